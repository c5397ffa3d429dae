"""Running some clients' rounds in this process: one after another, or vectorised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nestfed.core import Clients, Data, DivergedError, Fields, NestfedError, Tape
from nestfed.data.random import Streams
from nestfed.engine.encode import RESIDUAL, Encoding
from nestfed.engine.reduce import Reduction
from nestfed.engine.round import TAP, AnyAlgorithm, Program, Report, Span, dropout_keys
from nestfed.problems.flat import channels_last

WIDEST = 256
"""Clients that are vectorised at once: enough to use the processor, few enough to bound the memory."""
ROOM = 2**22
"""Numbers in one field of all clients that are vectorised at once: beyond, they leave the processor's cache."""


class Share(NamedTuple):
    """What some of the clients are asked to do in one round."""

    ns: Sequence[int]
    span: Span
    round: int
    tap: int
    stale: Sequence[bool]
    """For each of them, whether it sat out the last round."""
    at: int = 0
    """The row of the first of them in a table of all who answer this round."""


@dataclass
class Tally:
    """What some clients have done in one round: sums over them."""

    sums: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Instead of sums: every upload, one row each, for a reduction that needs all of them."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Clients whose numbers went wrong, each with a sentence; nothing of them is in this tally."""
    loss: float = 0.0
    moved: float = 0.0
    examples: int = 0
    evaluations: int = 0
    laps: dict[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on."""

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Add the time that something takes."""
        began = perf_counter()
        try:
            yield
        finally:
            self.laps[name] = self.laps.get(name, 0.0) + perf_counter() - began


class Runner(Protocol):
    """Somebody who runs clients: this process, worker processes, or several machines."""

    def run(self, shared: Fields, private: dict[str, Tensor], share: Share) -> Tally:
        """Run the clients' rounds, renew their rows of the private fields, return sums."""

    def close(self) -> None:
        """Let go of what the runner holds."""


def start_tally(shared: Fields, point: str, share: Share, reduction: Reduction) -> Tally:
    """Return a tally at zero."""
    if reduction.tabled:
        return Tally({}, {k: v.new_empty((len(share.ns), *v.shape)) for k, v in shared.items()})
    sums = {k: torch.zeros_like(v) for k, v in shared.items()}
    if share.span.start <= share.tap < share.span.stop:
        sums[TAP] = torch.zeros_like(shared[point])
    return Tally(sums)


@dataclass
class Local:
    """Runs clients here."""

    problem: Any
    algorithm: AnyAlgorithm
    clients: Clients
    template: Any
    seed: int
    device: torch.device
    vectorised: bool = False
    compiled: bool = False
    precision: torch.dtype | None = None
    pieces: int = 1
    profiled: bool = False
    first: int = 0
    """The client that the private fields' row 0 belongs to."""
    encoding: Encoding = Encoding()
    """How what is sent is rounded."""
    reduction: Reduction = Reduction()
    drop: bool = False
    """Leave out a client whose numbers go wrong, instead of stopping."""

    def __post_init__(self) -> None:
        self.streams = Streams(self.seed)
        # Convolutions on a processor are up to twice as fast with the channels innermost; measured, not for vmap.
        self.planar = not self.vectorised and self.problem.planar and self.device.type == "cpu"
        self._step = torch.compile(self._steps) if self.compiled else self._steps
        self.compiling = 0.0

    def close(self) -> None:
        """Nothing to let go of."""

    def run(self, shared: Fields, private: dict[str, Tensor], share: Share, tally: Tally | None = None) -> Tally:
        """Run the clients' rounds; a tally that is given is added to, in place."""
        tally = tally or start_tally(shared, self.algorithm.point, share, self.reduction)
        width = max(1, min(WIDEST, ROOM // self.problem.x0.numel())) if self.vectorised else 1
        stale = share.stale if any(share.stale) else [False] * len(share.ns)
        for i in range(0, len(share.ns), width):
            self._chunk(shared, private, share, slice(i, i + width), stale, tally)
        return tally

    def _chunk(
        self, shared: Fields, private: dict[str, Tensor], share: Share, part: slice, late: Sequence[bool], tally: Tally
    ) -> None:
        """Run as many clients as are run at once."""
        ns, span = list(share.ns[part]), share.span
        problem = self.problem
        if self.profiled:
            problem = _Wrapped(problem, partial(_timed, tally))
        program = Program(
            problem, self.algorithm, self.template, span, not self.vectorised, share.tap,
            precision=self.precision, pieces=self.pieces,
        )  # fmt: skip
        with tally.lap("drawing"):
            batches = self.clients.draw(ns, range(*span))
            keys: list[Any] = [None] * (span.stop - span.start)
            if self.problem.random:
                keys = list(dropout_keys(self.streams, ns, span, self.device).unbind(1))
            stale = torch.tensor(late[part], device=self.device) if any(late[part]) else None
        rows = [n - self.first for n in ns]
        everything, whole = private, shared
        shared = self.encoding.broadcast(shared)
        private = {k: private[k] for k in self.algorithm.private}  # without the residuals of encoded uploads
        with tally.lap("running"), self._blamed(ns, share.round):
            if self.vectorised:
                mine: Fields = {k: v[rows] for k, v in private.items()}
                run = self._compiled if self.compiled else self._together
                self.compiling = 0.0
                upload, mine, report = run(program, shared, mine, stale, batches, keys)
                if self.compiling:
                    tally.laps["compiling"] = tally.laps.get("compiling", 0.0) + self.compiling
            else:
                mine = {k: v[rows[0]] for k, v in private.items()}
                upload, mine, report = self._alone(program, shared, mine, 0, stale, batches, keys)
                upload, mine = ({k: v[None] for k, v in fields.items()} for fields in (upload, mine))
                report = Report(*(r[None] for r in report))
        with tally.lap("averaging"):
            sums = (v.sum(list(range(1, v.dim()))) if v.dim() > 1 else v for v in (*upload.values(), *mine.values()))
            numbers = torch.stack([*report, *sums]).double()
            good = torch.isfinite(numbers).all(0).tolist()
            places = [share.at + part.start + i for i in range(len(ns))]
            if not all(good):
                for i in (i for i, fine in enumerate(good) if not fine):
                    told = self._culprit(program, shared, private, share.round, ns[i], i, stale, batches, keys)
                    if not self.drop:
                        raise DivergedError(told)
                    tally.dropped[ns[i]] = told
                kept = [i for i, fine in enumerate(good) if fine]
                if not kept:
                    return
                ns, rows, places = [ns[i] for i in kept], [rows[i] for i in kept], [places[i] for i in kept]
                upload, mine = ({k: v[kept] for k, v in fields.items()} for fields in (upload, mine))
                numbers = numbers[:, kept]
            if self.encoding.up:
                upload = self._encoded(upload, shared, whole, everything, ns, share.round)
            if self.reduction.clips:
                # What was encoded is a change against the server's own fields, otherwise against what was received.
                upload = self.reduction.clipped(upload, whole if self.encoding.up else shared)
            for k, v in upload.items():
                if tally.rows:
                    _put(tally.rows[k], places, v)
                else:
                    tally.sums[k].add_(v.sum(0) if len(v) > 1 else v[0])
            # A field that the method passed through is still a row of the tables that are written below.
            tables = {v.untyped_storage().data_ptr() for v in private.values()}
            after = {k: v.clone() if v.untyped_storage().data_ptr() in tables else v for k, v in mine.items()}
            for k, v in after.items():
                _put(private[k], rows, v)
        tally.loss += float(numbers[0].sum())
        tally.moved += float(numbers[1].sum())
        tally.examples += program.examples * len(ns)
        tally.evaluations += program.evaluations * len(ns)

    @contextmanager
    def _blamed(self, ns: Sequence[int], round: int) -> Iterator[None]:
        """Turn an error in the user's own f, g or model into a sentence that says where; the cause stays attached."""
        try:
            yield
        except NestfedError:
            raise
        except Exception as error:
            label = self.clients.label
            who = f"client {label(ns[0])}" if len(ns) == 1 else f"clients {label(ns[0])} to {label(ns[-1])}"
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise NestfedError(
                f"The model or the objective failed at {who} in round {round + 1}: {type(error).__name__}: {reason}"
            ) from error

    def _encoded(
        self, upload: Fields, received: Fields, whole: Fields, private: dict[str, Tensor], ns: Sequence[int], round: int
    ) -> Fields:
        """Return uploads as the server understands them after they were sent in fewer bits, one row per client."""
        rows = [n - self.first for n in ns]
        fields = {k: upload[k] for k in self.algorithm.shared}
        residual = {k: private[RESIDUAL + k][rows] for k in fields}
        packed, lost = self.encoding.pack(
            fields, received, residual, self.encoding.noise(self.seed, ns, round, received)
        )
        for k, v in lost.items():
            private[RESIDUAL + k][rows] = v
        return {**upload, **self.encoding.unpack(packed, whole, list(fields))}

    def _together(
        self, program: Program, shared: Fields, mine: Fields, stale: Any, batches: Sequence[Data], keys: Sequence[Any]
    ) -> tuple[Fields, Fields, Report]:
        """Run the clients' whole round in one vectorised call."""
        run = torch.vmap(
            program.__call__,  # the method has a name; vmap would print the whole program to make one
            in_dims=(None, 0, None if stale is None else 0, 0, None if keys[0] is None else 0),
            randomness="error",
        )
        return run(shared, mine, stale, batches, keys)

    def _compiled(
        self, program: Program, shared: Fields, mine: Fields, stale: Any, batches: Sequence[Data], keys: Sequence[Any]
    ) -> tuple[Fields, Fields, Report]:
        """Run the round step by step, each step vectorised and compiled.

        A step is the unit because it is the same in every round; t is an ordinary number to the compiler, which makes
        its own code for t = 0 and one for all later ones.
        """
        count = len(next(iter(mine.values()))) if mine else len(torch.utils._pytree.tree_leaves(batches[0])[0])
        wide = {k: v.expand(count, *v.shape) for k, v in shared.items()}
        s = torch.vmap(program.begin, in_dims=(0, 0, None if stale is None else 0))(wide, mine, stale)
        # What a method passes through is not yet there once for every client.
        s = type(s)(*(v.contiguous() for v in s))
        losses, taps = [], {}
        for t, batch, key in zip(range(*program.span), batches, keys):
            graphs, began = _graphs(), perf_counter()
            try:
                s, loss, examples, evaluations = self._step(s, batch, key, t)
            except Exception as error:
                if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    reason = str(error).strip().split("\n")[0]
                    raise NestfedError(f"compile: this problem or machine cannot compile a step ({reason}).") from error
                raise
            if _graphs() != graphs:
                self.compiling += perf_counter() - began
            program.examples += examples
            program.evaluations += evaluations
            if loss is not None:
                losses.append(loss)
            if t == program.tap:
                taps[TAP] = getattr(s, self.algorithm.point)
        return torch.vmap(program.finish)(s, wide, losses, taps)

    def _steps(self, s: Any, batch: Data, key: Any, t: int) -> tuple[Any, Tensor | None, int, int]:
        """Take one step at all clients."""
        tape = Tape()

        def step(s: Any, batch: Data, key: Any) -> tuple[Any, Tensor | None]:
            program = Program(
                self.problem, self.algorithm, self.template, Span(0, 0), False,
                precision=self.precision, pieces=self.pieces,
            )  # fmt: skip
            s = self.algorithm.step(self.problem, s, program.sample(batch, key, tape), t)
            return s, tape.loss

        after, loss = torch.vmap(step, in_dims=(0, 0, None if key is None else 0))(s, batch, key)
        return after, loss, tape.examples, tape.evaluations

    def _alone(
        self, program: Program, shared: Fields, mine: Fields, i: int, stale: Any, batches: Any, keys: Any
    ) -> tuple[Fields, Fields, Report]:
        """Run one client's round; it is the i-th of those that the batches were drawn for."""
        lay = channels_last if self.planar else _as_it_is
        return program(
            shared,
            mine,
            None if stale is None else stale[i],
            [tree_map(lambda leaf: lay(leaf[i]), b) for b in batches],
            [None if k is None else k[i] for k in keys],
        )

    def _culprit(
        self, program: Program, shared: Fields, private: Fields, round: int, n: int, i: int, stale: Any, batches: Any,
        keys: Any,
    ) -> str:  # fmt: skip
        """Run a client's round again and tell the first number that went wrong; it is the i-th of the batches."""
        where = f"at client {self.clients.label(n)}"
        watched = _Wrapped(self.problem, _watched)
        mine = {k: v[n - self.first] for k, v in private.items()}
        now = program.span.start

        def watch(t: int, s: Any, loss: Tensor | None) -> None:
            nonlocal now
            now = t
            _refuse_infinite({**({} if loss is None else {"loss": loss}), **s._asdict()})
            now = t + 1

        try:
            self._alone(
                replace(program, problem=watched, eager=True, watch=watch), shared, mine, i, stale, batches, keys
            )
        except _WrongError as wrong:
            step = f"{where}, iteration {now} (round {round + 1})"
            leaves = torch.utils._pytree.tree_leaves(batches[now - program.span.start])
            numbers = [v[i] for v in leaves if isinstance(v, Tensor) and v.is_floating_point()]
            if not all(bool(torch.isfinite(v).all()) for v in numbers):
                return f"The data hold infinite or NaN values {step}, and so {wrong} became infinite or NaN."
            name = str(wrong)
            return (
                f"{name.replace('the ', 'The ', 1)} became infinite, NaN or too large {step}: the step size is too large, or the data hold such "
                "values."
            )
        return f"A number became infinite or NaN {where} in what it sent or keeps after round {round + 1}."


class _WrongError(Exception):
    """A number that is none; says which."""


def _refuse_infinite(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        # The square too: what is sent is judged by its norm, which overflows before the number does.
        if isinstance(value, Tensor) and not bool(torch.isfinite(value.square().sum())):
            raise _WrongError(name)


def _put(table: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write rows of a table; a single one is copied, which is quicker for a large model."""
    if len(rows) == 1:
        table[rows[0]] = values[0]
    else:
        table[list(rows)] = values


def _graphs() -> int:
    """Return how often torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _as_it_is(leaf: Tensor) -> Tensor:
    return leaf


class _Wrapped:
    """A problem with something around its evaluations; to an algorithm it looks like the problem itself."""

    def __init__(self, problem: Any, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._problem, self._around = problem, around

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._problem)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._problem, name)
        return self._around(name, found) if name in ("grad", "grads", "inner", "outer_grad", "best_dual") else found


def _timed(tally: Tally, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Measure the time of an evaluation, and of the pullback that it may return."""

    def call(*args: Any) -> Any:
        with tally.lap("gradients"):
            result = function(*args)
        if isinstance(result, tuple) and callable(result[-1]):
            return *result[:-1], _timed(tally, name, result[-1])
        return result

    return call


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Stop at the first evaluation with a wrong number."""
    what = {"inner": "the inner value", "outer_grad": "the outer gradient", "best_dual": "the best w"}

    def call(*args: Any) -> Any:
        result = function(*args)
        tape = getattr(args[-1], "tape", None)
        if tape is not None and tape.loss is not None:
            _refuse_infinite({"loss": tape.loss})
        parts = result if isinstance(result, tuple) else (result,)
        for part in parts:
            if callable(part) and not isinstance(part, Tensor):
                return *parts[:-1], _watched("grad", part)
            _refuse_infinite({what.get(name, "the gradient"): part})
        return result

    return call
