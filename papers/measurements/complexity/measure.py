"""Measure the theorems' claims with `nestfed_papers.complexity`.

    python papers/measurements/complexity/measure.py            everything, about ten minutes on one core
    python papers/measurements/complexity/measure.py --quick    a short test, less than a minute
    python papers/measurements/complexity/measure.py --only M   tune and measure one method again (not its bound)
    python papers/measurements/complexity/measure.py --draw     write figures and README.md again from results.json

Writes results.json, four figures and README.md next to this file (with --quick to runs/complexity-quick).
`nestfed reproduce complexity` makes the same measurements and can be resumed.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

import torch
from nestfed_papers.complexity import show
from nestfed_papers.complexity.measure import QUICK, SUBJECTS, Plan, everything

HERE = Path(__file__).resolve().parent


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--quick", action="store_true", help="a short test: few seeds, short runs")
    words.add_argument("--only", choices=tuple(SUBJECTS), default="", help="tune and measure one method only")
    words.add_argument(
        "--draw", action="store_true", help="measure nothing; write figures and README.md from results.json"
    )
    asked = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    plan = replace(QUICK if asked.quick else Plan(), only=asked.only)
    place = HERE.parents[2] / "runs" / "complexity-quick" if asked.quick else HERE
    place.mkdir(parents=True, exist_ok=True)
    path = place / "results.json"
    if not asked.draw:
        results = everything(plan)
        if plan.only:
            before = json.loads(path.read_text(encoding="utf-8"))
            measured = {k: before[k] | results[k] for k in ("tuned", "rates", "speedup")}
            results = before | measured | {"plan": results["plan"]}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show.everything(json.loads(path.read_text(encoding="utf-8")), place)
    print(f"written to {place.parent.name}/{place.name}/")


if __name__ == "__main__":
    main()
