"""The rows of a site under several models: bins of scores, losses, and influences on metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.data.random import Purpose, Streams
from nestfed.metrics import places
from nestfed.queries.base import Rows
from nestfed.queries.influence import influence, influences_of_sums, is_counted, losses, of_sums
from nestfed.queries.scores import BINS, LOG_ODDS, LOGITS, RANKING

Group = Sequence[str]
"""A subgroup: the name of a column, and one of its values."""
Case = Mapping[str, Any]
"""What is judged, as plain data: the number of the "model", or −1 for the one that the site has trained alone; its calibration
as "a", "b" and "sites"; and the numbers of "permuted" model inputs, whose rows are shuffled together by the key "seed"."""
ALONE = -1
TWO_CLASSES = (RANKING, LOG_ODDS)
"""The kinds of scores that are of two classes."""


def models_in(x: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the models' parameters, which are sent one after another."""
    return np.split(np.asarray(x), np.cumsum(lengths)[:-1]) if len(lengths) else []


def _scores(rows: Rows, models: Sequence[np.ndarray], case: Case) -> np.ndarray:
    """Return the rows' scores in a case, calibrated if there is one score per row."""
    alone, permuted = case["model"] == ALONE, list(case["permuted"])
    if alone and rows.own is not None:
        scores = rows.own()
    elif permuted and rows.scores_of is not None:
        order = Streams(int(case["seed"])).at(Purpose.JUDGE, 0, 0).permutation(len(rows))
        inputs = np.array(rows.x)
        inputs[:, permuted] = inputs[order][:, permuted]
        scores = rows.scores_of(models[case["model"]], inputs)
    elif rows.scores is not None and not alone and not permuted:
        scores = rows.scores(models[case["model"]])
    else:
        what = "a model of its own" if alone else "permuted inputs" if permuted else "a model"
        raise NestfedError(f"This site cannot score its rows by {what}.")
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1:
        return scores
    a, b = case["sites"].get(rows.site, (case["a"], case["b"]))
    return np.asarray(a * scores + b)


@dataclass(frozen=True)
class Scored:
    """The rows of a site under several models."""

    places: np.ndarray
    """The bin of every row's score, (models, rows)."""
    labels: np.ndarray
    """The class that counts as positive, (rows,); all rows if scores are not of two classes."""
    each: np.ndarray
    """The values that are summed, (models, values, rows)."""
    known: np.ndarray
    """For each model, whether all scores are numbers."""
    members: np.ndarray
    """For all rows and then for each subgroup, its rows, (groups, rows)."""
    person: np.ndarray
    """The number of each row's person."""

    @classmethod
    def of(
        cls,
        rows: Rows,
        x: np.ndarray,
        lengths: Sequence[int],
        cases: Sequence[Case],
        kind: str,
        groups: Sequence[Group],
    ) -> Scored:
        """Score the rows in every case."""
        y, models = np.asarray(rows.y), models_in(x, lengths)
        binned, each, known = [], [], []
        for case in cases:
            scores = _scores(rows, models, case)
            with np.errstate(all="ignore"):
                values = losses(scores, y, kind)
            known.append(bool(np.isfinite(values).all() and not np.isnan(scores).any()))
            each.append(values if known[-1] else np.zeros_like(values))
            binned.append(_bins(scores, y, kind) if known[-1] else np.zeros(len(y), np.int64))
        labels = y > 0 if kind in TWO_CLASSES else np.ones(len(y), bool)
        members = [np.ones(len(y), bool), *(column_of(rows, name) == value for name, value in groups)]
        person = np.arange(len(y)) if rows.group is None else np.unique(rows.group, return_inverse=True)[1]
        return cls(
            np.array(binned).reshape(-1, len(y)), labels, np.array(each), np.array(known), np.array(members), person
        )

    @cached_property
    def sizes(self) -> np.ndarray:
        """The rows of both classes in every group, positives first, (groups, 2)."""
        return np.stack([self.members @ mark.astype(np.int64) for mark in (self.labels, ~self.labels)], 1)

    def tallied(self, group: int) -> np.ndarray:
        """Return persons' numbers of rows in a group: of the positive class, of the other, and of both, (3, persons)."""
        mine = self.members[group]
        size = int(self.person.max(initial=-1)) + 1
        by_class = [np.bincount(self.person[mine & mark], minlength=size) for mark in (self.labels, ~self.labels)]
        return np.stack([*by_class, by_class[0] + by_class[1]])

    def histograms(self, group: int) -> np.ndarray:
        """Return every model's counts by class and bin in a group, (models, 2, BINS)."""
        mine = self.members[group]
        return np.stack(
            [
                np.stack([np.bincount(p[mine & mark], minlength=BINS) * ok for mark in (self.labels, ~self.labels)])
                for p, ok in zip(self.places, self.known)
            ]
        )

    def influences(
        self, metric: str, kind: str, histograms: np.ndarray, sums: np.ndarray, model: int
    ) -> tuple[float, np.ndarray]:
        """Return a metric of counts and sums, and the influences of this site's rows on it."""
        if not self.known[model]:
            return np.nan, np.zeros(len(self.labels))
        if is_counted(metric):
            found = influence(metric, *histograms)
            return found.value, found.of(self.places[model], self.labels)
        rows = int(histograms.sum())
        return of_sums(metric, kind, sums, rows), influences_of_sums(metric, kind, sums, rows, self.each[model])

    def products(self, influences: np.ndarray) -> np.ndarray:
        """Return the sums over persons of the products of their influences, (models, models) from (models, rows)."""
        if self.person.max(initial=-1) + 1 == len(self.person):
            return np.asarray(influences @ influences.T)
        each = np.stack([np.bincount(self.person, row) for row in influences])
        return np.asarray(each @ each.T)


def column_of(rows: Rows, name: str) -> np.ndarray:
    """Return a column as text; reject an unknown one."""
    if name not in rows.columns:
        raise NestfedError(
            f"There is no column {name!r} to form subgroups by; expected one of {', '.join(rows.columns)}."
        )
    return np.asarray(rows.columns[name], str)


def _bins(scores: np.ndarray, y: np.ndarray, kind: str) -> np.ndarray:
    """Return the rows' bins on the common grid; for one score per class, whether the prediction is right."""
    if kind == LOGITS:
        right = scores.argmax(1) == y
        return np.where(right, BINS - 1, 0)
    return places(scores, BINS) if kind in TWO_CLASSES else np.zeros(len(y), np.int64)
