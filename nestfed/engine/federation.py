"""The interface of a federation: clients in this process, in workers, on several machines, or at institutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from nestfed.core import Fields
from nestfed.data.random import Purpose, Streams
from nestfed.engine.round import Order, Reply
from nestfed.queries import Rows, answered, at_hand


class Federation(Protocol):
    """Runs the clients' half of each round and keeps their private fields."""

    def run(self, order: Order, shared: Fields) -> Reply:
        """Run a round. `shared` are the server's fields; the exchange may round them for the clients."""

    def own(self) -> Fields:
        """Return the private fields of this process's clients, one row each; empty if they stay at the clients."""

    def private(self) -> Fields:
        """Return the private fields of all clients, for a checkpoint (in the leading process)."""

    def restore(self, private: Fields) -> None:
        """Load private fields from a checkpoint."""

    def agree(self, value: Any) -> Any:
        """Return the leading process's value in every process."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""

    def close(self) -> None:
        """Release processes and memory."""


class Answering:
    """A federation at hand whose clients also answer queries: whenever asked, and in a round at the broadcast."""

    def __init__(
        self, inner: Federation, sites: Sequence[Mapping[str, Rows]], solution: Callable[[Fields], Tensor],
        min_cell: int = 0,
    ) -> None:  # fmt: skip
        """Take for each site its rows by part, and how shared fields give the parameters of a model."""
        self.inner, self.sites, self.solution, self.min_cell = inner, sites, solution, min_cell
        self.ask = at_hand(sites, min_cell)
        self.own, self.private, self.restore = inner.own, inner.private, inner.restore
        self.agree, self.any, self.close = inner.agree, inner.any, inner.close

    def run(self, order: Order, shared: Fields) -> Reply:
        """Let all sites answer the order's questions, then run the round."""
        answers = {}
        if order.questions:
            x = self.solution(shared).detach().cpu().numpy()
            answers = {n: answered(order.questions, parts, self.min_cell, x) for n, parts in enumerate(self.sites)}
        reply = self.inner.run(replace(order, questions=()), shared)
        reply.answers |= answers
        return reply


class Failing:
    """A federation that simulates failures: each asked client fails to answer with some probability."""

    def __init__(self, inner: Federation, failures: float, clients: int, seed: int) -> None:
        self.inner, self.failures, self.clients, self.streams = inner, failures, clients, Streams(seed)
        self.own, self.private, self.restore = inner.own, inner.private, inner.restore
        self.agree, self.any, self.close = inner.agree, inner.any, inner.close

    def run(self, order: Order, shared: Fields) -> Reply:
        """Run the round with the clients that answer; count the downloads of all."""
        luck = self.streams.at(Purpose.FAILURE, 0, order.round).random(self.clients)
        reply = self.inner.run(order.only([i for i, n in enumerate(order.asked) if luck[n] >= self.failures]), shared)
        reply.downloads = len(order.asked)
        return reply
