"""Personal models: a model of its own for every client, beside or inside a common one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nestfed.algorithms.references import COLLINS_2021, LI_2021
from nestfed.core import (
    Algorithm,
    Batch,
    Differentiable,
    Fields,
    NestfedError,
    Problem,
    Schedule,
    at,
    at_least,
    positive,
    unknown,
    whole,
)


class Beside(NamedTuple):
    """The common model, the client's own model, and the common model at the start of the round."""

    x: Tensor
    v: Tensor
    start: Tensor


@dataclass(frozen=True)
class Ditto(Algorithm[Differentiable, Beside]):
    """Ditto (Li et al. 2021): FedAvg's x, and beside it a private model that is pulled towards x.

    v_n ← v_n − η(∇f(v_n) + μ(v_n − x_start)), one step per iteration on the iteration's batch. v_n starts at x0 and is
    never reset. μ = 0 is training alone.
    """

    eta: Schedule
    mu: float = 0.1

    name = "ditto"
    accepts = Differentiable
    shared = ("x",)
    private = ("v",)
    cites = (LI_2021,)
    evaluations = 2

    def __post_init__(self) -> None:
        positive(self, "eta")
        at_least(self, 0, "mu")

    def own_points(self, problem: Differentiable, shared: Fields, private: Fields) -> Tensor:
        """Return every client's v."""
        return private["v"]

    def init(self, problem: Differentiable, x0: Tensor) -> Beside:
        """Start both models at x0."""
        return Beside(x0, x0, x0)

    def receive(self, s: Beside, t: int) -> Beside:
        """Store the starting point of the round."""
        return s._replace(start=s.x)

    def step(self, problem: Differentiable, s: Beside, batch: Batch, t: int) -> Beside:
        """x ← x − η∇f(x; B_t); v ← v − η(∇f(v; B_t) + μ(v − x_start))."""
        eta = at(self.eta, t)
        x = problem.project(s.x - eta * problem.grad(s.x, batch))
        v = problem.project(s.v - eta * (problem.grad(s.v, batch) + self.mu * (s.v - s.start)))
        return s._replace(x=x, v=v)

    def restarts(self, t: int, q: int) -> bool:
        """Return False: there is no estimate to restart."""
        return False


class Headed(NamedTuple):
    """The body with the common start of the heads, the client's own head, and the steps taken in this round."""

    x: Tensor
    head: Tensor
    done: Tensor


@dataclass(frozen=True)
class FedRep(Algorithm[Differentiable, Headed]):
    """FedRep (Collins et al. 2021): a common body, and on every client a head of its own.

    A round's q iterations are q_h head steps at the broadcast body, then q − q_h body steps with the new head fixed.
    Only the body is averaged. The head's entries of the shared x stay at the start, from which all heads begin.

    head: the parameters of the head, by name (`"out.bias"`) or by module (`"out"`), one or several.
    """

    eta: Schedule
    head: str | Sequence[str]
    q_h: int = 1

    name = "fedrep"
    accepts = Differentiable
    shared = ("x",)
    private = ("head",)
    cites = (COLLINS_2021,)

    def __post_init__(self) -> None:
        positive(self, "eta")
        whole("fedrep: q_h", self.q_h)
        names = (self.head,) if isinstance(self.head, str) else self.head
        if not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) and n for n in names):
            raise NestfedError(f"fedrep: head must name parameters or modules of the model, not {self.head!r}.")
        object.__setattr__(self, "head", tuple(names))  # a list from a file is not hashable

    def ends_round(self, t: int, q: int) -> bool:
        """Return whether a round of q_h head steps and q − q_h body steps ends."""
        if q <= self.q_h:
            raise NestfedError(f"fedrep: q must be above q_h = {self.q_h} to leave body steps, but q is {q}.")
        return super().ends_round(t, q)

    def own_points(self, problem: Differentiable, shared: Fields, private: Fields) -> Tensor:
        """Return the common body with every client's head."""
        heads = private["head"]
        rows = shared["x"].expand(len(heads), -1)
        return rows.scatter(1, self._places(problem).expand(len(heads), -1), heads)

    def init(self, problem: Differentiable, x0: Tensor) -> Headed:
        """Start all heads at x0."""
        return Headed(x0, x0[self._places(problem)], x0.new_zeros(()))

    def receive(self, s: Headed, t: int) -> Headed:
        """Begin with the head."""
        return s._replace(done=torch.zeros_like(s.done))

    def step(self, problem: Differentiable, s: Headed, batch: Batch, t: int) -> Headed:
        """Move the head during the first q_h steps, and the body later."""
        places = self._places(problem)
        y = s.x.scatter(0, places, s.head)
        is_head = torch.zeros_like(y).scatter(0, places, 1.0)
        moving = torch.where(s.done < self.q_h, is_head, 1 - is_head)
        y = problem.project(y - at(self.eta, t) * moving * problem.grad(y, batch))
        return Headed(y.scatter(0, places, s.x[places]), y[places], s.done + 1)

    def _places(self, problem: Problem) -> Tensor:
        """Return the positions of the head's parameters in x."""
        sizes = {name: torch.Size(shape).numel() for name, shape in problem.parameters().items()}
        for part in self.head:
            if not any(_belongs(name, part) for name in sizes):
                modules = {name.rsplit(".", 1)[0] for name in sizes if "." in name}
                raise unknown("parameter or module", part, {*sizes, *modules}, "fedrep: the model")
        inside = [any(_belongs(name, part) for part in self.head) for name in sizes]
        if all(inside):
            raise NestfedError(f"fedrep: head = {', '.join(self.head)} is the whole model and leaves no body to share.")
        ends = list(accumulate(sizes.values()))
        spans = zip([0, *ends], ends, inside)
        return torch.cat([torch.arange(i, j, device=problem.x0.device) for i, j, own in spans if own])


def _belongs(name: str, part: str) -> bool:
    """Return whether a parameter is this one or in this module."""
    return name == part or name.startswith(f"{part}.")
