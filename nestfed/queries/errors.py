"""Queries about a target that is a number: its scale, and the errors of a model, from which RMSE, MAE and R² follow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nestfed.metrics import ErrorTotals
from nestfed.queries.base import ROWS, Arrays, Field, Query, Rows, pooled


def _errors(rows: Rows, x: np.ndarray, center: float = 0.0) -> Arrays:
    assert rows.scores is not None
    totals = ErrorTotals.of(rows.scores(x), rows.y, center)
    known = np.isfinite(totals.sums).all()
    return {
        "unscored": np.array(0 if known else len(rows)),
        "sums": totals.sums if known else np.zeros_like(totals.sums),
    }


def totals_of(reply: Arrays) -> ErrorTotals:
    """Read a reply to `ERRORS`; raise a ValueError if it contradicts itself."""
    rows, sums = int(reply[ROWS]), np.asarray(reply["sums"], np.float64)
    if not 0 <= int(reply["unscored"]) <= rows:
        raise ValueError("it counts more rows without a prediction than rows.")
    if (sums[[1, 2, 4]] < 0).any():
        raise ValueError("its sums of squares or of absolute values are negative.")
    if int(reply["unscored"]):
        sums = np.full_like(sums, np.nan)
    return ErrorTotals(rows, sums)


ERRORS = Query(
    "errors",
    "to judge a model of a number on held-out rows",
    _errors,
    {
        "unscored": Field("the number of rows of a model whose predictions are not all numbers", "count"),
        "sums": Field(
            "the sums of the errors, their squares and absolute values, of the target and its squares", "sum", ("sums",)
        ),
    },
    lambda x=None, center=0.0: {"sums": 5},
    check=lambda reply, **arguments: totals_of(reply),
    of_columns=False,
    at_model=True,
)  # fmt: skip


def _scale(rows: Rows) -> Arrays:
    y = np.asarray(rows.y, np.float64)
    return {"total": y.sum(), "squares": (y**2).sum()}


SCALE = Query(
    "target-scale",
    "to agree on the mean and the deviation of a target that is a number",
    _scale,
    {
        "total": Field("the sum of the target", "sum"),
        "squares": Field("the sum of its squares", "sum", signed=False),
    },
    of_columns=False,
)


def scale_of(replies: Iterable[Arrays], reduce: str = "mean") -> tuple[float, float]:
    """Return the mean and the standard deviation of the target over all sites; the deviation is 1 if it is constant."""
    total = pooled(replies, reduce)
    mean = float(total["total"]) / int(total[ROWS])
    variance = float(total["squares"]) / int(total[ROWS]) - mean**2
    return mean, variance**0.5 if variance > 1e-12 * mean**2 else 1.0


def judged_errors(replies: Iterable[Arrays], reduce: str = "mean") -> dict[str, float]:
    """Return RMSE, MAE and R² over all sites, from the sums or from their medians per row."""
    return totals_of(pooled(replies, reduce)).metrics()
