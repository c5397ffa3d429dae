"""Running statistics of a model (BatchNorm), as one more field beside the state of any method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nestfed.algorithms.alone import with_field
from nestfed.core import Algorithm, Batch, Fields, NestfedError, OnPoints, Problem, Server

BUFFERS = "buffers"


@dataclass(frozen=True)
class Buffered(Algorithm[Any, Any]):
    """A method whose clients also carry running statistics: averaged by the server, or private, as in FedBN.

    The first evaluation of a step updates them, as in plain torch training. FedBN (Li et al. 2021) also keeps the
    layers' weights and biases on the client; here these are parameters like all others.
    """

    method: Algorithm[Any, Any]
    kept: str
    """average or private."""

    def __post_init__(self) -> None:
        for fact in Algorithm.__annotations__:  # a method's facts, such as its name, are attributes of its class
            object.__setattr__(self, fact, getattr(self.method, fact))
        sort = "shared" if self.kept == "average" else "private"
        object.__setattr__(self, sort, (*getattr(self.method, sort), BUFFERS))

    @property
    def server(self) -> Server:
        """The method's server for the method's fields; the statistics get the mean."""
        return OnPoints(self.method.server, self.method.shared)

    def solution(self, shared: Fields, private: Fields) -> Tensor:
        """Return the point, followed by the statistics: the averaged ones, or the mean of the clients' own."""
        b = shared[BUFFERS] if self.kept == "average" else private[BUFFERS].mean(0)
        return torch.cat([self.method.solution(shared, private), b])

    def own_points(self, problem: Any, shared: Fields, private: Fields) -> Tensor | None:
        """Return every client's own point, followed by its statistics."""
        own = self.method.own_points(problem, shared, private)
        if self.kept == "average":
            return None if own is None else torch.cat([own, shared[BUFFERS].expand(len(own), -1)], 1)
        b = private[BUFFERS]
        return torch.cat([shared[self.point].expand(len(b), -1) if own is None else own, b], 1)

    def init(self, problem: Any, x0: Tensor) -> Any:
        """Start as the method does, with the statistics behind x0, or else those of the user's module."""
        d = problem.x0.numel()
        return self._state(x0[d:] if x0.numel() > d else problem.b0, self.method.init(problem, x0[:d]))

    def step(self, problem: Any, s: Any, batch: Batch, t: int) -> Any:
        """One step of the method."""
        own = self.method.step(problem, self._own(s), replace(batch, buffers=s.buffers), t)
        return self._state(s.buffers if batch.tape.buffers is None else batch.tape.buffers, own)

    def send(self, s: Any, t: int) -> Any:
        """Prepare the upload."""
        return self._state(s.buffers, self.method.send(self._own(s), t))

    def receive(self, s: Any, t: int) -> Any:
        """Process the download."""
        return self._state(s.buffers, self.method.receive(self._own(s), t))

    def rejoin(self, s: Any, t: int) -> Any:
        """Refresh the method's private fields."""
        return self._state(s.buffers, self.method.rejoin(self._own(s), t))

    def fill(self, field: str, table: Tensor, ns: Sequence[int], rows: Tensor) -> Tensor:
        """Fill the method's table."""
        return self.method.fill(field, table, ns, rows)

    def restarts(self, t: int, q: int) -> bool:
        """Return whether the method restarts an estimate."""
        return self.method.restarts(t, q)

    def ends_round(self, t: int, q: int) -> bool:
        """Return whether the method's round ends."""
        return self.method.ends_round(t, q)

    def feasible(self, problem: Any, shared: Fields) -> Fields:
        """Project the players; noise may have made variances negative."""
        found = self.method.feasible(problem, {k: shared[k] for k in self.method.shared})
        return {**found, **{k: problem.project_buffers(v) for k, v in shared.items() if k == BUFFERS}}

    def _state(self, buffers: Tensor, own: Any) -> Any:
        kind: Any = type(own)
        return with_field(BUFFERS, kind)(buffers, *own)

    def _own(self, s: Any) -> Any:
        return s.kind(*s[1:])


def with_buffers(problem: Problem, method: Algorithm[Any, Any], keep: str) -> Algorithm[Any, Any]:
    """Return the method, with running statistics beside its state if the model keeps any; reject a point without them.

    - `keep`: which point the run returns (`Evaluation.keep`).
    """
    if not problem.buffers or isinstance(method, Buffered):
        return method
    kept = problem.buffers if method.talks else "private"  # clients that train alone keep theirs
    if keep == "uniform" or (keep == "best" and kept == "private"):
        raise NestfedError(
            f"evaluation.keep = {keep!r} would return a point without its running statistics (buffers = {kept!r}): use "
            f"'last'{' or best' if kept == 'average' else ''}."
        )
    return Buffered(method, kept)
