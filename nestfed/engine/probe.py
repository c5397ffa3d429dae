"""Before the first round: does the model learn, does it draw random numbers, and is it the problem of this directory?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nestfed.core import Batch, Clients, Differentiable, NestfedError, Problem, Saddle, __version__
from nestfed.data.random import Streams
from nestfed.engine.program import Span, batch_keys
from nestfed.files import write_atomically

FILE = "probe.json"
WARM_UP_FILE = "probe-warm-up.json"
CLIENTS = 4
"""The clients whose first batch is probed."""
BINS = 64
TOLERANCE = 1e-4
"""Processors, threads and engines change numbers by less than this share."""


@contextmanager
def blamed(
    label: Callable[[int], str], ns: Sequence[int], round: int, what: str = "The model or the objective"
) -> Iterator[None]:
    """Turn an error in the user's own code into a message with client and round; keep the cause attached."""
    try:
        yield
    except NestfedError:
        raise
    except Exception as error:
        who = f"client {label(ns[0])}" if len(ns) == 1 else f"clients {label(ns[0])} to {label(ns[-1])}"
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise NestfedError(f"{what} failed at {who} in round {round}: {type(error).__name__}: {reason}") from error


def inspect(problem: Problem, clients: Clients, seed: int, among: Sequence[int]) -> None:
    """Reject a problem whose loss does not depend on the parameters; let it find out whether it is random."""
    for n in among:
        batch = first_batch(problem, clients, seed, n)
        with blamed(clients.label, [n], 1):
            try:
                learns = problem.inspect(batch)
            except RuntimeError as error:
                _explain_dtype(problem, batch, f"client {clients.label(n)}", error)
                raise
        if learns:
            return
    raise NestfedError(
        "The loss does not depend on the model's parameters, so nothing would be trained: f and g must use the model "
        "that they get as an argument, without .detach(), no_grad or rounding on the way."
    )


def _explain_dtype(problem: Problem, batch: Batch, who: str, error: RuntimeError) -> None:
    """Turn torch's error into one about the data, if they are not of the model's type."""
    numbers = problem.x0.dtype
    others = [v.dtype for v in tree_leaves(batch.data) if v.is_floating_point() and v.dtype != numbers]
    if others:
        name = str(numbers).removeprefix("torch.")
        raise NestfedError(
            f"The batch of {who} has {others[0]}, but the model's parameters are {numbers}: convert the data, such as "
            f"x.astype('{name}') or x.to({numbers})."
        ) from error


def some(clients: int) -> list[int]:
    """Return the clients to probe, spread over all of them."""
    count = min(CLIENTS, clients)
    return [i * clients // count for i in range(count)]


def first_batch(problem: Problem, clients: Clients, seed: int, n: int) -> Batch:
    """Return client n's batch at t = 0, as a run evaluates it."""
    device = problem.x0.device
    with blamed(clients.label, [n], 1, "The clients' sample"):
        data = clients.sample(n, 0)
    for leaf in tree_leaves(data):
        if not isinstance(leaf, Tensor):
            what = (
                f"{leaf!r:.60}" if isinstance(leaf, str | int | float) else f"an object of type {type(leaf).__name__}"
            )
            raise NestfedError(
                f"The batch of client {clients.label(n)} contains {what}: sample must return tensors, or tuples, lists "
                "and dictionaries of tensors."
            )
    key = batch_keys(Streams(seed), [n], Span(0, 1), device)[0, 0]
    return Batch(data, key, torch.tensor(n, device=device), eager=True)


@dataclass(frozen=True)
class Probe:
    """A problem in a few numbers: its parameters, and the first batches of some clients with their gradients at x0."""

    parameters: Mapping[str, Sequence[int]]
    """The shape of each parameter."""
    batches: Mapping[str, Sequence[tuple[Sequence[int], float, float]]]
    """For each client and tensor of its batch: the shape, the mean, and the mean of the absolute values."""
    gradients: Mapping[str, Sequence[float]]
    """For each client: its gradient at x0, summed with random signs into a few bins, which keeps distances."""
    nestfed: str = __version__

    @classmethod
    def of(cls, problem: Problem, clients: Clients, seed: int, start: Tensor) -> Probe:
        """Probe a problem."""
        batches, gradients = {}, {}
        for n in some(len(clients)):
            batch = first_batch(problem, clients, seed, n)
            name = clients.label(n)
            batches[name] = [_summary(leaf) for leaf in tree_leaves(batch.data)]
            with blamed(clients.label, [n], 1):
                gradients[name] = _sketch(_gradient(problem, start, batch))
        return cls(problem.parameters(), batches, gradients)

    def difference(self, before: Probe) -> str:
        """Return what differs from another probe, in one clause; nothing if they are of the same problem."""
        if other := _changed(self.parameters, before.parameters):
            return f"the model's parameters differ ({other})"
        for name, leaves in self.batches.items():
            held = before.batches.get(name)
            if held is None:
                return f"the clients differ ({name} is new)"
            if [leaf[0] for leaf in leaves] != [list(leaf[0]) for leaf in held]:
                shapes = " instead of ".join(str([tuple(leaf[0]) for leaf in some]) for some in (leaves, held))
                return f"client {name} draws batches of another shape: {shapes}"
            if any(abs(a[1] - b[1]) > TOLERANCE * max(a[2], b[2]) for a, b in zip(leaves, held)):
                return f"client {name} draws other data"
        # A ReLU near 0 may flip with the processor and change one client's gradient; another objective changes all.
        if self.gradients and all(_far(g, before.gradients.get(name, [])) for name, g in self.gradients.items()):
            return "the objective or the starting point differs: all gradients at x0 have changed"
        return ""


def _summary(leaf: Tensor) -> tuple[list[int], float, float]:
    numbers = leaf.detach().double()
    if not numbers.numel():
        return list(leaf.shape), 0.0, 0.0
    return list(leaf.shape), float(numbers.mean()), float(numbers.abs().mean())


def _gradient(problem: Problem, x: Tensor, batch: Batch) -> Tensor:
    if isinstance(problem, Saddle):
        return torch.cat(problem.grads(x, problem.w0, batch))
    if isinstance(problem, Differentiable):
        return problem.grad(x, batch)
    return x  # a kind of the user's own: only its data are compared


def _sketch(gradient: Tensor) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
    bins = torch.randint(0, BINS, gradient.shape, generator=generator)
    numbers = gradient.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    return torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, numbers * signs).tolist()


def _far(a: Sequence[float], b: Sequence[float]) -> bool:
    if len(a) != len(b):
        return True
    left, right = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return bool((left - right).norm() > TOLERANCE * max(left.norm(), right.norm()))


def _changed(now: Mapping[str, Sequence[int]], before: Mapping[str, Sequence[int]]) -> str:
    for name in {**now, **before}:
        if name not in before or name not in now:
            return f"{name} is {'new' if name in now else 'missing'}"
        if list(now[name]) != list(before[name]):
            return f"{name} has shape {tuple(now[name])} instead of {tuple(before[name])}"
    return ""


def check(path: Path, probe: Probe, name: str = FILE) -> str:
    """Compare a probe with that of a run directory, or store it there; return a warning, or nothing."""
    file = path / name
    if not file.exists():
        write_atomically(file, json.dumps(asdict(probe)).encode())
        return ""
    try:
        held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        before = Probe(**held)
        what = probe.difference(before)
    except (ValueError, TypeError, KeyError, IndexError):
        return f"{file} cannot be read, so it is unknown whether {path} contains a run of this problem."
    if what:
        raise NestfedError(f"{path} contains a run of another problem: {what}. Choose another directory.")
    if before.nestfed != __version__:
        return f"{path} was started with nestfed {before.nestfed}; this is {__version__}, so its numbers may differ."
    return ""
