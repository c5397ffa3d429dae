"""Minimax methods: Local SGDA, its momentum version, CODA, CODA+, CODASCA, FMGDA, its adaptive version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms.references import DENG_2021, FMGDA_2022, GUO_2020, SHARMA_2022, WU_2023_FAFED, YUAN_2021
from nestfed.algorithms.server import ControlVariates
from nestfed.core import (
    Algorithm,
    Batch,
    NestfedError,
    Saddle,
    Schedule,
    Server,
    SolvableSaddle,
    at,
    at_least,
    positive,
    weight,
)


class Players(NamedTuple):
    """Both players."""

    theta: Tensor
    w: Tensor


@dataclass(frozen=True)
class LocalSGDA(Algorithm[Saddle, Players]):
    """Local SGDA (Deng & Mahdavi 2021): descent in θ and ascent in w, both gradients at the old point."""

    eta_theta: Schedule
    eta_w: Schedule

    name = "local-sgda"
    accepts = Saddle
    shared = ("theta", "w")
    point = "theta"
    points = ("theta", "w")
    family = "minimax"
    cites = (DENG_2021,)
    steps = ("eta_theta", "eta_w")
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual"}

    def __post_init__(self) -> None:
        positive(self, "eta_theta", "eta_w")

    def init(self, problem: Saddle, x0: Tensor) -> Players:
        """Start at θ0, w0."""
        return Players(x0, problem.w0)

    def step(self, problem: Saddle, s: Players, batch: Batch, t: int) -> Players:
        """θ ← θ − η_θ∇_θf; w ← w + η_w∇_wf."""
        g, h = problem.grads(s.theta, s.w, batch)
        return Players(
            problem.project(s.theta - at(self.eta_theta, t) * g), problem.project_dual(s.w + at(self.eta_w, t) * h)
        )


class PlayersMomentum(NamedTuple):
    """Both players and their directions."""

    theta: Tensor
    w: Tensor
    d_theta: Tensor
    d_w: Tensor


@dataclass(frozen=True)
class MomentumLocalSGDA(Algorithm[Saddle, PlayersMomentum]):
    """Momentum Local SGDA (Sharma et al. 2022): move along moving averages, then update them at the new point.

    Iteration 0 only estimates. The weight of the averages is aβ; the step sizes are aη.
    """

    eta_theta: Schedule
    eta_w: Schedule
    beta: Schedule = 0.9
    a: Schedule = 1.0

    name = "momentum-local-sgda"
    accepts = Saddle
    shared = ("theta", "w", "d_theta", "d_w")
    point = "theta"
    points = ("theta", "w")
    family = "minimax"
    cites = (SHARMA_2022,)
    steps = ("eta_theta", "eta_w")
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual", "d_w": "dual"}

    def __post_init__(self) -> None:
        positive(self, "eta_theta", "eta_w", "a", "beta")
        value = at(self.a, 1) * at(self.beta, 1)
        if not 0 < value <= 1:
            raise NestfedError(f"{self.name}: aβ is a weight and must be in (0, 1], not {value:g}.")

    def init(self, problem: Saddle, x0: Tensor) -> PlayersMomentum:
        """Start at θ0, w0."""
        return PlayersMomentum(x0, problem.w0, 0 * x0, 0 * problem.w0)

    def step(self, problem: Saddle, s: PlayersMomentum, batch: Batch, t: int) -> PlayersMomentum:
        """θ ← θ − aη_θd_θ; w ← w + aη_wd_w; d ← (1 − aβ)d + aβ∇f at the new point."""
        if t == 0:
            return s._replace(**dict(zip(("d_theta", "d_w"), problem.grads(s.theta, s.w, batch))))
        a = at(self.a, t - 1)  # the move of the previous iteration, whose gradient it uses
        theta = problem.project(s.theta - a * at(self.eta_theta, t - 1) * s.d_theta)
        w = problem.project_dual(s.w + a * at(self.eta_w, t - 1) * s.d_w)
        g, h = problem.grads(theta, w, batch)
        c = a * at(self.beta, t - 1)
        return PlayersMomentum(theta, w, (1 - c) * s.d_theta + c * g, (1 - c) * s.d_w + c * h)


class Staged(NamedTuple):
    """Both players, the stage's reference point, and the stage's number."""

    theta: Tensor
    w: Tensor
    ref: Tensor
    stage: Tensor


@dataclass(frozen=True)
class _Stages:
    """The hyper-parameters of CODA's stages: stage s has T0·3^s iterations with step η0/3^s."""

    eta: Schedule
    gamma: float = float("inf")
    T0: int = 1000

    def __post_init__(self) -> None:
        positive(self, "eta")
        at_least(self, 1, "T0")
        if self.gamma != float("inf"):
            positive(self, "gamma")

    @classmethod
    def usual(cls, lr: Schedule | None, *, rounds: int, q: int) -> dict[str, Any]:
        """Divide the step by three after a quarter of the rounds."""
        return {"T0": q * max(1, math.ceil(rounds / 4)), **({} if lr is None else {"eta": lr})}

    def stage(self, t: int) -> tuple[int, int]:
        """Return the stage of iteration t and its first iteration."""
        s, start = 0, 0
        while t >= start + self.T0 * 3**s:
            start += self.T0 * 3**s
            s += 1
        return s, start

    def step_size(self, t: int) -> float:
        """Return η_s."""
        return at(self.eta, t) / 3 ** self.stage(t)[0]

    def reference(self, theta: Tensor, ref: Tensor, stage: Tensor, t: int) -> dict[str, Tensor]:
        """Return the reference for iteration t: the stored one, or the broadcast θ if it belongs to another stage."""
        now = self.stage(t)[0]
        return {"ref": torch.where(stage == now, ref, theta), "stage": torch.full_like(stage, now)}

    def begins(self, t: int) -> bool:
        """Return whether t is the first iteration of a stage after the first."""
        s, start = self.stage(t)
        return s > 0 and t == start

    def check_stages(self, q: int) -> None:
        """Reject stages that end inside a round, because their result would not be an average."""
        if self.T0 % q:
            raise NestfedError(f"{getattr(self, 'name', '')}: T0 = {self.T0} must be a multiple of q = {q}.")


@dataclass(frozen=True)
class CODAPlus(_Stages, Algorithm[Saddle, Staged]):
    """CODA+ (Yuan et al. 2021): stages of proximal local SGDA; each stage divides the step size by three.

    θ ← θ − η_s(∇_θF + (θ − θ_ref)/γ), w ← w + η_s∇_wF; θ_ref is the averaged θ at the start of the stage. A client
    that was absent then uses the θ that it receives on its return.
    """

    name = "coda-plus"
    accepts = Saddle
    shared = ("theta", "w")
    private = ("ref", "stage")
    point = "theta"
    points: ClassVar[tuple[str, ...]] = ("theta", "w")
    family = "minimax"
    cites = (YUAN_2021,)
    aliases: ClassVar[tuple[str, ...]] = ("coda+",)
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual"}

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise every q iterations."""
        self.check_stages(q)
        return (t + 1) % q == 0

    def init(self, problem: Saddle, x0: Tensor) -> Staged:
        """Start at θ0, w0."""
        return Staged(x0, problem.w0, x0, x0.new_zeros(()))

    def receive(self, s: Staged, t: int) -> Staged:
        """Update the reference at the start of a stage."""
        return s._replace(**self.reference(s.theta, s.ref, s.stage, t))

    def step(self, problem: Saddle, s: Staged, batch: Batch, t: int) -> Staged:
        """One proximal step of both players."""
        eta = self.step_size(t)
        g, h = problem.grads(s.theta, s.w, batch)
        theta = problem.project(s.theta - eta * (g + (s.theta - s.ref) / self.gamma))
        return s._replace(theta=theta, w=problem.project_dual(s.w + eta * h))


@dataclass(frozen=True)
class CODA(CODAPlus):
    """CODA (Guo et al. 2020): CODA+ that also re-estimates w at the start of every stage.

    The first iteration of a stage sets w to the best one for the client's batch, and an extra synchronisation
    averages it. This batch may be larger: give the clients a batch size that depends on t.
    """

    name = "coda"
    accepts = SolvableSaddle
    points = ("theta",)  # a re-estimated w is not a step, so another server must not move it
    cites = (GUO_2020,)
    aliases = ()

    def ends_round(self, t: int, q: int) -> bool:
        """Also synchronise after the re-estimation of w."""
        return super().ends_round(t, q) or self.begins(t)

    def step(self, problem: Saddle, s: Staged, batch: Batch, t: int) -> Staged:
        """Re-estimate w at the start of a stage; otherwise CODA+'s step."""
        if self.begins(t) and isinstance(problem, SolvableSaddle):
            return s._replace(w=problem.project_dual(problem.best_dual(s.theta, batch)))
        return super().step(problem, s, batch, t)


class StagedControlled(NamedTuple):
    """Both players with control variates c (the server's), own (the client's) and the round's gradient sums."""

    theta: Tensor
    w: Tensor
    c_theta: Tensor
    c_w: Tensor
    ref: Tensor
    stage: Tensor
    own_theta: Tensor
    own_w: Tensor
    sum_theta: Tensor
    sum_w: Tensor
    steps: Tensor


@dataclass(frozen=True)
class CODASCA(_Stages, Algorithm[Saddle, StagedControlled]):
    """CODASCA (Yuan et al. 2021): CODA+ with control variates for both players.

    Directions are g − c_k + c. After a round c_k is the mean of the client's gradients in the round, and c the mean of
    all c_k. As in SCAFFOLD, a client uploads c + c_k⁺ − c_k, and a client that skips a round keeps its c_k.
    """

    eta_g: float = 1.0

    name = "codasca"
    accepts = Saddle
    shared = ("theta", "w", "c_theta", "c_w")
    private = ("ref", "stage", "own_theta", "own_w")
    point = "theta"
    points = ("theta", "w")
    family = "minimax"
    cites = (YUAN_2021,)
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual", "c_w": "dual"}

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta_g")

    @property
    def server(self) -> Server:
        """Move both players by η_g along the mean; c stays the mean of all c_k."""
        return ControlVariates(moved=("theta", "w"), variates=("c_theta", "c_w"), eta_g=self.eta_g)

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise every q iterations."""
        self.check_stages(q)
        return (t + 1) % q == 0

    def init(self, problem: Saddle, x0: Tensor) -> StagedControlled:
        """Start at θ0, w0 without correction."""
        z, o = 0 * x0, 0 * problem.w0
        return StagedControlled(x0, problem.w0, z, o, x0, x0.new_zeros(()), z, o, z, o, x0.new_zeros(()))

    def receive(self, s: StagedControlled, t: int) -> StagedControlled:
        """Update the reference at the start of a stage; reset the round's sums."""
        held = self.reference(s.theta, s.ref, s.stage, t)
        return s._replace(**held, sum_theta=0 * s.own_theta, sum_w=0 * s.own_w, steps=torch.zeros_like(s.steps))

    def step(self, problem: Saddle, s: StagedControlled, batch: Batch, t: int) -> StagedControlled:
        """One corrected proximal step of both players."""
        eta = self.step_size(t)
        g, h = problem.grads(s.theta, s.w, batch)
        direction = g - s.own_theta + s.c_theta + (s.theta - s.ref) / self.gamma
        return s._replace(
            theta=problem.project(s.theta - eta * direction),
            w=problem.project_dual(s.w + eta * (h - s.own_w + s.c_w)),
            sum_theta=s.sum_theta + g,
            sum_w=s.sum_w + h,
            steps=s.steps + 1,
        )

    def send(self, s: StagedControlled, t: int) -> StagedControlled:
        """Update c_k and upload its change."""
        own_theta, own_w = s.sum_theta / s.steps, s.sum_w / s.steps
        return s._replace(
            own_theta=own_theta,
            own_w=own_w,
            c_theta=s.c_theta + own_theta - s.own_theta,
            c_w=s.c_w + own_w - s.own_w,
        )


class RecursivePlayers(NamedTuple):
    """Both players, their gradient estimators, and the client's own previous point."""

    theta: Tensor
    w: Tensor
    u: Tensor
    v: Tensor
    last_theta: Tensor
    last_w: Tensor


@dataclass(frozen=True)
class _Recursive:
    """The hyper-parameters of FMGDA: steps ĉη_t and cη_t, and the weights of both recursions."""

    eta: Schedule = 1.0
    c_hat: float = 0.01
    c: float = 0.01
    alpha: Schedule = 0.9
    beta: Schedule = 0.9

    def __post_init__(self) -> None:
        positive(self, "eta", "c_hat", "c")
        weight(self, "alpha", "beta")

    @classmethod
    def usual(cls, lr: Schedule | None, *, rounds: int, q: int) -> dict[str, Any]:
        """Return ĉ and c; a schedule becomes η, because ĉ and c are numbers."""
        if callable(lr):
            return {"eta": lr, "c_hat": 1.0, "c": 1.0}
        return {} if lr is None else {"c_hat": lr, "c": lr}


@dataclass(frozen=True)
class FMGDA(_Recursive, Algorithm[Saddle, RecursivePlayers]):
    """FMGDA (Algorithm 1 of the deep AUC paper): recursive momentum for both players.

    The paper's step sizes are ĉη_t for θ (`c_hat`·`eta`) and cη_t for w (`c`·`eta`). Both points of a correction use
    the same batch. A client that skipped a round restarts at the broadcast.
    """

    name = "fmgda"
    accepts = Saddle
    shared = ("theta", "w", "u", "v")
    private = ("last_theta", "last_w")
    point = "theta"
    points = ("theta", "w")
    family = "minimax"
    cites = (FMGDA_2022,)
    aliases = ("fmsgda",)
    steps = ("c_hat", "c")
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual", "v": "dual"}
    evaluations = 2

    def init(self, problem: Saddle, x0: Tensor) -> RecursivePlayers:
        """Start at θ0, w0."""
        return RecursivePlayers(x0, problem.w0, 0 * x0, 0 * problem.w0, x0, problem.w0)

    def rejoin(self, s: RecursivePlayers, t: int) -> RecursivePlayers:
        """Restart the corrections from the broadcast."""
        return s._replace(last_theta=s.theta, last_w=s.w)

    def step(self, problem: Saddle, s: RecursivePlayers, batch: Batch, t: int) -> RecursivePlayers:
        """Correct both estimators with the same batch at the previous point, then move both players."""
        u, v = problem.grads(s.theta, s.w, batch.raw)  # line 2
        if t > 0:
            g, h = problem.grads(s.last_theta, s.last_w, batch.raw)
            u = u + (1 - at(self.alpha, t)) * (s.u - g)  # line 15
            v = v + (1 - at(self.beta, t)) * (s.v - h)  # line 16
        u = problem.clipped(u)
        theta = problem.project(s.theta - self.c_hat * at(self.eta, t) * u)  # lines 8, 11
        w = problem.project_dual(s.w + self.c * at(self.eta, t) * v)  # lines 9, 12
        return RecursivePlayers(theta, w, u, v, s.theta, s.w)


class AdaptivePlayers(NamedTuple):
    """Both players, their gradient estimators, second moments, the client's own previous point, and the frozen A's."""

    theta: Tensor
    w: Tensor
    u: Tensor
    v: Tensor
    square_theta: Tensor
    square_w: Tensor
    last_theta: Tensor
    last_w: Tensor
    A_theta: Tensor
    A_w: Tensor


@dataclass(frozen=True)
class AdaFMGDA(_Recursive, Algorithm[Saddle, AdaptivePlayers]):
    """Ada-FMGDA: FMGDA's estimators with FAFED's preconditioner for each player, shared by all, and FAFED's order.

    θ ← θ − ĉηu/A_θ and w ← w + cηv/A_w, then FMGDA's u and v at the new point; iteration 0 only estimates. Each player
    has its own second moment ρ₂·(·) + (1−ρ₂)g² of its plain gradient g, and A is the root of its mean plus ρ, frozen
    between synchronisations, which follow t = 0, q, 2q, … . A client that skipped a round restarts at the broadcast.
    """

    rho2: Schedule = 0.9
    rho: float = 0.01

    name = "ada-fmgda"
    accepts = Saddle
    shared = ("theta", "w", "u", "v", "square_theta", "square_w")
    nonnegative = ("square_theta", "square_w")
    private = ("last_theta", "last_w")
    point = "theta"
    points = ("theta", "w")
    family = "minimax"
    cites = (FMGDA_2022, WU_2023_FAFED)
    steps = ("c_hat", "c")
    sizes: ClassVar[Mapping[str, str]] = {"w": "dual", "v": "dual", "square_w": "dual"}
    evaluations = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "rho")
        weight(self, "rho2")

    def ends_round(self, t: int, q: int) -> bool:
        """Synchronise after the first estimate, then every q iterations."""
        return t % q == 0

    def init(self, problem: Saddle, x0: Tensor) -> AdaptivePlayers:
        """Start at θ0, w0."""
        w0, z, o = problem.w0, 0 * x0, 0 * problem.w0
        return AdaptivePlayers(x0, w0, z, o, z, o, x0, w0, z, o)

    def rejoin(self, s: AdaptivePlayers, t: int) -> AdaptivePlayers:
        """Restart the corrections from the broadcast."""
        return s._replace(last_theta=s.theta, last_w=s.w)

    def receive(self, s: AdaptivePlayers, t: int) -> AdaptivePlayers:
        """Rebuild both A's from the averaged second moments."""
        return s._replace(A_theta=s.square_theta.sqrt() + self.rho, A_w=s.square_w.sqrt() + self.rho)

    def step(self, problem: Saddle, s: AdaptivePlayers, batch: Batch, t: int) -> AdaptivePlayers:
        """Move both players, then estimate at the new point."""
        if t == 0:
            u, v = problem.grads(s.theta, s.w, batch)
            return s._replace(u=u, v=v, square_theta=self.square(u), square_w=self.square(v))
        eta = at(self.eta, t - 1)
        theta = problem.project(s.theta - self.c_hat * eta * s.u / s.A_theta)
        w = problem.project_dual(s.w + self.c * eta * s.v / s.A_w)
        g, h = problem.grads(theta, w, batch.raw)
        before_g, before_h = problem.grads(s.last_theta, s.last_w, batch.raw)
        rho2 = at(self.rho2, t)
        return s._replace(
            theta=theta,
            w=w,
            u=problem.clipped(g + (1 - at(self.alpha, t)) * (s.u - before_g)),
            v=h + (1 - at(self.beta, t)) * (s.v - before_h),
            square_theta=rho2 * s.square_theta + (1 - rho2) * self.square(problem.clipped(g)),
            square_w=rho2 * s.square_w + (1 - rho2) * self.square(h),
            last_theta=theta,
            last_w=w,
        )

    def square(self, g: Tensor) -> Tensor:
        """Return g², coordinate by coordinate."""
        return g**2
