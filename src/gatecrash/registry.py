"""Tables of names: every listing, plan and lookup by name goes through one of these."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for, filled by a decorator."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that enters what it decorates under `name`; a name is taken once."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.noun} {name!r} is registered already")
            self._entries[name] = entry
            return entry

        return enter

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self._entries:
            raise ValueError(unknown(self.noun, name, list(self)))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unknown(noun: str, name: str, known: list[str]) -> str:
    """The sentence for a name that is not there: the nearest one, then all of them."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {noun} {name!r}; {hint}known: {', '.join(known)}"
