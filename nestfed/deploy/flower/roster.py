"""The connected nodes, and the sites behind them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.serverapp import Grid

from nestfed.core import NestfedError
from nestfed.deploy.audit import FOLDER, Audit
from nestfed.deploy.enrolled import Enrolled, owner
from nestfed.deploy.flower.gate import inside
from nestfed.deploy.flower.mailbox import HELLO, Answer, Mailbox
from nestfed.deploy.flower.messages import TROUBLES, mismatch, stamp_of
from nestfed.deploy.flower.setup import Setup
from nestfed.deploy.pace import Pace
from nestfed.deploy.preflight import as_sentence, meanings
from nestfed.deploy.wire import Packed, RejectedError, pack
from nestfed.queries import PARTS
from nestfed.queries.agreement import too_few

LOG = logging.getLogger(__name__)
SLOWEST_POLL = 1.0
"""The longest wait between two polls for answers, in seconds."""
HELLO_WAIT = 15.0
"""Seconds before an unanswered hello is repeated; doubled after every attempt."""
ANSWER_WAIT = 60.0
"""Seconds to wait for the other sites' first answers before a run stops in which too few sites can take part."""
MOST_OFFSET = 60.0
"""Seconds by which a site's clock may differ; Flower rejects 300."""
FLUSH_WAIT = 30.0
"""Seconds for a site to answer repeated hellos, or twice the time of the slowest first answer if that is longer."""


class TroubleError(RejectedError):
    """A site reports an error of its own."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Roster:
    """The sites of a federation, as the coordinator sees them."""

    def __init__(self, study: Any, setup: Setup, grid: Grid) -> None:
        self.study, self.setup, self.grid = study, setup, grid
        self.mailbox = Mailbox(grid, setup.deadline)
        self.audit = Audit(setup.out / FOLDER, "coordinator")
        self.names: dict[int, str] = {}
        self.enrolled: dict[int, Enrolled] = {}
        """The site behind each node, if the study lists its sites."""
        self.strangers: set[int] = set()
        """Nodes whose key the study does not list; they get no message."""
        self.client_of: dict[int, int] = {}
        self.rows: dict[int, dict[str, int]] = {}
        """The rows of each part that each client declared; 0 = none, or too few to tell."""
        self.withdrawn: set[int] = set()
        """The clients that have withdrawn from the study."""
        self.reasons: dict[int, str] = {}
        """Why each node is left out."""
        self.rejected: set[int] = set()
        self.doubles: dict[int, int] = {}
        """Nodes whose client number another node has; without registered keys, it may be the same site before a crash."""
        self.since: dict[int, str] = {}
        """When each connected node was activated."""
        self.unanswered: dict[int, tuple[int, float, float]] = {}
        """Nodes that have not answered a hello: how many were sent, when the first was, and when the next is due."""
        self.behind: set[int] = set()
        """Nodes that hold back answers: see `flush`."""
        self.asked: dict[int, float] = {}
        """When each node was asked last."""
        self.hello_sent: dict[int, float] = {}
        """When the last hello was sent to each node."""
        self.greeted: dict[int, float] = {}
        """When the first hello was sent to each node since it connected, by the wall clock."""
        self.slowest = 0.0
        """The longest time until a site's first answer."""
        self._polled = 0.0

    def log(self, sentence: str, level: int = WARNING) -> None:
        """Log a message at the coordinator; warnings also go to sites.log."""
        LOG.log(level, "%s", sentence)
        if level >= WARNING:
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Add a line to sites.log."""
        with (self.setup.out / "sites.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def name(self, node: int) -> str:
        """Return the name of a site."""
        return self.names.get(node) or f"node {node}"

    def called(self, n: int) -> str:
        """Return the name of client n's site."""
        return next((self.name(node) for node, client in self.client_of.items() if client == n), f"client {n}")

    def poll(self, at_once: bool = False) -> set[int]:
        """Return the nodes activated since the last poll and send them a hello; poll once a second, or `at_once`."""
        if time.monotonic() - self._polled < 1 and not at_once:
            return set()
        self._polled = time.monotonic()
        nodes = {info.node_id: info.last_activated_at for info in self.grid.get_nodes() if self._may_take_part(info)}
        risen = {node for node, when in nodes.items() if self.since.get(node) != when}
        self.since = nodes
        free = {node for node, n in self.doubles.items() if node in nodes and n not in self.nodes()}
        for node in risen | free:
            self.rejected.discard(node)
            self.doubles.pop(node, None)
            self.unanswered.pop(node, None)
            self.behind.discard(node)
            self.greeted.pop(node, None)
            self.mailbox.withdraw(node, HELLO)
        due = {node for node, (_, _, when) in self.unanswered.items() if node in nodes and self._polled > when}
        for node in risen | free | due:
            times, first, _ = self.unanswered.get(node, (0, self._polled, 0.0))
            self.unanswered[node] = (times + 1, first, self._polled + HELLO_WAIT * 2**times)
            self.hello(node)
        return risen

    def _may_take_part(self, info: Any) -> bool:
        """Return whether a node's key is that of a site of the study; remember whose it is."""
        node, known = info.node_id, self.setup.enrolled
        if not known or node in self.enrolled:
            return True
        if (site := owner(known, info.public_key)) is not None:
            self.enrolled[node], self.names[node] = site, site.name
            return True
        if node not in self.strangers:
            self.strangers.add(node)
            self.log(f"node {node} is left out: its key is not in the list of the study's sites.")
            self.audit.add("left out a key that is not enrolled", node=str(node))
        return False

    def hello(self, node: int) -> None:
        """Send a hello to a node."""
        self.hello_sent[node] = time.monotonic()
        self.greeted.setdefault(node, time.time())
        self.mailbox.send(node, HELLO, pack(stamp_of(self.study), {}))

    def ask(self, node: int, kind: str, block: bytes, group: str, most: int) -> None:
        """Send a message to a node, whose answer has at most so many bytes besides its header."""
        self.asked[node] = time.monotonic()
        self.mailbox.send(node, kind, block, group, most)

    def answers(self) -> Iterator[Answer]:
        """Yield the new answers; send a hello to nodes that hold one back, or may do so after a quarter of the deadline."""
        answered = set()
        for answer in self.mailbox.receive():
            if answer.kind != HELLO:
                answered.add(answer.node)
            yield answer
        now = time.monotonic()
        self.behind -= {node for node in answered if not self.mailbox.open_hellos(node)}  # they needed no hello
        for node in self.mailbox.waiting():
            if self.mailbox.open_hellos(node):
                continue
            asked = now - self.asked[node]
            if node in self.behind:
                due = now - max(self.asked[node], self.hello_sent[node]) > min(30.0, max(3.0, asked / 4))
            else:
                due = self.hello_sent[node] < self.asked[node] and asked > max(60.0, self.setup.deadline / 4)
            if due:
                self.hello(node)

    def flush(self) -> None:
        """Find the nodes that hold back answers.

        A SuperNode sends one answer for each message that it receives, and at no other time. If it still has an answer for
        a stopped run, it sends that one for the next message, and every later answer waits for one more message. Such a
        node leaves one of several hellos unanswered.
        """

        def doubtful() -> list[int]:
            there = set(self.nodes().values()) - self.behind - self.unanswered.keys()
            return [node for node in there if self.mailbox.open_hellos(node)]

        self.wait(lambda: not doubtful(), max(FLUSH_WAIT, 2 * self.slowest))
        for node in doubtful():
            self.behind.add(node)
            self.log(f"site {self.name(node)} holds back an answer; hellos fetch it until the site restarts.", INFO)

    def nodes(self) -> dict[int, int]:
        """Return the node of every connected client."""
        return {n: node for node, n in self.client_of.items() if node in self.since and node not in self.rejected}

    def register(self, answer: Answer) -> None:
        """Read a site's answer to a hello, and register or reject the site."""
        node = answer.node
        if node not in self.unanswered:
            return  # already registered
        self.slowest = max(self.slowest, time.monotonic() - self.unanswered.pop(node)[1])
        if answer.lost:
            self.since.pop(node, None)  # the next poll sends a hello again if it is still connected
            self.log(f"site {self.name(node)} did not answer a hello: {answer.error}", INFO)
            return
        if answer.packed is not None and node not in self.enrolled:
            self.names[node] = str(answer.packed.words.get("site", ""))[:64]
        try:
            words = self.opened(answer).words
            n, name = words.get("client"), self.name(node)
            if type(n) is not int or not 0 <= n < self.setup.sites:
                raise RejectedError(f"its client number is {n}, but must be 0 to {self.setup.sites - 1}.")
            if (site := self.enrolled.get(node)) and (n, words.get("site")) != (site.number, site.name):
                raise RejectedError(
                    f"its node configuration says client={n} and site={str(words.get('site'))[:64]!r}, but its key is that of "
                    f"client={site.number} and site={site.name!r}."
                )
            if (other := self.nodes().get(n)) not in (None, node):
                self.doubles[node] = n
                raise RejectedError(f"its client number {n} is already used by {self.name(other or 0)}.")
            self._hear(node, words)
            self.rows[n] = _rows(words.get("rows"))
        except TroubleError as trouble:
            if trouble.kind == "withdrawn":
                self.withdraw(node)
            else:
                self.reject(node, str(trouble))
            return
        except RejectedError as error:
            self.reject(node, str(error))
            return
        for old in [k for k, v in self.client_of.items() if v == n and k != node]:
            del self.client_of[old]
        self.client_of[node] = n
        self.withdrawn.discard(n)
        self.log(f"site {name} connected as client {n}.", INFO)
        self.audit.add("site registered", site=name, client=n, key=site.key if site else "not enrolled")
        if words.get("torch") != torch.__version__:
            self.note(
                f"site {name} computes with torch {str(words.get('torch'))[:20]}, the coordinator with {torch.__version__}."
            )

    def _hear(self, node: int, words: Mapping[str, Any]) -> None:
        """Read the problems that a site reports, and its clock; raise if it cannot take part."""
        with inside():
            stops, minor = meanings(words.get("problems"))
            off = _offset(words.get("clock"), self.greeted[node], time.time())
        if abs(off) > MOST_OFFSET:
            minor.append(f"its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the coordinator's")
        if stops:
            raise RejectedError(as_sentence([*stops, *minor]))
        if minor:
            self.log(f"site {self.name(node)}: {as_sentence(minor)}")

    def reject(self, node: int, sentence: str) -> None:
        """Leave a node out until it restarts."""
        self.rejected.add(node)
        self.reasons[node] = sentence
        self.audit.add("site rejected", site=self.name(node), reason=sentence)
        self.log(f"site {self.name(node)} is rejected: {sentence}")

    def withdraw(self, node: int) -> None:
        """Leave out a site that has withdrawn, and stop if too few sites are left."""
        self.reject(node, f"{TROUBLES['withdrawn']}.")
        self.audit.add("site withdrew", site=self.name(node))
        if (n := self.client_of.get(node)) is not None:
            self.withdrawn.add(n)
        left = self.setup.sites - len(self.withdrawn)
        if left < self.setup.least:
            raise NestfedError(f"{left} of {self.setup.sites} sites are left, but {self.setup.least} are needed.")

    def opened(self, answer: Answer) -> Packed:
        """Return an answer whose header can be trusted to be of this experiment; raise otherwise."""
        if answer.packed is None:
            raise RejectedError(answer.error)
        words = answer.packed.words
        if "trouble" in words:
            kind = str(words["trouble"])
            raise TroubleError(kind, f"{TROUBLES.get(kind, 'it reported an unknown error')}.")
        if kind := mismatch(self.study, words):
            raise TroubleError(kind, f"{TROUBLES[kind]}.")
        return answer.packed

    def wait(self, enough: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Register sites until there are enough; return whether there were before the time (or the deadline) was over."""
        end, pace = time.monotonic() + (seconds or self.setup.deadline), Pace(slowest=SLOWEST_POLL)
        while not enough():
            if time.monotonic() > end:
                return False
            self.poll()
            if not self._awaited():
                self.check_hope()
            for answer in self.mailbox.receive():
                if answer.kind == HELLO:
                    self.register(answer)
                    pace.restart()
            pace.sleep()
        return True

    def gather(self) -> None:
        """Register sites until all are there, the deadline is over, or too few of those that are there can take part."""
        self.wait(lambda: len(self.nodes()) >= self.setup.sites or (self.hopeless() and not self._awaited()))

    def out(self) -> dict[str, str]:
        """Return the connected sites that cannot take part, with the reasons."""
        found: dict[str, str] = {}
        for node in self._out():
            name = self.name(node)
            found[name] = f"{found[name]} {self.reasons[node]}" if name in found else self.reasons[node]
        return found

    def hopeless(self) -> bool:
        """Return whether so many connected sites cannot take part that too few are left; waiting would not help."""
        return self.setup.sites - len(self._out()) < self.setup.least

    def check_hope(self) -> None:
        """Stop if it is hopeless."""
        if self.hopeless():
            raise too_few(self.setup.sites - len(self._out()), self.setup.sites, self.setup.least, self.out())

    def _out(self) -> list[int]:
        return [node for node in self.rejected if node in self.since and node not in self.doubles]

    def _awaited(self) -> bool:
        """Return whether a connected site has not said yet whether it can take part, and may still do so."""
        now = time.monotonic()
        return any(now - first < ANSWER_WAIT for node, (_, first, _) in self.unanswered.items() if node in self.since)


def _offset(clock: Any, sent: float, received: float) -> float:
    """Return how far a site's clock is at least from ours, if it was read between these times."""
    if type(clock) not in (int, float) or not math.isfinite(clock):
        raise ValueError("its clock is invalid")
    return min(clock - sent, 0.0) + max(clock - received, 0.0)


def _rows(found: Any) -> dict[str, int]:
    """Return the rows of each part that a site declares; raise if they are invalid."""
    good = isinstance(found, dict) and set(found) == set(PARTS)
    if not good or not all(type(n) is int and 0 <= n < 2**53 for n in found.values()):
        raise RejectedError("its numbers of rows are invalid.")
    return {part: found[part] for part in PARTS}
