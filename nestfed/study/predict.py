"""Use a trained model: predictions for the rows of a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.core import MOST_NAMES, NestfedError
from nestfed.study.tables import read_table
from nestfed.study.train import KINDS


def load(place: Path) -> tuple[Any, dict[str, Any]]:
    """Load a model of `nestfed train`, from its own directory or that of the training run."""
    found = next((p for p in (place, place / "model") if (p / "table.json").is_file()), None)
    if found is None:
        raise NestfedError(f"{place} contains no model: expected the output directory of `nestfed train`.")
    try:
        table = json.loads((found / "table.json").read_text(encoding="utf-8"))
        kind = KINDS[table["objective"]]
    except (ValueError, LookupError, TypeError) as error:
        raise NestfedError(f"{found / 'table.json'} cannot be read: {error}.") from error
    return kind.load(found), table


def predict(place: Path, file: Path, out: Path) -> int:
    """Write the probability of each class for the rows of a table; return the number of rows."""
    import pandas as pd

    estimator, table = load(place)
    how = estimator.scale_.table
    raw = read_table(file, how)
    needed = list(how.needed) or [column.name for column in estimator.scale_.schema]
    if missing := [name for name in needed if name not in raw]:
        has = ", ".join(map(str, [*raw][:MOST_NAMES]))
        raise NestfedError(
            f"{file} has no column {' and no column '.join(map(repr, missing[:MOST_NAMES]))}, which the model needs; it has {has}."
        )
    frame = pd.DataFrame({name: raw[name] for name in (how.used or needed) if name in raw})
    if not len(frame):
        raise NestfedError(f"{file} has no rows.")
    values = estimator.predict_proba(frame)
    classes = table["classes"]
    answers = np.asarray(classes)[estimator.predict(frame)]
    binary = len(classes) == 2
    head = ["row", *(["probability"] if binary else [f"probability of {c}" for c in classes]), "prediction"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(head)
        for i, (p, answer) in enumerate(zip(values, answers), 1):
            writer.writerow([i, *(f"{v:.6f}" for v in (p[1:] if binary else p)), answer])
    return len(frame)
