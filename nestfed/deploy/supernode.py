"""Run a site's SuperNode with a worker that stays."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nestfed.deploy.certificates import remember_authority

if TYPE_CHECKING:
    from nestfed.deploy.flower.private_site import Runtime


def supernode(options: Sequence[str], quick: bool = True) -> NoReturn:
    """Run a SuperNode with its worker, and exit when either ends.

    A worker answers all messages, unless the options contain `--isolation`, or Flower is not the known version. Then Flower
    starts a process for every message. quick: let the SuperNode poll more often than Flower does.

    A connection that breaks during a TLS handshake ends Flower's main loop, but one of its threads keeps the process alive.
    """
    from nestfed.deploy.flower import private_site as flower

    remember_authority(options)
    # Flower looks for its other commands there.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sys.argv = ["flower-supernode", *options]
    worker = None
    if reason := flower.unusable():
        say(f"without a worker, Flower starts a process for every message: {reason}.")
    elif (runtime := flower.runtime_of(options)) is not None:
        secret = Path(runtime.secret_file).expanduser().read_bytes() if runtime.secret_file else secrets.token_bytes(32)
        sys.argv += ["--isolation", "process"]
        if not runtime.secret_file:
            sys.argv += ["--superexec-auth-secret-file", _readable_once(secret)]
        if quick:
            flower.quicken()
        worker = _start(runtime, secret)
    from flwr.supernode.cli import flower_supernode

    try:
        flower_supernode()
    except SystemExit:
        if worker is None or worker.poll() is None:
            raise
    except Exception:  # otherwise the thread keeps the process alive
        traceback.print_exc()
    if worker is None or worker.poll() is None:
        say("the SuperNode lost the SuperLink; start it again.")
    os._exit(1)


def say(sentence: str) -> None:
    """Print a line for the site's log."""
    sys.stderr.write(f"nestfed: {sentence}\n")
    sys.stderr.flush()


def _readable_once(secret: bytes) -> str:
    """Return the path of a file that exists only for this process."""
    reader, writer = os.pipe()
    os.write(writer, secret)
    os.close(writer)
    return f"/dev/fd/{reader}"


def _start(runtime: Runtime, secret: bytes) -> subprocess.Popen[str]:
    """Start the worker; it ends when this process does, and this process ends when it does."""
    command = [sys.executable, "-m", "nestfed.deploy.flower.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, preexec_fn=_ignore_signals)
    assert worker.stdin is not None
    where = {"address": runtime.address, "root": runtime.root, "secret": secret.hex()}
    worker.stdin.write(json.dumps(where) + "\n")
    worker.stdin.flush()
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    return worker


def _ignore_signals() -> None:
    """Let the SuperNode alone decide when its worker ends, also if both get the signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with(worker: subprocess.Popen[str]) -> None:
    code = worker.wait()
    say(f"the site's worker ended ({code}), so the SuperNode ends too; start it again.")
    os.kill(os.getpid(), signal.SIGTERM)
