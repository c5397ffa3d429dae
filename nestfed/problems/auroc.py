"""AUROC as a minimax problem: deep AUC maximisation with any scoring module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Batch, Data, NestfedError, SolvableSaddle, as_batch, at_least
from nestfed.data.clients import Balanced, Examples, mean_rate
from nestfed.problems.base import Minimax, Model
from nestfed.problems.objective import Labelled

YING_2016 = """@inproceedings{ying2016stochastic,
  title     = {Stochastic Online {AUC} Maximization},
  author    = {Ying, Yiming and Wen, Longyin and Lyu, Siwei},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {29},
  pages     = {451--459},
  year      = {2016}
}"""


def square_losses(h: Tensor, a: Tensor, b: Tensor, w: Tensor, y: Tensor, p: Tensor | float) -> Tensor:
    """Return the terms of f for every score h with its label y; all but −p(1−p)w²."""
    positive = (1 - p) * ((h - a) ** 2 - 2 * (1 + w) * h)
    negative = p * ((h - b) ** 2 + 2 * (1 + w) * h)
    return torch.where(y == 1, positive, negative)


class Thresholds(nn.Module):
    """A scoring module with two numbers for each label: a tracks the positives' mean score, b the negatives'.

    labels: the number of labels; 0 = one, with scores (n,).
    """

    def __init__(self, module: nn.Module, sigmoid: bool, labels: int = 0) -> None:
        super().__init__()
        self.module, self.several = module, labels > 0
        like = next(module.parameters(), torch.ones(()))  # a module without parameters is rejected later
        shape = (labels,) if labels else ()
        self.a = nn.Parameter(torch.ones(shape, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.sigmoid = sigmoid

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, a and b."""
        scores = self.module(x)
        if scores.dim() != 1 and not self.several:
            raise NestfedError(f"auroc needs a model with one score per example, not shape {tuple(scores.shape)}.")
        return torch.sigmoid(scores) if self.sigmoid else scores, self.a, self.b


class AUROC(Minimax, SolvableSaddle):
    """Minimise the AUC square loss in the minimax form of Ying et al. 2016, θ = (model, a, b), one number w.

    f = (1−p)(h−a)²1[y=1] + p(h−b)²1[y=0] + 2(1+w)(p·h·1[y=0] − (1−p)·h·1[y=1]) − p(1−p)w², where p is the share of
    positives in the training data. The objective can be negative: watch the AUROC, not the loss.
    The score h is the raw output, or its sigmoid with `sigmoid=True`.

    Without `p`, batches are (x, y, weight) from `Balanced` clients, y in {0, 1}. The objective is then divided by
    4p(1−p), which makes it the one with p = ½: a step size means the same for every share of positives.
    With `p`, the mean over clients of their shares, batches are plain (x, y), as in the papers.
    """

    _inside = "module."

    def __init__(
        self,
        model: nn.Module,
        *,
        p: float | None = None,
        sigmoid: bool = False,
        clip: float | None = None,
        buffers: str = "",
    ) -> None:
        if p is not None and not 0 < p < 1:
            raise NestfedError(f"auroc: p, the share of positives, must be between 0 and 1, not {p:g}.")
        if not isinstance(model, nn.Module):
            raise NestfedError("auroc needs an nn.Module that gives one score per example.")
        self.weighted = p is None
        self.p = 0.5 if p is None else p
        super().__init__(self._objective, Thresholds(model, sigmoid), torch.zeros(1), clip=clip, buffers=buffers)

    def _objective(self, model: Model, w: Tensor, batch: Data) -> Tensor:
        x, y, *weight = self._checked(batch)
        h, a, b = model(x)
        p, w = self.p, w[0]
        loss = square_losses(h, a, b, w, y, p)
        return (weight[0] * loss if weight else loss).mean() - p * (1 - p) * w**2

    def _checked(self, batch: Data) -> Data:
        if len(batch) != 2 + self.weighted:
            raise NestfedError(
                "auroc: AUROC(model) needs batches (x, y, weight) from Balanced clients; for plain batches (x, y) pass "
                "the share of positives, AUROC(model, p=…)."
            )
        return batch

    def best_dual(self, theta: Tensor, batch: Batch | Data) -> Tensor:
        """Estimate E[h|−] − E[h|+]; the mean over clients is unbiased for every distribution of classes.

        The estimate is linear in the batch's examples. It averages distances from a and b, which are smaller than
        scores.
        """
        sample = as_batch(batch)
        x, negative, positive = self._classes(sample.data, theta.dtype)
        with self.evaluating(sample):
            h, a, b = self.model_at(theta)(x)
        sample.note(len(x))
        return (b - a + (negative * (h - b) - positive * (h - a)).mean())[None].detach()

    def _classes(self, data: Data, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch's inputs, and for each class weights whose mean over all data is 1."""
        x, y, *weight = self._checked(data)
        negative, positive = (y != 1).to(dtype) / (1 - self.p), (y == 1).to(dtype) / self.p
        if weight:
            negative, positive = weight[0].to(dtype) * negative, weight[0].to(dtype) * positive
        return x, negative, positive

    def bind(self, x: Tensor, *, train: bool = False) -> Model:
        """Return the user's scoring module at x, without a and b."""
        found = super().bind(x, train=train)
        return nn.Sequential(found.module, nn.Sigmoid()) if found.sigmoid else found.module

    def module(self, x: Tensor) -> Any:
        """Return the user's scoring module with trained parameters."""
        return super().module(x).module


@dataclass(frozen=True)
class AUROCOptions(Labelled):
    """Options of auroc: the AUC square loss as a minimax problem."""

    batch: int = 32
    """Examples in a step."""
    balanced: bool = True
    """Draw half positives and half negatives, with correcting weights; false = plain batches, as in the papers."""
    sigmoid: bool = False
    """Take the sigmoid of the model's output as the score."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "auroc"
    cites = (YING_2016,)
    aliases = ("solam",)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 if self.balanced else 1
        at_least(self, least, "batch")
        if self.initial_batch:
            at_least(self, least, "initial_batch")
        at_least(self, 0, "clip")

    def metric(self, classes: int) -> str:
        """AUROC."""
        return "auroc"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[AUROC, Balanced | Examples]:
        """Return the problem on balanced batches, or on plain batches with the share of positives p."""
        size = self.size(self.batch, restarts)
        if self.balanced:
            problem = AUROC(model, sigmoid=self.sigmoid, clip=self.clip or None)
            return problem, Balanced(arrays, parts, batch=size, p=p, **held)
        p = mean_rate(arrays[1], parts) if p is None else p
        problem = AUROC(model, p=p, sigmoid=self.sigmoid, clip=self.clip or None)
        return problem, Examples(arrays, parts, batch=size, **held)
