"""Run a reproduction: tuning, runs with every seed, records, figures, a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nestfed.core import Metric, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record
from nestfed.experiment.compare import compare
from nestfed.experiment.run import DIVERGED
from nestfed.experiment.spec import Experiment
from nestfed.files import make_directory
from nestfed.report.drawing import pyplot
from nestfed.report.machine import describe
from nestfed.report.plot import curves
from nestfed.report.summary import MethodResult, page_of_comparison
from nestfed_papers.page import report
from nestfed_papers.reproductions.base import Budget, Case, Evidence, Run, Workshop
from nestfed_papers.reproductions.figures import training_loss
from nestfed_papers.reproductions.lookup import find, folder

if TYPE_CHECKING:
    from nestfed.report.page import Page


def reproduce(
    name: str,
    budget: str = "standard",
    seeds: int = 0,
    out: Path = Path("runs/reproduce"),
    *,
    only: Sequence[str] = (),
    workers: int | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> tuple[Evidence, Path]:
    """Run a reproduction, or resume it; return what it found, and its directory.

    Runs are in `out`/runs, where figures and tables that need the same runs share them. `only` names cases.
    """
    found = find(name)
    pyplot()  # fail now rather than after hours if it is not installed
    amount = found.at(budget, seeds)
    if only:
        if unknown := [data for data in only if data not in [case.data for case in found.cases]]:
            raise NestfedError(f"{name} has no case {unknown[0]!r}; it has {', '.join(c.data for c in found.cases)}.")
        amount = replace(amount, cases=tuple(only))
    place = out / f"{name}-{budget}"
    make_directory(place)
    runs: list[Run] = []
    folders: dict[str, Path] = {}
    pages: dict[str, Page] = {}
    experiments: dict[str, Experiment] = {}
    for case in found.chosen(amount):
        experiment = case.build(amount)
        place_of_runs = out / folder(case, amount, experiment)
        folders[case.data], experiments[case.data] = place_of_runs, experiment

        def tell_case(sentence: str, data: str = case.data) -> None:
            tell(f"{data}: {sentence}")

        parts = _compare(case, experiment, amount, place_of_runs, workers, tell_case)
        runs += [run for part in parts for run in _records(case, part)]
        _draw(case, parts, place)
        pages[case.data] = page_of_comparison(parts[0].folder, parts[0].metric, parts[0].outcomes)
    numbers: dict[str, Any] = {}
    if found.produce is not None:
        tell("figures")
        numbers = found.produce(Workshop(place, budget, folders, experiments, amount.seeds))
    spent = {data: sum(map(_seconds, folder.rglob("record.jsonl"))) for data, folder in folders.items()}
    meta = {
        **_machine(folders.values()),
        "seconds": spent,
        "seeds": amount.seeds,
        "departs": amount.departs,
        "folders": {data: str(folder.relative_to(out)) for data, folder in folders.items()},
    }
    evidence = Evidence(name, budget, runs, numbers, meta)
    evidence.write(place / "records.jsonl")
    report(evidence, place, pages)
    return evidence, place


class Part(NamedTuple):
    """One comparison of a case: the only one, or that on one of its test sets."""

    experiment: Experiment
    folder: Path
    metric: Metric
    outcomes: Sequence[MethodResult]


def _compare(
    case: Case,
    experiment: Experiment,
    budget: Budget,
    folder: Path,
    workers: int | None,
    tell: Callable[[str], None],
) -> list[Part]:
    names = list(experiment.methods)
    how: dict[str, Any] = {
        "trials": budget.trials,
        "trial_rounds": budget.trial_rounds,
        "trial_seeds": budget.trial_seeds,
        "stopping": budget.stopping,
        "extend": 0,  # the papers' grids
        "workers": workers,
        "tell": tell,
    }
    if not case.splits:
        return [Part(experiment, folder, *compare(experiment, names, budget.seeds, folder, **how))]
    parts = []
    for s in range(budget.seeds):
        split, place = experiment.with_overrides({"data.split": s, "run.seed": s}), folder / f"split-{s}"
        parts.append(Part(split, place, *compare(split, names, 1, place, **how)))
    return parts


def _records(case: Case, part: Part) -> list[Run]:
    found = []
    for o in part.outcomes:
        variant = part.experiment.for_method(o.method).with_overrides(o.chosen)
        for s, history in enumerate(o.histories, part.experiment.run.seed):
            place = part.folder / o.method / f"seed-{s}"
            about = {"data": case.data, "method": o.method, "seed": s, "chosen": dict(o.chosen), "trials": o.trials}
            diverged = (place / DIVERGED).exists()
            training = None if diverged else training_loss(variant.with_overrides({"run.seed": s}), place)
            found.append(Run.of(history, part.metric.name, training=training, diverged=diverged, **about))
    return found


def _draw(case: Case, parts: Sequence[Part], place: Path) -> None:
    histories: dict[str, list[Sequence[Record]]] = {}
    for part in parts:
        for o in part.outcomes:
            histories.setdefault(o.method, []).extend(o.histories)
    curves(histories, parts[0].metric.name, place / f"{slug(case.data)}.png", case.data)


def slug(text: str) -> str:
    """Return a name for a file."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text.lower()).split())


def _machine(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the versions and the machine of the runs, which may be older than this report."""
    found = next((path for folder in folders for path in sorted(folder.rglob("seed-*/machine.json"))), None)
    return describe() if found is None else json.loads(found.read_text(encoding="utf-8"))


def _seconds(record: Path) -> float:
    rows = read_record(record)
    return float(rows[-1]["seconds"]) if rows else 0.0
