"""A comparison at every value of some settings: one table and one picture."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestfed.core import Metric, NestfedError
from nestfed.experiment.compare import Comparison, compare
from nestfed.experiment.spec import Experiment, parse_value
from nestfed.files import write_atomically
from nestfed.report import html, plot
from nestfed.report.drawing import drawable
from nestfed.report.page import Page, Table
from nestfed.report.summary import Swept, sweep_figure, sweep_table
from nestfed.report.text import as_text

LOG = logging.getLogger(__name__)
FILE = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One combination of the swept settings."""

    settings: Mapping[str, Any]
    """The values, or their labels, by setting."""
    experiment: Experiment

    @property
    def name(self) -> str:
        """The name of its directory."""
        text = ",".join(f"{key.split('.')[-1]}={value}" for key, value in self.settings.items())
        return "".join(c if c.isalnum() or c in "=,.-_" else "_" for c in text)


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep. `print(sweep)` shows its table."""

    place: Path
    title: str
    points: Sequence[tuple[Mapping[str, Any], Comparison]]
    """The settings and the comparison of every point."""
    keep: Any = field(default=None, repr=False, compare=False)
    """A temporary directory that lives as long as this object."""

    @classmethod
    def read(cls, place: Path, keep: Any = None) -> Sweep:
        """Read the sweep in a directory."""
        try:
            found = json.loads((place / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NestfedError(f"{place} contains no finished sweep: {FILE} cannot be read ({error}).") from error
        return cls(
            place, found["title"], [(p["settings"], Comparison.read(place / p["name"])) for p in found["points"]], keep
        )

    @property
    def metric(self) -> Metric:
        """The metric of all points."""
        return self.points[0][1].metric

    def _swept(self) -> list[Swept]:
        return [Swept(settings, comparison.results) for settings, comparison in self.points]

    def table(self) -> Table:
        """Return one row for every point and method."""
        return sweep_table(self._swept(), self.metric)

    def __str__(self) -> str:
        return as_text(self.table())

    def report(self, directory: str | Path | None = None) -> Path:
        """Write report.html, and sweep.png if matplotlib is installed; return the report's path."""
        place = self.place if directory is None else Path(directory)
        if drawable():
            self.draw(place / "sweep.png")
        figure = sweep_figure(self._swept(), self.metric)
        return html.write(Page(self.title, tables=[self.table()], figures=[figure]), place / "report.html")

    def draw(self, path: Path) -> Path:
        """Draw the metric of every method against the first setting."""
        return plot.figure(sweep_figure(self._swept(), self.metric), path)


def sweep_points(
    points: Sequence[Point],
    methods: Sequence[str],
    seeds: int,
    out: Path,
    *,
    title: str = "sweep",
    tell: Callable[[str], None] = LOG.info,
    **how: Any,
) -> Sweep:
    """Compare methods at every point, in a directory each; `how` are the other arguments of `compare`."""
    for name in methods:
        for point in points:
            _reject_replaced(point, name)
    if len({point.name for point in points}) < len(points):
        raise NestfedError("Two points of the sweep have the same settings: list every value once.")
    for i, point in enumerate(points, 1):

        def tell_point(sentence: str, i: int = i, point: Point = point) -> None:
            tell(f"{point.name} ({i} of {len(points)}): {sentence}")

        compare(point.experiment, methods, seeds, out / point.name, title=point.name, tell=tell_point, **how)
    content = {"title": title, "points": [{"settings": dict(p.settings), "name": p.name} for p in points]}
    write_atomically(out / FILE, json.dumps(content, indent=2).encode())
    return Sweep.read(out)


def _reject_replaced(point: Point, method: str) -> None:
    """Reject a swept setting that tuning chooses, or that the method's own table replaces: the points would not differ."""
    from nestfed.algorithms import METHODS

    variant = point.experiment.for_method(method)
    for key in point.settings:
        if key in point.experiment.grid(method):
            raise NestfedError(
                f"{key} is swept, but tuning {method} would choose it too: remove it from methods.{method}.tune, or from the "
                "sweep."
            )
        section, _, name = key.partition(".")
        if section != "algorithm" or name not in METHODS[variant.algorithm.name].__dataclass_fields__:  # type: ignore[attr-defined]
            continue
        if variant.algorithm.hyper.get(name) != point.experiment.algorithm.hyper.get(name):
            raise NestfedError(
                f"{key} is swept, but {method} has its own algorithm table in methods.{method}: remove it there."
            )


def points_of(experiment: Experiment, over: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Return the points of all combinations of dotted settings."""
    if not over:
        raise NestfedError("Nothing to sweep: give a setting several values, such as run.q=1,5,10.")
    return [
        Point(dict(zip(over, values)), experiment.with_overrides(dict(zip(over, values))))
        for values in itertools.product(*over.values())
    ]


def parse_settings(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Parse the settings of a sweep: those with one value, and those with several, such as run.q=1,5,10."""
    single, several = {}, {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise NestfedError(f"{word!r} is not a setting; write section.name=value or section.name=value,value.")
        value, whole = parse_value(key, text)
        if whole or "," not in text:
            single[key] = value
            continue
        values, whole = parse_value(key, f"[{text}]")
        several[key] = values if whole else [parse_value(key, part.strip())[0] for part in text.split(",")]
    return single, several
