"""Protection of the worst site in an estimator: `FederatedClassifier(fair="kl-dro")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from nestfed.algorithms import METHODS, build
from nestfed.core import Algorithm, at_least, unknown, whole
from nestfed.study.sites import DataError

WAYS: Mapping[str, tuple[str, str, float]] = {
    "kl-dro": ("kl-dro", "tau", 0.3),
    "cvar": ("cvar-dro", "rho", 0.5),
    "q-ffl": ("q-ffl", "p", 1.0),
    "agnostic": ("afl", "gamma", 0.1),
}
"""The method, its hyper-parameter that says how strongly it protects, and the usual value."""
SHRINKAGE = 50.0
"""k: a site of 50 rows counts half with its own loss, half with the mean over sites. It is about the ratio of the variance
of one row's cross-entropy, 0.4, to that of the sites' true means, 0.1²."""
MOST = 512
"""The most examples on which a site finds its loss in a round."""


@dataclass(frozen=True)
class Fair:
    """How an estimator protects the site that it serves worst.

    - `way`: "kl-dro", "cvar" (the worst share of sites), "q-ffl" (powers of the losses) or "agnostic" (the worst mixture).
    - `strength`: τ of kl-dro (small = strong), ρ of cvar, p of q-ffl, γ of agnostic; None = 0.3, 0.5, 1, 0.1.
    - `k`: shrinkage: weights use (rows·loss + k·mean loss)/(rows + k), so that sites of few rows do not rule.
    - `alone`: so many steps every site first trains alone; its loss then is subtracted (regret). 0 = no regret.
    """

    way: str = "kl-dro"
    strength: float | None = None
    k: float = SHRINKAGE
    alone: int = 0

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown("protection", self.way, WAYS)
        at_least(self, 0, "k")
        whole("Fair: alone", self.alone, 0)
        self.at(1.0)

    @classmethod
    def of(cls, fair: Fair | str | None) -> Fair | None:
        """Return the protection that an estimator was given, by name or as an object."""
        if fair is None or isinstance(fair, Fair):
            return fair
        if isinstance(fair, str):
            return cls(fair)
        raise DataError(
            f"fair must be {', '.join(WAYS)}, an object such as Fair('kl-dro', 0.1), or None, not {fair!r}."
        )

    @property
    def kind(self) -> type[Algorithm[Any, Any]]:
        """The class of the method."""
        return METHODS[WAYS[self.way][0]]

    @property
    def settings(self) -> dict[str, Any]:
        """The method's hyper-parameters besides its step size."""
        _, name, usual = WAYS[self.way]
        return {name: usual if self.strength is None else self.strength, "k": self.k, "alone": self.alone}

    def finds_losses(self, q: int) -> Callable[[int], bool]:
        """Return whether sites find their losses at an iteration, where a large batch helps."""
        return partial(self.at(1.0).restarts, q=q)

    def at(self, eta: float) -> Algorithm[Any, Any]:
        """Return the method with a step size."""
        return build(self.kind, eta=eta, **self.settings)


def large_batch(sizes: Sequence[int]) -> int:
    """Return the batch on which losses are found, given the examples of each site."""
    return min(MOST, max(1, round(median(sizes))))
