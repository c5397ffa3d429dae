"""Counter-examples of the papers, and the toys' truths against finite differences and sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, PLSaddle, Quadratic, Theorem1
from torch import Tensor

from nestfed import algorithms as a
from nestfed.core import NestfedError, as_batch
from nestfed.problems.base import Minimize
from tests.support import simulate
from tests.toys import trace


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- Theorem 1 of the FAFED paper ---


def test_the_functions_are_those_of_the_theorem() -> None:
    toy = Theorem1()
    for x in (-4.0, -1.0, -0.5, 0.0, 0.3, 1.0, 1.7, 10.0):
        first = 3 * x**2 if abs(x) <= 1 else 6 * abs(x) - 3
        other = -(x**2) if abs(x) <= 1 else -2 * abs(x) + 1
        assert [toy.client_value(n, x) for n in range(3)] == pytest.approx([first, other, other])
        assert toy.value(vector(x)) == pytest.approx((first + 2 * other) / 3)
        assert toy.true_grad(vector(x)).item() == pytest.approx(2 / 3 * max(-1.0, min(1.0, x)))
        losses = [toy.problem.loss(vector(x), toy.clients.sample(n, 0)).item() for n in range(3)]
        assert losses == pytest.approx([first, other, other])
    for n in range(3):  # continuous at ±1, which the printed −2 is not
        assert toy.client_value(n, 1 + 1e-9) == pytest.approx(toy.client_value(n, 1.0), abs=1e-7)


def naive(eta: float, beta: float, steps: int, start: float = 10.0) -> list[float]:
    toy = Theorem1(start=start)
    _, rounds = trace(toy.problem, a.NaiveAdaptive(eta, beta), toy.clients, rounds=steps, q=1, mode="loop")
    return [shared["x"].item() for _, shared in rounds]


def test_naive_first_step() -> None:
    """The numbers of ALGORITHMS.md: 9.8586 / 10.1414 / 10.1414, mean 10.0471."""
    toy, algorithm = Theorem1(), a.NaiveAdaptive(0.1, 0.5)
    ends = []
    for n in range(3):
        state = algorithm.init(toy.problem, toy.problem.x0)
        ends.append(algorithm.step(toy.problem, state, toy.clients.sample(n, 0), 0).x.item())
    assert ends == pytest.approx([9.8586, 10.1414, 10.1414], abs=5e-5)
    assert naive(0.1, 0.5, 1)[1] == pytest.approx(10.0471, abs=5e-5)


@pytest.mark.parametrize("eta", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [10.0, -3.0])
def test_naive_diverges(eta: float, beta: float, start: float) -> None:
    """|x| grows at every step, by exactly η/(3√(1−β^t)), whatever the step size and the weight."""
    steps = 12
    path = np.abs(naive(eta, beta, steps, start))
    expected = [eta / (3 * math.sqrt(1 - beta**t)) for t in range(1, steps + 1)]
    np.testing.assert_allclose(np.diff(path), expected, rtol=1e-10)


class ByHand(Minimize):
    """The same problem with its gradient written out, which is faster."""

    def grad(self, x: Tensor, batch: Any) -> Tensor:
        return as_batch(batch).data[0] * x.clamp(-1, 1)


def test_gradient_by_hand() -> None:
    toy = Theorem1()
    for x in (-3.0, -0.2, 0.0, 0.9, 2.0):
        for n in range(3):
            batch = toy.clients.sample(n, 0)
            assert ByHand(toy.problem.f, vector(x)).grad(vector(x), batch) == toy.problem.grad(vector(x), batch)


def fafed(q: int, eta: float, alpha: float, rho: float, rounds: int) -> float:
    """Return the common point after the move that follows the last synchronisation (line 12).

    It starts at 2, on the straight piece of the functions; from the theorem's 10 it only takes longer.
    """
    toy = Theorem1(start=2.0)
    algorithm = a.FAFED(eta, alpha, beta=0.5, rho=rho)
    problem = ByHand(toy.problem.f, toy.problem.x0)
    result = simulate(problem, algorithm, toy.clients, rounds=rounds, q=q, mode="loop", progress=False)
    s = result.shared
    return float(s["x"] - eta * s["m"] / (s["v"].sqrt() + rho))


@pytest.mark.parametrize(
    ("q", "eta", "alpha", "rho", "rounds"),
    [(1, 0.1, 0.5, 0.1, 160), (5, 0.05, 0.05, 1.0, 120), (20, 0.01, 0.01, 1.0, 120)],
)
def test_fafed_converges(q: int, eta: float, alpha: float, rho: float, rounds: int) -> None:
    assert abs(fafed(q, eta, alpha, rho, rounds)) < 0.01


def test_fafed_stalls_with_long_steps() -> None:
    """q = 5 with η/ρ = 1: near the optimum A → ρ, and it stays near 0.98."""
    ends = [fafed(5, 0.1, 0.5, 0.1, rounds) for rounds in (40, 80)]
    assert np.abs(ends) == pytest.approx([0.98, 0.98], abs=0.01)


# --- The PL counter-example of the FMGDA paper ---


def test_pl_saddle() -> None:
    toy = PLSaddle()
    m = toy.saddle()
    assert m.abs().max() < 1e-12  # it is the origin
    assert toy.gradient(m).norm() < 1e-12
    eigenvalues = torch.linalg.eigvalsh(toy.hessian(m))
    assert eigenvalues[0] < -0.1 < 0.1 < eigenvalues[1]  # up one way, down the other
    # far above the optimum, and the inequality fails for every μ, however small
    assert toy.surface(m).item() == pytest.approx(0.0, abs=1e-12)
    assert toy.optimum == -0.25
    for mu in (1.0, 1e-3, 1e-9):
        sides = toy.pl_sides(m, mu)
        assert sides.left < 1e-24
        assert sides.right == pytest.approx(0.25 * mu)
        assert not sides.holds
    # elsewhere it does hold for a small μ
    assert toy.pl_sides(vector(0.5, 0.5), 0.01).holds


def test_pl_surface_is_the_best_over_a_b_and_w() -> None:
    """S = min over a, b of max over w of the AUROC objective of ALGORITHMS.md = p(1−p)(P−1), by brute force."""
    toy, p = PLSaddle(), 0.5
    for m in (vector(0.7, -1.2), vector(-2.0, 0.4), vector(1.5, 3.0), vector(0.0, 0.0)):
        positive, negative = m[0] * torch.sigmoid(m[1]), m[0] * torch.sigmoid(-m[1])
        grid = torch.linspace(-3, 3, 61, dtype=torch.float64)
        A, B, W = torch.meshgrid(grid + positive, grid + negative, grid + negative - positive, indexing="ij")
        on_positive = (1 - p) * (positive - A) ** 2 - 2 * (1 + W) * (1 - p) * positive - p * (1 - p) * W**2
        on_negative = p * (negative - B) ** 2 + 2 * (1 + W) * p * negative - p * (1 - p) * W**2
        F = p * on_positive + (1 - p) * on_negative
        assert F.amax(2).min().item() == pytest.approx(toy.surface(m).item(), abs=1e-12)
        assert toy.surface(m).item() == pytest.approx(0.25 * ((1 - (positive - negative)).item() ** 2 - 1), abs=1e-12)
    assert toy.surface(vector(50.0, 2 * math.atanh(1 / 50))).item() == pytest.approx(toy.optimum, abs=1e-12)


def test_pl_problem_reaches_its_optimum_from_beside_the_saddle() -> None:
    toy = PLSaddle()
    result = simulate(toy.problem, a.LocalSGDA(0.5, 0.5), toy.clients, rounds=150, q=1, mode="loop", progress=False)
    assert toy.surface(result.x[:2]).item() == pytest.approx(toy.optimum, abs=1e-3)
    still = PLSaddle(start=(0.0, 0.0))
    stuck = torch.cat([still.saddle(), torch.zeros(2, dtype=torch.float64)])
    result = simulate(
        still.problem, a.LocalSGDA(0.5, 0.5), still.clients, rounds=20, q=1, x0=stuck, mode="loop", progress=False
    )
    assert result.x.abs().max() < 1e-10


# --- The toys' truths ---


def finite_differences(value: Any, x: Tensor, h: float = 1e-5) -> Tensor:
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.tensor([(value(x + e) - value(x - e)) / (2 * h) for e in steps], dtype=x.dtype)


TRUTHS = [
    Quadratic(5, 3, twist=0.4),
    ConditionalToy(5, 3),
    ConditionalToy(5, 3, kappa=0.2),
    CompositionalToy(5, 3, 4),
    MinimaxToy(5, 3, 2),
]


@pytest.mark.parametrize("toy", TRUTHS, ids=repr)
def test_true_gradient_is_that_of_the_value(toy: Any) -> None:
    x = vector(0.4, -0.9, 1.3)
    expected = finite_differences(toy.value, x)
    torch.testing.assert_close(toy.true_grad(x), expected, rtol=1e-6, atol=1e-7)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("toy", [t for t in TRUTHS if not getattr(t, "kappa", 0)], ids=repr)
def test_minimiser(toy: Any) -> None:
    assert toy.true_grad(toy.minimiser).norm() < 1e-12
    for direction in torch.eye(3, dtype=torch.float64):
        assert toy.value(toy.minimiser + 0.1 * direction) > toy.value(toy.minimiser)


def estimates(toy: Any, x: Tensor, draws: int) -> Tensor:
    """Return the mean over clients of the problem's own estimator, once per iteration."""
    clients = toy.clients.seeded(0)
    with torch.no_grad():
        batches = clients.draw(range(len(clients)), range(draws))
        together = torch.utils._pytree.tree_map(lambda *leaves: torch.cat(leaves), *batches)
        found = torch.vmap(lambda batch: toy.problem.grad(x, batch))(together)
        return found.view(draws, len(clients), -1).mean(1)


def within(found: Tensor, expected: Tensor, errors: float = 4.5) -> None:
    """The mean of the rows agrees up to its own standard error, which must be small."""
    error = found.std(0) / len(found) ** 0.5
    assert error.max() < 0.1 * expected.norm()
    assert ((found.mean(0) - expected).abs() < errors * error).all()


@pytest.mark.parametrize("kappa", [0.0, 0.1])
def test_conditional_estimator_has_the_known_bias(kappa: float) -> None:
    x = vector(0.4, -0.9, 1.3)
    toy = ConditionalToy(4, 3, kappa=kappa, inner=2, outer=64)
    found = estimates(toy, x, 100)
    within(found, toy.expected_grad(x, 2))
    error = found.std(0) / 10
    assert ((found.mean(0) - toy.true_grad(x)).abs() / error).max() > 10  # the bias is really seen
    torch.testing.assert_close(toy.bias(x, 2), toy.expected_grad(x, 2) - toy.true_grad(x))
    if not kappa:
        torch.testing.assert_close(toy.bias(x, 2), x / 2)


def test_compositional_estimator_has_the_known_bias() -> None:
    x = vector(0.4, -0.9, 1.3)
    toy = CompositionalToy(4, 3, 4, sigma=1.0, batch=2)
    found = estimates(toy, x, 1500)
    within(found, toy.true_grad(x) + toy.bias(x))
    torch.testing.assert_close(toy.bias(x), 2 * x)


def test_quadratic_constants() -> None:
    toy = Quadratic(6, 4, zeta=1.5, condition=20.0, sigma=0.7, mu=0.5, batch=1)
    x = torch.ones(4, dtype=torch.float64)
    grads = torch.stack([toy.client_grad(n, x) for n in range(6)])
    torch.testing.assert_close(grads.mean(0), toy.true_grad(x))
    assert (grads - grads.mean(0)).square().sum(1).mean().sqrt().item() == pytest.approx(1.5)
    assert toy.curvature.min().item() == pytest.approx(0.5)
    assert pytest.approx(10.0) == toy.L
    # the clients' own gradients, and the size of the noise
    clients = toy.clients.seeded(1)
    drawn = torch.stack(
        [torch.stack([toy.problem.grad(x, clients.sample(n, t)) for n in range(6)]) for t in range(100)]
    )
    assert (drawn - grads).square().sum(2).mean().item() == pytest.approx(0.49, rel=0.15)
    within((drawn - grads).mean(1) + toy.true_grad(x), toy.true_grad(x))


def test_twisted_quadratic_misleads_local_steps() -> None:
    """With unequal curvature FedAvg's fixed point moves away as q grows; SCAFFOLD's does not."""
    toy = Quadratic(4, 3, sigma=0.0, twist=0.8, zeta=3.0, condition=2.0)
    gaps = {}
    for name, algorithm in (("fedavg", a.FedAvg(0.1)), ("scaffold", a.Scaffold(0.1))):
        result = simulate(toy.problem, algorithm, toy.clients, rounds=60, q=5, mode="vmap", progress=False)
        gaps[name] = toy.value(result.x)
    assert gaps["fedavg"] > 1e-3
    assert gaps["scaffold"] < 1e-6


def test_minimax_toy() -> None:
    toy = MinimaxToy(5, 3, 2, sigma=0.0)
    theta, w = vector(0.4, -0.9, 1.3), toy.best_dual(vector(0.4, -0.9, 1.3))
    clients = toy.clients

    def mean(theta: Tensor, w: Tensor) -> float:
        return float(np.mean([toy.problem.loss_at(theta, w, clients.sample(n, 0)) for n in range(5)]))

    assert mean(theta, w) == pytest.approx(toy.value(theta))
    assert finite_differences(lambda v: mean(theta, v), w).norm() < 1e-8
    for direction in torch.eye(2, dtype=torch.float64):
        assert mean(theta, w + 0.1 * direction) < toy.value(theta)
    estimated = torch.stack([toy.problem.best_dual(theta, clients.sample(n, 0)) for n in range(5)])
    torch.testing.assert_close(estimated.mean(0), w)


def test_clients_of_toys() -> None:
    """Same seed, same batch; another seed, client or iteration, another batch; the truth does not depend on it."""
    for make in (Quadratic, ConditionalToy, CompositionalToy, MinimaxToy):
        toy = make(N=3, dim=2)
        leaves = torch.utils._pytree.tree_leaves
        clients = toy.clients.seeded(1)
        assert len(clients) == 3
        assert clients.seeded(2) is clients  # a seed of its own stays
        one = leaves(clients.sample(1, 4))
        assert all(torch.equal(x, y) for x, y in zip(one, leaves(toy.clients.seeded(1).sample(1, 4))))
        for other in (clients.sample(0, 4), clients.sample(1, 5), toy.clients.seeded(2).sample(1, 4)):
            assert not all(torch.equal(x, y) for x, y in zip(one, leaves(other)))
        assert not torch.equal(make(N=3, dim=2, seed=1).minimiser, toy.minimiser)
        single = make(N=3, dim=2, dtype=torch.float32)
        assert {leaf.dtype for leaf in leaves(single.clients.sample(0, 0))} == {torch.float32}
        assert single.problem.x0.dtype == torch.float32


def test_toys_refuse_nonsense() -> None:
    for make, wrong in (
        (Quadratic, {"N": 0}),
        (Quadratic, {"twist": 1.0}),
        (Quadratic, {"condition": 0.5}),
        (Quadratic, {"sigma": -1.0}),
        (ConditionalToy, {"inner": 0}),
        (CompositionalToy, {"zeta": math.nan}),
        (MinimaxToy, {"mu": 0.0}),
    ):
        with pytest.raises(NestfedError, match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(NestfedError, match="kappa"):
        _ = ConditionalToy(kappa=0.1).minimiser
