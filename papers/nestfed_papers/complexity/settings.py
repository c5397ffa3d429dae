"""Problems for the measurements: small populations, so that gradient and constants are known, and nonconvex losses.

All are made of ρ(r) = √(1+r²) − 1 + r²/(1+r²), a robust and nonconvex loss with |ρ'| ≤ 1.221 and |ρ''| ≤ 3, over a finite
population of K points per client. (Its slope does not vanish far out: with one that does, a run that diverges looks like
one that arrives.) A batch samples the population, so the noise is multiplicative, as with real data: a
variance-reduced correction reduces it and does not cancel it. Each problem is one of the library's kinds with f and g
in torch, and its gradient a second time by hand: that one accepts leading axes (seeds, clients), which makes many seeds
as cheap as one. `batched.check` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Batch, Clients, Data, as_batch
from nestfed.data.random import Purpose, Streams
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize

SLOPE, CURVE = 1.221, 3.0  # bounds of |ρ'| and |ρ''|
BLOCK = 64
"""Iterations drawn at once."""


def rho(r: Tensor) -> Tensor:
    """Return ρ(r)."""
    square = r * r
    return (1 + square).sqrt() - 1 + square / (1 + square)


def slope(r: Tensor) -> Tensor:
    """Return ρ'(r)."""
    more = 1 + r * r
    return r / more.sqrt() + 2 * r / (more * more)


def residual(x: Tensor, a: Tensor, y: Tensor) -> Tensor:
    """aᵀx − y for every example; x may have leading axes."""
    return (a @ x.unsqueeze(-1)).squeeze(-1) - y


class Plain(Minimize):
    """E ρ(aᵀx − y); a batch is (a, y), (…, b, d) and (…, b)."""

    def __init__(self, dim: int) -> None:
        super().__init__(lambda x, batch: rho(batch[0] @ x - batch[1]).mean(), torch.zeros(dim, dtype=torch.float64))

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the gradient in closed form."""
        a, y = as_batch(batch).data
        as_batch(batch).note(y.shape[-1])
        return (slope(residual(x, a, y)).unsqueeze(-1) * a).mean(-2)


class Inner(Conditional):
    """E_ξ ρ(E_η ηᵀx − y), η ~ N(a, σ²I); a batch is ((y,), mean of the m inner η), which has the law N(a, σ²I/m).

    g is linear, so the estimator sees its m inner samples through their mean alone, and that is what is drawn.
    """

    def __init__(self, dim: int, m: int) -> None:
        self.m = m
        super().__init__(
            f=lambda u, outer: rho(u - outer[0]),
            g=lambda x, outer, inner: inner @ x,
            model=torch.zeros(dim, dtype=torch.float64),
        )

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the gradient in closed form."""
        (y,), eta = as_batch(batch).data
        eta = eta.squeeze(-2)
        as_batch(batch).note(y.shape[-1] * (1 + self.m))
        return (slope(residual(x, eta, y)).unsqueeze(-1) * eta).mean(-2)


class Nested(Compositional):
    """f(E G x) with f(u; ζ) = Σ_j ρ(u_j − c_j); a batch is (c, G), (…, b, p) and (…, b, p, d)."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__(
            f=lambda u, c: rho(u - c).sum(-1).mean(),
            g=lambda x, G: (G @ x).mean(0),
            model=torch.zeros(dim, dtype=torch.float64),
            inner_dim=inner_dim,
        )

    def inner(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the inner value and its pullback, in closed form."""
        G = as_batch(batch).data[1]
        as_batch(batch).note(G.shape[-3])
        G = G.mean(-3)
        # One task; its axis always comes first.
        value = (G @ x.unsqueeze(-1)).squeeze(-1).unsqueeze(0)
        return value, lambda v: (G.transpose(-1, -2) @ v[0].unsqueeze(-1)).squeeze(-1)

    def outer_grad(self, u: Tensor, batch: Batch) -> Tensor:
        """Return ∇f in closed form."""
        c = as_batch(batch).data[0]
        as_batch(batch).note(c.shape[-2])
        return slope(u.unsqueeze(-2) - c).mean(-2)


class Game(Minimax):
    """E ρ(aᵀθ − y) + wᵀ(Cθ − e) − ½‖w‖²; a batch is (a, y, C, e)."""

    def __init__(self, dim: int, dual_dim: int) -> None:
        zeros = torch.zeros(dim + dual_dim, dtype=torch.float64)

        def f(theta: Tensor, w: Tensor, batch: Data) -> Tensor:
            a, y, C, e = batch
            return rho(a @ theta - y).mean() + (w * (C @ theta - e).mean(0)).sum() - (w * w).sum() / 2

        super().__init__(f, zeros[:dim], zeros[dim:])

    def grads(self, theta: Tensor, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return both gradients in closed form."""
        a, y, C, e = as_batch(batch).data
        as_batch(batch).note(y.shape[-1])
        mean = C.mean(-3)
        pull = (slope(residual(theta, a, y)).unsqueeze(-1) * a).mean(-2)
        pull = pull + (mean.transpose(-1, -2) @ w.unsqueeze(-1)).squeeze(-1)
        return pull, (mean @ theta.unsqueeze(-1)).squeeze(-1) - e.mean(-2) - w


@dataclass(frozen=True)
class Source(Clients):
    """Clients that sample their own populations: b points at an iteration, B at the first.

    `population` holds arrays (N, K, …) that share an index; `second` arrays have an index of their own (ζ beside ξ).
    `spread` adds normal numbers of this size to the first array. BLOCK iterations are drawn at once.
    """

    population: tuple[Tensor, ...]
    second: tuple[Tensor, ...] = ()
    spread: float = 0.0
    b: int = 1
    B: int = 1
    arrange: Callable[..., Data] = lambda *arrays: arrays
    seed: int = 0
    _kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.population[0])

    def seeded(self, seed: int) -> Source:
        """Return these clients with this seed."""
        return Source(self.population, self.second, self.spread, self.b, self.B, self.arrange, seed)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t."""
        return torch.utils._pytree.tree_map(lambda leaf: leaf[0], self.draw([n], range(t, t + 1))[0])

    def draw(self, ns: Any, ts: range) -> list[Data]:
        """Draw for several clients and iterations."""
        return [torch.utils._pytree.tree_map(lambda leaf: leaf[0], self.at((self.seed,), t, ns)) for t in ts]

    def at(self, seeds: tuple[int, ...], t: int, ns: Any = None) -> Data:
        """Return the batch of iteration t for all seeds and clients: leading axes (seeds, clients)."""
        ns = tuple(range(len(self))) if ns is None else tuple(ns)
        block, within = (-1, 0) if t == 0 and self.b != self.B else divmod(t, BLOCK)
        key = (seeds, ns, block)
        if self._kept.get("key") != key:
            self._kept["key"], self._kept["block"] = key, self._block(seeds, ns, block)
        return torch.utils._pytree.tree_map(lambda leaf: leaf[within], self._kept["block"])

    def _block(self, seeds: tuple[int, ...], ns: tuple[int, ...], block: int) -> Data:
        count, size = (1, self.B) if block < 0 else (BLOCK, self.b)
        purpose = Purpose.INNER if block < 0 else Purpose.BATCH
        K, K2 = self.population[0].shape[1], self.second[0].shape[1] if self.second else 1
        width = self.population[0].shape[2:] if self.spread else ()
        chosen, other, noise = [], [], []
        for seed in seeds:
            streams = Streams(seed)
            for n in ns:
                generator = streams.at(purpose, n, max(block, 0))
                chosen.append(generator.integers(K, size=(count, size)))
                other.append(generator.integers(K2, size=(count, size)) if self.second else None)
                noise.append(generator.standard_normal((count, size, *width)) if self.spread else None)

        def packed(rows: list[Any]) -> Tensor:
            table = torch.from_numpy(np.stack(rows))
            return table.view(len(seeds), len(ns), *table.shape[1:]).movedim(2, 0)

        who = torch.tensor(ns)[:, None]
        first = packed(chosen)
        arrays = [p[who, first] for p in self.population]
        if self.second:
            index = packed(other)
            arrays += [p[who, index] for p in self.second]
        if self.spread:
            arrays[0] = arrays[0] + self.spread * packed(noise)
        return self.arrange(*arrays)


@dataclass(frozen=True)
class Setting:
    """One problem for one family of methods, with its exact solution and constants.

    `alike` gives all clients the same population, so that F does not depend on N (for the speed-up).
    """

    family: str
    N: int = 4
    alike: bool = False
    dim: int = 5
    K: int = 64
    sigma: float = 0.5
    radius: float = 3.0
    """The iterates stay in this ball (checked); it bounds the variance of the inner value."""

    def _normal(self, what: int, *shape: int) -> Tensor:
        return torch.tensor(Streams(11).at(Purpose.PROBLEM, what, 0).standard_normal(shape))

    def _each(self, what: int, *shape: int) -> Tensor:
        """Draw one array per client, or the same for all."""
        if self.alike:
            return self._normal(what, 1, *shape).expand(self.N, *shape)
        return self._normal(what, self.N, *shape)

    @cached_property
    def points(self) -> tuple[Tensor, Tensor]:
        """a on the unit sphere, and y = aᵀx_n + noise; the x_n differ between the clients."""
        a = self._each(0, self.K, self.dim)
        a = a / a.norm(dim=-1, keepdim=True)
        truth = 0.6 * self._normal(1, self.dim) + (0.0 if self.alike else 0.3) * self._each(2, self.dim)
        y = (a @ truth.expand(self.N, -1).unsqueeze(-1)).squeeze(-1) + 0.3 * self._each(3, self.K)
        return a, y

    @cached_property
    def maps(self) -> Tensor:
        """G (nested) or C (game): the same population for all clients, because Local-SCGDM averages the tracked g."""
        rows = 4 if self.family == "nested" else 2
        spread = self._normal(5, self.K, rows, self.dim)
        base = self._normal(6, rows, self.dim)
        table = (base + 0.5 * spread) / (base + 0.5 * spread).flatten(1).norm(dim=1).max()
        return (table if self.family == "nested" else 0.5 * table).expand(self.N, -1, -1, -1)

    @cached_property
    def targets(self) -> Tensor:
        """c, (N, K, p), different between clients."""
        return self._normal(7, 4) * 0.5 + 0.2 * self._each(8, 1, 4) + 0.5 * self._each(9, self.K, 4)

    @cached_property
    def offsets(self) -> Tensor:
        """e, the same for all clients."""
        return (0.3 * self._normal(10, 2) + 0.2 * self._normal(11, self.K, 2)).expand(self.N, -1, -1)

    def problem(self, m: int | None = None) -> Any:
        """Return the problem; m is the number of inner samples."""
        if self.family == "plain":
            return Plain(self.dim)
        if self.family == "conditional":
            return Inner(self.dim, m or 1)
        return Nested(self.dim, 4) if self.family == "nested" else Game(self.dim, 2)

    def clients(self, m: int | None = None, b: int = 1, B: int = 1) -> Source:
        """Return the clients that draw b points at an iteration, B at the first."""
        a, y = self.points
        if self.family == "plain":
            return Source((a, y), b=b, B=B)
        if self.family == "conditional":
            shape = lambda eta, y: ((y,), eta.unsqueeze(-2))  # noqa: E731
            return Source((a, y), spread=self.sigma / (m or 1) ** 0.5, b=b, B=B, arrange=shape)
        if self.family == "nested":
            return Source((self.maps,), (self.targets,), b=b, B=B, arrange=lambda G, c: (c, G))
        return Source((a, y, self.maps, self.offsets), b=b, B=B)

    # Exact values, for points with any leading axes.

    def gradient(self, x: Tensor) -> Tensor:
        """∇F(x), or ∇Φ(θ)."""
        if self.family == "nested":
            G = self.maps[0].mean(0)
            outer = slope((x @ G.T)[..., None, :] - self.targets.flatten(0, 1)).mean(-2)
            return outer @ G
        a, y = (p.flatten(0, 1) for p in self.points)
        found = slope(x @ a.T - y) @ a / len(a)
        return found + self.best_dual(x) @ self.maps[0].mean(0) if self.family == "game" else found

    def best_dual(self, theta: Tensor) -> Tensor:
        """Return w*(θ)."""
        return theta @ self.maps[0].mean(0).T - self.offsets[0].mean(0)

    def value(self, x: Tensor) -> Tensor:
        """Return F(x), or Φ(θ)."""
        if self.family == "nested":
            u = x @ self.maps[0].mean(0).T
            return rho(u[..., None, :] - self.targets.flatten(0, 1)).sum(-1).mean(-1)
        a, y = (p.flatten(0, 1) for p in self.points)
        found = rho(x @ a.T - y).mean(-1)
        return found + self.best_dual(x).square().sum(-1) / 2 if self.family == "game" else found

    @cached_property
    def gap(self) -> float:
        """F(0) − F*, with F* by descent from several starts."""
        with torch.no_grad():
            x = torch.cat([torch.zeros(1, self.dim, dtype=torch.float64), self._normal(12, 15, self.dim)])
            for _ in range(5000):
                x = x - 0.3 * self.gradient(x)
            return float(self.value(torch.zeros(self.dim, dtype=torch.float64)) - self.value(x).min())

    @cached_property
    def constants(self) -> dict[str, float]:
        """The constants of the family's theorem, by name; suprema are bounded analytically, not estimated."""
        R = self.radius
        if self.family == "plain":
            # ‖a‖ = 1, so gradients of examples are at most SLOPE long, and those of two clients 2·SLOPE apart.
            return {
                "L": CURVE,
                "sigma": SLOPE,
                "zeta": 0.0 if self.alike else 2 * SLOPE,
                "G": SLOPE,
                "rho": 1.0,
                "F0": self.gap,
            }
        if self.family == "conditional":
            # E‖η‖⁴ of η ~ N(a, σ²I), since S_F is a mean-square smoothness of the estimator.
            s = self.sigma**2
            fourth = (1 + s * self.dim) ** 2 + 4 * s + 2 * s * s * self.dim
            return {
                "L_f": SLOPE,
                "L_g": fourth**0.25,
                "S_f": CURVE,
                "S_g": 0.0,
                "sigma_g": self.sigma * R,
                "F0": self.gap,
            }
        if self.family == "nested":
            G = self.maps[0]
            sizes = G.flatten(1).norm(dim=1)
            variance = float((G - G.mean(0)).flatten(1).square().sum(1).mean())
            return {
                "L_f": CURVE,
                "L_g": 0.0,
                "C_f": 2 * SLOPE,
                "C_g": float(sizes.square().mean().sqrt()),
                "sigma_f": 2 * SLOPE,
                "sigma_g": variance**0.5,
                "delta_g": variance**0.5 * R,
                "F0": self.gap,
            }
        C, e = self.maps[0], self.offsets[0]
        spread = float((C - C.mean(0)).flatten(1).square().sum(1).mean())
        shift = float((e - e.mean(0)).square().sum(1).mean())
        # θ: ρ'a and (C − C̄)ᵀw; w: (C − C̄)θ and e − ē; the theorem wants one σ for both.
        sigma = max((2 * SLOPE**2 + 2 * spread * R**2) ** 0.5, (2 * spread * R**2 + 2 * shift) ** 0.5)
        start = self.best_dual(torch.zeros(self.dim, dtype=torch.float64))
        return {
            "L_f": CURVE,
            "mu": 1.0,
            "sigma": sigma,
            "zeta": 0.0 if self.alike else 2 * SLOPE,
            "w0": float(start.square().sum()),
            "F0": self.gap,
        }
