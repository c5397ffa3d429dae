"""New rows for a released model: read a table in pieces, and turn its columns into the features that the model knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestfed.core import MOST_NAMES, NestfedError
from nestfed.data.columns import Reading, label_of
from nestfed.data.encoding import Column, Schema, TableEncoding
from nestfed.data.faults import Faults
from nestfed.data.formats import refuse
from nestfed.data.readers import Raw, in_pieces
from nestfed.data.schema import CATEGORY, NUMBER, ColumnSpec, TableSchema, folded

PIECE = 50_000
"""Rows of a CSV file that are read at once."""


@dataclass
class Oddities:
    """What is unusual about new rows, although the model can use them."""

    rows: int = 0
    unseen: dict[str, Counter[str]] = field(default_factory=dict)
    """For each column, categories that the model does not know, with their rows."""
    ignored: tuple[str, ...] = ()
    """Columns that the model does not use."""
    notes: dict[str, None] = field(default_factory=dict)
    """Further sentences."""

    def sentences(self, schema: Schema) -> list[str]:
        """Return them as sentences for people."""
        known = {column.name: column.categories or () for column in schema}
        found = [*self.notes]
        for name, counts in self.unseen.items():
            shown = ", ".join(_like(text, n, known[name]) for text, n in counts.most_common(5))
            more = f" and {len(counts) - 5} others" if len(counts) > 5 else ""
            found.append(f"Column {name!r} has categories that the model does not know: {shown}{more}.")
        if self.ignored:
            found.append(f"The model does not use {_list(self.ignored)}.")
        return found


def how_to_read(encoding: TableEncoding) -> TableSchema:
    """Return how the model's training tables were read; for a model without a schema, numbers and categories."""
    if encoding.table:
        return encoding.table
    return TableSchema({c.name: ColumnSpec(NUMBER if c.categories is None else CATEGORY) for c in encoding.schema})


def _like(text: str, rows: int, known: Sequence[str]) -> str:
    """Return an unseen category with its rows and the known one that it resembles."""
    near = {k.strip().casefold(): k for k in known}
    close = near.get(text.strip().casefold()) or next(iter(get_close_matches(text, known, 1, 0.8)), None)
    return f"{text!r} ({rows} {'row' if rows == 1 else 'rows'}{f', like {close!r}' if close else ''})"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:MOST_NAMES]))
    return shown + (f" and {len(names) - MOST_NAMES} more columns" if len(names) > MOST_NAMES else "")


def pieces(file: Path, how: TableSchema, texts: Collection[str] = ()) -> Iterator[pd.DataFrame]:
    """Read a table in pieces whose index continues; `texts`: columns to read as text, besides those of the schema."""
    if file.name.lower().endswith(".npz"):
        raise NestfedError(f"{file} has no named columns: expected a .csv, .csv.gz or .parquet file.")
    for raw in in_pieces(file, how.form, [*how.as_text, *texts], PIECE):
        found = pd.DataFrame(dict(raw.columns))
        yield found.set_axis(pd.RangeIndex(raw.first, raw.first + len(found)))


def whole_table(file: Path, how: TableSchema, texts: Collection[str] = ()) -> pd.DataFrame:
    """Read a table at once."""
    found = list(pieces(file, how, texts))
    if not sum(map(len, found)):
        raise NestfedError(f"{file} has no rows.")
    return pd.concat(found, ignore_index=True)


def class_numbers(labels: pd.Series[Any], classes: Sequence[str], where: str) -> np.ndarray:
    """Return the index of each label's class; reject missing labels and unknown classes."""
    if missing := int(labels.isna().sum()):
        raise NestfedError(
            f"{where} is missing in {missing:,} of {len(labels):,} rows: fill it in or remove these rows."
        )
    place = {name: i for i, name in enumerate(classes)}
    names = [_category(value, place) for value in labels]
    if strange := sorted({name for name in names if name not in place}):
        raise NestfedError(f"{where} holds {strange[0]!r}, expected one of {', '.join(classes)}.")
    return np.array([place[name] for name in names], np.int64)


def features(
    table: pd.DataFrame, encoding: TableEncoding, where: str = "The table", oddities: Oddities | None = None
) -> np.ndarray:
    """Return the features of a model's encoding, (rows, features), NaN where a number is missing.

    A category that the model does not know is 0 in all of its features, or "other"; `oddities` counts its rows. All problems
    are in one error.
    """
    if not len(table):
        raise refuse(where, "has no rows", "at least one")
    how, faults = how_to_read(encoding), Faults()
    missing = [name for name in how.needed if name not in table]
    if missing:
        has = ", ".join(map(str, [*table][:MOST_NAMES]))
        faults.add(f"{where} does not fit the model: it has no column {_list(missing)}; its columns are {has}.")
    first = table.index.start if isinstance(table.index, pd.RangeIndex) else 0
    columns = {str(name): table[name].reset_index(drop=True) for name in table}
    for column in encoding.schema:
        spec = how.columns.get(column.name, ColumnSpec())
        if column.name in columns and column.categories and not (spec.prefix or spec.buckets):
            known = set(column.categories)
            columns[column.name] = columns[column.name].map(
                lambda v, known=known: _category(v, known), na_action="ignore"
            )
    raw = Raw(where, columns, first=first)
    reading = Reading(raw, how.besides(missing), faults, strict=False)
    values, own = reading.features()
    faults.check()
    if oddities is not None:
        oddities.rows += len(table)
        oddities.notes |= dict.fromkeys(reading.notes)
        for name, unseen in _unseen(encoding.schema, own, values):
            oddities.unseen.setdefault(name, Counter()).update(unseen)
    return encoding.align(values, own, where)


def _unseen(schema: Schema, own: Schema, values: np.ndarray) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Return for each column the categories that a schema does not list, with their rows."""
    known, first = {column.name: column for column in schema}, 0
    for column in own:
        at, first = first, first + len(column)
        common = known.get(column.name, Column(column.name))
        if column.categories is None or common.categories is None or common.other:
            continue
        listed = {folded(category) for category in common.categories}
        rows = values[:, at:first].sum(0)
        unseen = {c: int(n) for c, n in zip(column.categories, rows) if n and folded(c) not in listed}
        if unseen:
            yield column.name, unseen


def _category(value: Any, known: Collection[str]) -> str:
    """Return the name of a category; 1, 1.0 and "1" are the same unless the model tells them apart."""
    text = label_of(value)
    if text in known:
        return text
    try:
        plain = label_of(float(text))
    except ValueError:
        return text
    return plain if plain in known else text
