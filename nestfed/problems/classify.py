"""Classification with cross-entropy, the baseline for the nested objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Data, NestfedError, at_least
from nestfed.data.clients import Balanced, Examples
from nestfed.problems.base import Minimize, Model
from nestfed.problems.objective import Labelled


def cross_entropy(model: Model, batch: Data) -> Tensor:
    """Return the mean cross-entropy of logits; a model with one score per example is a binary classifier.

    A batch (x, y, weight), as from `Balanced` clients, weights its examples.
    """
    if len(batch) not in (2, 3) or not all(isinstance(part, Tensor) for part in batch):
        raise NestfedError("classify needs batches (x, y) from Examples clients, not pairs (outer, inner).")
    x, y, *weight = batch
    logits = model(x)
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), *weight)
    losses = F.cross_entropy(logits, y, reduction="none" if weight else "mean")
    return (weight[0] * losses).mean() if weight else losses


class Classify(Minimize):
    """Cross-entropy on batches (x, y), or weighted on batches (x, y, weight)."""

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None, buffers: str = "") -> None:
        super().__init__(cross_entropy, model, clip=clip, buffers=buffers)


@dataclass(frozen=True)
class ClassifyOptions(Labelled):
    """Options of classify: cross-entropy of two or more classes."""

    batch: int = 32
    """Examples in a step."""
    balanced: bool = False
    """Give both classes the same weight, over all clients together; batches are half positives, half negatives."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "classify"
    binary = False
    log_odds = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2 if self.balanced else 1, "batch")
        at_least(self, 0, "clip")

    def metric(self, classes: int) -> str:
        """AUROC for two classes, otherwise accuracy."""
        return "auroc" if classes == 2 else "accuracy"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[Classify, Examples | Balanced]:
        """Return cross-entropy on plain or balanced batches."""
        size, problem = self.size(self.batch, restarts), Classify(model, clip=self.clip or None)
        if self.balanced:
            return problem, Balanced(arrays, parts, batch=size, p=p, **held)
        return problem, Examples(arrays, parts, batch=size, **held)
