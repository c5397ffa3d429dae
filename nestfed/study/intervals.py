"""95 % intervals of shares and of metrics."""

from __future__ import annotations

import math

from nestfed.metrics import Estimate

Z = 1.959963984540054
"""The normal quantile of 95 % intervals."""
UNKNOWN = Estimate(math.nan, math.nan, math.nan)
_RANGES = {"r2": (-math.inf, 1.0), "log_loss": (0.0, math.inf)} | dict.fromkeys(("mse", "rmse", "mae"), (0.0, math.inf))


def range_of(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a metric."""
    return _RANGES.get(metric, (0.0, 1.0))


def wilson(share: float, rows: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of independent rows (1927)."""
    middle = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z / (1 + Z**2 / rows) * math.sqrt(max(share * (1 - share), 0.0) / rows + Z**2 / (4 * rows**2))
    # At 0 and 1 the limit is exact; rounding must not exclude it.
    return (0.0 if share <= 0 else max(middle - half, 0.0)), (1.0 if share >= 1 else min(middle + half, 1.0))


def proportion(count: Estimate, rows: float, independent: float) -> Estimate:
    """Return count/rows with Wilson's interval, widened by the count's bounds; NaN without rows.

    - `independent`: how many independent rows these are worth.
    """
    if not rows:
        return UNKNOWN
    low, high = wilson(count.low / rows, independent)[0], wilson(count.high / rows, independent)[1]
    return Estimate(float(count.value / rows), float(low), float(high))


def bounded(value: float, variance: float, least: float) -> Estimate:
    """Return the interval of a metric between 0 and 1, normal on the scale of its log-odds.

    - `least`: the persons of the rarer class, whose number decides where all rows are ranked right and the variance is 0.
    """
    if not (0 < value < 1 and variance > 0):
        return Estimate(value, *wilson(value, least))
    half = Z * math.sqrt(variance) / (value * (1 - value))
    at = math.log(value / (1 - value))
    return Estimate(value, *(1 / (1 + math.exp(min(-end, 700.0))) for end in (at - half, at + half)))


def symmetric(value: float, variance: float, ends: tuple[float, float]) -> Estimate:
    """Return the normal interval, cut off at a metric's smallest and largest value."""
    half = Z * math.sqrt(max(variance, 0.0))
    return Estimate(value, max(value - half, ends[0]), min(value + half, ends[1]))


def plain(estimate: Estimate) -> list[float | str]:
    """Return value, low and high as plain data; "nan" and "inf" as text, as JSON has no such numbers."""
    return [v if math.isfinite(v) else str(v) for v in (estimate.value, estimate.low, estimate.high)]
