"""Adapt a model to a new site with labelled rows of its own: recalibrate it, or move its coefficients.

Let ℓ be the log-odds of the common model. With few rows only ℓ' = s·ℓ + t is fitted, shrunk to s = 1, t = 0. With more rows a
linear score also moves its coefficients: ℓ' = ℓ + δ·x + t, under ½λ‖δ‖². No rows leave the model as it is, and with many rows
both reach the fit of the new rows alone.

The rule: with fewer than `FEW` rows (or groups) of either class, recalibrate. Otherwise compare, in this order, the model unchanged,
recalibrated, and with moved coefficients (λ from large to small) by log-loss on rows left out (five folds). Take the first
whose mean loss exceeds the smallest by at most one standard error of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from scipy.special import expit
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from nestfed.core import one_of
from nestfed.data.readers import require_column
from nestfed.queries.solve import Minimum, Sums, newton
from nestfed.study.decide import Calibration
from nestfed.study.model import WHAT, StudyModel
from nestfed.study.rows import class_numbers, how_to_read, whole_table
from nestfed.study.sealed import reject_used
from nestfed.study.sites import DataError

Way = Literal["auto", "recalibrate", "coefficients"]
FEW = 10
FOLDS = 5
SHIFT, SLOPE = 1.0, 4.0
"""Precisions of t and s: standard deviations of 1 and ½ around the common model."""
RIDGES = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)


@dataclass(frozen=True)
class Change:
    """New log-odds: slope·ℓ + shift + x·delta."""

    way: str
    """"unchanged", "recalibrated", or "coefficients" with λ."""
    slope: float = 1.0
    shift: float = 0.0
    delta: np.ndarray | None = None

    def __call__(self, logit: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the new log-odds of rows."""
        made = self.slope * logit + self.shift
        return made if self.delta is None else made + x @ self.delta


@dataclass(frozen=True)
class Adapted:
    """An adapted model, and why it was adapted in this way."""

    model: StudyModel
    change: Change
    losses: Mapping[str, float]
    """The mean log-loss of every candidate on rows left out; empty if the rows were too few to compare."""
    why: str


def adapt_file(
    place: Path, file: Path, out: Path, *, group: str = "", force: bool = False, way: Way = "auto"
) -> Adapted:
    """Write the model adapted to the labelled rows of a table, as a model directory that names its parent's digest."""
    reject_used(out, WHAT, force=force)
    model = StudyModel.load(place)
    table = whole_table(file, how_to_read(model.encoding), [group])
    for name in (model.target, *([group] if group else [])):
        require_column(file, name, dict.fromkeys(map(str, table)))
    groups = table[group].astype(str).to_numpy() if group else None
    found = adapt_table(model, table, table[model.target], where=str(file), groups=groups, way=way)
    return replace(found, model=found.model.save(out, force=force))


def adapt_table(
    model: StudyModel,
    table: pd.DataFrame,
    labels: Any,
    *,
    where: str = "The table",
    groups: np.ndarray | None = None,
    way: Way = "auto",
) -> Adapted:
    """Return the model adapted to the rows of a table and their labels, named as the model's classes."""
    y = class_numbers(pd.Series(np.asarray(labels)), model.classes, f"Target {model.target!r} of {where}")
    if len(y) != len(table):
        raise DataError(f"There are {len(table)} rows and {len(y)} labels; the numbers must be equal.")
    x = model.inputs(table, where).numpy() if len(table) else np.zeros((0, *model.architecture.shape))
    return adapt(model, x, y, groups=groups, way=way)


def adapt(
    model: StudyModel,
    inputs: np.ndarray,
    labels: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    way: Way = "auto",
    seed: int = 0,
) -> Adapted:
    """Return the model adapted to rows of a new site, given as model inputs and class indices.

    - `groups`: for each row, a value such as a patient, whose rows are left out together.
    - `way`: "auto" applies the rule above; "recalibrate"; or "coefficients", with λ by the same comparison.
    - `seed`: of the folds.
    """
    one_of("way", way, ("auto", "recalibrate", "coefficients"))
    if not model.binary:
        raise DataError("Adapting needs a model of two classes: train again with the rows of the new site.")
    if way == "coefficients" and not model.architecture.linear:
        raise DataError("A network with hidden layers can only be recalibrated: leave way out, or train again.")
    x, y = np.asarray(inputs, np.float64), np.asarray(labels, np.int64)
    a, b = model.calibration.at()
    logit = a * model.scores(torch.from_numpy(x)) + b if len(x) else np.zeros(0)
    change, losses, why = choose(x if model.architecture.linear else None, logit, y, groups=groups, way=way, seed=seed)
    return Adapted(_changed(model, change, len(y), why), change, losses, why)


def choose(
    x: np.ndarray | None,
    logit: np.ndarray,
    y: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    way: Way = "auto",
    seed: int = 0,
) -> tuple[Change, dict[str, float], str]:
    """Return the change that the rule takes, the candidates' losses on rows left out, and the reason in a sentence."""
    if not len(y):
        return Change("unchanged"), {}, "There are no rows."
    few = min(len(np.unique(_ids(y, groups, which))) for which in (0, 1))
    if way == "recalibrate" or (few < FEW and way == "auto"):
        reason = (
            f"only {few} {'rows' if groups is None else 'groups'} are of the rarer class"
            if way == "auto"
            else "you asked for it"
        )
        return recalibrated(logit, y), {}, f"Recalibrated, because {reason}."
    moved = [] if x is None else [f"coefficients, λ = {ridge:g}" for ridge in RIDGES]
    names = moved if way == "coefficients" else ["unchanged", "recalibrated", *moved]
    lost = _left_out(names, np.zeros((len(y), 0)) if x is None else x, logit, y, _folds(y, groups, seed))
    mean = lost.mean(1)
    gap = lost - lost[mean.argmin()]
    near = gap.mean(1) <= _errors(gap, groups)
    found = _fitted(names[int(near.argmax())], np.zeros((len(y), 0)) if x is None else x, logit, y)
    hidden = "; networks with hidden layers are only recalibrated" if x is None else ""
    why = f"{found.way.capitalize()}: the first candidate within one standard error of the smallest log-loss{hidden}."
    return found, dict(zip(names, map(float, mean))), why


def recalibrated(logit: np.ndarray, y: np.ndarray) -> Change:
    """Return slope and shift of the log-odds, shrunk to 1 and 0; the slope is shrunk around the rows' mean log-odds."""
    middle = logit.mean()
    slope, shift = minimum(np.stack([logit - middle, np.ones(len(y))], 1), logit, y, np.array([SLOPE, SHIFT])).x
    return Change("recalibrated", 1 + slope, shift - slope * middle)


def moved(x: np.ndarray, logit: np.ndarray, y: np.ndarray, ridge: float) -> Change:
    """Return the change of the coefficients under ½·ridge·‖δ‖², and of the intercept."""
    penalty = np.r_[np.full(x.shape[1], ridge), SHIFT]
    found = minimum(np.c_[x, np.ones(len(y))], logit, y, penalty).x
    return Change(f"coefficients, λ = {ridge:g}", 1.0, float(found[-1]), found[:-1])


def minimum(columns: np.ndarray, offset: np.ndarray, y: np.ndarray, penalty: np.ndarray) -> Minimum:
    """Minimise Σ log-loss(offset + columns·δ) + ½ Σ penalty δ² by Newton's method."""

    def sums(delta: np.ndarray) -> Sums:
        score = offset + columns @ delta
        p = expit(score)
        loss = np.logaddexp(0.0, np.where(y == 1, -score, score)).sum()
        return Sums(float(loss), columns.T @ (p - y), columns.T @ ((p * (1 - p))[:, None] * columns))

    return newton(sums, penalty)


def _fitted(name: str, x: np.ndarray, logit: np.ndarray, y: np.ndarray) -> Change:
    if name == "unchanged":
        return Change(name)
    return recalibrated(logit, y) if name == "recalibrated" else moved(x, logit, y, float(name.split()[-1]))


def _folds(y: np.ndarray, groups: np.ndarray | None, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    folds = min(FOLDS, *(len(np.unique(each)) for each in (_ids(y, groups, 0), _ids(y, groups, 1))))
    if folds < 2:
        raise DataError("Comparing candidates needs at least two rows or groups of each class: use way='recalibrate'.")
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    return list(kind(folds, shuffle=True, random_state=seed).split(np.zeros(len(y)), y, groups))


def _errors(gap: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the standard error of the mean of each line; rows of a group may be alike."""
    place = np.arange(gap.shape[1]) if groups is None else np.unique(groups, return_inverse=True)[1]
    centred = gap - gap.mean(1, keepdims=True)
    by_group = np.stack([np.bincount(place, line) for line in centred])
    return np.asarray(np.sqrt((by_group**2).sum(1)) / gap.shape[1])


def _ids(y: np.ndarray, groups: np.ndarray | None, which: int) -> np.ndarray:
    """Return the groups, or the numbers, of the rows of a class."""
    return (np.arange(len(y)) if groups is None else groups)[y == which]


def _left_out(
    names: Sequence[str],
    x: np.ndarray,
    logit: np.ndarray,
    y: np.ndarray,
    folds: Sequence[tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """Return the log-loss of every candidate on every row, fitted without the row's fold."""
    lost = np.zeros((len(names), len(y)))
    for inside, outside in folds:
        for i, name in enumerate(names):
            score = _fitted(name, x[inside], logit[inside], y[inside])(logit[outside], x[outside])
            lost[i, outside] = np.logaddexp(0.0, np.where(y[outside] == 1, -score, score))
    return lost


def _changed(model: StudyModel, change: Change, rows: int, why: str) -> StudyModel:
    """Return the model with new log-odds; thresholds, metrics and sites of the common model do not apply to it."""
    if change.way == "unchanged":
        return replace(
            model, provenance=replace(model.provenance, parent=model.digest, notes=(*model.provenance.notes, why))
        )
    a, b = model.calibration.at()
    parameters = dict(model.parameters)
    if change.delta is not None:  # slope 1: move the weights so that the calibration may stay
        weight, bias = parameters["head.weight"].double(), parameters["head.bias"].double()
        parameters["head.weight"] = weight + torch.from_numpy(change.delta / a)
        parameters["head.bias"] = bias + change.shift / a
        calibration = Calibration(a, b)
    else:
        calibration = Calibration(change.slope * a, change.slope * b + change.shift)
    notes = [f"Adapted to {rows} rows of a new site. {why}"]
    if change.slope <= 0:
        notes.append("The slope is not positive: the common model ranks the new rows in the wrong order.")
    if model.thresholds:
        notes.append(
            "Thresholds, intervals and site calibrations of the common model were left out: they do not hold here."
        )
    provenance = replace(
        model.provenance,
        parent=model.digest,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics={},
        notes=(*model.provenance.notes, *notes),
    )
    return replace(
        model, parameters=parameters, calibration=calibration, thresholds=(), provenance=provenance, digest=""
    )
