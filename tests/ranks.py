"""One rank of the two that test_engines_agree starts: runs every method and saves what it holds at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from support import simulate
from test_contract import CASES, method, setting


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    outcome = {}
    for name in CASES:
        s = setting(name)
        options = {
            "q": 3,
            "seed": 5,
            "progress": False,
            "mode": "loop",
            "participation": None if len(s.clients) == 1 else 4,
        }
        result = simulate(s.problem, method(name), s.clients, rounds=4, **options)
        # A checkpoint of two ranks, which one process will go on from, and the other way round.
        simulate(s.problem, method(name), s.clients, rounds=2, directory=folder / f"two-{name}", **options)
        again = simulate(s.problem, method(name), s.clients, rounds=4, directory=folder / f"one-{name}", **options)
        outcome[name] = (dict(result.shared), dict(result.private), result.history, dict(again.shared))
    torch.save(outcome, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
