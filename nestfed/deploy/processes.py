"""Child processes that always end with their parent."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

MARK = "NESTFED_FEDERATION"
"""The environment variable that marks every process of a federation, also those that Flower detaches."""


class Processes:
    """Processes that end, with their children, when the `with` block is left, however it is left."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.mark = secrets.token_hex(8)
        self._before: Any = None

    def __enter__(self) -> Self:
        def stop(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        with suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGTERM, stop)
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process; its output is written to NAME.log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, MARK: f"{self.mark}-{name}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.running[name] = process
        return process

    def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines of a process's log."""
        text = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """Stop one process and its children."""
        process = self.running.pop(name)
        self._end([process], f"{self.mark}-{name}", number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt = None
        with suppress(ValueError):  # a second signal must not interrupt the cleanup
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end(list(self.running.values()), self.mark, signal.SIGTERM)
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, interrupt or signal.default_int_handler)
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _end(self, leaders: Sequence[subprocess.Popen[bytes]], mark: str, number: int) -> None:
        """Send a signal to all processes with a mark, wait, and kill the rest."""
        # A SuperNode needs seconds to tell the SuperLink, which otherwise rejects its successor for a minute.
        for attempt, patience in ((number, 10.0), (signal.SIGKILL, 5.0)):
            found = marked(mark)
            for pid in found:  # each gets one signal: at a second, a SuperNode ends without telling the SuperLink
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, attempt)
            for leader in leaders:
                if leader.pid not in found and leader.poll() is None:  # systems without /proc
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(leader.pid, attempt)
            end = time.monotonic() + patience
            while any(leader.poll() is None for leader in leaders) or marked(mark):
                if time.monotonic() > end:
                    break
                time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Return the running processes with a mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            items = path.read_bytes().split(b"\0")
            if any(item == wanted or item.startswith(wanted + b"-") for item in items):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
