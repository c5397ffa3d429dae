"""FCSG, FCSG-M and Acc-FCSG-M."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from nestfed.core import NestfedError
from nestfed.theory.base import (
    GRADIENT,
    METHODS,
    Bound,
    Constants,
    Method,
    Prescription,
    at_most,
    broken,
    ceil,
    floor,
    kind,
    number,
)


@dataclass(frozen=True, kw_only=True)
class ConditionalConstants(Constants):
    """FCSG's family: f is L_f-Lipschitz and S_f-smooth, g likewise, σ_g² bounds the variance of g.

    m is the inner batch, prescribed unless given; B is the initial batch of FCSG and FCSG-M.
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
            raise NestfedError("S_f and S_g cannot both be 0: F would be linear, without a minimum.")

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


def fcsg(k: ConditionalConstants) -> Prescription:
    """Corollary 4.2: α = √(N/T)/(6S_F), q = (T/N³)^(1/4), and m = ε^-2 = √(NT) (Remark 4.3)."""
    alpha = math.sqrt(k.N / k.T) / (6 * k.S_F)
    return Prescription(
        method="fcsg",
        constants=k,
        steps={"alpha": alpha},
        q=floor((k.T / k.N**3) ** 0.25),
        B=k.B or k.b,
        m=k.m or ceil(math.sqrt(k.N * k.T)),
        derived={"S_F": k.S_F},
    )


def fcsg_bound(p: Prescription) -> Bound:
    """Theorem 4.1, with 78 in the drift term: Lemma B.1 and Eq. 26 give 2·39, where the theorem prints 42.

    Corollary 4.2 prints 1/6 and 19/9 where these terms give 1/3 and 13/6.
    """
    k, alpha = kind(p, ConditionalConstants), number(p, "alpha")
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
    k, alpha = kind(p, ConditionalConstants), number(p, "alpha")
    limit = 1 / (6 * p.q * k.S_F)
    return broken(
        (at_most(alpha, limit), f"alpha = {alpha:.4g} must be at most 1/(6 q S_F) = {limit:.4g}."),
    )


def fcsg_m(k: ConditionalConstants) -> Prescription:
    """Corollary 4.5: FCSG's α and q, with β = 5S_Fα (Theorem 4.4 prints 5S_Fη, but has no η)."""
    base = fcsg(k)
    alpha = number(base, "alpha")
    return replace(base, method="fcsg-m", steps={"alpha": alpha, "beta": 5 * k.S_F * alpha})


def fcsg_m_bound(p: Prescription) -> Bound:
    """Theorem 4.4, with 12 in the drift term: Lemma C.3 and the proof have 12L_f²L_g², the theorem prints 3.

    Corollary 4.5 prints 112/3 for the drift where this gives 112/15.
    """
    k, alpha, beta = kind(p, ConditionalConstants), number(p, "alpha"), number(p, "beta")
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
    k, alpha, beta = kind(p, ConditionalConstants), number(p, "alpha"), number(p, "beta")
    rate = alpha * k.S_F
    least = 4 * rate / math.sqrt(1 - rate) if rate < 1 else math.inf
    return fcsg_violated(p) + broken(
        (0 < beta <= 1, f"beta = {beta:.4g} must be in (0, 1]."),
        (
            at_most(least, beta),
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
        q=floor(root),
        B=k.B or ceil(root),
        m=k.m or ceil((k.N * k.T) ** (2 / 3)),
        derived={"S_F": k.S_F, "c": c},
    )


def acc_fcsg_m_bound(p: Prescription) -> Bound:
    """Theorem 4.7 with c = β/α², and L_f²L_g² in the last term: it prints L_f², but uses Lemma A.2 c."""
    k, alpha, beta = kind(p, ConditionalConstants), number(p, "alpha"), number(p, "beta")
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
    k, alpha, beta = kind(p, ConditionalConstants), number(p, "alpha"), number(p, "beta")
    limit = 1 / (12 * p.q * k.S_F)
    unit = (k.S_F * alpha) ** 2
    least, most = 30 / (k.b * k.N) * unit, 81 * p.q * unit
    return broken(
        (at_most(alpha, limit), f"alpha = {alpha:.4g} must be at most 1/(12 q S_F) = {limit:.4g}."),
        (0 < beta <= 1, f"beta = {beta:.4g} must be in (0, 1]."),
        (
            at_most(least, beta),
            f"beta = {beta:.4g} must be at least 30 S_F^2 alpha^2 / (b N) = {least:.4g}.",
        ),
        (at_most(beta, most), f"beta = {beta:.4g} must be at most 81 q S_F^2 alpha^2 = {most:.4g}."),
    )


_WU = "Wu et al. 2023, "
METHODS |= {
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
}
