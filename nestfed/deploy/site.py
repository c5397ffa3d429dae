"""Build the objects of a site from the experiment and its own data, and compute what the site may share.

Before the first round every site sends `Facts`: counts, classes, and for a table the `Sums` of its training rows. The
coordinator adds them up (`merge`), asks for the sums of squared differences from the common mean (`spread`), and sends
the complete `Agreement` to all (`finish`). For metrics a site sends only a tally: counts of scores, or sums of correct
predictions and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Metric, NestfedError
from nestfed.data import encoding
from nestfed.data.clients import Totals
from nestfed.data.encoding import NO_TABLE, Schema, Sums, TableEncoding
from nestfed.data.partition import Summary
from nestfed.experiment.build import Assembly, Metrics, assemble, labelled, scored
from nestfed.experiment.prepare import Held, PartitionSpec, Prepared, as_table, divide, load_examples, prepare
from nestfed.experiment.spec import Experiment
from nestfed.metrics import ScoreHistogram, ScoreTotals, pooled
from nestfed.problems.objective import Labelled

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a site's examples are."""

    n: int
    """The client's number."""
    file: str = ""
    """The site's own table; empty = part n of the experiment's dataset."""


@dataclass(frozen=True)
class Facts:
    """What a site shares before the first round: counts and sums of its training examples, no rows."""

    examples: int = 0
    positives: int = 0
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    sums: Sums = Sums((), 0, np.zeros(0, np.int64), np.zeros(0))
    """The sums of a table; empty if the inputs are not scaled."""


@dataclass(frozen=True)
class Agreement:
    """What all sites agree on besides the experiment."""

    clients: int
    shape: tuple[int, ...] = ()
    """The shape of a model's input."""
    classes: tuple[str, ...] = ()
    p: float = 0.0
    """The share of positives in the mixture of all sites."""
    encoding: TableEncoding = NO_TABLE
    totals: Totals = Totals(0, 0, 0)
    """The rows of all sites that made the agreement."""


def merge(facts: Mapping[str, Facts], clients: int, by_examples: bool = False) -> Agreement:
    """Return the agreement except for the scaling; the sites' names appear in errors."""
    (first, model), *rest = facts.items()
    for name, other in rest:
        tables = bool(model.sums.schema), bool(other.sums.schema)
        alike = len(model.shape) == len(other.shape) == 1 if all(tables) else model.shape == other.shape
        if tables[0] != tables[1] or not alike:
            raise NestfedError(
                f"Sites {first} and {name} hold examples of different kinds or shapes "
                f"({model.shape} and {other.shape}): all sites must use tables with the same columns, or parts of one dataset."
            )
        if other.classes != model.classes:
            raise NestfedError(
                f"Sites {first} and {name} have different classes ({', '.join(model.classes)}; "
                f"{', '.join(other.classes)}): list them in data.classes of the experiment."
            )
    # The share of positives in the mixture that the objective averages over, as in `Prepared.positive_rate`.
    rows = [f.examples if by_examples else 1 for f in facts.values()]
    shares = [f.positives / max(f.examples, 1) for f in facts.values()]
    p = sum(weight * share for weight, share in zip(rows, shares)) / max(sum(rows), 1)
    totals = Totals(len(facts), sum(f.positives for f in facts.values()), sum(f.examples for f in facts.values()))
    found = Agreement(clients, model.shape, model.classes, p, totals=totals)
    if not model.sums.schema:
        return found
    table = len(model.shape) == 1
    made = encoding.merge(_sums(facts), mark_gaps=table)
    return replace(found, encoding=made, shape=(len(made.inputs),) if table else model.shape)


def finish(agreement: Agreement, squares: Sequence[np.ndarray], facts: Mapping[str, Facts]) -> Agreement:
    """Return the agreement with the common deviations."""
    return replace(agreement, encoding=encoding.finish(agreement.encoding, squares, _sums(facts)))


def _sums(facts: Mapping[str, Facts]) -> dict[str, Sums]:
    return {f"Site {name}": f.sums for name, f in facts.items()}


@dataclass(frozen=True)
class SiteExamples:
    """A site's unscaled examples, split into training and held-out ones."""

    prepared: Prepared
    schema: Schema
    """Empty for images, which need no encoding."""
    classes: tuple[str, ...]


def own_examples(experiment: Experiment, place: Place) -> SiteExamples:
    """Read a site's file and split off its test examples."""
    spec = replace(experiment.data, name="", file=place.file)
    whole, test = load_examples(spec)
    images = whole.x.dtype == np.uint8
    raw: Callable[[np.ndarray], Tensor] | None = None if images else lambda x: torch.from_numpy(np.array(x))
    made = divide(spec, whole, test, PartitionSpec("pooled"), experiment.run.seed, scaling=raw)
    names = ("negative", "positive") if spec.binary or spec.positive else whole.classes
    return SiteExamples(made, () if images else as_table(whole)[1], names)


def facts(experiment: Experiment, place: Place) -> Facts:
    """Return what a site shares before the first round."""
    if not isinstance(experiment.problem, Labelled):
        return Facts()
    if not place.file:
        made = _divided(experiment)
        rows = _part(made, place.n)
        positives = int((made.y[rows] == 1).sum())
        names = tuple(map(str, range(made.classes)))
        return Facts(len(rows), positives, tuple(made.x.shape[1:]), names)
    mine = own_examples(experiment, place)
    x, y = mine.prepared.x, mine.prepared.y
    found = Facts(len(y), int((y == 1).sum()), tuple(x.shape[1:]), mine.classes)
    return replace(found, sums=Sums.of(x.numpy(), mine.schema)) if mine.schema else found


def spread(experiment: Experiment, place: Place, agreement: Agreement) -> np.ndarray:
    """Return a site's sums of squared differences from the common mean."""
    mine = own_examples(experiment, place)
    return agreement.encoding.squares(mine.prepared.x.numpy(), mine.schema, place.file)


# ---------------------------------------------------------------------------------------------------------
# Objects


@dataclass(frozen=True)
class Made:
    """The objects of one site, and the function that counts a model's scores."""

    assembly: Assembly
    tally: Callable[[Any], Arrays]


def at_site(experiment: Experiment, place: Place, agreement: Agreement) -> Made:
    """Return the objects of a site."""
    if not isinstance(experiment.problem, Labelled):
        return Made(assemble(experiment), lambda model: {})
    if place.file:
        mine = own_examples(experiment, place)
        prepared = mine.prepared
        if mine.schema:
            prepared = _scaled(prepared, lambda x: agreement.encoding(x.numpy(), mine.schema, place.file))
        rows = prepared.parts[0]
        held = [prepared.test, prepared.validation]
    else:
        prepared = _divided(experiment)
        rows = _part(prepared, place.n)
        held = [_share(h, place.n, agreement.clients) for h in (prepared.test, prepared.validation)]
    # Only this client is ever sampled, so the others can have the same rows.
    prepared = replace(prepared, parts=[rows] * agreement.clients, names=[str(n) for n in range(agreement.clients)])
    if experiment.problem.binary and not bool((prepared.y[rows] == 1).any()):
        prepared = _with_phantom(prepared)
    assembly = labelled(experiment, prepared, agreement.p, experiment.run.seed, agreement.totals)
    log_odds = experiment.problem.log_odds
    return Made(assembly, lambda model: _tally(model, prepared, held, log_odds))


def at_coordinator(experiment: Experiment, agreement: Agreement) -> Assembly:
    """Return the objects of the coordinator, which has no labelled examples and evaluates none."""
    if not isinstance(experiment.problem, Labelled):
        return assemble(experiment)
    if experiment.problem.several:
        raise NestfedError(f"{experiment.problem.name} cannot be deployed: sites count scores of one label only.")
    # Two rows of zeros replace the examples: the model needs only their shape.
    x, y = torch.zeros((2, *agreement.shape)), torch.tensor([0, 1])
    rows = [np.arange(2)] * agreement.clients
    summary = Summary(np.zeros((0, 0), np.int64), (), ())
    empty = Prepared(x, y, rows, [], Held(x[:0], y[:0]), None, len(agreement.classes), None, summary)
    return labelled(experiment, empty, agreement.p, experiment.run.seed, agreement.totals)


def _divided(experiment: Experiment) -> Prepared:
    return prepare(experiment.data, experiment.partition, experiment.run.seed)


def _part(prepared: Prepared, n: int) -> np.ndarray:
    if not 0 <= n < len(prepared.parts):
        raise NestfedError(
            f"The dataset has {len(prepared.parts)} parts, so the client must be 0 to {len(prepared.parts) - 1}, not {n}."
        )
    return prepared.parts[n]


def _scaled(prepared: Prepared, scale: Callable[[Tensor], Tensor]) -> Prepared:
    def held(some: Held | None) -> Held | None:
        return None if some is None else replace(some, x=scale(some.x))

    test = held(prepared.test) or prepared.test
    return replace(prepared, x=scale(prepared.x), test=test, validation=held(prepared.validation))


def _share(held: Held | None, n: int, clients: int) -> Held | None:
    """Return the held-out examples that this site evaluates: its own, or every N-th of the common ones."""
    if held is None:
        return None
    rows = held.parts[n] if held.parts else np.arange(n, len(held.y), clients)
    return Held(held.x[rows], held.y[rows])


def _with_phantom(prepared: Prepared) -> Prepared:
    """Add an unused client with one positive, so that a site without positives can take part."""
    x = torch.cat([prepared.x, torch.zeros_like(prepared.x[:1])])
    y = torch.cat([prepared.y, torch.ones_like(prepared.y[:1])])
    parts = [*prepared.parts, np.array([len(prepared.y)])]
    return replace(prepared, x=x, y=y, parts=parts, names=[*prepared.names, "phantom"])


# ---------------------------------------------------------------------------------------------------------
# Metrics


def _tally(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Sequence[Held | None], log_odds: bool
) -> Arrays:
    """Count scores by class (binary problems, non-empty bins only) and sum correct predictions and losses."""
    tally: Arrays = {}
    for prefix, some in zip(("", "val_"), held):
        if some is None or not len(some.y):
            continue
        totals = ScoreTotals.of(*scored(model, prepared, some), log_odds=log_odds)
        if totals.sums:
            tally |= {f"{prefix}sum.{k}": np.array(v) for k, v in totals.sums.items()}
            tally[f"{prefix}sum.examples"] = np.array(float(totals.examples))
        counted = totals.histogram
        if counted is None:
            continue
        bins = np.flatnonzero(counted.positives + counted.negatives)
        tally[f"{prefix}histogram"] = np.stack([bins, counted.positives[bins], counted.negatives[bins]]).astype(
            np.uint32
        )
        tally[f"{prefix}unscored"] = np.array(counted.unscored, np.uint32)
    return tally


BINS = 4096
MOST = 2**31


def tally_error(tally: Mapping[str, np.ndarray]) -> str:
    """Return what is wrong with a site's tally, or nothing."""
    for name, value in tally.items():
        kind = name.removeprefix("val_")
        if kind == "histogram":
            if value.dtype != np.uint32 or value.ndim != 2 or len(value) != 3 or value.shape[1] > BINS:
                return f"its {name} is not a table of bins and counts."
            if len(np.unique(value[0])) != value.shape[1] or (value[0] >= BINS).any() or (value[1:] >= MOST).any():
                return f"its {name} has invalid bins or counts."
        elif kind == "unscored":
            if value.dtype != np.uint32 or value.ndim:
                return f"its {name} is not a count."
        elif kind.startswith("sum."):
            if value.dtype != np.float64 or value.ndim or np.isinf(value):
                return f"its {name} is not a sum."
        else:
            return f"it sent {name}, which was not requested."
    return ""


def pool(tallies: Sequence[Mapping[str, np.ndarray]], metric: str | Metric = "") -> Metrics:
    """Return the metrics over all sites from their tallies; `metric` is that of `nestfed.metrics.judge`."""
    found: Metrics = {}
    for prefix in ("", "val_"):
        totals = [_totals(t, prefix) for t in tallies if f"{prefix}histogram" in t or f"{prefix}sum.examples" in t]
        if totals:
            found |= {prefix + k: v for k, v in pooled(totals, metric).items()}
    return found


def _totals(tally: Mapping[str, np.ndarray], prefix: str) -> ScoreTotals:
    """Read what `_tally` wrote."""
    start = f"{prefix}sum."
    sums = {k.removeprefix(start): float(v) for k, v in tally.items() if k.startswith(start)}
    examples = sums.pop("examples", 0.0)
    if f"{prefix}histogram" not in tally:
        return ScoreTotals(examples, sums, None)
    bins, positives, negatives = tally[f"{prefix}histogram"].astype(np.int64)
    counts = np.zeros((2, BINS), np.int64)
    counts[0, bins], counts[1, bins] = positives, negatives
    unscored = int(tally.get(f"{prefix}unscored", np.array(0)))
    return ScoreTotals(examples, sums, ScoreHistogram(counts[0], counts[1], None, unscored))
