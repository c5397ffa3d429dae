"""Several machines: every rank of torch.distributed (`torchrun`) runs its own block of clients.

All ranks have the shared fields and do the same arithmetic on the same sums; only its rank has a client's private
fields. Rank 0 alone evaluates, records, and writes checkpoints. They contain the private fields of all clients, so a
run may resume with another number of ranks.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
from torch import Tensor, distributed

from nestfed.core import Fields, NestfedError
from nestfed.engine.federation import Federation
from nestfed.engine.round import Order, Reply


class Group:
    """The ranks of a run; without `torchrun`, a single one."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, device: torch.device) -> Group:
        """Join the ranks that `torchrun` started, if any."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 or "RANK" not in os.environ:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(distributed.destroy_process_group)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates and writes."""
        return self.rank == 0

    def agree(self, value: Any) -> Any:
        """Return the leading rank's value on all ranks."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box)
        return box[0]

    def block(self, clients: int, rank: int | None = None) -> range:
        """Return the clients of a rank; None = this one."""
        rank = self.rank if rank is None else rank
        return range(rank * clients // self.count, (rank + 1) * clients // self.count)


class Ranks:
    """Runs this rank's clients with another federation and sums over all ranks."""

    def __init__(self, inner: Federation, group: Group, clients: int, device: torch.device) -> None:
        self._inner, self._group, self._clients, self._device = inner, group, clients, device
        self._block = group.block(clients)

    def run(self, order: Order, shared: Fields) -> Reply:
        """Run this rank's clients, then sum over all ranks."""
        mine = order.only([i for i, n in enumerate(order.asked) if n in self._block])
        failure: NestfedError | None = None
        try:
            reply = self._inner.run(mine, shared)
        except NestfedError as error:
            failure = error
        if self.any(failure is not None):
            raise next(m for m in self._gathered(failure) if m is not None)
        with reply.lap("averaging"):
            for k in sorted(reply.sums):
                distributed.all_reduce(reply.sums[k])
            total = Reply(reply.sums, {k: self._all_rows(reply.rows[k], order) for k in sorted(reply.rows)})
            for numbers in self._gathered(_numbers(reply)):
                total.merge(numbers)
            place = {n: i for i, n in enumerate(order.asked)}
            total.places = [place[n] for n in total.answered]
        total.downloads, total.laps = len(order.asked), reply.laps
        return total

    def _gathered(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks."""
        values: list[Any] = [None] * self._group.count
        distributed.all_gather_object(values, value)
        return values

    def _all_rows(self, mine: Tensor, order: Order) -> Tensor:
        """Return the rows of all ranks, in the order of the clients."""
        rows = mine.new_empty((len(order.asked), *mine.shape[1:]))
        start = 0
        for rank in range(self._group.count):
            block = self._group.block(self._clients, rank)
            stop = start + sum(n in block for n in order.asked)
            if rank == self._group.rank:
                rows[start:stop] = mine
            if stop > start:
                distributed.broadcast(rows[start:stop], rank)
            start = stop
        return rows

    def own(self) -> Fields:
        """Return the private fields of this rank's clients."""
        return self._inner.own()

    def private(self) -> Fields:
        """Return the private fields of all clients on rank 0, and of its own clients on any other rank."""
        own = self.own()
        if not self._group.leads:
            for v in own.values():
                distributed.send(v.contiguous(), 0)
            return own
        whole = {}
        for k, v in own.items():
            whole[k] = v.new_empty((self._clients, *v.shape[1:]))
            whole[k][: len(v)] = v
            for rank in range(1, self._group.count):
                block = self._group.block(self._clients, rank)
                distributed.recv(whole[k][block.start : block.stop], rank)
        return whole

    def restore(self, private: Fields) -> None:
        """Send each rank the private fields of its clients, which rank 0 has read."""
        own = {}
        for k, v in self.own().items():
            if self._group.leads:
                for rank in range(1, self._group.count):
                    block = self._group.block(self._clients, rank)
                    distributed.send(private[k][block.start : block.stop].contiguous(), rank)
                own[k] = private[k][self._block.start : self._block.stop]
            else:
                own[k] = torch.empty_like(v)
                distributed.recv(own[k], 0)
        self._inner.restore(own)

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        return self._group.agree(value)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        votes = torch.tensor([float(flag)], device=self._device)
        distributed.all_reduce(votes)
        return bool(votes > 0)

    def close(self) -> None:
        """Close the inner federation."""
        self._inner.close()


def _numbers(reply: Reply) -> Reply:
    """Return a reply without its tensors."""
    numbers = Reply({})
    numbers.merge(reply)
    return numbers
