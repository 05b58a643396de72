"""The rooms of docs/architecture.md: each imports only from those above it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gatecrash"


def rooms_in_order() -> list[str]:
    """The rooms as the architecture page lists them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("src/gatecrash/\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^ +([a-z_]+)(?:\.py|/)", block, flags=re.MULTILINE)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(source: str) -> set[str]:
    """The rooms that a module imports from when it runs; imports for type checking only do not count."""
    tree = ast.parse(source)
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("gatecrash.")}
    return found


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


def test_every_room_is_on_the_architecture_page() -> None:
    assert {room_of(path) for path in MODULES} - {"__main__"} == set(rooms_in_order()) - {"__init__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_those_above_it(path: Path) -> None:
    order = rooms_in_order()
    own = room_of(path)
    if own == "__main__":
        own = "__init__"
    allowed = {*order[: order.index(own)], own}
    assert imports_of(path.read_text(encoding="utf-8")) <= allowed


def test_the_walk_sees_a_forbidden_import() -> None:
    assert imports_of("from gatecrash.search import search\nimport gatecrash.ball") == {"search", "ball"}
    assert imports_of("if TYPE_CHECKING:\n    from gatecrash.ball import Ball") == set()
    assert imports_of("def f():\n    from gatecrash import attacks") == {"attacks"}
