"""The options of Cox regression over sites, which is exact: `nestfed train` fits it by questions, without rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nestfed.core import NestfedError, one_of
from nestfed.problems.objective import Labelled

TIES, BASELINES = ("efron", "breslow"), ("common", "stratified")


@dataclass(frozen=True)
class CoxOptions(Labelled):
    """Options of cox: proportional hazards for the time to an event."""

    ties: str = "efron"
    """How events at the same time are compared: efron or breslow."""
    baseline: str = "common"
    """The model that is released: common has one baseline hazard; stratified compares rows within their site only."""
    times: tuple[float, ...] = ()
    """The times at which survival is judged and predicted; empty = those at which 1/4, 1/2 and 3/4 of the events have happened."""

    name = "cox"
    binary = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_batch:
            raise NestfedError("cox: initial_batch has no meaning without rounds: leave it out.")
        one_of("problem.ties", self.ties, TIES)
        one_of("problem.baseline", self.baseline, BASELINES)
        if any(not isinstance(t, int | float) or not t > 0 for t in self.times):
            raise NestfedError(f"problem.times must be positive numbers, not {list(self.times)}.")

    def metric(self, classes: int) -> str:
        """Return no metric of rounds: there are none."""
        return ""

    def build(self, *given: Any, **options: Any) -> tuple[Any, Any]:
        """Reject rounds of training."""
        raise NestfedError("Cox regression has no rounds of training: `nestfed train` fits it exactly, by questions.")
