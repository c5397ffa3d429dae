"""FMGDA."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nestfed.core import at
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
    number,
    ratio,
    sum_of_cubes,
)


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


def fmgda(k: MinimaxConstants) -> Prescription:
    """Corollary 1 and Remark 1: η_t = h̄/(e_t+t)^(1/3), h̄ = N^(2/3)/L, α_t = β_t = c1η_t², q = (T/N²)^(1/3), B = bq.

    The theorem only limits c and ĉ. Here c is 99 % of its strict limit and ĉ = √(17/14400)·c/κ², as
    29/480 − 2/480 − 30κ⁴(ĉ/c)² ≥ 0 in the proof requires; the printed 17/1440 and 11/2880 are too large for it.
    """
    q = floor((k.T / k.N**2) ** (1 / 3))
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
    h̄³ ln(T+1) as the paper does. The dual variance has the factor 5κ²c2²/(2L²), as Γ_t
    gives; from Eq. 53 on it is printed with 5/(μ²L_f²).
    """
    k, eta = kind(p, MinimaxConstants), p["eta"]
    c_hat, c = number(p, "c_hat"), number(p, "c")
    c1, c2 = ratio(p, "alpha"), ratio(p, "beta")
    span = at(eta, k.T) * k.T
    cubes = 2 * sum_of_cubes(eta, k.T, first=1, printed=printed) / span
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
    k, eta = kind(p, MinimaxConstants), p["eta"]
    c_hat, c, c1 = number(p, "c_hat"), number(p, "c"), max(ratio(p, "alpha"), ratio(p, "beta"))
    limit, rate = _minimax_limit(k), 1 / (20 * k.L * p.q)
    most, weight = math.sqrt(17 / 14400) * c / k.kappa**2, 90 * k.L**2 / (k.b * k.N)
    first = at(eta, 0)
    return broken(
        (k.L_f >= 1, f"L_f = {k.L_f:.4g} must be at least 1, as the proof assumes."),
        (k.L_f >= k.mu, f"mu = {k.mu:.4g} must be at most L_f = {k.L_f:.4g}."),
        (
            max(c, c_hat) < limit,
            f"c = {c:.4g} and c_hat = {c_hat:.4g} must be below min(1/6, 1/(6L), mu/(6L)) = {limit:.4g}.",
        ),
        (at_most(c_hat, most), f"c_hat = {c_hat:.4g} must be at most sqrt(17/14400) c/kappa^2 = {most:.4g}."),
        (at_most(c1, weight), f"c1 = {c1:.4g} must be at most 90 L^2/(b N) = {weight:.4g}, so b <= 600 q N."),
        (
            at_most(first, rate),
            f"eta_0 = {first:.4g} must be at most 1/(20 L q) = {rate:.4g}, which e_factor = 8000 ensures.",
        ),
    )


METHODS |= {
    "fmgda": Method(
        "FMGDA",
        "On the Convergence of Federated Deep AUC Maximization, Theorem 1",
        MinimaxConstants,
        fmgda,
        fmgda_bound,
        fmgda_violated,
    ),
}
