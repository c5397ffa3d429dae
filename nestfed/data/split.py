"""Set rows aside for testing and validation, so that nobody and nothing is on both sides.

| protocol | test rows |
| --- | --- |
| random | a share of each class |
| by group | all rows of a share of the persons (or other groups), chosen by a salted hash of their id |
| temporal | the rows from a date on |
| leave one site out | all rows of one site |

The hash is the same everywhere, so a person who was at several sites is on one side at all of them, and no id leaves its site.
A temporal split, and one that leaves a site out, can have groups too. Then test rows are those of the persons on the test
side, and training rows those of the others; rows of neither kind are not used, because no site can know who else has seen a
person.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError
from nestfed.data.columns import label_of, seconds
from nestfed.data.partition import hold_out
from nestfed.data.schema import spaced

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

TEST, VALIDATION = "test", "validation"
"""What rows are set aside for. Each has a salt of its own, so that the seeds of both may be equal."""
UNKNOWN = ("", "unknown", "nan", "none")
"""Ids that stand for nobody in particular: their rows are divided one by one."""


def aside(
    n: int,
    share: float,
    seed: int,
    purpose: str = TEST,
    *,
    strata: npt.ArrayLike | None = None,
    group: Sequence[Any] | np.ndarray | None = None,
    chosen: Mask | None = None,
) -> tuple[Indices, Indices]:
    """Divide rows 0 … n−1 into those that stay and those that are held out.

    - `share`: the share of the rows to hold out, or of the groups.
    - `strata`: hold out the same share of each class; ignored with `group` or `chosen`.
    - `group`: rows with equal values stay together, also over sites.
    - `chosen`: the rows that a temporal split, or one that leaves a site out, holds out.
    """
    if group is None and chosen is None:
        return hold_out(n, share, seed, labels=strata)
    sides = [] if chosen is None else [chosen]
    sides += [] if group is None else [by_hash(group, share, f"{purpose}:{seed}")]
    held, rest = np.all(sides, axis=0), ~np.any(sides, axis=0)
    return np.flatnonzero(rest).astype(np.int64), np.flatnonzero(held).astype(np.int64)


def by_hash(group: Sequence[Any] | np.ndarray, share: float, salt: str) -> Mask:
    """Return the rows of the groups that are held out: those whose salted hash, in [0, 1), is below `share`."""
    if not 0 < share < 1:
        raise NestfedError(f"The share of rows to set aside must be between 0 and 1, not {share:g}.")
    values, codes = np.unique([spaced(str(label_of(v))) for v in np.asarray(group).tolist()], return_inverse=True)
    held = np.array([_hash(f"{salt}|{value}") < share for value in values], bool)[codes]
    for row in np.flatnonzero(np.isin(np.char.lower(values), UNKNOWN)[codes]):
        held[row] = _hash(f"{salt}||{row}") < share
    return held


def _hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def late(values: np.ndarray, test_from: str, column: str, where: str, form: str = "") -> Mask:
    """Return the rows whose date or number is `test_from` or later.

    - `test_from`: a year, a month or a day, as in 2020, 2020-06 or 2020-06-30; or a number, for a column of numbers.
    - `form`: the format of the dates, if it is not that of 2020-06-30.
    """
    if values.dtype.kind in "iuf":
        times, start = values.astype(np.float64), _number(test_from, column)
    else:
        import pandas as pd

        texts = [None if str(v) in UNKNOWN else str(v) for v in values.tolist()]
        times, wrong = seconds(pd.Series(texts, dtype=object), texts, form)
        if wrong is not None:
            raise NestfedError(
                f"Column {column!r} of {where} holds {str(texts[wrong])[:40]!r} in row {wrong + 1}, which is not a date: a temporal "
                "split needs dates such as 2020-12-31, or numbers."
            )
        start = _first_day(test_from)
    if gone := int(np.isnan(times).sum()):
        raise NestfedError(
            f"Column {column!r} of {where} is missing in {gone:,} rows, which a temporal split cannot place: fill it in "
            "or remove these rows."
        )
    return np.asarray(times >= start)


def _number(text: str, column: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NestfedError(f"Column {column!r} holds numbers, so test_from must be one, not {text!r}.") from None


def _first_day(text: str) -> float:
    """Return the start of a year, month or day in seconds since 1970."""
    parts = re.fullmatch(r"(\d{4})(?:-(\d\d?))?(?:-(\d\d?))?", text.strip())
    try:
        if parts is None:
            raise ValueError
        day = np.datetime64(f"{parts[1]}-{int(parts[2] or 1):02d}-{int(parts[3] or 1):02d}", "s")
    except ValueError:
        raise NestfedError(
            f"test_from must be a year, a month or a day, such as 2020, 2020-06 or 2020-06-30, not {text!r}."
        ) from None
    return float(day.astype(np.int64))
