"""The client's half of a round: receive, take local steps, send. It runs for one client or vectorised over many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestfed.core import Algorithm, Batch, Data, Fields, NestfedError, Problem, Tape
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


class Who(NamedTuple):
    """What a batch says of its client: `Batch.key` (before `at`: one for each iteration), `client`, `steps` and `rows`."""

    key: Tensor
    client: Tensor
    steps: Tensor
    rows: Tensor

    def at(self, i: int) -> Who:
        """Return these facts for the i-th iteration."""
        return self._replace(key=self.key[i])


class Report(NamedTuple):
    """Statistics of one client's round, sent with its upload."""

    loss: Tensor
    moved: Tensor
    """‖x_n − x_start‖² of the uploaded point, from which the drift is computed."""


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
    costs: list[tuple[int, int]] = field(default_factory=list)
    """Examples and evaluations of each step."""
    noted: bool = False
    """Whether the problem recorded a loss."""
    precision: torch.dtype | None = None
    pieces: int = 1

    def __call__(
        self, shared: Fields, private: Fields, stale: Any, who: Who, batches: Sequence[Data], *, short: bool = False
    ) -> tuple[Fields, Fields, Report]:
        """Return the upload, the new private fields and the report.

        There may be fewer batches than iterations. With `short`, vectorised clients take fewer steps than there are
        batches: each keeps its state after its last step.
        """
        s = self.begin(shared, private, stale)
        losses, taps = [], {}
        for i, (t, data) in enumerate(zip(range(*self.span), batches)):
            s, tape = self.step(s, data, who.at(i), t, who.steps > i if short else None, begins=i == 0)
            self.costs.append((tape.examples, tape.evaluations))
            if tape.loss is not None:
                losses.append(tape.loss)
            if t <= self.tap:
                taps[TAP] = getattr(s, self.method.point)
            if self.watch is not None:
                self.watch(t, s, tape.loss)
        return self.finish(s, shared, losses, taps if self.span.holds(self.tap) else {}, who.steps if short else None)

    def begin(self, shared: Fields, private: Fields, stale: Any) -> Any:
        """Load the download; `stale` marks a client that skipped the last round."""
        s = self.template._replace(**shared, **private)
        if stale is not None:
            fresh = self.returned("rejoin", self.method.rejoin(s, self.span.start))
            s = s._replace(**{k: torch.where(stale, getattr(fresh, k), getattr(s, k)) for k in self.method.private})
        return self.returned("receive", self.method.receive(s, self.span.start))

    def returned(self, hook: str, s: Any) -> Any:
        """Return the state that a method's hook returned; reject anything else."""
        if getattr(s, "_fields", ()) != self.template._fields:
            raise NestfedError(
                f"The {hook} of {self.method.name} must return its state, a {type(self.template).__name__}, but it returns a "
                f"{type(s).__name__}."
            )
        return s

    def step(
        self, s: Any, data: Data, who: Who, t: int, active: Tensor | None = None, *, begins: bool
    ) -> tuple[Any, Tape]:
        """Take the step of iteration t; return the new state and what it cost.

        active: whether this client takes the step; None = it does.
        begins: whether it is the first step of its round.
        """
        tape = Tape()
        batch = Batch(
            data, *who, tape=tape, begins=begins, eager=self.eager, precision=self.precision, pieces=self.pieces
        )
        new = self.returned("step", self.method.step(self.problem, s, batch, t))
        if not tape.evaluations:  # the problem does not count evaluations
            length = max(self.span.stop - self.span.start, 1)
            once = self.method.evaluations == 1 or self.method.restarts(t, length)
            for _ in range(1 if once else self.method.evaluations):
                tape.note(leading(data))
        if active is not None:
            _same_shapes(self.method, s, new)
            new = type(s)(*(torch.where(active, after, before) for after, before in zip(new, s)))
            tape.loss = None if tape.loss is None else tape.loss * active
        return new, tape

    def finish(
        self, s: Any, shared: Fields, losses: Sequence[Tensor], taps: Fields, steps: Tensor | None = None
    ) -> tuple[Fields, Fields, Report]:
        """Prepare the upload; `steps` is the number of steps that this client took, if it skipped some."""
        self.noted = bool(losses)
        x_start = shared[self.method.point]
        loss = x_start.new_zeros(())
        if losses:
            loss = torch.stack(list(losses)).mean() if steps is None else torch.stack(list(losses)).sum() / steps
        s = self.returned("send", self.method.send(s, self.span.stop))
        for k, v in shared.items():
            if getattr(s, k).shape != v.shape:
                raise NestfedError(
                    f"{self.method.name} sends {k} with shape {tuple(getattr(s, k).shape)}, but its shared field {k} has shape "
                    f"{tuple(v.shape)}: shared fields keep the shape that they have in init."
                )
        report = Report(loss, ((getattr(s, self.method.point) - x_start) ** 2).sum())
        return (
            {k: getattr(s, k) for k in (*self.method.shared, *self.method.gathered)} | dict(taps),
            {k: getattr(s, k) for k in self.method.private},
            report,
        )


def _same_shapes(method: AnyAlgorithm, before: Any, after: Any) -> None:
    """Reject a field that grows from step to step where clients take different numbers of steps."""
    for name, one, other in zip(before._fields, before, after):
        if one.shape != other.shape:
            raise NestfedError(
                f"{method.name} collects one {name} for each local step, so all clients must take equally many steps."
            )


def batch_keys(streams: Streams, ns: Sequence[int], span: Span, device: torch.device) -> Tensor:
    """Return one key per client and iteration, shape (clients, iterations)."""
    return torch.from_numpy(streams.keys(Purpose.DROPOUT, ns, range(*span))).to(device)
