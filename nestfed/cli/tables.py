"""The options that say how to read tables, shared by `train`, `lr-find` and `schema`, and the command `schema`."""

# Slow imports are inside the functions, so that `nestfed --help` is fast.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nestfed.data.schema import TableSchema

Group = Annotated[
    str,
    typer.Option(
        "--group", help="Never split rows with equal values in this column, at any site.", show_default="none"
    ),
]
Drop = Annotated[
    list[str] | None, typer.Option("--drop", help="A column to leave out; repeat for several.", show_default="none")
]
Categorical = Annotated[
    list[str] | None,
    typer.Option(
        "--categorical", help="A column whose numbers are codes; repeat for several.", show_default="detected"
    ),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(
        "--missing", help="A mark of missing values, such as ? or -9; repeat for several.", show_default="detected"
    ),
]
Date = Annotated[
    list[str] | None,
    typer.Option(
        "--date", help="A column of dates: NAME, or NAME=%d.%m.%Y; repeat for several.", show_default="detected"
    ),
]
Sep = Annotated[str, typer.Option("--sep", help="What separates values in CSV files.", show_default="detected")]
Decimal = Annotated[str, typer.Option("--decimal", help="The decimal point or comma.", show_default="detected")]
Encoding = Annotated[
    str, typer.Option("--encoding", help="The encoding of CSV files.", show_default="UTF-8, or else Latin-1")
]
SplitBy = Annotated[
    str, typer.Option("--split-by", help="A column of dates or numbers, for a temporal split.", show_default="none")
]
TestFrom = Annotated[
    str,
    typer.Option("--test-from", help="Where its test rows begin: 2020, 2020-06 or 2020-06-30.", show_default="none"),
]


def table_schema(
    categorical: list[str] | None,
    missing: list[str] | None,
    date: list[str] | None,
    sep: str,
    decimal: str,
    encoding: str,
) -> TableSchema:
    """Return the schema that the options describe; the rest is detected."""
    from nestfed.data.schema import TableSchema

    dates = dict(_format_of(one) for one in date or ())
    return TableSchema.of(
        categorical=categorical or (), dates=dates, missing=missing or (), sep=sep.replace("\\t", "\t"), decimal=decimal, encoding=encoding,
    )  # fmt: skip


def _format_of(written: str) -> tuple[str, str]:
    """Return the column and the format of NAME=FORMAT; the name may contain "=" and the format contains "%"."""
    name, _, form = written.rpartition("=")
    return (name, form) if name and "%" in form else (written, "")


def note(sentences: tuple[str, ...]) -> None:
    """Print what was detected and may surprise."""
    for sentence in sentences:
        typer.echo(f"note: {sentence}", err=True)


def schema_command(
    files: Annotated[
        list[Path],
        typer.Argument(help="Tables of one or several sites; or the word merge and the files that sites drafted."),
    ],
    target: Annotated[str, typer.Option("--target", help="The column to predict.", show_default="none")] = "",
    group: Group = "",
    split_by: SplitBy = "",
    drop: Drop = None,
    categorical: Categorical = None,
    missing: Missing = None,
    date: Date = None,
    sep: Sep = "",
    decimal: Decimal = "",
    encoding: Encoding = "",
    min_cell: Annotated[
        int, typer.Option("--min-cell", min=1, help="No count below this, and no rarer category, is written.")
    ] = 10,
) -> None:
    """Draft the experiment file of a study from tables, for people to agree on.

    nestfed schema sites/*.csv --target died > study.toml

    Where tables are apart, each site drafts its own file, and `nestfed schema merge a.toml b.toml > study.toml` joins them.
    """
    from nestfed.data.faults import COMMAND_LINE
    from nestfed.study.draft import draft, merged

    if str(files[0]) == "merge":
        typer.echo(merged(files[1:], min_cell).to_toml(), nl=False)
        return
    given = table_schema(categorical, missing, date, sep, decimal, encoding)
    made = draft(
        files, target, group=group, split_by=split_by, drop=drop or (), given=given, min_cell=min_cell, entrance=COMMAND_LINE,
    )  # fmt: skip
    typer.echo(made.to_toml(), nl=False)
