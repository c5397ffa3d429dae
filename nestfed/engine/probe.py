"""Before the first round: does the model learn, does it draw random numbers, and is it the problem of this directory?"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
"""The clients whose gradients are probed."""
DRAWN = 64
"""The clients whose first batch is probed."""
PATIENCE = 1.0
"""Seconds after which no more of these batches are drawn: some clients read theirs from files."""
SPANS = 4
"""The rounds whose numbers of local steps are probed."""
SCALES = (0.0, 0.1, 10.0, 1000.0)
"""How far from the start the points are whose projections are probed."""
NOISE = 1e-6
"""The rounding error of a projection is below this share of the point's norm."""
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


def some(clients: int, most: int = CLIENTS) -> list[int]:
    """Return the clients to probe, spread over all of them."""
    count = min(most, clients)
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
    """A problem in a few numbers: its parameters, its clients' first batches, and gradients at two points.

    What an older version did not probe is empty, and is not compared.
    """

    parameters: Mapping[str, Sequence[int]]
    """The shape of each parameter."""
    batches: Mapping[str, Sequence[tuple[Sequence[int], float, float]]]
    """For each client and tensor of its batch: the shape, the mean, and the mean of the absolute values."""
    gradients: Mapping[str, Sequence[float]]
    """For each client: its gradient at x0, summed with random signs into a few bins, which keeps distances."""
    nestfed: str = __version__
    moved: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The same at a point near x0: the gradient of a penalty may be 0 at x0."""
    points: Sequence[Sequence[float]] = ()
    """x0 and points ever farther away after their projection, each summed into bins."""
    rows: Sequence[int] = ()
    """The number of every client's examples."""
    q: int = 0
    steps: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The numbers of local steps of clients in the first rounds."""
    dtype: str = ""
    precision: str = ""

    @classmethod
    def of(
        cls, problem: Problem, clients: Clients, seed: int, start: Tensor, *, q: int = 1, spans: Sequence[Span] = (),
        precision: str = "full",
    ) -> Probe:  # fmt: skip
        """Probe a problem; `spans` are the first rounds."""
        N = len(clients)
        batches, gradients, moved = {}, {}, {}
        w = problem.w0 if isinstance(problem, Saddle) else None
        sketch = _Sketch.of(start.numel() + (0 if w is None else w.numel()))
        near = _projected(problem, clients, start, w, start.numel() ** -0.5)
        for n in some(N):
            batch = first_batch(problem, clients, seed, n)
            name = clients.label(n)
            batches[name] = [_summary(leaf) for leaf in tree_leaves(batch.data)]
            with blamed(clients.label, [n], 1):
                gradients[name] = sketch(_gradient(problem, start, w, batch))
            if near is not None and (found := _gradient_near(problem, clients, n, near, batch)) is not None:
                moved[name] = sketch(found)
        far = [_projected(problem, clients, start, w, scale) for scale in SCALES]
        drawn = some(N, DRAWN)
        return cls(
            problem.parameters(), {**batches, **_batches(problem, clients, seed, drawn, batches)}, gradients,
            moved=moved,
            points=[[] if pair is None else sketch(_joined(*pair)) for pair in far],
            rows=[clients.examples(n) for n in range(N)],
            q=q,
            steps={clients.label(n): [clients.steps(n, s.start, s.stop - s.start) for s in spans] for n in drawn},
            dtype=str(start.dtype).removeprefix("torch."),
            precision=precision,
        )  # fmt: skip

    def difference(self, before: Probe) -> str:
        """Return what differs from another probe, in one clause; nothing if they are of the same problem."""
        return self._other_model(before) or self._other_clients(before) or self._other_objective(before)

    def _other_model(self, before: Probe) -> str:
        if other := _changed(self.parameters, before.parameters):
            return f"the model's parameters differ ({other})"
        if before.dtype and self.dtype != before.dtype:
            return f"the model's parameters are {self.dtype} instead of {before.dtype}"
        if before.precision and self.precision != before.precision:
            return f"execution.precision is {self.precision!r} instead of {before.precision!r}"
        return ""

    def _other_clients(self, before: Probe) -> str:
        if absent := [name for name in self.gradients if name not in before.gradients]:
            return f"the clients differ ({absent[0]} is new)"
        if before.rows and len(self.rows) != len(before.rows):
            return f"there are {len(self.rows)} clients instead of {len(before.rows)}"
        for name in [name for name in self.batches if name in before.batches]:
            leaves, held = self.batches[name], before.batches[name]
            if [list(leaf[0]) for leaf in leaves] != [list(leaf[0]) for leaf in held]:
                shapes = " instead of ".join(str([tuple(leaf[0]) for leaf in some]) for some in (leaves, held))
                return f"client {name} draws batches of another shape: {shapes}"
            if any(abs(a[1] - b[1]) > TOLERANCE * max(a[2], b[2]) for a, b in zip(leaves, held)):
                return f"client {name} draws other data"
        for n, (rows, held_rows) in enumerate(zip(self.rows, before.rows)):
            if rows != held_rows:
                return f"client number {n} has {rows} examples instead of {held_rows}"
        for name in self.steps if self.q == before.q else ():  # another q is another experiment anyway
            for r, (steps, held_steps) in enumerate(zip(self.steps[name], before.steps.get(name, ())), 1):
                if steps != held_steps:
                    return f"client {name} takes {steps} local steps in round {r} instead of {held_steps}"
        return ""

    def _other_objective(self, before: Probe) -> str:
        size = sum(math.prod(shape) for shape in self.parameters.values())
        for scale, now, then in zip(SCALES, self.points, before.points):
            if now and then and _far(now, then, NOISE * scale * size**0.5):
                return "the domain differs" if scale else "the starting point differs"
        # A ReLU near 0 may flip with the processor and change one client's gradient; another objective changes all.
        if self.gradients and all(_far(g, before.gradients.get(name, [])) for name, g in self.gradients.items()):
            return "the objective or the starting point differs: all gradients at x0 have changed"
        both = [name for name in self.moved if name in before.moved]
        if both and all(_far(self.moved[name], before.moved[name]) for name in both):
            return "the objective differs: all gradients at a point near x0 have changed"
        return ""


_Point = tuple[Tensor, Tensor | None]
"""x, and w for a minimax problem."""


def _batches(
    problem: Problem, clients: Clients, seed: int, drawn: Sequence[int], known: Mapping[str, Any]
) -> dict[str, list[tuple[list[int], float, float]]]:
    """Return summaries of more clients' first batches, as long as drawing them is cheap."""
    found, end = {}, time.monotonic() + PATIENCE
    for n in drawn:
        if clients.label(n) in known:
            continue
        if time.monotonic() > end:
            break
        found[clients.label(n)] = [_summary(leaf) for leaf in tree_leaves(first_batch(problem, clients, seed, n).data)]
    return found


def _projected(problem: Problem, clients: Clients, x: Tensor, w: Tensor | None, scale: float) -> _Point | None:
    """Return the feasible point nearest to one at a distance, each coordinate ± scale; None if there is none."""
    generator = torch.Generator().manual_seed(1)

    def away(v: Tensor) -> Tensor:
        return v + scale * (torch.randint(0, 2, v.shape, generator=generator) * 2 - 1).to(v)

    try:
        with blamed(clients.label, [0], 1):
            dual = problem.project_dual(away(w)) if isinstance(problem, Saddle) and w is not None else None
            return problem.project(away(x)), dual
    except NestfedError:  # a run may never come there
        return None


def _gradient_near(problem: Problem, clients: Clients, n: int, point: _Point, batch: Batch) -> Tensor | None:
    """Return the gradient at a point that a run may never visit, so it may not exist."""
    try:
        with blamed(clients.label, [n], 1):
            return _gradient(problem, *point, batch)
    except NestfedError:
        return None


def _joined(x: Tensor, w: Tensor | None) -> Tensor:
    return x if w is None else torch.cat([x, w])


def _summary(leaf: Tensor) -> tuple[list[int], float, float]:
    numbers = leaf.detach().double()
    if not numbers.numel():
        return list(leaf.shape), 0.0, 0.0
    return list(leaf.shape), float(numbers.mean()), float(numbers.abs().mean())


def _gradient(problem: Problem, x: Tensor, w: Tensor | None, batch: Batch) -> Tensor:
    if isinstance(problem, Saddle) and w is not None:
        return torch.cat(problem.grads(x, w, batch))
    if isinstance(problem, Differentiable):
        return problem.grad(x, batch)
    return x  # a kind of the user's own: only its data are compared


@dataclass(frozen=True)
class _Sketch:
    """Sums a vector with random signs into a few bins, which keeps distances."""

    signs: Tensor
    bins: Tensor

    @classmethod
    def of(cls, size: int) -> _Sketch:
        """Draw signs and bins for vectors of this size; they are the same in every run."""
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        return cls(signs.to(torch.int8), torch.randint(0, BINS, (size,), generator=generator))

    def __call__(self, vector: Tensor) -> list[float]:
        """Return the sums."""
        numbers = vector.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
        sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, self.bins, numbers * self.signs)
        return [float(f"{v:.8g}") for v in sums.tolist()]  # more digits than are compared would only fill the disk


def _far(a: Sequence[float], b: Sequence[float], slack: float = 0.0) -> bool:
    if len(a) != len(b):
        return True
    left, right = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return bool((left - right).norm() > TOLERANCE * max(left.norm(), right.norm()) + slack)


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
