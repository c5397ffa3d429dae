"""Build the objects of a site from the experiment and its own data, and the rows that queries describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Metric, NestfedError
from nestfed.data.encoding import Schema
from nestfed.data.partition import Summary
from nestfed.deploy.agree import Agreement
from nestfed.experiment.build import Assembly, Metrics, assemble, labelled, scored
from nestfed.experiment.prepare import Held, PartitionSpec, Prepared, as_table, divide, load_examples, prepare
from nestfed.experiment.spec import Experiment
from nestfed.files import write_atomically
from nestfed.problems.objective import Labelled
from nestfed.queries import SCORES, TEST, TRAINING, VALIDATION, Answers, Question, Rows
from nestfed.queries.scores import LOG_ODDS, LOGITS, RANKING, judged


@dataclass(frozen=True)
class Place:
    """Where a site's examples are."""

    n: int
    """The client's number."""
    file: str = ""
    """The site's own table; empty = part n of the experiment's dataset."""


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


def read_examples(experiment: Experiment, place: Place) -> SiteExamples:
    """Read a site's own examples, or the dataset of which it has a part."""
    if place.file:
        return own_examples(experiment, place)
    made = _divided(experiment)
    return SiteExamples(made, (), tuple(map(str, range(made.classes))))


Read = Callable[[Experiment, Place], SiteExamples]


def raw_rows(experiment: Experiment, place: Place, read: Read = read_examples) -> dict[str, Rows]:
    """Return a site's rows by part, before the sites have agreed on an encoding."""
    if not isinstance(experiment.problem, Labelled):
        return {}
    own, spec = read(experiment, place), experiment.data
    stated = not place.file or bool(spec.binary or spec.positive or spec.classes)

    def rows(held: Held) -> Rows:
        x = held.x.numpy()
        table = x if own.schema else None
        return Rows(x, held.y.numpy(), table=table, schema=own.schema, classes=own.classes, stated=stated)

    mine = own.prepared.parts[0] if place.file else _part(own.prepared, place.n)
    return _by_part(own.prepared, mine, place, 1 if place.file else experiment.partition.clients, rows)


def _by_part(
    prepared: Prepared, mine: np.ndarray, place: Place, clients: int, make: Callable[[Held], Rows]
) -> dict[str, Rows]:
    """Return what `make` makes of a site's training, test and validation examples."""
    n = place.n if not place.file else 0
    held = {TEST: _share(prepared.test, n, clients), VALIDATION: _share(prepared.validation, n, clients)}
    found = {TRAINING: make(Held(prepared.x[mine], prepared.y[mine]))}
    return found | {part: make(some) for part, some in held.items() if some is not None and len(some.y)}


WITHDRAWN = "withdrawn"
"""The file in a site's state folder that says that it has withdrawn."""


def withdraw(state: Path) -> str:
    """Mark a site as withdrawn; return what that means."""
    if not state.is_dir():
        raise NestfedError(f"{state} is not the state folder of a site: give the one in its node configuration.")
    write_atomically(
        state / WITHDRAWN, b"This site has withdrawn from its study. Delete this file to take part again.\n"
    )
    return (
        f"The site answers nothing from now on, except that it has withdrawn. Its earlier contributions stay in the model. "
        f"Delete {state / WITHDRAWN} to take part again."
    )


# ---------------------------------------------------------------------------------------------------------
# Objects


@dataclass(frozen=True)
class Made:
    """The objects of one site."""

    assembly: Assembly
    rows: Callable[[str], Rows | None]
    """Returns the rows of a part as model inputs."""


def at_site(experiment: Experiment, place: Place, agreement: Agreement, read: Read = read_examples) -> Made:
    """Return the objects of a site."""
    if not isinstance(experiment.problem, Labelled):
        return Made(assemble(experiment), lambda part: None)
    mine = read(experiment, place)
    prepared = mine.prepared
    if place.file:
        if mine.schema:
            prepared = _scaled(prepared, lambda x: agreement.encoding(x.numpy(), mine.schema, place.file))
        rows = prepared.parts[0]
        held = {TEST: prepared.test, VALIDATION: prepared.validation}
    else:
        rows = _part(prepared, place.n)
        both = {TEST: prepared.test, VALIDATION: prepared.validation}
        held = {part: _share(h, place.n, agreement.clients) for part, h in both.items()}
    # Only this client is ever sampled, so the others can have the same rows.
    prepared = replace(prepared, parts=[rows] * agreement.clients, names=[str(n) for n in range(agreement.clients)])
    if experiment.problem.binary and not bool((prepared.y[rows] == 1).any()):
        prepared = _with_phantom(prepared)
    assembly = labelled(experiment, prepared, agreement.p, experiment.run.seed, agreement.totals)

    def rows_of(part: str) -> Rows | None:
        some = Held(prepared.x[rows], prepared.y[rows]) if part == TRAINING else held[part]
        if some is None or not len(some.y):
            return None

        def scores(x: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return scored(assembly.problem.bind(torch.from_numpy(x)), prepared, some)[0]

        return Rows(some.x.numpy(), some.y.numpy(), scores=scores, classes=agreement.classes)

    return Made(assembly, rows_of)


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

PREFIXES = {TEST: "", VALIDATION: "val_"}
"""How the names of metrics of a part begin."""


def score_kind(experiment: Experiment, agreement: Agreement) -> str:
    """Return what a model's outputs are."""
    if len(agreement.classes) != 2:
        return LOGITS
    assert isinstance(experiment.problem, Labelled)
    return LOG_ODDS if experiment.problem.log_odds else RANKING


def evaluation_questions(experiment: Experiment, agreement: Agreement) -> tuple[Question, ...]:
    """Return what sites are asked to judge the model by."""
    kind = score_kind(experiment, agreement)
    return tuple(Question(SCORES, part, {"kind": kind}) for part in PREFIXES)


def metrics_of(
    experiment: Experiment, agreement: Agreement, default: str | Metric, answers: Mapping[int, Answers]
) -> Metrics:
    """Return the metrics over all sites from their answers."""
    found: Metrics = {}
    kind, metric = score_kind(experiment, agreement), experiment.evaluation.metric or default
    reduce = "mean" if experiment.exchange.reduction.plain else "median"
    for one in evaluation_questions(experiment, agreement):
        replies = [answers[n][one.key] for n in sorted(answers) if one.key in answers[n]]
        if replies:
            found |= {PREFIXES[one.part] + k: v for k, v in judged(replies, kind, metric, reduce).items()}
    return found
