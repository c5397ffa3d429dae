"""Short real trainings: thresholds that fail if an objective is wrong, and a round of every packaged comparison."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from nestfed_papers.networks import FashionNet, MnistNet
from torch import Tensor

from nestfed.algorithms import FCSGM, FMGDA
from nestfed.data.clients import Examples, Pairs
from nestfed.experiment.prepare import DataSpec, PartitionSpec, Prepared, prepare
from nestfed.experiment.run import run
from nestfed.experiment.spec import packaged, read
from nestfed.metrics import judge
from nestfed.models import build
from nestfed.problems.auprc import AUPRC
from nestfed.problems.auroc import AUROC
from tests.support import simulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.skipif(not os.environ.get("NESTFED_DATA"), reason="set NESTFED_DATA to a folder with the data sets"),
]
SHOWN = 2000  # test examples that are scored, half of them positive


def prepared(name: str, side: str) -> Prepared:
    return prepare(DataSpec(name=name, binary=True, remove=side, fraction=0.8), PartitionSpec(clients=8), 0)


def trained(problem: Any, algorithm: Any, clients: Any, p: Prepared, rounds: int) -> list[dict[str, Any]]:
    def evaluate(model: Any) -> dict[str, float]:
        scores: Tensor = model(p.test.x[:SHOWN])
        return judge(scores.double().numpy(), p.test.y[:SHOWN].numpy())

    result = simulate(
        problem, algorithm, clients, rounds=rounds, q=10, seed=0, evaluate=evaluate, every=rounds, progress=False
    )
    return result.history


def test_fashion_auroc_by_fmgda() -> None:
    p = prepared("fashion-mnist", "negative")
    assert p.positive_rate == pytest.approx(5 / 6, abs=1e-3)
    model = build("fashion", (1, 28, 28), seed=1)  # a start that ranks the wrong way round
    assert isinstance(model, FashionNet)
    clients = Examples((p.x, p.y), p.parts, batch=50)
    algorithm = FMGDA(c_hat=0.02, c=0.02, alpha=0.9, beta=0.9)
    start, *_, end = trained(AUROC(model, p=p.positive_rate), algorithm, clients, p, 6)
    assert start["auroc"] < 0.5
    assert end["auroc"] > 0.88


def test_mnist_average_precision_by_fcsg_m() -> None:
    p = prepared("mnist", "positive")
    assert p.positive_rate == pytest.approx(1 / 6, abs=0.01)
    model = build("mnist", (1, 28, 28), seed=0)
    assert isinstance(model, MnistNet)
    clients = Pairs((p.x, p.y), p.parts, outer=3, inner=17, inner_positives=3)
    start, *_, end = trained(AUPRC(model), FCSGM(alpha=0.3, beta=0.5), clients, p, 6)
    assert start["ap"] < 0.7
    assert end["ap"] > 0.95


NAMES = [n for n in packaged() if read(n).problem.name in ("classify", "auroc", "auprc")]


@pytest.mark.parametrize("name", [n for n in NAMES if read(n).model.name != "resnet18"])
def test_a_round_of_every_packaged_comparison(name: str, tmp_path: Path) -> None:
    """On its real data, with every method as its first trial has it (Tiny-ImageNet: tests/test_language.py)."""
    experiment = read(name)
    metric = experiment.evaluation.metric
    for method in experiment.methods:
        first = {k: values[0] for k, values in experiment.grid(method).items()}
        trial = experiment.for_method(method).with_overrides({**first, "run.rounds": 1})
        start, *_, end = run(trial, tmp_path / method, progress=False, picture=False)
        assert math.isfinite(end["loss"])
        assert 0 <= end[metric] <= 1
        assert f"val_{metric}" in end
        assert any(end[k] != v for k, v in start.items() if k.startswith("val_"))  # something was learnt
