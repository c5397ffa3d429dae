"""Start a survival study whose tables are at hand, and write what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestfed.data.faults import PYTHON, Entrance, Faults
from nestfed.data.schema import EMPTY, TableSchema
from nestfed.data.tables import SURVIVAL, Roles
from nestfed.experiment.spec import from_tables
from nestfed.study import release
from nestfed.study.at_hand import AtHand
from nestfed.study.conduct import LOG
from nestfed.study.hazards import Survived, options_of, survive
from nestfed.study.propose import proposed_survival
from nestfed.study.start import Started
from nestfed.study.survival_release import write
from nestfed.study.tables import read_files


def from_files(
    files: Sequence[str | Path],
    time: str,
    event: str,
    *,
    times: Sequence[float] = (),
    schema: TableSchema = EMPTY,
    data: Mapping[str, Any] | None = None,
    seed: int = 0,
    entrance: Entrance = PYTHON,
) -> Started:
    """Read one table per site, each once, and propose a survival study.

    - `time`, `event`: the columns of times, and of whether the event happened.
    - `times`: when survival is judged and predicted.
    - `data`: further settings of [data], such as group, drop, split_by and test_from.
    """
    given = {k: v for k, v in (data or {}).items() if v}
    kept = tuple(dict.fromkeys(given[name] for name in ("group", "split_by") if name in given))
    roles = Roles(event, kept, tuple(given.get("drop", ())), kind=SURVIVAL, time=time)
    found = read_files(files, roles, schema, Faults(entrance))
    tables = proposed_survival(
        time, event, data=given, sites={one.site: one.where for one in found.raw}, times=times, seed=seed
    )
    if described := found.schema.to_tables():
        tables["schema"] = described
    return Started(from_tables(tables), found.by_name(), found.notes())


def train(
    started: Started, out: Path, *, force: bool = False, tell: Callable[[str], None] = LOG.info
) -> tuple[Survived, dict[str, Path]]:
    """Conduct a survival study and write what it leaves; return the result and the paths.

    - `force`: replace a model in the output directory.
    """
    study = started.study
    release.claim(out, force=force)
    options_of(study)
    release.keep_file(study, out)
    found = survive(study, AtHand(study, started.tables, directory=release.trainings(out, study)), tell)
    _, paths = write(found, out, {"files": ", ".join(study.sites.files.values())}, force=force)
    return found, {**paths, "study": out / release.STUDY}
