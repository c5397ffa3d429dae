"""The disclosure rule of subgroups and histograms: no count, and no difference of counts, describes a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nestfed.queries.base import Arrays, Rows, TooFewError
from nestfed.queries.scored import TWO_CLASSES, Group
from nestfed.queries.scores import BINS

HIDDEN = "\0"
"""What stands for a value that a site may not describe."""


def without_small_groups(rows: Rows, min_cell: int, groups: Sequence[Group] = (), kind: str = "", **_: Any) -> Rows:
    """Hide the values of a column that fewer than `min_cell` persons of a class have, and enough others to hide them.

    Without that, the rows of a hidden value would be the difference between all rows and those of the other values.
    """
    labels = np.asarray(rows.y) > 0 if kind in TWO_CLASSES else np.ones(len(rows), bool)
    person = np.arange(len(rows)) if rows.group is None else np.asarray(rows.group)

    def sizes(mine: np.ndarray) -> np.ndarray:
        return np.array([len(np.unique(person[mine & mark])) for mark in (labels, ~labels)])

    def small(count: np.ndarray) -> bool:
        return bool(((count > 0) & (count < min_cell)).any())

    if small(sizes(np.ones(len(rows), bool))):
        raise TooFewError(f"This site has fewer than min_cell = {min_cell} persons of a class to judge a model by.")
    columns = dict(rows.columns)
    for name in dict.fromkeys(name for name, _ in groups):
        held = np.asarray(columns.get(name, np.zeros(len(rows), str)), str)
        asked = [value for column, value in groups if column == name]
        hidden = ~np.isin(held, asked)
        shown = sorted((value for value in asked if (held == value).any()), key=lambda v: int(sizes(held == v).min()))
        while (gone := next((v for v in shown if small(sizes(held == v)) or small(sizes(hidden))), None)) is not None:
            hidden |= held == gone
            shown.remove(gone)
        if name in columns:
            columns[name] = np.where(hidden, HIDDEN, held)
    return replace(rows, columns=columns)


def merged_cells(reply: Arrays, min_cell: int) -> Arrays:
    """Merge bins until every cell counts at least `min_cell` rows.

    The cells of subgroups are unions of those of all rows. In each, every group of the same column, and the rows in none of
    them, count 0 or at least `min_cell`. So differences between groups describe no fewer rows.
    """
    groups, models, _ = reply["cells"].shape
    cells = np.zeros_like(reply["cells"])
    made: dict[tuple[int, int, int], np.ndarray] = {}
    every = _dense(reply)
    for m in range(models):
        for label in range(2):
            table = every[:, m, label]
            starts = np.flatnonzero(table[0])
            fine = _join(starts, table[0][starts][None], min_cell)
            made[0, m, label] = _listed(fine, table[0], starts)
            for column in np.unique(reply["column"][1:]).tolist():
                mine = np.flatnonzero(reply["column"] == column)
                sums = np.stack([np.add.reduceat(row, fine) if len(fine) else row[:0] for row in table[[0, *mine]]])
                sums[0] -= sums[1:].sum(0)
                joined = _join(fine, sums, min_cell)
                for g in mine.tolist():
                    made[g, m, label] = _listed(joined, table[g], starts)
    order = [(g, m, label) for g in range(groups) for m in range(models) for label in range(2)]
    for key in order:
        cells[key] = made[key].shape[1]
    all_cells = np.concatenate([made[key] for key in order], 1)
    return {"cells": cells, "first": all_cells[0], "last": all_cells[1], "counts": all_cells[2]}


def _join(starts: np.ndarray, table: np.ndarray, min_cell: int) -> np.ndarray:
    """Return the starts of larger cells in which every row of a table of counts is 0 or at least `min_cell`."""
    cells: list[tuple[int, np.ndarray]] = []
    for start, counts in zip(starts.tolist(), table.T):
        if cells and _short(cells[-1][1], min_cell):
            cells[-1] = (cells[-1][0], cells[-1][1] + counts)
        else:
            cells.append((start, counts))
    while len(cells) > 1 and _short(cells[-1][1], min_cell):
        _, counts = cells.pop()
        cells[-1] = (cells[-1][0], cells[-1][1] + counts)
    return np.array([start for start, _ in cells], np.int64)


def _short(counts: np.ndarray, min_cell: int) -> bool:
    return bool(((counts > 0) & (counts < min_cell)).any())


def _listed(cells: np.ndarray, counts: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return first bin, last bin and count of the cells that are not empty, given the bins that all rows use."""
    if not len(cells):
        return np.zeros((3, 0), np.int64)
    last = used[np.append(np.searchsorted(used, cells[1:]) - 1, len(used) - 1)]
    inside = np.add.reduceat(counts, cells)
    return np.stack([cells, last, inside])[:, inside > 0]


def _dense(reply: Arrays) -> np.ndarray:
    """Return the counts by bin of a reply whose cells are single bins, (groups, models, 2, BINS)."""
    found = np.zeros((reply["cells"].size, BINS), np.int64)
    where = np.repeat(np.arange(reply["cells"].size), reply["cells"].ravel())
    found[where, reply["first"]] = reply["counts"]
    return found.reshape(*reply["cells"].shape, BINS)
