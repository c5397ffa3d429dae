"""Tune, compare and sweep in Python, on your own problem, methods, clients and metric.

These are the functions behind `nestfed tune`, `compare` and `sweep`: equal tuning on validation data, the same seeds for every
method, and the same report.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nestfed.core import Algorithm, Metric, NestfedError, unknown
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.experiment.compare import Comparison
from nestfed.experiment.compare import compare as compare_experiment
from nestfed.experiment.own import Given, Judge, Method, OwnExperiment, by_method, hyper_parameters
from nestfed.experiment.spec import RunSpec
from nestfed.experiment.sweep import Point, Sweep, sweep_points
from nestfed.experiment.tune import EXTEND, Tuned, shown
from nestfed.experiment.tune import tune as tune_experiment
from nestfed.metrics import find
from nestfed.report.page import Table
from nestfed.report.text import as_text

LOG = logging.getLogger("nestfed.experiment")


@dataclass(frozen=True)
class Tuning:
    """The result of tuning. `print(tuning)` shows every trial."""

    metric: Metric
    tuned: Mapping[str, Tuned]
    methods: Mapping[str, Algorithm[Any, Any]]
    """The methods with the chosen hyper-parameters, for `simulate`."""

    def __str__(self) -> str:
        columns, rows = shown(self.tuned, self.metric)
        return as_text(Table("", columns, rows))


def tune(
    problem: Any,
    methods: Mapping[str, Method],
    clients: Any,
    *,
    rounds: int,
    metric: str | Metric,
    validate: Judge,
    grids: Mapping[str, Sequence[Any]],
    q: int = 1,
    seed: int = 0,
    trials: int = 0,
    trial_seeds: int = 1,
    stopping: bool = True,
    extend: int = EXTEND,
    evaluation: Evaluation = Evaluation(),
    exchange: Exchange = Exchange(),
    execution: Execution = Execution(),
    directory: str | Path | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> Tuning:
    """Try the values of `grids` for each method and choose by the metric of `validate`. See `compare` for the arguments.

    - `stopping`: stop the worse half of the trials after a quarter and after half of the rounds.
    """
    experiment = _own(
        problem, methods, clients, metric, validate, validate, grids, rounds, q, seed, evaluation, exchange, execution
    )
    with _place(directory) as place:
        found, tuned = tune_experiment(
            experiment, list(methods), Path(place), trials=trials, seeds=trial_seeds, stopping=stopping, extend=extend,
            workers=workers, tell=tell,
        )  # fmt: skip
    made = {n: experiment.for_method(n).with_overrides(tuned[n].chosen).method() for n in methods}
    return Tuning(found, tuned, made)


def compare(
    problem: Any,
    methods: Mapping[str, Method],
    clients: Any,
    *,
    rounds: int,
    metric: str | Metric,
    evaluate: Judge,
    validate: Judge | None = None,
    grids: Mapping[str, Sequence[Any]] | None = None,
    q: int = 1,
    seed: int = 0,
    seeds: int = 3,
    trials: int = 0,
    trial_seeds: int = 1,
    extend: int = EXTEND,
    evaluation: Evaluation = Evaluation(),
    exchange: Exchange = Exchange(),
    execution: Execution = Execution(),
    directory: str | Path | None = None,
    title: str = "comparison",
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> Comparison:
    """Compare methods at equal rounds: tune each on validation data, then run it with every seed.

    - `problem`, `clients`: an object for all methods, a mapping by method, or a function of the seed.
    - `methods`: for each name a class, `functools.partial(FCSGM, beta=0.5)`, an object, or a function of the values to try.
    - `metric`: a name, or a `Metric` with its direction.
    - `evaluate`, `validate`: functions of the model that return named metrics on test and validation data. Tuning sees only
      `validate`. With `held_out` the choice knows the noise of the validation rows.
    - `grids`: values to try; `"eta"` is for all methods that have it, `"fedavg.eta"` for one. `"eta_g"` may be that of a server.
    - `seeds`: runs per method, from `seed` on.
    - `trials`, `trial_seeds`, `extend`: trials per method (0 = the whole grid), seeds per trial, and the trials beyond a grid.
    - `evaluation`, `exchange`, `execution`: as in `simulate`.
    - `directory`: keep all runs there, and resume from them; None = temporary.
    - `workers`: parallel processes; None = one per core.
    """
    experiment = _own(
        problem, methods, clients, metric, evaluate, validate, grids, rounds, q, seed, evaluation, exchange, execution
    )
    place = _place(directory)
    compare_experiment(
        experiment, list(methods), seeds, Path(place.name), trials=trials, trial_seeds=trial_seeds, extend=extend,
        title=title, workers=workers, tell=tell,
    )  # fmt: skip
    return Comparison.read(Path(place.name), place)


def sweep(
    problem: Any,
    methods: Mapping[str, Method],
    clients: Any,
    *,
    over: Mapping[str, Any],
    rounds: int,
    metric: str | Metric,
    evaluate: Judge,
    validate: Judge | None = None,
    grids: Mapping[str, Sequence[Any]] | None = None,
    q: int = 1,
    seed: int = 0,
    seeds: int = 3,
    trials: int = 0,
    trial_seeds: int = 1,
    extend: int = EXTEND,
    evaluation: Evaluation = Evaluation(),
    exchange: Exchange = Exchange(),
    execution: Execution = Execution(),
    directory: str | Path | None = None,
    title: str = "sweep",
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> Sweep:
    """Compare methods at every value of some settings; see `compare` for the other arguments.

    - `over`: for each setting its values, such as `{"q": (1, 5, 10), "exchange.share": (0.5, 1.0)}`; all combinations are run.
      The values of `"clients"` and `"problem"` are mappings from a label to the object.
    """
    experiment = _own(
        problem, methods, clients, metric, evaluate, validate, grids, rounds, q, seed, evaluation, exchange, execution
    )
    place = _place(directory)
    sweep_points(
        list(_points(experiment, over)), list(methods), seeds, Path(place.name), trials=trials, trial_seeds=trial_seeds,
        extend=extend, title=title, workers=workers, tell=tell,
    )  # fmt: skip
    return Sweep.read(Path(place.name), place)


def _points(experiment: OwnExperiment, over: Mapping[str, Any]) -> Any:
    keys = {key: key if key in ("clients", "problem") else _setting(key, experiment.given.methods) for key in over}
    for key, values in over.items():
        if key in ("clients", "problem") and not isinstance(values, Mapping):
            raise NestfedError(f"over[{key!r}] must be a mapping from a label to the {key}, not {values!r}.")
        if isinstance(values, str) or not isinstance(values, Sequence | Mapping) or not values:
            raise NestfedError(f"over[{key!r}] must be a list of values, not {values!r}.")
    for values in itertools.product(*over.values()):
        point, variant = dict(zip(over, values)), experiment
        for key, value in point.items():
            if key in ("clients", "problem"):
                variant = replace(variant, given=replace(variant.given, **{key: over[key][value]}))
            else:
                variant = variant.with_overrides({keys[key]: value})
        yield Point(point, variant)


def _setting(key: str, methods: Mapping[str, Method]) -> str:
    """Return the dotted name of a setting."""
    known = {
        f.name: f"{section}.{f.name}"
        for section, cls in (
            ("execution", Execution),
            ("evaluation", Evaluation),
            ("exchange", Exchange),
            ("run", RunSpec),
        )
        for f in fields(cls)
    }
    if key in known or key in known.values():
        return known.get(key, key)
    if having := [name for name, method in methods.items() if key.rpartition(".")[2] in hyper_parameters(method)]:
        raise NestfedError(
            f"over has {key!r}, which is a hyper-parameter of {', '.join(having)} and not a setting of the run: give its "
            "values in grids to tune it, or one method for each value to compare them."
        )
    raise unknown("setting", key, [*known, "clients", "problem"])


def _own(
    problem: Any, methods: Mapping[str, Method], clients: Any, metric: str | Metric, evaluate: Judge, validate: Judge | None,
    grids: Mapping[str, Sequence[Any]] | None, rounds: int, q: int, seed: int, evaluation: Evaluation, exchange: Exchange,
    execution: Execution,
) -> OwnExperiment:  # fmt: skip
    if not isinstance(methods, Mapping) or not methods:
        raise NestfedError(f'methods must be a mapping such as {{"fedavg": FedAvg}}, not {methods!r}.')
    given = Given(problem, methods, clients, find(metric), evaluate, validate, by_method(methods, grids or {}))
    return OwnExperiment.of(given, rounds, q, seed, evaluation, exchange, execution)


class _Folder:
    """A directory of the user's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        return None


def _place(directory: str | Path | None) -> Any:
    """Return the user's directory, or a temporary one that is removed with its last user."""
    return tempfile.TemporaryDirectory(prefix="nestfed-") if directory is None else _Folder(str(directory))
