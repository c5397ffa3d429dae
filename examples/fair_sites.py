"""Agnostic federated learning (Mohri et al. 2019): train for the worst mixture of hospitals, not their mean."""

import argparse
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from nestfed import FederatedMinimax, LocalSGDA
from nestfed.data.partition import hold_out
from nestfed.data.sources import load
from nestfed.problems import Simplex

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=100)
options = parser.parse_args()

data = load("heart-disease").train
train, test = hold_out(len(data.y), 0.25, seed=0, labels=data.y)
hospital = data.columns["hospital"]
names = np.unique(hospital)


def rows_of(part: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one hospital's rows."""
    rows = part[hospital[part] == name]
    return data.x[rows], data.y[rows].astype(np.float32)


def loss(model, batch):  # type: ignore[no-untyped-def]
    """Return the cross-entropy of every row."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")


def worst_mixture(model, w, batch):  # type: ignore[no-untyped-def]
    """Weight each row by its site's share of the mixture."""
    return (len(w) * w[batch[2]] * loss(model, batch)).mean()


sites = {str(name): rows_of(train, name) for name in names}
common = {"rounds": options.rounds, "q": 5, "method": partial(LocalSGDA, eta_w=0.05)}
fair = FederatedMinimax(objective=worst_mixture, w0=[1 / len(names)] * len(names), dual_domain=Simplex(), **common)
mean = FederatedMinimax(objective=lambda m, w, b: loss(m, b).mean(), w0=[0.0], **common)
for label, est in (("mean of sites", mean), ("worst mixture", fair)):
    est.fit(sites)
    each = []
    for name in names:
        x, y = rows_of(test, name)
        logits = torch.from_numpy(est.predict(x))
        each.append(float(F.binary_cross_entropy_with_logits(logits, torch.from_numpy(y))))
    print(
        f"{label}: worst {max(each):.3f}, mean {np.mean(each):.3f}  "
        + "  ".join(f"{n} {v:.3f}" for n, v in zip(names, each))
    )
print("weights of the sites:", dict(zip(map(str, names), fair.w_.round(2).tolist())))
