"""What this package adds to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nestfed.cli.main import TensorBoard, say, show_table, status, write_events_below


def reproduce(
    name: Annotated[str, typer.Argument(help="A figure or table, such as fcsg-table2; see --list.")] = "",
    budget: Annotated[
        str, typer.Option(help="quick (a rehearsal), standard, or full (the paper's size).")
    ] = "standard",
    seeds: Annotated[int, typer.Option(help="How many seeds.", show_default="those of the budget")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Directory of all reproductions.")] = Path("runs/reproduce"),
    list_: Annotated[bool, typer.Option("--list", help="Show what there is, and what each needs.")] = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Repeat a figure or table of the papers, ours beside the published; the same command goes on when interrupted."""
    from nestfed_papers import reproduce as work

    if list_ or not name:
        show_table(["name", "what it is", "data", "quick", "standard", "full", "memory"], work.listing())
        say("\nTimes are estimates for two cores, tuning included, from measured seconds per round.")
        return
    with status() as tell:
        evidence, place = work.reproduce(name, budget, seeds, out, tell=tell)
    if tensorboard:
        for data, folder in evidence.meta["folders"].items():
            write_events_below(out / folder, place / "tensorboard" / work.slug(data))
    for data in evidence.data():
        say(f"[bold]{data}[/bold]")
        show_table(work.header(evidence, data), [work.cells(row, evidence, data) for row in work.rows(evidence, data)])
        say()
    for claim, verdict in work.verdicts(evidence):
        say(f"[bold]{verdict.outcome}[/bold]: {claim}. {verdict.figures}")
    say(f"\nreport   {place / 'report.html'}\nrecords  {place / 'records.jsonl'}")


def results(
    source: Annotated[Path, typer.Argument(help="Directory of reproductions.")] = Path("runs/reproduce"),
    papers: Annotated[Path, typer.Option(help="Where the small records are kept.")] = Path("benchmarks/papers"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
) -> None:
    """Collect the records of reproductions, and write results.json and the page of results from them."""
    from nestfed_papers.results import write

    names = write(source, papers, page)
    say(f"{page} and {papers / 'results.json'} tell of {len(names)} reproductions: {', '.join(names) or 'none'}.")
