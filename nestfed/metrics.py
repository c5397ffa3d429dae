"""Metrics and their direction, computed from rows or from counts that clients share.

`nestfed.core.Metric` says whether higher is better; `find` looks up a metric by name.

Conventions in this file: ``scores`` are logits; ranking metrics accept any increasing function of them. Binary
``labels`` are 0/1 (or −1/+1, or booleans). An undefined value is NaN, not an error: a client with one class is
common in federated data, and a diverged model should show as a gap in a curve, not end the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce, wraps
from operator import add
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nestfed.core import METRICS, Metric, NestfedError, unknown

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# ------------------------------------------------------------------------------------- direction by name


_IN_RECORD = re.compile(r"(?:val_)?(?:worst_)?(.+?)(?:_\d+)?")
"""How a record names a metric: val_auroc is measured on validation data, worst_auroc is that of the worst client, r2_5 is
measured after 5 inner steps of a meta-learner."""


_PARTIAL = re.compile(r"(?:val_)?(?:worst_)?(pauroc(?:@(.*))?)")


def find(metric: str | Metric) -> Metric:
    """Return the metric for a column of a record, under the column's name; a `Metric` is returned unchanged."""
    if isinstance(metric, Metric):
        return metric
    if asked := _PARTIAL.fullmatch(metric):
        return Metric(metric, True, partial(partial_auroc, max_fpr=_rate(asked[2])), "ranking")
    found = _IN_RECORD.fullmatch(metric)
    for name in (metric, metric.removeprefix("val_"), found[1] if found else metric):
        if name in METRICS:
            return replace(METRICS[name], name=metric)
    raise NestfedError(
        f"{unknown('metric', metric, METRICS)} If it is your own, declare whether higher is better: "
        f'METRICS.add("{metric}", Metric("{metric}", higher=True)) of nestfed.metrics, or pass that Metric itself.'
    )


def _rate(written: str | None) -> float:
    try:
        rate = float(written or "")
    except ValueError:
        rate = math.nan
    if not 0 < rate <= 1:
        raise NestfedError(
            "Partial AUROC needs the largest false positive rate, above 0 and at most 1, as in pauroc@0.3; got "
            f"{'pauroc' if written is None else f'pauroc@{written}'}."
        )
    return rate


def _partial_too(metric: str | Metric) -> dict[str, float]:
    """Return {metric: ρ} for partial AUROC, without the prefix of validation data, and nothing for any other metric."""
    asked = _PARTIAL.fullmatch(metric) if isinstance(metric, str) else None
    return {asked[1]: _rate(asked[2])} if asked else {}


# -------------------------------------------------------------------------------------- metrics of rows


def _macro(metric: Callable[..., float]) -> Callable[..., float]:
    """Extend a ranking metric to labels (n, L): its mean over labels, on known rows (not NaN), where both classes are present."""

    @wraps(metric)
    def mean_over_labels(scores: npt.ArrayLike, labels: npt.ArrayLike, *more: float, **options: float) -> float:
        if np.ndim(labels) != 2:
            return metric(scores, labels, *more, **options)
        s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.float64)
        s = s[:, None] if s.ndim == 1 else s
        if s.shape != y.shape:
            raise NestfedError(f"{y.shape[1]} labels need as many scores, not scores of shape {s.shape}.")
        known = ~np.isnan(y)
        both = [j for j in range(y.shape[1]) if len(np.unique(y[known[:, j], j])) > 1]
        each = [metric(s[known[:, j], j], y[known[:, j], j], *more, **options) for j in both]
        return fmean(each) if each else float("nan")

    return mean_over_labels


@_macro
def auroc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Area under the ROC curve, ties counting ½; NaN unless both classes are present. For labels (n, L) the mean over labels."""
    s, y = _scored(scores, labels)
    if np.isnan(s).any() or y.all() or not y.any():
        return float("nan")
    positives, negatives = _tallied(s, y)
    below = negatives.cumsum() - negatives / 2  # a tie counts ½
    return float(positives @ below / (positives.sum() * negatives.sum()))


@_macro
def partial_auroc(scores: npt.ArrayLike, labels: npt.ArrayLike, max_fpr: float) -> float:
    """Mean true positive rate over false positive rates up to ``max_fpr``: the area under that part of the ROC curve / max_fpr.

    It is the AUROC against the share max_fpr of the highest-scored negatives; with max_fpr = 1 the AUROC, and about max_fpr/2
    by chance. NaN unless both classes are present. ``roc_auc_score(max_fpr=…)`` of scikit-learn rescales it as
    ½(1 + (v − max_fpr/2)/(1 − max_fpr/2)), which makes chance ½.
    """
    s, y = _scored(scores, labels)
    if np.isnan(s).any() or y.all() or not y.any():
        return float("nan")
    positives, negatives = _tallied(s, y)
    return _partial_area(positives[::-1], negatives[::-1], max_fpr).value


@_macro
def average_precision(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Average precision Σ (R_i − R_{i−1})·P_i over distinct scores; NaN without positives. For labels (n, L) the mean over labels."""
    s, y = _scored(scores, labels)
    if np.isnan(s).any() or not y.any():
        return float("nan")
    positives, negatives = _tallied(s, y)
    hits = positives[::-1].cumsum()
    precision = hits / (hits + negatives[::-1].cumsum())
    return float(positives[::-1] @ precision / hits[-1])


def accuracy(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Share of correct predictions: logit > 0 for scores (n,), the largest logit for scores (n, C)."""
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim == 2:
        logits, classes = _classified(s, labels)
        right = logits.argmax(axis=1) == classes
    else:
        s, y = _scored(s, labels)
        right = (s > 0) == y
    # A NaN score compares as false and would count as a "negative".
    return float("nan") if np.isnan(s).any() or not len(s) else float(right.mean())


def log_loss(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean cross-entropy in nats of logits (n,) or (n, C); exact for large logits, where probabilities would clip."""
    s = np.asarray(scores, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # logits that are NaN, or several infinite ones, give NaN quietly
        if s.ndim == 2:
            logits, classes = _classified(s, labels)
            losses = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(logits)), classes]
        else:
            s, y = _scored(s, labels)
            losses = np.logaddexp(0.0, np.where(y, -s, s))
    return float(losses.mean()) if len(losses) else float("nan")


def brier(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean squared difference between the probability of the positive class and the class, of logits (n,)."""
    s, y = _scored(scores, labels)
    return float(((0.5 * (1 + np.tanh(s / 2)) - y) ** 2).mean()) if len(s) else float("nan")


def perplexity(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Exponential of the mean cross-entropy: for words, the effective number of equally likely choices."""
    with np.errstate(over="ignore"):  # a diverged model has perplexity inf
        return float(np.exp(log_loss(scores, labels)))


def mse(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> float:
    """Mean squared error; NaN without examples."""
    p, y = _predicted(predictions, targets)
    return float(((p - y) ** 2).mean()) if len(p) else float("nan")


def mae(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> float:
    """Mean absolute error; NaN without examples."""
    p, y = _predicted(predictions, targets)
    return float(np.abs(p - y).mean()) if len(p) else float("nan")


def r2(predictions: npt.ArrayLike, targets: npt.ArrayLike, baseline: float | None = None) -> float:
    """Coefficient of determination, 1 − (squared error of the model) / (squared error of a constant).

    The constant is ``baseline``, by default the targets' mean. NaN if its error is 0.
    """
    p, y = _predicted(predictions, targets)
    constant = baseline if baseline is not None else y.mean() if len(y) else 0.0
    total = float(((y - constant) ** 2).sum())
    return 1 - float(((p - y) ** 2).sum()) / total if total else float("nan")


for _metric in (
    Metric("auroc", True, auroc, "ranking"),
    Metric("ap", True, average_precision, "ranking"),
    Metric("accuracy", True, accuracy, "log-odds"),
    Metric("log_loss", False, log_loss, "log-odds"),
    Metric("brier", False, brier),
    Metric("perplexity", False, perplexity),
    Metric("log_likelihood", True, lambda scores, labels: -log_loss(scores, labels)),
    Metric("mse", False, mse),
    Metric("rmse", False, lambda predictions, targets: math.sqrt(mse(predictions, targets))),
    Metric("mae", False, mae),
    Metric("r2", True, r2),
    Metric("auroc_error", False),  # largest possible error of a value from counts
    Metric("ap_error", False),
    Metric("loss", False),  # columns of every record
    Metric("drift", False),
):
    METRICS.add(_metric.name, _metric)


def judge(
    scores: npt.ArrayLike, labels: npt.ArrayLike, *, log_odds: bool = False, metric: str | Metric = ""
) -> dict[str, float]:
    """Return all metrics that apply: ranking metrics for one score per example, logit metrics for one per class.

    With several labels per example, (n, L), NaN if unknown, ranking metrics are means over the labels that have both classes.
    log_odds: single scores are log-odds, as from cross-entropy, so both kinds apply.
    metric: pauroc@ρ adds the partial AUROC up to the false positive rate ρ; any other name adds nothing.
    """
    several = np.ndim(labels) == 2
    one = np.ndim(scores) == 1 or several
    kinds = ["ranking"] * one + ["log-odds"] * ((log_odds or not one) and not several)
    found = {m.name: m(scores, labels) for m in METRICS.values() if m.scores in kinds}
    return found | {name: partial_auroc(scores, labels, rate) for name, rate in _partial_too(metric).items() if one}


@dataclass(frozen=True, eq=False)
class ErrorTotals:
    """Sums over rows from which RMSE, MAE and R² follow; those of several sites add up."""

    rows: int
    sums: Floats
    """Of the errors, their squares and absolute values, of the target minus a common constant, and of its squares."""

    @classmethod
    def of(cls, predictions: npt.ArrayLike, targets: npt.ArrayLike, center: float = 0.0) -> ErrorTotals:
        """Compute the sums; a `center` near the target's mean keeps the digits of R²."""
        p, y = _predicted(predictions, targets)
        errors, target = p - y, y - center
        parts = (errors, errors**2, np.abs(errors), target, target**2)
        return cls(len(p), np.array([part.sum() for part in parts], np.float64))

    def __add__(self, other: ErrorTotals) -> ErrorTotals:
        return ErrorTotals(self.rows + other.rows, self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """Return RMSE, MAE and R²; NaN where they are not defined."""
        if not self.rows:
            return dict.fromkeys(("rmse", "mae", "r2"), math.nan)
        _, squared, absolute, total, squares = self.sums.tolist()
        spread = squares - total**2 / self.rows
        r2 = 1 - squared / spread if spread > 0 else math.nan
        return {"rmse": math.sqrt(squared / self.rows), "mae": absolute / self.rows, "r2": r2}


# --------------------------------------------------------------------------------- value and certainty


@dataclass(frozen=True)
class Estimate:
    """A value with its lower and upper bound."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The largest possible distance between ``value`` and the truth."""
        return max(self.high - self.value, self.value - self.low)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.2g}"


def confidence_interval(values: npt.ArrayLike, level: float = 0.95) -> Estimate:
    """Mean of independent values with Student's t interval.

    The interval of a single value is the whole real line.
    """
    v = np.asarray(values, dtype=np.float64).ravel()
    if not 0 < level < 1:
        raise NestfedError(f"confidence_interval: level must be strictly between 0 and 1, not {level}.")
    if not len(v):
        raise NestfedError("confidence_interval: there are no values; give at least one.")
    mean = float(v.mean())
    if len(v) == 1:
        return Estimate(mean, float("-inf"), float("inf"))
    from scipy.special import stdtrit

    half = float(stdtrit(len(v) - 1, (1 + level) / 2) * v.std(ddof=1) / np.sqrt(len(v)))
    return Estimate(mean, mean - half, mean + half)


# ------------------------------------------------------------------------------- clients that share counts


@dataclass(frozen=True, eq=False)
class ScoreHistogram:
    """Counts of scores by class on a grid that all clients share, so clients' counts can be added.

    The sum gives the AUROC and the average precision over all clients without sharing rows. These are not the
    averages of the clients' own values, which never compare a patient of one hospital with a patient of another.
    The order of scores inside a bin is unknown. The estimate treats them as tied; ``low`` and ``high`` are its
    values in the worst and the best order. The bounds are certain (up to rounding in the last digits) and tight.

    By default the grid is even in the squashed score s/(1+|s|), which fits the logits of any model: bins are
    2/bins·(1+|s|)² wide, and wide bounds show that this is too coarse. The edges need only IEEE additions and
    divisions, so they are equal to the last bit on every machine. Scores are compared with the edges themselves,
    so rounding cannot swap two scores. With ``range`` the grid is even in the score; scores outside count in the
    first or last bin, and the bounds account for it.

    Privacy: a fine histogram of few examples is close to a list of their scores and labels. Where that matters,
    add histograms under secure aggregation or use fewer bins.
    """

    positives: Counts
    negatives: Counts
    range: tuple[float, float] | None = None
    unscored: int = 0
    """The number of NaN scores; a single one makes every estimate NaN, as for rows."""

    @classmethod
    def of(
        cls,
        scores: npt.ArrayLike,
        labels: npt.ArrayLike,
        bins: int = 4096,
        range: tuple[float, float] | None = None,
    ) -> ScoreHistogram:
        """Count the scores of one client; all clients must use the same ``bins`` and ``range``."""
        s, y = _scored(scores, labels)
        range = None if range is None else (float(range[0]), float(range[1]))  # TOML gives a list
        unscored = np.isnan(s)
        place = places(s[~unscored], bins, range)
        y = y[~unscored]
        return cls(
            np.bincount(place[y], minlength=bins),
            np.bincount(place[~y], minlength=bins),
            range,
            int(unscored.sum()),
        )

    def __add__(self, other: ScoreHistogram) -> ScoreHistogram:
        if not isinstance(other, ScoreHistogram):
            return NotImplemented
        if len(self.positives) != len(other.positives) or self.range != other.range:
            raise NestfedError(
                f"Histograms on different grids cannot be added ({len(self.positives)} bins, range {self.range}; "
                f"{len(other.positives)} bins, range {other.range}): use the same bins and range for all clients."
            )
        return ScoreHistogram(
            self.positives + other.positives,
            self.negatives + other.negatives,
            self.range,
            self.unscored + other.unscored,
        )

    def __radd__(self, other: int) -> ScoreHistogram:
        # sum(histograms) starts from 0.
        return self if other == 0 else NotImplemented

    @property
    def edges(self) -> Floats:
        """The inner edges of the bins; the outer bins are unbounded."""
        return edges(len(self.positives), self.range)

    def auroc(self) -> Estimate:
        """Pooled AUROC: (Σ_b pos_b·(neg below b + ½ neg_b)) / PN, to within ½ Σ_b pos_b·neg_b / PN."""
        # Floats, because the number of pairs of a large federation may overflow an int64.
        pos, neg = self.positives.astype(np.float64), self.negatives.astype(np.float64)
        pairs = pos.sum() * neg.sum()
        if not pairs or self.unscored:
            return _UNKNOWN
        won = float(pos @ (np.cumsum(neg) - neg) / pairs)
        tied = float(pos @ neg / pairs)
        return Estimate(won + tied / 2, won, won + tied)

    def average_precision(self) -> Estimate:
        """Pooled average precision, with bounds from the worst and the best order inside each bin.

        Worst: the bin's negatives first, then its positives one by one. Best: its positives first and all
        tied, so that each gets the precision after the last.
        """
        pos, neg = self.positives[::-1], self.negatives[::-1]  # the highest scores first
        if not pos.any() or self.unscored:
            return _UNKNOWN
        true = np.repeat(np.cumsum(pos), pos)  # at the end of the bin, once for each positive in it
        false = np.repeat(np.cumsum(neg), pos)
        false_before = np.repeat(np.cumsum(neg) - neg, pos)
        rank = np.arange(1, pos.sum() + 1)
        return Estimate(
            float(np.mean(true / (true + false))),
            float(np.mean(rank / (rank + false))),
            float(np.mean(true / (true + false_before))),
        )

    def partial_auroc(self, max_fpr: float) -> Estimate:
        """Pooled partial AUROC, with bounds from the worst and the best order inside each bin."""
        pos, neg = self.positives[::-1].astype(np.float64), self.negatives[::-1].astype(np.float64)
        if not (pos.any() and neg.any()) or self.unscored:
            return _UNKNOWN
        return _partial_area(pos, neg, max_fpr)

    def roc_curve(self) -> tuple[Floats, Floats]:
        """False and true positive rates, from (0, 0) to (1, 1), one point per non-empty bin."""
        used, true, false = self._cumulated()
        with np.errstate(invalid="ignore"):  # 0/0 where a class is missing gives NaN
            return np.r_[0, false[used]] / false[-1], np.r_[0, true[used]] / true[-1]

    def pr_curve(self) -> tuple[Floats, Floats]:
        """Recall and precision, recall increasing; Σ (R_i − R_{i−1})·P_i is the estimated average precision."""
        used, true, false = self._cumulated()
        with np.errstate(invalid="ignore"):
            return true[used] / true[-1], true[used] / (true + false)[used]

    def _cumulated(self) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
        pos, neg = self.positives[::-1], self.negatives[::-1]
        return pos + neg > 0, np.cumsum(pos, dtype=np.float64), np.cumsum(neg, dtype=np.float64)


_UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"))


class Counted(Protocol):
    """Counts of scores by class, from which metrics are estimated."""

    def auroc(self) -> Estimate:
        """Pooled AUROC."""

    def average_precision(self) -> Estimate:
        """Pooled average precision."""

    def partial_auroc(self, max_fpr: float) -> Estimate:
        """Pooled partial AUROC."""

    def __add__(self, other: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class ScoreTotals:
    """What a client shares about its scores: a histogram, and sums of correct predictions and losses. Can be added."""

    examples: float
    sums: Mapping[str, float]
    """Sums of metrics that are means over examples; empty unless the scores are logits."""
    histogram: Counted | None
    """None for one score per class."""

    @classmethod
    def of(cls, scores: npt.ArrayLike, labels: npt.ArrayLike, *, log_odds: bool = False) -> ScoreTotals:
        """Count the scores of one client; `log_odds` adds the sums for single scores."""
        n, one = len(np.asarray(labels)), np.ndim(scores) == 1
        means = {"accuracy": accuracy, "log_loss": log_loss} if log_odds or not one else {}
        sums = (
            {name: n * function(scores, labels) for name, function in means.items()} if n else dict.fromkeys(means, 0.0)
        )
        return cls(n, sums, ScoreHistogram.of(scores, labels) if one else None)

    def __add__(self, other: ScoreTotals) -> ScoreTotals:
        if not isinstance(other, ScoreTotals):
            return NotImplemented
        missing = float("nan")  # a sum that one side lacks is unknown
        sums = {k: self.sums.get(k, missing) + other.sums.get(k, missing) for k in {**self.sums, **other.sums}}
        histograms = [h for h in (self.histogram, other.histogram) if h is not None]
        return ScoreTotals(self.examples + other.examples, sums, reduce(add, histograms) if histograms else None)

    def metrics(self, metric: str | Metric = "") -> dict[str, float]:
        """Return the metrics over all examples; auroc_error is the largest error that the bins can cause.

        metric: as in `judge`.
        """
        found = {k: v / self.examples if self.examples else float("nan") for k, v in self.sums.items()}
        if self.histogram is not None:
            estimates = {"auroc": self.histogram.auroc(), "ap": self.histogram.average_precision()}
            estimates |= {name: self.histogram.partial_auroc(rate) for name, rate in _partial_too(metric).items()}
            for name, estimate in estimates.items():
                found |= {name: estimate.value, f"{name}_error": estimate.error}
        return found


def judge_pooled(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    parts: Iterable[npt.ArrayLike],
    *,
    log_odds: bool = False,
    metric: str | Metric = "",
) -> dict[str, float]:
    """Return the metrics computed from clients' totals.

    scores, labels: of all rows.
    parts: the rows of each client.
    log_odds: single scores are log-odds.
    metric: as in `judge`.
    """
    s, y = np.asarray(scores), np.asarray(labels)
    each = [ScoreTotals.of(s[rows], y[rows], log_odds=log_odds) for rows in map(np.asarray, parts) if len(rows)]
    return pooled(each, metric)


def pooled(totals: Sequence[ScoreTotals], metric: str | Metric = "") -> dict[str, float]:
    """Return the metrics over all clients from their totals, and as worst_NAME the worst client's.

    A client for which a metric is undefined is not the worst. `metric` is that of `judge`.
    """
    if not totals:
        raise NestfedError("No client has examples to evaluate on.")
    found, own = reduce(add, totals).metrics(metric), [client.metrics(metric) for client in totals]
    for name in [k for k in found if not k.endswith("_error")]:
        known = [values[name] for values in own if not math.isnan(values.get(name, math.nan))]
        found[f"worst_{name}"] = find(name).worst(known) if known else math.nan
    return found


def places(scores: npt.ArrayLike, bins: int = 4096, range: tuple[float, float] | None = None) -> Counts:
    """Return the bin of every score on the grid of `ScoreHistogram`."""
    return np.searchsorted(edges(bins, range), np.asarray(scores, np.float64), side="right")


@lru_cache(maxsize=8)
def edges(bins: int, range: tuple[float, float] | None) -> Floats:
    """Return the bins−1 inner edges; the outer bins are unbounded."""
    if bins < 2:
        raise NestfedError(f"ScoreHistogram: bins must be at least 2, not {bins}.")
    edges: Floats
    inner = np.arange(1, bins) / bins
    if range is None:
        squashed = 2 * inner - 1
        edges = squashed / (1 - np.abs(squashed))
    else:
        low, high = range
        if not -np.inf < low < high < np.inf:
            raise NestfedError(f"ScoreHistogram: range must be (low, high) with low < high, not {range}.")
        edges = low + inner * (high - low)
    edges.setflags(write=False)  # the cache hands the same array to everyone
    return edges


# ------------------------------------------------------------------------------------------ small helpers


def _tallied(scores: Floats, labels: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the numbers of positives and of negatives at each distinct score, in ascending order."""
    ranks = np.unique(scores, return_inverse=True)[1]
    positives, negatives = (np.bincount(ranks, which).astype(np.float64) for which in (labels, ~labels))
    return positives, negatives


def _partial_area(positives: Floats, negatives: Floats, max_fpr: float) -> Estimate:
    """Return the area under the ROC curve up to max_fpr, divided by it, from counts by score, the highest scores first.

    The curve is straight within a score. The bounds are its areas if the negatives of a score come first, or the positives.
    """
    width, height = negatives / negatives.sum(), positives / positives.sum()
    used = (max_fpr - (width.cumsum() - width)).clip(0, width)
    before = height.cumsum() - height
    rise = height * used / np.where(width > 0, width, 1)
    low, value, high = (float(used @ (before + part) / max_fpr) for part in (0, rise / 2, height))
    return Estimate(value, low, high)


def _scored(scores: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Floats, npt.NDArray[np.bool_]]:
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if s.ndim != 1 or s.shape != y.shape:
        raise NestfedError(
            f"Binary metrics need one score and one label per example, not shapes {s.shape} and {y.shape}."
        )
    if not (np.isin(y, [0, 1]).all() or np.isin(y, [-1, 1]).all()):
        raise NestfedError(f"Binary labels must be 0/1 or -1/+1, not {np.unique(y)[:5].tolist()}.")
    return s, y > 0


def _predicted(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Floats, Floats]:
    p, y = np.asarray(predictions, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if p.shape != y.shape:
        raise NestfedError(f"Regression metrics need one prediction per target, not shapes {p.shape} and {y.shape}.")
    return p.ravel(), y.ravel()


def _classified(logits: Floats, labels: npt.ArrayLike) -> tuple[Floats, Counts]:
    y = np.asarray(labels)
    if y.shape != logits.shape[:1]:
        raise NestfedError(f"Logits of shape {logits.shape} need {len(logits)} labels, not shape {y.shape}.")
    if y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() < logits.shape[1]):
        raise NestfedError(f"Labels must be whole numbers from 0 to {logits.shape[1] - 1}, one per class.")
    return logits, y.astype(np.int64)
