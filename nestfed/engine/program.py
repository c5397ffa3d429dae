"""The client's half of a round: receive, take local steps, send. It runs for one client or vectorised over many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestfed.core import Algorithm, Batch, Data, Fields, Problem, Tape
from nestfed.data.random import Purpose, Streams
from nestfed.problems.base import leading

AnyAlgorithm = Algorithm[Any, Any]

TAP = "tap."
"""The key in an upload for the point after the iteration drawn for keep = "uniform"."""


class Span(NamedTuple):
    """The iterations start … stop−1 of one round."""

    start: int
    stop: int

    def holds(self, t: int) -> bool:
        """Return whether iteration t belongs to the round."""
        return self.start <= t < self.stop


def span_from(method: AnyAlgorithm, t: int, q: int) -> Span:
    """Return the round that begins at iteration t."""
    stop = t
    while not method.ends_round(stop, q):
        stop += 1
    return Span(t, stop + 1)


class Report(NamedTuple):
    """Statistics of one client's round, sent with its upload."""

    loss: Tensor
    moved: Tensor
    """‖x_n − x_start‖², from which the drift is computed."""


@dataclass
class Program:
    """One client's round."""

    problem: Problem
    method: AnyAlgorithm
    template: Any
    span: Span
    eager: bool
    tap: int = -1
    """Upload the point after this iteration too."""
    watch: Callable[[int, Any, Tensor | None], None] | None = None
    """Called after every step, to find where numbers became infinite or NaN."""
    examples: int = 0
    evaluations: int = 0
    noted: bool = False
    """Whether the problem recorded a loss."""
    precision: torch.dtype | None = None
    pieces: int = 1

    def __call__(
        self, shared: Fields, private: Fields, stale: Any, batches: Sequence[Data], keys: Sequence[Tensor | None]
    ) -> tuple[Fields, Fields, Report]:
        """Return the upload, the new private fields and the report."""
        s = self.begin(shared, private, stale)
        losses, taps = [], {}
        for t, data, key in zip(range(*self.span), batches, keys):
            s, tape = self.step(s, data, key, t)
            self.examples += tape.examples
            self.evaluations += tape.evaluations
            if tape.loss is not None:
                losses.append(tape.loss)
            if t == self.tap:
                taps[TAP] = getattr(s, self.method.point)
            if self.watch is not None:
                self.watch(t, s, tape.loss)
        self.noted = bool(losses)
        return self.finish(s, shared, losses, taps)

    def begin(self, shared: Fields, private: Fields, stale: Any) -> Any:
        """Load the download; `stale` marks a client that skipped the last round."""
        s = self.template._replace(**shared, **private)
        if stale is not None:
            fresh = self.method.rejoin(s, self.span.start)
            s = s._replace(**{k: torch.where(stale, getattr(fresh, k), getattr(s, k)) for k in self.method.private})
        return self.method.receive(s, self.span.start)

    def step(self, s: Any, data: Data, key: Tensor | None, t: int) -> tuple[Any, Tape]:
        """Take the step of iteration t; return the new state and what it cost."""
        tape = Tape()
        s = self.method.step(self.problem, s, Batch(data, key, tape, self.eager, self.precision, self.pieces), t)
        if not tape.evaluations:  # the problem does not count evaluations
            tape.note(leading(data))
        return s, tape

    def finish(self, s: Any, shared: Fields, losses: Sequence[Tensor], taps: Fields) -> tuple[Fields, Fields, Report]:
        """Prepare the upload."""
        x, x_start = getattr(s, self.method.point), shared[self.method.point]
        loss = torch.stack(list(losses)).mean() if losses else x_start.new_zeros(())
        report = Report(loss, ((x - x_start) ** 2).sum())
        s = self.method.send(s, self.span.stop)
        return (
            {k: getattr(s, k) for k in self.method.shared} | dict(taps),
            {k: getattr(s, k) for k in self.method.private},
            report,
        )


def dropout_keys(streams: Streams, ns: Sequence[int], span: Span, device: torch.device) -> Tensor:
    """Return one key per client and iteration, shape (clients, iterations)."""
    keys = [[int(streams.at(Purpose.DROPOUT, n, t).integers(2**62)) for t in range(span.start, span.stop)] for n in ns]
    return torch.tensor(keys, dtype=torch.int64, device=device)
