"""`nestfed train --objective survival`: exact Cox regression over one table per site."""

# Slow imports are inside the functions, so that `nestfed --help` is fast.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nestfed.core import NestfedError

if TYPE_CHECKING:
    from nestfed.data.schema import TableSchema


def survive_files(
    files: Sequence[Path],
    time: str,
    event: str,
    at: Sequence[float],
    schema: TableSchema,
    data: Mapping[str, Any],
    *,
    target: str = "",
    hidden: Sequence[int] = (),
    seed: int = 0,
    out: Path | None = None,
    force: bool = False,
) -> None:
    """Fit Cox regression over sites, write what it leaves, and print the result.

    - `data`: further settings of [data].
    """
    if not (time and event):
        raise NestfedError("Survival needs the columns of times and of events: --time TD --event DIED.")
    if target:
        raise NestfedError("For survival the target is --event, with --time: leave --target out.")
    if hidden:
        raise NestfedError(
            "Survival is exact Cox regression, which has no hidden layers: leave --hidden out, or see docs/exact.md for networks."
        )
    import tomli_w

    from nestfed.experiment.site import own_tables
    from nestfed.experiment.spec import from_tables
    from nestfed.files import make_directory, reject_foreign, write_atomically
    from nestfed.study.at_hand import AtHand
    from nestfed.study.hazards import survive
    from nestfed.study.model import WHAT
    from nestfed.study.propose import proposed_survival
    from nestfed.study.sealed import SUMS, reject_used
    from nestfed.study.survival_release import headline, write
    from nestfed.study.tables import site_names

    place = out or Path("runs") / f"train-{event}"
    reject_foreign(place, "study", "study.toml", f"model/{SUMS}")
    reject_used(place / "model", WHAT, (SUMS,), force=force)
    named = dict(zip(site_names(files), map(str, files)))
    tables = proposed_survival(time, event, data=data, sites=named, times=at, seed=seed)
    if described := schema.to_tables():
        tables["schema"] = described
    study = from_tables(tables)
    hand = AtHand(study, own_tables(study, named), directory=place / "trainings")
    found = survive(study, hand, lambda sentence: typer.echo(sentence, err=True))
    _, written = write(found, place, {"files": ", ".join(named.values())}, force=force)
    write_atomically(make_directory(place) / "study.toml", tomli_w.dumps(tables).encode())
    typer.echo(f"\n{headline(found)}")
    for note in found.notes:
        typer.echo(note)
    typer.echo()
    for name, path in {**written, "study": place / "study.toml"}.items():
        typer.echo(f"{name:<11} {path}")
