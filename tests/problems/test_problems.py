"""The four estimators: right gradients on modules and vectors, with everything that can be switched on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import ConditionalToy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from nestfed import algorithms as a
from nestfed.core import Batch, NestfedError, Tape
from nestfed.data.clients import Examples
from nestfed.problems.base import Ball, Box, Compositional, Conditional, Minimax, Minimize, Simplex
from nestfed.problems.flat import Flat, KeyedDropout
from tests import toys
from tests.support import simulate


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """3 → 4 → 2 with a nonlinearity, in float64, with the same weights every time."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), middle or nn.Identity(), nn.Tanh(), nn.Linear(4, 2)).double()
        for i, p in enumerate(self.parameters()):
            p.data = 0.6 * normal(*p.shape, seed=i)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def differences(value: Callable[[Tensor], Tensor], x: Tensor, h: float = 1e-5) -> Tensor:
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(value(x + e) - value(x - e)) / (2 * h) for e in steps]).detach()


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def sample(batch: Any, eager: bool, key: Tensor | None = None) -> Batch:
    return Batch(batch, key, Tape(), eager)


def penalty(model: Any) -> Tensor:
    if isinstance(model, Tensor):
        return 0.3 * (model**2 / (1 + model**2)).sum()
    return 0.3 * model(torch.ones(1, 3, dtype=torch.float64)).square().sum()


B, M = 3, 4
X, Y, INNER = normal(B, 3, seed=10), normal(B, seed=11), normal(B, M, 3, seed=12)


def call(model: Any, x: Tensor) -> Tensor:
    """A number per row: the network's difference of outputs, or a nonlinear function of a vector's product."""
    return torch.sin(x @ model) if isinstance(model, Tensor) else model(x)[..., 0] - model(x)[..., 1] ** 2


def minimize(model: Any, **options: Any) -> tuple[Any, Any]:
    return Minimize(lambda m, b: (call(m, b[0]) - b[1]).square().mean(), model, **options), (X, Y)


def conditional(model: Any, **options: Any) -> tuple[Any, Any]:
    problem = Conditional(
        lambda u, outer: (u[:, 0] - outer[1]).exp() + u[:, 1] ** 2,
        lambda m, outer, inner: torch.stack([call(m, inner), call(m, outer[0])[:, None] * call(m, inner)], -1),
        model,
        **options,
    )
    return problem, ((X, Y), INNER)


def compositional(model: Any, **options: Any) -> tuple[Any, Any]:
    def g(m: Any, inner: Tensor) -> Tensor:
        s = call(m, inner)
        return torch.stack([s, s**2, torch.cos(s)]).mean((1, 2))

    problem = Compositional(lambda u, outer: ((u - outer.mean()) ** 4).sum(), g, model, 3, **options)
    return problem, (Y, INNER)


KINDS = [minimize, conditional, compositional]
MODELS = {"module": Net, "vector": lambda: normal(3, seed=20)}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
eagerly = pytest.mark.parametrize("eager", [True, False], ids=["eager", "functional"])


# --- Gradients ---


@eagerly
@kinds
@models
@pytest.mark.parametrize("extra", [None, penalty], ids=["bare", "penalty"])
def test_gradient_is_that_of_the_loss(kind: Any, model: Any, extra: Any, eager: bool) -> None:
    problem, batch = kind(model(), penalty=extra)
    x = problem.x0 + 0.1
    expected = differences(lambda y: problem.loss(y, batch), x)
    close(problem.grad(x, sample(batch, eager)), expected)
    close(problem.grad(x, batch), expected)  # a bare batch will do
    if extra is not None:
        bare, _ = kind(model())
        value = penalty(problem.bind(x))
        torch.testing.assert_close(problem.loss(x, batch), bare.loss(x, batch) + value)


@eagerly
@models
@pytest.mark.parametrize("extra", [None, penalty], ids=["bare", "penalty"])
def test_compositional_in_two_parts(model: Any, extra: Any, eager: bool) -> None:
    """The inner value, its Jacobian and the outer gradient, each against finite differences; together, the gradient."""
    problem, batch = compositional(model(), penalty=extra)
    x, v = problem.x0 + 0.1, normal(1, 3, seed=5)
    value, pullback = problem.inner(x, sample(batch, eager))
    inner = problem.g(problem.bind(x), batch[1])
    torch.testing.assert_close(value, inner[None])

    def weighted(y: Tensor) -> Tensor:
        value = (problem.g(problem.bind(y), batch[1]) * v[0]).sum()
        return value if extra is None else value + penalty(problem.bind(y))

    close(pullback(v), differences(weighted, x))
    u = normal(1, 3, seed=6)
    close(problem.outer_grad(u, sample(batch, eager))[0], differences(lambda y: problem.f(y, batch[0]), u[0]))
    value, pullback = problem.inner(x, sample(batch, eager))
    chained = pullback(problem.outer_grad(value, sample(batch, eager)))
    close(chained, problem.grad(x, sample(batch, eager)))
    assert problem.which(batch).tolist() == [0]


@eagerly
@models
@pytest.mark.parametrize("extra", [None, penalty], ids=["bare", "penalty"])
def test_minimax_gradients(model: Any, extra: Any, eager: bool) -> None:
    problem = Minimax(
        lambda m, w, b: (call(m, b[0]) * (w[0] - b[1])).square().mean() + (w[1] ** 3) * call(m, b[0]).sum(),
        model(),
        normal(2, seed=3),
        penalty=extra,
    )
    theta, w = problem.x0 + 0.1, problem.w0 + 0.2
    g, h = problem.grads(theta, w, sample((X, Y), eager))
    close(g, differences(lambda y: problem.loss_at(y, w, (X, Y)), theta))
    close(h, differences(lambda y: problem.loss_at(theta, y, (X, Y)), w))


@eagerly
@kinds
def test_clip(kind: Any, eager: bool) -> None:
    free, batch = kind(Net())
    full = free.grad(free.x0, batch)
    for clip in (0.5 * float(full.norm()), 2 * float(full.norm())):
        clipped, _ = kind(Net(), clip=clip)
        found = clipped.grad(free.x0, sample(batch, eager))
        torch.testing.assert_close(found, full * min(1.0, clip / float(full.norm())))
        if kind is compositional:
            value, pullback = clipped.inner(free.x0, sample(batch, eager))
            torch.testing.assert_close(pullback(clipped.outer_grad(value, sample(batch, eager))), found)


@eagerly
def test_clip_of_minimax_is_for_theta(eager: bool) -> None:
    problem = Minimax(lambda m, w, b: (m * w).sum() * 100, normal(3), normal(3, seed=1), clip=0.1)
    g, h = problem.grads(problem.x0, problem.w0, sample((X,), eager))
    assert g.norm().item() == pytest.approx(0.1)
    torch.testing.assert_close(h, 100 * problem.x0)


@pytest.mark.parametrize("clip", [0.0, -1.0])
def test_clip_must_be_positive(clip: float) -> None:
    with pytest.raises(NestfedError, match="clip"):
        minimize(Net(), clip=clip)


def test_costs_are_counted() -> None:
    for kind, cost in ((minimize, B), (conditional, B + B * M), (compositional, B + B)):
        problem, batch = kind(Net())
        one = sample(batch, True)
        problem.grad(problem.x0, one)
        problem.grad(problem.x0 + 1, one)
        assert one.tape.examples == 2 * cost
        assert one.tape.evaluations == 2
        torch.testing.assert_close(one.tape.loss, problem.loss(problem.x0, batch))  # at the first point


# --- Second order ---


@pytest.mark.parametrize(("eager", "vectorised"), [(True, False), (False, False), (False, True)])
def test_second_order(eager: bool, vectorised: bool) -> None:
    """g = x − λ∇L(x) contains a gradient itself, as in MAML: (I − λ∇²L)∇L."""

    def task_loss(x: Tensor, data: Tensor) -> Tensor:
        return torch.cosh(data @ x).mean()

    def g(x: Tensor, inner: Tensor) -> Tensor:
        return x - 0.2 * torch.func.grad(task_loss)(x, inner)

    problem = Compositional(lambda u, outer: task_loss(u, outer), g, 0.3 * normal(3), 3)
    batch, x = (X, INNER[0]), 0.3 * normal(3)
    by_hand = torch.eye(3, dtype=torch.float64) - 0.2 * torch.autograd.functional.hessian(
        lambda y: task_loss(y, INNER[0]), x
    )
    adapted = g(x, INNER[0])
    outer = torch.autograd.functional.jacobian(lambda y: task_loss(y, X), adapted)
    expected = by_hand.T @ outer
    with torch.no_grad():
        if vectorised:
            stacked = torch.utils._pytree.tree_map(lambda leaf: leaf.expand(2, *leaf.shape), batch)
            found = torch.vmap(lambda b: problem.grad(x, sample(b, False)))(stacked)[1]
        else:
            found = problem.grad(x, sample(batch, eager))
            value, pullback = problem.inner(x, sample(batch, eager))
            close(pullback(problem.outer_grad(value, sample(batch, eager))), expected)
    close(found, expected)
    assert (found - outer).norm() > 0.01  # first order would be something else


# --- The mean is inside f ---


def test_mean_over_inner_samples_is_inside_f() -> None:
    """Eq. 3 by brute force; f of each sample, averaged outside, is another number."""
    problem, batch = conditional(Net())
    model = problem.bind(problem.x0)
    inside = outside = 0.0
    for i in range(B):
        h = call(model, X[i : i + 1])
        values = [torch.stack([call(model, e[None]), h * call(model, e[None])], -1)[0] for e in INNER[i]]
        f = lambda u, i=i: (u[0] - Y[i]).exp() + u[1] ** 2  # noqa: E731
        inside += float(f(sum(values) / M)) / B
        outside += float(sum(f(v) for v in values)) / M / B
    assert problem.loss(problem.x0, batch).item() == pytest.approx(inside, rel=1e-12)
    assert abs(inside - outside) > 5e-3


def test_estimator_is_product_of_means() -> None:
    """(mean_j ∇g_j)ᵀ ∇f(mean_j g_j), with explicit Jacobians."""
    setting = toys.conditional()
    x = setting.problem.x0
    for t in range(3):
        found = setting.problem.grad(x, setting.clients.seeded(toys.SEED).sample(1, t))
        np.testing.assert_allclose(found.numpy(), setting.maps["grad"](1, t, x.numpy()), rtol=1e-12)


def test_common_inner_samples() -> None:
    """Inner samples with leading axes (1, m) are seen by all outer ones, and counted once."""
    x = normal(3)
    problem = Conditional(lambda u, o: u.exp(), lambda m, o, i: (o[:, None] * i) @ m, x)
    shared = (X, INNER[:1])
    repeated = (X, INNER[:1].expand(B, M, 3))
    torch.testing.assert_close(problem.grad(x, shared), problem.grad(x, repeated))
    assert problem.examples(shared) == B + M
    assert problem.examples(repeated) == B + B * M


def test_bias_falls_like_one_over_m() -> None:
    """The measured bias of the estimator on a toy with known gradient has slope −1 against m."""
    x = torch.tensor([1.0, -1.5, 2.0], dtype=torch.float64)
    sizes, biases = (1, 2, 4, 8, 16), []
    for m in sizes:
        # The clients differ only in their targets and all draw on their own; more draws where the bias is smaller.
        toy = ConditionalToy(N=20, dim=3, kappa=0.0, sigma=2.0, inner=m, outer=400 * m)
        clients = toy.clients.seeded(7)
        batches = clients.draw(range(20), range(1))[0]
        found = torch.vmap(lambda b, toy=toy: toy.problem.grad(x, b))(batches).mean(0)
        # The same outer samples with the exact inner mean: what is left is the bias and the inner noise.
        (outer, targets), _ = batches
        exact = ((outer * (x - targets)).sum(-1, keepdim=True) * outer).mean((0, 1))
        biases.append(float(((found - exact) * x).sum() / x.norm()))
        assert biases[-1] == pytest.approx(float(toy.bias(x, m).norm()), rel=0.25)
    slope = np.polyfit(np.log(sizes), np.log(biases), 1)[0]
    assert -1.2 < slope < -0.8


# --- Domains ---


@pytest.mark.parametrize("x", [normal(2, seed=i) * 2 for i in range(6)], ids=str)
@pytest.mark.parametrize("domain", [Box(-0.5, 0.8), Ball(0.7), Simplex()], ids=repr)
def test_projection_is_the_nearest_point(domain: Any, x: Tensor) -> None:
    grid = torch.linspace(-1.0, 1.0, 401, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    inside = {
        Box: ((points >= -0.5 - 1e-9) & (points <= 0.8 + 1e-9)).all(1),
        Ball: points.norm(dim=1) <= 0.7 + 1e-9,
        Simplex: (points >= -1e-9).all(1) & ((points.sum(1) - 1).abs() < 1e-9),
    }[type(domain)]
    nearest = (points[inside] - x).norm(dim=1).min()
    found = domain.project(x)
    assert (found - x).norm() <= nearest + 1e-9
    assert (found - x).norm() >= nearest - 0.01
    torch.testing.assert_close(domain.project(found), found)  # once is enough
    torch.testing.assert_close(torch.vmap(domain.project)(torch.stack([x, x + 1]))[0], found)


def test_simplex_in_many_dimensions() -> None:
    """Against bisection on the shift."""
    x = normal(9, seed=4)
    low, high = x.min() - 1, x.max()
    for _ in range(100):
        shift = (low + high) / 2
        low, high = (shift, high) if (x - shift).clamp_min(0).sum() > 1 else (low, shift)
    torch.testing.assert_close(Simplex().project(x), (x - low).clamp_min(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["fedavg", "stem", "fafed", "acc-fcsg-m"])
def test_every_point_stays_in_the_domain(name: str) -> None:
    setting = toys.plain()
    problem = Minimize(setting.problem.f, setting.problem.x0, domain=Ball(0.2))
    algorithm = a.build(name, **{"alpha" if "fcsg" in name else "eta": 0.3})
    x0 = 0.1 * setting.problem.x0
    result = simulate(problem, algorithm, setting.clients, rounds=5, q=3, x0=x0, progress=False)
    assert result.x.norm() <= 0.2 + 1e-12
    free = simulate(setting.problem, algorithm, setting.clients, rounds=5, q=3, x0=x0, progress=False)
    assert free.x.norm() > 0.2


def test_dual_domain() -> None:
    setting = toys.minimax()
    problem = Minimax(setting.problem.f, setting.problem.x0, setting.problem.w0, dual_domain=Box(-0.1, 0.1))
    result = simulate(problem, a.LocalSGDA(0.1, 0.5), setting.clients, rounds=4, q=3, progress=False)
    assert result.shared["w"].abs().max() <= 0.1 + 1e-12


# --- Modules ---


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


DATA = (normal(60, 3, seed=30), (normal(60, seed=31) > 0).long())
HELD = Examples(DATA, np.array_split(np.arange(60), 4), batch=5)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)])
def test_running_statistics_are_refused_with_advice(layer: nn.Module) -> None:
    with pytest.raises(NestfedError, match=r"layers\.1 .*GroupNorm or LayerNorm.*track_running_stats=False"):
        Minimize(classify, Net(layer))


def test_batch_statistics_work() -> None:
    problem = Minimize(classify, Net(nn.BatchNorm1d(4, track_running_stats=False).double()))
    batch = HELD.seeded(0).sample(0, 0)
    close(problem.grad(problem.x0, batch), differences(lambda y: problem.loss(y, batch, train=True), problem.x0))
    results = [
        simulate(problem, a.FedAvg(0.1), HELD, rounds=3, q=2, mode=mode, progress=False) for mode in ("vmap", "loop")
    ]
    torch.testing.assert_close(results[0].x, results[1].x, rtol=1e-10, atol=1e-10)


class Tied(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3).double(), nn.Linear(3, 3, bias=False).double()
        self.encode.weight.data = normal(3, 3, seed=1)
        self.encode.bias.data = normal(3, seed=2)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


@eagerly
def test_tied_weights(eager: bool) -> None:
    problem = Minimize(lambda m, b: (m(b) - b).square().mean(), Tied())
    assert problem.x0.numel() == 3 * 3 + 3
    close(problem.grad(problem.x0, sample(X, eager)), differences(lambda y: problem.loss(y, X), problem.x0))
    trained = problem.module(problem.x0 + 1)
    assert trained.decode.weight is trained.encode.weight
    torch.testing.assert_close(trained(X), problem.bind(problem.x0 + 1)(X))
    reference = Tied()
    (reference(X) - X).square().mean().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(problem.grad(problem.x0, sample(X, eager)), flat)


def test_the_users_module_is_left_alone() -> None:
    net = Net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    problem = Minimize(classify, net)
    result = simulate(problem, a.FedAvg(0.5), HELD, rounds=2, q=2, progress=False)
    for k, v in net.state_dict().items():
        assert torch.equal(v, before[k])
        assert not torch.equal(result.model.state_dict()[k], v)
    assert net.training
    assert not result.model.training


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Tanh(), "no parameters"),
        (torch.zeros(2, 2), "vector of floats"),
        (torch.zeros(3, dtype=torch.long), "vector of floats"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "one dtype"),
    ],
)
def test_models_that_cannot_be(model: Any, message: str) -> None:
    with pytest.raises(NestfedError, match=message):
        Flat(model)


# --- Dropout ---


def dropping(p: float = 0.4) -> Minimize:
    return Minimize(classify, Net(nn.Dropout(p)))


@pytest.mark.parametrize("algorithm", [a.FedAvg(0.2), a.STEM(0.2, 0.3)], ids=lambda algorithm: algorithm.name)
def test_dropout_is_the_same_vectorised_or_not_and_every_time(algorithm: Any) -> None:
    problem = dropping()
    generator = torch.get_rng_state()
    runs = [
        simulate(problem, algorithm, HELD, rounds=3, q=2, seed=1, mode=mode, progress=False).x
        for mode in ("vmap", "loop", "vmap")
    ]
    assert torch.equal(runs[0], runs[2])
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-10, atol=1e-10)
    assert torch.equal(generator, torch.get_rng_state())
    other = simulate(problem, algorithm, HELD.seeded(1), rounds=3, q=2, seed=2, mode="vmap", progress=False).x
    assert not torch.equal(runs[0], other)  # the same batches with other masks
    without = simulate(Minimize(classify, Net()), algorithm, HELD, rounds=3, q=2, seed=1, progress=False).x
    assert not torch.allclose(runs[0], without)


class Watched(nn.Module):
    """Remembers what dropout made of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.drop(torch.ones_like(x))
        self.seen.append(mask)
        return (mask * x * self.weight).sum()


def masks(problem: Minimize) -> list[Tensor]:
    return problem.flat._train.seen


def test_both_points_of_a_correction_see_one_mask() -> None:
    problem = Minimize(lambda m, b: m(b[0]), Watched())
    clients = Examples((torch.ones(8, 50, dtype=torch.float64),), [np.arange(8)], batch=4)
    simulate(problem, a.AccFCSGM(0.1, 0.5), clients, rounds=3, q=1, mode="loop", progress=False)
    seen = masks(problem)[1:]  # the first evaluation inspects the problem before round 1
    assert len(seen) == 5  # one evaluation at t = 0, two later
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(seen[3], seen[4])
    for left, right in itertools.combinations((seen[0], seen[1], seen[3]), 2):
        assert not torch.equal(left, right)


def test_dropout_keeps_the_right_share() -> None:
    x = torch.ones(400, 500, dtype=torch.float64)
    for p in (0.1, 0.5, 0.8):
        rates = []
        for key in (0, 1, 2**61 + 12345):
            with KeyedDropout(torch.tensor(key)):
                first, second = F.dropout(x, p), F.dropout(x, p)
            kept = first > 0
            assert first[kept].unique().tolist() == pytest.approx([1 / (1 - p)])
            assert not torch.equal(first, second)  # the next call has another mask
            rates.append(kept.double().mean().item())
            # no pattern along rows, along columns, or between two calls
            deviation = (p * (1 - p) / 500) ** 0.5
            assert kept.double().mean(1).std().item() == pytest.approx(deviation, rel=0.2)
            assert kept.double().mean(0).std().item() == pytest.approx((p * (1 - p) / 400) ** 0.5, rel=0.2)
            together = (kept & (second > 0)).double().mean().item()
            assert together == pytest.approx((1 - p) ** 2, abs=0.006)
        assert rates == pytest.approx([1 - p] * 3, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
        assert len(set(rates)) == 3


class Forgetful(nn.Module):
    """Three parts with dropout, two of them in a third; each may be recomputed in the backward pass."""

    def __init__(self, forget: bool, other: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.drop, self.forget = nn.Dropout(0.4), forget
        self.other = nn.Dropout1d(0.4) if other else nn.Identity()  # its numbers come from torch's generator

    def part(self, function: Any, x: Tensor) -> Tensor:
        return recompute(function, x, use_reentrant=False) if self.forget else function(x)

    def begin(self, x: Tensor) -> Tensor:
        return self.other(self.drop(torch.tanh(self.first(x)))[..., None])[..., 0]

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.second(self.drop(self.part(self.begin, x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.third(self.part(self.drop, self.part(self.middle, x))))


RECOMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "minimize": lambda model: Minimize(classify, model),
    "conditional": lambda model: Conditional(
        lambda u, outer: u.square().sum(1), lambda m, o, i: m(i.flatten(0, 1)).view(*i.shape[:2], 2), model
    ),
    "compositional": lambda model: Compositional(
        lambda u, outer: (u * u).sum(), lambda m, inner: m(inner).mean(0), model, 2
    ),
    "minimax": lambda model: Minimax(lambda m, w, b: w.sum() * classify(m, b), model, torch.ones(1)),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
@pytest.mark.parametrize("other", [False, True], ids=["dropout", "dropout and torch's generator"])
def test_a_recomputed_part_has_the_same_masks(kind: str, other: bool) -> None:
    found = {}
    data = HELD.sample(0, 0) if kind in ("minimize", "minimax") else (normal(5, 1), normal(5, 3))
    data = (data[0], data[1].expand(5, 5, 3)) if kind == "conditional" else data
    for forget in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            problem = RECOMPUTED[kind](Forgetful(forget, other).double())
        assert problem.inspect(Batch(data))
        generator = torch.get_rng_state()
        found[forget] = [
            problem.grads(problem.x0, problem.w0, batch) if kind == "minimax" else problem.grad(problem.x0, batch)
            for batch in (Batch(data, torch.tensor(key), eager=True) for key in (7, 7, 8))
        ]
        assert torch.equal(generator, torch.get_rng_state())
    torch.testing.assert_close(found[True], found[False], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[True][0], found[True][1], rtol=0, atol=0)
    assert not torch.allclose(found[True][1][0], found[True][2][0])


def test_dropout_is_off_in_evaluation() -> None:
    problem = dropping()
    model = problem.bind(problem.x0)
    assert torch.equal(model(X), model(X))
    torch.testing.assert_close(model(X), Net()(X))


# --- Wrong shapes ---


def refused(problem: Any, batch: Any, message: str, algorithm: Any = None) -> None:
    clients = type("One", (), {"__len__": lambda self: 1, "sample": lambda self, n, t: batch})()
    for mode in ("vmap", "loop"):
        with pytest.raises(NestfedError, match=message) as error:
            simulate(problem, algorithm or a.FedAvg(0.1), clients, rounds=1, mode=mode, progress=False)
        assert str(error.value).endswith(".")
        assert "\n" not in str(error.value)


def test_wrong_shapes_are_reported() -> None:
    x = normal(3)
    refused(Minimize(lambda m, b: b @ m, x), X, r"f must return one number .* \(3,\)")
    refused(
        Minimize(lambda m, b: (b @ m).sum(), x, penalty=lambda m: m), X, r"penalty must return one number .* \(3,\)"
    )
    per_pair = lambda m, o, i: i @ m  # noqa: E731
    refused(Conditional(lambda u, o: u, lambda m, o, i: o @ m, x), (X, INNER), r"g must return one value per pair")
    # the classic: (b,) against (b, 1) broadcasts to (b, b)
    refused(Conditional(lambda u, o: u - o[:, :1], per_pair, x), (X, INNER), r"one number per outer sample.* \(3, 3\)")
    refused(Conditional(lambda u, o: u.mean(), per_pair, x), (X, INNER), r"one number per outer sample.* \(\)")
    tracked = a.LocalSCGD(0.1)
    refused(Compositional(lambda u, o: u.sum(), lambda m, i: m, x, 2), (X, X), r"g must return 2 values", tracked)
    refused(Compositional(lambda u, o: u, lambda m, i: m, x, 3), (X, X), r"f must return one number", tracked)
    refused(Compositional(lambda u, o: u, lambda m, i: m, x, 3), (X, X), r"f must return one number")
    refused(Minimax(lambda m, w, b: m * w, x, x), X, r"f must return one number", a.LocalSGDA(0.1, 0.1))
