"""Whole experiments in small: how data are divided, every application that needs no download, tuning, comparing."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.values import adapter
from tests.values.registry import SINGLE, case

case("data/divided")(partial(adapter.divided, [i * i % 5 for i in range(40)], 4, 3))

DIGITS = {"name": "digits", "binary": True, "limit": 240, "validation": 0.25}
LINEAR = {"name": "mlp", "hidden": []}
RUN = {"rounds": 3, "q": 2, "seed": 1}


def experiment(problem: dict[str, Any], algorithm: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return the tables of a small experiment on handwritten digits, or what stands in their place."""
    tables: dict[str, Any] = {"data": DIGITS, "partition": {"clients": 4}, "model": LINEAR}
    tables |= {"problem": problem, "algorithm": algorithm, **others}
    return {**tables, "run": {**RUN, **others.get("run", {})}}


AUPRC = {"name": "auprc", "outer": 2, "inner": 8, "margin": 0.1}
FEDAVG = {"name": "fedavg", "eta": 0.5}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "classify": experiment(
        {"name": "classify", "batch": 8},
        FEDAVG,
        data={**DIGITS, "binary": False},
        partition={"kind": "dirichlet", "clients": 4},
        model={"name": "mlp", "hidden": [5]},
    ),
    "auroc-balanced": experiment({"name": "auroc", "batch": 8}, {"name": "codasca", "eta": 0.1, "gamma": 10.0, "T0": 4}),
    "auroc": experiment(
        {"name": "auroc", "batch": 8, "balanced": False}, {"name": "codasca", "eta": 0.1, "gamma": 10.0, "T0": 4}),
    "auroc-sigmoid": experiment(
        {"name": "auroc", "batch": 8, "balanced": False, "sigmoid": True}, {"name": "fmgda", "c_hat": 0.1, "c": 0.1, "alpha": 0.3}
    ),
    "auprc": experiment(
        {**AUPRC, "inner_positives": 3, "initial_batch": 6},
        {"name": "acc-fcsg-m", "alpha": {"scale": 0.2, "shift": 2.0, "power": 0.5}, "beta": 0.5},
        data={**DIGITS, "remove": "positive", "fraction": 0.5},
    ),
    "partial-auroc": experiment(
        {"name": "partial-auroc", "outer": 2, "inner": 8}, {"name": "sox", "eta": 0.1},
    ),
    "partial-auroc-cvar": experiment(
        {"name": "partial-auroc", "outer": 2, "inner": 8, "form": "cvar"}, {"name": "sox", "eta": 0.1},
    ),
    "paired-partial-auroc": experiment(
        {"name": "paired-partial-auroc", "first": 4, "rho": 0.1}, {"name": "fedxl2", "eta": 0.02, "passive": 4},
        data={**DIGITS, "held_out": "clients"},
    ),
    "judged-by-clients": experiment(
        {"name": "classify", "batch": 8}, {"name": "fedadam", "eta": 0.2, "eta_g": 0.05, "tau": 0.01},
        data={**DIGITS, "held_out": "clients"}, exchange={"count": 3}, evaluation={"every": 2},
    ),
    "best-of-robust": experiment(
        AUPRC, {"name": "fcsg-m", "alpha": 0.2, "beta": 0.5},
        evaluation={"keep": "best", "metric": "ap"},
        exchange={"reduce": "median", "encode": "int8", "failures": 0.2},
    ),
    "every-site-alone": experiment({"name": "classify", "batch": 8}, FEDAVG, run={"sites": "alone"}),
    "invariant": experiment(
        {"name": "invariant", "dim": 4, "inner": 4, "outer": 4},
        {"name": "fcsg-m", "alpha": 0.2, "beta": 0.5},
    ),
    "sine": experiment(
        {"name": "sine", "shots": 5, "test_tasks": 20},
        {"name": "local-moml", "eta": 0.01, "beta": 0.7},
        partition={"clients": 5},
        model={"name": "sine"},
    ),
}  # fmt: skip
for name, tables in EXPERIMENTS.items():
    case(f"experiments/{name}", tolerance=SINGLE)(partial(adapter.run_experiment, tables))

STUDY = experiment(
    AUPRC,
    {"name": "fcsg"},
    run={"rounds": 4},
    evaluation={"metric": "ap"},
    methods={
        "fedavg": {
            "problem": {"name": "classify", "batch": 8},
            "tune": {"eta": [0.01, 0.1, 1.0]},
        },
        "fcsg-m": {
            "algorithm": {"beta": 0.5},
            "tune": {
                "alpha": {"low": 0.01, "high": 1.0, "log": True},
                "problem.margin": [0.1, 0.5],
            },
        },
    },
)
case("studies/tuned", tolerance=SINGLE)(partial(adapter.tuned, STUDY, ["fedavg", "fcsg-m"], 4))
case("studies/compared", tolerance=SINGLE)(partial(adapter.compared, STUDY, ["fedavg", "fcsg-m"], 2, 2))
