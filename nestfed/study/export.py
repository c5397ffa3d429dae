"""What a training leaves behind: the model, its export, a report and a model card."""

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

from nestfed.core import __version__
from nestfed.data.encoding import TableEncoding, standardised
from nestfed.files import write_atomically
from nestfed.metrics import find
from nestfed.report import html
from nestfed.report.page import Figure, Line, Page, Table
from nestfed.study.base import Scores
from nestfed.study.page import BEST, curves, sites_table
from nestfed.study.train import Outcome, Trained


class Scorer(nn.Module):
    """Imputation, scaling, the model and its calibration in one: raw features in their order to probabilities.

    Missing values are NaN. Two classes: one probability, of the positive class; more: one for each.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, encoding: TableEncoding, model: Scores, calibration: tuple[float, float]) -> None:
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
    """Write the whole way from raw features to probabilities as a program for `torch.export.load`."""
    scorer = Scorer(estimator.scale_, estimator._scores, estimator.calibration_).eval()
    example = torch.zeros(2, len(estimator.scale_.features))
    made = torch.export.export(scorer, (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.export.save(made, path)
    return path


def write(outcome: Outcome, out: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Write the model, its export, the report and the model card; return where they are."""
    out.mkdir(parents=True, exist_ok=True)
    model = outcome.estimator.save(out / "model")
    told = {"target": outcome.target, "classes": list(outcome.classes), "objective": outcome.objective}
    write_atomically(model / "table.json", (json.dumps(told, indent=1) + "\n").encode())
    exported = export(outcome.estimator, model / "model.pt2")
    card = out / "MODEL_CARD.md"
    write_atomically(card, model_card(outcome).encode())
    report = html.write(page(outcome, files), out / "report.html")
    return {"report": report, "model card": card, "model": model, "export": exported}


def headline(outcome: Outcome) -> str:
    """Return the result in a sentence or two."""
    best, metric = outcome.best, BEST[outcome.metric]
    low, high = outcome.interval
    text = f"{metric} {best.values[outcome.metric]:.3f} (95 % interval {low:.3f} to {high:.3f}) on {len(outcome.labels)} test rows."
    if outcome.gain is not None:
        gain, less, more = outcome.gain
        verdict = (
            ""
            if less > 0
            else " a difference that these test rows cannot tell from 0"
            if more > 0
            else " FedAvg is better here"
        )
        text += (
            f" Over FedAvg on cross-entropy {gain:+.3f} ({less:+.3f} to {more:+.3f}){':' + verdict if verdict else ''}."
        )
    return text


def results(outcome: Outcome) -> tuple[list[str], list[list[Any]]]:
    """Return the comparison as columns and rows."""
    names = [m for m in BEST if m in outcome.best.values]
    columns = [
        "way of training",
        *(BEST[m] for m in names),
        f"{BEST[outcome.metric]} within sites",
        "lr",
        "trials",
        "sent",
    ]
    rows = []
    for one in outcome.trained:
        last = one.history[-1] if one.history else None
        sent = "nothing" if last is None else f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.2f} MB"
        cells = [f"{one.values[m]:.4f}" for m in names]
        rows.append([one.name, *cells, f"{one.inside:.4f}", f"{one.lr:.3g}", len(one.trials), sent])
    return columns, rows


def page(outcome: Outcome, files: Sequence[Path]) -> Page:
    """Return the report."""
    est = outcome.estimator
    columns, rows = results(outcome)
    note = (
        "All on the same test rows. Within sites: the mean over sites of the metric on their own test rows, which compares "
        "no two sites' rows. Alone: the mean over sites of how well a site's own model does on all test rows."
    )
    metric_names = [m for m in BEST if m in outcome.best.values]
    histories = {one.name: one.history for one in outcome.trained if one.history}
    by_site = []
    for n, name in enumerate(est.sites_.names):
        mine = outcome.owner == n
        cells = [_on(one, mine, outcome) for one in outcome.trained]
        by_site.append([name, int(mine.sum()), *cells])
    site_table = Table(
        f"{BEST[outcome.metric]} on each site's own test rows",
        ["site", "test rows", *(one.name for one in outcome.trained)],
        by_site,
        "– where a site's test rows are of one class. Few rows make these numbers uncertain.",
    )
    facts = {
        "files": ", ".join(f.name for f in files[:8]) + (" …" if len(files) > 8 else ""),
        "target": f"{outcome.target}: {', '.join(outcome.classes)}"
        + (f" ({outcome.classes[-1]} counts as positive)" if len(outcome.classes) == 2 else ""),
        "rows": ", ".join(f"{v:,} {k}" for k, v in outcome.rows.items()),
        "split": f"per site, whole values of {outcome.grouped}" if outcome.grouped else "per site, stratified by class",
        "method": repr(est.algorithm_),
        "chosen because": est.choice_.why,
        "time": f"{outcome.seconds:.0f} s on {platform.machine()}",
        "nestfed": f"{__version__}, torch {torch.__version__}",
    }
    return Page(
        f"{outcome.target}: {len(est.sites_.names)} sites",
        " ".join([headline(outcome), *est.hints_]),
        tables=[
            Table("Comparison", columns, rows, note, [_best_row(outcome)]),
            site_table,
            sites_table(_named(outcome)),
        ],
        curves=curves(histories, [*metric_names, "loss"][:3]),
        figures=_figures(outcome),
        facts=facts,
        settings={type(est).__name__: {k: str(v) for k, v in est.get_params().items()}},
    )


def _best_row(outcome: Outcome) -> int:
    metric = find(outcome.metric)
    return int(np.argmax([metric.signed(one.values[metric.name]) for one in outcome.trained]))


def _named(outcome: Outcome) -> Any:
    return replace(outcome.estimator.sites_, classes=outcome.classes)


def _on(one: Trained, mine: np.ndarray, outcome: Outcome) -> float | None:
    """Return a model's metric on a site's own rows; of local training, of the site's own model."""
    if not mine.any():
        return None
    n = int(outcome.owner[mine][0])
    scores = one.scores[n] if one.name == "every site alone" else one.scores
    return find(outcome.metric)(scores[mine], outcome.labels[mine])


def _figures(outcome: Outcome) -> list[Figure]:
    """Return the ROC curve, the precision-recall curve and the reliability of the probabilities."""
    if len(outcome.classes) > 2:
        return []
    from sklearn.metrics import precision_recall_curve, roc_curve

    roc, pr = [], []
    for one in outcome.trained:
        if one.scores.ndim == 1:
            fpr, tpr, _ = roc_curve(outcome.labels, one.scores)
            precision, recall, _ = precision_recall_curve(outcome.labels, one.scores)
            roc.append(Line(one.name, fpr.tolist(), tpr.tolist()))
            pr.append(Line(one.name, recall[::-1].tolist(), precision[::-1].tolist()))
    roc.append(Line("chance", [0.0, 1.0], [0.0, 1.0], "dashed"))
    a, b = outcome.estimator.calibration_
    chance = 1 / (1 + np.exp(-(a * outcome.best.scores + b)))
    edges = np.quantile(chance, np.linspace(0, 1, min(9, 2 + len(chance) // 40)))
    place = np.clip(np.searchsorted(edges, chance, side="right") - 1, 0, len(edges) - 2)
    told = [
        (chance[place == i].mean(), outcome.labels[place == i].mean())
        for i in range(len(edges) - 1)
        if (place == i).any()
    ]
    reliability = [
        Line("predicted and seen", [float(p) for p, _ in told], [float(s) for _, s in told], "points"),
        Line("perfect", [0.0, 1.0], [0.0, 1.0], "dashed"),
    ]
    return [
        Figure("ROC curve", "false positive rate", "true positive rate", roc, unit=True),
        Figure("Precision and recall", "recall", "precision", pr, unit=True),
        Figure("Are the probabilities right?", "predicted", "seen", reliability, unit=True),
    ]


def model_card(outcome: Outcome) -> str:
    """Return the model card: what the model is for, what it was made of, how well it does and where it may fail."""
    est = outcome.estimator
    columns, rows = results(outcome)
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))
    counts = est.sites_.counts
    sites = "\n".join(
        f"| {name} | {int(c.sum())} | {' | '.join(str(int(k)) for k in c)} |"
        for name, c in zip(est.sites_.names, counts)
    )
    heads = " | ".join(f"{outcome.target} = {c}" for c in outcome.classes)
    split = f"whole values of `{outcome.grouped}`" if outcome.grouped else "single rows, by class"
    gaps = int(est.scale_.gaps.sum())
    poor = [n for n, c in zip(est.sites_.names, counts) if c.min() < 5]
    thin = f"\n- Almost no examples of the rarer class at: {', '.join(poor)}." if poor else ""
    inputs = ", ".join(f"`{f}`" for f in est.scale_.features[:40]) + (" …" if len(est.scale_.features) > 40 else "")
    shape = "a linear score" if not est.hidden else f"a fully connected network with layers of {list(est.hidden)}"
    probability = (
        "Its scores become probabilities by Platt's method on the training rows."
        if est.kind != "classify"
        else "Its probabilities are those of cross-entropy."
    )
    return f"""# Model card: {outcome.target}

{headline(outcome)}

## What it is

{shape.capitalize()}, trained for {BEST[outcome.metric]} by {est.choice_.name} over {len(est.sites_.names)} sites, {est.rounds}
rounds of {est.q} local steps. Only sums and model parameters would leave a site. {probability}
Positive class: {outcome.classes[-1] if len(outcome.classes) == 2 else "none, there are " + str(len(outcome.classes))}.

## What it was trained on

| site | training rows | {heads} |
| --- | --- | {" | ".join("---" for _ in outcome.classes)} |
{sites}

Test rows were set aside at every site first ({split}): {outcome.rows["test"]} rows. {outcome.rows["of these for tuning"]} of the
{outcome.rows["training"]} training rows were used to choose the step size. Missing values are filled with the mean of all
sites; {gaps} features also tell that they were missing. Values beyond five deviations count as that far.

Inputs: {inputs}

## How well it does

{table}

Every way of training had the same trials, batch size and rounds. Within sites: the mean over sites of the metric on
their own test rows.

## Where it may fail

- Nothing is known about sites, times or people unlike those above: test rows came from the same sites.
- A score that ranks well over all sites may do so by telling the sites apart: compare with the column "within sites".
- Correlations, not causes; whoever acts on the score changes what it was trained on.{thin}
- Not a medical device, and not examined for fairness between groups of people.

## How to use it

```console
$ nestfed predict MODEL new.csv
```

`model/model.pt2` (torch.export) maps the raw inputs above, in this order, NaN where missing, to probabilities;
`model/model.safetensors` holds the parameters. Made with nestfed {__version__}, torch {torch.__version__}.
"""
