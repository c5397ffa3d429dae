"""Regression with the squared error, for a target that is a number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Data, NestfedError, at_least
from nestfed.data.clients import Examples
from nestfed.models import Mlp
from nestfed.problems.base import Minimize, Model
from nestfed.problems.objective import Labelled


class InUnits(nn.Module):
    """A network that learns a target in its deviations from its mean, and predicts it in its own units.

    It has the parameters of the network. `plain` returns a network without units, with other parameters of its head.
    """

    def __init__(self, network: nn.Module, center: float, unit: float) -> None:
        super().__init__()
        self.network, self.center, self.unit = network, center, unit

    def forward(self, x: Tensor) -> Tensor:
        """Map examples to predictions."""
        return self.center + self.unit * self.network(x)

    def plain(self) -> nn.Module:
        """Return a network that makes the same predictions by itself."""
        made = copy.deepcopy(self.network)
        assert isinstance(made.head, nn.Linear)
        with torch.no_grad():
            made.head.weight.mul_(self.unit)
            made.head.bias.mul_(self.unit).add_(self.center)
        return made


def in_units(network: nn.Module, center: float, unit: float) -> nn.Module:
    """Return a network with hidden layers in units of its target; others as they are.

    Gradients of hidden layers grow with the square of the target's scale. A linear score has no hidden layers: its
    parameters stay those of the regression.
    """
    linear = isinstance(network, Mlp) and not len(network.hidden)
    headed = isinstance(getattr(network, "head", None), nn.Linear)
    return InUnits(network, center, unit) if headed and not linear and (center, unit) != (0.0, 1.0) else network


def squared_error(model: Model, batch: Data) -> Tensor:
    """Return half the mean squared error of a batch (x, y); the model returns one number per example."""
    x, y = batch
    found = model(x)
    if found.shape != y.shape:
        raise NestfedError(f"regress needs a model with one number per example, not shape {tuple(found.shape)}.")
    return 0.5 * ((found - y.to(found.dtype)) ** 2).mean()


class Regress(Minimize):
    """Half the mean squared error on batches (x, y), in squares of the unit of an `InUnits`."""

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None, buffers: str = "") -> None:
        unit = model.unit if isinstance(model, InUnits) else 1.0
        loss = squared_error if unit == 1 else partial(_in_squares, unit**2)
        super().__init__(loss, model, clip=clip, buffers=buffers)


def _in_squares(square: float, model: Model, batch: Data) -> Tensor:
    return squared_error(model, batch) / square


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
