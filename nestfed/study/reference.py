"""Statistics of training rows and scores that a model carries, so that new rows can be compared with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nestfed.data.encoding import Sums
from nestfed.metrics import ScoreHistogram

BINS = 10
LEAST = 10
"""The smallest number of rows in a bin of scores, whatever the sites' rule."""


@dataclass(frozen=True)
class ScoreShares:
    """How many rows have scores in each of a few bins; the outer bins are unbounded."""

    edges: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_scores(cls, scores: np.ndarray, min_cell: int = 0) -> ScoreShares:
        """Count scores in about ten bins of equal size, none with fewer than `min_cell` rows."""
        values, counts = np.unique(scores, return_counts=True)
        return cls._grouped((values[1:] + values[:-1]) / 2, counts, min_cell)

    @classmethod
    def of_histogram(cls, histogram: ScoreHistogram, min_cell: int = 0) -> ScoreShares:
        """Join the bins of a histogram into about ten of equal size, none with fewer than `min_cell` rows."""
        return cls._grouped(histogram.edges, histogram.positives + histogram.negatives, min_cell)

    @classmethod
    def _grouped(cls, edges: np.ndarray, counts: np.ndarray, min_cell: int) -> ScoreShares:
        least = max(min_cell, LEAST, int(np.ceil(counts.sum() / BINS)))
        ends, held = [], 0
        for i, count in enumerate(counts[:-1]):
            held += int(count)
            if held >= least and counts[i + 1 :].sum() >= max(min_cell, LEAST):
                ends.append(i)
                held = 0
        joined = np.add.reduceat(counts, [0, *(i + 1 for i in ends)])
        return cls(np.asarray(edges, np.float64)[ends], joined.astype(np.int64))

    def count(self, scores: np.ndarray) -> np.ndarray:
        """Count other scores in the same bins."""
        return np.bincount(np.searchsorted(self.edges, scores, side="right"), minlength=len(self.counts))


@dataclass(frozen=True)
class Reference:
    """The number of training rows, of known values of each feature, and of test rows by score.

    Means and deviations are those of the model's encoding.
    """

    rows: int
    known: np.ndarray
    scores: ScoreShares | None = None

    @classmethod
    def of(cls, sums: Iterable[Sums], schema: Any) -> Reference:
        """Add up what the sites sent to agree on the encoding."""
        each = list(sums)
        known = sum((one.aligned(schema, "A site")[0] for one in each), np.zeros(sum(map(len, schema))))
        return cls(sum(one.rows for one in each), np.asarray(known, np.int64))

    def with_scores(self, scores: ScoreShares) -> Reference:
        """Return it with the numbers of rows by score."""
        return replace(self, scores=scores)

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        scores = self.scores and {"edges": self.scores.edges.tolist(), "counts": self.scores.counts.tolist()}
        return {"rows": self.rows, "known": self.known.tolist(), "scores": scores}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Reference:
        """Return the statistics that `to_json` wrote."""
        scores = found["scores"] and ScoreShares(
            np.array(found["scores"]["edges"]), np.array(found["scores"]["counts"])
        )
        return cls(int(found["rows"]), np.array(found["known"], np.int64), scores or None)


def summary_scores(scores: np.ndarray) -> np.ndarray:
    """Return one number per row whose distribution is watched: the score, or the lead of the best class over the next."""
    if scores.ndim == 1:
        return scores
    best = np.sort(scores, axis=1)
    return best[:, -1] - best[:, -2]
