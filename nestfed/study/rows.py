"""New rows for a released model: read a table in pieces, and turn its columns into the features that the model knows."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestfed.core import MOST_NAMES, NestfedError
from nestfed.data.encoding import Column, Schema
from nestfed.data.formats import reading, refuse
from nestfed.data.tables import label_of, read_columns

PIECE = 50_000
"""Rows of a CSV file that are read at once."""
TRUTH = {"true": 1.0, "false": 0.0}


@dataclass
class Oddities:
    """What is unusual about new rows, although the model can use them."""

    rows: int = 0
    unseen: dict[str, Counter[str]] = field(default_factory=dict)
    """For each column, categories that the model does not know, with their rows."""
    ignored: tuple[str, ...] = ()
    """Columns that the model does not use."""

    def sentences(self, schema: Schema) -> list[str]:
        """Return them as sentences for people."""
        known = {column.name: column.categories or () for column in schema}
        found = []
        for name, counts in self.unseen.items():
            shown = ", ".join(_like(text, n, known[name]) for text, n in counts.most_common(5))
            more = f" and {len(counts) - 5} others" if len(counts) > 5 else ""
            found.append(f"Column {name!r} has categories that the model does not know: {shown}{more}.")
        if self.ignored:
            found.append(f"The model does not use {_list(self.ignored)}.")
        return found


def _like(text: str, rows: int, known: Sequence[str]) -> str:
    """Return an unseen category with its rows and the known one that it resembles."""
    near = {k.strip().casefold(): k for k in known}
    close = near.get(text.strip().casefold()) or next(iter(get_close_matches(text, known, 1, 0.8)), None)
    return f"{text!r} ({rows} {'row' if rows == 1 else 'rows'}{f', like {close!r}' if close else ''})"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:MOST_NAMES]))
    return shown + (f" and {len(names) - MOST_NAMES} more columns" if len(names) > MOST_NAMES else "")


def pieces(file: Path) -> Iterator[pd.DataFrame]:
    """Read a table in pieces whose index continues; a CSV file as text, and only one piece at a time."""
    if not file.name.lower().endswith((".csv", ".csv.gz")) or not file.is_file() or not file.stat().st_size:
        if file.name.lower().endswith(".npz"):
            raise NestfedError(f"{file} has no named columns: expected a .csv, .csv.gz or .parquet file.")
        yield pd.DataFrame(read_columns(file))
        return
    with reading(file, "a table of comma-separated values in UTF-8"), warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
        head = pd.read_csv(file, header=None, dtype=str, na_filter=False, nrows=1).iloc[0]
        names = [str(name).strip() for name in head]
        if twice := [name for name in names if names.count(name) > 1]:
            raise NestfedError(f"{file} has two columns called {twice[0]!r}: rename one of them.")
        with pd.read_csv(file, header=0, names=names, index_col=False, dtype=str, chunksize=PIECE) as found:
            yield from found


def whole_table(file: Path) -> pd.DataFrame:
    """Read a table at once, with the texts of a CSV file as they are."""
    found = list(pieces(file))
    if not sum(map(len, found)):
        raise NestfedError(f"{file} has no rows.")
    return pd.concat(found)


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
    table: pd.DataFrame, schema: Schema, where: str = "The table", oddities: Oddities | None = None
) -> np.ndarray:
    """Return the values of the columns in a model's schema, (rows, features); numbers that are missing are NaN.

    A category that the schema lacks is 0 in all of its features, and is counted in `oddities`. All problems are in one error.
    """
    problems = missing_columns(table, schema)
    if not len(table):
        raise refuse(where, "has no rows", "at least one")
    made = []
    for column in schema:
        if column.name not in table:
            continue
        if column.categories is None:
            values, problem = _numbers(table[column.name], where)
            problems += [f"column {column.name!r} {problem}"] if problem else []
            made.append(values[:, None])
        else:
            found, unseen = _categories(table[column.name], column)
            made.append(found)
            if unseen and oddities is not None:
                oddities.unseen.setdefault(column.name, Counter()).update(unseen)
    if problems:
        raise NestfedError(f"{where} does not fit the model: {'; '.join(problems)}.")
    if oddities is not None:
        oddities.rows += len(table)
    return np.concatenate(made, 1) if made else np.zeros((len(table), 0))


def missing_columns(table: pd.DataFrame, schema: Schema) -> list[str]:
    """Return the problem that a table lacks columns of a schema, if it does."""
    missing = [column.name for column in schema if column.name not in table]
    if not missing:
        return []
    return [f"it has no column {_list(missing)}; its columns are {', '.join(map(str, [*table][:MOST_NAMES]))}"]


def _numbers(column: pd.Series[Any], where: str) -> tuple[np.ndarray, str]:
    """Return a column as numbers, rounded to float32 as in training, and what is wrong with it."""
    if pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(np.float64, na_value=np.nan)
    else:
        text = column.astype(object).where(column.notna(), None)
        plain = [TRUTH.get(str(v).strip().lower(), v) for v in text]
        values = pd.to_numeric(pd.Series(plain, dtype=object), errors="coerce").to_numpy(np.float64)
        odd = np.flatnonzero(np.isnan(values) & column.notna().to_numpy())
        if len(odd):
            at = int(column.index[odd[0]])
            line = f"line {at + 2}" if where.lower().endswith((".csv", ".csv.gz")) else f"row {at + 1}"
            return values, f"holds the text {str(column.iloc[odd[0]])[:40]!r} in {line}, where the model needs numbers"
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32).astype(np.float64)
    return narrow, "holds infinite values" if np.isinf(narrow).any() else ""


def _categories(column: pd.Series[Any], known: Column) -> tuple[np.ndarray, Counter[str]]:
    """Return a column as one 0/1 feature per known category, and the rows of every other one."""
    place = {category: i for i, category in enumerate(known.categories or ())}
    codes, values = pd.factorize(column.astype(object))  # each different value is looked at once; −1 = missing
    names = [_category(value, place) for value in values]
    at = np.array([*(place.get(name, -1) for name in names), -1], np.int64)[codes]
    found = (at[:, None] == np.arange(len(place))).astype(np.float64)
    rows = np.bincount(codes[codes >= 0], minlength=len(names))
    return found, Counter({n: int(rows[i]) for i, n in enumerate(names) if n not in place})


def _category(value: Any, known: dict[str, int]) -> str:
    """Return the name of a category; 1, 1.0 and "1" are the same unless the model tells them apart."""
    text = label_of(value)
    if text in known:
        return text
    try:
        return label_of(float(text))
    except ValueError:
        return text
