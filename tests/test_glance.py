"""A number that is read when it has arrived, and not before."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gatecrash.glance import Glance


def test_a_number_on_a_cpu_is_read_as_it_is() -> None:
    assert Glance(torch.tensor(0.25)).read() == 0.25


def test_a_devices_number_is_read_after_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not wait holds anything until the event behind it has happened."""
    host = torch.tensor(-1.0)
    asked = []

    def to(where: str, *, non_blocking: bool) -> Tensor:
        asked.append((where, non_blocking))
        return host

    event = SimpleNamespace(synchronize=lambda: host.fill_(0.5))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    glance = Glance(SimpleNamespace(is_cuda=True, device="cuda:0", to=to))  # type: ignore[arg-type]
    assert asked == [("cpu", True)]
    assert host == -1.0, "it waited"
    assert glance.read() == 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_device_works_on_while_a_number_is_read() -> None:
    numbers = torch.rand(4096, 4096, device="cuda")
    glance = Glance((numbers >= 0).float().mean())
    behind = torch.cuda.Event()
    for _ in range(200):
        numbers = numbers @ numbers / 4096
    behind.record()
    assert glance.read() == 1.0
    assert not behind.query(), "all of it was waited for"
