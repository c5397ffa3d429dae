"""Plain averaging and its corrections: FedAvg, FedProx, FedNova, SCAFFOLD, FedDyn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms.references import ACAR_2021, KARIMIREDDY_2020, LI_2020, MCMAHAN_2017, WANG_2020
from nestfed.algorithms.server import ControlVariates, Dynamic, Normalized
from nestfed.core import Algorithm, Batch, Differentiable, Schedule, Server, at, at_least, positive


class Point(NamedTuple):
    """The model."""

    x: Tensor


@dataclass(frozen=True)
class FedAvg(Algorithm[Differentiable, Point]):
    """FedAvg (McMahan et al. 2017): q local gradient steps, then the mean.

    On a conditional or compositional problem, the gradient is the problem's biased estimator.
    """

    eta: Schedule

    name = "fedavg"
    accepts = Differentiable
    shared = ("x",)
    cites = (MCMAHAN_2017,)

    def __post_init__(self) -> None:
        positive(self, "eta")

    def init(self, problem: Differentiable, x0: Tensor) -> Point:
        """Start at x0."""
        return Point(x0)

    def step(self, problem: Differentiable, s: Point, batch: Batch, t: int) -> Point:
        """x ← x − η∇f(x; B_t)."""
        return Point(problem.project(s.x - at(self.eta, t) * problem.grad(s.x, batch)))


class Anchored(NamedTuple):
    """The model and its value at the start of the round."""

    x: Tensor
    start: Tensor


@dataclass(frozen=True)
class FedProx(Algorithm[Differentiable, Anchored]):
    """FedProx (Li et al. 2020): FedAvg with a pull μ(x − x_start) towards the round's starting point."""

    eta: Schedule
    mu: float = 0.01

    name = "fedprox"
    accepts = Differentiable
    shared = ("x",)
    cites = (LI_2020,)

    def __post_init__(self) -> None:
        positive(self, "eta")
        at_least(self, 0, "mu")

    def init(self, problem: Differentiable, x0: Tensor) -> Anchored:
        """Start at x0."""
        return Anchored(x0, x0)

    def receive(self, s: Anchored, t: int) -> Anchored:
        """Store the starting point of the round."""
        return s._replace(start=s.x)

    def step(self, problem: Differentiable, s: Anchored, batch: Batch, t: int) -> Anchored:
        """x ← x − η(∇f(x; B_t) + μ(x − x_start))."""
        direction = problem.grad(s.x, batch) + self.mu * (s.x - s.start)
        return s._replace(x=problem.project(s.x - at(self.eta, t) * direction))


class Travelled(NamedTuple):
    """The model, the sum of the round's step sizes, and the model at the start of the round."""

    x: Tensor
    length: Tensor
    start: Tensor


@dataclass(frozen=True)
class FedNova(Algorithm[Differentiable, Travelled]):
    """FedNova (Wang et al. 2020): FedAvg for clients that take different numbers of steps τ_n.

    A client uploads x − d_n with d_n = (x − y_n)/(ητ_n), and ητ_n, the sum of its step sizes. The server moves by
    x ← x − mean(ητ_n)·mean(d_n), so a fast client has no more weight than a slow one. Equal τ_n: FedAvg.
    """

    eta: Schedule

    name = "fednova"
    accepts = Differentiable
    shared = ("x", "length")
    nonnegative = ("length",)
    cites = (WANG_2020,)
    sizes: ClassVar[Mapping[str, str]] = {"length": "one number"}

    def __post_init__(self) -> None:
        positive(self, "eta")

    @property
    def server(self) -> Server:
        """Move along the mean direction by the mean length."""
        return Normalized()

    def init(self, problem: Differentiable, x0: Tensor) -> Travelled:
        """Start at x0."""
        return Travelled(x0, x0.new_zeros(1), x0)

    def receive(self, s: Travelled, t: int) -> Travelled:
        """Store the starting point of the round."""
        return s._replace(length=torch.zeros_like(s.length), start=s.x)

    def step(self, problem: Differentiable, s: Travelled, batch: Batch, t: int) -> Travelled:
        """y ← y − η∇f(y; B_t)."""
        eta = at(self.eta, t)
        return s._replace(x=problem.project(s.x - eta * problem.grad(s.x, batch)), length=s.length + eta)

    def send(self, s: Travelled, t: int) -> Travelled:
        """Upload x − d_n."""
        return s._replace(x=s.start - (s.start - s.x) / s.length)


class Controlled(NamedTuple):
    """The model with SCAFFOLD's control variates: the server's c, the client's own."""

    x: Tensor
    c: Tensor
    own: Tensor
    start: Tensor
    length: Tensor


@dataclass(frozen=True)
class Scaffold(Algorithm[Differentiable, Controlled]):
    """SCAFFOLD (Karimireddy et al. 2020), option II: each client corrects its drift by c − c_n.

    y ← y − η(∇f(y) − c_n + c); after a round c_n⁺ = c_n − c + (x − y)/(qη), where qη is the sum of the round's
    step sizes. A client uploads c + c_n⁺ − c_n instead of c, which is all that the server's rule
    c ← c + (|S|/N)·mean(c_n⁺ − c_n) needs. A client that skips a round keeps its c_n.
    """

    eta: Schedule
    eta_g: float = 1.0

    name = "scaffold"
    accepts = Differentiable
    shared = ("x", "c")
    private = ("own",)
    cites = (KARIMIREDDY_2020,)

    def __post_init__(self) -> None:
        positive(self, "eta", "eta_g")

    @property
    def server(self) -> Server:
        """Move by η_g along the mean; c stays the mean of all c_n."""
        return ControlVariates(moved=("x",), variates=("c",), eta_g=self.eta_g)

    def init(self, problem: Differentiable, x0: Tensor) -> Controlled:
        """Start at x0 without correction."""
        zero = 0 * x0
        return Controlled(x0, zero, zero, x0, x0.new_zeros(()))

    def receive(self, s: Controlled, t: int) -> Controlled:
        """Store the starting point of the round."""
        return s._replace(start=s.x, length=torch.zeros_like(s.length))

    def step(self, problem: Differentiable, s: Controlled, batch: Batch, t: int) -> Controlled:
        """y ← y − η(∇f(y; B_t) − c_n + c)."""
        eta = at(self.eta, t)
        x = problem.project(s.x - eta * (problem.grad(s.x, batch) - s.own + s.c))
        return s._replace(x=x, length=s.length + eta)

    def send(self, s: Controlled, t: int) -> Controlled:
        """Update c_n and upload its change."""
        own = s.own - s.c + (s.start - s.x) / s.length
        return s._replace(own=own, c=s.c + own - s.own)


class Leaning(NamedTuple):
    """The model, the client's own linear term, and the model at the start of the round."""

    x: Tensor
    own: Tensor
    start: Tensor


@dataclass(frozen=True)
class FedDyn(Algorithm[Differentiable, Leaning]):
    """FedDyn (Acar et al. 2021): every client's loss gets a linear and a quadratic term that adapt to the others.

    y ← y − η(∇f(y) − λ_n + α(y − x)); after a round λ_n ← λ_n − α(y − x), h ← h − (α/N)·Σ_{n∈S}(y_n − x) and
    x ← mean(y) − h/α. If x settles, it is the minimiser of the clients' mean, for every q.
    """

    eta: Schedule
    alpha: float = 0.1

    name = "feddyn"
    accepts = Differentiable
    shared = ("x",)
    private = ("own",)
    cites = (ACAR_2021,)

    def __post_init__(self) -> None:
        positive(self, "eta", "alpha")

    @property
    def server(self) -> Server:
        """Correct the mean by h/α."""
        return Dynamic(self.alpha)

    def init(self, problem: Differentiable, x0: Tensor) -> Leaning:
        """Start at x0 with λ_n = 0."""
        return Leaning(x0, 0 * x0, x0)

    def receive(self, s: Leaning, t: int) -> Leaning:
        """Store the starting point of the round."""
        return s._replace(start=s.x)

    def step(self, problem: Differentiable, s: Leaning, batch: Batch, t: int) -> Leaning:
        """y ← y − η(∇f(y; B_t) − λ_n + α(y − x))."""
        direction = problem.grad(s.x, batch) - s.own + self.alpha * (s.x - s.start)
        return s._replace(x=problem.project(s.x - at(self.eta, t) * direction))

    def send(self, s: Leaning, t: int) -> Leaning:
        """λ_n ← λ_n − α(y − x)."""
        return s._replace(own=s.own - self.alpha * (s.x - s.start))
