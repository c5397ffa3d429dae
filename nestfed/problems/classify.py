"""Classification with cross-entropy, the plain average of losses that the nested objectives are compared with."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Data
from nestfed.problems.base import Minimize, Model


def cross_entropy(model: Model, batch: Data) -> Tensor:
    """Return the mean cross-entropy of logits; a model with one score per example is a binary classifier."""
    x, y = batch
    logits = model(x)
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    return F.cross_entropy(logits, y)


class Classify(Minimize):
    """Cross-entropy on batches (x, y)."""

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None) -> None:
        super().__init__(cross_entropy, model, clip=clip)
