"""Write the experiment file of a study from what a person asks for and the sizes of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from nestfed.core import NestfedError, unknown
from nestfed.data.tables import NUMBER, SURVIVAL
from nestfed.study.protect import protected_methods

BATCH = 32
STEPS = (4, 50)
"""The least and the most local steps of a round."""
ROUNDS, EVERY, PATIENCE = 100, 2, 5
"""The most rounds, the rounds between two looks at the validation rows, and the looks without a better value."""
GRID = (0.01, 0.1, 1.0)
"""The step sizes that every method tries; a best step at the end of the grid adds the next one, at most twice."""

Tables = dict[str, Any]

BASELINES: Mapping[str, Tables] = {
    "fedavg": {"problem": {"name": "classify"}, "algorithm": {"name": "fedavg"}, "tune": {"eta": GRID}},
    "fedavg-balanced": {
        "problem": {"name": "classify", "balanced": True}, "algorithm": {"name": "fedavg"}, "tune": {"eta": GRID},
    },
}  # fmt: skip
"""What every study of two classes is compared with."""
PROPOSED: Mapping[str, Tables] = {
    "auroc": {
        "problem": {"name": "auroc"}, "algorithm": {"name": "fmgda", "c_hat": 1.0, "c": 1.0}, "tune": {"eta": GRID},
    },
    "auprc": {"problem": {"name": "auprc"}, "algorithm": {"name": "fcsg-m", "beta": 0.5}, "tune": {"alpha": GRID}},
    "pairwise": {"problem": {"name": "paired-auroc"}, "algorithm": {"name": "fedavg"}, "tune": {"eta": GRID}},
    "partial-auroc": {
        "problem": {"name": "partial-auroc"}, "algorithm": {"name": "fcsg-m", "beta": 0.5}, "tune": {"alpha": GRID},
    },
}  # fmt: skip
"""The nested objectives, each with its method."""
OF_NUMBERS: Mapping[str, Tables] = {
    "fedavg": {"problem": {"name": "regress"}, "algorithm": {"name": "fedavg"}, "tune": {"eta": GRID}},
}
"""What a study of a number trains beside exact linear regression."""
REGRESS = "regress"
METRIC: Mapping[str, str] = {
    "auto": "auroc", "auroc": "auroc", "auprc": "ap", "pairwise": "auroc", "partial-auroc": "auroc", "accuracy": "accuracy",
}  # fmt: skip
"""What decides on validation rows, by objective."""
OBJECTIVES = ("auto", *PROPOSED, "accuracy", REGRESS)


def proposed(
    target: str,
    objective: str,
    rows: Sequence[int],
    classes: Sequence[str],
    *,
    data: Mapping[str, Any] | None = None,
    schema: Mapping[str, Any] | None = None,
    sites: Mapping[str, str] | None = None,
    hidden: Sequence[int] = (),
    rounds: int = 0,
    q: int = 0,
    seed: int = 0,
    study: Mapping[str, Any] | None = None,
) -> Tables:
    """Return the tables of a study.

    - `rows`: the number of rows of each site.
    - `classes`: empty for a target that is a number.
    - `data`, `study`: further settings of [data] and [study].
    - `schema`: the table [schema].
    - `sites`: the file of each site, if the tables are at hand.
    - `rounds`, `q`: 0 = from the sizes of the tables.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if (objective == REGRESS) != (not classes) and objective != "auto":
        kind = "a number" if objective == REGRESS else "classes"
        raise NestfedError(f"The objective {objective} is for {kind}, which {target!r} is not.")
    training = 0.75 * 0.75 * median(rows)
    binary = len(classes) == 2
    if classes and not binary and objective not in ("auto", "accuracy"):
        raise NestfedError(
            f"{objective} is for two classes, but {target!r} has {len(classes)} ({', '.join(classes)}): use the objective "
            "accuracy or auto."
        )
    if not classes:
        methods = dict(OF_NUMBERS)
    elif not binary or objective == "accuracy":
        methods = {"fedavg": BASELINES["fedavg"]}
    else:
        wanted = PROPOSED if objective == "auto" else {objective: PROPOSED[objective]}
        methods = {**wanted, **BASELINES}
    metric = _metric(objective, classes)
    protect = bool((study or {}).get("protect"))
    if protect:
        methods = {**methods, **protected_methods([round(0.75 * 0.75 * n) for n in rows], GRID)}
    first = next(iter(methods.values()))
    least, most = STEPS
    tables: Tables = {
        "data": {"target": target, **_kind(classes), "test": 0.25, "validation": 0.25, **(data or {})},
        "model": {"name": "mlp", "hidden": list(hidden)},
        "problem": dict(first["problem"]),
        "run": {"rounds": rounds or ROUNDS, "q": q or min(max(round(training / BATCH), least), most), "seed": seed},
        "evaluation": {
            "every": EVERY, "keep": "best", "patience": PATIENCE, "metric": metric,
        },
        "study": {"release": "first" if objective in PROPOSED and not protect else "best", **(study or {})},
        "methods": {name: {k: _plain(v) for k, v in one.items()} for name, one in methods.items()},
    }  # fmt: skip
    if schema:
        tables["schema"] = dict(schema)
    if sites:
        tables["sites"] = dict(sites)
    return tables


def proposed_survival(
    time: str,
    event: str,
    *,
    data: Mapping[str, Any] | None = None,
    sites: Mapping[str, str] | None = None,
    times: Sequence[float] = (),
    seed: int = 0,
) -> Tables:
    """Return the tables of a survival study: exact Cox regression for the time to an event.

    - `time`, `event`: the columns of times, and of whether the event happened.
    - `data`: further settings of [data].
    - `sites`: the file of each site, if the tables are at hand.
    - `times`: when survival is judged and predicted.
    """
    tables: Tables = {
        "data": {
            "target": event, "time": time, "target_kind": SURVIVAL, "test": 0.25, "validation": 0.25, **(data or {}),
        },
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": "cox", **({"times": list(times)} if times else {})},
        "run": {"seed": seed},
        "study": {},
    }  # fmt: skip
    if sites:
        tables["sites"] = dict(sites)
    return tables


def _kind(classes: Sequence[str]) -> Tables:
    return {"classes": list(classes)} if classes else {"target_kind": NUMBER}


def _metric(objective: str, classes: Sequence[str]) -> str:
    if not classes:
        return "rmse"
    return METRIC[objective] if len(classes) == 2 else "accuracy"


def _plain(table: Mapping[str, Any]) -> Tables:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in table.items()}
