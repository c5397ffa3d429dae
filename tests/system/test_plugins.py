"""A plugin is found by name. The package of CONTRIBUTING's "Write a plugin" is installed and used as it stands there."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

from tests.support import in_new_process, nestfed_command

ROOT = Path(__file__).parents[2]
TINY = """
from nestfed.core import METHODS

METHODS.add("heavy-ball", "tiny.rolling:HeavyBall")
"""
ROLLING = '''
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nestfed.core import Algorithm, Differentiable, at, positive


class Rolling(NamedTuple):
    x: Tensor
    v: Tensor


@dataclass(frozen=True)
class HeavyBall(Algorithm[Differentiable, Rolling]):
    """FedAvg with local heavy-ball momentum."""

    eta: float
    mu: float = 0.9

    name = "heavy-ball"
    accepts = Differentiable
    shared = ("x",)
    private = ("v",)
    cites = ("@article{polyak1964some,\\n  title = {Some Methods}\\n}",)
    aliases = ("polyak",)

    def __post_init__(self):
        positive(self, "eta")

    def init(self, problem, x0):
        return Rolling(x0, 0 * x0)

    def step(self, problem, s, batch, t):
        v = self.mu * s.v + problem.grad(s.x, batch)
        return Rolling(s.x - at(self.eta, t) * v, v)
'''
WITH_HEAVY_BALL = """
[data]
name = "digits"
limit = 200

[partition]
clients = 3

[problem]
name = "classify"
batch = 8

[algorithm]
name = "heavy-ball"
eta = 0.01

[run]
rounds = 2
q = 2
"""
FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)


def install(folder: Path, module: str) -> None:
    """Do what pip does for a plugin: the metadata that names its module."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nestfed.plugins]\n{module} = {module}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plugin")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## Write a plugin") :].split("\n## ")[0]
    for name, content in FILE.findall(section):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content, encoding="utf-8")
    install(place, "moons")
    (place / "tiny").mkdir()
    (place / "tiny" / "__init__.py").write_text(TINY)
    (place / "tiny" / "rolling.py").write_text(ROLLING)
    install(place, "tiny")
    return place


def test_nestfed_does_not_pack_the_papers() -> None:
    """What setuptools would put into the wheel of nestfed; tests/system/test_wheel.py looks into a built one."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = setuptools.find_packages(str(ROOT), include=settings["packages"]["find"]["include"])
    assert packages
    assert {p.split(".")[0] for p in packages} == {"nestfed"}
    data = [f for p, globs in settings["package-data"].items() for g in globs for f in (ROOT / p).glob(g)]
    packed = {f.name for f in data if f.suffix == ".toml"}
    assert packed == {"average-precision.toml", "demo.toml", "prevalence.toml", "site.toml"}
    assert not list((ROOT / "nestfed").rglob("*claims*"))


def test_the_pyproject_names_the_entry_point(folder: Path) -> None:
    assert '[project.entry-points."nestfed.plugins"]\nmoons = "moons"' in (folder / "pyproject.toml").read_text()


def test_its_command_is_listed_and_runs(folder: Path) -> None:
    listed = nestfed_command("--help", cwd=folder, path=folder)
    assert re.search(r"moons-count\W+Count the examples of each class\.", listed.out), listed
    assert re.search(r"reproduce\b", listed.out), "two plugins stand beside each other"
    said = nestfed_command("moons-count", cwd=folder, path=folder)
    assert said.out == "class 0: 150 examples\nclass 1: 150 examples\n"


def test_its_names_are_listed(folder: Path) -> None:
    listed = nestfed_command("list", cwd=folder, path=folder).out
    for kind, name in (("Datasets", "moons"), ("Networks", "waves"), ("Experiments", "moons")):
        assert re.search(rf"{kind}:[^:]*\b{name}\b", listed), listed
    (row,) = [line for line in listed.splitlines() if line.startswith("heavy-ball")]
    assert "1 × model: x" in row
    assert "FedAvg with local heavy-ball momentum." in row
    assert "two half circles" in nestfed_command("data", "list", cwd=folder, path=folder).out
    assert "polyak1964some" in nestfed_command("cite", "polyak", cwd=folder, path=folder).out


def test_its_experiment_runs_on_its_dataset_and_network(folder: Path) -> None:
    done = nestfed_command("run", "moons", "run.rounds=2", "--out", "moons-out", cwd=folder, path=folder)
    assert done.code == 0, done.err
    assert "auroc" in done.out


def test_its_method_runs(folder: Path) -> None:
    (folder / "e.toml").write_text(WITH_HEAVY_BALL)
    done = nestfed_command("run", "e.toml", "--out", "out", cwd=folder, path=folder)
    assert done.code == 0, done.err
    last = json.loads((folder / "out" / "record.jsonl").read_text().splitlines()[-1])
    assert last["round"] == 2
    assert 0 <= last["accuracy"] <= 1


def test_its_method_is_found_from_python(folder: Path) -> None:
    def make() -> None:
        import nestfed

        sys.stdout.write(repr(nestfed.algorithm("heavy-ball", eta=0.1)))

    assert in_new_process(make, folder, folder).out == "HeavyBall(eta=0.1, mu=0.9)"


MINE = (
    ROLLING
    + '''
import numpy as np

from nestfed.core import DATASETS, METHODS, METRICS, OBJECTIVES, Metric
from nestfed.data.sources import Dataset, Source, Split
from nestfed.problems.classify import ClassifyOptions


class Doubled(ClassifyOptions):
    """Cross-entropy, judged by a metric of one's own."""

    def metric(self, classes):
        return "misses"


def steps(found):
    x = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    data = Dataset(x, (x.sum(1) > 0).astype(np.int64), classes=("low", "high"))
    return Split(data.take(np.arange(200)), data.take(np.arange(200, 300)))


METHODS.add("heavy-ball", HeavyBall)
OBJECTIVES.add("doubled", Doubled)
DATASETS.add("steps", Source("steps", "steps", "300", "none", folder="", forms=(), decode=steps))
METRICS.add("misses", Metric("misses", False, lambda s, y: float(((s > 0) != (y > 0)).sum()), "log-odds"))
'''
)
WITH_MINE = """
[data]
name = "steps"
validation = 0.25

[partition]
clients = 2

[model]
hidden = []

[problem]
name = "doubled"
batch = 8

[run]
rounds = 2
q = 2

[methods.heavy-ball]
tune = { eta = [0.001, 1.0] }
"""


@pytest.mark.long
def test_a_file_brings_methods_problems_datasets_and_metrics_to_every_command(tmp_path: Path) -> None:
    """Without installing anything; worker processes load it too."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "e.toml").write_text(WITH_MINE)
    plugin = ("--plugin", "mine.py")
    words = ("compare", "e.toml", "--seeds", "2", "--workers", "2", "--out", "out")
    done = nestfed_command(*words, *plugin, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "misses on test" in done.out
    assert len(list(tmp_path.glob("out/heavy-ball/seed-*/finished.json"))) == 2
    assert "heavy-ball" in nestfed_command(*plugin, "list", cwd=tmp_path).out
    assert "steps" in nestfed_command("data", "list", "--plugin=mine.py", cwd=tmp_path).out
    assert "--plugin" in nestfed_command("--help", cwd=tmp_path).out
    without = nestfed_command(*words[:-1], "other", cwd=tmp_path)
    assert (without.code, without.err.count("\n")) == (2, 1)
    missing = nestfed_command("list", "--plugin", "absent.py", cwd=tmp_path)
    assert "'absent.py' does not exist" in missing.err
    (tmp_path / "broken.py").write_text("1 / 0")
    broken = nestfed_command("list", "--plugin", "broken.py", cwd=tmp_path)
    assert (broken.code, broken.err.count("\n")) == (2, 1)
    assert "ZeroDivisionError" in broken.err


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
    done = nestfed_command("--help", cwd=tmp_path, path=tmp_path)
    assert done.code == 2
    assert done.err.startswith(("nestfed: The ", "nestfed: A plugin"))
    assert done.err.count("\n") == 1
    assert words in done.err
