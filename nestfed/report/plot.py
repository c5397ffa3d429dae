"""Plots of runs and comparisons with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.data.partition import Summary
from nestfed.engine.round import Record
from nestfed.report.drawing import pyplot, save
from nestfed.report.page import Figure, Series
from nestfed.report.summary import series_of

AXES = {
    "round": "communication rounds",
    "examples": "examples used, all clients",
    "bytes": "bytes sent, up and down",
}
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#5c636a", "#c2255c", "#e6a700", "#1c7ed6", "#66a80f", "#343a40")
Runs = Mapping[str, Sequence[Sequence[Record]]]
"""The histories of each method, one per seed."""


def curves(runs: Runs, metric: str, path: Path, title: str = "") -> Path:
    """Plot a metric against rounds, examples and bytes: the mean over seeds, and a band of one standard deviation."""
    plt = pyplot()
    shown = _shown(runs, metric)
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.9), sharey=True, layout="constrained")
    for panel, axis in zip(panels, AXES):
        _draw(panel, shown, axis)
        panel.set_xlabel(AXES[axis])
    panels[0].set_ylabel(metric)
    panels[-1].legend(frameon=False, loc="lower right")
    if title:
        figure.suptitle(title, fontsize=11)
    return save(figure, path)


def overview(cases: Mapping[str, Runs], metrics: Sequence[str], path: Path) -> Path:
    """Plot metrics against rounds, one panel per case, at most three in a row."""
    plt = pyplot()
    drawn = [(metric, case, _shown(runs, metric)) for metric in metrics for case, runs in cases.items()]
    across = min(len(cases), 3)
    down = -(-len(drawn) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(max(5.2, 4 * across), 3.2 * down + 0.3), squeeze=False, layout="constrained"
    )
    for panel, (metric, case, shown) in zip(panels.flat, drawn):
        _draw(panel, shown, "round")
        panel.set_title(case, fontsize=10)
        panel.set_ylabel(metric)
    for panel in panels[-1]:
        panel.set_xlabel(AXES["round"])
    names = list(dict.fromkeys(name for _, _, shown in drawn for name in shown))
    handles = [plt.Line2D([], [], color=COLOURS[i % len(COLOURS)], label=name) for i, name in enumerate(names)]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=min(2 * across + 1, len(names)))
    return save(figure, path)


def figure(drawn: Figure, path: Path) -> Path:
    """Draw a figure of a report."""
    figure, panel = pyplot().subplots(figsize=(6.4, 4), layout="constrained")
    for i, one in enumerate(drawn.lines):
        panel.plot(one.x, one.y, "o-", color=COLOURS[i % len(COLOURS)], label=one.name, linewidth=1.8)
    panel.set_xlabel(f"{drawn.x}\n{drawn.note}" if drawn.note else drawn.x)
    panel.set_ylabel(drawn.y)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    return save(figure, path)


def clients(summary: Summary, path: str | Path) -> Path:
    """Plot one bar per client: its length is the number of examples, its colours are the classes."""
    plt = pyplot()
    clients, classes = summary.counts.shape
    row = min(0.3, 9.0 / clients)  # inches per client, so that the plot fits on a page
    shown = range(classes) if classes <= 20 else range(0, classes, -(-classes // 10))
    height = max(row * clients + 0.8, 0.18 * len(shown) + 0.6, 2.0)  # room for the bars and for the legend
    figure, axes = plt.subplots(figsize=(7.5, height), layout="constrained")
    scheme = plt.colormaps["tab10" if classes <= 10 else "tab20" if classes <= 20 else "viridis"]
    colours = [scheme(c if classes <= 20 else c / (classes - 1)) for c in range(classes)]
    left = np.zeros(clients, dtype=np.int64)
    for c in range(classes):
        axes.barh(
            np.arange(clients),
            summary.counts[:, c],
            left=left,
            height=0.82,
            color=colours[c],
            label=summary.classes[c],
        )
        left = left + summary.counts[:, c]
    numbered = all(name.isdecimal() for name in summary.names)
    step = 5 if numbered and clients > 30 else 1
    axes.set_yticks(np.arange(0, clients, step), summary.names[::step], fontsize=min(9.0, 72 * row * step * 0.8))
    axes.set_ylim(clients - 0.4, -0.6)  # client 0 on top, as in the table
    axes.set_ylabel("client")
    axes.set_xlabel("examples")
    axes.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    handles = axes.get_legend_handles_labels()[0]
    figure.legend(
        [handles[c] for c in shown],
        [summary.classes[c] for c in shown],
        title="class" if classes <= 20 else f"class (every {shown.step}th of {classes})",
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title_fontsize=9,
    )
    return save(figure, Path(path))


def _shown(runs: Runs, metric: str) -> dict[str, Series | None]:
    return {name: series_of(name, histories, metric) for name, histories in runs.items()}


def _draw(panel: Any, shown: Mapping[str, Series | None], axis: str) -> None:
    seeds: list[np.ndarray] = []
    for i, (name, series) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        if series is None:
            panel.plot([], [], color=colour, label=name)
            continue
        across, mean = series.at[axis], np.array(series.mean, float)
        panel.plot(across, mean, color=colour, label=name, linewidth=1.8)
        if series.sd:
            deviation = np.array(series.sd, float)
            panel.fill_between(across, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        seeds += [np.array(values, float) for values in series.seeds or [series.mean]]
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)
    # Early values are far below the rest, where methods differ: cut them off.
    if seeds and max(values.max() for values in seeds) <= 1 and min(values.min() for values in seeds) >= 0:
        late = [values[max(1, len(values) // 4) :] for values in seeds]
        low = min((values.min() for values in late if len(values)), default=min(values.min() for values in seeds))
        panel.set_ylim(max(0.0, low - 0.05), min(1.0, max(values.max() for values in seeds) + 0.02))
