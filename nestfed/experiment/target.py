"""What kind of target a study has, and what follows from it. The only place that decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nestfed.data.tables import CLASS, NUMBER, SURVIVAL
from nestfed.queries.influence import NUMBERS
from nestfed.queries.scores import LOG_ODDS, LOGITS

if TYPE_CHECKING:
    from nestfed.experiment.prepare import DataSpec


@dataclass(frozen=True)
class Target:
    """The kind of a target: class, number or survival."""

    kind: str = CLASS
    classes: tuple[str, ...] = ()
    """The names of the classes, the positive one last; empty for the other kinds."""

    @classmethod
    def of(cls, data: DataSpec, classes: tuple[str, ...] = ()) -> Target:
        """Return the target of a [data] table; `classes`: as the sites have agreed."""
        return cls(data.target_kind, classes if data.target_kind == CLASS else ())

    @property
    def binary(self) -> bool:
        """Whether there are two classes, so that scores have thresholds and calibrations."""
        return len(self.classes) == 2

    @property
    def is_number(self) -> bool:
        """Whether scores predict a number."""
        return self.kind == NUMBER

    @property
    def is_survival(self) -> bool:
        """Whether scores are logarithms of hazards."""
        return self.kind == SURVIVAL

    @property
    def outputs(self) -> int:
        """The scores of a row: one for each of several classes, otherwise one."""
        return len(self.classes) if len(self.classes) > 2 else 1

    @property
    def scores(self) -> str:
        """What the scores of an exact regression are, and of every model that is judged beside it."""
        if self.is_number:
            return NUMBERS
        return LOG_ODDS if self.binary else LOGITS

    @property
    def family(self) -> Literal["logistic", "linear"]:
        """The exact regression that fits it."""
        return "linear" if self.is_number else "logistic"

    @property
    def exact(self) -> str:
        """The name of this regression."""
        return f"{self.family} regression"
