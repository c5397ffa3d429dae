"""The loop over rounds, for simulations and deployments alike.

`rounds` is a generator: it yields the work of a round and receives the reply, so its driver decides where clients run.
It owns participation, evaluation, the record, checkpoints, progress and interrupts, so every federation has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from time import perf_counter

from nestfed.core import Fields, NestfedError
from nestfed.data.random import Purpose, Streams
from nestfed.engine.federation import Federation
from nestfed.engine.options import Evaluation
from nestfed.engine.program import span_from
from nestfed.engine.round import Order, Reply, Rules, RunState, close_round
from nestfed.engine.run_directory import Interrupted, RunDirectory
from nestfed.engine.schedules import iterations
from nestfed.queries import Answers, Question

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """One request from the loop to a federation."""

    order: Order
    shared: Fields


@dataclass(frozen=True)
class Plan:
    """A run: its rules, its number of rounds, and who evaluates."""

    rules: Rules
    rounds: int
    q: int
    seed: int
    evaluation: Evaluation
    evaluate: Callable[[RunState], Mapping[str, float]] | None = None
    """Evaluates the state on the server; None if the clients do, or nobody does."""
    questions: tuple[Question, ...] = ()
    """What clients are asked to evaluate the broadcast."""
    pool: Callable[[Mapping[int, Answers]], Mapping[str, float]] | None = None
    """Turns the clients' answers into metrics."""

    def __post_init__(self) -> None:
        if self.rules.noise is not None and self.evaluation.keep == "best":
            raise NestfedError(
                "evaluation.keep = 'best' would choose by metrics without noise, so exchange.privacy would be a false promise: "
                "set keep = 'last' or 'uniform'."
            )

    def tap(self) -> int:
        """Return the iteration whose averaged point is returned, drawn uniformly; −1 unless keep = "uniform"."""
        if self.evaluation.keep != "uniform":
            return -1
        T = iterations(self.rules.method, self.rounds, self.q)
        return int(Streams(self.seed).at(Purpose.OUTPUT, 0, 0).integers(max(T, 1)))

    def order(self, state: RunState, tap: int, train: bool, questions: tuple[Question, ...] = ()) -> Order:
        """Return the order of the next round."""
        rules = self.rules
        asked = rules.exchange.draw(Streams(self.seed), rules.clients, state.round) if train else []
        span = span_from(rules.method, state.t, self.q)
        return Order(
            state.round, span, asked, state.seen[asked].tolist(), tap, tables=state.tables, before=state.rounds_before,
            questions=questions,
        )  # fmt: skip


def rounds(plan: Plan, state: RunState, book: RunDirectory) -> Generator[Work, Reply, None]:
    """Advance the state round by round until the plan is complete."""
    tap = plan.tap()
    if 0 <= tap < state.t and "uniform" not in state.kept:
        raise NestfedError(
            f"evaluation.keep = 'uniform' must be set from the start, but {book.path} contains a run without it."
        )
    while True:
        over = state.round >= plan.rounds or book.stalled()
        due = plan.evaluation.due(state.number, over)
        if due and plan.evaluate is not None and not book.judged(state):
            with book.lap("evaluation"):
                book.judge(state, plan.evaluate(state))
        book.settle(state, over)
        questions = plan.questions if due else ()
        if over and not questions:
            return
        order = plan.order(state, tap, train=not over, questions=questions)
        began = perf_counter()
        reply = yield Work(order, state.shared)
        if questions and plan.pool is not None:
            book.judge(state, plan.pool(reply.answers))
        if over:
            book.settle(state, over)  # a run of 0 rounds has no line yet
            return
        with reply.lap("averaging"):
            record = close_round(plan.rules, state, order, reply)
        seconds = perf_counter() - began
        state.seconds += seconds
        record["seconds"] = round(state.seconds, 6)
        book.close(record, reply, seconds)


def drive(plan: Plan, state: RunState, federation: Federation, book: RunDirectory) -> None:
    """Run a plan's rounds on a federation. After an error, save the last good state and name its location in the error."""
    loop = rounds(plan, state, book)
    if book.leads:
        _log_start(plan, state, book)
    try:
        work = next(loop, None)
        while work is not None:
            work = send(loop, federation.run(work.order, work.shared))
    except Interrupted:
        raise
    except NestfedError as error:
        if where := book.rescue(state):
            raise type(error)(f"{error} {where}") from error
        raise
    if book.leads:
        LOG.info("finished after round %d: %s examples, %.3g s.", state.number, f"{state.examples:,}", state.seconds)


def _log_start(plan: Plan, state: RunState, book: RunDirectory) -> None:
    what = f"{plan.rules.method.name} with {plan.rules.clients} clients, {plan.rounds} rounds of {plan.q} local steps"
    begin = f"resuming after round {state.number}" if state.number else "starting"
    LOG.info("%s: %s; %s.", begin, what, f"directory {book.path}" if book.path is not None else "nothing is saved")


def send(loop: Generator[Work, Reply, None], reply: Reply) -> Work | None:
    """Send the loop a reply; return its next work, or None at the end."""
    try:
        return loop.send(reply)
    except StopIteration:
        return None
