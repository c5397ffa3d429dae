"""Write what a study leaves: the model directory, the report, the study's file. The same from tables at hand and from sites."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from nestfed.experiment.spec import Experiment
from nestfed.files import make_directory, reject_foreign, write_atomically
from nestfed.report import html
from nestfed.study import findings
from nestfed.study.convert import model_of_way
from nestfed.study.metric_table import ALL
from nestfed.study.model import CARD, WHAT, StudyModel
from nestfed.study.outcome import Outcome
from nestfed.study.page import LABELS
from nestfed.study.reference import Reference, ScoreShares
from nestfed.study.sealed import SUMS, reject_used

STUDY, TABLE_FILE, TRAININGS = "study.toml", "metrics.json", "trainings"
"""Files of a study's directory: its own file, all metrics with intervals, and the records of its trainings."""


def claim(out: Path, *, force: bool = False) -> None:
    """Reject an output directory with something other than a study, or with a released model unless `force`."""
    reject_foreign(out, "study", STUDY, f"model/{SUMS}", "model/estimator.json")
    reject_used(out / "model", WHAT, (SUMS, "estimator.json"), force=force)


def keep_file(study: Experiment, out: Path) -> None:
    """Write the study's file; the trainings of another study in the same directory are not resumed."""
    write_atomically(make_directory(out) / STUDY, tomli_w.dumps(dict(study.source)).encode())


def trainings(out: Path, study: Experiment, *, afresh: bool = False) -> Path:
    """Return the directory of a study's trainings, without earlier ones if they must be done again."""
    place = out / TRAININGS / study.digest()
    if afresh:
        shutil.rmtree(place, ignore_errors=True)
    return place


def released(outcome: Outcome) -> StudyModel:
    """Return the model of a study with its calibration, thresholds, metrics, and statistics to compare new rows with."""
    done, way = outcome.conducted, outcome.released
    made = model_of_way(done, way)
    metrics = {name: one.value for name, one in outcome.test.row(way.name, ALL).items()}
    provenance = replace(
        made.provenance,
        objective=LABELS.get(outcome.metric, outcome.metric),
        sites=done.rows,
        metrics=metrics,
        notes=(*made.provenance.notes, outcome.why),
    )
    reference = Reference(done.agreement.totals.rows, done.agreement.known)
    if outcome.counts is not None:
        reference = reference.with_scores(ScoreShares.of_histogram(outcome.plain.scores.even))
    return replace(
        made, calibration=outcome.calibration, thresholds=outcome.thresholds, provenance=provenance, reference=reference
    )


def write(
    outcome: Outcome, out: Path, facts: Mapping[str, str], *, force: bool = False
) -> tuple[StudyModel, dict[str, Path]]:
    """Write the model directory, the report and all metrics; return the model and the paths."""
    model = released(outcome).save(out / "model", force=force, tables=findings.tables(outcome))
    write_atomically(out / TABLE_FILE, json.dumps(outcome.test.to_json()).encode())
    report = html.write(findings.page(outcome, facts, model.digest), out / "report.html")
    return model, {"report": report, "model card": out / "model" / CARD, "model": out / "model", "study": out / STUDY}
