"""From a table's columns to numbers: align, impute, scale. All of it is computed from sums that a site may tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError

FAR = 5.0
"""A feature's largest distance from its mean, in deviations."""

Scaling = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Facts:
    """What a site tells of its training examples: counts and sums, no rows."""

    examples: int = 0
    positives: int = 0
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """Names of a table's features; none if nothing has to be scaled in common."""
    known: np.ndarray = field(default_factory=lambda: np.zeros(0))
    total: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Plan:
    """What all sites have to agree on beside the experiment."""

    clients: int
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    p: float = 0.0
    """The share of positives in the mixture of all sites."""
    features: tuple[str, ...] = ()
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0))
    deviation: np.ndarray = field(default_factory=lambda: np.zeros(0))
    gaps: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """Features that are missing somewhere: "is missing" is a feature of its own."""

    def align(self, x: np.ndarray, features: Sequence[str]) -> np.ndarray:
        """Return a site's columns in the common order; a text that this site never met is 0 everywhere."""
        place = {name: i for i, name in enumerate(features)}
        columns = [x[:, place[f]] if f in place else np.zeros(len(x), x.dtype) for f in self.features]
        return np.stack(columns, 1).astype(np.float64)

    def scale(self, x: np.ndarray, features: Sequence[str]) -> Tensor:
        """Impute by the common mean and scale to the common deviation."""
        return standardised(self.align(x, features), self.mean, self.deviation, self.gaps)


def merge(told: Mapping[str, Facts], clients: int, by_examples: bool = False) -> Plan:
    """Return the plan as far as counts and sums make it; names of sites are for sentences."""
    (first, model), *rest = told.items()
    for name, other in rest:
        if bool(other.features) != bool(model.features) or (not model.features and other.shape != model.shape):
            raise NestfedError(
                f"Sites {first} and {name} hold examples of different kinds or shapes "
                f"({model.shape} and {other.shape}): all must read tables alike, or parts of one data set."
            )
        if other.classes != model.classes:
            raise NestfedError(
                f"Sites {first} and {name} have different classes ({', '.join(model.classes)}; "
                f"{', '.join(other.classes)}): list them in data.classes of the experiment."
            )
    # The share of positives in what the mean objective averages over, as `Prepared.positive_rate` has it.
    rows = [f.examples if by_examples else 1 for f in told.values()]
    shares = [f.positives / max(f.examples, 1) for f in told.values()]
    p = sum(weight * share for weight, share in zip(rows, shares)) / max(sum(rows), 1)
    plan = Plan(clients, model.shape, model.classes, p)
    if not model.features:
        return plan
    features = _common(told)
    known, total, examples = np.zeros(len(features)), np.zeros(len(features)), 0
    for f in told.values():
        place = {name: i for i, name in enumerate(f.features)}
        for j, name in enumerate(features):
            if name in place:
                known[j] += f.known[place[name]]
                total[j] += f.total[place[name]]
            else:
                known[j] += f.examples  # a text that this site never met: 0 in every row
        examples += f.examples
    gaps = known < examples
    count = np.maximum(known, 1)
    shape = (len(features) + int(gaps.sum()),)
    return replace(
        plan, shape=shape, features=features, mean=total / count, deviation=np.ones(len(features)), gaps=gaps
    )


def finish(plan: Plan, squares: Sequence[np.ndarray], told: Mapping[str, Facts]) -> Plan:
    """Return the plan with the common deviation."""
    count = np.zeros(len(plan.features))
    for f in told.values():
        place = {name: i for i, name in enumerate(f.features)}
        count += [f.known[place[name]] if name in place else f.examples for name in plan.features]
    return replace(plan, deviation=deviation(sum(squares) / np.maximum(count, 1), plan.mean))


def _common(told: Mapping[str, Facts]) -> tuple[str, ...]:
    """Return all features: the columns as the first site has them, the texts of a column in alphabetical order."""
    columns: dict[str, set[str]] = {}
    for f in told.values():
        for name in f.features:
            columns.setdefault(name.partition("=")[0], set()).add(name)
    for site, f in told.items():
        if lacking := [n for n, all_ in columns.items() if n in all_ and n not in f.features]:
            raise NestfedError(f"Site {site} has no column {lacking[0]!r} of numbers, which other sites have.")
    return tuple(name for all_ in columns.values() for name in sorted(all_))


def standardise(training: np.ndarray) -> Scaling:
    """Return the map that imputes by the training mean and scales to the training deviation, feature by feature.

    All that clients have to send for it are, for every feature, the count and the sum of their known values, and
    then the sum of squared differences from the common mean. Where a table's training values are missing, a feature
    "is missing" is added: in clinical tables it tells more than the imputed value.
    """
    values = training.astype(np.float64)
    known = np.isfinite(values)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, values, 0.0).sum(0) / count
    squares = (np.where(known, values - mean, 0.0) ** 2).sum(0)
    return partial(standardised, mean=mean, deviation=deviation(squares / count, mean), gaps=known.sum(0) < len(values))


def deviation(variance: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the square root, and 1 for a feature that is constant up to rounding."""
    found = np.sqrt(variance)
    return np.where(found <= 1e-12 * np.maximum(np.abs(mean), 1), 1.0, found)


def standardised(x: np.ndarray, mean: np.ndarray, deviation: np.ndarray, gaps: np.ndarray) -> Tensor:
    """Scale examples, fill what is missing with the mean, and tell of it in further features where there are gaps.

    What lies further than `FAR` deviations from the mean counts as that far: a typing error, or a rare 0/1 feature
    scaled to 50, would otherwise decide which step size is stable.
    """
    missing = ~np.isfinite(x)
    scaled = np.where(missing, 0.0, np.clip((x - mean) / deviation, -FAR, FAR))
    told = [missing[:, gaps]] if x.ndim == 2 else []
    return torch.from_numpy(np.concatenate([scaled, *told], 1).astype(np.float32))
