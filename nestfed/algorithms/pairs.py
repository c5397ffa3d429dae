"""Pairs across clients: FeDXL1 and FeDXL2. Clients compare own rows with scores that others computed a round ago."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from nestfed.core import Algorithm, Batch, Drawn, NestfedError, Paired, Schedule, at, first, positive, weight, whole
from nestfed.problems.flat import uniform
from nestfed.problems.paired import GUO_2023


class Passive(NamedTuple):
    """Numbers of other rows for each own row, (b, k, …), and their shares in a mean, (b, k); shares 0 = the pool is empty."""

    numbers: Tensor
    share: Tensor


def _passive(table: Tensor, fresh: Tensor, count: int, k: int, batch: Batch, stream: int) -> Passive:
    """Draw k numbers of a pool for each of `count` own rows, with replacement; k = 0 takes the whole pool.

    The pool has the rows (numbers, weight) of the clients that took part in the last round, ordered by client, iteration
    and position in the batch. A row is drawn with a probability proportional to its weight: where all weights are equal,
    uniformly. Then clients count in the pool as in their own terms.
    """
    rows = table.flatten(0, 1)
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])  # the pool may be empty
    chance = rows[:, -1].clamp_min(0) * torch.cat([fresh.repeat_interleave(table.shape[1]), fresh.new_zeros(1)])
    if k == 0:
        share = chance / torch.where(chance.sum() > 0, chance.sum(), 1)
        return Passive(rows[:, :-1].expand(count, -1, -1), share.expand(count, -1))
    until = chance.double().cumsum(0)
    place = torch.searchsorted(until, uniform(batch.key, (count, k), stream) * until[-1], right=True)
    share = (until[-1] > 0).to(table.dtype) / k
    return Passive(rows[place.clamp(max=len(rows) - 1), :-1], share.expand(count, k))


def _compared(problem: Paired, h: Tensor, others: Passive) -> Tensor:
    """Return mean ℓ(h_i, c') over the passive numbers of each own S1 row, (b, inner_dim)."""
    value = problem.pair(h[:, None], others.numbers[..., 0], others.numbers[..., 1:])
    return problem.inner_mean(value, others.share)


class Tangent(NamedTuple):
    """Inner values u and the slopes f'(u) there, both constant."""

    slope: Tensor
    u: Tensor


def _tangent(problem: Paired, u: Tensor) -> Tangent:
    """Return the slope for every row of u."""
    return Tangent(torch.func.grad(lambda v: problem.outer(v).sum())(u), u)


def _cotangents(
    problem: Paired,
    scores: tuple[Tensor, Tensor],
    drawn: Drawn,
    passive: tuple[Passive, Passive],
    at: tuple[Tangent, Tangent],
) -> tuple[Tensor, Tensor]:
    """Return the derivatives of mean_i f'(u_i)ℓ(h_i, c'_i) + mean_j f'(ũ_j)ℓ(c_j, h'_j) with respect to h and h'.

    at: of own S1 rows, (b1, inner_dim), and of passive ones, (b2, k, inner_dim).
    """
    (others, ranked), (own, theirs) = passive, at

    def surrogate(h1: Tensor, h2: Tensor) -> Tensor:
        first = problem.tangent(*own, _compared(problem, h1, others))
        value = problem.pair(ranked.numbers[..., 0], h2[:, None], drawn.marks[:, None])
        second = (ranked.share * problem.tangent(*theirs, value)).sum(1)
        return (drawn.first * first).mean() + (drawn.second * second).mean()

    found: tuple[Tensor, Tensor] = torch.func.grad(surrogate, argnums=(0, 1))(*scores)
    return found


def _rows(kept: Tensor, *columns: Tensor) -> Tensor:
    """Return the contribution so far with the rows of another iteration."""
    return torch.cat([kept, torch.cat([c if c.dim() > 1 else c[:, None] for c in columns], 1).to(kept)])


S = TypeVar("S", bound=NamedTuple)


@dataclass(frozen=True)
class _Crossing(Algorithm[Paired, S]):
    """What both have in common: iteration 0 only scores its batch, and its scores are gathered at once."""

    accepts = Paired
    gathered: ClassVar[Mapping[str, str]] = {"first": "pool1", "second": "pool2"}
    describes_rows = True
    family = "pairs"
    cites = (GUO_2023,)

    def receive(self, s: S, t: int) -> S:
        """Begin a new contribution."""
        return s._replace(first=s.first[:0], second=s.second[:0])  # type: ignore[attr-defined]

    def ends_round(self, t: int, q: int) -> bool:
        """Gather and average after t = 0, q, 2q, …."""
        return t % q == 0


class Crossed(NamedTuple):
    """The model; the own scores of this round with their weights; everybody's of the last round."""

    x: Tensor
    first: Tensor
    second: Tensor
    pool1: Tensor
    pool2: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class FeDXL1(_Crossing[Crossed]):
    """FeDXL1 (Guo et al. 2023): pairs across clients, f linear.

    G = ∇ₓ[mean_i ℓ(h(x; z_i), c'_i) + mean_j ℓ(c_j, h(x; z'_j))] with passive scores c', c of all clients; x ← x − ηG.

    passive: passive scores for each own row, whose mean is used; the paper has 1; 0 = all of the pool.
    """

    eta: Schedule
    passive: int = 1

    name = "fedxl1"
    shared = ("x",)

    def __post_init__(self) -> None:
        positive(self, "eta")
        whole(f"{self.name}: passive", self.passive, 0)

    def init(self, problem: Paired, x0: Tensor) -> Crossed:
        """Start at x0 without any scores."""
        if not problem.linear:
            raise NestfedError(f"fedxl1 needs a linear f, but that of {type(problem).__name__} is not: use fedxl2.")
        scores = x0.new_zeros(0, 2), x0.new_zeros(0, 2 + problem.marks)
        return Crossed(x0, *scores, *scores, x0.new_zeros(0))

    def step(self, problem: Paired, s: Crossed, batch: Batch, t: int) -> Crossed:
        """Score the batch, compare it with passive scores, move."""
        h1, h2, pull = problem.scores(s.x, batch)
        drawn, x, loss = problem.drawn(batch), s.x, None
        if t > 0:
            others = _passive(s.pool2, s.fresh, len(h1), self.passive, batch, 0)
            ranked = _passive(s.pool1, s.fresh, len(h2), self.passive, batch, 1)
            anywhere = _tangent(problem, x.new_zeros(problem.inner_dim))
            G = pull(*_cotangents(problem, (h1, h2), drawn, (others, ranked), (anywhere, anywhere)))
            x = problem.project(x - at(self.eta, t) * G)
            loss = (drawn.first * problem.outer(_compared(problem, h1, others))).mean()
        batch.note(len(h1) + len(h2), loss)
        return s._replace(
            x=x, first=_rows(s.first, h1, drawn.first), second=_rows(s.second, h2, drawn.marks, drawn.second)
        )


class CrossedStates(NamedTuple):
    """The model and momentum; one inner value per own S1 row, and which rows were met; scores as in `Crossed`."""

    x: Tensor
    m: Tensor
    u: Tensor
    met: Tensor
    first: Tensor
    second: Tensor
    pool1: Tensor
    pool2: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class FeDXL2(_Crossing[CrossedStates]):
    """FeDXL2 (Guo et al. 2023): pairs across clients, f not linear; one inner value u(z) per own S1 row, private.

    u(z_i) ← (1−γ)u(z_i) + γℓ(h(x; z_i), c'_i), weight 1 the first time;
    G = ∇ₓ[mean_i f'(u(z_i))ℓ(h(x; z_i), c'_i) + mean_j f'(ũ_j)ℓ(c_j, h(x; z'_j))], (c_j, ũ_j) passive;
    m ← (1−β)m + βG, weight 1 at t = 1; x ← x − ηm.

    passive: passive scores for each own row, whose mean is used; the paper has 1; 0 = all of the pool.
    """

    eta: Schedule
    gamma: Schedule = 0.9
    beta: Schedule = 0.1
    passive: int = 1

    name = "fedxl2"
    shared = ("x", "m")
    private = ("u", "met")

    def __post_init__(self) -> None:
        positive(self, "eta")
        weight(self, "gamma", "beta")
        whole(f"{self.name}: passive", self.passive, 0)

    def init(self, problem: Paired, x0: Tensor) -> CrossedStates:
        """Start at x0 without any scores; no row is met."""
        if problem.rows < 1:
            raise NestfedError(
                f"fedxl2 keeps one number per S1 row, so {type(problem).__name__} must know how many a client has: pass "
                "rows=clients.rows."
            )
        scores = x0.new_zeros(0, 2 + problem.inner_dim), x0.new_zeros(0, 2 + problem.marks)
        u = x0.new_zeros(problem.rows, problem.inner_dim)
        return CrossedStates(x0, 0 * x0, u, x0.new_zeros(problem.rows), *scores, *scores, x0.new_zeros(0))

    def step(self, problem: Paired, s: CrossedStates, batch: Batch, t: int) -> CrossedStates:
        """Score the batch, refresh u of its S1 rows, move along the momentum."""
        h1, h2, pull = problem.scores(s.x, batch)
        drawn = problem.drawn(batch)
        if t > 0:
            others = _passive(s.pool2, s.fresh, len(h1), self.passive, batch, 0)
        else:  # the client's own S2 rows
            share = drawn.second / torch.where(drawn.second.sum() > 0, drawn.second.sum(), 1)
            own = torch.cat([h2[:, None], drawn.marks], 1).expand(len(h1), -1, -1)
            others = Passive(own, share.expand(len(h1), -1))
        value, real = _compared(problem, h1, others), drawn.first > 0
        u, table, met = self._refreshed(problem, s, drawn.rows, value, real & (others.share.sum(1) > 0), t)
        known = real & ((met[drawn.rows] > 0) | problem.linear)  # a linear f does not depend on u
        safe = torch.where(known[:, None], u, 1)  # f may be undefined at 0
        x, m, loss = s.x, s.m, None
        if t > 0:
            ranked = _passive(s.pool1, s.fresh, len(h2), self.passive, batch, 1)
            theirs = torch.where(ranked.share[..., None] > 0, ranked.numbers[..., 1:], 1)
            tangents = _tangent(problem, safe), _tangent(problem, theirs)
            G = pull(*_cotangents(problem, (h1, h2), drawn, (others, ranked), tangents))
            b = 1.0 if t == 1 else at(self.beta, t)
            m = (1 - b) * m + b * G
            x = problem.project(x - at(self.eta, t) * m)
            loss = (drawn.first * known * problem.outer(safe)).mean()
        batch.note(len(h1) + len(h2), loss)
        return s._replace(
            x=x, m=m, u=table, met=met,
            first=_rows(s.first, h1, u, drawn.first * known),
            second=_rows(s.second, h2, drawn.marks, drawn.second),
        )  # fmt: skip

    def _refreshed(
        self, problem: Paired, s: CrossedStates, rows: Tensor, value: Tensor, now: Tensor, t: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new u of these rows, of all rows, and which are met; only rows with `now` change."""
        met = s.met[rows]
        c = torch.where(met > 0, torch.full_like(met, first(self.gamma, t)), 1.0) * now
        u = problem.moving_mean(s.u[rows], value, c[:, None])
        table = s.u.scatter(0, rows[:, None].expand_as(u), u)
        return u, table, s.met.scatter(0, rows, torch.where(now, torch.ones_like(met), met))
