"""From a data set to what the clients hold: labels, imbalance, hold-outs, partition, scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.data import partition
from nestfed.data.sources import Dataset, load, load_table

# The usual mean and deviation per channel, of pixels in [0, 1].
PIXELS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
KEEP_AS_FLOATS = 300_000_000
"""Images that need fewer bytes as floats are converted once, larger sets batch by batch."""


@dataclass(frozen=True)
class DataSpec:
    """The [data] table of an experiment."""

    name: str = ""
    file: str = ""
    """A table of the user's own, instead of a name."""
    target: str = ""
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    folder: str = ""
    binary: bool = False
    """Second half of the classes against the first."""
    positive: tuple[int, ...] = ()
    """The positive classes, if not the second half."""
    remove: str = ""
    """"positive" or "negative": the side of which `fraction` is removed from the training examples."""
    fraction: float = 0.8
    validation: float = 0.0
    """The share of the training examples that is set aside for tuning, before anything is removed."""
    test: float = 0.25
    """The share that is set aside as test set where the origin names none."""
    limit: int = 0
    """At most so many training examples, for quick tries; 0 means all."""


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


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prepared:
    """Examples ready for clients and for evaluation."""

    x: Tensor
    y: Tensor
    parts: Sequence[np.ndarray]
    names: Sequence[str]
    test: Pair
    validation: Pair | None
    classes: int
    transform: Callable[[Tensor], Tensor] | None = None
    summary: str = ""
    features: tuple[str, ...] = field(default=())

    @property
    def positive_rate(self) -> float:
        """The share of positives over all clients, from their own counts."""
        held = torch.from_numpy(np.concatenate(self.parts))
        return float((self.y[held] == 1).double().mean())

    def ready(self, x: Tensor) -> Tensor:
        """Return examples as the model wants them."""
        return x if self.transform is None else self.transform(x)


def prepare(data: DataSpec, parts: PartitionSpec, seed: int) -> Prepared:
    """Load, label, set aside, remove, divide and scale, all with one seed."""
    train, test = _load(data, seed)
    labels_train, classes = _labels(train, data)
    labels_test = _labels(test, data)[0]
    rows = np.arange(len(train))
    held = rows[:0]
    if data.validation:
        groups = train.columns.get("patient")
        rows, held = partition.hold_out(
            len(train), data.validation, seed, groups=groups, labels=None if groups is not None else labels_train
        )
    if data.remove:
        if data.remove not in ("positive", "negative"):
            raise NestfedError(f"data.remove must be 'positive' or 'negative', not {data.remove!r}.")
        if classes != 2:
            raise NestfedError("data.remove needs two classes: set data.binary = true.")
        rows = rows[partition.remove(labels_train[rows], int(data.remove == "positive"), data.fraction, seed)]
    if data.limit and len(rows) > data.limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, data.limit, replace=False))
    shares, names = _divide(parts, train.take(rows), labels_train[rows], seed)
    local = partition.summary(shares, labels_train[rows], names)
    used = train.take(np.concatenate([rows, held]))
    x, x_test, transform = _scaled(data.name, used, test, len(rows))
    y, y_test = torch.from_numpy(labels_train[np.concatenate([rows, held])]), torch.from_numpy(labels_test)
    n = len(rows)
    return Prepared(
        x[:n],
        y[:n],
        shares,
        names,
        (x_test, y_test),
        (x[n:], y[n:]) if len(held) else None,
        classes,
        transform,
        str(local),
        train.features,
    )


def _load(data: DataSpec, seed: int) -> tuple[Dataset, Dataset]:
    if bool(data.name) == bool(data.file):
        raise NestfedError("data needs a name or a file, and not both.")
    if data.file:
        if not data.target:
            raise NestfedError(f"data.target must name the column of {data.file} that is to be predicted.")
        whole = load_table(Path(data.file), data.target, columns=data.columns, drop=data.drop)
        return _cut(whole, data.test, seed)
    split = load(data.name, data.folder or None)
    return (split.train, split.test) if len(split.test) else _cut(split.train, data.test, seed)


def _cut(whole: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Set a test set aside: by patient where patients are known, otherwise stratified by label."""
    groups = whole.columns.get("patient")
    rest, held = partition.hold_out(
        len(whole), share, seed + 1, groups=groups, labels=None if groups is not None else whole.y
    )
    return whole.take(rest), whole.take(held)


def _labels(data: Dataset, spec: DataSpec) -> tuple[np.ndarray, int]:
    if not data.y.size:
        raise NestfedError(f"{spec.name} has no labels: it is for language modelling.")
    if spec.binary or spec.positive:
        half = range(len(data.classes) // 2, len(data.classes))
        return partition.binary(data.y, spec.positive or half), 2
    return np.asarray(data.y, dtype=np.int64), len(data.classes)


def _divide(
    spec: PartitionSpec, data: Dataset, labels: np.ndarray, seed: int
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
        for name in filter(None, (spec.column or " ", spec.fallback)):
            if name not in data.columns:
                known = ", ".join(data.columns) or "none"
                raise NestfedError(f"partition.column: there is no column {name.strip()!r} to divide by (there are: {known}).")
        coarse: Any = data.columns[spec.fallback] if spec.fallback else None
        return partition.by_column(data.columns[spec.column], spec.smallest, coarse)
    if spec.kind not in kinds:
        raise NestfedError(f"partition.kind must be one of {', '.join([*kinds, 'column'])}, not {spec.kind!r}.")
    shares = kinds[spec.kind]()
    return shares, [str(n) for n in range(len(shares))]


def _scaled(
    name: str, used: Dataset, test: Dataset, training: int
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
    if used.x.dtype != np.uint8:
        x, x_test = standardise(used.x, test.x, training)
        return x, x_test, None
    mean, deviation = PIXELS.get(name, ((0.0,), (1.0,)))
    shape = (-1, *(1,) * (used.x.ndim - 2))
    shift, scale = torch.tensor(mean).view(shape), 1 / torch.tensor(deviation).view(shape)

    def transform(x: Tensor) -> Tensor:
        return (x.float() / 255 - shift.to(x.device)) * scale.to(x.device)

    pixels, pixels_test = (torch.from_numpy(np.array(d.x)) for d in (used, test))
    if 4 * pixels.numel() <= KEEP_AS_FLOATS:
        return transform(pixels), transform(pixels_test), None
    return pixels, pixels_test, transform


def standardise(x: np.ndarray, x_test: np.ndarray, training: int) -> tuple[Tensor, Tensor]:
    """Impute by the mean and scale to unit variance, from the training rows' sums alone.

    Sums, sums of squares and counts are all that clients would have to send for this. Where training values are
    missing, a feature "is missing" is added: in clinical tables it tells more than the imputed value.
    """
    rows = np.asarray(x[:training], dtype=np.float64)
    known = np.isfinite(rows)
    count = known.sum(0)
    filled = np.where(known, rows, 0.0)
    mean = filled.sum(0) / np.maximum(count, 1)
    variance = (filled**2).sum(0) / np.maximum(count, 1) - mean**2
    deviation = np.sqrt(np.maximum(variance, 0))
    deviation[deviation < 1e-8] = 1.0
    gaps = count < training

    def apply(values: np.ndarray) -> Tensor:
        missing = ~np.isfinite(values)
        scaled = np.where(missing, 0.0, (np.where(missing, 0.0, values) - mean) / deviation)
        return torch.from_numpy(np.concatenate([scaled, missing[:, gaps]], 1).astype(np.float32))

    return apply(np.asarray(x)), apply(np.asarray(x_test))
