"""Rooms import only from rooms above them, imports inside functions included.

A room is a directory of the package or a module at its top. The package itself (`import nestfed`) is a façade over all
rooms, so no room may import it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import nestfed

PACKAGE = Path(nestfed.__file__).parent
FACADE = ("(root)", "__main__")
ORDER = (
    "core", "metrics", "models", "files", "data", "queries", "problems", "algorithms", "engine", "theory", "report",
    "experiment", "study", "deploy", "cli", "testing",
)  # fmt: skip

BACKWARDS: set[tuple[str, str]] = set()
"""Imports from below that remain to be removed. This list may only get shorter."""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "(root)"


def imported(node: ast.AST) -> list[str]:
    """Return the modules of the package that a statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module == "nestfed":
        return [f"nestfed.{alias.name}" if alias.name in ORDER else "nestfed" for alias in node.names]
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name for name in names if name.split(".")[0] in ("nestfed", "nestfed_papers")]


def imports() -> set[tuple[str, str]]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        here = room(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} has a relative import"
            assert not any(n.startswith("nestfed_papers") for n in imported(node)), f"{path} imports the papers"
            found |= {(here, room(name)) for name in imported(node)}
    return {(a, b) for a, b in found if a != b and a not in FACADE}


def test_every_room_has_its_place() -> None:
    there = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there <= {*ORDER, "__init__", "__main__"}


def test_rooms_import_only_from_rooms_above() -> None:
    place = {name: i for i, name in enumerate(ORDER)}
    wrong = {(a, b) for a, b in imports() if place.get(b, len(ORDER)) >= place[a]}
    assert wrong - BACKWARDS == set()
    assert BACKWARDS - wrong == set(), "these are gone: take them off the list"


def test_no_test_imports_another() -> None:
    """What tests share is in plain modules, so that a test file can be read, run and deleted alone."""
    wrong = [
        f"{path.name} imports {name}"
        for path in Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    ]
    assert not wrong, wrong
