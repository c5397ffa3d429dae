"""Named objectives: their options, and how they build problem and clients.

The `[problem]` table of an experiment file is one of these dataclasses, chosen by `name` from `core.OBJECTIVES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from nestfed.core import Metric, at_least
from nestfed.data.clients import Size

Evaluate = Callable[[Any], dict[str, float]]
"""Computes the metrics of a model."""


@dataclass(frozen=True)
class Objective:
    """The options of an objective: a frozen dataclass that validates itself. The base class stands for no objective."""

    name: ClassVar[str] = ""
    cites: ClassVar[tuple[str, ...]] = ()
    """The BibTeX entries to cite."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that `nestfed cite` accepts."""


@dataclass(frozen=True)
class Labelled(Objective, ABC):
    """An objective on labelled examples (x, y)."""

    binary: ClassVar[bool] = True
    """Labels must be 0 and 1."""
    several: ClassVar[bool] = False
    """Every example has several labels, each 0, 1 or unknown (NaN)."""
    numeric: ClassVar[bool] = False
    """The target is a number, not a class."""
    log_odds: ClassVar[bool] = False
    """A single score is the log-odds of the positive class, so accuracy and log-loss are defined for it."""
    counted: ClassVar[bool] = False
    """`build` also takes `totals`, the rows of all clients (`nestfed.data.clients.Totals`)."""
    initial_batch: int = 0
    """The batch size (of `outer` for auprc, of `first` for pairs across clients) wherever the method restarts its estimate; 0 = the usual size."""

    def __post_init__(self) -> None:
        at_least(self, 0, "initial_batch")

    @abstractmethod
    def metric(self, classes: int) -> str:
        """Return the name of the default metric."""

    @abstractmethod
    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[Any, Any]:
        """Return the problem and the clients.

        - `arrays`: all examples, (x, y); `parts`: the rows of each client.
        - `p`: the mean over clients of their share of positives; None = computed from `parts`.
        - `restarts`: whether the method restarts its estimate at iteration t.
        - `held`: further options of the clients (`seed`, `names`, `transform`).
        """

    def size(self, usual: int, restarts: Callable[[int], bool]) -> Size:
        """Return the batch size, with the larger `initial_batch` where the method restarts its estimate."""
        large = self.initial_batch
        return (lambda t: large if restarts(t) else usual) if large else usual


@dataclass(frozen=True)
class Setting:
    """Settings from the other tables of an experiment, for an objective that brings its own examples."""

    clients: int
    seed: int
    network: Callable[[tuple[int, ...] | None, int], nn.Module]
    """Builds the model of [model] from the shape of one input and the number of outputs."""
    dataset: str = ""
    folder: Path | str | None = None
    """Where the dataset is; None = NESTFED_DATA or the cache."""
    limit: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Made:
    """A problem with its clients and its evaluation."""

    problem: Any
    clients: Any
    metric: str | Metric
    """The default metric."""
    test: Evaluate
    validation: Evaluate | None = None


@dataclass(frozen=True)
class Generated(Objective, ABC):
    """An objective that brings its own examples: synthetic ones, tasks, or text."""

    @abstractmethod
    def build(self, setting: Setting) -> Made:
        """Return the problem, the clients and the evaluation."""
