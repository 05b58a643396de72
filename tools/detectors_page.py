"""Writes docs/detectors.md from the detectors' cards, docstrings and signatures:

python tools/detectors_page.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from gatecrash.cli import detector_entry
from gatecrash.detectors import DETECTORS, Detector
from gatecrash.files import write_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "detectors.md"

HEAD = """\
# Detectors

Made by `python tools/detectors_page.py` from the code; changes belong there. `gatecrash detectors [--json]` prints the
same table.

A higher score always means more out-of-distribution. *Reads* is what the score is computed from, *fit* the data that
`fit` cannot do without (an ensemble needs what its members need), *gradient* whether the score's gradient is exact,
exact save where the score jumps, or a term without a useful one is omitted. Where it is not exact, attacks by gradient
may miss much: `worst_case` then also begins at simpler versions of every image, of few greys and blurred.
"""

COLUMNS = ("name", "paper", "year", "reads", "fit", "gradient")


def page() -> str:
    """The whole page: a table, then every detector in alphabetical order."""
    names = sorted(name for name in DETECTORS if DETECTORS[name].__module__.startswith("gatecrash."))
    return "\n".join([HEAD, table(names), *(section(name, DETECTORS[name]) for name in names)])


def table(names: list[str]) -> str:
    """The cards, one row each."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for name in names:
        entry = detector_entry(name) | {"name": f"[{name}](#{name})"}
        rows.append([str(entry[column]).replace("|", r"\|") for column in COLUMNS])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def section(name: str, kind: type[Detector]) -> str:
    """Class, what the docstring says, and what the constructor takes."""
    lines = [f"## {name}\n", f"`{kind.__module__}.{kind.__qualname__}`\n", description(kind) + "\n"]
    return "\n".join([*lines, "".join(f"- {option}\n" for option in options(kind))])


def description(kind: type[Detector]) -> str:
    """All that a class's docstring says before its sections: what it is, its formula, what to know."""
    text = re.split(r"^(?:Args|Raises|Returns):$", inspect.getdoc(kind) or "", flags=re.MULTILINE)[0]
    return "\n\n".join(plain(part) for part in text.strip().split("\n\n"))


def options(kind: type[Detector]) -> list[str]:
    """What the constructor takes, with defaults, and what the docstring says of it."""
    said: dict[str, str] = {}
    for parent in reversed(kind.__mro__):  # a family's options are explained once
        if issubclass(parent, Detector) and parent is not Detector:
            said |= arguments(inspect.cleandoc(parent.__doc__ or ""))
    found = []
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        meaning = f": {said[parameter.name]}" if parameter.name in said else ""
        found.append(f"`{parameter.name}{default}`{meaning}")
    return found


def arguments(docstring: str) -> dict[str, str]:
    """The entries of a docstring's section Args: names and their text, lines joined."""
    block = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^ {4}\**(\w+): ((?:.*)(?:\n {5,}.*)*)", block.group(1) if block else "", re.MULTILINE)
    return {name: plain(text) for name, text in entries}


def plain(text: str) -> str:
    """Text on one line in which the stars and brackets of a formula stay what they are, as all in backticks does."""
    special = re.compile(r"`[^`]*`|[*<\\]")
    return special.sub(lambda found: ("" if found[0].startswith("`") else "\\") + found[0], " ".join(text.split()))


if __name__ == "__main__":
    write_text(PAGE, page())
    print(PAGE)
