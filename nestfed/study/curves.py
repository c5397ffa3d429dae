"""Curves of a judged model, from counts of its calibrated scores: net benefit, and predicted against observed frequency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.queries.tally import Tally
from nestfed.report.page import Figure, Line
from nestfed.study.decide import EDGES, Confusion
from nestfed.study.intervals import proportion


@dataclass(frozen=True)
class DecisionCurve:
    """Net benefit by threshold (Vickers and Elkin 2006): of the model, and of calling every row positive; of none it is 0."""

    probability: tuple[float, ...]
    model: tuple[float, ...]
    everybody: tuple[float, ...]

    def _beneficial(self) -> tuple[list[float], list[float]]:
        """Return the net benefit of calling every row positive where it is not far below 0, which would hide the model's."""
        least = -max(self.everybody) / 2
        kept = [(p, v) for p, v in zip(self.probability, self.everybody) if v >= least]
        return [p for p, _ in kept], [v for _, v in kept]

    def figure(self, name: str) -> Figure:
        """Return the curve for a report."""
        return Figure(
            "Decision curve", "threshold probability", "net benefit",
            [
                Line(name, self.probability, self.model),
                Line("call everybody positive", *self._beneficial(), "dashed"),
                Line("call nobody positive", self.probability, [0.0] * len(self.probability), "dashed"),
            ],
        )  # fmt: skip


def decision_curve(tally: Tally, probabilities: Sequence[float] = tuple(np.arange(1, 100) / 100)) -> DecisionCurve:
    """Return the net benefit of a calibrated model at thresholds."""
    if not all(0 < p < 1 for p in probabilities):
        raise NestfedError("The thresholds of a decision curve are probabilities between 0 and 1.")
    share = float(tally.rows[0] / tally.rows.sum())
    return DecisionCurve(
        tuple(float(p) for p in probabilities),
        tuple(Confusion.of(tally, p).net_benefit(p) for p in probabilities),
        tuple(share - p / (1 - p) * (1 - share) for p in probabilities),
    )


@dataclass(frozen=True)
class Reliable:
    """Rows with similar predictions: the mean prediction, and the share of positives with its interval."""

    predicted: float
    observed: Estimate
    rows: int


def calibration_curve(tally: Tally, parts: int = 10) -> tuple[Reliable, ...]:
    """Return predicted and observed probabilities in parts with about equally many rows, from the lowest."""
    both = tally.histogram
    rows = both.sum(0)
    ends = np.concatenate([[0.0], EDGES, [1.0]])
    middle = (ends[1:] + ends[:-1]) / 2
    part = np.minimum((np.cumsum(rows) - rows / 2) * parts // max(rows.sum(), 1), parts - 1).astype(int)
    share = tally.independent[2] / max(float(rows.sum()), 1.0)
    found = []
    for i in range(parts):
        mine = part == i
        count, hits = int(rows[mine].sum()), float(both[0][mine].sum())
        if count:
            observed = proportion(Estimate(hits, hits, hits), count, share * count)
            found.append(Reliable(float(rows[mine] @ middle[mine] / count), observed, count))
    return tuple(found)
