"""Turn scores into probabilities with sums that sites send: one calibration for all, and one per site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nestfed.core import NestfedError, unknown
from nestfed.metrics import Estimate
from nestfed.queries.base import TEST, VALIDATION, Ask, pooled
from nestfed.queries.calibration import FACTS, FLOOR, LINE, OWN, SUMS, WAYS, strengths_of, targets
from nestfed.queries.guard import steady
from nestfed.queries.solve import SeparationError, Sums, newton
from nestfed.study.decide import Calibration
from nestfed.study.intervals import UNKNOWN, symmetric
from nestfed.study.metric_table import ALL, SITE

QUERIES = (FACTS, SUMS, OWN, LINE)
"""What sites are asked to calibrate models."""
STRENGTHS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, math.inf)
"""The strengths of shrinkage that `recalibrate` tries: λ, or 1/variance of the sites' parameters."""


@dataclass(frozen=True)
class _Scale:
    """The mean and the deviation of all sites' scores, in whose units pairs of slope and intercept are fitted."""

    mean: float
    deviation: float
    positives: int
    negatives: int

    @classmethod
    def of(cls, ask: Ask, x: np.ndarray, part: str) -> _Scale:
        total = pooled(ask(FACTS, part=part, x=x).values())
        used, positives = int(total["used"]), int(total["positives"])
        if not used:
            raise NestfedError(
                f"No site may describe its {part} rows: at every site a class has fewer rows than its min_cell."
            )
        mean = float(total["total"]) / used
        deviation = math.sqrt(max(float(total["squares"]) / used - mean**2, 0.0))
        return cls(mean, deviation if deviation > 1e-12 * (1 + abs(mean)) else 1.0, positives, used - positives)

    @property
    def array(self) -> np.ndarray:
        return np.array([self.mean, self.deviation])

    def raw(self, pair: np.ndarray) -> tuple[float, float]:
        """Return a and b of a·score + b."""
        return float(pair[0] / self.deviation), float(pair[1] - pair[0] * self.mean / self.deviation)

    def pair(self, a: float, b: float) -> np.ndarray:
        """Return slope and shift of scaled scores."""
        return np.array([a * self.deviation, b + a * self.mean])


def calibrate(ask: Ask, x: np.ndarray, *, part: str = VALIDATION) -> Calibration:
    """Fit P(y = 1) = 1/(1 + exp(−(a·score + b))) to the scores of all sites by Newton steps (Platt 1999).

    - `x`: the parameters of the model.
    - `part`: rows on which the model was not trained.

    a stays above 0, so that the order of scores is kept.
    """
    ask = steady(ask)
    scale = _Scale.of(ask, x, part)
    target = np.array(targets(scale.positives, scale.negatives))
    pair = _common(ask, x, part, Calibration(), scale.array, target)[0]
    if pair[0] < FLOOR:  # the scores are no better than chance: keep their order, and fit the intercept
        pair = _common(ask, x, part, Calibration(), scale.array, target, slope=FLOOR)[0]
    return Calibration(*scale.raw(pair))


def _common(
    ask: Ask, x: np.ndarray, part: str, before: Calibration, scale: np.ndarray, target: np.ndarray, slope: float | None = None
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the best (slope, shift) over all sites and its covariance; with `slope`, the best shift at this slope."""
    free = [0, 1] if slope is None else [1]

    def sums(move: np.ndarray) -> Sums:
        pair = move if slope is None else np.array([slope, move[0]])
        found = pooled(ask(SUMS, part=part, x=x, case=before.to_json(), scale=scale, target=target, pair=pair).values())
        return Sums(float(found["loss"]), found["gradient"][free], found["hessian"][np.ix_(free, free)])

    found = newton(sums, np.zeros(len(free)), names=("slope", "intercept")[-len(free) :])
    return found.x if slope is None else np.array([slope, found.x[0]]), found.inverse


# ------------------------------------------------------------------------------------------------- by site


@dataclass(frozen=True)
class Recalibration:
    """A calibration with a pair per site, and how it was chosen."""

    calibration: Calibration
    way: str
    """What sites adapt: "intercept" or "slope" (both)."""
    strength: float
    """λ; 0 is the sites' own fits, infinity the common calibration."""
    losses: Mapping[tuple[str, float], float]
    """The mean loss by way and strength on rows left out in turn."""
    kept: tuple[str, ...]
    """The sites that keep the common calibration: they have too few rows."""


def recalibrate(
    ask: Ask,
    x: np.ndarray,
    common: Calibration,
    sites: Sequence[str],
    *,
    way: Literal["auto", "intercept", "slope"] = "auto",
    strength: float | None = None,
    part: str = VALIDATION,
    seed: int = 0,
) -> Recalibration:
    """Adapt the common calibration to every site: intercept, or intercept and slope, shrunk towards the common ones.

    - `sites`: the names of the sites, by number.
    - `way`: what sites adapt; "auto" chooses.
    - `strength`: λ, the penalty on the squared distance from the common pair, for scores scaled to deviation 1.
      λ rows with weight p(1 − p) = 1 pull as strongly. None chooses.

    The rule: every site leaves a fifth of its persons out in turn and adapts on the rest. Way and strength with the smallest
    loss over all sites are taken; of equals the stronger, and the intercept before the slope.
    """
    if way not in ("auto", *WAYS):
        raise unknown("way", way, ("auto", *WAYS))
    ask = steady(ask)
    scale = _Scale.of(ask, x, part)
    strengths = strengths_of(STRENGTHS if strength is None else [strength])
    replies = ask(
        OWN, part=part, x=x, scale=scale.array, common=scale.pair(common.a, common.b), strengths=strengths, seed=seed
    )
    total = pooled(replies.values())
    tried = {
        (name, float(s)): float(total["losses"][w, i] / total["used"])
        for w, name in enumerate(WAYS)
        if way in ("auto", name)
        for i, s in enumerate(strengths)
    }
    best = min(tried, key=lambda key: (tried[key], -key[1], WAYS.index(key[0])))
    w, i = WAYS.index(best[0]), strengths.tolist().index(best[1])
    own = {sites[n]: scale.raw(reply["pairs"][w, i]) for n, reply in replies.items() if int(reply["used"])}
    if math.isinf(best[1]):
        own = dict.fromkeys(own, (common.a, common.b))  # without the rounding of the scale
    kept = tuple(name for name in sites if name not in own)
    return Recalibration(replace(common, sites=own), *best, tried, kept)


# --------------------------------------------------------------------------------------------- how good it is


@dataclass(frozen=True)
class Agreement:
    """Whether probabilities agree with frequencies: the regression of the class on the log-odds, with 95 % intervals."""

    slope: Estimate
    """1 if differences between rows are right; below 1, probabilities are too extreme."""
    intercept: Estimate
    """The intercept at slope 1: above 0, probabilities are too low on average."""


def agreement(
    ask: Ask, x: np.ndarray, calibration: Calibration, sites: Sequence[str] = (), *, part: str = TEST
) -> dict[str, Agreement]:
    """Return calibration slope and intercept over all rows ("all") and by site ("site = NAME").

    They are unknown where all rows are of one class, or a threshold separates the classes, or `min_cell` forbids.
    """
    ask = steady(ask)
    one, plain = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    try:
        line, covariance = _common(ask, x, part, calibration, one, plain)
        large, variance = _common(ask, x, part, calibration, one, plain, slope=1.0)
        found = {ALL: Agreement(_normal(line[0], covariance[0, 0]), _normal(large[1], variance[0, 0]))}
    except SeparationError:
        found = {ALL: Agreement(UNKNOWN, UNKNOWN)}
    for n, reply in ask(LINE, part=part, x=x, case=calibration.to_json()).items():
        name = f"{SITE} = {sites[n] if sites else n}"
        known = bool(int(reply["used"]))
        found[name] = Agreement(
            _normal(float(reply["line"][0]), float(reply["covariance"][0, 0])) if known else UNKNOWN,
            _normal(float(reply["shift"]), float(reply["variance"])) if known else UNKNOWN,
        )
    return found


def _normal(value: float, variance: float) -> Estimate:
    return symmetric(float(value), float(variance), (-math.inf, math.inf))
