"""The data of a report, as plain dataclasses; `nestfed.report.html` writes it, `nestfed.report.summary` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nestfed.core import NestfedError

AXES = {"round": "rounds", "examples": "examples", "bytes": "bytes sent", "seconds": "seconds"}
"""What a curve may be drawn against."""

Cell = str | int | float | None
Verdict = Literal["confirmed", "not confirmed", "not confirmed (within the spread)", "not testable here"]
Style = Literal["line", "dashed", "points"]
"""A dashed line is drawn in grey: something to compare with, such as chance or the truth."""


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row, and `best` are the rows that stand out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    best: Sequence[int] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise NestfedError(
                    f"Table {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns."
                )


@dataclass(frozen=True)
class Series:
    """One method's curve: the mean over seeds, its deviation, and the seeds, at the same places."""

    name: str
    at: Mapping[str, Sequence[float]]
    """For every axis (round, examples, bytes, seconds) where the values were taken."""
    mean: Sequence[float | None]
    sd: Sequence[float | None] = ()
    seeds: Sequence[Sequence[float | None]] = ()

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (*self.at.values(), self.mean, self.sd or self.mean, *self.seeds)}
        if len(lengths) != 1 or not self.at:
            raise NestfedError(f"Series {self.name!r}: places, means, deviations and seeds must be equally many.")


@dataclass(frozen=True)
class Curve:
    """A metric against costs, one series per method."""

    metric: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Curves:
    """Curves that share a legend and an axis: the first is drawn large, the others small."""

    title: str
    curves: Sequence[Curve]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Points (x, y) of a figure; the x of a line must not decrease."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "line"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise NestfedError(f"Line {self.name!r} has {len(self.x)} x and {len(self.y)} y.")
        if any(not a <= b for a, b in zip(self.x, self.x[1:])):
            raise NestfedError(f"Line {self.name!r}: x must not decrease; sort the points.")


@dataclass(frozen=True)
class Figure:
    """Lines and points with axes of their own: an ROC curve, a fitted function."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    note: str = ""
    unit: bool = False
    """Both axes run from 0 to 1, and the figure is square."""


@dataclass(frozen=True)
class Image:
    """A picture; `alt` says in words what it shows."""

    title: str
    png: bytes
    alt: str
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A published claim, what became of it, and the figures behind the verdict."""

    sentence: str
    verdict: Verdict
    evidence: str

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise NestfedError(f"A verdict is one of {', '.join(get_args(Verdict))}, not {self.verdict!r}.")


@dataclass(frozen=True)
class Page:
    """What a report shows, from top to bottom."""

    title: str
    summary: str = ""
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    curves: Sequence[Curves] = ()
    figures: Sequence[Figure] = ()
    images: Sequence[Image] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What was run: experiment, seeds, versions, machine."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Every setting, by its table."""


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
