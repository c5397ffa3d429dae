"""Several machines: every rank of torch.distributed (`torchrun`) runs the clients of its own block.

All ranks hold the shared fields and do the same arithmetic on the same sums; the private fields of a client lie only
on its rank. Rank 0 alone evaluates, records, and writes checkpoints, which hold the private fields of all clients and
so may be resumed by any number of ranks.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from nestfed.core import Fields, NestfedError
from nestfed.engine.local import Runner, Share, Tally, start_tally
from nestfed.engine.reduce import Reduction
from nestfed.engine.round import RunState


class Group:
    """The ranks that run an experiment together; by itself, a single one."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, device: torch.device) -> Group:
        """Join the ranks that `torchrun` started, if it did."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 or "RANK" not in os.environ:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(distributed.destroy_process_group)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def leads(self) -> bool:
        """This rank evaluates and writes."""
        return self.rank == 0

    def block(self, clients: int, rank: int | None = None) -> range:
        """Return the clients whose private fields lie on a rank, this one unless another is named."""
        rank = self.rank if rank is None else rank
        return range(rank * clients // self.count, (rank + 1) * clients // self.count)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Tell whether the flag is set on any rank."""
        if self.count == 1:
            return flag
        votes = torch.tensor([float(flag)], device=device)
        distributed.all_reduce(votes)
        return bool(votes > 0)

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box)
        return box[0]

    def gather(self, state: RunState, clients: int) -> RunState:
        """Return on rank 0 the state with the private fields of all clients; elsewhere the state as it is."""
        if self.count == 1:
            return state
        private = {}
        for k, v in state.private.items():
            if not self.leads:
                distributed.send(v.contiguous(), 0)
                continue
            private[k] = v.new_empty((clients, *v.shape[1:]))
            private[k][: len(v)] = v
            for rank in range(1, self.count):
                block = self.block(clients, rank)
                distributed.recv(private[k][block.start : block.stop], rank)
        return replace(state, private=private) if self.leads else state

    def scatter(self, found: RunState | None, clients: int, like: RunState) -> RunState | None:
        """Give every rank the state that rank 0 has read: all of it, but only its own clients' private fields."""
        if self.count == 1:
            return found
        numbers = None
        if found is not None:
            numbers = {k: v for k, v in vars(found).items() if k not in ("private", "shared", "server", "kept")}
            numbers["kept"] = {k: (v.shape, v.dtype) for k, v in found.kept.items()}
        numbers = self.agree(numbers)
        if numbers is None:
            return None
        place = next(iter(like.shared.values())).device
        kept = {k: torch.empty(shape, dtype=dtype, device=place) for k, (shape, dtype) in numbers.pop("kept").items()}
        state = replace(like, kept=kept, **numbers) if found is None else found
        for group in ("shared", "server", "kept"):
            target = {k: torch.empty_like(v) for k, v in getattr(like if group != "kept" else state, group).items()}
            source = getattr(state, group)
            for k in sorted(target):
                value = source[k].clone() if self.leads else target[k]
                distributed.broadcast(value, 0)
                target[k] = value
            setattr(state, group, target)
        private = {}
        for k, v in like.private.items():
            private[k] = v
            if self.leads:
                for rank in range(1, self.count):
                    block = self.block(clients, rank)
                    distributed.send(state.private[k][block.start : block.stop].contiguous(), rank)
                own = self.block(clients)
                v.copy_(state.private[k][own.start : own.stop])
            else:
                rows = torch.empty_like(v)
                distributed.recv(rows, 0)
                v.copy_(rows)
        state.private = private
        return state


class Ranks:
    """Runs this rank's clients by another runner and adds up over all ranks."""

    def __init__(self, inner: Runner, group: Group, clients: int, point: str, reduction: Reduction, drop: bool) -> None:
        self._inner, self._group, self._block, self._point = inner, group, group.block(clients), point
        self._clients, self._reduction, self._drop = clients, reduction, drop

    def run(self, shared: Fields, private: dict[str, Tensor], share: Share) -> Tally:
        """Run those clients that are this rank's, then add up over all ranks."""
        mine = [i for i, n in enumerate(share.ns) if n in self._block]
        part = share._replace(ns=[share.ns[i] for i in mine], stale=[share.stale[i] for i in mine])
        tally, mistake = start_tally(shared, self._point, part, self._reduction), None
        try:
            if mine:
                tally = self._inner.run(shared, private, part)
        except NestfedError as error:
            mistake = error
        device = next(iter(shared.values())).device
        if self._group.any(mistake is not None, device):
            mistakes: list[NestfedError | None] = [None] * self._group.count
            distributed.all_gather_object(mistakes, mistake)
            raise next(m for m in mistakes if m is not None)
        with tally.lap("averaging"):
            for k in sorted(tally.sums):
                distributed.all_reduce(tally.sums[k])
            tally.rows = {k: self._exchange(tally.rows[k], share) for k in sorted(tally.rows)}
            if self._drop:
                told: list[dict[int, str]] = [{}] * self._group.count
                distributed.all_gather_object(told, tally.dropped)
                tally.dropped = {n: why for each in told for n, why in each.items()}
            # Floats of 64 bits hold counts up to 2^53.
            numbers = [tally.loss, tally.moved, float(tally.examples), float(tally.evaluations)]
            totals = torch.tensor(numbers, dtype=torch.float64, device=device)
            distributed.all_reduce(totals)
        tally.loss, tally.moved = float(totals[0]), float(totals[1])
        tally.examples, tally.evaluations = int(totals[2]), int(totals[3])
        return tally

    def _exchange(self, mine: Tensor, share: Share) -> Tensor:
        """Return the rows of all ranks, in the order of the clients."""
        rows = mine.new_empty((len(share.ns), *mine.shape[1:]))
        start = 0
        for rank in range(self._group.count):
            block = self._group.block(self._clients, rank)
            stop = start + sum(n in block for n in share.ns)
            if rank == self._group.rank:
                rows[start:stop] = mine
            if stop > start:
                distributed.broadcast(rows[start:stop], rank)
            start = stop
        return rows

    def close(self) -> None:
        """Close the runner inside."""
        self._inner.close()
