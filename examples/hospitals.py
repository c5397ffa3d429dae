"""Predict death in hospital (8.5 %) in the eICU demo. Small hospitals are merged by region; patients are not split."""

import argparse

from nestfed import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.data.partition import by_column, hold_out
from nestfed.data.sources import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=50)
options = parser.parse_args()

data = load("eicu").train
train, test = hold_out(len(data.y), 0.25, seed=0, groups=data.columns["patient"])
stays, held = data.take(train), data.take(test)
parts, names = by_column(stays.columns["hospital"], 10, stays.columns["region"])
sites = {name: (stays.x[part], stays.y[part]) for name, part in zip(names, parts)}
print(f"{len(sites)} clients, {int(stays.y.sum())} deaths in {len(stays)} stays")

for kind in (FederatedAUC, FederatedAUPRC, FederatedClassifier):
    est = kind(rounds=options.rounds, batch_size=16, verbose=None).fit(sites)
    found = est.evaluate(held.x, held.y)
    print(f"{kind.__name__:<20} {est.choice_.name:<10} AUROC {found['auroc']:.4f}  AP {found['ap']:.4f}")
