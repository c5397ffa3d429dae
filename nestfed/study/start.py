"""Start a study whose tables are at hand: from files and options, or from its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.data.faults import PYTHON, Entrance, Faults
from nestfed.data.schema import EMPTY, ID, TableSchema
from nestfed.data.tables import CLASS, NUMBER, SURVIVAL, Dataset, Roles
from nestfed.experiment.prepare import PATIENT
from nestfed.experiment.site import own_tables
from nestfed.experiment.spec import Experiment, from_tables
from nestfed.experiment.study import reject_unfit
from nestfed.study import release
from nestfed.study.at_hand import AtHand
from nestfed.study.conduct import LOG
from nestfed.study.hazards import options_of
from nestfed.study.model import StudyModel
from nestfed.study.outcome import Outcome, find_out
from nestfed.study.propose import REGRESS, proposed
from nestfed.study.tables import ReadFiles, read_files

STRAY = 5
"""A class of several with fewer rows is rejected."""


@dataclass(frozen=True)
class Started:
    """A study with the tables of its sites, before any training."""

    study: Experiment
    tables: Mapping[str, Dataset]
    notes: tuple[str, ...] = ()
    """Sentences on what was detected in the tables and may surprise."""


def from_files(
    files: Sequence[str | Path],
    target: str,
    objective: str = "auto",
    *,
    positive: str = "",
    schema: TableSchema = EMPTY,
    data: Mapping[str, Any] | None = None,
    entrance: Entrance = PYTHON,
    **options: Any,
) -> Started:
    """Read one table per site, each once, and propose a study.

    - `data`: further settings of [data], such as group, drop, split_by and test_from, subgroups.
    - `options`: those of `propose.proposed`.
    """
    given = {k: v for k, v in (data or {}).items() if v}
    kept = [given[name] for name in ("group", "split_by") if name in given]
    faults = Faults(entrance)
    subgroups = tuple(given.get("subgroups", ()))
    kind = NUMBER if objective == REGRESS else CLASS
    roles = Roles(target, tuple(dict.fromkeys(kept)), tuple(given.get("drop", ())), kind=kind, subgroups=subgroups)
    group = "" if "group" in given else PATIENT
    found = read_files(files, roles, schema, faults, positive=positive, group=group, numbers=objective == "auto")
    notes = found.notes()
    _reject_stray_classes(found, target)
    notes += _repeated_ids(found, given)
    if found.roles.kind != kind:
        notes = (*notes, f"Target {target!r} has many different numbers, so the study predicts a number.")
    if PATIENT in found.roles.columns and "group" not in given:
        given["group"] = PATIENT
        notes = (
            *notes,
            f"Rows of the same {PATIENT!r} stay together, and the column is not a feature; name another with --group.",
        )
    tables = proposed(
        target,
        objective,
        [len(table) for table in found.tables],
        found.classes,
        data={k: list(v) if isinstance(v, tuple) else v for k, v in given.items()},
        schema=found.schema.to_tables(),
        sites={one.site: one.where for one in found.raw},
        **options,
    )
    return Started(from_tables(tables), found.by_name(), notes)


def _reject_stray_classes(found: ReadFiles, target: str) -> None:
    """Reject a third class that hardly any row has: it is more likely a mistake than a class."""
    if len(found.classes) < 3:
        return
    counts = np.array([np.bincount(table.y, minlength=len(found.classes)) for table in found.tables])
    for n, name in enumerate(found.classes):
        if (rows := int(counts[:, n].sum())) < STRAY:
            places = ", ".join(one.where for one, count in zip(found.raw, counts[:, n]) if count)
            raise NestfedError(
                f"Target {target!r} is {name!r} in only {rows} of all rows ({places}): correct them, or remove these rows."
            )


def _repeated_ids(found: ReadFiles, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence on ids that several rows share, unless a group keeps such rows together."""
    if "group" in given or PATIENT in found.roles.columns:
        return ()
    ids = [name for name, spec in found.schema.columns.items() if spec.kind == ID]
    repeated = [name for name in ids if any(one.columns[name].dropna().duplicated().any() for one in found.raw)]
    return tuple(
        f"Column {name!r} holds ids that several rows share, so rows of one of them may be on both sides of the split: use "
        f"--group {name} if it is a person."
        for name in repeated
    )


def from_file(study: Experiment) -> Started:
    """Read the tables that a study's file names in [sites]."""
    if not study.is_study:
        raise NestfedError("The file has no [study] table: run it with `nestfed run` or `nestfed compare`.")
    if not study.sites.files:
        raise NestfedError(
            "The study names no tables: add [sites] with one line for each site, such as clinic-a = 'sites/a.csv', or deploy it "
            "where each site has its own table (`nestfed deploy`)."
        )
    if study.data.target_kind == SURVIVAL:
        options_of(study)
    else:
        reject_unfit(study)
    tables = own_tables(study, study.sites.files)
    return Started(study, tables, next(iter(tables.values())).notes)


def train(
    started: Started,
    out: Path,
    *,
    force: bool = False,
    progress: bool | None = False,
    tell: Callable[[str], None] = LOG.info,
) -> tuple[Outcome, StudyModel, dict[str, Path]]:
    """Conduct a study and write what it leaves. Call it again to resume.

    - `force`: replace a model in the output directory, and train again.
    """
    study = started.study
    release.claim(out, force=force)
    reject_unfit(study)
    release.keep_file(study, out)
    sites = AtHand(study, started.tables, directory=release.trainings(out, study, afresh=force), progress=progress)
    outcome = find_out(study, sites, tell)
    facts = {"files": ", ".join(study.sites.files.values())}
    model, written = release.write(outcome, out, facts, force=force)
    return outcome, model, written
