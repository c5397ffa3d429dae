"""A directory is the old one or the new one, whenever the process that replaces it dies."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nestfed.core import NestfedError
from nestfed.study import sealed

OLD = {"model.json": b"old", "model.safetensors": b"0" * 1000}
NEW = {"model.json": b"new", "model.safetensors": b"1" * 1000, "card.md": b"card"}
STEPS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "ctypes.dlsym")


def die_at(step: int, place: Path) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that kills this process before its n-th file operation."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in STEPS and (event == "ctypes.dlsym" or str(place) in str(arguments[0])):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def killed_at(step: int, place: Path) -> bool:
    """Replace the directory in a child process that dies at a step; return whether it died."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(die_at(step, place.parent))
        sealed.write(place, NEW)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.long
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_every_step(atomic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without renameat2, as on some network file systems."""
    if not atomic:
        monkeypatch.setattr(sealed, "_exchanged", lambda a, b: False)
    place, found = tmp_path / "model", []
    for step in range(1, 200):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        sealed.write(place, OLD)
        died = killed_at(step, place)
        left = dict(sealed.read(place, "model").files)
        assert left in (OLD, NEW), step
        found.append(left == NEW)
        assert sealed.write(place, OLD) == sealed.digest_of(OLD)  # nothing that was left behind is in the way
        assert dict(sealed.read(place, "model").files) == OLD
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        if not died:
            break
    assert not died
    assert len(found) > 20
    assert found == sorted(found)  # first always the old one, then always the new one
    assert not found[0]
    assert found[-1]


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_at_every_file(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed.write(tmp_path / "model", OLD)
    whole, count = sealed.write_atomically, iter(range(10))

    def failing(path: Path, content: bytes) -> None:
        if next(count) == step:
            raise NestfedError("No space left on device")
        whole(path, content)

    monkeypatch.setattr(sealed, "write_atomically", failing)
    with pytest.raises(NestfedError, match="No space"):
        sealed.write(tmp_path / "model", NEW)
    assert dict(sealed.read(tmp_path / "model", "model").files) == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.long
def test_a_reader_never_sees_a_mix(tmp_path: Path) -> None:
    place = tmp_path / "model"
    sealed.write(place, OLD)
    over = threading.Event()

    def replace() -> None:
        for i in range(40):
            sealed.write(place, (NEW, OLD)[i % 2])
        over.set()

    writer = threading.Thread(target=replace)
    writer.start()
    seen = []
    while not over.is_set():
        seen.append(dict(sealed.read(place, "model").files))
    writer.join()
    assert all(one in (OLD, NEW) for one in seen)
    assert seen


def test_the_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    digest = sealed.write(tmp_path / "m", NEW)
    assert digest == hashlib.sha256((tmp_path / "m" / "SHA256SUMS").read_bytes()).hexdigest()
    assert digest == sealed.read(tmp_path / "m", "model").digest != sealed.digest_of(OLD)
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "m", capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("OK") == 3


def test_what_is_damaged_is_rejected(tmp_path: Path) -> None:
    place = tmp_path / "m"
    for name in ("model.json", "card.md"):
        sealed.write(place, NEW)
        (place / name).write_bytes(b"other")
        with pytest.raises(NestfedError, match=f"{name} is missing or changed since SHA256SUMS was written"):
            sealed.read(place, "model")
        (place / name).unlink()
        with pytest.raises(NestfedError, match=f"{name} is missing or changed"):
            sealed.read(place, "model")
    (tmp_path / "secret").write_bytes(b"x")
    for line in (f"{hashlib.sha256(b'x').hexdigest()}  ../secret\n", "short\n", ""):
        (place / "SHA256SUMS").write_text(line)
        with pytest.raises(NestfedError, match="SHA256SUMS is not a list of digests"):
            sealed.read(place, "model")
    (place / "SHA256SUMS").unlink()
    with pytest.raises(NestfedError, match="contains no model: SHA256SUMS is missing"):
        sealed.read(place, "model")
    with pytest.raises(NestfedError, match="contains no model: No such file"):
        sealed.read(tmp_path / "nowhere", "model")


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    sealed.write(tmp_path / "model", OLD)
    for force in (False, True):
        with pytest.raises(NestfedError, match="is a file"):
            sealed.reject_used(tmp_path / "file", "model", force=force)
        with pytest.raises(NestfedError, match="not empty and contains no model"):
            sealed.reject_used(tmp_path / "other", "model", force=force)
    with pytest.raises(NestfedError, match="already contains a model: replace it with --force"):
        sealed.reject_used(tmp_path / "model", "model")
    sealed.reject_used(tmp_path / "model", "model", force=True)
    sealed.reject_used(tmp_path / "new", "model")
    (tmp_path / ".model.writing").mkdir()
    (tmp_path / "model").rename(tmp_path / ".model.writing" / "old")  # a process was killed between two renames
    with pytest.raises(NestfedError, match="already contains a model"):
        sealed.reject_used(tmp_path / "model", "model")
