"""Use a released model: predictions and decisions for the rows of a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestfed.core import NestfedError, unknown
from nestfed.files import make_directory, written
from nestfed.study.model import StudyModel
from nestfed.study.rows import Oddities, how_to_read, pieces


@dataclass(frozen=True)
class Predicted:
    """What was predicted, and what was unusual about the rows."""

    rows: int
    positive: int
    """Rows called positive, for two classes."""
    decision: str
    """The rule of the decision, for people; empty without one."""
    notes: Sequence[str]


def predict(
    place: Path, file: Path, out: Path, *, site: str = "", threshold: str = "", keep: Sequence[str] = (),
    times: Sequence[float] = (),
) -> Predicted:  # fmt: skip
    """Write the probability of each class and the decision for the rows of a table.

    - `site`: use this site's own calibration, if it has one.
    - `threshold`: a rule of the model or a probability; by default the model's first rule.
    - `keep`: columns to copy, such as an identifier.
    - `times`: when to predict survival, for a model of the time to an event; empty = the model's own times.
    """
    model = _at(StudyModel.load(place), times)
    model.require_site(site)
    if threshold and not model.binary:
        raise NestfedError(
            f"A threshold needs two classes, but the model has {len(model.classes)}: leave --threshold out."
        )
    if out.resolve() == file.resolve():
        raise NestfedError(f"{out} is the table itself: choose another file with --out.")
    head = ["row", *keep, *_columns(model)]
    if twice := [name for name in head if head.count(name) > 1]:
        raise NestfedError(f"The output would have two columns called {twice[0]!r}: keep other columns.")
    cut, oddities, positive = model.threshold(threshold), Oddities(), 0
    make_directory(out.parent)
    with written(out.parent / f".{out.name}.{os.getpid()}.tmp", lambda: out) as raw:
        stream = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        writer = csv.writer(stream)
        writer.writerow(head)
        for table in pieces(file, how_to_read(model.encoding), keep):
            if not oddities.rows:
                oddities.ignored = _ignored(file, table, model, keep)
            values = model.predictions(model.scores(model.inputs(table, str(file), oddities)), site)
            writer.writerows(_lines(model, table, values, keep, cut))
            positive += int((values[:, 1] >= cut).sum()) if model.binary else 0
        if not oddities.rows:
            raise NestfedError(f"{file} has no rows.")
        stream.flush()
        stream.detach()
    notes = oddities.sentences(model.encoding.schema)
    return Predicted(oddities.rows, positive, _decision(model, threshold, cut), notes)


def _at(model: StudyModel, times: Sequence[float]) -> StudyModel:
    """Return the model with other times at which it predicts survival."""
    if not times:
        return model
    if model.survival is None:
        raise NestfedError("Times need a model of survival, which this is not: leave --time out.")
    if any(not t >= 0 for t in times):
        raise NestfedError(f"Times must be numbers from 0, not {', '.join(f'{t:g}' for t in times)}.")
    return replace(model, survival=replace(model.survival, times=tuple(map(float, times))))


def _columns(model: StudyModel) -> list[str]:
    if model.survival is not None:
        return [f"survival at {t:g}" for t in model.survival.times]
    if not model.classes:
        return ["prediction"]
    return [*(["probability"] if model.binary else [f"probability of {c}" for c in model.classes]), "prediction"]


def _ignored(file: Path, table: pd.DataFrame, model: StudyModel, keep: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that the model does not use; reject columns to keep that the table lacks."""
    for name in keep:
        if name not in table:
            raise unknown("column", name, map(str, table), owner=str(file))
    used = {*how_to_read(model.encoding).columns, model.target, *keep}
    used |= {model.survival.time} if model.survival else set()
    return tuple(str(name) for name in table if name not in used)


def _lines(
    model: StudyModel, table: pd.DataFrame, values: np.ndarray, keep: Sequence[str], cut: float
) -> Iterator[list[Any]]:
    """Return the rows of the output: number, columns to keep, probabilities, decision."""
    kept = table[[*keep]].astype(object).where(table[[*keep]].notna(), "").to_numpy()
    for number, copied, value in zip(table.index + 1, kept, values):
        if not model.classes:
            yield [number, *copied, *(f"{v:.6g}" for v in np.atleast_1d(value))]
            continue
        best = int(value[1] >= cut) if model.binary else int(value.argmax())
        yield [number, *copied, *(f"{v:.6f}" for v in (value[1:] if model.binary else value)), model.classes[best]]


def _decision(model: StudyModel, rule: str, cut: float) -> str:
    if not model.binary:
        return ""
    named = rule or (model.thresholds[0].rule if model.thresholds else "")
    why = f" ({named})" if named and any(one.rule == named for one in model.thresholds) else ""
    default = "" if rule or model.thresholds else ", as the model has no threshold"
    return f"{model.target} = {model.classes[1]} from a probability of {cut:.4g}{why}{default}"
