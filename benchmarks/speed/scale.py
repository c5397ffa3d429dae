"""Growing: the cost of a client's step from 4 to 10,000 clients, two ranks against one, 16-bit products.

python benchmarks/speed/scale.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SIZES = (4, 16, 64, 256, 1000, 4000, 10_000)


def busy() -> float:
    return time.process_time()


def clients_sweep() -> dict[str, Any]:
    """FedAvg and SCAFFOLD (one private field) on logistic regression, all clients taking part, q = 5."""
    import numpy as np
    import torch

    from nestfed import Classify, Examples, Execution, algorithm, simulate

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(50_000, 64))).float(), torch.from_numpy(rng.integers(10, size=50_000))
    table: dict[str, Any] = {}
    for name in ("fedavg", "scaffold"):
        for count in SIZES:
            clients = Examples((x, y), [np.arange(5 * i, 5 * i + 50) % 50_000 for i in range(count)], batch=20)
            problem = Classify(torch.nn.Linear(64, 10))
            marks: list[float] = []

            def mark(shared: Any, private: Any, marks: list[float] = marks) -> dict[str, float]:
                marks.append(busy())
                return {}

            rounds = 3 if count >= 1000 else 30
            simulate(
                problem,
                algorithm(name, eta=0.1),
                clients,
                rounds=rounds + 1,
                q=5,
                progress=False,
                execution=Execution(mode="vmap", workers=1),
                measure=mark,
            )
            gaps = [b - a for a, b in pairwise(marks[1:])]
            table[f"{name} N={count}"] = statistics.median(gaps) / (count * 5) * 1e6
            print(
                f"{name:10} N={count:6}: {table[f'{name} N={count}']:.1f} µs of processor time per client and step",
                flush=True,
            )
    return table


RANK = """
import sys, time, json
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads(1)
from works import build
from nestfed import Execution, simulate
w = build("a-fedavg")
r = simulate(w.problem, w.algorithm, w.clients, rounds=6, q=w.q, progress=False, execution=Execution(workers=1))
if __import__("os").environ.get("RANK", "0") == "0":
    s = [h["seconds"] for h in r.history]
    print(json.dumps([b - a for a, b in zip(s, s[1:])]))
"""


def ranks() -> dict[str, float]:
    """Work (a) on one rank with one thread and on two, in turns."""
    code = RANK.format(here=str(HERE))
    script = HERE / ".rank.py"
    script.write_text(code)
    found: dict[int, list[float]] = {1: [], 2: []}
    try:
        for _ in range(2):
            for count in (1, 2):
                runner = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(count), str(script)]
                out = subprocess.run(
                    runner, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
                found[count] += json.loads(out.stdout.splitlines()[-1])
    finally:
        script.unlink()
    one, two = statistics.median(found[1]), statistics.median(found[2])
    print(f"one rank {one:.3f} s a round, two ranks {two:.3f} s: {one / two:.2f} times as fast", flush=True)
    return {"one": one, "two": two, "speedup": one / two}


def sixteen_bits() -> dict[str, float]:
    """Works (a) and (b) with full and with bf16 products, in turns."""
    import torch

    sys.path.insert(0, str(HERE))
    from works import build

    from nestfed import Execution, simulate

    torch.set_num_threads(1)
    table = {}
    for name in ("a-fedavg", "b-fedavg"):
        work = build(name)
        spent: dict[str, list[float]] = {"full": [], "bf16": []}
        for _ in range(3):
            for precision in spent:
                began = busy()
                simulate(
                    work.problem,
                    work.algorithm,
                    work.clients,
                    rounds=1,
                    q=2,
                    progress=False,
                    execution=Execution(workers=1, precision=precision),
                )
                spent[precision].append(busy() - began)
        table[name] = statistics.median(spent["bf16"]) / statistics.median(spent["full"])
        print(f"{name}: bf16 takes {table[name]:.2f} × the processor time of full precision", flush=True)
    return table


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["scale"] = {"clients_us": clients_sweep(), "ranks": ranks(), "bf16": sixteen_bits()}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
