"""From scores to decisions: probabilities, and the threshold at which a row counts as positive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from nestfed.core import NestfedError
from nestfed.experiment.study import threshold_rule
from nestfed.metrics import Estimate, edges
from nestfed.queries.scores import BINS
from nestfed.queries.tally import Tally
from nestfed.study.intervals import UNKNOWN, plain, proportion

RULES = ("sensitivity 0.9", "specificity 0.9", "balanced")
ESTIMATES = ("sensitivity", "specificity", "ppv", "alerts")
ROUNDING = 1e-12


@dataclass(frozen=True)
class Calibration:
    """The map from scores to probabilities: P(y = 1 | score) = 1/(1 + exp(−(a·score + b))) (Platt 1999)."""

    a: float = 1.0
    b: float = 0.0
    sites: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A site's own a and b, by the site's name."""

    def at(self, site: str = "") -> tuple[float, float]:
        """Return a and b for a site; the common ones if it has none of its own."""
        return self.sites.get(site, (self.a, self.b))

    def log_odds(self, scores: npt.ArrayLike, site: str = "") -> np.ndarray:
        """Return a·score + b."""
        a, b = self.at(site)
        return a * np.asarray(scores, np.float64) + b

    def __call__(self, scores: npt.ArrayLike, site: str = "") -> np.ndarray:
        """Return probabilities."""
        return np.asarray(expit(self.log_odds(scores, site)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"a": self.a, "b": self.b, "sites": {name: list(pair) for name, pair in self.sites.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Read what `to_json` returned."""
        sites = {str(name): (float(a), float(b)) for name, (a, b) in data.get("sites", {}).items()}
        return cls(float(data["a"]), float(data["b"]), sites)


@dataclass(frozen=True)
class Threshold:
    """A row is positive if its probability is at least `probability`; with 95 % intervals of what that means on test rows."""

    rule: str
    """How it was chosen: "sensitivity 0.9", "specificity 0.95", "alerts 0.1" or "balanced"."""
    probability: float
    sensitivity: Estimate
    specificity: Estimate
    ppv: Estimate
    alerts: Estimate
    """The share of rows that are called positive."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; values that are not numbers are text."""
        found = asdict(self)
        return found | {name: plain(getattr(self, name)) for name in ESTIMATES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Threshold:
        """Read what `to_json` returned."""
        each = {name: Estimate(*map(float, data[name])) for name in ESTIMATES}
        return cls(str(data["rule"]), float(data["probability"]), **each)


# --------------------------------------------------------------------------------- counts at a threshold

EDGES = Calibration()(edges(BINS, None))
"""The probabilities between the bins of scores."""


@dataclass(frozen=True)
class Confusion:
    """Right and wrong decisions at a threshold. Merged cells leave open how many: each count has bounds."""

    tally: Tally
    caught: Estimate
    """Rows of the positive class that are called positive."""
    false_alarms: Estimate
    """Rows of the other class that are called positive."""

    @classmethod
    def of(cls, tally: Tally, probability: float) -> Confusion:
        """Count the rows whose probability is at least `probability`; NaN if not all scores are numbers."""
        if not tally.known:
            return cls(tally, UNKNOWN, UNKNOWN)
        first = int(np.searchsorted(EDGES, probability, side="left")) + 1
        on_edge = first <= len(EDGES) and EDGES[first - 1] == probability < 1  # 1 is the rounded value of many scores
        maybe = first if on_edge else first - 1  # some rows of the bin that holds the threshold
        even, worst, best = tally.scores.even, tally.scores.worst, tally.scores.best

        def above(counts: np.ndarray, where: int) -> float:
            return float(counts[where:].sum())

        return cls(
            tally,
            Estimate(above(even.positives, first), above(worst.positives, first), above(best.positives, maybe)),
            Estimate(above(even.negatives, first), above(best.negatives, first), above(worst.negatives, maybe)),
        )

    @property
    def sensitivity(self) -> Estimate:
        """The share of the positive class that is called positive."""
        return proportion(self.caught, self.tally.rows[0], self.tally.independent[0])

    @property
    def specificity(self) -> Estimate:
        """The share of the other class that is not called positive."""
        wrong = self.false_alarms
        negatives = float(self.tally.rows[1])
        right = Estimate(negatives - wrong.value, negatives - wrong.high, negatives - wrong.low)
        return proportion(right, negatives, self.tally.independent[1])

    @property
    def alerts(self) -> Estimate:
        """The share of all rows that are called positive."""
        both = (getattr(self.caught, k) + getattr(self.false_alarms, k) for k in ("value", "low", "high"))
        return proportion(Estimate(*both), self.tally.rows.sum(), self.tally.independent[2])

    @property
    def ppv(self) -> Estimate:
        """The share of the rows that are called positive which are of the positive class."""
        hit, wrong = self.caught, self.false_alarms
        share = self.tally.independent[2] / max(float(self.tally.rows.sum()), 1.0)
        if math.isnan(hit.value) or not hit.value + wrong.value:
            return UNKNOWN
        value, low, high = (
            proportion(Estimate(a, a, a), a + b, share * (a + b))
            for a, b in ((hit.value, wrong.value), (hit.low, wrong.high), (hit.high, wrong.low))
        )
        # Where the bounds allow that no row is called positive, they say nothing.
        return Estimate(
            value.value, 0.0 if math.isnan(low.low) else low.low, 1.0 if math.isnan(high.high) else high.high
        )

    def net_benefit(self, probability: float) -> float:
        """Return true positives per row, less false positives weighted by the odds of the threshold."""
        odds = probability / (1 - probability)
        return (self.caught.value - odds * self.false_alarms.value) / float(self.tally.rows.sum())


# ------------------------------------------------------------------------------------- choosing a threshold


def choose(validation: Tally, rule: str) -> float:
    """Return the probability from which a row counts as positive, by a rule.

    - "sensitivity 0.9": the highest that keeps this sensitivity.
    - "specificity 0.95": the lowest that reaches this specificity.
    - "alerts 0.1": the lowest at which at most this share of rows is called positive.
    - "balanced": the highest sum of sensitivity and specificity; of equals the lowest.
    """
    name, wanted = threshold_rule(rule)
    if not (validation.rows.all() and validation.known):
        raise NestfedError(
            f"A threshold for {rule!r} needs validation rows of both classes, and scores that are numbers."
        )
    # The numbers of rows with at least the probability of every edge; several edges may round to the same.
    first = np.searchsorted(EDGES, EDGES, side="left") + 1
    caught, wrong = (row[::-1].cumsum()[::-1][first].astype(np.float64) for row in validation.histogram)
    called = caught + wrong
    positives, negatives = validation.rows
    caught, wrong, called = caught / positives, wrong / negatives, called / (positives + negatives)
    if name == "balanced":
        return float(EDGES[int(np.argmax(caught - wrong))])
    if name == "sensitivity":
        good = np.flatnonzero(caught >= wanted - ROUNDING)
        return float(EDGES[good[-1]]) if len(good) else 0.0
    good = np.flatnonzero(wrong <= 1 - wanted + ROUNDING if name == "specificity" else called <= wanted + ROUNDING)
    return float(EDGES[good[0]]) if len(good) else 1.0


def judged_at(rule: str, probability: float, test: Tally) -> Threshold:
    """Return a threshold with what it means on test rows."""
    found = Confusion.of(test, probability)
    return Threshold(rule, probability, found.sensitivity, found.specificity, found.ppv, found.alerts)


def thresholds(validation: Tally, test: Tally, rules: Sequence[str] = RULES) -> tuple[Threshold, ...]:
    """Choose a threshold by each rule on validation rows, and judge it on test rows.

    The tallies are those of a calibrated model, from `nestfed.study.counts.count`.
    """
    return tuple(judged_at(rule, choose(validation, rule), test) for rule in rules)
