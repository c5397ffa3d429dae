"""Find out what the columns of tables are, where no schema says so.

| a column | becomes |
| --- | --- |
| of numbers, also with marks such as `?`, and with -9, -99, -999 if nothing else is negative | a number |
| of text with at most 50 categories | a category |
| of text with more categories that look like codes (I21.4, 250.83, V45), also among numbers | a category by its first 3 letters |
| of text with more than 1,000 categories | a category in 64 buckets, by a fixed hash |
| of text that is different in most rows, or a number that counts rows | an id, which is left out |
| of dates (2020-12-31, 31.12.2020) | the days since 2000-01-01 |
| of whole numbers that look like a code, by their name | a number, but kind = "?" in a schema file |

Nothing here depends on the other sites' rows except the decision between a number and a code, so sites that detect alone
agree in all but odd cases; a schema file removes the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError
from nestfed.data.columns import DATE_FORMATS, Odd, coded, numbers
from nestfed.data.encoding import MOST_CATEGORIES
from nestfed.data.faults import Faults
from nestfed.data.readers import Raw
from nestfed.data.schema import CATEGORY, DATE, ID, IGNORED, NUMBER, OPEN, ColumnSpec, TableSchema, folded

SIGNS = ("?", "??", "-", "--", ".", "..", "*", "n.a.", "k.a.")
"""Texts that mark missing values, in small letters; pandas itself recognises NA, N/A, NULL and others."""
MARKS = (*SIGNS, "na", "unknown", "missing", "not available", "nil", "none", "nan")
"""Texts that mark missing values among numbers."""
MARK_NUMBERS = (-9.0, -99.0, -999.0, -9999.0)
"""Numbers that mark missing values in a column with no other negative value."""
PREFIX, BUCKETS, MANY = 3, 64, 1_000
"""The letters of a code that count; the buckets of a column with more than so many categories."""
FEW_ROWS = 50
"""With fewer rows, values that are all different do not make an id."""

_CODE = re.compile(r"[A-Za-z]{1,3}[-. ]?\d[\w.\-/]*|\d{2,}(\.\d+)?")
_CODE_TEXT = re.compile(r"[A-Za-z]{1,3}[-. ]?\d[\w.\-/]*|\d+([.\-/]\w*)+[A-Za-z]\w*")
_PADDED = re.compile(r"0\d+")
_CODE_NAME = re.compile(
    r"(^|_)(id|code|cd|type|typ|class|category|cat|icd\d*|drg|zip|plz|postcode|ward|dept|department|region|country|race|"
    r"ethnicity|sex|gender|marital|insurance|payer|specialty|status)s?\d*(_|$)|(id|code|type|num)$"
)
_ID_NAME = re.compile(
    r"(^|_)(id|ids|no|nr|number|num|key|index|idx|mrn|case|row|record|uid|uuid|pid|patient|subject|person)(_|$)"
)


@dataclass
class Seen:
    """What a column looks like at one site."""

    raw: Raw
    column: Any
    values: npt.NDArray[np.float64]
    """As numbers, NaN where it is none."""
    odd: Odd
    """The texts that are not numbers."""
    texts: Counter[str] = field(default_factory=Counter)
    """The rows of each text, for columns that are not numbers alone."""
    declared: bool = False
    """A data frame declares it to be categories, or numbers such as 007 show it."""

    @property
    def numeric(self) -> int:
        """The number of known values that are numbers."""
        return int(np.isfinite(self.values).sum())


@dataclass(frozen=True)
class Detected:
    """What was found: the schema, how it was found, and notes on the columns that may surprise."""

    schema: TableSchema
    notes: Mapping[str, str]
    """One sentence by column, without any value of the tables."""
    target_notes: tuple[str, ...] = ()


def detect(
    tables: Sequence[Raw], given: TableSchema, roles: Collection[str], faults: Faults, *, open_codes: bool = False
) -> Detected:
    """Return the schema of some tables: the columns of `given`, and the rest as detected.

    - `roles`: columns that are no features, such as the target.
    - `open_codes`: whole numbers that look like a code are kind = "?" instead of a number.
    """
    found, notes = dict(given.besides(roles).columns), dict[str, str]()
    if given.others == IGNORED:
        return Detected(replace(given, columns=found), notes)
    names = dict.fromkeys(name for raw in tables for name in raw.columns if name not in roles)
    order: dict[str, ColumnSpec] = {}
    for name in names:
        if name in found:
            order[name] = found[name]
            continue
        with faults.noting():
            seen = [look(raw, name, given.missing) for raw in tables if name in raw.columns]
            order[name], note = decide(name, seen, faults)
            if note:
                notes[name] = note
            if open_codes and order[name].kind == NUMBER and looks_like_code(name, seen):
                order[name] = replace(order[name], kind=OPEN)
    missing = {name: spec for name, spec in found.items() if name not in order}
    return Detected(replace(given, columns=order | missing), notes)


def look(raw: Raw, name: str, marks: tuple[str, ...]) -> Seen:
    """Return what a column looks like at one site."""
    column = raw.columns[name]
    dtype = str(column.dtype)
    if dtype.startswith(("datetime", "timedelta")):
        return Seen(raw, column, np.full(len(column), np.nan), {})
    if column.dtype.kind == "c":
        raise NestfedError(f"Column {name!r} of {raw.where} holds complex numbers: drop it.")
    if column.dtype.kind in "biuf":
        return Seen(raw, column, numbers(column, marks)[0], {})
    where = f"Column {name!r} of {raw.where}"
    values, odd = numbers(column, marks, where)
    codes, texts = coded(column, where)
    rows: Counter[str] = Counter()
    for text, n in zip(texts, np.bincount(codes[codes >= 0], minlength=len(texts)).tolist()):
        if text not in {"", *marks}:
            rows[text] += n
    declared = dtype == "category" or any(map(_PADDED.fullmatch, rows))
    return Seen(raw, column, values, odd, rows, declared)


def decide(name: str, seen: Sequence[Seen], faults: Faults) -> tuple[ColumnSpec, str]:
    """Return what a column is at all sites together, with a note if that may surprise."""
    if any(str(one.column.dtype).startswith(("datetime", "timedelta")) for one in seen):
        return ColumnSpec(DATE), "a date; it counts as the days since 2000-01-01"
    if any(one.declared for one in seen):
        return _category(name, seen)
    marks = sorted({text for one in seen for text in one.odd if text.casefold() in MARKS})
    odd = [(one, {t: n for t, (_, n) in one.odd.items() if t not in marks}) for one in seen]
    numeric = sum(one.numeric for one in seen)
    texts_of = sum((Counter(texts) for _, texts in odd), Counter[str]())
    strange = texts_of.total()
    if not strange and numeric:
        return _number(name, seen, tuple(marks))
    if not strange:
        return ColumnSpec(CATEGORY if any(one.texts for one in seen) else NUMBER), ""
    if all(_dated(texts) for _, texts in odd if texts) and not numeric:
        return ColumnSpec(DATE), "a date; it counts as the days since 2000-01-01"
    codes = sum(n for t, n in texts_of.items() if _CODE_TEXT.fullmatch(t)) >= 0.9 * strange
    mixed = any(one.numeric and texts for one, texts in odd)
    if numeric and codes and mixed:  # codes among numbers
        return _category(name, seen)
    if numeric and not mixed:
        text, number = (next(one.raw.inside for one in seen if bool(one.odd) is kind) for kind in (True, False))
        faults.add(
            f"Column {name!r} holds text at {text} but numbers at {number}: use one kind at all sites, set "
            f"{faults.entrance('category', column=name)}, or drop the column."
        )
        return ColumnSpec(IGNORED), ""
    if any(one.numeric >= sum(texts.values()) > 0 for one, texts in odd):
        return ColumnSpec(missing=tuple(marks)), ""  # reading it reports the text among its numbers
    return _category(name, seen)


def _number(name: str, seen: Sequence[Seen], marks: tuple[str, ...]) -> tuple[ColumnSpec, str]:
    """Return the spec of a column of numbers."""
    values = np.concatenate([one.values for one in seen])
    values = values[np.isfinite(values)]
    negative = np.unique(values[values < 0])
    notes = [f"{', '.join(map(repr, marks))} marks missing values"] if marks else []
    if len(negative) == 1 and negative[0] in MARK_NUMBERS and (values == negative[0]).sum() > 1:
        notes.append(f"{negative[0]:g} marks missing values, as nothing else is negative")
        marks = (*marks, f"{negative[0]:g}")
        values = values[values >= 0]
    if _counts_rows(name, seen, values):
        return ColumnSpec(ID), "different in every row; it is left out as an id"
    if looks_like_code(name, seen):
        notes.append("whole numbers that may be a code; they are read as numbers")
    return ColumnSpec(missing=marks), "; ".join(notes)


def _counts_rows(name: str, seen: Sequence[Seen], values: npt.NDArray[np.float64]) -> bool:
    """Return whether whole numbers are different in every row, and are called or look like the number of a row."""
    rows = sum(len(one.values) for one in seen)
    if len(values) < max(rows, FEW_ROWS) or not all(one.column.dtype.kind in "iu" for one in seen):
        return False
    if any(len(np.unique(one.values)) < len(one.values) for one in seen):
        return False
    in_order = all(len(one.values) > 1 and np.ptp(one.values) == len(one.values) - 1 for one in seen)
    return in_order or bool(_ID_NAME.search(_words(name)))


def looks_like_code(name: str, seen: Sequence[Seen]) -> bool:
    """Return whether a column of whole numbers has a name such as admission_type_id, and more than two values."""
    values = np.concatenate([one.values for one in seen])
    values = values[np.isfinite(values)]
    if any(one.column.dtype.kind == "b" for one in seen) or not len(values) or (values != np.floor(values)).any():
        return False
    return len(np.unique(values)) > 2 and bool(_CODE_NAME.search(_words(name)))


def _words(name: str) -> str:
    """Return a column's name in small letters, its words separated by _."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


def _category(name: str, seen: Sequence[Seen]) -> tuple[ColumnSpec, str]:
    """Return the spec of a column of categories."""
    texts: Counter[str] = Counter()
    marks: set[str] = set()
    for one in seen:
        own = one.texts or Counter(f"{v:g}" for v in one.values[np.isfinite(one.values)])
        marks |= {t for t in own if t.casefold() in SIGNS}
        texts.update({folded(t): n for t, n in own.items() if t not in marks})
    rows = texts.total()
    spec = ColumnSpec(CATEGORY, missing=tuple(sorted(marks)))
    note = f"{', '.join(map(repr, spec.missing))} marks missing values" if marks else ""
    codes = sum(n for t, n in texts.items() if _CODE.fullmatch(t)) >= 0.9 * rows
    most = len(texts) > max(MOST_CATEGORIES, rows / 2) and (not codes or bool(_ID_NAME.search(_words(name))))
    if rows >= FEW_ROWS and (most or len(texts) == rows):
        return ColumnSpec(ID), "different in most rows; it is left out as an id or free text"
    if len(texts) <= MOST_CATEGORIES:
        return spec, note
    if codes:
        spec, grouped = replace(spec, prefix=PREFIX), f"{len(texts):,} codes, grouped by their first {PREFIX} letters"
    elif len(texts) > MANY:
        spec, grouped = replace(spec, buckets=BUCKETS), f"{len(texts):,} categories, divided into {BUCKETS} by a hash"
    else:
        grouped = f"{len(texts):,} categories; rare ones share a feature"
    return spec, "; ".join(filter(None, [note, grouped]))


def _dated(texts: Iterable[str]) -> bool:
    return any(all(map(shape.fullmatch, texts)) for shape in DATE_FORMATS)
