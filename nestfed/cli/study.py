"""The commands `train` and `lr-find`, for one table per site."""

# Slow imports are inside the commands, so that `nestfed --help` is fast.
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from nestfed.cli.survival import SURVIVAL, survival_from_files, survive_started
from nestfed.cli.tables import (
    Categorical,
    Date,
    Decimal,
    Drop,
    Encoding,
    Group,
    Missing,
    Sep,
    SplitBy,
    TestFrom,
    note,
    table_schema,
)
from nestfed.core import NestfedError

Files = Annotated[list[Path], typer.Argument(help="One table per site: .csv, .csv.gz or .parquet.")]
Target = Annotated[str, typer.Option("--target", help="The column to predict.")]
Objective = Annotated[str, typer.Option("--objective", help="Train for auroc, auprc or accuracy.")]
Time = Annotated[str, typer.Option("--time", help="For survival: the column of times.", show_default="none")]
Event = Annotated[
    str,
    typer.Option("--event", help="For survival: the column that says whether the event happened.", show_default="none"),
]
At = Annotated[
    list[float] | None,
    typer.Option(
        "--at",
        help="For survival: a time at which to judge and predict; repeat for several.",
        show_default="quartiles of the events",
    ),
]
Positive = Annotated[
    str, typer.Option("--positive", help="The target's positive value.", show_default="last in sorted order")
]
Rounds = Annotated[int, typer.Option("--rounds", help="Communication rounds.")]
Q = Annotated[int, typer.Option("--q", help="Local steps per round.")]
Hidden = Annotated[
    list[int] | None,
    typer.Option("--hidden", help="Width of a hidden layer; repeat for several.", show_default="a linear model"),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the split, the initial model and the batches.")]


Subgroup = Annotated[
    list[str] | None,
    typer.Option(
        "--subgroup", help="A column by whose values to judge the model too; repeat for several.", show_default="none"
    ),
]
Threshold = Annotated[
    list[str] | None,
    typer.Option(
        "--threshold",
        help="The rule of a threshold: 'sensitivity 0.9', 'specificity 0.95', 'alerts 0.1' or balanced; repeat for several.",
        show_default="balanced",
    ),
]


def train_command(
    files: Annotated[
        list[Path],
        typer.Argument(help="One table per site (.csv, .csv.gz or .parquet), or the file of a study (.toml)."),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="The column to predict; for survival, use --event.",
            show_default="that of the study's file",
        ),
    ] = "",
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="auto (the best on validation rows), auroc, auprc, pairwise, partial-auroc, accuracy, regress (a number), or "
            "survival (exact Cox regression).",
        ),
    ] = "auto",
    time: Time = "",
    event: Event = "",
    at: At = None,
    group: Group = "",
    drop: Drop = None,
    subgroup: Subgroup = None,
    threshold: Threshold = None,
    calibration: Annotated[
        str, typer.Option("--calibration", help="common, or sites: every site's own, shrunk towards the common one.")
    ] = "common",
    protect: Annotated[
        str,
        typer.Option("--protect", help="sites: also train models that protect the worst site.", show_default="none"),
    ] = "",
    split_by: SplitBy = "",
    test_from: TestFrom = "",
    categorical: Categorical = None,
    missing: Missing = None,
    date: Date = None,
    sep: Sep = "",
    decimal: Decimal = "",
    encoding: Encoding = "",
    positive: Positive = "",
    rounds: Annotated[
        int, typer.Option("--rounds", help="The most communication rounds.", show_default="by validation, up to 100")
    ] = 0,
    q: Annotated[int, typer.Option("--q", help="Local steps per round.", show_default="by the size of the tables")] = 0,
    hidden: Hidden = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory.", show_default="runs/train-TARGET")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model in the output directory, and train again.")
    ] = False,
) -> None:
    """Train a model across sites, compare it with the plain ways, and write the model and a report. Run it again to resume an unfinished study."""
    from nestfed.data.faults import COMMAND_LINE
    from nestfed.experiment.spec import read
    from nestfed.study import findings, release
    from nestfed.study.start import Started, from_file, from_files, train

    started: Started
    if len(files) == 1 and files[0].suffix == ".toml":
        if target:
            raise NestfedError(
                f"{files[0]} says what to predict and how: leave --target and other options out, or edit it."
            )
        study = read(files[0])
        place = out or Path("runs") / f"train-{study.data.target}"
        release.claim(place, force=force)
        started = from_file(study)
    elif objective == SURVIVAL:
        place = out or Path("runs") / f"train-{event}"
        started = survival_from_files(
            files, time, event, at or (), target=target, hidden=hidden or (), seed=seed,
            schema=table_schema(categorical, missing, date, sep, decimal, encoding),
            data={"group": group, "drop": drop or [], "split_by": split_by, "test_from": test_from},
        )  # fmt: skip
    else:
        if used := [name for name, value in {"--time": time, "--event": event, "--at": at}.items() if value]:
            raise NestfedError(f"{used[0]} is for survival: add --objective survival, or leave it out.")
        if not target:
            raise NestfedError("Name the column to predict with --target, or give the file of a study (.toml).")
        place = out or Path("runs") / f"train-{target}"
        release.claim(place, force=force)
        started = from_files(
            files,
            target,
            objective,
            positive=positive,
            schema=table_schema(categorical, missing, date, sep, decimal, encoding),
            data={
                "group": group, "drop": tuple(drop or ()), "subgroups": tuple(subgroup or ()), "split_by": split_by,
                "test_from": test_from,
            },
            study={"calibration": calibration}
            | ({"thresholds": list(threshold)} if threshold else {})
            | ({"protect": protect.split(",")} if protect else {}),
            hidden=hidden or (),
            rounds=rounds,
            q=q,
            seed=seed,
            entrance=COMMAND_LINE,
        )  # fmt: skip
    note(started.notes)
    if started.study.data.target_kind == SURVIVAL:
        survive_started(started, place, force=force)
        return
    classes = started.study.data.classes
    if len(classes) == 2:
        typer.echo(f"{len(started.tables)} sites; {started.study.data.target} = {classes[1]} is the positive class.")
    outcome, _, written = train(started, place, force=force, tell=_tell)
    shown = findings.by_metric(outcome)[0]
    typer.echo()
    _table([list(shown.columns), *([str(cell) for cell in row] for row in shown.rows)])
    typer.echo(f"\n{findings.headline(outcome)}")
    for sentence in outcome.conducted.notes:
        typer.echo(sentence)
    typer.echo()
    for name, path in written.items():
        typer.echo(f"{name:<11} {path}")


def lr_find_command(
    files: Files,
    target: Target,
    objective: Objective = "auroc",
    group: Group = "",
    drop: Drop = None,
    split_by: SplitBy = "",
    test_from: TestFrom = "",
    categorical: Categorical = None,
    missing: Missing = None,
    date: Date = None,
    sep: Sep = "",
    decimal: Decimal = "",
    encoding: Encoding = "",
    positive: Positive = "",
    rounds: Rounds = 50,
    q: Q = 10,
    hidden: Hidden = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option("--out", help="Output file of the plot, or its directory.")] = Path("lr.png"),
) -> None:
    """Try step sizes in short runs and plot the validation metric against them."""
    from nestfed.data.faults import COMMAND_LINE
    from nestfed.report.drawing import drawable
    from nestfed.study.lr_find import find_kind, lr_find
    from nestfed.study.tables import read_sites

    kind, schema = find_kind(objective), table_schema(categorical, missing, date, sep, decimal, encoding)
    out = out if out.suffix and not out.is_dir() else out / "lr.png"
    with _warnings_in_one_line():
        data = read_sites(
            files, target, group=group, drop=drop or (), positive=positive, schema=schema, split_by=split_by,
            test_from=test_from, entrance=COMMAND_LINE,
        )  # fmt: skip
        note(data.notes)
        estimator = kind(rounds=rounds, q=q, hidden=tuple(hidden or ()), random_state=seed)
        found = lr_find(estimator, data.sites)
    _table([["lr", found.metric], *([f"{lr:.3g}", f"{value:.4f}"] for lr, value in zip(found.lrs, found.values))])
    mark = f" ({found.end} of those tried)" if found.end else ""
    typer.echo(f"\nbest lr = {found.best:.3g}{mark}" + (f"; plot {found.draw(out)}" if drawable() else ""))


def _tell(sentence: str) -> None:
    typer.echo(sentence, err=True)


def _table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip())


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each nestfed warning once, in one line."""
    from nestfed.study.advice import NestfedWarning

    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", NestfedWarning)
        before = warnings.showwarning

        def show(message, category, *rest, **options) -> None:  # type: ignore[no-untyped-def]
            if not issubclass(category, NestfedWarning):
                before(message, category, *rest, **options)
            elif str(message) not in seen:
                seen.add(str(message))
                typer.echo(f"warning: {message}", err=True)

        warnings.showwarning = show
        yield
