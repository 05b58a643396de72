from __future__ import annotations

import csv
import os
import threading
from pathlib import Path

import pytest
from fit_toys import Plain, material, network
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from gatecrash.fitting import Batch, History, Outcome, Recipe, fit
from gatecrash.fitting import logs as logs_module

RECIPE = Recipe(epochs=3, batch_size=8, lr=0.1)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: by name, epochs and values."""
    reader = EventAccumulator(str(folder), purge_orphaned_data=False)
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def expected(history: History) -> dict[str, list[tuple[int, float]]]:
    names = [name for name in history[0] if name != "epoch"]
    return {name: [(int(row["epoch"]), pytest.approx(row[name])) for row in history] for name in names}


def test_every_epoch_is_an_event_and_a_line(tmp_path: Path) -> None:
    history = fit(network(), Plain(), material(), RECIPE, folder=tmp_path, evaluate=lambda _: {"test accuracy": 0.25})
    assert [*history[0]] == ["epoch", "loss", "accuracy", "test accuracy"]
    assert scalars(tmp_path / "events") == expected(history)
    with (tmp_path / "epochs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in line.items()} for line in lines] == history


def test_a_resumed_run_neither_repeats_nor_loses_an_epoch(tmp_path: Path) -> None:
    class Stopping(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            if len(self.batches) == 4:
                raise RuntimeError("stop")
            return super().__call__(model, batch)

    with pytest.raises(RuntimeError, match="stop"):
        fit(network(), Stopping(), material(), RECIPE, folder=tmp_path)
    assert [step for step, _ in scalars(tmp_path / "events")["loss"]] == [1]
    os.remove(tmp_path / "epochs.csv")  # noqa: PTH107 - as after a kill between checkpoint and log
    for file in (tmp_path / "events").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    step = Plain()
    (tmp_path / "checkpoint.json").write_text((tmp_path / "checkpoint.json").read_text().replace("Stopping", "Plain"))
    history = fit(network(), step, material(), RECIPE, folder=tmp_path, resume=True)
    assert len(step.batches) == 6
    assert scalars(tmp_path / "events") == expected(history)
    assert len(list((tmp_path / "events").iterdir())) == 1
    for file in (tmp_path / "epochs.csv", *(tmp_path / "events").iterdir()):
        file.unlink()
    fit(network(), step, material(), RECIPE, folder=tmp_path, resume=True)
    assert scalars(tmp_path / "events") == expected(history)
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 4


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(fit(network(), Plain(), material(), RECIPE)) == 3
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_there_is_still_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "find_spec", lambda name: None)
    fit(network(), Plain(), material(), RECIPE, folder=tmp_path)
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 4
    assert not (tmp_path / "events").exists()


def test_a_disk_that_is_full_is_told_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise OSError(28, "No space left on device")

    hook = threading.excepthook
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.flush", full)
    with pytest.raises(OSError, match="No space left on device") as told:
        fit(network(), Plain(), material(), RECIPE, folder=tmp_path)
    assert told.value.filename == str(tmp_path / "events")
    assert threading.excepthook is hook


def test_only_a_disks_error_of_the_writers_thread_is_kept_quiet() -> None:
    shown: list[type[BaseException]] = []
    before, threading.excepthook = threading.excepthook, lambda args: shown.append(args.exc_type)
    try:
        for error in (OSError, KeyError):

            def fail(error: type[Exception] = error) -> None:
                raise error

            with logs_module.quiet_writer():
                thread = threading.Thread(target=fail)
                thread.start()
                thread.join()
    finally:
        threading.excepthook = before
    assert shown == [KeyError]
