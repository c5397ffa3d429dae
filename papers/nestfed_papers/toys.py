"""Small problems with known solutions: minimiser, gradient, bias and constants in closed form.

Every toy has a `problem` and `clients` to run, and the exact values to compare with. Its constants depend on its own
`seed`, the noise of its clients on the seed of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Batch, Clients, Data, NestfedError, SolvableSaddle, as_batch
from nestfed.data.random import Purpose, Streams
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize

Arrange = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Data]


@dataclass(frozen=True)
class ToyClients(Clients):
    """Clients that own constants and draw standard normal numbers.

    `own` holds one row per client, `shapes` what is drawn at every iteration; `arrange` makes a batch of them, with
    the clients along the first axis of everything.
    """

    own: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    arrange: Arrange
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_streams", Streams(self.seed or 0))

    def __len__(self) -> int:
        return len(self.own[0])

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def to(self, device: torch.device) -> Self:
        """Return these clients with their constants on a device."""
        return replace(self, own=tuple(o.to(device) for o in self.own))

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t."""
        batch = self.draw([n], range(t, t + 1))[0]
        return torch.utils._pytree.tree_map(lambda leaf: leaf[0], batch)

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Draw for several clients and iterations at once."""
        own = tuple(o[list(ns)] for o in self.own)
        return [self.arrange(own, self._noise(ns, t)) for t in ts]

    def _noise(self, ns: Sequence[int], t: int) -> tuple[Tensor, ...]:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        streams: Streams = self._streams  # type: ignore[attr-defined]
        rows = np.stack([streams.at(Purpose.BATCH, n, t).standard_normal(sum(sizes)) for n in ns])
        parts = torch.split(torch.from_numpy(rows).to(self.own[0]), sizes, 1)
        return tuple(part.reshape(len(ns), *shape) for part, shape in zip(parts, self.shapes))


class _Toy:
    """The base of all toys: constants drawn from the toy's own seed, and checks."""

    seed: int
    dtype: torch.dtype

    def _check(self, *at_least_one: str) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name in at_least_one:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise NestfedError(f"{type(self).__name__}: {f.name} must be at least 1, not {value!r}.")
            elif isinstance(value, float) and not 0 <= value < float("inf"):
                raise NestfedError(f"{type(self).__name__}: {f.name} must be a finite number from 0, not {value:g}.")

    def _normal(self, what: int, *shape: int) -> Tensor:
        """Draw a constant of the problem; `what` is its number."""
        generator = Streams(self.seed).at(Purpose.PROBLEM, what, 0)
        return torch.tensor(generator.standard_normal(shape), dtype=self.dtype)

    def _spread(self, what: int, clients: int, dim: int, size: float) -> Tensor:
        """Draw one vector per client with mean exactly 0 and mean squared norm exactly size²."""
        if clients == 1 or size == 0:
            return torch.zeros(clients, dim, dtype=self.dtype)
        z = self._normal(what, clients, dim)
        z = z - z.mean(0)
        return z * (size / z.square().sum(1).mean().sqrt())


# ---------------------------------------------------------------------------------------------------------
# Plain minimization


@dataclass(frozen=True)
class Quadratic(_Toy):
    """F_n(x) = ½(x−x*)ᵀH_n(x−x*) + z_nᵀ(x−x*), with Σz_n = 0 and gradient noise N(0, (σ²/d)I).

    The mean has the Hessian H = diag(μ … L), condition number `condition`, and its minimiser is x* with value 0.
    `zeta` is the heterogeneity: mean ‖∇F_n − ∇F‖² = ζ² at x*, and everywhere while `twist` is 0. `twist` in [0, 1)
    makes H_n = (1 ± twist)H, so that local steps drift to a wrong point. E‖noise‖² = σ² for one example.
    """

    N: int = 8
    dim: int = 10
    zeta: float = 1.0
    condition: float = 10.0
    sigma: float = 0.1
    twist: float = 0.0
    batch: int = 1
    mu: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._check("N", "dim", "batch")
        if not self.twist < 1:
            raise NestfedError(f"Quadratic: twist must be in [0, 1), not {self.twist:g}.")
        if not self.condition >= 1:
            raise NestfedError(f"Quadratic: condition must be at least 1, not {self.condition:g}.")

    @cached_property
    def minimiser(self) -> Tensor:
        """The minimiser x* of the mean, where F is 0."""
        return self._normal(0, self.dim)

    @cached_property
    def curvature(self) -> Tensor:
        """The diagonal of the mean Hessian, from μ to μ·condition."""
        return self.mu * torch.logspace(0, 1, self.dim, base=self.condition, dtype=self.dtype)

    @cached_property
    def pulls(self) -> Tensor:
        """Every client's z_n = ∇F_n(x*)."""
        return self._spread(1, self.N, self.dim, self.zeta)

    @cached_property
    def scales(self) -> Tensor:
        """Every client's H_n/H, of mean 1."""
        signs = torch.linspace(-1, 1, self.N, dtype=self.dtype) if self.N > 1 else torch.zeros(1)
        return 1 + self.twist * signs.to(self.dtype)

    @property
    def L(self) -> float:  # noqa: N802
        """The largest smoothness of a client."""
        return float(self.curvature.max() * self.scales.max())

    @cached_property
    def problem(self) -> Minimize:
        """The problem; the search starts at 0."""
        return Minimize(self._f, torch.zeros(self.dim, dtype=self.dtype))

    def _f(self, x: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        noise, scale, pull = batch
        y = x - self.minimiser.to(x.device)
        slope = pull + noise.mean(0) * (self.sigma / self.dim**0.5)
        result: Tensor = scale / 2 * (self.curvature.to(x.device) * y * y).sum() + (slope * y).sum()
        return result

    @cached_property
    def clients(self) -> ToyClients:
        """The clients."""
        return ToyClients((self.scales, self.pulls), ((self.batch, self.dim),), lambda own, noise: (*noise, *own))

    def value(self, x: Tensor) -> float:
        """Return F(x), which is 0 at the minimiser."""
        y = x.to(self.dtype) - self.minimiser
        return float((self.curvature * y * y).sum() / 2)

    def true_grad(self, x: Tensor) -> Tensor:
        """Return ∇F(x)."""
        return self.curvature * (x - self.minimiser)

    def client_grad(self, n: int, x: Tensor) -> Tensor:
        """Return ∇F_n(x)."""
        return self.scales[n] * self.true_grad(x) + self.pulls[n]


@dataclass(frozen=True)
class Theorem1(_Toy):
    """The counter-example of FAFED's Theorem 1: three clients in one dimension, on which naive adaptivity diverges.

    f1 = 3x² for |x| ≤ 1 and 6|x|−3 beyond, f2 = f3 = −x² and −2|x|+1 beyond, that is 6, −2 and −2 times Huber's
    function; their mean has its only minimum at 0. (The paper prints 6|x|−2, which is discontinuous.)
    """

    start: float = 10.0
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def minimiser(self) -> Tensor:
        """0."""
        return torch.zeros(1, dtype=self.dtype)

    @cached_property
    def weights(self) -> Tensor:
        """Every client's factor of Huber's function."""
        return torch.tensor([[6.0], [-2.0], [-2.0]], dtype=self.dtype)

    @cached_property
    def problem(self) -> Minimize:
        """The problem; the search starts at `start`."""
        return Minimize(lambda x, batch: (batch[0] * _huber(x)).sum(), torch.tensor([self.start], dtype=self.dtype))

    @cached_property
    def clients(self) -> ToyClients:
        """The three clients, without noise."""
        return ToyClients((self.weights,), (), lambda own, noise: own)

    def value(self, x: Tensor) -> float:
        """Return F(x)."""
        return float(self.weights.mean() * _huber(x[0].to(self.dtype)))

    def true_grad(self, x: Tensor) -> Tensor:
        """Return ∇F(x)."""
        return self.weights.mean() * x.clamp(-1, 1)

    def client_value(self, n: int, x: float) -> float:
        """Return f_n(x)."""
        return float(self.weights[n, 0] * _huber(torch.tensor(x, dtype=self.dtype)))


def _huber(x: Tensor) -> Tensor:
    return torch.where(x.abs() <= 1, x * x / 2, x.abs() - 0.5)


# ---------------------------------------------------------------------------------------------------------
# Conditional


@dataclass(frozen=True)
class ConditionalToy(_Toy):
    """ξ = a ~ N(0, I), η ~ N(a, σ²I), g = ηᵀx − aᵀx_n, f(u) = ½u² + (κ/4)u⁴: everything is known, including the bias.

    The inner mean of m samples is N(0, v) with v = ‖x−x_n‖² + σ²‖x‖²/m, so the estimator's expectation is the
    gradient of mean_n(½v + ¾κv²), and the true objective is that with m = ∞. The x_n have mean square distance ζ²
    from their mean.
    """

    N: int = 8
    dim: int = 5
    zeta: float = 0.5
    sigma: float = 1.0
    kappa: float = 0.0
    inner: int = 4
    outer: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._check("N", "dim", "inner", "outer")

    @cached_property
    def targets(self) -> Tensor:
        """Every client's x_n."""
        return self._normal(0, self.dim) + self._spread(1, self.N, self.dim, self.zeta)

    @property
    def minimiser(self) -> Tensor:
        """The minimiser when κ = 0: the mean of the x_n."""
        if self.kappa:
            raise NestfedError(f"ConditionalToy: the minimiser is known for kappa = 0 only, not {self.kappa:g}.")
        return self.targets.mean(0)

    @cached_property
    def problem(self) -> Conditional:
        """The problem; the search starts at 0."""
        return Conditional(
            f=lambda u, outer: u**2 / 2 + self.kappa / 4 * u**4,
            g=lambda x, outer, inner: inner @ x - (outer[0] * outer[1]).sum(-1, keepdim=True),
            model=torch.zeros(self.dim, dtype=self.dtype),
        )

    @cached_property
    def clients(self) -> ToyClients:
        """The clients; a batch is ((a, x_n for each outer sample), η)."""

        def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
            (target,), (a, spread) = own, noise
            return (a, target[:, None].expand_as(a)), a.unsqueeze(-2) + self.sigma * spread

        shapes = ((self.outer, self.dim), (self.outer, self.inner, self.dim))
        return ToyClients((self.targets,), shapes, arrange)

    def value(self, x: Tensor) -> float:
        """Return F(x)."""
        v = (x.to(self.dtype) - self.targets).square().sum(1)
        return float((v / 2 + 0.75 * self.kappa * v**2).mean())

    def expected_grad(self, x: Tensor, m: float) -> Tensor:
        """Return the expectation of the estimator with m inner samples, averaged over the clients."""
        away = x - self.targets
        v = away.square().sum(1, keepdim=True) + self.sigma**2 * x.square().sum() / m
        return ((1 + 3 * self.kappa * v) * (away + self.sigma**2 / m * x)).mean(0)

    def true_grad(self, x: Tensor) -> Tensor:
        """Return ∇F(x)."""
        return self.expected_grad(x, float("inf"))

    def bias(self, x: Tensor, m: float) -> Tensor:
        """Return the bias of the estimator with m inner samples: σ²x/m when κ = 0."""
        return self.expected_grad(x, m) - self.true_grad(x)


# ---------------------------------------------------------------------------------------------------------
# Compositional


@dataclass(frozen=True)
class CompositionalToy(_Toy):
    """g_n(x; ξ) = (G_n + σZ)x with Gaussian Z, f_n(u; ζ) = ½‖u − c_n‖² + σζᵀu: F(x) = mean_n ½‖G_nx − c_n‖².

    ξ is in both factors of Local-BSGD's estimator, which is therefore biased by σ²(p/b)x, b being the inner batch.
    """

    N: int = 6
    dim: int = 4
    inner_dim: int = 6
    zeta: float = 0.5
    sigma: float = 0.1
    batch: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._check("N", "dim", "inner_dim", "batch")

    @cached_property
    def maps(self) -> Tensor:
        """Every client's G_n, (N, p, d)."""
        base = self._normal(0, self.inner_dim, self.dim) / self.inner_dim**0.5
        spread = self._spread(1, self.N, self.inner_dim * self.dim, self.zeta)
        result: Tensor = base + spread.view(-1, self.inner_dim, self.dim)
        return result

    @cached_property
    def targets(self) -> Tensor:
        """Every client's c_n, (N, p)."""
        return self._normal(2, self.inner_dim) + self._spread(3, self.N, self.inner_dim, self.zeta)

    @cached_property
    def minimiser(self) -> Tensor:
        """The minimiser of the mean."""
        gram = torch.einsum("npd,npe->de", self.maps, self.maps)
        result: Tensor = torch.linalg.solve(gram, torch.einsum("npd,np->d", self.maps, self.targets))
        return result

    @cached_property
    def problem(self) -> Compositional:
        """The problem; the search starts at 0."""
        return Compositional(
            f=lambda u, outer: (u - outer[1]).square().sum() / 2 + self.sigma * (outer[0].mean(0) * u).sum(),
            g=lambda x, inner: (inner[1] + self.sigma * inner[0].mean(0)) @ x,
            model=torch.zeros(self.dim, dtype=self.dtype),
            inner_dim=self.inner_dim,
        )

    @cached_property
    def clients(self) -> ToyClients:
        """The clients; a batch is ((ζ, c_n), (Z, G_n))."""

        def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
            return (noise[0], own[0]), (noise[1], own[1])

        shapes = ((self.batch, self.inner_dim), (self.batch, self.inner_dim, self.dim))
        return ToyClients((self.targets, self.maps), shapes, arrange)

    def value(self, x: Tensor) -> float:
        """Return F(x)."""
        return float((self.maps @ x.to(self.dtype) - self.targets).square().sum(1).mean() / 2)

    def true_grad(self, x: Tensor) -> Tensor:
        """Return ∇F(x)."""
        return torch.einsum("npd,np->d", self.maps, self.maps @ x - self.targets) / self.N

    def bias(self, x: Tensor) -> Tensor:
        """Return the bias of Local-BSGD's estimator."""
        return self.sigma**2 * self.inner_dim / self.batch * x


# ---------------------------------------------------------------------------------------------------------
# Minimax


class BilinearSaddle(Minimax, SolvableSaddle):
    """½(θ−c)ᵀH(θ−c) + wᵀ(Bθ−e) − (μ/2)‖w‖² plus linear noise; a batch is (noise in θ, noise in w, c, B, e)."""

    def __init__(self, curvature: Tensor, mu: float, theta0: Tensor, w0: Tensor) -> None:
        self.curvature, self.mu = curvature, mu
        super().__init__(self._value, theta0, w0)

    def _value(self, theta: Tensor, w: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        noise, noise_w, c, B, e = batch
        y = theta - c
        concave = (w * (B @ theta - e + noise_w.mean(0))).sum() - self.mu / 2 * (w * w).sum()
        return (self.curvature.to(y.device) * y * y).sum() / 2 + (noise.mean(0) * y).sum() + concave

    def best_dual(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the maximiser of this batch's loss."""
        sample = as_batch(batch)
        _, noise_w, _, B, e = sample.data
        sample.note(self.examples(sample.data))
        best: Tensor = (B @ theta - e + noise_w.mean(0)) / self.mu
        return best


@dataclass(frozen=True)
class MinimaxToy(_Toy):
    """F_n(θ, w) = ½(θ−c_n)ᵀH(θ−c_n) + wᵀ(B_nθ − e_n) − (μ/2)‖w‖², with noise of size σ in both gradients.

    Φ(θ) = max_w F(θ, w), ∇Φ, w*(θ) and the minimiser of Φ are known. c_n, B_n and e_n differ between clients by ζ.
    """

    N: int = 6
    dim: int = 4
    dual_dim: int = 2
    zeta: float = 0.5
    sigma: float = 0.1
    condition: float = 4.0
    mu: float = 1.0
    batch: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._check("N", "dim", "dual_dim", "batch")
        if not self.mu > 0:
            raise NestfedError(f"MinimaxToy: mu must be above 0, not {self.mu:g}.")

    @cached_property
    def curvature(self) -> Tensor:
        """The diagonal of H, from 1 to `condition`."""
        return torch.logspace(0, 1, self.dim, base=self.condition, dtype=self.dtype)

    @cached_property
    def centres(self) -> Tensor:
        """Every client's c_n."""
        return self._normal(0, self.dim) + self._spread(1, self.N, self.dim, self.zeta)

    @cached_property
    def couplings(self) -> Tensor:
        """Every client's B_n, (N, p, d)."""
        spread = self._spread(3, self.N, self.dual_dim * self.dim, self.zeta)
        return self._normal(2, self.dual_dim, self.dim) + spread.view(-1, self.dual_dim, self.dim)

    @cached_property
    def offsets(self) -> Tensor:
        """Every client's e_n."""
        return self._normal(4, self.dual_dim) + self._spread(5, self.N, self.dual_dim, self.zeta)

    @cached_property
    def problem(self) -> BilinearSaddle:
        """The problem; both players start at 0."""
        zeros = torch.zeros(self.dim + self.dual_dim, dtype=self.dtype)
        return BilinearSaddle(self.curvature, self.mu, zeros[: self.dim], zeros[self.dim :])

    @cached_property
    def clients(self) -> ToyClients:
        """The clients."""

        def arrange(own: tuple[Tensor, ...], noise: tuple[Tensor, ...]) -> Data:
            return (*(self.sigma * z for z in noise), *own)

        shapes = ((self.batch, self.dim), (self.batch, self.dual_dim))
        return ToyClients((self.centres, self.couplings, self.offsets), shapes, arrange)

    def best_dual(self, theta: Tensor) -> Tensor:
        """Return w*(θ)."""
        return (self.couplings.mean(0) @ theta - self.offsets.mean(0)) / self.mu

    def value(self, theta: Tensor) -> float:
        """Return Φ(θ)."""
        y = theta.to(self.dtype) - self.centres
        residual = self.couplings.mean(0) @ theta.to(self.dtype) - self.offsets.mean(0)
        return float((self.curvature * y * y).sum(1).mean() / 2 + residual.square().sum() / (2 * self.mu))

    def true_grad(self, theta: Tensor) -> Tensor:
        """Return ∇Φ(θ)."""
        return self.curvature * (theta - self.centres.mean(0)) + self.couplings.mean(0).T @ self.best_dual(theta)

    @cached_property
    def minimiser(self) -> Tensor:
        """The minimiser of Φ."""
        B = self.couplings.mean(0)
        hessian = torch.diag(self.curvature) + B.T @ B / self.mu
        right = self.curvature * self.centres.mean(0) + B.T @ self.offsets.mean(0) / self.mu
        result: Tensor = torch.linalg.solve(hessian, right)
        return result


# ---------------------------------------------------------------------------------------------------------
# The PL counter-example


class Sides(NamedTuple):
    """The two sides of the PL inequality ½‖∇S‖² ≥ μ(S − S*)."""

    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether the inequality holds."""
        return self.left >= self.right


@dataclass(frozen=True)
class PLSaddle(_Toy):
    """AUROC of h(m, x) = m1·sigmoid(m2·x) on the points (1, +1) and (−1, −1) (FMGDA paper, section 5.3).

    The surface S(m) = min over a, b of Φ(m, a, b) has a saddle with zero gradient far above the optimum, so no μ > 0
    satisfies the PL inequality ½‖∇S‖² ≥ μ(S − S*).
    """

    N: int = 1
    start: tuple[float, float] = (0.5, 0.5)
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("N")

    @property
    def optimum(self) -> float:
        """The infimum S* = −p(1−p) = −¼, reached wherever h separates the two points by 1."""
        return -0.25

    def scores(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the positive and the negative point; m may have leading axes."""
        return m[..., 0] * torch.sigmoid(m[..., 1]), m[..., 0] * torch.sigmoid(-m[..., 1])

    def surface(self, m: Tensor) -> Tensor:
        """Return S(m): a, b and w are at their best, the class means and their difference."""
        positive, negative = self.scores(m)
        return self.objective(m, positive, negative, negative - positive)

    def objective(self, m: Tensor, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        """Return F(m, a, b, w), the mean over the two points with p = ½."""
        positive, negative = self.scores(m)
        on_positive = (positive - a) ** 2 / 2 - (1 + w) * positive
        on_negative = (negative - b) ** 2 / 2 + (1 + w) * negative
        return (on_positive + on_negative) / 2 - w**2 / 4

    def gradient(self, m: Tensor) -> Tensor:
        """Return ∇S(m)."""
        return torch.func.grad(self.surface)(m)

    def hessian(self, m: Tensor) -> Tensor:
        """Return ∇²S(m)."""
        return torch.func.jacrev(torch.func.grad(self.surface))(m)

    def saddle(self, start: Sequence[float] = (0.3, -0.2), steps: int = 50) -> Tensor:
        """Locate the saddle by Newton's method on ∇S = 0."""
        m = torch.tensor(start, dtype=torch.float64)
        for _ in range(steps):
            m = m - torch.linalg.solve(self.hessian(m), self.gradient(m))
        return m

    def pl_sides(self, m: Tensor, mu: float) -> Sides:
        """Return both sides of the PL inequality at m."""
        left = self.gradient(m).square().sum() / 2
        return Sides(float(left), mu * float(self.surface(m) - self.optimum))

    @cached_property
    def problem(self) -> Minimax:
        """The minimax problem over θ = (m1, m2, a, b) and w, which starts at m = `start`, a = 1, b = 0, w = 0."""
        theta = torch.tensor([*self.start, 1.0, 0.0], dtype=self.dtype)
        return Minimax(
            lambda theta, w, batch: self.objective(theta[:2], theta[2], theta[3], w[0]),
            theta,
            torch.zeros(1, dtype=self.dtype),
        )

    @cached_property
    def clients(self) -> ToyClients:
        """Clients that all have the two points and draw nothing."""
        return ToyClients((torch.zeros(self.N, 1, dtype=self.dtype),), (), lambda own, noise: own)
