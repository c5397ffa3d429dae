"""Prepare a dataset for clients: labels, held-out examples, imbalance, partition, scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError, one_of, unknown
from nestfed.data import partition
from nestfed.data.clients import mean_rate
from nestfed.data.encoding import Schema, encode, flat, numbered
from nestfed.data.faults import FILE
from nestfed.data.schema import EMPTY, TableSchema
from nestfed.data.sources import Dataset, load, load_table
from nestfed.data.split import TEST, VALIDATION, aside, late
from nestfed.data.tables import CLASS, NUMBER, SURVIVAL, TARGETS, Roles

_TINY = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
PIXELS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "tiny-imagenet": _TINY,
    "tiny-imagenet-200": _TINY,
}
"""The usual mean and standard deviation per channel, for pixels in [0, 1]. Other images stay in [0, 1]."""
PATIENT = "patient"
"""The column whose rows stay together in a split, if there is one and the data name no other."""
BY_CLASS = ("similar", "all-classes", "k-classes", "dirichlet")
"""The kinds of partition that look at labels."""
Scaling = Callable[[np.ndarray], Tensor]
KEEP_AS_FLOATS = 300_000_000
"""Convert images to floats once if they need at most this many bytes, otherwise batch by batch."""


@dataclass(frozen=True)
class DataSpec:
    """The [data] table of an experiment."""

    name: str = ""
    file: str = ""
    """A table file, instead of a name."""
    target: str = ""
    """The column to predict."""
    classes: tuple[str, ...] = ()
    """The values of that column in order, if a file may lack some of them."""
    columns: tuple[str, ...] = ()
    """Columns to divide by, such as hospital or patient; they are not features."""
    drop: tuple[str, ...] = ()
    folder: str = ""
    """The folder of a named dataset, if it is neither in NESTFED_DATA nor in the cache."""
    binary: bool = False
    """Learn the second half of the classes (positive) against the first."""
    positive: tuple[int, ...] = ()
    """The positive classes, if not the second half."""
    remove: str = ""
    """Remove `fraction` of the positive or negative training examples."""
    fraction: float = 0.8
    validation: float = 0.0
    """The share of the training examples to hold out for tuning, before `remove`."""
    test: float = 0.25
    """The share to hold out for testing, if the dataset has no test set or held_out = "clients"."""
    held_out: str = "central"
    """Who has the test set: central, or clients (each holds out some of its own rows and shares only counts of scores)."""
    split: int = 0
    """The seed of the test set. It is independent of run.seed, so tuning with other seeds never sees test rows."""
    group: str = ""
    """Keep rows with equal values in this column on one side of every split, at all sites; by default "patient", if it exists."""
    split_by: str = ""
    """A column of dates or numbers: rows from `test_from` on are the test rows. It is not a feature."""
    test_from: str = ""
    """Where the test rows begin: a year, month or day, as in 2020, 2020-06 or 2020-06-30, or a number."""
    leave_out: str = ""
    """A site whose rows are the test rows: a value of partition.column, or the name of a site with its own table."""
    subgroups: tuple[str, ...] = ()
    """Columns by whose values a study judges its models as well; they are features."""
    target_kind: str = "class"
    """What the target is: class, number for regression, or survival."""
    time: str = ""
    """For survival, the column of times; the target is the column that says whether the event happened."""
    limit: int = 0
    """The largest number of training examples, for quick tests; 0 = all."""

    def __post_init__(self) -> None:
        one_of("data.held_out", self.held_out, ("central", "clients"))
        one_of("data.target_kind", self.target_kind, TARGETS)
        if bool(self.split_by) != bool(self.test_from):
            raise NestfedError(
                "data.split_by and data.test_from belong together: name a column of dates, and where its test rows begin."
            )
        if self.split_by and self.leave_out:
            raise NestfedError(
                "data.leave_out and data.split_by choose the test rows in two ways: leave one of them out."
            )


@dataclass(frozen=True)
class PartitionSpec:
    """The [partition] table of an experiment."""

    kind: str = "even"
    """even, similar, all-classes, k-classes, dirichlet, column, or pooled (one client)."""
    clients: int = 16
    similarity: float = 0.95
    k: int = 5
    alpha: float = 0.5
    minimum: int = 1
    column: str = ""
    smallest: int = 1
    fallback: str = ""


@dataclass(frozen=True)
class Held:
    """Held-out examples. If they stay with the clients, `parts` are the rows of each client."""

    x: Tensor
    y: Tensor
    parts: Sequence[np.ndarray] = ()
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Their hospital, region, …, to evaluate by group."""


@dataclass(frozen=True)
class Prepared:
    """Examples ready for clients and for evaluation."""

    x: Tensor
    y: Tensor
    parts: Sequence[np.ndarray]
    names: Sequence[str]
    test: Held
    validation: Held | None
    classes: int
    transform: Callable[[Tensor], Tensor] | None
    summary: partition.Summary
    """Training examples by client and class."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The training examples' hospital, region, …"""

    @property
    def positive_rate(self) -> float:
        """The mean share of positives over clients."""
        return mean_rate(self.y, self.parts)

    def ready(self, x: Tensor) -> Tensor:
        """Return examples as model inputs."""
        return x if self.transform is None else self.transform(x)


def prepare(data: DataSpec, parts: PartitionSpec, seed: int, schema: TableSchema = EMPTY) -> Prepared:
    """Load, label, hold out, remove, divide and scale. `schema` says what the columns of data.file are.

    The test set is that of the dataset, or else a share drawn with `data.split`. With held_out = "clients", the training
    examples of the dataset are divided first, and each client holds out a share for testing and validation.
    """
    return divide(data, *load_examples(data, schema), parts, seed, form=schema.date_format(data.split_by))


def divide(
    data: DataSpec,
    whole: Dataset,
    test: Dataset | None,
    parts: PartitionSpec,
    seed: int,
    *,
    scaling: Scaling | None = None,
    site: str | None = None,
    form: str = "",
) -> Prepared:
    """Do all of `prepare` except loading.

    - `scaling` replaces the scaling computed from these examples.
    - `site`: the name of the site whose table this is, if it is one site's; a part of its rows may then be empty.
    - `form`: the format of the dates in `data.split_by`.
    """
    labels, classes = _labels(whole.y, len(whole.classes), data)
    unlabelled = data.target_kind != CLASS or labels.ndim == 2
    if unlabelled:
        what = {NUMBER: "a number as its target", SURVIVAL: "a time as its target"}
        _check_several(data, parts, what.get(data.target_kind, "several labels per example"))
    _check_removal(data, classes)
    strata = np.zeros(len(labels), np.int64) if unlabelled else labels
    if data.target_kind == SURVIVAL:
        strata = labels[:, 1].astype(np.int64)
    chosen = _protocol(data, whole, parts, site, form)
    owners = _Owners.divide(parts, whole, strata, seed) if data.held_out == "clients" else None
    rows = _choose(data, whole, strata, owners, chosen, own_test=test is None, seed=seed)
    if site is None:
        _reject_empty(data, rows, own_test=test is None or owners is not None)
    if owners is None:
        shares, names = _divide(parts, {k: v[rows.train] for k, v in whole.columns.items()}, strata[rows.train], seed)
    else:
        shares, names = owners.training(rows.train), owners.names
    scale, later = _scaling(data.name, whole, rows.train, shares, names) if scaling is None else (scaling, None)
    y = torch.from_numpy(labels)

    def held(chosen: np.ndarray) -> Held:
        columns = {k: v[chosen] for k, v in whole.columns.items()}
        return Held(scale(whole.x[chosen]), y[chosen], owners.parts(chosen) if owners else (), columns)

    if test is None or owners is not None:
        outside = held(rows.test)
    else:
        answers = torch.from_numpy(_labels(test.y, len(test.classes), data)[0])
        outside = Held(scale(test.x), answers, columns=test.columns)
    return Prepared(
        scale(whole.x[rows.train]),
        y[rows.train],
        shares,
        names,
        outside,
        held(rows.validation) if len(rows.validation) else None,
        classes,
        later,
        _summary(data, whole, shares, strata[rows.train], names, unlabelled),
        {k: v[rows.train] for k, v in whole.columns.items()},
    )


@dataclass(frozen=True)
class _Owners:
    """The client of every row, if clients hold out their own examples."""

    names: list[str]
    client: np.ndarray

    @classmethod
    def divide(cls, parts: PartitionSpec, whole: Dataset, labels: np.ndarray, seed: int) -> _Owners:
        """Give every row to a client."""
        shares, names = _divide(parts, whole.columns, labels, seed)
        client = np.empty(len(whole), np.int64)
        for n, share in enumerate(shares):
            client[share] = n
        return cls(names, client)

    def parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the positions of each client's rows among these rows."""
        return [np.flatnonzero(self.client[rows] == n) for n in range(len(self.names))]

    def training(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the parts of the training rows; every client needs some."""
        shares = self.parts(rows)
        if empty := [name for name, share in zip(self.names, shares) if not len(share)]:
            raise NestfedError(
                f"Client {empty[0]} has no training examples left: lower data.test, or use fewer clients."
            )
        return shares


@dataclass(frozen=True)
class _Rows:
    """The rows of a dataset by their use."""

    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray


def _choose(
    data: DataSpec,
    whole: Dataset,
    labels: np.ndarray,
    owners: _Owners | None,
    chosen: np.ndarray | None,
    *,
    own_test: bool,
    seed: int,
) -> _Rows:
    """Hold out test and validation rows, then drop training rows (`remove`, `limit`).

    - `chosen`: the test rows of a temporal split, or of one that leaves a site out.
    - `own_test`: the dataset has no test set, so some of its rows become one.
    """
    strata = labels
    if owners is not None:  # every client holds out some examples of each of its classes
        strata = owners.client * (labels.max(initial=0) + 1) + labels
    rows = np.arange(len(whole))
    test = validation = rows[:0]
    if own_test or owners is not None:
        rows, test = _aside(data, whole, strata, rows, data.test, data.split, TEST, chosen)
    if data.validation:
        rows, validation = _aside(data, whole, strata, rows, data.validation, seed, VALIDATION)
    if data.remove:
        rows = rows[partition.remove(labels[rows], int(data.remove == "positive"), data.fraction, seed)]
    if data.limit and len(rows) > data.limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, data.limit, replace=False))
    return _Rows(rows, test, validation)


def _scaling(
    name: str, whole: Dataset, rows: np.ndarray, shares: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[Scaling, Callable[[Tensor], Tensor] | None]:
    """Return the conversion of examples to tensors, fitted on the training rows, and the transform of each batch."""
    if whole.x.dtype == np.uint8:
        return _pixels(name, whole.x, len(rows))
    x, schema = as_table(whole)
    encoding = encode({name: (x[rows[share]], schema) for name, share in zip(names, shares)}, mark_gaps=x.ndim == 2)
    return lambda x: encoding(x, schema), None


def _summary(
    data: DataSpec,
    whole: Dataset,
    shares: Sequence[np.ndarray],
    labels: np.ndarray,
    names: Sequence[str],
    several: bool,
) -> partition.Summary:
    """Count the training examples by client and class, or by client alone if each has several labels."""
    summary = partition.summary(shares, labels, names)
    if several:
        return replace(summary, classes=("examples",))
    called = ("negative", "positive") if data.binary or data.positive else whole.classes
    return replace(summary, classes=tuple(called[int(c)] for c in summary.classes))


def as_table(data: Dataset) -> tuple[np.ndarray, Schema]:
    """Return examples as a table with its schema; columns of a plain array are numbered."""
    return data.x, data.schema or numbered(flat(data.x[:1]).shape[1])


def roles_of(data: DataSpec) -> Roles:
    """Return what the columns of a table are for."""
    columns = tuple(dict.fromkeys(filter(None, [*data.columns, data.group, data.split_by])))
    return Roles(data.target, columns, data.drop, data.classes or None, data.target_kind, data.subgroups, data.time)


def load_examples(data: DataSpec, schema: TableSchema = EMPTY) -> tuple[Dataset, Dataset | None]:
    """Return the examples that [data] names, and the dataset's own test set, if any."""
    if bool(data.name) == bool(data.file):
        raise NestfedError("[data] needs either a name or a file: set data.name or data.file.")
    if data.file:
        if not data.target:
            raise NestfedError(f"data.target must name the column of {data.file} to predict.")
        roles = roles_of(data)
        table = load_table(
            Path(data.file), roles.target, columns=roles.columns, drop=roles.drop, classes=roles.classes, schema=schema,
            target_kind=roles.kind, subgroups=roles.subgroups, time=roles.time, entrance=FILE,
        )  # fmt: skip
        return table, None
    split = load(data.name, data.folder or None)
    if not split.train.y.size:
        raise NestfedError(
            f"{data.name} has no labels, because it is for language modelling; choose a labelled dataset."
        )
    return split.train, split.test if len(split.test) else None


def _labels(y: np.ndarray, classes: int, data: DataSpec) -> tuple[np.ndarray, int]:
    """Return the labels to learn and the number of classes; with two classes, 1 is positive."""
    if data.target_kind == SURVIVAL:
        return np.array(y, dtype=np.float64), 1
    if y.ndim == 2:
        return np.array(y, dtype=np.float32), classes
    if data.target_kind == NUMBER:
        return np.array(y, dtype=np.float32), 1
    if not (data.binary or data.positive):
        return np.array(y, dtype=np.int64), classes
    positive = data.positive or tuple(range(classes // 2, classes))
    if wrong := [c for c in positive if not (isinstance(c, int) and 0 <= c < classes)]:
        raise NestfedError(f"data.positive: class {wrong[0]!r} does not exist; the classes are 0 to {classes - 1}.")
    return np.isin(y, positive).astype(np.int64), 2


def _check_several(data: DataSpec, parts: PartitionSpec, what: str) -> None:
    """Reject what needs one class per example; the data have `what`."""
    name = data.name or data.file
    for setting, used in (("binary", data.binary), ("positive", data.positive), ("remove", data.remove)):
        if used:
            raise NestfedError(f"data.{setting} needs one class per example, but {name} has {what}: leave it out.")
    if data.held_out == "clients":
        raise NestfedError(f"{name} has {what}: set data.held_out = 'central'.")
    if parts.kind in BY_CLASS:
        raise NestfedError(
            f"partition.kind = {parts.kind!r} needs one class per example, but {name} has {what}: use even, column or pooled."
        )


def _check_removal(data: DataSpec, classes: int) -> None:
    if data.remove:
        one_of("data.remove", data.remove, ("positive", "negative"))
        if classes != 2:
            raise NestfedError("data.remove needs two classes: set data.binary = true.")


def _aside(
    data: DataSpec,
    whole: Dataset,
    strata: np.ndarray,
    rows: np.ndarray,
    share: float,
    seed: int,
    purpose: str,
    chosen: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out some of some rows: by patient if patients are known, otherwise by strata."""
    name = data.group or (PATIENT if PATIENT in whole.columns else "")
    group = _column("data.group", name, whole.columns)[rows] if name else None
    of = None if chosen is None else chosen[rows]
    rest, held = aside(len(rows), share, seed, purpose, strata=strata[rows], group=group, chosen=of)
    return rows[rest], rows[held]


def _reject_empty(data: DataSpec, rows: _Rows, *, own_test: bool) -> None:
    """Reject a split by groups, time or site that leaves nothing on one side."""
    sides = {"training": rows.train}
    sides |= {"test": rows.test} if own_test else {}
    sides |= {"validation": rows.validation} if data.validation else {}
    for side, there in sides.items():
        if not len(there):
            raise NestfedError(
                f"The split leaves no {side} rows: it needs more groups (data.group), another seed (data.split), or another "
                "data.test_from."
            )


def _protocol(data: DataSpec, whole: Dataset, parts: PartitionSpec, site: str | None, form: str) -> np.ndarray | None:
    """Return the test rows of a temporal split, or of one that leaves a site out; None for a random split."""
    if data.split_by:
        return late(
            _column("data.split_by", data.split_by, whole.columns), data.test_from, data.split_by, data.file, form
        )
    if not data.leave_out:
        return None
    if site == "":
        raise NestfedError("data.leave_out names a site, but this site's name is not known: state it at the site.")
    if site:
        return np.full(len(whole), site == data.leave_out)
    if parts.kind != "column":
        raise NestfedError("data.leave_out names a value of partition.column: set partition.kind = 'column'.")
    places = _column("partition.column", parts.column, whole.columns).astype(str)
    if data.leave_out not in places:
        raise unknown("site", data.leave_out, np.unique(places).tolist(), owner="data.leave_out: the dataset")
    return np.asarray(places == data.leave_out)


def _column(setting: str, name: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    if name not in columns:
        raise unknown("column", name, columns, owner=f"{setting}: the dataset")
    return columns[name]


def _divide(
    spec: PartitionSpec, columns: Mapping[str, np.ndarray], labels: np.ndarray, seed: int
) -> tuple[list[np.ndarray], list[str]]:
    kinds: dict[str, Callable[[], list[np.ndarray]]] = {
        "even": lambda: partition.even(len(labels), spec.clients, seed),
        "similar": lambda: partition.similar(labels, spec.clients, spec.similarity, seed),
        "all-classes": lambda: partition.all_classes(labels, spec.clients, seed),
        "k-classes": lambda: partition.k_classes(labels, spec.clients, spec.k, seed),
        "dirichlet": lambda: partition.dirichlet(labels, spec.clients, spec.alpha, seed, spec.minimum),
        "pooled": lambda: [np.arange(len(labels))],
    }
    if spec.kind == "column":
        coarse = _column("partition.fallback", spec.fallback, columns) if spec.fallback else None
        return partition.by_column(_column("partition.column", spec.column, columns), spec.smallest, coarse)
    one_of("partition.kind", spec.kind, [*kinds, "column"])
    shares = kinds[spec.kind]()
    return shares, ["all"] if spec.kind == "pooled" else [str(n) for n in range(len(shares))]


def _pixels(name: str, x: np.ndarray, rows: int) -> tuple[Scaling, Callable[[Tensor], Tensor] | None]:
    """Return the conversion of images to tensors, and the transform to apply to each batch, if any."""
    mean, deviation = PIXELS.get(name, ((0.0,), (1.0,)))
    shape = (-1, *(1,) * (x.ndim - 2))
    factor = (1 / (255 * torch.tensor(deviation))).view(shape)
    shift = (torch.tensor(mean) / torch.tensor(deviation)).view(shape)

    def transform(pixels: Tensor) -> Tensor:
        return pixels.float().mul_(factor.to(pixels.device)).sub_(shift.to(pixels.device))

    if 4 * x[:1].size * rows <= KEEP_AS_FLOATS:
        return lambda pixels: transform(torch.from_numpy(np.array(pixels))), None
    return lambda pixels: torch.from_numpy(np.array(pixels)), transform
