"""The parts of a reproduction, and the small records from which its report is written."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Self

from nestfed.core import Metric, NestfedError
from nestfed.engine.record import metrics_of
from nestfed.engine.round import Record
from nestfed.experiment.spec import Experiment, from_tables, read
from nestfed.files import write_atomically
from nestfed.metrics import find

CONFIRMED, REFUTED, UNTESTED = "confirmed", "not confirmed", "not testable here"
UNDECIDED = "not confirmed (within the spread)"
BUDGETS = ("quick", "standard", "full")


class Missing(NestfedError):
    """The runs that a claim needs are missing."""


# ---------------------------------------------------------------------------------------------------------
# Results


class Point(NamedTuple):
    """One evaluation of a run, with the costs up to it."""

    round: int
    value: float
    examples: int
    bytes: int
    seconds: float
    loss: float | None = None
    """The mean training loss of that round."""


@dataclass(frozen=True)
class Run:
    """One run as a small record: its evaluations."""

    data: str
    method: str
    seed: int
    metric: str
    curve: Sequence[Point]
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """The settings that tuning chose."""
    trials: int = 0
    also: Mapping[str, float] = field(default_factory=dict)
    """The other metrics at the end."""
    training: float | None = None
    """The training objective of the last model, where the recorded loss differs between methods."""
    diverged: bool = False
    """The run diverged; the curve ends before that."""

    @classmethod
    def of(cls, history: Sequence[Record], metric: str, **about: Any) -> Self:
        """Make the small record of a run from its full record."""
        rows = [r for r in history if r.get(metric) is not None]
        if not rows:
            raise NestfedError(f"{about['method']} on {about['data']}: the record has no {metric!r}.")
        curve = [
            Point(r["round"], r[metric], r["examples"], r["bytes_up"] + r["bytes_down"], r["seconds"], r["loss"])
            for r in rows
        ]
        also = {k: v for k, v in metrics_of(rows[-1]).items() if k != metric and not k.startswith("val_")}
        return cls(metric=metric, curve=curve, also=also, **about)

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.curve[-1].value

    def reach(self, target: float) -> Point | None:
        """Return the first evaluation after the start at which the metric was at least as good as the target."""
        metric = find(self.metric)
        return next((p for p in self.curve if p.round and metric.reached(p.value, target)), None)

    def loss(self, last: int = 3) -> float:
        """Return the final training loss: of the last model, or the mean over the last evaluated rounds."""
        if self.training is not None:
            return self.training
        values = [p.loss for p in self.curve if p.loss is not None]
        if not values:
            raise Missing(f"no training loss of {self.method} on {self.data}")
        return fmean(values[-last:])


@dataclass(frozen=True)
class Evidence:
    """The results of one reproduction."""

    name: str
    budget: str
    runs: Sequence[Run] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Measurements of an experiment without training."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Versions, machine, time spent."""

    def methods(self, data: str) -> list[str]:
        """Return the methods that were run on a dataset, in order."""
        return list(dict.fromkeys(r.method for r in self.runs if r.data == data))

    def data(self) -> list[str]:
        """Return the datasets, in order."""
        return list(dict.fromkeys(r.data for r in self.runs))

    def of(self, data: str, method: str) -> list[Run]:
        """Return a method's runs on a dataset, one per seed."""
        found = [r for r in self.runs if r.data == data and r.method == method]
        if not found:
            raise Missing(f"{method} was not run on {data}")
        return found

    def metric(self, data: str) -> Metric:
        """Return a case's metric."""
        found = next((r.metric for r in self.runs if r.data == data), None)
        if found is None:
            raise Missing(f"nothing was run on {data}")
        return find(found)

    def finals(self, data: str, method: str) -> list[float]:
        """Return the last value for every seed."""
        return [r.final for r in self.of(data, method)]

    def number(self, key: str) -> Any:
        """Return one of the numbers."""
        if key not in self.numbers:
            raise Missing(f"{key} was not measured")
        return self.numbers[key]

    def write(self, path: Path) -> None:
        """Write the records: a line about the reproduction, then one per run."""
        head = {"name": self.name, "budget": self.budget, "meta": self.meta, "numbers": self.numbers}
        lines = [json.dumps(head), *(json.dumps(asdict(run)) for run in self.runs)]
        write_atomically(path, ("\n".join(lines) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read records."""
        try:
            head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
            runs = [Run(**{**row, "curve": [Point(*p) for p in row["curve"]]}) for row in rows]
            return cls(head["name"], head["budget"], runs, head["numbers"], head["meta"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NestfedError(f"{path} is not the record of a reproduction: {error}.") from error


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation; nan for a single value."""
    return stdev(values) if len(values) > 1 else math.nan


def plus_minus(values: Sequence[float], digits: int = 4) -> str:
    """Return mean ± deviation as text."""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def reached(runs: Sequence[Run], target: float) -> dict[str, Any]:
    """Return the costs of reaching a target: mean and deviation over the seeds that did, and their number."""
    points = [p for p in (run.reach(target) for run in runs) if p is not None]
    found: dict[str, Any] = {"target": target, "reached": len(points), "seeds": len(runs)}
    for cost in ("round", "examples", "bytes") if points else ():
        values = [getattr(p, cost) for p in points]
        found[cost] = {"mean": fmean(values), "sd": None if len(values) < 2 else stdev(values)}
    return found


# ---------------------------------------------------------------------------------------------------------
# Claims


class Verdict(NamedTuple):
    """The verdict on a claim, with the numbers behind it."""

    outcome: str
    figures: str


@dataclass(frozen=True)
class Claim:
    """A published claim and how it is judged."""

    text: str
    check: Callable[[Evidence], Verdict]
    trains: bool = True
    """The claim is about training, which the quick budget cannot test."""

    def verdict(self, evidence: Evidence) -> Verdict:
        """Judge the claim by the results."""
        try:
            found = self.check(evidence)
        except Missing as missing:
            return Verdict(UNTESTED, f"{missing}.")
        if self.trains and evidence.budget == "quick":
            return Verdict(UNTESTED, f"The quick budget is too short to judge this: {found.figures}")
        return found


# ---------------------------------------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Case:
    """One comparison of methods: an experiment file with changes, and the published values."""

    data: str
    """Its name in the paper's table."""
    experiment: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings by section.name, or by methods.METHOD.section.name for one method."""
    published: Mapping[str, float] = field(default_factory=dict)
    higher: float | None = None
    """A further target, above the published values."""
    sweep: tuple[str, str, tuple[Any, ...]] | None = None
    """(method, setting, values): instead of the file's methods, one method with one setting varied."""
    splits: bool = False
    """Seed s uses test set s, with its own tuning."""

    def build(self, budget: Budget) -> Experiment:
        """Return the experiment at a budget."""
        changes = {**self.changes, **budget.changes, **budget.only_for.get(self.data, {})}
        common = {k: v for k, v in changes.items() if not k.startswith("methods.")}
        experiment = read(budget.swap.get(self.experiment, self.experiment)).with_overrides(common)
        tables = copy.deepcopy(dict(experiment.source))
        for key in changes.keys() - common.keys():
            _, method, section, setting = key.split(".")
            tables["methods"][method].setdefault(section, {})[setting] = changes[key]
        experiment = from_tables(tables)
        return experiment if self.sweep is None else _swept(experiment, *self.sweep)


def _swept(experiment: Experiment, method: str, setting: str, values: Sequence[Any]) -> Experiment:
    tables = copy.deepcopy(dict(experiment.source))
    base = {k: v for k, v in tables["methods"][method].items() if k != "tune"}
    section, _, key = setting.partition(".")
    tables["methods"] = {}
    for value in values:
        table = copy.deepcopy(base)
        table.setdefault(section, {})[key] = value
        if setting == "run.q":  # at equal iterations, not rounds
            run, every = experiment.run, experiment.evaluation.every
            table["run"]["rounds"] = max(1, run.rounds * run.q // value)
            table["evaluation"] = {"every": max(1, every * run.q // value)}
        tables["methods"][f"{key}={value}"] = table
    return from_tables(tables)


@dataclass(frozen=True)
class Budget:
    """How much of a reproduction is run."""

    seeds: int = 3
    trials: int = 0
    """Trials per method; 0 = the whole grid."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    only_for: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes for one case, by its name."""
    cases: tuple[str, ...] = ()
    """Only these cases; empty = all."""
    swap: Mapping[str, str] = field(default_factory=dict)
    """Experiment files that replace others."""
    factor: float = 1.0
    """The cost of a round relative to the measured size."""
    minutes: float = 0.0
    """Measured minutes on two cores, for work that is not training."""
    memory: float = 1.0
    """Gigabytes, at most."""
    departs: str = ""
    """What differs from the paper at this budget."""
    trial_rounds: int = 0
    """Rounds of a trial; 0 = those of a run."""
    trial_seeds: int = 1
    """Seeds of a trial; their mean decides."""
    stopping: bool = True
    """The worse half of the trials stops early."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """The factor of single cases, by name."""


class Workshop(NamedTuple):
    """The directories and settings for making figures."""

    place: Path
    budget: str
    folders: Mapping[str, Path]
    """The directories of the trained cases."""
    experiments: Mapping[str, Experiment]
    seeds: int = 0


@dataclass(frozen=True)
class Reproduction:
    """One figure or table."""

    name: str
    title: str
    budgets: Mapping[str, Budget]
    claims: Sequence[Claim] = ()
    cases: Sequence[Case] = ()
    produce: Callable[[Workshop], dict[str, Any]] | None = None
    """Makes figures and returns numbers, after training."""
    needs: tuple[str, ...] = ()
    """The datasets."""
    also: tuple[str, ...] = ()
    """Further metrics for the table."""
    losses: bool = False
    """The training loss is comparable between methods, and the paper plots it."""
    ours: bool = False
    """Not from a paper."""

    def at(self, budget: str, seeds: int = 0) -> Budget:
        """Return a budget, with another number of seeds if one is given."""
        if budget not in self.budgets:
            raise NestfedError(f"Unknown budget {budget!r}; the budgets are {', '.join(self.budgets)}.")
        found = self.budgets[budget]
        if seeds < 0:
            raise NestfedError(f"seeds must be at least 1, not {seeds}.")
        return replace(found, seeds=seeds or found.seeds)

    def chosen(self, budget: Budget) -> list[Case]:
        """Return the cases that a budget runs."""
        return [case for case in self.cases if not budget.cases or case.data in budget.cases]
