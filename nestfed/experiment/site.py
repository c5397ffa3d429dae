"""Build the objects of a site from the experiment and its own data, and the rows that queries describe."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nestfed import models
from nestfed.core import Metric, NestfedError
from nestfed.data.encoding import Schema
from nestfed.data.faults import FILE, Faults
from nestfed.data.partition import Summary
from nestfed.data.readers import read_table
from nestfed.data.schema import TableSchema, folded
from nestfed.data.sources import Dataset
from nestfed.data.tables import as_datasets
from nestfed.experiment.build import Assembly, Metrics, assemble, labelled, scored
from nestfed.experiment.prepare import (
    PATIENT,
    DataSpec,
    Held,
    PartitionSpec,
    Prepared,
    as_table,
    divide,
    load_examples,
    prepare,
    roles_of,
)
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import FINAL
from nestfed.experiment.target import Target
from nestfed.problems.objective import Labelled
from nestfed.problems.regress import in_units
from nestfed.queries import SCORES, TEST, TRAINING, VALIDATION, Answers, Question, Rows, at_hand
from nestfed.queries.agreement import Agreement
from nestfed.queries.errors import ERRORS, judged_errors
from nestfed.queries.influence import NUMBERS
from nestfed.queries.newton import network_parameters, ridge_regression
from nestfed.queries.scores import LOG_ODDS, RANKING, judged

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a site's examples are."""

    n: int
    """The client's number."""
    file: str = ""
    """The site's own table; empty = part n of the experiment's dataset."""
    name: str = ""
    """The site's name, for a split that leaves one site out."""


Table = tuple[Dataset, Dataset | None]
"""The content of a site's file, and its own test set, if it has one."""


@dataclass(frozen=True)
class SiteExamples:
    """A site's examples, split into training and held-out ones."""

    prepared: Prepared
    schema: Schema
    """Empty for images, which need no encoding."""
    classes: tuple[str, ...]
    stated: bool
    """Whether the experiment states the classes; otherwise they come from this site's rows."""

    def encoded(self, agreement: Agreement, where: str) -> Prepared:
        """Return the examples as model inputs; `where` names the table in errors."""
        if not self.schema:
            return self.prepared
        return _scaled(self.prepared, lambda x: agreement.encoding(x.numpy(), self.schema, where))

    def rows(self) -> dict[str, Rows]:
        """Return the rows by part, before the sites have agreed on an encoding."""

        def rows(held: Held) -> Rows:
            x = held.x.numpy()
            table = x if self.schema else None
            return Rows(x, held.y.numpy(), table=table, schema=self.schema, classes=self.classes, stated=self.stated)

        return {part: rows(held) for part, held in parts_of(self.prepared).items()}


def parts_of(prepared: Prepared) -> dict[str, Held]:
    """Return the examples of one site by part, without empty parts."""
    mine = prepared.parts[0]
    held = {TEST: prepared.test, VALIDATION: prepared.validation}
    columns = {k: v[mine] for k, v in prepared.columns.items()}
    found = {TRAINING: Held(prepared.x[mine], prepared.y[mine], columns=columns)}
    return found | {part: some for part, some in held.items() if some is not None and len(some.y)}


def own_table(experiment: Experiment, file: str) -> tuple[Dataset, Dataset | None]:
    """Read a site's file."""
    whole, test = load_examples(replace(experiment.data, name="", file=file), experiment.schema)
    _reject_own_groups(experiment.schema, whole.table)
    return whole, test


def _reject_own_groups(given: TableSchema, found: TableSchema) -> None:
    """Reject columns whose categories this site groups by itself, as others might not."""
    grouped = [k for k, spec in found.columns.items() if (spec.prefix or spec.buckets) and k not in given.columns]
    if grouped:
        raise NestfedError(
            f"The categories of {', '.join(map(repr, grouped))} must be grouped alike at all sites: write [schema] into the "
            "experiment, which `nestfed schema` drafts at each site and `nestfed schema merge` joins, or drop them."
        )


def own_tables(experiment: Experiment, files: Mapping[str, str | Path]) -> dict[str, Dataset]:
    """Read the tables of all sites at hand, by name; columns are detected for all of them together."""
    faults, raw = Faults(FILE), []
    for name, file in files.items():
        with faults.noting():
            raw.append(replace(read_table(file, experiment.schema.form, experiment.schema.as_text), site=name))
    faults.check()
    data = replace(experiment.data, name="")
    return dict(zip(files, as_datasets(raw, roles_of(data), experiment.schema, faults)))


def examples_at(experiment: Experiment, place: Place, table: Table | None = None) -> SiteExamples:
    """Return a site's examples: those of its own file, or its part of the experiment's dataset.

    - `table`: the file's content, if it was read before.
    """
    if place.file:
        return divided(experiment, *(table or own_table(experiment, place.file)), site=place.name)
    prepared = _part(experiment, place.n)
    names = Target.of(experiment.data, tuple(map(str, range(prepared.classes)))).classes
    return SiteExamples(prepared, (), names, True)


def divided(experiment: Experiment, whole: Dataset, test: Dataset | None = None, site: str = "") -> SiteExamples:
    """Split a site's table into training and held-out examples; `site`: its name, for a split that leaves one out."""
    spec = replace(experiment.data, name="")
    images = whole.x.dtype == np.uint8
    raw: Callable[[np.ndarray], Tensor] | None = None if images else lambda x: torch.from_numpy(np.array(x))
    form = experiment.schema.date_format(spec.split_by)
    made = divide(spec, whole, test, PartitionSpec("pooled"), experiment.run.seed, scaling=raw, site=site, form=form)
    names = ("negative", "positive") if spec.binary or spec.positive else whole.classes
    stated = bool(spec.binary or spec.positive or spec.classes)
    return SiteExamples(made, () if images else as_table(whole)[1], names, stated)


def raw_rows(experiment: Experiment, place: Place) -> dict[str, Rows]:
    """Return a site's rows by part, before the sites have agreed on an encoding."""
    return examples_at(experiment, place).rows() if isinstance(experiment.problem, Labelled) else {}


# ---------------------------------------------------------------------------------------------------------
# Objects


@dataclass(frozen=True)
class Made:
    """The objects of one site."""

    assembly: Assembly
    rows: Callable[[str], Rows | None]
    """Returns the rows of a part as model inputs."""


def at_site(
    experiment: Experiment, place: Place, agreement: Agreement, examples: Callable[[], SiteExamples] | None = None
) -> Made:
    """Return the objects of a site; `examples` returns its examples, if they were read before."""
    if not isinstance(experiment.problem, Labelled):
        return Made(assemble(experiment), lambda part: None)
    own = examples_at(experiment, place) if examples is None else examples()
    return made_of(experiment, own.encoded(agreement, place.file), agreement)


def made_of(experiment: Experiment, own: Prepared, agreement: Agreement) -> Made:
    """Return the objects of a site, given its encoded examples."""
    rows = own.parts[0]
    # Only this client is ever sampled, so the others can have the same rows.
    prepared = replace(own, parts=[rows] * agreement.clients, names=[str(n) for n in range(agreement.clients)])
    assert isinstance(experiment.problem, Labelled)
    if experiment.problem.binary and not bool((prepared.y[rows] == 1).any()):
        prepared = _with_phantom(prepared)
    scale = agreement.center, agreement.unit
    assembly = labelled(experiment, prepared, agreement.p, experiment.run.seed, agreement.totals, scale)

    def rows_of(part: str) -> Rows | None:
        if (some := parts_of(own).get(part)) is None:
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
    classes = len(agreement.classes) or Target.of(experiment.data).outputs
    empty = Prepared(x, y, rows, [], Held(x[:0], y[:0]), None, classes, None, summary)
    scale = agreement.center, agreement.unit
    return labelled(experiment, empty, agreement.p, experiment.run.seed, agreement.totals, scale)


def _part(experiment: Experiment, n: int) -> Prepared:
    """Return part n of the experiment's dataset as the examples of one site."""
    prepared = prepare(experiment.data, experiment.partition, experiment.run.seed, experiment.schema)
    sites = len(prepared.parts)
    if not 0 <= n < sites:
        raise NestfedError(f"The dataset has {sites} parts, so the client must be 0 to {sites - 1}, not {n}.")
    test, validation = _share(prepared.test, n, sites), _share(prepared.validation, n, sites)
    return replace(prepared, parts=[prepared.parts[n]], test=test or prepared.test, validation=validation)


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
    target = Target.of(experiment.data, agreement.classes)
    assert isinstance(experiment.problem, Labelled)
    return RANKING if target.scores == LOG_ODDS and not experiment.problem.log_odds else target.scores


def evaluation_questions(
    experiment: Experiment, agreement: Agreement, parts: Sequence[str] = tuple(PREFIXES)
) -> tuple[Question, ...]:
    """Return what sites are asked to judge the model by."""
    kind = score_kind(experiment, agreement)
    if kind == NUMBERS:
        return tuple(Question(ERRORS, part) for part in parts)
    return tuple(Question(SCORES, part, {"kind": kind}) for part in parts)


def metrics_of(
    experiment: Experiment, agreement: Agreement, default: str | Metric, answers: Mapping[int, Answers],
    parts: Sequence[str] = tuple(PREFIXES),
) -> Metrics:  # fmt: skip
    """Return the metrics over all sites from their answers."""
    found: Metrics = {}
    kind, metric = score_kind(experiment, agreement), experiment.evaluation.metric or default
    reduce = "mean" if experiment.exchange.reduction.plain else "median"
    for one in evaluation_questions(experiment, agreement, parts):
        replies = [answers[n][one.key] for n in sorted(answers) if one.key in answers[n]]
        if replies:
            values = judged_errors(replies, reduce) if kind == NUMBERS else judged(replies, kind, metric, reduce)
            found |= {PREFIXES[one.part] + k: v for k, v in values.items()}
    return found


# ---------------------------------------------------------------------------------------------------------
# Judging networks after their training


@dataclass(frozen=True)
class Network:
    """The network of a study: its parameters as one vector, whatever objective trained them.

    A shorter vector, one number per input and output and one per output, is a linear score instead.
    """

    module: nn.Module
    linear: nn.Module

    @classmethod
    def of(cls, study: Experiment, agreement: Agreement) -> Network:
        """Return the network that [model] names, for the agreed inputs and classes."""
        outputs, spec = Target.of(study.data, agreement.classes).outputs, study.model
        made = models.build(spec.name, agreement.shape, outputs, seed=study.run.seed, **spec.options)
        made = in_units(made, agreement.center, agreement.unit)
        return cls(made, models.build("mlp", agreement.shape, outputs, hidden=()))

    @property
    def is_linear(self) -> bool:
        """Whether the network is a linear score."""
        return isinstance(self.module, models.Mlp) and not len(self.module.hidden)

    def at(self, x: np.ndarray) -> nn.Module:
        """Return the network, or the linear score, with these parameters."""
        module = copy.deepcopy(self.module if len(x) == _size(self.module) else self.linear)
        if len(x) != _size(module):
            raise NestfedError(f"The network has {_size(self.module)} parameters, but got {len(x)}.")
        vector = torch.from_numpy(np.array(x)).to(next(module.parameters()).dtype)
        nn.utils.vector_to_parameters(vector, module.parameters())
        return module.eval()

    def vector(self, module: nn.Module) -> np.ndarray:
        """Return the parameters of a trained network."""
        return nn.utils.parameters_to_vector(module.parameters()).detach().cpu().double().numpy()

    def scores(self, x: np.ndarray, inputs: Tensor) -> np.ndarray:
        """Return the scores of some examples, computed in float64."""
        return models.score(self.at(x).double(), inputs, Tensor.double).numpy()


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def own_rows(study: Experiment, place: Place, agreement: Agreement, table: Table | None = None) -> OwnRows:
    """Return a site's rows as model inputs; `table`: its file's content, if it was read before."""
    network = Network.of(study, agreement)
    trial, last = (
        examples_at(made, place, table).encoded(agreement, place.file or place.name)
        for made in (study, study.with_overrides(FINAL))
    )
    return OwnRows(place.name, study.data, network, agreement, trial, last)


@dataclass(frozen=True)
class OwnRows:
    """A site's rows as model inputs, in the division of a study's trials and in that of its last trainings."""

    site: str
    data: DataSpec
    network: Network
    agreement: Agreement
    trial: Prepared
    last: Prepared

    def by_part(self, final: bool) -> Mapping[str, Rows]:
        """Return the rows, with their scores under any parameters of the network and under the site's own model."""
        return self._in_last if final else self._in_trial

    @cached_property
    def _in_trial(self) -> dict[str, Rows]:
        return self._rows(self.trial)

    @cached_property
    def _in_last(self) -> dict[str, Rows]:
        return self._rows(self.last)

    def _rows(self, prepared: Prepared) -> dict[str, Rows]:
        return {
            part: Rows(
                some.x.double().numpy(),
                some.y.numpy(),
                scores=partial(_scores, self.network, some),
                scores_of=lambda x, inputs: self.network.scores(x, torch.from_numpy(inputs)),
                site=self.site,
                group=some.columns.get(self.data.group or PATIENT),
                columns={name: _alike(some.columns[name]) for name in self.data.subgroups},
                own=lambda some=some: self.network.scores(self.own_model, some.x),  # type: ignore[misc]
                classes=self.agreement.classes,
            )
            for part, some in parts_of(prepared).items()
        }

    @cached_property
    def own_model(self) -> np.ndarray:
        """The exact regression on this site's rows alone; all 0 if it has none, as with one class."""
        names, classes = self.agreement.encoding.inputs, len(self.agreement.classes)
        trial, last = (at_hand([self.by_part(final)]) for final in (False, True))
        try:
            _, found, _ = ridge_regression(trial, last, names, classes)
        except NestfedError as error:
            LOG.info("this site has no model of its own: %s", error)
            return network_parameters(np.zeros(max(classes - 1, 1) * (len(names) + 1)), classes)
        return network_parameters(found.coef, classes)


def _alike(values: np.ndarray) -> np.ndarray:
    """Return the values of a column as text, without differences in spaces and capital letters between sites."""
    texts, place = np.unique(values.astype(str), return_inverse=True)
    return np.array([folded(text) for text in texts])[place]


def _scores(network: Network, some: Held, x: np.ndarray) -> np.ndarray:
    return network.scores(x, some.x)
