"""Every method as one client's program: one file per family. A class with a `name` in such a file is registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nestfed.algorithms import adaptive, average, compositional, conditional, minimax, pairs, personal, worst
from nestfed.algorithms.adaptive import FAFED, STEM, FedAdagrad, FedAdam, FedAMS, FedYogi, NaiveAdaptive
from nestfed.algorithms.alone import Alone
from nestfed.algorithms.average import FedAvg, FedDyn, FedNova, FedProx, Scaffold
from nestfed.algorithms.compositional import SCGD, LocalBSGD, LocalMOML, LocalSCGD, LocalSCGDM, LocalSCGDMTasks
from nestfed.algorithms.conditional import BSGD, FCSG, FCSGM, SOX, AccFCSGM, AdaFCSGM, BSpiderBoost
from nestfed.algorithms.minimax import CODA, CODASCA, FMGDA, AdaFMGDA, CODAPlus, LocalSGDA, MomentumLocalSGDA
from nestfed.algorithms.pairs import FeDXL1, FeDXL2
from nestfed.algorithms.personal import Ditto, FedRep
from nestfed.algorithms.server import AMS, Adagrad, Adam, Momentum, Yogi
from nestfed.algorithms.worst import AFL, KLDRO, QFFL, CVaRDRO
from nestfed.core import METHODS, SERVERS, Algorithm, Average, NestfedError, Server, unknown

__all__ = [
    "AFL", "AMS", "BSGD", "CODA", "CODASCA", "FAFED", "FCSG", "FCSGM", "FMGDA", "KLDRO", "METHODS", "QFFL", "SCGD", "SERVERS", "SOX", "STEM", "AccFCSGM",
    "AdaFCSGM", "AdaFMGDA", "Adagrad", "Adam", "Alone", "Average", "BSpiderBoost", "CODAPlus", "CVaRDRO", "Ditto", "FeDXL1", "FeDXL2", "FedAMS", "FedAdagrad", "FedAdam",
    "FedAvg", "FedDyn", "FedNova", "FedProx", "FedRep", "FedYogi", "LocalBSGD", "LocalMOML", "LocalSCGD", "LocalSCGDM", "LocalSCGDMTasks", "LocalSGDA",
    "Momentum", "MomentumLocalSGDA", "NaiveAdaptive", "Scaffold", "Yogi", "build", "build_server",
]  # fmt: skip

for _module in (average, adaptive, personal, conditional, compositional, minimax, pairs, worst):
    for _thing in vars(_module).values():  # every method that a family's file defines, in its order
        if isinstance(_thing, type) and issubclass(_thing, Algorithm) and "name" in vars(_thing):
            METHODS.add(_thing.name, _thing)


for _server in (Average, Momentum, Adam, Yogi, Adagrad, AMS):
    SERVERS.add(_server.name, _server)


def build(method: str | type[Algorithm[Any, Any]], **hyper: Any) -> Algorithm[Any, Any]:
    """Make a method from its name or class and hyper-parameters; an error names unknown or missing ones."""
    kind = METHODS[method] if isinstance(method, str) else method
    _check_names(kind, hyper)
    return kind(**hyper)


def build_server(name: str, **hyper: Any) -> Server:
    """Make a server from its name and hyper-parameters; an error names unknown or missing ones."""
    kind = SERVERS[name]
    _check_names(kind, hyper)
    return kind(**hyper)


def _check_names(kind: Any, hyper: Mapping[str, Any]) -> None:
    """Reject unknown and missing hyper-parameters."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in hyper:
        if key not in known:
            has = f"{kind.name} has {', '.join(known)}. " if known else f"{kind.name} has no hyper-parameters. "
            raise NestfedError(f"{has}{unknown('hyper-parameter', key, known)}")
    missing = [k for k, f in known.items() if f.default is dataclasses.MISSING and k not in hyper]
    if missing:
        raise NestfedError(f"{kind.name} needs {', '.join(missing)}.")
