"""The content of a report as dataclasses; `nestfed.report.summary` builds it, `nestfed.report.html` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nestfed.core import NestfedError, one_of

AXES = {"round": "rounds", "examples": "examples", "bytes": "bytes sent", "seconds": "seconds"}
"""The possible x axes of a curve."""

Cell = str | int | float | None
Verdict = Literal["confirmed", "not confirmed", "not confirmed (within the spread)", "not testable here"]
Style = Literal["line", "dashed", "points"]
"""Dashed lines are grey references, such as chance or the true function."""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row, and `best` are the rows to highlight."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    best: Sequence[int] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise NestfedError(
                    f"Table {self.title!r}: a row has {len(row)} cells, but there are {len(self.columns)} columns."
                )


@dataclass(frozen=True)
class Series:
    """One method's curve: the mean over seeds, the standard deviation, and each seed, at the same points."""

    name: str
    at: Mapping[str, Sequence[float]]
    """For each axis (round, examples, bytes, seconds), the x of every value."""
    mean: Sequence[float | None]
    sd: Sequence[float | None] = ()
    seeds: Sequence[Sequence[float | None]] = ()

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (*self.at.values(), self.mean, self.sd or self.mean, *self.seeds)}
        if len(lengths) != 1 or not self.at:
            raise NestfedError(f"Series {self.name!r}: axes, means, deviations and seeds must have the same length.")


@dataclass(frozen=True)
class Curve:
    """A metric against costs, one series per method."""

    metric: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Curves:
    """Curves with a common legend and axis: the first is drawn large, the others small."""

    title: str
    curves: Sequence[Curve]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Points (x, y) of a figure; x must not decrease."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "line"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise NestfedError(f"Line {self.name!r} has {len(self.x)} x but {len(self.y)} y values.")
        if any(not a <= b for a, b in zip(self.x, self.x[1:])):
            raise NestfedError(f"Line {self.name!r}: x must not decrease; sort the points.")


@dataclass(frozen=True)
class Figure:
    """Lines and points with their own axes, such as an ROC curve or a fitted function."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    note: str = ""
    unit: bool = False
    """Both axes run from 0 to 1, and the figure is square."""


@dataclass(frozen=True)
class Image:
    """A picture; `alt` describes it in words."""

    title: str
    png: bytes
    alt: str
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A published claim, our verdict, and the evidence."""

    sentence: str
    verdict: Verdict
    evidence: str

    def __post_init__(self) -> None:
        one_of("verdict", self.verdict, get_args(Verdict))


@dataclass(frozen=True)
class Page:
    """A report, from top to bottom."""

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
    """Return a number of bytes with a unit, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
