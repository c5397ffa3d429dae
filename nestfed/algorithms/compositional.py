"""Compositional optimization: Local-BSGD, Local-SCGD, Local-SCGDM, Local-MOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms.average import Point
from nestfed.algorithms.references import GAO_2022, HUANG_2021, WANG_2017, WANG_2021
from nestfed.core import Algorithm, Batch, Composed, NestfedError, Schedule, at, first, positive, weight


@dataclass(frozen=True)
class LocalBSGD(Algorithm[Composed, Point]):
    """Local-BSGD, also known as Local-MAML: the inner value comes from the current batch only."""

    eta: Schedule

    name = "local-bsgd"
    accepts = Composed
    shared = ("x",)
    family = "compositional"
    cites = (HUANG_2021,)
    aliases = ("local-maml",)

    def __post_init__(self) -> None:
        positive(self, "eta")

    def init(self, problem: Composed, x0: Tensor) -> Point:
        """Start at x0."""
        return Point(x0)

    def step(self, problem: Composed, s: Point, batch: Batch, t: int) -> Point:
        """x ← x − η∇g(x; ξ)ᵀ∇f(g(x; ξ); ζ)."""
        value, pullback = problem.inner(s.x, batch)
        return Point(problem.project(s.x - at(self.eta, t) * pullback(problem.outer_grad(value, batch))))


class Tracked(NamedTuple):
    """The model and the moving average of the inner value."""

    x: Tensor
    u: Tensor


@dataclass(frozen=True)
class LocalSCGD(Algorithm[Composed, Tracked]):
    """Local-SCGD (Wang et al. 2017, federated): the inner value is a moving average, shared by all clients.

    With several tasks in a batch, each has u_i = (1−γ)u + γg_i(x), and the new u is their mean.
    """

    eta: Schedule
    gamma: Schedule = 0.9

    name = "local-scgd"
    accepts = Composed
    shared = ("x", "u")
    family = "compositional"
    cites: ClassVar[tuple[str, ...]] = (WANG_2017, GAO_2022)
    sizes: ClassVar[Mapping[str, str]] = {"u": "inner value"}

    def __post_init__(self) -> None:
        positive(self, "eta")
        weight(self, "gamma")

    def init(self, problem: Composed, x0: Tensor) -> Tracked:
        """Start at x0; u takes its first value in iteration 0."""
        return Tracked(x0, x0.new_zeros(problem.inner_dim))

    def step(self, problem: Composed, s: Tracked, batch: Batch, t: int) -> Tracked:
        """Track the inner value, then move along the outer gradient at it."""
        value, pullback = problem.inner(s.x, batch)
        c = first(self.gamma, t)
        u = (1 - c) * s.u + c * value
        z = pullback(problem.outer_grad(u, batch))
        return Tracked(problem.project(s.x - at(self.eta, t) * z), u.mean(0))


class SCGD(LocalSCGD):
    """SCGD (Wang, Fang & Liu 2017): Local-SCGD with one client."""

    name = "scgd"
    single = True
    cites = (WANG_2017,)


class TrackedMomentum(NamedTuple):
    """The model, the tracked inner value and the momentum."""

    x: Tensor
    u: Tensor
    m: Tensor


@dataclass(frozen=True)
class LocalSCGDM(Algorithm[Composed, TrackedMomentum]):
    """Local-SCGDM (Gao, Li & Huang 2022, Algorithm 1): Local-SCGD with momentum.

    ξ_t is used in g and ∇g, ζ_t in ∇f; z uses the new u (lines 4 and 8; Eq. 2 prints the old one).
    """

    eta: Schedule = 1.0
    alpha: Schedule = 0.9
    beta: Schedule = 0.01
    gamma: Schedule = 0.9

    name = "local-scgdm"
    accepts = Composed
    shared = ("x", "u", "m")
    family = "compositional"
    cites = (GAO_2022,)
    steps = ("beta",)
    sizes: ClassVar[Mapping[str, str]] = {"u": "inner value"}

    def __post_init__(self) -> None:
        _check_weights(self)

    def init(self, problem: Composed, x0: Tensor) -> TrackedMomentum:
        """Start at x0; u and m take their first values in iteration 0."""
        return TrackedMomentum(x0, x0.new_zeros(problem.inner_dim), 0 * x0)

    def step(self, problem: Composed, s: TrackedMomentum, batch: Batch, t: int) -> TrackedMomentum:
        """Track the inner value, average the direction over time, move."""
        value, pullback = problem.inner(s.x, batch)
        eta = at(self.eta, t)
        c, a = first(at(self.gamma, t) * eta, t), first(at(self.alpha, t) * eta, t)
        u = (1 - c) * s.u + c * value  # lines 3, 7
        z = pullback(problem.outer_grad(u, batch))  # lines 4, 8
        m = (1 - a) * s.m + a * z  # lines 5, 9
        return TrackedMomentum(problem.project(s.x - at(self.beta, t) * eta * m), u.mean(0), m)  # line 11


def _check_weights(method: LocalSCGDM | LocalSCGDMTasks) -> None:
    positive(method, "eta", "alpha", "beta", "gamma")
    for name, schedule in (("αη", method.alpha), ("γη", method.gamma)):
        value = at(schedule, 1) * at(method.eta, 1)
        if not 0 < value <= 1:
            raise NestfedError(f"{method.name}: {name} is a weight and must be in (0, 1], not {value:g}.")


class Tasks(NamedTuple):
    """The model and, on this client only, one inner value per task; `met` marks the tasks sampled so far."""

    x: Tensor
    u: Tensor
    met: Tensor


def tracking_weight(met: Tensor, rows: Tensor, c: float) -> Tensor:
    """Return the weight of the new values of these rows: 1 the first time, then c."""
    # c as a tensor, because torch.where turns two Python numbers into float32.
    return torch.where(met[rows] > 0, torch.full_like(met[rows], c), 1.0)


def replaced(u: Tensor, met: Tensor, rows: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the table with new rows, and `met` with a mark on them."""
    table = u.scatter(0, rows.unsqueeze(-1).expand_as(new), new)
    return table, met.scatter(0, rows, torch.ones_like(rows, dtype=met.dtype))


def _track(u: Tensor, met: Tensor, rows: Tensor, value: Tensor, c: float) -> tuple[Tensor, Tensor, Tensor]:
    """Update the inner values of the sampled tasks (weight 1 the first time); return them, the table and `met`."""
    w = tracking_weight(met, rows, c).unsqueeze(-1)
    new = (1 - w) * u[rows] + w * value
    return new, *replaced(u, met, rows, new)


@dataclass(frozen=True)
class LocalMOML(Algorithm[Composed, Tasks]):
    """Local-MOML (Wang et al. 2021): one inner state per task, kept on its client and updated when sampled."""

    eta: Schedule
    beta: Schedule = 0.7

    name = "local-moml"
    accepts = Composed
    shared = ("x",)
    private = ("u", "met")
    family = "compositional"
    cites = (WANG_2021,)

    def __post_init__(self) -> None:
        positive(self, "eta")
        weight(self, "beta")

    def init(self, problem: Composed, x0: Tensor) -> Tasks:
        """Start at x0 with no task met."""
        return Tasks(x0, x0.new_zeros(problem.tasks, problem.inner_dim), x0.new_zeros(problem.tasks))

    def step(self, problem: Composed, s: Tasks, batch: Batch, t: int) -> Tasks:
        """u_i ← (1−β)u_i + βg_i(x); x ← x − η·mean_i ∇g_i(x)ᵀ∇f_i(u_i)."""
        value, pullback = problem.inner(s.x, batch)
        u, table, met = _track(s.u, s.met, problem.which(batch), value, at(self.beta, t))
        z = pullback(problem.outer_grad(u, batch))
        return Tasks(problem.project(s.x - at(self.eta, t) * z), table, met)


class TasksMomentum(NamedTuple):
    """The model and momentum, and on this client only one inner value per task."""

    x: Tensor
    m: Tensor
    u: Tensor
    met: Tensor


@dataclass(frozen=True)
class LocalSCGDMTasks(Algorithm[Composed, TasksMomentum]):
    """Local-SCGDM as its sine-wave experiment ran it: one inner state per task, kept on its client."""

    eta: Schedule = 1.0
    alpha: Schedule = 0.8
    beta: Schedule = 0.01
    gamma: Schedule = 0.7

    name = "local-scgdm-tasks"
    accepts = Composed
    shared = ("x", "m")
    private = ("u", "met")
    family = "compositional"
    cites = (GAO_2022,)
    steps = ("beta",)

    def __post_init__(self) -> None:
        _check_weights(self)

    def init(self, problem: Composed, x0: Tensor) -> TasksMomentum:
        """Start at x0 with no task met."""
        return TasksMomentum(x0, 0 * x0, x0.new_zeros(problem.tasks, problem.inner_dim), x0.new_zeros(problem.tasks))

    def step(self, problem: Composed, s: TasksMomentum, batch: Batch, t: int) -> TasksMomentum:
        """Local-SCGDM's step with u_i instead of u."""
        value, pullback = problem.inner(s.x, batch)
        eta = at(self.eta, t)
        u, table, met = _track(s.u, s.met, problem.which(batch), value, at(self.gamma, t) * eta)  # lines 3, 7
        z = pullback(problem.outer_grad(u, batch))  # lines 4, 8
        a = first(at(self.alpha, t) * eta, t)
        m = (1 - a) * s.m + a * z  # lines 5, 9
        return TasksMomentum(problem.project(s.x - at(self.beta, t) * eta * m), m, table, met)  # line 11
