"""A plugin's method: one class and one line, in a tiny package that is found through its entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
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
EXPERIMENT = """
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in (("__init__", MODULE), ("rolling", ROLLING)):
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / f"{name}.py").write_text(text)
    about = tmp_path / "tiny-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nestfed.plugins]\ntiny = tiny\n")
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    return tmp_path


def test_a_method_of_a_plugin_is_listed_cited_made_and_run(place: Path) -> None:
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (row,) = [line for line in said("-m", "nestfed", "list").splitlines() if line.startswith("heavy-ball")]
    assert "1 × model: x" in row
    assert "FedAvg with local heavy-ball momentum." in row
    assert "polyak1964some" in said("-m", "nestfed", "cite", "polyak")
    made = said("-c", "import nestfed; print(nestfed.algorithm('heavy-ball', eta=0.1))")
    assert "HeavyBall(eta=0.1, mu=0.9)" in made
    said("-m", "nestfed", "run", "e.toml", "--out", "out")
    last = json.loads((place / "out" / "record.jsonl").read_text().splitlines()[-1])
    assert last["round"] == 2
    assert 0 <= last["accuracy"] <= 1
