"""What can be checked before the first round: a site's configuration, its table and its machine.

A site runs these checks by itself (`nestfed deploy check`) and when it registers. Its log gets every problem in full. The
coordinator gets only the kinds, and says what each means in words that quote nothing of the site's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.deploy.disk import scarce
from nestfed.queries import TRAINING, Rows

if TYPE_CHECKING:
    from nestfed.experiment.site import Place
    from nestfed.experiment.spec import Experiment


@dataclass(frozen=True)
class Kind:
    """A kind of problem, as the coordinator may know it."""

    sentence: str
    """What it means, without anything of the site's own."""
    stops: bool = True
    """Whether the site cannot take part."""


KINDS = {
    "data": Kind("its data cannot be read"),
    "target": Kind("its table has no column for data.target"),
    "columns": Kind(
        "its table lacks columns that the study names in data.columns, data.group, data.split_by or data.drop"
    ),
    "labels": Kind("its target column has missing values, or values that the study does not name in data.classes"),
    "features": Kind("some of its columns cannot be used"),
    "too-few": Kind("it has fewer rows than its min_cell"),
    "single-rows": Kind(
        "the method sends scores of single rows, which its min_cell forbids; choose another method, or agree that the site sets "
        "min-cell = 0"
    ),
    "one-class": Kind("fewer than two classes reach its min_cell in its training rows", stops=False),
    "disk": Kind("its disk is nearly full", stops=False),
    "certificate": Kind("its ca.crt expires soon", stops=False),
}
"""The problems that a site may report when it registers."""


@dataclass(frozen=True)
class Problem:
    """Something to repair."""

    kind: str
    sentence: str
    """All of it, for the site's own log; it may quote the site's data."""
    minor: bool = False
    """Whether the site can take part, although the kind is not in `KINDS`."""

    @property
    def stops(self) -> bool:
        """Whether the site cannot take part."""
        return KINDS[self.kind].stops if self.kind in KINDS else not self.minor


@dataclass(frozen=True)
class Examined:
    """A site's rows by part, and its problems."""

    rows: Mapping[str, Rows]
    problems: tuple[Problem, ...]


def examine(study: Experiment, place: Place, min_cell: int, read: Callable[[], Mapping[str, Rows]]) -> Examined:
    """List everything that is wrong with a site's data; `read` reads its rows by part."""
    try:
        rows = read()
    except NestfedError as error:
        found = tuple(_wrong(study, Path(place.file))) if place.file else ()
        return Examined({}, found or (Problem("data", str(error)),))
    training = len(rows.get(TRAINING, ()))
    wrong = [*forbidden(training, describes_rows(study), min_cell), *_of_classes(rows.get(TRAINING), min_cell)]
    return Examined(rows, tuple(wrong))


def forbidden(rows: int, describes_rows: bool, min_cell: int) -> Iterator[Problem]:
    """Yield what a site's min-cell forbids, given its training rows and whether a method sends numbers of single rows."""
    if 0 < rows < min_cell:
        yield Problem("too-few", f"this site has {rows} training rows, fewer than its min-cell = {min_cell}.")
    if describes_rows and min_cell > 1:
        yield Problem("single-rows", f"the method sends scores of single rows, which min-cell = {min_cell} forbids.")


def describes_rows(study: Experiment) -> bool:
    """Return whether a method of the study sends numbers of single rows."""
    from nestfed.algorithms import METHODS

    trained = [study.for_method(name) for name in study.methods] if study.is_study else [study]
    return any(METHODS[one.algorithm.name].describes_rows for one in trained)


def _wrong(study: Experiment, path: Path) -> Iterator[Problem]:
    """Yield all that is wrong with a table: its file, its columns, its target, its features."""
    from nestfed.data.faults import FILE, Faults
    from nestfed.data.readers import read_table, require_column
    from nestfed.data.tables import Roles, as_datasets, tables_of

    data, schema = study.data, study.schema
    try:
        raw = read_table(path, schema.form, schema.as_text)
    except NestfedError as error:
        yield Problem("data", str(error))
        return
    named = [name for name in dict.fromkeys((*data.columns, data.group, data.split_by, *data.drop)) if name]
    for name in (data.target, *named):
        try:
            require_column(raw.where, name, raw.columns)
        except NestfedError as error:
            yield Problem("target" if name == data.target else "columns", str(error))
    if path.suffix.lower() == ".npz":
        return
    labels, features = Faults(FILE), Faults(FILE)
    if data.target in raw.columns:
        # A feature without content, to look at the target alone.
        alone = replace(raw, columns={data.target: raw.columns[data.target], "": _zeros(len(raw))})
        known = replace(schema, columns={k: v for k, v in schema.columns.items() if k == data.target})
        with labels.noting():
            as_datasets([alone], Roles(data.target, classes=data.classes or None, kind=data.target_kind), known, labels)
    rest = replace(raw, columns={k: v for k, v in raw.columns.items() if k not in (data.target, *named)})
    with features.noting():
        tables_of([rest], schema.besides((data.target, *named)).decided(), features)
    yield from (Problem("labels", sentence) for sentence in labels.found)
    yield from (Problem("features", sentence) for sentence in features.found)


def _zeros(rows: int) -> Any:
    """Return a column of zeros."""
    import pandas as pd

    return pd.Series(np.zeros(rows))


def _of_classes(training: Rows | None, min_cell: int) -> Iterator[Problem]:
    if training is None:
        return
    if training.y.ndim == 1 and len(training.classes) > 1:
        sizes = np.bincount(np.asarray(training.y, np.int64), minlength=len(training.classes))
        if (sizes >= max(min_cell, 1)).sum() < 2:  # so that it says no more than the counts that leave the site
            told = ", ".join(f"{name}: {size}" for name, size in zip(training.classes, sizes))
            yield Problem("one-class", f"only one class of this site's training rows reaches its min-cell ({told}).")


def machine(state: Path, authority: Path | None = None) -> Iterator[Problem]:
    """Yield what is wrong with a site's machine: the disk of its state folder, and its copy of ca.crt."""
    from nestfed.deploy.certificates import expiring

    if sentence := scarce(state):
        yield Problem("disk", sentence)
    if authority is not None and authority.is_file() and (sentence := expiring(authority)):
        yield Problem("certificate", sentence)


def meanings(kinds: Any) -> tuple[list[str], list[str]]:
    """Return what a site's reported kinds mean: those that stop it, and the rest; raise a ValueError if invalid."""
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        raise ValueError("its list of problems is invalid.")
    known = [KINDS[kind] for kind in KINDS if kind in kinds]
    return [k.sentence for k in known if k.stops], [k.sentence for k in known if not k.stops]


def as_sentence(parts: Iterable[str]) -> str:
    """Return several findings as one sentence."""
    return "; ".join(parts) + "."
