"""What the theorems prescribe and promise: step sizes, bounds term by term, conditions, complexities.

`prescribe("fcsg", N=16, T=10000).lines()` is the whole story as text. S_F, L_F and L are the smoothness of
the whole objective, derived from the constants of its layers as each paper does. Where a printed formula does
not follow from its own proof, the docstring says in one sentence which one is used here.
"""

from __future__ import annotations

import difflib
from typing import Any

from nestfed.core import NestfedError
from nestfed.theory import adaptive, compositional, conditional, minimax
from nestfed.theory.base import COMPLEXITY, METHODS, Bound, Complexity, CubeRoot, Method, Prescription, Squared, join

__all__ = [
    "COMPLEXITY",
    "METHODS",
    "Bound",
    "Complexity",
    "CubeRoot",
    "Method",
    "Prescription",
    "Squared",
    "adaptive",
    "compositional",
    "conditional",
    "method",
    "minimax",
    "prescribe",
]


def method(name: str) -> Method:
    """The row of a method; an unknown name is answered with the nearest one."""
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        near = difflib.get_close_matches(key, METHODS, n=1)
        hint = f"did you mean {near[0]}" if near else f"choose {join(METHODS).replace(' and ', ' or ')}"
        raise NestfedError(f"There is no theorem for {name!r}: {hint}.")
    return METHODS[key]


def prescribe(name: str, **constants: Any) -> Prescription:
    """What the theorem of a method prescribes for a problem with these constants."""
    row = method(name)
    missing = [n for n in row.required if constants.get(n) is None]
    if missing:
        rest = ", ".join(n if v is None else f"{n}={v:g}" for n, v in row.optional.items())
        raise NestfedError(f"{row.title} needs {join(missing)}; optional are {rest}.")
    known = [*row.required, *row.optional]
    for n in constants:
        if n not in known:
            near = difflib.get_close_matches(n, known, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise NestfedError(f"{row.title} has no constant {n!r}{hint}; it knows {join(known)}.")
    return row.prescribe(row.constants(**constants))
