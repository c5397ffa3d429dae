"""Bad input at scale: whatever bytes come in, the answer is data or one sentence.

No input may give a traceback, hang, run anything, write outside its folder, or take memory without limit. Every target
is fed mutations of good files, from seeds that name the failing input again; hypothesis makes structured nonsense.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestfed.core import NestfedError
from nestfed.data import formats
from nestfed.data.tables import load_table
from nestfed.experiment.spec import from_tables, parse_overrides, read
from nestfed.experiment.tune import search_space
from tests.system.targets import TARGETS, npy, read_study, zipped

ROOT = Path(__file__).parents[2]
FEW, MANY = 120, 6000
SECONDS = 10
MEMORY = 600_000_000
"""Bytes that a target may add to this process at most; every limit of a reader is far below."""

# --- watching ---

_watching: list[tuple[Path, list[str]]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    folder, found = _watching[-1]
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect"):
        found.append(f"{event} {arguments!r}")
    if event == "open" and isinstance(arguments[0], str | bytes) and isinstance(arguments[2], int):
        path = Path(os.fsdecode(arguments[0]))
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and folder not in path.resolve().parents and str(path) != os.devnull:
            found.append(f"writes {path}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Refuse side effects and more than so many seconds of work (not of waiting, on a busy machine)."""
    found: list[str] = []

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _watching.append((folder.resolve(), found))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        _watching.pop()
    assert not found, found


# --- mutation ---

TOKENS = [
    b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff" * 8, b"\x80" + b"\x00" * 7, b"../", b"/", b"-1", b"1e999",
    b"nan", b"{", b"}", b"[" * 50, b'"', b"\n", b",", b"=", b"\xed\xa0\x80", b"%s", b"O", b"99999999999999999999", b"PK\x05\x06",
]  # fmt: skip


def mutated(content: bytes, luck: random.Random) -> bytes:
    """Change some bytes: flip, cut, double, move, overwrite with something nasty."""
    out = bytearray(content)
    for _ in range(luck.choice((1, 1, 1, 2, 4, 16))):
        place = luck.randrange(len(out) + 1)
        end = min(len(out), place + luck.choice((1, 2, 4, 8, 64)))
        kind = luck.randrange(7)
        if kind == 0 and place < len(out):
            out[place] ^= 1 << luck.randrange(8)
        elif kind == 1:
            del out[place:end]
        elif kind == 2:
            out[place:place] = out[place:end]
        elif kind == 3:
            token = luck.choice(TOKENS)
            out[place : place + len(token)] = token
        elif kind == 4:
            out[place:place] = luck.choice(TOKENS)
        elif kind == 5:
            del out[place:]
        elif place < len(out):
            out[place] = luck.randrange(256)
    return bytes(out)


def attack(name: str, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Feed a target; return how many inputs it took."""
    target = TARGETS[name]()
    inside = folder / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    for seed in target.seeds:
        with contextlib.suppress(NestfedError):
            target.read(inside, seed)  # imports what it needs, before anybody watches
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = round(count * target.share)
    for i in range(total):
        luck = random.Random(f"{name} {i}")
        content = mutated(luck.choice(target.seeds), luck)
        message = ""
        try:
            with watched(inside):
                target.read(inside, content)
        except NestfedError as error:
            message = str(error)
        except BaseException as error:
            raise AssertionError(f"{name}, input {i}: {type(error).__name__}: {error}\n{content[:400]!r}") from error
        _, *more = message.split("\n")  # several problems are a list, one line each
        assert all(line.startswith("- ") for line in more), f"{name}, input {i}: {message}"
        assert len(message) < 2000, f"{name}, input {i}: a sentence of {len(message)} characters"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < MEMORY, f"{name} took {grown:,} bytes"
    assert [p.name for p in folder.iterdir()] == ["inside"]
    return total


@pytest.mark.parametrize("name", TARGETS)
def test_some_bad_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attack(name, FEW, tmp_path, monkeypatch) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_bad_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attack(name, MANY, tmp_path, monkeypatch) > 0


def test_many_are_more_than_a_hundred_thousand() -> None:
    assert sum(round(MANY * make().share) for make in TARGETS.values()) >= 100_000


GUIDED = ("idx", "npz", "words", "cache", "table.csv", "experiment", "overrides", "checkpoint", "record", "flower plan")
"""What is read by Python, so that its branches can be seen; compiled readers see random bytes above."""


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDED)
def test_inputs_that_follow_the_branches(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="needs atheris, which is not built for this system")
    command = [sys.executable, "-m", "tests.system.guided", name, str(MANY), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {MANY} runs" in done.stderr


# --- structured nonsense ---

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["fedavg", "mean", "digits"]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
settings_ = st.sampled_from(
    [
        "name",
        "rounds",
        "q",
        "seed",
        "count",
        "share",
        "reduce",
        "privacy",
        "eta",
        "clients",
        "keep",
        "workers",
        "tune",
        "x",
    ]
)
tables = st.dictionaries(
    st.sampled_from(
        ["data", "partition", "model", "algorithm", "run", "evaluation", "exchange", "execution", "methods", "rub"]
    ),
    st.one_of(trees, st.dictionaries(settings_, trees, max_size=4)),
    max_size=5,
)


@given(tables)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_experiments_of_any_shape(found: dict[str, Any]) -> None:
    with contextlib.suppress(NestfedError):
        study = from_tables(found)
        study.digest()
        for name in study.methods:
            with contextlib.suppress(NestfedError):
                study.for_method(name)
                search_space(study, name)


# --- defects that fuzzing found ---


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("[algorithm]\neta = " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("methods = 3", r"\[methods\] must be a table of tables"),
        ("[methods]\na = 3", r"methods\.a must be a table"),
        ("[methods.a]\ntune = 3", r"methods\.a\.tune must be a table"),
        ("[methods.a]\nalgorithm = [1]", r"methods\.a\.algorithm must be a table"),
        ("[exchange]\nshare = 1" + "0" * 400, r"exchange\.share is a whole number beyond 64 bits"),
        ("[algorithm]\neta = 2026-01-01", r"algorithm\.eta must be a number"),
        ("[data]\npositive = [10:30:00]", r"data\.positive must be a number"),
    ],
)
def test_experiments_that_once_gave_a_traceback(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(NestfedError, match=sentence):
        read_study(tmp_path / "x.toml")


def test_settings_that_once_gave_a_traceback() -> None:
    with pytest.raises(NestfedError, match="nested too deeply"):
        parse_overrides(["algorithm.eta=" + "[" * 100_000])
    with pytest.raises(NestfedError, match=r"no setting 'run\.rounds\\nx'; did you mean run\.rounds\?"):
        read("average-precision").with_overrides(parse_overrides(["run.rounds\nx=3"]))
    with pytest.raises(NestfedError, match="cannot be read: embedded null byte"):
        read("a\x00b")


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': #<f8', 'fortran_order': False, 'shape': (6,), }" + b" " * 60 + b"\n"


def test_an_array_whose_header_numpy_cannot_even_split(tmp_path: Path) -> None:
    """numpy raises TokenError, which nobody expects."""
    (tmp_path / "x.npy").write_bytes(HEADER)
    body = json.dumps({"sums": {"x": zlib.crc32(HEADER)}, "note": 1})
    (tmp_path / "index.json").write_text(f"{zlib.crc32(body.encode()):08x}\n{body}")
    assert formats.read_arrays(tmp_path) is None


# --- bombs and lies ---


def test_bombs_are_refused_before_they_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes, in every packing that we open, and shapes that lie."""
    monkeypatch.setattr("nestfed.data.readers.MOST_BYTES", 1_000_000)
    zeros = bytes(100_000_000)
    lie = npy(np.zeros(3)).replace(b"(3,)", b"(99,")[:-24].replace(b"(99,", b"(9,)")
    cases: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "x.gz": (gzip.compress(zeros, 1), lambda p: formats.read_idx(p, (5,))),
        "x.xz": (lzma.compress(zeros, preset=0), lambda p: formats.unpack(p, 1000)),
        "x.csv.gz": (gzip.compress(b"a,died\n" + b"1,0\n" * 500_000, 1), lambda p: load_table(p, "died")),
        "x.npz": (zipped({"x.npy": zeros}), lambda p: formats.read_npz(p, 10_000)),
        "y.npz": (zipped({"x.npy": lie}), lambda p: formats.read_npz(p, 10_000)),
    }
    del zeros
    for name, (content, _) in cases.items():
        (tmp_path / name).write_bytes(content)
    tracemalloc.start()
    for name, (_, open_) in cases.items():
        tracemalloc.reset_peak()
        with watched(tmp_path), pytest.raises(NestfedError):
            open_(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000, name
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-nestfed", "a/../../evil", "C:\\evil", "..\\evil"])
def test_archives_cannot_write_anywhere(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    array = npy(np.zeros(3))
    (inside / "x.npz").write_bytes(zipped({f"{name}.npy": array, "x.npy": array}))
    with watched(inside):
        formats.read_npz(inside / "x.npz", 10_000)
    assert [p.name for p in tmp_path.iterdir()] == ["inside"]
    assert [p.name for p in inside.iterdir()] == ["x.npz"]
