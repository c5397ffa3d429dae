"""A warm-up: rounds with another method, and possibly another objective, before a run's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nestfed.core import Algorithm, NestfedError, Problem, whole
from nestfed.engine.program import AnyAlgorithm


@dataclass(frozen=True)
class WarmUp:
    """The first rounds of a run, with another method: `simulate(…, rounds=100, warm_up=WarmUp(20, FedAvg(0.1), problem))`.

    They count among the run's rounds and are in its record, its checkpoints and its costs. The run's own method then
    starts at iteration 0 from the trained model, as if it were a new run.
    """

    rounds: int
    """The rounds of the warm-up; 0 = none."""
    method: AnyAlgorithm
    problem: Problem | None = None
    """Another objective on the same model; None = the run's problem."""
    clients: Any = None
    """The clients with the batches of that objective; None = the run's clients."""

    def __post_init__(self) -> None:
        whole("warm_up.rounds", self.rounds, 0)
        if not isinstance(self.method, Algorithm):
            raise NestfedError(f"warm_up.method must be an object such as FedAvg(eta=0.1), not {self.method!r}.")

    def first(self, problem: Problem, x0: Tensor | None) -> Tensor | None:
        """Return the starting point of the warm-up for a starting point of the run's problem."""
        if x0 is None or self.problem is None or self.problem is problem:
            return x0
        return self.problem.start(problem.module(x0))

    def hand_over(self, problem: Problem, x: Tensor) -> Tensor:
        """Return the starting point of the run's problem for the warm-up's last point, by the user's model."""
        if self.problem is None or self.problem is problem:
            return x
        return problem.start(self.problem.module(x))
