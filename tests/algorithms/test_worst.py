"""Objectives over clients: solutions against scipy and closed forms, identities, absent clients, numbers that overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import Tensor, nn

from nestfed import AFL, AUPRC, KLDRO, QFFL, Average, Classify, CVaRDRO, Examples, FedAvg, Minimize, NestfedError, Pairs
from nestfed.core import Batch, Clients, Differentiable, as_clients
from nestfed.data.clients import Paced
from nestfed.data.random import Purpose, Streams
from nestfed.problems import Ball
from tests import toys
from tests.algorithms import boxes
from tests.support import answering, close, grouped, identical, simulate
from tests.toys import SEED, constants, trace

N, D, Q = 5, 3, 3
METHODS = {
    "afl": AFL(0.1, 0.2),
    "kl-dro": KLDRO(0.1, 0.5, 0.8),
    "cvar-dro": CVaRDRO(0.1, 0.6, 0.3),
    "q-ffl": QFFL(0.1, 1.5),
}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Bowls:
    """f_n(x) = ½(x − c_n)ᵀA_n(x − c_n) + b_n, the same at every iteration."""

    def __init__(self, dtype: torch.dtype = torch.float64, scale: float = 1.0, floor: float = 0.2) -> None:
        root = constants(N, D, D, seed=1)
        self.A = ((root @ root.mT) / 2 + torch.eye(D)).to(dtype) * scale
        self.c = constants(N, D, seed=2).to(dtype)
        self.b = (floor * torch.arange(N)).to(dtype) * scale
        self.x0 = torch.zeros(D, dtype=dtype)
        self.problem = Minimize(self.one, self.x0)

    @staticmethod
    def one(x: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        A, c, b = batch
        return (x - c) @ A @ (x - c) / 2 + b

    def __len__(self) -> int:
        return N

    def sample(self, n: int, t: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.A[n], self.c[n], self.b[n]

    def losses(self, x: Any) -> Tensor:
        point = torch.as_tensor(x, dtype=self.A.dtype)
        return torch.stack([self.one(point, self.sample(n, 0)) for n in range(N)])

    def slopes(self, x: Any) -> Tensor:
        return (self.A @ (torch.as_tensor(x) - self.c)[:, :, None])[:, :, 0]

    def run(self, method: Any, rounds: int, q: int = 1, **options: Any) -> Any:
        options = {"mode": "vmap", "workers": 1, "progress": False, **options}
        return simulate(self.problem, method, as_clients(self), rounds=rounds, q=q, **options)


def minimised(function: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Return the minimiser that scipy finds, with gradients by torch."""

    def with_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(x, requires_grad=True)
        value = function(leaf)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0].numpy()

    found = optimize.minimize(with_slope, np.zeros(D), jac=True, method="BFGS", options={"gtol": 1e-9})
    return found.x


def largest_mean(bowls: Bowls, count: int) -> optimize.OptimizeResult:
    """Minimise the mean of the `count` largest losses, as min over (x, s) of s + Σ(f_n − s)₊/count, in epigraph form."""

    def rest(z: np.ndarray) -> np.ndarray:
        return z[D + 1 :] - bowls.losses(z[:D]).numpy() + z[D]

    start = np.concatenate([np.zeros(D), [1.0], np.full(N, 3.0)])
    return optimize.minimize(
        lambda z: z[D] + z[D + 1 :].sum() / count,
        start,
        bounds=[(None, None)] * (D + 1) + [(0, None)] * N,
        constraints={"type": "ineq", "fun": rest},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )


def without_step(method: Any) -> Any:
    return {k: v for k, v in vars(method).items() if k != "eta"}


# --- what they minimise ---


@pytest.mark.parametrize("tau", [0.4, 4.0])
def test_kl_dro_minimises_the_tilted_mean(tau: float) -> None:
    bowls = Bowls()
    truth = minimised(lambda x: tau * torch.logsumexp(bowls.losses(x) / tau, 0))
    found = bowls.run(KLDRO(min(0.1, tau / 16), tau), 800)
    np.testing.assert_allclose(found.x.numpy(), truth, atol=1e-6)
    L = tau * special.logsumexp(bowls.losses(truth).numpy() / tau, b=1 / N)
    np.testing.assert_allclose(found.gathered["level"][:, 0].numpy(), L, atol=1e-6)


def test_kl_dro_with_fresh_values_is_gradient_descent() -> None:
    """L of round 1 is that of x0, where its weights are found; so is every L if each run starts where the last one ended."""
    bowls, tau, x = Bowls(), 0.7, torch.zeros(D, dtype=torch.float64)
    for _ in range(4):
        f = bowls.losses(x)
        w = torch.softmax(f / tau, 0)
        expected = x - 0.1 * (w[:, None] * bowls.slopes(x)).sum(0)
        x = bowls.run(KLDRO(0.1, tau), 2, x0=x).x
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.5, 3.0])
def test_q_ffl_minimises_the_mean_power(p: float) -> None:
    bowls = Bowls()
    truth = minimised(lambda x: (bowls.losses(x) ** (p + 1)).mean())
    found = bowls.run(QFFL(0.1, p), 500)
    np.testing.assert_allclose(found.x.numpy(), truth, atol=1e-6)
    np.testing.assert_allclose(found.gathered["level"][0, 0].exp(), (bowls.losses(truth) ** p).mean(), rtol=1e-6)


@pytest.mark.parametrize("update", ["projected", "exponentiated"])
def test_afl_finds_the_saddle_point(update: str) -> None:
    """The largest of x²/2, 2(x − 3)² and x²/4 is smallest at x = 2, where λ = (2/3, 1/3, 0) makes the mixture's slope 0."""

    class Three(Bowls):
        A = torch.tensor([[[1.0]], [[4.0]], [[0.5]]]).double()
        c = torch.tensor([[0.0], [3.0], [0.0]]).double()
        b = torch.zeros(3).double()

        def __init__(self) -> None:
            self.problem = Minimize(self.one, torch.zeros(1).double())

        def __len__(self) -> int:
            return 3

    found = Three().run(AFL(0.1, 0.1, update), 600)
    torch.testing.assert_close(found.x, torch.tensor([2.0]).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(
        found.gathered["level"][:, 0], torch.tensor([2 / 3, 1 / 3, 0.0]).double(), atol=1e-3, rtol=0
    )


def test_afl_finds_the_smallest_largest_loss() -> None:
    bowls = Bowls()
    truth = largest_mean(bowls, 1)
    found = bowls.run(AFL(0.05, 0.05), 1000)
    np.testing.assert_allclose(found.x.numpy(), truth.x[:D], atol=1e-3)
    assert float(bowls.losses(found.x).max()) == pytest.approx(truth.fun, abs=1e-3)
    # λ has no weight where a loss is below the largest, and the mixture's gradient is 0
    lam = found.gathered["level"][:, 0]
    assert float(lam @ (truth.fun - bowls.losses(truth.x[:D]))) == pytest.approx(0, abs=1e-3)
    assert (lam @ bowls.slopes(truth.x[:D])).abs().max() < 1e-3


def test_cvar_minimises_the_mean_of_the_worst_share() -> None:
    bowls, count = Bowls(), 2
    truth = largest_mean(bowls, count)
    found = bowls.run(CVaRDRO(lambda t: 0.2 / (10 + t) ** 0.7, count / N, 0.02), 1200)
    value = float(bowls.losses(found.x).topk(count).values.mean())
    start = float(bowls.losses(bowls.x0).topk(count).values.mean())
    assert truth.fun <= value < truth.fun + 0.01 * (start - truth.fun)
    mean = minimised(lambda x: bowls.losses(x).mean())
    assert float(bowls.losses(mean).topk(count).values.mean()) > truth.fun + 0.05


@each
@pytest.mark.long
def test_the_worst_client_is_better_off(method: Any) -> None:
    bowls = Bowls()
    options = {"afl": {"gamma": 0.05}, "cvar-dro": {"rho": 1 / N, "eta_s": 0.02}}.get(method.name, {})
    found = bowls.run(type(method)(**{**without_step(method), **options}, eta=0.05), 250, q=2)
    plain = bowls.run(FedAvg(0.05), 250, q=2)
    assert bowls.losses(found.x).max() < bowls.losses(plain.x).max() - 0.02


# --- identities ---


@pytest.mark.parametrize("method", [QFFL(0.1, 0.0), KLDRO(0.1, 1e9), AFL(0.1, 1e-12), CVaRDRO(0.1, 1.0, 1e6)])
@pytest.mark.parametrize("q", [1, 3])
def test_weights_of_one_are_fedavg(method: Any, q: int) -> None:
    """CVaR of all clients, once its threshold is below all losses: after round 1, in which only half of them count."""
    bowls = Bowls()
    skipped = 2 if isinstance(method, CVaRDRO) else 1
    begin = bowls.run(method, skipped, q).x
    found, plain = bowls.run(method, skipped + 6, q), bowls.run(FedAvg(0.1), 6, q, x0=begin)
    torch.testing.assert_close(found.x, plain.x, rtol=1e-7, atol=1e-7)
    assert (begin == 0).all() == (skipped == 1)
    assert (plain.x - begin).abs().max() > 0.1


class Counted(Bowls):
    """Bowls that count the rows of their clients."""

    rows = (2, 40, 7, 11, 25)

    def run(self, method: Any, rounds: int, q: int = 1, **options: Any) -> Any:
        options = {"mode": "vmap", "workers": 1, "progress": False, **options}
        return simulate(self.problem, method, Sized(self), rounds=rounds, q=q, **options)


class Sized(Clients):
    """The clients of counted bowls."""

    def __init__(self, bowls: Counted) -> None:
        self.bowls = bowls

    def __len__(self) -> int:
        return N

    def sample(self, n: int, t: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.bowls.sample(n, t)

    def examples(self, n: int) -> int:
        return self.bowls.rows[n]


@each
def test_without_shrinkage_rows_do_not_matter(method: Any) -> None:
    plain, counted = Bowls().run(method, 6, Q), Counted().run(method, 6, Q)
    close(counted, plain, 0.0)
    tiny = Counted().run(type(method)(**{**vars(method), "k": 1e-9}), 6, Q)
    torch.testing.assert_close(tiny.x, plain.x, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("method", [QFFL(0.1, 2.0, k=1e12), KLDRO(0.1, 2.0, k=1e12), AFL(0.1, 0.2, k=1e12)])
def test_full_shrinkage_is_fedavg(method: Any) -> None:
    """All weights are 1, whatever the losses; the first round only exchanges them."""
    counted = Counted()
    found, plain = counted.run(method, 7, Q), counted.run(FedAvg(0.1), 6, Q)
    torch.testing.assert_close(found.x, plain.x, rtol=1e-6, atol=1e-6)
    without = counted.run(type(method)(**{**vars(method), "k": 0.0}), 7, Q)
    assert (without.x - plain.x).abs().max() > 0.01


def test_shrinkage_takes_weight_from_small_clients() -> None:
    """At the fixed point of KL-DRO the weights are those of the losses shrunk by the sheet's formula."""
    counted, tau, k = Counted(), 0.4, 10.0
    found = counted.run(KLDRO(0.02, tau, k=k), 3000)
    f, rows = counted.losses(found.x), torch.tensor(counted.rows).double()
    w = torch.softmax((rows * f + k * f.mean()) / (rows + k) / tau, 0)
    assert (w[:, None] * counted.slopes(found.x)).sum(0).abs().max() < 1e-6
    assert (torch.softmax(f / tau, 0)[:, None] * counted.slopes(found.x)).sum(0).abs().max() > 0.05


def test_shrinkage_needs_clients_that_count_their_rows() -> None:
    with pytest.raises(NestfedError, match="these clients do not count them: define `examples`, or set k = 0"):
        Bowls().run(KLDRO(0.1, k=1.0), 1)
    with pytest.raises(NestfedError, match="k must be at least 0"):
        KLDRO(0.1, k=-1.0)


@each
def test_the_weight_at_the_server_is_the_weight_of_the_gradient_for_one_step(method: Any) -> None:
    """q = 1: x moves along mean w_n ∇f_n(x)."""
    bowls = Bowls()
    _, rounds = trace(bowls.problem, method, as_clients(bowls), rounds=4, q=1)
    result = bowls.run(method, 3, seed=SEED)
    f, x = bowls.losses(rounds[3][1]["x"]), rounds[3][1]["x"]
    w = torch.stack([method.weigh(f[n], result.gathered["level"][n, 0], N) for n in range(N)])
    torch.testing.assert_close(
        rounds[4][1]["x"], x - 0.1 * (w[:, None] * bowls.slopes(x)).mean(0), rtol=1e-12, atol=1e-12
    )


@each
def test_served_by_the_mean_is_the_method_itself(method: Any) -> None:
    bowls = Bowls()
    close(bowls.run(method.served_by(Average()), 5, Q), bowls.run(method, 5, Q))


@each
def test_uniform_is_drawn_from_the_weighted_points(method: Any) -> None:
    """The mean over clients of x + w_n(y_n − x) in the middle of a round, not of y_n."""
    s = toys.plain(4)
    own = without_step(method)
    args = [v for k, v in own.items() if k not in ("alone", "k")]
    inside = 0
    for seed in (SEED,):
        for rounds in range(4, 12):
            result = simulate(
                s.problem, method, s.clients, rounds=rounds, q=Q, seed=seed, keep="uniform", progress=False
            )
            T = 1 + Q * (rounds - 1)
            drawn = int(Streams(seed).at(Purpose.OUTPUT, 0, 0).integers(T))
            box = getattr(boxes, method.name.replace("-", "_"))(s.maps, s.x0, 4, Q, T, 0.1, *args)
            np.testing.assert_allclose(result.x.numpy(), box["x"][drawn + 1].mean(0), rtol=1e-10, atol=1e-10)
            inside += drawn % Q > 0
    assert inside > 0


# --- regret ---


@each
def test_regret_is_what_is_above_the_loss_reached_alone(method: Any) -> None:
    """With b_n known by training alone, f_n − f_n* is the loss of bowls without b_n."""
    bowls, level = Bowls(), Bowls(floor=0.0)
    alone, method = 800, type(method)(**{**vars(method), "eta": 0.03})
    found = bowls.run(type(method)(**{**vars(method), "alone": alone}), 20, Q)
    torch.testing.assert_close(found.private["reached"][:, 0], bowls.b, rtol=0, atol=1e-9)
    plain = level.run(method, 20, Q)
    torch.testing.assert_close(found.x, plain.x, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.gathered["level"], plain.gathered["level"], rtol=0, atol=1e-6)
    assert found.history[-1]["iteration"] == plain.history[-1]["iteration"] + alone
    assert (bowls.run(method, 20, Q).x - plain.x).abs().max() > 1e-3


def test_regret_of_a_client_that_was_away_in_the_first_round() -> None:
    """Its f_n* is not known: its weight is 1, and L comes from the others."""
    bowls, tau, alone = Bowls(), 0.5, 4
    method = KLDRO(0.1, tau, alone=alone)
    options: dict[str, Any] = {"participation": 3, "seed": 1}
    exchange = grouped(options)["exchange"]
    first, second = (answering(exchange, 1, N, r) for r in (0, 1))
    late = set(second) - set(first)
    assert late
    assert set(second) & set(first)
    best = torch.zeros(N, dtype=torch.float64)
    for n in first:
        y = bowls.x0
        for _ in range(alone):
            y = y - 0.1 * bowls.slopes(y)[n]
        best[n] = bowls.losses(y)[n]
    gap = bowls.losses(bowls.x0) - best
    L = tau * torch.log(torch.exp(gap[first] / tau).mean())
    w = torch.exp((gap - L) / tau)
    w[list(late)] = 1
    x = bowls.x0 - 0.1 * (w[:, None] * bowls.slopes(bowls.x0))[second].mean(0)
    found = bowls.run(method, 2, 1, **options)
    torch.testing.assert_close(found.x, x, rtol=1e-12, atol=1e-12)
    known = [n for n in second if n in first]
    new = tau * torch.log(torch.exp(gap[known] / tau).mean())
    torch.testing.assert_close(found.gathered["level"][:, 0], new.expand(N), rtol=1e-12, atol=1e-12)
    assert found.private["reached"][:, 1].tolist() == [n in first for n in range(N)]


# --- who takes part ---


def test_afl_moves_the_answered_coordinates() -> None:
    """By γ(N/|S|)(f_n − mean over S), then the projection, which all coordinates feel."""
    lam = np.array([0.1, 0.2, 0.3, 0.25, 0.15])
    f = np.array([2.0, 0.5])
    table = torch.tensor(np.stack([lam, np.ones(N)], 1))
    rows = torch.tensor([[2.0, 1.0], [0.5, 1.0], [0.0, 0.0]], dtype=torch.float64)  # the third does not know its loss
    move = np.zeros(N)
    move[[1, 4]] = 0.3 * (N / 2) * (f - f.mean())
    found = AFL(0.1, 0.3).fill("loss", table, [1, 4, 2], rows)
    np.testing.assert_allclose(found[:, 0].numpy(), boxes.onto_simplex(lam + move), rtol=1e-12)
    weights = lam * np.exp(move)
    found = AFL(0.1, 0.3, "exponentiated").fill("loss", table, [1, 4, 2], rows)
    np.testing.assert_allclose(found[:, 0].numpy(), weights / weights.sum(), rtol=1e-12)
    unknown = AFL(0.1, 0.3).fill("loss", table, [2], rows[2:])
    assert torch.equal(unknown, table)


def test_afl_is_unbiased_over_who_answers() -> None:
    """Over all pairs of clients the mean move of λ before the projection is proportional to f − mean f."""
    f, found = torch.tensor([0.3, 1.0, 0.2, 0.7, 0.4], dtype=torch.float64), []
    table = torch.tensor([[0.2, 1.0]] * N, dtype=torch.float64)
    for i in range(N):
        for j in range(i):
            rows = torch.stack([f[[i, j]], torch.ones(2).double()], 1)
            found.append(AFL(0.1, 1e-3).fill("loss", table, [i, j], rows)[:, 0] - 0.2)
    # (N/|S|)·(|S|/N)·(|S|−1)/|S|·N/(N−1) of it
    expected = 1e-3 * (f - f.mean()) * (1 / 2) * N / (N - 1)
    torch.testing.assert_close(torch.stack(found).mean(0), expected, rtol=1e-10, atol=1e-12)


@each
def test_clients_that_never_come_and_rounds_without_anybody(method: Any) -> None:
    s = toys.plain(N)
    options: dict[str, Any] = {"share": 0.2, "failures": 0.5, "seed": SEED, "q": Q, "progress": False}
    found = simulate(s.problem, method, s.clients, rounds=12, **options)
    assert torch.isfinite(found.x).all()
    came = [r["participants"] for r in found.history]
    assert 0 in came[1:]
    assert (found.private["reached"][:, 1] == 0).any()
    if isinstance(method, AFL):
        assert float(found.gathered["level"][:, 0].sum()) == pytest.approx(1)
    close(simulate(s.problem, method, s.clients, rounds=12, mode="loop", **options), found)


@each
@pytest.mark.parametrize("alone", [0, 2])
def test_clients_of_different_pace(method: Any, alone: int) -> None:
    """A slow client does not get through its steps alone: its f_n* stays unknown, and it counts as in FedAvg."""
    s = toys.plain(4)
    clients = Paced(s.clients.seeded(SEED), lambda n, t, q: min(q, [3, 1, 2, 3][n]))
    method = type(method)(**{**vars(method), "alone": alone})
    runs = [simulate(s.problem, method, clients, rounds=5, q=Q, mode=mode, progress=False) for mode in ("vmap", "loop")]
    close(*runs)
    assert runs[0].private["reached"][:, 1].tolist() == ([1, 0, 0, 1] if alone else [1, 1, 1, 1])


# --- numbers ---


@each
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e3])
def test_nothing_overflows_in_float32(method: Any, size: float) -> None:
    """Losses of 1e3 with τ of 1e-2, and their powers."""
    bowls = Bowls(torch.float32, scale=size)
    extreme = {"kl-dro": {"tau": 0.01}, "q-ffl": {"p": 20.0}, "afl": {"gamma": 100.0, "update": "exponentiated"}}
    method = type(method)(**{**vars(method), **extreme.get(method.name, {}), "eta": 1e-3 / size})
    found = bowls.run(method, 6)
    assert torch.isfinite(found.x).all()
    f = bowls.losses(torch.zeros(D)).double().numpy()
    level = float(bowls.run(method, 1).gathered["level"][0, 0])
    if method.name == "kl-dro":
        assert level == pytest.approx(0.01 * special.logsumexp(f / 0.01, b=1 / N), rel=1e-5)
    if method.name == "q-ffl":
        assert level == pytest.approx(special.logsumexp(20 * np.log(f), b=1 / N), rel=1e-5)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_q_ffl_of_losses_that_are_not_positive(p: float) -> None:
    """Their gradient of max(f, 0)^{p+1} is 0, except for p = 0, which is FedAvg by convention."""
    bowls = Bowls(floor=0.0)
    bowls.b = bowls.b - 100
    found = bowls.run(QFFL(0.1, p), 4)
    assert torch.isfinite(found.gathered["level"]).all()
    expected = bowls.x0 if p else bowls.run(FedAvg(0.1), 3).x
    torch.testing.assert_close(found.x, expected, rtol=1e-12, atol=1e-12)


@each
def test_losses_are_neither_rounded_nor_clipped(method: Any) -> None:
    s = toys.plain(4)
    options: dict[str, Any] = {"q": Q, "seed": SEED, "progress": False}
    first = simulate(s.problem, method, s.clients, rounds=1, **options)
    exact = simulate(s.problem, method, s.clients, rounds=6, **options)
    for more in ({"encode": "int8"}, {"encode": "bfloat16"}, {"reduce": "clip:0.05"}):
        identical(
            dict(simulate(s.problem, method, s.clients, rounds=1, **options, **more).gathered), dict(first.gathered)
        )
        found = simulate(s.problem, method, s.clients, rounds=6, **options, **more)
        assert 0 < (found.x - exact.x).abs().max() < (1 if "reduce" in more else 1e-3)


@each
def test_the_point_stays_feasible(method: Any) -> None:
    """Weights above 1 take clients' points out of the ball; the broadcast and a drawn point are in it."""
    bowls = Bowls()
    bowls.problem = Minimize(bowls.one, bowls.x0, domain=Ball(0.2))
    for keep in ("last", "uniform"):
        found = bowls.run(method, 8, Q, keep=keep, seed=SEED)
        assert 0.1 < float(found.x.norm()) <= 0.2 + 1e-12


# --- what they work on, and what is rejected ---


def test_a_conditional_problem_and_one_with_running_statistics() -> None:
    """f_n is the loss that the gradient belongs to, whatever the kind of problem."""
    x, y = constants(40, 4, seed=3).float(), (torch.arange(40) % 3 == 0).long()
    parts = [np.arange(40)[i::4] for i in range(4)]
    sides = (
        (AUPRC(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))), Pairs((x, y), parts)),
        (
            Classify(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), buffers="average"),
            Examples((x, y), parts, batch=10),
        ),
    )
    for problem, clients in sides:
        run = as_clients(clients).seeded(SEED)
        found = simulate(problem, KLDRO(0.1, 1.0), clients, rounds=1, q=Q, seed=SEED, progress=False)
        losses = []
        for n in range(4):
            batch = Batch(run.sample(n, 0), eager=True)
            problem.grad(problem.x0, batch)
            losses.append(float(batch.tape.loss))  # type: ignore[arg-type]
        assert float(found.gathered["level"][0, 0]) == pytest.approx(special.logsumexp(losses, b=0.25), rel=1e-5)
        later = simulate(problem, KLDRO(0.1, 1.0), clients, rounds=3, q=Q, seed=SEED, progress=False)
        assert (later.shared["x"] - found.shared["x"]).abs().max() > 1e-4


class Silent(Differentiable):
    """It notes no loss."""

    @property
    def x0(self) -> Tensor:
        return torch.zeros(2)

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return x + 1


class Nothing(Clients):
    def __len__(self) -> int:
        return 2

    def sample(self, n: int, t: int) -> Tensor:
        return torch.ones(1)


@each
def test_rejected(method: Any) -> None:
    s = toys.plain(4)
    for options, sentence in (
        ({"weights": "examples"}, "weights clients by their losses"),
        ({"reduce": "median"}, "weights clients by their losses"),
        ({"reduce": "trimmed:0.3"}, "weights clients by their losses"),
        ({"clip": 1.0, "noise": 1.0}, "false promise"),
    ):
        clients = Examples((torch.ones(8, 1),), np.array_split(np.arange(8), 4), batch=2)
        held: Any = clients if "weights" in options else s.clients
        problem = Minimize(lambda x, b: ((x - b[0]) ** 2).sum(), torch.zeros(1)) if "weights" in options else s.problem
        with pytest.raises(NestfedError, match=sentence):
            simulate(problem, method, held, rounds=1, progress=False, **options)
    with pytest.raises(NestfedError, match="notes no loss"):
        simulate(Silent(), method, Nothing(), rounds=1, progress=False)


@each
def test_a_large_batch_is_drawn_where_losses_are_found(method: Any) -> None:
    """At the end of the first round, and at the start of every other one."""
    for alone in (0, 2):
        one = type(method)(**{**vars(method), "alone": alone})
        ends = [t for t in range(12) if one.ends_round(t, Q)]
        assert ends == [alone + Q * i for i in range(len(ends))]
        assert [t for t in range(12) if one.restarts(t, Q)] == [alone, *(t + 1 for t in ends if t < 11)]
