"""AUROC and AP across real hospitals: every method is tuned and trained on each of several test sets.

Also reports the mean over sites of their own metrics, which do not compare patients of different sites.

python papers/measurements/institutions/run.py heart-disease --splits 5 --out runs/institutions
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from safetensors.torch import load_file

from nestfed.experiment.compare import compare
from nestfed.experiment.prepare import prepare
from nestfed.experiment.spec import Experiment, read
from nestfed.metrics import judge
from nestfed.report.summary import MethodResult

SITE = {"heart-disease": "hospital", "eicu": "region"}  # a hospital of the eICU demo has too few deaths to judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/institutions"))
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    experiment = read(options.experiment)
    found: dict[str, list[MethodResult]] = {name: [] for name in experiment.methods}
    inside: dict[str, list[dict[str, float]]] = {name: [] for name in experiment.methods}
    for split in range(options.splits):
        chosen = experiment.with_overrides({"data.split": split, "run.seed": split})
        place = options.out / options.experiment / f"split-{split}"
        _, outcomes = compare(chosen, list(found), 1, place, workers=options.workers)
        for outcome in outcomes:
            found[outcome.method].append(outcome)
            model = place / outcome.method / f"seed-{split}" / "model.safetensors"
            if model.exists():  # local training has many
                inside[outcome.method].append(within(chosen, model, SITE[options.experiment]))
        print(f"split {split} done", flush=True)
    base = found["fedavg"]
    print("| method | AUROC | AP | AUROC − FedAvg's | AUROC within sites | AP within sites | tuned to |")
    print("| --- " * 7 + "|")
    for method, outcomes in found.items():
        values = {metric: [o.final(metric)[0] for o in outcomes] for metric in ("auroc", "ap")}
        gain = [a - b.final("auroc")[0] for a, b in zip(values["auroc"], base)]
        chosen_settings = "; ".join(", ".join(f"{v:g}" for v in o.chosen.values()) for o in outcomes)
        own = [spread([v[k] for v in inside[method]]) if inside[method] else "" for k in ("auroc", "ap")]
        cells = [spread(values["auroc"]), spread(values["ap"]), spread(gain, "+"), *own, chosen_settings]
        print(f"| {method} | {' | '.join(cells)} |")


def within(experiment: Experiment, model: Path, column: str) -> dict[str, float]:
    """Return the mean over sites of a linear model's metrics on their own test rows."""
    test = prepare(experiment.data, experiment.partition, experiment.run.seed).test
    scores, labels = (test.x @ load_file(model)["head.weight"][0]).numpy(), test.y.numpy()
    sites = [test.columns[column] == site for site in np.unique(test.columns[column])]
    each = [judge(scores[rows], labels[rows]) for rows in sites if len(set(labels[rows])) == 2]
    return {k: fmean(v[k] for v in each) for k in each[0]}


def spread(values: list[float], sign: str = "") -> str:
    return f"{fmean(values):{sign}.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
