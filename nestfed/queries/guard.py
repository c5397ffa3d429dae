"""Rows that a site may describe by sums over classes and pairs of columns, under its disclosure rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.queries.base import TRAINING, Arrays, Ask, Query, Rows


def complete(rows: Rows) -> np.ndarray:
    """Return the model inputs in float64; reject missing values."""
    x = np.asarray(rows.x, np.float64)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise NestfedError("Exact regression needs a table of model inputs without missing values.")
    return x


def arrays(**values: Any) -> dict[str, np.ndarray]:
    """Return values as the arrays of a reply."""
    return {name: np.asarray(value) for name, value in values.items()}


def nothing(rows: Rows) -> Rows:
    """Return no rows: the site contributes nothing."""
    return replace(rows, x=np.asarray(rows.x)[:0], y=rows.y[:0], group=None if rows.group is None else rows.group[:0])


class SiteLostError(NestfedError):
    """A site stopped answering in the middle of a fit."""


def steady(ask: Ask) -> Ask:
    """Return `ask` for the sites that answered first, by part; raise a SiteLostError if one of them is missing later.

    Newton's method compares sums at different points, so they must be over the same rows.
    """
    first: dict[str, set[int]] = {}

    def asked(query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        replies = ask(query, part=part, **arguments)
        sites = first.setdefault(part, set(replies))
        if lost := sorted(sites - set(replies)):
            raise SiteLostError(
                f"Site {lost[0]} stopped answering ({query.name}): fit again, with the sites that answer."
            )
        return {n: reply for n, reply in replies.items() if n in sites}

    return asked


def small(counts: np.ndarray, min_cell: int) -> bool:
    """Return whether a cell holds at least one row and fewer than `min_cell`."""
    return bool(((counts > 0) & (counts < min_cell)).any())


def guarded(rows: Rows, min_cell: int, atoms: np.ndarray) -> Rows:
    """Return rows whose sums by atom, by column and by pair of columns describe at least `min_cell` rows.

    - `atoms`: the number of each row's cell, such as its class. If a cell is too small, no row is used.

    A column with two values is made constant if one of its values is too rare inside a cell, or in combination with
    another such column; of a pair, the column with the rarer value is changed.
    """
    if small(np.bincount(atoms), min_cell):
        return nothing(rows)
    rows = rows.coarse(min_cell)
    x = np.array(complete(rows))
    marks = {j: mark for j, mark in ((j, _rare(x[:, j])) for j in range(x.shape[1])) if mark is not None}
    for j in [j for j, mark in marks.items() if small(np.bincount(2 * atoms + mark), min_cell)]:
        _flatten(x[:, j], marks.pop(j))
    kept: list[int] = []
    for j in sorted(marks, key=lambda j: -int(marks[j].sum())):  # the more frequent column of a pair stays
        if any(small(np.bincount(2 * marks[i] + marks[j]), min_cell) for i in kept):
            _flatten(x[:, j], marks[j])
        else:
            kept.append(j)
    return replace(rows, x=x)


def _rare(column: np.ndarray) -> np.ndarray | None:
    """Return 1 for the rarer value of a column with two values, 0 for the other; None for other columns."""
    if not len(column):
        return None
    low, high = column.min(), column.max()
    if low == high or not ((column == low) | (column == high)).all():
        return None
    mark = (column == high).astype(np.int64)
    return mark if 2 * mark.sum() <= len(mark) else 1 - mark


def _flatten(column: np.ndarray, mark: np.ndarray) -> None:
    """Give all rows the common value of a column, in place."""
    column[:] = column[mark == 0][0]


def least(atoms: np.ndarray, x: np.ndarray) -> int:
    """Return the rows in the smallest cell that is not empty, columns with two values included; 0 without rows."""
    counts = [np.bincount(atoms)] + [
        np.bincount(2 * atoms + mark) for mark in (_rare(column) for column in x.T) if mark is not None
    ]
    every = np.concatenate(counts)
    return int(every[every > 0].min(initial=len(atoms))) if len(atoms) else 0


def persons(scores: np.ndarray, group: np.ndarray | None) -> np.ndarray:
    """Return the rows' gradients summed by person."""
    if group is None or not len(scores):
        return scores
    _, place = np.unique(group, return_inverse=True)
    found = np.zeros((place.max() + 1, scores.shape[1]))
    np.add.at(found, place, scores)
    return found
