"""One rule for choosing from a grid: among the values within noise of the best, take the smallest step.

The noise between two options is the standard error of their difference on the validation rows, by a paired bootstrap: every
option is evaluated on the same resamples of the rows. Without rows it is the standard error of the difference over the
seeds of a trial, if there are several. It is at least 0.1 % of the best value, so the last bits decide nothing, and at most
1 % of it, so a few validation rows cannot choose a step that hardly trains. This is the one-standard-error rule (Breiman et
al. 1984) for paired values, with limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Literal

import numpy as np
import numpy.typing as npt

from nestfed.core import Metric, NestfedError

RESAMPLES = 100
LEAST, MOST = 1e-3, 1e-2
"""The limits of the noise, as shares of the best value."""
EQUAL = 1e-6
"""Values that differ by less than this share are equal."""
End = Literal["smallest", "largest"]


@dataclass(frozen=True)
class Option:
    """A setting that was tried."""

    value: float | None
    """Its metric on validation data; None or NaN if it failed."""
    steps: tuple[float, ...] = ()
    """Its step sizes, the most important first; empty if none is chosen."""
    resamples: Sequence[float] = ()
    """The metric on resampled validation rows; all options have the same resamples."""
    seeds: Sequence[float] = ()
    """The metric of every seed, if there are several."""


def resampled(metric: Metric, scores: npt.ArrayLike, labels: npt.ArrayLike) -> list[float]:
    """Return the metric on resamples of rows, which depend on the number of rows only; empty if it has no function."""
    s, y = np.asarray(scores), np.asarray(labels)
    if metric.function is None or not len(y):
        return []
    rng = np.random.default_rng(0)
    rows = (rng.integers(len(y), size=len(y)) for _ in range(RESAMPLES))
    return [float(metric(s[r], y[r])) for r in rows]


def noise(best: Option, other: Option) -> float:
    """Return the noise of the difference between two options."""
    assert best.value is not None
    rows, seeds = _differences(best.resamples, other.resamples), _differences(best.seeds, other.seeds)
    error = stdev(rows) if len(rows) > 1 else stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return abs(best.value) * min(max(error / (abs(best.value) or 1.0), LEAST), MOST)


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    pairs = zip(a, b) if len(a) == len(b) else ()
    return [x - y for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def rank(metric: Metric, options: Sequence[Option]) -> list[int]:
    """Return the places of the options, best value first; of equal values the smaller step comes first."""

    def key(i: int) -> tuple[float, tuple[float, ...], int]:
        value = metric.signed(options[i].value)
        return (-float(f"{value:.6g}"), options[i].steps, i)  # six digits: the last bits decide nothing

    return sorted(range(len(options)), key=key)


def best(metric: Metric, options: Sequence[Option]) -> int:
    """Return the place of the best value; of equal values the smallest step."""
    known = [i for i, o in enumerate(options) if o.value is not None and math.isfinite(o.value)]
    if not known:
        raise NestfedError("No option has a finite value: all of them diverged.")
    top = metric.best(_value(options[i]) for i in known)
    equal = [i for i in known if abs(_value(options[i]) - top) <= EQUAL * abs(top)]
    return min(equal, key=lambda i: (options[i].steps, i))


def choose(metric: Metric, options: Sequence[Option]) -> int:
    """Return the place of the choice: the smallest step within noise of the best value, and of these the best value."""
    first = options[at := best(metric, options)]
    close = [
        i
        for i, o in enumerate(options)
        if o.value is not None
        and math.isfinite(o.value)
        and metric.signed(first.value) - metric.signed(o.value) <= noise(first, o)
    ]
    smallest = min(options[i].steps for i in close)
    if smallest == first.steps:
        return at
    close = [i for i in close if options[i].steps == smallest]
    return close[best(metric, [options[i] for i in close])]


def end(value: float, tried: Sequence[float]) -> End | None:
    """Return whether a value is at an end of those tried."""
    low, high = min(tried), max(tried)
    if low == high or low < value < high:
        return None
    return "largest" if value == high else "smallest"


def beyond(value: float, tried: Sequence[float]) -> float | None:
    """Return the next value beyond an end, in the ratio of the two values there; None if there is none."""
    order = sorted(set(tried))
    where = end(value, order)
    if where is None or order[0] <= 0:
        return None
    ratio = order[-1] / order[-2] if where == "largest" else order[0] / order[1]
    return float(f"{value * ratio:.6g}")


def _value(option: Option) -> float:
    assert option.value is not None
    return option.value
