"""What a model uses: permutation importance by query, and the coefficients of a linear score in the columns' own units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from nestfed.core import NestfedError
from nestfed.data.encoding import TableEncoding
from nestfed.metrics import Estimate, find
from nestfed.queries.base import TEST, Ask
from nestfed.queries.guard import steady
from nestfed.queries.influence import applicable
from nestfed.queries.scores import LOG_ODDS
from nestfed.study.counts import Candidate, count
from nestfed.study.decide import Calibration
from nestfed.study.intervals import range_of, symmetric
from nestfed.study.judge import moments
from nestfed.study.metric_table import ALL

CASES = 24
"""The most permuted versions of a model in one question."""


@dataclass(frozen=True)
class Importance:
    """What a model loses if the rows of a column are shuffled inside every site."""

    column: str
    loss: Estimate
    """How much worse the metric gets, with its 95 % interval; near 0 if the model does not use the column."""
    between: float
    """The standard deviation between permutations."""


def importance(
    ask: Ask,
    model: Candidate,
    inputs: Mapping[str, Sequence[int]],
    *,
    kind: str = LOG_ODDS,
    metric: str = "auroc",
    repeats: int = 5,
    seed: int = 0,
    part: str = TEST,
) -> tuple[Importance, ...]:
    """Return how much worse a metric gets if a column is permuted, the most important column first.

    - `inputs`: the numbers of the model inputs of every column, from `inputs_by_column`.
    - `repeats`: permutations of each column, whose mean is reported.

    Columns that resemble each other share their importance: each alone can be replaced by the others.
    """
    applicable(metric, kind)
    if repeats < 1:
        raise NestfedError(f"repeats must be at least 1, not {repeats}.")
    ask = steady(ask)
    found, names, step = [], list(inputs), max(1, CASES // repeats)
    for columns in (names[i : i + step] for i in range(0, len(names), step)):
        shuffled = {
            (column, r): replace(model, permuted=tuple(inputs[column]), seed=seed * repeats + r)
            for column in columns
            for r in range(repeats)
        }
        named = {f"{column} {r}": one for (column, r), one in shuffled.items()}
        counts = count(ask, {"": model, **named}, kind, part=part)
        there = moments(ask, counts, [metric])[ALL]
        values = np.array([one.value for one in there.values[0]])
        sign, (low, high) = (1 if find(metric).higher else -1), range_of(metric)
        for c, column in enumerate(columns):
            mine = slice(1 + c * repeats, 1 + (c + 1) * repeats)
            weights = np.zeros(len(values))
            weights[0], weights[mine] = sign, -sign / repeats
            loss = symmetric(float(weights @ values), there.variance(0, weights), (low - high, high - low))
            between = float(values[mine].std(ddof=1)) if repeats > 1 else math.nan
            found.append(Importance(column, loss, between))
    return tuple(sorted(found, key=lambda one: -one.loss.value))


def inputs_by_column(encoding: TableEncoding) -> dict[str, list[int]]:
    """Return for every column of a table the numbers of its model inputs, "is missing" included."""
    features = [column.name for column in encoding.schema for _ in range(len(column))]
    found: dict[str, list[int]] = {}
    for i, name in enumerate([*features, *(features[k] for k in encoding.marked)]):
        found.setdefault(name, []).append(i)
    return found


def coefficients(
    parameters: np.ndarray, encoding: TableEncoding, calibration: Calibration | None = None
) -> pd.DataFrame:
    """Return the coefficients of a linear score on the calibrated log-odds, by model input.

    - `per_deviation`: for one standard deviation of the input, 1 for "is missing".
    - `per_unit`: for one unit of the column; `odds_ratio` is its exponential.

    The last line is the intercept: the log-odds where every input has its mean and nothing is missing.
    """
    names = encoding.inputs
    if len(parameters) != len(names) + 1:
        raise NestfedError(
            f"A linear score of {len(names)} inputs has {len(names) + 1} parameters, not {len(parameters)}: use permutation "
            "importance for other models."
        )
    a, b = (calibration or Calibration()).at()
    weights = a * np.asarray(parameters[:-1], np.float64)
    scale = np.concatenate(
        [encoding.deviation if encoding.scaled else np.ones(len(encoding.features)), np.ones(len(encoding.marked))]
    )
    per_unit = np.append(weights / scale, a * float(parameters[-1]) + b)
    with np.errstate(over="ignore"):  # of a number, whose units may be large, it means nothing
        table = {"per_deviation": np.append(weights, math.nan), "per_unit": per_unit, "odds_ratio": np.exp(per_unit)}
    return pd.DataFrame(table, index=pd.Index([*names, "(intercept)"], name="input"))
