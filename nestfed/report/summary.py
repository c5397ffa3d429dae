"""Build a report from the directories of runs. It only reads records and runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nestfed.core import Metric, NestfedError
from nestfed.engine.record import COSTS, last_known, read
from nestfed.engine.round import Record
from nestfed.metrics import find
from nestfed.report.page import Cell, Curve, Curves, Figure, Image, Line, Page, Series, Table, size

History = Sequence[Record]
BY_CLIENT = "by-client.json"
"""The file of a run with the final model's metrics on each client's test data."""
TRAINING = ("loss", "drift")
COST_COLUMNS = ("rounds", "examples", "sent", "seconds")


@dataclass(frozen=True)
class MethodResult:
    """The result of one method in a comparison."""

    method: str
    chosen: Mapping[str, Any]
    """The settings that tuning chose."""
    trials: int
    histories: Sequence[Sequence[Record]]
    """One per seed."""
    diverged: Sequence[str] = ()
    """The errors of the seeds that diverged; their last evaluated model counts."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """The chosen step sizes that are the smallest or the largest of those tried."""

    def final(self, metric: str) -> list[float]:
        """Return the metric's last value for every seed."""
        return [last(h, metric) for h in self.histories]

    def divergence(self) -> str:
        """Return a sentence about the seeds that diverged, or nothing."""
        if not self.diverged:
            return ""
        return (
            f"{self.method} diverged with {len(self.diverged)} of {len(self.histories)} seeds; their last evaluated model "
            f"counts. {self.diverged[0]}"
        )


def in_words(settings: Mapping[str, Any], ends: Mapping[str, str], between: str = " ", equals: str = "=") -> str:
    """Return tuned settings as text, and mark step sizes at an end of those tried: eta=100.0 (largest)."""
    marks = {key: f" ({where})" for key, where in ends.items()}
    return between.join(f"{k.split('.')[-1]}{equals}{v}{marks.get(k, '')}" for k, v in settings.items())


def last(history: History, metric: str) -> float:
    """Return a metric's last recorded value."""
    value = last_known(history, metric)
    if value is None:
        known = sorted(set().union(*history) - {"round", "iteration"}) if history else []
        raise NestfedError(f"The records have no {metric!r}; they have {', '.join(known)}.")
    return value


def page_of_run(directory: Path, title: str = "") -> Page:
    """Return the report of one run, finished or not."""
    settings, history = _settings(directory), read(directory / "record.jsonl")
    if not history:
        raise NestfedError(f"{directory} contains no rounds yet; run it first.")
    method, metrics, end = _method_name(settings), _metrics([history], settings), history[-1]
    kinds = {"test": "", "validation": "val_"}
    curves = []
    for metric in metrics:
        named = {kind: series_of(kind, [history], prefix + metric) for kind, prefix in kinds.items()}
        curves.append(Curve(metric, [s for s in named.values() if s is not None]))
    training = [(name, series_of("training", [history], name)) for name in TRAINING]
    curves += [Curve(name, [series]) for name, series in training if series is not None]
    finals = [
        [metric, *(_number(last_known(history, prefix + metric)) for prefix in kinds.values())] for metric in metrics
    ]
    done = "" if (directory / "finished.json").exists() else f", unfinished ({settings['run']['rounds']} planned)"
    summary = (
        f"{end['round']} rounds{done}; {end['examples']:,} examples, {size(_sent(end))} sent, {end['seconds']:.3g} s."
    )
    return Page(
        title or f"{method} on {_subject(settings)}",
        summary,
        tables=[Table("Final values", ["metric", *kinds], finals)] if finals else [],
        curves=[Curves("Curves", curves)] if curves else [],
        figures=_score_figures({method: directory}),
        images=_pictures([directory]),
        facts=_facts({method: settings}, [settings["run"]["seed"]], [directory]),
        settings=settings,
    )


def page_of_comparison(
    directory: Path, metric: str | Metric, outcomes: Sequence[MethodResult], *, title: str = ""
) -> Page:
    """Return the report of a comparison (`nestfed.experiment.compare`) from its directory."""
    metric = find(metric)
    places = {o.method: _seed_directories(directory, o) for o in outcomes}
    first = {method: found[0] for method, found in places.items()}
    settings = {method: _settings(place) for method, place in first.items()}
    seeds = sorted({_settings(place)["run"]["seed"] for found in places.values() for place in found})
    runs = {o.method: o.histories for o in outcomes}
    return Page(
        title or f"{_count(len(outcomes), 'method')} on {_one(_subject(s) for s in settings.values())}",
        _conclusion(outcomes, metric, len(seeds)),
        tables=[
            final_table(runs, metric, _tuning_columns(outcomes)),
            target_table(runs, metric, metric.worst(fmean(o.final(metric.name)) for o in outcomes)),
        ],
        curves=[curves_of_runs(runs, _metrics_to_draw(runs, metric, next(iter(settings.values()))))],
        figures=[*_client_figures(places, outcomes, metric), *_score_figures(first)],
        images=_pictures(first.values()),
        facts=_facts(settings, seeds, list(first.values())),
        settings=_differences(settings),
    )


def _seed_directories(directory: Path, outcome: MethodResult) -> list[Path]:
    """Return the directories of a method's runs, one per history, in the order of their seeds."""
    found = sorted((directory / outcome.method).glob("seed-*"), key=lambda p: int(p.name.partition("-")[2]))
    if not found:
        raise NestfedError(f"{directory} contains no runs of {outcome.method}.")
    return found[: len(outcome.histories)]


def _conclusion(outcomes: Sequence[MethodResult], metric: Metric, seeds: int) -> str:
    """Return a sentence about the best method, and one about each method that diverged."""
    best = _best(outcomes, metric)
    result = f"{best.method}, {spread(best.final(metric.name))} over {_count(seeds, 'seed')}"
    return " ".join(
        [
            f"{metric.direction} mean {metric.name}: {result}.",
            *trade_off(outcomes, metric),
            *(o.divergence() for o in outcomes if o.diverged),
        ]
    )


def _tuning_columns(outcomes: Sequence[MethodResult]) -> dict[str, dict[str, Cell]]:
    """Return the columns about tuning, if any method was tuned."""
    if not any(o.trials for o in outcomes):
        return {}
    return {
        "trials": {o.method: o.trials for o in outcomes},
        "tuned to": {o.method: in_words(o.chosen, o.ends, ", ", " = ") for o in outcomes},
    }


def _metrics_to_draw(runs: Mapping[str, Sequence[History]], metric: Metric, settings: Mapping[str, Any]) -> list[str]:
    """Return the metric of the comparison, then all others, then loss and drift."""
    found = _metrics([h for histories in runs.values() for h in histories], settings)
    return [metric.name, *(m for m in found if m != metric.name), *TRAINING]


def comparison_table(outcomes: Sequence[MethodResult], metric: Metric) -> Table:
    """Return the table that a comparison prints: final values, rounds to the worst final mean, bytes and tuning.

    Beside the worst client's value it shows that of all clients together.
    """
    best, target = _best(outcomes, metric), metric.worst(fmean(o.final(metric.name)) for o in outcomes)
    together = _together(outcomes, metric)
    rows: list[list[Cell]] = []
    for o in outcomes:
        end, seeds = o.histories[0][-1], len(o.histories)
        hits = [hit["round"] for history in o.histories if (hit := reached(history, metric, target)) is not None]
        some = f" ({len(hits)} of {seeds})" if len(hits) < seeds else ""
        rows.append(
            [
                o.method,
                *(spread(o.final(name)) for name in (metric.name, *together)),
                f"{spread(hits, lambda v: f'{v:.3g}')}{some}" if hits else "–",
                size(_sent(end)),
                in_words(o.chosen, o.ends),
            ]
        )
    ends = [o.histories[0][-1] for o in outcomes]
    trials = f", {_span([o.trials for o in outcomes])} trials per method" if any(o.trials for o in outcomes) else ""
    note = (
        f"Mean ± standard deviation over {_count(len(outcomes[0].histories), 'seed')}; "
        f"{_span([e['round'] for e in ends])} rounds, {_span([e['examples'] for e in ends])} examples{trials}. "
        f"{metric.direction} mean {metric.name}: {best.method}."
    )
    columns = ["method", f"{metric.name} on test", *together, f"rounds to {target:.4f}", "sent", "tuned to"]
    sentences = [note, *trade_off(outcomes, metric), *(o.divergence() for o in outcomes if o.diverged)]
    return Table("", columns, rows, "\n".join(sentences), [outcomes.index(best)])


def _best(outcomes: Sequence[MethodResult], metric: Metric) -> MethodResult:
    """Return the method with the best mean."""
    return max(outcomes, key=lambda o: metric.signed(fmean(o.final(metric.name))))


def _together(outcomes: Sequence[MethodResult], metric: Metric) -> list[str]:
    """Return the metric of all clients together if this one is the worst client's, as a list of one name or none."""
    name = metric.name.removeprefix("worst_")
    known = all(last_known(history, name) is not None for o in outcomes for history in o.histories)
    return [name] if name != metric.name and known else []


def trade_off(outcomes: Sequence[MethodResult], metric: Metric) -> list[str]:
    """Return a sentence on what the best method gains for the worst client over the first, and what that costs."""
    (first, *_), best, together = outcomes, _best(outcomes, metric), _together(outcomes, metric)
    if not together or best is first:
        return []

    def difference(name: str) -> str:
        pairs = [b - a for a, b in zip(first.final(name), best.final(name), strict=True)]
        error = f" ± {stdev(pairs) / math.sqrt(len(pairs)):.3f}" if len(pairs) > 1 else ""
        return f"{fmean(pairs):+.3f}{error}"

    ends = [o.histories[0][-1] for o in (first, best)]
    times = _sent(ends[1]) / _sent(ends[0]) if _sent(ends[0]) else 1.0
    return [
        f"{best.method} against {first.method}: worst client's {together[0]} {difference(metric.name)}, all clients' "
        f"{difference(together[0])} (mean ± standard error of the seeds' differences), {times:.2g} times the bytes."
    ]


def _span(numbers: Sequence[float]) -> str:
    """Return the range of some whole numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@dataclass(frozen=True)
class Swept:
    """The results of a comparison at one point of a sweep."""

    settings: Mapping[str, Any]
    results: Sequence[MethodResult]


def sweep_table(points: Sequence[Swept], metric: Metric) -> Table:
    """Return one row for every point of a sweep and method; the best method of each point is highlighted."""
    keys = list(points[0].settings)
    rows: list[list[Cell]] = []
    best = []
    for point in points:
        means = [fmean(o.final(metric.name)) for o in point.results]
        best += [len(rows) + i for i, mean in enumerate(means) if mean == metric.best(means) and len(means) > 1]
        for o in point.results:
            costs = _costs([history[-1] for history in o.histories])
            at = [str(value) for value in point.settings.values()]
            rows.append([*at, o.method, spread(o.final(metric.name)), *costs, o.trials, in_words(o.chosen, o.ends)])
    seeds = len(points[0].results[0].histories)
    columns = [
        *(key.split(".")[-1] for key in keys),
        "method",
        f"{metric.name} on test",
        *COST_COLUMNS,
        "trials",
        "tuned to",
    ]
    note = f"Mean ± standard deviation over {_count(seeds, 'seed')}."
    note += " ".join(["", *(o.divergence() for point in points for o in point.results if o.diverged)])
    return Table(", ".join(keys), columns, rows, note.strip(), best)


def sweep_figure(points: Sequence[Swept], metric: Metric) -> Figure:
    """Return the mean of a metric against the first setting of a sweep, one line per method and other settings.

    Values that are not numbers are at 1, 2, ….
    """
    first, *others = points[0].settings
    values = list(dict.fromkeys(point.settings[first] for point in points))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {v: float(v) if numeric else float(i) for i, v in enumerate(values, 1)}
    lines: dict[str, dict[float, float]] = {}
    for point in points:
        for o in point.results:
            name = ", ".join([o.method, *(f"{k.split('.')[-1]}={point.settings[k]}" for k in others)])
            lines.setdefault(name, {})[places[point.settings[first]]] = fmean(o.final(metric.name))
    drawn = [Line(name, sorted(of), [of[x] for x in sorted(of)]) for name, of in lines.items()]
    note = "" if numeric else f"{first}: " + ", ".join(f"{i} is {v}" for i, v in enumerate(values, 1)) + "."
    return Figure(f"{metric.name} on test against {first}", first, metric.name, drawn, note)


# ------------------------------------------------------------------------------ parts that other reports use too


def series_of(name: str, histories: Sequence[History], metric: str) -> Series | None:
    """Return a metric's curve: the mean over seeds at the rounds that all seeds evaluated; None without such rounds."""
    rows = [{r["round"]: r for r in history if r.get(metric) is not None} for history in histories]
    shared = sorted(set.intersection(*(set(by_round) for by_round in rows))) if rows else []
    if not shared:
        return None
    at = {
        "round": [float(r) for r in shared],
        "examples": [fmean(one[r]["examples"] for one in rows) for r in shared],
        "bytes": [fmean(_sent(one[r]) for one in rows) for r in shared],
        "seconds": [fmean(one[r]["seconds"] for one in rows) for r in shared],
    }
    seeds = [[float(one[r][metric]) for r in shared] for one in rows]
    mean = [fmean(values) for values in zip(*seeds)]
    if len(seeds) == 1:
        return Series(name, at, mean)
    return Series(name, at, mean, [stdev(values) for values in zip(*seeds)], seeds)


def curves_of_runs(runs: Mapping[str, Sequence[History]], metrics: Sequence[str], title: str = "Curves") -> Curves:
    """Return the curves of several metrics, one series per method; the first metric is drawn large."""
    curves = []
    for metric in metrics:
        found = [series_of(method, histories, metric) for method, histories in runs.items()]
        if any(found):
            curves.append(Curve(metric, [s for s in found if s is not None]))
    several = any(len(histories) > 1 for histories in runs.values())
    note = "Lines are means over seeds; bands are ± one standard deviation. " if several else ""
    if any(c.metric == "loss" for c in curves):
        note += "The loss is each method's own objective; do not compare it between objectives."
    return Curves(title, curves, note.strip())


def final_table(
    runs: Mapping[str, Sequence[History]],
    metric: str | Metric,
    more: Mapping[str, Mapping[str, Cell]] | None = None,
) -> Table:
    """Return final values and total costs per method; `more` adds columns."""
    metric, more = find(metric), more or {}
    finals = {method: [last(h, metric.name) for h in histories] for method, histories in runs.items()}
    rows: list[list[Cell]] = []
    for method, histories in runs.items():
        added = [values.get(method) for values in more.values()]
        rows.append([method, spread(finals[method]), *_costs([h[-1] for h in histories]), *added])
    means = [fmean(values) for values in finals.values()]
    best = [i for i, mean in enumerate(means) if mean == metric.best(means)] if len(runs) > 1 else []
    columns = ["method", metric.name, *COST_COLUMNS, *more]
    return Table("Final values on test data", columns, rows, _seeds_note(runs), best)


def _seeds_note(runs: Mapping[str, Sequence[History]]) -> str:
    counts = {len(histories) for histories in runs.values()}
    if max(counts) == 1:
        return "One seed."
    seeds = "–".join(str(c) for c in sorted({min(counts), max(counts)}))
    return f"Mean ± standard deviation over {seeds} seeds."


def _costs(records: Sequence[Record]) -> list[Cell]:
    """Return the costs up to some records, one per seed, as the cells of `COST_COLUMNS`."""
    return [
        spread([r["round"] for r in records], _whole),
        spread([r["examples"] for r in records], _whole),
        spread([_sent(r) for r in records], size),
        spread([r["seconds"] for r in records], _seconds),
    ]


def target_table(runs: Mapping[str, Sequence[History]], metric: str | Metric, target: float) -> Table:
    """Return the cost of reaching a value per method: rounds, examples, bytes, seconds, and how many seeds reached it."""
    metric = find(metric)
    rows: list[list[Cell]] = []
    for method, histories in runs.items():
        hits = [hit for history in histories if (hit := reached(history, metric, target)) is not None]
        costs = _costs(hits) if hits else [None] * len(COST_COLUMNS)
        rows.append([method, *costs, f"{len(hits)} of {len(histories)}"])
    note = (
        "Costs up to the first evaluation that reaches the value, averaged over the seeds that reach it (last column)."
    )
    columns = ["method", *COST_COLUMNS, "seeds"]
    return Table(f"Cost of reaching {metric.name} {_number(target)}", columns, rows, note)


def reached(history: History, metric: str | Metric, target: float) -> Record | None:
    """Return the first record after round 0 whose metric is at least as good as the target."""
    metric = find(metric)
    return next((r for r in history if r["round"] and metric.reached(r.get(metric.name), target)), None)


def spread(values: Sequence[float], form: Callable[[float], str] = lambda v: f"{v:.4f}") -> str:
    """Return mean ± sample standard deviation as text; a deviation of 0 is omitted."""
    mean = form(fmean(values))
    return mean if len(values) < 2 or len(set(values)) == 1 else f"{mean} ± {form(stdev(values))}"


# ----------------------------------------------------------------------------------------------- settings


def _settings(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / "experiment.json").read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        raise NestfedError(f"{directory} contains no run: experiment.json is missing.") from None
    except ValueError as error:
        raise NestfedError(f"{directory / 'experiment.json'} cannot be read: {error}.") from error


def _method_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a run's method, with that of its server if it has one beside the method's own."""
    return "+".join(settings[section]["name"] for section in ("algorithm", "server") if section in settings)


def _described(table: Mapping[str, Any]) -> str:
    """Return a name and its options."""
    return ", ".join(f"{k} = {v}" if k != "name" else str(v) for k, v in _name_first(table))


def _warm_up(table: Mapping[str, Any]) -> str:
    """Return a warm-up in words."""
    names = [table[k] for k in ("algorithm", "server") if k in table]
    on = f", on {table['problem']['name']}" if "problem" in table else ""
    return f"the first {table['rounds']} rounds: {'; '.join(map(_described, names))}{on}"


def _facts(runs: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], places: Sequence[Path]) -> dict[str, str]:
    tables = list(runs.values())
    return {
        "Data": _one(t["data"]["name"] or t["data"].get("file") or "generated by the problem" for t in tables),
        "Clients": _one(f"{t['partition']['clients']}, split {t['partition']['kind']}" for t in tables),
        "Model": _one(t["model"]["name"] for t in tables),
        "Problem": _one(t["problem"]["name"] for t in tables),
        "Methods" if len(runs) > 1 else "Method": ", ".join(runs)
        if len(runs) > 1
        else _described(tables[0]["algorithm"]),
        **({"Server": servers} if (servers := _one(_described(t["server"]) for t in tables if "server" in t)) else {}),
        **({"Warm-up": warm} if (warm := _one(_warm_up(t["warm_up"]) for t in tables if "warm_up" in t)) else {}),
        "Training": _one(f"{t['run']['rounds']} rounds of {t['run']['q']} local steps" for t in tables),
        "Seeds": ", ".join(map(str, seeds)),
        **_machines(places),
    }


def _machines(places: Sequence[Path]) -> dict[str, str]:
    """Return the versions and machines that runs recorded."""
    known = [json.loads(p.read_text(encoding="utf-8")) for place in places if (p := place / "machine.json").exists()]
    names = {"Versions": "versions", "Machine": "machine"}
    return {label: _one(t[key] for t in known) or "not recorded" for label, key in names.items()}


def _subject(settings: Mapping[str, Any]) -> str:
    return str(settings["data"]["name"] or settings["problem"]["name"])


def _name_first(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(table.items(), key=lambda item: item[0] != "name")


def _one(texts: Any) -> str:
    """Return the distinct texts, joined."""
    return "; ".join(dict.fromkeys(t for t in texts if t))


def _differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings by table: first those that all methods share, then those of each method."""
    shown: dict[str, dict[str, Any]] = {}
    for section in dict.fromkeys(section for settings in runs.values() for section in settings):
        tables = {method: settings.get(section, {}) for method, settings in runs.items()}
        keys = list(dict.fromkeys(key for table in tables.values() for key in table))
        missing = object()
        same = [
            k for k in keys if len({json.dumps(t.get(k, str(missing)), sort_keys=True) for t in tables.values()}) == 1
        ]
        if same:
            shown[section] = {k: next(iter(tables.values()))[k] for k in same}
        for method, table in tables.items():
            if own := {k: v for k, v in _name_first(table) if k not in same}:
                shown[f"{section} of {method}"] = own
    return shown


def _metrics(histories: Sequence[History], settings: Mapping[str, Any]) -> list[str]:
    """Return the test metrics of records, starting with evaluation.metric."""
    keys = dict.fromkeys(k for history in histories for record in history for k, v in record.items() if v is not None)
    found = [k for k in keys if k not in COSTS and not k.startswith("val_")]
    found = [
        k for k in found if k.removesuffix("_error") not in found or not k.endswith("_error")
    ]  # error bounds are not metrics
    return sorted(found, key=lambda k: k != settings["evaluation"]["metric"])


def _score_figures(places: Mapping[str, Path]) -> list[Figure]:
    """Return the ROC and precision-recall curves of runs that have them."""
    kept = {
        name: json.loads((place / "roc.json").read_text(encoding="utf-8"))
        for name, place in places.items()
        if (place / "roc.json").exists()
    }
    if not kept:
        return []
    share = fmean(k["positives"] / (k["positives"] + k["negatives"]) for k in kept.values())
    note = f"Final model on test data{', first seed' if len(places) > 1 else ''}."
    figures = []
    for title, curve, area, x, y, chance in (
        ("ROC curve", "roc", "auroc", "false positive rate", "true positive rate", (0.0, 1.0)),
        ("Precision-recall curve", "pr", "ap", "recall", "precision", (share, share)),
    ):
        lines = [Line(f"{name} ({area} {k[area]:.4f})", k[curve]["x"], k[curve]["y"]) for name, k in kept.items()]
        figures.append(Figure(title, x, y, [*lines, Line("chance", (0.0, 1.0), chance, "dashed")], note, unit=True))
    return figures


def _client_figures(
    places: Mapping[str, Sequence[Path]], outcomes: Sequence[MethodResult], metric: Metric
) -> list[Figure]:
    """Return the worst client against all together, and every client's value, if the metric is the worst client's."""
    together = _together(outcomes, metric)
    if not together:
        return []
    (name,) = together
    points = []
    for o in outcomes:
        pairs = sorted(zip(o.final(name), o.final(metric.name)))
        points.append(Line(o.method, [a for a, _ in pairs], [b for _, b in pairs], "points"))
    figures = [
        Figure("Worst client against all clients", f"{name} of all clients", metric.name, points, "One point per seed.")
    ]
    found = {method: _by_client(runs, name) for method, runs in places.items()}
    if all(found.values()):
        first = next(iter(found.values()))
        order = sorted(first, key=lambda client: first[client])
        at = [float(i) for i in range(1, len(order) + 1)]
        lines = [Line(method, at, [values[c] for c in order], "points") for method, values in found.items()]
        note = f"Mean over seeds; clients in the order of {next(iter(found))}: {', '.join(order)}."
        figures.append(Figure(f"{name} by client", "client", name, lines, note))
    return figures


def _by_client(runs: Sequence[Path], name: str) -> dict[str, float]:
    """Return each client's mean over some runs; empty if a run has none, or for clients without a value."""
    if not all((run / BY_CLIENT).exists() for run in runs):
        return {}
    found = [json.loads((run / BY_CLIENT).read_text(encoding="utf-8")) for run in runs]
    values = {client: [of.get(client, {}).get(name) for of in found] for client in found[0]}
    return {client: fmean(known) for client, known in values.items() if None not in known}


def _pictures(places: Any) -> list[Image]:
    """Return the plot of the clients' examples, which is the same for all methods of a comparison."""
    path = next((p for place in places if (p := place / "clients.png").exists()), None)
    alt = "One bar per client; its length is the number of examples, its colours are the classes."
    return [Image("Examples by client", path.read_bytes(), alt)] if path else []


# ------------------------------------------------------------------------------------------------- numbers


def _sent(record: Record) -> int:
    return int(record["bytes_up"] + record["bytes_down"])


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
