"""Read one table per site, with common columns and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.data.columns import label_of
from nestfed.data.encoding import Sums, differences
from nestfed.data.faults import PYTHON, Entrance, Faults
from nestfed.data.readers import Raw
from nestfed.data.readers import read_table as read_file
from nestfed.data.schema import EMPTY, TableSchema, is_number, same_spelling, spaced
from nestfed.data.split import late
from nestfed.data.tables import CLASS, MOST_VALUES, NUMBER, Dataset, Roles, as_datasets
from nestfed.study.sites import Site


@dataclass(frozen=True)
class Sites:
    """The tables of all sites, with the same columns; y is the index of a class, or a number."""

    sites: Sequence[Site]
    classes: tuple[str, ...]
    """Empty if the target is a number."""
    schema: TableSchema = EMPTY
    """How the files were read."""
    notes: tuple[str, ...] = ()
    """Sentences on what was detected in the files and may surprise."""


@dataclass(frozen=True)
class ReadFiles:
    """The files of all sites as datasets with the same columns."""

    raw: Sequence[Raw]
    tables: Sequence[Dataset]
    roles: Roles

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the target; empty if it is a number."""
        return self.tables[0].classes

    @property
    def schema(self) -> TableSchema:
        """How the files were read."""
        return self.tables[0].table

    def by_name(self) -> dict[str, Dataset]:
        """Return the tables by the names of their sites."""
        return {one.site: table for one, table in zip(self.raw, self.tables)}

    def notes(self) -> tuple[str, ...]:
        """Return sentences on what was detected; raise an error if the tables cannot be put together."""
        sums = {f"Site {name}": Sums.of(table.x, table.schema) for name, table in self.by_name().items()}
        return (*self.tables[0].notes, *differences(sums))


def read_files(
    files: Sequence[str | Path],
    roles: Roles,
    schema: TableSchema,
    faults: Faults,
    *,
    positive: str = "",
    group: str = "",
    numbers: bool = False,
) -> ReadFiles:
    """Read one table per site, with common classes and column types; `faults` collects what is wrong with them.

    - `group`: a column to divide by if all tables have it and it has no other role.
    - `numbers`: take a target with many different numbers as a number.
    """
    raw = read_raw(files, schema, faults)
    if numbers and _is_a_number(raw, roles.target):
        roles = replace(roles, kind=NUMBER)
    if group and group not in roles.names and all(group in one.columns for one in raw):
        roles = replace(roles, columns=(*roles.columns, group))
    if roles.kind == CLASS and (there := [one for one in raw if roles.target in one.columns]):
        with faults.noting():
            raw, classes = _with_classes(raw, there, roles, schema, positive, faults)
            roles = replace(roles, classes=classes)
    return ReadFiles(raw, as_datasets(raw, roles, schema, faults), roles)


def read_sites(
    files: Sequence[str | Path],
    target: str,
    *,
    group: str = "",
    drop: Sequence[str] = (),
    positive: str = "",
    schema: TableSchema = EMPTY,
    split_by: str = "",
    test_from: str = "",
    target_kind: str = CLASS,
    entrance: Entrance = PYTHON,
) -> Sites:
    """Read one table per site, with common classes and column types. All that is wrong with them is in one error.

    - `schema`: what the columns are; those that it does not name are detected.
    - `group`: a column whose rows with equal values, such as a patient's, stay on one side of every split.
    - `split_by`, `test_from`: a column of dates or numbers, and where the test rows of a temporal split begin. The column is
      not a feature.
    - `target_kind`: "class", or "number" for regression.
    """
    if bool(split_by) != bool(test_from):
        raise NestfedError(
            "A temporal split needs a column of dates and where its test rows begin: --split-by and --test-from."
        )
    faults = Faults(entrance)
    kept = tuple(dict.fromkeys(filter(None, [group, split_by])))
    found = read_files(files, Roles(target, kept, tuple(drop), kind=target_kind), schema, faults, positive=positive)
    form = schema.date_format(split_by)
    sites = []
    for one, read in zip(found.raw, found.tables):
        held = None
        with faults.noting():
            held = late(read.columns[split_by], test_from, split_by, one.where, form) if split_by else None
        sites.append(Site(one.site, read.x, read.y, read.schema, read.columns.get(group), read.table, held))
    faults.check()
    return Sites(sites, found.classes, found.schema, found.notes())


def _is_a_number(raw: Sequence[Raw], target: str) -> bool:
    """Return whether a target has more different numbers than classes may have."""
    columns = [one.columns[target] for one in raw if target in one.columns]
    numeric = all(column.dtype.kind in "iuf" for column in columns)
    return numeric and len(set().union(*(column.dropna().unique().tolist() for column in columns))) > MOST_VALUES


def read_raw(files: Sequence[str | Path], schema: TableSchema, faults: Faults) -> list[Raw]:
    """Read one table per site as its file shows it; files that cannot be read are among the faults."""
    paths = [Path(f) for f in files]
    if not paths:
        raise NestfedError("There are no files: pass one table for each site, such as sites/*.csv.")
    raw = []
    for name, path in zip(site_names(paths), paths):
        with faults.noting():
            raw.append(replace(_read(path, schema), site=name))
    if not raw:
        faults.check()
    return raw


def site_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the sites: the names of the files, with their folders if they are not unique."""
    short = [path.name.split(".")[0] for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise NestfedError(f"A file in {paths[0].parent} is named twice: each file is one site.")
    return names


def _read(path: Path, schema: TableSchema = EMPTY) -> Raw:
    if path.name.lower().endswith(".npz"):
        raise NestfedError(f"{path} has no named columns: expected a .csv, .csv.gz or .parquet file.")
    return read_file(path, schema.form, schema.as_text)


def read_table(path: Path, schema: TableSchema = EMPTY) -> dict[str, Any]:
    """Read the named columns of a table, as they stand in the file."""
    return dict(_read(path, schema).columns)


def _with_classes(
    raw: Sequence[Raw], there: Sequence[Raw], roles: Roles, schema: TableSchema, positive: str, faults: Faults
) -> tuple[list[Raw], tuple[str, ...]]:
    """Return the classes of all sites in order, the positive one last, and the tables with the target in their spelling."""
    target = roles.target
    marks = {*schema.missing, *(schema.columns[target].missing if target in schema.columns else ())}
    counts: Counter[str] = Counter()
    for one in there:
        column = one.columns[target]
        texts = [spaced(label_of(v)) for v in column[column.notna()].tolist()]
        if missing := len(column) - sum(t not in marks for t in texts):
            faults.add(
                f"Target {target!r} of {one.where} is missing in {missing:,} of {len(column):,} rows: fill it in or "
                "remove these rows."
            )
        counts.update(t for t in texts if t not in marks)
    alike = same_spelling(counts)
    found = {alike[text] for text in counts}
    if len(found) > 20:
        raise NestfedError(
            f"Target {target!r} has {len(found):,} different values, such as {sorted(found)[0]!r}: expected a few classes."
        )
    if len(found) < 2 and any(len(one) for one in there):
        only = next(iter(found), "nothing")
        raise NestfedError(f"Target {target!r} is {only!r} in every row of every file: there is nothing to predict.")
    classes = sorted(found, key=float) if all(map(is_number, found)) else sorted(found)
    if positive:
        if positive not in found:
            raise NestfedError(f"Target {target!r} is never {positive!r}: it is {', '.join(classes)}.")
        classes = [c for c in classes if c != positive] + [positive]
    if all(text == same for text, same in alike.items()):
        return list(raw), tuple(classes)
    return [_respelled(one, target, alike) for one in raw], tuple(classes)


def _respelled(raw: Raw, target: str, alike: Mapping[str, str]) -> Raw:
    """Return a table with its target in the common spelling."""
    column = raw.columns[target].map(lambda v: alike.get(spaced(label_of(v)), v) if isinstance(v, str) else v)
    changed = f"Target {target!r}: {', '.join(f'{a!r} as {b!r}' for a, b in alike.items() if a != b)}."
    return replace(raw, columns={**raw.columns, target: column}, notes=(*raw.notes, changed))
