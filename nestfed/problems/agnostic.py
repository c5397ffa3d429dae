"""Agnostic training: the worst mixture of the clients' losses, as a minimax problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Batch, Data, NestfedError, as_batch, at_least, whole
from nestfed.data.clients import Examples
from nestfed.problems.base import Minimax, Model, Simplex
from nestfed.problems.classify import cross_entropy
from nestfed.problems.objective import Labelled

MOHRI_2019 = """@inproceedings{mohri2019agnostic,
  title     = {Agnostic Federated Learning},
  author    = {Mohri, Mehryar and Sivek, Gary and Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning},
  pages     = {4615--4625},
  publisher = {PMLR},
  year      = {2019}
}"""
FLOOR = 1e-4
"""The logarithm of N·w_n is bounded below by that of this number; at w_n = 0 its gradient would be infinite."""


class Agnostic(Minimax):
    """min over θ, max over w in the simplex of Σ_n w_n f_n(θ) − τ Σ_n w_n log(N w_n), f_n the loss of client n.

    The clients' mean objective is this one if client n has N·w_n·f_n(θ) − τ Σ_m w_m log(N w_m). The maximum over w is
    τ log mean_n exp(f_n/τ): τ = 0 protects the worst client alone, a large τ gives the plain mean.

    - `clients`: N, the number of clients.
    - `loss`: f, from the model and a batch to the batch's mean loss.
    """

    def __init__(
        self,
        model: nn.Module | Tensor,
        clients: int,
        *,
        tau: float = 0.1,
        loss: Callable[[Model, Data], Tensor] = cross_entropy,
        **options: Any,
    ) -> None:
        if not tau >= 0:
            raise NestfedError(f"agnostic: tau must be at least 0, not {tau:g}.")
        self.n, self.tau, self.client_loss = whole("agnostic: clients", clients), tau, loss
        super().__init__(
            lambda model, w, data: self.client_loss(model, data),
            model,
            torch.full((self.n,), 1 / self.n),
            dual_domain=Simplex(),
            **options,
        )

    def grads(self, theta: Tensor, w: Tensor, batch: Batch | Data) -> tuple[Tensor, Tensor]:
        """Return the gradients of client n's share of the objective."""
        sample = as_batch(batch)
        g, h = self.estimate(lambda a, b, data: self._share(a, b, data, sample.client), (theta, w), sample)
        return g, h

    def _share(self, theta: Tensor, w: Tensor, data: Data, client: Tensor) -> Tensor:
        own = torch.arange(self.n, device=w.device) == client
        model = self.model_at(theta)
        regret = (w * (self.n * w).clamp_min(FLOOR).log()).sum()
        return self.penalised(self.n * (own * w).sum() * self.client_loss(model, data) - self.tau * regret, model)

    def inspect(self, batch: Batch) -> bool:
        """Return whether the loss depends on the parameters of the model."""
        return self.depends(lambda theta: self._share(theta, self.w0, batch.data, batch.client))


@dataclass(frozen=True)
class AgnosticOptions(Labelled):
    """Options of agnostic: cross-entropy of the worst mixture of the clients."""

    batch: int = 32
    """Examples in a step."""
    tau: float = 0.1
    """The weight of the mixture's distance from equal weights: 0 = the worst client alone, large = the plain mean."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "agnostic"
    cites = (MOHRI_2019,)
    binary = False
    log_odds = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch")
        at_least(self, 0, "tau", "clip")

    def metric(self, classes: int) -> str:
        """Accuracy."""
        return "accuracy"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[Agnostic, Examples]:
        """Return the problem on plain batches."""
        clients = Examples(arrays, parts, batch=self.size(self.batch, restarts), **held)
        return Agnostic(model, len(parts), tau=self.tau, clip=self.clip or None), clients
