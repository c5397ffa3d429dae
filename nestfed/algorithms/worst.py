"""The worst client: objectives over the clients' losses, such as the largest. Clients weight their moves, the server says how."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms.references import (
    LI_2020_FAIR,
    LI_2021_TILTED,
    ROCKAFELLAR_2000,
)
from nestfed.core import Algorithm, Batch, Differentiable, Schedule, at, at_least, one_of, positive, weight, whole
from nestfed.problems.agnostic import MOHRI_2019
from nestfed.problems.base import Simplex


class Weighted(NamedTuple):
    """The weighted point, the client's own path from the broadcast, its weight and loss; what the server says of losses."""

    x: Tensor
    y: Tensor
    start: Tensor
    weight: Tensor
    reached: Tensor
    """What the client reached alone, and 1 if that is known."""
    loss: Tensor
    """The contribution: f_n at the round's broadcast, 1 if it is known, and with k > 0 its share rows_n/(rows_n + k)."""
    level: Tensor
    """A row per client: the number that its weight follows from, 1 from the first exchange on, and with k > 0 f̄."""
    fresh: Tensor


@dataclass(frozen=True)
class _OverClients(Algorithm[Differentiable, Weighted]):
    """A function of the clients' losses f_n: y_n takes FedAvg's steps from x; x ← x + mean w_n(y_n − x).

    f_n is the loss at the broadcast on the batch of the round's first iteration, w_n fixed during the round. The losses
    at x0 are exchanged before round 1. With `alone`, every client first takes that many steps by itself, f_n* is its loss
    then, and f_n − f_n* stands for f_n from there on; a client without f_n* has the weight 1, and its loss does not count.

    With `k`, weights follow from (rows_n f_n + k f̄)/(rows_n + k), f̄ the mean over clients, in place of f_n, so that a
    client of few rows, whose loss is noisy, does not rule. A client knows f̄ of the last round. k → ∞ gives equal weights.
    """

    eta: Schedule
    alone: int = field(default=0, kw_only=True)
    k: float = field(default=0.0, kw_only=True)

    accepts = Differentiable
    shared = ("x",)
    private = ("reached",)
    gathered: ClassVar[Mapping[str, str]] = {"loss": "level"}
    weighs = True
    family = "worst client"

    def __post_init__(self) -> None:
        positive(self, "eta")
        whole(f"{self.name}: alone", self.alone, 0)
        at_least(self, 0, "k")

    @property
    def counts_rows(self) -> bool:  # type: ignore[override]  # only with k
        """Whether clients must count their rows."""
        return self.k > 0

    @abstractmethod
    def weigh(self, f: Tensor, level: Tensor, clients: int) -> Tensor:
        """Return w_n from f_n and the server's number for this client."""

    @abstractmethod
    def answer(self, f: Tensor, ns: Tensor, level: Tensor | None, clients: int) -> Tensor:
        """Return the server's next numbers, one for all clients or one for each.

        - `f`: the losses of the clients `ns`; `level`: the last numbers, None before round 1.
        """

    def init(self, problem: Differentiable, x0: Tensor) -> Weighted:
        """Start at x0."""
        none = x0.new_zeros(3 if self.k else 2)
        return Weighted(x0, x0, x0, x0.new_ones(()), x0.new_zeros(2), none, none, x0.new_zeros(0))

    def receive(self, s: Weighted, t: int) -> Weighted:
        """Start from the broadcast."""
        return s._replace(y=s.x, start=s.x, weight=torch.ones_like(s.weight), loss=torch.zeros_like(s.loss))

    def step(self, problem: Differentiable, s: Weighted, batch: Batch, t: int) -> Weighted:
        """Before round 1 find f_n* and f_n(x0); then y ← y − η∇f(y; B_t), x ← x_start + w(y − x_start)."""
        if t == self.alone:
            f, _ = problem.value_and_grad(s.start, batch)
            best = problem.value_and_grad(s.y, batch)[0] if self.alone else torch.zeros_like(f)
            one = torch.ones_like(f)
            return s._replace(reached=torch.stack([best, one]), loss=self._contribution(f - best, one, batch))
        if t > self.alone and batch.begins:
            f, gradient = problem.value_and_grad(s.y, batch)
            f, known = f - s.reached[0], s.reached[1] if self.alone else torch.ones_like(f)
            number, begun, *mean = s.level.index_select(0, batch.client[None])[0]
            shrunk = mean[0] + self._share(f, batch) * (f - mean[0]) if self.k else f
            w = torch.where(known * begun > 0, self.weigh(shrunk, number, len(s.level)), s.weight)
            s = s._replace(weight=w, loss=known * self._contribution(f, known, batch))
        else:
            gradient = problem.grad(s.y, batch)
        y = problem.project(s.y - at(self.eta, t) * gradient)
        return s._replace(y=y) if t < self.alone else s._replace(y=y, x=s.start + s.weight * (y - s.start))

    def fill(self, field: str, table: Tensor, ns: Sequence[int], rows: Tensor) -> Tensor:
        """Return the server's numbers, from the losses of the clients that answered."""
        known = rows[:, 1] > 0
        if not bool(known.any()):
            return table
        who = torch.tensor(ns, device=rows.device)[known]
        level = table[:, 0] if bool(table[0, 1] > 0) else None
        f, mean = rows[known, 0], rows[known, 0].mean()
        shrunk = mean + rows[known, 2].clamp(0, 1) * (f - mean) if self.k else f
        number = self.answer(shrunk, who, level, len(table)).expand(len(table))
        return torch.stack([number, torch.ones_like(number), *[mean.expand(len(table))] * (self.k > 0)], 1)

    def _share(self, f: Tensor, batch: Batch) -> Tensor:
        """Return rows_n/(rows_n + k)."""
        rows = batch.rows.to(f.dtype)
        return rows / (rows + self.k)

    def _contribution(self, f: Tensor, known: Tensor, batch: Batch) -> Tensor:
        return torch.stack([f, known, *[self._share(f, batch)] * (self.k > 0)])

    def ends_round(self, t: int, q: int) -> bool:
        """Exchange the losses after t = alone; synchronise q iterations later, and so on."""
        return t >= self.alone and (t - self.alone) % q == 0

    def restarts(self, t: int, q: int) -> bool:
        """Return whether losses are found at iteration t: at the end of the first round, and at the start of all others."""
        return t == self.alone or (t > self.alone and (t - self.alone - 1) % q == 0)


def _log_mean(a: Tensor) -> Tensor:
    """Return log mean exp(a), with one constant for all of them, so that nothing overflows."""
    return torch.logsumexp(a, 0, keepdim=True) - math.log(len(a))


@dataclass(frozen=True)
class AFL(_OverClients):
    """Agnostic federated learning (Mohri et al. 2019): min over x, max over mixtures λ of clients, of Σ λ_n f_n(x).

    w_n = Nλ_n with λ = 1/N in round 1; after a round, λ ← projection of λ + γ(f_1, …, f_N) onto the simplex, or with
    `update="exponentiated"` λ∘exp(γf), normalised. Of absent clients nothing is known: the answers' mean is
    subtracted from their losses, and their coordinates move N/|S| times as far.
    """

    gamma: float = 0.1
    update: str = "projected"

    name = "afl"
    cites = (MOHRI_2019,)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "gamma")
        one_of(f"{self.name}: update", self.update, ("projected", "exponentiated"))

    def weigh(self, f: Tensor, level: Tensor, clients: int) -> Tensor:
        """w_n = Nλ_n."""
        return clients * level

    def answer(self, f: Tensor, ns: Tensor, level: Tensor | None, clients: int) -> Tensor:
        """Move λ along the losses."""
        if level is None:
            return f.new_full((clients,), 1 / clients)
        move = torch.zeros_like(level).index_put((ns,), self.gamma * clients / len(ns) * (f - f.mean()))
        if self.update == "exponentiated":
            return torch.softmax(level.log() + move, 0)
        return Simplex().project(level + move)


@dataclass(frozen=True)
class KLDRO(_OverClients):
    """KL-DRO, or tilted losses (Li et al. 2021): τ log mean_n exp(f_n/τ), from the mean (τ → ∞) to the largest (τ → 0).

    w_n = exp((f_n − L)/τ) with last round's L = τ log mean_n exp(f_n/τ), smoothed by
    e^{L/τ} ← (1−γ)e^{L/τ} + γ mean_n e^{f_n/τ}.
    Losses of small batches make weights noisy: give rounds a large first batch (`initial_batch`).
    """

    tau: float = 1.0
    gamma: float = 1.0

    name = "kl-dro"
    cites = (LI_2021_TILTED,)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "tau")
        weight(self, "gamma")

    def weigh(self, f: Tensor, level: Tensor, clients: int) -> Tensor:
        """w_n = exp((f_n − L)/τ)."""
        return ((f - level) / self.tau).exp()

    def answer(self, f: Tensor, ns: Tensor, level: Tensor | None, clients: int) -> Tensor:
        """Return L."""
        new = _log_mean(f / self.tau)
        if level is not None and self.gamma < 1:
            new = torch.logaddexp(level[:1] / self.tau + math.log1p(-self.gamma), new + math.log(self.gamma))
        return self.tau * new


@dataclass(frozen=True)
class CVaRDRO(_OverClients):
    """CVaR over clients: the mean of the worst share ρ of the losses, min over s of s + mean_n (f_n − s)₊/ρ.

    w_n = 1[f_n > s]/ρ and s ← s − η_s(1 − mean_n 1[f_n > s]/ρ), from the same indicators; s starts at mean f_n(x0).
    Iterates circle around the optimum: return an averaged one (`Evaluation(keep="uniform")`) or the best.
    """

    rho: float = 0.5
    eta_s: float = 0.1

    name = "cvar-dro"
    cites = (ROCKAFELLAR_2000,)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta_s")
        weight(self, "rho")

    def weigh(self, f: Tensor, level: Tensor, clients: int) -> Tensor:
        """w_n = 1[f_n > s]/ρ."""
        return (f > level).to(f.dtype) / self.rho

    def answer(self, f: Tensor, ns: Tensor, level: Tensor | None, clients: int) -> Tensor:
        """Return s."""
        if level is None:
            return f.mean(0, keepdim=True)
        return level[:1] - self.eta_s * (1 - self.weigh(f, level[:1], clients).mean())


@dataclass(frozen=True)
class QFFL(_OverClients):
    """q-FFL (Li et al. 2020): mean_n f_n^{p+1} for losses f_n ≥ 0, between FedAvg (p = 0) and the largest (p → ∞).

    w_n = max(f_n, 0)^p / M, M = last round's mean of max(f_n, 0)^p. The paper's q is p here, because q counts local steps.
    """

    p: float = 1.0

    name = "q-ffl"
    cites = (LI_2020_FAIR,)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "p")

    def weigh(self, f: Tensor, level: Tensor, clients: int) -> Tensor:
        """w_n = max(f_n, 0)^p / M, 0 if M is 0; the level is log M."""
        w = (self._log_power(f) - level).exp()
        return torch.where(level > torch.finfo(level.dtype).min, w, 0)

    def answer(self, f: Tensor, ns: Tensor, level: Tensor | None, clients: int) -> Tensor:
        """Return log M."""
        return _log_mean(self._log_power(f)).clamp_min(torch.finfo(f.dtype).min)

    def _log_power(self, f: Tensor) -> Tensor:
        return torch.xlogy(torch.full_like(f, self.p), f.clamp_min(0))
