"""Where clients run: on which device, vectorised or one after another, in how many processes and on how many ranks."""

from __future__ import annotations

import logging
import os
from functools import cache
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch

from nestfed.core import Clients, NestfedError, Problem
from nestfed.engine.federation import Failing, Federation
from nestfed.engine.local import Local
from nestfed.engine.options import Execution
from nestfed.engine.ranks import Group, Ranks
from nestfed.engine.round import Rules, RunState
from nestfed.engine.store import Tables, private_fields
from nestfed.engine.workers import Workers

LOG = logging.getLogger("nestfed.engine")

SMALL = 200_000
"""Vectorise dense models with at most this many parameters over clients."""
LARGE = 20_000_000
"""From this many parameters on, one process with all threads is faster than several, and needs less memory."""
MANY = 512
WIDE = 2**20
"""Use several processes for vectorised work from MANY clients in a round, or WIDE numbers in one field of all of them."""


def available(name: str) -> torch.device:
    """Return a device of this machine."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise NestfedError(
            f"execution.device = {name!r} is not available here: {str(error).splitlines()[0].rstrip('.')}."
        ) from error
    return torch.device(name)


def vectorises(execution: Execution, problem: Problem, clients: Clients) -> bool:
    """Decide whether to vectorise over clients.

    Measured: it is faster for small dense models (fivefold at a few thousand parameters) and slower for convolutions
    and recurrent models, whose batched kernels are slow.
    """
    if problem.sequential:
        if execution.mode == "vmap" or execution.compile:
            raise NestfedError(
                "The model or the objective draws random numbers (other than dropout) that cannot be vectorised over "
                "clients: use mode = 'loop' without compile."
            )
        LOG.info("Clients run one after another, because the model draws random numbers that cannot be vectorised.")
        return False
    if problem.buffers:
        if execution.mode == "vmap" or execution.compile:
            raise NestfedError(
                "The model keeps running statistics (buffers), so clients cannot be vectorised: use mode = 'loop' without "
                "compile."
            )
        LOG.info("Clients run one after another, because the model keeps running statistics.")
        return False
    if execution.mode != "auto" or execution.compile:
        return execution.mode != "loop"
    return len(clients) > 1 and not problem.heavy and clients.alike and problem.x0.numel() <= SMALL


def make_federation(
    rules: Rules, clients: Clients, seed: int, template: Any, state: RunState, execution: Execution,
    vectorised: bool, path: Path | None, group: Group,
) -> Federation:  # fmt: skip
    """Return the federation: clients in this process or in workers, on one rank or several."""
    problem, method, exchange = rules.problem, rules.method, rules.exchange
    device, N = torch.device(execution.device), len(clients)
    if vectorised:
        _load_transforms()
    workers = _processes(execution.workers, vectorised, problem, device, exchange.participants(N) // group.count)
    fields = private_fields(method, template, exchange.encoding)
    limit = round(execution.memory_gb * 1e9)
    store = Tables.start(fields, group.block(N), limit=limit, folder=path, shared=workers > 1)
    local = Local(
        problem, method, clients, store, seed, exchange, device, vectorised, execution.compile,
        torch.bfloat16 if execution.precision == "bf16" else None, execution.accumulate, execution.profile, template,
    )  # fmt: skip
    federation: Federation = local
    if workers > 1:
        federation = Workers(local, state.shared, workers, exchange.count or N)
    if group.count > 1:
        federation = Ranks(federation, group, N, device)
    return Failing(federation, exchange.failures, N, seed) if exchange.failures else federation


def _processes(workers: int, vectorised: bool, problem: Problem, device: torch.device, participants: int) -> int:
    """Decide how many processes run the clients.

    Measured: several processes with one thread each are faster than one process with several threads if a client's
    step is short. The number of torch threads limits the processes; `nestfed compare` sets it to 1.
    """
    # Daemon processes cannot have children, and accelerators do not survive a fork.
    able = device.type == "cpu" and not current_process().daemon and hasattr(os, "fork")
    if workers > 1 and not able:
        raise NestfedError(f"execution.workers = {workers} needs device = cpu and a system with fork; use 1 here.")
    if workers == 0:
        size = problem.x0.numel()
        several = (participants >= MANY or participants * size >= WIDE) if vectorised else size < LARGE
        workers = torch.get_num_threads() if several and able and not torch.cuda.is_available() else 1
    return max(1, min(workers, participants))


@cache
def _load_transforms() -> None:
    """Load what torch imports at its first vectorised gradient, so that no run's seconds include it."""
    torch.vmap(torch.func.grad_and_value(torch.sum))(torch.zeros(2, 1))
