"""Small released models of every kind, and the tables they were trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from nestfed import FederatedAUC, FederatedClassifier, FederatedLinear, FederatedLogistic
from nestfed.study.model import StudyModel


def table(rows: int = 240, seed: int = 0, shift: float = 0.0) -> pd.DataFrame:
    """Numbers with gaps, categories of which one looks like a number, and three targets."""
    rng = np.random.default_rng(seed)
    age = rng.normal(60 + shift, 12, rows)
    ward = rng.choice(["north", "south", "12"], rows, p=[0.5, 0.3, 0.2])
    lab = np.where(rng.random(rows) < 0.2, np.nan, rng.lognormal(0, 1, rows))
    risk = 0.06 * (age - 60) + 0.8 * (ward == "south") + 0.4 * np.log(np.nan_to_num(lab, nan=1.0))
    died = (rng.random(rows) < 1 / (1 + np.exp(0.7 - risk))).astype(int)
    days = 10 + 3 * risk + rng.normal(size=rows)
    grade = np.digitize(risk + rng.normal(size=rows), [-0.5, 0.8])
    return pd.DataFrame({"age": age, "ward": ward, "lab": lab, "died": died, "days": days, "grade": grade})


INPUTS = ["age", "ward", "lab"]


def sites(target: str) -> dict[str, tuple[pd.DataFrame, np.ndarray]]:
    """Three sites with a target."""
    frames = {name: table(seed=seed) for seed, name in enumerate(("a", "b", "c"))}
    return {name: (frame[INPUTS], frame[target].to_numpy()) for name, frame in frames.items()}


def fitted(kind: str) -> Any:
    """Return a fitted estimator."""
    quick: dict[str, Any] = {"rounds": 6, "q": 4}
    make: dict[str, tuple[Any, str]] = {
        "auc": (FederatedAUC(**quick), "died"),
        "hidden": (FederatedClassifier(hidden=(5, 4), **quick), "died"),
        "unscaled": (FederatedClassifier(standardize=False, lr=1e-4, **quick), "died"),
        "classes": (FederatedClassifier(**quick), "grade"),
        "logistic": (FederatedLogistic(check_sites=False), "died"),
        "logistic-classes": (FederatedLogistic(check_sites=False), "grade"),
        "linear": (FederatedLinear(check_sites=False), "days"),
    }
    estimator, target = make[kind]
    data = sites(target)
    if kind == "unscaled":
        data = {name: (x.assign(lab=x["lab"].fillna(1)), y) for name, (x, y) in data.items()}
    return estimator.fit(data)


KINDS = ("auc", "hidden", "unscaled", "classes", "logistic", "logistic-classes", "linear")


def released(kind: str) -> StudyModel:
    """Return a released model."""
    model: StudyModel = fitted(kind).to_model("grade" if "classes" in kind else "days" if kind == "linear" else "died")
    return model
