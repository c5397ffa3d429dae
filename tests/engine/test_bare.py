"""A problem with nothing but the abstract methods, and clients with just len and sample, run on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nestfed.algorithms import STEM, AccFCSGM, BSpiderBoost, Ditto
from nestfed.core import Clients, NestfedError, as_clients
from nestfed.study.advice import smoothness
from nestfed.testing import ALGORITHM_CHECKS, Trial, check_clients, check_problem
from tests.bare import BARE, CLIENTS, OPTIONS, ROWS, run
from tests.support import close, on_two_ranks, simulate

KINDS = pytest.mark.parametrize("kind", BARE)


@KINDS
def test_the_problem_and_its_clients_keep_the_contract(kind: str) -> None:
    problem, _, clients = BARE[kind]
    check_clients(clients)
    check_problem(problem, clients)


@KINDS
@pytest.mark.parametrize("check", ALGORITHM_CHECKS)
def test_methods_keep_their_contract_on_it(kind: str, check: str) -> None:
    problem, method, clients = BARE[kind]
    ALGORITHM_CHECKS[check](Trial(method, problem, as_clients(clients)))


@KINDS
def test_every_engine_of_one_machine(kind: str, tmp_path: Path) -> None:
    loop = run(kind, mode="loop")
    assert torch.is_tensor(loop.model)  # a problem without a module gives the vector
    for options in ({"mode": "vmap"}, {"mode": "auto"}, {"mode": "loop", "workers": 2}, {"mode": "vmap", "workers": 2}):
        close(run(kind, **options), loop)
    run(kind, mode="loop", directory=tmp_path)
    close(run(kind, mode="loop", directory=tmp_path), loop)


@KINDS
def test_models_and_measures_are_vectors(kind: str) -> None:
    seen: list[Any] = []
    run(kind, mode="loop", evaluate=lambda model: seen.append(model) or {"first": float(model[0])})
    assert len(seen) == 5
    assert all(torch.is_tensor(model) for model in seen)


@KINDS
def test_profile_and_errors_need_nothing_more(kind: str) -> None:
    problem, method, clients = BARE[kind]
    assert run(kind, mode="loop", profile=True).profile["gradients"] > 0

    class Sick(type(clients)):  # type: ignore[misc]
        def sample(self, n: int, t: int) -> Any:
            return tuple(v * float("nan") if (n, t) == (2, 4) else v for v in super().sample(n, t))

    with pytest.raises(NestfedError, match=r"The data contain infinite or NaN values at client 2, iteration 4"):
        simulate(problem, method, Sick(*clients.widths), rounds=4, **OPTIONS)


@KINDS
def test_smoothness_asks_for_nothing_more(kind: str) -> None:
    problem, _, clients = BARE[kind]
    assert smoothness(problem, clients) > 0


def test_two_ranks(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        results = {kind: run(kind, mode="loop") for kind in BARE}
        return {kind: (dict(result.shared), result.history) for kind, result in results.items()}

    for found in on_two_ranks(work, tmp_path):
        for kind in BARE:
            loop = run(kind, mode="loop")
            shared, history = found[kind]
            torch.testing.assert_close(shared, dict(loop.shared), rtol=1e-10, atol=1e-10)
            assert [r["bytes_up"] for r in history] == [r["bytes_up"] for r in loop.history]


@KINDS
def test_without_notes_the_engine_counts_rows_and_records_no_loss(kind: str) -> None:
    for mode in ("loop", "vmap"):
        history = run(kind, mode=mode).history
        assert [r["examples"] for r in history] == [CLIENTS * ROWS * OPTIONS["q"] * (i + 1) for i in range(4)]
        assert [r["loss"] for r in history] == [None] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "loop"},
        {"mode": "vmap"},
        pytest.param({"mode": "vmap", "compile": True}, marks=pytest.mark.long),  # compiles four methods
    ],
    ids=str,
)
def test_without_notes_both_points_of_a_correction_count(options: dict[str, Any]) -> None:
    problem, _, clients = BARE["differentiable"]
    q, once = OPTIONS["q"], CLIENTS * ROWS
    for method, costs in (
        (AccFCSGM(0.05), [once * (2 * q * (i + 1) - 1) for i in range(4)]),  # the first step evaluates once
        (STEM(0.05), [once * (2 * q * i + 1) for i in range(4)]),  # round 1 is the first estimate alone
        (Ditto(0.05), [once * 2 * q * (i + 1) for i in range(4)]),
        (BSpiderBoost(0.05, period=2), [ROWS * n for n in (4, 9, 13, 18)]),
    ):
        some = Alone(clients) if method.single else clients
        history = simulate(problem, method, some, rounds=4, **{**OPTIONS, "workers": 1, **options}).history
        assert [r["examples"] for r in history] == costs, method.name


class Alone(Clients):
    """The first client."""

    def __init__(self, clients: Any) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return 1

    def sample(self, n: int, t: int) -> Any:
        return self.clients.sample(0, t)


def test_what_cannot_be_clients_is_named() -> None:
    with pytest.raises(NestfedError, match=r"object has no __len__, but clients need __len__ and sample\(n, t\);"):
        as_clients(object())
    with pytest.raises(NestfedError, match=r"list has no sample\(n, t\), but clients need"):
        as_clients([1, 2])

    class Half:
        def __len__(self) -> int:
            return 1

        def sample(self, n: int, t: int) -> Any:
            return torch.zeros(1)

        def seeded(self, seed: int) -> Any:
            return self

    with pytest.raises(NestfedError, match=r"Half has seeded but is not a nestfed\.core\.Clients: subclass it\."):
        as_clients(Half())  # its seed would be ignored in silence
    held = as_clients(BARE["saddle"][2])
    assert isinstance(held, Clients)
    assert as_clients(held) is held


def test_batches_that_are_not_tensors_or_differ_in_shape_are_named() -> None:
    class Odd(Clients):
        def __len__(self) -> int:
            return 2

        def sample(self, n: int, t: int) -> Any:
            return torch.zeros(n + 1) if t else 3.0

    with pytest.raises(NestfedError, match="client 0 holds something that is not a tensor"):
        Odd().draw([0], range(1))
    with pytest.raises(NestfedError, match="clients 0…1 differ in shape"):
        Odd().draw([0, 1], range(1, 2))
