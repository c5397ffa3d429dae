"""A round whose clients are elsewhere: what a site does when asked, and what the coordinator believes of the answers.

Nothing here knows how messages travel. A site's private fields stay on its disk, one version for every round that
it took part in; the coordinator says which version its next answer must start from, so an answer that was lost,
late or refused leaves no trace: the site goes on from the version before it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestfed.core import Clients, Fields, NestfedError, refuse_mismatch
from nestfed.data.random import Streams
from nestfed.engine import checkpoint
from nestfed.engine.encode import RESIDUAL, Encoding, wire_form
from nestfed.engine.privacy import Noise
from nestfed.engine.program import TAP, AnyAlgorithm, Program, dropout_keys, span_from
from nestfed.engine.record import line
from nestfed.engine.record import read as read_record
from nestfed.engine.reduce import Reduction
from nestfed.engine.round import Participation, Record, RunState, drawn
from nestfed.files import write_atomically

KEEP = 3
"""Versions of its private fields that a site keeps before the one it was last asked for."""


class LostStateError(NestfedError):
    """A site was asked to go on from a version of its private fields that it does not have."""


class RefusedError(NestfedError):
    """An answer that must not be averaged; the sentence says why."""


@dataclass(frozen=True)
class Order:
    """What the coordinator asks of a client in a round."""

    round: int
    """Rounds that are over."""
    t: int
    """The first iteration."""
    seen: int
    """The version of its private fields to start from: the rounds that were over when it last took part, or −1."""
    tap: int = -1


@dataclass(frozen=True)
class Answer:
    """What a client sends back for a round."""

    round: int
    fields: Fields
    loss: float
    moved: float
    examples: int
    weight: float = 1.0


# ---------------------------------------------------------------------------------------------------------
# The site


@dataclass(frozen=True)
class Store:
    """A site's private fields on its own disk, one folder per version, each written whole or not at all."""

    folder: Path
    identity: str

    def read(self, version: int) -> dict[str, Tensor]:
        """Return the fields of a version."""
        path = self.folder / f"version-{version:08d}"
        found, _ = checkpoint.read(path, self.identity, torch.device("cpu")) if path.is_dir() else (None, [])
        if found is None:
            raise LostStateError(f"its private fields after round {version} are not in {self.folder}.")
        return found.private

    def write(self, version: int, private: Mapping[str, Tensor]) -> None:
        """Save a version."""
        path = self.folder / f"version-{version:08d}"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NestfedError(f"Cannot make the directory {path}: {error.strerror}.") from error
        nothing: dict[str, Tensor] = {}
        state = RunState(nothing, nothing, dict(private), torch.zeros(1), round=version)
        checkpoint.write(path, state, self.identity, keep=1)

    def forget(self, before: int) -> None:
        """Delete versions older than any that may still be asked for."""
        for path in sorted(self.folder.glob("version-*")):
            if int(path.name.removeprefix("version-")) < before:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Site:
    """One client and all that it needs for a round."""

    problem: Any
    algorithm: AnyAlgorithm
    clients: Clients
    n: int
    q: int
    seed: int
    store: Store
    encoding: Encoding = Encoding()

    def __call__(self, order: Order, received: Fields) -> Answer:
        """Carry out a round from the broadcast; the new private fields are on disk before the answer exists."""
        algorithm = self.algorithm
        template = algorithm.init(self.problem, self.problem.x0)
        shared = {k: v.to(getattr(template, k)) for k, v in received.items()}
        kept = self._kept(order, template)
        private = {k: kept[k] for k in algorithm.private}
        stale = None
        if algorithm.private and order.round > 0 and order.seen != order.round:
            stale = torch.tensor(True)
        span = span_from(algorithm, order.t, self.q)
        batches = [_first(b) for b in self.clients.draw([self.n], range(span.start, span.stop))]
        keys: list[Any] = [None] * len(batches)
        if self.problem.random:
            keys = list(dropout_keys(Streams(self.seed), [self.n], span, torch.device("cpu"))[0])
        program = Program(self.problem, algorithm, template, span, True, order.tap)
        with torch.no_grad():
            upload, after, report = program(shared, private, stale, batches, keys)
        tap = {TAP: upload[TAP]} if TAP in upload else {}
        fields = {k: upload[k] for k in algorithm.shared}
        kept = dict(after)
        if self.encoding.up:
            residual = self._residual(order, template)
            noise = {k: v[0] for k, v in self.encoding.noise(self.seed, [self.n], order.round, fields).items()}
            fields, lost = self.encoding.pack(fields, shared, residual, noise)
            kept |= {RESIDUAL + k: v for k, v in lost.items()}
        if kept:
            self.store.write(order.round + 1, kept)
            self.store.forget(order.seen - KEEP)
        return Answer(order.round, fields | tap, float(report.loss), float(report.moved), program.examples)

    def _kept(self, order: Order, template: Any) -> dict[str, Tensor]:
        if order.seen < 0 or not self.algorithm.private:
            return {k: getattr(template, k) for k in self.algorithm.private}
        return self.store.read(order.seen)

    def _residual(self, order: Order, template: Any) -> dict[str, Tensor]:
        if order.seen < 0:
            return {k: torch.zeros_like(getattr(template, k)) for k in self.algorithm.shared}
        kept = self.store.read(order.seen)
        return {k: kept[RESIDUAL + k] for k in self.algorithm.shared}


def _first(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf[0], batch)


# ---------------------------------------------------------------------------------------------------------
# The coordinator


@dataclass(frozen=True)
class Rules:
    """When a round counts, and whose answers."""

    least: int = 1
    """Fewer good answers make no round: it is asked again."""
    deadline: float = 600.0
    """Seconds after which a round goes on without those who have not answered."""
    attempts: int = 3
    """How often a round is asked before the run stops."""
    norm: float = 0.0
    """The largest ‖upload − broadcast‖ over all fields that is believed; 0 means any."""
    by_examples: bool = False
    """Weigh clients by their examples instead of alike."""
    restart_lost: bool = False
    """Let a site that lost its private fields start anew, instead of leaving it out."""

    def check(self, clients: int) -> None:
        """Refuse what cannot be."""
        if not 1 <= self.least <= clients:
            raise NestfedError(f"min-sites must lie between 1 and the {clients} sites, not {self.least}.")
        if not self.deadline > 0 or self.attempts < 1 or not self.norm >= 0:
            raise NestfedError("deadline and attempts must be above 0 and norm-limit at least 0.")


@dataclass
class Coordinator:
    """The server's side of a run: whom to ask, what to believe, how to average, what to keep."""

    problem: Any
    algorithm: AnyAlgorithm
    total: int
    rounds: int
    q: int
    seed: int
    directory: Path
    identity: str
    rules: Rules = Rules()
    encoding: Encoding = Encoding()
    participation: Participation = Participation()
    output: str = "last"
    best: str = ""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Of clients, if they do not weigh alike."""
    reduce: str = "mean"
    noise: float = 0.0

    def __post_init__(self) -> None:
        refuse_mismatch(self.problem, self.algorithm)
        if self.participation.failures:
            raise NestfedError(
                "exchange.failures invents failures for a simulation; set it to 0, a deployment has its own."
            )
        if self.algorithm.single and self.total > 1:
            raise NestfedError(f"{self.algorithm.name} is a single-machine method, but there are {self.total} sites.")
        if self.output not in ("last", "uniform", "best"):
            raise NestfedError(f"evaluation.keep must be last, uniform or best, not {self.output!r}.")
        self.rules.check(self.total)
        self.participation.check(self.total)
        self.reduction = Reduction.parse(self.reduce)
        if not self.reduction.plain and self.output == "uniform":
            raise NestfedError(f"evaluation.keep = 'uniform' needs exchange.reduce = 'mean', not {self.reduce!r}.")
        if not self.reduction.plain and self.rules.by_examples:
            raise NestfedError(f"weights = examples needs exchange.reduce = 'mean', not {self.reduce!r}.")
        self.blur = Noise.plan(self.noise, self.reduction, self.participation, self.total)
        # Who is asked follows from the seed, which every site knows: nothing is gained by sampling.
        self.promise = replace(self.blur, rate=1.0).statement(self.rounds, self.algorithm.shared) if self.blur else ""
        template = self.algorithm.init(self.problem, self.problem.x0)
        self.state = RunState.start(self.algorithm, template, self.total)
        self.state.private = {}  # is where it belongs: on the sites
        found, self.passed_over = checkpoint.read(self.directory, self.identity, torch.device("cpu"), self.state)
        self.history: list[Record] = [self.state.record(None, None, 0)]
        if found is not None:
            new = max(self.total - len(found.seen), 0)
            found.seen = torch.cat([found.seen, torch.full((new,), -1)])[: self.total]
            self.state = found
            self.history = [r for r in read_record(self._path) if r["round"] <= found.round]
        if self.promise:
            write_atomically(self.directory / "privacy.txt", f"{self.promise}\n".encode())
        self.streams = Streams(self.seed)
        self.tap = drawn(self.algorithm, self.rounds, self.q, self.seed) if self.output == "uniform" else -1

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.state.round >= self.rounds

    def ask(self) -> list[int]:
        """Return the clients of this round."""
        return self.participation.draw(self.streams, self.total, self.state.round)[0]

    def order(self, n: int) -> Order:
        """Return what client n is asked to do."""
        span = span_from(self.algorithm, self.state.t, self.q)
        tap = self.tap if span.start <= self.tap < span.stop else -1
        return Order(self.state.round, self.state.t, int(self.state.seen[n]), tap)

    def broadcast(self) -> Fields:
        """Return what every client gets."""
        return self.encoding.broadcast(self.state.shared)

    def believe(self, answer: Answer) -> Answer:
        """Return an answer with its fields as they are averaged, or refuse it."""
        state, names = self.state, self.algorithm.shared
        if answer.round != state.round:
            raise RefusedError(f"it answered round {answer.round + 1} instead of {state.round + 1}.")
        form = wire_form(self.encoding.up, state.shared)
        if self.order(0).tap >= 0:
            x = state.shared[self.algorithm.point]
            form[TAP] = (x.dtype, tuple(x.shape))
        if set(answer.fields) != set(form):
            raise RefusedError(f"it sent {', '.join(sorted(answer.fields)) or 'nothing'} instead of {', '.join(form)}.")
        for k, (dtype, shape) in form.items():
            value = answer.fields[k]
            if tuple(value.shape) != shape:
                raise RefusedError(f"its {k} has shape {tuple(value.shape)} instead of {shape}.")
            if value.dtype != dtype:
                raise RefusedError(f"its {k} is {value.dtype} instead of {dtype}.")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RefusedError(f"its {k} holds infinite or NaN values.")
        if not (math.isfinite(answer.loss) and math.isfinite(answer.moved) and answer.examples >= 0):
            raise RefusedError("its loss, movement or count of examples is no number.")
        fields = dict(answer.fields)
        tap = {k: fields.pop(k) for k in (TAP,) if k in fields}
        if self.encoding.up:
            fields = self.encoding.unpack(fields, state.shared, names)
        broadcast = state.shared if self.encoding.up else self.broadcast()
        norm = math.sqrt(sum(float(((fields[k] - broadcast[k]) ** 2).sum()) for k in names))
        if not math.isfinite(norm):
            raise RefusedError("its change is infinite or NaN.")
        if self.rules.norm and norm > self.rules.norm:
            raise RefusedError(f"its change has norm {norm:.4g}, above the limit of {self.rules.norm:g}.")
        return Answer(answer.round, fields | tap, answer.loss, answer.moved, answer.examples, answer.weight)

    def average(self, answers: Mapping[int, Answer], asked: int, began: float) -> None:
        """Close a round with the answers that were believed; its record and then its checkpoint are on disk."""
        state, algorithm = self.state, self.algorithm
        up, down = self.encoding.sizes(state.shared)
        span = span_from(algorithm, state.t, self.q)
        ns = sorted(answers)
        loss: float | None = None
        drift: float | None = 0.0
        if ns or self.blur:  # noise comes also when nobody does, or its absence would tell so
            mean = self._reduced({n: answers[n].fields for n in ns})
            tapped = mean.pop(TAP, None)
            if not self.blur:  # what has no noise would give sites away
                loss = self._mean({n: answers[n].loss for n in ns})
            drift = None
            if self.reduction.plain:
                spread = ((mean[algorithm.point] - state.shared[algorithm.point]) ** 2).sum()
                drift = max(self._mean({n: answers[n].moved for n in ns}) - float(spread), 0.0)
            server, shared = algorithm.server.update(state.server, state.shared, mean, self._fraction(ns))
            shared = algorithm.feasible(self.problem, shared)
            for k, v in (*shared.items(), *server.items()):
                if not bool(torch.isfinite(v).all()):
                    raise NestfedError(f"The server's {k} became infinite or NaN in round {state.round + 1}.")
            # Only now does the state change, so that after an error it is still that of the last good round.
            state.server, state.shared = server, shared
            state.examples += sum(answers[n].examples for n in ns)
            if tapped is not None:
                state.kept["uniform"] = tapped
        elif span.start <= self.tap < span.stop:
            state.kept["uniform"] = state.shared[algorithm.point].clone()
        state.bytes_up += len(ns) * up
        state.bytes_down += asked * down
        state.advance(span.stop, ns)
        state.seconds += time.perf_counter() - began
        self.history.append(self.state.record(loss, drift, len(ns)))
        self._write()
        checkpoint.write(self.directory, state, self.identity)

    def _reduced(self, uploads: Mapping[int, Fields]) -> dict[str, Tensor]:
        """Return what takes the place of the mean of the uploads, field by field."""
        ns, state = list(uploads), self.state  # in the order of their numbers, so that the sum is the simulation's
        if self.reduction.tabled:
            return {k: self.reduction.over(torch.stack([uploads[n][k] for n in ns])) for k in state.shared}
        base = state.shared if self.encoding.up else self.broadcast()
        share = self._shares(ns)
        sums: dict[str, Tensor] = {k: torch.zeros_like(v) for k, v in state.shared.items()}
        for n in ns:
            fields = uploads[n]
            if self.reduction.clips:
                fields = {
                    k: v[0] for k, v in self.reduction.clipped({k: v[None] for k, v in fields.items()}, base).items()
                }
            for k, v in fields.items():
                part = v if share is None else v * share[n]
                sums[k] = sums[k].add_(part) if k in sums else part.clone()
        if self.blur:
            return self.blur.mean(sums, base, state.round, None)
        mean = sums if share is not None else {k: v.div_(len(ns)) for k, v in sums.items()}
        return {k: base[k] + v for k, v in mean.items()} if self.reduction.clips else mean

    def _mean(self, values: Mapping[int, float]) -> float:
        share = self._shares(list(values))
        return sum(v * (1 / len(values) if share is None else share[n]) for n, v in values.items())

    def judge(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of the last finished round, which come with the next round's answers, and keep the best."""
        if self.output == "best" and metrics:
            self.state.keep_best(self.state.shared[self.algorithm.point], metrics, self.best)
        self.history[-1] |= dict(metrics)
        self._write()

    @property
    def _path(self) -> Path:
        return self.directory / "record.jsonl"

    def _write(self) -> None:
        write_atomically(self._path, "".join(map(line, self.history)).encode())

    def outcome(self) -> Tensor:
        """Return the point that the run was for."""
        return self.state.outcome(self.algorithm.point, self.output)

    def _shares(self, ns: Sequence[int]) -> dict[int, float] | None:
        if not self.rules.by_examples:
            return None
        total = sum(self.weights[n] for n in ns)
        return {n: self.weights[n] / total for n in ns}

    def _fraction(self, ns: Sequence[int]) -> float:
        if self.blur:
            return self.blur.rate
        if not self.rules.by_examples:
            return len(ns) / self.total
        return sum(self.weights[n] for n in ns) / sum(self.weights.values())
