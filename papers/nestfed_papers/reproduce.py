"""A figure or table of a paper with one command: runs, records, verdicts on the claims, a report."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from nestfed.algorithms import METHODS
from nestfed.core import NestfedError
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record
from nestfed.experiment.compare import compare
from nestfed.experiment.run import DIVERGED
from nestfed.experiment.spec import Experiment
from nestfed.experiment.tune import number, pauses, search_space, trial_rounds
from nestfed.report.drawing import pyplot
from nestfed.report.machine import describe
from nestfed.report.page import size
from nestfed.report.plot import curves, overview
from nestfed.report.summary import MethodResult
from nestfed_papers.reproductions.base import (
    BUDGETS,
    Budget,
    Case,
    Evidence,
    Reproduction,
    Run,
    Verdict,
    Workshop,
    reached,
    spread,
)
from nestfed_papers.reproductions.figures import training_loss

if TYPE_CHECKING:
    from nestfed.report.page import Curves, Page

CORES = 2
"""The machine that times are told for."""
START = 1.5
"""Processor seconds until a job has loaded its data and judged its start, in a worker that has loaded torch for others before."""
VALIDATION = 0.3
"""What a trial's evaluation costs of a run's, which has the test data to judge too."""


def find(name: str) -> Reproduction:
    """Return a reproduction by its name."""
    from nestfed_papers.reproductions.papers import REPRODUCTIONS

    if name not in REPRODUCTIONS:
        near = difflib.get_close_matches(name, REPRODUCTIONS, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else "`nestfed reproduce --list` shows them."
        raise NestfedError(f"There is no reproduction {name!r}; {hint}")
    return REPRODUCTIONS[name]


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
    """Carry out a reproduction, or what of it is not done yet; return what was found, and where it is.

    Runs are in `out`/runs, where figures and tables that need the same ones share them. `only` names cases.
    """
    from nestfed.report.summary import page_of_comparison

    found = find(name)
    pyplot()  # better now than after hours
    amount = found.at(budget, seeds)
    if only:
        if unknown := [data for data in only if data not in [case.data for case in found.cases]]:
            raise NestfedError(f"{name} has no case {unknown[0]!r}; it has {', '.join(c.data for c in found.cases)}.")
        amount = replace(amount, cases=tuple(only))
    place = out / f"{name}-{budget}"
    place.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    folders: dict[str, Path] = {}
    pages: dict[str, Page] = {}
    experiments: dict[str, Experiment] = {}
    for case in found.chosen(amount):
        experiment = case.build(amount)
        folder = out / _folder(case, amount, experiment)
        folders[case.data], experiments[case.data] = folder, experiment

        def told(sentence: str, data: str = case.data) -> None:
            tell(f"{data}: {sentence}")

        parts = _carry_out(case, experiment, amount, folder, workers, told)
        runs += [run for part in parts for run in _records(case, part)]
        _draw(case, parts, place)
        pages[case.data] = page_of_comparison(parts[0].folder, parts[0].metric, parts[0].outcomes)
    numbers: dict[str, Any] = {}
    if found.produce is not None:
        tell("figures")
        numbers = found.produce(Workshop(place, budget, folders, experiments, amount.seeds))
    spent = {data: sum(map(_seconds, _recorded(folder))) for data, folder in folders.items()}
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


def _digest(experiment: Experiment, budget: Budget, case: Case) -> str:
    """Return a short name of all that decides the runs of a case, but for the number of seeds."""
    told = [experiment.resolved(), experiment.methods, budget.trials, case.splits]
    told += [budget.trial_rounds] if 0 < budget.trial_rounds < experiment.run.rounds else []
    told += [budget.trial_seeds, budget.stopping] if (budget.trial_seeds, budget.stopping) != (1, True) else []
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:10]


def outdated(evidence: Evidence) -> list[str]:
    """Return the cases whose settings have changed since they were run."""
    found = find(evidence.name)
    budget = found.at(evidence.budget)
    runs = {case.data: _folder(case, budget, case.build(budget)) for case in found.chosen(budget)}
    told = evidence.meta.get("folders", {})
    return [data for data in evidence.data() if data not in runs or told.get(data) != str(runs[data])]


def departs(evidence: Evidence) -> str:
    """Return what differs from the paper: as we say it now, or, for settings that have changed, as it was said then."""
    return evidence.meta["departs"] if outdated(evidence) else find(evidence.name).at(evidence.budget).departs


def _folder(case: Case, budget: Budget, experiment: Experiment) -> Path:
    """Return where a case's runs are, below the directory of all reproductions."""
    return Path("runs") / f"{case.experiment}-{_digest(experiment, budget, case)}"


class Part(NamedTuple):
    """One comparison of a case: the only one, or that on one of its test sets."""

    experiment: Experiment
    folder: Path
    metric: str
    outcomes: Sequence[MethodResult]


def _carry_out(
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
            found.append(Run.of(history, part.metric, training=training, diverged=diverged, **about))
    return found


def _draw(case: Case, parts: Sequence[Part], place: Path) -> None:
    histories: dict[str, list[Sequence[Record]]] = {}
    for part in parts:
        for o in part.outcomes:
            histories.setdefault(o.method, []).extend(o.histories)
    curves(histories, parts[0].metric, place / f"{slug(case.data)}.png", case.data)


def slug(text: str) -> str:
    """Return a name for a file."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text.lower()).split())


def _machine(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the versions and the machine of the runs, which may be older than this report."""
    told = next((path for folder in folders for path in sorted(folder.rglob("seed-*/machine.json"))), None)
    return describe() if told is None else json.loads(told.read_text(encoding="utf-8"))


def _recorded(folder: Path) -> list[Path]:
    """Return the records of all runs; sites that train alone are in the record of their run."""
    return [path for path in folder.rglob("record.jsonl") if not path.parent.name.startswith("client-")]


def _seconds(record: Path) -> float:
    rows = read_record(record)
    return float(rows[-1]["seconds"]) if rows else 0.0


# ---------------------------------------------------------------------------------------------------------
# What was found, in words and tables


def verdicts(evidence: Evidence) -> list[tuple[str, Verdict]]:
    """Return every claim of a reproduction with what became of it."""
    return [(claim.text, claim.verdict(evidence)) for claim in find(evidence.name).claims]


def published(evidence: Evidence, data: str) -> tuple[Mapping[str, float], float | None]:
    """Return what the paper gives for a case, and the higher target."""
    case = next((c for c in find(evidence.name).cases if c.data == data), None)
    return (case.published, case.higher) if case else ({}, None)


def rows(evidence: Evidence, data: str) -> list[dict[str, Any]]:
    """Return a case's table: for every method the outcome, the published value, and what targets cost.

    Where nothing was published the target is the lowest of the methods' final means, which all of them reach.
    """
    values, higher = published(evidence, data)
    methods = evidence.methods(data)
    means = {m: fmean(evidence.finals(data, m)) for m in methods}
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
                "to_published": reached(runs, min(means.values()) if known is None else known),
                "to_higher": None if higher is None else reached(runs, higher),
                "also": {k: {"mean": fmean(v), "sd": spread(v)} for k, v in others.items() if v},
                "finals": finals,
            }
        )
    return table


def _offered(evidence: Evidence, data: str) -> dict[str, dict[str, Sequence[float]]]:
    """Return the numbers that each method could choose from, of step sizes and of whatever had at least three."""
    found = find(evidence.name)
    budget = found.at(evidence.budget)
    case = next((c for c in found.chosen(budget) if c.data == data), None)
    if case is None or data in outdated(evidence):
        return {}
    grids = {method: table.get("grid", {}) for method, table in case.build(budget).methods.items()}
    return {
        method: {
            k: given
            for i, (k, given) in enumerate(grid.items())
            if isinstance(given, list) and (i == 0 or len(given) > 2) and all(isinstance(v, int | float) for v in given)
        }
        for method, grid in grids.items()
    }


def _setting(value: Any, offered: Sequence[float]) -> str:
    """Return a setting as text, marked if it is at the end of what was on offer; a schedule is a table."""
    if isinstance(value, Mapping):
        return f"({', '.join(f'{k} {v:.3g}' for k, v in value.items())})"
    ends = {max(offered): " (largest)", min(offered): " (smallest)"} if len(offered) > 1 else {}
    return f"{value}{ends.get(value, '')}"


def cost(found: Mapping[str, Any] | None, what: str) -> str:
    """Return what a target cost, as text: mean ± deviation, and how many seeds reached it if not all."""
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
    from nestfed.report.html import write

    return write(page(evidence, place, pages or {}), place / "report.html")


def page(evidence: Evidence, place: Path, pages: Mapping[str, Page]) -> Page:
    """Return the report as data."""
    from nestfed.report.page import Claim, Image, Page, Table

    found, several = find(evidence.name), len(evidence.data()) > 1
    tables, blocks, shown = [], [], []
    for data in evidence.data():
        table = rows(evidence, data)
        best = max(range(len(table)), key=lambda i: table[i]["mean"])
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
    facts = {
        "reproduction": f"{evidence.name}, budget {evidence.budget}",
        "seeds": str(meta["seeds"]) if evidence.runs else "",
        "differs from the paper": departs(evidence),
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
        "evaluation at which a seed had reached the target, of all clients together; – means that none did."
        + (" A run that diverged counts with the last model that was evaluated before." if diverged else "")
    )


def _curves(evidence: Evidence, data: str) -> Curves:
    from nestfed.report.summary import curves_of_runs

    # The loss that a meta-learner records is not the same quantity for all methods.
    meta = any(run.training is not None for run in evidence.runs if run.data == data)
    return curves_of_runs(histories(evidence, data), [evidence.metric(data), *([] if meta else ["loss"])], data)


def histories(evidence: Evidence, data: str) -> dict[str, list[list[Record]]]:
    """Return the runs of a case as histories, by method, as far as the small records tell them."""
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
    """Draw a reproduction's curves against rounds from its records, and the training loss where the paper draws it."""
    cases = {data: histories(evidence, data) for data in evidence.data()}
    metric = evidence.metric(evidence.data()[0])
    return overview(cases, [metric, "loss"] if find(evidence.name).losses else [metric], path)


def summary(evidence: Evidence) -> str:
    """Return one sentence on the claims."""
    outcomes = [v.outcome for _, v in verdicts(evidence)]
    told = [f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)]
    return f"Budget {evidence.budget}; {len(outcomes)} claim{'s' * (len(outcomes) != 1)}: {', '.join(told)}."


# ---------------------------------------------------------------------------------------------------------
# What it needs


def minutes(found: Reproduction, budget: str) -> float:
    """Estimate a budget's minutes on two cores, tuning included, from measured seconds per round and evaluation."""
    from nestfed_papers.reproductions.papers import COSTS

    amount = found.at(budget)
    total = amount.minutes * 60 * CORES
    for case in found.chosen(amount):
        experiment = case.build(amount)
        price = COSTS[amount.swap.get(case.experiment, case.experiment)]
        for name in experiment.methods:
            variant = experiment.for_method(name)
            run, times = variant.run, METHODS[variant.algorithm.name].evaluations
            trained, processes = _trial_rounds(experiment, name, amount)
            if case.splits:
                trained, processes = trained * amount.seeds, processes * amount.seeds
            judged = VALIDATION * (trained / run.every + processes) + amount.seeds * (run.rounds / run.every + 1)
            trained += amount.seeds * run.rounds
            share = getattr(experiment.problem, "test_tasks", 600) / 600
            total += (
                trained * price.round * times * amount.factors.get(case.data, amount.factor)
                + judged * price.evaluation * share
            )
            total += (processes + amount.seeds) * START
    return total / 60 / CORES


def _trial_rounds(experiment: Experiment, method: str, budget: Budget) -> tuple[float, int]:
    """Return how many rounds all trials of a method take together, and how many processes."""
    space = search_space(experiment, method)
    if all(d.single() for d in space.values()):
        return 0.0, 0
    start = number(space, budget.trials)
    run = experiment.for_method(method).run
    rounds = trial_rounds(experiment.for_method(method), budget.trial_rounds)
    stops = [*(pauses(rounds, run.every) if budget.stopping else []), rounds]
    done, total, processes = 0, 0.0, 0
    for i, stop in enumerate(stops):
        alive = math.ceil(start / 2**i) * budget.trial_seeds
        total += alive * (stop - done)
        processes += alive if stop > done else 0
        done = stop
    return total, processes


def listing() -> list[list[str]]:
    """Return a row for every reproduction: name, what it is, data, time at each budget, memory."""
    from nestfed_papers.reproductions.papers import REPRODUCTIONS

    table = []
    for found in REPRODUCTIONS.values():
        memory = " / ".join(f"{found.budgets[budget].memory:g}" for budget in BUDGETS)
        table.append(
            [
                found.name,
                found.title,
                ", ".join(found.needs) or "none",
                *(_time(minutes(found, budget)) for budget in BUDGETS),
                f"{memory} GB",
            ]
        )
    return table


def _time(value: float) -> str:
    if value < 90:
        return f"{max(1, round(value))} min"
    return f"{value / 60:.0f} h" if value < 60 * 72 else f"{value / 60 / 24:.0f} days"
