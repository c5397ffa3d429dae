"""AUPRC as a conditional problem: average precision of any scoring module on imbalanced data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nestfed.core import Data, NestfedError
from nestfed.problems.base import Conditional, Model


class AUPRC(Conditional):
    """Minimise −E_{z⁺} g₁/g₂ with g = (E 1[y=1]ℓ, E ℓ), ℓ = max(s − h(z⁺) + h(z), 0)², h = sigmoid of the score.

    ξ is a positive example z⁺, η an example z of the whole data; batches come from `nestfed.data.clients.Pairs`.
    z⁺ itself, which is always among the examples, is counted as one more of the batch's k inner positives, each of which
    then weighs k/(k+1) of what it did, so that positives weigh as much as in the data. Without it a z⁺ that the few drawn
    positives do not reach would have a ratio near 0, and gradients of any size, however well it is ranked. Its ℓ is s²,
    so g₂ is never 0; a tiny ε does the same for a batch without positives.
    """

    def __init__(self, model: nn.Module | Tensor, *, margin: float = 0.1, clip: float | None = None) -> None:
        if not margin > 0:
            raise NestfedError(f"auprc: margin must be above 0, not {margin:g}.")
        self.margin = margin
        super().__init__(self._ratio, self._surrogates, model, clip=clip)

    def _surrogates(self, model: Model, outer: Data, inner: Data) -> Tensor:
        (positive, _), (x, y, weight) = outer, inner
        b = len(positive)
        scores = torch.sigmoid(model(torch.cat([positive, x[0]])))
        if scores.dim() != 1:
            raise NestfedError(f"auprc needs a model with one score per example, not shape {tuple(scores.shape)}.")
        y, weight = y[0].to(scores.dtype), weight[0].to(scores.dtype)
        k = y.sum()
        one = (y * weight).mean() / (k + 1)
        weight = weight * (1 - y / (k + 1))
        loss = weight * torch.relu(self.margin - scores[:b, None] + scores[None, b:]) ** 2
        return torch.stack([y * loss, loss], -1) + self.margin**2 * one

    def _ratio(self, u: Tensor, outer: Data) -> Tensor:
        epsilon = 1e-4 * self.margin**2
        return -outer[1] * (u[:, 0] + epsilon) / (u[:, 1] + epsilon)
