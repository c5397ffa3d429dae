"""Classification with cross-entropy, the baseline for the nested objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Data, NestfedError, at_least
from nestfed.data.clients import Examples
from nestfed.problems.base import Minimize, Model
from nestfed.problems.objective import Labelled


def cross_entropy(model: Model, batch: Data) -> Tensor:
    """Return the mean cross-entropy of logits; a model with one score per example is a binary classifier."""
    if len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise NestfedError("classify needs batches (x, y) from Examples clients, not pairs (outer, inner).")
    x, y = batch
    logits = model(x)
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    return F.cross_entropy(logits, y)


class Classify(Minimize):
    """Cross-entropy on batches (x, y)."""

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None, buffers: str = "") -> None:
        super().__init__(cross_entropy, model, clip=clip, buffers=buffers)


@dataclass(frozen=True)
class ClassifyOptions(Labelled):
    """Options of classify: cross-entropy of two or more classes."""

    batch: int = 32
    """Examples in a step."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "classify"
    binary = False
    log_odds = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch")
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
    ) -> tuple[Classify, Examples]:
        """Return cross-entropy on plain batches."""
        clients = Examples(arrays, parts, batch=self.size(self.batch, restarts), **held)
        return Classify(model, clip=self.clip or None), clients
