"""Queries before the first round: what sites must tell of their tables to agree on columns, classes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nestfed.data.encoding import Column, Sums, TableEncoding, schema_from_json, schema_to_json
from nestfed.queries.base import ROWS, Arrays, Field, Query, Rows, TooFewError, as_text, from_text
from nestfed.queries.slots import AtMost

LETTERS, FEATURES, MOST_CLASSES, AXES = 1_000_000, 100_000, 10_000, 8
"""The most bytes of text, features of a table, classes, and axes of an example that a reply may have."""


def _table(rows: Rows) -> Arrays:
    if rows.table is None:
        raise TooFewError("The examples of this site are not a table.")
    sums = Sums.of(rows.table, rows.schema)
    return {"schema": as_text(schema_to_json(rows.schema)), "known": sums.known, "total": sums.total}


def _without_rare(reply: Arrays, min_cell: int) -> Arrays:
    """Leave out the categories of fewer than `min_cell` rows, and their sums."""
    kept: list[int] = []
    schema: list[Column] = []
    first = 0
    for column in schema_from_json(from_text(reply["schema"])):
        places = list(range(first, first + len(column)))
        first += len(column)
        if column.categories is not None:
            common = [i for i in range(len(column)) if reply["total"][places[i]] >= min_cell]
            listed = tuple(column.categories[i] for i in common if i < len(column.categories))
            column = Column(column.name, listed, len(listed) < len(common))
            places = [places[i] for i in common]
        kept += places
        schema.append(column)
    return {
        "schema": as_text(schema_to_json(tuple(schema))),
        "known": reply["known"][kept],
        "total": reply["total"][kept],
    }


def sums_of(reply: Arrays) -> Sums:
    """Read a reply to `TABLE`; raise a ValueError if it contradicts itself."""
    try:
        schema = schema_from_json(from_text(reply["schema"]))
    except (TypeError, ValueError) as error:
        raise ValueError("its list of columns is invalid.") from error
    if sum(map(len, schema)) != len(reply["known"]):
        raise ValueError("its sums do not fit its columns.")
    if (reply["known"] > reply[ROWS]).any():
        raise ValueError("it knows more values than it has rows.")
    return Sums(schema, int(reply[ROWS]), reply["known"], reply["total"])


TABLE = Query(
    "table",
    "to agree on the columns, their categories and their means",
    _table,
    {
        "schema": Field("the names of the columns, whether they hold numbers or text, and the categories", "text", ("letters",)),
        "known": Field("for every feature, the number of rows in which it is known", "count", ("features",)),
        "total": Field("for every feature, its sum; for a category, its number of rows", "sum", ("features",), "known"),
    },
    lambda: {"letters": AtMost(LETTERS), "features": AtMost(FEATURES)},
    protect=_without_rare,
    check=sums_of,
)  # fmt: skip


def _encoding(schema: Any, mean: np.ndarray) -> TableEncoding:
    columns = schema_from_json(schema)
    return TableEncoding(columns, np.asarray(mean), np.ones(len(mean)), np.zeros(len(mean), bool))


def _squares(rows: Rows, schema: Any, mean: np.ndarray) -> Arrays:
    assert rows.table is not None
    return {"squares": _encoding(schema, mean).squares(rows.table, rows.schema)}


def _width(schema: Any, mean: np.ndarray) -> Mapping[str, int]:
    return {"features": len(mean)}


SQUARES = Query(
    "squares",
    "to agree on the scale of every feature",
    _squares,
    {"squares": Field("for every feature, the sum of its squared differences from the common mean", "sum", ("features",), signed=False)},
    _width,
)  # fmt: skip


def _classes(rows: Rows) -> Arrays:
    # A target that is not a class has no names of classes, and nothing to count.
    counts = (
        np.bincount(rows.y.astype(np.int64), minlength=len(rows.classes)) if rows.classes else np.zeros(0, np.int64)
    )
    names = as_text({"names": rows.classes, "stated": rows.stated})
    return {"names": names, "counts": counts, "shape": np.array(rows.x.shape[1:], np.int64)}


def _no_small_class(reply: Arrays, min_cell: int) -> Arrays:
    """Set small counts to 0, and leave out the name of a small class unless the study states it."""
    rows, counts = reply[ROWS], reply["counts"]
    found = np.where(counts < min_cell, 0, counts)
    found = np.where((found < rows) & (found > rows - min_cell), rows, found)
    words = from_text(reply["names"])
    if words["stated"]:
        return {"counts": found}
    kept = counts >= min_cell
    names = [name for name, keep in zip(words["names"], kept) if keep]
    return {"names": as_text({"names": names, "stated": False}), "counts": found[kept]}


def classes_of(reply: Arrays) -> tuple[tuple[str, ...], np.ndarray, tuple[int, ...]]:
    """Read a reply to `CLASSES`: names, counts, and the shape of an example; raise a ValueError if it contradicts itself."""
    try:
        names = tuple(map(str, from_text(reply["names"])["names"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("its list of classes is invalid.") from error
    if len(names) != len(reply["counts"]):
        raise ValueError("its counts do not fit its classes.")
    if (reply["shape"] < 0).any():
        raise ValueError("its examples have a negative size.")
    return names, reply["counts"], tuple(map(int, reply["shape"]))


CLASSES = Query(
    "classes",
    "to agree on the classes and the share of positives",
    _classes,
    {
        "names": Field("the names of the classes", "text", ("letters",)),
        "counts": Field("the number of rows of each class", "count", ("classes",)),
        "shape": Field("the size of an example", "index", ("axes",)),
    },
    lambda: {"letters": AtMost(LETTERS), "classes": AtMost(MOST_CLASSES), "axes": AtMost(AXES)},
    protect=_no_small_class,
    check=classes_of,
    of_columns=False,
)
