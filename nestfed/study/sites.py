"""From what people have (arrays, tensors, data frames, data sets, one per site) to sites alike, and their common scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_array, column_or_1d
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.data.encoding import Facts, Plan, deviation, finish, merge
from nestfed.data.tables import _features


class Refused(NestfedError, ValueError):
    """A mistake in the data, which scikit-learn's tools expect to be a ValueError."""


@dataclass(frozen=True)
class Site:
    """One site's examples: features as numbers (NaN where missing), labels as they came."""

    name: str
    x: np.ndarray
    y: np.ndarray
    features: tuple[str, ...] = ()
    """Names of a table's features; none for images and other arrays of more than two axes."""
    group: np.ndarray | None = None
    """For each row what must not stand on both sides of a split, such as a patient."""

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: np.ndarray) -> Site:
        """Return some of its rows."""
        group = None if self.group is None else self.group[rows]
        return Site(self.name, self.x[rows], self.y[rows], self.features, group)


def gather(x: Any, y: Any = None, groups: Any = None, target: str | None = None) -> list[Site]:
    """Return the sites that the user's data make.

    Without `y`: a list of (X, y), a dict of them by name, or data sets in their place. With `y`: one site, or one for
    every value of `groups`.
    """
    if y is not None or _one_table(x):
        if y is None and target is None:
            raise Refused(
                "This estimator requires y to be passed, but the target y is None: give fit(X, y), or "
                "fit([(X1, y1), (X2, y2), …]) with one entry for each site, or name the column by target=…."
            )
        whole = _site("all", x if y is None else (x, y), target)
        return [whole] if groups is None else _by_group(whole, groups)
    if groups is not None:
        raise Refused("groups says which row belongs to which site, so it goes with fit(X, y, groups=…).")
    return [_site(name, entry, target) for name, entry in _entries(x)]


def _one_table(x: Any) -> bool:
    """Tell whether x is one array or table rather than a collection of sites."""
    if isinstance(x, Mapping) or hasattr(x, "load_partition"):
        return False
    if isinstance(x, list | tuple):
        # A nested list of numbers is an array; a list of pairs or of data sets is not.
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
    """Tell whether an entry is a data set: of torch (len and rows), in the style of Hugging Face, or a data frame."""
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
        found = [("all", x)]
    else:
        found = [(str(n), entry) for n, entry in enumerate(x)]
    if not found:
        raise Refused("There are no sites: give at least one (X, y).")
    return found


def _site(name: str, entry: Any, target: str | None) -> Site:
    where = "the data" if name == "all" else f"site {name}"
    if _is_pair(entry) and not _is_frame(entry):
        x, y = entry
    elif hasattr(entry, "column_names"):
        x, y = _columns(where, {c: entry[c] for c in entry.column_names}, target)
    elif _is_frame(entry):
        x, y = _columns(where, {c: entry[c] for c in entry.columns}, target)
    elif isinstance(entry, torch.utils.data.Dataset):
        x, y = _rows(where, entry)
    else:
        raise Refused(
            f"{where.capitalize()} is a {type(entry).__name__}, expected a pair (X, y), a data set or a data frame."
        )
    values, features = as_features(x, where)
    labels = column_or_1d(_array(y), warn=True)
    if len(values) != len(labels):
        raise Refused(
            f"{where.capitalize()} holds {len(values)} examples and {len(labels)} labels; they must be equal."
        )
    return Site(name, values, labels, features)


def _columns(where: str, table: Mapping[Any, Any], target: str | None) -> tuple[Any, Any]:
    """Divide a table into features and target, which is called `label` unless the user says otherwise."""
    wanted = target or next((c for c in ("label", "labels", "target", "y") if c in table), None)
    if wanted is None or wanted not in table:
        named = f"has no column {target!r}" if target else "does not say which column is to be predicted"
        raise Refused(f"{where.capitalize()} {named}; its columns are {', '.join(map(str, table))}: set target=….")
    rest = {c: v for c, v in table.items() if c != wanted}
    if len(rest) == 1:
        (only,) = rest.values()
        first = only[0] if not hasattr(only, "iloc") else only.iloc[0]
        if np.ndim(_array(first)):  # images, or vectors, one in each row
            return np.stack([_array(v) for v in only]), table[wanted]
    import pandas as pd

    return pd.DataFrame({c: v if hasattr(v, "iloc") else list(v) for c, v in rest.items()}), table[wanted]


def _rows(where: str, data: Any) -> tuple[Any, Any]:
    if hasattr(data, "tensors"):
        if len(data.tensors) != 2:
            raise Refused(f"{where.capitalize()} is a TensorDataset of {len(data.tensors)} tensors, expected (x, y).")
        return data.tensors
    rows = [data[i] for i in range(len(data))]
    if not rows:
        raise Refused(f"{where.capitalize()} has no examples.")
    return np.stack([_array(x) for x, _ in rows]), np.array([_array(y).item() for _, y in rows])


def _array(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    return np.asarray(x)


def as_features(x: Any, where: str = "the data") -> tuple[np.ndarray, tuple[str, ...]]:
    """Return examples as an array of numbers, and the names of a table's features."""
    if _is_frame(x):
        names = [str(c) for c in x.columns]
        if len(set(names)) < len(names):
            raise Refused(f"{where.capitalize()} has two columns of one name.")
        values, features = _features(where, {n: x.iloc[:, i] for i, n in enumerate(names)})  # type: ignore[arg-type]
        if not len(values):
            raise Refused(f"Found array with 0 sample(s) in {where}, while a minimum of 1 is required.")
        return values, features
    array = _array(x) if isinstance(x, Tensor) else x
    kept = check_array(array, allow_nd=True, ensure_all_finite="allow-nan", dtype="numeric", copy=False)
    return kept, tuple(f"x{i}" for i in range(kept.shape[1])) if kept.ndim == 2 else ()


def _by_group(whole: Site, groups: Any) -> list[Site]:
    names = _array(groups)
    if names.shape != (len(whole),):
        raise Refused(f"groups has shape {names.shape}, expected one site's name for each of {len(whole)} rows.")
    found = np.unique(names.astype(str))
    return [
        Site(str(name), whole.x[rows], whole.y[rows], whole.features)
        for name in found
        for rows in [np.flatnonzero(names.astype(str) == name)]
    ]


# ---------------------------------------------------------------------------------------------------------
# The common scale, from sums alone


class Scale:
    """What turns a site's numbers into a model's input; this one only changes their type."""

    kind = "raw"

    def __call__(self, x: np.ndarray, features: Sequence[str]) -> Tensor:
        """Return the model's input."""
        if not np.isfinite(x).all():
            raise Refused("Input contains NaN: leave standardize=True, which fills in what is missing.")
        return torch.from_numpy(np.array(x, dtype=np.float32))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that it expects; none if it does not care."""
        return ()

    def width(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a model's input for examples of a shape."""
        return shape

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Columns(Scale):
    """A table, imputed and scaled feature by feature."""

    plan: Plan
    kind = "columns"

    def __call__(self, x: np.ndarray, features: Sequence[str]) -> Tensor:
        """Impute by the common mean, scale to the common deviation, tell what was missing."""
        return self.plan.scale(x, features)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return self.plan.features

    def width(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Features, and "is missing" for those with gaps."""
        return self.plan.shape

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        p = self.plan
        numbers = {"mean": p.mean.tolist(), "deviation": p.deviation.tolist(), "gaps": p.gaps.tolist()}
        return {"kind": self.kind, "features": list(p.features), **numbers}


@dataclass(frozen=True)
class Channels(Scale):
    """Images and other arrays, scaled channel by channel (axis 1)."""

    mean: np.ndarray
    deviation: np.ndarray
    kind = "channels"

    def __call__(self, x: np.ndarray, features: Sequence[str]) -> Tensor:
        """Scale."""
        if not np.isfinite(x).all():
            raise Refused("Input contains NaN: arrays of more than two axes must be complete.")
        shape = (-1, *(1,) * (x.ndim - 2))
        scaled = (x - self.mean.reshape(shape)) / self.deviation.reshape(shape)
        return torch.from_numpy(scaled.astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {"kind": self.kind, "mean": self.mean.tolist(), "deviation": self.deviation.tolist()}


def scale_from_json(told: Mapping[str, Any]) -> Scale:
    """Return what `to_json` wrote."""
    if told["kind"] == "raw":
        return Scale()
    if told["kind"] == "channels":
        return Channels(np.array(told["mean"]), np.array(told["deviation"]))
    gaps = np.array(told["gaps"], bool)
    features = tuple(told["features"])
    shape = (len(features) + int(gaps.sum()),)
    plan = Plan(1, shape, (), 0.0, features, np.array(told["mean"]), np.array(told["deviation"]), gaps)
    return Columns(plan)


def common_scale(sites: Sequence[Site], *, tell_gaps: bool) -> Scale:
    """Return the scale that all sites agree on; each tells counts and sums, then sums of squares, and no rows."""
    shapes = {site.x.shape[1:] for site in sites}
    if sites[0].features:
        told = {site.name: _facts(site) for site in sites}
        plan = merge(told, len(sites))
        squares = []
        for site in sites:
            values = plan.align(site.x, site.features)
            squares.append((np.where(np.isfinite(values), values - plan.mean, 0.0) ** 2).sum(0))
        plan = finish(plan, squares, told)
        if not tell_gaps:
            gaps = np.zeros(len(plan.features), bool)
            plan = Plan(plan.clients, (len(gaps),), (), 0.0, plan.features, plan.mean, plan.deviation, gaps)
        return Columns(plan)
    if len(shapes) > 1:
        raise Refused(f"The sites' examples have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    axes = (0, *range(2, sites[0].x.ndim))
    count = sum(site.x.size / site.x.shape[1] for site in sites)
    mean = sum(site.x.sum(axes, dtype=np.float64) for site in sites) / count
    shape = (-1, *(1,) * (sites[0].x.ndim - 2))
    squares_ = sum(((site.x - mean.reshape(shape)) ** 2).sum(axes, dtype=np.float64) for site in sites)
    return Channels(mean, deviation(squares_ / count, mean))


def _facts(site: Site) -> Facts:
    values = site.x.astype(np.float64)
    there = np.isfinite(values)
    known, total = there.sum(0).astype(np.int64), np.where(there, values, 0.0).sum(0)
    return Facts(len(site), 0, tuple(site.x.shape[1:]), (), site.features, known, total)
