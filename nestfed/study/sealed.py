"""A directory that is whole or absent: built beside, checked by one digest, swapped into place.

`SHA256SUMS` lists the SHA-256 of every file, as `sha256sum` writes it; the SHA-256 of that list is the directory's digest.

POSIX renames a directory only onto an empty one. On Linux the new directory and the old one exchange their names in one
step (renameat2). On file systems without this, the old one first moves to `.NAME.writing/old`, and `read` finds it there
if the process dies before the new one has its name. So a killed process leaves the old directory or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nestfed.core import NestfedError
from nestfed.files import locked, make_directory, write_atomically

SUMS = "SHA256SUMS"
PATIENCE = 10.0
"""Seconds to wait for another process that writes the same directory."""


@dataclass(frozen=True)
class Sealed:
    """The files of a directory by name, and its digest."""

    files: Mapping[str, bytes]
    digest: str


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """Return the content of SHA256SUMS."""
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the digest of a directory with these files."""
    return hashlib.sha256(sums_of(files)).hexdigest()


def reject_used(place: Path, what: str, marks: tuple[str, ...] = (SUMS,), *, force: bool = False) -> None:
    """Reject a place that is not free: a file, something else than `what`, or `what` itself unless `force`."""
    there = _existing(place)
    if not there.exists():
        return
    if not there.is_dir():
        raise NestfedError(f"{place} is a file; choose another directory with --out.")
    names = {p.name for p in there.iterdir() if not p.name.startswith(".")}
    if names and not names & set(marks):
        raise NestfedError(f"{place} is not empty and contains no {what}; choose another directory with --out.")
    if names and not force:
        raise NestfedError(
            f"{place} already contains a {what}: replace it with --force (force=True in Python), or choose another directory."
        )


def write(place: Path, files: Mapping[str, bytes]) -> str:
    """Write the files as the whole content of a directory; return its digest. See `reject_used` for what is replaced."""
    place = place.resolve()
    workshop = make_directory(_workshop(place))
    with locked(workshop, PATIENCE):
        _restore(place)
        shutil.rmtree(workshop / "new", ignore_errors=True)
        try:
            _build(workshop / "new", files)
            _swap(workshop / "new", place, workshop / "old")
            _sync(place.parent)
        except OSError as error:
            raise NestfedError(
                f"{place} cannot be replaced: {error.strerror}; choose a directory inside it."
            ) from error
        finally:
            _restore(place)
            shutil.rmtree(workshop, ignore_errors=True)
    return digest_of(files)


def _build(new: Path, files: Mapping[str, bytes]) -> None:
    make_directory(new)
    for name in sorted(files):
        write_atomically(new / name, files[name])
    write_atomically(new / SUMS, sums_of(files))
    _sync(new)


def read(place: Path, what: str) -> Sealed:
    """Return the files that SHA256SUMS lists; reject the directory if one of them differs."""
    while True:
        try:
            here = os.open(
                _existing(place), os.O_RDONLY | os.O_DIRECTORY
            )  # the same directory, even if it is replaced now
        except OSError as error:
            raise NestfedError(f"{place} contains no {what}: {error.strerror}.") from error
        try:
            content = _content(here, SUMS)
            listed = {} if content is None else _listed(place, what, content)
            found = {name: _content(here, name) for name in listed}
            replaced = not _is(here, _existing(place))
        finally:
            os.close(here)
        if not replaced:
            break
    if content is None:
        raise NestfedError(f"{place} contains no {what}: {SUMS} is missing.")
    files = {name: content for name, content in found.items() if content is not None and _sha(content) == listed[name]}
    wrong = [name for name in found if name not in files]
    if wrong:
        raise NestfedError(
            f"The {what} in {place} is damaged: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or changed "
            f"since {SUMS} was written; copy it again, or train again."
        )
    return Sealed(files, digest_of(files))


def exists(place: Path) -> bool:
    """Return whether a place holds a sealed directory."""
    return (_existing(place) / SUMS).is_file()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is(directory: int, place: Path) -> bool:
    """Return whether an open directory still has this name."""
    try:
        return os.path.samestat(os.fstat(directory), place.stat())
    except FileNotFoundError:
        return False


def _listed(place: Path, what: str, content: bytes) -> dict[str, str]:
    """Return the digests in SHA256SUMS by file name."""
    pairs = [line.split("  ", 1) for line in content.decode("utf-8", "replace").splitlines()]
    if not pairs or any(len(pair) != 2 or not pair[1] or "/" in pair[1] or pair[1] in (".", "..") for pair in pairs):
        raise NestfedError(f"The {what} in {place} is damaged: {SUMS} is not a list of digests; copy it again.")
    return {name: digest for digest, name in pairs}


def _content(directory: int, name: str) -> bytes | None:
    """Return the content of a file in an open directory, or None if there is no such file."""
    try:
        handle = os.open(name, os.O_RDONLY, dir_fd=directory)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _workshop(place: Path) -> Path:
    return place.parent / f".{place.name}.writing"


def _existing(place: Path) -> Path:
    """Return the directory, or where a killed process left it."""
    old = _workshop(place.resolve()) / "old"
    return old if not place.exists() and old.exists() else place


def _restore(place: Path) -> None:
    """Give the directory that a killed process moved aside its name back."""
    old = _workshop(place) / "old"
    if old.exists() and not place.exists():
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _swap(new: Path, place: Path, aside: Path) -> None:
    """Give the new directory its name; the old one, if any, gets another."""
    if not place.exists():
        new.rename(place)
    elif not _exchanged(new, place):
        place.rename(aside)
        new.rename(place)


def _exchanged(a: Path, b: Path) -> bool:
    """Exchange the names of two directories in one step; return whether this system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(at, os.fsencode(a), at, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
