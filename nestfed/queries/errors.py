"""The query that judges a model of a number: sums of its errors, from which RMSE, MAE and R² over all sites follow."""

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


def judged_errors(replies: Iterable[Arrays], reduce: str = "mean") -> dict[str, float]:
    """Return RMSE, MAE and R² over all sites, from the sums or from their medians per row."""
    return totals_of(pooled(replies, reduce)).metrics()
