"""The identities of ALGORITHMS.md: methods that must coincide, and server steps worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import ToyClients
from torch import Tensor, nn

from nestfed import algorithms as a
from nestfed.algorithms import server as servers
from nestfed.core import Fields, Power, Server, at
from nestfed.data.clients import Examples
from nestfed.problems.base import Conditional, Minimax, Minimize
from tests import toys
from tests.support import simulate
from tests.toys import SEED, Setting, trace

ROUNDS, Q = 4, 3


def path(setting: Setting, algorithm: Any, field: str = "x", *, q: int = Q, rounds: int = ROUNDS) -> Tensor:
    """Return a field after every round, stacked."""
    _, seen = trace(setting.problem, algorithm, setting.clients, rounds=rounds, q=q, mode="vmap")
    return torch.stack([shared[field] for _, shared in seen])


def same(left: Tensor, right: Tensor) -> None:
    assert (left[-1] - left[0]).abs().max() > 1e-3  # it moved
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def differs(left: Tensor, right: Tensor) -> None:
    assert (left[-1] - right[-1]).abs().max() > 1e-4


# --- Conditional ---


@pytest.mark.parametrize("alpha", [0.1, lambda t: 0.2 / (1 + t) ** 0.5], ids=["number", "schedule"])
def test_fcsg_family(alpha: Any) -> None:
    """FCSG-M(β=1) = Acc-FCSG-M(β=1) = FCSG = FedAvg on the conditional estimator."""
    setting = toys.conditional()
    fcsg = path(setting, a.FCSG(alpha))
    same(fcsg, path(setting, a.FedAvg(alpha)))
    same(fcsg, path(setting, a.FCSGM(alpha, 1.0)))
    same(fcsg, path(setting, a.AccFCSGM(alpha, 1.0)))
    differs(fcsg, path(setting, a.FCSGM(alpha, 0.5)))
    differs(fcsg, path(setting, a.AccFCSGM(alpha, 0.5)))


@pytest.mark.parametrize("alpha", [0.1, lambda t: 0.2 / (1 + t) ** 0.5], ids=["number", "schedule"])
def test_sox_without_memory_is_fcsg_m(alpha: Any) -> None:
    setting = toys.sampled()
    fcsgm = path(setting, a.FCSGM(alpha, 0.3))
    torch.testing.assert_close(fcsgm, path(setting, a.SOX(alpha, 0.3, 1.0)), rtol=1e-12, atol=1e-12)
    differs(fcsgm, path(setting, a.SOX(alpha, 0.3, 0.5)))


def test_single_machine_ancestors() -> None:
    """BSGD = FCSG with N = 1; BSpiderBoost with period 1 = BSGD; SCGD = Local-SCGD with K = 1, whatever q is."""
    setting = toys.conditional(N=1)
    same(path(setting, a.BSGD(0.1)), path(setting, a.FCSG(0.1)))
    same(path(setting, a.BSGD(0.1)), path(setting, a.BSpiderBoost(0.1, period=1)))
    differs(path(setting, a.BSGD(0.1)), path(setting, a.BSpiderBoost(0.1, period=2)))
    setting = toys.compositional(N=1)
    same(path(setting, a.SCGD(0.1, 0.6)), path(setting, a.LocalSCGD(0.1, 0.6)))
    same(path(setting, a.SCGD(0.1, 0.6), q=1, rounds=12)[::3], path(setting, a.SCGD(0.1, 0.6)))


def test_conditional_with_identity_inside_is_plain() -> None:
    """Conditional with g(x) = x is plain minimization."""
    setting = toys.plain()
    nested = Conditional(
        f=lambda u, outer: toys.soft((outer[0] * u).sum(-1) - outer[1]),
        g=lambda x, outer, inner: x.expand(len(outer[1]), 1, -1),
        model=toys.start(torch.float64),
    )
    clients = replace(setting.clients, arrange=lambda own, noise: (setting.clients.arrange(own, noise), noise[0]))
    same(path(setting, a.FedAvg(0.1)), path(Setting(nested, clients, setting.x0, {}), a.FCSG(0.1)))
    same(path(setting, a.STEM(0.1, 0.3)), path(Setting(nested, clients, setting.x0, {}), a.STEM(0.1, 0.3)))


# --- Plain ---


@dataclass(frozen=True)
class EarlyFedAvg(a.FedAvg):
    """FedAvg that averages after t = 0, q, 2q, … as STEM does."""

    def ends_round(self, t: int, q: int) -> bool:
        return t % q == 0


def test_stem_with_weight_one_is_fedavg() -> None:
    setting = toys.plain()
    same(path(setting, a.STEM(0.1, 1.0)), path(setting, EarlyFedAvg(0.1)))
    same(path(setting, a.STEM(0.1, c=1e9)), path(setting, EarlyFedAvg(0.1)))  # a weight above 1 is 1
    differs(path(setting, a.STEM(0.1, 0.5)), path(setting, EarlyFedAvg(0.1)))
    same(path(setting, a.STEM(0.1, 1.0), q=1), path(setting, a.FedAvg(0.1), q=1))


def test_fedprox_without_pull_is_fedavg() -> None:
    setting = toys.plain()
    same(path(setting, a.FedProx(0.1, 0.0)), path(setting, a.FedAvg(0.1)))
    differs(path(setting, a.FedProx(0.1, 0.5)), path(setting, a.FedAvg(0.1)))
    same(path(setting, a.FedProx(0.1, 0.5), q=1), path(setting, a.FedAvg(0.1), q=1))  # no local drift to pull back


def test_scaffold_alone_is_sgd() -> None:
    setting = toys.plain(N=1)
    same(path(setting, a.Scaffold(0.1)), path(setting, a.FedAvg(0.1)))
    schedule = lambda t: 0.2 / (1 + t)  # noqa: E731
    same(path(setting, a.Scaffold(schedule)), path(setting, a.FedAvg(schedule)))
    setting = toys.plain()
    same(path(setting, a.Scaffold(0.1), q=1), path(setting, a.FedAvg(0.1), q=1))  # Σ(c − c_n) = 0
    differs(path(setting, a.Scaffold(0.1)), path(setting, a.FedAvg(0.1)))


@dataclass(frozen=True)
class UnscaledFAFED(a.FAFED):
    """FAFED with A ≡ I."""

    def receive(self, s: Any, t: int) -> Any:
        return s._replace(A=torch.ones_like(s.v))


def test_fafed_without_scaling_is_stem() -> None:
    """FAFED with A ≡ I is STEM with the same α and η; FAFED's x lies one move behind at a synchronisation."""
    setting = toys.plain()
    eta, alpha = (lambda t: 0.2 / (1 + t) ** 0.5), (lambda t: 0.9 / (1 + t) ** 0.3)
    for arguments in ((0.1, 0.3), (eta, alpha)):
        fafed, stem = UnscaledFAFED(*arguments), a.STEM(*arguments)
        m, d = path(setting, fafed, "m"), path(setting, stem, "d")
        same(m, d)
        moves = [0.0, *(at(fafed.eta, t) for t in range(0, Q * ROUNDS, Q))]
        steps = torch.tensor(moves, dtype=torch.float64)
        same(path(setting, fafed) - steps[:, None] * m, path(setting, stem))
    differs(path(setting, a.FAFED(0.1, 0.3), "m"), path(setting, a.STEM(0.1, 0.3), "d"))


class Small(nn.Module):
    """A network with a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        for p in self.parameters():
            p.data = 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_fedavg_alone_is_torch_sgd() -> None:
    """N = 1, q = 1: FedAvg = torch.optim.SGD on the same batches, parameter by parameter."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (40,), generator=generator)
    clients = Examples((x, y), [np.arange(40)], batch=8)
    problem = Minimize(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), Small())
    result = simulate(problem, a.FedAvg(0.3), clients, rounds=12, q=1, seed=SEED, progress=False)
    reference = Small()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.3)
    for t in range(12):
        inputs, labels = clients.seeded(SEED).sample(0, t)
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(inputs), labels).backward()
        optimiser.step()
    before = Small().state_dict()
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-12, atol=1e-12)
        assert (value - before[name]).abs().max() > 1e-3


# --- Compositional ---


def test_scgd_family() -> None:
    """Local-SCGDM(αη=1) = Local-SCGD; Local-SCGD(γ=1) = Local-BSGD = FedAvg on the compositional estimator."""
    setting = toys.compositional()
    bsgd = path(setting, a.LocalBSGD(0.1))
    same(bsgd, path(setting, a.FedAvg(0.1)))
    same(bsgd, path(setting, a.LocalSCGD(0.1, 1.0)))
    scgd = path(setting, a.LocalSCGD(0.1, 0.6))
    differs(bsgd, scgd)
    same(scgd, path(setting, a.LocalSCGDM(eta=0.5, alpha=2.0, beta=0.2, gamma=1.2)))
    u = path(setting, a.LocalSCGD(0.1, 0.6), "u")
    same(u, path(setting, a.LocalSCGDM(eta=0.5, alpha=2.0, beta=0.2, gamma=1.2), "u"))
    differs(scgd, path(setting, a.LocalSCGDM(eta=0.5, alpha=1.0, beta=0.2, gamma=1.2)))


def test_states_per_task() -> None:
    """MOML(β=1) = Local-BSGD; with one task and one client it is SCGD; Local-SCGDM-tasks(αη=1) = Local-MOML."""
    setting = toys.tasked()
    same(path(setting, a.LocalMOML(0.1, 1.0)), path(setting, a.LocalBSGD(0.1)))
    moml = path(setting, a.LocalMOML(0.1, 0.6))
    differs(moml, path(setting, a.LocalBSGD(0.1)))
    same(moml, path(setting, a.LocalSCGDMTasks(eta=0.5, alpha=2.0, beta=0.2, gamma=1.2)))
    alone = toys.compositional(N=1)
    same(path(alone, a.LocalMOML(0.1, 0.6)), path(alone, a.SCGD(0.1, 0.6)))


# --- Minimax ---


@pytest.mark.parametrize("field", ["theta", "w"])
def test_sgda_family(field: str) -> None:
    """FMGDA(α=β=1) = Local SGDA = CODA+(γ=∞) in its first stage."""
    setting = toys.minimax()
    sgda = path(setting, a.LocalSGDA(0.1, 0.1), field)
    same(sgda, path(setting, a.FMGDA(1.0, 0.1, 0.1, 1.0, 1.0), field))
    differs(sgda, path(setting, a.FMGDA(1.0, 0.1, 0.1, 0.5, 0.5), field))
    same(sgda, path(setting, a.CODAPlus(0.1, T0=3 * ROUNDS), field))
    same(sgda, path(setting, a.CODA(0.1, T0=3 * ROUNDS), field))
    differs(sgda, path(setting, a.CODAPlus(0.1, gamma=0.5, T0=3 * ROUNDS), field))
    differs(sgda, path(setting, a.CODAPlus(0.1, T0=3), field))
    unequal = path(setting, a.LocalSGDA(0.1, 0.2), field)
    same(unequal, path(setting, a.FMGDA(0.5, 0.2, 0.4, 1.0, 1.0), field))


@pytest.mark.parametrize("field", ["theta", "w"])
@pytest.mark.parametrize(("N", "q"), [(4, 1), (1, 1), (1, 3)])
def test_momentum_sgda_with_weight_one(N: int, q: int, field: str) -> None:
    """Momentum Local SGDA(aβ=1) = Local SGDA one batch later: its iteration t+1 moves by the gradient of batch t."""
    setting = toys.minimax(N)
    rounds = 12 // q
    momentum = path(setting, a.MomentumLocalSGDA(0.2, 0.4, beta=2.0, a=0.5), field, q=q, rounds=rounds)
    plain = path(setting, a.LocalSGDA(0.1, 0.2), field, q=1, rounds=12)
    # after k iterations the momentum method has made k − 1 moves
    same(momentum[1:], plain[torch.arange(q, 12 + 1, q) - 1])


@pytest.mark.parametrize("field", ["theta", "w"])
def test_momentum_sgda_with_weight_one_and_a_schedule(field: str) -> None:
    setting = toys.minimax()
    momentum = path(setting, a.MomentumLocalSGDA(Power(0.2), Power(0.4), beta=1.0), field, q=1, rounds=12)
    same(momentum[1:], path(setting, a.LocalSGDA(Power(0.2), Power(0.4)), field, q=1, rounds=12)[:-1])


@pytest.mark.parametrize("kind", [a.CODAPlus, a.CODASCA])
def test_the_proximal_term_holds_also_for_those_who_sit_out(kind: Any) -> None:
    """A strong pull to the stage's start keeps θ near it, whoever takes part; a new stage has a new start."""
    setting = toys.minimax()

    def end(gamma: float, T0: int = 10**6, **options: Any) -> float:
        method = kind(0.05, gamma, T0)
        found = simulate(setting.problem, method, setting.clients, rounds=30, q=2, progress=False, **options)
        return float((found.x - setting.problem.x0).norm())

    free = end(float("inf"), participation=2)
    assert free > 0.3
    assert end(0.1) < 0.2 * free
    assert (held := end(0.1, participation=2)) < 0.2 * free
    assert end(0.1, 2, participation=2) > 1.5 * held


@pytest.mark.parametrize("field", ["theta", "w"])
def test_codasca_with_equal_clients_is_coda_plus(field: str) -> None:
    setting = toys.minimax()
    alike = tuple(o[:1].expand_as(o) for o in setting.clients.own)
    same_noise = lambda own, noise: setting.clients.arrange(own, tuple(z[:1].expand_as(z) for z in noise))  # noqa: E731
    equal = setting._replace(clients=ToyClients(alike, setting.clients.shapes, same_noise))
    plus, sca = a.CODAPlus(0.2, 2.0, 3), a.CODASCA(0.2, 2.0, 3)
    same(path(equal, plus, field), path(equal, sca, field))
    differs(path(setting, plus, field), path(setting, sca, field))


def test_minimax_without_w_is_plain() -> None:
    setting = toys.plain()
    saddle = Minimax(
        lambda theta, w, batch: toys.soft(batch[0] @ theta - batch[1]).mean(),
        toys.start(torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    for mode in ("vmap", "loop"):
        runs = {}
        for name, problem, algorithm, field in (
            ("plain", setting.problem, a.FedAvg(0.1), "x"),
            ("saddle", saddle, a.LocalSGDA(0.1, 0.2), "theta"),
        ):
            _, seen = trace(problem, algorithm, setting.clients, rounds=ROUNDS, q=Q, mode=mode)
            runs[name] = torch.stack([shared[field] for _, shared in seen])
            assert name == "plain" or not seen[-1][1]["w"].any()
        same(runs["plain"], runs["saddle"])
    fmgda = path(setting._replace(problem=saddle), a.FMGDA(1.0, 0.1, 0.1, 0.3, 0.3), "theta")
    same(path(setting, a.AccFCSGM(0.1, 0.3)), fmgda)


# --- Servers ---


def adam_without_correction(points: Tensor, eta: float, beta1: float, beta2: float, tau: float) -> Tensor:
    """An independent Adam: exponentially weighted sums written out, no recursion, no bias correction.

    `points` holds the pseudo-gradients Δ_1 … Δ_k; the result is the sum of all steps after each of them.
    """
    steps = []
    for k in range(1, len(points) + 1):
        ages = torch.arange(k - 1, -1, -1, dtype=points.dtype)[:, None]
        M = ((1 - beta1) * beta1**ages * points[:k]).sum(0)
        V = beta2**k * tau**2 + ((1 - beta2) * beta2**ages * points[:k] ** 2).sum(0)
        steps.append(eta * M / (V.sqrt() + tau))
    return torch.stack(steps).cumsum(0)


def test_adam_server_is_adam_without_bias_correction() -> None:
    """The server on N = 1: Δ is one client's round, replayed here by FedAvg from each broadcast point."""
    setting = toys.plain(N=1)
    eta_g, beta1, beta2, tau = 0.2, 0.8, 0.95, 0.03
    run = path(setting, a.FedAdam(0.1, eta_g, beta1, beta2, tau), rounds=6)
    deltas = []
    for r in range(6):
        x = run[r].numpy()
        for t in range(r * Q, (r + 1) * Q):
            x = x - 0.1 * setting.maps["grad"](0, t, x)
        deltas.append(torch.from_numpy(x) - run[r])
    expected = run[0] + adam_without_correction(torch.stack(deltas), eta_g, beta1, beta2, tau)
    torch.testing.assert_close(run[1:], expected, rtol=1e-10, atol=1e-10)


def two_rounds(server: Server, deltas: list[list[float]]) -> list[list[float]]:
    """Run a server from x = 0 on given Δ's."""
    shared: Fields = {"x": torch.zeros(len(deltas[0]), dtype=torch.float64)}
    state, out = server.init(shared), []
    for delta in deltas:
        mean = {"x": shared["x"] + torch.tensor(delta, dtype=torch.float64)}
        state, shared = server.update(state, shared, mean, 1.0)
        out.append(shared["x"].tolist())
    return out


def test_adam_by_hand() -> None:
    """β1 = β2 = ½, τ = 1, η_g = 2; Δ = 1, then 3.

    M = 0.5,  V = 0.5·1 + 0.5·1 = 1,  x = 2·0.5/(1+1) = 0.5.
    M = 0.25 + 1.5 = 1.75,  V = 0.5 + 4.5 = 5,  x = 0.5 + 3.5/(√5+1), where
    3.5/(√5+1) = 3.5(√5−1)/4 = 0.875·1.2360679775 = 1.0815594803.
    """
    found = two_rounds(servers.Adam(2.0, 0.5, 0.5, 1.0), [[1.0], [3.0]])
    assert found[0] == pytest.approx([0.5])
    assert found[1] == pytest.approx([1.5815594803], abs=1e-9)


def test_yogi_by_hand() -> None:
    """β1 = ½, β2 = ¾, τ = 2, η_g = 1; Δ = (4, 1), then (2, 2).

    First: M = (2, 0.5); V = 4 − ¼·16·sign(4−16) = 8 and 4 − ¼·1·sign(4−1) = 3.75;
    x = (2/(√8+2), 0.5/(√3.75+2)) = (0.4142135624, 0.1270166538).
    Then:  M = (2, 1.25); V = 8 − ¼·4·sign(8−4) = 7 and 3.75 − ¼·4·sign(3.75−4) = 4.75;
    x += (2/(√7+2), 1.25/(√4.75+2)) = (0.4305008740, 0.2990824530).
    """
    first = [0.4142135624, 0.1270166538]
    second = [0.8447144364, 0.4260991068]
    found = two_rounds(servers.Yogi(1.0, 0.5, 0.75, 2.0), [[4.0, 1.0], [2.0, 2.0]])
    assert found[0] == pytest.approx(first, abs=1e-9)
    assert found[1] == pytest.approx(second, abs=1e-9)


def test_adagrad_by_hand() -> None:
    """β1 = 0, τ = 3, η_g = 2; Δ = 4, then −√11.

    M = 4,  V = 9 + 16 = 25,  x = 2·4/(5+3) = 1.
    M = −√11,  V = 25 + 11 = 36,  x = 1 − 2√11/(6+3) = 1 − 0.7370277312 = 0.2629722688.
    """
    found = two_rounds(servers.Adagrad(2.0, 0.0, 0.9, 3.0), [[4.0], [-(11**0.5)]])
    assert found[0] == pytest.approx([1.0])
    assert found[1] == pytest.approx([0.2629722688], abs=1e-9)


def test_ams_by_hand() -> None:
    """β1 = 0, β2 = ½, τ = 1, ε = 2, η_g = 1; Δ = (1, 5), then (0, 1).

    First: V = ½·1 + ½·(1, 25) = (1, 13); V̂ = max(0, V, 2) = (2, 13); x = (1/√2, 5/√13) = (0.7071067812, 1.3867504906).
    Then:  V = (½, 7); V̂ = (2, 13), the old maximum; x += (0, 1/√13) = 0.2773500981.
    """
    found = two_rounds(servers.AMS(1.0, 0.0, 0.5, 1.0, 2.0), [[1.0, 5.0], [0.0, 1.0]])
    assert found[0] == pytest.approx([0.7071067812, 1.3867504906], abs=1e-9)
    assert found[1] == pytest.approx([0.7071067812, 1.6641005887], abs=1e-9)


def test_control_variates_by_hand() -> None:
    """η_g = ½ moves x half the way; with 2 of 4 clients c moves by half of the mean change."""
    server = servers.ControlVariates(("x",), ("c",), 0.5)
    old = {"x": torch.tensor([1.0]), "c": torch.tensor([2.0])}
    mean = {"x": torch.tensor([5.0]), "c": torch.tensor([8.0])}
    _, new = server.update({}, old, mean, 0.5)
    assert new["x"].item() == 3.0
    assert new["c"].item() == 5.0
