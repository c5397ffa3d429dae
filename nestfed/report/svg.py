"""Charts as SVG text: what a report shows on paper and without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Range = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    """One series of a chart; `slot` is its place in the legend, which decides its colour."""

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

    The start is often far away, and what tells methods apart is the rest: the first quarter of each series is left out
    of what is shown if that leaves out more than a third of the height. Positive values over two decades get a
    logarithmic axis.
    """
    values, whole, late = [], [], []
    for s in series:
        for i, v in enumerate(s.y):
            if v is not None and math.isfinite(v):
                around = (s.spread[i] or 0.0) if s.spread else 0.0
                values.append(v)
                whole += [v - around, v + around]
                if i > len(s.y) // 4 or len(s.y) < 8:  # of a few points none is left out
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
    """Return round numbers between low and high, about as many as asked for."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda size: abs(math.log(size / raw)))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label(value: float, step: float) -> str:
    """Return a tick's label, with as many digits as its neighbour needs; large numbers as 20k or 3M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size and step >= size / 1000:
            return label(value / size, step / size) + unit
    if step < 1e-4 and 0 < abs(value) < 1e-3:
        return f"{value:.{max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9))}e}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 2
    digits += round(step, digits) != round(step, digits + 1)  # steps of 0.025
    return f"{value:.{digits}f}"


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
    """Return a chart; `name` is unique on the page, colours come from its style; `whole` x are labelled as such."""
    width, height = (440, 440 if square else 280) if small else (880, 360)
    left, right, top, bottom = 52, 12, 28 if y else 10, 42
    places = [v for s in series for v in s.x] or [0.0, 1.0]
    low, high = across or (min(places), max(places) if max(places) > min(places) else min(places) + 1)
    scale = (lambda v: math.log10(max(v, shown.shown[0]))) if shown.log else (lambda v: v)
    down, up = map(scale, shown.shown)

    def at(px: float, py: float) -> str:
        return (
            f"{left + (px - low) / (high - low) * (width - left - right):.1f},"
            f"{top + (up - scale(py)) / (up - down) * (height - top - bottom):.1f}"
        )

    decades = [10.0**k for k in range(math.ceil(down), math.floor(up) + 1)] if shown.log else ticks(down, up)
    columns = [v for v in ticks(low, high, 5 if small else 8) if not whole or v == round(v)]
    parts = [f'<svg viewBox="0 0 {width} {height}">']
    frame = f'x="{left}" y="{top}" width="{width - left - right}" height="{height - top - bottom}"'
    parts.append(f'<clipPath id="{name}-clip"><rect {frame}/></clipPath>')
    for values, vertical in ((columns, False), (decades, True)):
        for value in values:
            step = value if vertical and shown.log else values[1] - values[0] if len(values) > 1 else 1.0
            px, py = at(low, value).split(",") if vertical else at(value, shown.shown[0]).split(",")
            if vertical:
                parts.append(f'<path class="grid" d="M{left} {py}H{width - right}"/>')
                parts.append(f'<text x="{left - 6}" y="{py}" dy="0.32em" text-anchor="end">{label(value, step)}</text>')
            else:
                parts.append(f'<path class="grid" d="M{px} {top}V{height - bottom}"/>')
                parts.append(
                    f'<text x="{px}" y="{height - bottom + 16}" text-anchor="middle">{label(value, step)}</text>'
                )
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">{escape(x)}</text>')
    if y:
        parts.append(f'<text x="4" y="14">{escape(y)}</text>')
    parts.append(f'<g clip-path="url(#{name}-clip)">')
    for s in series:
        known = [(a, b, i) for i, (a, b) in enumerate(zip(s.x, s.y)) if b is not None and math.isfinite(b)]
        if s.spread and known:
            reach = [(a, b, s.spread[i] or 0.0) for a, b, i in known]
            outline = [at(a, b + c) for a, b, c in reach] + [at(a, b - c) for a, b, c in reversed(reach)]
            parts.append(f'<polygon class="band f{s.slot % 7}" points="{" ".join(outline)}"/>')
    for s in series:
        points = [at(a, b) for a, b in zip(s.x, s.y) if b is not None and math.isfinite(b)]
        if s.style == "points" or len(points) == 1:
            circles = (p.split(",") for p in points)
            parts += [f'<circle class="f{s.slot % 7}" cx="{a}" cy="{b}" r="4"/>' for a, b in circles]
        else:
            look = "reference" if s.style == "dashed" else f"s{s.slot % 7} d{s.slot // 7 % 3}"
            parts.append(f'<polyline class="{look}" points="{" ".join(points)}"/>')
    return "".join(parts) + "</g></svg>"
