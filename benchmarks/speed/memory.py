"""Peak memory of a loop over clients with a large model, compared with a bound.

    python benchmarks/speed/memory.py [--clients N] [--million D]

The bound is 1.3 × (state fields of the model's size × N × d × 4 bytes) + one client's activations. Each run is a new
process; the memory of Python, torch and the data before the model is created is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

METHODS = {
    "fedavg": {"eta": 0.01}, "scaffold": {"eta": 0.01}, "stem": {"eta": 0.01}, "fafed": {"eta": 0.01},
    "fcsg-m": {"alpha": 0.01}, "acc-fcsg-m": {"alpha": 0.01},
}  # fmt: skip
RESULTS = Path(__file__).parent / "results.json"


def status(name: str) -> float:
    """Return a line of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def one(name: str, clients: int, million: float, saving: bool) -> dict[str, float]:
    import tempfile

    import numpy as np
    import torch
    from torch import nn

    from nestfed import Classify, Examples, Execution, algorithm, simulate

    torch.set_num_threads(2)
    width = int((million * 1e6 / 2) ** 0.5)
    x = torch.randn(clients * 8, 16)
    y = torch.randint(0, 4, (clients * 8,))
    held = Examples((x, y), np.array_split(np.arange(len(x)), clients), batch=4)
    (x.T @ x).sum()
    before = status("VmRSS")
    model = nn.Sequential(
        nn.Linear(16, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 4),
    )
    method = algorithm(name, **METHODS[name])
    problem = Classify(model)
    d = problem.x0.numel()
    state = method.init(problem, problem.x0)
    fields = sum(v.numel() == d for v in state)
    del state, model
    with tempfile.TemporaryDirectory() as folder:
        simulate(
            problem,
            method,
            held,
            rounds=2,
            q=2,
            execution=Execution(mode="loop", workers=1),
            progress=False,
            directory=folder if saving else None,
        )
    peak = status("VmHWM") - before
    activations = 8 * 4 * 4 * width * 4 / 1e6
    bound = 1.3 * fields * clients * d * 4 / 1e6 + activations
    return {"fields": fields, "clients": clients, "d": d, "peak_mb": peak, "bound_mb": bound, "of_bound": peak / bound}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--million", type=float, default=10)
    parser.add_argument("--child")
    parser.add_argument("--saving", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(one(given.child, given.clients, given.million, given.saving)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    table = {}
    for name in METHODS:
        for saving in (False, True):
            command = [
                sys.executable,
                __file__,
                "--child",
                name,
                "--clients",
                str(given.clients),
                "--million",
                str(given.million),
            ]
            out = subprocess.run(
                [*command, *(["--saving"] if saving else [])], stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(out.stdout.splitlines()[-1])
            label = f"{name}{' with checkpoints' if saving else ''}"
            table[label] = found
            verdict = "within" if found["of_bound"] <= 1 else "ABOVE"
            print(
                f"{label:30} {found['fields']} fields, N={found['clients']}, d={found['d'] / 1e6:.1f} million: peak "
                f"{found['peak_mb']:.0f} MB, bound {found['bound_mb']:.0f} MB, {verdict} ({found['of_bound']:.2f})", flush=True,
            )  # fmt: skip
    results["memory"] = table
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
