"""Conditional stochastic optimization: FCSG, FCSG-M, its adaptive version, Acc-FCSG-M, SOX, and their single-machine ancestors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nestfed.algorithms.average import Point
from nestfed.algorithms.compositional import replaced, tracking_weight
from nestfed.algorithms.references import HU_2020, WANG_2022_SOX, WU_2023_FAFED, WU_2023_FCSG
from nestfed.core import Algorithm, Batch, Differentiable, Schedule, Tracked, at, at_least, first, positive, weight


@dataclass(frozen=True)
class FCSG(Algorithm[Differentiable, Point]):
    """FCSG (Wu et al. 2023, Algorithm 1): local steps along the biased conditional estimator.

    The box also averages u. It is overwritten before use, so it is not sent here.
    """

    alpha: Schedule

    name = "fcsg"
    accepts = Differentiable
    shared = ("x",)
    family = "conditional"
    cites = (WU_2023_FCSG,)
    steps = ("alpha",)

    def __post_init__(self) -> None:
        positive(self, "alpha")

    def init(self, problem: Differentiable, x0: Tensor) -> Point:
        """Start at x0."""
        return Point(x0)

    def step(self, problem: Differentiable, s: Point, batch: Batch, t: int) -> Point:
        """Estimate and move."""
        u = problem.grad(s.x, batch)  # lines 2, 14
        return Point(problem.project(s.x - at(self.alpha, t) * u))  # lines 7, 9


class Momentum(NamedTuple):
    """The model and its gradient estimator."""

    x: Tensor
    u: Tensor


@dataclass(frozen=True)
class FCSGM(Algorithm[Differentiable, Momentum]):
    """FCSG-M (Wu et al. 2023, Algorithm 1): FCSG whose estimator is a moving average."""

    alpha: Schedule
    beta: Schedule = 0.5

    name = "fcsg-m"
    accepts = Differentiable
    shared = ("x", "u")
    family = "conditional"
    cites = (WU_2023_FCSG,)
    steps = ("alpha",)

    def __post_init__(self) -> None:
        positive(self, "alpha")
        weight(self, "beta")

    def init(self, problem: Differentiable, x0: Tensor) -> Momentum:
        """Start at x0."""
        return Momentum(x0, 0 * x0)

    def step(self, problem: Differentiable, s: Momentum, batch: Batch, t: int) -> Momentum:
        """Average the estimator over time, then move."""
        b = first(self.beta, t)  # 1 at t = 0: "Initialize" is a step
        u = (1 - b) * s.u + b * problem.grad(s.x, batch)  # lines 2, 15
        return Momentum(problem.project(s.x - at(self.alpha, t) * u), u)  # lines 7, 9


class AdaptiveMomentum(NamedTuple):
    """The model, its gradient estimator, the second moment, and the frozen A."""

    x: Tensor
    u: Tensor
    v: Tensor
    A: Tensor


@dataclass(frozen=True)
class AdaFCSGM(Algorithm[Differentiable, AdaptiveMomentum]):
    """Ada-FCSG-M: FCSG-M's estimator with FAFED's preconditioner, shared by all, and FAFED's order.

    x ← x − αu/A, then at the new point u ← (1−β)u + βg and v ← ρ₂v + (1−ρ₂)g² with g = ∇F̂(x; B_t); iteration 0 only
    estimates. The clients synchronise after t = 0, q, 2q, …; A = √v̄ + ρ is frozen in between. The same construction for
    Acc-FCSG-M is FAFED.
    """

    alpha: Schedule
    beta: Schedule = 0.5
    rho2: Schedule = 0.9
    rho: float = 0.01

    name = "ada-fcsg-m"
    accepts = Differentiable
    shared = ("x", "u", "v")
    nonnegative = ("v",)
    family = "conditional"
    cites = (WU_2023_FCSG, WU_2023_FAFED)
    steps = ("alpha",)

    def __post_init__(self) -> None:
        positive(self, "alpha", "rho")
        weight(self, "beta", "rho2")

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise after the first estimate, then every q iterations."""
        return t % q == 0

    def init(self, problem: Differentiable, x0: Tensor) -> AdaptiveMomentum:
        """Start at x0."""
        zero = 0 * x0
        return AdaptiveMomentum(x0, zero, zero, zero)

    def receive(self, s: AdaptiveMomentum, t: int) -> AdaptiveMomentum:
        """Rebuild A from the averaged v."""
        return s._replace(A=s.v.sqrt() + self.rho)

    def step(self, problem: Differentiable, s: AdaptiveMomentum, batch: Batch, t: int) -> AdaptiveMomentum:
        """Move, then estimate at the new point."""
        if t == 0:
            g = problem.grad(s.x, batch)
            return s._replace(u=g, v=self.square(g))
        x = problem.project(s.x - at(self.alpha, t - 1) * s.u / s.A)
        g = problem.grad(x, batch)
        b, rho2 = at(self.beta, t), at(self.rho2, t)
        return s._replace(x=x, u=(1 - b) * s.u + b * g, v=rho2 * s.v + (1 - rho2) * self.square(g))

    def square(self, g: Tensor) -> Tensor:
        """Return g², coordinate by coordinate."""
        return g**2


class Corrected(NamedTuple):
    """The model, its gradient estimator, and the client's own previous point."""

    x: Tensor
    u: Tensor
    last: Tensor


@dataclass(frozen=True)
class AccFCSGM(Algorithm[Differentiable, Corrected]):
    """Acc-FCSG-M (Wu et al. 2023, Algorithm 2): FCSG-M with a variance-reduced estimator.

    Both points of the correction use the same batch. A client that skipped a round restarts at the broadcast.
    """

    alpha: Schedule
    beta: Schedule = 0.5

    name = "acc-fcsg-m"
    accepts = Differentiable
    shared = ("x", "u")
    private = ("last",)
    family = "conditional"
    cites = (WU_2023_FCSG,)
    steps = ("alpha",)
    evaluations = 2

    def __post_init__(self) -> None:
        positive(self, "alpha")
        weight(self, "beta")

    def init(self, problem: Differentiable, x0: Tensor) -> Corrected:
        """Start at x0."""
        return Corrected(x0, 0 * x0, x0)

    def rejoin(self, s: Corrected, t: int) -> Corrected:
        """Restart the correction from the broadcast."""
        return s._replace(last=s.x)

    def step(self, problem: Differentiable, s: Corrected, batch: Batch, t: int) -> Corrected:
        """Correct the estimator with the same batch at the previous point, then move."""
        u = problem.grad(s.x, batch.raw)  # line 2
        if t > 0:
            u = u + (1 - at(self.beta, t)) * (s.u - problem.grad(s.last, batch.raw))  # line 13
        u = problem.clipped(u)
        return Corrected(problem.project(s.x - at(self.alpha, t) * u), u, s.x)  # lines 7, 9


class Sampled(NamedTuple):
    """The model and momentum, and on this client only one inner value per outer example; `met` marks the drawn ones."""

    x: Tensor
    m: Tensor
    u: Tensor
    met: Tensor


@dataclass(frozen=True)
class SOX(Algorithm[Tracked, Sampled]):
    """SOX (Wang & Yang 2022) with local steps: FCSG-M with one inner state per own outer example, refreshed when drawn.

    u_i ← (1−γ)u_i + γ·mean_j g_ij(x), with weight 1 the first time; G = mean_i ∇g_i(x)ᵀ∇f_i(u_i) with the new u_i and
    the same inner samples; m ← (1−β)m + βG; x ← x − ηm. The bias of FCSG-M's estimator, O(1/m) for m inner samples,
    becomes O(γ/m). γ = 1 is FCSG-M.

    An example may be twice in a batch only if both have the same inner samples, as with `Pairs`.
    """

    eta: Schedule
    beta: Schedule = 0.5
    gamma: Schedule = 0.5

    name = "sox"
    accepts = Tracked
    shared = ("x", "m")
    private = ("u", "met")
    family = "conditional"
    cites = (WANG_2022_SOX,)

    def __post_init__(self) -> None:
        positive(self, "eta")
        weight(self, "beta", "gamma")

    def init(self, problem: Tracked, x0: Tensor) -> Sampled:
        """Start at x0 with no example drawn."""
        count = problem.outer_examples
        return Sampled(x0, 0 * x0, x0.new_zeros(count, problem.inner_dim), x0.new_zeros(count))

    def step(self, problem: Tracked, s: Sampled, batch: Batch, t: int) -> Sampled:
        """Refresh the inner states of the drawn examples, estimate with them, and move."""
        drawn = problem.outer_ids(batch)
        w = tracking_weight(s.met, drawn, at(self.gamma, t))
        g, new = problem.tracked_grad(s.x, s.u[drawn], w, batch)
        b = first(self.beta, t)
        m = (1 - b) * s.m + b * g
        return Sampled(problem.project(s.x - at(self.eta, t) * m), m, *replaced(s.u, s.met, drawn, new))


class BSGD(FCSG):
    """BSGD (Hu et al. 2020): biased gradient descent on one machine, i.e. FCSG with one client."""

    name = "bsgd"
    single = True
    cites = (HU_2020,)


@dataclass(frozen=True)
class BSpiderBoost(Algorithm[Differentiable, Corrected]):
    """BSpiderBoost (Hu et al. 2020): a large batch every `period` steps, recursive corrections in between.

    The clients draw the large batch: give them a batch size that depends on t.
    """

    alpha: Schedule
    period: int = 10

    name = "bspiderboost"
    accepts = Differentiable
    shared = ("x", "u")
    private = ("last",)
    single = True
    family = "conditional"
    cites = (HU_2020,)
    steps = ("alpha",)
    evaluations = 2

    def __post_init__(self) -> None:
        positive(self, "alpha")
        at_least(self, 1, "period")

    def init(self, problem: Differentiable, x0: Tensor) -> Corrected:
        """Start at x0."""
        return Corrected(x0, 0 * x0, x0)

    def restarts(self, t: int, q: int) -> bool:
        """Restart every `period` steps."""
        return t % self.period == 0

    def step(self, problem: Differentiable, s: Corrected, batch: Batch, t: int) -> Corrected:
        """Restart the estimator, or add its change on one batch."""
        u = problem.grad(s.x, batch.raw)
        if t % self.period:
            u = s.u + u - problem.grad(s.last, batch.raw)
        u = problem.clipped(u)
        return Corrected(problem.project(s.x - at(self.alpha, t) * u), u, s.x)
