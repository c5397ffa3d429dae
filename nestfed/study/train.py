"""Train and compare models on one table per site; `nestfed.study.export` writes the results."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone
from torch import Tensor, nn

from nestfed import metrics, models
from nestfed.algorithms import Alone, FedAvg
from nestfed.core import DivergedError, Metric, NestfedError, unknown
from nestfed.data.encoding import Sums
from nestfed.data.split import TEST as FOR_TESTING
from nestfed.engine.round import Record
from nestfed.experiment.choice import resampled
from nestfed.study import FederatedAUC, FederatedAUPRC, FederatedClassifier, advice
from nestfed.study.base import Scores, precise
from nestfed.study.lr_find import StepSearch, apart, sweep, with_rows
from nestfed.study.reference import Reference
from nestfed.study.sites import Encoded, Site
from nestfed.study.tables import Sites

KINDS: Mapping[str, type[FederatedAUC | FederatedAUPRC | FederatedClassifier]] = {
    "auroc": FederatedAUC,
    "auprc": FederatedAUPRC,
    "accuracy": FederatedClassifier,
}
TRIALS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The multiples of the default step size that each method tries on validation rows."""
TEST, VALIDATION = 0.25, 0.25
RESAMPLES = 300


def find_kind(objective: str) -> type[FederatedAUC | FederatedAUPRC | FederatedClassifier]:
    """Return the estimator for an objective."""
    if objective not in KINDS:
        raise unknown("objective", objective, KINDS)
    return KINDS[objective]


@dataclass(frozen=True)
class Trained:
    """The result of one way of training."""

    name: str
    scores: np.ndarray
    """Scores on the test rows of all sites, (rows,) or (rows, classes); with a first axis of sites for local training."""
    values: Mapping[str, float]
    inside: float
    """The metric on each site's own test rows, averaged over sites."""
    lr: float
    trials: Mapping[float, float]
    history: Sequence[Record] = ()


@dataclass(frozen=True)
class StudyResult:
    """The result of a study: all that the report and the model card need."""

    estimator: Any
    metric: str
    classes: tuple[str, ...]
    target: str
    objective: str
    trained: Sequence[Trained]
    labels: np.ndarray
    owner: np.ndarray
    """The site number of each test row."""
    interval: tuple[float, float]
    """95 %, by bootstrap over test rows."""
    gain: tuple[float, float, float] | None
    """The difference to FedAvg, above 0 if better, and its 95 % interval, by paired bootstrap."""
    rows: Mapping[str, int]
    grouped: str
    seconds: float
    reference: Reference | None = None
    """Statistics of the training rows, to compare new rows with."""

    @property
    def best(self) -> Trained:
        """The saved model."""
        return self.trained[0]


def train(
    data: Sites,
    target: str,
    objective: str,
    *,
    rounds: int = 50,
    q: int = 10,
    hidden: Sequence[int] = (),
    grouped: str = "",
    seed: int = 0,
    tell: Callable[[str], None] = lambda sentence: None,
) -> StudyResult:
    """Tune on validation rows, train on all but the test rows, and compare with FedAvg and with each site alone.

    All ways of training have the same trials, batch size, rounds and local steps. Each site first holds out its test
    rows, which affect no choice.
    """
    kind = find_kind(objective)
    if objective != "accuracy" and len(data.classes) > 2:
        raise NestfedError(
            f"{objective} is for two classes, but {target!r} has {len(data.classes)} ({', '.join(data.classes)}): "
            "use --objective accuracy."
        )
    began = time.perf_counter()
    rest, test = apart(with_rows(data.sites), TEST, seed, FOR_TESTING)
    empty = {
        site.name for site in rest if not len(site)
    }  # a split by groups may leave a small site nothing to train on
    rest, test = ([site for site in part if site.name not in empty] for part in (rest, test))
    fitting, validation = apart(rest, VALIDATION, seed + 1)
    fitting = with_rows(fitting)
    _reject_one_class(target, data.classes, fitting, "training")
    _reject_one_class(target, data.classes, test, "test")
    common: dict[str, Any] = {"rounds": rounds, "q": q, "hidden": tuple(hidden), "random_state": seed}
    fedavg = FederatedClassifier(method="fedavg", **common)
    ways: list[Any] = [fedavg] if objective == "accuracy" else [kind(**common), fedavg]
    split = _Split.of(kind.metric, fitting, validation, rest, test)
    trained, fitted = [], []
    for way in ways:
        name = "FedAvg on cross-entropy" if way is fedavg else objective
        tell(f"{name}: {len(TRIALS)} trials, then training")
        fitted.append(way)
        trained.append(_tuned(way, split))
    tell(f"every site alone: {len(TRIALS)} trials, then training")
    trained.append(_alone(fedavg, list(trained[-1].trials), split))
    judge = split.test
    interval, gain = _bootstrap(trained, judge, seed)
    rows = {
        "training": len(split.training.x),
        "of these for tuning": len(split.validation.labels),
        "test": len(judge.labels),
    }
    return StudyResult(
        fitted[0], judge.metric.name, data.classes, target, objective, trained, judge.labels, judge.owner, interval, gain,
        rows, grouped, time.perf_counter() - began,
        Reference.of([Sums.of(site.x, site.schema) for site in rest], split.training.encoding.schema),
    )  # fmt: skip


def _reject_one_class(target: str, classes: Sequence[str], sites: Sequence[Site], which: str) -> None:
    found = np.unique(np.concatenate([site.y for site in sites]))
    if len(found) < 2:
        raise NestfedError(
            f"All {which} rows of all sites have {target} = {classes[int(found[0])]}: add rows of the other class."
        )


@dataclass(frozen=True)
class _Judge:
    """Held-out rows of all sites as model inputs, and the metrics on them."""

    metric: Metric
    x: Tensor
    labels: np.ndarray
    owner: np.ndarray
    """The site number of each row."""

    def scores(self, model: Scores) -> np.ndarray:
        """Return a model's scores of the rows."""
        return models.score(precise(model), self.x).double().numpy()

    def values(self, scores: np.ndarray) -> dict[str, float]:
        """Return all metrics."""
        return metrics.judge(scores, self.labels, log_odds=self.metric.scores == "log-odds")

    def value(self, scores: np.ndarray, rows: Any = slice(None)) -> float:
        """Return the main metric on some of the rows."""
        return self.metric(scores[rows], self.labels[rows])

    def inside(self, scores: Callable[[int], np.ndarray]) -> float:
        """Return the metric of scores(n) on site n's own rows, averaged over the sites where it is defined."""
        each = [self.value(scores(n), self.owner == n) for n in np.unique(self.owner)]
        return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")


@dataclass(frozen=True)
class _Split:
    """The rows of all sites, encoded once: to try step sizes, and to train and judge the final models."""

    fitting: Encoded
    validation: _Judge
    """The validation rows, in the encoding of `fitting`."""
    training: Encoded
    """All rows but the test rows."""
    test: _Judge

    @classmethod
    def of(
        cls,
        metric: str,
        fitting: Sequence[Site],
        validation: Sequence[Site],
        rest: Sequence[Site],
        test: Sequence[Site],
    ) -> _Split:
        """Encode the rows."""

        def judge(data: Encoded, held: Sequence[Site]) -> _Judge:
            owner = np.repeat(np.arange(len(held)), [len(site) for site in held])
            return _Judge(metrics.find(metric), *data.held_out(with_rows(held)), owner)

        trial, final = Encoded.of(fitting), Encoded.of(rest)
        return cls(trial, judge(trial, validation), final, judge(final, test))


def _short(way: FederatedClassifier) -> Any:
    """Return a way of training with half of its rounds, which are enough to rank step sizes."""
    return clone(way).set_params(rounds=max(1, way.rounds // 2))


def _tuned(way: Any, split: _Split) -> Trained:
    """Choose the step size of a way of training on validation rows, then train it on all but the test rows."""
    held, judge = split.validation, split.test
    found = sweep(_short(way), split.fitting, (held.x, held.labels), judge.metric.name, (), TRIALS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", advice.TheoryWarning)  # the step size was tuned
        way.set_params(lr=found.best)._fit(split.training, (judge.x, judge.labels))
    scores = judge.scores(way._scores)
    trials = dict(zip(found.lrs, found.values))
    values, inside = judge.values(scores), judge.inside(lambda n: scores)
    return Trained(way.choice_.name, scores, values, inside, found.best, trials, way.history_)


def _alone(way: FederatedClassifier, lrs: Sequence[float], split: _Split) -> Trained:
    """Train each site alone, with the trials of FedAvg; average the sites' metrics on all rows."""

    def scores(lr: float, way: Any, data: Encoded, judge: _Judge) -> np.ndarray:
        """Return the scores of every site's own model."""
        method = Alone(FedAvg(lr))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", advice.NestfedWarning)
            made = clone(way).set_params(method=method, lr=None)._fit(data)
        each = []
        for own in made._result.points:
            model = copy.deepcopy(made._scores)
            nn.utils.vector_to_parameters(own.clone(), model.parameters())
            each.append(judge.scores(model))
        return np.stack(each)

    held, judge = split.validation, split.test
    trials: dict[float, float] = {}
    rows: list[tuple[float, ...]] = []
    for lr in lrs:
        try:
            own = scores(lr, _short(way), split.fitting, held)
        except DivergedError:  # the step is too large for one of the sites
            trials[lr] = float("nan")
            rows.append(())
            continue
        trials[lr] = float(np.nanmean([held.value(s) for s in own]))
        rows.append(tuple(np.mean([resampled(held.metric, s, held.labels) for s in own], axis=0)))
    lr = StepSearch(judge.metric.name, tuple(trials), tuple(trials.values()), tuple(rows)).best
    final = scores(lr, way, split.training, judge)
    each = [judge.values(s) for s in final]
    values = {k: float(np.nanmean([v[k] for v in each])) for k in each[0]}
    return Trained("every site alone", final, values, judge.inside(lambda n: final[n]), lr, trials)


def _bootstrap(
    trained: Sequence[Trained], judge: _Judge, seed: int
) -> tuple[tuple[float, float], tuple[float, float, float] | None]:
    """Return 95 % intervals of the first model's metric and of its gain over FedAvg, by resampling test rows."""
    rng = np.random.default_rng(seed)
    draws = [rng.integers(len(judge.labels), size=len(judge.labels)) for _ in range(RESAMPLES)]
    draws = [d for d in draws if len(np.unique(judge.labels[d])) > 1]
    first = np.array([judge.value(trained[0].scores, d) for d in draws])
    low, high = np.quantile(first, [0.025, 0.975])
    base = next((t for t in trained[1:] if t.name == "fedavg"), None)
    if base is None:
        return (float(low), float(high)), None
    other = np.array([judge.value(base.scores, d) for d in draws])
    sign = 1 if judge.metric.higher else -1
    less, more = np.quantile(sign * (first - other), [0.025, 0.975])
    gain = sign * (judge.value(trained[0].scores, slice(None)) - judge.value(base.scores, slice(None)))
    return (float(low), float(high)), (gain, float(less), float(more))
