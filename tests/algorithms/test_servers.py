"""Servers compose with any method: identities, every engine, resuming, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestfed import algorithms as a
from nestfed.algorithms.server import Fieldwise
from nestfed.core import METHODS, SERVERS, Algorithm, Average, Fields, NestfedError, Registry
from nestfed.problems.base import Minimax
from nestfed.testing import ALGORITHM_CHECKS, Trial
from tests import toys
from tests.methods import CASES, Q, method, setting
from tests.support import close, identical, on_two_ranks, simulate
from tests.toys import SEED

SERVING = {
    "average": Average(),
    "momentum": a.Momentum(0.7, 0.5),
    "adam": a.Adam(0.05, tau=0.01),
    "yogi": a.Yogi(0.05, tau=0.01),
    "adagrad": a.Adagrad(0.2, tau=0.01),
    "ams": a.AMS(0.05, tau=0.01),
}
AVERAGED = [name for name in METHODS if type(method(name).server) is Average]
SERVED: dict[str, Algorithm[Any, Any]] = {
    "fcsg-m": method("fcsg-m").served_by(SERVING["adam"]),
    "fmgda": method("fmgda").served_by(SERVING["yogi"]),
    "coda": method("coda").served_by(SERVING["momentum"]),
    "local-scgdm-tasks": method("local-scgdm-tasks").served_by(SERVING["ams"]),
    "ada-fmgda": method("ada-fmgda").served_by(SERVING["adagrad"]),
}
"""With estimates, two players, private fields, extra synchronisations, and fields of several sizes."""


def run(name: str, algorithm: Any, rounds: int = 4, **options: Any) -> Any:
    s = setting(name)
    some = 4 if len(s.clients) > 1 else None  # four of five, so that some sit out
    options = {"q": Q, "seed": SEED, "progress": False, "mode": "vmap", "participation": some, **options}
    return simulate(s.problem, algorithm, s.clients, rounds=rounds, **options)


@cache
def plain(name: str) -> Any:
    return run(name, method(name))


def test_all_servers_are_tested() -> None:
    assert set(SERVING) == set(SERVERS)
    assert all(type(server) is SERVERS[name] for name, server in SERVING.items())


@pytest.mark.parametrize("name", AVERAGED)
def test_served_by_the_mean_is_the_method_itself(name: str) -> None:
    own, served = plain(name), run(name, method(name).served_by(Average()))
    identical(dict(own.shared), dict(served.shared))
    identical(dict(own.private), dict(served.private))
    free = [{k: v for k, v in r.items() if k != "seconds"} for r in own.history]
    assert free == [{k: v for k, v in r.items() if k != "seconds"} for r in served.history]


@pytest.mark.parametrize("name", AVERAGED)
def test_no_momentum_and_step_one_is_the_method_itself(name: str) -> None:
    own, served = plain(name), run(name, method(name).served_by(a.Momentum(1.0, 0.0)))
    torch.testing.assert_close(dict(own.shared), dict(served.shared), rtol=1e-10, atol=1e-10)
    moved = run(name, method(name).served_by(a.Momentum(1.0, 0.5)))
    assert (moved.x - own.x).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("name", "server"), [("fedadam", a.Adam), ("fedyogi", a.Yogi), ("fedadagrad", a.Adagrad), ("fedams", a.AMS)]
)
def test_the_adaptive_methods_are_fedavg_served(name: str, server: Callable[..., Any]) -> None:
    hyper = dict(CASES[name].hyper)
    served = a.FedAvg(hyper.pop("eta")).served_by(server(**hyper))
    identical(dict(run(name, method(name)).shared), dict(run(name, served).shared))


def test_momentum_by_hand() -> None:
    """M ← M/2 + Δ, x ← x + 2M, for Δ = 1 and then −1."""
    server = a.Momentum(2.0, 0.5)
    old: Fields = {"x": torch.tensor([0.0])}
    state, new = server.update(server.init(old), old, {"x": torch.tensor([1.0])}, 1.0)
    assert new["x"].tolist() == [2.0]
    state, new = server.update(state, new, {"x": new["x"] - 1}, 1.0)
    assert new["x"].tolist() == [1.0]
    assert list(state) == ["M.x"]


def test_only_points_are_moved_each_with_its_own_state() -> None:
    """After one round u and v are the means that the method itself has; θ and w are not."""
    own, served = run("fmgda", method("fmgda"), 1), run("fmgda", SERVED["fmgda"], 1)
    identical({k: own.shared[k] for k in "uv"}, {k: served.shared[k] for k in "uv"})
    for player in ("theta", "w"):
        assert (own.shared[player] - served.shared[player]).abs().max() > 1e-3
    shared = {k: torch.zeros(n) for k, n in (("theta", 3), ("w", 2), ("u", 3), ("v", 2))}
    assert {k: len(v) for k, v in SERVED["fmgda"].server.init(shared).items()} == {
        "M.theta": 3, "V.theta": 3, "M.w": 2, "V.w": 2,
    }  # fmt: skip
    assert set(SERVED["coda"].server.init(shared)) == {"M.theta"}  # a re-estimated w is not a step


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("check", ALGORITHM_CHECKS)
def test_contract(name: str, check: str) -> None:
    """Loop, vmap and workers agree; absent clients, dtype, purity: as for every method."""
    s = setting(name, N=4)
    ALGORITHM_CHECKS[check](Trial(SERVED[name], s.problem, s.clients.seeded(SEED), Q, rounds=3, seed=SEED))


def test_two_ranks_and_resuming(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        results = {name: run(name, algorithm, mode="loop") for name, algorithm in SERVED.items()}
        return {name: dict(result.shared) for name, result in results.items()}

    ranks = on_two_ranks(work, tmp_path)
    for name, algorithm in SERVED.items():
        whole = run(name, algorithm, mode="loop", workers=1)
        for shared in (ranks[0][name], ranks[1][name]):
            torch.testing.assert_close(shared, dict(whole.shared), rtol=1e-10, atol=1e-10)
        run(name, algorithm, 2, mode="loop", workers=1, directory=tmp_path / name)
        resumed = run(name, algorithm, mode="loop", workers=1, directory=tmp_path / name)
        identical(dict(whole.shared), dict(resumed.shared))
        close(whole, resumed)


def test_another_server_is_another_run(tmp_path: Path) -> None:
    run("fcsg-m", SERVED["fcsg-m"], directory=tmp_path)
    for other in (method("fcsg-m"), method("fcsg-m").served_by(a.Adam(0.06, tau=0.01))):
        with pytest.raises(NestfedError, match="another experiment"):
            run("fcsg-m", other, directory=tmp_path)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in AVERAGED])
def test_methods_with_a_server_of_their_own_are_rejected(name: str) -> None:
    with pytest.raises(NestfedError, match=f"^{name} has a server's rule of its own, so it cannot be served by adam;"):
        method(name).served_by(SERVING["adam"])


def test_what_cannot_be_served() -> None:
    with pytest.raises(NestfedError, match="alone has no server"):
        a.Alone(a.FedAvg(0.1)).served_by(SERVING["adam"])
    with pytest.raises(NestfedError, match=r"fedavg\+adam has a server's rule of its own"):
        a.FedAvg(0.1).served_by(SERVING["adam"]).served_by(SERVING["yogi"])
    with pytest.raises(NestfedError, match=r"an object such as Adam\(eta_g=0.01\), not 'adam'"):
        a.FedAvg(0.1).served_by("adam")  # type: ignore[arg-type]
    with pytest.raises(NestfedError, match="needs its server's step"):
        a.Alone(a.FedAvg(0.1).served_by(SERVING["adam"]))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: a.Adam(0.0), "adam: eta_g must be a finite number above 0, not 0."),
        (lambda: a.Yogi(0.1, beta1=1.0), r"yogi: beta1 must be in \[0, 1\), not 1."),
        (lambda: a.Adagrad(0.1, tau=-1.0), "adagrad: tau must be a finite number above 0, not -1."),
        (lambda: a.AMS(0.1, epsilon=0.0), "ams: epsilon must be a finite number above 0, not 0."),
        (lambda: a.Momentum(1.0, 1.0), r"momentum: beta must be in \[0, 1\), not 1."),
        (lambda: a.build_server("adan"), "no server 'adan'; did you mean adam?"),
        (lambda: a.build_server("adam", lr=0.1), "adam has eta_g, beta1, beta2, tau. There is no hyper-parameter 'lr'"),
        (lambda: a.build_server("average", lr=0.1), "average has no hyper-parameters."),
        (lambda: a.build_server("yogi"), "yogi needs eta_g."),
    ],
)
def test_wrong_options(wrong: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        wrong()


@dataclass(frozen=True)
class Halfway(Fieldwise):
    """x ← x + Δ/2."""

    name = "halfway"

    def start(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, s: Fields, x: Tensor, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {}, x + delta / 2


def test_a_server_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVERS, "_things", dict(SERVERS._things))
    assert isinstance(SERVERS, Registry)
    SERVERS.add("halfway", f"{__name__}:Halfway")
    served = a.FedAvg(0.05).served_by(a.build_server("halfway"))
    close(run("fedavg", served), run("fedavg", a.FedAvg(0.05).served_by(a.Momentum(0.5, 0.0))))


# --- Adaptive nested methods ---


def path(problem: Any, clients: Any, algorithm: Any, *, q: int = Q, rounds: int = 5) -> dict[str, Tensor]:
    """Return every shared field after every round, stacked."""
    _, seen = toys.trace(problem, algorithm, clients, rounds=rounds, q=q, mode="vmap")
    return {k: torch.stack([shared[k] for _, shared in seen]) for k in seen[0][1]}


def same(left: Tensor, right: Tensor) -> None:
    assert (left[-1] - left[0]).abs().max() > 1e-3  # it moved
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.1, lambda t: 0.2 / (1 + t) ** 0.5], ids=["number", "schedule"])
def test_ada_fcsg_m_without_memory_is_fafed_without_memory(alpha: Any) -> None:
    s = toys.conditional()
    ada = path(s.problem, s.clients, a.AdaFCSGM(alpha, 1.0, 0.8, 0.2))
    fafed = path(s.problem, s.clients, a.FAFED(alpha, 1.0, 0.8, 0.2))
    for field, other in (("x", "x"), ("u", "m"), ("v", "v")):
        same(ada[field], fafed[other])
    longer = path(s.problem, s.clients, a.AdaFCSGM(alpha, 0.5, 0.8, 0.2))
    assert (longer["x"][-1] - ada["x"][-1]).abs().max() > 1e-4


def test_ada_fmgda_without_w_is_fafed() -> None:
    s = toys.plain()
    saddle = a_saddle_without_w(s.problem)
    ada = path(saddle, s.clients, a.AdaFMGDA(0.5, 0.2, 0.7, 0.3, 0.6, 0.8, 0.2))
    fafed = path(s.problem, s.clients, a.FAFED(0.1, 0.3, 0.8, 0.2))
    for field, other in (("theta", "x"), ("u", "m"), ("square_theta", "v")):
        same(ada[field], fafed[other])


def a_saddle_without_w(plain: Any) -> Any:
    return Minimax(
        f=lambda x, w, batch: plain.f(x, batch) + 0 * w.sum(),
        model=toys.start(torch.float64),
        w0=torch.zeros(1).double(),
    )


@dataclass(frozen=True)
class FrozenFCSGM(a.AdaFCSGM):
    """v is frozen at (1 − ρ)², so A = 1."""

    def square(self, g: Tensor) -> Tensor:
        return torch.full_like(g, (1 - self.rho) ** 2)


@dataclass(frozen=True)
class FrozenFMGDA(a.AdaFMGDA):
    """Both second moments are frozen at (1 − ρ)²."""

    def square(self, g: Tensor) -> Tensor:
        return torch.full_like(g, (1 - self.rho) ** 2)


def test_frozen_the_adaptive_methods_are_their_base() -> None:
    """With q = 1; the point is one round late, because iteration 0 only estimates."""
    s = toys.conditional()
    base = path(s.problem, s.clients, a.FCSGM(0.1, 0.3), q=1, rounds=9)
    ada = path(s.problem, s.clients, FrozenFCSGM(0.1, 0.3, 0.8, 0.2), q=1, rounds=9)
    same(ada["x"][1:], base["x"][:-1])
    same(ada["u"][1:], base["u"][1:])
    s = toys.minimax()
    base = path(s.problem, s.clients, a.FMGDA(0.5, 0.2, 0.4, 0.3, 0.6), q=1, rounds=9)
    ada = path(s.problem, s.clients, FrozenFMGDA(0.5, 0.2, 0.4, 0.3, 0.6, 0.8, 0.2), q=1, rounds=9)
    for player, estimate in (("theta", "u"), ("w", "v")):
        same(ada[player][1:], base[player][:-1])
        same(ada[estimate][1:], base[estimate][1:])
