"""A progress bar with the time left and current metrics; hidden when stderr is not a terminal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from nestfed.engine.round import Record

FLAT, LEAST = 1e-3, 5
"""A metric is flat if its last evaluations (at least LEAST, and a third of all) are within FLAT of the latest."""


def flat_since(curve: Sequence[tuple[int, float]]) -> int | None:
    """Return the round since which a metric, given as (round, value), has not moved; None if it still does."""
    latest = curve[-1][1]
    near = FLAT * max(1.0, abs(latest))
    still = list(itertools.takewhile(lambda point: abs(point[1] - latest) <= near, reversed(curve)))
    return still[-1][0] if len(still) >= max(LEAST, len(curve) / 3) else None


class Progress:
    """Shows a run's progress on standard error. `show=None` means: only on a terminal."""

    def __init__(self, label: str, total: int, done: int, show: bool | None) -> None:
        self.label, self.total, self.done = label, total, done
        self.show = sys.stderr.isatty() if show is None else show
        self._bar: Any = None
        self._metrics = ""
        self._curve: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        if self.show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
                TimeRemainingColumn(), TextColumn("{task.fields[metrics]}"), console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done, metrics="")
        return self

    def update(self, record: Record, metrics: dict[str, float]) -> None:
        """Show a new record."""
        if self._bar is not None:
            if metrics:
                self._metrics = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
                first = next(iter(metrics))
                self._curve.append((record["round"], metrics[first]))
                since = flat_since(self._curve)
                self._metrics += "" if since is None else f"  ({first} flat since round {since})"
            loss = f"loss {record['loss']:.4f}  " if record["loss"] is not None else ""
            self._bar.update(self._task, completed=record["round"], metrics=loss + self._metrics)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
