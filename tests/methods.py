"""Hyper-parameters of every method, under which it works on every problem of the tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nestfed.algorithms import METHODS
from nestfed.core import Algorithm
from tests import toys
from tests.support import simulate
from tests.toys import SEED


class Case(NamedTuple):
    """Hyper-parameters under which a method works on every problem here, and which of them are of what sort."""

    hyper: dict[str, Any]
    setting: str = "plain"
    steps: tuple[str, ...] = ("eta",)
    """Must be above 0."""
    weights: tuple[str, ...] = ()
    """Must lie in (0, 1]."""
    homogeneous: bool = False
    """Promises to go down only when all clients are alike."""
    personal: bool = False
    """Its answer is one model per client; the shared point alone is none."""


SERVER = {"eta": 0.05, "eta_g": 0.05, "tau": 0.01}
STAGES = {"eta": 0.1, "gamma": 10.0, "T0": 30}

CASES: dict[str, Case] = {
    "fedavg": Case({"eta": 0.05}),
    "fedprox": Case({"eta": 0.05, "mu": 0.1}),
    "fednova": Case({"eta": 0.05}),
    "scaffold": Case({"eta": 0.05}, steps=("eta", "eta_g")),
    "feddyn": Case({"eta": 0.05, "alpha": 0.5}, steps=("eta", "alpha")),
    "ditto": Case({"eta": 0.05, "mu": 0.3}),
    "fedrep": Case({"eta": 0.05, "head": "head", "q_h": 1}, "parted", ("eta", "q_h"), personal=True),
    "stem": Case({"eta": 0.05, "a": 0.3}, weights=("a",)),
    "naive-adaptive": Case({"eta": 0.02, "beta": 0.9}, weights=("beta",), homogeneous=True),
    "fafed": Case({"eta": 0.05, "alpha": 0.3, "rho": 1.0}, steps=("eta", "rho"), weights=("alpha", "beta")),
    "fedadam": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedyogi": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedadagrad": Case({**SERVER, "eta_g": 0.3}, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedams": Case(SERVER, steps=("eta", "eta_g", "tau", "epsilon"), weights=("beta2",)),
    "fcsg": Case({"alpha": 0.05}, "conditional", ("alpha",)),
    "fcsg-m": Case({"alpha": 0.05, "beta": 0.3}, "conditional", ("alpha",), ("beta",)),
    "ada-fcsg-m": Case({"alpha": 0.05, "beta": 0.3, "rho": 1.0}, "conditional", ("alpha", "rho"), ("beta", "rho2")),
    "acc-fcsg-m": Case({"alpha": 0.05, "beta": 0.5}, "conditional", ("alpha",), ("beta",)),
    "sox": Case({"eta": 0.05, "beta": 0.3, "gamma": 0.6}, "sampled", ("eta",), ("beta", "gamma")),
    "bsgd": Case({"alpha": 0.05}, "conditional", ("alpha",)),
    "bspiderboost": Case({"alpha": 0.03, "period": 4}, "conditional", ("alpha", "period")),
    "local-bsgd": Case({"eta": 0.05}, "compositional"),
    "local-scgd": Case({"eta": 0.05, "gamma": 0.7}, "compositional", weights=("gamma",)),
    "local-scgdm": Case(
        {"eta": 0.8, "alpha": 0.9, "beta": 0.06, "gamma": 0.9}, "compositional", ("eta", "alpha", "beta", "gamma")
    ),
    "local-scgdm-tasks": Case(
        {"eta": 0.8, "alpha": 0.9, "beta": 0.06, "gamma": 0.9}, "tasked", ("eta", "alpha", "beta", "gamma")
    ),
    "local-moml": Case({"eta": 0.05, "beta": 0.7}, "tasked", weights=("beta",)),
    "scgd": Case({"eta": 0.05, "gamma": 0.7}, "compositional", weights=("gamma",)),
    "local-sgda": Case({"eta_theta": 0.05, "eta_w": 0.1}, "minimax", ("eta_theta", "eta_w")),
    "momentum-local-sgda": Case(
        {"eta_theta": 0.05, "eta_w": 0.1, "beta": 0.5}, "minimax", ("eta_theta", "eta_w", "a"), ("beta",)
    ),
    "coda": Case(STAGES, "minimax", ("eta", "gamma", "T0")),
    "coda-plus": Case(STAGES, "minimax", ("eta", "gamma", "T0")),
    "codasca": Case(STAGES, "minimax", ("eta", "gamma", "T0", "eta_g")),
    "fmgda": Case({"c_hat": 0.05, "c": 0.1, "alpha": 0.3}, "minimax", ("eta", "c_hat", "c"), ("alpha", "beta")),
    "ada-fmgda": Case(
        {"c_hat": 0.1, "c": 0.2, "alpha": 0.3, "rho": 1.0},
        "minimax",
        ("eta", "c_hat", "c", "rho"),
        ("alpha", "beta", "rho2"),
    ),
    "fedxl1": Case({"eta": 0.05, "passive": 2}, "paired"),
    "fedxl2": Case({"eta": 0.05, "gamma": 0.7, "beta": 0.3, "passive": 2}, "precise", weights=("gamma", "beta")),
    "afl": Case({"eta": 0.05, "gamma": 0.02}, steps=("eta", "gamma"), homogeneous=True),
    "kl-dro": Case(
        {"eta": 0.05, "tau": 0.5, "gamma": 0.7, "k": 3.0}, "counted", ("eta", "tau"), ("gamma",), homogeneous=True
    ),
    "cvar-dro": Case({"eta": 0.05, "rho": 0.6}, steps=("eta", "eta_s"), weights=("rho",), homogeneous=True),
    "q-ffl": Case({"eta": 0.05, "p": 0.5}, homogeneous=True),
}
Q = 3
FEW = ("scaffold", "fedadam", "acc-fcsg-m", "local-scgdm-tasks", "codasca", "fmgda", "bspiderboost")
"""With private fields, a server's state, restarts, tasks, stages, fields of several sizes, a single client."""


def method(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return METHODS[name](**{**CASES[name].hyper, **changes})


def setting(name: str, N: int = 5, dtype: torch.dtype = torch.float64) -> toys.Setting:
    return toys.SETTINGS[CASES[name].setting](1 if METHODS[name].single else N, dtype)


def run(name: str, rounds: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    s = setting(name, dtype=dtype)
    options = {"seed": SEED, "q": Q, "progress": False, "mode": "vmap", **options}
    return simulate(s.problem, options.pop("algorithm", method(name)), s.clients, rounds=rounds, **options)


def run_some(name: str, rounds: int = 4, **options: Any) -> Any:
    """Four of five clients a round, so that some sit out."""
    s = setting(name)
    options = {"q": Q, "seed": SEED, "progress": False, "participation": None if METHODS[name].single else 4, **options}
    return simulate(s.problem, method(name), s.clients, rounds=rounds, **options)
