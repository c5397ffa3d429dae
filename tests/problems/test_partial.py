"""One-way partial AUROC: closed forms, thresholds, logarithms that cannot overflow, fixed points, and a case where it pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestfed import (
    FCSG,
    FCSGM,
    SOX,
    AccFCSGM,
    CrossPairs,
    FedAvg,
    FeDXL2,
    NestfedError,
    Opposites,
    PairedPartialAUROC,
    Pairs,
    PartialAUROC,
    held_out,
)
from nestfed.core import Batch
from nestfed.experiment.run import run
from nestfed.experiment.spec import from_tables
from nestfed.metrics import partial_auroc
from nestfed.models import Mlp
from nestfed.problems.base import Conditional
from nestfed.problems.partial import PairedPartialAUROCOptions, PartialAUROCOptions
from nestfed.testing import check_algorithm, check_clients, check_problem
from tests import toys
from tests.support import simulate
from tests.toys import rows_of_sites

FORMS = [{"form": "kl", "temperature": 0.7}, {"form": "cvar", "rho": 0.3}, {"form": "cvar", "rho": 0.25}]


def data(positives: int = 5, negatives: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.tensor([1] * positives + [0] * negatives)
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(y), 3))) + 0.4 * y[:, None]
    return x, y


def linear(start: float = 0.3) -> nn.Module:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, start)
    return nn.Sequential(model, nn.Flatten(0))


def all_pairs(x: Tensor, y: Tensor, **options: Any) -> Opposites:
    """A client that draws all its positives and all its negatives in every step."""
    k = int(y.sum())
    return Opposites((x, y), [np.arange(len(y))], outer=k, inner=len(y) - k, **options)


def losses(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """max(0, 1 − h⁺ + h⁻)² of every pair."""
    return (1 - (x[y == 1] @ w)[:, None] + x[y == 0] @ w).clamp_min(0) ** 2


def cvar(values: Tensor, rho: float) -> Tensor:
    """min over s of s + mean(v − s)₊/ρ, at the best of all kinks."""
    return (values + (values[:, None] - values[..., None]).clamp_min(0).mean(2) / rho).min(1).values


def exact(options: dict[str, Any], w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    values = losses(w, x, y)
    if options["form"] == "cvar":
        return cvar(values, options["rho"]).mean()
    return options["temperature"] * (values / options["temperature"]).exp().mean(1).log().mean()


# --- the objective ---


@pytest.mark.parametrize("options", FORMS)
def test_value_and_gradient_over_all_pairs(options: dict[str, Any]) -> None:
    x, y = data()
    problem, batch = PartialAUROC(linear(), **options), all_pairs(x, y).sample(0, 0)
    assert float(problem.loss(problem.x0, batch)) == pytest.approx(float(exact(options, problem.x0, x, y)), abs=1e-12)
    ahead, behind = (
        torch.stack([exact(options, problem.x0 + h * e, x, y) for e in torch.eye(3)]) for h in (1e-6, -1e-6)
    )
    torch.testing.assert_close(problem.grad(problem.x0, batch), (ahead - behind) / 2e-6, rtol=1e-7, atol=1e-7)


def test_between_the_mean_and_the_maximum() -> None:
    x, y = data()
    batch, n = all_pairs(x, y).sample(0, 0), 12
    values = losses(linear()[0].weight[0].detach(), x, y)

    def value(**options: Any) -> float:
        problem = PartialAUROC(linear(), **options)
        return float(problem.loss(problem.x0, batch))

    mean, largest = float(values.mean()), float(values.max(1).values.mean())
    assert value(form="kl", temperature=1e9) == pytest.approx(mean, rel=1e-6)
    assert largest - 1e-3 * math.log(n) - 1e-9 <= value(form="kl", temperature=1e-3) <= largest
    assert value(form="cvar", rho=1.0) == pytest.approx(mean, abs=1e-12)
    assert value(form="cvar", rho=1 / n) == pytest.approx(largest, abs=1e-12)
    top = values.sort(1, descending=True).values
    assert value(form="cvar", rho=0.3) == pytest.approx(float(((top[:, :3].sum(1) + 0.6 * top[:, 3]) / 3.6).mean()))


def test_with_the_zero_one_loss_cvar_is_one_minus_the_metric() -> None:
    rng = np.random.default_rng(1)
    h, y = rng.normal(size=40), rng.permutation(np.arange(40) < 15).astype(int)
    wrong = torch.from_numpy((h[y == 1][:, None] < h[y == 0]).astype(float))
    for rho in (0.1, 0.35, 1.0):
        assert float(cvar(wrong, rho).mean()) == pytest.approx(1 - partial_auroc(h, y, rho), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_overflows(dtype: torch.dtype) -> None:
    """ψ/λ ≈ 1000, where exp is infinite also in float64."""
    x, y = data()
    clients = Opposites((x.to(dtype), y), [np.arange(17)], outer=3, inner=6, seed=0)
    problem = PartialAUROC(linear(-0.1).to(dtype), temperature=2e-3, outer_examples=5)
    values = losses(problem.x0.double(), x, y) / 2e-3
    assert float(values.max()) > 800
    for algorithm in (SOX(1e-4, 0.5, 0.3), AccFCSGM(1e-4), FCSG(1e-4)):
        result = simulate(problem, algorithm, clients, rounds=10, q=2, progress=False, mode="vmap")
        assert torch.isfinite(result.x).all()
        assert all(math.isfinite(r["loss"]) for r in result.history)
        assert not torch.equal(result.x, problem.x0)
    u = torch.zeros(3, dtype=dtype)
    _, new = problem.tracked_grad(problem.x0, u[:, None], u + 0.5, Batch(clients.sample(0, 0), eager=True))
    assert float(new.min()) > 100
    both = CrossPairs((x.to(dtype), y), [np.arange(0, 17, 2), np.arange(1, 17, 2)], first=3, second=4)
    across = PairedPartialAUROC(linear(-0.1).to(dtype), temperature=2e-3, rows=both.rows, others=both.others)
    result = simulate(across, FeDXL2(1e-4, 0.3, 0.5, 2), both, rounds=10, q=2, progress=False, mode="vmap")
    assert torch.isfinite(result.x).all()
    assert float(result.private["u"].max()) > 100
    assert all(r["loss"] is None or math.isfinite(r["loss"]) for r in result.history)


# --- clients ---


def test_clients_draw_positives_and_negatives() -> None:
    x, y, parts = rows_of_sites(5)
    clients = Opposites((x, y), parts, outer=2, inner=3, seed=0)
    check_clients(clients)
    for n, part in enumerate(parts):
        (above, weight), (below,), which = clients.sample(n, 4)
        assert (above.shape, below.shape) == ((2, 3), (1, 3, 3))
        own = [x[part][y[part] == label] for label in (1, 0)]
        if not all(map(len, own)):
            assert weight.tolist() == [0, 0]
            continue
        assert weight.tolist() == [1, 1]
        assert torch.equal(own[1][which] if not len(own[0]) else own[0][which], above)
        assert all(bool((own[1] == row).all(1).any()) for row in below[0])
    assert clients.outer_examples == 6


@pytest.mark.parametrize("options", FORMS)
def test_a_client_of_one_class_teaches_nothing(options: dict[str, Any]) -> None:
    x, y, parts = rows_of_sites(5)
    clients = Opposites((x, y), parts, outer=2, inner=3, seed=0)
    problem = PartialAUROC(linear(), **options, outer_examples=clients.outer_examples)
    for n, nothing in enumerate((False, False, True, True, False)):
        g = problem.grad(problem.x0, clients.sample(n, 0))
        assert bool((g == 0).all()) == nothing


# --- the contract ---


def setting(options: dict[str, Any]) -> tuple[PartialAUROC, Opposites]:
    x, y, parts = rows_of_sites(5)
    clients = Opposites((x, y), parts, outer=3, inner=5, seed=0)
    return PartialAUROC(toys.Bent(torch.float64), **options, outer_examples=clients.outer_examples), clients


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("algorithm", [FCSG(0.05), FCSGM(0.05, 0.3), AccFCSGM(0.05), SOX(0.05, 0.3, 0.5)], ids=str)
def test_the_contract(options: dict[str, Any], algorithm: Any) -> None:
    problem, clients = setting(options)
    check_problem(problem, clients)
    check_algorithm(algorithm, problem, clients, rounds=3)


def test_the_contract_across_clients() -> None:
    s = toys.steep()
    check_problem(s.problem, s.clients)
    check_algorithm(FeDXL2(0.02, 0.7, 0.3, 2), s.problem, s.clients, rounds=3)


# --- SOX ---


@pytest.mark.parametrize("options", FORMS)
def test_without_memory_sox_is_fcsg_m(options: dict[str, Any]) -> None:
    problem, clients = setting(options)
    ours, theirs = (
        simulate(problem, m, clients, rounds=4, q=3, seed=2, count=3, mode="vmap", progress=False).x
        for m in (SOX(0.05, 0.3, 1.0), FCSGM(0.05, 0.3))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert (ours - problem.x0).norm() > 1e-3


def test_logarithms_are_sox_on_the_exponentials() -> None:
    """The same problem written without logarithms: g = exp(ψ/λ), f = λ log u."""
    problem, clients = setting({"form": "kl", "temperature": 0.7})

    def exponentials(model: Any, outer: Any, inner: Any) -> Tensor:
        gap = model(outer[0])[:, None] - model(inner[0][0])
        return torch.exp((1 - gap).clamp_min(0) ** 2 / 0.7)

    plain = Conditional(
        lambda u, outer: outer[1] * 0.7 * u.log(),
        exponentials,
        toys.Bent(torch.float64),
        outer_examples=clients.outer_examples,
    )
    ours, theirs = (
        simulate(p, SOX(0.05, 0.3, 0.4), clients, rounds=5, q=3, seed=2, mode="vmap", progress=False)
        for p in (problem, plain)
    )
    torch.testing.assert_close(ours.x, theirs.x, rtol=1e-10, atol=1e-10)
    met = ours.private["met"] > 0
    torch.testing.assert_close(ours.private["u"][met].exp(), theirs.private["u"][met], rtol=1e-9, atol=1e-9)


def test_thresholds_move_by_the_rule_of_sopa() -> None:
    """By hand, in numpy, one client with all pairs: s, then x with the same indicators."""
    x, y = data()
    eta, gamma, rho = 0.05, 0.3, 0.3
    problem = PartialAUROC(linear(), form="cvar", rho=rho, outer_examples=5)
    result = simulate(problem, SOX(eta, 1.0, gamma), all_pairs(x, y), rounds=6, q=1, progress=False, mode="vmap")
    a, w = x.numpy(), np.full(3, 0.3)
    gap = a[:5][:, None] - a[5:][None]
    for t in range(6):
        margin = np.maximum(1 - gap @ w, 0)
        psi, slope = margin**2, -2 * margin[..., None] * gap
        if t == 0:
            top = np.sort(psi, 1)[:, ::-1]
            s = top[:, 3]  # ρm = 3.6
            p = (psi > s[:, None]) + 0.6 * (psi == s[:, None])
        else:
            p = (psi > s[:, None]) * 1.0
            s = s + gamma * (p.mean(1) - rho)
        w = w - eta * (p[..., None] * slope).mean((0, 1)) / rho
    np.testing.assert_allclose(result.x, w, rtol=1e-10)
    np.testing.assert_allclose(result.private["u"][0, :, 0], s, rtol=1e-10)


# --- fixed points ---


def bowl(model: Any) -> Tensor:
    return 0.1 * model[0].weight.square().sum()


def slope_at(options: dict[str, Any], w: Tensor, x: Tensor, y: Tensor) -> float:
    leaf = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(exact(options, leaf, x, y) + 0.1 * leaf @ leaf, leaf)
    return float(g.norm())


def test_sox_rests_where_the_gradient_of_all_pairs_is_0() -> None:
    x, y = data(seed=3)
    options = {"form": "kl", "temperature": 0.7}
    problem = PartialAUROC(linear(), **options, outer_examples=5, penalty=bowl)
    found = simulate(problem, SOX(0.1, 0.5, 0.5), all_pairs(x, y), rounds=20, q=20, progress=False, mode="vmap").x
    assert slope_at(options, problem.x0, x, y) > 0.1
    assert slope_at(options, found, x, y) < 1e-8


def test_thresholds_find_the_share_from_few_negatives() -> None:
    """With 4 of 40 negatives in a step the batch's own minimiser, γ = 1, is too small; tracked thresholds are less biased."""
    rng = np.random.default_rng(0)
    y = torch.tensor([1] * 3 + [0] * 40)
    x = torch.from_numpy(rng.normal(size=(43, 3)))
    values, rho = losses(torch.full((3,), 0.3, dtype=torch.float64), x, y), 0.2
    problem = PartialAUROC(linear(), form="cvar", rho=rho, outer_examples=3)
    clients = Opposites((x, y), [np.arange(43)], outer=3, inner=4, seed=0)
    seen: list[Tensor] = []

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append(private["u"][0, :, 0].clone())
        return {}

    # A step of almost 0: x stays, and only the thresholds move.
    simulate(problem, SOX(1e-12, 0.5, 0.05), clients, rounds=120, q=10, measure=measure, progress=False, mode="vmap")
    share = torch.stack([(values > s[:, None]).double().mean(1) for s in seen[20:]]).mean(0)
    assert (share - rho).abs().max() < 0.02


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_fedxl2_rests_where_the_gradient_of_all_pairs_is_0(gamma: float) -> None:
    x, y, parts = rows_of_sites(5)
    clients = CrossPairs((x, y), parts, first=9, second=40)
    options = {"form": "kl", "temperature": 0.7}
    problem = PairedPartialAUROC(linear(), temperature=0.7, rows=clients.rows, others=clients.others, penalty=bowl)
    found = simulate(problem, FeDXL2(0.1, gamma, 0.5, 0), clients, rounds=250, q=1, progress=False, mode="vmap").x
    assert slope_at(options, problem.x0, x, y) > 0.1
    assert slope_at(options, found, x, y) < 1e-8


@pytest.mark.parametrize("over", ["rows", "clients"])
def test_no_negative_exceeds_the_mean_by_more_than_its_share(over: str) -> None:
    """`others` is a bound that no current score reaches beyond, so old scores alone are held to it."""
    x, y, parts = rows_of_sites(2)
    clients = CrossPairs((x, y), parts, over=over)
    weights = torch.cat([torch.full((int((y[p] == 0).sum()),), 1.0) for p in parts])
    if over == "clients":
        weights = torch.cat([torch.full((k,), 1 / k) for k in (int((y[p] == 0).sum()) for p in parts)])
    assert clients.others >= float((weights.sum() / weights).max()) - 1e-4


def test_inside_each_client_across_is_fedavg() -> None:
    """`grad` of the problem across clients is that of the pairs inside each client."""
    x, y = data()
    clients = CrossPairs((x, y), [np.arange(17)], first=5, second=12)
    problem = PairedPartialAUROC(linear(), temperature=0.7)
    leaf = problem.x0.clone().requires_grad_()
    (g,) = torch.autograd.grad(exact({"form": "kl", "temperature": 0.7}, leaf, x, y), leaf)
    found = simulate(problem, FedAvg(0.1), clients, rounds=1, q=1, progress=False, mode="vmap").x
    torch.testing.assert_close(found, problem.x0 - 0.1 * g, rtol=1e-10, atol=1e-10)


# --- where it pays ---


def hidden(seed: int) -> tuple[Tensor, Tensor]:
    """One negative in ten is as high as a positive in the first feature, and differs only in the second."""
    rng = np.random.default_rng(seed)
    y = (rng.random(2000) < 0.3).astype(int)
    hard = (y == 0) & (rng.random(2000) < 0.1)
    x = rng.normal(size=(2000, 2)) + np.stack([3.0 * (y | hard), -2.5 * hard], 1)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"form": "kl", "temperature": 0.3}, {"form": "cvar", "rho": 0.1}])
def test_it_is_ahead_of_auroc_where_few_negatives_are_hard(options: dict[str, Any]) -> None:
    """Same model, batches, method and steps on three data sets; ρ = 1 is the pairwise AUROC loss."""
    gains = []
    for seed in range(3):
        (x, y), (x_test, y_test) = hidden(seed), hidden(100 + seed)
        clients = Opposites((x, y), np.array_split(np.arange(2000), 4), outer=16, inner=100, seed=seed)
        torch.manual_seed(seed)
        net, judge = Mlp(2, ()), held_out(x_test, y_test, metric="pauroc@0.05")
        how: dict[str, Any] = {"rounds": 15, "q": 20, "evaluate": judge, "mode": "vmap", "progress": False}
        ours, plain = (
            simulate(PartialAUROC(net, **o), FCSGM(0.05, 0.3), clients, **how)["pauroc@0.05"]
            for o in (options, {"form": "cvar", "rho": 1.0})
        )
        gains.append(ours - plain)
    assert np.mean(gains) > 0.015
    assert min(gains) > 0


# --- experiments ---


TABLES: dict[str, Any] = {
    "data": {"name": "digits", "binary": True, "validation": 0.2},
    "partition": {"clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "run": {"rounds": 2, "q": 2},
    "evaluation": {"keep": "best"},
}


@pytest.mark.parametrize(
    ("problem", "algorithm", "held"),
    [
        ({"name": "partial-auroc", "rho": 0.2}, {"name": "sox", "eta": 0.1}, "central"),
        ({"name": "partial-auroc", "form": "cvar", "rho": 0.2}, {"name": "fcsg-m", "alpha": 0.1}, "clients"),
        ({"name": "paired-partial-auroc", "rho": 0.2}, {"name": "fedxl2", "eta": 0.05, "passive": 8}, "central"),
    ],
)
def test_an_experiment_is_judged_by_partial_auroc(problem: Any, algorithm: Any, held: str, tmp_path: Any) -> None:
    tables = {**TABLES, "data": {**TABLES["data"], "held_out": held}, "problem": problem, "algorithm": algorithm}
    records = run(from_tables(tables), tmp_path, progress=False, picture=False)
    assert all(0 <= r["pauroc@0.2"] <= r["auroc"] + 1e-9 for r in records)
    assert "val_pauroc@0.2" in records[-1]
    assert ("pauroc@0.2_error" in records[-1]) == (held == "clients")
    other = {
        **tables,
        "problem": {"name": "auroc"},
        "algorithm": {"name": "local-sgda", "eta_theta": 0.1, "eta_w": 0.1},
    }
    asked = from_tables({**other, "evaluation": {"metric": "pauroc@0.05", "keep": "best"}})
    assert "pauroc@0.05" in run(asked, tmp_path / "other", progress=False, picture=False)[-1]


# --- rejected ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PartialAUROC(linear(), form="dro"), "form must be kl or cvar, not 'dro'"),
        (lambda: PartialAUROC(linear(), loss="hinge"), "loss must be square, squared_hinge or logistic"),
        (lambda: PartialAUROC(linear(), rho=0), r"rho must be in \(0, 1\]"),
        (lambda: PartialAUROC(linear(), temperature=-1), "temperature must be a finite number above 0"),
        (lambda: PairedPartialAUROC(linear(), temperature=0), "temperature must be a finite number above 0"),
        (lambda: PairedPartialAUROC(linear(), form="cvar"), "kl only.*use partial-auroc"),
        (lambda: PairedPartialAUROCOptions(form="cvar"), "kl only.*use partial-auroc"),
        (lambda: PartialAUROCOptions(rho=1.5), "partial-auroc: rho must be at most 1, not 1.5"),
        (lambda: PartialAUROCOptions(form="x"), "partial-auroc: form must be kl or cvar"),
        (lambda: Opposites((torch.zeros(4, 1), torch.zeros(4)), [np.arange(4)]), "No client has a positive"),
        (lambda: Opposites((torch.zeros(4, 1), torch.ones(4)), [np.arange(4)], inner=0), "at least 1, not 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_rejected(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(NestfedError, match=words):
        make()


def test_wrong_batches_and_missing_numbers() -> None:
    x, y, parts = rows_of_sites(2)
    problem = PartialAUROC(linear())
    for batch in (Pairs((x, y), parts, seed=0).sample(0, 0), (x, y)):
        with pytest.raises(NestfedError, match="from Opposites clients"):
            problem.loss(problem.x0, batch)
    flat = PartialAUROC(nn.Linear(3, 1, dtype=torch.float64))
    with pytest.raises(NestfedError, match="one score per example"):
        flat.loss(flat.x0, Opposites((x, y), parts).sample(0, 0))
    clients = CrossPairs((x, y), parts)
    with pytest.raises(NestfedError, match=r"pass others=clients\.others"):
        simulate(PairedPartialAUROC(linear(), rows=clients.rows), FeDXL2(0.1), clients, rounds=2, q=1, progress=False)
