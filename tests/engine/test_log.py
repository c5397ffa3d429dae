"""What a run says through `logging`: useful lines if the user asks for them, otherwise nothing."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestfed import Examples, Minimize
from nestfed.algorithms import FedAvg
from tests.support import in_new_process, simulate


def squares() -> tuple[Minimize, Examples]:
    """Four clients, each with two numbers whose mean is wanted."""
    rows = torch.arange(8.0)
    parts = [np.arange(2 * n, 2 * n + 2) for n in range(4)]
    return Minimize(lambda x, batch: (x - batch[0]).square().mean(), torch.zeros(1)), Examples((rows,), parts, batch=2)


def run(rounds: int, **options: Any) -> None:
    problem, clients = squares()
    options = {"q": 2, "progress": False, "workers": 1, "checkpoint_every": 2, **options}
    simulate(problem, FedAvg(0.1), clients, rounds=rounds, evaluate=lambda x: {"r2": float(x)}, every=2, **options)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged since the last call; all of it by the engine."""
    assert all(r.name.startswith("nestfed.engine.") for r in caplog.records)
    lines = [r.getMessage() for r in caplog.records]
    caplog.clear()
    return lines


def test_a_run_says_how_it_starts_proceeds_and_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="nestfed")
    run(3, directory=tmp_path)
    lines = said(caplog)
    assert lines[0] == f"starting: fedavg with 4 clients, 3 rounds of 2 local steps; directory {tmp_path}."
    assert [line.split(":")[0] for line in lines[1:]] == [
        "round 0 of 3", "round 2 of 3", "checkpoint after round 2.", "round 3 of 3", "checkpoint after round 3.",
        "finished after round 3",
    ]  # fmt: skip
    assert lines[1] == "round 0 of 3: r2 0"
    assert "loss" in lines[2]
    run(4, directory=tmp_path)
    assert said(caplog)[0].startswith("resuming after round 3: fedavg with 4 clients, 4 rounds")
    run(1)
    assert said(caplog)[0].endswith("; nothing is saved.")


def test_warnings_are_logged_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(2, directory=tmp_path)
    newest = next(tmp_path.glob("round-00000002-*"))
    newest.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged and was skipped|the run starts from the beginning"):
        run(2, directory=tmp_path)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned[0] == f"{newest} is damaged and was skipped."


def test_only_who_asks_sees_the_log(tmp_path: Path) -> None:
    """In a process of its own without pytest's handlers of the log."""

    def work() -> None:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        run(1, directory="silent")
        sys.stderr.write("configured\n")
        logging.basicConfig(level="INFO", stream=sys.stderr)
        run(1, directory="heard")

    done = in_new_process(work, tmp_path)
    before, after = done.err.split("configured\n")
    assert done.out == before == ""
    assert "INFO:nestfed.engine.loop:starting: fedavg with 4 clients" in after
    assert "INFO:nestfed.engine.run_directory:round 1 of 1: loss" in after
