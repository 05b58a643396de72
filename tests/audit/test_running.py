"""A run in its folder: what is begun, gone on with, refused, and what is left behind when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gatecrash.audit.running import carry_out, with_earlier
from gatecrash.audit.work import Work
from gatecrash.bundle import Bundle

MANIFEST: dict[str, Any] = {"networks": {"net": "1"}, "data": {"inliers": "2"}, "code_sha256": "3"}
PIECES = ("clean | inliers", "fgsm | 0", "fgsm | 1")


class Run:
    """A run of three pieces that can be made to fail before one of them."""

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle(folder)
        self.rehearsed = 0
        self.computed: list[str] = []

    def __call__(
        self, *, resume: bool = False, fail: tuple[int, type[BaseException]] | None = None, **changes: Any
    ) -> list[float] | None:
        def rehearse() -> None:
            self.rehearsed += 1
            assert not self.bundle.folder.exists() or not any(self.bundle.folder.glob("plan.yaml"))
            if fail is not None and fail[0] < 0:
                raise fail[1]("rehearsal")

        def measure(work: Work) -> list[float]:
            values = []
            for number, key in enumerate(PIECES):
                if fail is not None and number == fail[0]:
                    raise fail[1](key)

                def compute(seed: int, key: str = key) -> dict[str, torch.Tensor]:
                    self.computed.append(key)
                    return {"value": torch.tensor([float(seed % 1000)])}

                values.append(float(work.done(key, compute)["value"]))
            return values

        plan = changes.pop("plan", "plan: mine\n")
        done = carry_out(self.bundle, plan, MANIFEST | changes, 7, rehearse, measure, resume=resume)
        if done is None:
            return None
        values, work = done
        (self.bundle.folder / "results.json").write_text("{}")
        work.clear()
        return values


def test_a_run_is_rehearsed_begun_and_finished(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    values = run()
    assert (run.rehearsed, run.computed) == (1, list(PIECES))
    assert run.bundle.plan_text() == "plan: mine\n" and run.bundle.manifest() == MANIFEST
    assert run(resume=True) is None  # it is finished
    assert run.computed == list(PIECES)
    assert values == Run(tmp_path / "again")(resume=True)  # nothing to go on with is a beginning


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_was_done_before_a_kill_is_not_done_again(tmp_path: Path, kind: type[BaseException], place: int) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(kind):
        run(fail=(place, kind))
    with pytest.raises(ValueError, match="holds another run; choose another --out, or go on with it: --resume"):
        run()
    assert run(resume=True) == Run(tmp_path / "straight")()
    assert run.computed == list(PIECES) and run.rehearsed == 1


@pytest.mark.parametrize("place", [-1, 0, 1])
def test_a_users_mistake_leaves_no_trace(tmp_path: Path, place: int) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"rehearsal|clean|fgsm"):
        run(fail=(place, ValueError))
    assert not (tmp_path / "run").exists()
    assert run() is not None


def test_a_mistake_after_an_attack_keeps_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"fgsm \| 1"):
        run(fail=(2, ValueError))
    with pytest.raises(ValueError, match=r"fgsm \| 1"):
        run(fail=(2, ValueError), resume=True)
    assert run(resume=True) is not None
    assert run.computed == list(PIECES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "plan: another\n"}, "was begun with another plan, see its plan.yaml"),
        ({"networks": {}}, "was begun with other weights"),
        ({"data": {}}, "was begun with other images"),
        ({"code_sha256": "4"}, "was begun with another version of gatecrash"),
    ],
)
def test_another_run_is_refused_and_harms_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(RuntimeError):
        run(fail=(2, RuntimeError))
    with pytest.raises(ValueError, match=message):
        run(resume=True, **changes)
    assert run(resume=True) is not None and run.computed == list(PIECES)


def test_a_run_that_goes_on_elsewhere_tells_where_it_was_before(tmp_path: Path) -> None:
    here, there = {"device": "cuda: one"}, {"device": "cpu", "versions": {"torch": "2"}}
    run = Run(tmp_path / "run")
    assert with_earlier(run.bundle, MANIFEST | here) == MANIFEST | here  # there is nothing yet
    with pytest.raises(RuntimeError):
        run(fail=(1, RuntimeError), **here)
    assert with_earlier(run.bundle, MANIFEST | here) == MANIFEST | here
    nothing = {"precision": None, "versions": None}
    first = with_earlier(run.bundle, MANIFEST | there)
    assert first == MANIFEST | there | {"earlier": {"1": here | nothing}}
    with pytest.raises(RuntimeError):
        run(resume=True, fail=(2, RuntimeError), **first)
    assert run.bundle.manifest() == first
    assert with_earlier(run.bundle, MANIFEST | there) == first
    last = with_earlier(run.bundle, MANIFEST | here)
    assert last["device"] == "cuda: one"
    assert last["earlier"] == {"1": here | nothing, "2": there | {"precision": None}}
    assert run(resume=True, **last) is not None and run.computed == list(PIECES)
    run(resume=True, **MANIFEST)
    assert run.bundle.manifest() == last  # nothing was done since


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds other files and no run; choose an empty or new folder"):
            Run(tmp_path / "full")(resume=resume)
        with pytest.raises(ValueError, match="is a file; --out must name a folder"):
            Run(tmp_path / "full" / "letter.txt")(resume=resume)
    assert (tmp_path / "full" / "letter.txt").read_text() == "mine"


def test_a_run_killed_before_its_plan_stood_there_can_begin_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / ".plan.abc.yaml").write_text("pl")
    run = Run(folder)
    assert run() is not None and run.bundle.manifest() == MANIFEST


def test_a_run_killed_while_its_bundle_was_written_writes_it_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(RuntimeError):
        run(fail=(2, RuntimeError))
    (tmp_path / "run" / "results.json").write_text("half")
    assert run(resume=True) is not None  # the pieces are still there, so it was not finished
    assert (tmp_path / "run" / "results.json").read_text() == "{}"
