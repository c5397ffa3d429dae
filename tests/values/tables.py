"""What people with tables of their own get: the estimators, and `train` and `predict` on small files made here."""

from __future__ import annotations

import csv
import math
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.values import adapter
from tests.values.adapter import Values
from tests.values.registry import DOUBLE, SINGLE, case

Row = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------
# Estimators


def numbers(seed: int, rows: int, columns: int) -> np.ndarray:
    """Return numbers between -2 and 2, by a generator of which Python promises that it never changes."""
    draw = random.Random(seed).random
    return np.array([[round(4 * draw() - 2, 3) for _ in range(columns)] for _ in range(rows)])


def site(seed: int, rows: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return a site's features, and a label that depends on three of them."""
    x = numbers(seed, rows, 4)
    y = np.floor((np.tanh(x @ [1.0, -0.5, 0.3, 0.0] + 0.3 * np.sin(7 * x[:, 3])) + 1) / 2 * classes)
    return x, y.astype(int)


for kind in ("auroc", "auprc", "accuracy"):
    sites = [site(seed, 40) for seed in range(3)]
    case(f"estimators/{kind}", tolerance=SINGLE)(partial(adapter.fitted, kind, sites, numbers(9, 6, 4)))
case("estimators/three-classes", tolerance=SINGLE)(
    partial(adapter.fitted, "accuracy", [site(seed, 40, 3) for seed in range(3)], numbers(9, 6, 4))
)


def waves(seed: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tasks, each a sine of its own height."""
    made = []
    for i in range(count):
        x = numbers(100 * seed + i, 20, 1)
        made.append((x, (1 + 0.2 * i) * np.sin(x[:, 0]).astype(np.float32)))
    return made


# By default it takes 1,000 steps with two hidden layers, in which last bits grow.
case("estimators/tasks", tolerance=SINGLE)(
    partial(adapter.fitted_to_tasks, [waves(seed, 4) for seed in range(3)], waves(7, 2), rounds=3, q=2)
)


@case("estimators/worst-mixture", tolerance=SINGLE)
def worst_mixture() -> Values:
    sites = []
    for seed, slope in enumerate((1.0, 1.0, -1.0)):
        x = numbers(seed, 40, 2)
        sites.append((x, (slope * x[:, 0]).astype(np.float32)))
    return adapter.fitted_to_the_worst_mixture(sites, numbers(9, 6, 2))


# ---------------------------------------------------------------------------------------------------------
# Tables


def only_numbers(draw: Callable[[], float]) -> Row:
    age, pressure, dose = round(20 + 60 * draw()), round(90 + 80 * draw(), 1), round(draw(), 3)
    dose = 40.0 if draw() < 0.02 else dose  # so far out that it is cut off
    return {"age": age, "pressure": pressure, "dose": dose, "ill": int(age / 80 + pressure / 170 - dose + draw() > 1.4)}


def categories(draw: Callable[[], float]) -> Row:
    ward, smokes = ("north", "south", "east")[int(3 * draw())], draw() < 0.4
    row = only_numbers(draw)
    ill = row.pop("ill") + (ward == "south") + smokes + draw() > 1.6
    return {"ward": ward, "smokes": str(bool(smokes)), **row, "ill": "yes" if ill else "no"}


def gaps(draw: Callable[[], float]) -> Row:
    row = categories(draw)
    lost = [k for k in ("ward", "age", "dose") if draw() < 0.25]
    return {"patient": f"p{int(15 * draw())}", **row, **dict.fromkeys(lost, "")}


def three_classes(draw: Callable[[], float]) -> Row:
    row = only_numbers(draw)
    score = row["age"] / 80 - row["dose"] + math.sin(row["pressure"] / 10)
    return {**row, "ill": "none" if score < -0.2 else "some" if score < 0.6 else "much"}


def written(make: Callable[[Callable[[], float]], Row], folder: Path) -> list[Path]:
    """Write the tables of three sites and one of new rows; every cell is a short decimal, so every reader gets the same."""
    paths = []
    for number, (name, rows) in enumerate((("alpha", 40), ("beta", 48), ("gamma", 36), ("new", 6))):
        draw = random.Random(number).random
        made = [make(draw) for _ in range(rows)]
        paths.append(folder / f"{name}.csv")
        with paths[-1].open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, made[0])
            writer.writeheader()
            writer.writerows(made)
    return paths


TABLES: dict[str, tuple[Callable[[Callable[[], float]], Row], str, dict[str, Any]]] = {
    "numbers": (only_numbers, "auroc", {}),
    "categories": (categories, "auprc", {}),
    "gaps": (gaps, "auroc", {"group": "patient"}),
    "three-classes": (three_classes, "accuracy", {"hidden": (3,)}),
}


def train(name: str) -> Values:
    make, objective, settings = TABLES[name]
    with tempfile.TemporaryDirectory() as folder:
        *files, new = written(make, Path(folder))
        return adapter.trained(files, "ill", objective, new, rounds=2, q=2, **settings)


def encoded(name: str) -> Values:
    make, _, settings = TABLES[name]
    with tempfile.TemporaryDirectory() as folder:
        files = written(make, Path(folder))[:-1]
        return adapter.encoded(files, "ill", group=settings.get("group", ""))


for name in TABLES:
    case(f"tables/encoded/{name}", tolerance=DOUBLE)(partial(encoded, name))
    case(f"tables/trained/{name}", tolerance=SINGLE)(partial(train, name))
