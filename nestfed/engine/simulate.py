"""Simulation: the loop over rounds. Who runs the clients (local, workers, distributed) changes no number."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nestfed.core import Clients, DivergedError, Fields, NestfedError, as_clients, refuse_mismatch
from nestfed.data.random import Streams
from nestfed.engine import memory
from nestfed.engine.encode import RESIDUAL, Encoding
from nestfed.engine.local import Local, Runner, Share, Tally, start_tally
from nestfed.engine.privacy import Noise
from nestfed.engine.progress import Progress
from nestfed.engine.ranks import Group, Ranks
from nestfed.engine.reduce import Reduction
from nestfed.engine.round import TAP, AnyAlgorithm, Participation, Record, RunState, drawn, span_from
from nestfed.engine.run_directory import Diary
from nestfed.engine.workers import Workers
from nestfed.files import locked, write_atomically

Mode = Literal["auto", "vmap", "loop"]
Output = Literal["last", "uniform", "best"]
Precision = Literal["full", "bf16"]
SMALL = 200_000
"""Parameters up to which dense models are vectorised over clients."""
LARGE = 20_000_000
"""Parameters from which one process with all threads beats several with one each, and needs less memory."""
MANY = 512
WIDE = 2**20
"""Clients in a round, or numbers in one field of all of them, from which vectorised work is worth several processes."""


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
    """What stayed on the clients, one row each (under `torchrun`: of this rank's clients)."""
    profile: Mapping[str, float] = field(default_factory=dict)
    """Where the time went, in seconds: drawing, gradients, updates, averaging, evaluation, saving, rest."""
    privacy: str = ""
    """With noise: ε and all that it rests on, in one sentence."""


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
    workers: int = 0,
    compile: bool = False,
    precision: Precision = "full",
    accumulate: int = 1,
    memory_limit: int = 0,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    measure: Callable[[Fields], Mapping[str, float]] | None = None,
    every: int = 1,
    output: Output = "last",
    best: str = "",
    participation: int | float | None = None,
    failures: float = 0.0,
    encode: str = "",
    reduce: str = "mean",
    noise: float = 0.0,
    on_nan: str = "stop",
    directory: str | Path | None = None,
    checkpoint_every: int = 10,
    progress: bool | None = None,
    label: str = "",
    profile: bool = False,
) -> Result:
    """Train for a number of communication rounds of q local iterations each.

    `evaluate` gets the model (in evaluation mode) every `every` rounds and returns named metrics; `measure` gets the
    shared fields, for measures of convergence. `output` is the point that is returned: the last one, one drawn
    uniformly from all averaged iterates (which the theorems speak of), or the best by the metric `best` (a leading
    minus sign means that less is better). `participation` is a count (int) or a probability (float) of clients per
    round, `failures` the probability that one who was asked does not answer. `encode` rounds what is sent (see
    `nestfed.engine.encode`). `reduce` takes the place of the mean over clients in every shared field: median,
    trimmed:SHARE (both by coordinate), or clip:NORM, the mean of changes clipped to a norm; `noise` adds Gaussian noise
    of that many times NORM to their sum (see `nestfed.engine.privacy`). A number that goes wrong stops the run and is
    named; with `on_nan` "drop" the client that it came from is left out of its round instead. With a `directory` the
    run leaves record.jsonl and checkpoints there, and goes on from them when they exist; one run at a time.

    How the clients are run changes no number beyond rounding. `mode` is vmap (all clients in one vectorised call, in
    chunks), loop (one after another), or auto: vmap for dense models of up to 200,000 parameters. `workers` processes
    share the clients out, one thread each; 0 means as many as torch has threads for a loop over a model of up to 20
    million parameters, and for vmap over 512 clients or a million numbers a round; one otherwise. `compile` compiles vectorised steps, which
    takes some seconds and makes small dense problems several times faster. `precision` "bf16" computes matrix products
    and convolutions in 16 bits while all state keeps its own type. `accumulate` evaluates every batch in that many
    pieces when it does not fit as a whole. What clients keep between rounds lies on disk if it exceeds `memory_limit`
    bytes (0: half of the machine's memory). Under `torchrun` the clients are shared out over all ranks.
    """
    _check(problem, algorithm, clients, rounds, q, every, checkpoint_every, output, best)
    if output == "best" and evaluate is None and measure is None:
        raise NestfedError("output='best' needs evaluate or measure, which give the metric to judge by.")
    _check_engine(mode, workers, compile, precision, accumulate)
    taking_part = Participation(participation, failures)
    taking_part.check(len(clients))
    reduction = Reduction.parse(reduce)
    blur = Noise.plan(noise, reduction, taking_part, len(clients))
    if on_nan not in ("stop", "drop"):
        raise NestfedError(f"on_nan must be stop or drop, not {on_nan!r}.")
    if output == "uniform" and not reduction.plain:
        raise NestfedError(
            f"output='uniform' is a mean of the clients' points, so it needs reduce='mean', not {reduce!r}."
        )
    promise = blur.statement(rounds, algorithm.shared) if blur else ""
    place = torch.device(device)
    group = Group.join(place)
    problem.to(place)
    clients = as_clients(clients).seeded(seed).to(place)
    start = problem.x0 if x0 is None else x0.detach().to(problem.x0)
    if start.shape != problem.x0.shape:
        raise NestfedError(f"x0 has shape {tuple(start.shape)}, but the model has {problem.x0.numel()} parameters.")

    template = algorithm.init(problem, start)
    vectorised = _vectorise(mode, compile, problem, clients)
    block = group.block(len(clients))
    workers = _processes(workers, vectorised, problem, place, taking_part.most(len(clients)) // group.count)
    path = Path(directory) if directory is not None else None
    if path is not None:
        _make(path)
    with locked(path) if path is not None and group.leads else nullcontext():
        table = partial(_new_table, limit=memory_limit, folder=path, shared=workers > 1)
        state = RunState.start(algorithm, template, len(clients), len(block), table)
        encoding = Encoding.parse(encode)
        if encoding.up:
            state.private |= {RESIDUAL + k: table(torch.zeros_like(v), len(block)) for k, v in state.shared.items()}
        # A drawn outcome needs to know how many iterations there will be.
        tap = drawn(algorithm, rounds, q, seed) if output == "uniform" else -1
        identity = f"{algorithm!r} q={q} seed={seed} N={len(clients)} d={start.numel()} {participation} {failures} {encode}".rstrip()
        identity += "".join(f" {v}" for v, usual in ((reduce, "mean"), (noise, 0), (on_nan, "stop")) if v != usual)
        diary = Diary(path, identity, group, len(clients))
        state = diary.resume(state, place)
        if 0 <= tap < state.t and "uniform" not in state.kept:
            raise NestfedError(f"output='uniform' needs a run from its start, but {path} holds one without it.")
        if promise and path is not None and group.leads:
            write_atomically(path / "privacy.txt", f"{promise}\n".encode())

        def note(record: Record) -> dict[str, float]:
            """Evaluate if it is time, keep the best point, and write the record."""
            metrics: dict[str, float] = {}
            if group.leads and (state.round % every == 0 or state.round == rounds):
                if evaluate is not None:
                    model = problem.bind(state.shared[algorithm.point])
                    with torch.no_grad():
                        metrics |= {k: float(v) for k, v in evaluate(model).items()}
                if measure is not None:
                    metrics |= {k: float(v) for k, v in measure(state.shared).items()}
            if output == "best" and metrics:
                state.keep_best(state.shared[algorithm.point], metrics, best)
            diary.add(record | metrics)
            return metrics

        # What a round brings along anyway need not lie in the template too.
        brought = {
            k: v.new_empty(0) for k, v in template._asdict().items() if k in algorithm.shared + algorithm.private
        }
        local = Local(
            problem, algorithm, clients, template._replace(**brought), seed, place, vectorised, compile,
            torch.bfloat16 if precision == "bf16" else None, accumulate, profile, block.start, encoding,
            reduction, on_nan == "drop",
        )  # fmt: skip
        most = taking_part.of if isinstance(taking_part.of, int) else len(clients)
        runner: Runner = local if workers == 1 else Workers(local, state.shared, state.private, workers, most)
        if group.count > 1:
            runner = Ranks(runner, group, len(clients), algorithm.point, reduction, local.drop)
        engine = _Engine(problem, algorithm, runner, len(clients), q, seed, encoding, reduction, blur)
        left_out: set[int] = set()
        clock = _Clock(engine.laps)
        del template
        try:
            if state.round == 0 and not diary.history and (evaluate or measure):
                note(state.record(None, None, 0))
            with (
                Progress(label or algorithm.name, rounds, state.round, progress if group.leads else False) as bar,
                _deferred_interrupt() as interrupted,
                torch.no_grad(),
            ):
                while state.round < rounds:
                    began = time.perf_counter()
                    try:
                        # Vectorised steps are many small operations, which threads only slow down.
                        with _threads(1 if vectorised and place.type == "cpu" else 0):
                            loss, drift, took_part = engine.round(state, taking_part, tap)
                    except NestfedError as error:
                        if where := diary.rescue(state):
                            raise type(error)(f"{error} {where}") from error
                        raise
                    for n in engine.dropped.keys() - left_out:  # once for each client, or a long run tells nothing else
                        left_out.add(n)
                        warnings.warn(f"{engine.dropped[n]} It is left out of this round.", stacklevel=2)
                    state.seconds += clock.passed("round", began)
                    record = state.record(loss, drift, took_part)
                    began = time.perf_counter()
                    bar.update(record, note(record))
                    clock.passed("evaluation", began)
                    over = state.round >= rounds
                    asked = group.any(interrupted.is_set(), place)
                    if over or asked or state.round % checkpoint_every == 0:
                        began = time.perf_counter()
                        diary.save(state)
                        clock.passed("saving", began)
                    if asked and not over:
                        how = (
                            f"; the same command goes on from {path}"
                            if path is not None
                            else " (nothing was to be saved)"
                        )
                        raise Interrupted(f"Stopped after round {state.round} of {rounds}{how}.")
        finally:
            runner.close()
            diary.close()
        x = state.shared[algorithm.point] if output == "last" else group.agree(state.outcome(algorithm.point, output))
        return Result(
            x, problem.module(x), diary.history, dict(state.shared), dict(state.private), clock.table(), promise
        )


class _Clock:
    """Adds up where the time goes."""

    def __init__(self, laps: dict[str, float]) -> None:
        self.laps = laps

    def passed(self, name: str, began: float) -> float:
        """Add the time since then, and return it."""
        seconds = time.perf_counter() - began
        self.laps[name] = self.laps.get(name, 0.0) + seconds
        return seconds

    def table(self) -> dict[str, float]:
        """Return seconds by what they were spent on, as people read it."""
        laps = self.laps
        gradients = laps.get("gradients", 0.0)
        inside = {
            "drawing": laps.get("drawing", 0.0),
            "gradients": gradients,
            "updates": laps.get("running", 0.0) - gradients - laps.get("compiling", 0.0),
            "averaging": laps.get("averaging", 0.0),
        }
        if "compiling" in laps:
            inside = {"compiling": laps["compiling"], **inside}
        rest = max(0.0, laps.get("round", 0.0) - sum(inside.values()))
        return {**inside, "rest": rest, "evaluation": laps.get("evaluation", 0.0), "saving": laps.get("saving", 0.0)}


class _Engine:
    """Advances the state of a run by rounds; who runs the clients is the runner's business."""

    def __init__(
        self, problem: Any, algorithm: AnyAlgorithm, runner: Runner, clients: int, q: int, seed: int,
        encoding: Encoding, reduction: Reduction, blur: Noise | None,
    ) -> None:  # fmt: skip
        self.encoding, self.reduction, self.blur, self.seed = encoding, reduction, blur, seed
        self.problem, self.algorithm, self.runner, self.clients, self.q = problem, algorithm, runner, clients, q
        self.streams = Streams(seed)
        self.dropped: dict[int, str] = {}
        """Clients that were left out of the last round because of a number that went wrong, each with a sentence."""
        self.laps: dict[str, float] = {}

    def round(self, state: RunState, taking_part: Participation, tap: int) -> tuple[float | None, float | None, int]:
        """Advance the state by one round; return the mean loss, the clients' drift and how many answered."""
        algorithm = self.algorithm
        span = span_from(algorithm, state.t, self.q)
        asked, answering = taking_part.draw(self.streams, self.clients, state.round)
        loss: float | None = None
        drift: float | None = 0.0
        count = len(answering)
        self.dropped = {}
        if answering or self.blur:  # noise comes also when nobody does, or its absence would tell so
            late = (state.seen[answering] != state.round) & (state.round > 0)
            stale = late.tolist() if algorithm.private else [False] * count
            share = Share(answering, span, state.round, tap, stale)
            if answering:
                tally = self.runner.run(state.shared, state.private, share)
            else:
                tally = start_tally(state.shared, algorithm.point, share, self.reduction)
            for name, seconds in tally.laps.items():
                self.laps[name] = self.laps.get(name, 0.0) + seconds
            self.dropped, everybody = tally.dropped, answering
            answering = [n for n in answering if n not in tally.dropped]
            count = len(answering)
            if not count and not self.blur:
                raise NestfedError(
                    f"No client of round {state.round + 1} is left: {next(iter(tally.dropped.values()))}"
                )
            with tally.lap("averaging"):
                mean = self._reduced(tally, state, everybody)
                tapped = mean.pop(TAP, None)
                if self.reduction.plain:
                    spread = mean[algorithm.point] - state.shared[algorithm.point]
                    drift = max(tally.moved / count - float(spread.square_().sum()), 0.0)
                else:
                    drift = None  # it is a spread about the mean
                present = self.blur.expected if self.blur else count
                server, shared = algorithm.server.update(state.server, state.shared, mean, present / self.clients)
                shared = algorithm.feasible(self.problem, shared)
                for k, v in (*shared.items(), *server.items()):
                    if not bool(torch.isfinite(v.sum())):
                        raise DivergedError(f"The server's {k} became infinite or NaN in round {state.round + 1}.")
            # Only now does the state change, so that after an error it is still that of the last good round.
            state.server, state.shared = server, shared
            if tapped is not None:
                state.kept["uniform"] = tapped
            state.examples += tally.examples
            if math.isfinite(tally.loss) and not self.blur:  # what has no noise would give clients away
                loss = tally.loss / count
        elif span.start <= tap < span.stop:
            state.kept["uniform"] = state.shared[algorithm.point].clone()
        up, down = self.encoding.sizes(state.shared)
        state.bytes_down += len(asked) * down
        state.bytes_up += count * up
        state.advance(span.stop, answering)
        return loss, drift, count

    def _reduced(self, tally: Tally, state: RunState, ns: Sequence[int]) -> dict[str, Tensor]:
        """Return what takes the place of the mean of the uploads, field by field; `ns` are those who answered."""
        count = len(ns) - len(tally.dropped)
        if self.reduction.tabled:
            rows = tally.rows
            if tally.dropped:
                kept = [i for i, n in enumerate(ns) if n not in tally.dropped]
                rows = {k: v[kept] for k, v in rows.items()}
            return {k: self.reduction.over(v) for k, v in rows.items()}
        if not self.reduction.clips:
            return {k: v.div_(count) for k, v in tally.sums.items()}
        base = state.shared if self.encoding.up else self.encoding.broadcast(state.shared)
        if self.blur is None:
            return {k: base[k] + v.div_(count) for k, v in tally.sums.items()}
        return self.blur.mean(tally.sums, base, state.round, self.seed)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NestfedError(f"Cannot make the directory {path}: {error.strerror}.") from error


def _check(
    problem: Any,
    algorithm: AnyAlgorithm,
    clients: Clients,
    rounds: int,
    q: int,
    every: int,
    saving: int,
    output: str,
    best: str,
) -> None:
    """Refuse what cannot work before any work starts."""
    refuse_mismatch(problem, algorithm)
    for name, value, least in (
        ("rounds", rounds, 0),
        ("q", q, 1),
        ("every", every, 1),
        ("checkpoint_every", saving, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise NestfedError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    if len(clients) < 1:
        raise NestfedError("There are no clients.")
    if algorithm.single and len(clients) > 1:
        raise NestfedError(f"{algorithm.name} is a single-machine method, but there are {len(clients)} clients.")
    if output not in ("last", "uniform", "best"):
        raise NestfedError(f"output must be last, uniform or best, not {output!r}.")
    if output == "best" and not best:
        raise NestfedError(
            "output='best' needs the name of the metric: best='auroc', or best='-loss' for less is better."
        )
    algorithm.ends_round(0, q)


def _check_engine(mode: str, workers: int, compile: bool, precision: str, accumulate: int) -> None:
    """Refuse a way to run that does not exist."""
    if mode not in ("auto", "vmap", "loop"):
        raise NestfedError(f"mode must be auto, vmap or loop, not {mode!r}.")
    if precision not in ("full", "bf16"):
        raise NestfedError(f"precision must be full or bf16, not {precision!r}.")
    if compile and mode == "loop":
        raise NestfedError("compile needs vectorised clients: mode='vmap' or 'auto', not 'loop'.")
    for name, value, least in (("workers", workers, 0), ("accumulate", accumulate, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise NestfedError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _vectorise(mode: str, compile: bool, problem: Any, clients: Clients) -> bool:
    """Decide whether to vectorise over clients.

    Measured rule: it wins for small dense models (fivefold at a few thousand parameters) and loses for convolutions
    and recurrences, whose batched kernels are slow.
    """
    if mode != "auto" or compile:
        return mode != "loop"
    return len(clients) > 1 and not problem.heavy and clients.alike and problem.x0.numel() <= SMALL


def _processes(workers: int, vectorised: bool, problem: Any, device: torch.device, participants: int) -> int:
    """Decide how many processes run the clients.

    Measured rule: one thread each in several processes beats several threads in one as long as a client's step is
    short. torch's number of threads says how many cores are ours; it is 1 inside `nestfed compare`.
    """
    # A process that may not have children, or whose accelerator would not survive a fork, works alone.
    able = device.type == "cpu" and not current_process().daemon and hasattr(os, "fork")
    if workers > 1 and not able:
        raise NestfedError(f"workers = {workers}: worker processes are for the processor, on systems that can fork.")
    if workers == 0:
        if vectorised:
            much = participants >= MANY or participants * problem.x0.numel() >= WIDE
            wanted = torch.get_num_threads() if much else 1
        else:
            wanted = torch.get_num_threads() if problem.x0.numel() < LARGE else 1
        workers = wanted if able and not torch.cuda.is_available() else 1
    return max(1, min(workers, participants))


def _new_table(value: Tensor, rows: int, *, limit: int, folder: Path | None, shared: bool) -> Tensor:
    """Return a table with `value` in every row, where workers see it, and on disk if it is large."""
    need = rows * value.numel() * value.element_size()
    large = need > (limit or memory.physical() // 2)
    if value.device.type != "cpu" or not (large or shared):
        return value.expand(rows, *value.shape).clone()
    # Without a directory of its own a large table goes where temporary files go.
    place = (folder or Path(tempfile.gettempdir())) if large else None
    return memory.table((rows, *value.shape), value.dtype, place).copy_(value)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside; 0 leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
