"""The theorems in numbers: step sizes, bounds term by term, conditions, complexities.

`prescribe("fcsg", N=16, T=10000).lines()` gives all of it as text. S_F, L_F and L are the smoothness constants of
the whole objective, derived from those of its layers as in each paper. Where a printed formula does not follow from
its proof, the docstring says which one is used here.
"""

from __future__ import annotations

from typing import Any

from nestfed.core import NestfedError, unknown
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
    """Return the row of a method; for an unknown name, suggest the nearest one."""
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        raise unknown("theorem for", name, METHODS)
    return METHODS[key]


def prescribe(name: str, **constants: Any) -> Prescription:
    """Return what a method's theorem prescribes for a problem with these constants."""
    row = method(name)
    missing = [n for n in row.required if constants.get(n) is None]
    if missing:
        rest = ", ".join(n if v is None else f"{n}={v:g}" for n, v in row.optional.items())
        raise NestfedError(f"{row.title} needs {join(missing)}; optional constants are {rest}.")
    known = [*row.required, *row.optional]
    for n in constants:
        if n not in known:
            raise unknown("constant", n, known, owner=row.title)
    return row.prescribe(row.constants(**constants))
