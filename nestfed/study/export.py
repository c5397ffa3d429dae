"""Write the results of a study: model, exported program, report and model card."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import NestfedError, __version__
from nestfed.data.encoding import TableEncoding, standardised
from nestfed.experiment import choice
from nestfed.files import reject_foreign, write_atomically
from nestfed.metrics import find
from nestfed.report import html
from nestfed.report.page import Figure, Line, Page, Table
from nestfed.study.base import precise
from nestfed.study.page import LABELS, curves, sites_table
from nestfed.study.train import StudyResult, Trained

CARD, TABLE = "MODEL_CARD.md", "table.json"


class Scorer(nn.Module):
    """Maps raw features, in order, to probabilities: imputation, scaling, model and calibration.

    Missing values are NaN. With two classes it returns the probability of the positive class, otherwise one per class.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, encoding: TableEncoding, model: nn.Module, calibration: tuple[float, float]) -> None:
        super().__init__()
        self.model, (self.a, self.b) = model, calibration
        self.register_buffer("mean", torch.from_numpy(encoding.mean))
        self.register_buffer("deviation", torch.from_numpy(encoding.deviation))
        self.gaps = encoding.marked

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, features) to probabilities."""
        scaled = standardised(x, self.mean, self.deviation, self.gaps)
        scores = self.model(scaled)
        return torch.sigmoid(self.a * scores + self.b) if scores.dim() == 1 else torch.softmax(scores, 1)


def export(estimator: Any, path: Path) -> Path:
    """Write the map from raw features to probabilities as a program for `torch.export.load`."""
    scorer = Scorer(estimator.scale_, precise(estimator._scores), estimator.calibration_).eval()
    example = torch.zeros(2, len(estimator.scale_.features))
    made = torch.export.export(scorer, (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.export.save(made, path)
    return path


def claim(out: Path, target: str, objective: str) -> None:
    """Reject an output directory that contains something other than a model for this target and objective."""
    reject_foreign(out, "model of `nestfed train`", CARD)
    path = out / "model" / TABLE
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if held and (held["target"], held["objective"]) != (target, objective):
        raise NestfedError(
            f"{out} contains a model for {held['objective']} of {held['target']!r}; choose another directory with --out."
        )


def write(result: StudyResult, out: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Write the model, its export, the report and the model card; return their paths."""
    model = result.estimator.save(out / "model")
    table = {"target": result.target, "classes": list(result.classes), "objective": result.objective}
    write_atomically(model / TABLE, (json.dumps(table, indent=1) + "\n").encode())
    exported = export(result.estimator, model / "model.pt2")
    card = out / CARD
    write_atomically(card, model_card(result).encode())
    report = html.write(page(result, files), out / "report.html")
    return {"report": report, "model card": card, "model": model, "export": exported}


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


def page(result: StudyResult, files: Sequence[Path]) -> Page:
    """Return the report."""
    est = result.estimator
    columns, rows = results(result)
    note = (
        "All rows use the same test data. Within sites: the metric on each site's own test rows, averaged over sites. Every "
        "site alone: the metric of each site's own model on all test rows, averaged over sites."
    )
    metric_names = [m for m in LABELS if m in result.best.values]
    histories = {one.name: one.history for one in result.trained if one.history}
    by_site = []
    for n, name in enumerate(est.sites_.names):
        mine = result.owner == n
        cells = [_on(one, mine, result) for one in result.trained]
        by_site.append([name, int(mine.sum()), *cells])
    site_table = Table(
        f"{LABELS[result.metric]} on each site's own test rows",
        ["site", "test rows", *(one.name for one in result.trained)],
        by_site,
        "– if all test rows of a site have the same class. Values from few rows are uncertain.",
    )
    facts = {
        "files": ", ".join(f.name for f in files[:8]) + (" …" if len(files) > 8 else ""),
        "target": f"{result.target}: {', '.join(result.classes)}"
        + (f" ({result.classes[-1]} is positive)" if len(result.classes) == 2 else ""),
        "rows": ", ".join(f"{v:,} {k}" for k, v in result.rows.items()),
        "split": f"per site, by groups of {result.grouped}" if result.grouped else "per site, stratified by class",
        "method": repr(est.method_),
        "reason": est.choice_.why,
        "time": f"{result.seconds:.0f} s on {platform.machine()}",
        "nestfed": f"{__version__}, torch {torch.__version__}",
    }
    return Page(
        f"{result.target}: {len(est.sites_.names)} sites",
        " ".join([headline(result), *est.hints_]),
        tables=[
            Table("Comparison", columns, rows, note, [_best_row(result)]),
            site_table,
            sites_table(_named(result)),
        ],
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


def model_card(result: StudyResult) -> str:
    """Return the model card: the model, its training data, its results and its limits."""
    est = result.estimator
    columns, rows = results(result)
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))
    counts = est.sites_.counts
    sites = "\n".join(
        f"| {name} | {int(c.sum())} | {' | '.join(str(int(k)) for k in c)} |"
        for name, c in zip(est.sites_.names, counts)
    )
    heads = " | ".join(f"{result.target} = {c}" for c in result.classes)
    split = f"by groups of `{result.grouped}`" if result.grouped else "stratified by class"
    gaps = int(est.scale_.gaps.sum())
    poor = [n for n, c in zip(est.sites_.names, counts) if c.min() < 5]
    thin = f"\n- Sites with almost no examples of the rarer class: {', '.join(poor)}." if poor else ""
    inputs = ", ".join(f"`{f}`" for f in est.scale_.features[:40]) + (" …" if len(est.scale_.features) > 40 else "")
    shape = "a linear score" if not est.hidden else f"a fully connected network with layers of {list(est.hidden)}"
    probability = (
        "Platt scaling on the training rows turns its scores into probabilities."
        if est.kind != "classify"
        else "It was trained with cross-entropy, so its outputs are probabilities."
    )
    return f"""# Model card: {result.target}

{headline(result)}

## What it is

{shape.capitalize()}, trained for {LABELS[result.metric]} by {est.choice_.name} over {len(est.sites_.names)} sites, {est.rounds}
rounds of {est.q} local steps. In a deployment only sums and model parameters leave a site. {probability}
Positive class: {result.classes[-1] if len(result.classes) == 2 else "none, as there are " + str(len(result.classes)) + " classes"}.

## What it was trained on

| site | training rows | {heads} |
| --- | --- | {" | ".join("---" for _ in result.classes)} |
{sites}

Each site held out test rows first ({split}): {result.rows["test"]} rows in total. {result.rows["of these for tuning"]} of the
{result.rows["training"]} training rows were used to choose the step size. Missing values are replaced by the mean of all
sites; {gaps} features have an extra input "is missing". Values are clipped at five standard deviations.

Inputs: {inputs}

## Results

{table}

All ways of training had the same trials, batch size and rounds. Within sites: the metric on each site's own test rows,
averaged over sites.

## Limits

- Test rows come from the same sites. Performance at other sites, times or populations is unknown.
- A high value over all sites may only reflect differences between sites: compare with the column "within sites".
- The model learns correlations, not causes. Acting on its score changes the population that it was trained on.{thin}
- It is not a medical device, and its fairness between groups of people was not examined.

## How to use it

```console
$ nestfed predict MODEL new.csv
```

`model/model.pt2` (torch.export) maps the raw inputs above, in this order and with NaN for missing values, to probabilities;
`model/model.safetensors` contains the parameters. Made with nestfed {__version__}, torch {torch.__version__}.
"""
