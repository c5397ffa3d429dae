"""Measure the theorems' claims with `nestfed_papers.complexity`, and write them up.

    python papers/measurements/complexity/measure.py            all, about ten minutes on one core
    python papers/measurements/complexity/measure.py --quick    a look, less than a minute
    python papers/measurements/complexity/measure.py --only M   tune and measure one method again (not its bound)
    python papers/measurements/complexity/measure.py --draw     pictures and table again from results.json

Writes results.json, four pictures and README.md beside itself (with --quick into runs/complexity-quick). The same
measurements as a reproduction that goes on when interrupted: nestfed reproduce complexity.
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
    words.add_argument("--quick", action="store_true", help="a look: few seeds, short runs")
    words.add_argument("--only", choices=tuple(SUBJECTS), default="", help="tuning, costs and speed-up of one method")
    words.add_argument("--draw", action="store_true", help="only draw results.json again")
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
