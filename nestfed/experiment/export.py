"""Export a run, a comparison or a sweep for papers: CSV, LaTeX and PDF."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.engine.record import metrics_of, read
from nestfed.engine.round import Record
from nestfed.experiment.compare import FILE as COMPARISON
from nestfed.experiment.compare import Comparison
from nestfed.experiment.sweep import FILE as SWEEP
from nestfed.experiment.sweep import Sweep
from nestfed.files import write_atomically
from nestfed.report import plot
from nestfed.report.page import Table
from nestfed.report.summary import page_of_run
from nestfed.report.text import as_csv, as_tex


@dataclass(frozen=True)
class _Content:
    """What can be exported."""

    table: Table
    records: Sequence[tuple[Mapping[str, Any], Sequence[Record]]]
    """The history of every run, with what identifies it."""
    draw: Mapping[str, Callable[[Path], Path]]
    """The plots by name."""


def export(place: Path, out: Path, *, csv: bool = False, tex: bool = False, pdf: bool = False) -> list[Path]:
    """Write table.csv and records.csv, table.tex, and one PDF per plot; return the files."""
    if not (csv or tex or pdf):
        raise NestfedError("Nothing to export: choose --csv, --tex or --pdf.")
    content = _content(place)
    out.mkdir(parents=True, exist_ok=True)
    texts = {}
    if csv:
        texts = {"table.csv": as_csv(content.table), "records.csv": as_csv(_records(content))}
    if tex:
        texts["table.tex"] = as_tex(content.table)
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    drawn = [draw(out / f"{name}.pdf") for name, draw in content.draw.items()] if pdf else []
    return [*(out / name for name in texts), *drawn]


def _content(place: Path) -> _Content:
    if (place / SWEEP).exists():
        swept = Sweep.read(place)
        records = [({**settings, **who}, history) for settings, one in swept.points for who, history in _runs(one)]
        return _Content(swept.table(), records, {"sweep": swept.draw})
    if (place / COMPARISON).exists():
        found = Comparison.read(place)
        runs = {o.method: o.histories for o in found.results}
        return _Content(found.table(), list(_runs(found)), _curves(runs, found.title))
    if not (place / "record.jsonl").exists():
        raise NestfedError(f"{place} contains no run, no finished comparison and no finished sweep.")
    return _run(place)


def _run(place: Path) -> _Content:
    history = read(place / "record.jsonl")
    if (place / "experiment.json").exists():
        page = page_of_run(place)
        name = str(json.loads((place / "experiment.json").read_text(encoding="utf-8"))["algorithm"]["name"])
        tables = list(page.tables)
    else:  # a directory of `simulate`
        name, tables = place.name, []
    if not history:
        raise NestfedError(f"{place} contains no rounds yet; run it first.")
    final = Table("Final values", ["metric", "value"], [[k, f"{v:.6g}"] for k, v in metrics_of(history[-1]).items()])
    return _Content(tables[0] if tables else final, [({}, history)], _curves({name: [history]}, ""))


def _runs(comparison: Comparison) -> Iterator[tuple[Mapping[str, Any], Sequence[Record]]]:
    for result in comparison.results:
        for seed, history in zip(comparison.seeds, result.histories):
            yield {"method": result.method, "seed": seed}, history


def _curves(runs: Mapping[str, Sequence[Sequence[Record]]], title: str) -> dict[str, Callable[[Path], Path]]:
    names = dict.fromkeys(k for histories in runs.values() for h in histories for r in h for k in metrics_of(r))

    def draw(metric: str) -> Callable[[Path], Path]:
        return lambda path: plot.curves(runs, metric, path, title)

    return {metric: draw(metric) for metric in names if not metric.endswith("_error")}


def _records(content: _Content) -> Table:
    """Return all records as one table."""
    rows = [{**who, **record} for who, history in content.records for record in history]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table("records", columns, [[row.get(column) for column in columns] for row in rows])
