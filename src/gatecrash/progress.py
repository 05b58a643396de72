"""Progress bars for whatever takes more than a few seconds; silent when standard error is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds before a bar appears, so that short work stays quiet."""

BAR = 20
"""Signs that a bar has."""

NARROW = 100
"""Columns below which it has fewer, so that the note has more: on 80 a training's loss, accuracy and attack success."""

_shown: ContextVar[Progress | None] = ContextVar("gatecrash_progress", default=None)


class Bar:
    """A bar that appears once the work has lasted longer than `PATIENCE` seconds."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._began = time.monotonic()
        self._display: Progress | None = None
        self._owned = False
        self._task: TaskID | None = None

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Say that `amount` more of the work is done; `note` replaces what stands behind the title."""
        self.done += amount
        if self._display is not None and not self._display.live.is_started:
            self._display = None  # the bar that started it is gone
        if self._display is None and self._is_due():
            self._show()
        if self._display is not None and self._task is not None:
            self._display.update(self._task, completed=self.done, description=f"{self.title} {note}".rstrip())

    def close(self) -> None:
        """Take the bar away."""
        if self._display is None:
            return
        if self._owned:
            self._display.stop()
            _shown.set(None)
        elif self._task is not None:
            self._display.remove_task(self._task)
        self._display = None

    def _is_due(self) -> bool:
        return time.monotonic() - self._began > PATIENCE and sys.stderr.isatty()

    def _show(self) -> None:
        outer, console = _shown.get(), Console(stderr=True)
        self._owned = outer is None
        self._display = outer or Progress(
            # It takes the room that bar, count and time left do not need, so these are whole on a narrow terminal too.
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            BarColumn(BAR if console.width >= NARROW else BAR // 4),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),  # else what a script prints would leave its pipe or file
        )
        if self._owned:
            self._display.start()
            _shown.set(self._display)
        self._task = self._display.add_task(self.title, total=self.total, completed=self.done)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Bar]:
    """A bar for the work of a `with` block; nested bars share one display."""
    bar = Bar(title, total)
    try:
        yield bar
    finally:
        bar.close()


def tracked(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar that counts them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(title, total) as bar:
        for item in items:
            yield item
            bar.advance()
