"""`make bench`: time every work with our engine, as bare passes and as a hand-written loop.

    python benchmarks/speed/bench.py [work …] [--rounds N]

The three take turns, round by round, so that other load on the machine affects all of them equally; medians are
compared. Processor time is also recorded: on a shared machine it varies less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
CORES = len(os.sched_getaffinity(0))


def busy(pid: int | str) -> float:
    """Return the processor seconds of a process."""
    total = 0.0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0
    return total


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(c) for c in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def held(pids: list[int]) -> float:
    """Return the memory of processes in MB, with shared pages counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000


class Limit:
    """Only the passes of a round's batches, divided over one single-threaded process per core."""

    def __init__(self, make: Callable[[], Any], batches: list[Any], evaluations: int) -> None:
        fork = get_context("fork")
        self.pipes, self.processes = [], []
        for i in range(CORES):
            here, there = fork.Pipe()
            process = fork.Process(target=self._serve, args=(there, make, batches[i::CORES], evaluations), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    @staticmethod
    def _serve(pipe: Any, make: Callable[[], Any], batches: list[Any], evaluations: int) -> None:
        import torch

        torch.set_num_threads(1)
        one = make()
        while pipe.recv():
            for batch in batches:
                for _ in range(evaluations):
                    one(batch)
            pipe.send(True)

    def round(self) -> None:
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def busy(self) -> float:
        return sum(busy(p.pid) for p in self.processes)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(False)
            process.join()


def time_work(name: str, rounds: int) -> dict[str, Any]:
    """Time one work, in its own process."""
    import numpy as np
    import torch
    from torch.utils._pytree import tree_map
    from works import build

    from nestfed import Exchange, Execution, simulate

    torch.set_num_threads(CORES)
    work = build(name)
    chosen = list(range(len(work.clients)))[: work.participation or None]
    limit = None
    if work.gradient is not None:
        drawn = [work.clients.draw([n], range(work.q)) for n in chosen]
        batches = [tree_map(lambda leaf: leaf[0].clone(), b) for each in drawn for b in each]
        limit = Limit(work.gradient, batches, work.evaluations)
        limit.round()
    seconds: dict[str, list[float]] = {"limit": [], "plain": [], "ours": []}
    cpu: dict[str, list[float]] = {"limit": [], "plain": [], "ours": []}
    mark = {"ours": 0.0, "calls": 0.0}
    others = set(tree(os.getpid())[1:])

    def own() -> float:
        return sum(busy(p) for p in tree(os.getpid()) if p not in others)

    def between(shared: Any, private: Any) -> dict[str, float]:
        """Record our round, then run one round of each of the others."""
        if mark["calls"]:
            cpu["ours"].append(own() - mark["ours"])
        if limit is not None:
            began, spent = time.perf_counter(), limit.busy()
            limit.round()
            seconds["limit"].append(time.perf_counter() - began)
            cpu["limit"].append(limit.busy() - spent)
        began, spent = time.perf_counter(), busy("self")
        with torch.enable_grad():
            work.plain(int(mark["calls"]) * work.q)
        seconds["plain"].append(time.perf_counter() - began)
        cpu["plain"].append(busy("self") - spent)
        mark["calls"] += 1
        mark["ours"] = own()
        return {}

    result = simulate(
        work.problem, work.algorithm, work.clients, rounds=rounds + 1, q=work.q, measure=between, progress=False,
        exchange=Exchange(count=work.participation), execution=Execution(profile=True, **work.options),
    )  # fmt: skip
    if limit is not None:
        limit.close()
    clock = [r["seconds"] for r in result.history]
    seconds["ours"] = list(np.diff(clock))[1:]  # the first round warms up
    cpu["ours"] = cpu["ours"][1:]
    median = {k: statistics.median(v[-rounds:]) if v else None for k, v in seconds.items()}
    found: dict[str, Any] = {
        **median,
        "cpu": {k: statistics.median(v[-rounds:]) if v else None for k, v in cpu.items()},
    }
    # Ratios of consecutive rounds.
    for other in ("limit", "plain"):
        if seconds[other]:
            pairs = list(zip(seconds["ours"], seconds[other][-len(seconds["ours"]) :]))
            found[f"over_{other}"] = statistics.median(a / b for a, b in pairs)
    if "compiling" in result.profile:
        found["compile_seconds"] = result.profile["compiling"]
    shares = {k: v for k, v in result.profile.items() if k in ("drawing", "gradients", "updates", "averaging", "rest")}
    found["profile"] = {k: round(v / (rounds + 1), 6) for k, v in shares.items()}
    found["rounds"] = rounds
    return found


def start_up(name: str) -> dict[str, float]:
    """Return the seconds from a fresh command to the end of its first round, and the memory of all its processes."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from works import build; from nestfed import Exchange, "
        "Execution, simulate; "
        "w = build(sys.argv[2]); simulate(w.problem, w.algorithm, w.clients, rounds=3, q=w.q, progress=False, "
        "exchange=Exchange(count=w.participation), execution=Execution(**w.options), "
        "measure=lambda s, p: print('round', flush=True) or {})"
    )
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, str(HERE), name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    most, first, lines = 0.0, None, 0
    os.set_blocking(process.stdout.fileno(), False)
    while process.poll() is None:
        most = max(most, held(tree(process.pid)))
        line = process.stdout.readline()
        if line.startswith("round"):
            lines += 1
            if lines == 2:  # the first is printed before round 1
                first = time.perf_counter() - began
        time.sleep(0.02)
    return {"startup": first or time.perf_counter() - began, "rss_mb": most}


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "processor": model, "cores": CORES, "python": platform.python_version(), "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(HERE))
    from table import write
    from works import WORKS

    parser = argparse.ArgumentParser()
    parser.add_argument("works", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(time_work(given.works[0], given.rounds)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.works or WORKS:
        began = machine()
        command = [sys.executable, __file__, "--child", name, "--rounds", str(given.rounds)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if out.returncode:
            print(f"{name}: failed")
            continue
        found = json.loads(out.stdout.splitlines()[-1])
        found |= start_up(name)
        results[name] = {
            **results.get(name, {}),
            **found,
            "about": WORKS[name][0],
            "bar": WORKS[name][2],
            "load": began["load"],
        }
        results["machine"] = began
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        show = {k: f"{v:.3f}" for k, v in found.items() if isinstance(v, float)}
        print(name, show, "load", f"{began['load']:.1f}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
