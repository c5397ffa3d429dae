"""`make bench-peers`: other simulators, each in its own environment, on works (a) and (f), in turns with ours.

    python benchmarks/speed/peers.py ENVIRONMENTS [--rounds N]

ENVIRONMENTS is a folder with one virtual environment for each: flower, pfl, fedjax. Peers that
could not be installed are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench import CORES, HERE, RESULTS, held, tree
from table import write

PEERS = {"flower": "Flower 1.41.0", "pfl": "pfl-research 0.6.0", "fedjax": "FedJAX 0.0.17"}
SIZES = {"a-fedavg": (16, 16), "f": (1000, 50)}
OURS = (
    "import sys, time; sys.path.insert(0, sys.argv[1]); from works import build; from nestfed import Exchange, "
    "simulate; "
    "w = build(sys.argv[2]); simulate(w.problem, w.algorithm, w.clients, rounds=int(sys.argv[3]), q=w.q, progress=False, "
    "exchange=Exchange(count=w.participation), measure=lambda s, p: print('round', time.perf_counter(), flush=True) or {})"
)


def timed(command: list[str], most: float = 900) -> dict[str, Any]:
    """Run a command that prints the end of every round; return the seconds per round, the start-up time and the memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE / 'peers'}"}
    if "works" in command[2]:
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        environment.pop("OMP_NUM_THREADS")
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        rounds: list[float] = []
        memory, looked = 0.0, 0.0
        while process.poll() is None or rounds == []:
            if (
                time.perf_counter() - looked > 2
            ):  # rarely, because the kernel walks all pages, which slows the processes
                memory, looked = max(memory, held(tree(process.pid))), time.perf_counter()
            while line := process.stdout.readline():
                if line.startswith("round"):
                    rounds.append(float(line.split()[1]))
            if process.poll() is not None or time.perf_counter() - began > most:
                break
            time.sleep(0.05)
        while line := process.stdout.readline():
            if line.startswith("round"):
                rounds.append(float(line.split()[1]))
        process.kill()
        log.seek(0)
        if len(rounds) < 3:
            last = [text for text in log.read().splitlines() if text.strip()][-1:]
            return {"trouble": f"did not run: {last[0] if last else process.returncode}"}
    # perf_counter has the same origin in all processes.
    gaps = [b - a for a, b in pairwise(rounds)][1:]
    return {"seconds": statistics.median(gaps), "startup": rounds[0] - began, "rss_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("environments", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        dump = "import sys; sys.path.insert(0, sys.argv[1]); from works import images; import numpy as np; x, y = images('fashion-mnist'); np.save(sys.argv[2] + '/x.npy', x.numpy()); np.save(sys.argv[2] + '/y.npy', y.numpy()); np.save(sys.argv[2] + '/order.npy', np.random.default_rng(0).permutation(len(x)))"
        subprocess.run([sys.executable, "-c", dump, str(HERE), folder], check=True)
        for work, (clients, part) in SIZES.items():
            found: dict[str, Any] = {}
            ours = [timed([sys.executable, "-c", OURS, str(HERE), work, str(given.rounds)])]
            for peer, label in PEERS.items():
                python = given.environments / peer / "bin" / "python"
                if not python.exists():
                    found[label] = {"trouble": "could not be installed"}
                    continue
                script = [str(HERE / "peers" / f"{peer}_.py"), folder, str(clients), str(part), str(given.rounds)]
                runner = [str(python)]
                if peer == "pfl":
                    runner = [str(python.with_name("torchrun")), "--nproc-per-node", str(CORES)]
                found[label] = timed([*runner, *script])
                ours.append(timed([sys.executable, "-c", OURS, str(HERE), work, str(given.rounds)]))
                if "seconds" in found[label]:
                    found[label]["ours"] = statistics.median(o["seconds"] for o in ours[-2:])
                print(work, label, found[label], flush=True)
            results.setdefault(work, {})["peers"] = found
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write(results)


if __name__ == "__main__":
    main()
