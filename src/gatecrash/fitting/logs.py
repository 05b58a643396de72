"""The epochs of a run as TensorBoard reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gatecrash.fitting.checkpoint import History


class EventLog(Protocol):
    """Where the epochs go."""

    def __call__(self, row: Mapping[str, float], /) -> None:
        """Write one epoch."""
        ...


@contextmanager
def event_log(folder: Path | None, history: History) -> Iterator[EventLog]:
    """Event files in `folder`, which begin anew with `history`: a resumed run neither repeats nor loses an epoch.

    Without a folder, or where the package tensorboard is missing, nothing is written.

    Raises:
        OSError: they cannot be written; it names the folder.
    """
    if folder is None or find_spec("tensorboard") is None:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()

    def write(row: Mapping[str, float]) -> None:
        with naming(folder):
            for name, value in row.items():
                if name != "epoch":
                    writer.add_scalar(name, value, int(row["epoch"]))
            writer.flush()

    with quiet_writer():
        with naming(folder):
            writer = SummaryWriter(str(folder))
        try:
            for row in history:
                write(row)
            yield write
        finally:
            with naming(folder):
                writer.close()


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """An error of the disk in the block names the folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error


@contextmanager
def quiet_writer() -> Iterator[None]:
    """TensorBoard writes in a thread of its own, whose traceback is not shown: its error comes up here too."""
    before = threading.excepthook

    def only_others(args: Any) -> None:
        if not isinstance(args.exc_value, OSError):
            before(args)

    threading.excepthook = only_others
    try:
        yield
    finally:
        threading.excepthook = before
