"""A plugin is found by name. The package of CONTRIBUTING's "Write a plugin" is installed and used as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)


def install(folder: Path, module: str) -> None:
    """Do what pip does for a plugin: the metadata that names its module."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nestfed.plugins]\n{module} = {module}\n")


def nestfed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "papers")])
    return subprocess.run(
        [sys.executable, "-m", "nestfed", *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plugin")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## Write a plugin") :].split("\n## ")[0]
    for name, content in FILE.findall(section):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content, encoding="utf-8")
    install(place, "moons")
    return place


def test_nestfed_does_not_pack_the_papers() -> None:
    """What setuptools would put into the wheel of nestfed; tests/system/test_wheel.py looks into a built one."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = setuptools.find_packages(str(ROOT), include=settings["packages"]["find"]["include"])
    assert packages
    assert {p.split(".")[0] for p in packages} == {"nestfed"}
    data = [f for p, globs in settings["package-data"].items() for g in globs for f in (ROOT / p).glob(g)]
    assert [f.name for f in data if f.suffix == ".toml"] == ["demo.toml"]
    assert not list((ROOT / "nestfed").rglob("*claims*"))


def test_the_pyproject_names_the_entry_point(folder: Path) -> None:
    assert '[project.entry-points."nestfed.plugins"]\nmoons = "moons"' in (folder / "pyproject.toml").read_text()


def test_its_command_is_listed_and_runs(folder: Path) -> None:
    listed = nestfed(folder, "--help")
    assert re.search(r"moons-count\W+Count the examples of each class\.", listed.stdout), listed.stdout + listed.stderr
    assert re.search(r"reproduce\b", listed.stdout), "two plugins stand beside each other"
    assert nestfed(folder, "moons-count").stdout == "class 0: 150 examples\nclass 1: 150 examples\n"


def test_its_names_are_listed(folder: Path) -> None:
    told = nestfed(folder, "list").stdout
    for kind, name in (("Datasets", "moons"), ("Networks", "waves"), ("Experiments", "moons")):
        assert re.search(rf"{kind}:[^:]*\b{name}\b", told), told
    assert "two half circles" in nestfed(folder, "data", "list").stdout


def test_its_experiment_runs_on_its_dataset_and_network(folder: Path) -> None:
    done = nestfed(folder, "run", "moons", "run.rounds=2", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "auroc" in done.stdout


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import nowhere",
            "plugin 'broken' (broken) cannot be imported; fix or uninstall it: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ('from nestfed.core import COMMANDS\nCOMMANDS.add("reproduce", print)', "already a command called 'reproduce'"),
        (
            'from nestfed.core import COMMANDS\nCOMMANDS.add("theory", print)',
            "A plugin's command 'theory' has the name of a nestfed command",
        ),
        (
            'from nestfed.core import COMMANDS\nCOMMANDS.add("data", print)',
            "A plugin's command 'data' has the name of a nestfed command",
        ),
        (
            'from nestfed.core import COMMANDS\nCOMMANDS.add("odd", "broken:absent")',
            "The command 'odd' (broken:absent)",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_sentence(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    install(tmp_path, "broken")
    done = nestfed(tmp_path, "--help")
    assert done.returncode == 2
    assert done.stderr.startswith(("nestfed: The ", "nestfed: A plugin"))
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
