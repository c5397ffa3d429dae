"""AUROC as a minimax problem: deep AUC maximisation with any scoring module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nestfed.core import Batch, Data, NestfedError, SolvableSaddle, as_batch
from nestfed.problems.base import Minimax, Model, _around


class Thresholds(nn.Module):
    """A scoring module with the objective's own scalars: a follows the positives' mean score, b the negatives'."""

    def __init__(self, module: nn.Module, sigmoid: bool) -> None:
        super().__init__()
        self.module = module
        like = next(module.parameters(), torch.ones(()))  # that there are none is told later, in one sentence
        self.a = nn.Parameter(torch.ones((), dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))
        self.sigmoid = sigmoid

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, a and b."""
        scores = self.module(x)
        if scores.dim() != 1:
            raise NestfedError(f"auroc needs a model with one score per example, not shape {tuple(scores.shape)}.")
        return torch.sigmoid(scores) if self.sigmoid else scores, self.a, self.b


class AUROC(Minimax, SolvableSaddle):
    """Minimise the AUC square loss in the minimax form of Ying et al. 2016, θ = (model, a, b), one number w.

    f = (1−p)(h−a)²1[y=1] + p(h−b)²1[y=0] + 2(1+w)(p·h·1[y=0] − (1−p)·h·1[y=1]) − p(1−p)w², where p is the share of
    positives in the training data. The objective can be negative: look at the AUROC, not at the loss.
    Batches are (x, y) with y in {0, 1}. The score is the raw output, or its sigmoid on request.
    """

    def __init__(self, model: nn.Module, *, p: float, sigmoid: bool = False, clip: float | None = None) -> None:
        if not 0 < p < 1:
            raise NestfedError(f"auroc: p, the share of positives, must lie in (0, 1), not {p:g}.")
        if not isinstance(model, nn.Module):
            raise NestfedError("auroc needs an nn.Module that gives one score per example.")
        self.p = p
        super().__init__(self._objective, Thresholds(model, sigmoid), torch.zeros(1), clip=clip)

    def _objective(self, model: Model, w: Tensor, batch: Data) -> Tensor:
        x, y = batch
        h, a, b = model(x)
        p, w = self.p, w[0]
        positive = (1 - p) * ((h - a) ** 2 - 2 * (1 + w) * h)
        negative = p * ((h - b) ** 2 + 2 * (1 + w) * h)
        return torch.where(y == 1, positive, negative).mean() - p * (1 - p) * w**2

    def best_dual(self, theta: Tensor, batch: Batch | Data) -> Tensor:
        """Return E[h|−] − E[h|+], estimated so that the mean over clients is right however they share the classes.

        Linear in the batch's examples; distances from a and b are averaged, which are smaller than scores.
        """
        sample = as_batch(batch)
        x, negative, positive = self._classes(sample.data, theta.dtype)
        with _around(sample):
            h, a, b = self.flat.bind(theta)(x)
        sample.note(len(x))
        return (b - a + (negative * (h - b) - positive * (h - a)).mean())[None].detach()

    def _classes(self, data: Data, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch's inputs, and for either class weights whose mean over all data is 1."""
        x, y = data
        return x, (y != 1).to(dtype) / (1 - self.p), (y == 1).to(dtype) / self.p

    def bind(self, x: Tensor, *, train: bool = False) -> Model:
        """Return the scoring model at x, without a and b."""
        model = super().bind(x, train=train)
        return lambda *args, **kwargs: model(*args, **kwargs)[0]

    def module(self, x: Tensor) -> Any:
        """Return the user's own scoring module with trained parameters."""
        return super().module(x).module
