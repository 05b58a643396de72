"""The table of attacks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gatecrash.registry import Registry

A = TypeVar("A", bound=Callable[..., Any])


@dataclass(frozen=True)
class Attack:
    """A named attack and what one should know of it."""

    run: Callable[..., Any]
    aim: Literal["latent", "score", "softmax", "classifier"]
    """What it acts on: a latent, a detector's score, the softmax, or a classifier's decision."""
    paper: str

    @property
    def summary(self) -> str:
        """The first sentence of its description."""
        return (self.run.__doc__ or "").strip().split("\n", 1)[0]


ATTACKS: Registry[Attack] = Registry("attack")


def register(name: str, *, aim: Literal["latent", "score", "softmax", "classifier"], paper: str) -> Callable[[A], A]:
    """A decorator that enters an attack under its name in plans and listings."""

    def enter(run: A) -> A:
        ATTACKS.register(name)(Attack(run, aim, paper))
        return run

    return enter
