"""The epochs of a run as TensorBoard reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

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
    """
    if folder is None or find_spec("tensorboard") is None:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = SummaryWriter(str(folder))

    def write(row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "epoch":
                writer.add_scalar(name, value, int(row["epoch"]))
        writer.flush()

    try:
        for row in history:
            write(row)
        yield write
    finally:
        writer.close()
