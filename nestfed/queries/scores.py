"""The query that judges a model: counts of its scores by class, and sums of correct predictions and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nestfed.core import Metric
from nestfed.metrics import Estimate, ScoreHistogram, ScoreTotals, find, pooled
from nestfed.queries.base import ROWS, Arrays, Field, Query, Rows, TooFewError
from nestfed.queries.slots import AtMost

BINS = 4096
RANKING, LOG_ODDS, LOGITS = "ranking", "log-odds", "logits"
"""What scores are: one per row that only ranks, one per row that is a log-odds, or one per class."""
SUMS = ("accuracy", "log_loss")
CLASSES = ("positive", "negative")


@dataclass(frozen=True, eq=False)
class Blurred:
    """Counts of scores in cells of several bins: as if evenly spread in each cell, and in the worst and best order."""

    even: ScoreHistogram
    worst: ScoreHistogram
    best: ScoreHistogram

    @classmethod
    def of(cls, reply: Arrays) -> Blurred:
        """Place the rows of every cell."""
        unscored = int(reply["unscored"])
        cells = {k: (reply[f"{k}_first"], reply[f"{k}_last"], reply[f"{k}s"]) for k in CLASSES}
        first = {k: np.bincount(low, counts, BINS).astype(np.int64) for k, (low, _, counts) in cells.items()}
        last = {k: np.bincount(high, counts, BINS).astype(np.int64) for k, (_, high, counts) in cells.items()}
        even = {k: _spread(*cell) for k, cell in cells.items()}
        return cls(*(
            ScoreHistogram(positives, negatives, None, unscored)
            for positives, negatives in (
                (even["positive"], even["negative"]), (first["positive"], last["negative"]), (last["positive"], first["negative"])
            )
        ))  # fmt: skip

    def __add__(self, other: Blurred) -> Blurred:
        return Blurred(self.even + other.even, self.worst + other.worst, self.best + other.best)

    def auroc(self) -> Estimate:
        """Pooled AUROC, with the bounds that the cells leave open."""
        return Estimate(self.even.auroc().value, self.worst.auroc().low, self.best.auroc().high)

    def average_precision(self) -> Estimate:
        """Pooled average precision, with the bounds that the cells leave open."""
        worst, best = self.worst.average_precision(), self.best.average_precision()
        return Estimate(self.even.average_precision().value, worst.low, best.high)

    def partial_auroc(self, max_fpr: float) -> Estimate:
        """Pooled partial AUROC, with the bounds that the cells leave open."""
        worst, best = self.worst.partial_auroc(max_fpr), self.best.partial_auroc(max_fpr)
        return Estimate(self.even.partial_auroc(max_fpr).value, worst.low, best.high)


def _spread(first: np.ndarray, last: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return counts by bin, with the rows of every cell spread evenly over its bins."""
    found = np.zeros(BINS, np.int64)
    for low, high, count in zip(first.tolist(), last.tolist(), counts.tolist()):
        if low == high:
            found[low] += count
        else:
            np.add.at(found, low + ((np.arange(count) + 0.5) * (high - low + 1) / count).astype(np.int64), 1)
    return found


def _scores(rows: Rows, kind: str, x: np.ndarray | None = None, own: bool = False) -> Arrays:
    if own:
        assert rows.own is not None
        scores = np.asarray(rows.own())
    else:
        assert rows.scores is not None
        assert x is not None
        scores = np.asarray(rows.scores(x))
    totals = ScoreTotals.of(scores, rows.y, log_odds=kind == LOG_ODDS)
    sums = np.array([totals.sums[name] for name in SUMS if totals.sums], np.float64)
    unscored = int(np.isnan(scores.reshape(len(scores), -1)).any(1).sum())
    if not np.isfinite(sums).all():
        sums, unscored = np.zeros_like(sums), unscored or len(rows)
    found = {"unscored": np.array(unscored), "sums": sums}
    counted = totals.histogram
    for name in CLASSES:
        counts = np.zeros(0, np.int64) if counted is None else getattr(counted, f"{name}s")
        bins = np.flatnonzero(counts)
        found |= {f"{name}_first": bins, f"{name}_last": bins, f"{name}s": counts[bins]}
    return found


def _merged(reply: Arrays, min_cell: int) -> Arrays:
    """Merge neighbouring bins of each class until every cell counts at least `min_cell` rows."""
    found: dict[str, np.ndarray] = {}
    for name in CLASSES:
        cells: list[list[int]] = []  # first bin, last bin, rows
        for b, count in zip(reply[f"{name}_first"].tolist(), reply[f"{name}s"].tolist()):
            if cells and cells[-1][2] < min_cell:
                cells[-1] = [cells[-1][0], b, cells[-1][2] + count]
            else:
                cells.append([b, b, count])
        if len(cells) > 1 and cells[-1][2] < min_cell:
            _, b, count = cells.pop()
            cells[-1] = [cells[-1][0], b, cells[-1][2] + count]
        if cells and cells[0][2] < min_cell:
            raise TooFewError(f"This site has fewer than min_cell = {min_cell} {name} rows to judge a model by.")
        made = np.array(cells, np.int64).reshape(-1, 3).T
        found |= {f"{name}_first": made[0], f"{name}_last": made[1], f"{name}s": made[2]}
    unscored, rows = int(reply["unscored"]), int(reply[ROWS])
    sums = reply["sums"].copy()
    if len(sums):  # the sum of correct predictions counts rows
        sums[0] = 0 if sums[0] < min_cell else rows if sums[0] > rows - min_cell else sums[0]
    small = 0 < unscored < min_cell or rows - min_cell < unscored < rows
    return found | {"sums": sums, "unscored": np.array(rows if small else unscored)}


def _sizes(kind: str, x: np.ndarray | None = None, own: bool = False) -> Mapping[str, int | AtMost]:
    bins = AtMost(0 if kind == LOGITS else BINS)
    return {"positive cells": bins, "negative cells": bins, "sums": 0 if kind == RANKING else len(SUMS)}


def totals_of(reply: Arrays, kind: str) -> ScoreTotals:
    """Read a reply to `SCORES`; raise a ValueError if it contradicts itself."""
    unscored, rows, counted = int(reply["unscored"]), int(reply[ROWS]), 0
    for name in CLASSES:
        first, last, counts = reply[f"{name}_first"], reply[f"{name}_last"], reply[f"{name}s"]
        if len(first) and not (
            first[0] >= 0 and last[-1] < BINS and (first <= last).all() and (first[1:] > last[:-1]).all()
        ):
            raise ValueError("its bins are invalid.")
        counted += sum(counts.tolist())
    if counted > rows:
        raise ValueError("it counts more scores than rows.")
    sums = {k: float("nan") if unscored else float(v) for k, v in zip(SUMS, reply["sums"])}
    return ScoreTotals(float(rows), sums, None if kind == LOGITS else Blurred.of(reply))


SCORES = Query(
    "scores",
    "to judge the model on held-out rows",
    _scores,
    {
        k: field
        for name in CLASSES
        for k, field in {
            f"{name}_first": Field(f"the first bin of each cell of scores of {name} rows", "index", (f"{name} cells",)),
            f"{name}_last": Field("the last bin of each of these cells", "index", (f"{name} cells",)),
            f"{name}s": Field(f"the number of {name} rows in each of these cells", "count", (f"{name} cells",)),
        }.items()
    }
    | {
        "unscored": Field("the number of rows whose score is not a number", "count"),
        "sums": Field("the number of correct predictions, and the sum of the losses", "sum", ("sums",), signed=False),
    },
    _sizes,
    protect=_merged,
    check=lambda reply, kind, **_: totals_of(reply, kind),
    of_columns=False,
    at_model=True,
)


def judged(replies: Sequence[Arrays], kind: str, metric: str | Metric = "", reduce: str = "mean") -> dict[str, float]:
    """Return the metrics over all sites.

    With reduce = "median", they are the medians of the sites' own, which one site cannot move far.
    """
    totals = [totals_of(reply, kind) for reply in replies]
    if reduce == "mean":
        return pooled(totals, metric)
    each = [one.metrics(metric) for one in totals]
    found = {}
    for name in each[0] if each else ():
        known = [own[name] for own in each if not np.isnan(own[name])]
        found[name] = float(np.median(known)) if known else float("nan")
        if not name.endswith("_error"):
            found[f"worst_{name}"] = find(name).worst(known) if known else float("nan")
    return found
