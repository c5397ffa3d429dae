"""Training alone is what each client would do if it were the only one."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from nestfed.algorithms import (
    FCSGM,
    FMGDA,
    STEM,
    AccFCSGM,
    Adam,
    CODAPlus,
    Ditto,
    FedAdam,
    FedAvg,
    FedProx,
    FedRep,
    LocalSCGDM,
    LocalSCGDMTasks,
    Scaffold,
)
from nestfed.algorithms.alone import Alone
from nestfed.core import Clients, NestfedError
from nestfed.data.clients import Examples
from nestfed.engine.options import Exchange, Execution
from nestfed.engine.simulate import simulate
from nestfed.problems.classify import Classify
from nestfed.testing import check_algorithm
from tests.toys import SETTINGS

METHODS = {
    "plain": [FedAvg(0.05), FedProx(0.05, mu=0.5), STEM(0.05, a=0.3)],
    "conditional": [FCSGM(0.05, beta=0.3), AccFCSGM(0.05, beta=0.5)],
    "compositional": [LocalSCGDM(beta=0.06)],
    "tasked": [LocalSCGDMTasks(beta=0.06)],
    "minimax": [FMGDA(c_hat=0.05, c=0.1), CODAPlus(0.1, gamma=10.0, T0=6)],
}
ALL = [pytest.param(kind, method, id=method.name) for kind, methods in METHODS.items() for method in methods]


class Only(Clients):
    """One of the clients, with its own batches."""

    def __init__(self, clients: Clients, n: int) -> None:
        self.clients, self.n = clients, n

    def __len__(self) -> int:
        return 1

    def sample(self, n: int, t: int) -> Any:
        return self.clients.sample(self.n, t)

    def seeded(self, seed: int) -> "Only":
        return Only(self.clients.seeded(seed), self.n)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize(("kind", "method"), ALL)
def test_each_client_is_as_if_it_were_the_only_one(kind: str, method: Any, mode: str) -> None:
    s = SETTINGS[kind](4)
    how: dict[str, Any] = {"rounds": 3, "q": 3, "seed": 5, "progress": False}
    result = simulate(s.problem, Alone(method), s.clients, execution=Execution(mode=mode), **how)
    points = result.points
    for n in range(4):
        single = simulate(s.problem, method, Only(s.clients, n), execution=Execution(mode="loop"), **how)
        torch.testing.assert_close(points[n], single.x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.x, points.mean(0), rtol=1e-12, atol=1e-14)
    assert result["bytes_up"] == result["bytes_down"] == 0


@pytest.mark.parametrize(
    ("kind", "method"), [p for p in ALL if p.id in ("fedprox", "acc-fcsg-m", "local-scgdm-tasks", "coda-plus")]
)
def test_it_keeps_the_contract(kind: str, method: Any) -> None:
    """With a point of its own, restarts, private fields and stages."""
    s = SETTINGS[kind](3)
    check_algorithm(Alone(method), s.problem, s.clients.seeded(5), q=3)


def test_a_client_that_skips_a_round_continues_where_it_stopped() -> None:
    s = SETTINGS["plain"](4)
    how: dict[str, Any] = {"q": 1, "seed": 5, "progress": False}
    seen: list[torch.Tensor] = []  # the start, then after every round

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append(private["x"].clone())
        return {}

    exchange = Exchange(count=1)
    simulate(s.problem, Alone(FedAvg(0.05)), s.clients, rounds=6, measure=measure, exchange=exchange, **how)
    for before, after in pairwise(seen):
        assert (before != after).any(1).sum() == 1


def test_the_own_models_of_a_personal_method_are_those_it_trains() -> None:
    """Ditto's v and FedRep's head, not only x, as if the client were the only one."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    clients = Examples((x, (x[:, 0] > 0).long()), [np.arange(20), np.arange(20, 40)], batch=5)
    problem = Classify(torch.nn.Linear(3, 2))
    how: dict[str, Any] = {"rounds": 3, "q": 3, "seed": 5, "progress": False}
    for method in (Ditto(0.1, mu=0.5), FedRep(0.1, head="bias")):
        points = simulate(problem, Alone(method), clients, **how).points
        for n in range(2):
            single = simulate(problem, method, Only(clients, n), execution=Execution(mode="loop"), **how)
            torch.testing.assert_close(points[n], single.points[0], rtol=1e-5, atol=1e-6)
            assert (points[n] - single.x).abs().max() > 1e-3


def test_a_kind_of_problem_that_the_method_does_not_accept_is_rejected() -> None:
    s = SETTINGS["plain"](2)
    with pytest.raises(NestfedError, match=r"^alone works on problems of kind Minimax, but this problem is"):
        simulate(s.problem, Alone(FMGDA(c_hat=0.05, c=0.1)), s.clients, rounds=1)


@pytest.mark.parametrize("method", [FedAdam(0.05, eta_g=0.05), Scaffold(0.05), FedAvg(0.05).served_by(Adam(0.01))])
def test_a_method_with_a_step_of_the_server_is_rejected(method: Any) -> None:
    with pytest.raises(NestfedError, match=f"{re.escape(method.name)} needs its server's step"):
        Alone(method)


def test_alone_cannot_be_served_or_be_alone_again() -> None:
    with pytest.raises(
        NestfedError, match=r"^alone has no server, so it cannot be served by adam; choose a method whose"
    ):
        Alone(FedAvg(0.05)).served_by(Adam(0.01))
    with pytest.raises(NestfedError, match=r"^alone trains every client alone already"):
        Alone(Alone(FedAvg(0.05)))
