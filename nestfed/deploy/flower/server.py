"""The coordinator: it asks, waits, averages, and writes what a simulation would write."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from nestfed.core import NestfedError
from nestfed.deploy.flower.messages import (
    LOG,
    TROUBLES,
    Custom,
    arrays_of,
    broadcast_record,
    mismatch,
    plan_record,
    read_plan,
    stamp_of,
    study_of,
    tensors_of,
    write_plan,
)
from nestfed.deploy.remote import Answer, Coordinator, RefusedError, Rules
from nestfed.engine.encode import Encoding
from nestfed.engine.record import metrics_of
from nestfed.engine.round import Participation
from nestfed.files import locked, write_atomically

if TYPE_CHECKING:
    from nestfed.data.encoding import Facts, Plan
    from nestfed.experiment.build import Assembly


HELLO = "query.hello"
POLL = 0.2
"""Seconds between two looks for answers."""
PREDECESSOR = 60.0
"""Seconds for the ServerApp of a SuperLink that was killed to notice, about ten, before the run is refused."""
GREETING = 15.0
"""Seconds for a site to answer a greeting, before it is greeted again; twice as many after every attempt."""
SETTLING = 30.0
"""Seconds for a site that was greeted again to answer the later greetings too, or twice what its first answer took."""
DAY = 86400.0
MOST_TALLY = 1_000_000
"""Bytes of a site's counts that are believed."""


@dataclass(frozen=True)
class _Setup:
    """The app's configuration, [tool.flwr.app.config]."""

    sites: int
    rules: Rules
    out: Path

    @classmethod
    def read(cls, study: Any, config: Mapping[str, Any]) -> _Setup:
        defaults = {
            "sites": 0, "min-sites": 0, "deadline": 600.0, "attempts": 3, "norm-limit": 0.0, "weights": "equal",
            "lost-state": "refuse", "out": "",
        }  # fmt: skip
        if wrong := [k for k in config if k not in defaults]:
            raise NestfedError(f"The app's configuration knows {', '.join(defaults)}, but not {wrong[0]!r}.")
        told = {**defaults, **config}
        sites = int(told["sites"])
        if sites < 1:
            raise NestfedError("The app's configuration must say how many sites there are: sites = 4.")
        if told["weights"] not in ("equal", "examples"):
            raise NestfedError(f"weights must be equal or examples, not {told['weights']!r}.")
        if told["lost-state"] not in ("refuse", "restart"):
            raise NestfedError(f"lost-state must be refuse or restart, not {told['lost-state']!r}.")
        rules = Rules(
            int(told["min-sites"]) or sites, float(told["deadline"]), int(told["attempts"]), float(told["norm-limit"]),
            told["weights"] == "examples", told["lost-state"] == "restart",
        )  # fmt: skip
        return cls(sites, rules, Path(str(told["out"]) or f"runs/deployed-{study.digest()}"))


class _Post:
    """Messages under way. An answer is taken once, and only while its question stands."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.open: dict[str, tuple[int, str]] = {}
        self.sent = self.got = 0

    def send(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Ask a node something; what it was asked before and has not answered is withdrawn, but for greetings."""
        if kind != HELLO:
            self.withdraw(node, kind)
        message = Message(content, node, kind, ttl=DAY if kind == HELLO else self.deadline, group_id=group)
        self.sent += _weight(message)
        for identity in self.grid.push_messages([message]):
            if identity:
                self.open[identity] = (node, kind)

    def withdraw(self, node: int | None = None, kind: str | None = None) -> None:
        """Stop waiting for answers."""
        self.open = {
            i: (n, k)
            for i, (n, k) in self.open.items()
            if not ((node is None or n == node) and (kind is None or k == kind))
        }

    def greetings(self, node: int) -> int:
        """Return how many greetings a node has left unanswered."""
        return list(self.open.values()).count((node, HELLO))

    def receive(self) -> list[tuple[int, str, Message]]:
        """Return the answers that have come."""
        found = []
        for reply in self.grid.pull_messages(list(self.open)) if self.open else ():
            asked = self.open.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                self.got += _weight(reply)
                found.append((*asked, reply))
        return found


def _weight(message: Message) -> int:
    """Return the bytes of a message as Flower sends it, without HTTP and TLS."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


class _Server:
    """One run of a federation, from whoever is there to the last round."""

    def __init__(self, study: Any, setup: _Setup, grid: Grid) -> None:
        self.study, self.setup = study, setup
        self.post = _Post(grid, setup.rules.deadline)
        self.grid = grid
        self.names: dict[int, str] = {}
        self.client_of: dict[int, int] = {}
        self.facts: dict[int, Facts] = {}
        self.refused: set[int] = set()
        self.doubles: dict[int, int] = {}
        """Nodes whose number another node has; without registered keys, that may be the same site before a crash."""
        self.planned: set[int] = set()
        """Nodes that have the plan."""
        self.since: dict[int, str] = {}
        """When each node that is there came up."""
        self.silent: dict[int, tuple[int, float, float]] = {}
        """Nodes that have answered no greeting yet: how many they got, when the first, and when the next is due."""
        self.behind: set[int] = set()
        """Nodes that keep answers back: see `settle`."""
        self.asked: dict[int, float] = {}
        """When each node was asked last."""
        self.greeted: dict[int, float] = {}
        """When each node was greeted last."""
        self.slowest = 0.0
        """The longest time that a site took for its first answer."""
        self._looked = 0.0

    # -- who is there

    def say(self, sentence: str, level: int = WARNING) -> None:
        """Tell the coordinator's people; warnings stay in sites.log."""
        LOG.log(level, "nestfed: %s", sentence)
        if level >= WARNING:
            with (self.setup.out / "sites.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def name(self, node: int) -> str:
        """Return how people call a site."""
        return self.names.get(node) or f"node {node}"

    def look(self, at_once: bool = False) -> set[int]:
        """Return the nodes that came up since the last look, and greet them; looks are a second apart, or at once."""
        if time.monotonic() - self._looked < 1 and not at_once:
            return set()
        self._looked = time.monotonic()
        nodes = {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}
        risen = {node for node, when in nodes.items() if self.since.get(node) != when}
        self.since = nodes
        free = {node for node, n in self.doubles.items() if node in nodes and n not in self.nodes()}
        for node in risen | free:
            self.refused.discard(node)
            self.doubles.pop(node, None)
            self.silent.pop(node, None)
            self.behind.discard(node)
            self.post.withdraw(node, HELLO)
        due = {node for node, (_, _, when) in self.silent.items() if node in nodes and self._looked > when}
        for node in risen | free | due:
            times, first, _ = self.silent.get(node, (0, self._looked, 0.0))
            self.silent[node] = (times + 1, first, self._looked + GREETING * 2**times)
            self.hello(node)
        return risen

    def hello(self, node: int) -> None:
        """Greet a node."""
        self.greeted[node] = time.monotonic()
        self.post.send(node, HELLO, RecordDict({"order": stamp_of(self.study)}))

    def ask(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Ask a node something."""
        self.asked[node] = time.monotonic()
        self.post.send(node, kind, content, group)

    def answers(self) -> list[tuple[int, str, Message]]:
        """Return what has come, and greet the nodes that keep an answer back, or may after a quarter of the deadline."""
        found, now = self.post.receive(), time.monotonic()
        for node, kind, _ in found:
            if kind != HELLO and not self.post.greetings(node):
                self.behind.discard(node)  # it spoke unasked
        for node in {n for n, kind in self.post.open.values() if kind != HELLO}:
            if self.post.greetings(node):
                continue
            asked = now - self.asked[node]
            if node in self.behind:
                due = now - max(self.asked[node], self.greeted[node]) > min(30.0, max(3.0, asked / 4))
            else:
                due = self.greeted[node] < self.asked[node] and asked > max(60.0, self.setup.rules.deadline / 4)
            if due:
                self.hello(node)
        return found

    def settle(self) -> None:
        """Find out which nodes keep answers back.

        When a SuperNode has received a message it waits until some answer is ready and sends it, and at no other time. If
        it has computed an answer for a run that was stopped in the meantime, it sends that one after the next question, and
        stays behind from then on: an answer goes out when something else comes. Then one greeting of several stays open.
        """

        def doubtful() -> list[int]:
            there = set(self.nodes().values()) - self.behind - self.silent.keys()
            return [node for node in there if self.post.greetings(node)]

        self.wait(lambda: not doubtful(), max(SETTLING, 2 * self.slowest))
        for node in doubtful():
            self.behind.add(node)
            self.say(
                f"site {self.name(node)} keeps an answer back; greetings bring it out until it starts again.", INFO
            )

    def nodes(self) -> dict[int, int]:
        """Return the node of every client that is there."""
        return {n: node for node, n in self.client_of.items() if node in self.since and node not in self.refused}

    def greet(self, node: int, reply: Message) -> None:
        """Take in a site's first words, or refuse it."""
        if node not in self.silent:
            return  # it has had them already
        self.slowest = max(self.slowest, time.monotonic() - self.silent.pop(node)[1])
        if reply.has_error():
            self.since.pop(node, None)  # as if it had not been there: if it still is, it is greeted again
            self.say(f"site {self.name(node)} did not answer a greeting (Flower's error {reply.error.code}).", INFO)
            return
        try:
            words = self._words(reply, "site")
            n, name = words.get("client"), str(words.get("site", ""))[:64]
            self.names[node] = name
            if not isinstance(n, int) or not 0 <= n < self.setup.sites:
                raise RefusedError(f"it says it is client {n}, but there are {self.setup.sites}, from 0 on.")
            if (other := self.nodes().get(n)) not in (None, node):
                self.doubles[node] = n
                raise RefusedError(f"it says it is client {n}, as {self.name(other or 0)} does already.")
            self.facts[n] = self._facts(words, reply)
        except RefusedError as error:
            self.refuse(node, str(error))
            return
        for old in [k for k, v in self.client_of.items() if v == n and k != node]:
            del self.client_of[old]
        self.client_of[node] = n
        self.say(f"site {name} is there as client {n}.", INFO)

    def refuse(self, node: int, sentence: str) -> None:
        """Leave a node out until it starts again."""
        self.refused.add(node)
        self.say(f"site {self.name(node)} is refused: {sentence}")

    def _words(self, reply: Message, key: str) -> Mapping[str, Any]:
        """Return a reply's stamp if it speaks of this experiment."""
        if reply.has_error():
            raise RefusedError(f"its app did not answer (Flower's error {reply.error.code}).")
        if "trouble" in reply.content:
            kind = str(reply.content["trouble"].get("kind"))
            raise _Spoke(kind, f"{TROUBLES.get(kind, 'it has an unknown trouble')}.")
        words = reply.content.get(key)
        if not isinstance(words, ConfigRecord):
            raise RefusedError("its answer is not one of nestfed's.")
        if kind := mismatch(self.study, words):
            raise _Spoke(kind, f"{TROUBLES[kind]}.")
        return words

    def _facts(self, words: Mapping[str, Any], reply: Message) -> Facts:
        from nestfed.data.encoding import Facts

        sums = reply.content.get("sums")
        try:
            arrays = arrays_of(sums, 10_000_000) if isinstance(sums, ArrayRecord) else {}
            told = Facts(
                int(words["examples"]), int(words["positives"]), tuple(words["shape"]), tuple(words["classes"]),
                tuple(words["features"]), arrays["known"], arrays["total"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("its counts and sums are not as asked.") from error
        sizes = {len(told.known), len(told.total), len(told.features)}
        good = len(sizes) == 1 and np.isfinite(told.total).all() and (told.known >= 0).all()
        if not good or not 0 <= told.positives <= told.examples:
            raise RefusedError("its counts and sums do not fit together.")
        return told

    def wait(self, enough: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Take in greetings until there are enough sites; tell whether there were in time, at most the deadline."""
        end = time.monotonic() + (seconds or self.setup.rules.deadline)
        while not enough():
            if time.monotonic() > end:
                return False
            self.look()
            for node, kind, reply in self.post.receive():
                if kind == HELLO:
                    self.greet(node, reply)
            time.sleep(POLL)
        return True

    # -- before the first round

    def plan(self) -> tuple[Plan, str]:
        """Return what all sites agree on: as it was before, or from what those who are there tell."""
        path = self.setup.out / "plan.safetensors"
        if found := read_plan(path):
            return replace(found[0], clients=self.setup.sites), found[1]
        total, least = self.setup.sites, self.setup.rules.least
        if not self.wait(lambda: len(self.nodes()) >= total) and len(self.nodes()) < least:
            raise NestfedError(
                f"Only {len(self.nodes())} of {total} sites came within {self.setup.rules.deadline:g} s; "
                f"{least} are needed."
            )
        self.settle()
        token = secrets.token_hex(8)
        plan = self._agree()
        write_plan(path, plan, token)
        return plan, token

    def _agree(self) -> Plan:
        from nestfed.data.encoding import Plan, finish, merge

        there = self.nodes()
        if isinstance(self.study, Custom):
            return Plan(self.setup.sites)
        told = {self.name(there[n]): self.facts[n] for n in sorted(there)}
        plan = merge(told, self.setup.sites, self.setup.rules.by_examples)
        if not plan.features:
            return plan
        words, arrays = plan_record(plan)
        for node in there.values():
            self.ask(
                node, "query.spread", RecordDict({"order": stamp_of(self.study), "plan": words, "scaling": arrays})
            )
        squares: dict[int, np.ndarray] = {}
        number = {node: n for n, node in there.items()}
        end = time.monotonic() + self.setup.rules.deadline
        while len(squares) < len(there) and time.monotonic() < end:
            for node, kind, reply in self.answers():
                if kind == "query.spread":
                    try:
                        self._words(reply, "site")
                        values = arrays_of(reply.content["squares"])["squares"]  # type: ignore[arg-type]
                    except (RefusedError, KeyError) as error:
                        raise NestfedError(f"Site {self.name(node)} told no sums of squares: {error}") from error
                    if values.shape != plan.mean.shape or not np.isfinite(values).all() or (values < 0).any():
                        raise NestfedError(f"Site {self.name(node)} told sums of squares that cannot be.")
                    squares[number[node]] = values
                elif kind == HELLO:
                    self.greet(node, reply)
            time.sleep(POLL)
        if len(squares) < len(there):
            raise NestfedError("A site told its sums but then not its sums of squares; start again when it is there.")
        return finish(plan, [squares[n] for n in sorted(squares)], told)

    # -- rounds

    def run(self) -> None:
        """Carry the experiment out, from the last finished round on."""
        from nestfed.experiment.run import claim

        study, setup = self.study, self.setup
        claim(setup.out, study)
        with locked(setup.out, PREDECESSOR):
            self._run(study, setup)

    def _run(self, study: Any, setup: _Setup) -> None:
        if (setup.out / "finished.json").exists():
            self.say(f"{setup.out} holds a finished run; choose another `out` for a new one.", INFO)
            return
        try:
            plan, token = self.plan()
            made, tells = self._made(plan)
            spec = study.run
            self.encoding = Encoding.parse(spec.encode)
            coordinator = Coordinator(
                made.problem, made.algorithm, setup.sites, spec.rounds, spec.q, spec.seed, setup.out,
                f"{study.digest()} {token}", setup.rules, self.encoding, Participation(spec.participation or None, spec.failures),
                spec.output, f"val_{spec.metric or made.metric}" if spec.output == "best" else "",
                reduce=spec.reduce, noise=spec.noise,
            )  # fmt: skip
            for sentence in coordinator.passed_over:
                self.say(sentence)
            if coordinator.promise:
                self.say(coordinator.promise, INFO)
            if coordinator.state.round:
                self.say(f"goes on after round {coordinator.state.round} of {spec.rounds}.", INFO)
            self._rounds(coordinator, made, tells, plan, token)
        except NestfedError as error:
            self.say(f"stopped: {error}")
            raise
        self._finish(coordinator, made)

    def _made(self, plan: Plan) -> tuple[Assembly, bool]:
        """Return the coordinator's objects, and whether the sites evaluate."""
        from nestfed.deploy.site import at_coordinator
        from nestfed.problems.objective import Labelled

        if isinstance(self.study, Custom):
            return self.study.make(), False
        return at_coordinator(self.study, plan), isinstance(self.study.problem, Labelled)

    def _rounds(self, c: Coordinator, made: Assembly, tells: bool, plan: Plan, token: str) -> None:
        every = self.study.run.every
        while True:
            due = c.state.round % every == 0 or c.over
            began = time.perf_counter()
            asked = [] if c.over else c.ask()
            answers, tallies, sent = self._ask(c, asked, due and tells, plan, token)
            if due:
                c.judge(self._metrics(c, made, tells, tallies))
                self._tell(c)
            if c.over:
                return
            c.average(answers, sent, began)
            self._count(c)

    def _ask(
        self, c: Coordinator, asked: list[int], due: bool, plan: Plan, token: str
    ) -> tuple[dict[int, Answer], dict[int, Mapping[str, np.ndarray]], int]:
        """Ask until a round's worth of good answers is there; return them, the tallies, and how many were asked."""
        rules = self.setup.rules
        answers: dict[int, Answer] = {}
        tallies: dict[int, Mapping[str, np.ndarray]] = {}
        sent = 0
        if not asked and not due:
            return answers, tallies, sent
        least = min(rules.least, len(asked)) if asked else 1
        for attempt in range(rules.attempts):
            wanted = [n for n in asked if n not in answers]
            audience = [n for n in range(self.setup.sites) if n not in asked and n not in tallies] if due else []
            need = least - len(answers) if asked else 1
            self.look(at_once=True)
            self.wait(lambda wanted=wanted or audience, need=need: len(self.nodes().keys() & set(wanted)) >= need)  # type: ignore[misc]
            self.settle()
            sent += self._collect(c, wanted, audience, due, plan, token, answers, tallies)
            if len(answers if asked else tallies) >= least:
                return answers, tallies, sent
            self.say(
                f"round {c.state.round + 1}: {len(answers)} of {len(asked)} sites answered well in time, {least} are "
                f"needed (attempt {attempt + 1} of {rules.attempts})."
            )
        if not asked:
            return answers, tallies, sent  # only a metric is missing
        raise NestfedError(
            f"Round {c.state.round + 1} had too few answers {rules.attempts} times; the same command goes on from "
            f"round {c.state.round}."
        )

    def _collect(
        self, c: Coordinator, wanted: list[int], audience: list[int], due: bool, plan: Plan, token: str,
        answers: dict[int, Answer], tallies: dict[int, Mapping[str, np.ndarray]],
    ) -> int:  # fmt: skip
        """Ask once, and take in what comes before the deadline; return how many were asked to train."""
        end = time.monotonic() + self.setup.rules.deadline
        open_: set[int] = set()
        trained = 0
        shared = broadcast_record(self.encoding, c.state.shared)

        def put(n: int) -> None:
            nonlocal trained
            node = self.nodes().get(n)
            if node is None:
                return
            kind = "train" if n in wanted else "evaluate"
            words = {**asdict(c.order(n)), "token": token, "evaluate": due}
            content = RecordDict({"order": stamp_of(self.study, **words), "shared": shared})
            if node not in self.planned:
                content["plan"], content["scaling"] = plan_record(plan)
            self.ask(node, kind, content, str(c.state.round + 1))
            open_.add(n)
            trained += kind == "train"

        self.look(at_once=True)
        for n in (*wanted, *audience):
            put(n)
        while open_ and time.monotonic() < end:
            # A site that came up again has forgotten the question.
            again = {self.client_of[node] for node in self.look() if node in self.client_of} & open_
            for n in again:
                self.say(f"site {self.name(self.nodes().get(n, 0))} came back; it is asked again.", INFO)
                put(n)
            for node, kind, reply in self.answers():
                if kind == HELLO:
                    first = node in self.silent
                    self.greet(node, reply)
                    n = self.client_of.get(node, -1)
                    if first and node not in self.refused and n in {*wanted, *audience} - open_ - answers.keys():
                        if self.post.greetings(node):
                            self.behind.add(node)  # or it was only slow, which its answer will show
                        put(n)
                    continue
                n = self.client_of.get(node, -1)
                open_.discard(n)
                try:
                    self._take(c, n, node, reply, kind == "train", due, answers, tallies)
                except _Spoke as spoke:
                    if self._mend(c, n, node, spoke):
                        put(n)
                except RefusedError as error:
                    self.say(f"round {c.state.round + 1}: the answer of site {self.name(node)} is dropped: {error}")
            time.sleep(POLL)
        for n in sorted(open_):
            node = self.nodes().get(n, 0)
            self.say(f"round {c.state.round + 1}: site {self.name(node)} did not answer in time.")
        self.post.withdraw(kind="train")  # a late answer finds nobody who waits for it
        self.post.withdraw(kind="evaluate")
        return trained

    def _mend(self, c: Coordinator, n: int, node: int, spoke: _Spoke) -> bool:
        """Do something about a site's trouble; tell whether to ask it again."""
        if spoke.kind == "no-plan" and node in self.planned:
            self.planned.discard(node)
            return True
        if spoke.kind == "lost-state" and self.setup.rules.restart_lost and int(c.state.seen[n]) >= 0:
            self.say(f"round {c.state.round + 1}: site {self.name(node)} lost its private fields and starts anew.")
            c.state.seen[n] = -1
            return True
        if spoke.kind in ("another-experiment", "another-version"):
            self.refuse(node, str(spoke))
        else:
            self.say(f"round {c.state.round + 1}: site {self.name(node)} did not take part: {spoke}")
        return False

    def _take(
        self, c: Coordinator, n: int, node: int, reply: Message, training: bool, due: bool,
        answers: dict[int, Answer], tallies: dict[int, Mapping[str, np.ndarray]],
    ) -> None:  # fmt: skip
        """Check an answer to the last number before anything of it is used."""
        from nestfed.deploy.site import refuse_tally

        words = self._words(reply, "answer")
        if words.get("client") != n:
            raise RefusedError(f"it answered for client {words.get('client')}.")
        if words.get("round") != c.state.round:
            raise RefusedError(f"it answered round {_plus_one(words.get('round'))} instead of {c.state.round + 1}.")
        extra = set(reply.content) - {"answer", "fields", "report", "tally"}
        if extra or ("fields" in reply.content) != training:
            raise RefusedError("it sent records that nobody asked for, or not those asked for.")
        counted: Mapping[str, np.ndarray] = {}
        tally = reply.content.get("tally")
        if isinstance(tally, ArrayRecord) and due:
            counted = arrays_of(tally, MOST_TALLY)
            if sentence := refuse_tally(counted):
                raise RefusedError(sentence)
        if training:
            fields, report = reply.content.get("fields"), reply.content.get("report")
            if not isinstance(fields, ArrayRecord) or not isinstance(report, MetricRecord):
                raise RefusedError("its fields or its report are missing.")
            # numpy's header is at most some hundred bytes for every array, of which int8 has two.
            most = sum(v.numel() * v.element_size() + 10_000 for v in c.state.shared.values()) * 2
            numbers = [v for k in ("loss", "moved", "examples") if isinstance(v := report.get(k), int | float)]
            if len(numbers) != 3 or len(report) != 3 or not isinstance(numbers[2], int):
                raise RefusedError("its report is not as asked.")
            loss, moved, examples = numbers
            answer = Answer(c.state.round, tensors_of(fields, most), float(loss), float(moved), int(examples))
            answers[n] = c.believe(answer)
        if counted:
            tallies[n] = counted
        self.planned.add(node)
        if self.setup.rules.by_examples:
            c.weights = {k: float(f.examples) for k, f in self.facts.items()}
            if not c.weights[n]:
                raise NestfedError("weights = examples, but this problem's sites count none: set weights = equal.")

    # -- what people see

    def _metrics(
        self, c: Coordinator, made: Assembly, tells: bool, tallies: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[str, float]:
        from nestfed.deploy.site import pool

        if tells:
            return pool([tallies[n] for n in sorted(tallies)])
        with torch.no_grad():
            found = made.evaluate(made.problem.bind(c.state.shared[c.algorithm.point]))
        return {k: float(v) for k, v in found.items()}

    def _tell(self, c: Coordinator) -> None:
        end = c.history[-1]
        shown = ({} if end["loss"] is None else {"loss": end["loss"]}) | metrics_of(end)
        self.say(f"round {c.state.round} of {c.rounds}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown.items()), INFO)

    def _count(self, c: Coordinator) -> None:
        """Note the bytes of the messages themselves beside the record's count of the fields in them."""
        line = {"round": c.state.round, "sent": self.post.sent, "received": self.post.got}
        with (self.setup.out / "wire.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _finish(self, c: Coordinator, made: Assembly) -> None:
        from safetensors.torch import save

        x = c.outcome()
        model = made.problem.module(x)
        tensors = model.state_dict() if hasattr(model, "state_dict") else {"x": x}
        write_atomically(
            self.setup.out / "model.safetensors", save({k: v.contiguous().clone() for k, v in tensors.items()})
        )
        write_atomically(self.setup.out / "finished.json", json.dumps(c.history[-1]).encode())


class _Spoke(RefusedError):
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _plus_one(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value


def server_app(source: Any) -> ServerApp:
    """Return the coordinator's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        study = study_of(source)
        _Server(study, _Setup.read(study, context.run_config), grid).run()

    return app
