"""Worker processes on this machine: each runs some of a round's clients with one thread.

Workers are forked, so they need no copy of the data. Vectors pass through shared memory; a round is one short
message to each worker and one back, with the gathered numbers in it. Workers end with their parent, even if it is killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.engine.local import Local
from nestfed.engine.memory import table
from nestfed.engine.program import TAP
from nestfed.engine.round import Order, Reply

LOG = logging.getLogger("nestfed.engine")


class Workers:
    """Runs clients in worker processes."""

    def __init__(self, local: Local, shared: Fields, count: int, most: int) -> None:
        """Start the workers. The private fields must be in shared memory (`memory.table`).

        `most` is the largest number of clients in a round.
        """
        self._local = local
        self.own, self.private, self.restore = local.own, local.private, local.restore
        self.agree, self.any = local.agree, local.any
        self._shared = {k: table(tuple(v.shape), v.dtype) for k, v in shared.items()}
        point = shared[local.method.point]
        self._sums: list[dict[str, Tensor]] = []
        self._rows: dict[str, Tensor] = {}
        if local.exchange.reduction.tabled:
            self._rows = {k: table((most, *v.shape), v.dtype) for k, v in shared.items()}
        for _ in range(count):
            sums = {k: table(tuple(v.shape), v.dtype) for k, v in shared.items() if not self._rows}
            sums[TAP] = table(tuple(point.shape), point.dtype)
            self._sums.append(sums)
        self.trips = 0
        """Messages sent to workers so far."""
        if local.vectorised:
            import_module("torch._dynamo")  # torch.func needs it; import it once here, because it takes a second
        fork = get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for i in range(count):
            here, there = fork.Pipe()
            process = fork.Process(
                target=_serve,
                args=(
                    there,
                    [*self._pipes, here],
                    os.getpid(),
                    local,
                    self._shared,
                    self._sums[i],
                    self._rows,
                ),
                name=f"nestfed-worker-{i + 1}",
                daemon=True,
            )
            with warnings.catch_warnings():
                # Python warns about threads at a fork; a worker takes no lock that another thread may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, order: Order, shared: Fields) -> Reply:
        """Divide the clients among the workers, wait for all, and sum."""
        if not order.asked:
            return self._local.run(order, shared)
        for k, v in shared.items():
            self._shared[k].copy_(v)
        parts = _parts(order, len(self._pipes))
        waiting: dict[Connection, int] = {}
        for i, part in enumerate(parts):
            try:
                self._pipes[i].send(replace(part, tables=_arrays(part.tables)))
            except (BrokenPipeError, ConnectionResetError):
                self._report_death(i, part)
            waiting[self._pipes[i]] = i
            self.trips += 1
        answers: dict[int, Reply] = {}
        while waiting:
            sentinels = {self._processes[i].sentinel: i for i in waiting.values()}
            ready = wait([*waiting, *sentinels])
            for source in sorted(
                ready, key=lambda r: r not in waiting
            ):  # use an answer even if its worker died afterwards
                i = waiting[source] if source in waiting else sentinels[source]
                if i in answers:
                    continue
                try:
                    kind, value = self._pipes[i].recv()
                except (EOFError, ConnectionResetError):
                    self._report_death(i, parts[i])
                if kind == "error":
                    raise value
                answers[i] = value
                del waiting[self._pipes[i]]
        return self._total(order, [answers[i] for i in range(len(parts))])

    def _total(self, order: Order, answers: list[Reply]) -> Reply:
        """Sum in the order of the workers, so that a run is reproducible."""
        names = [k for k in self._sums[0] if k != TAP or order.tapped]
        rows = {k: v[: len(order.asked)] for k, v in self._rows.items()}  # valid until the next round
        total = Reply({k: self._sums[0][k].clone() for k in names}, rows)
        total.downloads = len(order.asked)
        for i, answer in enumerate(answers):
            if i:
                for k in names:
                    total.sums[k].add_(self._sums[i][k])
            answer.gathered = {n: _tensors(row) for n, row in answer.gathered.items()}
            total.merge(answer)
            for name, seconds in answer.laps.items():
                # Workers run at the same time, so report the mean of their times.
                total.laps[name] = total.laps.get(name, 0.0) + seconds / len(answers)
        return total

    def _report_death(self, i: int, part: Order) -> NoReturn:
        process = self._processes[i]
        process.join(1)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        hint = " (possibly out of memory: use fewer workers)" if code == -signal.SIGKILL else ""
        raise NestfedError(
            f"Worker {i + 1} of {len(self._pipes)}, which ran clients {part.asked[0]}…{part.asked[-1]} in round "
            f"{part.number}, {how}{hint}."
        )

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def _parts(order: Order, count: int) -> list[Order]:
    """Divide an order into parts of nearly equal size, at most one per client."""
    total = len(order.asked)
    count = min(count, total)
    edges = [i * total // count for i in range(count + 1)]
    return [order.part(a, b) for a, b in pairwise(edges)]


def _serve(
    pipe: Connection, others: list[Connection], parent: int, local: Local, shared: Fields, sums: dict[str, Tensor],
    rows: dict[str, Tensor],
) -> None:  # fmt: skip
    """Work until the parent closes the pipe."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # an inherited end would keep a pipe open after its owner's exit
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(_answer(order, local, shared, sums, rows))
        except (BrokenPipeError, ConnectionResetError):  # the parent has ended the run, for another worker's error
            return


def _answer(
    order: Order, local: Local, shared: Fields, sums: dict[str, Tensor], rows: dict[str, Tensor]
) -> tuple[str, Reply | NestfedError]:
    """Run a worker's part of a round; return what to send to the parent."""
    try:
        for v in sums.values():
            v.zero_()
        reply = Reply(sums, rows)
        local.work(replace(order, tables=_tensors(order.tables)), shared, reply)
        reply.sums = reply.rows = {}  # they are in shared memory
        reply.gathered = {n: _arrays(row) for n, row in reply.gathered.items()}
        return "done", reply
    except NestfedError as error:
        return "error", error
    except Exception as error:
        LOG.debug("Worker failed.", exc_info=True)
        return "error", NestfedError(f"A worker process failed: {type(error).__name__}: {error}.")


def _arrays(fields: Fields) -> dict[str, Any]:
    """Return small fields as numpy arrays, which a pipe copies; torch would put each into a shared memory of its own."""
    return {k: v.numpy() for k, v in fields.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v) for k, v in arrays.items()}


def _die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
