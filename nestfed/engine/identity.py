"""What identifies a run in its checkpoints, and what differs from another run."""

from __future__ import annotations

import re

from nestfed.engine.options import Exchange
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.schedules import described

_PARTS = re.compile(
    r"(?P<method>.*) q=(?P<q>\d+) seed=(?P<seed>\d+) N=(?P<N>\d+) d=(?P<d>\d+) Exchange(?P<exchange>.*)"
)
_OPTION = re.compile(r"(\w+)=(Gaussian\(.*?\)|'.*?'|[^,)]*)")
_AFTER = " after "
"""Stands before the identity of a warm-up."""


def identity(method: AnyAlgorithm, q: int, seed: int, clients: int, parameters: int, exchange: Exchange) -> str:
    """Return what identifies a run."""
    return f"{described(method)} q={q} seed={seed} N={clients} d={parameters} {exchange!r}"


def after_warm_up(own: str, rounds: int, warm_up: str) -> str:
    """Return the identity of a run whose first rounds are a warm-up."""
    return f"{own}{_AFTER}{rounds} rounds of {warm_up}"


def difference(now: str, before: str) -> str:
    """Return which part of an identity differs, in one clause; nothing if it is unknown."""
    (own, _, warm), (held, _, held_warm) = now.partition(_AFTER), before.partition(_AFTER)
    if own == held:
        first, other = (found.partition(" of ")[2] for found in (warm, held_warm))
        inside = difference(first, other) if first and other and first != other else ""
        return (
            f"in the warm-up, {inside}"
            if inside
            else f"the warm-up is {warm or 'none'} instead of {held_warm or 'none'}"
        )
    parts, others = _PARTS.fullmatch(own), _PARTS.fullmatch(held)
    if parts is None or others is None:
        return ""
    name = next(name for name in _PARTS.groupindex if parts[name] != others[name])
    if name != "exchange":
        return f"{_WORDS.get(name, name)} is {parts[name]} instead of {others[name]}"
    option = dict(_OPTION.findall(others[name]))
    return next(
        (
            f"exchange.{k} is {v} instead of {option.get(k)}"
            for k, v in _OPTION.findall(parts[name])
            if option.get(k) != v
        ),
        "",
    )


_WORDS = {"method": "the method", "N": "the number of clients", "d": "the number of parameters"}
