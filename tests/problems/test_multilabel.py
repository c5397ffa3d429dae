"""Several labels: the mean of the single-label objectives, missing labels, labels of one class, and experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

from nestfed import (
    AUPRC,
    AUROC,
    CODA,
    FCSG,
    FCSGM,
    FMGDA,
    SOX,
    AccFCSGM,
    Examples,
    MultiLabelAP,
    MultiLabelAUROC,
    NestfedError,
    held_out,
)
from nestfed.core import DATASETS
from nestfed.data.sources import Dataset, Source, Split
from nestfed.experiment.run import run
from nestfed.experiment.site import Agreement, at_coordinator
from nestfed.experiment.spec import from_tables
from nestfed.metrics import auroc, average_precision, judge
from nestfed.problems.multilabel import MultiLabelAPOptions
from nestfed.testing import check_algorithm, check_problem
from tests.support import simulate

L, D = 4, 5


def data(n: int = 40, seed: int = 0, missing: float = 0.2) -> tuple[Tensor, Tensor]:
    """Labels of which the last is rare, and some of which are unknown."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D))
    y = (x @ rng.normal(size=(D, L)) + rng.normal(size=(n, L)) > [0, 0.5, -0.5, 3]).astype(float)
    y[rng.random((n, L)) < missing] = np.nan
    return torch.from_numpy(x), torch.from_numpy(y)


def network(outputs: int = L) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(D, outputs, dtype=torch.float64)


class One(nn.Module):
    """Label j of a network, as a model of its own with all parameters."""

    def __init__(self, net: nn.Module, j: int) -> None:
        super().__init__()
        self.net, self.j = net, j

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, self.j]


def both(y: Tensor) -> list[int]:
    return [j for j in range(y.shape[1]) if {0.0, 1.0} <= set(y[:, j].tolist())]


def balance(y: Tensor) -> Tensor:
    """The weights of `Balanced` for a batch that is half one class, half the other."""
    k, b = float(y.sum()), len(y)
    return y * b / (2 * k) + (1 - y) * b / (2 * (b - k))


# --- AUROC ---


@pytest.mark.parametrize("shares", [None, (0.3, 0.4, 0.5, 0.1)])
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_auroc_is_the_mean_of_the_single_labels(shares: Any, missing: float, sigmoid: bool) -> None:
    """Values, gradients of the network, of a, b and w, and the best w, label by label; the rare label is left out."""
    x, y = data(missing=missing)
    y[:, 3] = 0.0
    assert both(y) == [0, 1, 2]
    net, rng = network(), torch.Generator().manual_seed(1)
    problem = MultiLabelAUROC(net, L, p=shares, sigmoid=sigmoid)
    a, b, w = torch.randn(3, L, dtype=torch.float64, generator=rng)
    named = {"module.weight": net.weight, "module.bias": net.bias, "a": a, "b": b}
    theta = torch.cat([named[name].detach().flatten() for name in problem.flat.names])
    g_theta, g_w = problem.grads(theta, w, (x, y))
    found = dict(zip(problem.flat.names, torch.split(g_theta, problem.flat.sizes)))
    values, slopes = [], []
    for j in both(y):
        rows = ~y[:, j].isnan()
        known, one = (x[rows], y[rows, j]), AUROC(One(net, j), p=None if shares is None else shares[j], sigmoid=sigmoid)
        batch = known if shares is not None else (*known, balance(known[1]))
        at = {"module.net.weight": net.weight, "module.net.bias": net.bias, "a": a[j : j + 1], "b": b[j : j + 1]}
        point = torch.cat([at[name].detach().flatten() for name in one.flat.names])
        values.append(one.loss_at(point, w[j : j + 1], batch))
        g, g_one = one.grads(point, w[j : j + 1], batch)
        slopes.append(dict(zip(one.flat.names, torch.split(g, one.flat.sizes))))
        for name, value in (("a", found["a"][j]), ("b", found["b"][j])):
            torch.testing.assert_close(value, slopes[-1][name][0] / 3, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(g_w[j], g_one[0] / 3, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            problem.best_dual(theta, (x, y))[j], one.best_dual(point, batch)[0], rtol=1e-10, atol=1e-12
        )
    torch.testing.assert_close(problem.loss_at(theta, w, (x, y)), torch.stack(values).mean(), rtol=1e-12, atol=1e-12)
    together = torch.stack([s["module.net.weight"] for s in slopes]).mean(0)
    torch.testing.assert_close(found["module.weight"], together, rtol=1e-10, atol=1e-12)
    assert float(found["a"][3]) == float(found["b"][3]) == float(g_w[3]) == 0


@pytest.mark.parametrize("shares", [None, (0.4,)])
def test_one_label_is_auroc(shares: Any) -> None:
    x, y = data(missing=0)
    y = y[:, :1]
    net = nn.Sequential(network(1), nn.Flatten(0))  # (n,), as the networks of this library for one output
    single = AUROC(net, p=None if shares is None else shares[0])
    batch = (x, y[:, 0]) if shares else (x, y[:, 0], balance(y[:, 0]))
    several = MultiLabelAUROC(net, 1, p=shares)
    w = torch.tensor([0.3], dtype=torch.float64)
    ours, theirs = several.grads(several.x0, w, (x, y)), single.grads(single.x0, w, batch)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


# --- AP ---


def single_ap(net: nn.Module, j: int, x: Tensor, y: Tensor, w: Tensor, margin: float) -> Tensor:
    """AUPRC of a label, one positive after the other: the others are its inner samples, weighted by `Pairs`' rule."""
    n, k = len(y), int(y.sum())
    problem, losses = AUPRC(One(net, j), margin=margin), []
    for i in range(n):
        if y[i] == 1:
            rest = torch.arange(n) != i
            weight = y[rest] * k / n * (n - 1) / (k - 1) + (1 - y[rest]) * (n - 1) / n
            inner = (x[rest][None], y[rest][None], weight[None])
            losses.append(problem.loss(w, ((x[i : i + 1], torch.ones(1, dtype=x.dtype)), inner)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("margin", [0.1, 0.5])
def test_ap_is_the_mean_of_the_single_labels(missing: float, margin: float) -> None:
    x, y = data(missing=missing)
    y[:, 3] = 0.0
    problem = MultiLabelAP(network(), margin=margin)
    w = problem.x0.clone().requires_grad_()
    each = []
    for j in both(y):
        rows = ~y[:, j].isnan()
        each.append(single_ap(network(), j, x[rows], y[rows, j], w, margin))
    assert len(each) == 3
    mean = torch.stack(each).mean()
    torch.testing.assert_close(problem.loss(problem.x0, (x, y)), mean.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(problem.grad(problem.x0, (x, y)), torch.autograd.grad(mean, w)[0], rtol=1e-9, atol=1e-12)


def test_one_label_is_average_precision() -> None:
    x, y = data(missing=0)
    y = y[:, :1]
    problem = MultiLabelAP(nn.Sequential(network(1), nn.Flatten(0)))
    expected = single_ap(network(1), 0, x, y[:, 0], problem.x0, problem.margin)
    torch.testing.assert_close(problem.loss(problem.x0, (x, y)), expected, rtol=1e-13, atol=1e-14)


# --- labels without both classes ---


@pytest.mark.parametrize("label", [0.0, 1.0, math.nan])
def test_a_batch_of_one_class_teaches_nothing(label: float) -> None:
    x, y = data()
    y = torch.full_like(y, label)
    ap, area = MultiLabelAP(network()), MultiLabelAUROC(network(), L)
    assert not ap.grad(ap.x0, (x, y)).any()
    for g in area.grads(area.x0, area.w0 + 0.2, (x, y)):
        assert not g.any()
    torch.testing.assert_close(area.best_dual(area.x0, (x, y)), -torch.ones(L, dtype=torch.float64))  # b − a


# --- the contract and the engines ---


def clients(**options: Any) -> Examples:
    x, y = data(120)
    return Examples.of(
        {name: (x[i::3], y[i::3]) for i, name in enumerate("abc")}, **{"batch": 12, "seed": 0, **options}
    )


@pytest.mark.parametrize("make", [lambda: MultiLabelAUROC(network(), L), lambda: MultiLabelAP(network())])
def test_the_contract(make: Callable[[], Any]) -> None:
    """Also with batches so small that labels come and go."""
    problem = make()
    for size in (12, 3):
        check_problem(problem, clients(batch=size))
    for algorithm in (
        (FMGDA(c_hat=0.1, c=0.1), CODA(0.1, 2.0, 6))
        if isinstance(problem, MultiLabelAUROC)
        else (FCSG(0.1), AccFCSGM(0.1))
    ):
        check_algorithm(algorithm, problem, clients(), rounds=3)


@pytest.mark.parametrize("how", [{"mode": "loop"}, {"mode": "vmap", "workers": 2}])
def test_engines_agree(how: dict[str, Any]) -> None:
    for problem, algorithm in (
        (MultiLabelAUROC(network(), L), FMGDA(c_hat=0.1, c=0.1)),
        (MultiLabelAP(network()), FCSGM(0.2, 0.5)),
    ):
        one, other = (
            simulate(problem, algorithm, clients(), rounds=3, q=2, progress=False, **options).x
            for options in ({"mode": "vmap"}, how)
        )
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert (one - problem.x0).norm() > 1e-3


@pytest.mark.parametrize(
    ("make", "algorithm", "metric"),
    [
        (lambda net: MultiLabelAUROC(net, L), FMGDA(c_hat=0.1, c=0.1), "auroc"),
        (lambda net: MultiLabelAP(net), FCSGM(1.0, 0.5), "ap"),
    ],
)
def test_training_raises_the_mean_over_labels(make: Callable[[nn.Module], Any], algorithm: Any, metric: str) -> None:
    x, y = data(600)
    sites = {str(i): (x[:400][i::4], y[:400][i::4]) for i in range(4)}
    there = Examples.of(sites, batch=32, seed=0)
    judged = held_out(x[400:], y[400:])
    net = nn.Linear(D, L, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    result = simulate(make(net), algorithm, there, rounds=25, q=4, evaluate=judged, mode="vmap", progress=False)
    first, last = result.history[0][metric], result.history[-1][metric]
    assert last > first + 0.1
    assert result.model(x).shape == (600, L)


# --- metrics ---


def test_metrics_are_means_over_labels_with_both_classes() -> None:
    x, y = data()
    y[:, 2] = torch.where(y[:, 2].isnan(), math.nan, 1.0)
    scores = x.numpy()[:, :L]
    for metric, theirs in ((auroc, roc_auc_score), (average_precision, average_precision_score)):
        known = [(~y[:, j].isnan().numpy(), j) for j in both(y)]
        expected = np.mean([theirs(y[rows, j], scores[rows, j]) for rows, j in known])
        assert metric(scores, y) == pytest.approx(expected, abs=1e-12)
    assert judge(scores, y, metric="pauroc@0.3").keys() == {"auroc", "ap", "pauroc@0.3"}
    assert math.isnan(auroc(scores, np.full(y.shape, np.nan)))
    assert auroc(scores[:, 0], y[:, :1]) == auroc(scores[:, :1], y[:, :1])
    with pytest.raises(NestfedError, match=r"4 labels need as many scores, not scores of shape \(40, 2\)"):
        auroc(scores[:, :2], y)


# --- experiments ---


def decode(found: object) -> Split:
    """300 training and 100 test examples with four labels, a tenth of them unknown."""
    x, y = make_multilabel_classification(400, n_features=8, n_classes=L, random_state=0)
    y = np.where(np.random.default_rng(0).random(y.shape) < 0.1, np.nan, y).astype(np.float32)
    whole = Dataset(x.astype(np.float32), y, {"ward": np.arange(400) % 3}, classes=("a", "b", "c", "d"))
    return Split(whole.take(np.arange(300)), whole.take(np.arange(300, 400)))


@pytest.fixture
def dataset() -> Iterator[str]:
    DATASETS.add(
        "wards", Source("wards", "four labels", "300 train, 100 test", "none", folder="", forms=(), decode=decode)
    )
    yield "wards"
    del DATASETS._things["wards"]


def tables(name: str, problem: str, algorithm: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "data": {"name": name, "validation": 0.2, **more.pop("data", {})},
        "partition": {"clients": 3, **more.pop("partition", {})},
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": problem},
        "algorithm": algorithm,
        "run": {"rounds": 3, "q": 5},
        "evaluation": {"keep": "best"},
    }  # fmt: skip


FMGDA_TABLE = {"name": "fmgda", "c_hat": 0.1, "c": 0.1}


@pytest.mark.parametrize(
    ("problem", "algorithm", "metric"),
    [("multi-label-auroc", FMGDA_TABLE, "auroc"), ("multi-label-ap", {"name": "fcsg-m", "alpha": 0.5}, "ap")],
)
def test_an_experiment(dataset: str, problem: str, algorithm: Any, metric: str, tmp_path: Any) -> None:
    records = run(from_tables(tables(dataset, problem, algorithm)), tmp_path, progress=False, picture=False)
    assert records[-1][metric] > records[0][metric]
    assert {"auroc", "ap", f"val_{metric}"} <= set(records[-1])
    by_ward = tables(dataset, problem, algorithm, partition={"kind": "column", "column": "ward"})
    assert run(from_tables(by_ward), tmp_path / "wards", progress=False, picture=False)[-1][metric] > 0.5


@pytest.mark.parametrize(
    ("problem", "more", "words"),
    [
        (
            "classify",
            {},
            "classify cannot learn from several labels per example: .*multi-label-auroc or multi-label-ap",
        ),
        ("multi-label-ap", {"data": {"name": "digits"}}, "cannot learn from one label per example"),
        ("multi-label-ap", {"data": {"binary": True}}, "data.binary needs one class per example"),
        ("multi-label-ap", {"data": {"held_out": "clients"}}, "set data.held_out = 'central'"),
        ("multi-label-ap", {"partition": {"kind": "dirichlet"}}, "use even, column or pooled"),
    ],
)
def test_experiments_that_need_one_label(dataset: str, problem: str, more: Any, words: str, tmp_path: Any) -> None:
    asked = from_tables(tables(dataset, problem, {"name": "fedavg", "eta": 0.1}, **more))
    with pytest.raises(NestfedError, match=words):
        run(asked, tmp_path, progress=False, picture=False)


def test_a_deployment_says_that_it_cannot(dataset: str) -> None:
    asked = from_tables(tables(dataset, "multi-label-ap", {"name": "fcsg", "alpha": 0.1}))
    with pytest.raises(NestfedError, match="multi-label-ap cannot be deployed"):
        at_coordinator(asked, Agreement(3, (8,), ("a", "b", "c", "d"), 0.5))


# --- rejected ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiLabelAUROC(network(), L, p=[0.5]), "p must be 4 shares of positives between 0 and 1"),
        (lambda: MultiLabelAUROC(network(), L, p=[0.5, 0.5, 0.5, 1.0]), "p must be 4 shares"),
        (lambda: MultiLabelAUROC(torch.zeros(3), L), "nn.Module"),  # type: ignore[arg-type]
        (lambda: MultiLabelAP(network(), margin=0), "margin must be above 0"),
        (lambda: MultiLabelAP(network(3)).loss(torch.zeros(18, dtype=torch.float64), data()), r"shape \(40, 4\), not \(40, 3\)"),
        (lambda: MultiLabelAP(network()).loss(torch.zeros(24), (data()[0], torch.zeros(40))), r"y of shape \(n, L\)"),
        (lambda: MultiLabelAPOptions(batch=1), "batch must be at least 2"),
        (lambda: simulate(MultiLabelAP(network()), SOX(0.1), clients(), rounds=1, progress=False), "kind Conditional"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_rejected(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(NestfedError, match=words):
        make()
