"""A released model's performance on new labelled rows, beside the values of its card."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import norm

from nestfed import metrics
from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.report.page import Table
from nestfed.study.adapt import minimum
from nestfed.study.model import StudyModel

LEVEL = 0.95


def judged(model: StudyModel, scores: np.ndarray, y: np.ndarray) -> Table:
    """Return AUROC and calibration on labelled rows, beside the values of the model card."""
    if len(np.unique(y)) < 2:
        raise NestfedError("All new rows have the same class: performance needs rows of both.")
    a, b = model.calibration.at()
    found = {"auroc": auroc(scores, y), **calibration(a * scores + b, y)}
    rows = []
    for name, value in found.items():
        card, verdict = _against(name, value, model.provenance.metrics)
        rows.append([NAMES[name], card, f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})", verdict])
    note = (
        "95 % intervals. AUROC is worse or better if the interval of its difference to the card excludes 0. Calibration is off "
        "if the interval excludes the ideal value: slope 1, and 0 for the mean log-odds."
    )
    return Table("Performance", ["measure", "model card, or ideal", "new", "verdict"], rows, note)


NAMES = {"auroc": "AUROC", "slope": "calibration slope", "level": "calibration in the large (log-odds)"}
IDEAL = {"slope": 1.0, "level": 0.0}


def _against(name: str, value: Estimate, card: Mapping[str, Estimate]) -> tuple[str, str]:
    """Return the value to compare with, and the verdict."""
    if name in IDEAL:
        return f"{IDEAL[name]:g}", "off" if not value.low <= IDEAL[name] <= value.high else "no evidence against it"
    if name not in card or not np.isfinite(card[name].low):
        return "–", "no value to compare with"
    old = card[name]
    gap = value.value - old.value
    half = float(np.hypot((value.high - value.low) / 2, (old.high - old.low) / 2))
    shown = f"{old.value:.3f} ({old.low:.3f} to {old.high:.3f})"
    return shown, "worse" if gap < -half else "better" if gap > half else "no evidence of a change"


def auroc(scores: np.ndarray, y: np.ndarray, level: float = LEVEL) -> Estimate:
    """Return the AUROC with DeLong's interval, computed on the log-odds scale."""
    positive, negative = np.sort(scores[y == 1]), np.sort(scores[y == 0])
    won = _below(negative, positive) / len(negative)
    lost = 1 - _below(positive, negative) / len(positive)
    value = metrics.auroc(scores, y)
    variance = _spread(won) / len(won) + _spread(lost) / len(lost)
    if not 0 < value < 1:
        return Estimate(value, 0.0 if value <= 0 else np.nan, 1.0 if value >= 1 else np.nan)
    half = norm.isf((1 - level) / 2) * np.sqrt(variance) / (value * (1 - value))
    middle = np.log(value / (1 - value))
    return Estimate(value, *(float(1 / (1 + np.exp(-(middle + side * half)))) for side in (-1, 1)))


def _below(sorted_values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return how many values lie below each point, ties counting ½."""
    left, right = (np.searchsorted(sorted_values, at, side=side) for side in ("left", "right"))
    return (left + right) / 2


def _spread(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else float("nan")


def calibration(logit: np.ndarray, y: np.ndarray, level: float = LEVEL) -> dict[str, Estimate]:
    """Return the slope of the outcome on the log-odds, and the mean shift of the log-odds at slope 1, with intervals."""
    z = float(norm.isf((1 - level) / 2))
    both, errors = _logistic(np.stack([logit, np.ones(len(y))], 1), np.zeros(len(y)), y)
    level_, error = _logistic(np.ones((len(y), 1)), logit, y)
    return {
        "slope": Estimate(both[0], both[0] - z * errors[0], both[0] + z * errors[0]),
        "level": Estimate(level_[0], level_[0] - z * error[0], level_[0] + z * error[0]),
    }


def _logistic(columns: np.ndarray, offset: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the coefficients of a logistic regression and their standard errors."""
    found = minimum(columns, offset, y, np.zeros(columns.shape[1]))
    return found.x.tolist(), np.sqrt(np.diag(found.inverse)).tolist()
