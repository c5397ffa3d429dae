"""Conduct a study: the same steps whether the sites' tables are at hand or at institutions.

It learns of rows only by queries, and of models only their parameters. So a study gives the same result simulated and deployed.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from nestfed.core import DivergedError, Metric, NestfedError
from nestfed.engine.record import metrics_of
from nestfed.engine.round import Record
from nestfed.experiment import choice
from nestfed.experiment.site import Network
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import Training, protects, reject_unfit
from nestfed.experiment.target import Target
from nestfed.metrics import find
from nestfed.queries import TRAINING, Answers, Arrays, Ask, Query, Question
from nestfed.queries.agreement import Agreement
from nestfed.queries.newton import FACTS, OUTER, SUMS, Path, network_parameters, ridge_regression
from nestfed.queries.solve import Fit
from nestfed.study.advice import lack_of_positives

LOG = logging.getLogger(__name__)
EXTEND = 2
"""How often a grid whose best step is at its end is extended by the next step."""
QUERIES = (FACTS, SUMS, OUTER)
"""What a study asks besides what every run over tables asks."""


@dataclass(frozen=True)
class Trained:
    """A training's result: the network's parameters and the record."""

    x: np.ndarray
    history: Sequence[Record]


class Sites(Protocol):
    """Where the tables of a study are: on this machine, or at institutions."""

    names: Sequence[str]

    @property
    def agreement(self) -> Agreement:
        """What the sites agree on before the first training."""

    @property
    def network(self) -> Network:
        """The network that the study trains."""

    def ask_all(
        self, questions: Sequence[Question], *, final: bool = True, x: np.ndarray | None = None
    ) -> Mapping[int, Answers]:
        """Ask about model inputs, in the division of rows of the last trainings or (final=False) of the trials.

        - `x`: the network's parameters, for questions about scores.
        """

    def train(self, training: Training, start: np.ndarray | None) -> Trained:
        """Train over all sites, from the given parameters of the network."""


def asking(sites: Sites, *, final: bool = True) -> Ask:
    """Return how to ask sites one question; the argument `x` is the network's parameters."""

    def ask(query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        x = arguments.pop("x", None) if query.at_model else None
        one = Question(query, part, arguments)
        return {n: found[one.key] for n, found in sites.ask_all([one], final=final, x=x).items() if one.key in found}

    return ask


def choosing(study: Experiment) -> Metric:
    """Return the metric that decides what is chosen on validation rows, in a study or among the trials of one method."""
    return find(study.evaluation.metric)


@dataclass(frozen=True)
class Way:
    """One way of training, tuned and trained."""

    name: str
    x: np.ndarray
    """The parameters after the last training, on training and validation rows."""
    trial: np.ndarray
    """The parameters of the chosen trial, which has not seen the validation rows."""
    settings: Mapping[str, float] = field(default_factory=dict)
    trials: Mapping[str, float] = field(default_factory=dict)
    """The validation metric of every trial; NaN if it diverged."""
    end: str | None = None
    """Whether the chosen step is the smallest or the largest that was tried."""
    rounds: int = 0
    """The rounds of the last training, chosen by validation."""
    converged: bool = True
    """Whether validation ended the chosen trial before its last round."""
    history: Sequence[Record] = ()
    """The record of the chosen trial."""


@dataclass(frozen=True)
class Exact:
    """Logistic or linear regression over all sites, equal to that of the pooled rows."""

    way: Way
    fit: Fit
    path: Path
    """The penalties that were tried."""


@dataclass(frozen=True)
class Conducted:
    """All trained models of a study, the proposed one first."""

    study: Experiment
    agreement: Agreement
    network: Network
    names: Sequence[str]
    ways: Sequence[Way]
    exact: Exact
    rows: Mapping[str, tuple[int, ...]]
    """The training and validation rows of each site, by class; of a number, all of them."""
    notes: Sequence[str] = ()
    """What a reader must know, in sentences."""

    @property
    def target(self) -> Target:
        """The kind of the target."""
        return Target.of(self.study.data, self.agreement.classes)


def conduct(study: Experiment, sites: Sites, tell: Callable[[str], None] = LOG.info) -> Conducted:
    """Agree on the inputs, then tune and train every method of the study, with exact regression as the start."""
    reject_unfit(study)
    agreement, network = sites.agreement, sites.network
    target = Target.of(study.data, agreement.classes)
    tell(f"{target.exact}: exact, over {len(sites.names)} sites")
    exact = exact_regression(sites, target)
    # A linear score has the exact optimum of its plain loss to start from, whatever method trains it.
    start = exact.way if network.is_linear else None
    tuned = {name: _tuned(study, sites, name, start, tell) for name in study.methods}
    ways = [way for way in tuned.values() if way is not None]
    lost = [name for name, way in tuned.items() if way is None]
    if study.study.baseline in lost:
        raise NestfedError(
            f"{study.study.baseline} diverged with every step size: add smaller ones to methods.{study.study.baseline}.tune."
        )
    notes = [
        f"{way.name} had not converged after {way.rounds} rounds: allow more (run.rounds)."
        for way in ways
        if not way.converged
    ]
    notes += [f"{name} diverged with every step size and is left out." for name in lost]
    counts = asking(sites)(FACTS, classes=len(target.classes))
    rows = {sites.names[n]: tuple(reply["classes"].tolist()) or (int(reply["used"]),) for n, reply in counts.items()}
    if target.binary:
        few = lack_of_positives(list(rows), [counts[1] for counts in rows.values()], [*map(sum, rows.values())])
        notes += [few] if few else []
    return Conducted(study, agreement, network, sites.names, ways, exact, rows, (*exact.fit.notes, *notes))


# ------------------------------------------------------------------------------------- exact regression


def exact_regression(sites: Sites, target: Target) -> Exact:
    """Fit the regression of a target over all sites, with the ridge penalty that is best on validation rows."""
    names, classes = sites.agreement.encoding.inputs, len(target.classes)
    first, last, path = ridge_regression(asking(sites, final=False), asking(sites), names, classes)
    way = Way(
        target.exact,
        network_parameters(last.coef, classes),
        network_parameters(first.coef, classes),
        {"ridge": path.best},
        {f"ridge={ridge:.3g}": loss for ridge, loss in zip(path.ridges, path.losses)},
        rounds=last.iterations,
    )
    return Exact(way, last, path)


# ------------------------------------------------------------------------------------- tuning and training


def _tuned(study: Experiment, sites: Sites, name: str, start: Way | None, tell: Callable[[str], None]) -> Way | None:
    """Try the settings of a method's grid, choose on validation rows, and train on training and validation rows.

    Return None if every trial diverged.
    """
    grid, metric = study.grid(name), choosing(study.for_method(name))
    steps = [f"algorithm.{step}" for step in study.for_method(name).steps() if f"algorithm.{step}" in grid]
    tried: list[tuple[dict[str, float], Trained | None, choice.Option]] = []
    todo = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    tell(f"{name}: {len(todo)} trials, then training")
    # With a step that is too large, the losses of the worst sites jump, and a jump may look best for one round.
    for _ in range(1 if protects(study, name) else 1 + EXTEND):
        tried += [_tried(study, sites, name, settings, steps, metric, start) for settings in todo]
        todo = _further(metric, steps, [(settings, option) for settings, _, option in tried])
        if not todo:
            break
    if all(trial is None for _, trial, _ in tried):
        return None
    at = choice.choose(metric, [option for _, _, option in tried])
    settings, trial, _ = tried[at]
    assert trial is not None
    best, last = _best_round(trial.history, metric), trial.history[-1]["round"]
    final = start.x if start is not None and not best else sites.train(
        Training(name, settings, True, max(best, 1)), None if start is None else start.x
    ).x  # fmt: skip
    values = [settings[steps[0]] for settings, _, _ in tried] if steps else []
    return Way(
        name,
        final,
        trial.x,
        settings,
        {_words(one): _value(option) for one, _, option in tried},
        choice.end(settings[steps[0]], values) if len(steps) == 1 else None,
        best,
        last < study.for_method(name).run.rounds or best < last,
        trial.history,
    )


def _tried(
    study: Experiment, sites: Sites, name: str, settings: dict[str, float], steps: Sequence[str], metric: Metric,
    start: Way | None,
) -> tuple[dict[str, float], Trained | None, choice.Option]:  # fmt: skip
    """Return a trial with its best value on validation rows."""
    sizes = tuple(settings[step] for step in steps)
    try:
        trial = sites.train(Training(name, settings), None if start is None else start.trial)
    except DivergedError:
        return settings, None, choice.Option(None, sizes)
    values = [metrics_of(r).get(f"val_{metric.name}") for r in trial.history if metrics_of(r)]
    return settings, trial, choice.Option(max(values, key=metric.signed), sizes)


def _further(
    metric: Metric, steps: Sequence[str], tried: Sequence[tuple[dict[str, float], choice.Option]]
) -> list[dict[str, float]]:
    """Return the next settings if the best value is at the end of the steps that were tried, and better beyond noise.

    A training that starts from the exact optimum often ends near it with every step; then no step is better.
    """
    if len(steps) != 1:
        return []
    known = [(settings, option) for settings, option in tried if not math.isnan(_value(option))]
    if not known:
        smallest = min((settings for settings, _ in tried), key=lambda settings: settings[steps[0]])
        beyond = choice.beyond(smallest[steps[0]], [settings[steps[0]] for settings, _ in tried])
        return [] if beyond is None else [{**smallest, steps[0]: beyond}]
    settings, best = known[choice.best(metric, [option for _, option in known])]
    step = settings[steps[0]]
    beyond = choice.beyond(step, [other[steps[0]] for other, _ in tried])
    others = [option for other, option in known if other[steps[0]] != step]
    clear = all(metric.signed(best.value) - metric.signed(o.value) > choice.noise(best, o) for o in others)
    return [{**settings, steps[0]: beyond}] if beyond is not None and clear else []


def _best_round(history: Sequence[Record], metric: Metric) -> int:
    """Return the round with the best validation metric; of equals the first."""
    judged = [r for r in history if metrics_of(r)]
    best = max(judged, key=partial(_signed, metric))
    return int(best["round"])


def _signed(metric: Metric, record: Record) -> float:
    return metric.signed(metrics_of(record).get(f"val_{metric.name}"))


def _words(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{key.removeprefix('algorithm.')}={value:g}" for key, value in settings.items())


def _value(option: choice.Option) -> float:
    return math.nan if option.value is None else option.value
