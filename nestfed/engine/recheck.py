"""When a run resumes: does the user's evaluation still find what the record says?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.engine.record import metric_names
from nestfed.engine.round import Record

SHARE = 1e-3
LEAST = 1e-6
"""Processors and threads change a metric by less than this share, or this amount."""


def refuse_other_metrics(
    records: Sequence[Record], round: int, measure: Callable[[], Mapping[str, float]], path: Path | None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> None:  # fmt: skip
    """Evaluate the state after a round again; raise an error if the record has other metrics, or other values.

    With `agree`, every rank takes part and raises the error of the first.
    """
    names = metric_names(records)
    if not agree(bool(names)):
        return
    found = measure()
    error = agree(differing_names(names, found, path))
    before: Mapping[str, Any] = next((r for r in records if r["round"] == round), {})
    if (
        not error
        and (other := agree(_differing_value(before, found)))
        and not agree(_differing_value(found, measure()))
    ):
        # An evaluation that differs from itself is random, and says nothing.
        error = f"{path} contains a run with another evaluation: after round {round} it finds {other}. Choose another directory."
    if error:
        raise NestfedError(error)


def differing_names(known: Sequence[str], found: Mapping[str, float], path: Path | None) -> str:
    """Return an error if metrics do not have the names of those in the record."""
    if not known or not found or set(known) == set(found):
        return ""
    where = "the record of this run" if path is None else f"the record in {path}"
    return f"The evaluation returns {', '.join(found)}, but {where} has {', '.join(known)}."


def _differing_value(before: Mapping[str, Any], found: Mapping[str, float]) -> str:
    for name, value in found.items():
        if name not in before:
            continue
        held = before[name]
        if held is None or not math.isfinite(held) or not math.isfinite(value):  # the record has no infinite numbers
            same = not math.isfinite(value) and (held is None or not math.isfinite(held))
        else:
            same = abs(value - held) <= SHARE * max(abs(value), abs(held)) + LEAST
        if not same:
            return f"{name} = {value:.6g} instead of {held if held is None else f'{held:.6g}'}"
    return ""
