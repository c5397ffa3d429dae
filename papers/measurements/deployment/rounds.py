"""Seconds per round of a tiny model over three sites with TLS and keys, by how the sites answer.

    python papers/measurements/deployment/rounds.py [--rounds 10] [--sites 3] [--out runs/rounds]

worker: `nestfed deploy supernode`. unhurried: the same without shorter sleeps in Flower's loop. ordinary: a process for
every message (`--isolation subprocess`). One federation after another, so compare their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

from nestfed.deploy.app import write_app
from nestfed.deploy.local import SUPERNODE, Local
from nestfed.deploy.processes import Processes
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import Experiment, read

UNHURRIED = "import sys; from nestfed.deploy.supernode import supernode; supernode(sys.argv[1:], quick=False)"
WAYS = {
    "worker": SUPERNODE,
    "unhurried": (sys.executable, "-c", UNHURRIED),
    "ordinary": (*SUPERNODE, "--isolation", "subprocess"),
}


def study(rounds: int, sites: int) -> Experiment:
    chosen = read("average-precision").for_method("fcsg-m")
    return chosen.with_overrides({"algorithm.alpha": 1.0, "run.rounds": rounds, "partition.clients": sites})


def seconds(way: str, rounds: int, sites: int, folder: Path) -> list[float]:
    """Return the seconds of each round after the first, in which the sites load their data."""
    with Processes(folder / "logs") as processes:
        federation = Local(folder, processes)
        federation.superlink()
        federation.register(*range(sites))
        for n in range(sites):
            federation.commands[n] = WAYS[way]
            federation.supernode(n, **{"min-cell": 0})
        write_app(folder / "app", study(rounds, sites), sites, out=str(folder / "run"))
        code = federation.run(folder / "app").wait()
        if code:
            raise SystemExit(processes.tail("run", 40))
    times = [line["seconds"] for line in read_record(folder / "run" / "record.jsonl")]
    return [b - a for a, b in pairwise(times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"))
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for way in options.ways:
        found = seconds(way, options.rounds, options.sites, (options.out / way).resolve())
        line = {
            "way": way,
            "median": round(median(found), 2),
            "least": round(min(found), 2),
            "most": round(max(found), 2),
        }
        sys.stdout.write(json.dumps({**line, "load": round(os.getloadavg()[0], 1)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
