"""The server's half of a round: its order, the sum of the uploads, and the next broadcast.

`Fold.add` decodes, clips and adds uploads as they arrive. Only `close_round` turns the total into the next broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nestfed.core import DivergedError, Fields, Metric, NestfedError, Paired, Problem
from nestfed.engine.options import Exchange
from nestfed.engine.privacy import Noise
from nestfed.engine.program import TAP, AnyAlgorithm, Span
from nestfed.queries import Answers, Question

Record = dict[str, Any]
"""A line of the record: round, iteration, participants, loss, drift, examples, bytes_up, bytes_down, seconds, metrics."""


@dataclass(frozen=True)
class Order:
    """The work of a round: who trains, and from which state."""

    round: int
    """Rounds completed before."""
    span: Span
    asked: Sequence[int]
    """The clients that train."""
    seen: Sequence[int]
    """For each of them, the version of its private fields: the rounds completed when it last took part, or −1."""
    tap: int = -1
    """Upload the point after this iteration too, if it is in the round."""
    at: int = 0
    """The row of the first client in a table of all uploads."""
    tables: Fields = field(default_factory=dict)
    """The tables of the clients' contributions, and who is fresh (`Algorithm.gathered`)."""
    before: int = 0
    """Rounds of a warm-up, for messages."""
    questions: tuple[Question, ...] = ()
    """Answered by every client, also by those that do not train, at the broadcast and before training."""

    @property
    def number(self) -> int:
        """This round's number in records and messages."""
        return self.before + self.round + 1

    @property
    def tapped(self) -> bool:
        """Whether uploads include the point after iteration `tap`."""
        return self.span.holds(self.tap)

    def stale(self) -> list[bool]:
        """Return for each client whether it skipped the last round."""
        return [self.round > 0 and version != self.round for version in self.seen]

    def part(self, start: int, stop: int) -> Order:
        """Return the order for some of the clients."""
        return self.only(range(start, stop), self.at + start)

    def only(self, places: Sequence[int], at: int = 0) -> Order:
        """Return the order for the clients at these places."""
        asked, seen = [self.asked[i] for i in places], [self.seen[i] for i in places]
        return replace(self, asked=asked, seen=seen, at=at)


@dataclass
class Upload:
    """What some clients send after their round: one row per client in every field, encoded for the network."""

    ns: Sequence[int]
    places: Sequence[int]
    """Their rows in a table of all uploads."""
    fields: Fields
    loss: Tensor
    """Each client's mean loss over its steps; NaN if the problem records none."""
    moved: Tensor
    """Each client's ‖x_n − x_start‖²."""
    examples: int
    evaluations: int = 0
    gathered: Fields = field(default_factory=dict)
    """Their contributions, one row each."""


@dataclass
class Reply:
    """The result of a round: sums over clients, or their rows for a reduction that needs all of them."""

    sums: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)
    """One row for each asked client; `places` are the rows of those that answered."""
    places: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    downloads: int = 0
    """Broadcasts sent to clients that train."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Clients dropped because their numbers became infinite or NaN, each with the reason."""
    weight: float = 0.0
    """The sum of the weights of the clients that answered."""
    loss: float = 0.0
    moved: float = 0.0
    examples: int = 0
    evaluations: int = 0
    answers: dict[int, Answers] = field(default_factory=dict)
    """The answers to the order's questions, by client."""
    laps: dict[str, float] = field(default_factory=dict)
    """Seconds by activity."""
    gathered: dict[int, Fields] = field(default_factory=dict)
    """The contributions of each client that answered."""

    def merge(self, other: Reply) -> None:
        """Add the reply of other clients, except sums, rows and laps, which the caller combines."""
        self.places += other.places
        self.answered += other.answered
        self.dropped |= other.dropped
        self.weight += other.weight
        self.loss += other.loss
        self.moved += other.moved
        self.examples += other.examples
        self.evaluations += other.evaluations
        self.gathered |= other.gathered

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time the block and add it to an activity."""
        began = perf_counter()
        try:
            yield
        finally:
            self.laps[name] = self.laps.get(name, 0.0) + perf_counter() - began


def empty_reply(shared: Fields, point: str, order: Order, exchange: Exchange) -> Reply:
    """Return a reply without any clients, for uploads to be added to."""
    if exchange.reduction.tabled:
        return Reply({}, {k: v.new_empty((len(order.asked), *v.shape)) for k, v in shared.items()})
    sums = {k: torch.zeros_like(v) for k, v in shared.items()}
    if order.tapped:
        sums[TAP] = torch.zeros_like(shared[point])
    return Reply(sums)


class Fold:
    """Adds uploads to a reply: decode, clip, weight, add. `shared` are the server's own fields, not rounded."""

    def __init__(
        self, exchange: Exchange, shared: Fields, reply: Reply, weight: Callable[[int], float] | None = None
    ) -> None:
        self.exchange, self.shared, self.reply, self.weight = exchange, shared, reply, weight
        self.base = shared if exchange.encoding.up else exchange.encoding.broadcast(shared)

    def decoded(self, fields: Fields) -> dict[str, Tensor]:
        """Return uploads as the server averages them."""
        encoding = self.exchange.encoding
        if not encoding.up:
            return dict(fields)
        tap = {k: fields[k] for k in (TAP,) if k in fields}
        return encoding.unpack(fields, self.shared, list(self.shared)) | tap

    def add(self, upload: Upload) -> None:
        """Add the uploads of some clients."""
        reply, reduction = self.reply, self.exchange.reduction
        fields = self.decoded(upload.fields)
        if not fields.keys() - {TAP} == self.shared.keys():
            raise NestfedError(
                f"An upload has the fields {', '.join(fields)}, but the method shares {', '.join(self.shared)}."
            )
        if reduction.clips:
            fields = reduction.clipped(fields, self.base)
        weights = None if self.weight is None else [self.weight(n) for n in upload.ns]
        for k, v in fields.items():
            if reply.rows:
                put(reply.rows[k], upload.places, v)
            else:
                v = _weighed(v, weights)
                reply.sums[k].add_(v.sum(0) if len(v) > 1 else v[0])
        reply.answered += upload.ns
        reply.places += upload.places
        reply.weight += len(upload.ns) if weights is None else sum(weights)
        reply.loss += float(_weighed(upload.loss, weights).sum())
        reply.moved += float(_weighed(upload.moved, weights).sum())
        reply.examples += upload.examples
        reply.evaluations += upload.evaluations
        if upload.gathered:
            reply.gathered |= {n: {k: v[i] for k, v in upload.gathered.items()} for i, n in enumerate(upload.ns)}


def _weighed(rows: Tensor, weights: Sequence[float] | None) -> Tensor:
    if weights is None:
        return rows
    return rows * rows.new_tensor(weights).view(-1, *[1] * (rows.dim() - 1))


def put(table: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write rows of a table; copying a single row directly is faster for a large model."""
    if len(rows) == 1:
        table[rows[0]] = values[0]
    else:
        table[list(rows)] = values


@dataclass
class RunState:
    """The server's state between rounds; the federation keeps the clients' private fields."""

    shared: Fields
    server: Fields
    seen: Tensor
    """For each client, the rounds completed when it last took part, or −1."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Points to return: "uniform" and "best"."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """The tables of the clients' contributions, and who is fresh."""
    round: int = 0
    t: int = 0
    examples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    best: float | None = None
    rounds_before: int = 0
    """Rounds of a warm-up, which `round` and everything random do not count."""
    t_before: int = 0
    """Iterations of a warm-up."""

    @classmethod
    def start(cls, method: AnyAlgorithm, template: Any, clients: int, warm: RunState | None = None) -> RunState:
        """Return the state before the first round; after a warm-up, with its costs."""
        shared = {k: getattr(template, k) for k in method.shared}
        state = cls(shared, method.server.init(shared), torch.full((clients,), -1))
        for name, table in method.gathered.items():
            own = getattr(template, name)
            state.tables |= {table: own.new_zeros((clients, *own.shape)), "fresh": own.new_zeros(clients)}
        if warm is not None:
            state.rounds_before, state.t_before = warm.round, warm.t
            for cost in ("examples", "bytes_up", "bytes_down", "seconds"):
                setattr(state, cost, getattr(warm, cost))
        return state

    @property
    def number(self) -> int:
        """Rounds completed, with those of a warm-up: the number in records, checkpoints and messages."""
        return self.rounds_before + self.round

    def advance(self, stop: int, answered: Sequence[int]) -> None:
        """Count a round that ended before iteration `stop`.

        Iteration 0 initialises the estimators, so it is repeated until some client takes part in it.
        """
        self.round += 1
        if answered or self.t:
            self.t = stop
        self.seen[list(answered)] = self.round

    def keep_best(self, point: Tensor, value: float, metric: Metric) -> None:
        """Keep a point if it is the best so far."""
        if not math.isnan(value) and (self.best is None or metric.better(value, self.best)):
            self.best = value
            self.kept["best"] = point.clone()

    def record(self, loss: float | None, drift: float | None, participants: int) -> Record:
        """Return a record with the costs so far and the statistics of the last round."""
        return {
            "round": self.number,
            "iteration": self.t_before + self.t,
            "participants": participants,
            "loss": loss,
            "drift": drift,
            "examples": self.examples,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(self.seconds, 6),
        }

    def outcome(self, last: Tensor, keep: str) -> Tensor:
        """Return the kept solution, or the last one if no round kept one."""
        return self.kept.get(keep, last)


@dataclass(frozen=True)
class Rules:
    """What the server needs to close a round, the same for all rounds."""

    problem: Problem
    method: AnyAlgorithm
    exchange: Exchange
    clients: int
    noise: Noise | None = None
    noise_seed: int | None = None
    """None = secret noise."""
    total_weight: Callable[[], float] | None = None
    """Returns the sum of all clients' weights; None = equal weights."""

    def __post_init__(self) -> None:
        if self.noise is not None and self.method.gathered:
            raise NestfedError(
                f"exchange.privacy adds noise to sums, but {self.method.name} hands {', '.join(self.method.gathered)} of "
                "single clients on without noise, so ε would be a false promise: leave privacy out or choose another method."
            )
        if self.method.weighs and (self.exchange.weights != "equal" or self.exchange.reduction.tabled):
            raise NestfedError(
                f"{self.method.name} weights clients by their losses, and the mean is over equal clients: set "
                "exchange.weights = 'equal', and exchange.reduce = 'mean' or 'clip:NORM'."
            )
        if isinstance(self.problem, Paired) and self.method.gathered and self.exchange.weights != "equal":
            raise NestfedError(
                f"exchange.weights must be 'equal' for {self.method.name}: the batches weight pairs already "
                "(problem.over), and other weights would give the two halves of its direction different objectives."
            )


def close_round(rules: Rules, state: RunState, order: Order, reply: Reply) -> Record:
    """Turn a round's total into the next broadcast, advance the state, and return the round's record.

    The state changes only after everything is computed and finite. After an error it is still the last good state.
    """
    method, span = rules.method, order.span
    loss: float | None = None
    drift: float | None = 0.0
    count = len(reply.answered)
    if reply.dropped and not count and not rules.noise:
        raise NestfedError(f"No client is left in round {state.number + 1}: {next(iter(reply.dropped.values()))}")
    if count or rules.noise:  # add noise even if nobody answered; otherwise its absence would reveal that
        mean = _reduced(rules, state, reply)
        tapped = mean.pop(TAP, None)
        drift = None  # defined only for the mean
        if rules.exchange.reduction.plain:
            spread = mean[method.point] - state.shared[method.point]
            drift = max(reply.moved / reply.weight - float(spread.square_().sum()), 0.0)
        server, shared = method.server.update(state.server, state.shared, mean, _fraction(rules, reply))
        if set(shared) != set(state.shared):
            raise NestfedError(
                f"The server of {method.name} returns the fields {', '.join(shared)}, but it shares {', '.join(method.shared)}."
            )
        shared = method.feasible(rules.problem, shared)
        tables = _gather(method, state.tables, reply.gathered)
        for k, v in (*shared.items(), *server.items()):
            if not bool(torch.isfinite(v.sum())):
                raise DivergedError(f"The server's {k} became infinite or NaN in round {state.number + 1}.")
        state.server, state.shared, state.tables = server, shared, tables
        if tapped is not None:
            state.kept["uniform"] = rules.problem.project(tapped)  # weights may leave the feasible set
        state.examples += reply.examples
        if math.isfinite(reply.loss) and not rules.noise:  # a loss without noise would leak private data
            loss = reply.loss / reply.weight
    elif order.tapped:
        state.kept["uniform"] = state.shared[method.point].clone()
    up, down = rules.exchange.encoding.sizes(state.shared) if method.talks else (0, 0)
    state.bytes_down += reply.downloads * (down + _bytes(order.tables))
    state.bytes_up += count * up + sum(map(_bytes, reply.gathered.values()))
    state.advance(span.stop, reply.answered)
    return state.record(loss, drift, count)


def _reduced(rules: Rules, state: RunState, reply: Reply) -> dict[str, Tensor]:
    """Return the combined uploads, field by field."""
    reduction, encoding = rules.exchange.reduction, rules.exchange.encoding
    if reduction.tabled:
        whole = all(len(v) == len(reply.places) for v in reply.rows.values())
        return {k: reduction.over(v if whole else v[sorted(reply.places)]) for k, v in reply.rows.items()}
    if not reduction.clips:
        return {k: v.div_(reply.weight) for k, v in reply.sums.items()}
    base = state.shared if encoding.up else encoding.broadcast(state.shared)
    if rules.noise is None:
        return {k: base[k] + v.div_(reply.weight) for k, v in reply.sums.items()}
    return rules.noise.mean(reply.sums, base, state.number, rules.noise_seed)


def _gather(method: AnyAlgorithm, tables: Fields, rows: Mapping[int, Fields]) -> dict[str, Tensor]:
    """Return the tables with the rows of the clients that answered."""
    found = dict(tables)
    if not rows:
        return found
    ns = sorted(rows)
    for name, table in method.gathered.items():
        shapes = {tuple(rows[n][name].shape) for n in ns}
        if len(shapes) > 1:
            raise NestfedError(
                f"Clients contribute {name} of the shapes {' and '.join(map(str, sorted(shapes)))}, but {method.name} needs "
                "the same from all: equal batches and equal numbers of local steps."
            )
        old = tables[table]
        found[table] = method.fill(name, old, ns, torch.stack([rows[n][name] for n in ns]).to(old))
    found["fresh"] = torch.zeros_like(tables["fresh"])
    found["fresh"][ns] = 1
    return found


def _bytes(fields: Fields) -> int:
    return sum(v.numel() * v.element_size() for v in fields.values())


def _fraction(rules: Rules, reply: Reply) -> float:
    """Return the share of all clients that the mean represents."""
    if rules.noise:
        return rules.noise.rate
    return reply.weight / (rules.clients if rules.total_weight is None else rules.total_weight())
