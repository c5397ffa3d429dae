"""Write what a survival study leaves: the model directory, the report and the metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.core import NestfedError, __version__
from nestfed.files import make_directory, write_atomically
from nestfed.queries.solve import Fit
from nestfed.queries.survival import LifeTable
from nestfed.report import html
from nestfed.report.page import Figure, Line, Page, Table
from nestfed.study.convert import linear_parameters
from nestfed.study.hazards import Survived
from nestfed.study.metric_table import text
from nestfed.study.model import CARD, Architecture, Provenance, StudyModel, SurvivalCurve

MOST_CURVES = 8
"""The sites whose survival curves are drawn: those with the most rows."""


def model_of(found: Survived) -> StudyModel:
    """Return the released model: the linear predictor of the hazard, and the common baseline hazard."""
    if found.baseline is None:
        raise NestfedError(
            "A stratified model has no common baseline hazard, so it predicts no survival: set problem.baseline = 'common'."
        )
    curve = SurvivalCurve(
        found.study.data.time, found.times, tuple(found.baseline.starts.tolist()), tuple(found.baseline.cumulative.tolist())
    )  # fmt: skip
    return StudyModel(
        Architecture("mlp", (len(found.encoding.inputs),), 1, {"hidden": []}),
        linear_parameters(found.scaled.coef[None], np.zeros(1)),
        found.encoding,
        found.study.data.target,
        provenance=Provenance(
            method="exact Cox regression",
            objective="the partial likelihood",
            study=found.study.digest(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            settings={"ties": _ties(found), "ridge per event": f"{found.path.best:.3g}"},
            sites={name: (sum(rows),) for name, rows in found.rows.items()},
            notes=found.notes,
        ),
        reference=found.reference,
        survival=curve,
    )


def headline(found: Survived) -> str:
    """Return the main result in a few sentences."""
    events = sum(own[0] for own in found.rows.values())
    what = f"{found.fit.model} over {len(found.names)} sites with {events:,} events"
    if found.exact:
        same = "the coefficients, standard errors and hazard ratios of the pooled rows, although no row left a site. Exact does not mean accurate"
    else:
        same = "approximate, as the sites' min_cell joins times or rare values"
    return f"{what}: {same}: on the test rows, the C-index of pairs inside sites is {found.judged.within:.3f}."


def tables(found: Survived) -> list[Table]:
    """Return the results that the report and the model card have in common."""
    return [_ratios(found.fit), _accuracy(found), _others(found), _rows(found)]


def page(found: Survived, facts: Mapping[str, str], digest: str = "") -> Page:
    """Return the report.

    - `facts`: where the tables came from.
    - `digest`: that of the model directory.
    """
    study = found.study
    return Page(
        f"{study.data.target} by {study.data.time}: {len(found.names)} sites",
        " ".join([headline(found), *found.notes]),
        tables=tables(found),
        figures=_figures(found),
        facts={
            "event": study.data.target,
            "time": study.data.time,
            "sites": ", ".join(found.names),
            "model": digest,
            "study": study.digest(),
            "duration": f"{found.seconds:.0f} s",
            **facts,
            "nestfed": __version__,
        },
        settings={k: v for k, v in study.resolved().items() if isinstance(v, Mapping) and v},
    )


def write(
    found: Survived, out: Path, facts: Mapping[str, str], *, force: bool = False
) -> tuple[StudyModel | None, dict[str, Path]]:
    """Write the model directory, the report and the metrics; return the model, if there is one, and the paths."""
    model = None
    if found.baseline is not None:
        model = model_of(found).save(out / "model", force=force, tables=tables(found))
    make_directory(out)
    metrics = {**asdict(found.judged), "times": found.times}
    write_atomically(out / "metrics.json", json.dumps(metrics).encode())
    report = html.write(page(found, facts, "" if model is None else model.digest), out / "report.html")
    paths = {"report": report, "metrics": out / "metrics.json"}
    if model is not None:
        paths |= {"model card": out / "model" / CARD, "model": out / "model"}
    return model, paths


def _ties(found: Survived) -> str:
    return str(getattr(found.study.problem, "ties", ""))


def _number(value: float) -> float | None:
    return None if not np.isfinite(value) else float(f"{value:.4g}")


def _ratios(fit: Fit) -> Table:
    frame = fit.summary("robust", ratio=True)
    rows = [
        [str(name), *(_number(float(line[k])) for k in ("ratio", "ratio_low", "ratio_high", "coef", "se", "p"))]
        for name, line in frame.iterrows()
    ]
    heads = ["column", "hazard ratio", "low", "high", "coefficient", "robust error", "p"]
    note = "Per unit of the column, or against the most common category. 95 % intervals, with robust standard errors."
    return Table("Hazard ratios", heads, rows, note)


def _accuracy(found: Survived) -> Table:
    judged = found.judged
    pooled = None if judged.pooled is None else text(judged.pooled)
    rows: list[list[Any]] = [
        ["C-index, pairs inside sites", _number(judged.within), 0.5],
        ["C-index, all pairs", pooled, 0.5],
    ]
    rows += [
        [f"Brier score at {found.study.data.time} = {t:g}", _number(one), _number(plain)]
        for t, one, plain in zip(found.times, judged.brier, judged.plain)
    ]
    note = (
        "The bounds of the C-index come from joined scores. Brier scores are weighted for censoring; smaller is better."
    )
    return Table("On test rows", ["metric", "value", "without columns"], rows, note)


def _others(found: Survived) -> Table:
    """Return the coefficients of all models side by side."""
    fits: dict[str, Fit] = {"released": found.fit, **found.beside}
    rows = [[name, *(_number(float(fit.coef[i])) for fit in fits.values())] for i, name in enumerate(found.fit.names)]
    note = (
        "Coefficients with a common baseline hazard, with one per site (stratified), with one times a factor per site "
        "(intercepts), and with the other way to treat ties. Where they disagree, sites differ in ways that columns do not explain."
    )
    if not found.exact:
        note = note.rpartition(". ")[0] + ". The sites' min_cell makes all but the stratified coefficients approximate."
    return Table("Other models", ["column", *fits], rows, note)


def _rows(found: Survived) -> Table:
    rows: list[list[Any]] = [[name, sum(own), own[0]] for name, own in found.rows.items()]
    note = "Training and validation rows that sites may describe. Test rows are left out."
    return Table("Rows by site", ["site", "rows", "events"], rows, note)


def _figures(found: Survived) -> list[Figure]:
    """Return the Kaplan-Meier curves of all sites together, with their interval, and by site."""
    if found.life is None:
        return []
    low, high = found.life.interval()
    whole = [
        _curve("all sites", found.life, found.life.survival),
        _curve("95 % interval, low", found.life, low, "dashed"),
        _curve("95 % interval, high", found.life, high, "dashed"),
    ]
    largest = sorted(found.by_site, key=lambda name: -int(found.by_site[name].at_risk[0]))[:MOST_CURVES]
    each = [_curve(name, found.by_site[name], found.by_site[name].survival) for name in largest]
    more = len(found.by_site) - len(largest)
    note = f"The {len(largest)} sites with the most rows; {more} others are not drawn." if more else ""
    label = found.study.data.time
    return [
        Figure("Survival (Kaplan-Meier)", label, "without the event", whole),
        Figure("Survival by site", label, "without the event", each, note),
    ]


def _curve(name: str, life: LifeTable, values: np.ndarray, style: Any = "line") -> Line:
    """Return a curve as steps."""
    x: Sequence[float] = np.repeat(life.starts, 2).tolist()
    y = np.repeat(np.nan_to_num(np.concatenate([[1.0], values]), nan=1.0), 2)[1:-1]
    return Line(name, x, y.tolist(), style)
