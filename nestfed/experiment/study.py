"""A study: an experiment file with a [study] table, which trains, compares, judges and releases a model for tables at sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nestfed.core import METHODS, NestfedError, one_of
from nestfed.data.tables import NUMBER
from nestfed.problems.objective import Labelled

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment

CALIBRATIONS, RELEASES = ("common", "sites"), ("best", "first")
FAMILY, AGNOSTIC = "worst client", "agnostic"
"""The family of methods, and the problem, whose objective is that of the worst clients."""
PROTECTED = "sites"
"""What study.protect may name."""


@dataclass(frozen=True)
class SitesSpec:
    """The [sites] table: the file of each site, where the tables are at hand. It is not part of the study's digest."""

    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, file in self.files.items():
            if not isinstance(file, str) or not file:
                raise NestfedError(f"sites.{name} must be the path of a table, not {file!r}.")


def threshold_rule(rule: str) -> tuple[str, float]:
    """Return the kind of a threshold's rule and the wanted share, NaN for balanced; reject an invalid rule."""
    name, _, written = rule.partition(" ")
    if name == "balanced" and not written:
        return name, math.nan
    try:
        wanted = float(written)
    except ValueError:
        wanted = math.nan
    if name not in ("sensitivity", "specificity", "alerts") or not 0 < wanted <= 1:
        raise NestfedError(
            f"A threshold's rule is 'sensitivity S', 'specificity S', 'alerts S' with a share S above 0 and at most 1, or "
            f"'balanced'; got {rule!r}."
        )
    return name, wanted


@dataclass(frozen=True)
class StudySpec:
    """The [study] table: what a study does with the methods of its file, of which the first is the proposed one."""

    baseline: str = "fedavg"
    """The method that the proposed one is compared with."""
    thresholds: tuple[str, ...] = ("balanced",)
    """The model's thresholds: "sensitivity 0.9", "specificity 0.95", "alerts 0.1" or balanced; the first decides."""
    calibration: str = "common"
    """The released model's probabilities: common, or with every site's own recalibration (sites), shrunk to the common one."""
    protect: tuple[str, ...] = ()
    """What to protect from being served worst: sites. A model that protects them is released if it is better at the worst site."""
    release: str = "best"
    """best: the method whose gain on validation rows is significant, otherwise the plain one; first: the first method."""

    def __post_init__(self) -> None:
        one_of("study.calibration", self.calibration, CALIBRATIONS)
        one_of("study.release", self.release, RELEASES)
        if others := [name for name in self.protect if name != PROTECTED]:
            raise NestfedError(
                f"study.protect can only protect {PROTECTED!r}, not {others[0]!r}: name a column in data.subgroups to see the "
                "metrics of its values."
            )
        for rule in self.thresholds:
            threshold_rule(rule)
        if not self.thresholds:
            raise NestfedError("study.thresholds needs at least one threshold, such as 'balanced'.")


FINAL = {"data.validation": 0.0, "evaluation.keep": "last", "evaluation.patience": 0}
"""What is different in the last training of a method: it uses the validation rows too, so nothing is chosen by them."""


@dataclass(frozen=True)
class Training:
    """One training of a study: a method of its file with some settings."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of the method's grid, by dotted setting."""
    final: bool = False
    rounds: int = 0
    """0 = those of the file."""

    @property
    def name(self) -> str:
        """What it is called in messages and folders."""
        words = [f"{key.rpartition('.')[2]}={value:g}" for key, value in sorted(self.settings.items())]
        return " ".join([self.method, *words, *(["final"] if self.final else [])])

    def experiment(self, study: Experiment) -> Experiment:
        """Return the experiment that trains it; reject settings that are not in the method's grid."""
        if self.method not in study.methods:
            raise NestfedError(f"The study has no method {self.method!r}, only {', '.join(study.methods)}.")
        steps = {f"algorithm.{name}" for name in study.for_method(self.method).steps()}
        if wrong := set(self.settings) - set(study.grid(self.method)) - steps:
            raise NestfedError(f"{', '.join(sorted(wrong))} is not in the grid of {self.method}.")
        rounds = {"run.rounds": self.rounds} if self.rounds else {}
        return study.for_method(self.method).with_overrides(
            {**self.settings, **rounds, **(FINAL if self.final else {})}
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, for messages."""
        return {"method": self.method, "settings": dict(self.settings), "final": self.final, "rounds": self.rounds}

    @classmethod
    def from_json(cls, found: Any) -> Training:
        """Return the training that `to_json` wrote; raise a NestfedError if it is invalid."""
        try:
            settings = {str(k): float(v) for k, v in found["settings"].items()}
            return cls(str(found["method"]), settings, bool(found["final"]), int(found["rounds"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NestfedError("The message does not describe a training of the study.") from error


def protects(study: Experiment, name: str) -> bool:
    """Return whether a method of a study minimises the losses of the sites that it serves worst."""
    made = study.for_method(name)
    return METHODS[made.algorithm.name].family == FAMILY or made.problem.name == AGNOSTIC


def reject_unfit(study: Experiment) -> None:
    """Reject an experiment that cannot be a study."""
    if not study.methods:
        raise NestfedError("A study needs methods: add tables such as [methods.fedavg], the proposed method first.")
    spec = study.study
    if spec.baseline not in study.methods:
        raise NestfedError(f"study.baseline is {spec.baseline!r}, but the methods are {', '.join(study.methods)}.")
    for name in study.methods:
        problem = study.for_method(name).problem
        if isinstance(problem, Labelled) and problem.numeric != (study.data.target_kind == NUMBER):
            raise NestfedError(
                f"methods.{name} has the problem {problem.name}, which is for a {'number' if problem.numeric else 'class'}, "
                f"but data.target_kind is {study.data.target_kind!r}."
            )
        for key, values in study.grid(name).items():
            if not isinstance(values, Sequence) or not all(_is_number(v) for v in values) or not values:
                raise NestfedError(f"methods.{name}.tune.{key} must be a list of numbers in a study, not {values!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
