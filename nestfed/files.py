"""Files: atomic writes, and a lock that keeps a directory for one process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nestfed.core import NestfedError

try:
    import fcntl
except ImportError:  # Windows; `require_locks` says so at first use
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
POLL = 0.2
_held: dict[Path, tuple[int, int]] = {}
"""Directories that this process has locked: the file descriptor, and the thread that may lock again."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even after a power cut."""
    with written(path.parent / f".{path.name}.{os.getpid()}.tmp", lambda: path) as file:
        file.write(content)


def write_model(path: Path, model: Any, x: Any) -> None:
    """Write a module's state to a safetensors file, or the vector x if the model has no state."""
    from safetensors.torch import save

    tensors = model.state_dict() if hasattr(model, "state_dict") else {"x": x}
    write_atomically(path, save({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}))


@contextmanager
def written(temporary: Path, name: Callable[[], Path]) -> Iterator[IO[bytes]]:
    """Open a temporary file that gets its name once everything is on disk."""
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(name())
    except OSError as error:
        raise NestfedError(f"Cannot write {name()}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def make_directory(path: Path) -> Path:
    """Create a directory and its parents if they do not exist; on a system without file locks, create nothing."""
    require_locks()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NestfedError(f"Cannot create the directory {path}: {error.strerror}.") from error
    return path


def reject_foreign(directory: Path, what: str, *marks: str) -> None:
    """Reject a directory whose content is something else: not empty, and without a file that matches one of the marks."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise NestfedError(f"{directory} is a file; choose another directory with --out.")
    held = any(not p.name.startswith(".") for p in directory.iterdir())  # ignore temporary files of a killed process
    if held and not any(any(directory.glob(mark)) for mark in marks):
        raise NestfedError(f"{directory} is not empty and contains no {what}; choose another directory with --out.")


def sweep(directory: Path) -> None:
    """Delete the partial files of a killed process. The caller must hold the directory's lock."""
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def require_locks() -> None:
    """Reject a system without file locks before any work starts."""
    if fcntl is None:
        raise NestfedError(f"NestFed needs file locks (fcntl), which {platform.system()} lacks; on Windows, use WSL 2.")


@contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a directory, or fail after `patience` seconds with an error that names the holder.

    The system frees the lock when the process ends, even by SIGKILL. The thread that holds a directory may lock it
    again. The lock file holds the holder's pid, host and start time; it is deleted at the end.
    """
    require_locks()
    place = directory.resolve()
    if place in _held and _held[place][1] == threading.get_ident():
        yield
        return
    if place in _held:
        raise NestfedError(_busy(directory, {"pid": os.getpid(), "host": socket.gethostname()}))
    handle = _take(place, directory, time.monotonic() + patience)
    _held[place] = (handle, threading.get_ident())
    try:
        yield
    finally:
        del _held[place]
        (place / NAME).unlink(missing_ok=True)  # while we still hold the lock
        os.close(handle)


def _take(place: Path, directory: Path, end: float) -> int:
    """Lock the file in `place` and return its descriptor; `directory` is the user's name for it, for errors."""
    path = place / NAME
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise NestfedError(f"Cannot write {path}: {error.strerror}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = _holder(handle)
                os.close(handle)
                if time.monotonic() < end:
                    time.sleep(POLL)
                    continue
                raise NestfedError(_busy(directory, holder)) from error
            warnings.warn(f"{directory} is on a file system without locking; run only one process there.", stacklevel=4)
        # The previous holder deletes its file, so the file we locked may be gone.
        try:
            if os.path.samestat(path.stat(), os.fstat(handle)):
                break
        except FileNotFoundError:
            pass
        os.close(handle)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # on a full disk the lock works without the holder's name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
    return handle


def _holder(handle: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(handle, 1000, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _busy(directory: Path, holder: dict[str, Any]) -> str:
    who = f"Process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "Another process"
    since = f" since {holder['since']}" if "since" in holder else ""
    return f"{who} has been using {directory}{since}: wait until it ends, or choose another directory."


def _forget() -> None:
    """Drop all locks in a forked child, so that a lock ends with the process that took it."""
    for handle, _ in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
