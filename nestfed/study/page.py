"""A training run as a page: what was learned where, how well, by which method."""

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

BEST = {"auroc": "AUROC", "ap": "average precision", "accuracy": "accuracy", "log_loss": "log-loss"}
"""Metrics as people call them."""


def write_report(estimator: _Labelled, path: Path) -> Path:
    """Write the page of one fitted estimator."""
    name = type(estimator).__name__
    last = next((r for r in reversed(estimator.history_) if r.get(estimator.metric) is not None), None)
    found = "" if last is None else f" {BEST[estimator.metric]} on the evaluation set: {last[estimator.metric]:.4f}."
    summary = f"{sentence(estimator)}{found} {' '.join(estimator.hints_)}".strip()
    shown = [m for m in BEST if any(r.get(m) is not None for r in estimator.history_)]
    page = Page(
        f"{name}: {len(estimator.sites_.names)} sites",
        summary,
        tables=[sites_table(estimator.sites_)],
        curves=curves({estimator.choice_.name: estimator.history_}, [*shown, "loss"]),
        facts={"method": repr(getattr(estimator, "algorithm_", estimator.choice_.name)), "nestfed": __version__},
        settings={name: {k: str(v) for k, v in estimator.get_params().items()}},
    )
    return html.write(page, path)


def sentence(estimator: _Labelled) -> str:
    """Return which method was used and why."""
    return f"{estimator.choice_.name} was chosen because {estimator.choice_.why}."


def sites_table(summary: Summary) -> Table:
    """Return who holds what."""
    rows: list[list[Any]] = [
        [name, int(counts.sum()), *map(int, counts), *_share(counts)]
        for name, counts in zip(summary.names, summary.counts)
    ]
    share = ["positive"] if len(summary.classes) == 2 else []
    return Table("Who holds what", ["site", "examples", *map(str, summary.classes), *share], rows)


def _share(counts: np.ndarray) -> list[str]:
    return [f"{counts[1] / counts.sum():.1%}"] if len(counts) == 2 else []


def curves(histories: Mapping[str, Sequence[Record]], metrics: Sequence[str]) -> list[Curves]:
    """Return the metrics against rounds and costs, as far as the histories hold them."""
    found = curves_of_runs({name: [history] for name, history in histories.items()}, metrics, "Training")
    named = [replace(curve, metric=BEST.get(curve.metric, curve.metric)) for curve in found.curves]
    return [replace(found, curves=named)] if named else []
