"""Compare new rows with what a model was trained on: its inputs, its scores and, with labels, its performance.

The rule: every measure has an interval and a limit. "changed" means that the whole interval is beyond the limit, "same" that it
is within, "unclear" that there are too few rows to tell. The intervals hold together: with nothing changed, the probability
of any "changed" is at most 5 %.

| measure | of | limit |
| --- | --- | --- |
| mean | a column of numbers: difference of means in training deviations | 0.25 |
| spread | the same, from 100 rows: new deviation / training deviation | a factor of 1.5 |
| missing | a column of numbers: difference of the shares of missing values | 0.1 |
| categories | a column of categories: population stability index, "missing or unknown" being a category | 0.1 |
| scores | the model's scores: population stability index over their bins | 0.1 |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2, norm

from nestfed.core import NestfedError
from nestfed.data.readers import require_column
from nestfed.metrics import Estimate
from nestfed.report.page import Table
from nestfed.study.model import StudyModel
from nestfed.study.performance import judged
from nestfed.study.reference import Reference, summary_scores
from nestfed.study.rows import Oddities, class_numbers, features, how_to_read, whole_table

Verdict = Literal["changed", "same", "unclear"]
LEVEL = 0.95
MEAN, SPREAD, MISSING, STABILITY = 0.25, float(np.log(1.5)), 0.1, 0.1
SPREAD_ROWS = 100
"""Fewer rows say too little about the tails of a column to give its spread an interval."""


@dataclass(frozen=True)
class Measure:
    """How a column, or the scores, differ from training, with an interval and the verdict."""

    column: str
    kind: str
    before: str
    now: str
    shift: Estimate
    limit: float

    @property
    def verdict(self) -> Verdict:
        """The rule at the top of this file."""
        if self.shift.low > self.limit or self.shift.high < -self.limit:
            return "changed"
        return "same" if -self.limit <= self.shift.low and self.shift.high <= self.limit else "unclear"


@dataclass(frozen=True)
class Monitored:
    """The comparison of new rows with training rows."""

    rows: int
    measures: Sequence[Measure]
    performance: Table | None
    notes: Sequence[str]

    @property
    def changed(self) -> list[Measure]:
        """The measures that changed."""
        return [one for one in self.measures if one.verdict == "changed"]

    def headline(self) -> str:
        """Return the result in a sentence."""
        unclear = sum(one.verdict == "unclear" for one in self.measures)
        names = ", ".join(f"{one.column} ({one.kind})" for one in self.changed)
        few = (
            f" {unclear} of {len(self.measures)} measures are unclear: there are too few rows to tell."
            if unclear
            else ""
        )
        return f"{self.rows:,} rows. {f'Changed: {names}.' if names else 'No change was found.'}{few}"

    def table(self) -> Table:
        """Return the measures, those that changed first."""
        order = {"changed": 0, "unclear": 1, "same": 2}
        rows = [
            [
                m.column,
                m.kind,
                m.before,
                m.now,
                f"{m.shift.value:.3f} ({m.shift.low:.3f} to {m.shift.high:.3f})",
                m.verdict,
            ]
            for m in sorted(self.measures, key=lambda one: order[one.verdict])
        ]
        note = (
            f"Limits: mean {MEAN} deviations, log of the spread {SPREAD:.2f}, missing {MISSING}, stability index {STABILITY}. "
            "Changed: the interval is beyond the limit. Same: it is within. Unclear: too few rows. Intervals hold together at 95 %."
        )
        return Table("Inputs and scores", ["column", "measure", "training", "new", "shift", "verdict"], rows, note)


def monitor(place: Path, file: Path, labels: str = "") -> Monitored:
    """Compare the rows of a table with a model's training rows; `labels`: the column with the true classes, if known."""
    model = StudyModel.load(place)
    if model.reference is None:
        raise NestfedError(
            f"The model in {place} has no statistics of its training rows: train it again with this version."
        )
    how, oddities = how_to_read(model.encoding), Oddities()
    table = whole_table(file, how)
    values = features(table, model.encoding, str(file), oddities)
    scores = model.scores(model.encoding(values, model.encoding.schema).double())
    performance = None
    if labels:
        require_column(file, labels, dict.fromkeys(map(str, table)))
        if not model.binary:
            raise NestfedError("Performance is compared for models of two classes: leave --labels out.")
        y = class_numbers(table[labels], model.classes, f"Target {labels!r} of {file}")
        performance = judged(model, scores, y)
    known = {*how.columns, model.target, labels}
    oddities.ignored = tuple(str(name) for name in table if name not in known)
    notes = oddities.sentences(model.encoding.schema)
    return Monitored(len(table), drift(model, values, scores), performance, notes)


def drift(model: StudyModel, values: np.ndarray, scores: np.ndarray) -> list[Measure]:
    """Return the measures of features (rows, features) and scores against the model's reference."""
    if model.reference is None:
        raise NestfedError("The model has no statistics of its training rows.")
    count = sum(3 if column.categories is None else 1 for column in model.encoding.schema) + 1
    level = 1 - (1 - LEVEL) / count
    return [*_columns(model, model.reference, values, level), *_scores(model.reference, scores, level)]


def _columns(model: StudyModel, before: Reference, values: np.ndarray, level: float) -> Iterator[Measure]:
    encoding, first = model.encoding, 0
    for column in encoding.schema:
        at, first = first, first + len(column)
        if column.categories is None:
            number = (float(encoding.mean[at]), float(encoding.deviation[at]), int(before.known[at]), before.rows)
            yield from _number(column.name, number, values[:, at], level)
        elif column.categories:
            shares = encoding.mean[at:first]
            old = np.r_[shares, max(0.0, 1 - shares.sum())] * before.rows
            new = np.r_[values[:, at:first].sum(0), (values[:, at:first].sum(1) == 0).sum()]
            names = [*column.categories, "missing or unknown"]
            yield Measure(
                column.name, "categories", _most(old, names), _most(new, names), stability(old, new, level), STABILITY
            )


def _number(name: str, before: tuple[float, float, int, int], values: np.ndarray, level: float) -> Iterator[Measure]:
    mean, deviation, known, rows = before
    here = values[np.isfinite(values)]
    gone = (rows - known, len(values) - len(here))
    yield Measure(
        name, "missing", f"{gone[0] / rows:.1%}", f"{gone[1] / len(values):.1%}",
        difference_of_shares(gone[0], rows, gone[1], len(values), level), MISSING,
    )  # fmt: skip
    if len(here) < 2 or known < 2:
        return
    z, own = float(norm.isf((1 - level) / 2)), float(here.std(ddof=1))
    shift = (here.mean() - mean) / deviation
    error = z * np.sqrt(1 / known + (own / deviation) ** 2 / len(here))
    yield Measure(
        name, "mean", f"{mean:.4g}", f"{here.mean():.4g}", Estimate(shift, shift - error, shift + error), MEAN
    )  # fmt: skip
    if own > 0 and len(here) >= SPREAD_ROWS:
        ratio = float(np.log(own / deviation))
        error = z * np.sqrt((_kurtosis(here) - 1) / 4 * (1 / known + 1 / len(here)))
        yield Measure(
            name, "spread", f"{deviation:.4g}", f"{own:.4g}", Estimate(ratio, ratio - error, ratio + error), SPREAD
        )  # fmt: skip


def _kurtosis(values: np.ndarray) -> float:
    centred = values - values.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


def _scores(before: Reference, scores: np.ndarray, level: float) -> Iterator[Measure]:
    if before.scores is not None:
        old, new = before.scores.counts, before.scores.count(summary_scores(scores))
        middle = [f"bin {i + 1} of {len(old)}" for i in range(len(old))]
        yield Measure("model", "scores", _most(old, middle), _most(new, middle), stability(old, new, level), STABILITY)


def _most(counts: np.ndarray, names: Sequence[str]) -> str:
    """Return the most common category with its share."""
    best = int(np.argmax(counts))
    return f"{names[best]} {counts[best] / counts.sum():.1%}"


def stability(before: np.ndarray, now: np.ndarray, level: float = LEVEL) -> Estimate:
    """Return the population stability index Σ (p − q)·ln(p/q) of two tables of counts, each cell plus ½, with its interval.

    Index/(1/n + 1/m) has about a noncentral χ² distribution with one degree of freedom less than cells, whose noncentrality
    is the true index on the same scale; the interval inverts it.
    """
    used = (before + now) > 0
    old, new = before[used] + 0.5, now[used] + 0.5
    p, q = new / new.sum(), old / old.sum()
    value = float(((p - q) * np.log(p / q)).sum())
    if used.sum() < 2:
        return Estimate(0.0, 0.0, 0.0)
    scale = 1 / before.sum() + 1 / now.sum()
    low, high = _noncentrality(value / scale, int(used.sum()) - 1, level)
    return Estimate(value, low * scale, high * scale)


def _noncentrality(found: float, freedom: int, level: float) -> tuple[float, float]:
    """Return the interval of the noncentrality of a χ² that was found to have this value."""
    tail = (1 - level) / 2

    def bound(probability: float) -> float:
        if chi2.cdf(found, freedom) <= probability:
            return 0.0
        top = found + 10 * np.sqrt(found + 1) + 100
        return float(brentq(lambda c: ncx2.cdf(found, freedom, c) - probability, 1e-12, top))

    return bound(1 - tail), bound(tail)


def difference_of_shares(a: int, rows_a: int, b: int, rows_b: int, level: float = LEVEL) -> Estimate:
    """Return b/rows_b − a/rows_a with Newcombe's interval, which holds at shares of 0 and 1 as well."""
    (p, p_low, p_high), (q, q_low, q_high) = (_wilson(*pair, level) for pair in ((a, rows_a), (b, rows_b)))
    low, high = np.hypot(q - q_low, p_high - p), np.hypot(q_high - q, p - p_low)
    return Estimate(q - p, q - p - float(low), q - p + float(high))


def _wilson(count: int, rows: int, level: float) -> tuple[float, float, float]:
    z2, p = float(norm.isf((1 - level) / 2)) ** 2, count / rows
    middle, half = p + z2 / (2 * rows), np.sqrt(z2 * (p * (1 - p) / rows + z2 / (4 * rows**2)))
    return p, float((middle - half) / (1 + z2 / rows)), float((middle + half) / (1 + z2 / rows))
