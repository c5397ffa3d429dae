"""Who is there: nodes that come and go, the sites behind them, and what each said of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from nestfed.core import NestfedError
from nestfed.deploy.flower.gate import RejectedError, TroubleError
from nestfed.deploy.flower.mailbox import HELLO, Mailbox
from nestfed.deploy.flower.messages import LOG, TROUBLES, arrays_of, facts_of, mismatch, stamp_of

if TYPE_CHECKING:
    from nestfed.deploy.site import Facts

POLL = 0.2
"""Seconds between two looks for answers."""
GREETING = 15.0
"""Seconds for a site to answer a greeting, before it is greeted again; twice as many after every attempt."""
SETTLING = 30.0
"""Seconds for a site that was greeted again to answer the later greetings too, or twice what its first answer took."""


@dataclass(frozen=True)
class Setup:
    """The app's configuration, [tool.flwr.app.config]."""

    sites: int
    out: Path
    least: int = 1
    """Fewer good answers make no round: it is asked again."""
    deadline: float = 600.0
    """Seconds after which a round continues without those who have not answered."""
    attempts: int = 3
    """How often a round is asked before the run stops."""
    norm_limit: float = 0.0
    """The largest ‖upload − broadcast‖ over all fields that is accepted; 0 = any."""
    restart_lost: bool = False
    """Let a site that lost its private fields start anew, instead of leaving it out."""

    @classmethod
    def read(cls, study: Any, config: Mapping[str, Any]) -> Setup:
        """Read the configuration, or reject it by name."""
        defaults = {
            "sites": 0, "min-sites": 0, "deadline": 600.0, "attempts": 3, "norm-limit": 0.0, "lost-state": "refuse",
            "out": "",
        }  # fmt: skip
        if "weights" in config:
            raise NestfedError("weights is now exchange.weights in the experiment file; remove it from the app's.")
        if wrong := [k for k in config if k not in defaults]:
            raise NestfedError(f"The app's configuration has {', '.join(defaults)}, but not {wrong[0]!r}.")
        given = {**defaults, **config}
        sites, least = int(given["sites"]), int(given["min-sites"]) or int(given["sites"])
        deadline, attempts = float(given["deadline"]), int(given["attempts"])
        if sites < 1:
            raise NestfedError("The app's configuration must say how many sites there are: sites = 4.")
        if given["lost-state"] not in ("refuse", "restart"):
            raise NestfedError(f"lost-state must be refuse or restart, not {given['lost-state']!r}.")
        if not 1 <= least <= sites:
            raise NestfedError(f"min-sites must be between 1 and the {sites} sites, not {least}.")
        if not deadline > 0 or attempts < 1 or not float(given["norm-limit"]) >= 0:
            raise NestfedError("deadline and attempts must be above 0 and norm-limit at least 0.")
        out = Path(str(given["out"]) or f"runs/deployed-{study.digest()}")
        restart = given["lost-state"] == "restart"
        return cls(sites, out, least, deadline, attempts, float(given["norm-limit"]), restart)


class Roster:
    """The sites of a federation, as far as the coordinator knows them."""

    def __init__(self, study: Any, setup: Setup, grid: Grid) -> None:
        self.study, self.setup, self.grid = study, setup, grid
        self.mailbox = Mailbox(grid, setup.deadline)
        self.names: dict[int, str] = {}
        self.client_of: dict[int, int] = {}
        self.facts: dict[int, Facts] = {}
        self.refused: set[int] = set()
        self.doubles: dict[int, int] = {}
        """Nodes whose number another node has; without registered keys, that may be the same site before a crash."""
        self.since: dict[int, str] = {}
        """When each node that is there came up."""
        self.silent: dict[int, tuple[int, float, float]] = {}
        """Nodes that have answered no greeting yet: how many they got, when the first, and when the next is due."""
        self.behind: set[int] = set()
        """Nodes that hold answers back: see `flush`."""
        self.asked: dict[int, float] = {}
        """When each node was asked last."""
        self.greeted: dict[int, float] = {}
        """When each node was greeted last."""
        self.slowest = 0.0
        """The longest time that a site took for its first answer."""
        self._looked = 0.0

    def say(self, sentence: str, level: int = WARNING) -> None:
        """Tell the coordinator's people; warnings stay in sites.log."""
        LOG.log(level, "nestfed: %s", sentence)
        if level >= WARNING:
            with (self.setup.out / "sites.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def name(self, node: int) -> str:
        """Return how people call a site."""
        return self.names.get(node) or f"node {node}"

    def poll(self, at_once: bool = False) -> set[int]:
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
            self.mailbox.withdraw(node, HELLO)
        due = {node for node, (_, _, when) in self.silent.items() if node in nodes and self._looked > when}
        for node in risen | free | due:
            times, first, _ = self.silent.get(node, (0, self._looked, 0.0))
            self.silent[node] = (times + 1, first, self._looked + GREETING * 2**times)
            self.hello(node)
        return risen

    def hello(self, node: int) -> None:
        """Greet a node."""
        self.greeted[node] = time.monotonic()
        self.mailbox.send(node, HELLO, RecordDict({"order": stamp_of(self.study)}))

    def ask(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Ask a node something."""
        self.asked[node] = time.monotonic()
        self.mailbox.send(node, kind, content, group)

    def answers(self) -> list[tuple[int, str, Message]]:
        """Return what has come, and greet the nodes that keep an answer back, or may after a quarter of the deadline."""
        found, now = self.mailbox.receive(), time.monotonic()
        for node, kind, _ in found:
            if kind != HELLO and not self.mailbox.greetings(node):
                self.behind.discard(node)  # it spoke unasked
        for node in {n for n, kind in self.mailbox.open.values() if kind != HELLO}:
            if self.mailbox.greetings(node):
                continue
            asked = now - self.asked[node]
            if node in self.behind:
                due = now - max(self.asked[node], self.greeted[node]) > min(30.0, max(3.0, asked / 4))
            else:
                due = self.greeted[node] < self.asked[node] and asked > max(60.0, self.setup.deadline / 4)
            if due:
                self.hello(node)
        return found

    def flush(self) -> None:
        """Find out which nodes keep answers back.

        When a SuperNode has received a message it waits until some answer is ready and sends it, and at no other time. If
        it has computed an answer for a run that was stopped in the meantime, it sends that one after the next question, and
        stays behind from then on: an answer goes out when something else comes. Then one greeting of several stays open.
        """

        def doubtful() -> list[int]:
            there = set(self.nodes().values()) - self.behind - self.silent.keys()
            return [node for node in there if self.mailbox.greetings(node)]

        self.wait(lambda: not doubtful(), max(SETTLING, 2 * self.slowest))
        for node in doubtful():
            self.behind.add(node)
            self.say(
                f"site {self.name(node)} keeps an answer back; greetings bring it out until it starts again.", INFO
            )

    def nodes(self) -> dict[int, int]:
        """Return the node of every client that is there."""
        return {n: node for node, n in self.client_of.items() if node in self.since and node not in self.refused}

    def register(self, node: int, reply: Message) -> None:
        """Take in a site's first words, or refuse it."""
        if node not in self.silent:
            return  # it has had them already
        self.slowest = max(self.slowest, time.monotonic() - self.silent.pop(node)[1])
        if reply.has_error():
            self.since.pop(node, None)  # as if it had not been there: if it still is, it is greeted again
            self.say(f"site {self.name(node)} did not answer a greeting (Flower's error {reply.error.code}).", INFO)
            return
        try:
            words = self.words(reply, "site")
            n, name = words.get("client"), str(words.get("site", ""))[:64]
            self.names[node] = name
            if not isinstance(n, int) or not 0 <= n < self.setup.sites:
                raise RejectedError(f"it says it is client {n}, but there are {self.setup.sites}, from 0 on.")
            if (other := self.nodes().get(n)) not in (None, node):
                self.doubles[node] = n
                raise RejectedError(f"it says it is client {n}, as {self.name(other or 0)} does already.")
            self.facts[n] = self._facts(words, reply)
        except RejectedError as error:
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

    def words(self, reply: Message, key: str) -> Mapping[str, Any]:
        """Return a reply's stamp if it speaks of this experiment."""
        if reply.has_error():
            raise RejectedError(f"its app did not answer (Flower's error {reply.error.code}).")
        if "trouble" in reply.content:
            kind = str(reply.content["trouble"].get("kind"))
            raise TroubleError(kind, f"{TROUBLES.get(kind, 'it has an unknown trouble')}.")
        words = reply.content.get(key)
        if not isinstance(words, ConfigRecord):
            raise RejectedError("its answer is not one of nestfed's.")
        if kind := mismatch(self.study, words):
            raise TroubleError(kind, f"{TROUBLES[kind]}.")
        return words

    def _facts(self, words: Mapping[str, Any], reply: Message) -> Facts:
        sums = reply.content.get("sums")
        try:
            return facts_of(words, arrays_of(sums, 10_000_000) if isinstance(sums, ArrayRecord) else {})
        except (KeyError, TypeError, ValueError) as error:
            raise RejectedError("its counts and sums are not as asked.") from error

    def wait(self, enough: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Take in greetings until there are enough sites; tell whether there were in time, at most the deadline."""
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
