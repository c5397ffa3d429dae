"""FedDyn's limit, and models of the clients' own: Ditto and FedRep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nestfed_papers.toys import Quadratic
from torch import Tensor, nn

from nestfed.algorithms import Alone, Ditto, FedAvg, FedDyn, FedRep
from nestfed.core import Batch, Fields, NestfedError
from nestfed.data.clients import Examples
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.simulate import simulate
from nestfed.problems.base import Minimize
from tests.toys import SETTINGS, Parted

HOW: dict[str, Any] = {"q": 3, "seed": 5, "progress": False}


@pytest.mark.parametrize("q", [5])
@pytest.mark.parametrize("count", [None, 3])
def test_feddyn_finds_the_minimiser_of_the_mean_where_fedavg_does_not(q: int, count: int | None) -> None:
    """Clients of different curvature and without noise: local steps drift, FedDyn corrects them exactly."""
    toy = Quadratic(4, 3, zeta=1.0, twist=0.8, sigma=0.0, condition=3.0)
    how: dict[str, Any] = {"q": q, "seed": 0, "progress": False}
    exchange = {} if count is None else {"exchange": Exchange(count=count)}
    good = simulate(toy.problem, FedDyn(0.2, 1.0), toy.clients, rounds=100, **exchange, **how)
    assert (good.x - toy.minimiser).abs().max() < 1e-8
    plain = simulate(toy.problem, FedAvg(0.2), toy.clients, rounds=20, **how)
    assert (plain.x - toy.minimiser).abs().max() > 1e-2


def test_ditto_without_pull_is_training_alone_beside_fedavg() -> None:
    s = SETTINGS["plain"]()
    both = simulate(s.problem, Ditto(0.1, mu=0.0), s.clients, rounds=4, **HOW)
    alone = simulate(s.problem, Alone(FedAvg(0.1)), s.clients, rounds=4, **HOW)
    together = simulate(s.problem, FedAvg(0.1), s.clients, rounds=4, **HOW)
    torch.testing.assert_close(both.private["v"], alone.points, rtol=0, atol=1e-12)
    torch.testing.assert_close(both.x, together.x, rtol=0, atol=1e-12)
    pulled = simulate(s.problem, Ditto(0.1, mu=5.0), s.clients, rounds=4, **HOW)
    assert (pulled.private["v"] - pulled.x).norm() < 0.5 * (both.private["v"] - both.x).norm()


def test_fedrep_of_one_client_moves_head_and_body_in_turn() -> None:
    """Two head steps, then one body step, each along its own part of the gradient."""
    s = SETTINGS["parted"](1)
    method = FedRep(0.1, "head", q_h=2)
    result = simulate(s.problem, method, s.clients, rounds=4, **HOW)
    x, clients = s.problem.x0.clone(), s.clients.seeded(5)
    for t in range(12):
        part = slice(2, 3) if t % 3 < 2 else slice(0, 2)
        with torch.no_grad():
            x[part] -= 0.1 * s.problem.grad(x, Batch(clients.sample(0, t), eager=True))[part]
    torch.testing.assert_close(result.points[0], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.x, torch.cat([x[:2], s.problem.x0[2:]]), rtol=0, atol=1e-12)


class Net(nn.Module):
    """A body of two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.out = nn.Linear(3, 1)
        self.outer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.out(self.body(x)))[:, 0]


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("out", ["out.weight", "out.bias"]),
        ("outer.bias", ["outer.bias"]),
        (("out", "outer"), ["out.weight", "out.bias", "outer.weight", "outer.bias"]),
        (["body.0"], ["body.0.weight", "body.0.bias"]),
    ],
)
def test_a_head_is_named_by_parameter_or_module(head: Any, names: list[str]) -> None:
    torch.manual_seed(0)
    problem = Minimize(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), Net().double())
    generator = torch.Generator().manual_seed(0)
    sites = {
        site: (torch.randn(9, 4, generator=generator).double(), torch.randn(9, generator=generator).double())
        for site in "abc"
    }
    method = FedRep(0.1, head)
    assert hash(method) == hash(FedRep(0.1, head))
    result = simulate(problem, method, Examples.of(sites, batch=9), rounds=3, **HOW)
    start = dict(problem.module(problem.x0).named_parameters())
    common = dict(problem.module(result.x).named_parameters())
    models = result.models
    for name, parameter in start.items():
        own = [dict(model.named_parameters())[name] for model in models]
        if name in names:
            torch.testing.assert_close(common[name], parameter, rtol=0, atol=1e-15)
            assert not torch.equal(own[0], own[1])
        else:
            assert not torch.equal(common[name], parameter)
            assert all(torch.equal(one, common[name]) for one in own)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("method", [Ditto(0.1, mu=0.1), FedRep(0.1, "head")], ids=["ditto", "fedrep"])
def test_personal_models_are_judged_during_a_run(method: Ditto | FedRep, mode: str) -> None:
    """Every client's own model on its own function goes below the common model on it."""
    targets = torch.tensor([[1.0, 2.0], [1.0, -2.0], [1.0, 0.5]], dtype=torch.float64)
    rows = {str(n): (targets[n].repeat(4, 1),) for n in range(3)}

    def loss(model: Any, batch: Any) -> Tensor:
        point = model()
        return (point[1:] - batch[0]).square().sum(1).mean() / 2

    problem = Minimize(loss, Parted(torch.float64))

    def measure(shared: Fields, private: Fields) -> dict[str, float]:
        found = method.own_points(problem, shared, private)
        return {"own": float((found[:, 1:] - targets).square().sum(1).mean())}

    result = simulate(
        problem, method, Examples.of(rows, batch=4), rounds=60, measure=measure, evaluation=Evaluation(every=20),
        execution=Execution(mode=mode), **HOW,
    )  # fmt: skip
    values = [r["own"] for r in result.history if "own" in r]
    common = float((result.x[1:] - targets).square().sum(1).mean())
    assert len(values) == 4
    assert values[-1] < 0.2 * values[0]
    assert values[-1] < 0.5 * common


def test_heads_that_cannot_be() -> None:
    s = SETTINGS["parted"]()

    def run(method: FedRep, q: int = 3) -> None:
        simulate(s.problem, method, s.clients, rounds=1, q=q, progress=False)

    with pytest.raises(NestfedError, match=r"no parameter or module 'heads'; did you mean head\?"):
        run(FedRep(0.1, "heads"))
    with pytest.raises(NestfedError, match="head, body is the whole model and leaves no body"):
        run(FedRep(0.1, ("head", "body")))
    with pytest.raises(NestfedError, match="q must be above q_h = 3 to leave body steps, but q is 3"):
        run(FedRep(0.1, "head", q_h=3))
