"""Sine waves with the Local-SCGDM paper's settings: the four methods over seeds, and the ablations over γ, p and α.

    python benchmarks/papers/meta/sine.py OUT [--iterations 2000] [--seeds 3]

Writes OUT/sine.jsonl, one line per run as soon as it is done (a run that is there is not repeated), and OUT/fit.png.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from nestfed.assemble import assemble
from nestfed.engine.simulate import simulate
from nestfed.experiment import read
from nestfed.problems.sine import draw_fit

ABLATIONS: dict[str, list[float]] = {
    "algorithm.gamma": [0.1, 0.9],
    "algorithm.alpha": [0.1, 0.9],
    "run.q": [1, 20],
}


def one(method: str, seed: int, iterations: int, **changes: Any) -> tuple[dict[str, Any], Any]:
    experiment = read("sine").for_method(method).with_overrides({"run.seed": seed, **changes})
    made, run = assemble(experiment), experiment.run
    began, cpu = time.perf_counter(), time.process_time()
    rounds = iterations // run.q
    result = simulate(
        made.problem,
        made.algorithm,
        made.clients,
        rounds=rounds,
        q=run.q,
        seed=seed,
        evaluate=made.evaluate,
        every=max(1, rounds // 10),
        progress=False,
    )
    curve = [
        {k: r[k] for k in ("round", "iteration", "loss_0", "loss_1", "loss_5")} for r in result.history if "loss_1" in r
    ]
    row = {
        "method": method,
        "seed": seed,
        "changes": changes,
        "iterations": iterations,
        "examples": result.history[-1]["examples"],
        "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu": round(time.process_time() - cpu, 1),
    }
    return row, made.problem.bind(result.x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "sine.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    fitted: dict[str, Any] = {}

    def run(method: str, seed: int, changes: dict[str, Any]) -> None:
        for row in done:
            if (row["method"], row["seed"], row["changes"], row["iterations"]) == (
                method,
                seed,
                changes,
                chosen.iterations,
            ):
                return
        row, model = one(method, seed, chosen.iterations, **changes)
        done.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if seed == 0 and not changes:
            fitted[method] = model
        print(method, seed, changes, row["curve"][-1], f"{row['cpu']} s", flush=True)

    for seed in range(chosen.seeds):
        for method in read("sine").methods:
            run(method, seed, {})
        if len(fitted) == len(read("sine").methods):
            draw_fit(fitted, chosen.out / "fit.png")
            fitted.clear()
    for setting, values in ABLATIONS.items():
        for value in values:
            run("local-scgdm", 0, {setting: value})

    print("\n| method | before | after 1 step | after 5 steps |\n| --- | --- | --- | --- |")
    for method in read("sine").methods:
        ends = [r["curve"][-1] for r in done if r["method"] == method and not r["changes"]]
        cells = []
        for name in ("loss_0", "loss_1", "loss_5"):
            values = [end[name] for end in ends]
            cells.append(f"{fmean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}")
        print(f"| {method} | " + " | ".join(cells) + " |")
    for setting in ABLATIONS:
        rows = [r for r in done if r["method"] == "local-scgdm" and list(r["changes"]) == [setting]]
        print(setting, {r["changes"][setting]: round(r["curve"][-1]["loss_1"], 3) for r in rows})


if __name__ == "__main__":
    main()
