"""AUPRC as a conditional problem: average precision of any scoring module on imbalanced data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Data, NestfedError, at_least, positive
from nestfed.data.clients import Pairs
from nestfed.problems.base import Conditional, Model
from nestfed.problems.objective import Labelled

QI_2021 = """@inproceedings{qi2021stochastic,
  title     = {Stochastic Optimization of Areas Under Precision-Recall Curves with Provable Convergence},
  author    = {Qi, Qi and Luo, Youzhi and Xu, Zhao and Ji, Shuiwang and Yang, Tianbao},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  pages     = {1752--1765},
  year      = {2021}
}"""
MARGIN = 0.5
"""The default margin s, chosen by experiment (papers/measurements/choosing.md). The papers use 0.1."""


def surrogate(margin: float, first: Tensor, second: Tensor) -> Tensor:
    """Return ℓ = max(s − first + second, 0)² of two sigmoid scores."""
    return torch.relu(margin - first + second) ** 2


def ratio(u: Tensor, margin: float) -> Tensor:
    """Return −u₁/u₂, from (…, 2) to (…), with a tiny ε for the case that both are 0."""
    epsilon = 1e-4 * margin**2
    return -(u[..., 0] + epsilon) / (u[..., 1] + epsilon)


class AUPRC(Conditional):
    """Minimise −E_{z⁺} g₁/g₂ with g = (E 1[y=1]ℓ, E ℓ), ℓ = max(s − h(z⁺) + h(z), 0)², h = sigmoid of the score.

    ξ is a positive example z⁺, η any example z of the data; batches come from `nestfed.data.clients.Pairs`.

    z⁺ itself counts as one more of the batch's k inner positives, whose weights are multiplied by k/(k+1), so that
    positives keep their total weight. Without it, a well-ranked z⁺ that scores above the few drawn positives would
    have a ratio near 0 and unbounded gradients. Its ℓ is s², so g₂ is never 0; a tiny ε ensures this for a batch
    without positives.

    outer_examples: the largest number of positives on a client, which SOX needs.
    """

    def __init__(
        self,
        model: nn.Module | Tensor,
        *,
        margin: float = MARGIN,
        clip: float | None = None,
        outer_examples: int | None = None,
        buffers: str = "",
    ) -> None:
        if not margin > 0:
            raise NestfedError(f"auprc: margin must be above 0, not {margin:g}.")
        self.margin = margin
        super().__init__(
            self._ratio, self._surrogates, model, clip=clip, buffers=buffers, outer_examples=outer_examples, inner_dim=2
        )

    def _surrogates(self, model: Model, outer: Data, inner: Data) -> Tensor:
        if isinstance(outer, Tensor) or isinstance(inner, Tensor):
            raise NestfedError("auprc needs batches (outer, inner) from Pairs clients, not plain batches (x, y).")
        (positive, _), (x, y, weight) = outer, inner
        b = len(positive)
        scores = torch.sigmoid(model(torch.cat([positive, x[0]])))
        if scores.dim() != 1:
            raise NestfedError(f"auprc needs a model with one score per example, not shape {tuple(scores.shape)}.")
        y, weight = y[0].to(scores.dtype), weight[0].to(scores.dtype)
        k = y.sum()
        one = (y * weight).mean() / (k + 1)
        weight = weight * (1 - y / (k + 1))
        loss = weight * surrogate(self.margin, scores[:b, None], scores[None, b:])
        return torch.stack([y * loss, loss], -1) + self.margin**2 * one

    def _ratio(self, u: Tensor, outer: Data) -> Tensor:
        return outer[1] * ratio(u, self.margin)


@dataclass(frozen=True)
class AUPRCOptions(Labelled):
    """Options of auprc: every outer positive is compared with an inner batch of both classes."""

    outer: int = 8
    """Positives in a step."""
    inner: int = 24
    """Examples compared with each positive."""
    inner_positives: int = 0
    """Positives among the inner examples; 0 = half."""
    margin: float = MARGIN
    """The margin s of the surrogate loss."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "auprc"
    cites = (QI_2021,)
    aliases = ("soap",)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "outer")
        at_least(self, 2, "inner")
        at_least(self, 0, "inner_positives", "clip")
        positive(self, "margin")
        if self.inner_positives >= self.inner:
            raise NestfedError(f"auprc: inner_positives must be less than inner = {self.inner}.")

    def metric(self, classes: int) -> str:
        """Average precision."""
        return "ap"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[AUPRC, Pairs]:
        """Return AUPRC on pairs of positives and inner batches."""
        clients = Pairs(
            arrays,
            parts,
            outer=self.size(self.outer, restarts),
            inner=self.inner,
            inner_positives=self.inner_positives or None,
            **held,
        )
        problem = AUPRC(model, margin=self.margin, clip=self.clip or None, outer_examples=clients.outer_examples)
        return problem, clients
