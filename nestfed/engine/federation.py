"""Where clients are: in this process, in worker processes, on several machines, at institutions."""

from __future__ import annotations

from typing import Any, Protocol

from nestfed.core import Fields
from nestfed.data.random import Purpose, Streams
from nestfed.engine.round import Order, Reply


class Federation(Protocol):
    """Runs the clients' halves of rounds, and keeps their private fields."""

    def run(self, order: Order, shared: Fields, evaluate: bool = False) -> Reply:
        """Run a round. `shared` are the server's fields; clients receive them as the exchange rounds them.

        With `evaluate` the clients also evaluate the broadcast, where they are the ones who do.
        """

    def own(self) -> Fields:
        """Return the private fields of this process's clients, one row each; none where they stay at the clients."""

    def private(self) -> Fields:
        """Return the private fields of all clients, for a checkpoint (in the leading process)."""

    def restore(self, private: Fields) -> None:
        """Take private fields from a checkpoint."""

    def agree(self, value: Any) -> Any:
        """Return the leading process's value on all of them."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""

    def close(self) -> None:
        """Release processes and memory."""


class Failing:
    """A federation in which clients that were asked fail to answer with some probability, to study methods under it."""

    def __init__(self, inner: Federation, failures: float, clients: int, seed: int) -> None:
        self.inner, self.failures, self.clients, self.streams = inner, failures, clients, Streams(seed)
        self.own, self.private, self.restore = inner.own, inner.private, inner.restore
        self.agree, self.any, self.close = inner.agree, inner.any, inner.close

    def run(self, order: Order, shared: Fields, evaluate: bool = False) -> Reply:
        """Run the round of those who answer; the others' downloads count."""
        luck = self.streams.at(Purpose.FAILURE, 0, order.round).random(self.clients)
        reply = self.inner.run(order.only([i for i, n in enumerate(order.asked) if luck[n] >= self.failures]), shared)
        reply.downloads = len(order.asked)
        return reply
