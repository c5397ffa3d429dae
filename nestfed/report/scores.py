"""The ROC and the precision-recall curve of a model's scores, small enough to keep beside a run's record."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.metrics import Floats, ScoreHistogram

TOLERANCE = 5e-4
"""How far a kept curve may be from the whole one: less than a pixel."""


def curves_of(scores: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, Any] | None:
    """Return both curves as plain data for a file roc.json; None where a class is missing or a score is NaN."""
    s, positive = np.asarray(scores, dtype=np.float64), np.asarray(labels) > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or np.isnan(s).any():
        return None
    ranks = np.unique(s, return_inverse=True)[1]  # a bin for every score: then the histogram is exact
    bins = int(ranks.max()) + 1
    counts = [np.bincount(ranks[of], minlength=bins) for of in (positive, ~positive)]
    counted = ScoreHistogram(counts[0], counts[1])
    found: dict[str, Any] = {"positives": positives, "negatives": negatives}
    found |= {"auroc": counted.auroc().value, "ap": counted.average_precision().value}
    for name, (x, y) in (("roc", counted.roc_curve()), ("pr", counted.pr_curve())):
        keep = simplify(x, y)
        found[name] = {"x": x[keep].tolist(), "y": y[keep].tolist()}
    return found


def simplify(x: Floats, y: Floats, tolerance: float = TOLERANCE) -> npt.NDArray[np.int64]:
    """Return which points to keep so that every other is within the tolerance of the line (Douglas and Peucker)."""
    keep, spans = {0, len(x) - 1}, [(0, len(x) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        dx, dy = x[last] - x[first], y[last] - y[first]
        px, py = x[first + 1 : last] - x[first], y[first + 1 : last] - y[first]
        along = np.clip((px * dx + py * dy) / ((dx * dx + dy * dy) or 1.0), 0.0, 1.0)
        away = np.hypot(px - along * dx, py - along * dy)
        furthest = int(away.argmax())
        if away[furthest] > tolerance:
            middle = first + 1 + furthest
            keep.add(middle)
            spans += [(first, middle), (middle, last)]
    return np.array(sorted(keep))
