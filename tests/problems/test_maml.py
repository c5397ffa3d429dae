"""MAML: its gradient in four ways, every method on it, sine waves, and the tasks of Omniglot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers import omniglot
from nestfed_papers.networks import OmniglotNet
from nestfed_papers.omniglot import Characters, Episodes, FewShotTest, OmniglotClients
from nestfed_papers.sine import SineClients, SineTest, draw_fit
from torch import Tensor, nn

from nestfed.algorithms import build
from nestfed.core import Batch, NestfedError, Tape
from nestfed.experiment.build import assemble
from nestfed.experiment.spec import read as read_experiment
from nestfed.models import build as network
from nestfed.problems.base import Minimize
from nestfed.problems.maml import MAML, squared_error
from tests.support import simulate

EAGER = pytest.mark.parametrize("eager", [True, False], ids=["autograd", "func"])
VECTORISE = pytest.mark.parametrize("vectorise", [True, False], ids=["vectorised", "in-turn"])


def curved() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()


def tasks(k: int = 3, ns: int = 4, nq: int = 6, d: int = 2) -> Any:
    g = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return (some(k, nq, d), some(k, nq)), (some(k, ns, d), some(k, ns)), torch.tensor([2, 0, 4][:k])


def sample(batch: Any, eager: bool) -> Batch:
    return Batch(batch, None, Tape(), eager)


# ---------------------------------------------------------------- the gradient


@EAGER
@VECTORISE
def test_gradient_is_that_of_the_loss_and_a_finite_difference(eager: bool, vectorise: bool) -> None:
    problem, batch = MAML(curved(), squared_error, inner_lr=0.3, tasks=5, vectorise=vectorise), tasks()
    x = problem.x0
    found = problem.grad(x, sample(batch, eager))
    direct = torch.func.grad(lambda y: problem.loss(y, batch))(x)
    torch.testing.assert_close(found, direct, rtol=1e-12, atol=1e-12)
    h = 1e-5
    basis = torch.eye(len(x), dtype=x.dtype)
    finite = torch.stack([(problem.loss(x + h * e, batch) - problem.loss(x - h * e, batch)) / (2 * h) for e in basis])
    torch.testing.assert_close(found, finite, rtol=1e-6, atol=1e-6)


@EAGER
@VECTORISE
def test_gradient_equals_the_explicit_hessian_on_a_linear_model(eager: bool, vectorise: bool) -> None:
    lam, batch = 0.2, tasks(d=3)

    def loss(w: Tensor, examples: Any) -> Tensor:
        return ((examples[0] @ w - examples[1]) ** 2).mean()

    w = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    problem = MAML(w, loss, inner_lr=lam, tasks=5, vectorise=vectorise)
    total = np.zeros(3)
    (xq, yq), (xs, ys), _ = (tuple(p.numpy() for p in part) if isinstance(part, tuple) else part for part in batch)
    for A, y, Q, z in zip(xs, ys, xq, yq):
        slope, hessian = 2 * A.T @ (A @ w.numpy() - y) / len(y), 2 * A.T @ A / len(y)
        adapted = w.numpy() - lam * slope
        total += (np.eye(3) - lam * hessian) @ (2 * Q.T @ (Q @ adapted - z) / len(z)) / len(xs)
    np.testing.assert_allclose(problem.grad(w, sample(batch, eager)).numpy(), total, rtol=1e-12)


@EAGER
def test_first_order_leaves_the_hessian_out(eager: bool) -> None:
    batch = tasks()
    second = MAML(curved(), squared_error, inner_lr=0.3)
    first = MAML(curved(), squared_error, inner_lr=0.3, first_order=True)
    x = second.x0
    value, _ = second.inner(x, sample(batch, eager))
    value1, pullback = first.inner(x, sample(batch, eager))
    torch.testing.assert_close(value, value1)
    found = first.grad(x, sample(batch, eager))
    torch.testing.assert_close(found, second.outer_grad(value, sample(batch, eager)).mean(0))
    assert (found - second.grad(x, sample(batch, eager))).norm() > 0.01 * found.norm()
    torch.testing.assert_close(pullback(value), value.mean(0))


@EAGER
@VECTORISE
def test_pullback_is_the_mean_of_each_tasks_own_jacobian(eager: bool, vectorise: bool) -> None:
    problem, batch = MAML(curved(), squared_error, inner_lr=0.3, vectorise=vectorise), tasks()
    x = problem.x0
    value, pullback = problem.inner(x, sample(batch, eager))
    assert value.shape == (3, problem.inner_dim) == (3, len(x))
    assert problem.which(batch).tolist() == [2, 0, 4]
    v = torch.randn(3, len(x), dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros_like(x)
    for i in range(3):
        support = (batch[1][0][i], batch[1][1][i])
        hessian = torch.func.hessian(lambda y, s=support: squared_error(problem.flat.bind(y), s))(x)
        slope = torch.func.grad(lambda y, s=support: squared_error(problem.flat.bind(y), s))(x)
        torch.testing.assert_close(value[i], x - 0.3 * slope)
        expected += (v[i] - 0.3 * hessian @ v[i]) / 3
    torch.testing.assert_close(pullback(v), expected)


def test_several_inner_steps() -> None:
    problem, (query, support, _) = MAML(curved(), squared_error, inner_lr=0.3), tasks()
    u = problem.x0.expand(3, -1)
    for _ in range(3):
        slopes = [
            torch.func.grad(lambda y, i=i: squared_error(problem.flat.bind(y), (support[0][i], support[1][i])))(u[i])
            for i in range(3)
        ]
        u = u - 0.3 * torch.stack(slopes)
    model = problem.bind(problem.x0)
    torch.testing.assert_close(model.adapt(support, 3), u)
    assert torch.equal(model.adapt(support, 0), problem.x0.expand(3, -1))
    torch.testing.assert_close(model.predict(u, query[0])[1], problem.flat.bind(u[1])(query[0][1]))
    torch.testing.assert_close(model(query[0][0]), problem.flat.bind(problem.x0)(query[0][0]))


def test_batch_normalisation_sees_one_task_at_a_time() -> None:
    torch.manual_seed(0)
    net = OmniglotNet(3).double()
    g = torch.Generator().manual_seed(0)
    images = torch.rand(2, 9, 1, 28, 28, generator=g, dtype=torch.float64)
    labels = torch.arange(3).repeat(3).expand(2, -1)
    batch = ((images[:, 3:], labels[:, 3:]), (images[:, :3], labels[:, :3]))
    problems = [MAML(net, omniglot.cross_entropy, inner_lr=0.4, vectorise=v) for v in (False, True)]
    x = problems[0].x0
    grads = [p.grad(x, sample(batch, eager)) for p in problems for eager in (True, False)]
    for other in grads[1:]:
        torch.testing.assert_close(grads[0], other, rtol=1e-8, atol=1e-10)
    alone = [
        problems[0].grad(x, sample(torch.utils._pytree.tree_map(lambda leaf: leaf[i : i + 1], batch), True))  # noqa: B023
        for i in range(2)
    ]
    torch.testing.assert_close(grads[0], (alone[0] + alone[1]) / 2, rtol=1e-8, atol=1e-10)
    assert problems[0].vectorise != MAML(curved(), squared_error, inner_lr=1.0).vectorise


def test_evaluation_has_no_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(0))
    for vectorise in (True, False):
        problem = MAML(model, squared_error, inner_lr=0.1, vectorise=vectorise)
        bound = problem.bind(problem.x0)
        assert SineTest(4)(bound) == SineTest(4)(bound)
        batch = SineTest(4).tasks()
        assert float(problem.loss(problem.x0, batch)) == float(problem.loss(problem.x0, batch))


def test_mistakes_are_named() -> None:
    with pytest.raises(NestfedError, match="inner_lr"):
        MAML(curved(), squared_error, inner_lr=0.0)
    with pytest.raises(NestfedError, match="at least 1"):
        MAML(curved(), squared_error, inner_lr=0.1, tasks=0)
    problem = MAML(curved(), lambda m, e: m(e[0]) - e[1], inner_lr=0.1)
    with pytest.raises(NestfedError, match="one number"):
        problem.grad(problem.x0, tasks())
    unnumbered = MAML(network("sine"), squared_error, inner_lr=0.1)
    with pytest.raises(NestfedError, match="local-scgdm"):
        simulate(unnumbered, build("local-moml", eta=0.01), SineClients(), rounds=1, progress=False)


# ---------------------------------------------------------------- every method on it

METHODS = {
    "fcsg": {"alpha": 0.05},
    "fcsg-m": {"alpha": 0.05, "beta": 0.3},
    "acc-fcsg-m": {"alpha": 0.05, "beta": 0.3},
    "bsgd": {"alpha": 0.05},
    "bspiderboost": {"alpha": 0.05, "period": 2},
    "local-bsgd": {"eta": 0.05},
    "local-scgd": {"eta": 0.05, "gamma": 0.6},
    "local-scgdm": {"eta": 0.9, "alpha": 0.7, "beta": 0.05, "gamma": 0.6},
    "local-scgdm-tasks": {"eta": 0.9, "alpha": 0.7, "beta": 0.05, "gamma": 0.6},
    "local-moml": {"eta": 0.05, "beta": 0.6},
    "scgd": {"eta": 0.05, "gamma": 0.6},
}
SINGLE = ("bsgd", "bspiderboost", "scgd")


def sine(name: str, mode: str, hyper: dict[str, Any] | None = None) -> Any:
    clients = SineClients(1 if name in SINGLE else 5, 3, 10, seed=3, dtype=torch.float64)
    problem = MAML(network("sine").double(), squared_error, inner_lr=0.05, tasks=clients.held)
    algorithm = build(name, **(hyper or METHODS[name]))
    return simulate(problem, algorithm, clients, rounds=2, q=2, seed=3, mode=mode, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_vectorised_clients_and_clients_in_turn_agree(name: str) -> None:
    one, other = sine(name, "vmap"), sine(name, "loop")
    for field, value in one.shared.items():
        torch.testing.assert_close(value, other.shared[field], rtol=1e-10, atol=1e-12)
    for field, value in one.private.items():
        torch.testing.assert_close(value, other.private[field], rtol=1e-10, atol=1e-12)
    for a, b in zip(one.history, other.history):
        assert a["examples"] == b["examples"]
        assert a["loss"] == pytest.approx(b["loss"])
    N, twice = 1 if name in SINGLE else 5, {"acc-fcsg-m": 7 / 4, "bspiderboost": 6 / 4}.get(name, 1)
    assert one.history[-1]["examples"] == 4 * N * 3 * 20 * twice  # iterations, clients, tasks, support and query


def test_identities_across_the_two_families() -> None:
    plain = sine("fcsg", "vmap").x
    torch.testing.assert_close(plain, sine("local-bsgd", "vmap").x, rtol=1e-12, atol=1e-12)
    for name, hyper in (
        ("local-scgd", {"eta": 0.05, "gamma": 1.0}),
        ("local-moml", {"eta": 0.05, "beta": 1.0}),
        ("local-scgdm-tasks", {"eta": 1.0, "beta": 0.05, "alpha": 1.0, "gamma": 1.0}),
    ):
        torch.testing.assert_close(plain, sine(name, "vmap", hyper).x, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- sine waves


def test_sine_protocol() -> None:
    clients = SineClients().seeded(4)
    assert len(clients) == 5
    assert clients.held == 5
    pairs = [tuple(w.tolist()) for client in clients.waves for w in client]
    assert sorted(pairs) == [(a, b) for a in range(1, 6) for b in range(1, 6)]
    assert pairs != [tuple(w.tolist()) for client in SineClients().seeded(5).waves for w in client]
    (xq, yq), (xs, ys), which = clients.sample(2, 7)
    assert xq.shape == xs.shape == (3, 10, 1)
    assert yq.shape == ys.shape == (3, 10)
    assert len(set(which.tolist())) == 3
    assert float(torch.cat([xq, xs]).abs().max()) <= 5
    for i, task in enumerate(which.tolist()):
        a, b = clients.waves[2, task]
        torch.testing.assert_close(yq[i], a * torch.sin(xq[i, :, 0] + b * torch.pi / 5))
    assert not set(xq.flatten().tolist()) & set(xs.flatten().tolist())
    stacked = clients.draw([2, 4], range(6, 8))[1]
    assert torch.equal(stacked[1][0][0], xs)
    assert torch.equal(stacked[2][0], which)
    seen = {i for t in range(20) for i in clients.sample(0, t)[2].tolist()}
    assert seen == set(range(5))


def test_sine_test_tasks() -> None:
    (x, y), (xs, _) = SineTest().tasks()
    assert len(x) == len(xs) == 600
    assert xs.shape == (600, 10, 1)
    assert 0.05 < float(y.abs().amax(1).min()) < 0.5
    assert 4.5 < float(y.abs().max()) <= 5
    assert torch.equal(SineTest().tasks()[0][0], x)
    assert not torch.equal(SineTest(stream=1).tasks()[0][0], x)


@pytest.mark.parametrize(("options", "part"), [((4,), "divide"), ((5, 6), "1 to 5"), ((5, 3, 0), "at least 1")])
def test_sine_mistakes(options: tuple[int, ...], part: str) -> None:
    with pytest.raises(NestfedError, match=part):
        SineClients(*options)


def test_meta_learning_adapts_and_plain_training_does_not(tmp_path: Path) -> None:
    clients, test = SineClients(1, 25, 10, seed=0), SineTest(200)
    meta = MAML(network("sine"), squared_error, inner_lr=0.05, clip=10.0)
    plain = Minimize(
        lambda model, batch: squared_error(model, (batch[0][0].flatten(0, 1), batch[0][1].flatten())), network("sine")
    )
    found = {}
    for name, problem in (("MAML", meta), ("plain", plain)):
        result = simulate(problem, build("fedavg", eta=0.05), clients, rounds=150, mode="loop", progress=False)
        found[name] = test(meta.bind(result.x))
    assert found["MAML"]["loss_1"] < 0.75 * found["MAML"]["loss_0"]
    assert found["plain"]["loss_1"] > 0.9 * found["plain"]["loss_0"]
    assert found["MAML"]["r2_1"] == pytest.approx(1 - found["MAML"]["loss_1"] / float((test.tasks()[0][1] ** 2).mean()))
    picture = draw_fit({"MAML": meta.bind(result.x), "plain": meta.bind(result.x)}, tmp_path / "fit.png")
    assert picture.stat().st_size > 10_000


def test_packaged_sine_experiment_runs_with_all_its_methods() -> None:
    experiment = read_experiment("sine")
    for name in experiment.methods:
        made = assemble(experiment.for_method(name))
        result = simulate(made.problem, made.algorithm, made.clients, rounds=1, q=5, progress=False)
        assert {"loss_0", "loss_1", "loss_5", "val_r2_1", made.metric} <= set(
            made.evaluate(made.problem.bind(result.x))
        )


# ---------------------------------------------------------------- Omniglot's tasks


def characters(count: int = 12) -> Characters:
    """Images that encode their character, drawer and turn in the first two pixels of the first row."""
    images = torch.zeros(count, 20, 28, 28, dtype=torch.uint8)
    images[:, :, 0, 0] = torch.arange(count)[:, None] + 1
    images[:, :, 0, 1] = torch.arange(20) + 1
    return Characters(images, [f"alphabet {i % 3}" for i in range(count)])


def contents(image: Tensor) -> tuple[int, int, int]:
    for turn in range(4):
        back = torch.rot90(image[0], -turn)
        if back[0, 0] > 0 and back[0, 1] > 0:
            return int((back[0, 0] * 255).round()), int((back[0, 1] * 255).round()), turn
    raise AssertionError("an image without ink")


@pytest.mark.parametrize(("ways", "shots"), [(5, 1), (5, 5), (8, 1)])
def test_episode(ways: int, shots: int) -> None:
    parts = [np.arange(6), np.arange(6, 12)]
    clients = OmniglotClients(Episodes(characters(), parts, ways, shots, 15), tasks=3).seeded(1)
    turns = set()
    for t in range(6):
        (xq, yq), (xs, ys) = clients.sample(1, t)
        assert xq.shape == (3, 15 * ways, 1, 28, 28)
        assert xs.shape == (3, shots * ways, 1, 28, 28)
        assert yq.shape == (3, 15 * ways)
        for i in range(3):
            support, query = [contents(x) for x in xs[i]], [contents(x) for x in xq[i]]
            assert not set(support) & set(query)
            assert len(set(support)) == shots * ways
            assert len(set(query)) == 15 * ways
            meaning = {int(y): (c, r) for (c, _, r), y in zip(support, ys[i])}
            assert sorted(meaning) == list(range(ways))
            assert len(set(meaning.values())) == ways
            assert all(meaning[int(y)] == (c, r) for (c, _, r), y in zip(query, yq[i]))
            assert all(6 < c <= 12 for c, _, _ in query)  # the client's own
            turns |= {r for _, _, r in support}
    assert turns == {0, 1, 2, 3}
    again = clients.sample(1, 5)
    assert torch.equal(again[0][0], xq)
    assert not torch.equal(clients.sample(1, 4)[0][0], xq)
    assert not torch.equal(clients.seeded(9).sample(1, 5)[1][0], clients.sample(0, 5)[1][0])


def test_split_by_characters() -> None:
    split = omniglot.by_characters(1623, 16, seed=3)
    training = np.concatenate(split.training)
    assert [len(training), len(split.validation[0]), len(split.test[0])] == [1028, 172, 423]
    together = np.concatenate([training, *split.validation, *split.test])
    assert sorted(together.tolist()) == list(range(1623))
    assert {len(p) for p in split.training} == {64, 65}
    other = omniglot.by_characters(1623, 16, seed=4)
    assert np.array_equal(np.sort(training), np.sort(np.concatenate(other.training)))  # one split for every run
    assert not np.array_equal(split.training[0], other.training[0])
    with pytest.raises(NestfedError, match="1 to 1028"):
        omniglot.by_characters(1623, 2000, 0)
    with pytest.raises(NestfedError, match="the data have 10"):
        omniglot.by_characters(10, 2, 0)


def test_split_by_alphabets() -> None:
    names = [f"alphabet {i % 50}" for i in range(1000)]
    split = omniglot.by_alphabets(names)
    assert [len(split.training), len(split.validation), len(split.test)] == [33, 5, 12]
    groups = [*split.training, *split.validation, *split.test]
    assert sorted(np.concatenate(groups).tolist()) == list(range(1000))
    assert all(len({names[i] for i in group}) == 1 for group in groups)
    assert all(names[group[0]] == name for group, name in zip(split.training, split.names))
    with pytest.raises(NestfedError, match="50 alphabets, but the data have 3"):
        omniglot.by_alphabets(characters().alphabets)


def test_episode_mistakes() -> None:
    with pytest.raises(NestfedError, match="20 images"):
        Episodes(characters(), [np.arange(6)], shots=6, queries=15)
    with pytest.raises(NestfedError, match="at most 24"):
        Episodes(characters(), [np.arange(6)], ways=25)
    with pytest.raises(NestfedError, match="ways must be"):
        Episodes(characters(), [np.arange(6)], ways=0)


def test_few_shot_evaluation_is_fixed_and_counts() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 5))
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    problem = MAML(net, omniglot.cross_entropy, inner_lr=50.0)
    episodes = Episodes(characters(), [np.arange(6), np.arange(6, 12)])
    test = FewShotTest(episodes, 30, steps=1)
    before = FewShotTest(episodes, 30, steps=0)(problem.bind(problem.x0))
    assert before == {"accuracy": pytest.approx(0.2), "accuracy_ci95": pytest.approx(0.0, abs=1e-9)}
    each = test.accuracies(problem.bind(problem.x0))
    found = test(problem.bind(problem.x0))
    assert found["accuracy"] == pytest.approx(float(each.mean()))
    assert found["accuracy"] > 0.5  # the corners tell turn and character
    assert found["accuracy_ci95"] == pytest.approx(1.96 * float(each.std()) / 30**0.5)
    assert found == test(problem.bind(problem.x0))
    assert not torch.equal(test.tasks(range(2))[0][0], FewShotTest(episodes, 30, stream=1).tasks(range(2))[0][0])


@pytest.mark.data
@pytest.mark.long
def test_real_omniglot(real: Path) -> None:
    found = omniglot.read()
    assert found.images.shape == (1623, 20, 28, 28)
    split = omniglot.by_alphabets(found.alphabets)
    assert len(split.training) == 33
    twenty = Episodes(found, split.training, ways=20, shots=5)
    clients = OmniglotClients(twenty, tasks=1, names=split.names).seeded(0)
    (xq, _), (xs, _) = clients.sample(32, 0)
    assert xs.shape == (1, 100, 1, 28, 28)
    assert 0.02 < float(xq.mean()) < 0.2
    assert clients.label(0) == split.names[0]


@pytest.mark.data
@pytest.mark.parametrize("name", ["omniglot-1shot", "omniglot-5shot", "omniglot-alphabets"])
def test_packaged_omniglot_experiments_run(real: Path, name: str) -> None:
    experiment = read_experiment(name)
    for method in experiment.methods:
        variant = experiment.for_method(method).with_overrides({"problem.tasks": 1, "problem.test_tasks": 8})
        variant = variant.with_overrides({k: v[0] for k, v in experiment.grid(method).items()})
        made = assemble(variant)
        assert len(made.clients) == (33 if name == "omniglot-alphabets" else 16)
    result = simulate(made.problem, made.algorithm, made.clients, rounds=1, q=1, participation=2, progress=False)
    found = made.evaluate(made.problem.bind(result.x))
    assert set(found) == {"accuracy", "accuracy_ci95", "val_accuracy", "val_accuracy_ci95"}


@pytest.mark.data
@pytest.mark.slow
def test_omniglot_learns(real: Path) -> None:
    found = omniglot.read()
    split = omniglot.by_characters(len(found.images), 4, 0)
    problem = MAML(network("omniglot", (1, 28, 28), 5), omniglot.cross_entropy, inner_lr=0.4, clip=10.0)
    clients = OmniglotClients(Episodes(found, split.training, shots=5), tasks=2)
    test = FewShotTest(Episodes(found, split.test, shots=5), 40)
    before = test(problem.bind(problem.x0))
    result = simulate(problem, build("fcsg-m", alpha=0.1, beta=0.5), clients, rounds=10, q=10, progress=False)
    after = test(problem.bind(result.x))
    assert after["accuracy"] > before["accuracy"] + 0.1
