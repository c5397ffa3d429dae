"""Agnostic training is KL-DRO over clients, class-balanced cross-entropy, and metrics of the worst client."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch.nn import functional as F

from nestfed import FMGDA, Agnostic, Examples, Execution, FedAvg, LocalSGDA, NestfedError, simulate
from nestfed.core import Batch
from nestfed.data.clients import Balanced
from nestfed.data.sources import load
from nestfed.experiment.build import assemble
from nestfed.experiment.compare import Comparison, compare
from nestfed.experiment.spec import from_tables, read
from nestfed.metrics import find, judge_pooled
from nestfed.problems.classify import cross_entropy
from nestfed.testing import check_problem

CENTRES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
WIDTHS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def losses(x: torch.Tensor) -> torch.Tensor:
    """Each client's own loss at x."""
    return 0.5 * WIDTHS * ((x - CENTRES) ** 2).sum(1)


CLIENTS = Examples((CENTRES, WIDTHS), [np.array([n]) for n in range(3)], batch=1)
"""Every client's batch is its own centre and width."""


def quadratics(tau: float) -> Agnostic:
    def own(x: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        centre, width = batch
        return 0.5 * (width * ((x - centre) ** 2).sum(1)).mean()

    return Agnostic(torch.zeros(2, dtype=torch.float64), 3, tau=tau, loss=own)


def dro(x: np.ndarray, tau: float) -> float:
    """τ log mean exp(f/τ), written on its own."""
    f = losses(torch.tensor(x)).numpy()
    return float(f.max() + tau * np.log(np.exp((f - f.max()) / tau).mean()))


def mean_gradients(problem: Agnostic, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [Batch((CENTRES[n : n + 1], WIDTHS[n : n + 1]), client=torch.tensor(n)) for n in range(3)]
    theta, dual = zip(*(problem.grads(x, w, batch) for batch in batches))
    return torch.stack(theta).mean(0), torch.stack(dual).mean(0)


def test_at_the_best_mixture_the_gradient_is_that_of_kl_dro() -> None:
    tau, x = 0.7, torch.tensor([0.4, 0.9], dtype=torch.float64)
    best = torch.softmax(losses(x) / tau, 0)
    g, h = mean_gradients(quadratics(tau), x, best)
    for i in range(2):
        step = np.eye(2)[i] * 1e-5
        slope = (dro(x.numpy() + step, tau) - dro(x.numpy() - step, tau)) / 2e-5
        assert g[i] == pytest.approx(slope, abs=1e-8)
    assert h == pytest.approx(h.mean().expand(3), abs=1e-12)  # w cannot gain inside the simplex
    other = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert mean_gradients(quadratics(tau), x, other)[1].numpy() == pytest.approx(
        (losses(x) - tau * (1 + (3 * other).log())).numpy(), abs=1e-12
    )


@pytest.mark.parametrize("tau", [0.6, 1.5])
@pytest.mark.parametrize("method", [LocalSGDA(0.3, 0.1), FMGDA(c_hat=0.3, c=0.1, alpha=0.9, beta=0.9)])
def test_minimax_methods_find_the_minimum_of_kl_dro(method: LocalSGDA | FMGDA, tau: float) -> None:
    result = simulate(quadratics(tau), method, CLIENTS, rounds=180, q=1)
    truth = minimize(dro, np.zeros(2), (tau,), tol=1e-12, method="Nelder-Mead").x
    assert result.model.numpy() == pytest.approx(truth, abs=1e-5)
    found = torch.softmax(losses(result.model) / tau, 0)
    assert result.shared["w"].numpy() == pytest.approx(found.numpy(), abs=1e-4)


def test_a_large_tau_gives_the_mean_and_tau_0_the_worst_client_alone() -> None:
    mean = (WIDTHS[:, None] * CENTRES).sum(0) / WIDTHS.sum()
    calm = simulate(quadratics(1e4), LocalSGDA(0.5, 1e-6), CLIENTS, rounds=60, q=1)
    assert calm.model.numpy() == pytest.approx(mean.numpy(), abs=1e-3)
    x, worst = torch.tensor([0.4, 0.9], dtype=torch.float64), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    g, h = mean_gradients(quadratics(0.0), x, worst)
    assert g.numpy() == pytest.approx((WIDTHS[2] * (x - CENTRES[2])).numpy(), abs=1e-12)
    assert h.numpy() == pytest.approx(losses(x).numpy(), abs=1e-12)


def test_finite_differences_and_engines() -> None:
    rng = np.random.default_rng(0)
    sites = {str(n): (rng.normal(size=(12, 3)), rng.integers(2, size=12)) for n in range(4)}
    clients = Examples.of({k: (torch.tensor(x), torch.tensor(y)) for k, (x, y) in sites.items()}, batch=6)
    linear = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)).double()
    problem = Agnostic(linear, 4, tau=0.1)
    check_problem(problem, clients)
    runs = [
        simulate(problem, FMGDA(c_hat=0.3, c=0.1), clients, rounds=3, q=2, execution=Execution(mode=mode, workers=workers))
        for mode, workers in (("vmap", 0), ("loop", 0), ("vmap", 2))
    ]  # fmt: skip
    for run in runs[1:]:
        assert torch.allclose(run.x, runs[0].x, rtol=0, atol=1e-12)
        assert torch.allclose(run.shared["w"], runs[0].shared["w"], rtol=0, atol=1e-12)
    assert float(runs[0].shared["w"].sum()) == pytest.approx(1, abs=1e-12)
    assert len(set(runs[0].shared["w"].tolist())) == 4  # every client has its own weight


def test_wrong_options_are_one_sentence() -> None:
    with pytest.raises(NestfedError, match="tau must be at least 0, not -1"):
        Agnostic(torch.zeros(1), 3, tau=-1.0)
    with pytest.raises(NestfedError, match="agnostic: clients must be a whole number"):
        Agnostic(torch.zeros(1), 0)
    with pytest.raises(NestfedError, match="fedavg works on problems of kind"):
        simulate(quadratics(0.1), FedAvg(0.1), CLIENTS, rounds=1)


def test_balanced_cross_entropy_gives_both_classes_the_same_weight() -> None:
    """Site a has 4 positives and 4 negatives, site b 8 negatives: p = ¼, and negatives of b count twice those of a."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(16, 3)))
    y = torch.tensor([1] * 4 + [0] * 12)
    clients = Balanced((x, y), [np.arange(8), np.arange(8, 16)], batch=8)
    weights = torch.tensor(rng.normal(size=3))

    def score(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weights

    found = torch.stack([cross_entropy(score, clients.sample(n, 0)) for n in range(2)]).mean()
    own = F.binary_cross_entropy_with_logits(score(x), y.double(), reduction="none")
    truth = own[:4].mean() / 2 + own[4:8].mean() / 6 + own[8:].mean() / 3
    assert float(found) == pytest.approx(float(truth), abs=1e-12)
    batch = clients.sample(0, 0)  # the same with two scores
    two = cross_entropy(lambda rows: torch.stack([0 * score(rows), score(rows)], 1), batch)
    assert float(two) == pytest.approx(float(cross_entropy(score, batch)), abs=1e-12)


def test_the_worst_client_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    s, y = rng.normal(size=90), rng.integers(2, size=90)
    y[60:] = 1  # the last client has one class: its AUROC is undefined, its accuracy counts
    parts = [np.arange(30), np.arange(30, 60), np.arange(60, 90), np.arange(0)]
    found = judge_pooled(s, y, parts, log_odds=True)
    p = 1 / (1 + np.exp(-s))
    assert found["worst_accuracy"] == pytest.approx(min(accuracy_score(y[r], s[r] > 0) for r in parts[:3]))
    assert found["worst_log_loss"] == pytest.approx(max(log_loss(y[r], p[r], labels=[0, 1]) for r in parts[:3]))
    assert found["worst_auroc"] == pytest.approx(min(roc_auc_score(y[r], s[r]) for r in parts[:2]), abs=2e-3)
    assert find("val_worst_log_loss").higher is False
    assert find("worst_accuracy").higher is True


def test_the_shortcut_is_right_at_nine_sites_and_wrong_at_the_last() -> None:
    data = load("shortcut-digits").train
    marked, site = data.x[:, 0, 0, 0] == 255, data.columns["site"]
    agrees = marked == (data.y >= 5)
    assert len(data) == 1797
    for name in map(str, range(10)):
        rows = site == name
        assert 179 <= rows.sum() <= 180
        assert agrees[rows].mean() == pytest.approx(0.1 if name == "9" else 0.9, abs=0.05)
    plain = load("digits")
    assert sorted(data.x[:, 0, 1:].sum(axis=(1, 2))) == sorted(
        np.concatenate([plain.train.x, plain.test.x])[:, 0, 1:].sum(axis=(1, 2))
    )


def test_a_comparison_shows_the_worst_client_beside_all(tmp_path: Path) -> None:
    tables = copy.deepcopy(dict(read("demo").with_overrides({"run.rounds": 3, "evaluation.every": 3}).source))
    tables["methods"] = {
        "fedavg": {"problem": {"name": "classify"}, "algorithm": {"name": "fedavg", "eta": 1.0}},
        "fmgda": {"algorithm": {"c_hat": 0.3, "c": 0.03}},
    }
    experiment = from_tables(tables)
    compare(experiment, ["fedavg", "fmgda"], 2, tmp_path, title="demo", workers=1)
    found = Comparison.read(tmp_path)
    table = found.table()
    assert list(table.columns)[:3] == ["method", "worst_accuracy on test", "accuracy"]
    assert len(table.columns) <= 6
    difference = np.mean(found["fmgda"].final("worst_accuracy")) - np.mean(found["fedavg"].final("worst_accuracy"))
    best = "fmgda" if difference > 0 else "fedavg"
    assert f"Highest mean worst_accuracy: {best}" in table.note
    page = found.report().read_text()
    assert "accuracy by client" in page
    assert "Worst client against all clients" in page
    made = assemble(experiment.for_method("fmgda"))
    each = made.by_client(made.problem.bind(made.problem.x0))
    assert sorted(each) == [str(n) for n in range(10)]
    assert min(v["accuracy"] for v in each.values()) == made.test(made.problem.bind(made.problem.x0))["worst_accuracy"]
