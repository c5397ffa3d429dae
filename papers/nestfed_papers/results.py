"""Collect the small records of reproductions, and write the results page from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.files import write_atomically
from nestfed_papers.page import cells, draw, header, length, rows, verdicts
from nestfed_papers.reproductions.base import Evidence
from nestfed_papers.reproductions.lookup import departs, outdated
from nestfed_papers.reproductions.papers import REPRODUCTIONS

RECORDS = "records.jsonl"
CURVES = "curves.png"


def collect(source: Path, records: Path, images: Path) -> list[str]:
    """Copy the records of reproductions (not of quick ones) into `records`/NAME and their figures; return the names."""
    names = []
    for path in sorted(source.glob(f"*/{RECORDS}")):
        evidence = Evidence.read(path)
        if evidence.budget == "quick" or (evidence.budget != "full" and _has_full(source, evidence.name)):
            continue
        place = records / evidence.name
        place.mkdir(parents=True, exist_ok=True)
        if (place / RECORDS).exists():
            evidence = _joined(Evidence.read(place / RECORDS), evidence)
        for figure in evidence.numbers.get("figures", ()):
            images.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.parent / figure, images / f"{evidence.name}-{figure}")
        evidence.write(place / RECORDS)
        names.append(evidence.name)
    return names


def _joined(old: Evidence, new: Evidence) -> Evidence:
    """Add the missing cases from the old records to the new ones, if both have the same budget."""
    kept = [data for data in old.data() if data not in new.data()]
    if old.budget != new.budget or not new.runs or not kept:
        return new
    runs = [*new.runs, *(run for run in old.runs if run.data in kept)]
    order = {case.data: i for i, case in enumerate(REPRODUCTIONS[new.name].cases)}
    runs.sort(key=lambda run: order.get(run.data, len(order)))
    parts = {
        k: {**{d: old.meta[k][d] for d in kept if d in old.meta[k]}, **new.meta[k]} for k in ("seconds", "folders")
    }
    return replace(new, runs=runs, meta={**new.meta, **parts})


def _has_full(source: Path, name: str) -> bool:
    return (source / f"{name}-full" / RECORDS).exists()


def figures(evidence: Evidence) -> list[str]:
    """Return the figures of a reproduction: its own, or the curves, which are drawn from the records."""
    return list(evidence.numbers.get("figures", ())) or [CURVES] * bool(evidence.runs)


def held(records: Path) -> dict[str, Evidence]:
    """Read all records in `records`, in the order of the table of reproductions."""
    places = {name: records / name / RECORDS for name in REPRODUCTIONS}
    return {name: Evidence.read(path) for name, path in places.items() if path.exists()}


def table(found: dict[str, Evidence]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return all outcomes: {experiment: {dataset: {method: {mean, sd, seeds, published, …}}}}."""
    keys = ("mean", "sd", "seeds", "published", "metric", "rounds", "trials", "to_published", "to_higher")
    return {
        name: {
            data: {row["method"]: {k: _rounded(row[k]) for k in keys} for row in rows(evidence, data)}
            for data in evidence.data()
        }
        for name, evidence in found.items()
        if evidence.runs
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return value


def markdown(found: dict[str, Evidence]) -> str:
    """Return the page."""
    judged = {name: verdicts(evidence) for name, evidence in found.items()}
    outcomes = [v.outcome for claims in judged.values() for _, v in claims]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes))
    text = [
        "# Results",
        "",
        "`nestfed results` writes this page from the records in `papers/records`; do not edit it. Each section shows what",
        "`nestfed reproduce NAME` found at the stated budget. Each method is tuned on validation data with the number of trials in its",
        "row, then run with every seed. Values are mean ± standard deviation over seeds. Where the paper gives one setting instead of a",
        "grid, that setting is used (0 trials). A diverged run counts with its last evaluated model.",
        "",
        "- **Costs** are those up to the first evaluation at which a seed reached the target, summed over all clients. Without a published",
        "  value, the target is the worst final mean. *(2 of 3)* means that two of three seeds reached it; – means that none did.",
        "- **Verdicts**: a difference is significant if the 95 % interval (Student's t) of the paired differences excludes 0. A claim",
        "  that the seeds neither contradict nor support is *not confirmed (within the spread)*. A claim without runs is *not testable",
        "  here*. Means decide whether published values are reached, and which method is first at an evaluation. The training loss is",
        "  that of the last three evaluated rounds; for meta-learners it is that of the last model after its inner step.",
        "- **Tuned to**: *(largest)* and *(smallest)* mark a choice at the end of its grid.",
        "- **Minutes** are those of rounds without evaluation, summed over all runs and trials. Each run had one core, at times shared with",
        "  other work, so they show what a reproduction costs and do not compare methods.",
        "- **loss_k** is a meta-learner's mean squared error on unseen tasks after k inner steps, **r2_k** the share of the targets'",
        "  mean square that it explains, and **ap** the average precision.",
        "- **Changed since these runs**: variance-reduced methods clip the corrected estimate instead of both of its gradients (Acc-FCSG-M",
        "  on CIFAR-10 and Omniglot, FMGDA on CIFAR-10, STEM and FAFED on WikiText-2), and clients that train alone draw batches by their",
        "  own number (`local` on eICU and heart disease). A repetition will differ there.",
        "",
        f"{len(outcomes)} statements (the papers' claims, and whether we reach their values) on {len(found)} figures and tables: {counts}."
        if outcomes
        else "Nothing has been run yet.",
        "",
    ]  # fmt: skip
    for name, reproduction in REPRODUCTIONS.items():
        text += [f"## {name}", "", f"{reproduction.title}.", ""]
        if name not in found:
            text += [f"Not run yet: `nestfed reproduce {name}`.", ""]
            continue
        text += _section(found[name])
        for claim, verdict in judged[name]:
            text.append(f"- {claim}: **{verdict.outcome}**. {verdict.figures}")
        text.append("")
    return "\n".join(text)


def _section(evidence: Evidence) -> list[str]:
    meta = evidence.meta
    text = []
    facts = [f"Budget {evidence.budget}"]
    if evidence.runs:
        minutes = sum(meta["seconds"].values()) / 60
        split = any(case.splits for case in REPRODUCTIONS[evidence.name].cases)
        seeds = f"{meta['seeds']} " + ("test sets, all methods tuned on each" if split else "seeds")
        facts += [seeds, f"{minutes:.0f} minutes of rounds, tuning included"]
    facts.append(meta["machine"])
    label, differences = departs(evidence)
    differs = f" {label}: {differences}" if differences else ""
    old = outdated(evidence)
    changed = f" **Settings have changed since: {', '.join(old)}.**" if old else ""
    text += [f"{'; '.join(facts)}.{differs}{changed}", ""]
    for data in evidence.data():
        lines = rows(evidence, data)
        text += [f"**{data}** ({length(lines)})", ""]
        text += _table(header(evidence, data), [cells(row, evidence, data) for row in lines])
    for figure in figures(evidence):
        text += [f"![{evidence.name}](figures/{evidence.name}-{figure})", ""]
    return text


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "| --- " * len(columns) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def write(source: Path, records: Path, page: Path) -> list[str]:
    """Collect the records in `source`, write `records`/results.json and the page, and return the names on it."""
    if not records.is_dir():
        raise NestfedError(f"{records} is not a directory; run this from the root of the repository.")
    collect(source, records, page.parent / "figures")
    found = held(records)
    for name, evidence in found.items():
        if CURVES in figures(evidence):
            draw(evidence, page.parent / "figures" / f"{name}-{CURVES}")
    write_atomically(records / "results.json", (json.dumps(table(found), indent=1) + "\n").encode())
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, markdown(found).encode())
    return list(found)
