"""What a search keeps, against a copy made at every step."""

import pytest
import torch
from torch import Tensor

from gatecrash import kept as module
from gatecrash.kept import Kept


def batch(seed: int, count: int = 6) -> Tensor:
    return torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("room", [0, 24 * 4, 24 * 9, 10**6])
@pytest.mark.parametrize("on_a_device", [False, True])
def test_what_is_kept_is_what_was_taken(room: int, on_a_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", room)
    if on_a_device:
        monkeypatch.setattr(module, "waits", lambda tensor: True)
    start, given = batch(0), []
    kept, expected = Kept(start), start.clone()
    source = torch.Generator().manual_seed(1)
    for step in range(1, 30):
        x = batch(step)
        share = (0.0, 0.3, 1.0, 0.8)[step % 4]
        taken = torch.rand(6, generator=source) < share
        kept.take(taken, x)
        expected[taken] = x[taken]
        given.append((x, x.clone()))
        if step % 7 == 0:
            assert torch.equal(kept.x, expected)
    assert torch.equal(kept.x, expected)
    assert torch.equal(start, batch(0))
    assert all(torch.equal(x, copy) for x, copy in given), "what was given is not written to"


def test_all_is_kept_without_a_copy() -> None:
    kept, x = Kept(batch(0)), batch(1)
    kept.take(torch.ones(6, dtype=torch.bool), x)
    assert kept.x is x
    kept.take_all(start := batch(2))
    assert kept.x is start


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", 5 * batch(0).numel())
    kept, taken = Kept(batch(0)), torch.tensor([True, False] * 3)
    for step in range(15):
        kept.take(taken, batch(step))
        assert len(kept._batches) <= 5
