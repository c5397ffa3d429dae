"""Sites with rows, subgroups and models for the tests of judging, and second implementations to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from nestfed.queries.base import TEST, VALIDATION, Rows

A, B = np.array([1.0, 0.3, 0.0]), np.array([0.6, 0.6, 0.2])
"""Two linear models."""
NAMES = ("north", "south", "west")


def rows(
    n: int, seed: int, *, persons: int = 0, positive: float = 0.3, site: str = "", alike: float = 1.0, kind: str = "two"
) -> Rows:
    """Return rows of a site; with `persons`, rows of the same person resemble each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    group = rng.integers(0, persons, n) if persons else None
    shared = alike * rng.normal(size=(persons or 1, 3))[group] if group is not None else 0.0
    logit = np.log(positive / (1 - positive)) + (x + shared) @ [1.2, 0.5, -0.3]
    if group is None:
        y = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    else:
        y = (rng.random(persons)[group] < 1 / (1 + np.exp(-logit))).astype(np.int64)
    target: Any = y if kind == "two" else x @ [1.0, -0.5, 0.2] + rng.normal(size=n)
    inputs = x + shared
    columns = {
        "sex": np.where(rng.random(n) < 0.4, "F", "M"),
        "ward": rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2]),
    }

    def scores_of(w: np.ndarray, some: np.ndarray) -> np.ndarray:
        return some @ w

    return Rows(inputs, target, group, columns, lambda w: inputs @ w, site=site, scores_of=scores_of)


def sites(n: int = 400, seed: int = 0, part: str = TEST, **options: Any) -> list[dict[str, Rows]]:
    """Return three sites that differ in their share of positives."""
    return [
        {part: rows(n, 10 * seed + i, positive=share, site=name, **options)}
        for i, (name, share) in enumerate(zip(NAMES, (0.2, 0.3, 0.5)))
    ]


def both_parts(n: int = 400, seed: int = 0, **options: Any) -> list[dict[str, Rows]]:
    """Return three sites with validation and test rows."""
    first, second = sites(n, 2 * seed, VALIDATION, **options), sites(n, 2 * seed + 1, TEST, **options)
    return [one | other for one, other in zip(first, second)]


def stacked(found: list[dict[str, Rows]], part: str = TEST) -> Rows:
    """Return the rows of all sites as one; the persons of different sites differ."""
    each = [site[part] for site in found]
    x, y = np.concatenate([one.x for one in each]), np.concatenate([one.y for one in each])
    group = None
    if each[0].group is not None:
        group = np.concatenate([one.group + 10**6 * i for i, one in enumerate(each) if one.group is not None])
    columns = {k: np.concatenate([one.columns[k] for one in each]) for k in each[0].columns}
    return Rows(x, y, group, columns, lambda w: x @ w)


def delong(s: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the AUROCs of scores (models, n) and their covariance, transcribed from DeLong et al. (1988)."""
    pos, neg = s[:, y == 1], s[:, y == 0]
    m, n = pos.shape[1], neg.shape[1]
    wins = (pos[:, :, None] > neg[:, None, :]) + 0.5 * (pos[:, :, None] == neg[:, None, :])
    theta, v10, v01 = wins.mean((1, 2)), wins.mean(2), wins.mean(1)
    s10 = (v10 - theta[:, None]) @ (v10 - theta[:, None]).T / (m - 1)
    s01 = (v01 - theta[:, None]) @ (v01 - theta[:, None]).T / (n - 1)
    return theta, s10 / m + s01 / n


def resampled(group: np.ndarray | None, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of a bootstrap sample of persons."""
    if group is None:
        return rng.integers(n, size=n)
    persons, place = np.unique(group, return_inverse=True)
    order = np.argsort(place, kind="stable")
    ends = np.cumsum(np.bincount(place))
    drawn = rng.integers(len(persons), size=len(persons))
    return np.concatenate([order[ends[i] - np.bincount(place)[i] : ends[i]] for i in drawn])
