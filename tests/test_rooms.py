"""Which room of the package imports which. Two rooms that need each other are one room; those that still do are listed.

A room is a directory of the package, or a module at its top; imports inside functions count. Cycles are found as
strongly connected components, so that a way round over a third room is found too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import nestfed

PACKAGE = Path(nestfed.__file__).parent
TOP = "(root)"

BACKWARDS = {
    ("deploy", "cli"),
    ("engine", TOP),
    ("engine", "assemble"),
    ("engine", "running"),
    ("engine", "site"),
    ("estimators", TOP),
    ("report", "running"),
    ("running", "tuning"),
}
"""Imports that close a cycle and are to go; without them there is none. This list may only get shorter."""

Edges = set[tuple[str, str]]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else TOP


def imported(node: ast.AST) -> list[str]:
    """Return the modules of the package that a statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module == "nestfed":
        return [f"nestfed.{alias.name}" if _is_room(alias.name) else "nestfed" for alias in node.names]
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name for name in names if name.split(".")[0] == "nestfed"]


def _is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def imports() -> Edges:
    found: Edges = set()
    for path in PACKAGE.rglob("*.py"):
        here = room(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} has a relative import"
            found |= {(here, room(name)) for name in imported(node)}
    return {(a, b) for a, b in found if a != b}


def cycles(edges: Edges) -> list[list[str]]:
    """Return the groups of rooms in which each can be reached from each."""
    beyond = defaultdict(set)
    for a, b in edges:
        beyond[a].add(b)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            new = beyond[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    far = {a: reached(a) for a in {a for a, _ in edges}}
    return sorted({tuple(sorted(b for b in far[a] if a in far.get(b, ()))) for a in far if a in far[a]})


def test_no_new_cycle() -> None:
    assert cycles(imports() - BACKWARDS) == []


def test_nothing_is_listed_that_is_not_needed() -> None:
    edges = imports()
    assert edges >= BACKWARDS, f"no longer there, take them off the list: {BACKWARDS - edges}"
    needless = [one for one in sorted(BACKWARDS) if not cycles(edges - (BACKWARDS - {one}))]
    assert not needless, f"in no cycle any more, take them off the list: {needless}"
