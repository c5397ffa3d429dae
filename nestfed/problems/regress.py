"""Regression with the squared error, for a target that is a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from nestfed.core import Data, NestfedError, at_least
from nestfed.data.clients import Examples
from nestfed.problems.base import Minimize, Model
from nestfed.problems.objective import Labelled


def squared_error(model: Model, batch: Data) -> Tensor:
    """Return half the mean squared error of a batch (x, y); the model returns one number per example."""
    x, y = batch
    found = model(x)
    if found.shape != y.shape:
        raise NestfedError(f"regress needs a model with one number per example, not shape {tuple(found.shape)}.")
    return 0.5 * ((found - y.to(found.dtype)) ** 2).mean()


class Regress(Minimize):
    """Half the mean squared error on batches (x, y)."""

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None, buffers: str = "") -> None:
        super().__init__(squared_error, model, clip=clip, buffers=buffers)


@dataclass(frozen=True)
class RegressOptions(Labelled):
    """Options of regress: the squared error of a target that is a number."""

    batch: int = 32
    """Examples in a step."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "regress"
    binary = False
    numeric = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch")
        at_least(self, 0, "clip")

    def metric(self, classes: int) -> str:
        """Root mean squared error."""
        return "rmse"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[Regress, Examples]:
        """Return the squared error on plain batches."""
        return Regress(model, clip=self.clip or None), Examples(
            arrays, parts, batch=self.size(self.batch, restarts), **held
        )
