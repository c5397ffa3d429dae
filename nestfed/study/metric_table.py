"""Metrics of models by group, with intervals, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from nestfed.core import unknown
from nestfed.metrics import Estimate, find
from nestfed.queries.tally import Tally
from nestfed.report.page import Table
from nestfed.study.intervals import plain

ALL, SITE = "all", "site"
"""The name of the group of all rows, and the column of the groups that are sites."""
WIDE = 0.005
"""The share of a metric's range that merged cells may leave open without a remark."""


@dataclass(frozen=True)
class Size:
    """How much is behind the metrics of a group."""

    rows: int
    positives: int | None
    """None unless there are two classes."""
    persons: int
    sites: int
    """The sites with such rows that they may describe."""

    @classmethod
    def of(cls, tally: Tally, *, two_classes: bool) -> Size:
        """Read the counts of sites."""
        positives = int(tally.rows[0]) if two_classes else None
        return cls(int(tally.rows.sum()), positives, int(tally.persons[2]), tally.sites)


@dataclass(frozen=True)
class Entry:
    """A metric of a model in a group."""

    value: Estimate
    """With the 95 % interval."""
    cells: Estimate
    """With the bounds of the value itself on these rows, if sites have merged small cells; nearly equal if not."""
    difference: Estimate | None
    """The model's metric less that of the reference, with its paired 95 % interval; None for the reference."""

    def better(self, metric: str) -> bool | None:
        """Return whether the model is better than the reference; None if the interval of the difference includes 0."""
        if self.difference is None or not (self.difference.low > 0 or self.difference.high < 0):
            return None
        return (self.difference.low > 0) == find(metric).higher


@dataclass(frozen=True)
class MetricTable:
    """Metrics of several models on the same rows: over all of them, by site and by subgroup.

    A group is "all", "site = NAME" or "COLUMN = VALUE". Intervals allow for several rows of the same person at a site.
    """

    models: tuple[str, ...]
    reference: str
    """The model with which the others are compared."""
    metrics: tuple[str, ...]
    sizes: Mapping[str, Size]
    """By group."""
    entries: Mapping[tuple[str, str, str], Entry]
    """By model, group and metric."""
    silent: tuple[str, ...] = ()
    """The sites that have too few rows to take part."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups."""
        return tuple(self.sizes)

    def columns(self) -> dict[str, list[str]]:
        """Return the groups other than "all" by their column; sites come under "site"."""
        found: dict[str, list[str]] = {}
        for group in self.groups:
            if group != ALL:
                found.setdefault(group.split(" = ", 1)[0], []).append(group)
        return found

    def entry(self, model: str, metric: str, group: str = ALL) -> Entry:
        """Return a metric of a model in a group."""
        for name, known in ((model, self.models), (group, self.groups), (metric, self.metrics)):
            if name not in known:
                raise unknown("model, group or metric", name, known)
        return self.entries[model, group, metric]

    def row(self, model: str, group: str = ALL) -> dict[str, Entry]:
        """Return all metrics of a model in a group."""
        return {metric: self.entry(model, metric, group) for metric in self.metrics}

    def worst(self, model: str, metric: str, column: str = SITE) -> tuple[str, Entry]:
        """Return the site, or the value of a column, for which a model's metric is worst, and the metric there."""
        groups = self.columns().get(column)
        if groups is None:
            raise unknown("column", column, self.columns())
        each = {group: self.entry(model, metric, group) for group in groups}
        known = {group: one for group, one in each.items() if not math.isnan(one.value.value)} or each
        worst = (min if find(metric).higher else max)(known, key=lambda group: known[group].value.value)
        return worst, known[worst]

    def frame(self) -> pd.DataFrame:
        """Return one line for every model, group and metric."""
        lines = []
        for (model, group, metric), one in self.entries.items():
            gap = one.difference or Estimate(math.nan, math.nan, math.nan)
            lines.append(
                {
                    "model": model, "group": group, "metric": metric, **asdict(self.sizes[group]),
                    "value": one.value.value, "low": one.value.low, "high": one.value.high,
                    "least": one.cells.low, "most": one.cells.high,
                    "difference": gap.value, "difference_low": gap.low, "difference_high": gap.high,
                }
            )  # fmt: skip
        return pd.DataFrame(lines)

    def tables(
        self, metric: str = "", *, models: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> list[Table]:
        """Return tables for a report: all models by metric, then one metric by site and by every subgroup.

        - `models`: the models in the tables by group; empty = all.
        - `labels`: the display names of metrics.
        """
        metric, named, shown = metric or self.metrics[0], labels or {}, models or self.models
        made = [self._overall(named)]
        for column, groups in self.columns().items():
            title = f"{named.get(metric, metric)} by {column}"
            rows = [
                [
                    group.split(" = ", 1)[1],
                    *self._size(group),
                    *(self._text(model, group, metric) for model in shown),
                ]
                for group in groups
            ]
            made.append(Table(title, [column, *self._heads(), *shown], rows, self.note(metric)))
        return made

    def _overall(self, named: Mapping[str, str]) -> Table:
        labels = [named.get(metric, metric) for metric in self.metrics]
        gap = f"{labels[0]} − {self.reference}"
        rows = []
        for model in self.models:
            first = self.entry(model, self.metrics[0])
            rows.append(
                [
                    model,
                    *(self._text(model, ALL, m) for m in self.metrics),
                    "" if first.difference is None else signed(first.difference),
                ]
            )
        return Table("All test rows", ["model", *labels, gap], rows, self.note(self.metrics[0]))

    def _heads(self) -> list[str]:
        two = any(size.positives is not None for size in self.sizes.values())
        return ["rows", "positives"] if two else ["rows"]

    def _size(self, group: str) -> list[int | None]:
        size = self.sizes[group]
        return [size.rows, size.positives] if "positives" in self._heads() else [size.rows]

    def _text(self, model: str, group: str, metric: str) -> str:
        return text(self.entry(model, metric, group).value)

    def note(self, metric: str) -> str:
        """Return what a reader of the intervals must know."""
        said = ["In brackets: 95 % intervals, which allow for several rows of the same person at a site."]
        if self.silent:
            said.append(f"Sites with too few rows to be judged: {', '.join(self.silent)}.")
        unsure = max(
            self.entry(model, metric).cells.high - self.entry(model, metric).cells.low for model in self.models
        )
        if unsure > WIDE:
            included = (
                "The intervals include that."
                if metric == "accuracy"
                else "Values are corrected for the cells to first order; the intervals do not include the rest."
            )
            said.append(
                f"Sites have merged small cells: {metric} on all rows could differ by up to {unsure:.2g} between the worst and "
                f"the best order of the scores in each cell. {included}"
            )
        return " ".join(said)

    # ---------------------------------------------------------------------------------------------- files

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "models": list(self.models),
            "reference": self.reference,
            "metrics": list(self.metrics),
            "silent": list(self.silent),
            "groups": {name: asdict(size) for name, size in self.sizes.items()},
            "entries": [
                [*key, plain(one.value), plain(one.cells), one.difference and plain(one.difference)]
                for key, one in self.entries.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MetricTable:
        """Read what `to_json` returned."""

        def estimate(found: Sequence[Any]) -> Estimate:
            return Estimate(*map(float, found))

        entries = {
            (model, group, metric): Entry(estimate(value), estimate(cells), gap and estimate(gap))
            for model, group, metric, value, cells, gap in data["entries"]
        }
        sizes = {name: Size(**size) for name, size in data["groups"].items()}
        return cls(
            tuple(data["models"]), data["reference"], tuple(data["metrics"]), sizes, entries, tuple(data["silent"])
        )


def text(one: Estimate) -> str:
    """Return a value with its interval; – if it is unknown."""
    return "–" if math.isnan(one.value) else f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def signed(one: Estimate) -> str:
    """Return a difference with its interval; – if it is unknown."""
    return "–" if math.isnan(one.value) else f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
