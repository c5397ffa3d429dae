"""The partial likelihood of Cox regression, written event by event as in the textbook."""

from __future__ import annotations

from typing import Any

import numpy as np


def minus_log_likelihood(coef: np.ndarray, x: np.ndarray, y: np.ndarray, ties: str, weight: Any = None) -> float:
    """Efron's and Breslow's partial likelihood, as in the textbook: event by event."""
    time, event = y[:, 0], y[:, 1] == 1
    w = np.ones(len(x)) if weight is None else weight
    h, total = x @ coef, 0.0
    for t in np.unique(time[event]):
        tied = np.flatnonzero((time == t) & event)
        all_at_risk, all_tied = (w * np.exp(h))[time >= t].sum(), (w * np.exp(h))[tied].sum()
        for place, i in enumerate(tied):
            share = place / len(tied) if ties == "efron" else 0.0
            total -= w[i] * (h[i] - np.log(all_at_risk - share * all_tied))
    return total
