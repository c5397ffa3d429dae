"""Shared by all theorems: constants, schedules, bounds and prescriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from nestfed.core import NestfedError, Schedule, at

K = TypeVar("K", bound="Constants")


@dataclass(frozen=True)
class CubeRoot:
    """η_t = scale / (w_t + slope·t)^(1/3) with w_t = max(least, start − slope·t): first constant, then decreasing."""

    scale: float
    start: float
    least: float = 1.5
    slope: float = 1.0

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
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
        """Return the value at iteration t."""
        return 1.0 if t < self.lag else min(1.0, self.c * at(self.eta, t - self.lag) ** 2)

    def __str__(self) -> str:
        return f"{self.c:.4g} · eta({'t' if self.lag == 0 else f't-{self.lag}'})^2"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of every theorem: N clients, T iterations, b examples per batch, F0 the gap F(x_0) − F*."""

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
                    raise NestfedError(f"The constant {f.name} must be at least 0, not {value!r}.")
            elif value <= 0:
                raise NestfedError(f"The constant {f.name} must be positive, not {value!r}.")


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
        """Return one line per term with its share."""
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
"""As stated in the four papers, including the methods that they compare with."""


@dataclass(frozen=True)
class Prescription:
    """The theorem's settings for given constants; use `replace` to evaluate the theorem at other settings."""

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
        """Return a step size or weight by its name in the paper."""
        if name not in self.steps:
            raise NestfedError(f"{self.method} prescribes {join(self.steps)}, but not {name!r}.")
        return self.steps[name]

    def replace(self, **changes: Any) -> Prescription:
        """Return the same problem with other step sizes, weights, q, B or m."""
        own = {k: changes.pop(k) for k in ("q", "B", "m") if k in changes}
        for name in changes:
            self[name]
        return replace(self, steps={**self.steps, **changes}, **own)

    def bound(self) -> Bound | None:
        """Return the theorem's right-hand side at these settings; None for STEM, for which only the schedule exists."""
        rule = METHODS[self.method].bound
        return None if rule is None else rule(self)

    def violated(self) -> list[str]:
        """Return the violated conditions of the theorem, one sentence each."""
        return METHODS[self.method].violated(self)

    def lines(self) -> list[str]:
        """Return settings, bound term by term, conditions and complexity as text."""
        method, k = METHODS[self.method], self.constants
        given = ", ".join(f"{n} = {v:.6g}" for n, v in asdict(k).items() if v is not None)
        rows = [f"{method.title}: {method.source}", f"constants: {given}"]
        if self.derived:
            rows.append("derived: " + ", ".join(f"{n} = {v:.6g}" for n, v in self.derived.items()))
        for name, value in self.steps.items():
            text = str(value) if callable(value) else f"{value:.6g}"
            first = f", {at(value, 1):.4g} at t = 1" if callable(value) else ""
            rows.append(f"{name} = {text}{first}")
        rows.append(f"q = {self.q} iterations per round, {math.ceil(k.T / self.q)} rounds in total")
        rows.append(f"B = {self.B} examples at the start, then b = {k.b}")
        if self.m is not None:
            rows.append(f"m = {self.m} inner examples per outer example")
        bound = self.bound()
        if bound is not None:
            rows += bound.lines()
        broken = self.violated()
        rows += [f"violated: {sentence}" for sentence in broken] or ["conditions of the theorem: all hold"]
        cost = COMPLEXITY[self.method]
        rows.append(f"complexity: {cost.sample_text} samples, {cost.communication_text} rounds")
        return rows


@dataclass(frozen=True)
class Method:
    """A method's theorem: its constants and rules."""

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


METHODS: dict[str, Method] = {}
"""Every method with a theorem, filled by the modules of the families."""


def join(names: Mapping[str, Any] | list[str]) -> str:
    """Return "a, b and c"."""
    words = list(names)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def floor(x: float) -> int:
    """Round down, to at least 1: a shorter round never violates a theorem."""
    return max(1, math.floor(x * (1 + 1e-12)))


def ceil(x: float) -> int:
    """Round up, to at least 1: a larger batch never violates a theorem."""
    return max(1, math.ceil(x * (1 - 1e-12)))


def broken(*checks: tuple[bool, str]) -> list[str]:
    """Return the sentences of the checks that do not hold."""
    return [sentence for holds, sentence in checks if not holds]


def at_most(x: float, limit: float) -> bool:
    """Compare up to rounding."""
    return x <= limit * (1 + 1e-9)


def number(p: Prescription, name: str) -> float:
    """Return a step size or weight that must not depend on t."""
    value = p[name]
    if callable(value):
        raise NestfedError(f"The theorem of {p.method} needs a constant {name}, not a schedule.")
    return float(value)


def _digamma(x: float) -> float:
    """ψ(x) for x > 0, so that Σ_{t<n} 1/(x + t) = ψ(x + n) − ψ(x)."""
    shift = 0.0
    while x < 20:
        shift += 1 / x
        x += 1
    return math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - shift


def sum_of_cubes(eta: Schedule, T: int, first: int, printed: bool) -> float:
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


def ratio(p: Prescription, weight: str) -> float:
    """Return the c in weight = cη²."""
    value, eta = p[weight], p["eta"]
    if isinstance(value, Squared):
        return value.c
    if callable(value) or callable(eta):
        raise NestfedError(f"{p.method}: {weight} must be Squared(c, eta), or a number if eta is a number.")
    return float(value / eta**2)


def kind(p: Prescription, kind: type[K]) -> K:
    """Return the constants as type `kind`."""
    if not isinstance(p.constants, kind):
        raise NestfedError(f"{p.method} needs {kind.__name__}, not {type(p.constants).__name__}.")
    return p.constants


GRADIENT = "(1/T) Σ E‖∇F(x̄_t)‖²"
