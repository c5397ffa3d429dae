"""Pairs across clients: identities, fixed points, pools, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed import CrossPairs, FedAvg, FeDXL1, FeDXL2, NestfedError, PairedAP, PairedAUROC
from nestfed.algorithms.pairs import _passive
from nestfed.core import Batch
from nestfed.problems.flat import uniform
from tests import toys
from tests.methods import Q, method, run, setting
from tests.support import simulate
from tests.toys import SEED, Ranking, rows_of_sites, trace

PSI: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda s: (1 - s).square(),
    "squared_hinge": lambda s: (1 - s).clamp_min(0).square(),
    "logistic": lambda s: -F.logsigmoid(s),
}
FULL = {"first": 9, "second": 40}


def scores(w: Tensor, a: Tensor) -> Tensor:
    return a @ w + 0.3 * torch.sin(a @ w)


def descent(objective: Callable[[Tensor], Tensor], x: Tensor, eta: float) -> Tensor:
    """One step of gradient descent."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(objective(x), x)
    return (x - eta * g).detach()


def first_moves(problem: Any, algorithm: Any, clients: Any, count: int) -> Tensor:
    """Repeat: score at a point, gather, move once. The pools are then scored at the current point."""
    x = problem.x0
    for _ in range(count):
        x = simulate(problem, algorithm, clients, x0=x, rounds=2, q=1, seed=SEED, progress=False, mode="vmap").x
    return x


# --- identities ---


@pytest.mark.parametrize("loss", PSI)
@pytest.mark.parametrize("N", [1, 5])
def test_all_pairs_scored_at_the_current_point_are_gradient_descent(loss: str, N: int) -> None:
    """For one client, and for sites of different sizes, some without positives or negatives: weights p_n."""
    x, y, parts = rows_of_sites(N)
    problem = PairedAUROC(toys.Bent(torch.float64), loss=loss)

    def auroc(w: Tensor) -> Tensor:
        h = scores(w, x)
        return PSI[loss](h[y == 1][:, None] - h[y == 0]).mean()

    expected = problem.x0
    for _ in range(3):
        expected = descent(auroc, expected, 0.2)
    found = first_moves(problem, FeDXL1(0.2, 0), CrossPairs((x, y), parts, **FULL), 3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (expected - problem.x0).norm() > 0.01


def test_over_clients_is_the_mean_over_clients() -> None:
    """F = mean over n and m of the mean over S1ⁿ × S2ᵐ: every client has the same weight, whatever its size."""
    x, y, parts = rows_of_sites(2)
    problem = PairedAUROC(toys.Bent(torch.float64), loss="logistic")

    def mean_of_clients(w: Tensor) -> Tensor:
        h = [scores(w, x[part]) for part in parts]
        own = [y[part] == 1 for part in parts]
        each = [F.softplus(h[m][~own[m]] - h[n][own[n]][:, None]).mean() for n in (0, 1) for m in (0, 1)]
        return torch.stack(each).mean()

    expected = descent(mean_of_clients, problem.x0, 0.2)
    found = first_moves(problem, FeDXL1(0.2, 0), CrossPairs((x, y), parts, **FULL, over="clients"), 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    pooled = first_moves(problem, FeDXL1(0.2, 0), CrossPairs((x, y), parts, **FULL), 1)
    assert (pooled - found).norm() > 1e-4


def ap_loss(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    def loss(w: Tensor) -> Tensor:
        h = torch.sigmoid(scores(w, x))
        value = (0.5 - h[y == 1][:, None] + h).clamp_min(0).square()
        u = (value * (y == 1)).mean(1) + 2.5e-5
        return -(u / (value.mean(1) + 2.5e-5)).mean()

    return loss


def test_fedxl2_alone_is_gradient_descent_on_ap() -> None:
    x, y, parts = rows_of_sites(1)
    clients = CrossPairs((x, y), parts, **FULL, everything=True)
    problem = PairedAP(toys.Bent(torch.float64), margin=0.5, rows=clients.rows)
    expected = problem.x0
    for _ in range(3):
        expected = descent(ap_loss(x, y), expected, 0.2)
    found = first_moves(problem, FeDXL2(0.2, 1.0, 0.5, 0), clients, 3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_fedxl2_with_the_identity_is_fedxl1() -> None:
    s = toys.paired(5)
    for k in (0, 2):
        one, other = (
            trace(s.problem, algorithm, s.clients, rounds=5, q=Q, mode="vmap", participation=4)[1]
            for algorithm in (FeDXL1(0.1, k), FeDXL2(0.1, 0.7, 1.0, k))
        )
        for (_, a), (_, b) in zip(one, other):
            torch.testing.assert_close(a["x"], b["x"], rtol=1e-12, atol=1e-12)
        assert (one[-1][1]["x"] - one[0][1]["x"]).norm() > 0.01


def test_pairs_inside_each_site_are_fedavg_on_the_same_problem() -> None:
    """`grad` is the gradient of the site's own pairs, with the weight of its positives."""
    x, y, parts = rows_of_sites(5)
    problem, clients = PairedAUROC(toys.Bent(torch.float64), loss="logistic"), CrossPairs((x, y), parts, **FULL)

    def inside(w: Tensor) -> Tensor:
        terms = []
        for part in parts:
            h, positive = scores(w, x[part]), y[part] == 1
            if positive.any() and not positive.all():
                each = F.softplus(h[~positive] - h[positive][:, None]).mean(1)
                terms.append(each.sum() / (y == 1).sum())
        return torch.stack(terms).sum()

    found = simulate(problem, FedAvg(0.2), clients, rounds=1, q=1, progress=False, mode="vmap").x
    torch.testing.assert_close(found, descent(inside, problem.x0, 0.2), rtol=1e-10, atol=1e-10)


# --- fixed points ---


def end(eta: float, q: int, rounds: int, algorithm: Callable[[float], Any]) -> tuple[Tensor, Tensor]:
    toy = Ranking(5, **FULL)
    options: dict[str, Any] = {"rounds": rounds, "q": q, "progress": False, "mode": "vmap"}
    return simulate(toy.problem, algorithm(eta), toy.clients, **options).x, toy.minimiser


@pytest.mark.parametrize("algorithm", [lambda eta: FeDXL1(eta, 0), lambda eta: FeDXL2(eta, 0.5, 0.5, 0)])
def test_the_fixed_point_is_that_of_all_pairs(algorithm: Callable[[float], Any]) -> None:
    """With q = 1 scores are one move old, which does not matter at rest."""
    found, truth = end(0.1, 1, 120, algorithm)
    torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7)


def test_local_steps_shift_the_fixed_point_by_the_order_of_the_step() -> None:
    shifts = []
    for eta, rounds in ((0.04, 60), (0.02, 120)):
        found, truth = end(eta, 3, rounds, lambda eta: FeDXL1(eta, 0))
        shifts.append(float((found - truth).norm()))
    assert shifts[1] > 1e-3
    assert shifts[0] / shifts[1] == pytest.approx(2, abs=0.3)


def test_fedxl2_rests_where_the_gradient_of_ap_is_0() -> None:
    x, y, parts = rows_of_sites(5)
    clients = CrossPairs((x, y), parts, **FULL, everything=True)
    problem = PairedAP(
        toys.Bent(torch.float64), margin=0.5, rows=clients.rows, penalty=lambda m: 0.1 * m.weight @ m.weight
    )

    def objective(w: Tensor) -> Tensor:
        return ap_loss(x, y)(w) + 0.1 * w @ w

    result = simulate(problem, FeDXL2(1.0, 0.9, 0.9, 0), clients, rounds=150, q=1, progress=False, mode="vmap")
    before, after = ((x - descent(objective, x, 1.0)).norm() for x in (problem.x0, result.x))
    assert before > 0.1
    assert after < 1e-8


# --- pools ---


def test_passive_numbers_are_drawn_by_weight_from_those_who_took_part() -> None:
    """Rows are tagged; the frequencies of 20,000 draws are within five standard deviations."""
    weights = torch.tensor([[1.0, 1.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    table = torch.stack([torch.arange(8.0).view(4, 2), weights], -1)
    fresh = torch.tensor([1.0, 1.0, 0.0, 1.0])
    batch = Batch(None, torch.tensor(77))
    drawn = _passive(table, fresh, 1000, 20, batch, 0)
    counts = torch.bincount(drawn.numbers[..., 0].flatten().long(), minlength=8)
    assert set(counts.nonzero().flatten().tolist()) == {0, 1, 3}
    expected = torch.tensor([0.25, 0.25, 0.5])
    error = (counts[[0, 1, 3]] / 20_000 - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert (drawn.share == 1 / 20).all()
    everything = _passive(table, fresh, 3, 0, batch, 0)
    torch.testing.assert_close(everything.share[0], torch.tensor([0.25, 0.25, 0, 0.5, 0, 0, 0, 0, 0]))
    for k in (0, 3):
        nobody = _passive(table, 0 * fresh, 3, k, batch, 0)
        assert (nobody.share == 0).all()
        assert torch.isfinite(nobody.numbers).all()


def test_luck_is_a_function_of_key_stream_and_place() -> None:
    keys = torch.tensor([5, 6, 2**62 - 1])
    together = torch.vmap(lambda key: uniform(key, (50, 40), 1))(keys)
    for i, key in enumerate(keys):
        assert torch.equal(together[i], uniform(key, (50, 40), 1))
    other = uniform(keys[0], (50, 40), 0)
    for a, b in ((together[0], other), (together[0], together[1]), (together[0, 1:], together[0, :-1])):
        correlation = np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1]
        assert abs(correlation) < 5 / 2000**0.5
    assert float(other.min()) >= 0
    assert float(other.max()) < 1
    assert float(other.mean()) == pytest.approx(0.5, abs=5 / 12**0.5 / 2000**0.5)


def test_pools_are_the_scores_of_the_last_round() -> None:
    """What `result.gathered` has, computed anew: before each move, by client, iteration and position in the batch."""
    s = toys.paired(5)
    eta, N = 0.1, 5
    clients = s.clients.seeded(SEED)
    result = simulate(s.problem, FeDXL1(eta, 1), s.clients, rounds=1, q=Q, seed=SEED, progress=False, encode="int8")
    for n in range(N):
        (first, _, weight), (second, _, other) = clients.sample(n, 0)
        x0 = s.problem.x0
        torch.testing.assert_close(result.gathered["pool1"][n], torch.stack([scores(x0, first), weight], 1))
        torch.testing.assert_close(result.gathered["pool2"][n], torch.stack([scores(x0, second), other], 1))
    later = run("fedxl2", 3)
    assert later.gathered["pool1"].shape == (N, Q * 4, 4)
    assert later.gathered["pool2"].shape == (N, Q * 5, 3)
    real = later.gathered["pool1"][..., -1] > 0
    assert real.sum(1).tolist() == [3 * Q, 4 * Q, 0, 4 * Q, 4 * Q]  # nothing from a site without positives


@pytest.mark.parametrize("name", ["fedxl1", "fedxl2"])
def test_rounding_leaves_scores_exact(name: str) -> None:
    plain, rounded = (run(name, 1, encode=encode) for encode in ("", "int8"))
    for pool in ("pool1", "pool2"):
        assert torch.equal(plain.gathered[pool], rounded.gathered[pool])
    assert plain.gathered["pool1"].abs().sum() > 0
    assert not torch.equal(run(name, 3).x, run(name, 3, encode="int8").x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedxl1", "fedxl2"])
def test_compiled(name: str) -> None:
    torch.testing.assert_close(run(name, 3, compile=True).x, run(name, 3).x, rtol=1e-9, atol=1e-9)


# --- clients ---


@pytest.mark.parametrize("everything", [False, True])
def test_no_row_twice_and_weights_of_all_rows(everything: bool) -> None:
    """A client's weights sum up to b·N·|Sⁿ|/|S|; what fills a batch has none."""
    x, y, parts = rows_of_sites(5)
    clients = CrossPairs((x, y), parts, first=4, second=6, everything=everything, seed=3)
    positives = [int(y[part].sum()) for part in parts]
    others = [len(part) if everything else len(part) - p for part, p in zip(parts, positives)]
    for n in range(5):
        for t in range(20):
            (a, number, first), (b, label, second) = clients.sample(n, t)
            for rows, weight, held, size, all_ in (
                (a, first, positives, 4, sum(positives)),
                (b, second, others, 6, sum(others)),
            ):
                real = rows[weight > 0]
                assert len(real) == min(size, held[n])
                assert len(torch.unique(real, dim=0)) == len(real)
                assert float(weight.sum()) == pytest.approx(size * 5 * held[n] / all_)
            own = x[parts[n]][y[parts[n]] == 1]
            assert torch.equal(own[number[first > 0]], a[first > 0])
            assert (number[first == 0] == clients.rows - 1).all()
            assert max(positives) == clients.rows - 1
            assert everything or not label[second > 0].any()


def test_totals_of_all_clients() -> None:
    """A site that knows the totals draws the same batch as in a simulation of all."""
    from nestfed.data.clients import Totals

    x, y, parts = rows_of_sites(5)
    whole = CrossPairs((x, y), parts, seed=3)
    for n in (1, 2):
        mine = CrossPairs((x, y), [parts[n]] * 5, seed=3, totals=Totals(5, int(y.sum()), len(y)))
        one, other = (torch.utils._pytree.tree_leaves(c.sample(n, 4)) for c in (whole, mine))
        for i in (0, 2, 3, 4, 5):  # the number of a row without weight differs
            assert torch.equal(one[i], other[i])


# --- rejected ---


def rejected(sentence: str, call: Callable[[], Any]) -> None:
    with pytest.raises(NestfedError, match=sentence):
        call()


@pytest.mark.parametrize("name", ["fedxl1", "fedxl2"])
def test_what_would_be_another_objective_or_a_false_promise(name: str) -> None:
    rejected("false promise", lambda: run(name, 1, clip=1.0, noise=1.0))
    rejected("exchange.weights must be 'equal'", lambda: run(name, 1, weights="examples"))
    rejected("whole batch at once", lambda: run(name, 1, mode="loop", accumulate=2))
    s = setting(name)
    rejected("Client 2 has no positive examples.*use over = 'rows'", lambda: replace(s.clients, over="clients"))
    assert run(name, 1).x is not None


def test_wrong_problems_and_options() -> None:
    s = toys.precise(4)
    rejected(
        "needs a linear f.*use fedxl2", lambda: simulate(s.problem, FeDXL1(0.1), s.clients, rounds=1, progress=False)
    )
    unknown = PairedAP(toys.Bent(torch.float64))
    rejected("pass rows=clients.rows", lambda: simulate(unknown, method("fedxl2"), s.clients, rounds=1, progress=False))
    rejected("loss must be square, squared_hinge or logistic", lambda: PairedAUROC(nn.Linear(2, 1), loss="hinge"))
    rejected("margin must be above 0", lambda: PairedAP(nn.Linear(2, 1), margin=0))
    x, y, parts = rows_of_sites(4)
    rejected("all examples are of one class", lambda: CrossPairs((x, 0 * y), parts))
    rejected("labels 0 and 1", lambda: CrossPairs((x, y + 1), parts))
    rejected("over must be rows or clients", lambda: CrossPairs((x, y), parts, over="all"))
    flat = PairedAUROC(nn.Linear(3, 1, dtype=torch.float64))
    rejected("one score per example", lambda: simulate(flat, FeDXL1(0.1), s.clients, rounds=1, progress=False))
