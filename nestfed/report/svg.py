"""Charts as SVG text, shown on paper and without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Range = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    """One series of a chart; `slot` is its position in the legend and sets its colour."""

    slot: int
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[float | None] = ()
    style: str = "line"


@dataclass(frozen=True)
class View:
    """The range of all values, the range worth showing, and whether the axis is logarithmic."""

    whole: Range
    shown: Range
    log: bool = False


def view(series: Sequence[Drawn]) -> View:
    """Choose what a y axis shows.

    Early values are often far from the rest and hide the differences between methods. If leaving out the first quarter
    of each series saves more than a third of the height, it is left out. Positive values over more than two decades get
    a logarithmic axis.
    """
    values, whole, late = [], [], []
    for s in series:
        for i, v in enumerate(s.y):
            if v is not None and math.isfinite(v):
                around = (s.spread[i] or 0.0) if s.spread else 0.0
                values.append(v)
                whole += [v - around, v + around]
                if i > len(s.y) // 4 or len(s.y) < 8:  # keep all of a few points
                    late += [v - around, v + around]
    if values and min(values) > 0 and max(values) / min(values) > 100:
        room = (min(values) / 1.3, max(values) * 1.3)
        return View(room, room, log=True)
    first, second = _padded(whole), _padded(late or whole)
    near = second[1] - second[0] < (first[1] - first[0]) * 2 / 3
    return View(first, second if near else first)


def _padded(values: Sequence[float]) -> Range:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    share = low >= 0 and high <= 1  # a share needs no room beyond 0 and 1
    return (max(0.0, low - pad), min(1.0, high + pad)) if share and low < high else (low - pad, high + pad)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return about `about` round numbers between low and high."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda size: abs(math.log(size / raw)))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label(value: float, step: float) -> str:
    """Return a tick's label with just enough digits for the step; large numbers become 20k or 3M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size and step >= size / 1000:
            return label(value / size, step / size) + unit
    if step < 1e-4 and 0 < abs(value) < 1e-3:
        return f"{value:.{max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9))}e}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 2
    digits += round(step, digits) != round(step, digits + 1)  # steps of 0.025
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class _Frame:
    """The drawing area of a chart: its size in pixels, and how values map to it."""

    width: int
    height: int
    top: int
    x: Range
    y: View
    left: int = 52
    right: int = 12
    bottom: int = 42

    @property
    def inner(self) -> tuple[int, int]:
        """The width and height between the axes."""
        return self.width - self.left - self.right, self.height - self.top - self.bottom

    def level(self, value: float) -> float:
        """Return a y value on the axis: its logarithm if the axis is logarithmic."""
        return math.log10(max(value, self.y.shown[0])) if self.y.log else value

    @property
    def levels(self) -> Range:
        """The bottom and the top of the y axis."""
        low, high = self.y.shown
        return self.level(low), self.level(high)

    def column(self, x: float) -> str:
        """Return the horizontal position of an x value."""
        low, high = self.x
        return f"{self.left + (x - low) / (high - low) * self.inner[0]:.1f}"

    def row(self, y: float) -> str:
        """Return the vertical position of a y value."""
        down, up = self.levels
        return f"{self.top + (up - self.level(y)) / (up - down) * self.inner[1]:.1f}"

    def point(self, x: float, y: float) -> str:
        """Return the position of a point."""
        return f"{self.column(x)},{self.row(y)}"


def draw(
    name: str,
    series: Sequence[Drawn],
    x: str,
    y: str,
    shown: View,
    *,
    small: bool = False,
    across: Range | None = None,
    square: bool = False,
    whole: bool = False,
) -> str:
    """Return a chart as SVG; the page's style sheet sets its colours.

    - `name`: an id that is unique on the page.
    - `x`, `y`: the labels of the axes.
    - `across`: the range of the x axis; None = that of the series.
    - `whole`: label only whole numbers on the x axis.
    """
    width, height = (440, 440 if square else 280) if small else (880, 360)
    frame = _Frame(width, height, 28 if y else 10, across or _span(series), shown)
    area = f'x="{frame.left}" y="{frame.top}" width="{frame.inner[0]}" height="{frame.inner[1]}"'
    parts = [
        f'<svg viewBox="0 0 {width} {height}">',
        f'<clipPath id="{name}-clip"><rect {area}/></clipPath>',
        *_columns(frame, 5 if small else 8, whole),
        *_rows(frame),
        *_axis_labels(frame, x, y),
        f'<g clip-path="url(#{name}-clip)">',
        *(_band(frame, s) for s in series),
        *(_series(frame, s) for s in series),
        "</g></svg>",
    ]
    return "".join(parts)


def _span(series: Sequence[Drawn]) -> Range:
    """Return the range of all x values, never empty."""
    places = [v for s in series for v in s.x] or [0.0, 1.0]
    low, high = min(places), max(places)
    return low, high if high > low else low + 1


def _columns(frame: _Frame, about: int, whole: bool) -> list[str]:
    """Return the vertical grid lines with the labels of the x axis."""
    values = [v for v in ticks(*frame.x, about) if not whole or v == round(v)]
    step, bottom = _step(values), frame.height - frame.bottom
    parts = []
    for value in values:
        px = frame.column(value)
        parts.append(f'<path class="grid" d="M{px} {frame.top}V{bottom}"/>')
        parts.append(f'<text x="{px}" y="{bottom + 16}" text-anchor="middle">{label(value, step)}</text>')
    return parts


def _rows(frame: _Frame) -> list[str]:
    """Return the horizontal grid lines with the labels of the y axis; a logarithmic one has whole decades."""
    down, up = frame.levels
    log = frame.y.log
    values = [10.0**k for k in range(math.ceil(down), math.floor(up) + 1)] if log else ticks(down, up)
    step = _step(values)
    parts = []
    for value in values:
        py, text = frame.row(value), label(value, value if log else step)
        parts.append(f'<path class="grid" d="M{frame.left} {py}H{frame.width - frame.right}"/>')
        parts.append(f'<text x="{frame.left - 6}" y="{py}" dy="0.32em" text-anchor="end">{text}</text>')
    return parts


def _step(values: Sequence[float]) -> float:
    return values[1] - values[0] if len(values) > 1 else 1.0


def _axis_labels(frame: _Frame, x: str, y: str) -> list[str]:
    middle = (frame.left + frame.width - frame.right) / 2
    parts = [f'<text x="{middle}" y="{frame.height - 6}" text-anchor="middle">{escape(x)}</text>']
    return [*parts, f'<text x="4" y="14">{escape(y)}</text>'] if y else parts


def _known(s: Drawn) -> list[tuple[float, float, float]]:
    """Return the points of a series whose value is known, each with its deviation."""
    spread = s.spread or [0.0] * len(s.y)
    return [(a, b, c or 0.0) for a, b, c in zip(s.x, s.y, spread) if b is not None and math.isfinite(b)]


def _band(frame: _Frame, s: Drawn) -> str:
    """Return the band of one deviation around a series, or nothing."""
    known = _known(s)
    if not (s.spread and known):
        return ""
    outline = [frame.point(a, b + c) for a, b, c in known] + [frame.point(a, b - c) for a, b, c in reversed(known)]
    return f'<polygon class="band f{s.slot % 7}" points="{" ".join(outline)}"/>'


def _series(frame: _Frame, s: Drawn) -> str:
    """Return a series as a line, or as points where it has no line."""
    known = _known(s)
    if s.style == "points" or len(known) == 1:
        return "".join(
            f'<circle class="f{s.slot % 7}" cx="{frame.column(a)}" cy="{frame.row(b)}" r="4"/>' for a, b, _ in known
        )
    look = "reference" if s.style == "dashed" else f"s{s.slot % 7} d{s.slot // 7 % 3}"
    points = " ".join(frame.point(a, b) for a, b, _ in known)
    return f'<polyline class="{look}" points="{points}"/>'
