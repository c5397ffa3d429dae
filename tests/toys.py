"""One nonlinear, heterogeneous, noisy problem of each kind, with its gradients written by hand in numpy.

`f` and `g` are given to the library in torch; the boxes get what stands below each of them. The noise is inside the
nonlinearity, so a method that mixes up batches or points gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from nestfed_papers.toys import ToyClients
from torch import Tensor, nn

from nestfed.core import Algorithm, Batch, Clients, Data, Differentiable, SolvableSaddle, as_batch
from nestfed.data.clients import CrossPairs
from nestfed.data.random import Purpose, Streams
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize
from nestfed.problems.paired import PairedAP, PairedAUROC
from nestfed.problems.partial import PairedPartialAUROC
from tests.support import simulate

D, P, B, M, TASKS, SAMPLED = 3, 4, 2, 3, 4, 2
SEED = 5


class Setting(NamedTuple):
    """A problem, its clients, and its numpy functions of (n, t, …) as the boxes want them."""

    problem: Any
    clients: Any
    x0: np.ndarray
    maps: dict[str, Callable[..., Any]]


def start(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.7, -0.4, 0.2], dtype=dtype)


def constants(*shape: int, seed: int = 0) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def numpy(clients: Clients, n: int, t: int) -> Any:
    batch = clients.seeded(SEED).sample(n, t)
    return torch.utils._pytree.tree_map(lambda leaf: leaf.double().numpy(), batch)


def slope(r: np.ndarray) -> np.ndarray:
    """The derivative of √(1+r²)."""
    return r / np.sqrt(1 + r * r)


def soft(r: Tensor) -> Tensor:
    return (1 + r * r).sqrt()


def plain(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """E √(1 + (aᵀx − y)²), convex."""
    problem = Minimize(lambda x, batch: soft(batch[0] @ x - batch[1]).mean(), start(dtype))

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        return noise[0] + own[0][:, None], noise[1] + own[1]

    own = (constants(N, D, seed=1).to(dtype), constants(N, 1, seed=2).to(dtype))
    clients = ToyClients(own, ((B, D), (B,)), arrange)

    def grad(n: int, t: int, x: np.ndarray) -> np.ndarray:
        a, y = numpy(clients, n, t)
        return np.mean([slope(a[i] @ x - y[i]) * a[i] for i in range(B)], axis=0)

    def loss(n: int, t: int, x: np.ndarray) -> float:
        a, y = numpy(clients, n, t)
        return float(np.mean([np.sqrt(1 + (a[i] @ x - y[i]) ** 2) for i in range(B)]))

    return Setting(problem, clients, start(dtype).double().numpy(), {"grad": grad, "loss": loss})


def rows(N: int) -> list[int]:
    """The rows that the clients of `counted` say they have."""
    return [(2, 9, 4, 30)[n % 4] + n // 4 for n in range(N)]


@dataclass(frozen=True)
class Counting(Clients):
    """Other clients, who count their rows."""

    clients: Clients

    def __len__(self) -> int:
        return len(self.clients)

    def sample(self, n: int, t: int) -> Data:
        return self.clients.sample(n, t)

    def seeded(self, seed: int) -> Counting:
        return Counting(self.clients.seeded(seed))

    def examples(self, n: int) -> int:
        return rows(len(self))[n]


def counted(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """The plain problem, with clients of different size."""
    same = plain(N, dtype)
    return same._replace(clients=Counting(same.clients))


class Parted(nn.Module):
    """The same model in two parameters: a body of two numbers and a head of one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = (nn.Parameter(part) for part in start(dtype).split((2, 1)))

    def forward(self) -> Tensor:
        return torch.cat([self.body, self.head])


def parted(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """The plain problem with named parameters."""
    same = plain(N, dtype)
    problem = Minimize(lambda model, batch: same.problem.f(model(), batch), Parted(dtype))
    return same._replace(problem=problem)


def conditional(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """E_ξ √(1 + (E_η g − y)²), g = ηᵀx + 0.3 sin(ηᵀx)."""
    problem = Conditional(
        f=lambda u, outer: soft(u - outer[1]),
        g=lambda x, outer, inner: inner @ x + 0.3 * torch.sin(inner @ x),
        model=start(dtype),
    )

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        a = noise[0] + own[0][:, None]
        return (a, noise[1] + own[1]), a[:, :, None] + 0.7 * noise[2]

    own = (constants(N, D, seed=1).to(dtype), constants(N, 1, seed=2).to(dtype))
    clients = ToyClients(own, ((B, D), (B,), (B, M, D)), arrange)

    def grad(n: int, t: int, x: np.ndarray) -> np.ndarray:
        (_, y), eta = numpy(clients, n, t)
        total = np.zeros(D)
        for i in range(B):
            value, jacobian = 0.0, np.zeros(D)
            for j in range(M):
                s = eta[i, j] @ x
                value += (s + 0.3 * np.sin(s)) / M
                jacobian += (1 + 0.3 * np.cos(s)) * eta[i, j] / M
            total += slope(value - y[i]) * jacobian
        return total / B

    return Setting(problem, clients, start(dtype).double().numpy(), {"grad": grad})


def sampled(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """The mean over TASKS own examples (a, y) of √(1 + (u₁ − y)²) + u₂²/2, u = E_η (s + 0.3 sin s, cos s), s = ηᵀx."""

    def values(x: Tensor, outer: Data, inner: Data) -> Tensor:
        s = inner @ x
        return torch.stack([s + 0.3 * torch.sin(s), torch.cos(s)], -1)

    problem = Conditional(
        f=lambda u, outer: soft(u[:, 0] - outer) + u[:, 1] ** 2 / 2,
        g=values,
        model=start(dtype),
        outer_examples=TASKS,
        inner_dim=2,
    )

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        which = noise[0].argsort(1)[:, :SAMPLED]
        rows = torch.arange(len(which))[:, None]
        return own[1][rows, which], own[0][rows, which][:, :, None] + 0.7 * noise[1], which

    own = (constants(N, TASKS, D, seed=1).to(dtype), constants(N, TASKS, seed=2).to(dtype))
    clients = ToyClients(own, ((TASKS,), (SAMPLED, M, D)), arrange)

    def examples(n: int, t: int) -> list[int]:
        return [int(i) for i in numpy(clients, n, t)[2]]

    def of(n: int, t: int, i: int, what: int) -> Any:
        return numpy(clients, n, t)[what][examples(n, t).index(i)]

    def g(n: int, t: int, i: int, x: np.ndarray) -> np.ndarray:
        s = [eta @ x for eta in of(n, t, i, 1)]
        return np.mean([[r + 0.3 * np.sin(r), np.cos(r)] for r in s], axis=0)

    def jac(n: int, t: int, i: int, x: np.ndarray) -> np.ndarray:
        eta = of(n, t, i, 1)
        return np.mean([[(1 + 0.3 * np.cos(e @ x)) * e, -np.sin(e @ x) * e] for e in eta], axis=0)

    def outer(n: int, t: int, i: int, u: np.ndarray) -> np.ndarray:
        return np.array([slope(u[0] - of(n, t, i, 0)), u[1]])

    maps = {"tasks": examples, "g": g, "jac": jac, "outer": outer}
    return Setting(problem, clients, start(dtype).double().numpy(), maps)


class OwnExamples:
    """F_n(x) = mean_i ½(a_iᵀ(x − x_n))² over `count` own examples: g = ηᵀx − a_iᵀx_n with η ~ N(a_i, σ²I), f = u²/2.

    The estimator's expectation has the bias σ²x/m, with moving means of the inner values γσ²x/m.
    """

    def __init__(self, N: int = 4, dim: int = 3, count: int = 6, *, sigma: float = 1.0, inner: int = 1, outer: int = 3):
        self.a = constants(N, count, dim, seed=3)
        self.targets = constants(1, dim, seed=4) + 0.3 * constants(N, dim, seed=5)
        self.sigma, self.inner = sigma, inner
        self.problem = Conditional(
            f=lambda u, outer: u**2 / 2,
            g=lambda x, outer, inner: inner @ x - (outer[0] * outer[1]).sum(-1, keepdim=True),
            model=torch.zeros(dim, dtype=torch.float64),
            outer_examples=count,
        )

        def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
            which = noise[0].argsort(1)[:, :outer]
            a = own[0][torch.arange(len(which))[:, None], which]
            return (a, own[1][:, None].expand_as(a)), a[:, :, None] + sigma * noise[1], which

        self.clients = ToyClients((self.a, self.targets), ((count,), (outer, inner, dim)), arrange)

    def limit(self, bias: float) -> Tensor:
        """Return the minimiser of F(x) + bias·‖x‖²/2."""
        A = torch.einsum("nid,nie->nde", self.a, self.a) / self.a.shape[1]
        H = A.mean(0) + bias * torch.eye(A.shape[-1], dtype=A.dtype)
        return torch.linalg.solve(H, torch.einsum("nde,ne->d", A, self.targets) / len(A))

    @property
    def minimiser(self) -> Tensor:
        return self.limit(0.0)

    def value(self, x: Tensor) -> float:
        return float((((x - self.targets)[:, None] * self.a).sum(-1) ** 2 / 2).mean())


def compositional(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """f(E g), g = tanh(Gx), f = E Σ√(1 + (u − ζ)²)."""
    problem = Compositional(
        f=lambda u, outer: soft(u - outer).sum(-1).mean(),
        g=lambda x, inner: torch.tanh(inner @ x).mean(0),
        model=start(dtype),
        inner_dim=P,
    )

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        return own[0][:, None] + noise[0], own[1][:, None] + 0.5 * noise[1]

    own = (constants(N, P, seed=1).to(dtype), constants(N, P, D, seed=2).to(dtype))
    clients = ToyClients(own, ((B, P), (B, P, D)), arrange)

    def g(n: int, t: int, x: np.ndarray) -> np.ndarray:
        return np.mean([np.tanh(G @ x) for G in numpy(clients, n, t)[1]], axis=0)

    def jac(n: int, t: int, x: np.ndarray) -> np.ndarray:
        return np.mean([(1 - np.tanh(G @ x) ** 2)[:, None] * G for G in numpy(clients, n, t)[1]], axis=0)

    def outer(n: int, t: int, u: np.ndarray) -> np.ndarray:
        return np.mean([slope(u - z) for z in numpy(clients, n, t)[0]], axis=0)

    return Setting(problem, clients, start(dtype).double().numpy(), {"g": g, "jac": jac, "outer": outer})


class Tasked(Compositional):
    """Several tasks per client, SAMPLED in a batch (which, ζ, G): g_i = tanh(G_i x), f_i = Σ√(1 + (u − ζ_i)²)."""

    tasks = TASKS

    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        value, pullback = self.inner(x, batch)
        return pullback(self.outer_grad(value, batch))

    def inner(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        sample = as_batch(batch)
        sample.note(SAMPLED)
        value, pull = torch.func.vjp(lambda y: torch.tanh(sample.data[2] @ y), x)
        return value, lambda v: pull(v / SAMPLED)[0]

    def outer_grad(self, u: Tensor, batch: Batch) -> Tensor:
        r = u - as_batch(batch).data[1]
        return r / soft(r)

    def which(self, batch: Batch) -> Tensor:
        return as_batch(batch).data[0]


def tasked(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    problem = Tasked(lambda u, outer: u.sum(), lambda x, inner: x, start(dtype), inner_dim=P)

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        which = noise[0].argsort(1)[:, :SAMPLED]
        rows = torch.arange(len(which))[:, None]
        return which, own[0][rows, which] + noise[1], own[1][rows, which] + 0.5 * noise[2]

    own = (constants(N, TASKS, P, seed=1).to(dtype), constants(N, TASKS, P, D, seed=2).to(dtype))
    clients = ToyClients(own, ((TASKS,), (SAMPLED, P), (SAMPLED, P, D)), arrange)

    def tasks(n: int, t: int) -> list[int]:
        return [int(i) for i in numpy(clients, n, t)[0]]

    def of(n: int, t: int, i: int, what: int) -> np.ndarray:
        batch = numpy(clients, n, t)
        return batch[what][list(batch[0]).index(i)]

    def g(n: int, t: int, i: int, x: np.ndarray) -> np.ndarray:
        return np.tanh(of(n, t, i, 2) @ x)

    def jac(n: int, t: int, i: int, x: np.ndarray) -> np.ndarray:
        G = of(n, t, i, 2)
        return (1 - np.tanh(G @ x) ** 2)[:, None] * G

    def outer(n: int, t: int, i: int, u: np.ndarray) -> np.ndarray:
        return slope(u - of(n, t, i, 1))

    maps = {"tasks": tasks, "g": g, "jac": jac, "outer": outer}
    return Setting(problem, clients, start(dtype).double().numpy(), maps)


class Solvable(Minimax, SolvableSaddle):
    """A minimax problem whose best w is tanh(Cθ)."""

    def best_dual(self, theta: Tensor, batch: Batch) -> Tensor:
        return torch.tanh(as_batch(batch).data[2] @ theta)


def minimax(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """E √(1 + (aᵀθ − y)²) + wᵀtanh(Cθ) − ½‖w‖²."""
    w0 = torch.tensor([0.3, -0.5], dtype=dtype)
    problem = Solvable(
        lambda theta, w, batch: (
            soft(batch[0] @ theta - batch[1]).mean() + (w * torch.tanh(batch[2] @ theta)).sum() - (w * w).sum() / 2
        ),
        start(dtype),
        w0,
    )

    def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
        return noise[0] + own[0][:, None], noise[1] + own[1], own[2] + 0.3 * noise[2]

    own = tuple(constants(N, *s, seed=i).to(dtype) for i, s in enumerate(((D,), (1,), (2, D))))
    clients = ToyClients(own, ((B, D), (B,), (2, D)), arrange)

    def grad(n: int, t: int, theta: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, y, C = numpy(clients, n, t)
        h = np.tanh(C @ theta)
        pull = np.mean([slope(a[i] @ theta - y[i]) * a[i] for i in range(B)], axis=0)
        return pull + C.T @ ((1 - h**2) * w), h - w

    def dual(n: int, t: int, theta: np.ndarray) -> np.ndarray:
        return np.tanh(numpy(clients, n, t)[2] @ theta)

    maps = {"grad": grad, "dual": dual, "w0": lambda: w0.double().numpy()}
    return Setting(problem, clients, start(dtype).double().numpy(), maps)


class Bent(nn.Module):
    """The score aᵀx + 0.3 sin(aᵀx)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(start(dtype))

    def forward(self, a: Tensor) -> Tensor:
        r = a @ self.weight
        return r + 0.3 * torch.sin(r)


HELD = ((3, 9), (6, 5), (0, 7), (4, 0), (5, 8))
"""Positives and negatives of the sites: too few for a batch, enough, none, only these."""


def rows_of_sites(N: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """Return examples with labels, and which site holds which."""
    labels = [label for held in HELD[:N] for label, count in zip((1, 0), held) for _ in range(count)]
    y = torch.tensor(labels)
    x = constants(len(y), D, seed=1) + 0.4 * y[:, None]
    ends = np.cumsum([0, *(sum(held) for held in HELD[:N])])
    return x.to(dtype), y, [np.arange(a, b) for a, b in pairwise(ends)]


def paired(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """Positives against negatives, ψ = log(1 + e^−s)."""

    def ell(a: float, b: float, y: float) -> np.ndarray:
        return np.array([np.log1p(np.exp(b - a))])

    def slopes(a: float, b: float, y: float) -> tuple[np.ndarray, np.ndarray]:
        r = 1 / (1 + np.exp(a - b))
        return np.array([-r]), np.array([r])

    x, y, parts = rows_of_sites(N, dtype)
    clients = CrossPairs((x, y), parts, first=4, second=5)
    problem = PairedAUROC(Bent(dtype), loss="logistic", rows=clients.rows)
    maps = {"ell": ell, "slopes": slopes, "outer": lambda u: np.ones(1)}
    return Setting(problem, clients, start(dtype).double().numpy(), maps | crossing(clients))


def precise(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """Positives against all rows, f(u) = −(u₁ + ε)/(u₂ + ε), ℓ = max(½ − h + h', 0)² of sigmoids."""

    def sigmoid(r: float) -> float:
        return 1 / (1 + np.exp(-r))

    def ell(a: float, b: float, y: float) -> np.ndarray:
        return max(0.5 - sigmoid(a) + sigmoid(b), 0.0) ** 2 * np.array([y, 1.0])

    def slopes(a: float, b: float, y: float) -> tuple[np.ndarray, np.ndarray]:
        twice = 2 * max(0.5 - sigmoid(a) + sigmoid(b), 0.0) * np.array([y, 1.0])
        return -twice * sigmoid(a) * sigmoid(-a), twice * sigmoid(b) * sigmoid(-b)

    def outer(u: np.ndarray) -> np.ndarray:
        first, second = u + 1e-4 * 0.25
        return np.array([-1 / second, first / second**2])

    x, y, parts = rows_of_sites(N, dtype)
    clients = CrossPairs((x, y), parts, first=4, second=5, everything=True)
    problem = PairedAP(Bent(dtype), margin=0.5, rows=clients.rows)
    maps = {"ell": ell, "slopes": slopes, "outer": outer}
    return Setting(problem, clients, start(dtype).double().numpy(), maps | crossing(clients))


class Tilted(PairedAUROC):
    """f(u) = log u, ℓ = 1 + e^−s: f is not defined at 0."""

    linear = False

    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        return 1 + torch.exp(second - first)[..., None]

    def outer(self, u: Tensor) -> Tensor:
        return torch.log(u[..., 0])


def tilted(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """Positives against negatives with f not linear: a site without negatives has no u at the start."""
    s = paired(N, dtype)

    def slopes(a: float, b: float, y: float) -> tuple[np.ndarray, np.ndarray]:
        return -np.array([np.exp(b - a)]), np.array([np.exp(b - a)])

    own = {"ell": lambda a, b, y: np.array([1 + np.exp(b - a)]), "slopes": slopes, "outer": lambda u: 1 / u}
    return s._replace(problem=Tilted(Bent(dtype), rows=s.clients.rows), maps={**s.maps, **own})


def steep(N: int = 4, dtype: torch.dtype = torch.float64) -> Setting:
    """Positives against negatives, f(u) = λ log u, ℓ = exp(ψ/λ), ψ = log(1 + e^−s), λ = ½: the problem has logarithms."""

    def ell(a: float, b: float, y: float) -> np.ndarray:
        return np.array([(1 + np.exp(b - a)) ** 2])

    def slopes(a: float, b: float, y: float) -> tuple[np.ndarray, np.ndarray]:
        pull = np.array([2 * (1 + np.exp(b - a)) * np.exp(b - a)])
        return -pull, pull

    s = paired(N, dtype)
    options = {"rows": s.clients.rows, "others": 10**6}  # no bound on ℓ/u: the box has none
    problem = PairedPartialAUROC(Bent(dtype), temperature=0.5, loss="logistic", **options)
    return s._replace(problem=problem, maps={**s.maps, "ell": ell, "slopes": slopes, "outer": lambda u: 0.5 / u})


def crossing(clients: CrossPairs) -> dict[str, Callable[..., Any]]:
    """Return what the boxes need of rows, scores and luck."""

    def first(n: int, t: int) -> list[tuple[int, np.ndarray, float]]:
        rows, number, weight = numpy(clients, n, t)[0]
        return [(int(i), a, w) for i, a, w in zip(number, rows, weight)]

    def second(n: int, t: int) -> list[tuple[float, np.ndarray, float]]:
        rows, label, weight = numpy(clients, n, t)[1]
        return list(zip(label, rows, weight))

    def score(x: np.ndarray, a: np.ndarray) -> float:
        return float(a @ x + 0.3 * np.sin(a @ x))

    def pull(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        return (1 + 0.3 * np.cos(a @ x)) * a

    def mixed(h: int) -> int:
        """The finaliser of SplitMix64."""
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB % 2**64
        return h ^ (h >> 31)

    def luck(n: int, t: int, side: int, place: int) -> float:
        key = int(Streams(SEED).at(Purpose.DROPOUT, n, t).integers(2**62))
        bits = mixed(mixed(place + (side << 40) + (1 << 62)) ^ key)
        return (bits >> 20 & (2**44 - 1)) / 2**44

    return {"first": first, "second": second, "score": score, "pull": pull, "luck": luck, "rows": lambda: clients.rows}


class Ranking:
    """Pairs across sites with a linear score and ψ = (1−s)²: F(x) = 1 − 2cᵀx + xᵀCx, c and C the moments of differences."""

    def __init__(self, N: int = 4, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        x, y, parts = rows_of_sites(N, dtype)
        x = x + 0.4 * y[:, None]
        self.clients = CrossPairs((x, y), parts, **{"first": 4, "second": 5, **options})
        model = nn.Linear(D, 1, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        self.problem = PairedAUROC(nn.Sequential(model, nn.Flatten(0)), loss="square", rows=self.clients.rows)
        gap = (x[y == 1][:, None] - x[y == 0]).flatten(0, 1)
        self.c, self.C = gap.mean(0), gap.T @ gap / len(gap)
        self.minimiser = torch.linalg.solve(self.C, self.c)

    def value(self, x: Tensor) -> float:
        return float(1 - 2 * self.c @ x + x @ self.C @ x)


SETTINGS = {
    f.__name__: f
    for f in (
        plain,
        counted,
        parted,
        conditional,
        sampled,
        compositional,
        tasked,
        minimax,
        paired,
        precise,
        tilted,
        steep,
    )
}


Rounds = list[tuple[int, dict[str, Tensor]]]


def trace(problem: Any, algorithm: Any, clients: Any, **options: Any) -> tuple[Any, Rounds]:
    """Run, and return the result and after every round (iterations done, the shared fields)."""
    seen: list[dict[str, Tensor]] = []

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append({k: v.clone() for k, v in shared.items()})
        return {}

    options = {"seed": SEED, "progress": False, **options}
    result = simulate(problem, algorithm, clients, measure=measure, **options)
    return result, [(record["iteration"], fields) for record, fields in zip(result.history, seen)]


class Flock(NamedTuple):
    """The model, the own norms of the round so far, and everybody's of the last round."""

    x: Tensor
    norms: Tensor
    everybody: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Flocking(Algorithm[Differentiable, Flock]):
    """FedAvg whose step is divided by 1 + the fresh clients' last norms, weighted by their place in the table."""

    eta: float = 0.1

    name = "flocking"
    accepts = Differentiable
    shared = ("x",)
    gathered: ClassVar = {"norms": "everybody"}

    def init(self, problem: Differentiable, x0: Tensor) -> Flock:
        empty = x0.new_zeros(0, 2)
        return Flock(x0, empty, empty, empty)

    def receive(self, s: Flock, t: int) -> Flock:
        return s._replace(norms=s.norms[:0])

    def ends_round(self, t: int, q: int) -> bool:
        return t % q == 0  # the first round has one iteration

    def step(self, problem: Differentiable, s: Flock, batch: Batch, t: int) -> Flock:
        g = problem.grad(s.x, batch)
        place = torch.arange(1, len(s.fresh) + 1).to(s.x)
        known = (s.everybody.flatten(1).sum(1) * s.fresh * place).sum() if s.everybody.numel() else g.new_zeros(())
        norm = torch.stack([g.norm(), s.x.norm()])[None]
        return s._replace(x=s.x - self.eta / (1 + known) * g, norms=torch.cat([s.norms, norm]))
