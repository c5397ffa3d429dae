"""From one table per site to a trained model, a comparison, a report and a model card."""

from __future__ import annotations

import copy
import csv
import difflib
import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor, nn

from nestfed import __version__, advice
from nestfed.core import Algorithm, Batch, Differentiable, NestfedError, Schedule, at, positive
from nestfed.data.prepare import FAR
from nestfed.data.tables import _csv, _known, _label, _parquet, load_table
from nestfed.engine.checkpoint import write_atomically
from nestfed.engine.sync import Record
from nestfed.estimators import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.estimators.base import Scores, in_chunks
from nestfed.estimators.page import BEST, curves, sites_table
from nestfed.estimators.sites import Columns, Site
from nestfed.lr_find import Found, apart, pairs, sweep
from nestfed.report import html, metrics
from nestfed.report.page import Figure, Line, Page, Table

KINDS: Mapping[str, type[FederatedAUC | FederatedAUPRC | FederatedClassifier]] = {
    "auroc": FederatedAUC,
    "auprc": FederatedAUPRC,
    "accuracy": FederatedClassifier,
}
TRIALS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Every method tries these multiples of its default step size on validation rows."""
TEST, VALIDATION = 0.25, 0.25
RESAMPLES = 300

# ---------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Sites:
    """All sites' tables, alike: y is the number of a class."""

    sites: Sequence[Site]
    classes: tuple[str, ...]


def read_sites(
    files: Sequence[str | Path], target: str, *, group: str = "", drop: Sequence[str] = (), positive: str = ""
) -> Sites:
    """Read one table per site and make them alike: the same classes, the same kind of every column."""
    paths = [Path(f) for f in files]
    if not paths:
        raise NestfedError("There are no files: name one table for each site, such as sites/*.csv.")
    names = _names(paths)
    raw = [_raw(path) for path in paths]
    for path, table in zip(paths, raw):
        for name in (target, *drop, *([group] if group else [])):
            _known(path, name, table)
    no_features = {target, group, *drop}
    empty = _kinds(paths, raw, no_features)
    classes = _classes(paths, raw, target, positive)
    sites = []
    for name, path, lacking in zip(names, paths, empty):
        read = load_table(path, target, columns=[group] if group else [], drop=[*drop, *lacking], classes=list(classes))
        sites.append(Site(name, read.x, read.y, read.features, read.columns[group] if group else None))
    return Sites(sites, classes)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the sites' names: those of the files, with their folders if that is not enough to tell them apart."""
    short = [path.name.split(".")[0] for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise NestfedError(f"{paths[0].parent} is named twice: every file is one site.")
    return names


def _raw(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise NestfedError(f"{path} is {what}: name the file of one table for each site.")
    kind = path.name.lower()
    if kind.endswith((".csv", ".csv.gz")):
        return _csv(path)
    if kind.endswith(".parquet"):
        return _parquet(path)
    raise NestfedError(f"{path} is no table by its name: expected one that ends in .csv, .csv.gz or .parquet.")


def _kinds(paths: Sequence[Path], raw: Sequence[Mapping[str, Any]], other: set[str]) -> list[list[str]]:
    """Refuse a column of numbers with text in it; return for each site the columns of text that it left empty."""
    import pandas as pd

    kinds: list[dict[str, str]] = []
    for path, table in zip(paths, raw):
        found = {}
        for name, column in table.items():
            if name in other:
                continue
            known = column.dropna()
            if pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
                found[name] = "numbers" if len(known) else "nothing"
                continue
            numbers = pd.to_numeric(known.astype(str), errors="coerce")
            if len(known) and 2 * numbers.notna().sum() >= len(known):
                odd = numbers.index[numbers.isna()]
                row = int(odd[0]) + 2  # the header is line 1
                raise NestfedError(
                    f"Column {name!r} of {path} holds the text {str(known[odd[0]])[:40]!r} in line {row} where its other "
                    "values are numbers: write a number there, or leave it empty if it is missing."
                )
            found[name] = "text" if len(known) else "nothing"
        kinds.append(found)
    columns = {name for found in kinds for name in found}
    for name in sorted(columns):
        by = {found.get(name, "nothing"): path for path, found in zip(paths, kinds)}
        if "text" in by and "numbers" in by:
            raise NestfedError(
                f"Column {name!r} holds text in {by['text']} but numbers in {by['numbers']}: make them alike, "
                "or leave the column out with --drop."
            )
    textual = {name for found in kinds for name, kind in found.items() if kind == "text"}
    return [[name for name, kind in found.items() if kind == "nothing" and name in textual] for found in kinds]


def _classes(paths: Sequence[Path], raw: Sequence[Mapping[str, Any]], target: str, positive: str) -> tuple[str, ...]:
    """Return the classes of all sites in order, the positive one last."""
    found: set[str] = set()
    for path, table in zip(paths, raw):
        column = table[target]
        if missing := int(column.isna().sum()):
            raise NestfedError(
                f"Target {target!r} of {path} is missing in {missing:,} of {len(column):,} rows: fill it in or remove "
                "these rows."
            )
        found |= {_label(v) for v in column.tolist()}
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
        near = difflib.get_close_matches(objective, KINDS, 1, 0.3)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(KINDS)}."
        raise NestfedError(f"There is no objective {objective!r}: {hint}")
    return KINDS[objective]


class Own(NamedTuple):
    """The broadcast, which nobody uses, and the client's own model."""

    x: Tensor
    own: Tensor


@dataclass(frozen=True)
class Alone(Algorithm[Differentiable, Own]):
    """Every site by itself: its model stays there and nothing is averaged."""

    eta: Schedule

    name = "local"
    accepts = Differentiable
    shared = ("x",)
    private = ("own",)

    def __post_init__(self) -> None:
        positive(self, "eta")

    def init(self, problem: Differentiable, x0: Tensor) -> Own:
        """Start at x0."""
        return Own(x0, x0)

    def step(self, problem: Differentiable, s: Own, batch: Batch, t: int) -> Own:
        """One gradient step of the client's own model."""
        return s._replace(own=problem.project(s.own - at(self.eta, t) * problem.grad(s.own, batch)))


@dataclass(frozen=True)
class Trained:
    """What one way of training came to."""

    name: str
    scores: np.ndarray
    """On the test rows of all sites, (rows,) or (rows, classes); of local training one such array for each site."""
    values: Mapping[str, float]
    inside: float
    """The mean over sites of the metric on their own test rows."""
    lr: float
    trials: Mapping[float, float]
    history: Sequence[Record] = ()


@dataclass(frozen=True)
class Outcome:
    """Everything that a report and a model card need."""

    estimator: Any
    metric: str
    classes: tuple[str, ...]
    target: str
    objective: str
    trained: Sequence[Trained]
    labels: np.ndarray
    owner: np.ndarray
    """The number of the site that a test row is from."""
    interval: tuple[float, float]
    """95 %, by bootstrap over test rows."""
    gain: tuple[float, float, float] | None
    """Over FedAvg: the difference and its 95 % interval, by paired bootstrap."""
    rows: Mapping[str, int]
    grouped: str
    seconds: float

    @property
    def best(self) -> Trained:
        """The model that is saved."""
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
) -> Outcome:
    """Tune on validation rows, train on all but the test rows, and compare with FedAvg and with every site alone.

    Each way of training has the same trials, batch size, rounds and local steps. The test rows of each site are set aside
    first; nothing is chosen by them.
    """
    kind = find_kind(objective)
    if objective != "accuracy" and len(data.classes) > 2:
        raise NestfedError(
            f"{objective} is for two classes, but {target!r} has {len(data.classes)} ({', '.join(data.classes)}): "
            "take --objective accuracy."
        )
    began = time.perf_counter()
    rest, test = apart(data.sites, TEST, seed)
    fitting, validation = apart(rest, VALIDATION, seed + 1)
    _refuse_one_class(target, data.classes, fitting, "training")
    _refuse_one_class(target, data.classes, test, "test")
    judge = _Judge(kind.metric, test, len(data.classes))
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
        found = sweep(clone(way).set_params(rounds=trying), fitting, validation, (), TRIALS, judge.metric)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", advice.TheoryWarning)  # the step size was measured
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
    return Outcome(
        fitted[0].set_params(lr=trained[0].lr), judge.metric, data.classes, target, objective, trained, judge.labels,
        judge.owner, interval, gain, rows, grouped, time.perf_counter() - began,
    )  # fmt: skip


def _refuse_one_class(target: str, classes: Sequence[str], sites: Sequence[Site], which: str) -> None:
    found = np.unique(np.concatenate([site.y for site in sites]))
    if len(found) < 2:
        raise NestfedError(
            f"All {which} rows of all sites have {target} = {classes[int(found[0])]}: more rows of the other class are needed."
        )


class _Judge:
    """The test rows of all sites, and the metrics on them."""

    def __init__(self, metric: str, test: Sequence[Site], classes: int) -> None:
        self.metric, self.classes = metric, classes
        self.test = [site for site in test if len(site)]
        self.labels = np.concatenate([site.y for site in test])
        self.owner = np.repeat(np.arange(len(test)), [len(site) for site in test])

    def scores(self, estimator: Any, model: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return a model's scores on the test rows."""
        x = torch.cat([estimator._scaled(site.x, site.features) for site in self.test])
        return in_chunks(model, x).double().numpy()

    def values(self, scores: np.ndarray, rows: Any = slice(None)) -> dict[str, float]:
        """Return the metrics on some of the rows."""
        s, y = scores[rows], self.labels[rows]
        found = {} if s.ndim > 1 else {"auroc": metrics.auroc(s, y), "ap": metrics.average_precision(s, y)}
        return found | ({"accuracy": metrics.accuracy(s, y)} if self.metric == "accuracy" else {})

    def inside(self, scores: np.ndarray) -> float:
        """Return the mean over sites of the metric on their own rows, where it is defined."""
        each = [self.values(scores, self.owner == n)[self.metric] for n in np.unique(self.owner)]
        return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")

    def trained(
        self, name: str, scores: np.ndarray, lr: float, trials: Mapping[float, float], history: Sequence[Any]
    ) -> Trained:
        """Sum up one way of training."""
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
    """Train every site by itself, with FedAvg's trials; return the mean over sites of how well it does on all rows."""

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

    held = _Judge(judge.metric, validation, judge.classes)
    trials = {}
    for lr in lrs:
        try:
            made, found = models(lr, fitting, trying)
        except NestfedError as error:  # too large a step for one of the sites
            if "infinite" not in str(error):
                raise
            trials[lr] = float("nan")
        else:
            trials[lr] = float(np.nanmean([held.values(held.scores(made, one))[judge.metric] for one in found]))
    lr = Found(judge.metric, tuple(trials), tuple(trials.values())).best
    made, found = models(lr, rest, common["rounds"])
    scores = np.stack([judge.scores(made, one) for one in found])
    each = [judge.values(s) for s in scores]
    values = {k: float(np.nanmean([v[k] for v in each])) for k in each[0]}
    own = [judge.values(s, judge.owner == n)[judge.metric] for n, s in enumerate(scores) if (judge.owner == n).any()]
    inside = float(np.nanmean(own)) if np.isfinite(own).any() else float("nan")
    return Trained("every site alone", scores, values, inside, lr, trials)


def _bootstrap(
    trained: Sequence[Trained], judge: _Judge, seed: int
) -> tuple[tuple[float, float], tuple[float, float, float] | None]:
    """Return the 95 % interval of the first model's metric, and of its gain over FedAvg, by resampled test rows."""
    rng = np.random.default_rng(seed)
    draws = [rng.integers(len(judge.labels), size=len(judge.labels)) for _ in range(RESAMPLES)]
    draws = [d for d in draws if len(np.unique(judge.labels[d])) > 1]
    first = np.array([judge.values(trained[0].scores, d)[judge.metric] for d in draws])
    low, high = np.quantile(first, [0.025, 0.975])
    base = next((t for t in trained[1:] if t.name == "fedavg"), None)
    if base is None:
        return (float(low), float(high)), None
    other = np.array([judge.values(base.scores, d)[judge.metric] for d in draws])
    less, more = np.quantile(first - other, [0.025, 0.975])
    gain = trained[0].values[judge.metric] - base.values[judge.metric]
    return (float(low), float(high)), (gain, float(less), float(more))


# ---------------------------------------------------------------------------------------------------------
# What is left behind


class Scorer(nn.Module):
    """Imputation, scaling, the model and its calibration in one: raw features in their order to probabilities.

    Missing values are NaN. Two classes: one probability, of the positive class; more: one for each.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, scale: Columns, model: Scores, calibration: tuple[float, float]) -> None:
        super().__init__()
        plan, kind = scale.plan, torch.float32
        self.model, (self.a, self.b) = model, calibration
        self.register_buffer("mean", torch.tensor(plan.mean, dtype=kind))
        self.register_buffer("deviation", torch.tensor(plan.deviation, dtype=kind))
        self.gaps = np.flatnonzero(plan.gaps).tolist()

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, features) to probabilities."""
        missing = torch.isnan(x)
        scaled = torch.where(missing, 0.0, ((x - self.mean) / self.deviation).clamp(-FAR, FAR))
        if self.gaps:
            scaled = torch.cat([scaled, missing[:, self.gaps].to(x.dtype)], 1)
        scores = self.model(scaled)
        return torch.sigmoid(self.a * scores + self.b) if scores.dim() == 1 else torch.softmax(scores, 1)


def export(estimator: Any, path: Path) -> Path:
    """Write the whole way from raw features to probabilities as a program for `torch.export.load`."""
    scorer = Scorer(estimator.scale_, estimator._scores, estimator.calibration_).eval()
    example = torch.zeros(2, len(estimator.scale_.features))
    made = torch.export.export(scorer, (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.export.save(made, path)
    return path


def write(outcome: Outcome, out: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Write the model, its export, the report and the model card; return where they are."""
    out.mkdir(parents=True, exist_ok=True)
    model = outcome.estimator.save(out / "model")
    told = {"target": outcome.target, "classes": list(outcome.classes), "objective": outcome.objective}
    write_atomically(model / "table.json", (json.dumps(told, indent=1) + "\n").encode())
    exported = export(outcome.estimator, model / "model.pt2")
    card = out / "MODEL_CARD.md"
    write_atomically(card, model_card(outcome).encode())
    report = html.write(page(outcome, files), out / "report.html")
    return {"report": report, "model card": card, "model": model, "export": exported}


def headline(outcome: Outcome) -> str:
    """Return the result in a sentence or two."""
    best, metric = outcome.best, BEST[outcome.metric]
    low, high = outcome.interval
    text = f"{metric} {best.values[outcome.metric]:.3f} (95 % interval {low:.3f} to {high:.3f}) on {len(outcome.labels)} test rows."
    if outcome.gain is not None:
        gain, less, more = outcome.gain
        verdict = (
            ""
            if less > 0
            else " a difference that these test rows cannot tell from 0"
            if more > 0
            else " FedAvg is better here"
        )
        text += (
            f" Over FedAvg on cross-entropy {gain:+.3f} ({less:+.3f} to {more:+.3f}){':' + verdict if verdict else ''}."
        )
    return text


def results(outcome: Outcome) -> tuple[list[str], list[list[Any]]]:
    """Return the comparison as columns and rows."""
    names = [m for m in BEST if m in outcome.best.values]
    columns = [
        "way of training",
        *(BEST[m] for m in names),
        f"{BEST[outcome.metric]} within sites",
        "lr",
        "trials",
        "sent",
    ]
    rows = []
    for one in outcome.trained:
        last = one.history[-1] if one.history else None
        sent = "nothing" if last is None else f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.2f} MB"
        cells = [f"{one.values[m]:.4f}" for m in names]
        rows.append([one.name, *cells, f"{one.inside:.4f}", f"{one.lr:.3g}", len(one.trials), sent])
    return columns, rows


def page(outcome: Outcome, files: Sequence[Path]) -> Page:
    """Return the report."""
    est = outcome.estimator
    columns, rows = results(outcome)
    note = (
        "All on the same test rows. Within sites: the mean over sites of the metric on their own test rows, which compares "
        "no two sites' rows. Alone: the mean over sites of how well a site's own model does on all test rows."
    )
    metric_names = [m for m in BEST if m in outcome.best.values]
    histories = {one.name: one.history for one in outcome.trained if one.history}
    by_site = []
    for n, name in enumerate(est.sites_.names):
        mine = outcome.owner == n
        cells = [_on(one, mine, outcome) for one in outcome.trained]
        by_site.append([name, int(mine.sum()), *cells])
    site_table = Table(
        f"{BEST[outcome.metric]} on each site's own test rows",
        ["site", "test rows", *(one.name for one in outcome.trained)],
        by_site,
        "– where a site's test rows are of one class. Few rows make these numbers uncertain.",
    )
    facts = {
        "files": ", ".join(f.name for f in files[:8]) + (" …" if len(files) > 8 else ""),
        "target": f"{outcome.target}: {', '.join(outcome.classes)}"
        + (f" ({outcome.classes[-1]} counts as positive)" if len(outcome.classes) == 2 else ""),
        "rows": ", ".join(f"{v:,} {k}" for k, v in outcome.rows.items()),
        "split": f"per site, whole values of {outcome.grouped}" if outcome.grouped else "per site, stratified by class",
        "method": repr(est.algorithm_),
        "chosen because": est.choice_.why,
        "time": f"{outcome.seconds:.0f} s on {platform.machine()}",
        "nestfed": f"{__version__}, torch {torch.__version__}",
    }
    return Page(
        f"{outcome.target}: {len(est.sites_.names)} sites",
        " ".join([headline(outcome), *est.hints_]),
        tables=[
            Table("Comparison", columns, rows, note, [_best_row(outcome)]),
            site_table,
            sites_table(_named(outcome)),
        ],
        curves=curves(histories, [*metric_names, "loss"][:3]),
        figures=_figures(outcome),
        facts=facts,
        settings={type(est).__name__: {k: str(v) for k, v in est.get_params().items()}},
    )


def _best_row(outcome: Outcome) -> int:
    return int(np.nanargmax([one.values[outcome.metric] for one in outcome.trained]))


def _named(outcome: Outcome) -> Any:
    return replace(outcome.estimator.sites_, classes=outcome.classes)


def _on(one: Trained, mine: np.ndarray, outcome: Outcome) -> float | None:
    """Return a model's metric on a site's own rows; of local training, of the site's own model."""
    if not mine.any():
        return None
    n = int(outcome.owner[mine][0])
    scores = one.scores[n] if one.name == "every site alone" else one.scores
    s, y = scores[mine], outcome.labels[mine]
    measure = {"auroc": metrics.auroc, "ap": metrics.average_precision, "accuracy": metrics.accuracy}[outcome.metric]
    return measure(s, y)


def _figures(outcome: Outcome) -> list[Figure]:
    """Return the ROC curve, the precision-recall curve and the reliability of the probabilities."""
    if len(outcome.classes) > 2:
        return []
    from sklearn.metrics import precision_recall_curve, roc_curve

    roc, pr = [], []
    for one in outcome.trained:
        if one.scores.ndim == 1:
            fpr, tpr, _ = roc_curve(outcome.labels, one.scores)
            precision, recall, _ = precision_recall_curve(outcome.labels, one.scores)
            roc.append(Line(one.name, fpr.tolist(), tpr.tolist()))
            pr.append(Line(one.name, recall[::-1].tolist(), precision[::-1].tolist()))
    roc.append(Line("chance", [0.0, 1.0], [0.0, 1.0], "dashed"))
    a, b = outcome.estimator.calibration_
    chance = 1 / (1 + np.exp(-(a * outcome.best.scores + b)))
    edges = np.quantile(chance, np.linspace(0, 1, min(9, 2 + len(chance) // 40)))
    place = np.clip(np.searchsorted(edges, chance, side="right") - 1, 0, len(edges) - 2)
    told = [
        (chance[place == i].mean(), outcome.labels[place == i].mean())
        for i in range(len(edges) - 1)
        if (place == i).any()
    ]
    reliability = [
        Line("predicted and seen", [float(p) for p, _ in told], [float(s) for _, s in told], "points"),
        Line("perfect", [0.0, 1.0], [0.0, 1.0], "dashed"),
    ]
    return [
        Figure("ROC curve", "false positive rate", "true positive rate", roc, unit=True),
        Figure("Precision and recall", "recall", "precision", pr, unit=True),
        Figure("Are the probabilities right?", "predicted", "seen", reliability, unit=True),
    ]


def model_card(outcome: Outcome) -> str:
    """Return the model card: what the model is for, what it was made of, how well it does and where it may fail."""
    est = outcome.estimator
    columns, rows = results(outcome)
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))
    counts = est.sites_.counts
    sites = "\n".join(
        f"| {name} | {int(c.sum())} | {' | '.join(str(int(k)) for k in c)} |"
        for name, c in zip(est.sites_.names, counts)
    )
    heads = " | ".join(f"{outcome.target} = {c}" for c in outcome.classes)
    split = f"whole values of `{outcome.grouped}`" if outcome.grouped else "single rows, by class"
    gaps = int(est.scale_.plan.gaps.sum())
    poor = [n for n, c in zip(est.sites_.names, counts) if c.min() < 5]
    thin = f"\n- Almost no examples of the rarer class at: {', '.join(poor)}." if poor else ""
    inputs = ", ".join(f"`{f}`" for f in est.scale_.features[:40]) + (" …" if len(est.scale_.features) > 40 else "")
    shape = "a linear score" if not est.hidden else f"a fully connected network with layers of {list(est.hidden)}"
    probability = (
        "Its scores become probabilities by Platt's method on the training rows."
        if est.kind != "classify"
        else "Its probabilities are those of cross-entropy."
    )
    return f"""# Model card: {outcome.target}

{headline(outcome)}

## What it is

{shape.capitalize()}, trained for {BEST[outcome.metric]} by {est.choice_.name} over {len(est.sites_.names)} sites, {est.rounds}
rounds of {est.q} local steps. Only sums and model parameters would leave a site. {probability}
Positive class: {outcome.classes[-1] if len(outcome.classes) == 2 else "none, there are " + str(len(outcome.classes))}.

## What it was trained on

| site | training rows | {heads} |
| --- | --- | {" | ".join("---" for _ in outcome.classes)} |
{sites}

Test rows were set aside at every site first ({split}): {outcome.rows["test"]} rows. {outcome.rows["of these for tuning"]} of the
{outcome.rows["training"]} training rows were used to choose the step size. Missing values are filled with the mean of all
sites; {gaps} features also tell that they were missing. Values beyond five deviations count as that far.

Inputs: {inputs}

## How well it does

{table}

Every way of training had the same trials, batch size and rounds. Within sites: the mean over sites of the metric on
their own test rows.

## Where it may fail

- Nothing is known about sites, times or people unlike those above: test rows came from the same sites.
- A score that ranks well over all sites may do so by telling the sites apart: compare with the column "within sites".
- Correlations, not causes; whoever acts on the score changes what it was trained on.{thin}
- Not a medical device, and not examined for fairness between groups of people.

## How to use it

```console
$ nestfed predict MODEL new.csv
```

`model/model.pt2` (torch.export) maps the raw inputs above, in this order, NaN where missing, to probabilities;
`model/model.safetensors` holds the parameters. Made with nestfed {__version__}, torch {torch.__version__}.
"""


# ---------------------------------------------------------------------------------------------------------
# Predicting


def load(place: Path) -> tuple[Any, dict[str, Any]]:
    """Read a model that `nestfed train` wrote, by its own directory or that of the training run."""
    found = next((p for p in (place, place / "model") if (p / "table.json").is_file()), None)
    if found is None:
        raise NestfedError(f"{place} holds no model: expected the directory that `nestfed train` wrote.")
    told = json.loads((found / "table.json").read_text(encoding="utf-8"))
    return KINDS[told["objective"]].load(found), told


def predict(place: Path, file: Path, out: Path) -> int:
    """Write the probability of every class for the rows of a table; return how many rows there were."""
    import pandas as pd

    estimator, told = load(place)
    raw = _raw(file)
    needed = dict.fromkeys(f.partition("=")[0] for f in estimator.scale_.features)
    for name in needed:
        _known(file, name, raw)
    numbers = [f for f in estimator.scale_.features if f in raw]
    _kinds([file], [{name: raw[name] for name in needed}], set())
    for name in numbers:
        if not pd.api.types.is_numeric_dtype(raw[name].dtype):
            raise NestfedError(f"Column {name!r} of {file} holds text, but it was numbers in training.")
    frame = pd.DataFrame({name: raw[name] for name in needed})
    if not len(frame):
        raise NestfedError(f"{file} has no rows.")
    values = estimator.predict_proba(frame)
    classes = told["classes"]
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
