"""The documentation: every Python block runs, every link leads somewhere, every page is found, mkdocs has no complaint."""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from nestfed.algorithms import average, server
from tests.algorithms import boxes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROUNDS = re.compile(r"\brounds=([7-9]|\d\d+)\b")


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few-rounds", "whole"])
@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text("utf-8"))],
                         ids=lambda p: str(p.relative_to(DOCS)))  # fmt: skip
def test_python_blocks_run(page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, as somebody would paste them, or with few rounds where they assert nothing."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            block = block if whole or "assert" in block else ROUNDS.sub("rounds=3", block)
            exec(compile(block, str(page), "exec"), scope)


def anchors(page: Path) -> set[str]:
    """Return the anchors that mkdocs makes of a page's titles."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def test_names_that_readers_import_are_on_the_api_page() -> None:
    listed = set(re.findall(r"\w+", (DOCS / "api.md").read_text(encoding="utf-8")))
    pages = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").glob("*.py")]
    imports = re.compile(r"^ *from nestfed[\w.]* import (.+)$", re.MULTILINE)
    used = {
        name.strip()
        for page in pages
        for names in imports.findall(page.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert "simulate" in used
    assert used - listed == set()


def test_the_second_worked_example_is_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("### A second example") :].split("\n## ")[0]
    shown = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    parts = [average.Leaning, average.FedDyn, server.Dynamic, boxes.feddyn]
    leaning, *others = [inspect.getsource(part).rstrip() for part in parts]
    row = next(
        x.strip() for x in (ROOT / "tests/methods.py").read_text(encoding="utf-8").splitlines() if '"feddyn"' in x
    )
    assert shown == [f"{leaning}\n\n\n{others[0]}", others[1], row, others[2]]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", nav))
    assert {str(p.relative_to(DOCS)) for p in PAGES} - named <= {"results.md", "reliability.md"}
    assert all((DOCS / name).exists() for name in named)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_are_described(script: Path) -> None:
    """Every example says what it shows, and is named in the README of its folder."""
    text = script.read_text(encoding="utf-8")
    compile(text, str(script), "exec")
    assert text.startswith('"""')
    assert script.name in (script.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--rounds", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    if "is not on this machine" in done.stderr or "not found" in done.stderr:
        pytest.skip("the data set is not here")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_mkdocs_has_no_complaint(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "site" / "quickstart" / "index.html").exists()
