"""From an experiment and one site's own data to the objects that its round needs, and to what it may tell of them.

Before the first round every site tells `Facts`: counts, names of columns and classes, and for every feature of a table
the count and the sum of its known values. The coordinator adds them up to a `Plan`, asks for the sums of squared
differences from the common mean, and sends the finished plan to all. Later a site tells only `tally`: counts of
scores, or sums of right answers and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.data.encoding import Facts, Plan
from nestfed.data.partition import Summary
from nestfed.data.tables import load_table
from nestfed.experiment.build import Assembly, Metrics, assemble, judged, labelled
from nestfed.experiment.prepare import Held, PartitionSpec, Prepared, prepare
from nestfed.experiment.spec import Experiment
from nestfed.metrics import ScoreHistogram
from nestfed.problems.objective import Labelled

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a site's examples are."""

    n: int
    """Its number among the clients."""
    file: str = ""
    """Its own table; otherwise it holds part n of the experiment's data set."""


@dataclass(frozen=True)
class Own:
    """A site's examples as they are in its file, training and the rest apart."""

    prepared: Prepared
    features: tuple[str, ...]
    """Empty for images, which are ready."""
    classes: tuple[str, ...]


def own(experiment: Experiment, place: Place) -> Own:
    """Read a site's file and set its own test examples aside."""
    spec = replace(experiment.data, name="", file=place.file)
    if not spec.target:
        raise NestfedError(f"data.target must name the column of {place.file} that is to be predicted.")
    table = load_table(
        Path(place.file), spec.target, columns=spec.columns, drop=spec.drop, classes=spec.classes or None
    )
    images = table.x.dtype == np.uint8
    raw: Callable[[np.ndarray], Tensor] | None = None if images else lambda x: torch.from_numpy(np.array(x))
    made = prepare(spec, PartitionSpec("pooled"), experiment.run.seed, scaling=raw)
    names = ("negative", "positive") if spec.binary or spec.positive else table.classes
    return Own(made, () if images else table.features, names)


def facts(experiment: Experiment, place: Place) -> Facts:
    """Return what a site tells before the first round."""
    if not isinstance(experiment.problem, Labelled):
        return Facts()
    if not place.file:
        made = _divided(experiment)
        rows = _part(made, place.n)
        positives = int((made.y[rows] == 1).sum())
        names = tuple(map(str, range(made.classes)))
        return Facts(len(rows), positives, tuple(made.x.shape[1:]), names)
    mine = own(experiment, place)
    x, y = mine.prepared.x, mine.prepared.y
    counts = {"examples": len(y), "positives": int((y == 1).sum()), "classes": mine.classes}
    if not mine.features:
        return Facts(shape=tuple(x.shape[1:]), **counts)  # type: ignore[arg-type]
    values = x.numpy().astype(np.float64)
    there = np.isfinite(values)
    return Facts(
        shape=tuple(x.shape[1:]),
        features=mine.features,
        known=there.sum(0).astype(np.int64),
        total=np.where(there, values, 0.0).sum(0),
        **counts,  # type: ignore[arg-type]
    )


def spread(experiment: Experiment, place: Place, plan: Plan) -> np.ndarray:
    """Return a site's sums of squared differences from the common mean."""
    mine = own(experiment, place)
    values = plan.align(mine.prepared.x.numpy(), mine.features)
    squares: np.ndarray = (np.where(np.isfinite(values), values - plan.mean, 0.0) ** 2).sum(0)
    return squares


# ---------------------------------------------------------------------------------------------------------
# The objects


@dataclass(frozen=True)
class Made:
    """An experiment as objects for one site, and what it may tell of a model."""

    assembly: Assembly
    tally: Callable[[Any], Arrays]


def at_site(experiment: Experiment, place: Place, plan: Plan) -> Made:
    """Return the objects of a site."""
    if not isinstance(experiment.problem, Labelled):
        return Made(assemble(experiment), lambda model: {})
    if place.file:
        mine = own(experiment, place)
        prepared = mine.prepared
        if mine.features:
            prepared = _scaled(prepared, lambda x: plan.scale(x.numpy(), mine.features))
        rows = prepared.parts[0]
        held = [prepared.test, prepared.validation]
    else:
        prepared = _divided(experiment)
        rows = _part(prepared, place.n)
        held = [_share(h, place.n, plan.clients) for h in (prepared.test, prepared.validation)]
    # Only this site's number is ever drawn from, so all others may stand for the same rows.
    prepared = replace(prepared, parts=[rows] * plan.clients, names=[str(n) for n in range(plan.clients)])
    if not bool((prepared.y[rows] == 1).any()):
        prepared = _with_phantom(prepared)
    assembly = labelled(experiment, prepared, plan.p, experiment.run.seed)
    return Made(assembly, lambda model: _tally(model, prepared, held))


def at_coordinator(experiment: Experiment, plan: Plan) -> Assembly:
    """Return the objects of the coordinator, who has no labelled examples and so evaluates nothing there."""
    if not isinstance(experiment.problem, Labelled):
        return assemble(experiment)
    # Two rows of zeros stand for examples that the coordinator must not have: the model needs their shape only.
    x, y = torch.zeros((2, *plan.shape)), torch.tensor([0, 1])
    rows = [np.arange(2)] * plan.clients
    summary = Summary(np.zeros((0, 0), np.int64), (), ())
    nobody = Prepared(x, y, rows, [], Held(x[:0], y[:0]), None, len(plan.classes), None, summary)
    return labelled(experiment, nobody, plan.p, experiment.run.seed)


def _divided(experiment: Experiment) -> Prepared:
    return prepare(
        experiment.data, experiment.partition, experiment.run.seed, own_test=experiment.run.evaluate == "clients"
    )


def _part(prepared: Prepared, n: int) -> np.ndarray:
    if not 0 <= n < len(prepared.parts):
        raise NestfedError(f"The experiment divides its data set into {len(prepared.parts)} parts; there is no {n}.")
    return prepared.parts[n]


def _scaled(prepared: Prepared, scale: Callable[[Tensor], Tensor]) -> Prepared:
    def held(some: Held | None) -> Held | None:
        return None if some is None else replace(some, x=scale(some.x))

    test = held(prepared.test) or prepared.test
    return replace(prepared, x=scale(prepared.x), test=test, validation=held(prepared.validation))


def _share(held: Held | None, n: int, clients: int) -> Held | None:
    """Return the examples set aside that this site evaluates on: its own, or every N-th of common ones."""
    if held is None:
        return None
    rows = held.parts[n] if held.parts else np.arange(n, len(held.y), clients)
    return Held(held.x[rows], held.y[rows])


def _with_phantom(prepared: Prepared) -> Prepared:
    """Add a client that nobody asks, with one positive: a site without positives teaches nothing, but is welcome."""
    x = torch.cat([prepared.x, torch.zeros_like(prepared.x[:1])])
    y = torch.cat([prepared.y, torch.ones_like(prepared.y[:1])])
    parts = [*prepared.parts, np.array([len(prepared.y)])]
    return replace(prepared, x=x, y=y, parts=parts, names=[*prepared.names, "nobody"])


# ---------------------------------------------------------------------------------------------------------
# Metrics


def _tally(model: Callable[[Tensor], Tensor], prepared: Prepared, held: Sequence[Held | None]) -> Arrays:
    """Count scores by class (of a binary problem, only bins that hold any), or add up right answers and losses."""
    told: Arrays = {}
    for prefix, some in zip(("", "val_"), held):
        if some is None or not len(some.y):
            continue
        scores = torch.cat([model(prepared.ready(part)) for part in some.x.split(1000)])
        logits, labels = scores.double().numpy(), some.y.numpy()
        if logits.ndim == 2:
            values = judged(logits, labels)
            told |= {f"{prefix}sum.{k}": np.array(v * len(labels)) for k, v in values.items()}
            told[f"{prefix}sum.examples"] = np.array(float(len(labels)))
            continue
        counted = ScoreHistogram.of(logits, labels)
        bins = np.flatnonzero(counted.positives + counted.negatives)
        told[f"{prefix}histogram"] = np.stack([bins, counted.positives[bins], counted.negatives[bins]]).astype(
            np.uint32
        )
        told[f"{prefix}unscored"] = np.array(counted.unscored, np.uint32)
    return told


BINS = 4096
MOST = 2**31


def refuse_tally(told: Mapping[str, np.ndarray]) -> str:
    """Return what is wrong with a site's tally, or nothing."""
    for name, value in told.items():
        kind = name.removeprefix("val_")
        if kind == "histogram":
            if value.dtype != np.uint32 or value.ndim != 2 or len(value) != 3 or value.shape[1] > BINS:
                return f"its {name} is no table of bins and counts."
            if len(np.unique(value[0])) != value.shape[1] or (value[0] >= BINS).any() or (value[1:] >= MOST).any():
                return f"its {name} has bins or counts that cannot be."
        elif kind == "unscored":
            if value.dtype != np.uint32 or value.ndim:
                return f"its {name} is no count."
        elif kind.startswith("sum."):
            if value.dtype != np.float64 or value.ndim or np.isinf(value):
                return f"its {name} is no sum."
        else:
            return f"it sent {name}, which nobody asked for."
    return ""


def pool(told: Sequence[Mapping[str, np.ndarray]]) -> Metrics:
    """Return the metrics over all sites from what each told."""
    found: Metrics = {}
    for prefix in ("", "val_"):
        histograms = [_histogram(t, prefix) for t in told if f"{prefix}histogram" in t]
        if histograms:
            whole = histograms[0]
            for other in histograms[1:]:
                whole = whole + other
            auroc, ap = whole.auroc(), whole.average_precision()
            values = {"auroc": auroc.value, "ap": ap.value, "auroc_error": auroc.error, "ap_error": ap.error}
            found |= {prefix + k: v for k, v in values.items()}
        sums = [t for t in told if f"{prefix}sum.examples" in t]
        total = sum(float(t[f"{prefix}sum.examples"]) for t in sums)
        if total:
            names = [k for k in sums[0] if k.startswith(f"{prefix}sum.") and not k.endswith(".examples")]
            for k in names:
                found[prefix + k.removeprefix(f"{prefix}sum.")] = sum(float(t.get(k, np.nan)) for t in sums) / total
    return found


def _histogram(told: Mapping[str, np.ndarray], prefix: str) -> ScoreHistogram:
    bins, positives, negatives = told[f"{prefix}histogram"].astype(np.int64)
    counts = np.zeros((2, BINS), np.int64)
    counts[0, bins], counts[1, bins] = positives, negatives
    return ScoreHistogram(counts[0], counts[1], None, int(told.get(f"{prefix}unscored", np.array(0))))
