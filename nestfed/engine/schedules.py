"""Schedules of a run: any function of t identifies itself by its values, and is checked at every iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from nestfed.core import Algorithm, NestfedError
from nestfed.engine.program import AnyAlgorithm, span_from

SAMPLES = (0, 1, 2, 3, 7, 20, 100, 1000, 10_000)
"""The iterations that identify a schedule."""


def iterations(method: AnyAlgorithm, rounds: int, q: int) -> int:
    """Return the number of iterations in a number of rounds."""
    t = 0
    for _ in range(rounds):
        t = span_from(method, t, q).stop
    return t


def described(method: AnyAlgorithm) -> str:
    """Return a method's class and hyper-parameters; a schedule by its values, so that any function can be compared."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
    return f"{type(method).__name__}({', '.join(f'{k}={_described(v)}' for k, v in values.items())})"


def _described(value: Any) -> str:
    if isinstance(value, Algorithm):
        return described(value)
    return f"[{', '.join(_sampled(value, t) for t in SAMPLES)}]" if callable(value) else repr(value)


def _sampled(schedule: Callable[[int], float], t: int) -> str:
    try:
        return f"{float(schedule(t)):.10g}"
    except (ArithmeticError, ValueError, TypeError):  # such as 1/t at 0, which a method may never ask for
        return "undefined"


def check_schedules(method: AnyAlgorithm, rounds: int, q: int) -> None:
    """Reject a schedule that fails, or leaves the range of its hyper-parameter, at any iteration of a run."""
    for field in fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if isinstance(value, Algorithm):
            check_schedules(value, rounds, q)
        elif callable(value):
            start = 0 if field.name in method.steps else 1  # momentum weights are not used at t = 0
            _check_schedule(method, field.name, value, range(start, iterations(method, rounds, q)))


def _check_schedule(method: AnyAlgorithm, name: str, schedule: Callable[[int], float], ts: range) -> None:
    """Try the smallest and the largest value as constants: ranges are intervals."""
    values = {}
    for t in ts:
        try:
            values[t] = float(schedule(t))
        except Exception as error:
            raise NestfedError(
                f"{method.name}: the schedule {name} fails at iteration {t}: {type(error).__name__}: {error}."
            ) from error
        if not math.isfinite(values[t]):
            raise NestfedError(f"{method.name}: the schedule {name} is {values[t]} at iteration {t}.")
    for t in {pick(values, key=values.__getitem__) for pick in (min, max)} if values else ():
        try:
            replace(method, **{name: values[t]})  # type: ignore[type-var]
        except NestfedError as error:
            raise NestfedError(f"{str(error).rstrip('.')}, the value of its schedule at iteration {t}.") from None
