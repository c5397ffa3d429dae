"""The commands for released models: `predict`, `monitor`, `adapt`, `diff` and `onnx`."""

# Slow imports are inside the commands, so that `nestfed --help` is fast.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nestfed.report.page import Table

Model = Annotated[Path, typer.Argument(help="A model directory, or the output directory of `nestfed train`.")]


def predict_command(
    model: Model,
    file: Annotated[Path, typer.Argument(help="A table with the columns of the model; the target may be missing.")],
    out: Annotated[Path, typer.Option("--out", help="Output file.")] = Path("predictions.csv"),
    site: Annotated[
        str, typer.Option("--site", help="Use this site's own calibration.", show_default="that of all sites")
    ] = "",
    threshold: Annotated[
        str,
        typer.Option("--threshold", help="A rule of the model card, or a probability.", show_default="the first rule"),
    ] = "",
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="A column to copy; repeat for several.", show_default="none")
    ] = None,
    time: Annotated[
        list[float] | None,
        typer.Option("--time", help="When to predict survival; repeat for several.", show_default="the model's times"),
    ] = None,
) -> None:
    """Predict probabilities and decisions for the rows of a table."""
    from nestfed.study.predict import predict

    found = predict(model, file, out, site=site, threshold=threshold, keep=keep or (), times=time or ())
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    if found.decision:
        typer.echo(f"{found.decision}: {found.positive:,} of {found.rows:,} rows")
    typer.echo(f"{found.rows} rows: {out}")


def monitor_command(
    model: Model,
    file: Annotated[Path, typer.Argument(help="A table of new rows with the columns of the model.")],
    labels: Annotated[
        str, typer.Option("--labels", help="The column with the true classes.", show_default="inputs and scores only")
    ] = "",
) -> None:
    """Compare new rows with the training rows: inputs, scores and, with labels, performance."""
    from nestfed.study.monitor import monitor

    found = monitor(model, file, labels)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    _print(found.table())
    if found.performance is not None:
        _print(found.performance)
    typer.echo(found.headline())


def adapt_command(
    model: Model,
    file: Annotated[Path, typer.Argument(help="A table of labelled rows of the new site.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the adapted model.")] = Path("adapted"),
    group: Annotated[
        str,
        typer.Option("--group", help="Leave rows with equal values in this column out together.", show_default="none"),
    ] = "",
    way: Annotated[str, typer.Option("--way", help="auto, recalibrate or coefficients.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a model in the output directory.")] = False,
) -> None:
    """Adapt a model to the labelled rows of a new site."""
    from nestfed.study.adapt import adapt_file

    found = adapt_file(model, file, out, group=group, force=force, way=way)  # type: ignore[arg-type]  # checked there
    for name, loss in found.losses.items():
        typer.echo(f"{name:<24} log-loss {loss:.4f}")
    for note in found.model.provenance.notes:
        typer.echo(note)
    typer.echo(f"model {found.model.digest[:12]}: {out}")


def diff_command(
    first: Model,
    second: Annotated[Path, typer.Argument(help="The model to compare it with.")],
) -> None:
    """Show what changed between two models."""
    from nestfed.study.difference import difference
    from nestfed.study.model import StudyModel

    tables = difference(StudyModel.load(first), StudyModel.load(second))
    for table in tables:
        _print(table)
    if not tables:
        typer.echo("The models are equal.")


def onnx_command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", help="Output file.")] = Path("model.onnx"),
) -> None:
    """Write a model as an ONNX file, from raw features to probabilities (needs the package onnx)."""
    from nestfed.files import write_atomically
    from nestfed.study.model import StudyModel
    from nestfed.study.programs import onnx_graph

    write_atomically(out, onnx_graph(StudyModel.load(model)))
    typer.echo(f"{out}")


def _print(table: Table) -> None:
    rows = [list(table.columns), *(["–" if cell is None else str(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    typer.echo(f"{table.title}\n")
    for row in rows:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip())
    typer.echo(f"\n{table.note}\n" if table.note else "")
