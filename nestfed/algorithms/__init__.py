"""How it is minimised: every method as one client's program. A new method is one class and one row here."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from nestfed.algorithms.adaptive import FAFED, STEM, FedAdagrad, FedAdam, FedAMS, FedYogi, NaiveAdaptive
from nestfed.algorithms.average import FedAvg, FedProx, Scaffold
from nestfed.algorithms.compositional import SCGD, LocalBSGD, LocalMOML, LocalSCGD, LocalSCGDM, LocalSCGDMTasks
from nestfed.algorithms.conditional import BSGD, FCSG, FCSGM, AccFCSGM, BSpiderBoost
from nestfed.algorithms.minimax import CODA, CODASCA, FMGDA, CODAPlus, LocalSGDA, MomentumLocalSGDA
from nestfed.core import Algorithm, NestfedError

FAMILIES: dict[str, tuple[type[Algorithm[Any, Any]], ...]] = {
    "plain": (
        FedAvg, FedProx, Scaffold, STEM, NaiveAdaptive, FAFED, FedAdam, FedYogi, FedAdagrad, FedAMS,
    ),
    "conditional": (FCSG, FCSGM, AccFCSGM, BSGD, BSpiderBoost),
    "compositional": (LocalBSGD, LocalSCGD, LocalSCGDM, LocalSCGDMTasks, LocalMOML, SCGD),
    "minimax": (LocalSGDA, MomentumLocalSGDA, CODA, CODAPlus, CODASCA, FMGDA),
}  # fmt: skip

TABLE = {method.name: method for family in FAMILIES.values() for method in family}


def find(name: str) -> type[Algorithm[Any, Any]]:
    """Return the class of a method by its name."""
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else "; `nestfed list` shows all."
        raise NestfedError(f"There is no algorithm {name!r}{hint}")
    return TABLE[name]


def build(name: str, **hyper: Any) -> Algorithm[Any, Any]:
    """Make a method from its name and hyper-parameters; those unknown or missing are named."""
    method = find(name)
    known = {f.name: f for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    for key in hyper:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise NestfedError(f"{name} has no hyper-parameter {key!r} (it has {', '.join(known)}){hint}")
    missing = [k for k, f in known.items() if f.default is dataclasses.MISSING and k not in hyper]
    if missing:
        raise NestfedError(f"{name} needs {', '.join(missing)}.")
    return method(**hyper)


__all__ = ["FAMILIES", "TABLE", "build", "find", *sorted(m.__name__ for m in TABLE.values())]
