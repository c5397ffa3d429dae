"""The report of a fitted estimator: sites, method, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nestfed.core import __version__
from nestfed.engine.round import Record
from nestfed.report import html
from nestfed.report.page import Curves, Page, Table
from nestfed.report.summary import curves_of_runs

if TYPE_CHECKING:
    from nestfed.data.partition import Summary
    from nestfed.study.labelled import _Labelled

LABELS = {
    "auroc": "AUROC", "ap": "average precision", "accuracy": "accuracy", "log_loss": "log-loss",
    "rmse": "RMSE", "mae": "MAE", "r2": "R²",
}  # fmt: skip
"""The display names of metrics."""


def write_report(estimator: _Labelled, path: Path) -> Path:
    """Write the report of a fitted estimator."""
    name = type(estimator).__name__
    last = next((r for r in reversed(estimator.history_) if r.get(estimator.metric) is not None), None)
    found = "" if last is None else f" {LABELS[estimator.metric]} on the evaluation set: {last[estimator.metric]:.4f}."
    summary = f"{sentence(estimator)}{found} {' '.join(estimator.hints_)}".strip()
    shown = [m for m in LABELS if any(r.get(m) is not None for r in estimator.history_)]
    page = Page(
        f"{name}: {len(estimator.sites_.names)} sites",
        summary,
        tables=[sites_table(estimator.sites_)],
        curves=curves({estimator.choice_.name: estimator.history_}, [*shown, "loss"]),
        facts={"method": repr(getattr(estimator, "method_", estimator.choice_.name)), "nestfed": __version__},
        settings={name: {k: str(v) for k, v in estimator.get_params().items()}},
    )
    return html.write(page, path)


def sentence(estimator: _Labelled) -> str:
    """Return the chosen method and the reason."""
    chosen = f"{estimator.choice_.name} was chosen because {estimator.choice_.why}."
    if not estimator.warm_up:
        return chosen
    return f"{chosen} The first {estimator.warm_up} of its {estimator.rounds} rounds trained cross-entropy by FedAvg."


def sites_table(summary: Summary) -> Table:
    """Return the table of examples by site and class."""
    rows: list[list[Any]] = [
        [name, int(counts.sum()), *map(int, counts), *_share(counts)]
        for name, counts in zip(summary.names, summary.counts)
    ]
    share = ["positive"] if len(summary.classes) == 2 else []
    return Table("Examples by site", ["site", "examples", *map(str, summary.classes), *share], rows)


def _share(counts: np.ndarray) -> list[str]:
    return [f"{counts[1] / counts.sum():.1%}"] if len(counts) == 2 else []


def curves(histories: Mapping[str, Sequence[Record]], metrics: Sequence[str]) -> list[Curves]:
    """Return the curves of those metrics that the histories contain."""
    found = curves_of_runs({name: [history] for name, history in histories.items()}, metrics, "Training")
    named = [replace(curve, metric=LABELS.get(curve.metric, curve.metric)) for curve in found.curves]
    return [replace(found, curves=named)] if named else []
