"""Train and compare models on one table per site; `nestfed.study.export` writes the results."""

from __future__ import annotations

import copy
import csv
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor, nn

from nestfed import metrics, models
from nestfed.core import (
    Algorithm,
    Batch,
    Differentiable,
    DivergedError,
    Metric,
    NestfedError,
    Schedule,
    at,
    positive,
    unknown,
)
from nestfed.data.encoding import Sums, common_schema
from nestfed.data.tables import as_dataset, label_of, read_columns, require_column
from nestfed.engine.round import Record
from nestfed.study import FederatedAUC, FederatedAUPRC, FederatedClassifier, advice
from nestfed.study.lr_find import StepSearch, apart, pairs, sweep
from nestfed.study.sites import Site

KINDS: Mapping[str, type[FederatedAUC | FederatedAUPRC | FederatedClassifier]] = {
    "auroc": FederatedAUC,
    "auprc": FederatedAUPRC,
    "accuracy": FederatedClassifier,
}
TRIALS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The multiples of the default step size that each method tries on validation rows."""
TEST, VALIDATION = 0.25, 0.25
RESAMPLES = 300

# ---------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Sites:
    """The tables of all sites, with the same columns; y is the index of a class."""

    sites: Sequence[Site]
    classes: tuple[str, ...]


def read_sites(
    files: Sequence[str | Path], target: str, *, group: str = "", drop: Sequence[str] = (), positive: str = ""
) -> Sites:
    """Read one table per site, with common classes and column types."""
    paths = [Path(f) for f in files]
    if not paths:
        raise NestfedError("There are no files: pass one table for each site, such as sites/*.csv.")
    names = _names(paths)
    raw = [_table(path) for path in paths]
    for path, table in zip(paths, raw):
        for name in (target, *drop, *([group] if group else [])):
            require_column(path, name, table)
    classes = _classes(paths, raw, target, positive)
    sites = []
    for name, path, table in zip(names, paths, raw):
        read = as_dataset(path, table, target, columns=[group] if group else [], drop=drop, classes=classes)
        sites.append(Site(name, read.x, read.y, read.schema, read.columns[group] if group else None))
    common_schema({f"Site {site.name}": Sums.of(site.x, site.schema) for site in sites})  # before any work
    return Sites(sites, classes)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the sites: the names of the files, with their folders if they are not unique."""
    short = [path.name.split(".")[0] for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise NestfedError(f"A file in {paths[0].parent} is named twice: each file is one site.")
    return names


def _table(path: Path) -> dict[str, Any]:
    if path.name.lower().endswith(".npz"):
        raise NestfedError(f"{path} has no named columns: expected a .csv, .csv.gz or .parquet file.")
    return read_columns(path)


def _classes(paths: Sequence[Path], raw: Sequence[Mapping[str, Any]], target: str, positive: str) -> tuple[str, ...]:
    """Return the classes of all sites in order, with the positive one last."""
    found: set[str] = set()
    for path, table in zip(paths, raw):
        column = table[target]
        if missing := int(column.isna().sum()):
            raise NestfedError(
                f"Target {target!r} of {path} is missing in {missing:,} of {len(column):,} rows: fill in or remove "
                "these rows."
            )
        found |= {label_of(v) for v in column.tolist()}
    if len(found) > 20:
        raise NestfedError(
            f"Target {target!r} has {len(found):,} different values, such as {sorted(found)[0]!r}: expected a few classes."
        )
    if len(found) < 2:
        only = next(iter(found), "nothing")
        raise NestfedError(f"Target {target!r} is {only!r} in every row of every file: there is nothing to predict.")
    numeric = all(_is_number(v) for v in found)
    classes = sorted(found, key=float) if numeric else sorted(found)
    if positive:
        if positive not in found:
            raise NestfedError(f"Target {target!r} is never {positive!r}: it is {', '.join(classes)}.")
        classes = [c for c in classes if c != positive] + [positive]
    return tuple(classes)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------
# Training and comparing


def find_kind(objective: str) -> type[FederatedAUC | FederatedAUPRC | FederatedClassifier]:
    """Return the estimator for an objective."""
    if objective not in KINDS:
        raise unknown("objective", objective, KINDS)
    return KINDS[objective]


class AloneState(NamedTuple):
    """The broadcast, which is not used, and the client's own model."""

    x: Tensor
    own: Tensor


@dataclass(frozen=True)
class Alone(Algorithm[Differentiable, AloneState]):
    """Train each site alone: its model stays there and nothing is averaged."""

    eta: Schedule

    name = "local"
    accepts = Differentiable
    shared = ("x",)
    private = ("own",)

    def __post_init__(self) -> None:
        positive(self, "eta")

    def init(self, problem: Differentiable, x0: Tensor) -> AloneState:
        """Start at x0."""
        return AloneState(x0, x0)

    def step(self, problem: Differentiable, s: AloneState, batch: Batch, t: int) -> AloneState:
        """One gradient step of the client's own model."""
        return s._replace(own=problem.project(s.own - at(self.eta, t) * problem.grad(s.own, batch)))


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
    rest, test = apart(data.sites, TEST, seed)
    fitting, validation = apart(rest, VALIDATION, seed + 1)
    _reject_one_class(target, data.classes, fitting, "training")
    _reject_one_class(target, data.classes, test, "test")
    judge = _Judge(kind.metric, test)
    common: dict[str, Any] = {"rounds": rounds, "q": q, "hidden": tuple(hidden), "random_state": seed}
    trying = max(1, rounds // 2)  # enough to rank step sizes
    ways: list[Any] = [FederatedClassifier(algorithm="fedavg", **common)]
    if objective != "accuracy":
        ways.insert(0, kind(**common))
    trained, fitted = [], []
    for way in ways:
        tell(
            f"{objective if way.kind != 'classify' else 'FedAvg on cross-entropy'}: {len(TRIALS)} trials, then training"
        )
        found = sweep(clone(way).set_params(rounds=trying), fitting, validation, (), TRIALS, judge.metric.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", advice.TheoryWarning)  # the step size was tuned
            final = way.set_params(lr=found.best).fit(pairs(rest), eval_set=pairs(test))
        scores = judge.scores(final, final._scores)
        trials = dict(zip(found.lrs, found.values))
        trained.append(judge.trained(final.choice_.name, scores, found.best, trials, final.history_))
        fitted.append(final)
    tell(f"every site alone: {len(TRIALS)} trials, then training")
    trained.append(_alone(common, trying, list(trained[-1].trials), fitting, validation, rest, judge))
    interval, gain = _bootstrap(trained, judge, seed)
    rows = {
        "training": sum(map(len, rest)),
        "of these for tuning": sum(map(len, validation)),
        "test": len(judge.labels),
    }
    return StudyResult(
        fitted[0].set_params(lr=trained[0].lr), judge.metric.name, data.classes, target, objective, trained, judge.labels,
        judge.owner, interval, gain, rows, grouped, time.perf_counter() - began,
    )  # fmt: skip


def _reject_one_class(target: str, classes: Sequence[str], sites: Sequence[Site], which: str) -> None:
    found = np.unique(np.concatenate([site.y for site in sites]))
    if len(found) < 2:
        raise NestfedError(
            f"All {which} rows of all sites have {target} = {classes[int(found[0])]}: add rows of the other class."
        )


class _Judge:
    """The test rows of all sites, and the metrics on them."""

    def __init__(self, metric: str | Metric, test: Sequence[Site]) -> None:
        self.metric = metrics.find(metric)
        self.test = [site for site in test if len(site)]
        self.labels = np.concatenate([site.y for site in test])
        self.owner = np.repeat(np.arange(len(test)), [len(site) for site in test])

    def scores(self, estimator: Any, model: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return a model's scores on the test rows."""
        x = torch.cat([estimator._scaled(site.x, site.schema) for site in self.test])
        return models.score(model, x).double().numpy()

    def values(self, scores: np.ndarray, rows: Any = slice(None)) -> dict[str, float]:
        """Return the metrics on some of the rows."""
        return metrics.judge(scores[rows], self.labels[rows], log_odds=self.metric.scores == "log-odds")

    def value(self, scores: np.ndarray, rows: Any) -> float:
        """Return the main metric on some of the rows."""
        return self.metric(scores[rows], self.labels[rows])

    def inside(self, scores: np.ndarray) -> float:
        """Return the metric on each site's own rows, averaged over the sites where it is defined."""
        each = [self.value(scores, self.owner == n) for n in np.unique(self.owner)]
        return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")

    def trained(
        self, name: str, scores: np.ndarray, lr: float, trials: Mapping[float, float], history: Sequence[Any]
    ) -> Trained:
        """Return the result of one way of training."""
        return Trained(name, scores, self.values(scores), self.inside(scores), lr, trials, history)


def _alone(
    common: Mapping[str, Any],
    trying: int,
    lrs: Sequence[float],
    fitting: Sequence[Site],
    validation: Sequence[Site],
    rest: Sequence[Site],
    judge: _Judge,
) -> Trained:
    """Train each site alone, with the trials of FedAvg; average the sites' metrics on all rows."""

    def models(lr: float, sites: Sequence[Site], rounds: int) -> tuple[FederatedClassifier, list[nn.Module]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", advice.NestfedWarning)
            made = FederatedClassifier(algorithm=Alone(lr), **{**common, "rounds": rounds}).fit(pairs(sites))
        found = []
        for own in made._result.private["own"]:
            one = copy.deepcopy(made._scores)
            nn.utils.vector_to_parameters(own.clone(), one.parameters())
            found.append(one)
        return made, found

    held = _Judge(judge.metric, validation)
    trials = {}
    for lr in lrs:
        try:
            made, found = models(lr, fitting, trying)
        except DivergedError:  # the step is too large for one of the sites
            trials[lr] = float("nan")
        else:
            trials[lr] = float(np.nanmean([held.value(held.scores(made, one), slice(None)) for one in found]))
    lr = StepSearch(judge.metric.name, tuple(trials), tuple(trials.values())).best
    made, found = models(lr, rest, common["rounds"])
    scores = np.stack([judge.scores(made, one) for one in found])
    each = [judge.values(s) for s in scores]
    values = {k: float(np.nanmean([v[k] for v in each])) for k in each[0]}
    own = [judge.value(s, judge.owner == n) for n, s in enumerate(scores) if (judge.owner == n).any()]
    inside = float(np.nanmean(own)) if np.isfinite(own).any() else float("nan")
    return Trained("every site alone", scores, values, inside, lr, trials)


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


# ---------------------------------------------------------------------------------------------------------
# Prediction


def load(place: Path) -> tuple[Any, dict[str, Any]]:
    """Load a model of `nestfed train`, from its own directory or that of the training run."""
    found = next((p for p in (place, place / "model") if (p / "table.json").is_file()), None)
    if found is None:
        raise NestfedError(f"{place} contains no model: expected the output directory of `nestfed train`.")
    table = json.loads((found / "table.json").read_text(encoding="utf-8"))
    return KINDS[table["objective"]].load(found), table


def predict(place: Path, file: Path, out: Path) -> int:
    """Write the probability of each class for the rows of a table; return the number of rows."""
    import pandas as pd

    estimator, table = load(place)
    raw = _table(file)
    needed = [column.name for column in estimator.scale_.schema]
    for name in needed:
        require_column(file, name, raw)
    frame = pd.DataFrame({name: raw[name] for name in needed})
    if not len(frame):
        raise NestfedError(f"{file} has no rows.")
    values = estimator.predict_proba(frame)
    classes = table["classes"]
    answers = np.asarray(classes)[estimator.predict(frame)]
    binary = len(classes) == 2
    head = ["row", *(["probability"] if binary else [f"probability of {c}" for c in classes]), "prediction"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(head)
        for i, (p, answer) in enumerate(zip(values, answers), 1):
            writer.writerow([i, *(f"{v:.6f}" for v in (p[1:] if binary else p)), answer])
    return len(frame)
