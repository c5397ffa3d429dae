"""How it is minimised: every method as one client's program. A new method is one class and its name here."""

from __future__ import annotations

import dataclasses
from typing import Any

from nestfed.algorithms.adaptive import FAFED, STEM, FedAdagrad, FedAdam, FedAMS, FedYogi, NaiveAdaptive
from nestfed.algorithms.average import FedAvg, FedProx, Scaffold
from nestfed.algorithms.compositional import SCGD, LocalBSGD, LocalMOML, LocalSCGD, LocalSCGDM, LocalSCGDMTasks
from nestfed.algorithms.conditional import BSGD, FCSG, FCSGM, AccFCSGM, BSpiderBoost
from nestfed.algorithms.minimax import CODA, CODASCA, FMGDA, CODAPlus, LocalSGDA, MomentumLocalSGDA
from nestfed.core import METHODS, Algorithm, NestfedError, unknown

_OWN = (
    FedAvg, FedProx, Scaffold, STEM, NaiveAdaptive, FAFED, FedAdam, FedYogi, FedAdagrad, FedAMS,
    FCSG, FCSGM, AccFCSGM, BSGD, BSpiderBoost,
    LocalBSGD, LocalSCGD, LocalSCGDM, LocalSCGDMTasks, LocalMOML, SCGD,
    LocalSGDA, MomentumLocalSGDA, CODA, CODAPlus, CODASCA, FMGDA,
)  # fmt: skip
for _method in _OWN:
    METHODS.add(_method.name, _method)


def build(name: str, **hyper: Any) -> Algorithm[Any, Any]:
    """Make a method from its name and hyper-parameters; those unknown or missing are named."""
    method = METHODS[name]
    known = {f.name: f for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    for key in hyper:
        if key not in known:
            raise NestfedError(f"{name} has {', '.join(known)}. {unknown('hyper-parameter', key, known)}")
    missing = [k for k, f in known.items() if f.default is dataclasses.MISSING and k not in hyper]
    if missing:
        raise NestfedError(f"{name} needs {', '.join(missing)}.")
    return method(**hyper)


__all__ = ["METHODS", "build", *sorted(m.__name__ for m in _OWN)]
