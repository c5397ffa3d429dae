"""Adaptive and variance-reduced methods for plain minimization: FAFED, STEM, the naive method, adaptive servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms import server
from nestfed.algorithms.average import FedAvg
from nestfed.algorithms.references import CHEN_2020, KHANDURI_2021, REDDI_2021, WANG_2022, WU_2023_FAFED
from nestfed.core import (
    Algorithm,
    Batch,
    Differentiable,
    Schedule,
    Server,
    at,
    positive,
    weight,
)


@dataclass(frozen=True)
class _AdaptiveServer(FedAvg):
    eta_g: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        server.check_moments(self)


class FedAdam(_AdaptiveServer):
    """FedAdam (Reddi et al. 2021): FedAvg's clients, Adam without bias correction at the server."""

    name = "fedadam"
    cites = (REDDI_2021,)

    @property
    def server(self) -> Server:
        """Adam on Δ."""
        return server.Adam(self.eta_g, self.beta1, self.beta2, self.tau)


class FedYogi(_AdaptiveServer):
    """FedYogi (Reddi et al. 2021): FedAvg's clients, Yogi at the server."""

    name = "fedyogi"
    cites = (REDDI_2021,)

    @property
    def server(self) -> Server:
        """Yogi on Δ."""
        return server.Yogi(self.eta_g, self.beta1, self.beta2, self.tau)


class FedAdagrad(_AdaptiveServer):
    """FedAdagrad (Reddi et al. 2021): FedAvg's clients, Adagrad at the server."""

    name = "fedadagrad"
    cites = (REDDI_2021,)

    @property
    def server(self) -> Server:
        """Adagrad on Δ."""
        return server.Adagrad(self.eta_g, self.beta1, self.beta2, self.tau)


@dataclass(frozen=True)
class FedAMS(_AdaptiveServer):
    """FedAMS (Wang, Lin & Chen 2022): FedAvg's clients, AMSGrad with a floor ε at the server."""

    epsilon: float = 1e-6

    name = "fedams"
    cites = (WANG_2022,)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "epsilon")

    @property
    def server(self) -> Server:
        """AMS on Δ."""
        return server.AMS(self.eta_g, self.beta1, self.beta2, self.tau, self.epsilon)


class Recursive(NamedTuple):
    """The model, its gradient estimator, and the client's own previous point."""

    x: Tensor
    d: Tensor
    last: Tensor


@dataclass(frozen=True)
class STEM(Algorithm[Differentiable, Recursive]):
    """STEM (Khanduri et al. 2021): recursive momentum at every client, synchronised with the model.

    d ← ∇f(x_t; B_t) + (1 − a_t)(d − ∇f(x_{t−1}; B_t)), x ← x − η_t d, averaging after t = 0, q, 2q, …, as in
    FAFED. With `c` the weight is a_{t+1} = cη_t²; otherwise `a`. A client that skipped a round restarts at the
    broadcast.
    """

    eta: Schedule
    a: Schedule = 0.1
    c: float | None = None

    name = "stem"
    accepts = Differentiable
    shared = ("x", "d")
    private = ("last",)
    cites = (KHANDURI_2021,)
    evaluations = 2

    def __post_init__(self) -> None:
        positive(self, "eta")
        if self.c is None:
            weight(self, "a")
        else:
            positive(self, "c")

    def momentum(self, t: int) -> float:
        """Return a_t, at most 1."""
        return min(1.0, at(self.a, t) if self.c is None else self.c * at(self.eta, t - 1) ** 2)

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise after the first estimate, then every q iterations."""
        return t % q == 0

    def init(self, problem: Differentiable, x0: Tensor) -> Recursive:
        """Start at x0."""
        return Recursive(x0, 0 * x0, x0)

    def rejoin(self, s: Recursive, t: int) -> Recursive:
        """Restart the correction from the broadcast."""
        return s._replace(last=s.x)

    def step(self, problem: Differentiable, s: Recursive, batch: Batch, t: int) -> Recursive:
        """Estimate at x_t, then move."""
        d = problem.grad(s.x, batch.raw)
        if t > 0:
            d = d + (1 - self.momentum(t)) * (s.d - problem.grad(s.last, batch.raw))
        d = problem.clipped(d)
        return Recursive(problem.project(s.x - at(self.eta, t) * d), d, s.x)


class LocalAdaptive(NamedTuple):
    """The model and a second moment that never leaves its client."""

    x: Tensor
    v: Tensor


@dataclass(frozen=True)
class NaiveAdaptive(Algorithm[Differentiable, LocalAdaptive]):
    """Naive adaptive FedAvg (Algorithm 1 of the FAFED paper), which diverges by Theorem 1; do not use it.

    Line 8 is printed with √v_{t,i}; we use each client's own √v_{t,j}. 0/0 counts as 0.
    """

    eta: Schedule
    beta: Schedule = 0.9

    name = "naive-adaptive"
    accepts = Differentiable
    shared = ("x",)
    private = ("v",)
    cites = (CHEN_2020, WU_2023_FAFED)

    def __post_init__(self) -> None:
        positive(self, "eta")
        weight(self, "beta")

    def init(self, problem: Differentiable, x0: Tensor) -> LocalAdaptive:
        """v = 0."""
        return LocalAdaptive(x0, 0 * x0)

    def step(self, problem: Differentiable, s: LocalAdaptive, batch: Batch, t: int) -> LocalAdaptive:
        """Scale the step by the client's own second moment."""
        g = problem.grad(s.x, batch)  # line 5
        beta = at(self.beta, t)
        v = beta * s.v + (1 - beta) * g**2  # line 6
        return LocalAdaptive(problem.project(s.x - at(self.eta, t) * torch.nan_to_num(g / v.sqrt())), v)  # lines 8, 10


class Preconditioned(NamedTuple):
    """FAFED's model, gradient estimator, second moment, the client's own previous point, and the frozen A."""

    x: Tensor
    m: Tensor
    v: Tensor
    last: Tensor
    A: Tensor


@dataclass(frozen=True)
class FAFED(Algorithm[Differentiable, Preconditioned]):
    """FAFED (Wu et al. 2023, Algorithm 2): recursive momentum with one preconditioner A shared by all.

    The box averages v, rebuilds A, averages m and only then moves. So a step here first moves with the current m and
    A, then estimates, and the clients synchronise after the estimates at t = 0, q, 2q, … . A = √v̄ + ρ is frozen in
    between. The first move divides by A_0 too (Eq. 8; line 3 omits it). A client that skipped a round restarts at the
    broadcast. `norm=True` uses one scalar v from ‖∇f‖² (AdaGrad-Norm style). With `c` the momentum weight is
    α_{t+1} = cη_t², as in Theorem 2.
    """

    eta: Schedule
    alpha: Schedule = 0.1
    beta: Schedule = 0.9
    rho: float = 0.01
    c: float | None = None
    norm: bool = False

    name = "fafed"
    accepts = Differentiable
    shared = ("x", "m", "v")
    nonnegative = ("v",)
    private = ("last",)
    cites = (WU_2023_FAFED,)
    evaluations = 2

    def __post_init__(self) -> None:
        positive(self, "eta", "rho")
        weight(self, "beta")
        if self.c is None:
            weight(self, "alpha")
        else:
            positive(self, "c")

    def momentum(self, t: int) -> float:
        """Return α_t, at most 1."""
        return min(1.0, at(self.alpha, t) if self.c is None else self.c * at(self.eta, t - 1) ** 2)

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise after the first estimate (line 2), then as in line 9."""
        return t % q == 0

    def init(self, problem: Differentiable, x0: Tensor) -> Preconditioned:
        """Start at x0; v is a scalar in the norm version."""
        v = x0.new_zeros(1) if self.norm else 0 * x0
        return Preconditioned(x0, 0 * x0, v, x0, v)

    def rejoin(self, s: Preconditioned, t: int) -> Preconditioned:
        """Restart the correction from the broadcast."""
        return s._replace(last=s.x)

    def receive(self, s: Preconditioned, t: int) -> Preconditioned:
        """Rebuild A from the averaged v."""
        return s._replace(A=s.v.sqrt() + self.rho)  # line 10

    def step(self, problem: Differentiable, s: Preconditioned, batch: Batch, t: int) -> Preconditioned:
        """Move, then estimate."""
        if t == 0:
            g = problem.grad(s.x, batch)  # line 2
            return s._replace(m=g, v=self.square(g), last=s.x)
        x = problem.project(s.x - at(self.eta, t - 1) * s.m / s.A)  # lines 3, 12, 15
        g = problem.grad(x, batch.raw)  # line 6
        m = g + (1 - self.momentum(t)) * (s.m - problem.grad(s.last, batch.raw))  # lines 6, 7
        beta = at(self.beta, t)
        v = beta * s.v + (1 - beta) * self.square(problem.clipped(g))  # line 8
        return s._replace(x=x, m=problem.clipped(m), v=v, last=x)

    def square(self, g: Tensor) -> Tensor:
        """Return g², coordinate by coordinate, or ‖g‖² in the norm version."""
        return (g * g).sum(0, keepdim=True) if self.norm else g**2
