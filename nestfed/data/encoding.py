"""From a table to model inputs: align columns, encode categories, fill missing values, scale.

A table is an array of numbers and a schema. A column of numbers is one feature, NaN where missing. A column of text is
one 0/1 feature per category, all 0 where missing. Sites agree on one `TableEncoding` in two steps without sharing rows:

1. Each sends `Sums` of its training rows; `merge` computes the common schema and the means.
2. Each sends the squared differences from these means (`TableEncoding.squares`); `finish` computes the deviations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import MOST_NAMES, NestfedError
from nestfed.data.schema import EMPTY, TableSchema, folded, same_spelling

FAR = 5.0
"""A feature's largest distance from its mean, in deviations."""
MOST_CATEGORIES, LEAST_ROWS = 50, 10
"""A column with more categories at all sites keeps this many of its most common ones, those with at least so many rows."""
OTHER = "(other)"
"""The name of the feature that rare categories share."""


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers, or text with these categories."""

    name: str
    categories: tuple[str, ...] | None = None
    """None for numbers; empty for text without any known value."""
    other: bool = False
    """All categories that are not listed share one more feature, the last."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features, for people."""
        return self._named(self.name)

    @property
    def quoted(self) -> tuple[str, ...]:
        """The names of its features with the column in quotation marks, where `features` would be ambiguous."""
        return self._named(json.dumps(self.name, ensure_ascii=False))

    def _named(self, name: str) -> tuple[str, ...]:
        if self.categories is None:
            return (name,)
        return tuple(f"{name}={c}" for c in (*self.categories, *[OTHER] * self.other))

    def __len__(self) -> int:
        return 1 if self.categories is None else len(self.categories) + self.other


Schema = tuple[Column, ...]
"""The columns of a table, in order."""


def features_of(schema: Schema) -> tuple[str, ...]:
    """Return the names of a table's features, for people; each is unique.

    A category is named column=category. Where two features would have the same name, because a column's name contains
    "=", the names of the columns are in quotation marks.
    """
    named = Counter(name for column in schema for name in column.features)
    return tuple(
        quoted if named[plain] > 1 else plain
        for column in schema
        for plain, quoted in zip(column.features, column.quoted)
    )


def numbered(count: int) -> Schema:
    """Return the schema of an array without names: x0, x1, …"""
    return tuple(Column(f"x{i}") for i in range(count))


def schema_to_json(schema: Schema) -> list[Any]:
    """Return a schema as JSON: [name, categories or null] for every column, with true behind if others share a feature."""
    return [[c.name, None if c.categories is None else list(c.categories), *[True] * c.other] for c in schema]


def schema_from_json(found: Any) -> Schema:
    """Return the schema that `schema_to_json` wrote; raise a ValueError if it is invalid."""
    schema = tuple(
        Column(name, None if known is None else tuple(known), bool(other) and known is not None)
        for name, known, *other in found
    )
    texts = [text for c in schema for text in (c.name, *(c.categories or ()))]
    if not all(isinstance(text, str) for text in texts) or len({c.name for c in schema}) < len(schema):
        raise ValueError("expected pairs of a unique column name and its categories or null")
    return schema


@dataclass(frozen=True)
class Sums:
    """What a site shares about its training rows: schema, number of rows, and per feature the known count and sum."""

    schema: Schema
    rows: int
    known: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, schema: Schema) -> Sums:
        """Compute the sums of one site."""
        values = flat(x).astype(np.float64)
        known = np.isfinite(values)
        return cls(schema, len(x), known.sum(0).astype(np.int64), np.where(known, values, 0.0).sum(0))

    def aligned(self, schema: Schema, site: str) -> np.ndarray:
        """Return known counts and sums in a common order. A category that this site lacks is 0 in every row."""
        found = np.zeros((2, sum(map(len, schema))))
        for i, own in enumerate(_routes(schema, self.schema, site)):
            if own is None:
                continue
            found[:, i] = (self.known[own].max(), self.total[own].sum()) if own else (self.rows, 0.0)
        return found


def flat(x: np.ndarray) -> np.ndarray:
    """Return examples of any shape as rows of a table."""
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


@dataclass(frozen=True)
class TableEncoding:
    """Turns any site's table into model inputs: the common columns, and the scale of their features.

    A missing value becomes the mean. `gaps` marks the features with missing values in the training rows. Each gets an
    extra input "is missing", which in clinical tables is often more informative than the imputed value.
    """

    schema: Schema
    mean: np.ndarray
    deviation: np.ndarray
    gaps: np.ndarray
    scaled: bool = True
    """False: do not scale, and reject missing values."""
    table: TableSchema = EMPTY
    """How the columns of a table become numbers, to read other tables in the same way."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, before "is missing" is added."""
        return features_of(self.schema)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        names = self.features
        return (*names, *(f"{names[i]} is missing" for i in np.flatnonzero(self.gaps)))

    def align(self, x: np.ndarray, schema: Schema, where: str = "The table") -> np.ndarray:
        """Return a table's features in the common order; `where` names the table in errors.

        A category that this table lacks is 0. A missing column, or one of another kind, is an error.
        """
        values = flat(x)
        routes, place = _routes(self.schema, schema, where), _places(schema)
        for column in self.schema:
            own, first = place[column.name]
            if column.categories is not None and own.categories is None and np.isfinite(values[:, first]).any():
                raise NestfedError(f"{where} holds numbers in column {column.name!r}, which is text elsewhere.")
        if routes == [[i] for i in range(values.shape[1])]:
            return values.astype(np.float64)  # avoids a copy of a large array
        made = np.full((len(values), len(routes)), np.nan)
        for i, from_ in enumerate(routes):
            if from_ is not None:
                made[:, i] = values[:, from_[0]] if len(from_) == 1 else values[:, from_].sum(1)
        return made

    def squares(self, x: np.ndarray, schema: Schema, where: str = "The table") -> np.ndarray:
        """Return each feature's sum of squared differences from the common mean, which a site sends in step 2."""
        values = self.align(x, schema, where)
        squares: np.ndarray = (np.where(np.isfinite(values), values - self.mean, 0.0) ** 2).sum(0)
        return squares

    def __call__(self, x: np.ndarray, schema: Schema, where: str = "The table") -> Tensor:
        """Return model inputs; examples of more than two axes keep their shape."""
        values = torch.from_numpy(self.align(x, schema, where))
        if self.scaled:
            made = standardised(values, torch.from_numpy(self.mean), torch.from_numpy(self.deviation), self.marked)
        elif not bool(torch.isfinite(values).all()):
            raise NestfedError(f"{where} contains NaN: keep standardize=True, which fills in missing values.")
        else:
            made = values.float()
        return made if x.ndim == 2 else made.reshape(x.shape)

    @property
    def marked(self) -> list[int]:
        """The positions of the features with gaps."""
        return [int(i) for i in np.flatnonzero(self.gaps)]

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as JSON."""
        numbers = {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "gaps": self.gaps.tolist()}
        table = {"table": self.table.to_tables()} if self.table else {}
        return {"kind": "table", "columns": schema_to_json(self.schema), **numbers, "scaled": self.scaled, **table}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TableEncoding:
        """Return the encoding that `to_json` wrote."""
        mean, deviation = np.array(found["mean"], np.float64), np.array(found["deviation"], np.float64)
        schema, gaps = schema_from_json(found["columns"]), np.array(found["gaps"], bool)
        table = TableSchema.from_tables(found.get("table", {}))
        return cls(schema, mean, deviation, gaps, bool(found["scaled"]), table)


NO_TABLE = TableEncoding((), np.zeros(0), np.zeros(0), np.zeros(0, bool))
"""The encoding of examples that are not tables, such as images."""


def encode(tables: Mapping[str, tuple[np.ndarray, Schema]], *, mark_gaps: bool = True) -> TableEncoding:
    """Return the common encoding of several sites, given their training rows by site."""
    sums = {f"Site {name}": Sums.of(x, schema) for name, (x, schema) in tables.items()}
    found = merge(sums, mark_gaps=mark_gaps)
    return finish(found, [found.squares(x, schema, f"Site {name}") for name, (x, schema) in tables.items()], sums)


def merge(sites: Mapping[str, Sums], *, mark_gaps: bool = True, robust: bool = False) -> TableEncoding:
    """Return the common schema and means; keys such as "Site a" are for errors. `finish` adds the deviations.

    With `robust`, the statistics are medians over the sites, so that one bad site cannot move them far.
    """
    schema = common_schema(sites)
    known, total = _typical(schema, sites) if robust else _totals(schema, sites)
    gaps = known < sum(sums.rows for sums in sites.values())
    return TableEncoding(schema, total / np.maximum(known, 1), np.ones(len(known)), gaps & mark_gaps)


def finish(
    encoding: TableEncoding, squares: Iterable[np.ndarray], sites: Mapping[str, Sums], *, robust: bool = False
) -> TableEncoding:
    """Return the encoding with deviations computed from the sites' squared differences."""
    if robust:
        each = [sums.aligned(encoding.schema, site)[0] for site, sums in sites.items()]
        variance = _median(np.stack(list(squares)), np.stack(each))
    else:
        known, _ = _totals(encoding.schema, sites)
        variance = sum(squares, np.zeros(len(known))) / np.maximum(known, 1)
    return replace(encoding, deviation=deviation(variance, encoding.mean))


def _totals(schema: Schema, sites: Mapping[str, Sums]) -> np.ndarray:
    """Return every feature's known count and sum over all sites."""
    return sum((sums.aligned(schema, site) for site, sums in sites.items()), np.zeros((2, sum(map(len, schema)))))


def _typical(schema: Schema, sites: Mapping[str, Sums]) -> np.ndarray:
    """Return every feature's known count and sum, as if all sites had the medians over sites of its share and mean."""
    each = np.stack([sums.aligned(schema, site) for site, sums in sites.items()])
    rows = np.array([[sums.rows] for sums in sites.values()])
    known = np.round(_median(each[:, 0], np.broadcast_to(rows, each[:, 0].shape)) * rows.sum())
    return np.stack([known, _median(each[:, 1], each[:, 0]) * known])


def _median(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return for each column the median over sites of total / count, among the sites that count any; 0 if none does."""
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    some = (count > 0).any(0)
    found: np.ndarray = np.zeros(total.shape[1])
    found[some] = np.nanmedian(means[:, some], axis=0)
    return found


def common_schema(sites: Mapping[str, Sums]) -> Schema:
    """Return the columns in the order of the first site, with all sites' categories in alphabetical order.

    Every site must have every column. A column without any known value is compatible with numbers and with text. In a
    column with more than `MOST_CATEGORIES` categories, rare ones share a feature. Categories that differ between sites in
    spaces and capital letters only are the same (`spellings`).
    """
    kinds: dict[str, dict[str, str]] = {}
    for site, sums in sites.items():
        for name, kind in kinds_of(sums).items():
            kinds.setdefault(name, {}).setdefault(kind, site)
    for name, by_kind in kinds.items():
        for site, sums in sites.items():
            if name not in _places(sums.schema):
                holder = next(iter(by_kind.values()))
                raise NestfedError(
                    f"{site} has no column {name!r}, which {_inside(holder)} has: add it, or drop it everywhere."
                )
        if {"text", "numbers"} <= by_kind.keys():
            raise NestfedError(
                f"Column {name!r} holds text at {_inside(by_kind['text'])} but numbers at {_inside(by_kind['numbers'])}: "
                "use one kind at all sites, or drop the column."
            )
    numbers = {
        c.name for sums in sites.values() for c in sums.schema if c.categories is None and "text" not in kinds[c.name]
    }
    return tuple(Column(name) if name in numbers else _common(name, sites) for name in kinds)


def _common(name: str, sites: Mapping[str, Sums]) -> Column:
    """Return a column of text with the categories of all sites; of very many, the most common ones."""
    counts = _counts(name, sites)
    alike = _alike(name, sites)
    total: dict[str, float] = {}
    for by_category in counts.values():
        for category, rows in by_category.items():
            total[alike[category]] = total.get(alike[category], 0.0) + rows
    other = any(_places(sums.schema)[name][0].other for sums in sites.values())
    if len(total) <= MOST_CATEGORIES:
        return Column(name, tuple(sorted(total)), other)
    common = sorted(total, key=lambda c: (-total[c], c))[:MOST_CATEGORIES]
    return Column(name, tuple(sorted(c for c in common if total[c] >= LEAST_ROWS)), True)


def _counts(name: str, sites: Mapping[str, Sums]) -> dict[str, dict[str, float]]:
    """Return each site's rows by category of a column."""
    found: dict[str, dict[str, float]] = {}
    for site, sums in sites.items():
        column, first = _places(sums.schema)[name]
        rows = sums.total[first : first + len(column)].tolist()
        found[site] = dict(zip(column.categories or (), rows))
    return found


def _alike(name: str, sites: Mapping[str, Sums]) -> dict[str, str]:
    """Return the common spelling of every category: the one with most rows."""
    total: dict[str, float] = {}
    for by_category in _counts(name, sites).values():
        for category, rows in by_category.items():
            total[category] = total.get(category, 0.0) + rows
    return same_spelling(total)


def differences(sites: Mapping[str, Sums]) -> list[str]:
    """Return, in sentences, which categories the common schema treats as the same, and which it groups."""
    found = []
    for column in common_schema(sites):
        if column.categories is None:
            continue
        alike = _alike(column.name, sites)
        if changed := {a: b for a, b in alike.items() if a != b}:
            shown = ", ".join(f"{a!r} as {b!r}" for a, b in list(changed.items())[:MOST_NAMES])
            found.append(f"Column {column.name!r}: {shown}; sites spell them differently.")
        if rare := set(alike.values()) - set(column.categories):
            found.append(
                f"Column {column.name!r} has {len(set(alike.values())):,} categories; the {len(column.categories)} most "
                f"common have a feature each, and the {len(rare):,} others share one."
            )
    return found


def kinds_of(sums: Sums) -> dict[str, str]:
    """Return what each column of a site holds: "text", "numbers", or "" if no value is known."""

    def kind(column: Column, first: int) -> str:
        if column.categories is None and not column.other:
            return "numbers" if sums.known[first] else ""
        return "text" if column.categories or column.other else ""

    return {name: kind(column, first) for name, (column, first) in _places(sums.schema).items()}


def _inside(where: str) -> str:
    """Return a name as written inside a sentence."""
    return where[:1].lower() + where[1:]


def _places(schema: Schema) -> dict[str, tuple[Column, int]]:
    """Return every column by name, with the position of its first feature."""
    found, first = {}, 0
    for column in schema:
        found[column.name] = (column, first)
        first += len(column)
    return found


def _routes(schema: Schema, own: Schema, where: str) -> list[list[int] | None]:
    """Return for each common feature the table's own features that add up to it; None = missing in every row."""
    place = _places(own)
    found: list[list[int] | None] = []
    for column in schema:
        if column.name not in place:
            raise NestfedError(f"{where} has no column {column.name!r}.")
        mine, first = place[column.name]
        if column.categories is None:
            if mine.categories or mine.other:
                raise NestfedError(f"{where} holds text in column {column.name!r}, which is numbers elsewhere.")
            found.append([first] if mine.categories is None else None)
        else:
            routes: list[list[int]] = [[] for _ in range(len(column))]
            for i, at in enumerate(_homes(column, mine)):
                if at is not None:
                    routes[at].append(first + i)
            found += routes
    return found


def _homes(column: Column, own: Column) -> list[int | None]:
    """Return for each of a table's own categories, "other" included, its place among the common ones."""
    listed = column.categories or ()
    exact = {category: i for i, category in enumerate(listed)}
    loose = {folded(category): i for i, category in enumerate(listed)}
    rest = len(listed) if column.other else None
    homes = [exact.get(c, loose.get(folded(c), rest)) for c in own.categories or ()]
    return [*homes, *[rest] * own.other]


def unseen(schema: Schema, own: Schema, where: str) -> list[str]:
    """Return, in sentences, which categories of a table were not in the training data."""
    place, found = _places(own), []
    for column in schema:
        mine = place[column.name][0] if column.name in place else column
        if column.categories is None or column.other:
            continue
        homes = _homes(column, mine)
        if strange := [c for c, at in zip(mine.categories or (), homes) if at is None]:
            listed = ", ".join(map(repr, strange[:MOST_NAMES]))
            found.append(f"{where} has categories in column {column.name!r} that training did not have: {listed}.")
    return found


def deviation(variance: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the square root of the variance, or 1 for a feature that is constant up to rounding."""
    found = np.sqrt(variance)
    return np.where(found <= 1e-12 * np.maximum(np.abs(mean), 1), 1.0, found)


def standardised(x: Tensor, mean: Tensor, deviation: Tensor, gaps: Sequence[int]) -> Tensor:
    """Scale features, fill missing values with the mean, and add "is missing" for the features in `gaps`.

    Values are clipped at `FAR` deviations from the mean. Otherwise a typing error, or a rare 0/1 feature scaled to 50,
    would determine the largest stable step size.
    """
    values = x.double()
    missing = ~torch.isfinite(values)
    scaled = torch.where(missing, 0.0, ((values - mean) / deviation).clamp(-FAR, FAR))
    return torch.cat([scaled, missing[:, gaps].double()], 1).float() if gaps else scaled.float()
