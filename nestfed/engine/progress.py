"""A progress bar with the time left and live metrics; nothing at all when nobody watches."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from nestfed.engine.sync import Record


class Progress:
    """Shows a run's progress on standard error. `show=None` means: only on a terminal."""

    def __init__(self, label: str, total: int, done: int, show: bool | None) -> None:
        self.label, self.total, self.done = label, total, done
        self.show = sys.stderr.isatty() if show is None else show
        self._bar: Any = None
        self._metrics = ""

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
            loss = f"loss {record['loss']:.4f}  " if record["loss"] is not None else ""
            self._bar.update(self._task, completed=record["round"], metrics=loss + self._metrics)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
