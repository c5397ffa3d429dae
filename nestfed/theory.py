"""What the theorems prescribe and promise: step sizes, bounds term by term, conditions, complexities.

`prescribe("fcsg", N=16, T=10000).lines()` is the whole story as text. S_F, L_F and L are the smoothness of
the whole objective, derived from the constants of its layers as each paper does. Where a printed formula does
not follow from its own proof, the docstring says in one sentence which one is used here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from nestfed.core import NestfedError

Schedule = float | Callable[[int], float]
K = TypeVar("K", bound="Constants")


def at(value: Schedule, t: int) -> float:
    """The value of a number or schedule at iteration t."""
    return value(t) if callable(value) else value


@dataclass(frozen=True)
class CubeRoot:
    """η_t = scale / (w_t + slope·t)^(1/3) with w_t = max(least, start − slope·t): flat at first, then falling."""

    scale: float
    start: float
    least: float = 1.5
    slope: float = 1.0

    def __call__(self, t: int) -> float:
        """The value at iteration t."""
        return float(self.scale / max(self.least + self.slope * t, self.start) ** (1 / 3))

    def __str__(self) -> str:
        slope = "" if self.slope == 1 else f"{self.slope:.4g}·"
        return f"{self.scale:.4g} / max({self.start:.4g}, {self.least:.4g} + {slope}t)^(1/3)"


@dataclass(frozen=True)
class Squared:
    """weight_t = c·η² at iteration t − lag, and 1 before that; never above 1."""

    c: float
    eta: Schedule
    lag: int = 0

    def __call__(self, t: int) -> float:
        """The value at iteration t."""
        return 1.0 if t < self.lag else min(1.0, self.c * at(self.eta, t - self.lag) ** 2)

    def __str__(self) -> str:
        return f"{self.c:.4g} · eta({'t' if self.lag == 0 else f't-{self.lag}'})^2"


# --- Constants: one frozen class per family, names as in its paper ---


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What every theorem needs: N clients, T iterations, b examples per batch, F0 the gap F(x_0) − F*."""

    N: int
    T: int
    b: int = 1
    F0: float = 1.0

    counts: ClassVar[tuple[str, ...]] = ("N", "T", "b", "m", "B")
    may_vanish: ClassVar[tuple[str, ...]] = ("F0", "w0", "zeta", "sigma", "sigma_f", "sigma_g", "delta_g")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise NestfedError(f"The constant {f.name} must be a finite number, not {value!r}.")
            if f.name in self.counts and (value < 1 or value != int(value)):
                raise NestfedError(f"The constant {f.name} must be a whole number of at least 1, not {value!r}.")
            if f.name in self.may_vanish:
                if value < 0:
                    raise NestfedError(f"The constant {f.name} must not be negative, but is {value!r}.")
            elif value <= 0:
                raise NestfedError(f"The constant {f.name} must be positive, but is {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ConditionalConstants(Constants):
    """FCSG's family: f is L_f-Lipschitz and S_f-smooth, g likewise, σ_g² bounds the variance of g.

    m, the inner batch, is prescribed when it is not given; B is the initial batch of FCSG and FCSG-M.
    """

    L_f: float = 1.0
    L_g: float = 1.0
    S_f: float = 1.0
    S_g: float = 1.0
    sigma_g: float = 1.0
    m: int | None = None
    B: int | None = None

    may_vanish: ClassVar[tuple[str, ...]] = (*Constants.may_vanish, "S_f", "S_g")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.S_f == 0 and self.S_g == 0:
            raise NestfedError("S_f and S_g cannot both be 0: F would be linear and have no minimum.")

    @property
    def S_F(self) -> float:  # noqa: N802 - the paper's name
        """Smoothness of F and of its estimate (Lemma A.2 b)."""
        return self.S_g * self.L_f + self.S_f * self.L_g**2

    @property
    def variance(self) -> float:
        """L_f²L_g² bounds the squared gradient and the variance of its estimate (Lemma A.2 c)."""
        return self.L_f**2 * self.L_g**2

    @property
    def bias(self) -> float:
        """m times the squared bias of the estimate (Lemma A.2 a)."""
        return self.L_g**2 * self.S_f**2 * self.sigma_g**2


@dataclass(frozen=True, kw_only=True)
class CompositionalConstants(Constants):
    """Local-SCGDM: f is C_f-Lipschitz and L_f-smooth, g likewise.

    σ_f², σ_g², δ_g² bound the variances of ∇f, ∇g and g; α and γ are free, β is the largest allowed unless given.
    """

    L_f: float = 1.0
    L_g: float = 1.0
    C_f: float = 1.0
    C_g: float = 1.0
    sigma_f: float = 1.0
    sigma_g: float = 1.0
    delta_g: float = 1.0
    alpha: float = 1.0
    gamma: float = 1.0
    beta: float | None = None

    may_vanish: ClassVar[tuple[str, ...]] = (*Constants.may_vanish, "L_g")

    @property
    def L_F(self) -> float:  # noqa: N802 - the paper's name
        """Smoothness of F."""
        return self.C_g**2 * self.L_f + self.C_f * self.L_g


@dataclass(frozen=True, kw_only=True)
class MinimaxConstants(Constants):
    """FMGDA: every f_i is L_f-smooth and μ-strongly concave in w; F0 = Φ(θ_0) − Φ*, w0 = ‖w_0 − w*(θ_0)‖².

    σ² bounds the variance on a client, ζ² the squared difference between clients' gradients. `e_factor` is
    the number in e_t: 1728 as in the corollary, while the proof's η_t ≤ 1/(20Lq) needs 8000 (it prints 800).
    """

    L_f: float = 1.0
    mu: float = 1.0
    sigma: float = 1.0
    zeta: float = 1.0
    w0: float = 1.0
    c: float | None = None
    c_hat: float | None = None
    e_factor: float = 1728.0

    @property
    def kappa(self) -> float:
        """Condition number."""
        return self.L_f / self.mu

    @property
    def L(self) -> float:  # noqa: N802 - the paper's name
        """Smoothness of Φ (Lemma 1)."""
        return self.L_f * (1 + self.kappa)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConstants(Constants):
    """FAFED: every f_i is L-smooth with gradients bounded by G; σ², ζ² as for FMGDA; A ⪰ ρ."""

    L: float = 1.0
    sigma: float = 1.0
    zeta: float = 1.0
    G: float = 1.0
    rho: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StemConstants(Constants):
    """STEM: every f_i is L-smooth, σ² bounds the variance; κ̄, w and c follow from them unless given."""

    L: float = 1.0
    sigma: float = 1.0
    kappa_bar: float | None = None
    w: float | None = None
    c: float | None = None


# --- Results ---


@dataclass(frozen=True)
class Bound:
    """The right-hand side of a theorem: its named terms and their total."""

    measure: str
    terms: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return math.fsum(self.terms.values())

    @property
    def dominant(self) -> str:
        """Name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])

    def lines(self) -> list[str]:
        """One line per term with its share."""
        total = self.total
        width = max(len(name) for name in (*self.terms, "total"))
        rows = [f"bound on {self.measure}"]
        for name, value in self.terms.items():
            share = value / total if total else 0.0
            rows.append(f"  {name:<{width}}  {value:<10.4g}  {share:4.0%}")
        rows.append(f"  {'total':<{width}}  {total:<10.4g}")
        return rows


@dataclass(frozen=True)
class Complexity:
    """Cost of reaching E‖∇F‖ ≤ ε: samples ε^-sample (per client where `speedup`), rounds ε^-communication."""

    sample: float
    communication: float | None
    speedup: bool = False
    logarithm: bool = False

    def __post_init__(self) -> None:
        if self.sample <= 0:
            raise NestfedError("The exponent of a sample complexity must be positive.")

    def _order(self, inside: str) -> str:
        return f"{'Õ' if self.logarithm else 'O'}({inside})"

    @property
    def sample_text(self) -> str:
        """Sample complexity as text."""
        return self._order(f"{'N^-1 ' if self.speedup else ''}ε^-{self.sample:g}")

    @property
    def communication_text(self) -> str:
        """Communication complexity as text; a single machine does not communicate."""
        return "none" if self.communication is None else self._order(f"ε^-{self.communication:g}")


COMPLEXITY: dict[str, Complexity] = {
    "fcsg": Complexity(6, 3, speedup=True),
    "fcsg-m": Complexity(6, 3, speedup=True),
    "acc-fcsg-m": Complexity(5, 2, speedup=True),
    "bsgd": Complexity(6, None),
    "bspiderboost": Complexity(5, None),
    "local-scgdm": Complexity(4, 3),
    "local-moml": Complexity(5, 3),
    "local-bsgd": Complexity(8, 4),
    "scgd": Complexity(8, None),
    "fmgda": Complexity(3, 2, speedup=True, logarithm=True),
    "local-sgda": Complexity(4, 3),
    "momentum-local-sgda": Complexity(4, 3),
    "fafed": Complexity(3, 2, speedup=True, logarithm=True),
    "stem": Complexity(3, 2, speedup=True, logarithm=True),
    "fedavg": Complexity(4, 4),
    "scaffold": Complexity(4, 4),
    "fedadam": Complexity(4, 4),
    "fedyogi": Complexity(4, 4),
    "fedadagrad": Complexity(4, 4),
    "fedams": Complexity(4, 4),
}
"""As the four papers state them, also for the methods that they compare with."""


@dataclass(frozen=True)
class Prescription:
    """The theorem's settings for given constants; `replace` tries others against the same theorem."""

    method: str
    constants: Constants
    steps: Mapping[str, Schedule]
    q: int
    B: int
    m: int | None = None
    derived: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("q", self.q), ("B", self.B), ("m", self.m)):
            if value is not None and (value < 1 or value != int(value)):
                raise NestfedError(f"{self.method}: {name} must be a whole number of at least 1, not {value!r}.")

    def __getitem__(self, name: str) -> Schedule:
        """A step size or weight by its name in the paper."""
        if name not in self.steps:
            raise NestfedError(f"{self.method} prescribes {_and(self.steps)}, but not {name!r}.")
        return self.steps[name]

    def replace(self, **changes: Any) -> Prescription:
        """The same problem with other step sizes, weights, q, B or m."""
        own = {k: changes.pop(k) for k in ("q", "B", "m") if k in changes}
        for name in changes:
            self[name]
        return replace(self, steps={**self.steps, **changes}, **own)

    def bound(self) -> Bound | None:
        """The theorem's right-hand side at these settings; None for STEM, whose schedule alone is kept here."""
        rule = METHODS[self.method].bound
        return None if rule is None else rule(self)

    def violated(self) -> list[str]:
        """The theorem's conditions that these settings break, one sentence each."""
        return METHODS[self.method].violated(self)

    def lines(self) -> list[str]:
        """Everything as text: settings, bound term by term, conditions, complexity."""
        method, k = METHODS[self.method], self.constants
        given = ", ".join(f"{n} = {v:.6g}" for n, v in asdict(k).items() if v is not None)
        rows = [f"{method.title}: {method.source}", f"constants: {given}"]
        if self.derived:
            rows.append("derived: " + ", ".join(f"{n} = {v:.6g}" for n, v in self.derived.items()))
        for name, value in self.steps.items():
            text = str(value) if callable(value) else f"{value:.6g}"
            first = f", {at(value, 1):.4g} at t = 1" if callable(value) else ""
            rows.append(f"{name} = {text}{first}")
        rows.append(f"q = {self.q} iterations per round, {math.ceil(k.T / self.q)} rounds in all")
        rows.append(f"B = {self.B} examples at the start, then b = {k.b}")
        if self.m is not None:
            rows.append(f"m = {self.m} inner examples for each outer one")
        bound = self.bound()
        if bound is not None:
            rows += bound.lines()
        broken = self.violated()
        rows += [f"violated: {sentence}" for sentence in broken] or ["conditions of the theorem: all hold"]
        cost = COMPLEXITY[self.method]
        rows.append(f"complexity: {cost.sample_text} samples, {cost.communication_text} rounds")
        return rows


# --- Small helpers ---


def _and(names: Mapping[str, Any] | list[str]) -> str:
    words = list(names)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _floor(x: float) -> int:
    """Whole number just below x, at least 1: a shorter round never breaks a theorem."""
    return max(1, math.floor(x * (1 + 1e-12)))


def _ceil(x: float) -> int:
    """Whole number just above x, at least 1: a larger batch never breaks a theorem."""
    return max(1, math.ceil(x * (1 - 1e-12)))


def _broken(*checks: tuple[bool, str]) -> list[str]:
    return [sentence for holds, sentence in checks if not holds]


def _at_most(x: float, limit: float) -> bool:
    return x <= limit * (1 + 1e-9)


def _number(p: Prescription, name: str) -> float:
    value = p[name]
    if callable(value):
        raise NestfedError(f"The theorem of {p.method} is about a constant {name}, not one that changes with t.")
    return float(value)


def _digamma(x: float) -> float:
    """ψ(x) for x > 0, so that Σ_{t<n} 1/(x + t) = ψ(x + n) − ψ(x)."""
    shift = 0.0
    while x < 20:
        shift += 1 / x
        x += 1
    return math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - shift


def _sum_of_cubes(eta: Schedule, T: int, first: int, printed: bool) -> float:
    """Σ η_t³ over T iterations from t = first; `printed` bounds it by a logarithm, as the theorems do."""
    if not callable(eta):
        return T * eta**3
    if not isinstance(eta, CubeRoot):
        return math.fsum(eta(t) ** 3 for t in range(first, T + first))
    if printed:
        logarithm = math.log(T + 1) if first else math.log(T) + 1
        return eta.scale**3 * logarithm / eta.slope
    bend = max(first, math.ceil((eta.start - eta.least) / eta.slope))
    flat = min(T + first, bend) - first
    total = flat / eta.start if flat else 0.0
    if flat < T:
        x = eta.least / eta.slope + bend
        total += (_digamma(x + T - flat) - _digamma(x)) / eta.slope
    return eta.scale**3 * total


def _ratio(p: Prescription, weight: str) -> float:
    """The c of weight = cη²."""
    value, eta = p[weight], p["eta"]
    if isinstance(value, Squared):
        return value.c
    if callable(value) or callable(eta):
        raise NestfedError(f"{p.method}: {weight} must be Squared(c, eta), or a number together with a number eta.")
    return float(value / eta**2)


def _kind(p: Prescription, kind: type[K]) -> K:
    if not isinstance(p.constants, kind):
        raise NestfedError(f"{p.method} needs {kind.__name__}, not {type(p.constants).__name__}.")
    return p.constants


GRADIENT = "(1/T) Σ E‖∇F(x̄_t)‖²"


# --- FCSG, FCSG-M, Acc-FCSG-M ---


def fcsg(k: ConditionalConstants) -> Prescription:
    """Corollary 4.2: α = √(N/T)/(6S_F), q = (T/N³)^(1/4), and m = ε^-2 = √(NT) (Remark 4.3)."""
    alpha = math.sqrt(k.N / k.T) / (6 * k.S_F)
    return Prescription(
        method="fcsg",
        constants=k,
        steps={"alpha": alpha},
        q=_floor((k.T / k.N**3) ** 0.25),
        B=k.B or k.b,
        m=k.m or _ceil(math.sqrt(k.N * k.T)),
        derived={"S_F": k.S_F},
    )


def fcsg_bound(p: Prescription) -> Bound:
    """Theorem 4.1, with 78 in the drift term: Lemma B.1 and Eq. 26 give 2·39, where the theorem prints 42.

    Corollary 4.2 prints 1/6 and 19/9 where these terms give 1/3 and 13/6.
    """
    k, alpha = _kind(p, ConditionalConstants), _number(p, "alpha")
    return Bound(
        GRADIENT,
        {
            "initial gap": 2 * k.F0 / (alpha * k.T),
            "bias": 2 * k.bias / (p.m or 1),
            "variance": 2 * alpha * k.S_F * k.variance / k.N,
            "client drift": 78 * (p.q - 1) * p.q * alpha**2 * k.S_F**2 * k.variance,
        },
    )


def fcsg_violated(p: Prescription) -> list[str]:
    """Theorem 4.1: α ≤ 1/(6qS_F)."""
    k, alpha = _kind(p, ConditionalConstants), _number(p, "alpha")
    limit = 1 / (6 * p.q * k.S_F)
    return _broken(
        (_at_most(alpha, limit), f"alpha = {alpha:.4g} must be at most 1/(6 q S_F) = {limit:.4g}."),
    )


def fcsg_m(k: ConditionalConstants) -> Prescription:
    """Corollary 4.5: FCSG's α and q, with β = 5S_Fα (Theorem 4.4 prints 5S_Fη, there is no η)."""
    base = fcsg(k)
    alpha = _number(base, "alpha")
    return replace(base, method="fcsg-m", steps={"alpha": alpha, "beta": 5 * k.S_F * alpha})


def fcsg_m_bound(p: Prescription) -> Bound:
    """Theorem 4.4, with 12 in the drift term: Lemma C.3 and the proof have 12L_f²L_g², the theorem prints 3.

    Corollary 4.5 prints 112/3 for the drift where this gives 112/15.
    """
    k, alpha, beta = _kind(p, ConditionalConstants), _number(p, "alpha"), _number(p, "beta")
    return Bound(
        GRADIENT,
        {
            "initial gap": 2 * k.F0 / (alpha * k.T),
            "client drift": 96 / 5 * k.S_F**2 * p.q**2 * alpha**2 * (13 + 1 / k.N) * k.variance,
            "bias": 4 * k.bias / (p.m or 1),
            "initial estimate": 8 * k.variance / (beta * p.B * k.T),
            "variance": 8 * beta * k.variance / k.N,
        },
    )


def fcsg_m_violated(p: Prescription) -> list[str]:
    """Theorem 4.4: α ≤ 1/(6qS_F), β ≤ 1, and β large enough for 1 − αS_F − 16(αS_F/β)² ≥ 0 as 5S_Fα is."""
    k, alpha, beta = _kind(p, ConditionalConstants), _number(p, "alpha"), _number(p, "beta")
    rate = alpha * k.S_F
    least = 4 * rate / math.sqrt(1 - rate) if rate < 1 else math.inf
    return fcsg_violated(p) + _broken(
        (0 < beta <= 1, f"beta = {beta:.4g} must lie in (0, 1]."),
        (
            _at_most(least, beta),
            f"beta = {beta:.4g} must be at least 4 alpha S_F / sqrt(1 - alpha S_F) = {least:.4g}, "
            f"for example 5 S_F alpha = {5 * rate:.4g}.",
        ),
    )


def acc_fcsg_m(k: ConditionalConstants) -> Prescription:
    """Corollary 4.8: q = (T/N²)^(1/3), α = N^(2/3)/(12S_F T^(1/3)), β = cα², c = 30S_F²/(bN), B = (T/N²)^(1/3).

    Theorem 4.7 prints β = 5S_Fα, with which its third term does not vanish; the proof sets β = cα² too.
    """
    root = (k.T / k.N**2) ** (1 / 3)
    alpha = 1 / (12 * k.S_F * root)
    c = 30 * k.S_F**2 / (k.b * k.N)
    return Prescription(
        method="acc-fcsg-m",
        constants=k,
        steps={"alpha": alpha, "beta": c * alpha**2},
        q=_floor(root),
        B=k.B or _ceil(root),
        m=k.m or _ceil((k.N * k.T) ** (2 / 3)),
        derived={"S_F": k.S_F, "c": c},
    )


def acc_fcsg_m_bound(p: Prescription) -> Bound:
    """Theorem 4.7 with c = β/α², and L_f²L_g² in the last term: it prints L_f², but Lemma A.2 c is what it uses."""
    k, alpha, beta = _kind(p, ConditionalConstants), _number(p, "alpha"), _number(p, "beta")
    c = beta / alpha**2
    return Bound(
        GRADIENT,
        {
            "initial gap": 2 * k.F0 / (alpha * k.T),
            "initial estimate": 3 * k.variance / (beta * p.B * k.N * k.T),
            "client drift": 13 / 6 * k.variance * (c * alpha / k.S_F) ** 2,
            "bias": 3 * k.bias / (p.m or 1),
            "variance": 6 * beta * k.variance / (k.N * k.b),
        },
    )


def acc_fcsg_m_violated(p: Prescription) -> list[str]:
    """Conditions of the proof: α ≤ 1/(12qS_F) (the theorem prints 6), and 30/(bN) ≤ c/S_F² ≤ 81q for c = β/α².

    Below, the step term of Eq. 51 has the wrong sign; above, the drift is not absorbed before Eq. 46.
    """
    k, alpha, beta = _kind(p, ConditionalConstants), _number(p, "alpha"), _number(p, "beta")
    limit = 1 / (12 * p.q * k.S_F)
    unit = (k.S_F * alpha) ** 2
    least, most = 30 / (k.b * k.N) * unit, 81 * p.q * unit
    return _broken(
        (_at_most(alpha, limit), f"alpha = {alpha:.4g} must be at most 1/(12 q S_F) = {limit:.4g}."),
        (0 < beta <= 1, f"beta = {beta:.4g} must lie in (0, 1]."),
        (
            _at_most(least, beta),
            f"beta = {beta:.4g} must be at least 30 S_F^2 alpha^2 / (b N) = {least:.4g}.",
        ),
        (_at_most(beta, most), f"beta = {beta:.4g} must be at most 81 q S_F^2 alpha^2 = {most:.4g}."),
    )


# --- Local-SCGDM ---


def _largest_beta(k: CompositionalConstants) -> float:
    inner = k.C_g**4 * k.L_f**2
    return math.sqrt(0.125 / (inner / k.gamma**2 + inner / k.gamma + k.L_F**2 / k.alpha**2))


def local_scgdm(k: CompositionalConstants) -> Prescription:
    """Corollary 3.5: η = T^(-1/2), p = T^(1/4) (here q); β is the largest that Theorem 3.4 allows (Remark 3.6)."""
    return Prescription(
        method="local-scgdm",
        constants=k,
        steps={"eta": k.T**-0.5, "alpha": k.alpha, "beta": k.beta or _largest_beta(k), "gamma": k.gamma},
        q=_floor(k.T**0.25),
        B=k.b,
        derived={"L_F": k.L_F},
    )


def local_scgdm_bound(p: Prescription) -> Bound:
    """Theorem 3.4, where two things printed do not follow from its proof and are mended.

    The three variance terms carry 4, not 2, since Eq. 41 is divided by βη/2; the tracked value's start carries
    L_f², not L_g², as in the potential function (Eq. 39). The bound does not improve with the number of clients.
    """
    k, eta = _kind(p, CompositionalConstants), _number(p, "eta")
    alpha, beta, gamma = _number(p, "alpha"), _number(p, "beta"), _number(p, "gamma")
    gradient = k.C_g**2 * k.sigma_f**2 + k.C_f**2 * k.sigma_g**2
    inner = k.C_g**2 * k.L_f**2 * k.delta_g**2
    drift = 16 * inner + k.C_g**2 * k.sigma_f**2 + 3 * k.C_f**2 * k.sigma_g**2
    return Bound(
        GRADIENT,
        {
            "initial gap": 2 * k.F0 / (beta * eta * k.T),
            "initial estimate": 6 * (gradient + inner) / (alpha * eta * k.T),
            "initial inner value": 4 * inner / (gamma * eta * k.T),
            "inner variance": 4 * gamma * eta * inner,
            "gradient variance": 4 * alpha * eta * gradient,
            "inner variance, second order": 4 * (gamma * eta) ** 2 * inner,
            "client drift": 32 * (p.q * beta * eta * k.L_F) ** 2 * drift,
        },
    )


def local_scgdm_violated(p: Prescription) -> list[str]:
    """Theorem 3.4: αη ≤ 1, γη ≤ 1, and upper limits on β, η and p."""
    k, eta = _kind(p, CompositionalConstants), _number(p, "eta")
    alpha, beta, gamma = _number(p, "alpha"), _number(p, "beta"), _number(p, "gamma")
    most = _largest_beta(replace(k, alpha=alpha, gamma=gamma))
    rate = min(1.0, 1 / (2 * beta * k.L_F))
    period = 1 / (4 * beta * eta * math.sqrt(6 * k.C_f**2 * k.L_g**2 + 16 * k.C_g**4 * k.L_f**2))
    return _broken(
        (_at_most(alpha * eta, 1), f"alpha eta = {alpha * eta:.4g} must be at most 1."),
        (_at_most(gamma * eta, 1), f"gamma eta = {gamma * eta:.4g} must be at most 1."),
        (_at_most(beta, most), f"beta = {beta:.4g} must be at most {most:.4g}."),
        (_at_most(eta, rate), f"eta = {eta:.4g} must be at most min(1, 1/(2 beta L_F)) = {rate:.4g}."),
        (
            _at_most(p.q, period),
            f"q = {p.q} must be at most {period:.4g}, so that the clients do not drift apart.",
        ),
    )


# --- FMGDA ---


def fmgda(k: MinimaxConstants) -> Prescription:
    """Corollary 1 and Remark 1: η_t = h̄/(e_t+t)^(1/3), h̄ = N^(2/3)/L, α_t = β_t = c1η_t², q = (T/N²)^(1/3), B = bq.

    The theorem only limits c and ĉ: here c is 99 % of its strict limit, ĉ = √(17/14400)·c/κ². That is what
    29/480 − 2/480 − 30κ⁴(ĉ/c)² ≥ 0 in the proof needs; the printed 17/1440 and 11/2880 are too large for it.
    """
    q = _floor((k.T / k.N**2) ** (1 / 3))
    h = k.N ** (2 / 3) / k.L
    c1 = 1 / (20 * k.L * q * h**3) + 60 * k.L**2 / (k.b * k.N)
    eta = CubeRoot(scale=h, start=k.e_factor * (k.L * q * h) ** 3)
    c = k.c or 0.99 * _minimax_limit(k)
    c_hat = k.c_hat or math.sqrt(17 / 14400) * c / k.kappa**2
    return Prescription(
        method="fmgda",
        constants=k,
        steps={"eta": eta, "c_hat": c_hat, "c": c, "alpha": Squared(c1, eta), "beta": Squared(c1, eta)},
        q=q,
        B=k.b * q,
        derived={"kappa": k.kappa, "L": k.L, "h_bar": h, "c1": c1},
    )


def _minimax_limit(k: MinimaxConstants) -> float:
    return min(1 / 6, 1 / (6 * k.L), k.mu / (6 * k.L))


def fmgda_bound(p: Prescription, printed: bool = False) -> Bound:
    """Eq. 57, from which Corollary 1 follows, evaluated at the chosen η_t and c1 instead of their upper bounds.

    Σ η_t³ is summed exactly (with the prescribed q the schedule is flat up to T); `printed` bounds it by
    h̄³ ln(T+1) as the paper does. The dual variance carries 5κ²c2²/(2L²), which is what Γ_t gives; from
    Eq. 53 on it is printed with 5/(μ²L_f²).
    """
    k, eta = _kind(p, MinimaxConstants), p["eta"]
    c_hat, c = _number(p, "c_hat"), _number(p, "c")
    c1, c2 = _ratio(p, "alpha"), _ratio(p, "beta")
    span = at(eta, k.T) * k.T
    cubes = 2 * _sum_of_cubes(eta, k.T, first=1, printed=printed) / span
    start = k.b * k.sigma**2 / (k.L**2 * p.B * at(eta, 0) * span)
    both = (c1**2 + c2**2) / k.L**2
    return Bound(
        "(1/T) Σ E‖∇Φ(θ̄_t)‖²",
        {
            "initial gap": 2 * k.F0 / (c_hat * span),
            "initial dual distance": 12 * k.L_f**2 * k.w0 / (c * k.mu * span),
            "initial primal estimate": start / 20,
            "initial dual estimate": 2.5 * k.kappa**2 * start,
            "primal variance": cubes * k.sigma**2 * c1**2 / (20 * k.L**2),
            "dual variance": cubes * 2.5 * k.kappa**2 * k.sigma**2 * c2**2 / k.L**2,
            "drift by variance": cubes * k.sigma**2 * both / (20 * k.b),
            "drift by heterogeneity": cubes * k.zeta**2 * both / 8,
        },
    )


def fmgda_violated(p: Prescription) -> list[str]:
    """Theorem 1 and its proof: limits on c, ĉ, c1 and η_0 ≤ 1/(20Lq), which the corollary's 1728 exceeds."""
    k, eta = _kind(p, MinimaxConstants), p["eta"]
    c_hat, c, c1 = _number(p, "c_hat"), _number(p, "c"), max(_ratio(p, "alpha"), _ratio(p, "beta"))
    limit, rate = _minimax_limit(k), 1 / (20 * k.L * p.q)
    ratio, weight = math.sqrt(17 / 14400) * c / k.kappa**2, 90 * k.L**2 / (k.b * k.N)
    first = at(eta, 0)
    return _broken(
        (k.L_f >= 1, f"L_f = {k.L_f:.4g} must be at least 1, as the proof takes it."),
        (k.L_f >= k.mu, f"mu = {k.mu:.4g} must be at most L_f = {k.L_f:.4g}."),
        (
            max(c, c_hat) < limit,
            f"c = {c:.4g} and c_hat = {c_hat:.4g} must lie below min(1/6, 1/(6L), mu/(6L)) = {limit:.4g}.",
        ),
        (_at_most(c_hat, ratio), f"c_hat = {c_hat:.4g} must be at most sqrt(17/14400) c/kappa^2 = {ratio:.4g}."),
        (_at_most(c1, weight), f"c1 = {c1:.4g} must be at most 90 L^2/(b N) = {weight:.4g}, so b <= 600 q N."),
        (
            _at_most(first, rate),
            f"eta_0 = {first:.4g} must be at most 1/(20 L q) = {rate:.4g}, which e_factor = 8000 ensures.",
        ),
    )


# --- FAFED ---


def fafed(k: AdaptiveConstants) -> Prescription:
    """Theorem 2 and Remark 1: η_t = ρh̄/(w_t+t)^(1/3), h̄ = N^(2/3)/L, α_{t+1} = cη_t², q = (T/N²)^(1/3), B = bq.

    w_t = max(3/2, 1728L³q³h̄³ − t): the theorem prints I for q and a stray inequality.
    """
    q = _floor((k.T / k.N**2) ** (1 / 3))
    h = k.N ** (2 / 3) / k.L
    c = 1 / (12 * k.L * q * h**3 * k.rho**2) + 60 * k.L**2 / (k.b * k.N * k.rho**2)
    eta = CubeRoot(scale=k.rho * h, start=1728 * (k.L * q * h) ** 3)
    return Prescription(
        method="fafed",
        constants=k,
        steps={"eta": eta, "alpha": Squared(c, eta, lag=1)},
        q=q,
        B=k.b * q,
        derived={"h_bar": h, "c": c},
    )


def fafed_bound(p: Prescription, printed: bool = False) -> Bound:
    """Eq. 50 on the mean of M_t, evaluated at the chosen η_t and c.

    Σ η_t³ is summed exactly (with the prescribed q the schedule is flat up to T); `printed` bounds it by
    ρ³h̄³(ln T + 1) as the paper does. Theorem 2 simplifies it with two slips: its first term lacks a factor
    1/ρ, and its 3ζ²/2 must read 3ζ².
    """
    k, eta, c = _kind(p, AdaptiveConstants), p["eta"], _ratio(p, "alpha")
    span = at(eta, k.T) * k.T
    cubes = _sum_of_cubes(eta, k.T, first=0, printed=printed) * c**2 / (k.L**2 * span)
    return Bound(
        "(1/T) Σ E M_t",
        {
            "initial gap": k.F0 / (k.rho * span),
            "initial estimate": k.b * k.sigma**2 / (24 * k.L**2 * p.B * at(eta, 0) * span),
            "variance": cubes * 5 * k.sigma**2 / 24,
            "heterogeneity": cubes * 3 * k.zeta**2 / 8,
        },
    )


def fafed_gradient_bound(p: Prescription) -> float:
    """Theorem 2 on (1/T) Σ E‖∇f(x̄_t)‖: G'·√(mean of M_t), G' = 4√(σ² + G² + ρ²)."""
    k = _kind(p, AdaptiveConstants)
    return 4 * math.sqrt(k.sigma**2 + k.G**2 + k.rho**2) * math.sqrt(fafed_bound(p).total)


def fafed_violated(p: Prescription) -> list[str]:
    """Theorem 2: η_0 ≤ ρ/(12Lq) and 60 ≤ c·bNρ²/L² ≤ 120 (the theorem prints ρ for ρ² here)."""
    k, c = _kind(p, AdaptiveConstants), _ratio(p, "alpha")
    first, rate = at(p["eta"], 0), k.rho / (12 * k.L * p.q)
    unit = k.L**2 / (k.b * k.N * k.rho**2)
    return _broken(
        (_at_most(first, rate), f"eta_0 = {first:.4g} must be at most rho/(12 L q) = {rate:.4g}."),
        (
            _at_most(60 * unit, c),
            f"alpha/eta^2 = {c:.4g} must be at least 60 L^2/(b N rho^2) = {60 * unit:.4g}.",
        ),
        (
            _at_most(c, 120 * unit),
            f"alpha/eta^2 = {c:.4g} must be at most 120 L^2/(b N rho^2) = {120 * unit:.4g}, so b <= 720 q N.",
        ),
    )


# --- STEM ---


def stem(k: StemConstants) -> Prescription:
    """Khanduri et al. 2021: η_t = κ̄/(w_t + σ²t)^(1/3), a_{t+1} = cη_t², q = (T/N²)^(1/3), B = bq.

    Unless given, κ̄ = (bN)^(2/3)σ^(2/3)/L, c = 64L²/(bN) + σ²/(24κ̄³Lq), and w_t is the largest of 2σ²,
    4096L³q³κ̄³ − σ²t and c³κ̄³/(4096L³q³), so that η_t ≤ 1/(16Lq). A given w is constant in t.
    """
    if k.sigma == 0:
        raise NestfedError("STEM's schedule needs sigma > 0: with exact gradients a constant step serves.")
    q = _floor((k.T / k.N**2) ** (1 / 3))
    kappa = k.kappa_bar or (k.b * k.N) ** (2 / 3) * k.sigma ** (2 / 3) / k.L
    c = k.c or 64 * k.L**2 / (k.b * k.N) + k.sigma**2 / (24 * kappa**3 * k.L * q)
    unit = 4096 * (k.L * q) ** 3
    if k.w is None:
        least = max(2 * k.sigma**2, (c * kappa) ** 3 / unit)
        eta = CubeRoot(scale=kappa, start=unit * kappa**3, least=least, slope=k.sigma**2)
    else:
        eta = CubeRoot(scale=kappa, start=0.0, least=k.w, slope=k.sigma**2)
    return Prescription(
        method="stem",
        constants=k,
        steps={"eta": eta, "a": Squared(c, eta, lag=1)},
        q=q,
        B=k.b * q,
        derived={"kappa_bar": kappa, "c": c},
    )


def stem_violated(p: Prescription) -> list[str]:
    """η_0 ≤ 1/(16Lq) and cη_0² ≤ 1."""
    k, c = _kind(p, StemConstants), _ratio(p, "a")
    first, rate = at(p["eta"], 0), 1 / (16 * k.L * p.q)
    return _broken(
        (_at_most(first, rate), f"eta_0 = {first:.4g} must be at most 1/(16 L q) = {rate:.4g}."),
        (_at_most(c * first**2, 1), f"a_1 = c eta_0^2 = {c * first**2:.4g} must be at most 1."),
    )


# --- The table ---


@dataclass(frozen=True)
class Method:
    """A row of the table: which constants, which rules."""

    title: str
    source: str
    constants: type[Constants]
    prescribe: Callable[[Any], Prescription]
    bound: Callable[[Prescription], Bound] | None
    violated: Callable[[Prescription], list[str]]

    @property
    def required(self) -> list[str]:
        """Constants without a default."""
        return [f.name for f in fields(self.constants) if f.default is MISSING]

    @property
    def optional(self) -> dict[str, Any]:
        """Constants with their defaults; None means derived from the others."""
        return {f.name: f.default for f in fields(self.constants) if f.default is not MISSING}


_WU = "Wu et al. 2023, "
METHODS: dict[str, Method] = {
    "fcsg": Method("FCSG", _WU + "Theorem 4.1", ConditionalConstants, fcsg, fcsg_bound, fcsg_violated),
    "fcsg-m": Method("FCSG-M", _WU + "Theorem 4.4", ConditionalConstants, fcsg_m, fcsg_m_bound, fcsg_m_violated),
    "acc-fcsg-m": Method(
        "Acc-FCSG-M",
        _WU + "Theorem 4.7",
        ConditionalConstants,
        acc_fcsg_m,
        acc_fcsg_m_bound,
        acc_fcsg_m_violated,
    ),
    "local-scgdm": Method(
        "Local-SCGDM",
        "Gao, Li, Huang 2022, Theorem 3.4",
        CompositionalConstants,
        local_scgdm,
        local_scgdm_bound,
        local_scgdm_violated,
    ),
    "fmgda": Method(
        "FMGDA",
        "On the Convergence of Federated Deep AUC Maximization, Theorem 1",
        MinimaxConstants,
        fmgda,
        fmgda_bound,
        fmgda_violated,
    ),
    "fafed": Method("FAFED", "Wu et al. 2023, Theorem 2", AdaptiveConstants, fafed, fafed_bound, fafed_violated),
    "stem": Method("STEM", "Khanduri et al. 2021", StemConstants, stem, None, stem_violated),
}


def method(name: str) -> Method:
    """The row of a method; an unknown name is answered with the nearest one."""
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        near = difflib.get_close_matches(key, METHODS, n=1)
        hint = f"did you mean {near[0]}" if near else f"choose {_and(METHODS).replace(' and ', ' or ')}"
        raise NestfedError(f"There is no theorem for {name!r}: {hint}.")
    return METHODS[key]


def prescribe(name: str, **constants: Any) -> Prescription:
    """What the theorem of a method prescribes for a problem with these constants."""
    row = method(name)
    missing = [n for n in row.required if constants.get(n) is None]
    if missing:
        rest = ", ".join(n if v is None else f"{n}={v:g}" for n, v in row.optional.items())
        raise NestfedError(f"{row.title} needs {_and(missing)}; optional are {rest}.")
    known = [*row.required, *row.optional]
    for n in constants:
        if n not in known:
            near = difflib.get_close_matches(n, known, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise NestfedError(f"{row.title} has no constant {n!r}{hint}; it knows {_and(known)}.")
    return row.prescribe(row.constants(**constants))
