"""Open messages between coordinator and sites."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

HELLO = "query.hello"
DAY = 86400.0


class Mailbox:
    """Open messages. An answer is received once, and only if its message was not withdrawn."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.open: dict[str, tuple[int, str]] = {}
        self.sent = self.got = 0

    def send(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Send a message to a node; it replaces an open message of the same kind, except a hello."""
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

    def open_hellos(self, node: int) -> int:
        """Return the number of hello messages that a node has not answered."""
        return list(self.open.values()).count((node, HELLO))

    def receive(self) -> list[tuple[int, str, Message]]:
        """Return the new answers."""
        found = []
        for reply in self.grid.pull_messages(list(self.open)) if self.open else ():
            asked = self.open.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                self.got += _weight(reply)
                found.append((*asked, reply))
        return found


def _weight(message: Message) -> int:
    """Return the bytes of a message as Flower sends it, without HTTP and TLS."""
    with no_object_id_recompute():  # or every part would be hashed once for each record around it
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
