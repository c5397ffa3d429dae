"""What the columns of a table are, as people agree on it: the [schema] table of an experiment file.

[schema]
missing = ["?", "-9"]                  # marks of missing values in every column
others = "ignored"                     # columns that are not named here; "detect" = find out what they are

[schema.columns]
age = { unit = "years", range = [0, 120] }
sex = { kind = "category", categories = ["F", "M"] }
diagnosis = { kind = "category", prefix = 3 }
stage = { kind = "ordered", categories = ["I", "II", "III", "IV"] }
discharged = { kind = "date", since = "admitted" }
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from typing import Any

from nestfed.core import NestfedError, unknown
from nestfed.data.readers import Form

NUMBER, CATEGORY, ORDERED, DATE, ID, IGNORED, OPEN = KINDS = (
    "number", "category", "ordered", "date", "id", "ignored", "?",
)  # fmt: skip
FEATURES = (NUMBER, CATEGORY, ORDERED, DATE)
"""The kinds of columns that a model sees."""
EPOCH = "2000-01-01"
"""The day from which dates count, if their schema names none."""
DETECT = "detect"


@dataclass(frozen=True)
class ColumnSpec:
    """One column of a table."""

    kind: str = NUMBER
    """number, category, ordered, date, id (left out), ignored (left out), or ? (people have to decide)."""
    missing: tuple[str, ...] = ()
    """Marks of missing values in this column, besides those of the whole table."""
    unit: str = ""
    range: tuple[float, ...] = ()
    """The lowest and the highest allowed number."""
    categories: tuple[str, ...] = ()
    """The categories, in order for kind = "ordered"; empty = those that the sites have."""
    other: bool = False
    """Other categories than those listed share one feature."""
    prefix: int = 0
    """Categories count as the same if they begin with the same letters: 3 makes I21.0 and I21.4 one category."""
    buckets: int = 0
    """Divide the categories into this many by a fixed hash, for columns with thousands of categories."""
    format: str = ""
    """The format of a date, such as "%d.%m.%Y"; empty = 2020-12-31, with or without a time."""
    since: str = ""
    """A date counts the days since this one: another date column, or a day such as "2000-01-01"."""
    optional: bool = False
    """A site may lack the column; its values are missing there."""

    def problems(self, name: str, columns: Mapping[str, ColumnSpec]) -> list[str]:
        """Return what is wrong with the settings of column `name`."""
        found, where = [], f"Column {name!r} of the schema"
        if self.kind not in KINDS:
            found.append(f"{where} has kind = {self.kind!r}, expected {', '.join(KINDS[:-1])}.")
        if self.range and (len(self.range) != 2 or not self.range[0] <= self.range[1] or self.kind != NUMBER):
            found.append(f"{where} has range = {list(self.range)}, expected a number's lowest and highest value.")
        if self.kind == ORDERED and len(self.categories) < 2:
            found.append(f"{where} is ordered: list its categories from the lowest to the highest.")
        if len({folded(c) for c in self.categories}) < len(self.categories):
            found.append(f"{where} lists a category twice; spaces and capital letters make no difference.")
        if min(self.prefix, self.buckets) < 0 or (self.prefix and self.buckets):
            found.append(f"{where} needs prefix or buckets, above 0, not both.")
        if self.kind != CATEGORY and (self.prefix or self.buckets or self.other):
            found.append(f"{where} has prefix, buckets or other, which only categories have.")
        if (
            self.since
            and not _is_day(self.since)
            and getattr(columns.get(self.since), "kind", DATE) not in (DATE, IGNORED)
        ):
            found.append(f"{where} counts days since {self.since!r}, expected a date column or a day such as {EPOCH}.")
        return found

    def to_toml(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, and the kind, as plain data."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in chosen.items()}


@dataclass(frozen=True)
class TableSchema:
    """How to read a table, and what its columns are. An empty one leaves everything to detection."""

    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Marks of missing values in every column, such as "?"."""
    sep: str = ""
    """What separates the values of a CSV file; empty = detected."""
    decimal: str = ""
    """The decimal point or comma of a CSV file; empty = detected."""
    encoding: str = ""
    """The encoding of a CSV file; empty = UTF-8, or else Latin-1."""
    others: str = DETECT
    """What happens to columns that are not named: detect or ignored."""

    def __post_init__(self) -> None:
        if self.others not in (DETECT, IGNORED):
            raise NestfedError(f"schema.others must be {DETECT} or {IGNORED}, not {self.others!r}.")
        wrong = [text for name, spec in self.columns.items() for text in spec.problems(name, self.columns)]
        if wrong:
            raise NestfedError(" ".join(wrong))

    def __bool__(self) -> bool:
        return self != EMPTY

    @classmethod
    def of(
        cls,
        *,
        categorical: Iterable[str] = (),
        dates: Mapping[str, str] | Iterable[str] = (),
        missing: Iterable[str] = (),
        sep: str = "",
        decimal: str = "",
        encoding: str = "",
    ) -> TableSchema:
        """Return a schema for some columns; the rest is detected. `dates` may give the format of each date."""
        formats = dates if isinstance(dates, Mapping) else dict.fromkeys(dates, "")
        named = {name: ColumnSpec(CATEGORY) for name in categorical}
        named |= {name: ColumnSpec(DATE, format=text) for name, text in formats.items()}
        return cls(named, tuple(missing), sep, decimal, encoding)

    @property
    def form(self) -> Form:
        """How a CSV file is written."""
        return Form(self.sep, self.decimal, self.encoding)

    def date_format(self, name: str) -> str:
        """Return the format of a column of dates; empty if the schema does not state it."""
        return self.columns[name].format if name in self.columns else ""

    @property
    def as_text(self) -> tuple[str, ...]:
        """The columns whose values are read as text."""
        return tuple(name for name, spec in self.columns.items() if spec.kind in (CATEGORY, ORDERED, DATE, ID))

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that become model inputs, or from which dates count."""
        there = {name: spec for name, spec in self.columns.items() if spec.kind in (*FEATURES, OPEN)}
        since = [spec.since for spec in there.values() if spec.since and not _is_day(spec.since)]
        return tuple(dict.fromkeys([*there, *since]))

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a table must have to become model inputs."""
        return tuple(n for n in self.used if n not in self.columns or not self.columns[n].optional)

    def decided(self) -> TableSchema:
        """Return the schema; reject one with columns that people still have to decide."""
        if undecided := [name for name, spec in self.columns.items() if spec.kind == OPEN]:
            raise NestfedError(
                f'The schema leaves {", ".join(map(repr, undecided))} open (kind = "?"): decide whether each is a number '
                "or a category, and write it into [schema.columns]."
            )
        return self

    def besides(self, names: Collection[str]) -> TableSchema:
        """Return the schema with some columns ignored, such as the target."""
        columns = {k: _plain(v) if k in names else v for k, v in self.columns.items()}
        if self.others == IGNORED:
            columns |= {k: ColumnSpec(IGNORED) for k in names if k not in columns}
        return replace(self, columns=columns)

    def to_tables(self) -> dict[str, Any]:
        """Return the [schema] table as plain data, without defaults."""
        found: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "columns" and getattr(self, f.name) != f.default
        }
        if self.missing:
            found["missing"] = list(self.missing)
        if self.columns:
            found["columns"] = {name: spec.to_toml() for name, spec in self.columns.items()}
        return found

    @classmethod
    def from_tables(cls, table: Mapping[str, Any]) -> TableSchema:
        """Return the schema of a [schema] table; all mistakes are in one error."""
        wrong: list[str] = []
        columns = table.get("columns", {})
        if not isinstance(columns, Mapping):
            raise NestfedError(f"[schema.columns] must be a table, not {columns!r}.")
        made = {name: _settings(ColumnSpec, f"schema.columns.{name}", given, wrong) for name, given in columns.items()}
        rest = _settings(cls, "schema", {k: v for k, v in table.items() if k != "columns"}, wrong)
        if wrong:
            raise NestfedError(" ".join(wrong))
        return cls(**rest, columns={name: ColumnSpec(**settings) for name, settings in made.items()})

    def to_toml(self, notes: Mapping[str, str] | None = None) -> str:
        """Return the [schema] table as it stands in a file, with a note behind each column."""
        tables = self.to_tables()
        columns = tables.pop("columns", {})
        lines = ["[schema]", *(f"{k} = {toml(v)}" for k, v in tables.items()), "", "[schema.columns]"]
        for name, spec in columns.items():
            note = " ".join((notes or {}).get(name, "").split())
            lines.append(f"{_key(name)} = {toml(spec)}{'  # ' + note if note else ''}")
        return "\n".join(lines) + "\n"


def _plain(spec: ColumnSpec) -> ColumnSpec:
    """Return the spec of an ignored column, without the settings of other kinds."""
    return ColumnSpec(IGNORED, missing=spec.missing, format=spec.format)


def _settings(kind: type, where: str, given: Any, wrong: list[str]) -> dict[str, Any]:
    """Return the settings of a table in the types of their defaults, and add what is wrong."""
    if not isinstance(given, Mapping):
        wrong.append(f'{where} must be a table such as {{ kind = "number" }}, not {given!r}.')
        return {}
    defaults: dict[str, Any] = {f.name: f.default for f in fields(kind) if f.name != "columns"}
    made: dict[str, Any] = {}
    for key, value in given.items():
        if key not in defaults:
            wrong.append(str(unknown("setting", f"{where}.{key}", [f"{where}.{k}" for k in defaults])))
        elif isinstance(defaults[key], tuple):
            wanted = (int, float) if key == "range" else (str, int, float)
            items = list(value) if isinstance(value, list | tuple) else [None]
            if not all(isinstance(v, wanted) and not isinstance(v, bool) for v in items):
                wrong.append(
                    f"{where}.{key} must be a list of {'numbers' if key == 'range' else 'texts'}, not {value!r}."
                )
            made[key] = tuple(float(v) for v in items if v is not None) if key == "range" else tuple(map(str, items))
        elif type(value) is not type(defaults[key]):
            words = {str: "text", int: "a whole number", bool: "true or false"}[type(defaults[key])]
            wrong.append(f"{where}.{key} must be {words}, not {value!r}.")
        else:
            made[key] = value
    return made


EMPTY = TableSchema()


def folded(text: str) -> str:
    """Return a category without the differences that do not count: spaces and capital letters."""
    return spaced(text).casefold()


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def spaced(text: str) -> str:
    """Return a text without spaces at its ends, and with single ones inside."""
    return " ".join(text.split())


def same_spelling(counts: Mapping[str, float]) -> dict[str, str]:
    """Return for every category its most common spelling, among those that differ in spaces and capital letters only."""
    best: dict[str, str] = {}
    for text in sorted(counts, key=lambda t: (-counts[t], t)):
        best.setdefault(folded(text), text)
    return {text: best[folded(text)] for text in counts}


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def toml(value: Any) -> str:
    """Return a plain value in TOML, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
