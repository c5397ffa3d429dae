"""The ROC and precision-recall curves of a model's scores, simplified to a small file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.metrics import Floats, ScoreHistogram

TOLERANCE = 5e-4
"""The largest distance between the simplified and the full curve: less than a pixel."""


def curves_of(scores: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, Any] | None:
    """Return both curves as plain data for roc.json; None if a class is missing or a score is NaN."""
    s, positive = np.asarray(scores, dtype=np.float64), np.asarray(labels) > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or np.isnan(s).any():
        return None
    ranks = np.unique(s, return_inverse=True)[1]  # one bin per score makes the histogram exact
    bins = int(ranks.max()) + 1
    counts = [np.bincount(ranks[of], minlength=bins) for of in (positive, ~positive)]
    counted = ScoreHistogram(counts[0], counts[1])
    found: dict[str, Any] = {"positives": positives, "negatives": negatives}
    found |= {"auroc": counted.auroc().value, "ap": counted.average_precision().value}
    for name, (x, y) in (("roc", counted.roc_curve()), ("pr", counted.pr_curve())):
        keep = simplify(x, y)
        found[name] = {"x": x[keep].tolist(), "y": y[keep].tolist()}
    return found


def simplify(x: Floats, y: Floats) -> npt.NDArray[np.int64]:
    """Return the points to keep so that all others are within the tolerance of the line (Douglas and Peucker)."""
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
        if away[furthest] > TOLERANCE:
            middle = first + 1 + furthest
            keep.add(middle)
            spans += [(first, middle), (middle, last)]
    return np.array(sorted(keep))
