"""The commands that this package adds to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nestfed.cli.main import TensorBoard, echo, show_table, status, write_events_below


def reproduce(
    name: Annotated[str, typer.Argument(help="A figure or table, such as fcsg-table2.", show_default="list them")] = "",
    budget: Annotated[
        str, typer.Option(help="quick (a short test), standard, or full (the paper's size).")
    ] = "standard",
    seeds: Annotated[int, typer.Option(help="Number of seeds.", show_default="set by the budget")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Directory for all reproductions.")] = Path("runs/reproduce"),
    list_: Annotated[bool, typer.Option("--list", help="List the reproductions and what each needs.")] = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Reproduce a figure or table and compare it with the published values. Run it again to resume."""
    from nestfed_papers import estimate, page, run

    if list_ or not name:
        show_table(["name", "what it is", "data", "quick", "standard", "full", "memory"], estimate.listing())
        echo("\nTimes are estimates for two cores, tuning included, from measured seconds per round.")
        return
    with status() as tell:
        evidence, place = run.reproduce(name, budget, seeds, out, tell=tell)
    if tensorboard:
        for data, folder in evidence.meta["folders"].items():
            write_events_below(out / folder, place / "tensorboard" / run.slug(data))
    for data in evidence.data():
        echo(f"[bold]{data}[/bold]")
        show_table(page.header(evidence, data), [page.cells(row, evidence, data) for row in page.rows(evidence, data)])
        echo()
    for claim, verdict in page.verdicts(evidence):
        echo(f"[bold]{verdict.outcome}[/bold]: {claim}. {verdict.figures}")
    echo(f"\nreport   {place / 'report.html'}\nrecords  {place / 'records.jsonl'}")


def results(
    source: Annotated[Path, typer.Argument(help="Directory of the reproductions.")] = Path("runs/reproduce"),
    records: Annotated[Path, typer.Option(help="Directory of the committed records.")] = Path("papers/records"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("papers/results.md"),
) -> None:
    """Collect the records of reproductions and write the results page and results.json from them."""
    from nestfed_papers.results import write

    names = write(source, records, page)
    echo(f"Wrote {len(names)} reproductions to {page} and {records / 'results.json'}: {', '.join(names) or 'none'}.")
