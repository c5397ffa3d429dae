"""Write a report as one HTML file that needs no network.

The file contains every chart twice: as an SVG for paper and for browsers without JavaScript, and as numbers that a short
script draws with uPlot.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.files import write_atomically
from nestfed.report.page import AXES, Cell, Claim, Curve, Curves, Figure, Image, Page, Series, Style, Table
from nestfed.report.svg import Drawn, View, draw, view

POINTS = 400
"""Thin curves with more points than this; a screen does not show more."""


def write(page: Page, path: Path) -> Path:
    """Write the page as one HTML file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(page).encode())
    return path


def render(page: Page) -> str:
    """Return the page as HTML. All text is escaped; the content policy forbids other scripts and all requests."""
    charts: list[dict[str, Any]] = []
    body = [
        _section("claims", "Claims", [_claims(page.claims)] if page.claims else []),
        _section("results", "Results", [_table(table) for table in page.tables]),
        *(_curves(block, f"curves-{i}", charts) for i, block in enumerate(page.curves)),
        _section("figures", "Figures", _figures(page.figures, charts)),
        *(_image(image) for image in page.images),
        _section("run", "What was run", [_facts(page.facts), _settings(page.settings)] if page.facts else []),
    ]
    style = _asset("uplot.css") + _asset("report.css")
    script = f"/*\n{_asset('uplot-LICENSE.txt')}*/\n{_asset('uplot.js')}\n{_asset('report.js')}"
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"
    data = json.dumps(_finite(charts), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":  # no text can end the element that contains it
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="nestfed">
<link rel="icon" href="data:,">
<title>{escape(page.title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{escape(page.title)}</h1>{_paragraph(page.summary, "summary")}</header>
{"".join(body)}
</main>
<footer>Written by NestFed from the records of the runs. This file needs no network.</footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _section(name: str, title: str, parts: Sequence[str]) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(parts)}</section>\n' if parts else ""


def _paragraph(text: str, kind: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _claims(claims: Sequence[Claim]) -> str:
    marks = {"confirmed": "✓", "not confirmed": "✗", "not confirmed (within the spread)": "≈", "not testable here": "–"}
    kinds = {verdict: verdict.replace("(", "").replace(")", "").replace(" ", "-") for verdict in marks}
    items = [
        f'<li class="{kinds[c.verdict]}"><span class="verdict"><span aria-hidden="true">{marks[c.verdict]}'
        f"</span> {c.verdict}</span><div><p>{escape(c.sentence)}</p>{_paragraph(c.evidence, 'note')}</div></li>"
        for c in claims
    ]
    return f'<ul class="claims">{"".join(items)}</ul>'


def _table(table: Table) -> str:
    cells = [[_cell(cell) for cell in row] for row in table.rows]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(table.columns))]
    kinds = [' class="n"' if n else "" for n in numeric]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, table.columns))
    rows = []
    for i, row in enumerate(cells):
        rest = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:]))
        best = ' class="best"' if i in table.best else ""
        rows.append(f'<tr{best}><th scope="row">{escape(row[0])}</th>{rest}</tr>')
    return (
        f'<div class="block"><h3>{escape(table.title)}</h3>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"{_paragraph(table.note, 'note')}</div>"
    )


def _cell(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}" if isinstance(cell, float) else cell


def _is_number(text: str) -> bool:
    return text == "–" or text.lstrip("+−-")[:1].isdigit()


def _curves(block: Curves, name: str, charts: list[dict[str, Any]]) -> str:
    """Return the section of a block of curves, and add their numbers to `charts`."""
    found = [series for curve in block.curves for series in curve.series]
    if not found:
        return ""
    names = list(dict.fromkeys(series.name for series in found))
    axes = _axes(block.title, found)
    drawn = [_curve(curve, f"{name}-{i}", names, axes, i > 0) for i, curve in enumerate(block.curves)]
    charts += [numbers for numbers, _, _ in drawn]
    boxes = {
        "whole": ("whole range", any(trimmed for _, _, trimmed in drawn)),
        "seeds": ("single seeds", any(s.seeds for s in found)),
    }
    controls = _controls(name, axes, {value: text for value, (text, needed) in boxes.items() if needed})
    grid = f'<div class="charts">{"".join(figure for _, figure, _ in drawn)}</div>'
    parts = [f'<div class="board" id="{name}">{controls}{_legend(names)}{grid}</div>', _paragraph(block.note, "note")]
    return _section(f"{name}-section", block.title, parts)


def _axes(title: str, found: Sequence[Series]) -> list[str]:
    """Return the x axes that all series have.

    Costs that are always 0 are omitted, such as the bytes of clients that train alone. A run of 0 rounds has no others.
    """
    shared = [a for a in AXES if all(a in s.at for s in found)]
    if not shared:
        raise NestfedError(f"Curves {title!r}: the series have no axis in common.")
    return [a for a in shared if any(max(s.at[a], default=0) for s in found)] or shared[:1]


def _curve(
    curve: Curve, name: str, names: Sequence[str], axes: Sequence[str], small: bool
) -> tuple[dict[str, Any], str, bool]:
    """Return a curve's numbers for the script, its figure, and whether the figure leaves out early values."""
    axis, thin = axes[0], [_thinned(series) for series in curve.series]
    lines = [Drawn(names.index(s.name), s.at[axis], s.mean, s.sd) for s in thin if any(v is not None for v in s.mean)]
    shown = view(lines)
    series = [
        {"slot": names.index(s.name), "name": s.name, "mean": s.mean, "sd": s.sd, "seeds": s.seeds}
        | {"at": {a: s.at[a] for a in axes}}
        for s in thin
    ]
    numbers = {"id": name, "kind": "curve", "metric": curve.metric, "small": small}
    numbers |= {"view": shown.shown, "log": shown.log, "series": series}
    last = "; ".join(f"{s.name} {_last(s.mean)}" for s in curve.series)
    picture = draw(name, lines, AXES[axis], "", shown, small=small, whole=axis == "round")
    figure = _chart(name, curve.metric, f"{curve.metric} against {AXES[axis]}; last: {last}", picture)
    return numbers, figure, shown.whole != shown.shown


def _controls(name: str, axes: Sequence[str], boxes: Mapping[str, str]) -> str:
    """Return the choice of the x axis and the check boxes, by value, of a block of curves."""
    choice = "".join(
        f'<label><input type="radio" name="{name}-axis" value="{axis}"{" checked" if axis == axes[0] else ""}>'
        f"<span>{AXES[axis]}</span></label>"
        for axis in axes
    )
    against = f'<fieldset class="axis"><legend>against</legend>{choice}</fieldset>' if len(axes) > 1 else ""
    checks = "".join(
        f'<label class="check"><input type="checkbox" value="{value}"> {text}</label>' for value, text in boxes.items()
    )
    return f'<div class="controls">{against}{checks}</div>' if against or checks else ""


def _last(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{known[-1]:.4g}" if known else "none"


def _thinned(series: Series) -> Series:
    step = -(-len(series.mean) // POINTS)
    if step <= 1:
        return series
    last = len(series.mean) - 1
    keep = sorted({*range(0, last, step), last})
    return Series(
        series.name,
        {axis: [places[i] for i in keep] for axis, places in series.at.items()},
        [series.mean[i] for i in keep],
        [series.sd[i] for i in keep] if series.sd else (),
        [[seed[i] for i in keep] for seed in series.seeds],
    )


def _chart(name: str, title: str, alt: str, picture: str) -> str:
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    return (
        f'<figure class="chart" id="{name}">{caption}'
        f'<div class="plot" tabindex="-1"></div><div class="static" role="img" aria-label="{escape(alt)}">{picture}</div>'
        "</figure>"
    )


def _legend(names: Sequence[str], styles: Sequence[Style] = ()) -> str:
    keys = []
    for i, name in enumerate(names):
        style = styles[i] if styles else "line"
        mark = '<circle cx="11" cy="5" r="3.5"/>' if style == "points" else '<line x1="1" y1="5" x2="21" y2="5"/>'
        look = "reference" if style == "dashed" else f"s{i % 7} d{i // 7 % 3}"
        keys.append(
            f'<button type="button" aria-pressed="true" data-slot="{i}">'
            f'<svg class="key {look}" viewBox="0 0 22 10" aria-hidden="true">{mark}</svg>{escape(name)}</button>'
        )
    return f'<div class="legend" role="group" aria-label="Series, press to hide or show">{"".join(keys)}</div>'


def _figures(figures: Sequence[Figure], charts: list[dict[str, Any]]) -> list[str]:
    made = []
    for i, figure in enumerate(figures):
        name = f"figure-{i}"
        lines = [Drawn(slot, line.x, line.y, style=line.style) for slot, line in enumerate(figure.lines)]
        found = view(lines)
        shown = View((0.0, 1.0), (0.0, 1.0)) if figure.unit else View(found.whole, found.whole, found.log)
        series = [{"slot": s, **vars(line)} for s, line in enumerate(figure.lines)]
        charts.append(
            {"id": name, "kind": "figure", "x": figure.x, "y": figure.y, "unit": figure.unit}
            | {"view": shown.shown, "log": shown.log, "series": series}
        )
        span = (0.0, 1.0) if figure.unit else None
        picture = draw(name, lines, figure.x, figure.y, shown, small=figure.unit, across=span, square=figure.unit)
        legend = _legend([line.name for line in figure.lines], [line.style for line in figure.lines])
        parts = [f"<h3>{escape(figure.title)}</h3>", legend]
        parts += [_chart(name, "", f"{figure.y} against {figure.x}", picture), _paragraph(figure.note, "note")]
        kind = "board" if figure.unit else "board wide"
        made.append(f'<div class="{kind}" id="{name}-board">{"".join(parts)}</div>')
    return [f'<div class="figures">{"".join(made)}</div>'] if made else []


def _image(image: Image) -> str:
    source = f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
    width, height = struct.unpack(">II", image.png[16:24]) if len(image.png) > 24 else (1, 1)  # from the PNG's header
    wide = ' class="panorama"' if width > 1.8 * height else ""
    picture = f'<img{wide} src="{source}" alt="{escape(image.alt)}">'
    return f"<section><h2>{escape(image.title)}</h2>{picture}{_paragraph(image.note, 'note')}</section>\n"


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    if not settings:
        return ""
    groups = []
    for name, table in settings.items():
        shown = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in table.items()}
        rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v) or '–'}</dd></div>" for k, v in shown.items())
        groups.append(f"<div><h4>{escape(name)}</h4><dl>{rows}</dl></div>")
    return f'<details><summary>Every setting</summary><div class="settings">{"".join(groups)}</div></details>'


def _finite(value: Any) -> Any:
    """Return data with six digits, finer than a pixel, and null for infinite numbers and NaN."""
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
