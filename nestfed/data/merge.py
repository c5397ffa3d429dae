"""Put schemas together that sites made apart: what is equal stays, what differs is left for people to decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nestfed.data.faults import Faults
from nestfed.data.schema import (
    CATEGORY,
    DETECT,
    FEATURES,
    ID,
    IGNORED,
    NUMBER,
    OPEN,
    ORDERED,
    ColumnSpec,
    TableSchema,
    folded,
)


def merge(schemas: Mapping[str, TableSchema], faults: Faults) -> tuple[TableSchema, dict[str, str]]:
    """Return the common schema of several sites, with a note on each column where they differ.

    Categories and marks of missing values are those of all sites. A column that is a number here and a category there is left
    open (kind = "?"). Units, orders and formats that differ are problems, because no rule can decide them.
    """
    names = dict.fromkeys(name for schema in schemas.values() for name in schema.columns)
    columns, notes = {}, {}
    for name in names:
        own = {site: schema.columns[name] for site, schema in schemas.items() if name in schema.columns}
        columns[name], note = _merged(name, own, faults)
        if (lacking := [site for site in schemas if site not in own]) and columns[name].kind in (*FEATURES, OPEN):
            absent = f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no such column: add it there, or set optional = true"
            note = "; ".join(filter(None, [note, absent]))
        if note:
            notes[name] = note
    given = list(schemas.values())

    def same(setting: str) -> str:
        """Return a setting that all sites share; sites that differ detect their own."""
        found = {str(getattr(schema, setting)) for schema in given}
        return found.pop() if len(found) == 1 else ""

    marks = tuple(dict.fromkeys(mark for schema in given for mark in schema.missing))
    others = same("others") or DETECT
    return TableSchema(columns, marks, same("sep"), same("decimal"), same("encoding"), others), notes


def _merged(name: str, own: Mapping[str, ColumnSpec], faults: Faults) -> tuple[ColumnSpec, str]:
    """Return the common spec of a column, with a note if sites differ."""
    kinds = {site: spec.kind for site, spec in own.items()}
    first = next(iter(own.values()))
    marks = tuple(dict.fromkeys(mark for spec in own.values() for mark in spec.missing))
    if len(set(kinds.values())) > 1:
        shown = ", ".join(f"{kind} at {site}" for site, kind in kinds.items())
        return ColumnSpec(OPEN, missing=marks), f"decide: {shown}"
    kind = first.kind
    for setting in ("unit", "format", "since"):
        values = {site: getattr(spec, setting) for site, spec in own.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{value!r} at {site}" for site, value in values.items())
            faults.add(f"Column {name!r} has {setting} = {shown}: use one at all sites.")
    made = replace(first, missing=marks, optional=any(spec.optional for spec in own.values()))
    if kind in (ID, IGNORED):
        return ColumnSpec(kind), ""
    if kind == NUMBER and (ranges := [spec.range for spec in own.values() if spec.range]):
        return replace(made, range=(min(r[0] for r in ranges), max(r[1] for r in ranges))), ""
    if kind == ORDERED and len({tuple(map(folded, spec.categories)) for spec in own.values()}) > 1:
        faults.add(f"Column {name!r} has other ordered categories at {' and at '.join(own)}: list them in one order.")
    if kind == CATEGORY:
        return _categories(made, list(own.values()))
    return made, "a number or a code? write number or category" if kind == OPEN else ""


def _categories(made: ColumnSpec, own: list[ColumnSpec]) -> tuple[ColumnSpec, str]:
    """Return a column of categories with those of all sites, grouped as at the site that groups most."""
    if len({(spec.prefix, spec.buckets) for spec in own}) == 1:
        listed = {folded(c): c for spec in reversed(own) for c in spec.categories}  # the first site's spelling
        return replace(made, categories=tuple(sorted(listed.values())), other=any(s.other for s in own)), ""
    if prefix := min((spec.prefix for spec in own if spec.prefix), default=0):
        listed = {folded(c[:prefix]): c[:prefix] for spec in own if not spec.buckets for c in spec.categories}
        categories = tuple(sorted(listed.values()))
        return replace(made, prefix=prefix, buckets=0, categories=categories, other=True), "grouped at some sites only"
    most = max(spec.buckets for spec in own)
    return replace(made, buckets=most, categories=(), other=False), "grouped at some sites only"
