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
    from nestfed.study.start import Started

SURVIVAL = "survival"


def survival_from_files(
    files: Sequence[Path],
    time: str,
    event: str,
    at: Sequence[float],
    *,
    target: str,
    hidden: Sequence[int],
    seed: int,
    schema: TableSchema,
    data: Mapping[str, Any],
) -> Started:
    """Reject options that survival lacks, and read the tables; `data`: further settings of [data]."""
    if not (time and event):
        raise NestfedError("Survival needs the columns of times and of events: --time TD --event DIED.")
    if target:
        raise NestfedError("For survival the target is --event, with --time: leave --target out.")
    if hidden:
        raise NestfedError(
            "Survival is exact Cox regression, which has no hidden layers: leave --hidden out, or see docs/exact.md for networks."
        )
    from nestfed.data.faults import COMMAND_LINE
    from nestfed.study.survival_start import from_files

    return from_files(files, time, event, times=at, schema=schema, data=data, seed=seed, entrance=COMMAND_LINE)


def survive_started(started: Started, place: Path, *, force: bool) -> None:
    """Fit, write what the study leaves, and print the result."""
    from nestfed.study.survival_release import headline
    from nestfed.study.survival_start import train

    found, written = train(started, place, force=force, tell=lambda sentence: typer.echo(sentence, err=True))
    typer.echo(f"\n{headline(found)}")
    for note in found.notes:
        typer.echo(note)
    typer.echo()
    for name, path in written.items():
        typer.echo(f"{name:<11} {path}")
