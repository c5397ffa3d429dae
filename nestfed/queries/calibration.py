"""Calibrate scores from sums over rows, and let a site adapt the common calibration to its own rows.

P(y = 1) = 1/(1 + exp(−(slope·z + shift))), z = (score − mean)/deviation with the mean and the deviation of all sites. The
targets of Platt (1999) lie slightly inside (0, 1), so that separable scores have a finite solution.

A site's own pair minimises its loss + (λ/2)·(squared distance from the common pair): λ = 0 is its own fit, λ = ∞ the common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import expit

from nestfed.core import NestfedError
from nestfed.data.random import Purpose, Streams
from nestfed.queries.base import Arrays, Field, Query, Rows
from nestfed.queries.guard import arrays, small
from nestfed.queries.solve import SeparationError, Sums, newton

FLOOR = 1e-3
"""The smallest slope: the order of scores is kept."""
FOLDS = 5
WAYS = ("intercept", "slope")
"""What a site adapts: the intercept, or intercept and slope."""

# --------------------------------------------------------------------------------------------- at a site


def _scores(rows: Rows, x: np.ndarray, case: Mapping[str, Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' scores, calibrated as in `case`, and their classes; nothing from a site that may not answer."""
    if not len(rows):
        return np.zeros(0), np.zeros(0)
    if rows.scores is None:
        raise NestfedError("These rows have no scores: no model is known.")
    scores = np.asarray(rows.scores(np.asarray(x)), np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise NestfedError("Calibration needs one finite score per row.")
    a, b = (1.0, 0.0) if case is None else case["sites"].get(rows.site, (case["a"], case["b"]))
    return a * scores + b, (np.asarray(rows.y) > 0).astype(np.float64)


def targets(positives: float, negatives: float) -> tuple[float, float]:
    """Return Platt's targets of the two classes: (P + 1)/(P + 2) and 1/(N + 2)."""
    return (positives + 1) / (positives + 2), 1 / (negatives + 2)


def _loss(z: np.ndarray, target: np.ndarray, pair: np.ndarray) -> Sums:
    """Return the sum of cross-entropies to the targets, its gradient and its Hessian in (slope, shift)."""
    eta = pair[0] * z + pair[1]
    p, design = expit(eta), np.stack([z, np.ones(len(z))], 1)
    value = (np.logaddexp(0.0, eta) - target * eta).sum()
    return Sums(float(value), design.T @ (p - target), design.T @ ((p * (1 - p))[:, None] * design))


def _facts(rows: Rows, x: np.ndarray) -> Arrays:
    scores, y = _scores(rows, x)
    return arrays(used=len(y), positives=y.sum(), total=scores.sum(), squares=(scores**2).sum())


def _sums(
    rows: Rows, x: np.ndarray, case: Mapping[str, Any], scale: np.ndarray, target: np.ndarray, pair: np.ndarray
) -> Arrays:
    scores, y = _scores(rows, x, case)
    found = _loss((scores - scale[0]) / scale[1], np.where(y > 0, target[0], target[1]), np.asarray(pair))
    return arrays(used=len(y), loss=found.value, gradient=found.gradient, hessian=found.hessian)


def own_pair(z: np.ndarray, target: np.ndarray, common: np.ndarray, strength: float, *, slope: bool) -> np.ndarray:
    """Return a site's own (slope, shift): the common pair is kept as far as `strength` demands.

    - `slope`: adapt the slope as well as the intercept.
    """
    if np.isinf(strength):
        return common
    free = np.array([slope, True])

    def sums(move: np.ndarray) -> Sums:
        every = np.zeros(2)
        every[free] = move
        here = _loss(z, target, common + every)
        return Sums(here.value, here.gradient[free], here.hessian[np.ix_(free, free)])

    found = common.astype(np.float64)
    found[free] += newton(sums, np.full(int(free.sum()), strength), names=("slope", "intercept")).x
    if slope and found[0] < FLOOR:
        return own_pair(z, target, np.array([FLOOR, common[1]]), strength, slope=False)
    return found


def _own(rows: Rows, x: np.ndarray, scale: np.ndarray, common: np.ndarray, strengths: np.ndarray, seed: int) -> Arrays:
    scores, y = _scores(rows, x)
    pairs = np.zeros((len(WAYS), len(strengths), 2))
    losses = np.zeros((len(WAYS), len(strengths)))
    if not len(y):
        return arrays(used=0, pairs=pairs, losses=losses)
    z = (scores - scale[0]) / scale[1]
    fold = _folds(rows, seed)
    for w, way in enumerate(WAYS):
        for i, strength in enumerate(strengths):
            pairs[w, i] = _fitted(z, y, common, strength, way)
            for k in range(FOLDS):
                out = fold == k
                if out.any():
                    pair = _fitted(z[~out], y[~out], common, strength, way)
                    losses[w, i] += _loss(z[out], y[out], pair).value
    return arrays(used=len(y), pairs=pairs, losses=losses)


def _fitted(z: np.ndarray, y: np.ndarray, common: np.ndarray, strength: float, way: str) -> np.ndarray:
    high, low = targets(y.sum(), len(y) - y.sum())
    return own_pair(
        z, np.where(y > 0, high, low), np.asarray(common, np.float64), float(strength), slope=way == "slope"
    )


def _folds(rows: Rows, seed: int) -> np.ndarray:
    """Return the number of each row's fold; a person's rows stay together, and every fold has about as many persons."""
    group = np.arange(len(rows)) if rows.group is None else np.asarray(rows.group)
    _, place = np.unique(group, return_inverse=True)
    order = Streams(seed).at(Purpose.JUDGE, 0, 1).permutation(int(place.max()) + 1)
    return np.asarray(order[place] % FOLDS)


def _line(rows: Rows, x: np.ndarray, case: Mapping[str, Any]) -> Arrays:
    """Return the site's regression of the classes on log-odds, and the intercept at slope 1; 0 if it has none."""
    eta, y = _scores(rows, x, case)
    nothing = arrays(used=0, line=np.zeros(2), covariance=np.zeros((2, 2)), shift=0.0, variance=0.0)
    if not len(y) or y.min() == y.max():
        return nothing
    try:
        both = newton(lambda pair: _loss(eta, y, pair), np.zeros(2))
        large = newton(lambda b: _at_slope_1(eta, y, b), np.zeros(1))
    except SeparationError:
        return nothing
    return arrays(used=len(y), line=both.x, covariance=both.inverse, shift=large.x[0], variance=large.inverse[0, 0])


def _at_slope_1(eta: np.ndarray, y: np.ndarray, shift: np.ndarray) -> Sums:
    found = _loss(eta, y, np.array([1.0, shift[0]]))
    return Sums(found.value, found.gradient[1:], found.hessian[1:, 1:])


# ------------------------------------------------------------------------------------- the declarations


def _enough(rows: Rows, min_cell: int, **_: Any) -> Rows:
    """Return no rows if a class has fewer than `min_cell`, so that no sum describes fewer."""
    if not small(np.bincount((np.asarray(rows.y) > 0).astype(np.int64), minlength=2), min_cell):
        return rows
    return replace(rows, x=np.asarray(rows.x)[:0], y=rows.y[:0], group=None, scores=None)


_USED = Field("the number of rows in the sums; 0 if the site's disclosure rule leaves none", "count")

FACTS = Query(
    "calibration-facts",
    "to find the scale of a model's scores",
    _facts,
    {
        "used": _USED,
        "positives": Field("how many of them are of the positive class", "count"),
        "total": Field("the sum of their scores", over="used"),
        "squares": Field("the sum of their squared scores", over="used", signed=False),
    },
    prepare=_enough,
    of_columns=False,
)
SUMS = Query(
    "calibration-sums",
    "to take a Newton step of a calibration over all sites",
    _sums,
    {
        "used": _USED,
        "loss": Field("the sum of the rows' losses at a slope and an intercept", over="used"),
        "gradient": Field("the sum of the gradients of these losses", shape=("two",), over="used"),
        "hessian": Field("the sum of the second derivatives of these losses", shape=("two", "two"), over="used"),
    },
    sizes=lambda **_: {"two": 2},
    prepare=_enough,
    of_columns=False,
)
OWN = Query(
    "calibration-own",
    "to adapt the calibration of a model to every site",
    _own,
    {
        "used": _USED,
        "pairs": Field("the site's own slope and intercept, for both ways and every strength of shrinkage", shape=("ways", "strengths", "two"), over="used"),
        "losses": Field("the sum of their losses on rows left out in turn", shape=("ways", "strengths"), over="used", signed=False),
    },
    sizes=lambda strengths, **_: {"ways": len(WAYS), "strengths": len(strengths), "two": 2},
    prepare=_enough,
    of_columns=False,
)  # fmt: skip
LINE = Query(
    "calibration-line",
    "to see at every site whether probabilities agree with frequencies",
    _line,
    {
        "used": _USED,
        "line": Field("the site's regression of the class on the log-odds: slope and intercept", shape=("two",), over="used"),
        "covariance": Field("the covariance of these", shape=("two", "two"), over="used"),
        "shift": Field("the intercept at slope 1", over="used"),
        "variance": Field("the variance of this intercept", over="used", signed=False),
    },
    sizes=lambda **_: {"two": 2},
    prepare=_enough,
    of_columns=False,
)  # fmt: skip


def strengths_of(values: Sequence[float]) -> np.ndarray:
    """Return strengths of shrinkage as an array; reject negative ones."""
    found = np.asarray(values, np.float64)
    if not len(found) or not (found >= 0).all():
        raise NestfedError(f"The strengths of shrinkage are numbers from 0 or inf, not {list(values)}.")
    return found
