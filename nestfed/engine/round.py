"""One communication round, whatever engine it runs on: a client's program, and the state between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestfed.core import Algorithm, Batch, Data, Fields, NestfedError, Tape
from nestfed.data.random import Purpose, Streams

AnyAlgorithm = Algorithm[Any, Any]
Record = dict[str, Any]
"""A round's line: round, iteration, participants, loss, drift, examples, bytes_up, bytes_down, seconds, the metrics."""


class Span(NamedTuple):
    """The iterations start … stop−1 of one round."""

    start: int
    stop: int


def span_from(algorithm: AnyAlgorithm, t: int, q: int) -> Span:
    """Return the round that begins at iteration t."""
    stop = t
    while not algorithm.ends_round(stop, q):
        stop += 1
    return Span(t, stop + 1)


@dataclass
class RunState:
    """All that changes from round to round, and so all that a checkpoint holds."""

    shared: Fields
    server: Fields
    private: dict[str, Tensor]
    seen: Tensor
    """For every client, the number of rounds that were over when it last took part; −1 before."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Points put by for the outcome: "uniform" and "best"."""
    round: int = 0
    t: int = 0
    examples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    best: float | None = None

    @classmethod
    def start(
        cls,
        algorithm: AnyAlgorithm,
        template: Any,
        clients: int,
        rows: int | None = None,
        table: Callable[[Tensor, int], Tensor] = lambda value, rows: value.expand(rows, *value.shape).clone(),
    ) -> RunState:
        """Return the state before round 0; `table` makes the private fields, of all clients or of fewer `rows`."""
        shared = {k: getattr(template, k) for k in algorithm.shared}
        private = {k: table(getattr(template, k), clients if rows is None else rows) for k in algorithm.private}
        return cls(shared, algorithm.server.init(shared), private, torch.full((clients,), -1))

    def advance(self, stop: int, answered: Sequence[int]) -> None:
        """Close a round that ended before iteration `stop`.

        Iteration 0 initialises the estimators: as long as nobody was there for it, it is still to come.
        """
        self.round += 1
        if answered or self.t:
            self.t = stop
        self.seen[list(answered)] = self.round

    def keep_best(self, point: Tensor, metrics: Mapping[str, float], best: str) -> None:
        """Put a point by if it is the best so far by a metric; a leading minus sign means that less is better."""
        name = best.removeprefix("-")
        if name not in metrics:
            raise NestfedError(f"output='best' asks for {name!r}, but the evaluation gives {', '.join(metrics)}.")
        value = -metrics[name] if best.startswith("-") else metrics[name]
        if not math.isnan(value) and (self.best is None or value > self.best):
            self.best = value
            self.kept["best"] = point.clone()

    def record(self, loss: float | None, drift: float | None, participants: int) -> Record:
        """Return the costs so far, and what the last round brought."""
        return {
            "round": self.round,
            "iteration": self.t,
            "participants": participants,
            "loss": loss,
            "drift": drift,
            "examples": self.examples,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(self.seconds, 6),
        }

    def outcome(self, point: str, output: str) -> Tensor:
        """Return the point that the run was for; one that was never put by (no round had it) is the last."""
        return self.kept.get(output, self.shared[point])


def drawn(algorithm: AnyAlgorithm, rounds: int, q: int, seed: int) -> int:
    """Draw the iteration whose averaged point is the outcome, uniformly from all."""
    t = 0
    for _ in range(rounds):
        t = span_from(algorithm, t, q).stop
    return int(Streams(seed).at(Purpose.OUTPUT, 0, 0).integers(max(t, 1)))


def size(fields: Fields) -> int:
    """Return the bytes of what is sent."""
    return sum(v.numel() * v.element_size() for v in fields.values())


class Report(NamedTuple):
    """What one client's round says beside its upload."""

    loss: Tensor
    moved: Tensor
    """‖x_n − x_start‖², from which the drift is computed."""


TAP = "tap."
"""Beside an upload: the point after the iteration that was drawn for the outcome."""


@dataclass
class Program:
    """One client's round: receive, q steps, send. It runs as it is, or vectorised over clients."""

    problem: Any
    algorithm: AnyAlgorithm
    template: Any
    span: Span
    eager: bool
    tap: int = -1
    """After this iteration the point is reported too."""
    watch: Callable[[int, Any, Tensor | None], None] | None = None
    """Called after every step; for finding out where numbers went wrong."""
    examples: int = 0
    evaluations: int = 0
    precision: torch.dtype | None = None
    pieces: int = 1

    def __call__(
        self, shared: Fields, private: Fields, stale: Any, batches: Sequence[Data], keys: Sequence[Tensor | None]
    ) -> tuple[Fields, Fields, Report]:
        """Return the upload, the new private fields and the report."""
        s = self.begin(shared, private, stale)
        losses, taps = [], {}
        for t, batch, key in zip(range(*self.span), batches, keys):
            tape = Tape()
            s = self.algorithm.step(self.problem, s, self.sample(batch, key, tape), t)
            self.examples += tape.examples
            self.evaluations += tape.evaluations
            if tape.loss is not None:
                losses.append(tape.loss)
            if t == self.tap:
                taps[TAP] = getattr(s, self.algorithm.point)
            if self.watch is not None:
                self.watch(t, s, tape.loss)
        return self.finish(s, shared, losses, taps)

    def sample(self, data: Data, key: Tensor | None, tape: Tape) -> Batch:
        """Return a batch with all that a problem wants to know of it."""
        return Batch(data, key, tape, self.eager, self.precision, self.pieces)

    def begin(self, shared: Fields, private: Fields, stale: Any) -> Any:
        """Take in the download."""
        algorithm = self.algorithm
        s = self.template._replace(**shared, **private)
        if stale is not None:
            fresh = algorithm.rejoin(s, self.span.start)
            s = s._replace(**{k: torch.where(stale, getattr(fresh, k), getattr(s, k)) for k in algorithm.private})
        return algorithm.receive(s, self.span.start)

    def finish(self, s: Any, shared: Fields, losses: Sequence[Tensor], taps: Fields) -> tuple[Fields, Fields, Report]:
        """Prepare the upload."""
        algorithm = self.algorithm
        x, x_start = getattr(s, algorithm.point), shared[algorithm.point]
        loss = torch.stack(list(losses)).mean() if losses else x_start.new_zeros(())
        report = Report(loss, ((x - x_start) ** 2).sum())
        s = algorithm.send(s, self.span.stop)
        return (
            {k: getattr(s, k) for k in algorithm.shared} | dict(taps),
            {k: getattr(s, k) for k in algorithm.private},
            report,
        )


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round: `of` clients by count (int) or probability (float), some of whom fail to answer."""

    of: int | float | None = None
    failures: float = 0.0

    def check(self, clients: int) -> None:
        """Refuse what cannot be."""
        if isinstance(self.of, bool) or (isinstance(self.of, int) and not 1 <= self.of <= clients):
            raise NestfedError(f"participation must be between 1 and {clients} clients, not {self.of}.")
        if isinstance(self.of, float) and not 0 < self.of <= 1:
            raise NestfedError(f"participation as a probability must lie in (0, 1], not {self.of:g}.")
        if not 0 <= self.failures < 1:
            raise NestfedError(f"failures must lie in [0, 1), not {self.failures:g}.")

    def most(self, clients: int) -> int:
        """Return how many clients a round may have, or has on average."""
        if isinstance(self.of, float):
            return max(1, round(self.of * clients))
        return clients if self.of is None else self.of

    def draw(self, streams: Streams, clients: int, round: int) -> tuple[list[int], list[int]]:
        """Return the clients that are asked in this round, and those of them that answer."""
        asked = list(range(clients))
        if isinstance(self.of, int) and self.of < clients:
            generator = streams.at(Purpose.PARTICIPATION, 0, round)
            asked = sorted(generator.choice(clients, self.of, replace=False).tolist())
        elif isinstance(self.of, float) and self.of < 1:
            chances = streams.at(Purpose.PARTICIPATION, 0, round).random(clients)
            asked = [n for n in asked if chances[n] < self.of]
        answering = asked
        if self.failures:
            luck = streams.at(Purpose.FAILURE, 0, round).random(clients)
            answering = [n for n in asked if luck[n] >= self.failures]
        return asked, answering


def dropout_keys(streams: Streams, ns: Sequence[int], span: Span, device: torch.device) -> Tensor:
    """Return one key per client and iteration, shape (clients, iterations)."""
    keys = [[int(streams.at(Purpose.DROPOUT, n, t).integers(2**62)) for t in range(span.start, span.stop)] for n in ns]
    return torch.tensor(keys, dtype=torch.int64, device=device)
