"""A federation of institutions: rounds over Flower, with deadlines, retries and a minimum number of answers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from nestfed.core import DivergedError, Fields, Metric, NestfedError
from nestfed.deploy.flower.gate import Gate, RejectedError, TroubleError
from nestfed.deploy.flower.mailbox import HELLO
from nestfed.deploy.flower.messages import arrays_of, as_record, broadcast_record, plan_record, stamp_of, tensors_of
from nestfed.deploy.flower.roster import POLL, Roster
from nestfed.deploy.site import pool, tally_error
from nestfed.engine.options import Exchange
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.round import Fold, Order, Reply, Upload, empty_reply

if TYPE_CHECKING:
    from nestfed.deploy.site import Agreement

MOST_TALLY = 1_000_000
"""The largest accepted tally, in bytes."""
MOST_GATHERED = 10_000_000
"""The largest accepted contribution of a site to the gathered tables, in bytes."""

Tally = Mapping[str, np.ndarray]


class InOrder:
    """Fold uploads in the order of the clients, so that sums equal those of a simulation."""

    def __init__(self, fold: Fold, asked: Sequence[int]) -> None:
        self.fold, self.queue = fold, deque(asked)
        self.waiting: dict[int, Upload] = {}
        self.done: set[int] = set()
        self.first: Upload | None = None
        """The first upload of the round."""

    def add(self, n: int, upload: Upload) -> None:
        """Add the upload of client n."""
        self.waiting[n] = upload
        self.first = self.first or upload
        self.done.add(n)
        while self.queue and self.queue[0] in self.waiting:
            self.fold.add(self.waiting.pop(self.queue.popleft()))

    def finish(self) -> None:
        """Fold the uploads that were waiting for clients that did not answer."""
        for n in sorted(self.waiting):
            self.fold.add(self.waiting.pop(n))


@dataclass
class Round:
    """A round in progress."""

    order: Order
    shared: ArrayRecord
    evaluate: bool
    gate: Gate
    uploads: InOrder
    reply: Reply
    tallies: dict[int, Tally] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """The version of its private fields from which each client starts."""

    @property
    def number(self) -> int:
        """The round's number in messages, from 1."""
        return self.order.round + 1


class Flower:
    """Run rounds at sites. Private fields stay there; the order gives the version to start from."""

    def __init__(
        self, roster: Roster, plan: Agreement, token: str, method: AnyAlgorithm, exchange: Exchange, *,
        sites_evaluate: bool, metric: str | Metric = "",
    ) -> None:  # fmt: skip
        self.roster, self.plan, self.token, self.exchange = roster, plan, token, exchange
        self.point, self.gathered = method.point, method.gathered
        self.sites_evaluate, self.metric = sites_evaluate, metric
        self.weight: Callable[[int], float] | None = None
        if exchange.weights == "examples":
            self.weight = lambda n: float(roster.facts[n].examples)
        self.planned: set[int] = set()
        """Nodes that have the plan."""

    # -- the methods of a federation

    def run(self, order: Order, shared: Fields, evaluate: bool = False) -> Reply:
        """Ask until there are enough valid answers for a round, or raise."""
        reply = empty_reply(shared, self.point, order, self.exchange)
        fold = Fold(self.exchange, shared, reply, self.weight)
        gate = Gate(order, shared, self.point, self.exchange, self.roster.setup.norm_limit, fold)
        seen = dict(zip(order.asked, order.seen))
        message = broadcast_record(self.exchange.encoding, shared)
        now = Round(order, message, evaluate, gate, InOrder(fold, order.asked), reply, seen=seen)
        if order.asked or evaluate:
            self._ask(now)
        now.uploads.finish()
        if evaluate:
            reply.metrics = pool([now.tallies[n] for n in sorted(now.tallies)], self.metric)
        self._count_bytes(now)
        return reply

    def own(self) -> Fields:
        """Return nothing: private fields stay at the sites."""
        return {}

    def private(self) -> Fields:
        """Return nothing: private fields stay at the sites."""
        return {}

    def restore(self, private: Fields) -> None:
        """Do nothing: the sites keep their own versions."""

    def agree(self, value: Any) -> Any:
        """Return the value: there is one coordinator."""
        return value

    def any(self, flag: bool) -> bool:
        """Return the flag: there is one coordinator."""
        return flag

    def close(self) -> None:
        """Stop waiting for answers."""
        self.roster.mailbox.withdraw()

    # -- one round

    def _ask(self, now: Round) -> None:
        setup, roster, asked = self.roster.setup, self.roster, now.order.asked
        least = min(setup.least, len(asked)) if asked else 1
        for attempt in range(setup.attempts):
            wanted = [n for n in asked if n not in now.uploads.done and n not in now.reply.dropped]
            audience = [n for n in range(setup.sites) if n not in asked and n not in now.tallies]
            audience = audience if now.evaluate else []
            need = least - len(now.uploads.done) if asked else 1
            roster.poll(at_once=True)
            roster.wait(lambda wanted=wanted or audience, need=need: len(roster.nodes().keys() & set(wanted)) >= need)  # type: ignore[misc]
            roster.flush()
            self._collect(now, wanted, audience)
            if len(now.uploads.done if asked else now.tallies) >= least:
                return
            roster.log(
                f"round {now.number}: {len(now.uploads.done)} of {len(asked)} sites sent valid answers in time, {least} "
                f"are needed (attempt {attempt + 1} of {setup.attempts})."
            )
        if asked:  # otherwise only metrics are missing
            raise NestfedError(
                f"Round {now.number} had too few answers {setup.attempts} times; run again to resume after round "
                f"{now.order.round}."
            )

    def _collect(self, now: Round, wanted: list[int], audience: list[int]) -> None:
        """Ask once, and collect answers until the deadline."""
        roster = self.roster
        end = time.monotonic() + roster.setup.deadline
        open_: set[int] = set()

        def put(n: int) -> None:
            if self._send(now, n, n in wanted):
                open_.add(n)

        roster.poll(at_once=True)
        for n in (*wanted, *audience):
            put(n)
        while open_ and time.monotonic() < end:
            # A restarted site has lost the message.
            for n in {roster.client_of[node] for node in roster.poll() if node in roster.client_of} & open_:
                roster.log(f"site {roster.name(roster.nodes().get(n, 0))} restarted and is asked again.", INFO)
                put(n)
            for node, kind, reply in roster.answers():
                n = roster.client_of.get(node, -1)
                if kind == HELLO:
                    if self._joined(node, reply, {*wanted, *audience} - open_ - now.uploads.done):
                        put(roster.client_of[node])
                    continue
                open_.discard(n)
                try:
                    self._take(now, n, node, reply, kind == "train")
                except TroubleError as trouble:
                    if self._help(now, n, node, trouble):
                        put(n)
                except RejectedError as error:
                    roster.log(f"round {now.number}: the answer of site {roster.name(node)} is rejected: {error}")
            time.sleep(POLL)
        for n in sorted(open_):
            roster.log(f"round {now.number}: site {roster.name(roster.nodes().get(n, 0))} did not answer in time.")
        roster.mailbox.withdraw(kind="train")  # ignore late answers
        roster.mailbox.withdraw(kind="evaluate")

    def _send(self, now: Round, n: int, train: bool) -> bool:
        """Ask client n if it is connected; return whether it is."""
        node = self.roster.nodes().get(n)
        if node is None:
            return False
        order = now.order
        words = {
            "round": order.round, "t": order.span.start, "seen": now.seen.get(n, -1),
            "tap": order.tap if order.tapped else -1, "token": self.token,
            "evaluate": now.evaluate and self.sites_evaluate,
        }  # fmt: skip
        content = RecordDict({"order": stamp_of(self.roster.study, **words), "shared": now.shared})
        if train and order.tables:
            content["tables"] = as_record(order.tables)
        if node not in self.planned:
            content["plan"], content["scaling"] = plan_record(self.plan)
        self.roster.ask(node, "train" if train else "evaluate", content, str(now.number))
        now.reply.downloads += train
        return True

    def _joined(self, node: int, reply: Message, missing: set[int]) -> bool:
        """Register a site; return whether to ask it in this round."""
        roster = self.roster
        first = node in roster.unanswered
        roster.register(node, reply)
        if not first or node in roster.rejected or roster.client_of.get(node, -1) not in missing:
            return False
        if roster.mailbox.open_hellos(node):
            roster.behind.add(node)  # or it was only slow: its answer clears this
        return True

    def _help(self, now: Round, n: int, node: int, trouble: TroubleError) -> bool:
        """Handle a site's error; return whether to ask it again."""
        roster, name = self.roster, self.roster.name(node)
        if trouble.kind == "no-plan" and node in self.planned:
            self.planned.discard(node)
            return True
        if trouble.kind == "lost-state" and roster.setup.restart_lost and now.seen.get(n, -1) >= 0:
            roster.log(f"round {now.number}: site {name} lost its private fields and starts over.")
            now.seen[n] = -1
            return True
        if trouble.kind == "diverged":
            sentence = f"The numbers of site {name} became infinite or NaN in round {now.number}; see its log."
            if self.exchange.on_nan == "stop":
                raise DivergedError(sentence)
            now.reply.dropped[n] = sentence
        elif trouble.kind in ("another-experiment", "another-version"):
            roster.reject(node, str(trouble))
        else:
            roster.log(f"round {now.number}: site {name} did not take part: {trouble}")
        return False

    def _take(self, now: Round, n: int, node: int, reply: Message, training: bool) -> None:
        """Check all of an answer, then use it."""
        words = self.roster.words(reply, "answer")
        if words.get("client") != n:
            raise RejectedError(f"it answered for client {words.get('client')}.")
        if words.get("round") != now.order.round:
            raise RejectedError(f"it answered round {_plus_one(words.get('round'))} instead of {now.number}.")
        extra = (
            set(reply.content) - {"answer", "fields", "report", "tally"} - ({"gathered"} if self.gathered else set())
        )
        if extra or ("fields" in reply.content) != training:
            raise RejectedError("it sent other records than requested.")
        tally = _tally(reply) if now.evaluate else {}
        if training:
            now.uploads.add(n, self._upload(now, n, reply))
        if tally:
            now.tallies[n] = tally
        self.planned.add(node)

    def _upload(self, now: Round, n: int, reply: Message) -> Upload:
        if self.weight is not None and not self.weight(n):
            raise NestfedError(
                "exchange.weights = 'examples', but the sites of this problem do not count examples; set it to 'equal'."
            )
        fields, report = reply.content.get("fields"), reply.content.get("report")
        if not isinstance(fields, ArrayRecord) or not isinstance(report, MetricRecord):
            raise RejectedError("its fields or its report are missing.")
        moved, examples, loss = report.get("moved"), report.get("examples"), report.get("loss")
        if set(report) - {"loss"} != {"moved", "examples"} or not isinstance(moved, int | float):
            raise RejectedError("its report is invalid.")
        if not isinstance(examples, int) or not isinstance(loss, int | float | None):
            raise RejectedError("its report is invalid.")
        # Each array has a header of some hundred bytes; int8 sends two arrays per field.
        most = sum(v.numel() * v.element_size() + 10_000 for v in now.gate.shared.values()) * 2
        upload = now.gate.checked(n, tensors_of(fields, most), loss, float(moved), examples)
        if self.gathered:
            rows = reply.content.get("gathered")
            if not isinstance(rows, ArrayRecord):
                raise RejectedError("its contribution is missing.")
            upload.gathered = now.gate.contribution(tensors_of(rows, MOST_GATHERED), self.gathered, now.uploads.first)
        return upload

    def _count_bytes(self, now: Round) -> None:
        """Log the size of the messages; the record counts only the fields in them."""
        mailbox = self.roster.mailbox
        line = {"round": now.number, "sent": mailbox.sent, "received": mailbox.got}
        with (self.roster.setup.out / "wire.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _tally(reply: Message) -> Tally:
    """Return a site's counts for the metrics, if it sent any."""
    record = reply.content.get("tally")
    if not isinstance(record, ArrayRecord):
        return {}
    counted = arrays_of(record, MOST_TALLY)
    if sentence := tally_error(counted):
        raise RejectedError(sentence)
    return counted


def _plus_one(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value
