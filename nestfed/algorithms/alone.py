"""Training without federation: every client runs a method alone."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from nestfed.core import Algorithm, Average, Batch, Fields, NestfedError

MEAN = "mean"


@dataclass(frozen=True)
class Alone(Algorithm[Any, Any]):
    """Train each client alone with another method: its shared fields stay private, and nothing is averaged.

    It is the baseline "each site alone". `result.models` are the clients' own models. The mean of these models
    is the point of the run, for the drift in the record only: no client uses it, and it costs no bytes.
    """

    method: Algorithm[Any, Any]

    name = "alone"
    shared = (MEAN,)
    point = MEAN
    talks = False

    def __post_init__(self) -> None:
        if type(self.method.server) is not Average:
            raise NestfedError(f"{self.method.name} needs its server's step, so a client cannot run it alone.")
        if self.method.gathered:
            raise NestfedError(
                f"{self.method.name} needs what other clients contribute, so a client cannot run it alone."
            )
        if not self.method.talks:
            raise NestfedError(f"{self.method.name} trains every client alone already.")
        for fact in ("accepts", "steps", "evaluations"):
            object.__setattr__(self, fact, getattr(self.method, fact))
        object.__setattr__(self, "private", (*self.method.shared, *self.method.private))

    def own_points(self, problem: Any, shared: Fields, private: Fields) -> Tensor:
        """Return the points that the clients reached alone: the method's own, if it trains one per client."""
        own = self.method.own_points(problem, private, private)
        return private[self.method.point] if own is None else own

    def init(self, problem: Any, x0: Tensor) -> Any:
        """Start as the method does."""
        return self._state(x0, self.method.init(problem, x0))

    def step(self, problem: Any, s: Any, batch: Batch, t: int) -> Any:
        """One step of the method."""
        own = self.method.step(problem, self._own(s), batch, t)
        return self._state(getattr(own, self.method.point), own)

    def send(self, s: Any, t: int) -> Any:
        """Prepare the upload, which only this client receives."""
        return self._state(s.mean, self.method.send(self._own(s), t))

    def receive(self, s: Any, t: int) -> Any:
        """Process this client's own upload."""
        return self._state(s.mean, self.method.receive(self._own(s), t))

    def restarts(self, t: int, q: int) -> bool:
        """Return whether the method restarts an estimate."""
        return self.method.restarts(t, q)

    def ends_round(self, t: int, q: int) -> bool:
        """Return whether the method's round ends."""
        return self.method.ends_round(t, q)

    def feasible(self, problem: Any, shared: Fields) -> Fields:
        """Return the mean unchanged: the steps project every client's own point."""
        return shared

    def _state(self, mean: Tensor, own: Any) -> Any:
        kind: Any = type(own)
        return with_field(MEAN, kind)(mean, *own)

    def _own(self, s: Any) -> Any:
        return s.kind(*s[1:])


@cache
def with_field(name: str, kind: Any) -> Any:
    """Return the type of a method's state with one more field in front; its `kind` is the type without."""
    make: Any = namedtuple
    made = make(kind.__name__, (name, *kind._fields))
    made.kind = kind
    return made
