"""Simulation: all clients in one process, vectorised or one after another, with the same numbers."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nestfed.core import Fields, NestfedError, refuse_mismatch
from nestfed.data.clients import Clients, draw
from nestfed.data.random import Purpose, Streams
from nestfed.engine import checkpoint
from nestfed.engine.progress import Progress
from nestfed.engine.record import Log, Record
from nestfed.engine.record import read as read_record
from nestfed.engine.sync import (
    TAP, AnyAlgorithm, Participation, Program, Report, RunState, Span, dropout_keys, size, span_from,
)  # fmt: skip

Mode = Literal["auto", "vmap", "loop"]
Output = Literal["last", "uniform", "best"]
CHUNK = 256
"""Clients that are vectorised at once: enough to use the processor, few enough to bound the memory."""


class Interrupted(NestfedError):
    """The user stopped the run; what was done is saved."""


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    x: Tensor
    model: Any
    """The user's own module with the trained parameters, or the vector itself."""
    history: list[Record]
    shared: Fields
    """All that the clients had in common at the end: the point, and the estimators of the method."""
    private: Fields
    """What stayed on the clients, one row each."""


def simulate(
    problem: Any,
    algorithm: AnyAlgorithm,
    clients: Clients,
    *,
    rounds: int,
    q: int = 1,
    seed: int = 0,
    x0: Tensor | None = None,
    device: str | torch.device = "cpu",
    mode: Mode = "auto",
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    measure: Callable[[Fields], Mapping[str, float]] | None = None,
    every: int = 1,
    output: Output = "last",
    best: str = "",
    participation: int | float | None = None,
    failures: float = 0.0,
    directory: str | Path | None = None,
    checkpoint_every: int = 10,
    progress: bool | None = None,
    label: str = "",
) -> Result:
    """Train for a number of communication rounds of q local iterations each.

    `evaluate` gets the model (in evaluation mode) every `every` rounds and returns named metrics; `measure` gets the
    shared fields, for measures of convergence. `output` is the point that is returned: the last one, one drawn
    uniformly from all averaged iterates (which the theorems speak of), or the best by the metric `best` (a leading
    minus sign means that less is better). `participation` is a count (int) or a probability (float) of clients per
    round, `failures` the probability that one who was asked does not answer. With a `directory` the run leaves
    record.jsonl and checkpoints there, and goes on from them when they exist.
    """
    _check(problem, algorithm, clients, rounds, q, every, checkpoint_every, output, best)
    taking_part = Participation(participation, failures)
    taking_part.check(len(clients))
    place = torch.device(device)
    problem.flat.to(place)
    for adapt, value in (("seeded", seed), ("to", place)):
        if hasattr(clients, adapt):
            clients = getattr(clients, adapt)(value)
    start = problem.x0 if x0 is None else x0.detach().to(problem.x0)
    if start.shape != problem.x0.shape:
        raise NestfedError(f"x0 has shape {tuple(start.shape)}, but the model has {problem.x0.numel()} parameters.")

    engine = _Engine(problem, algorithm, clients, q, seed, _choose(mode, problem, clients), place)
    engine.template = algorithm.init(problem, start)
    state = RunState.start(algorithm, engine.template, len(clients))
    # A drawn outcome needs to know how many iterations there will be.
    tap = _drawn(algorithm, rounds, q, seed) if output == "uniform" else -1
    history: list[Record] = []
    log: Log | None = None
    identity = f"{algorithm!r} q={q} seed={seed} N={len(clients)} d={start.numel()} {participation} {failures}"
    path = Path(directory) if directory is not None else None
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        found, passed_over = checkpoint.read(path, identity, place)
        for sentence in passed_over:
            warnings.warn(sentence, stacklevel=2)
        if found is not None:
            state = found
            history = [r for r in read_record(path / "record.jsonl") if r["round"] <= state.round]
        log = Log(path / "record.jsonl", history)

    def note(record: Record) -> dict[str, float]:
        """Evaluate if it is time, keep the best point, and write the record."""
        metrics: dict[str, float] = {}
        if state.round % every == 0 or state.round == rounds:
            if evaluate is not None:
                model = problem.bind(state.shared[algorithm.point])
                with torch.no_grad():
                    metrics |= {k: float(v) for k, v in evaluate(model).items()}
            if measure is not None:
                metrics |= {k: float(v) for k, v in measure(state.shared).items()}
        if output == "best" and metrics:
            _keep_best(state, algorithm, metrics, best)
        record |= metrics
        history.append(record)
        if log is not None:
            log.add(record)
        return metrics

    if state.round == 0 and not history and (evaluate or measure):
        note(_record(state, None, None, 0))
    with (
        Progress(label or algorithm.name, rounds, state.round, progress) as bar,
        _deferred_interrupt() as interrupted,
        torch.no_grad(),
    ):
        while state.round < rounds:
            began = time.perf_counter()
            try:
                loss, drift, took_part = engine.round(state, taking_part, tap)
            except NestfedError as error:
                if path is not None and state.round:
                    raise NestfedError(f"{error} The last good checkpoint is in {path}.") from error
                raise
            state.seconds += time.perf_counter() - began
            record = _record(state, loss, drift, took_part)
            bar.update(record, note(record))
            over = state.round >= rounds
            if path is not None and (over or interrupted.is_set() or state.round % checkpoint_every == 0):
                checkpoint.write(path, state, identity)
            if interrupted.is_set() and not over:
                saved = f"; the same command goes on from {path}" if path is not None else " (nothing was to be saved)"
                raise Interrupted(f"Stopped after round {state.round} of {rounds}{saved}.")
    if log is not None:
        log.close()
    x = state.shared[algorithm.point] if output == "last" else state.kept[output]
    return Result(x, problem.module(x), history, dict(state.shared), dict(state.private))


class _Engine:
    """Runs rounds: knows the problem, the method and the clients, but keeps no state of the run."""

    template: Any

    def __init__(
        self, problem: Any, algorithm: AnyAlgorithm, clients: Clients, q: int, seed: int, vectorised: bool, device: torch.device
    ) -> None:
        self.problem, self.algorithm, self.clients, self.q = problem, algorithm, clients, q
        self.vectorised, self.device = vectorised, device
        self.streams = Streams(seed)

    def round(self, state: RunState, taking_part: Participation, tap: int) -> tuple[float | None, float, int]:
        """Advance the state by one round; return the mean loss, the clients' drift and how many answered."""
        algorithm, total = self.algorithm, len(self.clients)
        span = span_from(algorithm, state.t, self.q)
        asked, answering = taking_part.draw(self.streams, total, state.round)
        state.bytes_down += len(asked) * size(state.shared)
        sums: dict[str, Tensor] = {}
        loss = moved = 0.0
        if answering:
            chunks = _chunks(answering, CHUNK if self.vectorised else 1)
            for ns in chunks:
                program = Program(self.problem, algorithm, self.template, span, not self.vectorised, tap)
                upload, report = self._chunk(program, state, ns)
                for k, v in upload.items():
                    sums[k] = sums[k].add_(v) if k in sums else v.clone()
                loss += float(report.loss)
                moved += float(report.moved)
                state.examples += program.examples * (len(ns) if self.vectorised else 1)
                state.bytes_up += len(ns) * size({k: state.shared[k] for k in algorithm.shared})
            mean = {k: v.div_(len(answering)) for k, v in sums.items()}
            if TAP in mean:
                state.kept["uniform"] = mean.pop(TAP)
            moved = moved / len(answering) - float(
                ((mean[algorithm.point] - state.shared[algorithm.point]) ** 2).sum()
            )
            old = state.shared
            state.server, state.shared = algorithm.server.update(state.server, old, mean, len(answering) / total)
            for k, v in (*state.shared.items(), *state.server.items()):
                if not torch.isfinite(v).all():
                    state.shared = old
                    raise NestfedError(f"The server's {k} became infinite or NaN in round {state.round + 1}.")
        state.round += 1
        state.t = span.stop
        state.seen[answering] = state.round
        mean_loss = loss / len(answering) if answering and math.isfinite(loss) else None
        return mean_loss, max(moved, 0.0), len(answering)

    def _chunk(self, program: Program, state: RunState, ns: list[int]) -> tuple[dict[str, Tensor], Report]:
        """Run some clients' rounds; return the sums of what they send, after checking that it is finite."""
        algorithm, span = self.algorithm, program.span
        rows = torch.tensor(ns)
        late = (state.seen[rows] != state.round) & (state.round > 0) if algorithm.private else torch.zeros(len(ns))
        stale = late.bool().to(self.device) if bool(late.any()) else None
        batches = draw(self.clients, ns, range(span.start, span.stop))
        count = span.stop - span.start
        keys: list[Any] = [None] * count
        if self.problem.flat.random:
            keys = list(dropout_keys(self.streams, ns, span, self.device).unbind(1))
        if self.vectorised:
            private = {k: v[rows] for k, v in state.private.items()}
            run = torch.vmap(
                program,
                in_dims=(None, 0, None if stale is None else 0, 0, None if keys[0] is None else 0),
                randomness="error",
            )
            upload, private, report = run(state.shared, private, stale, batches, keys)
            upload = {k: v.sum(0) for k, v in upload.items()}
            report = Report(*(r.sum(0) for r in report))
        else:
            upload, private, report = self._one(program, state, ns[0], 0, stale, batches, keys)
            # A field that the method passed through is still a view of the state that is written below.
            private = {k: v[None].clone() for k, v in private.items()}
        if not all(bool(torch.isfinite(v).all()) for v in upload.values()) or not bool(torch.isfinite(report.loss)):
            self._name_culprit(program, state, ns, stale, batches, keys)
        for k, v in private.items():
            state.private[k][rows] = v
        return upload, report

    def _one(self, program: Program, state: RunState, n: int, i: int, stale: Any, batches: Any, keys: Any) -> Any:
        """Run one client's round; it is the i-th of those that the batches were drawn for."""
        return program(
            state.shared,
            {k: v[n] for k, v in state.private.items()},
            None if stale is None else stale[i],
            [tree_map(lambda leaf: leaf[i], b) for b in batches],
            [None if k is None else k[i] for k in keys],
        )

    def _name_culprit(
        self, program: Program, state: RunState, ns: Sequence[int], stale: Any, batches: Any, keys: Any
    ) -> None:
        """Run the clients again, one by one, and name the first number that went wrong."""
        label = getattr(self.clients, "label", str)
        for i, n in enumerate(ns):

            def watch(t: int, s: Any, loss: Tensor | None, n: int = n) -> None:
                named = {**({} if loss is None else {"loss": loss}), **s._asdict()}
                for name, value in named.items():
                    if not bool(torch.isfinite(value).all()):
                        raise NestfedError(
                            f"{name} became infinite or NaN at client {label(n)}, iteration {t} (round "
                            f"{state.round + 1}): the step size is too large, or the data hold such values."
                        )

            again = replace(program, eager=True, watch=watch)
            self._one(again, state, n, i, stale, batches, keys)
        raise NestfedError(f"A number became infinite or NaN in what the clients sent in round {state.round + 1}.")


def _check(
    problem: Any, algorithm: AnyAlgorithm, clients: Clients, rounds: int, q: int, every: int, saving: int, output: str, best: str
) -> None:
    """Refuse what cannot work before any work starts."""
    refuse_mismatch(problem, algorithm)
    for name, value, least in (("rounds", rounds, 0), ("q", q, 1), ("every", every, 1), ("checkpoint_every", saving, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise NestfedError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    if len(clients) < 1:
        raise NestfedError("There are no clients.")
    if algorithm.single and len(clients) > 1:
        raise NestfedError(f"{algorithm.name} is a single-machine method, but there are {len(clients)} clients.")
    if output not in ("last", "uniform", "best"):
        raise NestfedError(f"output must be last, uniform or best, not {output!r}.")
    if output == "best" and not best:
        raise NestfedError("output='best' needs the name of the metric: best='auroc', or best='-loss' for less is better.")
    algorithm.ends_round(0, q)


def _choose(mode: str, problem: Any, clients: Clients) -> bool:
    """Decide whether to vectorise over clients.

    Measured rule: it wins for small dense models (fivefold at a few thousand parameters) and loses for convolutions
    and recurrences, whose batched kernels are slow.
    """
    if mode not in ("auto", "vmap", "loop"):
        raise NestfedError(f"mode must be auto, vmap or loop, not {mode!r}.")
    if mode != "auto":
        return mode == "vmap"
    model = problem.flat.source
    heavy = isinstance(model, nn.Module) and any(
        isinstance(m, nn.modules.conv._ConvNd | nn.RNNBase) for m in model.modules()
    )
    alike = getattr(clients, "alike", True)
    return len(clients) > 1 and not heavy and alike and problem.x0.numel() <= 200_000


def _drawn(algorithm: AnyAlgorithm, rounds: int, q: int, seed: int) -> int:
    """Draw the iteration whose averaged point is the outcome, uniformly from all."""
    t = 0
    for _ in range(rounds):
        t = span_from(algorithm, t, q).stop
    return int(Streams(seed).at(Purpose.OUTPUT, 0, 0).integers(max(t, 1)))


def _keep_best(state: RunState, algorithm: AnyAlgorithm, metrics: Mapping[str, float], best: str) -> None:
    name = best.removeprefix("-")
    if name not in metrics:
        raise NestfedError(f"output='best' asks for {name!r}, but the evaluation gives {', '.join(metrics)}.")
    value = -metrics[name] if best.startswith("-") else metrics[name]
    if state.best is None or value > state.best:
        state.best = value
        state.kept["best"] = state.shared[algorithm.point].clone()


def _record(state: RunState, loss: float | None, drift: float | None, participants: int) -> Record:
    return {
        "round": state.round,
        "iteration": state.t,
        "participants": participants,
        "loss": loss,
        "drift": drift,
        "examples": state.examples,
        "bytes_up": state.bytes_up,
        "bytes_down": state.bytes_down,
        "seconds": round(state.seconds, 6),
    }


def _chunks(ns: list[int], width: int) -> list[list[int]]:
    return [ns[i : i + width] for i in range(0, len(ns), width)]


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Let Ctrl-C take effect between two rounds; a second one takes effect at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
