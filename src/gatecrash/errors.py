"""What the errors of networks and compilers say, for sentences of our own."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n", 1)[0]
