"""From a table's columns to numbers, as its schema says: marks of missing values, categories, dates, allowed ranges."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import MOST_NAMES, NestfedError
from nestfed.data.encoding import Column, Schema
from nestfed.data.faults import Faults
from nestfed.data.readers import Raw
from nestfed.data.schema import (
    CATEGORY,
    DATE,
    EPOCH,
    FEATURES,
    IGNORED,
    OPEN,
    ORDERED,
    ColumnSpec,
    TableSchema,
    folded,
    is_number,
    same_spelling,
    spaced,
)

Array = npt.NDArray[Any]
Odd = dict[str, tuple[int, int]]
"""For each text that is not a number: its first row and the number of its rows."""

DATE_FORMATS = {
    re.compile(r"\d{4}-\d\d?-\d\d?([ T]\d\d?:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?"): "ISO8601",
    re.compile(r"\d\d?\.\d\d?\.\d{4}"): "%d.%m.%Y",
}
"""Dates that are recognised. 03/04/2020 is not: it may be in March or in April."""
MOST_FEATURES = 5_000
"""The most different categories of one column that become features."""
DAY = 86_400.0


@dataclass
class Reading:
    """One table being read: what is wrong with it is in `faults`, what may surprise in `notes`."""

    raw: Raw
    schema: TableSchema
    faults: Faults
    strict: bool = True
    """False for rows to predict: values that the schema does not know are missing, and a note says so."""
    holders: Mapping[str, str] = field(default_factory=dict)
    """For a column, a table that has it."""

    def __post_init__(self) -> None:
        self.notes: list[str] = []

    # ------------------------------------------------------------------------------------------- the table

    def features(self) -> tuple[Array, Schema]:
        """Return the columns that a model sees as numbers, with their schema."""
        made: dict[Column, Array] = {}
        length, before = len(self.raw), len(self.faults.found)
        columns = self.raw.columns
        for name, spec in self.schema.columns.items():
            if spec.kind not in (*FEATURES, OPEN):
                continue
            if name not in columns:
                if not spec.optional:
                    owner = self.holders.get(name)
                    hint = "drop it everywhere" if owner else "set optional = true"
                    self.faults.add(
                        f"{self.raw.who} has no column {name!r}, which {f'{owner} has' if owner else 'the schema names'}: "
                        f"add it, or {hint}."
                    )
                    continue
                self.notes.append(f"{self.raw.who} has no column {name!r}; its values count as missing.")
                empty = Column(name, ()) if spec.kind == CATEGORY else Column(name)
                made[empty] = np.full((length, len(empty)), np.nan, np.float32)
                continue
            with self.faults.noting():
                column, values = self._makers.get(spec.kind, self.number)(name, spec)
                made[column] = values
        if self.schema.others == IGNORED and (extra := [n for n in columns if n not in self.schema.columns]):
            listed = ", ".join(map(repr, extra[:MOST_NAMES]))
            self.notes.append(
                f"{self.raw.where} has columns that the schema does not name: {listed}; they are left out."
            )
        if not any(map(len, made)):
            if len(self.faults.found) == before:
                self.faults.add(
                    f"{self.raw.where} has no column left for features: expected at least one beside the target."
                )
            return np.zeros((length, 0), np.float32), ()
        return np.concatenate(list(made.values()), 1), tuple(made)

    @property
    def _makers(self) -> Mapping[str, Callable[[str, ColumnSpec], tuple[Column, Array]]]:
        return {CATEGORY: self.category, ORDERED: self.ordered, DATE: self.date}

    # ------------------------------------------------------------------------------------------- one column

    def number(self, name: str, spec: ColumnSpec) -> tuple[Column, Array]:
        """Return a column of numbers."""
        where = f"Column {name!r} of {self.raw.where}"
        values, odd = numbers(self.raw.columns[name], (*self.schema.missing, *spec.missing), where)
        if odd:
            text, (row, _) = next(iter(odd.items()))
            how = self.faults.entrance
            self.faults.add(
                f"Column {name!r} of {self.raw.where} holds the text {text[:40]!r} in {self.raw.line(row)} where its "
                "other values are numbers: write a number there, leave it empty if it is missing, or use "
                f"{how('missing', value=text[:40])} or {how('category', column=name)}."
            )
        if spec.range:
            self._range(name, spec, values)
        return Column(name), finite(self.raw.where, name, values)[:, None]

    def _range(self, name: str, spec: ColumnSpec, values: Array) -> None:
        low, high = spec.range
        outside = np.flatnonzero((values < low) | (values > high))
        if not len(outside):
            return
        first = int(outside[0])
        sentence = (
            f"Column {name!r} of {self.raw.where} has {len(outside):,} values outside {low:g} to {high:g}"
            f"{f' {spec.unit}' if spec.unit else ''}, such as {values[first]:g} in {self.raw.line(first)}"
        )
        if self.strict:
            how = self.faults.entrance("missing", value=f"{values[first]:g}")
            self.faults.add(f"{sentence}: correct them, change range, or use {how} if it marks a missing value.")
        else:
            self.notes.append(f"{sentence}.")

    def category(self, name: str, spec: ColumnSpec) -> tuple[Column, Array]:
        """Return a column of categories as one 0/1 feature per category, all 0 where it is missing."""
        levels = self.levels(name, spec)
        known = {level: i for i, level in enumerate(sorted({level for level in levels if level is not None}))}
        if spec.categories:
            known = {level: i for i, level in enumerate(sorted(spec.categories))}
            levels = self._listed(name, spec, levels)
        if len(known) > MOST_FEATURES:
            raise NestfedError(
                f"Column {name!r} of {self.raw.where} has {len(known):,} categories: group them by prefix or buckets in "
                f"its schema, or leave it out ({self.faults.entrance('drop', column=name)})."
            )
        other = bool(spec.categories) and spec.other
        values = np.zeros((len(levels), len(known) + other), np.float32)
        at = np.array([-1 if level is None else known.get(level, len(known)) for level in levels], np.int64)
        rows = np.flatnonzero((at >= 0) & (at < values.shape[1]))
        values[rows, at[rows]] = 1.0
        return Column(name, tuple(known), other), values

    def levels(self, name: str, spec: ColumnSpec) -> list[str | None]:
        """Return the category of every row, None if missing: spaces and capital letters made alike, then grouped."""
        texts = as_texts(self.raw, name, (*self.schema.missing, *spec.missing))
        if spec.prefix:
            texts = [None if t is None else t[: spec.prefix].upper() for t in texts]
        if spec.buckets:
            return [None if t is None else bucket(t, spec.buckets) for t in texts]
        if spec.categories:
            return texts
        alike = same_spelling(Counter(t for t in texts if t is not None))
        if changed := {a: b for a, b in alike.items() if a != b}:
            shown = ", ".join(f"{a!r} as {b!r}" for a, b in list(changed.items())[:MOST_NAMES])
            self.notes.append(f"Column {name!r} of {self.raw.where}: {shown}, which differ in capital letters only.")
        return [None if t is None else alike[t] for t in texts]

    def _listed(self, name: str, spec: ColumnSpec, levels: list[str | None]) -> list[str | None]:
        """Return the categories in the spelling of the schema; others become "" and are reported."""
        own = {folded(c): c for c in spec.categories}
        found = [None if t is None else own.get(folded(t), "") for t in levels]
        odd = Counter(t for t, made in zip(levels, found) if made == "" and t is not None)
        if odd and not spec.other:
            listed = ", ".join(map(repr, list(odd)[:8])) + (", …" if len(odd) > 8 else "")
            self.notes.append(
                f"Column {name!r} of {self.raw.where} has categories that its schema does not list, in {odd.total():,} "
                f"rows: {listed}; they count as none of the listed ones."
            )
        return found

    def ordered(self, name: str, spec: ColumnSpec) -> tuple[Column, Array]:
        """Return the position of every category in their order, from 0."""
        place = {folded(c): i for i, c in enumerate(spec.categories)}
        texts = as_texts(self.raw, name, (*self.schema.missing, *spec.missing))
        odd = {i: t for i, t in enumerate(texts) if t is not None and folded(t) not in place}
        if odd:
            row, text = next(iter(odd.items()))
            sentence = (
                f"Column {name!r} of {self.raw.where} holds {text[:40]!r} in {self.raw.line(row)}, which is none of its "
                f"ordered categories {', '.join(spec.categories)}"
            )
            if self.strict:
                self.faults.add(f"{sentence}: add it to the schema in its place, or correct it.")
            else:
                self.notes.append(f"{sentence}; it counts as missing.")
        values = [np.nan if t is None else place.get(folded(t), np.nan) for t in texts]
        return Column(name), np.array(values, np.float32)[:, None]

    def date(self, name: str, spec: ColumnSpec) -> tuple[Column, Array]:
        """Return a date as the days since another one."""
        seconds = self._seconds(name, spec)
        if spec.since in self.raw.columns:
            start: Any = self._seconds(spec.since, self.schema.columns.get(spec.since, ColumnSpec(DATE)))
        elif not spec.since or spec.since not in self.schema.columns:
            start = _seconds_of(spec.since or EPOCH)
        else:
            raise NestfedError(f"{self.raw.where} has no column {spec.since!r}, from which {name!r} counts days.")
        return Column(name), finite(self.raw.where, name, (seconds - start) / DAY)[:, None]

    def _seconds(self, name: str, spec: ColumnSpec) -> Array:
        column = self.raw.columns[name]
        marks = (*self.schema.missing, *spec.missing)
        values, row = seconds(column, as_texts(self.raw, name, marks), spec.format)
        if row is not None:
            how = self.faults.entrance("date", column=name)
            raise NestfedError(
                f"Column {name!r} of {self.raw.where} holds {str(column.iloc[row])[:40]!r} in {self.raw.line(row)}, which "
                f"is not a date{f' of the format {spec.format}' if spec.format else ''}: write 2020-12-31, or state the "
                f"format, such as {how}."
            )
        return values


# ---------------------------------------------------------------------------------------------------------
# Values


def coded(column: Any, where: str) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return the number of each row's text, -1 where missing, and the texts, with single spaces. 1.0 and 1 are the same."""
    pd = importlib.import_module("pandas")
    try:
        codes, found = pd.factorize(column.astype(object))
        known = found.tolist()
    except TypeError:  # not hashable, such as a list
        known = [column]
    if not all(isinstance(v, str | bool | int | float | date) for v in known):
        raise NestfedError(f"{where} holds neither numbers nor texts: drop it.")
    return codes, [spaced(v if isinstance(v, str) else label_of(v)) for v in known]


def numbers(column: Any, marks: tuple[str, ...] = (), where: str = "A column") -> tuple[Array, Odd]:
    """Return a column as numbers, NaN where missing or marked, and its texts that are not numbers."""
    pd = importlib.import_module("pandas")
    types = pd.api.types
    if column.dtype == object and types.infer_dtype(column, skipna=True) == "boolean":
        column = column.astype("boolean")  # a missing value must not turn booleans into text
    if types.is_bool_dtype(column.dtype) or types.is_numeric_dtype(column.dtype):
        values: Array = column.to_numpy(np.float64, na_value=np.nan)
        return _unmarked(values, marks), {}
    codes, texts = coded(column, where)
    gone = {*marks, ""}
    known = pd.Series([None if t in gone else t for t in texts], dtype=object)
    parsed = pd.to_numeric(known, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    odd: Odd = {}
    strange = np.isnan(parsed) & known.notna().to_numpy()
    if strange.any():
        which, first, rows = np.unique(codes, return_index=True, return_counts=True)
        seen = sorted((int(row), int(n), texts[i]) for i, row, n in zip(which, first, rows) if i >= 0 and strange[i])
        for row, n, text in seen:
            start, before = odd.get(text, (row, 0))
            odd[text] = (start, before + n)
    return _unmarked(np.append(parsed, np.nan)[codes], marks), odd


def _unmarked(values: Array, marks: tuple[str, ...]) -> Array:
    """Return numbers with NaN in place of those that mark missing values."""
    codes = [float(m) for m in marks if is_number(m)]
    return np.where(np.isin(values, codes), np.nan, values) if codes else values


def as_texts(raw: Raw, name: str, marks: tuple[str, ...] = ()) -> list[str | None]:
    """Return a column as texts, None where missing or marked."""
    codes, texts = coded(raw.columns[name], f"Column {name!r} of {raw.where}")
    gone = {*marks, ""}
    kept = np.array([*(None if t in gone else t for t in texts), None], dtype=object)
    found: list[str | None] = kept[codes].tolist()
    return found


def label_of(value: Any) -> str:
    """Return the name of a label: 1, 1.0 and "1" are the same."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def seconds(column: Any, texts: list[str | None], form: str) -> tuple[Array, int | None]:
    """Return dates as seconds since 1970, NaN where missing, and the first row that is not a date."""
    pd = importlib.import_module("pandas")
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        times = pd.to_datetime(column, utc=True)
    elif pd.api.types.is_timedelta64_dtype(column.dtype):
        return column.dt.total_seconds().to_numpy(np.float64, na_value=np.nan), None
    else:
        known = pd.Series(texts, dtype=object)
        form = form or next((f for shape, f in DATE_FORMATS.items() if _all_match(shape, texts)), "ISO8601")
        times = pd.to_datetime(known, format=form, errors="coerce", utc=True)
        wrong = np.flatnonzero((times.isna() & known.notna()).to_numpy())
        if len(wrong):
            return np.full(len(texts), np.nan), int(wrong[0])
    since = (times - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return since.to_numpy(np.float64, na_value=np.nan), None


def _all_match(shape: re.Pattern[str], texts: list[str | None]) -> bool:
    return all(t is None or shape.fullmatch(t) for t in texts)


def _seconds_of(day: str) -> float:
    return float((date.fromisoformat(day) - date(1970, 1, 1)).days) * DAY


def bucket(text: str, buckets: int) -> str:
    """Return the bucket of a category, the same at every site."""
    number = int.from_bytes(hashlib.sha256(folded(text).encode()).digest()[:8], "big")
    return f"#{number % buckets:0{len(str(buckets - 1))}d}"


def finite(where: str, name: str, values: Array) -> Array:
    """Return numbers as float32; reject infinite ones."""
    with np.errstate(over="ignore"):
        narrow: Array = values.astype(np.float32)
    if np.isinf(narrow).any():
        raise NestfedError(
            f"Column {name!r} of {where} holds infinite values: replace them with numbers or leave them empty."
        )
    return narrow
