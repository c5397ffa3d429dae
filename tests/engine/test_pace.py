"""Clients that take fewer than q local steps, and what a batch says of its client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestfed import FedAvg, FedNova, Paced, Scaffold
from nestfed.core import Batch, Differentiable, NestfedError
from nestfed.data.random import Purpose, Streams
from nestfed.testing import check_algorithm, check_clients
from tests.algorithms import boxes
from tests.methods import CASES, method
from tests.support import close, identical, on_two_ranks, simulate
from tests.toys import SETTINGS, trace

Q = 4
TAU = [4, 1, 3, 2]
LOOP, VMAP, COMPILED, WORKERS = ENGINES = (
    {"mode": "loop"}, {"mode": "vmap"}, {"mode": "vmap", "compile": True}, {"mode": "loop", "workers": 2}
)  # fmt: skip
slow_if_compiled = [pytest.param(e, id=str(e), marks=[pytest.mark.long] * ("compile" in e)) for e in ENGINES]
"""Compiling takes many seconds."""


def slowed(clients: Any) -> Paced:
    return Paced(clients, lambda n, t, q: min(q, TAU[n]))


def run(algorithm: Any, setting: str = "plain", **options: Any) -> Any:
    problem, clients = SETTINGS[setting]()[:2]
    return simulate(problem, algorithm, slowed(clients), rounds=3, q=Q, seed=3, progress=False, **options)


@pytest.mark.parametrize("eta", [0.1, lambda t: 0.3 / (1 + t)], ids=["constant", "schedule"])
def test_fednova_is_its_box(eta: Any) -> None:
    setting = SETTINGS["plain"]()
    _, seen = trace(setting.problem, FedNova(eta), slowed(setting.clients), rounds=4, q=Q)
    box = boxes.fednova(setting.maps["grad"], setting.x0, 4, Q, 4 * Q, eta, TAU)["x"]
    for t, shared in seen:
        np.testing.assert_allclose(shared["x"].numpy(), box[t, 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["fednova", "scaffold", "feddyn", "fedrep", "acc-fcsg-m", "codasca", "local-scgdm-tasks"]
)
@pytest.mark.parametrize("others", [(VMAP, WORKERS), pytest.param((COMPILED,), marks=pytest.mark.long)],
                         ids=["vmap, workers", "compiled"])  # fmt: skip
def test_every_engine_takes_the_same_steps(name: str, others: tuple[dict[str, Any], ...]) -> None:
    setting = CASES[name].setting
    algorithm = method(name, **({"T0": 2 * Q} if name == "codasca" else {}))
    loop = run(algorithm, setting, **LOOP)
    for engine in others:
        close(run(algorithm, setting, **engine), loop)


def test_two_ranks_take_the_same_steps(tmp_path: Path) -> None:
    loop = run(Scaffold(0.1), mode="loop")
    for shared in on_two_ranks(lambda: dict(run(Scaffold(0.1), mode="loop").shared), tmp_path):
        torch.testing.assert_close(shared, dict(loop.shared), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", slow_if_compiled)
def test_costs_are_counted_as_used(engine: dict[str, Any]) -> None:
    problem, clients = SETTINGS["plain"]()[:2]
    whole = simulate(problem, FedAvg(0.1), clients, rounds=3, q=Q, seed=3, progress=False, **engine)
    assert run(FedAvg(0.1), **engine)["examples"] == whole["examples"] * sum(TAU) / (4 * Q)


@pytest.mark.parametrize("engine", slow_if_compiled[:3])
def test_the_loss_is_the_mean_over_the_steps_taken(engine: dict[str, Any]) -> None:
    setting = SETTINGS["plain"]()
    losses = []
    held = setting.clients.seeded(3)
    for n in range(4):
        x, mine = setting.problem.x0, []
        for t in range(TAU[n]):
            batch = Batch(held.sample(n, t), eager=True)
            x = x - 0.1 * setting.problem.grad(x, batch)
            assert batch.tape.loss is not None
            mine.append(float(batch.tape.loss))
        losses.append(np.mean(mine))
    assert run(FedAvg(0.1), **engine).history[0]["loss"] == pytest.approx(np.mean(losses), abs=1e-10)


def test_a_uniform_output_of_a_slow_client_is_its_last_point() -> None:
    results = [run(FedAvg(0.1), keep="uniform", **engine).x for engine in (LOOP, VMAP, WORKERS)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-10)


@pytest.mark.long
def test_a_uniform_output_is_the_same_compiled() -> None:
    loop, compiled = (run(FedAvg(0.1), keep="uniform", **engine).x for engine in (LOOP, COMPILED))
    torch.testing.assert_close(compiled, loop, rtol=0, atol=1e-10)


def test_fednova_reaches_the_minimum_of_the_mean_and_fedavg_that_of_the_fast() -> None:
    """min over x of mean_n ½(x − c_n)²: the mean of c_n, whatever the clients' speeds."""
    centres = torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    problem = Quadratic()
    clients = slowed(Centres(centres))
    for fed, low, high in ((FedNova(0.01), 0.98, 1.02), (FedAvg(0.01), 0.5, 0.9)):
        x = simulate(problem, fed, clients, rounds=250, q=Q, progress=False).x
        assert low < float(x) < high, fed


class Quadratic(Differentiable):
    @property
    def x0(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return x - batch.data


@dataclass
class Centres:
    centres: Tensor

    def __len__(self) -> int:
        return len(self.centres)

    def sample(self, n: int, t: int) -> Tensor:
        return self.centres[n : n + 1]


@pytest.mark.parametrize("pace", [0, 5, 2.0, None], ids=str)
def test_an_impossible_number_of_steps_is_rejected(pace: Any) -> None:
    problem, clients = SETTINGS["plain"]()[:2]
    with pytest.raises(NestfedError, match=rf"Client 0 must take 1…4 local steps, not {pace}"):
        simulate(problem, FedAvg(0.1), Paced(clients, lambda n, t, q: pace), rounds=1, q=Q, progress=False)


def test_full_pace_changes_no_bit() -> None:
    problem, clients = SETTINGS["plain"]()[:2]
    options: dict[str, Any] = {"rounds": 3, "q": Q, "seed": 3, "progress": False}
    for engine in ENGINES[:2]:
        same = simulate(problem, FedAvg(0.1), Paced(clients, lambda n, t, q: q), **options, **engine)
        identical(dict(same.shared), dict(simulate(problem, FedAvg(0.1), clients, **options, **engine).shared))


def test_slow_clients_keep_the_contract() -> None:
    problem, clients = SETTINGS["plain"]()[:2]
    check_clients(slowed(clients))
    check_algorithm(FedNova(0.1), problem, slowed(clients))


class Noted(Quadratic):
    """A gradient made of what the batch says of its client."""

    def __init__(self, number: Callable[[Batch], Tensor]) -> None:
        self.number = number

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return -self.number(batch).to(x).expand(1)


@pytest.mark.parametrize("engine", slow_if_compiled)
def test_a_batch_knows_its_client_its_steps_and_its_key(engine: dict[str, Any]) -> None:
    clients = slowed(Centres(torch.zeros(4, dtype=torch.float64)))
    options: dict[str, Any] = {"rounds": 1, "q": Q, "seed": 7, "progress": False, **engine}

    def total(number: Callable[[Batch], Tensor]) -> float:
        return float(simulate(Noted(number), FedAvg(1.0), clients, **options).x)

    assert total(lambda b: b.client) == pytest.approx(np.mean([n * TAU[n] for n in range(4)]))
    assert total(lambda b: b.steps) == pytest.approx(np.mean([k * k for k in TAU]))
    keys = [int(Streams(7).at(Purpose.DROPOUT, n, t).integers(2**62)) % 1000 for n in range(4) for t in range(TAU[n])]
    assert total(lambda b: b.key % 1000) == pytest.approx(sum(keys) / 4)


def test_keys_are_the_first_numbers_of_the_keyed_generator() -> None:
    clients, ts = [0, 3, 77, 2**40], range(2**33 - 2, 2**33 + 2)
    for seed in (0, 5, 2**64 - 1, 12345678901234567890):
        streams = Streams(seed)
        for purpose in Purpose:
            one_by_one = [[int(streams.at(purpose, n, t).integers(2**62)) for t in ts] for n in clients]
            assert streams.keys(purpose, clients, ts).tolist() == one_by_one
