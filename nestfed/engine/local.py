"""Clients in this process, one after another or vectorised. A deployed site is a `Local` with one client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nestfed.core import Clients, Data, DivergedError, Fields, NestfedError, Problem
from nestfed.data.random import Streams
from nestfed.engine.encode import RESIDUAL
from nestfed.engine.intercept import WrongNumberError, intercepted, reject_infinite, timed, watched
from nestfed.engine.options import Exchange
from nestfed.engine.probe import blamed
from nestfed.engine.program import TAP, AnyAlgorithm, Program, Report, Span, Who, batch_keys
from nestfed.engine.round import Fold, Order, Reply, Upload, empty_reply
from nestfed.engine.store import Store, Tables
from nestfed.problems.flat import channels_last

WIDEST = 256
"""The most clients to vectorise at once: enough to use the processor, few enough to bound memory."""
ROOM = 2**22
"""The most numbers in one field of all clients vectorised at once: more would not fit the processor's cache."""


class Inputs(NamedTuple):
    """The inputs of some clients' rounds, one row each."""

    shared: Fields
    private: Fields
    stale: Tensor | None
    """Whether each client skipped the last round; None if none did."""
    who: Who
    batches: Sequence[Data]
    """One for each iteration that some client takes."""
    steps: Sequence[int]
    """The number of local steps of each client."""

    @property
    def short(self) -> bool:
        """Whether some clients take fewer steps than others."""
        return min(self.steps) < len(self.batches)


@dataclass
class Local:
    """Runs clients in this process."""

    problem: Problem
    method: AnyAlgorithm
    clients: Clients
    store: Store
    seed: int
    exchange: Exchange
    device: torch.device = torch.device("cpu")
    vectorised: bool = False
    compiled: bool = False
    precision: torch.dtype | None = None
    pieces: int = 1
    profiled: bool = False
    template: Any = None
    """A state of the method; only its scratch fields are used, the others arrive with every round."""

    def __post_init__(self) -> None:
        self.streams = Streams(self.seed)
        self.drop = self.exchange.on_nan == "drop"
        self.weight: Callable[[int], float] | None = None
        if self.exchange.weights == "examples":
            self.weight = lambda n: float(self.clients.examples(n))
        if self.template is None:
            self.template = self.method.init(self.problem, self.problem.x0)
        brought = (*self.method.shared, *self.method.private, *self.method.tables())
        self.template = self.template._replace(**{k: getattr(self.template, k).new_empty(0) for k in brought})
        # Measured: channels-last convolutions are up to twice as fast on a CPU, but not under vmap.
        self.planar = not self.vectorised and self.problem.planar and self.device.type == "cpu"
        self._step = torch.compile(self._steps) if self.compiled else self._steps
        self.compiling = 0.0

    # -- the federation's methods

    def run(self, order: Order, shared: Fields) -> Reply:
        """Run a round."""
        reply = empty_reply(shared, self.method.point, order, self.exchange)
        reply.downloads = len(order.asked)
        self.work(order, shared, reply)
        return reply

    def work(self, order: Order, shared: Fields, reply: Reply) -> None:
        """Run the clients of an order and add their uploads to a reply."""
        # Vectorised steps are many small operations; threads only slow them down.
        with _threads(1 if self.vectorised and self.device.type == "cpu" else 0), torch.no_grad():
            fold = Fold(self.exchange, shared, reply, self.weight)
            for upload in self.uploads(order, self.exchange.encoding.broadcast(shared), reply):
                with reply.lap("averaging"):
                    fold.add(upload)

    def own(self) -> Fields:
        """Return the private fields of all clients; empty at a deployed site, which keeps them on disk."""
        return self.store.fields if isinstance(self.store, Tables) else {}

    def private(self) -> Fields:
        """Return the private fields of all clients."""
        return self.own()

    def restore(self, private: Fields) -> None:
        """Load private fields from a checkpoint."""
        for k, v in self.own().items():
            v.copy_(private[k])

    def agree(self, value: Any) -> Any:
        """Return the value, as this is the only process."""
        return value

    def any(self, flag: bool) -> bool:
        """Return the flag, as this is the only process."""
        return flag

    def close(self) -> None:
        """Release what the clients hold."""
        self.clients.close()

    # -- the clients' half of a round

    def uploads(self, order: Order, received: Fields, reply: Reply) -> Iterator[Upload]:
        """Run the clients and yield their uploads, one chunk of vectorised clients at a time.

        The reply collects times, and clients with infinite or NaN numbers.
        """
        first = order.span.start
        self.clients.prepare([(n, first + i) for n in order.asked for i in range(self._pace(n, order.span))])
        width = max(1, min(WIDEST, ROOM // self.problem.x0.numel())) if self.vectorised else 1
        for start in range(0, len(order.asked), width):
            upload = self._chunk(order, received, start, min(start + width, len(order.asked)), reply)
            if upload is not None:
                yield upload

    def _chunk(self, order: Order, received: Fields, start: int, stop: int, reply: Reply) -> Upload | None:
        """Run some clients at once and store their new private fields."""
        ns = list(order.asked[start:stop])
        problem = intercepted(self.problem, timed(reply)) if self.profiled else self.problem
        program = Program(
            problem, self.method, self.template, order.span, not self.vectorised, order.tap,
            precision=self.precision, pieces=self.pieces,
        )  # fmt: skip
        with reply.lap("drawing"), blamed(self.clients.label, ns, order.number, "The clients' sample"):
            kept = self.store.read(order, start, stop)
            inputs = self._inputs(order, received, kept, start, stop)
        with reply.lap("running"), blamed(self.clients.label, ns, order.number):
            fields, private, report = self._rounds(program, inputs)
            if self.compiling:
                reply.laps["compiling"] = reply.laps.get("compiling", 0.0) + self.compiling
        with reply.lap("averaging"):
            numbers, good = _checked(fields, private, report)
            if len(good) < len(ns):
                for i in sorted(set(range(len(ns))) - set(good)):
                    sentence = self._culprit(program, inputs, order.number, ns[i], i)
                    if not self.drop:
                        raise DivergedError(sentence)
                    reply.dropped[ns[i]] = sentence
                if not good:
                    return None
                fields, private, kept = ({k: v[good] for k, v in some.items()} for some in (fields, private, kept))
                numbers = numbers[:, good]
            ns = [ns[i] for i in good]
            gathered = {k: fields[k] for k in self.method.gathered}
            fields = {k: v for k, v in fields.items() if k not in gathered}
            fields, lost = self._encoded(fields, received, kept, ns, order.round)
            self.store.write(order, ns, {**private, **lost})
        places = [order.at + start + i for i in good]
        loss = numbers[0] if program.noted else torch.full_like(numbers[0], torch.nan)
        steps = [inputs.steps[i] for i in good]
        examples, evaluations = (
            sum(cost[k] * sum(taken > j for taken in steps) for j, cost in enumerate(program.costs)) for k in (0, 1)
        )
        return Upload(ns, places, fields, loss, numbers[1], examples, evaluations, gathered)

    def _inputs(self, order: Order, received: Fields, kept: Fields, start: int, stop: int) -> Inputs:
        ns, span = order.asked[start:stop], order.span
        steps = [self._pace(n, span) for n in ns]
        taken = Span(span.start, span.start + max(steps))
        batches = self.clients.draw(ns, range(*taken))
        rows = [self.clients.examples(n) for n in ns]
        numbers = torch.tensor([list(ns), steps, rows], device=self.device)
        who = Who(batch_keys(self.streams, ns, taken, self.device), *numbers)
        late = order.stale()[start:stop] if self.method.private else []
        stale = torch.tensor(late, device=self.device) if any(late) else None
        return Inputs(
            {**received, **order.tables}, {k: kept[k] for k in self.method.private}, stale, who, batches, steps
        )

    def _pace(self, n: int, span: Span) -> int:
        """Return the number of local steps of client n in a round."""
        most = span.stop - span.start
        steps = self.clients.steps(n, span.start, most)
        if not (isinstance(steps, int) and 1 <= steps <= most):
            raise NestfedError(f"Client {self.clients.label(n)} must take 1…{most} local steps, not {steps!r}.")
        return steps

    def _rounds(self, program: Program, inputs: Inputs) -> tuple[Fields, Fields, Report]:
        """Run all these clients' rounds; return one row per client."""
        self.compiling = 0.0
        if self.compiled:
            return self._compiled(program, inputs)
        if self.vectorised:
            return self._together(program, inputs)
        fields, private, report = self._alone(program, inputs, 0)
        return _one_row(fields), _one_row(private), Report(*(r[None] for r in report))

    def _together(self, program: Program, inputs: Inputs) -> tuple[Fields, Fields, Report]:
        """Run the clients' whole round in one vectorised call."""

        def round(*client: Any) -> tuple[Fields, Fields, Report]:
            return program(*client, short=inputs.short)

        in_dims = (None, 0, None if inputs.stale is None else 0, 0, 0)
        return torch.vmap(round, in_dims=in_dims, randomness="error")(*inputs[:5])

    def _compiled(self, program: Program, inputs: Inputs) -> tuple[Fields, Fields, Report]:
        """Run the round step by step, each step vectorised and compiled.

        The unit is a step because all rounds share it. The compiler treats t as a number and compiles twice: for t = 0
        and for all later t.
        """
        shared, mine, stale, who, batches, _ = inputs
        count = len(who.client)
        wide = {k: v.expand(count, *v.shape) for k, v in shared.items()}
        s = torch.vmap(program.begin, in_dims=(0, 0, None if stale is None else 0))(wide, mine, stale)
        # Fields that a method passes through unchanged are still shared by all clients.
        s = type(s)(*(v.contiguous() for v in s))
        losses, taps = [], {}
        for i, (t, batch) in enumerate(zip(range(*program.span), batches)):
            graphs, began = _graphs(), perf_counter()
            now = who._replace(key=who.key[:, i])
            try:
                s, loss, cost = self._step(s, batch, now, t, who.steps > i if inputs.short else None, i == 0)
            except Exception as error:
                if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    reason = str(error).strip().split("\n")[0]
                    raise NestfedError(f"compile: this problem or machine cannot compile a step: {reason}.") from error
                raise
            if _graphs() != graphs:
                self.compiling += perf_counter() - began
            program.costs.append(cost)
            losses += loss
            if t == program.tap:
                taps[TAP] = getattr(s, self.method.point)
        steps = who.steps if inputs.short else None
        return torch.vmap(program.finish, in_dims=(0, 0, 0, 0, None if steps is None else 0))(
            s, wide, losses, taps, steps
        )

    def _steps(
        self, s: Any, data: Data, who: Who, t: int, active: Tensor | None, begins: bool
    ) -> tuple[Any, list[Tensor], tuple[int, int]]:
        """Take one step at all clients, or at those that are active; the list has the loss, if the problem notes one."""
        counts = [0, 0]

        def step(s: Any, data: Data, who: Who, active: Tensor | None) -> tuple[Any, list[Tensor]]:
            program = Program(
                self.problem, self.method, self.template, Span(0, 0), False,
                precision=self.precision, pieces=self.pieces,
            )  # fmt: skip
            s, tape = program.step(s, data, who, t, active, begins=begins)
            counts[:] = tape.examples, tape.evaluations
            return s, [] if tape.loss is None else [tape.loss]

        after, loss = torch.vmap(step, in_dims=(0, 0, 0, None if active is None else 0))(s, data, who, active)
        return after, loss, (counts[0], counts[1])

    def _alone(self, program: Program, inputs: Inputs, i: int) -> tuple[Fields, Fields, Report]:
        """Run the round of the i-th client of the inputs."""
        lay = channels_last if self.planar else _unchanged
        return program(
            inputs.shared,
            {k: v[i] for k, v in inputs.private.items()},
            None if inputs.stale is None else inputs.stale[i],
            Who(*(v[i] for v in inputs.who)),
            [tree_map(lambda leaf: lay(leaf[i]), b) for b in inputs.batches[: inputs.steps[i]]],
        )

    def _encoded(
        self, fields: Fields, received: Fields, kept: Fields, ns: Sequence[int], round: int
    ) -> tuple[Fields, Fields]:
        """Return encoded uploads and their rounding errors."""
        encoding = self.exchange.encoding
        if not encoding.up:
            return fields, {}
        tap = {k: v for k, v in fields.items() if k == TAP}
        plain = {k: fields[k] for k in self.method.shared}
        residual = {k: kept[RESIDUAL + k] for k in plain}
        packed, lost = encoding.pack(plain, received, residual, encoding.noise(self.seed, ns, round, received))
        return packed | tap, {RESIDUAL + k: v for k, v in lost.items()}

    # -- errors with their location

    def _culprit(self, program: Program, inputs: Inputs, round: int, n: int, i: int) -> str:
        """Rerun a client's round and describe the first number that became infinite or NaN."""
        where = f"at client {self.clients.label(n)}"
        now = program.span.start

        def watch(t: int, s: Any, loss: Tensor | None) -> None:
            nonlocal now
            now = t
            reject_infinite({**({} if loss is None else {"loss": loss}), **s._asdict()})
            now = t + 1

        try:
            self._alone(
                replace(program, problem=intercepted(self.problem, watched), eager=True, watch=watch, costs=[]),
                inputs,
                i,
            )
        except WrongNumberError as wrong:
            step = f"{where}, iteration {now} (round {round})"
            leaves = tree_leaves(inputs.batches[now - program.span.start])
            numbers = [v[i] for v in leaves if isinstance(v, Tensor) and v.is_floating_point()]
            if not all(bool(torch.isfinite(v).all()) for v in numbers):
                return f"The data contain infinite or NaN values {step}, so {wrong} became infinite or NaN."
            name = str(wrong).removeprefix("the ")
            if now == 0 and name not in self.template._fields:  # no step was taken yet
                return (
                    f"The {name} is infinite, NaN or too large {step}, although the starting point and the data are "
                    "finite: look for a division by 0 or a logarithm or root of 0 in f or the model."
                )
            return (
                f"The {name} became infinite, NaN or too large {step}, although the data are finite: the step size is too "
                "large, or f or the model divides by 0 or takes a logarithm or root of 0."
            )
        return f"A number became infinite or NaN {where} in its upload or private fields after round {round}."


def _checked(fields: Fields, private: Fields, report: Report) -> tuple[Tensor, list[int]]:
    """Return each client's loss and movement, and the positions of clients whose numbers are all finite."""
    sums = (v.sum(list(range(1, v.dim()))) if v.dim() > 1 else v for v in (*fields.values(), *private.values()))
    numbers = torch.stack([*report, *sums]).double()
    good = torch.isfinite(numbers).all(0).tolist()
    return numbers[:2], [i for i, fine in enumerate(good) if fine]


def _one_row(fields: Fields) -> dict[str, Tensor]:
    return {k: v[None] for k, v in fields.items()}


def _graphs() -> int:
    """Return how often torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _unchanged(leaf: Tensor) -> Tensor:
    return leaf


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit torch to this many threads; 0 = no change."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
