"""Scripts that no test runs, such as measurements and benchmarks, still name things that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parents[1]
SCRIPTS = sorted(
    path
    for folder in ("papers/measurements", "benchmarks", "examples")
    for path in (HERE / folder).rglob("*.py")
    if not path.name.startswith(".")
)
OURS = ("nestfed", "nestfed_papers")


def ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in OURS


def imports(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name or nothing, name in the script) for every import of ours, also in code that is text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if ours(one.name):
                    yield one.name, "", one.asname or one.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and ours(node.module):
            for one in node.names:
                yield str(node.module), one.name, one.asname or one.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in re.findall(r"\bfrom (nestfed[\w.]*) import ([\w, ]+)", node.value):
                for name in names.split(","):
                    yield module, name.strip(), ""


def resolved(module: str, name: str) -> Any:
    """Import a thing, or fail with a sentence that names it."""
    home = importlib.import_module(module)
    if not name:
        return home
    if not hasattr(home, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(home, name)


def unknown_keywords(call: ast.Call, function: Any) -> set[str]:
    """Return the keywords of a call that its function does not have."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return set()
    return {k.arg for k in call.keywords if k.arg is not None} - set(parameters)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(HERE)))
def test_a_script_names_what_exists(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    compile(tree, str(path), "exec")
    known = {own: resolved(module, name) for module, name, own in imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = known.get(node.value.id)
            assert not isinstance(home, ModuleType) or hasattr(home, node.attr), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            assert not unknown_keywords(node, known[node.func.id]), ast.unparse(node)


def test_there_are_scripts() -> None:
    assert {p.parent.relative_to(HERE).parts[0] for p in SCRIPTS} == {"papers", "benchmarks", "examples"}


@pytest.mark.parametrize(
    "text",
    [
        "from nestfed.metrics import nothing",
        "import nestfed.nothing",
        "CODE = 'from nestfed import simulate, Nothing'",
        "from nestfed import theory\ntheory.nothing()",
        "from nestfed import simulate\nsimulate(1, 2, 3, rounds=1, nothing=2)",
    ],
)
def test_what_does_not_exist_is_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    with pytest.raises((ImportError, AssertionError), match=r"nothing|Nothing"):
        test_a_script_names_what_exists(path)
