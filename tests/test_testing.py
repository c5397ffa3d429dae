"""The public checks pass what keeps the contract and name what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from nestfed_papers.complexity.settings import Setting
from nestfed_papers.language import Language, TextClients
from nestfed_papers.sine import SineClients
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, Quadratic
from torch import Tensor, nn

from nestfed import AUPRC, AUROC, Classify, Examples, Pairs
from nestfed.core import Algorithm, Average, Batch, Clients, Composed, Differentiable
from nestfed.data.clients import Balanced
from nestfed.models import build as network
from nestfed.problems.base import Ball, Minimize, Simplex
from nestfed.problems.invariant import InvariantClients, InvariantLogistic
from nestfed.problems.maml import MAML, squared_error
from nestfed.study.meta import TaskClients
from nestfed.testing import check_algorithm, check_clients, check_problem
from tests.bare import ROWS, Rows, Squares

PARTS = np.split(np.arange(60), 3)


def arrays(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return torch.tensor(rng.normal(size=(60, 4)), dtype=dtype), torch.tensor(np.arange(60) % 3 == 0, dtype=torch.long)


def dense(outputs: int = 1, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = [nn.Flatten(-2)] if outputs == 1 else []
        return nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, outputs), *last
        ).to(dtype)  # fmt: skip


def tasks() -> TaskClients:
    x = torch.tensor(np.random.default_rng(1).normal(size=(3, 2, 9, 4)))
    return TaskClients([[(x[n, i], x[n, i].sum(-1)) for i in range(2)] for n in range(3)], each=2, shots=3, queries=4)


def words() -> tuple[Any, Any]:
    text = torch.tensor(np.random.default_rng(1).integers(9, size=400))
    model = network("lstm", None, 9, seed=0, size=4, layers=1).double()
    return Language(model, clip=None), TextClients(text, clients=3, batch=3, bptt=5)


def toy(made: Any) -> tuple[Any, Any]:
    return made.problem, made.clients


GOOD: dict[str, Callable[[], tuple[Any, Any]]] = {
    "classify": lambda: (Classify(dense(2)), Examples(arrays(), PARTS, batch=5)),
    "classify-float32": lambda: (
        Classify(dense(2, dtype=torch.float32)),
        Examples(arrays(torch.float32), PARTS, batch=5),
    ),
    "dropout": lambda: (Classify(dense(2, dropout=0.4)), Examples(arrays(), PARTS, batch=5)),
    "auroc": lambda: (AUROC(dense(), p=1 / 3), Examples(arrays(), PARTS, batch=6)),
    "balanced": lambda: (AUROC(dense()), Balanced(arrays(), PARTS, batch=6)),
    "auprc": lambda: (AUPRC(dense()), Pairs(arrays(), PARTS)),
    "maml": lambda: (MAML(dense(), squared_error, inner_lr=0.1, tasks=2), tasks()),
    "maml-sine": lambda: (MAML(network("mlp", (1,), 1, seed=0), squared_error, inner_lr=0.1), SineClients(5, 3, 4)),
    "invariant": lambda: (
        InvariantLogistic(torch.ones(4, dtype=torch.float64)),
        InvariantClients(3, 4, outer=2, dtype=torch.float64),
    ),
    "words": words,
    "quadratic": lambda: toy(Quadratic(4, 3)),
    "conditional": lambda: toy(ConditionalToy(4, 3)),
    "compositional": lambda: toy(CompositionalToy(4, 3, 5)),
    "minimax": lambda: toy(MinimaxToy(4, 3, 2)),
    "simplex": lambda: (
        Minimize(lambda x, b: (b[0] @ x).square().mean(), torch.full((4,), 0.25).double(), domain=Simplex()),
        Examples(arrays(), PARTS),
    ),
    "ball": lambda: (
        Minimize(lambda x, b: (b[0] @ x).square().mean(), torch.ones(4).double(), domain=Ball(0.5)),
        Examples(arrays(), PARTS),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_the_library_brings_keeps_the_contract(name: str) -> None:
    problem, clients = GOOD[name]()
    check_clients(clients)
    check_problem(problem, clients)


@pytest.mark.parametrize("family", ["plain", "conditional", "nested", "minimax"])
def test_the_settings_of_the_complexity_benchmark(family: str) -> None:
    made = Setting(family, N=3)
    check_clients(made.clients(b=2, B=3))
    check_problem(made.problem(), made.clients(b=2, B=3))


# --- clients that break it ---


class Order(Rows):
    """Batches depend on how often one asks."""

    asked = 0

    def sample(self, n: int, t: int) -> Any:
        self.asked += 1
        return torch.full((2,), float(self.asked))


class Global(Rows):
    def sample(self, n: int, t: int) -> Any:
        return torch.full((2,), float(torch.rand(()) >= 0))


class Numpy(Rows):
    def sample(self, n: int, t: int) -> Any:
        return np.zeros(3)


class Empty(Rows):
    def __len__(self) -> int:
        return 0


class Reseeded(Clients):
    """`seeded` changes the clients themselves."""

    seed = 0

    def __len__(self) -> int:
        return 2

    def sample(self, n: int, t: int) -> Any:
        return torch.full((2,), float(self.seed))

    def seeded(self, seed: int) -> Any:
        self.seed = seed
        return self


class Drawn(Clients):
    """`draw` mixes up clients."""

    def __len__(self) -> int:
        return 3

    def sample(self, n: int, t: int) -> Any:
        return torch.full((2,), float(n))

    def draw(self, ns: Any, ts: range) -> Any:
        return super().draw(sorted(ns), ts)


class Uneven(Clients):
    """Says that its batches are alike, and they are not."""

    def __len__(self) -> int:
        return 2

    def sample(self, n: int, t: int) -> Any:
        return torch.zeros(n + 1)


class Idle(Rows, Clients):
    """Clients that take no step in some rounds."""

    def steps(self, n: int, t: int, q: int) -> int:
        return q if t < 10 else 0


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        (Idle(1), r"Idle.steps\(0, 10, 1\) is 0, not a whole number from 1 to 1"),
        (Order(1), r"Order\.sample\(\d, \d\) returns a different batch"),
        (Global(1), "Global.sample draws from a global generator"),
        (Numpy(1), "Numpy.sample returns a ndarray instead of a tensor"),
        (Empty(1), "Empty has no clients"),
        (Reseeded(), "Reseeded.seeded changes the clients that it is called on"),
        (Drawn(), r"Drawn.draw\(\[2, 1, 0\], …\) differs from sample"),
        (Uneven(), "differ in shape"),
        (object(), "object has no __len__"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else "",
)
def test_clients_that_break_it(clients: Any, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        check_clients(clients)


# --- problems that break it ---


class Wrong(Squares):
    """The gradient is not that of the loss."""

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        (a,) = batch.data
        batch.note(ROWS, (a @ x - 1).square().mean() / 2)
        return 2 * super().grad(x, batch)


class Right(Wrong):
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return super().grad(x, batch) / 2


class Remembers(Squares):
    calls = 0

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return self.calls * super().grad(x, batch)


class InPlace(Squares):
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        x.mul_(0.9)
        return super().grad(x, batch)


class Random(Squares):
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return super().grad(x, batch) + 0 * torch.rand(())


class Shape(Squares):
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return super().grad(x, batch)[:, None]


class Halves(Squares):
    """A projection that is not one."""

    def project(self, x: Tensor) -> Tensor:
        return x / 2


class Views(Squares):
    def __init__(self) -> None:
        self.start = super().x0

    @property
    def x0(self) -> Tensor:
        return self.start

    def module(self, x: Tensor) -> Tensor:
        return x


class Flattens(Squares):
    """Wrong when vectorised: it looks at the shape that a batch has outside vmap only."""

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return super().grad(x, batch) * (1.0 if batch.eager else 1.5)


class Pull(Composed):
    """The pullback forgets a factor."""

    inner_dim = 3

    @property
    def x0(self) -> Tensor:
        return torch.ones(3, dtype=torch.float64)

    def inner(self, x: Tensor, batch: Batch) -> Any:
        return (x * x)[None], lambda v: v[0] * x

    def outer_grad(self, u: Tensor, batch: Batch) -> Tensor:
        return u

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def which(self, batch: Batch) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


class Lost(Pull):
    def which(self, batch: Batch) -> Tensor:
        return torch.ones(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (Wrong(), "Wrong.grad is off by .* from finite differences in float64"),
        (Remembers(), "Remembers.grad returns a different result when it is called again"),
        (InPlace(), "InPlace.grad changes its arguments in place"),
        (Random(), "Random.grad draws from a global generator"),
        (Shape(), r"Shape.grad returns the shape \(3, 1\), not \(3,\)"),
        (Halves(), "Halves.project is not idempotent"),
        (Views(), r"Views.module\(x\) shares memory with x"),
        (Flattens(), "Flattens.grad with batch.eager False and True"),
        (Pull(), "Pull.inner's pullback is off by"),
        (Lost(), "Lost.which returns a number outside 0…0"),
        (object(), "object has no kind"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else "",
)
def test_problems_that_break_it(problem: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_problem(problem, Rows(3))


def test_a_problem_that_notes_its_loss() -> None:
    check_problem(Right(), Rows(3))
    check_problem(Wrong(), Rows(3), exact=False)


# --- methods that break it ---


class Rolling(NamedTuple):
    x: Tensor
    v: Tensor


@dataclass(frozen=True)
class HeavyBall(Algorithm[Differentiable, Rolling]):
    """FedAvg with local heavy-ball momentum: v ← μv + ∇f(x; B_t), x ← x − ηv."""

    eta: float = 0.02
    mu: float = 0.9

    name = "heavy-ball"
    accepts = Differentiable
    shared = ("x",)
    private = ("v",)

    def init(self, problem: Differentiable, x0: Tensor) -> Rolling:
        return Rolling(x0, 0 * x0)

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        v = self.mu * s.v + problem.grad(s.x, batch)
        return Rolling(problem.project(s.x - self.eta * v), v)


def test_a_method_that_keeps_the_contract() -> None:
    check_algorithm(HeavyBall(), Squares(), Rows(3))


class Forgets(HeavyBall):
    """HeavyBall that declares no private field, so its velocity is scratch, and relies on it."""

    private = ()


class Nameless(HeavyBall):
    """HeavyBall that names a field which its state does not have."""

    shared = ("x", "y")


class Both(HeavyBall):
    """HeavyBall whose velocity would be both shared and private."""

    shared = ("x", "v")


@dataclass
class Loose(Algorithm[Differentiable, Rolling]):
    """HeavyBall whose hyper-parameters can be assigned."""

    eta: float = 0.1

    name = "loose"
    accepts = Differentiable
    shared = ("x",)
    init = HeavyBall.init
    step = HeavyBall.step


class Writes(HeavyBall):
    """HeavyBall that changes its state in place."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        return Rolling(s.x - self.eta * problem.grad(s.x, batch), s.v.add_(1.0))


class Draws(HeavyBall):
    """HeavyBall that draws random numbers from the global generator."""

    def receive(self, s: Rolling, t: int) -> Rolling:
        return s._replace(v=s.v + 0 * torch.rand(()))


class Widens(HeavyBall):
    """HeavyBall that computes in another dtype."""

    def send(self, s: Rolling, t: int) -> Rolling:
        return s._replace(x=s.x.float())


class Stands(HeavyBall):
    """HeavyBall that does not move at all."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        return s


class Twofold(HeavyBall):
    """HeavyBall whose steps depend on how it is run."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        after = super().step(problem, s, batch, t)
        return after if batch.eager else after._replace(x=after.x + 0.1)


class Casts(HeavyBall):
    """HeavyBall whose step computes in another dtype."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        after = super().step(problem, s, batch, t)
        return after._replace(x=after.x.float())


class Strays(HeavyBall):
    """HeavyBall that ignores the domain."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        v = self.mu * s.v + problem.grad(s.x, batch)
        return Rolling(s.x - self.eta * v, v)


class Doubles(HeavyBall):
    """HeavyBall that evaluates every batch twice."""

    def step(self, problem: Differentiable, s: Rolling, batch: Batch, t: int) -> Rolling:
        problem.grad(s.x, batch)
        return super().step(problem, s, batch, t)


class Promises(HeavyBall):
    """HeavyBall that declares more evaluations than it needs."""

    evaluations = 2


class Stepless(HeavyBall):
    """HeavyBall that has no step size of the name that it declares."""

    steps = ("alpha",)


class Small(HeavyBall):
    """HeavyBall that shares a field of an undeclared size."""

    shared = ("x", "v")
    private = ()

    def init(self, problem: Differentiable, x0: Tensor) -> Rolling:
        return Rolling(x0, x0[:1])


class Oversized(Small):
    """The same, declared by a word that says nothing."""

    sizes: ClassVar[Mapping[str, str]] = {"v": "1"}


class Misplaced(HeavyBall):
    """HeavyBall that declares the size of a field that it does not share."""

    sizes: ClassVar[Mapping[str, str]] = {"v": "one number"}


@dataclass(frozen=True)
class Adds(Average):
    """A server that sends a field more than the clients share."""

    def update(self, state: Any, old: Any, mean: Any, fraction: float) -> Any:
        return state, {**mean, "more": mean["x"]}


class Served(HeavyBall):
    """HeavyBall with a server that sends other fields than declared."""

    @property
    def server(self) -> Any:
        return Adds()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Forgets, "Forgets: x depends on v from before the round"),
        (Nameless, r"Nameless.shared names \['y'\], but the state has x, v"),
        (Both, r"Both: \['v'\] cannot be both shared and private"),
        (Loose, "Loose.eta can be assigned"),
        (Writes, "Writes.step changes its arguments in place"),
        (Draws, "Draws draws from a global generator"),
        (Widens, "Widens: x becomes torch.float32, but x0 is torch.float64"),
        (Casts, "Casts: x becomes torch.float32, but x0 is torch.float64"),
        (Doubles, r"Doubles.step evaluates its batch at 2 points in iteration 0, but it declares 1"),
        (Promises, r"Promises.step evaluates its batch at 1 points in iteration 1, but it declares 2"),
        (Stepless, r"Stepless.steps names 'alpha', but its hyper-parameters are eta, mu"),
        (Small, r"Small: the shared field v has 1 numbers, but by Small.sizes 3 \(the model's size\)"),
        (Oversized, r"Oversized.sizes\['v'\] is '1', but must be one of dual, inner value, one number"),
        (Misplaced, r"Misplaced.sizes names 'v', which is not a shared field"),
        (Stands, "Stands does not leave"),
        (Twofold, "Twofold vectorised and in a loop"),
        (Served, "Adds.update must return all shared fields and no others"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_methods_that_break_it(kind: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(kind(), Squares(), Rows(3))


class Bounded(Squares):
    """Squares on a small ball around the start."""

    def project(self, x: Tensor) -> Tensor:
        return self.x0 + Ball(0.01).project(x - self.x0)


def test_a_method_that_leaves_the_domain() -> None:
    check_algorithm(HeavyBall(), Bounded(), Rows(3))
    check_algorithm(Strays(), Squares(), Rows(3))  # nothing to leave
    with pytest.raises(AssertionError, match=r"Strays.step leaves the domain at iteration 0: x needs problem.project"):
        check_algorithm(Strays(), Bounded(), Rows(3))
