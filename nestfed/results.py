"""The page of results: small records collected from reproductions, and what is written from them alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.engine.checkpoint import write_atomically
from nestfed.reproduce import cells, header, length, rows, verdicts
from nestfed.reproductions.base import Evidence
from nestfed.reproductions.papers import REPRODUCTIONS

RECORDS = "records.jsonl"


def collect(source: Path, papers: Path, figures: Path) -> list[str]:
    """Copy the records of reproductions (not of quick ones) into `papers`/NAME and their figures; return the names."""
    names = []
    for path in sorted(source.glob(f"*/{RECORDS}")):
        evidence = Evidence.read(path)
        if evidence.budget == "quick" or (evidence.budget != "full" and _has_full(source, evidence.name)):
            continue
        place = papers / evidence.name
        place.mkdir(parents=True, exist_ok=True)
        for figure in evidence.numbers.get("figures", ()):
            figures.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.parent / figure, figures / f"{evidence.name}-{figure}")
        evidence.write(place / RECORDS)
        names.append(evidence.name)
    return names


def _has_full(source: Path, name: str) -> bool:
    return (source / f"{name}-full" / RECORDS).exists()


def held(papers: Path) -> dict[str, Evidence]:
    """Return the records that are in `papers`, in the order of the table of reproductions."""
    places = {name: papers / name / RECORDS for name in REPRODUCTIONS}
    return {name: Evidence.read(path) for name, path in places.items() if path.exists()}


def table(found: dict[str, Evidence]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return all outcomes: {experiment: {data set: {method: {mean, sd, seeds, published, …}}}}."""
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
        "Written by `nestfed results` from the records below `benchmarks/papers`; do not edit. Every section is the outcome of",
        "`nestfed reproduce NAME` at the budget that it states: each method tuned with the number of trials in its row, on validation",
        "data (see `nestfed.tuning`), then run with every seed; mean ± standard deviation over seeds. Costs are those of the",
        "first evaluation at which a seed had reached the target, of all clients together; – means that no seed did.",
        "A difference counts if the 95 % interval (Student's t) of its values seed by seed excludes 0. A run that diverged",
        "counts with the last model that was evaluated before. Methods without a grid in the paper are not tuned (0 trials).",
        "",
        f"{len(outcomes)} claims of {len(found)} figures and tables: {counts}." if outcomes else "Nothing has been run yet.",
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
    told = [f"Budget {evidence.budget}"]
    if evidence.runs:
        minutes = sum(meta["seconds"].values()) / 60
        told += [f"{meta['seeds']} seeds", f"{minutes:.0f} minutes of rounds by one process each, tuning included"]
    told.append(meta["machine"])
    departs = f" Differs from the paper: {meta['departs']}" if meta["departs"] else ""
    text += [f"{'; '.join(told)}.{departs}", ""]
    for data in evidence.data():
        lines = rows(evidence, data)
        text += [f"**{data}** ({length(lines)})", ""]
        text += _table(header(evidence, data), [cells(row, evidence, data) for row in lines])
    for figure in evidence.numbers.get("figures", ()):
        text += [f"![{evidence.name}](figures/{evidence.name}-{figure})", ""]
    return text


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "| --- " * len(columns) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def write(source: Path, papers: Path, page: Path) -> list[str]:
    """Collect what `source` holds, and write `papers`/results.json and the page; return the names that are in it."""
    if not papers.is_dir():
        raise NestfedError(f"{papers} is no directory; run this from the root of the project.")
    collect(source, papers, page.parent / "figures")
    found = held(papers)
    write_atomically(papers / "results.json", (json.dumps(table(found), indent=1) + "\n").encode())
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, markdown(found).encode())
    return list(found)
