"""A query: a named pure function of a site's own rows, with the declaration of its reply.

From the declaration follow, each in one place: the gate that checks a reply before it is decoded, the list of what leaves
a site, the disclosure rule that the site sets (`min_cell`), and the number of bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from nestfed.core import NestfedError
from nestfed.data.encoding import Schema
from nestfed.queries.slots import AtMost, Slot, misfit, most_bytes

LOG = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]

DTYPES = {"count": "<i8", "index": "<i8", "sum": "<f8", "text": "|u1"}
ROWS = "rows"
"""The count that is part of every reply: the rows that the query used."""
TRAINING, VALIDATION, TEST = PARTS = ("training", "validation", "test")
"""The parts of a site's table."""


class TooFewError(NestfedError):
    """A site has no rows for a query, or fewer than its `min_cell` allows to describe."""


@dataclass(frozen=True)
class Rows:
    """The rows of one part of a site's table, as queries see them."""

    x: np.ndarray
    """Model inputs, (n, inputs)."""
    y: np.ndarray
    """The target: class indices, numbers, or (n, 2) with time and event."""
    group: np.ndarray | None = None
    """For each row, a value that marks rows of the same person."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Columns as text, to count subgroups by."""
    scores: Callable[[np.ndarray], np.ndarray] | None = None
    """The scores of the rows under a model, given its parameters as one vector."""
    scores_of: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """The scores of other model inputs in place of `x`, given a model's parameters and the inputs."""
    own: Callable[[], np.ndarray] | None = None
    """The scores of the rows under a model that the site has trained alone."""
    site: str = ""
    """The site's name, for what differs by site, such as its calibration."""
    table: np.ndarray | None = None
    """The site's own table before it is encoded, for queries that agree on the encoding."""
    schema: Schema = ()
    """The columns of `table`."""
    classes: tuple[str, ...] = ()
    """The names of the classes."""
    stated: bool = True
    """Whether the study states these names; otherwise they come from this site's rows."""

    def __len__(self) -> int:
        return len(self.y)

    def coarse(self, min_cell: int) -> Rows:
        """Return the rows without rare values, so that no sum over them describes fewer than `min_cell` rows.

        In a column with two values, such as a category's 0/1, rarer than `min_cell`, all rows get the common value. Rare
        missing values become the column's mean, and a column with too few known values becomes missing.
        """
        if min_cell < 2:
            return self
        table = None if self.table is None else _coarse(self.table, min_cell)
        return replace(self, x=_coarse(self.x, min_cell) if self.x.ndim == 2 else self.x, table=table)


def _coarse(values: np.ndarray, min_cell: int) -> np.ndarray:
    found = np.array(values, np.float64)
    for column in found.T:
        _coarsen(column, min_cell)
    return found


def _coarsen(column: np.ndarray, min_cell: int) -> None:
    """Remove the rare values of a column, in place."""
    known = np.isfinite(column)
    if 0 < known.sum() < min_cell:
        column[:] = np.nan
        return
    if 0 < (~known).sum() < min_cell:
        column[~known] = column[known].mean()
    values, counts = np.unique(column[known], return_counts=True)
    if len(values) == 2 and counts.min() < min_cell:
        column[known] = values[counts.argmax()]


@dataclass(frozen=True)
class Field:
    """One array of a reply."""

    meaning: str
    """What it is, for the list of what leaves a site."""
    kind: Literal["count", "index", "sum", "text"] = "sum"
    """A count of rows, whole numbers that describe no rows, a sum over rows, or text."""
    shape: tuple[str, ...] = ()
    """The names of its sizes; the query's `sizes` gives their values."""
    over: str = ""
    """For a sum: the count of the rows that each cell adds up; empty = all rows of the part."""
    signed: bool = True
    """For a sum: whether it can be negative."""

    @property
    def dtype(self) -> str:
        """The type of its numbers, with byte order."""
        return DTYPES[self.kind]


def _no_sizes(**arguments: Any) -> Mapping[str, int | AtMost]:
    return {}


@dataclass(frozen=True)
class Query:
    """A statistic of a site's rows. Calling it computes the reply, under the site's disclosure rule."""

    name: str
    purpose: str
    """Why it is asked, in a short sentence."""
    compute: Callable[..., Arrays]
    """Computes the fields from `Rows` and the arguments."""
    fields: Mapping[str, Field]
    sizes: Callable[..., Mapping[str, int | AtMost]] = _no_sizes
    """Returns the values of the names in the fields' shapes, given the arguments."""
    protect: Callable[..., Arrays] | None = None
    """Replaces the default rule: given the reply and `min_cell`, returns it without cells below `min_cell`."""
    prepare: Callable[..., Rows] | None = None
    """Replaces `Rows.coarse`: given the rows, `min_cell` and the arguments, returns the rows that the query may use."""
    check: Callable[..., Any] | None = None
    """Reads a reply, given it and the arguments, and raises a ValueError if it contradicts itself."""
    of_columns: bool = True
    """Whether it describes columns, so that rare values are removed from the rows first."""
    at_model: bool = False
    """Whether it describes scores of a model, whose parameters are the argument `x`."""

    @property
    def declared(self) -> dict[str, Field]:
        """All fields of a reply, the number of rows included."""
        return {ROWS: Field("the number of rows used", "count"), **self.fields}

    def __call__(self, rows: Rows, min_cell: int = 0, **arguments: Any) -> dict[str, np.ndarray]:
        """Return a site's reply. No cell that counts between 1 and min_cell − 1 rows leaves the site."""
        if 0 < len(rows) < min_cell:
            raise TooFewError(
                f"This site has {len(rows)} rows for {self.name!r}, fewer than its min_cell = {min_cell}: it cannot answer."
            )
        made = self.compute(self._prepared(rows, min_cell, arguments), **arguments)
        found = {ROWS: np.array(len(rows), "<i8")}
        found |= {k: np.asarray(v, self.declared[k].dtype) for k, v in made.items()}
        if sentence := misfit({k: (v.dtype.str, v.shape) for k, v in found.items()}, self.slots(**arguments)):
            raise NestfedError(f"The query {self.name!r} broke its own declaration: {sentence}")
        if min_cell > 1:
            found |= (self.protect or self._suppressed)(found, min_cell)
        return found

    def _prepared(self, rows: Rows, min_cell: int, arguments: Mapping[str, Any]) -> Rows:
        """Return the rows that the query may use under the site's disclosure rule."""
        if min_cell > 1 and self.prepare is not None:
            return self.prepare(rows, min_cell, **arguments)
        return rows.coarse(min_cell) if self.of_columns else rows

    def _suppressed(self, reply: Arrays, min_cell: int) -> Arrays:
        """Set small counts, and the sums over their rows, to 0; a count that leaves few rows out, to all rows."""
        rows = reply[ROWS]
        small = {k: (reply[k] > 0) & (reply[k] < min_cell) for k, f in self.fields.items() if f.kind == "count"}
        found = {k: np.where(gone, 0, reply[k]) for k, gone in small.items()}
        found = {k: np.where((v < rows) & (v > rows - min_cell), rows, v) for k, v in found.items()}
        for k, f in self.fields.items():
            if f.over in small:
                gone = small[f.over]
                found[k] = np.where(gone.reshape(gone.shape + (1,) * (reply[k].ndim - gone.ndim)), 0.0, reply[k])
        return found

    def slots(self, **arguments: Any) -> dict[str, Slot]:
        """Return the type and the sizes of every array of a reply."""
        sizes = self.sizes(**arguments)
        return {k: Slot(f.dtype, tuple(sizes[name] for name in f.shape)) for k, f in self.declared.items()}

    def most_bytes(self, **arguments: Any) -> int:
        """Return the largest number of bytes of a reply's arrays."""
        return most_bytes(self.slots(**arguments))

    def invalid(self, reply: Arrays, most_rows: int | None = None, **arguments: Any) -> str:
        """Return what is wrong with the values of a reply, or nothing; `most_rows`: the rows that the site declared."""
        sizes: dict[str, int] = {}
        for name, one in self.declared.items():
            value = reply[name]
            if any(sizes.setdefault(size, n) != n for size, n in zip(one.shape, value.shape)):
                return f"its {name} has another size than its other arrays."
            if one.kind == "sum" and not np.isfinite(value).all():
                return f"its {name} holds infinite or NaN values."
            if one.kind == "sum" and not one.signed and (value < 0).any():
                return f"its {name} holds negative values."
            if one.kind == "count" and ((value < 0).any() or (most_rows is not None and (value > most_rows).any())):
                return f"its {name} holds counts outside 0 to {'the number of its rows' if most_rows is None else most_rows}."
        try:
            if self.check is not None:
                self.check(reply, **arguments)
        except ValueError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class Question:
    """A query about one part of a site's table."""

    query: Query
    part: str = TRAINING
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What it is called in a message, which may carry several questions."""
        return f"{self.query.name}.{self.part}"

    def answer(self, parts: Mapping[str, Rows], min_cell: int, x: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return a site's reply; `x`: the parameters of the model, for a query about its scores."""
        if self.part not in parts:
            raise TooFewError(f"This site has no {self.part} rows.")
        model = {"x": x} if self.query.at_model and x is not None else {}
        return self.query(parts[self.part], min_cell, **self.arguments, **model)


Answers = Mapping[str, Arrays]
"""A site's replies by the question's key. A question is missing if the site has too few rows for it."""


def answered(
    questions: Iterable[Question], parts: Mapping[str, Rows], min_cell: int, x: np.ndarray | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """Return a site's replies to the questions for which it has enough rows."""
    found = {}
    for one in questions:
        try:
            found[one.key] = one.answer(parts, min_cell, x)
        except TooFewError as error:
            LOG.info("%s", error)
    return found


class Ask(Protocol):
    """Asks every site a query about one part of its table; returns the replies by the site's number.

    Sites with too few rows for their `min_cell` are missing.
    """

    def __call__(self, query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]: ...  # noqa: D102


def at_hand(sites: Sequence[Mapping[str, Rows]], min_cell: int = 0) -> Ask:
    """Return how to ask sites whose tables are at hand, by part, as in a simulation."""

    def ask(query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        one = Question(query, part, arguments)
        replies = {n: answered([one], parts, min_cell) for n, parts in enumerate(sites)}
        return {n: reply[one.key] for n, reply in replies.items() if reply}

    return ask


def pooled(replies: Iterable[Arrays], reduce: str = "mean") -> dict[str, np.ndarray]:
    """Return the sums of counts and sums over sites.

    With reduce = "median", each number is the median over sites of its mean per row, times all rows, so that one bad site
    cannot move it far.
    """
    given = list(replies)
    if not given:
        raise NestfedError("No site answered the query.")
    names = [k for k, v in given[0].items() if v.dtype.kind in "if"]
    if reduce == "mean":
        return {k: sum((reply[k] for reply in given[1:]), given[0][k]) for k in names}
    some = [reply for reply in given if int(reply[ROWS])]
    total = sum(int(reply[ROWS]) for reply in some)
    means = {k: np.stack([np.asarray(reply[k], np.float64) / int(reply[ROWS]) for reply in some]) for k in names}
    return {k: np.asarray(np.median(v, axis=0) * total).astype(given[0][k].dtype) for k, v in means.items()}


def as_text(value: Any) -> np.ndarray:
    """Return a plain value as the bytes of its JSON text, for a field of kind "text"."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), np.uint8)


def from_text(array: np.ndarray) -> Any:
    """Return the value that `as_text` stored; raise a ValueError if it is not valid JSON."""
    try:
        return json.loads(bytes(array).decode())
    except RecursionError as error:  # hostile nesting
        raise ValueError("the text cannot be read") from error
