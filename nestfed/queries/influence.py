"""Metrics of counted scores, and what one more row in a bin changes: from these follow variances.

A metric T is a function of the weights of rows. The influence of a row is ∂T/∂(its weight). With all weights 1, the sum of
influences is 0 and the sum of their squares is the variance of T. For the AUROC this is DeLong's variance, up to the
factors P/(P − 1) and N/(N − 1) for P positives and N negatives.

Away from the counts at which influences were computed, T ≈ T(counts) + Σ influences of the rows: a first-order correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nestfed.core import NestfedError, unknown
from nestfed.metrics import find
from nestfed.queries.scores import BINS, LOG_ODDS, LOGITS, RANKING

MIDDLE = BINS // 2
"""The first bin whose scores are at least 0."""
RANKING_METRICS = ("auroc", "ap")


@dataclass(frozen=True)
class Influence:
    """A metric of counts by class and bin, and the influence of a row in every bin; NaN and 0 if undefined."""

    value: float
    positive: np.ndarray
    negative: np.ndarray

    def of(self, places: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the influence of rows, given their bins and classes."""
        return np.where(labels, self.positive[places], self.negative[places])


def influence(metric: str, positives: np.ndarray, negatives: np.ndarray) -> Influence:
    """Return a metric of counts by bin, scores ascending, with its influences."""
    p, n = positives.astype(np.float64), negatives.astype(np.float64)
    if metric == "accuracy":
        return _accuracy(p, n)
    if not p.any() or not (n.any() or metric == "ap"):
        return Influence(math.nan, np.zeros(len(p)), np.zeros(len(p)))
    top = _average_precision(p[::-1], n[::-1]) if metric == "ap" else _partial_area(p[::-1], n[::-1], max_fpr(metric))
    return Influence(top.value, top.positive[::-1], top.negative[::-1])


def max_fpr(metric: str) -> float:
    """Return the largest false positive rate of a ranking metric: 1 for the AUROC, ρ for pauroc@ρ."""
    if metric == "auroc":
        return 1.0
    find(metric)  # rejects what is not a rate
    return float(metric.partition("@")[2])


def is_counted(metric: str) -> bool:
    """Return whether a metric comes from counts of scores by class and bin."""
    return metric in (*RANKING_METRICS, "accuracy") or metric.startswith("pauroc")


def _accuracy(p: np.ndarray, n: np.ndarray) -> Influence:
    """Count a row as positive if its score is at least 0."""
    above = np.arange(len(p)) >= MIDDLE
    rows = p.sum() + n.sum()
    if not rows:
        return Influence(math.nan, 0 * p, 0 * n)
    value = float((p @ above + n @ ~above) / rows)
    return Influence(value, (above - value) / rows, (~above - value) / rows)


def _partial_area(p: np.ndarray, n: np.ndarray, rate: float) -> Influence:
    """Return the mean true positive rate over false positive rates up to `rate`; the highest scores come first."""
    width, height = n / n.sum(), p / p.sum()
    before = width.cumsum() - width
    used = (rate - before).clip(0, width)
    safe = np.where(width > 0, width, 1.0)
    # The area that a positive in the bin adds: half of its own bin's width, and all that follows.
    area = (rate - before - used).clip(0) + used**2 / (2 * safe)
    value = float(height @ area / rate)
    reached = height.cumsum() - height
    partly = (used > 0) & (used < width)
    # What more negatives in the bin change: they add a strip, and push the last strip beyond the rate.
    end = float((reached + height * used / safe)[partly][0]) if partly.any() else 1.0
    strip = np.where(before + width <= rate, reached + height / 2 - end, 0.0)
    strip = np.where(partly, -height * used**2 / (2 * safe**2), strip)
    return Influence(value, (area / rate - value) / p.sum(), (strip - width @ strip) / (rate * n.sum()))


def _average_precision(p: np.ndarray, n: np.ndarray) -> Influence:
    """Return Σ (R_i − R_{i−1})·P_i over bins, the highest scores first."""
    true, false = p.cumsum(), n.cumsum()
    total = true + false
    first = int(np.flatnonzero(total)[0])
    safe = np.where(total > 0, total, 1.0)
    precision = np.where(total > 0, true / safe, true[first] / total[first])
    value = float(p @ precision / p.sum())
    # A row changes the precision at every positive that does not have a higher score.
    gained = (p * false / safe**2)[::-1].cumsum()[::-1]
    lost = (p * true / safe**2)[::-1].cumsum()[::-1]
    return Influence(value, (precision - value + gained) / p.sum(), -lost / p.sum())


# ------------------------------------------------------------------------------ metrics of sums over rows

NUMBERS = "numbers"
"""Scores that predict a number, beside the kinds in `nestfed.queries.scores`."""
SUMMED = {
    RANKING: (),
    LOG_ODDS: ("log_loss", "brier"),
    LOGITS: ("log_loss",),
    NUMBERS: ("mse", "mae", "target", "square"),
}
"""For each kind of scores, the values that are summed over rows."""
_BY_KIND = {
    RANKING: (*RANKING_METRICS, "pauroc@ρ"),
    LOG_ODDS: (*RANKING_METRICS, "pauroc@ρ", "accuracy", "log_loss", "brier"),
    LOGITS: ("accuracy", "log_loss"),
    NUMBERS: ("mse", "rmse", "mae", "r2"),
}


def applicable(metric: str, kind: str) -> None:
    """Reject a metric that scores of this kind do not have."""
    if metric not in _BY_KIND[kind] and not (metric.startswith("pauroc") and "pauroc@ρ" in _BY_KIND[kind]):
        raise NestfedError(
            f"The metric {metric!r} is not defined for {kind} scores; expected one of {', '.join(_BY_KIND[kind])}."
        )
    if metric.startswith("pauroc"):
        max_fpr(metric)


def usual_metrics(kind: str) -> tuple[str, ...]:
    """Return the metrics of a kind of scores that need no option; reject an unknown kind."""
    if kind not in _BY_KIND:
        raise unknown("kind of scores", kind, _BY_KIND)
    return tuple(name for name in _BY_KIND[kind] if "@" not in name)


def losses(scores: np.ndarray, y: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of `SUMMED` for every row, (values, rows)."""
    if kind == LOG_ODDS:
        p = 0.5 * (1 + np.tanh(scores / 2))
        return np.stack([np.logaddexp(0.0, np.where(y > 0, -scores, scores)), (p - (y > 0)) ** 2])
    if kind == LOGITS:
        every = np.logaddexp.reduce(scores, axis=1)
        return np.asarray((every - scores[np.arange(len(scores)), y.astype(np.int64)])[None])
    if kind == NUMBERS:
        gap = scores - y
        return np.stack([gap**2, np.abs(gap), y, y**2])
    return np.zeros((0, len(y)))


def of_sums(metric: str, kind: str, sums: np.ndarray, rows: int) -> float:
    """Return a metric from sums over rows; NaN if it is undefined."""
    if not rows:
        return math.nan
    mean = dict(zip(SUMMED[kind], (sums / rows).tolist()))
    if metric == "rmse":
        return math.sqrt(mean["mse"])
    if metric == "r2":
        spread = mean["square"] - mean["target"] ** 2
        return 1 - mean["mse"] / spread if spread > 0 else math.nan
    return mean[metric]


def influences_of_sums(metric: str, kind: str, sums: np.ndarray, rows: int, each: np.ndarray) -> np.ndarray:
    """Return the influence of rows on a metric of sums, given the rows' own values `each`, (values, rows)."""
    value = of_sums(metric, kind, sums, rows)
    if not math.isfinite(value):
        return np.zeros(each.shape[1])
    mean = dict(zip(SUMMED[kind], (sums / rows).tolist()))
    own = dict(zip(SUMMED[kind], each))
    if metric == "rmse":
        return (own["mse"] - mean["mse"]) / (2 * value * rows) if value > 0 else np.zeros(each.shape[1])
    if metric == "r2":
        spread = mean["square"] - mean["target"] ** 2
        off = (own["target"] - mean["target"]) ** 2
        return (mean["mse"] / spread * (off - spread) - (own["mse"] - mean["mse"])) / (spread * rows)
    return (own[metric] - value) / rows
