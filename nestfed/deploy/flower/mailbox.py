"""Open messages between coordinator and sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

from nestfed.deploy.flower.private import pull
from nestfed.deploy.wire import MOST_HEADER, Packed, RejectedError, unpack

HELLO, ASK, TRAIN = "query.hello", "query.ask", "train"
"""The kinds of messages, in Flower's terms."""
DAY = 86400.0
RECORD, BLOCK = "nestfed", "message"
"""Where a message's bytes are in Flower's message."""
MOST_AROUND = 4096
"""The bytes that Flower adds to a message."""


def content_of(block: bytes) -> RecordDict:
    """Return the content of Flower's message."""
    return RecordDict({RECORD: ConfigRecord({BLOCK: block})})


def block_of(message: Message, most: int | None = None) -> Packed:
    """Read Flower's message; raise a RejectedError if it is not ours."""
    record = message.content.get(RECORD)
    if set(message.content) != {RECORD} or not isinstance(record, ConfigRecord) or set(record) != {BLOCK}:
        raise RejectedError("its answer is not a message of this version of nestfed.")
    block = record[BLOCK]
    if not isinstance(block, bytes):
        raise RejectedError("its answer is not a message of this version of nestfed.")
    return unpack(block, most)


@dataclass(frozen=True)
class Answer:
    """An answer to a message, or what is wrong with it."""

    node: int
    kind: str
    packed: Packed | None
    error: str = ""
    lost: bool = False
    """Whether Flower says that the site or its app could not answer."""


@dataclass(frozen=True)
class _Open:
    node: int
    kind: str
    most: int


class Mailbox:
    """Open messages. An answer is received once, and only if its message was not withdrawn."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.open: dict[str, _Open] = {}
        self.sent = self.got = 0

    def send(self, node: int, kind: str, block: bytes, group: str = "", most: int = 0) -> None:
        """Send a message to a node; it replaces an open message of the same kind, except a hello.

        most: the largest accepted answer, in bytes, besides its header.
        """
        if kind != HELLO:
            self.withdraw(node, kind)
        message = Message(content_of(block), node, kind, ttl=DAY if kind == HELLO else self.deadline, group_id=group)
        self.sent += _weight(message)
        for identity in self.grid.push_messages([message]):
            if identity:
                self.open[identity] = _Open(node, kind, most + MOST_HEADER)

    def withdraw(self, node: int | None = None, kind: str | None = None) -> None:
        """Stop waiting for answers."""
        self.open = {
            i: o
            for i, o in self.open.items()
            if not ((node is None or o.node == node) and (kind is None or o.kind == kind))
        }

    def open_hellos(self, node: int) -> int:
        """Return the number of hello messages that a node has not answered."""
        return sum(o.node == node and o.kind == HELLO for o in self.open.values())

    def waiting(self) -> set[int]:
        """Return the nodes that have not answered a message other than a hello."""
        return {o.node for o in self.open.values() if o.kind != HELLO}

    def receive(self) -> Iterator[Answer]:
        """Yield the new answers; each is pulled when the one before it has been used, so memory holds one."""
        for identity, reply in pull(self.grid, {i: o.most + MOST_AROUND for i, o in self.open.items()}):
            asked = self.open.pop(identity, None)
            if asked is not None:
                yield self._answer(asked, reply)

    def _answer(self, asked: _Open, reply: Message | RejectedError) -> Answer:
        if isinstance(reply, RejectedError):
            return Answer(asked.node, asked.kind, None, str(reply))
        self.got += _weight(reply)
        if reply.has_error():
            sentence = f"its app did not answer (Flower's error {reply.error.code})."
            return Answer(asked.node, asked.kind, None, sentence, lost=True)
        try:
            return Answer(asked.node, asked.kind, block_of(reply, asked.most))
        except RejectedError as error:
            return Answer(asked.node, asked.kind, None, str(error))


def _weight(message: Message) -> int:
    """Return the bytes of a message as Flower sends it, without HTTP and TLS."""
    with no_object_id_recompute():  # or every part would be hashed once for each record around it
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
