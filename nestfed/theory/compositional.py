"""Local-SCGDM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from nestfed.theory.base import (
    GRADIENT,
    METHODS,
    Bound,
    Constants,
    Method,
    Prescription,
    at_most,
    broken,
    floor,
    kind,
    number,
)


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


def _largest_beta(k: CompositionalConstants) -> float:
    inner = k.C_g**4 * k.L_f**2
    return math.sqrt(0.125 / (inner / k.gamma**2 + inner / k.gamma + k.L_F**2 / k.alpha**2))


def local_scgdm(k: CompositionalConstants) -> Prescription:
    """Corollary 3.5: η = T^(-1/2), p = T^(1/4) (here q); β is the largest that Theorem 3.4 allows (Remark 3.6)."""
    return Prescription(
        method="local-scgdm",
        constants=k,
        steps={"eta": k.T**-0.5, "alpha": k.alpha, "beta": k.beta or _largest_beta(k), "gamma": k.gamma},
        q=floor(k.T**0.25),
        B=k.b,
        derived={"L_F": k.L_F},
    )


def local_scgdm_bound(p: Prescription) -> Bound:
    """Theorem 3.4, with two corrections from its proof.

    The three variance terms have the factor 4, not 2, because Eq. 41 is divided by βη/2. The initial inner value has
    L_f², not L_g², as in the potential function (Eq. 39). The bound does not improve with the number of clients.
    """
    k, eta = kind(p, CompositionalConstants), number(p, "eta")
    alpha, beta, gamma = number(p, "alpha"), number(p, "beta"), number(p, "gamma")
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
    k, eta = kind(p, CompositionalConstants), number(p, "eta")
    alpha, beta, gamma = number(p, "alpha"), number(p, "beta"), number(p, "gamma")
    most = _largest_beta(replace(k, alpha=alpha, gamma=gamma))
    rate = min(1.0, 1 / (2 * beta * k.L_F))
    period = 1 / (4 * beta * eta * math.sqrt(6 * k.C_f**2 * k.L_g**2 + 16 * k.C_g**4 * k.L_f**2))
    return broken(
        (at_most(alpha * eta, 1), f"alpha eta = {alpha * eta:.4g} must be at most 1."),
        (at_most(gamma * eta, 1), f"gamma eta = {gamma * eta:.4g} must be at most 1."),
        (at_most(beta, most), f"beta = {beta:.4g} must be at most {most:.4g}."),
        (at_most(eta, rate), f"eta = {eta:.4g} must be at most min(1, 1/(2 beta L_F)) = {rate:.4g}."),
        (
            at_most(p.q, period),
            f"q = {p.q} must be at most {period:.4g}, so that the clients do not drift apart.",
        ),
    )


METHODS |= {
    "local-scgdm": Method(
        "Local-SCGDM",
        "Gao, Li, Huang 2022, Theorem 3.4",
        CompositionalConstants,
        local_scgdm,
        local_scgdm_bound,
        local_scgdm_violated,
    ),
}
