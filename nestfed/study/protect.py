"""Protect the worst site: the methods to train, which of them to release, and what protection gains and costs.

A study with `[study] protect = ["sites"]` trains KL-DRO at several strengths beside its other methods. Steps and rounds of
these are chosen by the log-loss of the worst site on validation rows: other metrics of a small site hardly move. Which of
the models is released is decided by the study's own metric. The report sets the worst site against all rows, for every way of training and for
the plain model with a calibration of its own for every site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestfed.core import Metric
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import protects
from nestfed.metrics import find
from nestfed.queries import Ask
from nestfed.report.page import Figure, Line, Table
from nestfed.study.conduct import Way, choosing
from nestfed.study.counts import Candidate
from nestfed.study.fair import SHRINKAGE, large_batch
from nestfed.study.judge import judge
from nestfed.study.metric_table import ALL, SITE, MetricTable, signed, text

LEAST = 1e-3
"""The least gain for which a protected model is released, as a share of the range of its metric: smaller ones round to 0."""
STRENGTHS = (1.0, 0.3, 0.1)
"""τ of KL-DRO, from weak to strong: sites whose losses differ by τ differ in weight by a factor of e."""


def protected_methods(rows: Sequence[int], grid: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the tables of the methods that protect the worst site.

    - `rows`: the number of training rows of each site.
    - `grid`: the step sizes for τ = 1; the curvature of τ log mean exp(f_n/τ) grows as 1/τ, so steps shrink with τ.
    """
    large = large_batch(rows)
    return {
        f"kl-dro-{tau:g}": {
            "problem": {"name": "classify", "initial_batch": large},
            "algorithm": {"name": "kl-dro", "tau": tau, "k": SHRINKAGE},
            "evaluation": {"metric": "worst_log_loss"},
            "tune": {"eta": [tau * eta for eta in grid]},
        }
        for tau in STRENGTHS
    }


def safest(study: Experiment, ways: Sequence[Way], plain: Way, validation: MetricTable) -> tuple[Way | None, str]:
    """Return the protected model to release, or None, and the reason in a sentence.

    - `validation`: the models of the trials on validation rows, compared with the plain one.

    It must be better than the plain model at the plain model's worst site, beyond the interval of the difference, and its
    own worst site must be better too, by more than `LEAST`.
    """
    metric = choosing(study)
    group, worst = validation.worst(plain.name, metric.name)
    site = group.removeprefix(f"{SITE} = ")

    def is_better(way: Way) -> bool:
        entry = validation.entry(way.name, metric.name, group)
        gain = metric.signed(_worst(validation, way.name, metric)) - metric.signed(worst.value.value)
        return bool(entry.better(metric.name)) and gain > LEAST

    better = [way for way in ways if way.name in study.methods and protects(study, way.name) and is_better(way)]
    if not better:
        return None, (
            f"No protected model is better than {plain.name} at its worst site, {site}, with 95 % confidence on the "
            "validation rows."
        )
    best = max(better, key=lambda way: metric.signed(_worst(validation, way.name, metric)))
    gain = validation.entry(best.name, metric.name, group).difference
    assert gain is not None
    return best, (
        f"{best.name} is released because the study protects sites: on the validation rows its {metric.name} at {site}, the "
        f"worst site of {plain.name}, is better by {abs(gain.value):.3f} (95 % interval {gain.low:+.3f} to {gain.high:+.3f})."
    )


def _worst(table: MetricTable, model: str, metric: Metric) -> float:
    return table.worst(model, metric.name)[1].value.value


# ------------------------------------------------------------------------------------- what it gains and costs


@dataclass(frozen=True)
class Protection:
    """The worst site against all rows, on test rows."""

    table: MetricTable
    """The plain model is the reference."""
    metric: str
    plain: str
    best: str
    """The protected model whose worst site was best on validation rows; empty if there is none."""
    adapted: str = ""
    """The plain model with the sites' own calibrations; empty for several classes."""

    @classmethod
    def of(
        cls, study: Experiment, ask: Ask, models: Mapping[str, Candidate], plain: str, own: Candidate | None,
        validation: MetricTable, *, kind: str, sites: Sequence[str],
    ) -> Protection:  # fmt: skip
        """Judge all models on test rows.

        - `models`: the last models, by name.
        - `own`: the plain model with the sites' own calibrations, if there is one.
        - `validation`: the models of the trials on validation rows, for the choice of the protected one.
        """
        metric = choosing(study)
        protected = [name for name in models if name in study.methods and protects(study, name)]
        best = max(protected, key=lambda name: metric.signed(_worst(validation, name, metric)), default="")
        adapted = f"{plain}, calibrated by site" if own is not None else ""
        judged = {**models, **({adapted: own} if own is not None else {})}
        metrics = list(dict.fromkeys([metric.name, "log_loss"]))
        return cls(
            judge(ask, judged, kind=kind, metrics=metrics, reference=plain, sites=sites),
            metric.name,
            plain,
            best,
            adapted,
        )

    def sentences(self) -> str:
        """Return what protection gains and costs, beside calibration by site."""
        if not self.best:
            return "No method of this study protects the worst site: add one, such as kl-dro."
        group, before = self.table.worst(self.plain, self.metric)
        _, after = self.table.worst(self.best, self.metric)
        there, everywhere = (self.table.entry(self.best, self.metric, g).difference for g in (group, ALL))
        assert there is not None
        assert everywhere is not None
        said = (
            f"Protection: on test rows the worst site's {self.metric} is {before.value.value:.3f} with {self.plain} and "
            f"{after.value.value:.3f} with {self.best}; at {group.removeprefix(f'{SITE} = ')}, the worst site of {self.plain}, "
            f"the difference is {signed(there)}, over all rows {signed(everywhere)}."
        )
        if self.adapted:
            losses = [
                self.table.worst(name, "log_loss")[1].value.value for name in (self.plain, self.best, self.adapted)
            ]
            said += (
                f" The worst site's log-loss is {losses[0]:.3f} with {self.plain}, {losses[1]:.3f} with {self.best} and "
                f"{losses[2]:.3f} with {self.plain} calibrated by site, which changes no order of rows within a site."
            )
        return said

    def report(self) -> Table:
        """Return the worst site against all rows, for every way."""
        metrics = self.table.metrics
        heads = ["model", *(head for m in metrics for head in (f"{m}, all rows", f"{m}, worst site", "which"))]
        rows = []
        for model in self.table.models:
            cells = [model]
            for metric in metrics:
                group, entry = self.table.worst(model, metric)
                cells += [
                    text(self.table.entry(model, metric).value),
                    text(entry.value),
                    group.removeprefix(f"{SITE} = "),
                ]
            rows.append(cells)
        note = (
            "The worst of several sites looks worse than it is, the more so the fewer rows sites have. Calibration by site changes "
            "probabilities, but not the order of the rows of a site."
        )
        return Table("The worst site against all rows", heads, rows, note)

    def figure(self) -> Figure:
        """Return the trade-off: one point for each way."""
        lines = []
        for model in self.table.models:
            point = self._point(model)
            if not any(math.isnan(v) for v in point):
                lines.append(Line(model, [point[0]], [point[1]], "points"))
        note = (
            "Up is better for the worst site, right for all rows."
            if find(self.metric).higher
            else "Lower and left is better."
        )
        return Figure("What protection costs", f"{self.metric}, all rows", f"{self.metric}, worst site", lines, note)

    def _point(self, model: str) -> tuple[float, float]:
        together, worst = self.table.entry(model, self.metric), self.table.worst(model, self.metric)[1]
        return together.value.value, worst.value.value
