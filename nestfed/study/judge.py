"""Judge models at all sites without seeing a row: metrics overall, by site and by subgroup, with intervals.

The coordinator asks every site twice (`nestfed.queries.judging`). The first answers, counts of scores by class, give the
metrics; the second, sums of products of influences, give their variances and those of differences between models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nestfed.metrics import Estimate
from nestfed.queries.base import TEST, Ask
from nestfed.queries.guard import steady
from nestfed.queries.influence import applicable, is_counted, max_fpr, of_sums, usual_metrics
from nestfed.queries.judging import COUNTED, LEVELS, SPREAD, WITHHELD
from nestfed.queries.scored import TWO_CLASSES
from nestfed.queries.scores import LOG_ODDS
from nestfed.queries.tally import Tally
from nestfed.study.counts import Counts, Models, count, place_of
from nestfed.study.decide import Confusion
from nestfed.study.intervals import UNKNOWN, bounded, proportion, range_of, symmetric
from nestfed.study.metric_table import ALL, SITE, Entry, MetricTable, Size

QUERIES = (LEVELS, COUNTED, SPREAD)
"""What sites are asked to judge models."""


def judge(
    ask: Ask,
    models: Models,
    *,
    kind: str = LOG_ODDS,
    metrics: Sequence[str] = (),
    subgroups: Mapping[str, Sequence[str]] | Sequence[str] = (),
    reference: str = "",
    sites: Sequence[str] = (),
    part: str = TEST,
) -> MetricTable:
    """Return the metrics of models on the rows of all sites, overall, by site and by subgroup, with 95 % intervals.

    - `metrics`: such as "auroc", "ap", "pauroc@0.1", "accuracy", "log_loss", "brier", "rmse", "mae", "r2"; empty = all that
      apply to `kind`.
    - `reference`: the model with which the others are compared; empty = the last.

    The other arguments are those of `count`.
    """
    ask = steady(ask)
    known = usual_metrics(kind)
    chosen = tuple(metrics) or known
    for metric in chosen:
        applicable(metric, kind)
    reference = reference or list(models)[-1]
    place_of("model", reference, list(models))
    counts = count(ask, models, kind, subgroups=subgroups, sites=sites, part=part)
    return compared(counts, moments(ask, counts, chosen), chosen, reference)


@dataclass(frozen=True, eq=False)
class Moments:
    """Metrics of models in one group of rows, and the covariances of these metrics between models."""

    tallies: Sequence[Tally]
    """By model."""
    values: Sequence[Sequence[Estimate]]
    """By metric and model; the bounds are what merged cells leave open."""
    covariances: np.ndarray
    """(metrics, models, models)"""
    withheld: np.ndarray
    """For each metric, whether a site keeps its part of the covariances, as the metric counts rows."""

    def variance(self, metric: int, weights: np.ndarray) -> float:
        """Return the variance of a weighted sum of the models' metrics; if it is withheld, as if models were independent."""
        if not self.withheld[metric]:
            return float(weights @ self.covariances[metric] @ weights)
        shares = np.nan_to_num([one.value for one in self.values[metric]])
        rows = np.array([tally.independent[2] for tally in self.tallies])
        return float(weights**2 @ (shares * (1 - shares) / rows))


def moments(ask: Ask, counts: Counts, metrics: Sequence[str]) -> dict[str, Moments]:
    """Ask the second question; return metrics and covariances by group."""
    groups, models = range(len(counts.groups) + 1), range(len(counts.models))
    pooled = [[counts.pooled[g, m] for m in models] for g in groups]
    asked = {
        "metrics": list(metrics),
        "counts": np.array([[one.histogram for one in tallies] for tallies in pooled], np.int32),
        "sums": np.array([[one.sums for one in tallies] for tallies in pooled]),
        "persons": np.array([tallies[0].persons for tallies in pooled]),
    }
    replies = ask(SPREAD, part=counts.part, **counts.arguments, **asked)
    shifts = np.sum([reply["shifts"] for reply in replies.values()], axis=0)
    products = np.sum([reply["products"] for reply in replies.values()], axis=0)
    withheld = {n: reply["counting"] == WITHHELD for n, reply in replies.items()}
    anywhere = np.any(list(withheld.values()), axis=0)
    found = {}
    for g, name in enumerate([ALL, *(f"{c} = {v}" for c, v in counts.groups)]):
        counted = [[_counted(metric, counts.kind, tally) for tally in pooled[g]] for metric in metrics]
        better = np.array([[one.value for one in row] for row in counted]) + shifts[g]
        found[name] = Moments(pooled[g], _inside(counted, better), products[g], anywhere)
    exact = np.array([metric != "accuracy" for metric in metrics])[:, None]
    for n, name in counts.sites.items():
        tallies = [counts.by_site[n, m] for m in models]
        counted = [[_counted(metric, counts.kind, tally) for tally in tallies] for metric in metrics]
        better = np.where(exact, replies[n]["values"], [[one.value for one in row] for row in counted])
        found[f"{SITE} = {name}"] = Moments(tallies, _inside(counted, better), replies[n]["own_products"], withheld[n])
    return found


def _counted(metric: str, kind: str, tally: Tally) -> Estimate:
    """Return a metric from counts and sums, with the bounds that merged cells leave open."""
    rows = int(tally.rows.sum())
    if not (tally.known and rows):
        return UNKNOWN
    if metric == "accuracy":
        right = Confusion.of(tally, 0.5)
        return Estimate(
            *((hit + float(tally.rows[1]) - wrong) / rows for hit, wrong in (
                (right.caught.value, right.false_alarms.value),
                (right.caught.low, right.false_alarms.high),
                (right.caught.high, right.false_alarms.low),
            ))
        )  # fmt: skip
    if metric == "ap":
        return tally.scores.average_precision()
    if is_counted(metric):
        return tally.scores.partial_auroc(max_fpr(metric))
    value = of_sums(metric, kind, tally.sums, rows)
    return Estimate(value, value, value)


def _inside(counted: Sequence[Sequence[Estimate]], better: np.ndarray) -> list[list[Estimate]]:
    """Return better values than those of counts, but inside the bounds of these, so that no site can move them further."""
    return [
        [
            one if math.isnan(one.value) else replace(one, value=min(max(float(v), one.low), one.high))
            for one, v in zip(row, values)
        ]
        for row, values in zip(counted, better)
    ]


def _entry(metric: str, found: Moments, i: int, m: int, base: int) -> Entry:
    """Return a model's metric with its interval, and its difference to the reference."""
    values, tally = found.values[i], found.tallies[m]
    value, unit = values[m], np.eye(len(values))
    ends = range_of(metric)
    enough = _persons(metric, tally)
    if math.isnan(value.value):
        return Entry(UNKNOWN, UNKNOWN, UNKNOWN if m != base else None)
    variance = found.variance(i, unit[m])
    if enough < 2:
        with_interval = Estimate(value.value, *ends)
    elif metric == "accuracy":
        share = value.value * (1 - value.value)
        rows = float(tally.rows.sum())
        bounds = Estimate(value.value * rows, value.low * rows, value.high * rows)
        with_interval = proportion(
            bounds, rows, share / variance if variance > 0 and share > 0 else tally.independent[2]
        )
    elif ends == (0.0, 1.0):
        with_interval = bounded(value.value, variance, enough)
    else:
        with_interval = symmetric(value.value, variance, ends)
    if m == base:
        return Entry(with_interval, value, None)
    other, widest = values[base], ends[1] - ends[0]
    gap = value.value - other.value
    if math.isnan(gap) or enough < 2:
        return Entry(with_interval, value, Estimate(gap, -widest, widest))
    difference = symmetric(gap, found.variance(i, unit[m] - unit[base]), (-widest, widest))
    if metric == "accuracy":  # merged cells leave open how many predictions are right
        less, more = value.low - other.high - gap, value.high - other.low - gap
        difference = Estimate(gap, difference.low + less, difference.high + more)
    return Entry(with_interval, value, difference)


def _persons(metric: str, tally: Tally) -> int:
    """Return how many persons decide a metric: of the rarer class for metrics that rank."""
    if metric.startswith(("auroc", "pauroc")):
        return int(tally.persons[:2].min())
    return int(tally.persons[0] if metric == "ap" else tally.persons[2])


def compared(counts: Counts, found: Mapping[str, Moments], metrics: Sequence[str], reference: str) -> MetricTable:
    """Return the table of metrics and of differences to the reference."""
    base = place_of("model", reference, counts.models)
    two = counts.kind in TWO_CLASSES
    return MetricTable(
        counts.models,
        reference,
        tuple(metrics),
        {name: Size.of(one.tallies[0], two_classes=two) for name, one in found.items()},
        {
            (model, name, metric): _entry(metric, one, i, m, base)
            for name, one in found.items()
            for i, metric in enumerate(metrics)
            for m, model in enumerate(counts.models)
        },
        counts.silent,
    )
