"""Read one table per site, with common columns and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.data.encoding import Sums, common_schema
from nestfed.data.tables import as_dataset, label_of, read_columns, require_column
from nestfed.study.sites import Site


@dataclass(frozen=True)
class Sites:
    """The tables of all sites, with the same columns; y is the index of a class."""

    sites: Sequence[Site]
    classes: tuple[str, ...]


def read_sites(
    files: Sequence[str | Path], target: str, *, group: str = "", drop: Sequence[str] = (), positive: str = ""
) -> Sites:
    """Read one table per site, with common classes and column types."""
    paths = [Path(f) for f in files]
    if not paths:
        raise NestfedError("There are no files: pass one table for each site, such as sites/*.csv.")
    names = _names(paths)
    raw = [read_table(path) for path in paths]
    for path, table in zip(paths, raw):
        for name in (target, *drop, *([group] if group else [])):
            require_column(path, name, table)
    classes = _classes(paths, raw, target, positive)
    sites = []
    for name, path, table in zip(names, paths, raw):
        read = as_dataset(path, table, target, columns=[group] if group else [], drop=drop, classes=classes)
        sites.append(Site(name, read.x, read.y, read.schema, read.columns[group] if group else None))
    common_schema({f"Site {site.name}": Sums.of(site.x, site.schema) for site in sites})  # before any work
    return Sites(sites, classes)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the sites: the names of the files, with their folders if they are not unique."""
    short = [path.name.split(".")[0] for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise NestfedError(f"A file in {paths[0].parent} is named twice: each file is one site.")
    return names


def read_table(path: Path) -> dict[str, Any]:
    """Read the named columns of a table."""
    if path.name.lower().endswith(".npz"):
        raise NestfedError(f"{path} has no named columns: expected a .csv, .csv.gz or .parquet file.")
    return read_columns(path)


def _classes(paths: Sequence[Path], raw: Sequence[Mapping[str, Any]], target: str, positive: str) -> tuple[str, ...]:
    """Return the classes of all sites in order, with the positive one last."""
    found: set[str] = set()
    for path, table in zip(paths, raw):
        column = table[target]
        if missing := int(column.isna().sum()):
            raise NestfedError(
                f"Target {target!r} of {path} is missing in {missing:,} of {len(column):,} rows: fill in or remove "
                "these rows."
            )
        found |= {label_of(v) for v in column.tolist()}
    if len(found) > 20:
        raise NestfedError(
            f"Target {target!r} has {len(found):,} different values, such as {sorted(found)[0]!r}: expected a few classes."
        )
    if len(found) < 2:
        only = next(iter(found), "nothing")
        raise NestfedError(f"Target {target!r} is {only!r} in every row of every file: there is nothing to predict.")
    numeric = all(_is_number(v) for v in found)
    classes = sorted(found, key=float) if numeric else sorted(found)
    if positive:
        if positive not in found:
            raise NestfedError(f"Target {target!r} is never {positive!r}: it is {', '.join(classes)}.")
        classes = [c for c in classes if c != positive] + [positive]
    return tuple(classes)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
