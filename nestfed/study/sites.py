"""Turn users' data (arrays, tensors, data frames, datasets, one per site) into sites with a common encoding."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_array, column_or_1d
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.data.columns import Reading
from nestfed.data.encoding import Schema, TableEncoding, deviation, encode, numbered, unseen
from nestfed.data.faults import Faults
from nestfed.data.partition import Summary
from nestfed.data.readers import Raw
from nestfed.data.schema import EMPTY, TableSchema
from nestfed.data.tables import tables_of

LOG = logging.getLogger(__name__)
ALL = "all"
"""The name of the site if there is only one table."""


class DataError(NestfedError, ValueError):
    """An error in the user's data or arguments; scikit-learn's tools expect a ValueError."""


@dataclass(frozen=True)
class Site:
    """One site's examples: features as numbers (NaN if missing), labels unchanged."""

    name: str
    x: np.ndarray
    y: np.ndarray
    schema: Schema = ()
    """The columns of a table; empty for images and other arrays of more than two axes."""
    group: np.ndarray | None = None
    """For each row, a value that stays on one side of a split, such as a patient."""
    table: TableSchema = EMPTY
    """How the columns of a data frame or file became numbers."""
    late: np.ndarray | None = None
    """For each row, whether a temporal split holds it out for testing."""

    def __len__(self) -> int:
        return len(self.x)

    @property
    def where(self) -> str:
        """Its name in error messages."""
        return "X" if self.name == ALL else f"Site {self.name}"

    def take(self, rows: np.ndarray) -> Site:
        """Return some of its rows."""
        group, late = (None if values is None else values[rows] for values in (self.group, self.late))
        return replace(self, x=self.x[rows], y=self.y[rows], group=group, late=late)


def gather(
    x: Any, y: Any = None, groups: Any = None, target: str | None = None, table: TableSchema = EMPTY
) -> list[Site]:
    """Return the sites in the user's data.

    Without `y`: a list of (X, y) or datasets, or a dict of them by name. With `y`: one site, or one for each value of
    `groups`. `table`: how a model's training data were read, to read data frames in the same way.
    """
    if y is not None or _one_table(x):
        if y is None and target is None:
            raise DataError(
                "This estimator requires y to be passed, but the target y is None: use fit(X, y), or "
                "fit([(X1, y1), (X2, y2), …]) with one entry for each site, or name the column with target=…."
            )
        (whole,) = _alike([_divided(ALL, x if y is None else (x, y), target)], table)
        return [whole] if groups is None else _by_group(whole, groups)
    if groups is not None:
        raise DataError("groups is the site of each row, so it needs one X and y: fit(X, y, groups=…).")
    return _alike([_divided(name, entry, target) for name, entry in _entries(x)], table)


def _one_table(x: Any) -> bool:
    """Return whether x is one array or table, not a collection of sites."""
    if isinstance(x, Mapping) or hasattr(x, "load_partition"):
        return False
    if isinstance(x, list | tuple):
        # A nested list of numbers is an array; a list of pairs or datasets is not.
        return not len(x) or not (_is_pair(x[0]) or _is_data(x[0]) or _is_pair(x))
    return not _is_federated(x)


def _is_federated(x: Any) -> bool:
    return hasattr(x, "load_partition") or _is_data(x)


def _is_pair(entry: Any) -> bool:
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return False
    return all(
        hasattr(part, "__len__" if not hasattr(part, "__array__") else "__array__") for part in entry
    ) and not any(isinstance(part, str) for part in entry)


def _is_data(entry: Any) -> bool:
    """Return whether an entry is a dataset: of torch, in the style of Hugging Face, or a data frame."""
    return hasattr(entry, "column_names") or _is_frame(entry) or isinstance(entry, torch.utils.data.Dataset)


def _is_frame(x: Any) -> bool:
    return hasattr(x, "columns") and hasattr(x, "dtypes")


def _entries(x: Any) -> list[tuple[str, Any]]:
    if hasattr(x, "load_partition"):  # flwr_datasets.FederatedDataset
        partitioners = x.partitioners
        split = "train" if "train" in partitioners else next(iter(partitioners))
        return [(str(n), x.load_partition(n, split)) for n in range(partitioners[split].num_partitions)]
    if isinstance(x, Mapping):
        found = [(str(name), entry) for name, entry in x.items()]
    elif _is_data(x) or (_is_pair(x) and not (_is_pair(x[0]) or _is_data(x[0]))):
        found = [(ALL, x)]
    else:
        found = [(str(n), entry) for n, entry in enumerate(x)]
    if not found:
        raise DataError("There are no sites: give at least one (X, y).")
    if twice := [name for name, _ in found if [n for n, _ in found].count(name) > 1]:
        raise DataError(f"Two sites are called {twice[0]!r}: rename one of them.")
    return found


@dataclass(frozen=True)
class _Divided:
    """One site's data, divided into features and labels."""

    name: str
    x: Any
    y: np.ndarray
    site: Site | None = None
    """The site, if the user gave one."""

    @property
    def where(self) -> str:
        """Its name in error messages."""
        return "the data" if self.name == ALL else f"site {self.name}"


def _divided(name: str, entry: Any, target: str | None) -> _Divided:
    if isinstance(entry, Site):
        return _Divided(name, entry.x, entry.y, entry)
    where = "the data" if name == ALL else f"site {name}"
    if _is_pair(entry) and not _is_frame(entry):
        x, y = entry
    elif hasattr(entry, "column_names"):
        x, y = _columns(where, {c: entry[c] for c in entry.column_names}, target)
    elif _is_frame(entry):
        x, y = _columns(where, {c: entry[c] for c in entry.columns}, target)
    elif isinstance(entry, torch.utils.data.Dataset):
        x, y = _rows(where, entry)
    else:
        raise DataError(
            f"{where.capitalize()} is a {type(entry).__name__}, expected a pair (X, y), a dataset or a data frame."
        )
    return _Divided(name, x, column_or_1d(_array(y), warn=True))


def _site(name: str, entry: Any, target: str | None = None) -> Site:
    return _alike([_divided(name, entry, target)])[0]


def _alike(entries: Sequence[_Divided], table: TableSchema = EMPTY) -> list[Site]:
    """Return the sites; what the columns of data frames are is decided for all sites together, or by `table`."""
    frames = [one for one in entries if one.site is None and _is_frame(one.x)]
    table, made = _as_tables([_raw(one.x, one.where, one.name) for one in frames], table)
    read = {one.name: features for one, features in zip(frames, made)}
    found = []
    for one in entries:
        if one.site is not None:
            found.append(one.site)
            continue
        values, schema = read[one.name] if one.name in read else as_table(one.x, one.where)
        if len(values) != len(one.y):
            raise DataError(
                f"{one.where.capitalize()} has {len(values)} examples and {len(one.y)} labels; the numbers must be equal."
            )
        found.append(Site(one.name, values, one.y, schema, table=table if one.name in read else EMPTY))
    return found


def _raw(x: Any, where: str, name: str = ALL) -> Raw:
    """Return a data frame as a table to read."""
    names = [str(c) for c in x.columns]
    if len(set(names)) < len(names):
        raise DataError(f"{where.capitalize()} has two columns with the same name.")
    if not len(x):
        raise DataError(f"Found array with 0 sample(s) in {where}, while a minimum of 1 is required.")
    return Raw(where, {n: x.iloc[:, i] for i, n in enumerate(names)}, site="" if name == ALL else name)


def _as_tables(
    tables: Sequence[Raw], table: TableSchema = EMPTY
) -> tuple[TableSchema, list[tuple[np.ndarray, Schema]]]:
    """Return what the columns of data frames are, and their features; log what may surprise."""
    if not tables:
        return table, []
    faults, notes = Faults(), []
    if table:
        readings = [Reading(raw, table, faults, strict=False) for raw in tables]
        made = [one.features() for one in readings]
        notes = [note for one in readings for note in one.notes]
    else:
        table, made, found = tables_of(tables, EMPTY, faults)
        notes = list(found)
    try:
        faults.check()
    except NestfedError as error:
        raise DataError(str(error)) from None
    for note in notes:
        LOG.warning("%s", note)
    return table, made


def _columns(where: str, table: Mapping[Any, Any], target: str | None) -> tuple[Any, Any]:
    """Divide a table into features and target; by default the target is `label`, `labels`, `target` or `y`."""
    wanted = target or next((c for c in ("label", "labels", "target", "y") if c in table), None)
    if wanted is None or wanted not in table:
        named = f"has no column {target!r}" if target else "has no target column"
        raise DataError(f"{where.capitalize()} {named}; its columns are {', '.join(map(str, table))}: set target=….")
    rest = {c: v for c, v in table.items() if c != wanted}
    if len(rest) == 1:
        (only,) = rest.values()
        first = only[0] if not hasattr(only, "iloc") else only.iloc[0]
        if np.ndim(_array(first)):  # one image or vector per row
            return np.stack([_array(v) for v in only]), table[wanted]
    import pandas as pd

    return pd.DataFrame({c: v if hasattr(v, "iloc") else list(v) for c, v in rest.items()}), table[wanted]


def _rows(where: str, data: Any) -> tuple[Any, Any]:
    if hasattr(data, "tensors"):
        if len(data.tensors) != 2:
            raise DataError(f"{where.capitalize()} is a TensorDataset of {len(data.tensors)} tensors, expected (x, y).")
        return data.tensors
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{where.capitalize()} is a {type(data).__name__} without a length or an index, such as an IterableDataset: "
            "expected a dataset with __len__ and __getitem__."
        )
    rows = [data[i] for i in range(len(data))]
    if not rows:
        raise DataError(f"{where.capitalize()} has no examples.")
    return np.stack([_array(x) for x, _ in rows]), np.array([_array(y).item() for _, y in rows])


def _array(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    return np.asarray(x)


def as_table(x: Any, where: str = "the data", table: TableSchema = EMPTY) -> tuple[np.ndarray, Schema]:
    """Return examples as an array of numbers, and its columns; those of a plain array are numbered.

    - `table`: how a model's training data were read, to read a data frame in the same way.
    """
    if _is_frame(x):
        return _as_tables([_raw(x, where)], table)[1][0]
    array = _array(x) if isinstance(x, Tensor) else x
    kept = check_array(array, allow_nd=True, ensure_all_finite="allow-nan", dtype="numeric", copy=False)
    return kept, numbered(kept.shape[1]) if kept.ndim == 2 else ()


def _by_group(whole: Site, groups: Any) -> list[Site]:
    names = _array(groups)
    if names.shape != (len(whole),):
        raise DataError(f"groups has shape {names.shape}, expected one site's name for each of {len(whole)} rows.")
    found = np.unique(names.astype(str))
    return [replace(whole.take(np.flatnonzero(names.astype(str) == name)), name=str(name)) for name in found]


# ---------------------------------------------------------------------------------------------------------
# The common encoding, from sums alone


@dataclass(frozen=True)
class Channels:
    """Encodes images and other arrays as model inputs, scaled per channel (axis 1)."""

    mean: np.ndarray
    deviation: np.ndarray
    schema: Schema = ()

    def __call__(self, x: np.ndarray, schema: Schema = (), where: str = "The data") -> Tensor:
        """Scale."""
        if not np.isfinite(x).all():
            raise DataError("Input contains NaN: arrays of more than two axes must be complete.")
        shape = (-1, *(1,) * (x.ndim - 2))
        scaled = (x - self.mean.reshape(shape)) / self.deviation.reshape(shape)
        return torch.from_numpy(scaled.astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as JSON."""
        return {"kind": "channels", "mean": self.mean.tolist(), "deviation": self.deviation.tolist()}


InputEncoding = TableEncoding | Channels
"""Encodes a site's examples as model inputs."""


def encoding_from_json(found: Mapping[str, Any]) -> InputEncoding:
    """Return an encoding from `to_json`."""
    if found["kind"] == "channels":
        return Channels(np.array(found["mean"]), np.array(found["deviation"]))
    return TableEncoding.from_json(found)


def common_encoding(sites: Sequence[Site], *, scaled: bool = True, mark_gaps: bool = True) -> InputEncoding:
    """Return the common encoding of all sites; each shares counts, sums and sums of squares, but no rows.

    Without `scaled`, columns are only aligned. With `mark_gaps`, a feature with missing values gets an extra input "is
    missing".
    """
    if all(site.schema for site in sites):
        try:
            made = encode({site.name: (site.x, site.schema) for site in sites}, mark_gaps=scaled and mark_gaps)
        except NestfedError as error:
            raise DataError(str(error)) from None
        return replace(made, scaled=scaled, table=sites[0].table)
    shapes = {site.x.shape[1:] for site in sites}
    if len(shapes) > 1:
        raise DataError(f"The sites' examples have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    channels = sites[0].x.shape[1]
    if not scaled:
        return Channels(np.zeros(channels), np.ones(channels))
    axes = (0, *range(2, sites[0].x.ndim))
    count = sum(site.x.size / channels for site in sites)
    mean = sum(site.x.sum(axes, dtype=np.float64) for site in sites) / count
    shape = (-1, *(1,) * (sites[0].x.ndim - 2))
    squares = sum(((site.x - mean.reshape(shape)) ** 2).sum(axes, dtype=np.float64) for site in sites)
    return Channels(mean, deviation(squares / count, mean))


def inputs(encoding: InputEncoding, x: np.ndarray, schema: Schema, where: str = "X") -> Tensor:
    """Return a table as model inputs; columns without names are matched by position."""
    if isinstance(encoding, TableEncoding):
        if not schema:
            raise DataError(f"{where} has shape {x.shape}, expected a table of {len(encoding.schema)} columns.")
        plain = all(column.categories is None for column in encoding.schema)
        if schema == numbered(len(encoding.schema)) and plain:
            schema = encoding.schema
        for note in unseen(encoding.schema, schema, where):
            LOG.warning("%s", note)
    try:
        return encoding(x, schema, where)
    except DataError:
        raise
    except NestfedError as error:
        raise DataError(str(error)) from None


@dataclass(frozen=True)
class Encoded:
    """The labelled examples of all sites as model inputs, with the encoding that made them."""

    encoding: InputEncoding
    names: tuple[str, ...]
    x: Tensor
    """The inputs of all sites, one site after another."""
    y: Tensor
    """For each of them, the index of its class."""
    parts: Sequence[np.ndarray]
    """The rows of each site."""
    classes: np.ndarray

    @classmethod
    def of(cls, sites: Sequence[Site], *, scaled: bool = True, mark_gaps: bool = True) -> Encoded:
        """Encode sites by statistics of all of them; see `common_encoding`."""
        encoding = common_encoding(sites, scaled=scaled, mark_gaps=mark_gaps)
        x = torch.cat([inputs(encoding, site.x, site.schema, site.where) for site in sites])
        classes = np.unique(np.concatenate([np.unique(site.y) for site in sites]))
        y = np.searchsorted(classes, np.concatenate([site.y for site in sites]))
        parts = np.split(np.arange(len(x)), np.cumsum([len(site) for site in sites])[:-1])
        names = tuple(site.name for site in sites)
        return cls(encoding, names, x, torch.from_numpy(y.astype(np.int64)), parts, classes)

    def summary(self) -> Summary:
        """Return the examples by site and class."""
        counts = np.stack([np.bincount(self.y[part].numpy(), minlength=len(self.classes)) for part in self.parts])
        return Summary(counts, tuple(map(str, self.classes)), self.names)

    def held_out(self, sites: Sequence[Site]) -> tuple[Tensor, np.ndarray]:
        """Return other examples of these sites as model inputs, and the indices of their classes."""
        x = torch.cat([inputs(self.encoding, site.x, site.schema, site.where) for site in sites])
        return x, class_indices(np.concatenate([site.y for site in sites]), self.classes)


def class_indices(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the index of each label's class; reject a class that was not in the training data."""
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise DataError(f"The class {unknown[0]!r} was not in the training data, whose classes are {classes}.")
    return np.searchsorted(classes, labels)
