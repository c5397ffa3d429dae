"""Two runs in one directory: the second is refused by name, and a crash leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from nestfed.core import NestfedError
from nestfed.files import NAME, locked
from tests.support import holder, in_new_process, simulate


def test_the_second_learns_who_the_first_is(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(NestfedError) as refused, locked(tmp_path):
            pass
        since = json.loads((tmp_path / NAME).read_text())["since"]
        assert str(refused.value) == (
            f"Process {process.pid} on {socket.gethostname()} has been using {tmp_path} since {since}: "
            "wait until it ends, or choose another directory."
        )
        from nestfed.algorithms import FedAvg
        from tests.support import images

        problem, clients = images()
        with pytest.raises(NestfedError, match=f"Process {process.pid} on"):
            simulate(problem, FedAvg(0.1), clients, rounds=1, directory=tmp_path, progress=False)
        assert [p.name for p in tmp_path.iterdir()] == [NAME]  # the refused one has touched nothing
        process.communicate("")  # it ends by itself
        assert not list(tmp_path.iterdir())


def test_a_crash_frees_the_directory(tmp_path: Path) -> None:
    for _ in range(2):
        with holder(tmp_path) as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert (tmp_path / NAME).exists()  # its last words, but nobody holds it
        with locked(tmp_path):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
        assert not (tmp_path / NAME).exists()


def test_the_patient_wait_for_the_end_and_no_longer(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(NestfedError, match=f"Process {process.pid}"), locked(tmp_path, patience=0.5):
            pass
        threading.Timer(0.5, process.kill).start()
        start = time.monotonic()
        with locked(tmp_path, patience=30):
            assert 0.3 < time.monotonic() - start < 20


def test_one_thread_may_enter_again_but_not_another(tmp_path: Path) -> None:
    seen: list[str] = []

    def other() -> None:
        try:
            with locked(tmp_path):
                seen.append("entered")
        except NestfedError as error:
            seen.append(str(error))

    with locked(tmp_path), locked(tmp_path / "." / ""):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen[0].startswith(f"Process {os.getpid()} on")
    with locked(tmp_path):
        pass


def test_a_forked_child_keeps_nothing(tmp_path: Path) -> None:
    """A worker that outlives its parent for a moment must not keep the next run out."""
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_many_at_once_hold_it_one_after_another(tmp_path: Path) -> None:
    """Also while the file is deleted and made again by those who come and go."""
    (tmp_path / "inside").mkdir()
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            done = 0
            end = time.monotonic() + 20
            while done < 30 and time.monotonic() < end:
                try:
                    with locked(tmp_path):
                        mark = tmp_path / "inside" / "mark"
                        mark.touch(exist_ok=False)  # fails if somebody else is inside
                        mark.unlink()
                        done += 1
                except NestfedError:
                    continue
                except BaseException:
                    os._exit(2)
            os._exit(0 if done else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [0] * 8


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    sentence = r"Cannot write .*missing/\.lock: No such file or directory\."
    with pytest.raises(NestfedError, match=sentence), locked(tmp_path / "missing"):
        pass


def test_a_system_without_locks_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """As on Windows: everything can be imported and listed; what needs locks says so at first use."""

    def work() -> None:
        sys.modules["fcntl"] = None  # type: ignore[assignment]
        main = importlib.import_module("nestfed.cli.main").main
        for command in (["list"], ["compare", "average-precision", "--seeds", "1"], ["demo"]):
            sys.argv = ["nestfed", *command]
            with contextlib.suppress(SystemExit):
                main()
        sys.argv = ["nestfed", "run", "average-precision", "algorithm.name=fcsg-m", "algorithm.alpha=1.0"]
        main()

    said = in_new_process(work, tmp_path)
    assert "fcsg-m" in said.out
    assert said.code == 2
    assert said.err.count("\n") == said.err.count("needs file locks (fcntl)") == 3
    assert not (tmp_path / "runs").exists()  # a run that was refused leaves nothing


def test_a_simulation_needs_no_directory_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestfed.files.fcntl", None)
    with pytest.raises(NestfedError, match="on Windows, use WSL 2"):
        simulate(None, None, None, rounds=1)
