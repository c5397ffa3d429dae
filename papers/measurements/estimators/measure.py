"""The estimators with their defaults on real data; each of five seeds has its own test set, clients, start and batches.

    python papers/measurements/estimators/measure.py
    python papers/measurements/estimators/measure.py heart-disease --seeds 2 --rounds 2    # a look

Prints the table of papers/measurements/choosing.md; needs eICU, heart disease and Fashion-MNIST (see docs/data.md).
"""

from __future__ import annotations

import argparse
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from nestfed import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.experiment.prepare import prepare
from nestfed.experiment.spec import read
from nestfed.metrics import auroc, average_precision

KINDS: dict[str, Any] = {
    "FederatedAUC": FederatedAUC,
    "FederatedAUPRC": FederatedAUPRC,
    "FederatedClassifier": FederatedClassifier,
}
WORKS: dict[str, dict[str, Any]] = {
    "eicu": {},
    "heart-disease": {},
    "fcsg-table2-mnist": {"data.name": "fashion-mnist"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="work", help=f"{', '.join(WORKS)}; by default all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.works or WORKS:
        changes = WORKS[name]
        found: dict[str, dict[str, list[float]]] = {kind: {"AUROC": [], "AP": []} for kind in KINDS}
        for seed in range(options.seeds):
            split = {"data.split": seed} if not changes else {}
            experiment = read(name).with_overrides({**changes, **split, "data.validation": 0.0})
            made = prepare(experiment.data, experiment.partition, seed)
            x, test = made.ready(made.x).flatten(1).numpy(), made.ready(made.test.x).flatten(1).numpy()
            sites = [(x[part], made.y[part].numpy()) for part in made.parts]
            for kind, make in KINDS.items():
                hidden = {"hidden": (64,)} if changes else {}
                model = make(rounds=options.rounds, q=10, random_state=seed, **hidden).fit(sites)
                score, truth = model.predict_proba(test)[:, 1], made.test.y.numpy()
                found[kind]["AUROC"].append(auroc(score, truth))
                found[kind]["AP"].append(average_precision(score, truth))
                print(name, seed, kind, *(f"{v[-1]:.4f}" for v in found[kind].values()), flush=True)
        for metric in ("AUROC", "AP"):
            base = found["FederatedClassifier"][metric]
            print(f"| {name} | {metric} | " + " | ".join(cell(found[kind][metric], base) for kind in KINDS) + " |")


def cell(values: list[float], base: list[float]) -> str:
    text = f"{fmean(values):.3f} ± {stdev(values):.3f}"
    if values is base:
        return text
    gains = np.subtract(values, base)
    return f"{text} ({gains.mean():+.3f}, {int((gains > 0).sum())})"


if __name__ == "__main__":
    main()
