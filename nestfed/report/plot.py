"""Curves of a run or of a comparison, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.drawing import pyplot, save
from nestfed.engine.sync import Record

AXES = {
    "round": "communication rounds",
    "examples": "examples used, all clients",
    "bytes": "bytes sent, up and down",
}
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#5c636a", "#c2255c", "#e6a700", "#1c7ed6", "#66a80f", "#343a40")


def curves(runs: Mapping[str, Sequence[Sequence[Record]]], metric: str, path: Path, title: str = "") -> Path:
    """Draw a metric against rounds, examples and bytes: the mean over seeds, and a band of one deviation."""
    plt = pyplot()
    shown = {name: [series(h, metric) for h in histories] for name, histories in runs.items()}
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.9), sharey=True, layout="constrained")
    for panel, (axis, label) in zip(panels, AXES.items()):
        for colour, (name, all_seeds) in zip(_cycle(COLOURS, len(shown)), shown.items()):
            length = min(len(s["value"]) for s in all_seeds)
            across = np.mean([s[axis][:length] for s in all_seeds], 0)
            values = np.array([s["value"][:length] for s in all_seeds])
            mean, deviation = values.mean(0), values.std(0)
            panel.plot(across, mean, color=colour, label=name, linewidth=1.8)
            if len(values) > 1:
                panel.fill_between(across, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)
    finals = [v for s in shown.values() for one in s for v in one["value"]]
    # The start is far below; what tells methods apart is the upper part.
    if finals and max(finals) <= 1 and min(finals) >= 0:
        late = [one["value"][max(1, len(one["value"]) // 4) :] for s in shown.values() for one in s]
        low = min((min(values) for values in late if len(values)), default=min(finals))
        panels[0].set_ylim(max(0.0, low - 0.05), min(1.0, max(finals) + 0.02))
    panels[0].set_ylabel(metric)
    panels[-1].legend(frameon=False, loc="lower right")
    if title:
        figure.suptitle(title, fontsize=11)
    return save(figure, path)


def series(history: Sequence[Record], metric: str) -> dict[str, Any]:
    """Return a metric's values and what had been spent when each was taken."""
    rows = [r for r in history if r.get(metric) is not None]
    return {
        "value": [r[metric] for r in rows],
        "round": [r["round"] for r in rows],
        "examples": [r["examples"] for r in rows],
        "bytes": [r["bytes_up"] + r["bytes_down"] for r in rows],
    }


def _cycle(colours: Sequence[str], count: int) -> list[str]:
    return [colours[i % len(colours)] for i in range(count)]
