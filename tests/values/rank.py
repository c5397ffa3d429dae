"""One rank of the two that `adapter.on_two_ranks` starts: carries out the runs and writes what it holds at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.values.adapter import simulated
from tests.values.registry import plain


def main(folder: Path, rank: str) -> None:
    torch.set_num_threads(1)
    runs = json.loads((folder / "runs.json").read_text())
    # Through JSON, which keeps all bits of a float; whole, because the arrays of toys are small.
    found = {name: plain(simulated(settings), whole=True) for name, settings in runs.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["RANK"])
