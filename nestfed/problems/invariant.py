"""Invariant logistic regression (FCSG paper, section 5.1): synthetic, with noise inside the logistic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nestfed.core import Clients, Data, NestfedError, at_least
from nestfed.data.random import Purpose, Streams
from nestfed.problems.base import Conditional
from nestfed.problems.objective import Generated, Made, Setting


@dataclass(frozen=True)
class InvariantClients(Clients):
    """Clients that draw ξ = (a, b), a ~ N(0, σ1²I), b = sign(aᵀx*), and m inner samples η ~ N(a, σ2²I) each.

    x* is random and the same for all clients; every client has its own random stream.
    """

    clients: int = 16
    dim: int = 10
    ratio: float = 1.0
    """σ2/σ1; σ1 is 1."""
    inner: int = 10
    outer: int = 1
    seed: int | None = field(default=None, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("clients", "dim", "inner", "outer"):
            if getattr(self, name) < 1:
                raise NestfedError(f"invariant: {name} must be at least 1, not {getattr(self, name)}.")
        if not self.ratio >= 0:
            raise NestfedError(f"invariant: ratio must be at least 0, not {self.ratio:g}.")
        object.__setattr__(self, "_streams", Streams(self.seed or 0))
        truth = self._streams.at(Purpose.PROBLEM, 0, 0).standard_normal(self.dim)  # type: ignore[attr-defined]
        object.__setattr__(self, "truth", torch.tensor(truth, dtype=self.dtype))

    def __len__(self) -> int:
        return self.clients

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's (outer, inner) at iteration t."""
        (a, b), (eta,) = self.draw([n], range(t, t + 1))[0]
        return (a[0], b[0]), (eta[0],)

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Draw for several clients and iterations at once."""
        streams: Streams = self._streams  # type: ignore[attr-defined]
        # Draw in place: these numbers take most of a round's time on such a small problem.
        drawn = np.empty((len(ts), len(ns), self.outer * (1 + self.inner), self.dim), dtype=np.float32)
        for at_t, t in zip(drawn, ts):
            for noise_of, n in zip(at_t, ns):
                streams.at(Purpose.BATCH, n, t).standard_normal(out=noise_of, dtype=np.float32)
        noise = torch.from_numpy(drawn).to(self.dtype)
        a = noise[:, :, : self.outer]
        b = torch.sign(a @ self.truth)  # type: ignore[attr-defined]
        spread = noise[:, :, self.outer :].view(*a.shape[:3], self.inner, self.dim)
        eta = spread.mul_(self.ratio).add_(a.unsqueeze(-2))
        return [((a[i], b[i]), (eta[i],)) for i in range(len(ts))]

    def held_out(self, which: int, examples: int = 50_000) -> tuple[Tensor, Tensor]:
        """Return held-out outer samples (a, b), which no client draws; each `which` gives another set."""
        generator = self._streams.at(Purpose.PROBLEM, 1, which)  # type: ignore[attr-defined]
        a = torch.from_numpy(generator.standard_normal((examples, self.dim), dtype=np.float32)).to(self.dtype)
        return a, torch.sign(a @ self.truth)  # type: ignore[attr-defined]


class InvariantLogistic(Conditional):
    """E log(1 + exp(−b·E_η[ηᵀx])) + λΣγx_i²/(1+γx_i²): the mean over η is inside the logistic."""

    def __init__(self, start: Tensor, *, lam: float = 0.001, gamma: float = 10.0, clip: float | None = None) -> None:
        super().__init__(
            f=lambda u, outer: F.softplus(-outer[1] * u),
            g=lambda x, outer, inner: inner[0] @ x,
            model=start,
            penalty=lambda x: lam * (gamma * x**2 / (1 + gamma * x**2)).sum(),
            clip=clip,
        )


def accuracy(x: Tensor, test: tuple[Tensor, Tensor]) -> float:
    """Return the share of outer samples whose sign x predicts."""
    a, b = test
    return float((torch.sign(a @ x) == b).double().mean())


@dataclass(frozen=True)
class InvariantOptions(Generated):
    """Options of invariant: synthetic examples, no [data] needed."""

    dim: int = 10
    """Coordinates of an example."""
    ratio: float = 1.0
    """Inner noise over outer noise, σ2/σ1."""
    outer: int = 4
    """Outer samples in a step."""
    inner: int = 16
    """Inner samples per outer sample."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "invariant"

    def __post_init__(self) -> None:
        at_least(self, 1, "dim", "outer", "inner")
        at_least(self, 0, "ratio", "clip")

    def build(self, setting: Setting) -> Made:
        """Return the problem; the metric is the accuracy on 50,000 samples that no client draws."""
        clients = InvariantClients(setting.clients, self.dim, self.ratio, self.inner, self.outer, seed=setting.seed)
        test, validation = clients.held_out(0), clients.held_out(1)
        return Made(
            InvariantLogistic(torch.zeros(self.dim), clip=self.clip or None),
            clients,
            "accuracy",
            lambda x: {"accuracy": accuracy(x, test)},
            lambda x: {"accuracy": accuracy(x, validation)},
        )
