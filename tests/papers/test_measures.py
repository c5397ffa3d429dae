"""Measures of convergence against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nestfed_papers.measures import (
    Fixed,
    Measure,
    estimator_error,
    fafed_progress,
    gradient_norm,
    inner_error,
    together,
)
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, Quadratic
from torch import Tensor, nn

from nestfed.algorithms import FAFED, FMGDA, STEM, AccFCSGM, LocalMOML, LocalSCGDM
from nestfed.core import NestfedError
from nestfed.data.clients import Examples
from nestfed.problems.auroc import AUROC
from nestfed.problems.base import Box, Minimax
from nestfed.problems.maml import MAML
from tests.support import simulate


def last(toy: Any, algorithm: Any, measure: Measure, **options: Any) -> tuple[Any, dict[str, float]]:
    options = {"rounds": 4, "q": 3, "seed": 1, "progress": False, **options}
    result = simulate(toy.problem, algorithm, toy.clients, measure=measure, **options)
    return result, result.history[-1]


@pytest.mark.parametrize(
    "toy", [Quadratic(3, 4), ConditionalToy(3, 4), CompositionalToy(3, 4)], ids=lambda t: type(t).__name__
)
def test_gradient_norm(toy: Any) -> None:
    algorithm = FAFED(eta=0.02, rho=1.0)
    result, record = last(toy, algorithm, gradient_norm(toy.true_grad))
    assert record["gradient_norm"] == pytest.approx(float(toy.true_grad(result.x).norm()), rel=1e-12)
    assert result.history[0]["gradient_norm"] == pytest.approx(float(toy.true_grad(toy.problem.x0).norm()), rel=1e-12)


def test_gradient_norm_is_a_slope() -> None:
    """Against the values of F, not against the gradient that it was made of."""
    toy, h = ConditionalToy(3, 4, kappa=0.3), 1e-5
    x = torch.linspace(-1, 1, 4, dtype=torch.float64)
    slopes = [(toy.value(x + h * e) - toy.value(x - h * e)) / (2 * h) for e in torch.eye(4, dtype=torch.float64)]
    norm = gradient_norm(toy.true_grad)({"x": x}, {})["gradient_norm"]
    assert norm == pytest.approx(float(torch.tensor(slopes, dtype=torch.float64).norm()), rel=1e-8)


@pytest.mark.parametrize(
    ("toy", "within"),
    [
        (Quadratic(3, 4, sigma=0.5, twist=0.4, batch=50), 0.05),
        (ConditionalToy(3, 4, sigma=0.3, inner=50, outer=200), 0.06),
        (CompositionalToy(3, 4, sigma=0.5, batch=50), 0.05),
        (MinimaxToy(3, sigma=0.5, batch=50), 0.05),
    ],
    ids=lambda v: type(v).__name__,
)
def test_fixed_sample_comes_near_the_truth(toy: Any, within: float) -> None:
    x = toy.problem.x0 + torch.linspace(0.5, -0.5, len(toy.problem.x0), dtype=torch.float64)
    true, found = toy.true_grad(x), Fixed(toy.problem, toy.clients, 40).gradient(x)
    assert float((found - true).norm() / true.norm()) < within


def test_fixed_sample_without_noise_is_exact() -> None:
    for toy in (Quadratic(3, 4, sigma=0.0), CompositionalToy(3, 4, sigma=0.0), MinimaxToy(3, sigma=0.0)):
        x = toy.problem.x0 + 0.7
        torch.testing.assert_close(
            Fixed(toy.problem, toy.clients, 2).gradient(x), toy.true_grad(x), rtol=1e-7, atol=1e-7
        )


def test_fixed_sample_averages_the_inner_value_before_f() -> None:
    """Single batches have a bias of σ²(p/b)x, here as large as the gradient; the sample of n has 1/n of it at most."""
    toy = CompositionalToy(2, 3, 20, zeta=0.0, sigma=0.5, batch=1)
    x = torch.full((3,), 2.0, dtype=torch.float64)
    fixed, true = Fixed(toy.problem, toy.clients, 200), toy.true_grad(x)
    one_by_one = fixed._mean(x, fixed._direct) - true
    torch.testing.assert_close(one_by_one, toy.bias(x), rtol=0.3, atol=0.5)
    assert float((fixed.gradient(x) - true).norm()) < float(one_by_one.norm()) / 10


def test_fixed_sample_is_fixed_and_not_the_training_batches() -> None:
    toy = Quadratic(2, 3, sigma=1.0)
    x = toy.problem.x0
    one, again = (Fixed(toy.problem, toy.clients, 3).gradient(x) for _ in range(2))
    assert torch.equal(one, again)
    trained_on = [toy.problem.grad(x, toy.clients.seeded(0).sample(n, t)) for n in range(2) for t in range(3)]
    assert not torch.allclose(one, torch.stack(trained_on).mean(0))


def test_inner_value() -> None:
    toy = CompositionalToy(3, 4, sigma=0.0)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64)
    torch.testing.assert_close(
        Fixed(toy.problem, toy.clients, 2).inner(x), toy.maps.mean(0) @ x, rtol=1e-12, atol=1e-12
    )


def test_inner_error() -> None:
    """Without noise and at a standstill the tracked value is right; what is left is the last step's way."""
    toy = CompositionalToy(3, 4, sigma=0.0)
    measure = inner_error(lambda x: toy.maps.mean(0) @ x)
    algorithm = LocalSCGDM(eta=1.0, alpha=1.0, beta=1e-9, gamma=1.0)
    result, record = last(toy, algorithm, measure)
    assert record["inner_error"] < 1e-14
    by_hand = (result.shared["u"] - toy.maps.mean(0) @ result.x).square().sum()
    assert record["inner_error"] == pytest.approx(float(by_hand), rel=1e-9, abs=1e-30)
    moved, record = last(toy, LocalSCGDM(beta=0.1), measure)
    assert record["inner_error"] == pytest.approx(
        float((moved.shared["u"] - toy.maps.mean(0) @ moved.x).square().sum()), rel=1e-9
    )
    assert record["inner_error"] > 1e-6


def test_estimator_error() -> None:
    """At a standstill with weight a, Acc-FCSG-M's error is that of a moving average: aσ²/((2−a)N) in the mean."""
    toy, a = Quadratic(4, 20, sigma=1.0, zeta=0.0), 0.5
    result, _ = last(toy, AccFCSGM(alpha=1e-12, beta=a), estimator_error(toy.true_grad), rounds=60, q=4)
    seen = [record["estimator_error"] for record in result.history[5:]]
    assert sum(seen) / len(seen) == pytest.approx(a / (2 - a) / 4, rel=0.2)


def test_estimators_of_other_names() -> None:
    toy = Quadratic(3, 4, sigma=0.0)
    result, record = last(toy, STEM(eta=1e-9), estimator_error(toy.true_grad, "d"))
    assert record["estimator_error"] < 1e-12
    with pytest.raises(NestfedError, match="does not share 'u'; it shares x, d"):
        estimator_error(toy.true_grad)(result.shared, {})


@pytest.mark.parametrize("norm", [False, True])
def test_fafed_progress_is_the_definition(norm: bool) -> None:
    """M_t from its definition, with x̄_{t+1} taken from a run whose rounds are one iteration long."""
    toy, rho, eta = Quadratic(3, 4), 0.5, 0.07
    algorithm = FAFED(eta=eta, alpha=0.3, rho=rho, norm=norm)
    now, record = last(toy, algorithm, fafed_progress(toy.true_grad, rho), rounds=5, q=1)
    then, _ = last(toy, algorithm, fafed_progress(toy.true_grad, rho), rounds=6, q=1)
    M = (then.x - now.x).square().sum() / (4 * eta**2)
    M += (toy.true_grad(now.x) - now.shared["m"]).square().sum() / (4 * rho**2)
    assert record["M"] == pytest.approx(float(M), rel=1e-10)


def test_minimax_gradient() -> None:
    toy = MinimaxToy(3, sigma=0.0)
    fixed = Fixed(toy.problem, toy.clients, 2)
    measure = together(
        gradient_norm(toy.true_grad, "theta"), gradient_norm(fixed.gradient, "theta", name="on_the_sample")
    )
    result, record = last(toy, FMGDA(), measure)
    assert record["gradient_norm"] == pytest.approx(float(toy.true_grad(result.x).norm()), rel=1e-12)
    assert record["on_the_sample"] == pytest.approx(record["gradient_norm"], rel=1e-6)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).squeeze(-1)


def test_best_w_by_ascent() -> None:
    """A badly scaled concave player without a closed form offered, with and without limits."""
    scales = torch.tensor([0.5, 10.0], dtype=torch.float64)

    def f(theta: Tensor, w: Tensor, batch: Any) -> Tensor:
        return theta.square().sum() + (w * theta).sum() - (scales * w * w).sum() / 2

    toy, theta = Quadratic(2, 2), torch.tensor([0.8, -0.7], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    free = Fixed(Minimax(f, zero, zero), toy.clients, 1)
    torch.testing.assert_close(free.best_dual(theta), theta / scales, rtol=1e-4, atol=1e-6)
    boxed = Fixed(Minimax(f, zero, zero, dual_domain=Box(-1.0, 1.0)), toy.clients, 1)
    torch.testing.assert_close(
        boxed.best_dual(theta), torch.tensor([1.0, -0.07], dtype=torch.float64), rtol=1e-4, atol=1e-6
    )
    convex = Minimax(lambda theta, w, batch: (w * w).sum() + w.sum(), zero, zero)
    with pytest.raises(NestfedError, match="concave"):
        Fixed(convex, toy.clients, 1).best_dual(theta, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_w_of_auroc(dtype: torch.dtype) -> None:
    """On data with the share p of positives it is mean h⁻ − mean h⁺, though single batches have other shares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=dtype)
    y = (torch.arange(40) < 10).to(dtype)
    everyone = Examples((x, y), [torch.arange(40).numpy()] * 2, batch=40)
    model = Plain().to(dtype)
    problem = AUROC(model, p=0.25)
    h = model(x).detach()
    w = Fixed(problem, everyone, 1).best_dual(problem.x0)
    torch.testing.assert_close(w, (h[10:].mean() - h[:10].mean())[None], rtol=1e-3, atol=1e-3)


def test_tasks_are_averaged_one_by_one() -> None:
    """MAML on quadratics L_i(x) = ½‖x − c_i‖² with noisy supports: F = mean_i ½(1−λ)²‖x − c_i‖²."""
    lam, N, tasks, d = 0.3, 2, 3, 2
    centres = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], [[2.0, 2.0], [0.5, 0.5], [3.0, -1.0]]]).double()

    class Clients:
        def __len__(self) -> int:
            return N

        def sample(self, n: int, t: int) -> Any:
            which = torch.tensor([t % tasks, (t + 1) % tasks])
            own = centres[n, which][:, None]
            sign = 1.0 if (t // tasks) % 2 else -1.0
            noisy = own + sign * torch.tensor([[[0.5, -0.2]], [[-0.3, 0.4]]]).double()
            return (own, own), (noisy, noisy), which

    problem = MAML(
        torch.zeros(d, dtype=torch.float64),
        lambda x, examples: (x - examples[0]).square().sum() / (2 * len(examples[0])),
        inner_lr=lam,
        tasks=tasks,
    )
    x = torch.tensor([0.2, -0.4], dtype=torch.float64)
    fixed = Fixed(problem, Clients(), 4 * tasks)
    expected = (1 - lam) ** 2 * (x - centres.mean((0, 1)))
    torch.testing.assert_close(fixed.gradient(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fixed.inner(x), x - lam * (x - centres.mean((0, 1))), rtol=1e-10, atol=1e-10)
    one: Callable[[Any], Any] = gradient_norm(fixed.gradient)
    result = simulate(
        problem, LocalMOML(eta=0.5), Clients(), rounds=12, q=2, every=12, measure=one, progress=False, seed=0
    )
    assert result.history[-1]["gradient_norm"] < 0.2 * result.history[0]["gradient_norm"]
