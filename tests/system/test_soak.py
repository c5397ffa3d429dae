"""Long runs: memory, open files, threads and the time of a round stay as they are."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import Quadratic

from nestfed.algorithms import Scaffold
from nestfed.engine.record import read as read_record
from tests.support import simulate

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def soak(rounds: int, samples: int, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """Run, and look at the process now and then."""
    toy = Quadratic(4, 3)
    every = rounds // samples
    seen: list[tuple[float, ...]] = []

    def look(shared: Any, private: Any) -> dict[str, float]:
        began = time.thread_time()
        gc.collect()
        handles = len(list(Path("/proc/self/fd").iterdir()))
        seen.append((began, resident(), handles, threading.active_count(), time.thread_time()))
        return {"norm": float(shared["x"].norm())}

    simulate(
        toy.problem, Scaffold(0.001), toy.clients, rounds=rounds, q=1, measure=look, every=every, directory=folder,
        checkpoint_every=every, progress=False, participation=3, **options,
    )  # fmt: skip
    table = np.array(seen[1:])
    seconds = (table[1:, 0] - table[:-1, 4]) / every  # without the looking
    return {"seconds": seconds, "bytes": table[:, 1], "handles": table[:, 2], "threads": table[:, 3]}


def judged(found: dict[str, np.ndarray], rounds: int) -> dict[str, float]:
    """Return slopes per thousand rounds over the second half; the first fills caches."""

    def slope(values: np.ndarray) -> float:
        late = values[len(values) // 2 :]
        return float(np.polyfit(np.arange(len(late)), late, 1)[0]) * len(values) / rounds * 1000

    seconds = found["seconds"]
    return {
        "kilobytes per thousand rounds": slope(found["bytes"]) / 1000,
        "milliseconds per round": float(np.median(seconds)) * 1000,
        "last quarter against first": float(np.median(seconds[-len(seconds) // 4 :]) / np.median(seconds[: len(seconds) // 4])),
        "handles gained": float(found["handles"][-1] - found["handles"][0]),
        "threads gained": float(found["threads"][-1] - found["threads"][0]),
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures by Linux's /proc")
@pytest.mark.parametrize(
    "rounds", [100, pytest.param(10_000, marks=pytest.mark.slow)], ids=["a hundred rounds", "ten thousand rounds"]
)
@pytest.mark.long
def test_nothing_grows(rounds: int, tmp_path: Path, record_property: Any) -> None:
    torch.set_num_threads(1)
    found = judged(soak(rounds, 20, tmp_path / "run", mode="loop"), rounds)
    for name, value in found.items():
        record_property(name, value)
    assert len(read_record(tmp_path / "run" / "record.jsonl")) == rounds + 1
    assert found["handles gained"] == 0
    assert found["threads gained"] == 0
    if rounds < 1000:
        return  # too short to tell a slope from noise
    # The history that `simulate` returns is one dictionary a round, about half a kilobyte: that much may be gained.
    assert found["kilobytes per thousand rounds"] < 1500
    assert found["last quarter against first"] < 1.3


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="measures by Linux's /proc")
def test_many_runs_in_one_process_leave_nothing_open(tmp_path: Path) -> None:
    toy = Quadratic(4, 3)

    def once(i: int) -> None:
        simulate(toy.problem, Scaffold(0.01), toy.clients, rounds=2, q=1, directory=tmp_path / str(i), progress=False)

    once(0)
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for i in range(1, 20):
        once(i)
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before
