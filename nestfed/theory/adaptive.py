"""FAFED and STEM."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nestfed.core import NestfedError, at
from nestfed.theory.base import (
    METHODS,
    Bound,
    Constants,
    CubeRoot,
    Method,
    Prescription,
    Squared,
    at_most,
    broken,
    floor,
    kind,
    ratio,
    sum_of_cubes,
)


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


def fafed(k: AdaptiveConstants) -> Prescription:
    """Theorem 2 and Remark 1: η_t = ρh̄/(w_t+t)^(1/3), h̄ = N^(2/3)/L, α_{t+1} = cη_t², q = (T/N²)^(1/3), B = bq.

    w_t = max(3/2, 1728L³q³h̄³ − t): the theorem prints I for q and a stray inequality. It bounds (1/T) Σ E‖∇f(x̄_t)‖ by
    G'·√(mean of E M_t) with G' = 4√(σ² + G² + ρ²).
    """
    q = floor((k.T / k.N**2) ** (1 / 3))
    h = k.N ** (2 / 3) / k.L
    c = 1 / (12 * k.L * q * h**3 * k.rho**2) + 60 * k.L**2 / (k.b * k.N * k.rho**2)
    eta = CubeRoot(scale=k.rho * h, start=1728 * (k.L * q * h) ** 3)
    return Prescription(
        method="fafed",
        constants=k,
        steps={"eta": eta, "alpha": Squared(c, eta, lag=1)},
        q=q,
        B=k.b * q,
        derived={"h_bar": h, "c": c, "G'": 4 * math.sqrt(k.sigma**2 + k.G**2 + k.rho**2)},
    )


def fafed_bound(p: Prescription, printed: bool = False) -> Bound:
    """Eq. 50 on the mean of M_t, evaluated at the chosen η_t and c.

    Σ η_t³ is summed exactly (with the prescribed q the schedule is flat up to T); `printed` bounds it by
    ρ³h̄³(ln T + 1) as the paper does. Theorem 2 simplifies it with two slips: its first term lacks a factor
    1/ρ, and its 3ζ²/2 should be 3ζ².
    """
    k, eta, c = kind(p, AdaptiveConstants), p["eta"], ratio(p, "alpha")
    span = at(eta, k.T) * k.T
    cubes = sum_of_cubes(eta, k.T, first=0, printed=printed) * c**2 / (k.L**2 * span)
    return Bound(
        "(1/T) Σ E M_t",
        {
            "initial gap": k.F0 / (k.rho * span),
            "initial estimate": k.b * k.sigma**2 / (24 * k.L**2 * p.B * at(eta, 0) * span),
            "variance": cubes * 5 * k.sigma**2 / 24,
            "heterogeneity": cubes * 3 * k.zeta**2 / 8,
        },
    )


def fafed_violated(p: Prescription) -> list[str]:
    """Theorem 2: η_0 ≤ ρ/(12Lq) and 60 ≤ c·bNρ²/L² ≤ 120 (the theorem prints ρ for ρ² here)."""
    k, c = kind(p, AdaptiveConstants), ratio(p, "alpha")
    first, rate = at(p["eta"], 0), k.rho / (12 * k.L * p.q)
    unit = k.L**2 / (k.b * k.N * k.rho**2)
    return broken(
        (at_most(first, rate), f"eta_0 = {first:.4g} must be at most rho/(12 L q) = {rate:.4g}."),
        (
            at_most(60 * unit, c),
            f"alpha/eta^2 = {c:.4g} must be at least 60 L^2/(b N rho^2) = {60 * unit:.4g}.",
        ),
        (
            at_most(c, 120 * unit),
            f"alpha/eta^2 = {c:.4g} must be at most 120 L^2/(b N rho^2) = {120 * unit:.4g}, so b <= 720 q N.",
        ),
    )


def stem(k: StemConstants) -> Prescription:
    """Khanduri et al. 2021: η_t = κ̄/(w_t + σ²t)^(1/3), a_{t+1} = cη_t², q = (T/N²)^(1/3), B = bq.

    Unless given, κ̄ = (bN)^(2/3)σ^(2/3)/L, c = 64L²/(bN) + σ²/(24κ̄³Lq), and w_t is the largest of 2σ²,
    4096L³q³κ̄³ − σ²t and c³κ̄³/(4096L³q³), so that η_t ≤ 1/(16Lq). A given w is constant in t.
    """
    if k.sigma == 0:
        raise NestfedError("STEM's schedule needs sigma > 0: with exact gradients a constant step is enough.")
    q = floor((k.T / k.N**2) ** (1 / 3))
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
    k, c = kind(p, StemConstants), ratio(p, "a")
    first, rate = at(p["eta"], 0), 1 / (16 * k.L * p.q)
    return broken(
        (at_most(first, rate), f"eta_0 = {first:.4g} must be at most 1/(16 L q) = {rate:.4g}."),
        (at_most(c * first**2, 1), f"a_1 = c eta_0^2 = {c * first**2:.4g} must be at most 1."),
    )


METHODS |= {
    "fafed": Method("FAFED", "Wu et al. 2023, Theorem 2", AdaptiveConstants, fafed, fafed_bound, fafed_violated),
    "stem": Method("STEM", "Khanduri et al. 2021", StemConstants, stem, None, stem_violated),
}
