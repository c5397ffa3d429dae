"""Wrap the evaluations of a problem, to time them or to check their numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from nestfed.core import Batch, Composed, Differentiable, Paired, Problem, Saddle, SolvableSaddle
from nestfed.engine.round import Reply

P = TypeVar("P", bound=Problem)
Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]

EVALUATIONS: Mapping[Any, tuple[str, ...]] = {
    Differentiable: ("grad",),
    Composed: ("inner", "outer_grad"),
    Paired: ("scores",),
    Saddle: ("grads",),
    SolvableSaddle: ("best_dual",),
}
"""The methods that an algorithm may call, by kind of problem."""


def intercepted(problem: P, around: Around) -> P:
    """Return a copy of the problem with `around` applied to each evaluation."""
    twin = copy.copy(problem)
    for kind, names in EVALUATIONS.items():
        if isinstance(problem, kind):
            for name in names:
                object.__setattr__(twin, name, around(name, getattr(problem, name)))
    return twin


def timed(reply: Reply) -> Around:
    """Time every evaluation, and the pullback that it may return."""

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with reply.lap("gradients"):
                result = function(*args)
            if isinstance(result, tuple) and callable(result[-1]):
                return *result[:-1], around(name, result[-1])
            return result

        return call

    return around


class WrongNumberError(Exception):
    """A number became infinite or NaN; the text says which."""


def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Stop at the first evaluation with an infinite or NaN number."""
    what = {
        "inner": "the inner value",
        "outer_grad": "the outer gradient",
        "best_dual": "the best w",
        "scores": "the score",
    }

    def call(*args: Any) -> Any:
        result = function(*args)
        if isinstance(args[-1], Batch) and args[-1].tape.loss is not None:
            reject_infinite({"loss": args[-1].tape.loss})
        parts = result if isinstance(result, tuple) else (result,)
        for part in parts:
            if callable(part) and not isinstance(part, Tensor):
                return *parts[:-1], watched("grad", part)
            reject_infinite({what.get(name, "the gradient"): part})
        return result

    return call


def reject_infinite(named: Mapping[str, Any]) -> None:
    """Raise an error for the first tensor with an infinite or NaN number."""
    for name, value in named.items():
        # Check the square: uploads are checked by their norm, which overflows before the number does.
        if isinstance(value, Tensor) and not bool(torch.isfinite(value.square().sum())):
            raise WrongNumberError(name)
