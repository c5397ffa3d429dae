"""The connected nodes, the sites behind them, and their facts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from nestfed.core import NestfedError, one_of, unknown
from nestfed.deploy.flower.gate import RejectedError, TroubleError
from nestfed.deploy.flower.mailbox import HELLO, Mailbox
from nestfed.deploy.flower.messages import TROUBLES, arrays_of, facts_of, mismatch, stamp_of

if TYPE_CHECKING:
    from nestfed.deploy.site import Facts

LOG = logging.getLogger(__name__)
POLL = 0.2
"""Seconds between two polls for answers."""
HELLO_WAIT = 15.0
"""Seconds before an unanswered hello is repeated; doubled after every attempt."""
FLUSH_WAIT = 30.0
"""Seconds for a site to answer repeated hellos, or twice the time of the slowest first answer if that is longer."""


@dataclass(frozen=True)
class Setup:
    """The app's configuration, [tool.flwr.app.config]."""

    sites: int
    out: Path
    least: int = 1
    """Valid answers that a round needs; otherwise it is repeated."""
    deadline: float = 600.0
    """Seconds after which a round continues without the missing answers."""
    attempts: int = 3
    """Attempts at a round before the run stops."""
    norm_limit: float = 0.0
    """The largest accepted ‖upload − broadcast‖ over all fields; 0 = no limit."""
    restart_lost: bool = False
    """Let a site that lost its private fields start over instead of leaving it out."""

    @classmethod
    def read(cls, study: Any, config: Mapping[str, Any]) -> Setup:
        """Read and check the configuration."""
        defaults = {
            "sites": 0, "min-sites": 0, "deadline": 600.0, "attempts": 3, "norm-limit": 0.0, "lost-state": "refuse",
            "out": "",
        }  # fmt: skip
        if "weights" in config:
            raise NestfedError(
                "weights is now exchange.weights in the experiment file; remove it from the app's configuration."
            )
        if wrong := [k for k in config if k not in defaults]:
            raise unknown("key", wrong[0], defaults, owner="The app's configuration")
        given = {**defaults, **config}
        sites, least = int(given["sites"]), int(given["min-sites"]) or int(given["sites"])
        deadline, attempts = float(given["deadline"]), int(given["attempts"])
        if sites < 1:
            raise NestfedError("The app's configuration must give the number of sites, such as sites = 4.")
        one_of("lost-state", given["lost-state"], ("refuse", "restart"))
        if not 1 <= least <= sites:
            raise NestfedError(f"min-sites must be between 1 and the {sites} sites, not {least}.")
        if not deadline > 0 or attempts < 1 or not float(given["norm-limit"]) >= 0:
            raise NestfedError("deadline and attempts must be above 0 and norm-limit at least 0.")
        out = Path(str(given["out"]) or f"runs/deployed-{study.digest()}")
        restart = given["lost-state"] == "restart"
        return cls(sites, out, least, deadline, attempts, float(given["norm-limit"]), restart)


class Roster:
    """The sites of a federation, as the coordinator sees them."""

    def __init__(self, study: Any, setup: Setup, grid: Grid) -> None:
        self.study, self.setup, self.grid = study, setup, grid
        self.mailbox = Mailbox(grid, setup.deadline)
        self.names: dict[int, str] = {}
        self.client_of: dict[int, int] = {}
        self.facts: dict[int, Facts] = {}
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

    def poll(self, at_once: bool = False) -> set[int]:
        """Return the nodes activated since the last poll and send them a hello; poll once a second, or `at_once`."""
        if time.monotonic() - self._polled < 1 and not at_once:
            return set()
        self._polled = time.monotonic()
        nodes = {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}
        risen = {node for node, when in nodes.items() if self.since.get(node) != when}
        self.since = nodes
        free = {node for node, n in self.doubles.items() if node in nodes and n not in self.nodes()}
        for node in risen | free:
            self.rejected.discard(node)
            self.doubles.pop(node, None)
            self.unanswered.pop(node, None)
            self.behind.discard(node)
            self.mailbox.withdraw(node, HELLO)
        due = {node for node, (_, _, when) in self.unanswered.items() if node in nodes and self._polled > when}
        for node in risen | free | due:
            times, first, _ = self.unanswered.get(node, (0, self._polled, 0.0))
            self.unanswered[node] = (times + 1, first, self._polled + HELLO_WAIT * 2**times)
            self.hello(node)
        return risen

    def hello(self, node: int) -> None:
        """Send a hello to a node."""
        self.hello_sent[node] = time.monotonic()
        self.mailbox.send(node, HELLO, RecordDict({"order": stamp_of(self.study)}))

    def ask(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Send a message to a node."""
        self.asked[node] = time.monotonic()
        self.mailbox.send(node, kind, content, group)

    def answers(self) -> list[tuple[int, str, Message]]:
        """Return the new answers; send a hello to nodes that hold one back, or may do so after a quarter of the deadline."""
        found, now = self.mailbox.receive(), time.monotonic()
        for node, kind, _ in found:
            if kind != HELLO and not self.mailbox.open_hellos(node):
                self.behind.discard(node)  # it answered without a hello
        for node in {n for n, kind in self.mailbox.open.values() if kind != HELLO}:
            if self.mailbox.open_hellos(node):
                continue
            asked = now - self.asked[node]
            if node in self.behind:
                due = now - max(self.asked[node], self.hello_sent[node]) > min(30.0, max(3.0, asked / 4))
            else:
                due = self.hello_sent[node] < self.asked[node] and asked > max(60.0, self.setup.deadline / 4)
            if due:
                self.hello(node)
        return found

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

    def register(self, node: int, reply: Message) -> None:
        """Read a site's answer to a hello, and register or reject the site."""
        if node not in self.unanswered:
            return  # already registered
        self.slowest = max(self.slowest, time.monotonic() - self.unanswered.pop(node)[1])
        if reply.has_error():
            self.since.pop(node, None)  # the next poll sends a hello again if it is still connected
            self.log(f"site {self.name(node)} did not answer a hello (Flower's error {reply.error.code}).", INFO)
            return
        try:
            words = self.words(reply, "site")
            n, name = words.get("client"), str(words.get("site", ""))[:64]
            self.names[node] = name
            if not isinstance(n, int) or not 0 <= n < self.setup.sites:
                raise RejectedError(f"its client number is {n}, but must be 0 to {self.setup.sites - 1}.")
            if (other := self.nodes().get(n)) not in (None, node):
                self.doubles[node] = n
                raise RejectedError(f"its client number {n} is already used by {self.name(other or 0)}.")
            self.facts[n] = self._facts(words, reply)
        except RejectedError as error:
            self.reject(node, str(error))
            return
        for old in [k for k, v in self.client_of.items() if v == n and k != node]:
            del self.client_of[old]
        self.client_of[node] = n
        self.log(f"site {name} connected as client {n}.", INFO)

    def reject(self, node: int, sentence: str) -> None:
        """Leave a node out until it restarts."""
        self.rejected.add(node)
        self.log(f"site {self.name(node)} is rejected: {sentence}")

    def words(self, reply: Message, key: str) -> Mapping[str, Any]:
        """Return a reply's stamp; raise if it is not of this experiment."""
        if reply.has_error():
            raise RejectedError(f"its app did not answer (Flower's error {reply.error.code}).")
        if "trouble" in reply.content:
            kind = str(reply.content["trouble"].get("kind"))
            raise TroubleError(kind, f"{TROUBLES.get(kind, 'it reported an unknown error')}.")
        words = reply.content.get(key)
        if not isinstance(words, ConfigRecord):
            raise RejectedError("its answer is not a nestfed message.")
        if kind := mismatch(self.study, words):
            raise TroubleError(kind, f"{TROUBLES[kind]}.")
        return words

    def _facts(self, words: Mapping[str, Any], reply: Message) -> Facts:
        sums = reply.content.get("sums")
        try:
            return facts_of(words, arrays_of(sums, 10_000_000) if isinstance(sums, ArrayRecord) else {})
        except (KeyError, TypeError, ValueError) as error:
            raise RejectedError("its counts and sums are invalid.") from error

    def wait(self, enough: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Register sites until there are enough; return whether there were before the time (or the deadline) was over."""
        end = time.monotonic() + (seconds or self.setup.deadline)
        while not enough():
            if time.monotonic() > end:
                return False
            self.poll()
            for node, kind, reply in self.mailbox.receive():
                if kind == HELLO:
                    self.register(node, reply)
            time.sleep(POLL)
        return True
