"""Tables and verdicts of a reproduction, and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nestfed.engine.round import Record
from nestfed.experiment.choice import end
from nestfed.report import html
from nestfed.report.page import Claim, Curves, Image, Page, Table, size
from nestfed.report.plot import overview
from nestfed.report.summary import curves_of_runs
from nestfed_papers.reproductions.base import Evidence, Verdict, reached, spread
from nestfed_papers.reproductions.lookup import departs, find, outdated


def verdicts(evidence: Evidence) -> list[tuple[str, Verdict]]:
    """Return every claim of a reproduction with its verdict."""
    return [(claim.text, claim.verdict(evidence)) for claim in find(evidence.name).claims]


def published(evidence: Evidence, data: str) -> tuple[Mapping[str, float], float | None]:
    """Return the published values of a case, and the higher target."""
    case = next((c for c in find(evidence.name).cases if c.data == data), None)
    return (case.published, case.higher) if case else ({}, None)


def rows(evidence: Evidence, data: str) -> list[dict[str, Any]]:
    """Return a case's table: for every method the result, the published value, and the costs of the targets.

    Where nothing was published the target is the worst of the methods' final means, which all of them reach.
    """
    values, higher = published(evidence, data)
    methods = evidence.methods(data)
    means = {m: fmean(evidence.finals(data, m)) for m in methods}
    worst = evidence.metric(data).worst(means.values()) if means else math.nan
    also = find(evidence.name).also
    offered = _offered(evidence, data)
    table = []
    for method in methods:
        runs = evidence.of(data, method)
        finals = [r.final for r in runs]
        known = values.get(method)
        others = {k: [r.also[k] for r in runs if k in r.also] for k in also}
        table.append(
            {
                "method": method,
                "metric": runs[0].metric,
                "mean": means[method],
                "sd": None if math.isnan(spread(finals)) else spread(finals),
                "seeds": len(runs),
                "published": known,
                "difference": None if known is None else means[method] - known,
                "rounds": max(r.curve[-1].round for r in runs),
                "trials": runs[0].trials,
                "chosen": {
                    k: list(dict.fromkeys(_setting(r.chosen[k], offered.get(method, {}).get(k, [])) for r in runs))
                    for k in runs[0].chosen
                },
                "diverged": sum(r.diverged for r in runs),
                "to_published": reached(runs, worst if known is None else known),
                "to_higher": None if higher is None else reached(runs, higher),
                "also": {k: {"mean": fmean(v), "sd": spread(v)} for k, v in others.items() if v},
                "finals": finals,
            }
        )
    return table


def _offered(evidence: Evidence, data: str) -> dict[str, dict[str, Sequence[float]]]:
    """Return the values on each method's grid, for the first setting and for those with at least three values."""
    found = find(evidence.name)
    budget = found.at(evidence.budget)
    case = next((c for c in found.chosen(budget) if c.data == data), None)
    if case is None or data in outdated(evidence):
        return {}
    experiment = case.build(budget)
    grids = {method: experiment.grid(method) for method in experiment.methods}
    return {
        method: {
            k: given
            for i, (k, given) in enumerate(grid.items())
            if isinstance(given, list) and (i == 0 or len(given) > 2) and all(isinstance(v, int | float) for v in given)
        }
        for method, grid in grids.items()
    }


def _setting(value: Any, offered: Sequence[float]) -> str:
    """Return a setting as text, marked if it is at the end of its grid; a schedule is a table."""
    if isinstance(value, Mapping):
        return f"({', '.join(f'{k} {v:.3g}' for k, v in value.items())})"
    where = end(value, offered) if len(offered) > 1 and value in offered else None
    return f"{value}{f' ({where})' if where else ''}"


def cost(found: Mapping[str, Any] | None, what: str) -> str:
    """Return the cost of a target as text: mean ± deviation, and the number of seeds that reached it if not all."""
    if found is None:
        return ""
    if not found["reached"]:
        return "–"
    value = found[what]
    show = count if what == "round" else (size if what == "bytes" else lambda v: f"{v:,.0f}")
    text = show(value["mean"]) + (f" ± {show(value['sd'])}" if value["sd"] else "")
    return text if found["reached"] == found["seeds"] else f"{text} ({found['reached']} of {found['seeds']})"


def count(value: float) -> str:
    """Return a number of rounds."""
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def cells(row: Mapping[str, Any], evidence: Evidence, data: str) -> list[str]:
    """Return a row of a case's table as text, under `header`."""
    _, higher = published(evidence, data)
    spreads = "" if row["sd"] is None else f" ± {row['sd']:.4f}"
    known = "" if row["published"] is None else f"{row['published']:.4f}"
    difference = "" if row["difference"] is None else f"{row['difference']:+.4f}".replace("-", "−")
    extra = [f"{v['mean']:.4f}" + ("" if math.isnan(v["sd"]) else f" ± {v['sd']:.4f}") for v in row["also"].values()]
    first = [cost(row["to_published"], what) for what in ("round", "examples", "bytes")]
    second = [cost(row["to_higher"], what) for what in ("round", "examples", "bytes")] if higher is not None else []
    tuned = ", ".join(f"{k.split('.')[-1]} {' or '.join(v)}" for k, v in row["chosen"].items())
    fate = f" (diverged in {row['diverged']} of {row['seeds']})" if row["diverged"] else ""
    return [
        f"{row['method']}{fate}",
        f"{row['mean']:.4f}{spreads}",
        *([known, difference] if published(evidence, data)[0] else []),
        *extra,
        *first,
        *second,
        str(row["trials"]),
        tuned,
    ]


def header(evidence: Evidence, data: str) -> list[str]:
    """Return the columns of a case's table."""
    values, higher = published(evidence, data)
    table = rows(evidence, data)
    target = "its published value" if values else f"{table[0]['to_published']['target']:.4f}"
    above = [f"{what} to {higher:g}" for what in ("rounds", "examples", "bytes")] if higher is not None else []
    return [
        "method",
        f"{table[0]['metric']} on test",
        *(["published", "difference"] if values else []),
        *table[0]["also"],
        *(f"{what} to {target}" for what in ("rounds", "examples", "bytes")),
        *above,
        "trials",
        "tuned to",
    ]


def report(evidence: Evidence, place: Path, pages: Mapping[str, Page] | None = None) -> Path:
    """Write report.html from the records; `pages` are those of the single comparisons, for their figures."""
    return html.write(page(evidence, place, pages or {}), place / "report.html")


def page(evidence: Evidence, place: Path, pages: Mapping[str, Page]) -> Page:
    """Return the report as data."""
    found, several = find(evidence.name), len(evidence.data()) > 1
    tables, blocks, shown = [], [], []
    for data in evidence.data():
        table = rows(evidence, data)
        metric = evidence.metric(data)
        best = max(range(len(table)), key=lambda i: metric.signed(table[i]["mean"]))
        texts = [cells(row, evidence, data) for row in table]
        tables.append(Table(data, header(evidence, data), texts, _note(table), [best]))
        blocks.append(_curves(evidence, data))
    for name in evidence.numbers.get("figures", ()):
        shown.append(Image(name.removesuffix(".png"), (place / name).read_bytes(), f"{found.title} ({name})"))
    drawn = []
    for data, one in pages.items():
        prefix = f"{data}: " if several else ""
        drawn += [replace(figure, title=prefix + figure.title) for figure in one.figures]
        shown += [replace(image, title=prefix + image.title) for image in one.images]
    meta = evidence.meta
    label, differences = departs(evidence)
    facts = {
        "reproduction": f"{evidence.name}, budget {evidence.budget}",
        "seeds": str(meta["seeds"]) if evidence.runs else "",
        label.lower(): differences,
        "time": ", ".join(f"{d} {s / 60:.1f} minutes of rounds" for d, s in meta["seconds"].items()),
        "versions": meta["versions"],
        "machine": meta["machine"],
    }
    return Page(
        f"{evidence.name}: {found.title}",
        summary(evidence),
        [Claim(text, v.outcome, v.figures) for text, v in verdicts(evidence)],  # type: ignore[arg-type]
        tables,
        blocks,
        drawn,
        shown,
        {k: v for k, v in facts.items() if v},
    )


def length(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of rounds of a case, or its range."""
    least, most = (f([row["rounds"] for row in table]) for f in (min, max))
    return f"{most} rounds" if least == most else f"{least} to {most} rounds"


def _note(table: Sequence[Mapping[str, Any]]) -> str:
    diverged = any(row["diverged"] for row in table)
    return (
        f"Mean ± standard deviation over {table[0]['seeds']} seeds after {length(table)}. Costs are those of the first "
        "evaluation at which a seed reached the target, summed over all clients; – means none did."
        + (" A diverged run counts with its last evaluated model." if diverged else "")
    )


def _curves(evidence: Evidence, data: str) -> Curves:
    # The recorded loss of a meta-learner is not comparable between methods.
    meta = any(run.training is not None for run in evidence.runs if run.data == data)
    return curves_of_runs(histories(evidence, data), [evidence.metric(data).name, *([] if meta else ["loss"])], data)


def histories(evidence: Evidence, data: str) -> dict[str, list[list[Record]]]:
    """Return the recorded part of the histories of a case's runs, by method."""
    found: dict[str, list[list[Record]]] = {}
    for run in (r for r in evidence.runs if r.data == data):
        lines: list[Record] = [
            {
                "round": p.round,
                "examples": p.examples,
                "bytes_up": p.bytes,
                "bytes_down": 0,
                "seconds": p.seconds,
                "loss": p.loss,
                run.metric: p.value,
            }
            for p in run.curve
        ]
        found.setdefault(run.method, []).append(lines)
    return found


def draw(evidence: Evidence, path: Path) -> Path:
    """Draw a reproduction's curves against rounds from its records, and the training loss where the paper plots it."""
    cases = {data: histories(evidence, data) for data in evidence.data()}
    metric = evidence.metric(evidence.data()[0]).name
    return overview(cases, [metric, "loss"] if find(evidence.name).losses else [metric], path)


def summary(evidence: Evidence) -> str:
    """Return one sentence on the claims."""
    outcomes = [v.outcome for _, v in verdicts(evidence)]
    counts = [f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)]
    return f"Budget {evidence.budget}; {len(outcomes)} claim{'s' * (len(outcomes) != 1)}: {', '.join(counts)}."
