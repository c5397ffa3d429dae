"""A federation of institutions: rounds and questions over Flower, with deadlines, retries and a minimum of answers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import INFO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

import numpy as np

from nestfed.core import DivergedError, Fields, NestfedError
from nestfed.deploy.flower.gate import FIELDS, GATHERED, Gate, answer_slots, answers_of, inside, most_bytes
from nestfed.deploy.flower.mailbox import ASK, HELLO, TRAIN, Answer
from nestfed.deploy.flower.messages import PARAMETERS, PLAN, TABLES, broadcast, questions_packed, stamp_of
from nestfed.deploy.flower.roster import SLOWEST_POLL, Roster, TroubleError
from nestfed.deploy.pace import Pace
from nestfed.deploy.wire import Packed, RejectedError, numbers, pack, tensors, unpack
from nestfed.engine.options import Exchange
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.round import Fold, Order, Reply, Upload, empty_reply
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import Training
from nestfed.queries import TRAINING, VALIDATION, Answers, Arrays, Query, Question
from nestfed.queries.agreement import Agreement


class InOrder:
    """Fold uploads in the order of the clients, so that sums equal those of a simulation.

    An upload that waits for those of clients before it waits on disk, so memory does not grow with the number of sites.
    """

    def __init__(self, fold: Fold, asked: Sequence[int], folder: Path) -> None:
        self.fold, self.queue, self.folder = fold, deque(asked), folder
        self.waiting: dict[int, IO[bytes]] = {}
        """Unnamed files, which disappear with this process."""
        self.done: set[int] = set()
        self.first: Upload | None = None
        """The first upload of the round."""

    def add(self, n: int, upload: Upload) -> None:
        """Add the upload of client n."""
        self.first = self.first or upload
        self.done.add(n)
        if self.queue[0] != n:
            self.waiting[n] = _saved(upload, self.folder)
            return
        self.queue.popleft()
        self.fold.add(upload)
        while self.queue and self.queue[0] in self.waiting:
            self._fold_saved(self.queue.popleft())

    def finish(self) -> None:
        """Fold the uploads that were waiting for clients that did not answer."""
        for n in sorted(self.waiting):
            self._fold_saved(n)

    def _fold_saved(self, n: int) -> None:
        with self.waiting.pop(n) as file:
            file.seek(0)
            self.fold.add(_loaded(file.read()))


def _saved(upload: Upload, folder: Path) -> IO[bytes]:
    words = {"ns": upload.ns, "places": upload.places, "examples": upload.examples}
    arrays = numbers(upload.fields, FIELDS) | numbers(upload.gathered, GATHERED)
    file = TemporaryFile(dir=folder)  # noqa: SIM115 - it stays open until its upload is folded
    file.write(pack(words, arrays | numbers({"loss": upload.loss, "moved": upload.moved})))
    return file


def _loaded(block: bytes) -> Upload:
    found = unpack(block)
    words, arrays = found.words, found.arrays()
    rest = tensors({k: arrays[k] for k in ("loss", "moved")})
    upload = Upload(
        words["ns"], words["places"], tensors(arrays, FIELDS), rest["loss"], rest["moved"], words["examples"]
    )
    upload.gathered = tensors(arrays, GATHERED)
    return upload


class Job(Protocol):
    """Work for several sites: what to send to each of them, and what to do with its answer."""

    label: str
    """How messages to people begin."""
    group: str

    @property
    def required(self) -> Sequence[int]:
        """The clients whose answers count."""

    @property
    def welcome(self) -> Sequence[int]:
        """Other clients, whose answers are used if they come in time."""

    def done(self, n: int) -> bool:
        """Return whether client n needs no further message."""

    def count(self) -> int:
        """Return the number of answers that count."""

    def send(self, n: int, node: int) -> None:
        """Send client n its message."""

    def take(self, n: int, packed: Packed) -> None:
        """Check all of an answer, then use it."""

    def trouble(self, n: int, error: TroubleError) -> bool:
        """Handle a site's own error; return whether to ask it again."""


class Flower:
    """Runs rounds at sites and asks them questions. Private fields stay there; the order gives the version to start from."""

    def __init__(self, roster: Roster, exchange: Exchange) -> None:
        self.roster, self.exchange = roster, exchange
        self.asked = 0
        """How many times questions were asked besides rounds."""
        self.training: Training | None = None
        """What the sites train, if the study has several trainings."""
        self.weight: Callable[[int], float] | None = None
        if self.exchange.weights == "examples":
            self.weight = lambda n: float(self.rows(n)[TRAINING])

    def agreed(self, plan: Agreement, token: str) -> None:
        """Set what the sites have agreed on, and the name of the run."""
        self.plan, self.token = plan, token
        self.planned: set[int] = set()
        """Nodes that have the plan."""

    def prepare(self, method: AnyAlgorithm, exchange: Exchange, training: Training | None = None) -> None:
        """Set what the next rounds train."""
        self.method, self.exchange, self.training = method, exchange, training

    @property
    def several(self) -> bool:
        """Whether the study has several trainings, whose last ones use the validation rows too."""
        study = self.roster.study
        return isinstance(study, Experiment) and study.is_study

    def rows(self, n: int, final: bool | None = None) -> Mapping[str, int]:
        """Return the rows of each part that site n declared, by the division that a question or a training uses."""
        declared = self.roster.rows[n]
        if final is None:
            final = self.training is not None and self.training.final
        return {**declared, TRAINING: declared[TRAINING] + declared[VALIDATION], VALIDATION: 0} if final else declared

    # -- the methods of a federation

    def run(self, order: Order, shared: Fields) -> Reply:
        """Ask until there are enough valid answers for a round, or raise."""
        method = self.method
        reply = empty_reply(shared, method.point, order, self.exchange)
        fold = Fold(self.exchange, shared, reply, self.weight)
        axes = {name: order.tables[table].dim() - 1 for name, table in method.gathered.items()}
        gate = Gate(order, shared, method.point, self.exchange, self.roster.setup.norm_limit, fold, axes)
        uploads = InOrder(fold, order.asked, self.roster.setup.out)
        job = Round(self, order, gate, uploads, reply, broadcast(self.exchange.encoding, shared))
        if order.asked or order.questions:
            self.fetch(job, min(self.roster.setup.least, len(order.asked)) if order.asked else 1)
            if order.asked and not self._enough(job):
                raise NestfedError(
                    f"Round {order.number} had too few answers {self.roster.setup.attempts} times; run again to resume after "
                    f"round {order.round}."
                )
        uploads.finish()
        self._note(order, uploads.done | job.answers.keys())
        reply.answers = {n: job.answers[n] for n in sorted(job.answers)}
        self._count_bytes(order.number)
        return reply

    def ask(self, query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        """Ask all connected sites a question; return the replies by client."""
        one = Question(query, part, arguments)
        return {n: found[one.key] for n, found in self.ask_all([one]).items() if one.key in found}

    def ask_all(
        self, questions: Sequence[Question], *, final: bool | None = None, x: np.ndarray | None = None
    ) -> dict[int, Answers]:
        """Ask all connected sites several questions in one message.

        - `final`: ask about model inputs, in the division of rows of a study's last trainings or of its trials; None = about
          the tables themselves, before the sites have agreed.
        - `x`: the network's parameters, for questions about scores.
        """
        self.asked += 1
        self.roster.poll(at_once=True)
        there = sorted(self.roster.nodes())
        if final is not None:  # sites that have agreed may still be on their way back, after the coordinator's restart
            there = [n for n in range(self.roster.setup.sites) if n not in self.roster.withdrawn]
        job = Asking(self, tuple(questions), f"question-{self.asked}", there, final, x)
        self.fetch(job, min(self.roster.setup.least, len(job.required)))
        self._count_bytes(0)
        asked, done = [one.key for one in questions], sorted(map(self.roster.called, job.answers))
        self.roster.audit.add("questions asked", questions=asked, answered=done)
        return {n: job.answers[n] for n in sorted(job.answers)}

    def with_plan(self, node: int, words: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Add the plan to a message, for a node that may lack it."""
        words["token"] = self.token
        if node not in self.planned:
            words["plan"], scaling = self.plan.packed()
            arrays |= {f"{PLAN}{k}": v for k, v in scaling.items()}

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

    # -- collecting answers

    def _enough(self, job: Job) -> bool:
        return job.count() >= min(self.roster.setup.least, len(job.required))

    def fetch(self, job: Job, least: int) -> None:
        """Ask, again if there are fewer than `least` answers, as often as the setup allows."""
        setup, roster = self.roster.setup, self.roster
        for attempt in range(setup.attempts):
            wanted = [n for n in job.required if not job.done(n)]
            others = [n for n in job.welcome if not job.done(n)]
            need = min(least - job.count(), len(wanted)) or 1
            roster.poll(at_once=True)
            if wanted or others:
                there = partial(_there, roster, {*wanted} or {*others}, need)
                roster.wait(there)
                roster.flush()
                self._collect(job, wanted, others)
            if job.count() >= least or not any(not job.done(n) for n in (*job.required, *job.welcome)):
                return
            roster.log(
                f"{job.label}: {job.count()} of {len(job.required)} sites sent valid answers in time, {least} are needed "
                f"(attempt {attempt + 1} of {setup.attempts})."
            )

    def _collect(self, job: Job, wanted: Sequence[int], others: Sequence[int]) -> None:
        """Ask once, and collect answers until the deadline."""
        roster = self.roster
        end, pace = time.monotonic() + roster.setup.deadline, Pace(slowest=SLOWEST_POLL)
        open_: set[int] = set()

        def put(n: int) -> None:
            node = roster.nodes().get(n)
            if node is not None:
                job.send(n, node)
                open_.add(n)

        roster.poll(at_once=True)
        for n in (*wanted, *others):
            put(n)
        while open_ and time.monotonic() < end:
            # A restarted site has lost the message.
            for n in {roster.client_of[node] for node in roster.poll() if node in roster.client_of} & open_:
                roster.log(f"site {roster.called(n)} restarted and is asked again.", INFO)
                put(n)
            for answer in roster.answers():
                pace.restart()
                if answer.kind == HELLO:
                    missing = {n for n in (*wanted, *others) if n not in open_ and not job.done(n)}
                    if self._joined(answer, missing):
                        put(roster.client_of[answer.node])
                    continue
                n = roster.client_of.get(answer.node, -1)
                open_.discard(n)
                if self._read(job, n, answer):
                    put(n)
            pace.sleep()
        for n in sorted(open_):
            roster.log(f"{job.label}: site {roster.called(n)} did not answer in time.")
        roster.mailbox.withdraw(kind=TRAIN)  # ignore late answers
        roster.mailbox.withdraw(kind=ASK)

    def _read(self, job: Job, n: int, answer: Answer) -> bool:
        """Let the gate check an answer and the job use it; return whether to ask again."""
        roster, name = self.roster, self.roster.name(answer.node)
        try:
            packed = roster.opened(answer)
            if packed.words.get("client") != n:
                raise RejectedError(f"it answered for client {packed.words.get('client')!r}."[:200])
            if packed.words.get("group") != job.group:
                raise RejectedError(f"it answered {packed.words.get('group')!r} instead of {job.group!r}."[:200])
            with inside():
                job.take(n, packed)
        except TroubleError as trouble:
            return self._help(job, n, answer.node, trouble)
        except RejectedError as error:
            roster.log(f"{job.label}: the answer of site {name} is rejected: {error}")
            return False
        return False

    def _help(self, job: Job, n: int, node: int, trouble: TroubleError) -> bool:
        """Handle a site's error; return whether to ask it again."""
        roster, name = self.roster, self.roster.name(node)
        if trouble.kind == "no-plan" and node in self.planned:
            self.planned.discard(node)
            return True
        if job.trouble(n, trouble):
            return True
        if trouble.kind == "withdrawn":
            roster.withdraw(node)
        elif trouble.kind in ("another-experiment", "another-version"):
            roster.reject(node, str(trouble))
        elif trouble.kind != "diverged":
            roster.log(f"{job.label}: site {name} did not take part: {trouble}")
        return False

    def _joined(self, answer: Answer, missing: set[int]) -> bool:
        """Register a site; return whether to ask it now."""
        roster, node = self.roster, answer.node
        first = node in roster.unanswered
        roster.register(answer)
        if not first or node in roster.rejected or roster.client_of.get(node, -1) not in missing:
            return False
        if roster.mailbox.open_hellos(node):
            roster.behind.add(node)  # or it was only slow: its answer clears this
        return True

    def _note(self, order: Order, done: Iterable[int]) -> None:
        """Add a round to the audit log."""
        what = "round finished" if order.asked else "model judged"
        training = {"training": self.training.name} if self.training else {}
        self.roster.audit.add(what, **training, round=order.number, sites=sorted(map(self.roster.called, done)))

    def _count_bytes(self, number: int) -> None:
        """Log the size of the messages; the record counts only the fields in them."""
        mailbox = self.roster.mailbox
        line = {"round": number, "sent": mailbox.sent, "received": mailbox.got}
        with (self.roster.setup.out / "wire.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _there(roster: Roster, wanted: set[int], need: int) -> bool:
    return len(roster.nodes().keys() & wanted) >= need


@dataclass
class Asking:
    """Questions to all connected sites, outside rounds."""

    flower: Flower
    questions: tuple[Question, ...]
    group: str
    required: Sequence[int]
    final: bool | None = None
    x: np.ndarray | None = None
    answers: dict[int, Answers] = field(default_factory=dict)
    welcome: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.label = f"questions {', '.join(one.key for one in self.questions)}"
        self.failed: set[int] = set()
        words, self.arrays = questions_packed(self.questions)
        if self.x is not None:
            self.arrays[PARAMETERS] = np.asarray(self.x, np.float64)
        self.words = stamp_of(self.flower.roster.study, group=self.group, questions=words)

    def done(self, n: int) -> bool:
        """Return whether client n has answered."""
        return n in self.answers or n in self.failed

    def count(self) -> int:
        """Return the number of answers."""
        return len(self.answers)

    def send(self, n: int, node: int) -> None:
        """Send client n the questions."""
        words, arrays = dict(self.words), dict(self.arrays)
        if self.final is not None:
            words["final"] = self.final
            self.flower.with_plan(node, words, arrays)
        self.flower.roster.ask(node, ASK, pack(words, arrays), self.group, most_bytes(self.questions))

    def take(self, n: int, packed: Packed) -> None:
        """Check an answer and keep it; a site whose answer is invalid is not asked again."""
        self.failed.add(n)
        arrays = packed.arrays(answer_slots(packed, self.questions))
        rows = self.flower.rows(n, self.flower.several if self.final is None else self.final)
        self.answers[n] = answers_of(packed, arrays, self.questions, rows)
        if self.final is not None:
            self.flower.planned.add(self.flower.roster.nodes().get(n, 0))

    def trouble(self, n: int, error: TroubleError) -> bool:
        """Do not ask a site again that failed."""
        self.failed.add(n)
        return False


@dataclass
class Round:
    """A round in progress."""

    flower: Flower
    order: Order
    gate: Gate
    uploads: InOrder
    reply: Reply
    shared: Arrays
    """The broadcast as it is sent."""
    answers: dict[int, Answers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.label = f"round {self.order.number}"
        self.group = str(self.order.number)
        self.seen = dict(zip(self.order.asked, self.order.seen))
        """The version of its private fields from which each client starts."""
        self.training = set(self.order.asked)
        self.words, self.asked_arrays = questions_packed(self.order.questions)

    @property
    def required(self) -> Sequence[int]:
        """The clients that train."""
        return self.order.asked

    @property
    def welcome(self) -> Sequence[int]:
        """The other clients, if they evaluate the broadcast."""
        everybody = range(self.flower.roster.setup.sites) if self.order.questions else ()
        return [n for n in everybody if n not in self.training]

    def done(self, n: int) -> bool:
        """Return whether client n has answered, or cannot."""
        return n in self.uploads.done or n in self.reply.dropped or (n not in self.training and n in self.answers)

    def count(self) -> int:
        """Return the number of uploads, or of answers if nobody trains."""
        return len(self.uploads.done) if self.order.asked else len(self.answers)

    def send(self, n: int, node: int) -> None:
        """Send client n the order, with the plan if it may lack it."""
        flower, order, train = self.flower, self.order, n in self.training
        words = stamp_of(
            flower.roster.study, group=self.group, round=order.round, t=order.span.start,
            seen=self.seen.get(n, -1), tap=order.tap if order.tapped else -1, questions=self.words, train=train,
        )  # fmt: skip
        if flower.training is not None:
            words["training"] = flower.training.to_json()
        arrays = {**self.shared, **self.asked_arrays}
        if train and order.tables:
            arrays |= numbers(order.tables, TABLES)
        flower.with_plan(node, words, arrays)
        most = most_bytes(order.questions) + (self.gate.most_bytes() if train else 0)
        flower.roster.ask(node, TRAIN if train else ASK, pack(words, arrays), self.group, most)
        self.reply.downloads += train

    def take(self, n: int, packed: Packed) -> None:
        """Check all of an answer, then use it."""
        flower, questions = self.flower, self.order.questions
        train = n in self.training
        slots = answer_slots(packed, questions) | (self.gate.slots() if train else {})
        arrays = packed.arrays(slots)
        answers = answers_of(packed, arrays, questions, flower.rows(n))
        if train:
            if flower.weight is not None and not flower.weight(n):
                raise RejectedError("exchange.weights = 'examples', but it counts no examples; set weights to 'equal'.")
            self.uploads.add(n, self.gate.checked(n, packed, arrays, self.uploads.first))
        if answers:
            self.answers[n] = answers
        flower.planned.add(flower.roster.nodes().get(n, 0))

    def trouble(self, n: int, error: TroubleError) -> bool:
        """Handle a site's own error; return whether to ask it again."""
        roster = self.flower.roster
        name = roster.called(n)
        if error.kind == "lost-state" and roster.setup.restart_lost and self.seen.get(n, -1) >= 0:
            roster.log(f"{self.label}: site {name} lost its private fields and starts over.")
            self.seen[n] = -1
            return True
        if error.kind == "diverged":
            sentence = f"The numbers of site {name} became infinite or NaN in round {self.order.number}; see its log."
            if self.flower.exchange.on_nan == "stop":
                raise DivergedError(sentence)
            self.reply.dropped[n] = sentence
        return False
