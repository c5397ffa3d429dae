"""Running some clients' rounds in this process: one after another, or vectorised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nestfed.core import Batch, Fields, NestfedError
from nestfed.data.clients import Clients, draw
from nestfed.data.random import Streams
from nestfed.engine.encode import RESIDUAL, Encoding
from nestfed.engine.sync import TAP, AnyAlgorithm, Program, Report, Span, dropout_keys
from nestfed.problems.base import Tape
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


@dataclass
class Tally:
    """What some clients have done in one round: sums over them."""

    sums: dict[str, Tensor]
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


def start_tally(shared: Fields, point: str, share: Share) -> Tally:
    """Return a tally at zero."""
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

    def __post_init__(self) -> None:
        self.streams = Streams(self.seed)
        # Convolutions on a processor are up to twice as fast with the channels innermost; measured, not for vmap.
        self.planar = not self.vectorised and self.problem.flat.planar and self.device.type == "cpu"
        self._step = torch.compile(self._steps) if self.compiled else self._steps
        self.compiling = 0.0

    def close(self) -> None:
        """Nothing to let go of."""

    def run(self, shared: Fields, private: dict[str, Tensor], share: Share, tally: Tally | None = None) -> Tally:
        """Run the clients' rounds; a tally that is given is added to, in place."""
        tally = tally or start_tally(shared, self.algorithm.point, share)
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
        problem = _Timed(self.problem, tally) if self.profiled else self.problem
        program = Program(
            problem, self.algorithm, self.template, span, not self.vectorised, share.tap,
            precision=self.precision, pieces=self.pieces,
        )  # fmt: skip
        with tally.lap("drawing"):
            batches = draw(self.clients, ns, range(*span))
            keys: list[Any] = [None] * (span.stop - span.start)
            if self.problem.flat.random:
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
                if self.encoding.up:
                    upload = self._encoded(upload, shared, whole, everything, ns, share.round)
                upload = {k: v.sum(0) for k, v in upload.items()}
                report = Report(*(r.sum(0) for r in report))
            else:
                mine = {k: v[rows[0]] for k, v in private.items()}
                upload, mine, report = self._alone(program, shared, mine, 0, stale, batches, keys)
                if self.encoding.up:
                    one = {k: v[None] for k, v in upload.items()}
                    upload = {
                        k: v[0] for k, v in self._encoded(one, shared, whole, everything, ns, share.round).items()
                    }
        with tally.lap("averaging"):
            numbers = torch.stack([*report, *(v.sum() for v in upload.values())]).double()
            if not bool(torch.isfinite(numbers).all()):
                self._name_culprit(program, shared, private, share, ns, stale, batches, keys)
            for k, v in upload.items():
                tally.sums[k].add_(v)
            if self.vectorised:
                for k, v in mine.items():
                    private[k][rows] = v
            else:
                # A field that the method passed through is still a row of the tables that are written below.
                tables = {v.untyped_storage().data_ptr() for v in private.values()}
                kept = {k: v.clone() if v.untyped_storage().data_ptr() in tables else v for k, v in mine.items()}
                for k, v in kept.items():
                    private[k][rows[0]] = v
        tally.loss += float(numbers[0])
        tally.moved += float(numbers[1])
        count = len(ns) if self.vectorised else 1
        tally.examples += program.examples * count
        tally.evaluations += program.evaluations * count

    @contextmanager
    def _blamed(self, ns: Sequence[int], round: int) -> Iterator[None]:
        """Turn an error in the user's own f, g or model into a sentence that says where; the cause stays attached."""
        try:
            yield
        except NestfedError:
            raise
        except Exception as error:
            label = getattr(self.clients, "label", str)
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
        self, program: Program, shared: Fields, mine: Fields, stale: Any, batches: Sequence[Batch], keys: Sequence[Any]
    ) -> tuple[Fields, Fields, Report]:
        """Run the clients' whole round in one vectorised call."""
        run = torch.vmap(
            program.__call__,  # the method has a name; vmap would print the whole program to make one
            in_dims=(None, 0, None if stale is None else 0, 0, None if keys[0] is None else 0),
            randomness="error",
        )
        return run(shared, mine, stale, batches, keys)

    def _compiled(
        self, program: Program, shared: Fields, mine: Fields, stale: Any, batches: Sequence[Batch], keys: Sequence[Any]
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

    def _steps(self, s: Any, batch: Batch, key: Any, t: int) -> tuple[Any, Tensor | None, int, int]:
        """Take one step at all clients."""
        tape = Tape()

        def step(s: Any, batch: Batch, key: Any) -> tuple[Any, Tensor | None]:
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

    def _name_culprit(
        self, program: Program, shared: Fields, private: Fields, share: Share, ns: Sequence[int], stale: Any, batches: Any,
        keys: Any,
    ) -> None:  # fmt: skip
        """Run the clients again, one by one, and name the first number that went wrong."""
        label = getattr(self.clients, "label", str)
        for i, n in enumerate(ns):

            def watch(t: int, s: Any, loss: Tensor | None, n: int = n) -> None:
                named = {**({} if loss is None else {"loss": loss}), **s._asdict()}
                for name, value in named.items():
                    # The square too: what is sent is judged by its norm, which overflows before the number does.
                    if not bool(torch.isfinite(value.square().sum())):
                        raise NestfedError(
                            f"{name} became infinite, NaN or too large at client {label(n)}, iteration {t} (round "
                            f"{share.round + 1}): the step size is too large, or the data hold such values."
                        )

            again = replace(program, eager=True, watch=watch)
            mine = {k: v[n - self.first] for k, v in private.items()}
            self._alone(again, shared, mine, i, stale, batches, keys)
        raise NestfedError(f"A number became infinite or NaN in what the clients sent in round {share.round + 1}.")


def _graphs() -> int:
    """Return how often torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _as_it_is(leaf: Tensor) -> Tensor:
    return leaf


class _Timed:
    """A problem that measures the time of its evaluations; to an algorithm it looks like the problem itself."""

    def __init__(self, problem: Any, tally: Tally) -> None:
        self._problem, self._tally = problem, tally

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._problem)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._problem, name)
        if name in ("grad", "grads", "inner", "outer_grad", "best_dual"):
            return self._timed(found)
        return found

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._tally.lap("gradients"):
                result = function(*args)
            if isinstance(result, tuple) and callable(result[-1]):
                return *result[:-1], self._timed(result[-1])
            return result

        return call
