"""Damped Newton steps on sums that sites send, and the table of coefficients that comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import norm
from scipy.stats import t as student

from nestfed.core import NestfedError
from nestfed.queries.base import Arrays

Errors = Literal["model", "robust", "site"]

TOLERANCE = 1e-8
"""Newton stops when no step is longer than this share of a standard error. The error is then near its square."""
MOST_STEPS = 50
NULL = 1e-10
"""A direction is not identified if its curvature is below this share of the largest, columns scaled alike."""

FLAT = 1e-9
"""The curvature at the solution, as a share of that at 0, below which the solution is taken for infinite."""


class SeparationError(NestfedError):
    """The likelihood has no maximum: some coefficients grow without end."""


@dataclass(frozen=True)
class Sums:
    """An objective summed over the rows of all sites, with its derivatives."""

    value: float
    gradient: np.ndarray
    hessian: np.ndarray


@dataclass(frozen=True)
class Minimum:
    """Where Newton's method stopped; `at` holds the sums there, without the penalty."""

    x: np.ndarray
    at: Sums
    inverse: np.ndarray
    """The pseudo-inverse of the Hessian with the penalty."""
    identified: np.ndarray
    """For each parameter, whether the data and the penalty determine it."""
    iterations: int


def newton(
    sums: Callable[[np.ndarray], Sums],
    penalty: np.ndarray,
    start: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> Minimum:
    """Minimise sums(x) + ½ Σ penalty_j x_j² by x ← x − s (H + P)⁻¹ (g + P x), s = 1, ½, ¼, …

    Directions without curvature at 0, such as those of collinear columns, are left out: the solution is the shortest, with
    columns scaled to equal curvature. Raise a SeparationError if steps do not become small.
    """
    zero = sums(np.zeros(len(penalty)))
    basis, identified = _basis(zero.hessian + np.diag(penalty))
    x, here = np.zeros(len(penalty)), zero
    if start is not None and start.any():
        x, here = start, sums(start)
    for iteration in range(1, MOST_STEPS + 1):
        factor = _factor(basis.T @ (here.hessian + np.diag(penalty)) @ basis, x, names)
        step = -np.linalg.solve(factor, basis.T @ (here.gradient + penalty * x))
        x, here = _shortened(sums, penalty, x, here, basis @ step)
        if np.abs(step).max(initial=0.0) <= TOLERANCE * (1 + np.abs(_scaled(basis, x)).max(initial=0.0)):
            curved = basis.T @ (here.hessian + np.diag(penalty)) @ basis
            if _flat(curved, basis.T @ (zero.hessian + np.diag(penalty)) @ basis):
                raise _error(names, np.abs(x) * np.sqrt(np.maximum(np.diag(zero.hessian), 0)))
            return Minimum(x, here, basis @ np.linalg.inv(curved) @ basis.T, identified, iteration)
    raise _separated(basis @ step, zero, names)


def _basis(curvature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the identified directions as columns, scaled to curvature 1, and which parameters lie inside them."""
    diagonal = np.diag(curvature)
    used = diagonal > 1e-14 * diagonal.max(initial=0.0)
    scale = np.where(used, 1 / np.sqrt(np.where(used, diagonal, 1.0)), 0.0)
    values, vectors = np.linalg.eigh(scale[:, None] * curvature * scale)
    kept = values > NULL * max(values.max(initial=0.0), 1e-300)
    outside = (vectors[:, ~kept] ** 2).sum(1)
    return scale[:, None] * vectors[:, kept], used & (outside < 1e-8)


def _scaled(basis: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a point in units of the basis."""
    lengths = (basis**2).sum(1)
    return x[lengths > 0] / np.sqrt(lengths[lengths > 0])


def _factor(curvature: np.ndarray, x: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the curvature; raise an error where the objective has become flat."""
    if len(curvature) and not np.linalg.cond(curvature) < 1e14:
        raise _error(names, np.abs(x))
    return curvature


def _flat(curved: np.ndarray, before: np.ndarray) -> bool:
    """Return whether nothing is left of the curvature that some direction had at 0: the end of a separated path."""
    scale = 1 / np.sqrt(np.diag(before))
    return bool(np.linalg.eigvalsh(scale[:, None] * curved * scale).min(initial=1.0) < FLAT)


def _separated(step: np.ndarray, zero: Sums, names: Sequence[str]) -> SeparationError:
    return _error(names, np.abs(step) * np.sqrt(np.maximum(np.diag(zero.hessian), 0)))


def _error(names: Sequence[str], size: np.ndarray) -> SeparationError:
    largest = [name for name, s in zip(names, size) if s >= 0.1 * size.max(initial=0.0)]
    which = ", ".join(largest) or "some coefficients"
    return SeparationError(
        f"The coefficients of {which} grow without end: these columns separate the outcomes. Set a ridge penalty, or drop "
        "the columns."
    )


def _shortened(
    sums: Callable[[np.ndarray], Sums], penalty: np.ndarray, x: np.ndarray, here: Sums, step: np.ndarray
) -> tuple[np.ndarray, Sums]:
    """Return the first point x + s·step, s = 1, ½, ¼, …, whose finite objective is not above the old one."""
    old = here.value + penalty @ x**2 / 2
    for halvings in range(40):
        new = x + step / 2**halvings
        there = sums(new)
        value = there.value + penalty @ new**2 / 2
        if np.isfinite(value) and value <= old + 1e-12 * (1 + abs(old)):  # the slack is rounding
            return new, there
    raise NestfedError("The objective does not decrease along Newton's step: check the data for extreme values.")


# ------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Fit:
    """Coefficients of a regression over all sites, with three kinds of standard errors.

    With a ridge penalty the coefficients are shrunk: the intervals cover the shrunk values, not the true ones.
    """

    model: str
    names: tuple[str, ...]
    coef: np.ndarray
    covariance: Mapping[Errors, np.ndarray]
    """By the kind of error: "model" (inverse Hessian), "robust" (sandwich by person or row), "site" (sandwich by site)."""
    log_likelihood: float
    iterations: int
    rows: int
    """The rows of the sites used."""
    sites: tuple[int, ...]
    """The numbers of the sites used."""
    ridge: float = 0.0
    degrees: float = np.inf
    """The degrees of freedom of Student's t; infinite for the normal distribution."""
    left_out: tuple[int, ...] = ()
    """The numbers of the sites that contribute nothing."""
    constant: Mapping[str, int] = field(default_factory=dict)
    """For every model input, the rows at sites where it has one value, by itself or by the disclosure rule."""
    notes: tuple[str, ...] = ()
    """What a reader must know, in sentences."""

    def standard_errors(self, errors: Errors = "model") -> np.ndarray:
        """Return the standard errors; NaN where the data do not determine a coefficient."""
        if errors not in self.covariance:
            raise NestfedError(f"There are no {errors!r} errors; expected {', '.join(map(repr, self.covariance))}.")
        return np.sqrt(np.diag(self.covariance[errors]))

    def summary(self, errors: Errors = "model", level: float = 0.95, *, ratio: bool = False) -> pd.DataFrame:
        """Return the table of coefficients: estimate, standard error, z, p, interval.

        - `errors`: "model", "robust" or "site".
        - `ratio`: adds exp(coef) with its interval: odds ratios, hazard ratios.
        """
        if not 0 < level < 1:
            raise NestfedError(f"level must be between 0 and 1, not {level}.")
        error = self.standard_errors(errors)
        law = student(self.degrees) if np.isfinite(self.degrees) else norm
        z = self.coef / error
        half = law.ppf((1 + level) / 2) * error
        table = {"coef": self.coef, "se": error, "z": z, "p": 2 * law.sf(np.abs(z))}
        table |= {"low": self.coef - half, "high": self.coef + half}
        if ratio:
            table |= {"ratio": np.exp(self.coef)}
            table |= {f"ratio_{k}": np.exp(table[k]) for k in ("low", "high")}
        return pd.DataFrame(table, index=pd.Index(self.names, name="column"))

    def transformed(self, matrix: np.ndarray, names: Sequence[str]) -> Fit:
        """Return the fit for coefficients matrix @ coef, such as those in the columns' own units."""
        # 0 · NaN: a coefficient that is not determined must not spoil those that do not use it.
        made = {}
        for kind, v in self.covariance.items():
            lost = np.isnan(np.diag(v))
            found = matrix @ np.where(lost[:, None] | lost, 0.0, v) @ matrix.T
            spoiled = (np.abs(matrix[:, lost]) > 0).any(1)
            found[spoiled] = found[:, spoiled] = np.nan
            made[kind] = found
        return replace(self, names=tuple(names), coef=matrix @ self.coef, covariance=made)


def covariances(
    found: Minimum, by_row: np.ndarray | None, by_site: np.ndarray | None, scale: float = 1.0
) -> dict[Errors, np.ndarray]:
    """Return the covariances of a minimum: A⁻¹ and the sandwiches A⁻¹ B A⁻¹, A with the penalty.

    - `by_row`, `by_site`: B, the sum of the outer products of the gradients of persons and of sites.
    - `scale`: the variance of the noise of linear regression.
    """
    bread = found.inverse
    made: dict[Errors, np.ndarray] = {"model": scale * bread}
    if by_row is not None:
        made["robust"] = bread @ by_row @ bread
    if by_site is not None:
        made["site"] = bread @ by_site @ bread
    for v in made.values():
        v[~found.identified] = v[:, ~found.identified] = np.nan
    return made


def not_identified(found: Minimum, names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on the coefficients that the data do not determine, or nothing."""
    lost = [name for name, sure in zip(names, found.identified) if not sure]
    if not lost:
        return ()
    return (
        f"The data do not determine the coefficients of {', '.join(lost)} (constant or collinear columns). They are the "
        "shortest solution, without standard errors; predictions are not affected.",
    )


def constant_columns(facts: Mapping[int, Arrays], names: Sequence[str]) -> dict[str, int]:
    """Return for every model input the rows at the sites where it has one value, given the replies with `varies`."""
    rows = [int(reply["used"]) * (1 - reply["varies"]) for reply in facts.values()]
    return {name: int(count) for name, count in zip(names, np.sum(rows, axis=0))}


def disagreement(common: Fit, own: Fit) -> tuple[str, ...]:
    """Return a sentence on coefficients that change when every site has its own intercept or baseline, or nothing.

    The rule: a coefficient changes by more than the standard error of the fit with own intercepts.
    """
    at = {name: i for i, name in enumerate(common.names)}
    errors = own.standard_errors()
    moved = [
        f"{name} ({common.coef[at[name]]:.3g} against {own.coef[i]:.3g})"
        for i, name in enumerate(own.names)
        if name in at and np.isfinite(errors[i]) and abs(own.coef[i] - common.coef[at[name]]) > errors[i]
    ]
    if not moved:
        return ()
    return (
        f"With {own.model} the coefficients of {', '.join(moved)} change by more than a standard error: sites differ in ways "
        "that the columns do not explain.",
    )
