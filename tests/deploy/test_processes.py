"""Processes of a federation end as they should."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from nestfed.deploy.processes import Processes, marked

SLOW_TO_END = """
import signal, sys, time

def end(number, frame):
    print("signal", flush=True)
    time.sleep(0.3)
    print("ended", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_gets_one_signal_and_time_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperNode takes a second one as the order to end at once, so it would not tell the SuperLink."""
    kill = os.kill

    def slow_kill(pid: int, number: int) -> None:
        kill(pid, number)
        time.sleep(0.1)  # on a fast machine two signals are one, if the process does not run between them

    monkeypatch.setattr(os, "kill", slow_kill)
    with Processes(tmp_path) as processes:
        started = processes.start("site", [sys.executable, "-c", SLOW_TO_END], {})
        while "ready" not in processes.tail("site"):
            time.sleep(0.02)
        processes.stop("site")
        assert processes.tail("site").splitlines() == ["ready", "signal", "ended"]
        assert started.returncode == 0
        assert not marked(processes.mark)
