"""What a run writes and resumes from: history, record, checkpoints, progress."""

from __future__ import annotations

import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from nestfed import metrics
from nestfed.core import NestfedError
from nestfed.engine import checkpoint
from nestfed.engine.callbacks import Callbacks
from nestfed.engine.federation import Federation
from nestfed.engine.options import Evaluation
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.progress import Progress
from nestfed.engine.recheck import differing_names
from nestfed.engine.record import COSTS, Log, metric_names, metrics_of
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record, Reply, RunState
from nestfed.files import sweep

LOG = logging.getLogger(__name__)


class Interrupted(NestfedError):
    """The user stopped the run; its progress is saved."""

    exit_code = 130


class RunDirectory:
    """A run's history; with a path also its record and checkpoints, which the leading process writes."""

    def __init__(
        self,
        path: Path | None,
        identity: str,
        federation: Federation,
        *,
        method: AnyAlgorithm,
        rounds: int,
        evaluation: Evaluation,
        checkpoint_every: int,
        leads: bool = True,
        before: int = 0,
        last: int = 2**31,
        history: Sequence[Record] = (),
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.path, self.identity, self.federation, self.leads = path, identity, federation, leads
        self.method, self.rounds, self.evaluation, self.every = method, rounds, evaluation, checkpoint_every
        self.before, self.last = before, last
        """The rounds of a warm-up before these, and the last round that can be of this part of the run."""
        self._warn = warn
        self.progress: Progress | None = None
        self.callbacks = Callbacks()
        self.history: list[Record] = list(history)
        self.laps: dict[str, float] = {}
        """Seconds by activity."""
        self.saved = -1
        """Rounds completed at the last checkpoint."""
        self._written = 0
        """Lines of the history already in the record."""
        self._log: Log | None = None
        self._dropped: set[int] = set()
        self._interrupt = threading.Event()

    # -- before and after

    def resume(self, state: RunState, device: torch.device, grow: bool = False) -> RunState:
        """Return the state of the newest valid checkpoint, or else the given one, and open the record.

        With `grow`, a checkpoint may have fewer clients; the new ones have not taken part yet.
        """
        if self.path is not None:
            state = self._resumed(state, device, grow)
        self._written = len(self.history)
        if not state.round and self.before and self.judged(state):  # the warm-up evaluated the point that it hands over
            self._keep_best(state, metrics_of(self.history[-1]))
        return state

    def _resumed(self, state: RunState, device: torch.device, grow: bool) -> RunState:
        assert self.path is not None
        found: checkpoint.Saved | None = None
        if self.leads:
            found = self._newest(state, device, grow)
        there = self.federation.agree(None if found is None else found.state)
        if there is not None:
            self.federation.restore({} if found is None else found.private)
            state, self.saved = _on(there, device), there.number
            self.history = [r for r in read_record(self.path / "record.jsonl") if r["round"] <= state.number]
        if self.leads:
            self._log = Log(self.path / "record.jsonl", self.history)
        return state

    def _newest(self, state: RunState, device: torch.device, grow: bool) -> checkpoint.Saved | None:
        assert self.path is not None
        sweep(self.path)
        like = checkpoint.Saved(state, dict(self.federation.own()))
        found, skipped = checkpoint.read(self.path, self.identity, device, like, range(self.before + 1, self.last + 1))
        lost = _recorded(self.path / "record.jsonl")
        if found is None and not skipped and lost > self.before:
            skipped = [f"{self.path} has no checkpoint of its {lost} rounds: the run starts from the beginning."]
        for sentence in skipped:
            self.warn(sentence)
        clients = len(state.seen)
        if found is not None and len(found.state.seen) != clients:
            if not grow:
                raise NestfedError(
                    f"{self.path} contains a checkpoint of {len(found.state.seen)} clients, not {clients}."
                )
            new = torch.full((max(clients - len(found.state.seen), 0),), -1)
            found.state.seen = torch.cat([found.state.seen, new])[:clients]
            found.state.tables = {
                k: torch.cat([v, v.new_zeros((len(new), *v.shape[1:]))])[:clients]
                for k, v in found.state.tables.items()
            }
        return found

    def __enter__(self) -> Self:
        if self.progress is not None:
            self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.__exit__(kind, error, trace)
        if self._log is not None:
            self._log.close()

    @contextmanager
    def deferred_interrupt(self) -> Iterator[None]:
        """Delay Ctrl-C until the end of the round; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: Any) -> None:
            self._interrupt.set()
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # -- what the loop calls

    def close(self, record: Record, reply: Reply, seconds: float) -> None:
        """Add a finished round. `settle` writes its line, with its metrics if they are known by then."""
        for name, more in (*reply.laps.items(), ("round", seconds)):
            self.laps[name] = self.laps.get(name, 0.0) + more
        for n in reply.dropped.keys() - self._dropped:  # warn once per client
            self._dropped.add(n)
            self.warn(f"{reply.dropped[n]} The client is dropped from this round.")
        self.history.append(record)

    def judged(self, state: RunState) -> bool:
        """Return whether the record already has the metrics of this state."""
        return bool(self.history) and self.history[-1]["round"] == state.number and bool(metrics_of(self.history[-1]))

    def stalled(self) -> bool:
        """Return whether the last `patience` evaluations brought no better value."""
        if not self.evaluation.patience:
            return False
        metric = metrics.find(self.evaluation.metric)
        own = [r for r in self.history if r["round"] >= self.before and metrics_of(r)]
        values = [metric.signed(metrics_of(r).get(metric.name)) for r in own]
        since = len(values) - 1 - max(range(len(values)), key=values.__getitem__) if values else 0
        return self.federation.any(since >= self.evaluation.patience)

    def judge(self, state: RunState, values: Mapping[str, float]) -> None:
        """Add metrics to the line of a state, and keep its point if it is the best."""
        if taken := [k for k in values if k in COSTS]:
            raise NestfedError(
                f"The evaluation returns {taken[0]!r}, which is a column of the record: rename the metric."
            )
        own = [r for r in self.history if r["round"] > self.before or not self.before]
        if error := differing_names(metric_names(own), values, self.path):
            raise NestfedError(error)
        if not self.history or self.history[-1]["round"] != state.number:
            self.history.append(state.record(None, None, 0))
        self.history[-1] |= values
        self._keep_best(state, values)
        if self._written == len(self.history):  # the line was written before its metrics were known
            self._rewrite()
            self._show(self.history[-1])

    def _keep_best(self, state: RunState, values: Mapping[str, float]) -> None:
        if self.evaluation.keep == "best" and values:
            metric = metrics.find(self.evaluation.metric)
            name = self.evaluation.metric if isinstance(self.evaluation.metric, str) else metric.name
            if name not in values:
                raise NestfedError(f"evaluation.metric is {name!r}, but the evaluation returns {', '.join(values)}.")
            state.keep_best(self.method.solution(state.shared, {}), values[name], metric)

    def settle(self, state: RunState, over: bool) -> None:
        """Write the new lines; save a checkpoint if one is due; stop if the user pressed Ctrl-C."""
        self._write()
        asked = self.federation.any(self._interrupt.is_set())
        if state.number > self.saved and state.round and (over or asked or state.number % self.every == 0):
            with self.lap("saving"):
                self.save(state)
        if asked and not over:
            how = f"; run it again to resume from {self.path}" if self.path is not None else " (nothing is saved)"
            raise Interrupted(f"Stopped after round {state.number} of {self.rounds}{how}.")

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time the block and add it to an activity."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.laps[name] = self.laps.get(name, 0.0) + time.perf_counter() - began

    def save(self, state: RunState) -> None:
        """Write a checkpoint."""
        if self.path is None:
            return
        private = self.federation.private()
        if self._log is not None:
            self._log.settle()
            checkpoint.write(self.path, state, private, self.identity)
            # A checkpoint after every round is not news.
            LOG.log(logging.INFO if self.every > 1 else logging.DEBUG, "checkpoint after round %d.", state.number)
        self.saved = state.number

    def rescue(self, state: RunState) -> str:
        """Save the last good state after a failed round; return a sentence that says where, or nothing."""
        if self.path is None or not state.round:
            return ""
        if not self.federation.own():  # with private fields, some clients are already in the failed round
            self._write()  # if the evaluation failed, its round has no line yet
            self.save(state)
        return f"The last good checkpoint is in {self.path}, after round {self.saved}." if self.saved >= 0 else ""

    def _write(self) -> None:
        """Write the lines of the history that are not in the record yet."""
        for record in self.history[self._written :]:
            if self._log is not None:
                self._log.add(record)
            self._show(record)
        self._written = len(self.history)

    def _show(self, record: Record) -> None:
        found = metrics_of(record)
        self.callbacks.record(record)
        if self.progress is not None:
            self.progress.update(record, found)
        if found and self.leads:
            numbers = ({} if record["loss"] is None else {"loss": record["loss"]}) | found
            text = ", ".join(f"{k} {v:.4g}" for k, v in numbers.items())
            LOG.info("round %d of %d: %s", record["round"], self.rounds, text)

    def warn(self, sentence: str) -> None:
        """Log a warning, and give it to the caller."""
        LOG.warning("%s", sentence)
        self._warn(sentence)

    def _rewrite(self) -> None:
        if self._log is not None and self.path is not None:
            self._log.close()
            self._log = Log(self.path / "record.jsonl", self.history)


def _on(state: RunState, device: torch.device) -> RunState:
    """Return a state with its fields on a device."""
    for group in ("shared", "server", "kept", "tables"):
        setattr(state, group, {k: v.to(device) for k, v in getattr(state, group).items()})
    return state


def _recorded(path: Path) -> int:
    """Return the number of rounds in a record."""
    try:
        return max((int(r["round"]) for r in read_record(path)), default=0)
    except NestfedError:
        return 1  # unreadable, but not empty
