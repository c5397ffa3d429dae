"""The coefficients of a released linear model, for standardised inputs and in the columns' own units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestfed.data.design import Design
from nestfed.study.model import StudyModel

INTERCEPT = "(intercept)"


@dataclass(frozen=True)
class Coefficient:
    """What an input adds to the log-odds, or to the prediction of a number."""

    name: str
    standardised: float
    """Per deviation of the training rows."""
    per_unit: float
    """Per unit of the column; for a category and for "is missing", what its presence adds."""


def coefficients(model: StudyModel) -> Sequence[Coefficient]:
    """Return the coefficients of a linear score after calibration, for every class if there are several; of others, none."""
    if not model.architecture.linear:
        return ()
    a, b = model.calibration.at() if model.binary else (1.0, 0.0)
    state = {name: np.asarray(value.double()) for name, value in model.parameters.items()}
    weights, offsets = a * state["head.weight"], a * state["head.bias"] + b
    middle, scale = _units(model)
    found = []
    for number, (row, offset) in enumerate(zip(weights, offsets)):
        prefix = f"{model.classes[number]}: " if len(weights) > 1 else ""
        found.append(Coefficient(prefix + INTERCEPT, float(offset), float(offset - row @ (middle / scale))))
        found += [
            Coefficient(prefix + name, float(w), float(w / s)) for name, w, s in zip(model.encoding.inputs, row, scale)
        ]
    return found


def _units(model: StudyModel) -> tuple[np.ndarray, np.ndarray]:
    """Return what is subtracted from every input and what it is divided by."""
    encoding = model.encoding
    kept = encoding.kept if isinstance(encoding, Design) else np.arange(len(encoding.mean))
    marks = np.zeros(len(encoding.marked) if encoding.scaled else 0)
    if not encoding.scaled:
        return np.zeros(len(kept)), np.ones(len(kept))
    return np.r_[encoding.mean[kept], marks], np.r_[encoding.deviation[kept], marks + 1]
