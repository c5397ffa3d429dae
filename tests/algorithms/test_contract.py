"""What every method promises: the public checks of `nestfed.testing`, and the library's own habits.

A new method is held to it by a row in CASES.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import cases
import pytest
import torch
from cases import SEED
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, Quadratic
from support import simulate

from nestfed.algorithms import METHODS, build
from nestfed.core import Algorithm, NestfedError, Problem
from nestfed.testing import ALGORITHM_CHECKS, Trial, check_clients, check_problem


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


SERVER = {"eta": 0.05, "eta_g": 0.05, "tau": 0.01}
STAGES = {"eta": 0.1, "gamma": 10.0, "T0": 30}

CASES: dict[str, Case] = {
    "fedavg": Case({"eta": 0.05}),
    "fedprox": Case({"eta": 0.05, "mu": 0.1}),
    "scaffold": Case({"eta": 0.05}, steps=("eta", "eta_g")),
    "stem": Case({"eta": 0.05, "a": 0.3}, weights=("a",)),
    "naive-adaptive": Case({"eta": 0.02, "beta": 0.9}, weights=("beta",), homogeneous=True),
    "fafed": Case({"eta": 0.05, "alpha": 0.3, "rho": 1.0}, steps=("eta", "rho"), weights=("alpha", "beta")),
    "fedadam": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedyogi": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedadagrad": Case({**SERVER, "eta_g": 0.3}, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedams": Case(SERVER, steps=("eta", "eta_g", "tau", "epsilon"), weights=("beta2",)),
    "fcsg": Case({"alpha": 0.05}, "conditional", ("alpha",)),
    "fcsg-m": Case({"alpha": 0.05, "beta": 0.3}, "conditional", ("alpha",), ("beta",)),
    "acc-fcsg-m": Case({"alpha": 0.05, "beta": 0.5}, "conditional", ("alpha",), ("beta",)),
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
}
Q = 3
every = pytest.mark.parametrize("name", METHODS)
federated = pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].single])


def method(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return METHODS[name](**{**CASES[name].hyper, **changes})


def setting(name: str, N: int = 5, dtype: torch.dtype = torch.float64) -> cases.Setting:
    return cases.SETTINGS[CASES[name].setting](1 if METHODS[name].single else N, dtype)


def run(name: str, rounds: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    s = setting(name, dtype=dtype)
    options = {"seed": SEED, "q": Q, "progress": False, "mode": "vmap", **options}
    return simulate(s.problem, options.pop("algorithm", method(name)), s.clients, rounds=rounds, **options)


def one_sentence(error: Any) -> str:
    text = str(error.value)
    assert text.endswith(".")
    assert not re.search(r"[.!?]\s+[A-Z]", text)
    assert "\n" not in text
    return text


def test_every_method_is_listed() -> None:
    assert set(CASES) == set(METHODS)


@every
@pytest.mark.parametrize("check", ALGORITHM_CHECKS)
def test_contract(name: str, check: str) -> None:
    s = setting(name)
    ALGORITHM_CHECKS[check](Trial(method(name), s.problem, s.clients.seeded(SEED), Q, seed=SEED))


@every
def test_dtype_is_kept_in_float32_too(name: str) -> None:
    s = setting(name, dtype=torch.float32)
    ALGORITHM_CHECKS["dtype"](Trial(method(name), s.problem, s.clients.seeded(SEED), Q, seed=SEED))


@every
def test_named_as_in_files_and_made_for_some_kind(name: str) -> None:
    assert method(name).name == name
    assert METHODS[name].accepts is not Problem


@pytest.mark.parametrize("kind", cases.SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_settings_keep_the_contract(kind: str, dtype: torch.dtype) -> None:
    s = cases.SETTINGS[kind](4, dtype)
    check_clients(s.clients)
    check_problem(s.problem, s.clients)


def identical(left: Any, right: Any) -> None:
    """Compare to the last bit; the order of names does not matter."""
    if isinstance(left, dict):
        assert set(left) == set(right)
        right = {k: right[k] for k in left}
    for a, b in zip(torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@every
def test_goes_down_on_a_convex_problem(name: str) -> None:
    """The gap to the optimum falls to a fifth and less on a problem of the method's kind with known truth."""
    case = CASES[name]
    N = 1 if METHODS[name].single else 4
    toy: Any = {
        "plain": lambda: Quadratic(N, 3, zeta=0.0 if case.homogeneous else 1.0, condition=4.0, sigma=0.1, batch=2),
        "conditional": lambda: ConditionalToy(N, 3, zeta=0.3, sigma=0.3, inner=8, outer=4),
        "compositional": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "tasked": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "minimax": lambda: MinimaxToy(N, 3, 2, zeta=0.3, sigma=0.1, batch=2),
    }[case.setting]()
    result = simulate(toy.problem, method(name), toy.clients, rounds=40, q=Q, seed=SEED, progress=False, mode="vmap")
    best = toy.value(toy.minimiser)
    gap = toy.value(toy.problem.x0) - best
    assert gap > 0.3
    assert toy.value(result.x) - best < gap / 5


def test_a_drawn_outcome_when_nobody_answers_or_the_draw_is_past(tmp_path: Path) -> None:
    """A round without answers leaves the point where it was; a run that was not asked for a draw cannot give one."""
    for seed in range(6):
        result = run("fedavg", 3, failures=0.9, keep="uniform", seed=seed)
        assert torch.isfinite(result.x).all()
    run("fedavg", 5, directory=tmp_path)
    with pytest.raises(NestfedError, match="uniform"):
        run("fedavg", 5, directory=tmp_path, keep="uniform")


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("local-scgdm", {"eta": 1.0, "alpha": 0.5, "beta": 0.1, "gamma": lambda t: 0.3 * t}),
        ("fcsg-m", {"alpha": 0.05, "beta": lambda t: 0.3 * t}),
    ],
)
def test_a_weight_that_would_grow_above_one_is_rejected_before_the_start(name: str, hyper: dict[str, Any]) -> None:
    s = setting(name)
    algorithm = build(name, **hyper)
    simulate(s.problem, algorithm, s.clients, rounds=1, q=4, progress=False)
    with pytest.raises(NestfedError, match=r"must be in \(0, 1\], not 2.1, .* at iteration 7"):
        simulate(s.problem, algorithm, s.clients, rounds=2, q=4, progress=False)


@every
def test_refuses_wrong_hyper_parameters(name: str) -> None:
    """Every number: text, NaN, infinity and less than nothing; a step size: 0; a weight: outside (0, 1]."""
    case, refused = CASES[name], []
    for field in dataclasses.fields(method(name)):  # type: ignore[arg-type]
        if field.name == "norm":
            continue
        values: list[Any] = ["0.1", math.nan, -1.0, None, True, lambda t: "x"]
        values += [math.inf] if field.name != "gamma" else []
        values += [0.0, lambda t: 0.0] if field.name in (*case.steps, *case.weights) else []
        values += [1.5, lambda t: 1.5] if field.name in case.weights else []
        refused += [(field.name, v) for v in values if not (field.name == "c" and v is None and name != "fmgda")]
    assert {*case.steps, *case.weights} <= {field for field, _ in refused}
    for field_name, value in refused:
        with pytest.raises(NestfedError) as error:
            method(name, **{field_name: value})
        text = one_sentence(error)
        assert text.startswith(name)


@every
def test_a_number_that_cannot_vary_refuses_a_function(name: str) -> None:
    """A field that is not declared as a schedule says so, instead of failing after the start."""
    varying = {}
    for field in dataclasses.fields(method(name)):  # type: ignore[arg-type]
        if "Schedule" in str(field.type):
            constant = getattr(method(name), field.name)
            varying[field.name] = lambda t, constant=constant: constant
        elif field.name != "norm":
            with pytest.raises(NestfedError, match=field.name):
                method(name, **{field.name: lambda t: 0.5})
    identical(run(name, 2, algorithm=method(name, **varying)).shared, run(name, 2).shared)


@every
def test_names_wrong_hyper_parameters(name: str) -> None:
    assert build(name, **CASES[name].hyper) == method(name)
    with pytest.raises(NestfedError, match="learning_rate"):
        build(name, learning_rate=0.1)
