"""Write the results of a study: the released model and the report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestfed.core import __version__
from nestfed.experiment import choice
from nestfed.files import reject_foreign
from nestfed.metrics import Estimate, find
from nestfed.report import html
from nestfed.report.page import Figure, Line, Page, Table
from nestfed.study.convert import model_of
from nestfed.study.model import CARD, PROGRAM, WHAT, StudyModel
from nestfed.study.page import LABELS, curves, sites_table
from nestfed.study.reference import ScoreShares, summary_scores
from nestfed.study.sealed import SUMS, reject_used
from nestfed.study.train import StudyResult, Trained


def claim(out: Path, *, force: bool = False) -> None:
    """Reject an output directory with something other than a model, or with a model unless `force`."""
    reject_foreign(out, "model of `nestfed train`", f"model/{SUMS}", "model/estimator.json")
    reject_used(out / "model", WHAT, (SUMS, "estimator.json"), force=force)


def released(result: StudyResult) -> StudyModel:
    """Return the model of a study with its metrics, and with statistics to compare new rows with."""
    low, high = result.interval
    nan = float("nan")
    metrics = {name: Estimate(value, nan, nan) for name, value in result.best.values.items()}
    metrics[result.metric] = Estimate(result.best.values[result.metric], low, high)
    made = model_of(result.estimator, result.target, result.classes)
    provenance = replace(
        made.provenance,
        objective=LABELS[result.metric],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics=metrics,
    )
    scores = ScoreShares.of_scores(summary_scores(result.best.scores))
    return replace(made, provenance=provenance, reference=result.reference and result.reference.with_scores(scores))


def write(result: StudyResult, out: Path, files: Sequence[Path], *, force: bool = False) -> dict[str, Path]:
    """Write the model directory and the report; return their paths."""
    model = released(result).save(out / "model", force=force, tables=tables(result))
    report = html.write(page(result, files, model.digest), out / "report.html")
    return {
        "report": report,
        "model card": out / "model" / CARD,
        "model": out / "model",
        "export": out / "model" / PROGRAM,
    }


def headline(result: StudyResult) -> str:
    """Return the main result in one or two sentences."""
    best, metric = result.best, LABELS[result.metric]
    low, high = result.interval
    text = f"{metric} {best.values[result.metric]:.3f} (95 % interval {low:.3f} to {high:.3f}) on {len(result.labels)} test rows."
    if result.gain is not None:
        gain, less, more = result.gain
        verdict = (
            ""
            if less > 0
            else " the difference is not significant on these test rows"
            if more > 0
            else " FedAvg is better"
        )
        text += f" Difference to FedAvg on cross-entropy: {gain:+.3f} ({less:+.3f} to {more:+.3f}){';' + verdict if verdict else ''}."
    return text


def results(result: StudyResult) -> tuple[list[str], list[list[Any]]]:
    """Return the comparison as columns and rows."""
    names = [m for m in LABELS if m in result.best.values]
    columns = [
        "way of training",
        *(LABELS[m] for m in names),
        f"{LABELS[result.metric]} within sites",
        "lr",
        "trials",
        "sent",
    ]
    rows = []
    for one in result.trained:
        last = one.history[-1] if one.history else None
        sent = "nothing" if last is None else f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.2f} MB"
        cells = [f"{one.values[m]:.4f}" for m in names]
        rows.append(
            [
                one.name,
                *cells,
                f"{one.inside:.4f}",
                f"{one.lr:.3g}{f' ({end})' if (end := choice.end(one.lr, list(one.trials))) else ''}",
                len(one.trials),
                sent,
            ]
        )
    return columns, rows


def tables(result: StudyResult) -> list[Table]:
    """Return the comparison of the ways of training, overall and by site."""
    columns, rows = results(result)
    note = (
        "All rows use the same test data. Within sites: the metric on each site's own test rows, averaged over sites. Every "
        "site alone: the metric of each site's own model on all test rows, averaged over sites."
    )
    by_site = []
    for n, name in enumerate(result.estimator.sites_.names):
        mine = result.owner == n
        cells = [_on(one, mine, result) for one in result.trained]
        by_site.append([name, int(mine.sum()), *cells])
    return [
        Table("Comparison", columns, rows, note, [_best_row(result)]),
        Table(
            f"{LABELS[result.metric]} on each site's own test rows",
            ["site", "test rows", *(one.name for one in result.trained)],
            by_site,
            "– if all test rows of a site have the same class. Values from few rows are uncertain.",
        ),
    ]


def page(result: StudyResult, files: Sequence[Path], digest: str = "") -> Page:
    """Return the report; `digest`: that of the model directory."""
    est = result.estimator
    metric_names = [m for m in LABELS if m in result.best.values]
    histories = {one.name: one.history for one in result.trained if one.history}
    facts = {
        "files": ", ".join(f.name for f in files[:8]) + (" …" if len(files) > 8 else ""),
        "target": f"{result.target}: {', '.join(result.classes)}"
        + (f" ({result.classes[-1]} is positive)" if len(result.classes) == 2 else ""),
        "rows": ", ".join(f"{v:,} {k}" for k, v in result.rows.items()),
        "split": f"per site, by groups of {result.grouped}" if result.grouped else "per site, stratified by class",
        "method": repr(est.method_),
        "reason": est.choice_.why,
        "time": f"{result.seconds:.0f} s on {platform.machine()}",
        "model": digest,
        "nestfed": f"{__version__}, torch {torch.__version__}",
    }
    return Page(
        f"{result.target}: {len(est.sites_.names)} sites",
        " ".join([headline(result), *est.hints_]),
        tables=[*tables(result), sites_table(_named(result))],
        curves=curves(histories, [*metric_names, "loss"][:3]),
        figures=_figures(result),
        facts=facts,
        settings={type(est).__name__: {k: str(v) for k, v in est.get_params().items()}},
    )


def _best_row(result: StudyResult) -> int:
    metric = find(result.metric)
    return int(np.argmax([metric.signed(one.values[metric.name]) for one in result.trained]))


def _named(result: StudyResult) -> Any:
    return replace(result.estimator.sites_, classes=result.classes)


def _on(one: Trained, mine: np.ndarray, result: StudyResult) -> float | None:
    """Return the metric on a site's own rows; for local training, of the site's own model."""
    if not mine.any():
        return None
    n = int(result.owner[mine][0])
    scores = one.scores[n] if one.name == "every site alone" else one.scores
    return find(result.metric)(scores[mine], result.labels[mine])


def _figures(result: StudyResult) -> list[Figure]:
    """Return the ROC curve, the precision-recall curve and the calibration plot."""
    if len(result.classes) > 2:
        return []
    from sklearn.metrics import precision_recall_curve, roc_curve

    roc, pr = [], []
    for one in result.trained:
        if one.scores.ndim == 1:
            fpr, tpr, _ = roc_curve(result.labels, one.scores)
            precision, recall, _ = precision_recall_curve(result.labels, one.scores)
            roc.append(Line(one.name, fpr.tolist(), tpr.tolist()))
            pr.append(Line(one.name, recall[::-1].tolist(), precision[::-1].tolist()))
    roc.append(Line("chance", [0.0, 1.0], [0.0, 1.0], "dashed"))
    a, b = result.estimator.calibration_
    chance = 1 / (1 + np.exp(-(a * result.best.scores + b)))
    edges = np.quantile(chance, np.linspace(0, 1, min(9, 2 + len(chance) // 40)))
    place = np.clip(np.searchsorted(edges, chance, side="right") - 1, 0, len(edges) - 2)
    bins = [
        (chance[place == i].mean(), result.labels[place == i].mean())
        for i in range(len(edges) - 1)
        if (place == i).any()
    ]
    reliability = [
        Line("predicted and observed", [float(p) for p, _ in bins], [float(s) for _, s in bins], "points"),
        Line("perfect", [0.0, 1.0], [0.0, 1.0], "dashed"),
    ]
    return [
        Figure("ROC curve", "false positive rate", "true positive rate", roc, unit=True),
        Figure("Precision and recall", "recall", "precision", pr, unit=True),
        Figure("Calibration", "predicted probability", "observed frequency", reliability, unit=True),
    ]
