"""The report of a study: which model is released and why, how good it is, and everything that was compared."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nestfed.core import __version__
from nestfed.metrics import Estimate
from nestfed.report.page import Figure, Line, Page, Table
from nestfed.study.conduct import Way
from nestfed.study.curves import calibration_curve, decision_curve
from nestfed.study.importance import coefficients
from nestfed.study.metric_table import ALL, SITE, signed, text
from nestfed.study.outcome import ALONE, BY_SITE, COMMON, Outcome
from nestfed.study.page import LABELS, curves


def headline(outcome: Outcome) -> str:
    """Return the main result in a few sentences."""
    metric, name = outcome.metric, outcome.released.name
    one, rows = outcome.test.entry(name, metric), outcome.test.sizes[ALL].rows
    found = f"{outcome.why} On {rows:,} test rows its {LABELS.get(metric, metric)} is {text(one.value)}."
    reference = outcome.test.reference
    if one.difference is not None and name != reference:
        found += f" Difference to {reference}: {signed(one.difference)}."
    return found if outcome.protection is None else f"{found} {outcome.protection.sentences()}"


def tables(outcome: Outcome) -> list[Table]:
    """Return the results that the report and the model card have in common."""
    found = by_metric(outcome)
    if outcome.thresholds:
        found.append(_thresholds(outcome))
    if outcome.agreements is not None:
        found.append(_calibration(outcome))
    if outcome.protection is not None:
        found.append(outcome.protection.report())
    return found


def by_metric(outcome: Outcome) -> list[Table]:
    """Return all models by metric; then the main metric by site and subgroup, of the models that matter most."""
    known, fallback = outcome.test.models, outcome.validation.reference
    wanted = (outcome.released.name, outcome.test.reference, fallback, ALONE)
    shown = [name for name in dict.fromkeys(wanted) if name in known]
    return outcome.test.tables(outcome.metric, models=shown, labels=LABELS)


def page(outcome: Outcome, facts: Mapping[str, str], digest: str = "") -> Page:
    """Return the report.

    - `facts`: where the tables came from.
    - `digest`: that of the model directory.
    """
    done = outcome.conducted
    study = done.study
    tabled = [
        *tables(outcome),
        _choice(outcome),
        _trials(outcome.ways, outcome.metric, protected=outcome.protection is not None),
        _model(outcome),
        _rows(outcome),
    ]
    histories = {way.name: way.history for way in done.ways if way.history}
    shown = [f"val_{outcome.metric}", "loss"]
    return Page(
        f"{study.data.target}: {len(done.names)} sites",
        " ".join([headline(outcome), *done.notes]),
        tables=tabled,
        curves=curves(histories, shown),
        figures=_figures(outcome),
        facts={
            "target": _target(outcome),
            "sites": ", ".join(done.names),
            **facts,
            "study": study.digest(),
            "model": digest,
            "time": f"{outcome.seconds:.0f} s on {platform.machine()}",
            "nestfed": f"{__version__}, torch {torch.__version__}",
        },
        settings={k: v for k, v in study.resolved().items() if isinstance(v, Mapping) and v},
    )


def _target(outcome: Outcome) -> str:
    target = outcome.conducted.target
    positive = f" ({target.classes[-1]} is positive)" if target.binary else ""
    return f"{outcome.conducted.study.data.target}: {', '.join(target.classes) or 'a number'}{positive}"


def _choice(outcome: Outcome) -> Table:
    """Return the comparison on validation rows by which the model was chosen."""
    found, metric = outcome.validation, outcome.metric
    rows = []
    for name in found.models:
        one = found.entry(name, metric)
        gain = "" if one.difference is None else signed(one.difference)
        rows.append([name, text(one.value), gain, "released" if name == outcome.released.name else ""])
    note = "Models of the trials, which have not seen these rows. The metric that decided, and the difference to the plain model."
    label = LABELS.get(metric, metric)
    return Table("The choice, on validation rows", ["model", label, f"− {found.reference}", ""], rows, note)


def _trials(ways: Sequence[Way], metric: str, *, protected: bool) -> Table:
    rows: list[list[Any]] = []
    for way in ways:
        sent = way.history[-1] if way.history else None
        megabytes = "–" if sent is None else f"{(sent['bytes_up'] + sent['bytes_down']) / 1e6:.2f} MB"
        best = ", ".join(f"{k.rpartition('.')[2]}={v:.3g}" for k, v in way.settings.items())
        ended = f"{best} ({way.end} of those tried)" if way.end else best
        values = " · ".join(f"{name}: {'diverged' if math.isnan(v) else f'{v:.4f}'}" for name, v in way.trials.items())
        rows.append([way.name, ended, way.rounds, megabytes, values])
    note = f"Every method has the same trials. Values are {LABELS.get(metric, metric)} on validation rows; of exact regression, the mean loss of a row."
    if any(way.history and not way.rounds for way in ways):
        note += " 0 rounds: no round was better than the start, which for a linear score is the exact regression."
    if protected:
        note += " Methods that protect sites have the log-loss of the worst site."
    return Table("Tuning", ["method", "chosen", "rounds", "sent by the chosen trial", "trials"], rows, note)


def _thresholds(outcome: Outcome) -> Table:
    rates = ("sensitivity", "specificity", "ppv", "alerts")
    rows = [
        [one.rule, f"{one.probability:.4g}", *(text(getattr(one, rate)) for rate in rates)]
        for one in outcome.thresholds
    ]
    heads = ["rule", "positive from", "sensitivity", "specificity", "positive predictive value", "alerts"]
    note = "Chosen on validation rows, judged on test rows, with 95 % intervals. `nestfed predict` uses the first rule."
    return Table("Thresholds", heads, rows, note)


def _calibration(outcome: Outcome) -> Table:
    """Return calibration by site, with the common calibration and with every site's own."""
    adapted, found = outcome.recalibration, outcome.agreements or {}
    assert adapted is not None
    assert outcome.recalibrated is not None
    rows: list[list[Any]] = []
    for group, one in found.items():
        briers = [outcome.recalibrated.entry(model, "brier", group).value for model in (COMMON, BY_SITE)]
        rows.append([group.removeprefix(f"{SITE} = "), text(one.slope), text(one.intercept), *map(_short, briers)])
    own = (
        f"Own calibrations adapt the {adapted.way}, with strength {adapted.strength:g}, chosen by cross-validation on "
        "validation rows."
    )
    used = (
        "The model has the common calibration" if not outcome.calibration.sites else "The model has the sites' own ones"
    )
    note = f"Slope 1 and intercept 0 are perfect. {own} {used} (study.calibration)."
    heads = ["site", "slope", "intercept", "Brier score, common", "Brier score, own"]
    return Table("Calibration on test rows", heads, rows, note)


def _short(one: Estimate) -> str:
    return "–" if math.isnan(one.value) else f"{one.value:.4f}"


def _model(outcome: Outcome) -> Table:
    """Return what the model uses: coefficients of a linear score, or the importance of every column."""
    done = outcome.conducted
    if outcome.importances:
        rows: list[list[Any]] = [[one.column, signed(one.loss), f"{one.between:.2g}"] for one in outcome.importances]
        note = (
            "What is lost if a column's rows are shuffled inside every site. Columns that resemble each other share it."
        )
        label = LABELS.get(outcome.metric, outcome.metric)
        return Table("What the model uses", ["column", f"loss of {label}", "between shuffles"], rows, note)
    if done.target.outputs == 1:
        frame = coefficients(outcome.released.x, done.agreement.encoding, outcome.calibration)
        heads, what = ["per deviation", "per unit", "odds ratio"], "log-odds"
        if not done.target.binary:
            frame, heads, what = frame.drop(columns="odds_ratio"), heads[:2], "prediction"
        rows = [
            [str(name), *(None if math.isnan(v) else float(f"{v:.5g}") for v in row)]
            for name, *row in frame.itertuples()
        ]
        note = f"On the {what}. The intercept is the {what} where every input has its mean."
        return Table("Coefficients", ["input", *heads], rows, note)
    return Table("Coefficients", ["input"], [], "With several classes, see the model card.")


def _rows(outcome: Outcome) -> Table:
    done = outcome.conducted
    heads = [f"{done.study.data.target} = {c}" for c in done.target.classes]
    rows: list[list[Any]] = [[name, sum(counts), *(counts if heads else ())] for name, counts in done.rows.items()]
    note = "Training and validation rows. Test rows are left out; so is a class with fewer rows than a site's min-cell."
    return Table("Rows by site", ["site", "rows", *heads], rows, note)


def _figures(outcome: Outcome) -> list[Figure]:
    """Return ROC, precision and recall, calibration and net benefit of the released model, and what protection costs."""
    protection = [] if outcome.protection is None else [outcome.protection.figure()]
    if not outcome.conducted.target.binary:
        return protection
    name, tally = outcome.released.name, outcome.tally
    even = tally.scores.even
    fpr, tpr = even.roc_curve()
    recall, precision = even.pr_curve()
    known = calibration_curve(tally)
    return [
        Figure(
            "ROC curve", "false positive rate", "true positive rate",
            [Line(name, fpr.tolist(), tpr.tolist()), Line("chance", [0.0, 1.0], [0.0, 1.0], "dashed")], unit=True,
        ),
        Figure(
            "Precision and recall", "recall", "precision", [Line(name, recall.tolist(), precision.tolist())], unit=True,
        ),
        Figure(
            "Calibration", "predicted probability", "observed frequency",
            [
                Line("predicted and observed", [o.predicted for o in known], [o.observed.value for o in known], "points"),
                Line("perfect", [0.0, 1.0], [0.0, 1.0], "dashed"),
            ],
            unit=True,
        ),
        decision_curve(tally).figure(name),
        *protection,
    ]  # fmt: skip
