"""Problems written from nothing but the abstract methods of `nestfed.core`, and clients with just len and sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.algorithms import LocalSCGD, LocalSGDA, Scaffold
from nestfed.core import Batch, Composed, Differentiable, Saddle
from tests.support import simulate

CLIENTS, ROWS, D, P = 4, 5, 3, 2
OPTIONS: dict[str, Any] = {"q": 3, "seed": 5, "progress": False}


class Rows:
    """Clients that draw ROWS rows of normal numbers around a mean of their own."""

    def __init__(self, *widths: int) -> None:
        self.widths = widths

    def __len__(self) -> int:
        return CLIENTS

    def sample(self, n: int, t: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng((n, t))
        return tuple(torch.tensor(rng.normal(0.2 * n, 1, (ROWS, width))) for width in self.widths)


def start() -> Tensor:
    return torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64)


class Squares(Differentiable):
    """½E(aᵀx − 1)²."""

    @property
    def x0(self) -> Tensor:
        return start()

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        (a,) = batch.data
        return (a @ x - 1) @ a / ROWS


class Nested(Composed):
    """½‖E tanh(Gx) − c‖² with G = diag(ξ)A."""

    inner_dim = P
    A = torch.tensor([[1.0, 0.5, -0.3], [0.2, -0.4, 0.8]], dtype=torch.float64)

    @property
    def x0(self) -> Tensor:
        return start()

    def inner(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        xi, _ = batch.data
        value = torch.tanh(xi * (self.A @ x))
        slope = ((1 - value**2) * xi).mean(0)
        return value.mean(0)[None], lambda v: (v[0] * slope) @ self.A

    def outer_grad(self, u: Tensor, batch: Batch) -> Tensor:
        return u - batch.data[1].mean(0)

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        u, pullback = self.inner(x, batch)
        return pullback(self.outer_grad(u, batch))

    def which(self, batch: Batch) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


class Game(Saddle):
    """½E(aᵀθ − 1)² + wᵀE[c] θ_0 − ½‖w‖²."""

    @property
    def x0(self) -> Tensor:
        return start()

    @property
    def w0(self) -> Tensor:
        return torch.tensor([0.3, -0.5], dtype=torch.float64)

    def grads(self, theta: Tensor, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        a, c = batch.data
        first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        c = c.mean(0)
        return (a @ theta - 1) @ a / ROWS + (w @ c) * first, c * theta[0] - w


BARE: dict[str, tuple[Any, Any, Any]] = {
    "differentiable": (Squares(), Scaffold(0.05), Rows(D)),
    "composed": (Nested(), LocalSCGD(eta=0.05, gamma=0.7), Rows(P, P)),
    "saddle": (Game(), LocalSGDA(eta_theta=0.05, eta_w=0.1), Rows(D, 2)),
}


def run(kind: str, **options: Any) -> Any:
    problem, method, clients = BARE[kind]
    return simulate(problem, method, clients, rounds=4, **{**OPTIONS, "workers": 1, **options})
