"""The query that judges a model: counts of its scores by class, and sums of correct predictions and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nestfed.core import Metric
from nestfed.metrics import ScoreHistogram, ScoreTotals, find, pooled
from nestfed.queries.base import ROWS, Arrays, Field, Query, Rows, TooFewError
from nestfed.queries.slots import AtMost

BINS = 4096
RANKING, LOG_ODDS, LOGITS = "ranking", "log-odds", "logits"
"""What scores are: one per row that only ranks, one per row that is a log-odds, or one per class."""
SUMS = ("accuracy", "log_loss")


def _scores(rows: Rows, kind: str, x: np.ndarray) -> Arrays:
    assert rows.scores is not None
    scores = np.asarray(rows.scores(x))
    totals = ScoreTotals.of(scores, rows.y, log_odds=kind == LOG_ODDS)
    sums = np.array([totals.sums[name] for name in SUMS if totals.sums], np.float64)
    counted = totals.histogram
    unscored = int(np.isnan(scores.reshape(len(scores), -1)).any(1).sum())
    if not np.isfinite(sums).all():
        sums, unscored = np.zeros_like(sums), unscored or len(rows)
    if counted is None:
        empty = np.zeros(0, np.int64)
        return {"bins": empty, "positives": empty, "negatives": empty, "unscored": np.array(unscored), "sums": sums}
    bins = np.flatnonzero(counted.positives + counted.negatives)
    return {
        "bins": bins, "positives": counted.positives[bins], "negatives": counted.negatives[bins],
        "unscored": np.array(unscored), "sums": sums,
    }  # fmt: skip


def _merged(reply: Arrays, min_cell: int) -> Arrays:
    """Merge neighbouring bins until each counts none or at least `min_cell` rows of every class."""
    cells: list[list[int]] = []  # bin, positives, negatives
    for b, p, n in zip(reply["bins"], reply["positives"], reply["negatives"]):
        if cells and _small(cells[-1], min_cell):
            cells[-1] = [int(b), cells[-1][1] + int(p), cells[-1][2] + int(n)]
        else:
            cells.append([int(b), int(p), int(n)])
    while len(cells) > 1 and _small(cells[-1], min_cell):
        last = cells.pop()
        cells[-1] = [cells[-1][0], cells[-1][1] + last[1], cells[-1][2] + last[2]]
    if cells and _small(cells[0], min_cell):
        raise TooFewError(f"This site has fewer than min_cell = {min_cell} rows of a class to judge a model by.")
    made = np.array(cells, np.int64).reshape(-1, 3).T
    unscored, rows = int(reply["unscored"]), int(reply[ROWS])
    sums = reply["sums"].copy()
    if len(sums):  # the sum of correct predictions counts rows
        correct = sums[0]
        sums[0] = 0 if correct < min_cell else rows if correct > rows - min_cell else correct
    return {
        "bins": made[0], "positives": made[1], "negatives": made[2], "sums": sums,
        "unscored": np.array(rows if 0 < unscored < min_cell or rows - min_cell < unscored < rows else unscored),
    }  # fmt: skip


def _small(cell: Sequence[int], min_cell: int) -> bool:
    return any(0 < count < min_cell for count in cell[1:])


def _sizes(kind: str, x: np.ndarray | None = None) -> Mapping[str, int | AtMost]:
    return {"bins": 0 if kind == LOGITS else AtMost(BINS), "sums": 0 if kind == RANKING else len(SUMS)}


SCORES = Query(
    "scores",
    "to judge the model on held-out rows",
    _scores,
    {
        "bins": Field("the bins of scores that are not empty", "index", ("bins",)),
        "positives": Field("the number of positive rows with a score in each bin", "count", ("bins",)),
        "negatives": Field("the number of negative rows with a score in each bin", "count", ("bins",)),
        "unscored": Field("the number of rows whose score is not a number", "count"),
        "sums": Field("the number of correct predictions, and the sum of the losses", "sum", ("sums",), signed=False),
    },
    _sizes,
    protect=_merged,
    of_columns=False,
    at_model=True,
)


def totals_of(reply: Arrays, kind: str) -> ScoreTotals:
    """Read a reply to `SCORES`; raise a ValueError if it contradicts itself."""
    bins, unscored, rows = reply["bins"], int(reply["unscored"]), int(reply[ROWS])
    if len(np.unique(bins)) != len(bins) or (len(bins) and not 0 <= bins.min() <= bins.max() < BINS):
        raise ValueError("its bins are invalid.")
    sums = {k: float("nan") if unscored else float(v) for k, v in zip(SUMS, reply["sums"])}
    if kind == LOGITS:
        return ScoreTotals(float(rows), sums, None)
    counts = np.zeros((2, BINS), np.int64)
    counts[0, bins], counts[1, bins] = reply["positives"], reply["negatives"]
    if counts.sum() > rows:
        raise ValueError("it counts more scores than rows.")
    return ScoreTotals(float(rows), sums, ScoreHistogram(counts[0], counts[1], None, unscored))


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
