"""What every method promises: the public checks of `nestfed.testing`, and the library's own habits.

A new method is held to it by a row in CASES.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, Quadratic

from nestfed.algorithms import METHODS, build
from nestfed.core import NestfedError, Problem
from nestfed.testing import ALGORITHM_CHECKS, Trial, check_clients, check_problem
from tests import toys
from tests.methods import CASES, Q, method, run, setting
from tests.support import identical, simulate
from tests.toys import SEED

every = pytest.mark.parametrize("name", METHODS)


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
    s = setting(name, N=3)
    ALGORITHM_CHECKS[check](Trial(method(name), s.problem, s.clients.seeded(SEED), Q, rounds=3, seed=SEED))


@every
def test_dtype_is_kept_in_float32_too(name: str) -> None:
    s = setting(name, dtype=torch.float32)
    ALGORITHM_CHECKS["dtype"](Trial(method(name), s.problem, s.clients.seeded(SEED), Q, seed=SEED))


@every
def test_named_as_in_files_and_made_for_some_kind(name: str) -> None:
    assert method(name).name == name
    assert METHODS[name].accepts is not Problem


@pytest.mark.parametrize("kind", toys.SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_settings_keep_the_contract(kind: str, dtype: torch.dtype) -> None:
    s = toys.SETTINGS[kind](4, dtype)
    check_clients(s.clients)
    check_problem(s.problem, s.clients)


@pytest.mark.parametrize("name", [name for name in METHODS if not CASES[name].personal])
def test_goes_down_on_a_convex_problem(name: str) -> None:
    """The gap to the optimum falls to a fifth and less on a problem of the method's kind with known truth."""
    case = CASES[name]
    N = 1 if METHODS[name].single else 4

    def bowl() -> Quadratic:
        return Quadratic(N, 3, zeta=0.0 if case.homogeneous else 1.0, condition=4.0, sigma=0.1, batch=2)

    toy: Any = {
        "plain": bowl,
        "counted": bowl,
        "conditional": lambda: ConditionalToy(N, 3, zeta=0.3, sigma=0.3, inner=8, outer=4),
        "sampled": lambda: toys.OwnExamples(N, sigma=0.3, inner=8, outer=4),
        "compositional": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "tasked": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "minimax": lambda: MinimaxToy(N, 3, 2, zeta=0.3, sigma=0.1, batch=2),
        "paired": lambda: toys.Ranking(N),
        "precise": lambda: toys.Ranking(N),
    }[case.setting]()
    clients = toys.Counting(toy.clients) if case.setting == "counted" else toy.clients
    result = simulate(toy.problem, method(name), clients, rounds=20, q=Q, seed=SEED, progress=False, mode="vmap")
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
        values: list[Any] = ["" if field.name == "head" else "0.1", math.nan, -1.0, None, True, lambda t: "x"]
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
