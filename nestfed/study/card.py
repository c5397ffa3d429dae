"""The model card: what a model is, what it was trained on, how good it is, where it ends, how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nestfed.data.encoding import FAR
from nestfed.metrics import Estimate
from nestfed.report.page import Table
from nestfed.study.coefficients import coefficients
from nestfed.study.model import GRAPH, PARAMETERS, PROGRAM, StudyModel
from nestfed.study.page import LABELS

FEW = 20
"""Rows of a class at a site below which the card names the site."""


def card(model: StudyModel, tables: Sequence[Table] = ()) -> str:
    """Return the model card as Markdown; `tables` hold the results, such as metrics by site and by subgroup."""
    sections = [
        f"# Model card: {_plain(model.target)}",
        _what(model),
        "## Results",
        _results(model, tables),
        *(["## Decisions", decisions] if (decisions := _decisions(model)) else []),
        "## Training rows",
        _sites(model),
        "## Inputs",
        _inputs(model),
        *(["## Coefficients", _coefficients(model)] if model.architecture.linear else []),
        "## Limits",
        _limits(model),
        "## Use",
        _use(model),
        "## Origin",
        _origin(model),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(_plain("–" if cell is None else cell) for cell in line) + " |" for line in lines)


def _plain(cell: Any) -> str:
    """Return a cell that cannot break out of its table."""
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())


def _interval(value: Estimate) -> str:
    if not np.isfinite(value.low):
        return f"{value.value:.4f}"
    return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"


def _what(model: StudyModel) -> str:
    origin = model.provenance
    kind = str(model.architecture)
    trained = f", trained for {origin.objective} by {origin.method}" if origin.method else ""
    over = f" over {len(origin.sites)} sites" if origin.sites else ""
    if model.survival is not None:
        answer = f"It predicts the probability that {model.target} has not happened until some {model.survival.time}."
    elif not model.classes:
        answer = "It predicts a number."
    elif model.binary:
        a, b = model.calibration.at()
        answer = (
            f"It predicts the probability that {model.target} is {model.classes[1]} rather than {model.classes[0]}: "
            f"1/(1 + exp(−({a:.6g}·score + {b:.6g})))."
        )
        if model.calibration.sites:
            answer += f" These sites have their own map: {', '.join(model.calibration.sites)}."
    else:
        answer = f"It predicts the probability of each of {len(model.classes)} classes: {', '.join(model.classes)}."
    return _plain(f"{kind[0].upper()}{kind[1:]}{trained}{over}. {answer}")


def _results(model: StudyModel, tables: Sequence[Table]) -> str:
    found = []
    if model.provenance.metrics:
        rows = [[LABELS.get(name, name), _interval(value)] for name, value in model.provenance.metrics.items()]
        found.append(markdown(Table("", ["metric on test rows", "value (95 % interval)"], rows)))
    for table in tables:
        found.append(
            f"### {_plain(table.title)}\n\n{markdown(table)}" + (f"\n\n{_plain(table.note)}" if table.note else "")
        )
    return "\n\n".join(found) or "No results were recorded for this model."


def _decisions(model: StudyModel) -> str:
    if not model.binary:
        return "The prediction is the most probable class." if model.classes else ""
    if not model.thresholds:
        return (
            "No threshold was chosen. `nestfed predict` decides at a probability of 0.5 unless you pass `--threshold`."
        )
    rates = ("sensitivity", "specificity", "ppv", "alerts")
    rows = [
        [t.rule, f"{t.probability:.4g}", *(_interval(getattr(t, rate)) for rate in rates)] for t in model.thresholds
    ]
    table = Table(
        "", ["rule", "positive from", "sensitivity", "specificity", "positive predictive value", "alerts"], rows
    )
    return f"{markdown(table)}\n\n`nestfed predict` uses the first rule; `--threshold` chooses another."


def _sites(model: StudyModel) -> str:
    sites = model.provenance.sites
    if not sites:
        return "No sites were recorded for this model."
    heads = [f"{model.target} = {c}" for c in model.classes]
    rows: list[list[Any]] = [[name, sum(counts), *(counts if heads else ())] for name, counts in sites.items()]
    total = np.array([row[1:] for row in rows]).sum(0)
    return markdown(Table("", ["site", "rows", *heads], [*rows, ["all sites", *map(int, total)]]))


def _inputs(model: StudyModel) -> str:
    """Return one line per column, with all categories."""
    encoding, before = model.encoding, model.reference
    rows, first = [], 0
    for column in encoding.schema:
        at, first = first, first + len(column)
        if column.categories is None:
            missing = "–" if before is None or not before.rows else f"{1 - before.known[at] / before.rows:.1%}"
            values = f"mean {encoding.mean[at]:.5g}, deviation {encoding.deviation[at]:.5g}"
            rows.append([column.name, "number", values, missing, "yes" if encoding.gaps[at] else "no"])
        else:
            shares = encoding.mean[at:first]
            values = (
                ", ".join(f"{name} {share:.1%}" for name, share in zip(column.categories, shares)) or "none was known"
            )
            rows.append([column.name, "category", values, f"{max(0.0, 1 - shares.sum()):.1%}", "no"])
    table = Table("", ["column", "kind", "training values", "missing", "marked if missing"], rows)
    clipped = f" and clipped at {FAR:g} deviations" if encoding.to_json()["kind"] == "table" else ""
    scaled = f"Numbers are standardised{clipped}; missing ones become the mean. " if encoding.scaled else ""
    return f"{markdown(table)}\n\n{scaled}A category that is missing or not listed is none of those listed."


def _coefficients(model: StudyModel) -> str:
    rows = [[one.name, f"{one.standardised:+.5g}", f"{one.per_unit:+.5g}"] for one in coefficients(model)]
    what = "log-odds" if model.classes else "log hazard" if model.survival else "prediction"
    table = Table("", ["input", "per standard deviation", "per unit, or if it is present"], rows)
    return f"What an input adds to the {what}.\n\n{markdown(table)}"


def _limits(model: StudyModel) -> str:
    limits = [
        "Test rows come from the same sites. Performance at other sites, times or populations is unknown: use "
        "`nestfed monitor` with your own rows first.",
        "A high value over all sites may only reflect differences between sites: compare with the values by site.",
        "The model learns correlations, not causes. Acting on its predictions changes the population it was trained on.",
        "It is not a medical device. Subgroups that the results do not list were not examined.",
    ]
    few = [name for name, counts in model.provenance.sites.items() if len(counts) > 1 and min(counts) < FEW]
    if few:
        limits.append(f"Sites with fewer than {FEW} training rows of a class: {', '.join(few)}.")
    if not model.thresholds and model.binary:
        limits.append("No threshold was chosen for a purpose; 0.5 is rarely right for rare classes.")
    return "\n".join(f"- {_plain(limit)}" for limit in [*limits, *model.provenance.notes])


def _use(model: StudyModel) -> str:
    graph = f"\n`{GRAPH}`, if it is here, does the same in ONNX Runtime." if model.architecture.name == "mlp" else ""
    if model.survival is not None:
        graph += " Both return the log of the hazard, against a row whose inputs are all at their mean or reference."
    return f"""```console
$ nestfed predict MODEL new.csv
$ nestfed monitor MODEL new.csv
```

`{PARAMETERS}` holds the parameters. `{PROGRAM}` (torch.export) maps the features, in the order of the inputs above with one
0/1 feature per category and NaN for missing values, to predictions.{graph} Safetensors and ONNX files run no code; a `.pt2` file
can, so load it only from a source you trust. `sha256sum -c SHA256SUMS` checks all files."""


def _origin(model: StudyModel) -> str:
    origin = model.provenance
    facts = {
        "date": origin.date,
        "study": origin.study,
        "adapted from": origin.parent,
        "nestfed": origin.nestfed,
        "torch": origin.torch,
        **origin.settings,
    }
    return markdown(Table("", ["fact", "value"], [[name, value] for name, value in facts.items() if value]))
