"""Draft the experiment file of a study from its tables, for people to agree on: `nestfed schema`."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from nestfed.core import NestfedError
from nestfed.data.columns import Reading, label_of, numbers
from nestfed.data.detect import detect
from nestfed.data.encoding import MOST_CATEGORIES
from nestfed.data.faults import PYTHON, Entrance, Faults
from nestfed.data.merge import merge
from nestfed.data.readers import Raw
from nestfed.data.schema import (
    CATEGORY,
    EMPTY,
    FEATURES,
    ID,
    IGNORED,
    OPEN,
    ColumnSpec,
    TableSchema,
    is_number,
    same_spelling,
    spaced,
    toml,
)
from nestfed.data.tables import MOST_VALUES, NUMBER, Roles
from nestfed.study.propose import proposed
from nestfed.study.tables import read_raw

USUAL = 1000
"""The rows of a site by which local steps are proposed where the tables are apart; few enough to suit small ones."""
HEAD = """\
# A study, for people to read and agree on. Decide every column with kind = "?": number or category.
# Counts below {min_cell} and categories of fewer rows are not in this file.
"""
OPTIONS = """\
# Options of a column: missing = ["-9"], unit = "kg", range = [0, 300], prefix = 3 (first letters of a code), buckets = 64,
# other = true (categories that are not listed share a feature), since = "admitted" or a day (for dates), optional = true
# (a site may lack it). Kinds: number, category, ordered (list the categories in order), date, id and ignored (left out).
"""


@dataclass(frozen=True)
class Draft:
    """The [data] and [schema] of a study, with notes for the people who agree on it."""

    data: Mapping[str, Any]
    schema: TableSchema
    notes: Mapping[str, str] = field(default_factory=dict)
    """One note by column, or by setting of [data] as data.NAME."""
    min_cell: int = 10
    rows: Sequence[int] = ()
    """The rows of each table; empty if they are not known here."""
    sites: Mapping[str, str] = field(default_factory=dict)
    """The file of each site, if all tables are at hand."""

    def to_toml(self) -> str:
        """Return the study's file, with the methods that `nestfed train` would propose."""
        data: dict[str, Any] = dict(self.data)
        rest: dict[str, Any] = {}
        if "target" in data:
            classes = data.get("classes", [])
            made = proposed(data["target"], "auto", self.rows or [USUAL], classes, data=data, sites=self.sites)
            data, rest = made.pop("data"), made
        settings = "".join(f"{k} = {toml(v)}{self._note(f'data.{k}')}\n" for k, v in data.items())
        return "\n".join([
            HEAD.format(min_cell=self.min_cell),
            f"[data]\n{settings}",
            OPTIONS + self.schema.to_toml(self.notes),
            tomli_w.dumps(rest),
        ])  # fmt: skip

    def _note(self, key: str) -> str:
        return f"  # {self.notes[key]}" if key in self.notes else ""


def draft(
    files: Sequence[str | Path],
    target: str = "",
    *,
    group: str = "",
    split_by: str = "",
    drop: Sequence[str] = (),
    given: TableSchema = EMPTY,
    min_cell: int = 10,
    entrance: Entrance = PYTHON,
) -> Draft:
    """Return the draft of a study's file, from the tables of one or several sites."""
    faults = Faults(entrance)
    tables = read_raw(files, given, faults)
    named = [name for name in (group, split_by) if name]
    roles = Roles(target, tuple(named), tuple(drop)) if target else None
    if roles is not None:
        roles.check(tables, faults)
    elif named or drop:
        raise NestfedError(f"Name the target too: {entrance('target', column='died')}.")
    faults.check()
    found = detect(tables, given, [] if roles is None else roles.names, faults, open_codes=True)
    columns, notes = {}, dict(found.notes)
    for name, spec in found.schema.columns.items():
        there = [raw.as_text(found.schema.as_text) for raw in tables if name in raw.columns]
        with faults.noting():
            columns[name], more = _described(name, spec, there, found.schema, faults, min_cell)
            if spec.kind == OPEN:
                more = "a number or a code? write number or category"
            notes[name] = "; ".join(filter(None, [notes.get(name, "") if spec.kind != OPEN else "", more]))
        if lacking := [raw.who for raw in tables if name not in raw.columns]:
            faults.add(
                f"{lacking[0]} has no column {name!r}, which {there[0].inside} has: add it, or drop it everywhere."
            )
    faults.check()
    for name in (*named, *drop):
        columns[name] = ColumnSpec(ID if name == group else IGNORED)
    data: dict[str, Any] = {"target": target} if target else {}
    if target:
        data |= _of_target(target, tables, found.schema, min_cell, notes)
    data |= {k: v for k, v in (("group", group), ("split_by", split_by)) if v}
    rows = sum(map(len, tables))
    notes["data.target"] = f"{len(tables)} tables" + (f", {rows:,} rows" if rows >= min_cell else "")
    schema = replace(found.schema, columns=columns, others=IGNORED)
    sites = {raw.site: raw.where for raw in tables} if len(tables) > 1 else {}
    return Draft(data, schema, notes, min_cell, [len(raw) for raw in tables] if sites else (), sites)


def _described(
    name: str, spec: ColumnSpec, tables: Sequence[Raw], schema: TableSchema, faults: Faults, min_cell: int
) -> tuple[ColumnSpec, str]:
    """Return a column's spec with its common categories, and a note on its missing values."""
    if spec.kind not in (*FEATURES, OPEN):
        return spec, ""
    rows = sum(len(raw.columns[name]) for raw in tables)
    if spec.kind == CATEGORY:
        counts: Counter[str] = Counter()
        for raw in tables:
            counts.update(t for t in Reading(raw, schema, faults).levels(name, spec) if t is not None)
        known = counts.total()
        if not spec.categories and not spec.buckets:
            alike = same_spelling(counts)
            total: Counter[str] = Counter()
            for text, n in counts.items():
                total[alike[text]] += n
            common = [text for text, n in total.most_common(MOST_CATEGORIES) if n >= max(min_cell, 1)]
            spec = replace(spec, categories=tuple(sorted(common)), other=len(common) < len(total))
    else:
        marks = (*schema.missing, *spec.missing)
        values = [numbers(raw.columns[name], marks)[0] for raw in tables]
        known = rows if spec.kind == "date" else sum(int(np.isfinite(v).sum()) for v in values)
    gone = rows - known
    safe = gone >= max(min_cell, 1) and known >= min_cell
    share = f"{gone / rows:.0%}" if gone >= rows / 100 else "under 1%"
    return spec, f"{share} missing" if safe else ""


def _of_target(
    target: str, tables: Sequence[Raw], schema: TableSchema, min_cell: int, notes: dict[str, str]
) -> dict[str, Any]:
    """Return the settings of [data] on the target."""
    counts: Counter[str] = Counter()
    for raw in tables:
        column = raw.columns[target]
        counts.update(spaced(label_of(v)) for v in column[column.notna()].tolist())
    alike = same_spelling(counts)
    total: Counter[str] = Counter()
    for text, n in counts.items():
        if text not in schema.missing:
            total[alike[text]] += n
    numeric = all(map(is_number, total))
    if len(total) > MOST_VALUES:
        if not numeric:
            raise NestfedError(
                f"Target {target!r} has {len(total):,} different values: expected a few classes, or numbers."
            )
        return {"target_kind": NUMBER}
    classes = [c for c in (sorted(total, key=float) if numeric else sorted(total)) if total[c] >= min_cell]
    rare = len(classes) < len(total)
    notes["data.classes"] = "in order; of two, the last one is positive" + (
        f"; classes of fewer than {min_cell} rows are left out: add them" if rare else ""
    )
    return {"classes": classes}


def merged(files: Sequence[str | Path], min_cell: int = 10) -> Draft:
    """Return the common file of drafts that sites made apart."""
    faults = Faults()
    given = {Path(file).stem: _read(Path(file)) for file in files}
    if len(given) < 2:
        raise NestfedError("Give at least two files of `nestfed schema`, with different names.")
    schema, notes = merge({site: one.schema for site, one in given.items()}, faults)
    data: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in given.values() for key in one.data):
        values = {site: one.data[key] for site, one in given.items() if key in one.data}
        if key == "classes":
            everywhere = dict.fromkeys(c for classes in values.values() for c in classes)
            data[key] = sorted(everywhere, key=float) if all(map(is_number, everywhere)) else sorted(everywhere)
            if len(set(map(tuple, values.values()))) > 1:
                notes["data.classes"] = "sites have different classes; of two, the last one is positive"
        elif len({str(v) for v in values.values()}) > 1:
            faults.add(
                f"The files differ in data.{key}: {', '.join(f'{v!r} at {site}' for site, v in values.items())}."
            )
        else:
            data[key] = next(iter(values.values()))
    faults.check()
    return Draft(data, schema, notes, min_cell)


def _read(path: Path) -> Draft:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NestfedError(f"{path} does not exist: give the files that `nestfed schema` wrote at the sites.") from None
    except (OSError, ValueError) as error:
        raise NestfedError(f"{path} cannot be read: {error}.") from error
    if "schema" not in tables:
        raise NestfedError(f"{path} has no [schema]: give the files that `nestfed schema` wrote at the sites.")
    try:
        return Draft(dict(tables.get("data", {})), TableSchema.from_tables(tables["schema"]))
    except NestfedError as error:
        raise NestfedError(f"{path}: {error}") from error
