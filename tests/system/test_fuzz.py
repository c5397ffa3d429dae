"""Bad input at scale: whatever bytes come in, the answer is data or one sentence.

No input may give a traceback, hang, run anything, write outside its folder, or take memory without limit. Every target
is fed mutations of good files, from seeds that name the failing input again; hypothesis makes structured nonsense.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestfed_papers.toys import Quadratic
from test_contract import method

from nestfed.core import NestfedError
from nestfed.data import formats
from nestfed.data.tables import load_table
from nestfed.engine import checkpoint
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import from_tables, packaged, parse_overrides, read
from nestfed.experiment.tune import search_space

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


# --- targets ---


@dataclass(frozen=True)
class Target:
    """A reader, and good inputs for it."""

    seeds: Sequence[bytes]
    read: Callable[[Path, bytes], Any]
    share: float = 1.0
    """Of the number of inputs, for a slow reader."""


def file(name: str, read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    def act(folder: Path, content: bytes) -> Any:
        path = folder / name
        path.write_bytes(content)
        return read(path)

    return act


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def image(kind: str, mode: str, size: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, (size, size)).save(buffer, kind)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("cifar/a.bin")
        info.size = 40
        tar.addfile(info, io.BytesIO(bytes(40)))
    return buffer.getvalue()


def cifar(path: Path) -> Any:
    return formats.read_cifar(path, formats.unpack(path, 2 * formats.CIFAR_RECORD), 2)


def tiny() -> dict[str, bytes]:
    jpeg = image("JPEG", "RGB", 64)
    return {
        "t/wnids.txt": b"n01\nn02\n", "t/words.txt": b"n01\tcat\nn02\tdog\n",
        "t/val/val_annotations.txt": b"v0.JPEG\tn01\t0\nv1.JPEG\tn02\t0\n",
        "t/train/n01/images/a.JPEG": jpeg, "t/train/n02/images/b.JPEG": jpeg, "t/val/images/v0.JPEG": jpeg,
        "t/val/images/v1.JPEG": jpeg,
    }  # fmt: skip


def cached(folder: Path, content: bytes) -> Any:
    """An index and an array, both mutated, the checksums mended so that the array is really read."""
    half = len(content) // 2
    (folder / "x.npy").write_bytes(content[half:])
    body = content[:half].decode("utf-8", "replace").replace("SUM", str(zlib.crc32(content[half:])))
    (folder / "index.json").write_bytes(f"{zlib.crc32(body.encode()):08x}\n{body}".encode())
    return formats.read_arrays(folder)


def cached_seed() -> bytes:
    array = npy(np.arange(6.0))
    text = b'{"sums": {"x": SUM}, "note": 1}'
    return text + b" " * (len(array) - len(text)) + array


def parquet_seed() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1.0, 2.0], "b": ["x", "y"], "died": [0, 1]}), buffer)
    return buffer.getvalue()


CSV = b"a,b,died\n1.5,x,0\n2.5,y,1\n,x,0\n"


def saved() -> checkpoint.Saved:
    """Return what a run of SCAFFOLD with three clients saves before its first round."""
    from nestfed.engine.encode import Encoding
    from nestfed.engine.round import RunState
    from nestfed.engine.store import private_fields

    toy, scaffold = Quadratic(3, 2), method("scaffold")
    template = scaffold.init(toy.problem, toy.problem.x0)
    private = {k: torch.stack([v] * 3) for k, v in private_fields(scaffold, template, Encoding()).items()}
    return checkpoint.Saved(RunState.start(scaffold, template, 3), private)


def checkpoint_seed() -> bytes:
    state, private = saved()
    numbers = {name: getattr(state, name) for name in checkpoint._NUMBERS}
    tensors = {"seen": state.seen} | {f"private.{k}": v for k, v in private.items()}
    for group in checkpoint._OF_STATE:
        tensors |= {f"{group}.{k}": v for k, v in getattr(state, group).items()}
    words = {"format": checkpoint.FORMAT, "fingerprint": "f", "numbers": json.dumps(numbers)}
    return b"".join(bytes(block) for block in checkpoint._blocks(tensors, words))


def read_checkpoint(folder: Path, content: bytes) -> Any:
    """As if whoever damaged it had also given it the right name."""
    path = folder / f"round-00000001-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    try:
        return checkpoint.read(folder, "f", torch.device("cpu"), saved())
    finally:
        path.unlink()


def read_study(path: Path) -> Any:
    """Read an experiment and everything that can be asked of it without data."""
    from nestfed.experiment.spec import hyper_parameters

    study = read(path)
    study.digest()
    for name in study.methods:
        variant = study.for_method(name)
        search_space(study, name)
        hyper_parameters(variant.algorithm)
    return study


def overrides(folder: Path, content: bytes) -> Any:
    words = content.decode("utf-8", "replace").split("\x1e")
    return read("demo").with_overrides(parse_overrides(words)).resolved()


def flower_arrays(folder: Path, content: bytes) -> Any:
    flower = pytest.importorskip("nestfed.deploy.flower.messages", reason="deployment is an extra")
    from flwr.app import Array, ArrayRecord

    record = ArrayRecord({"x": Array("float64", (3,), "numpy.ndarray", content)})
    try:
        return flower.tensors_of(record, 100_000)
    except flower.RejectedError as error:  # the coordinator drops the answer and says why
        raise NestfedError(str(error)) from error


def flower_plan(path: Path) -> Any:
    flower = pytest.importorskip("nestfed.deploy.flower.messages", reason="deployment is an extra")
    return flower.read_plan(path)


def plan_seed() -> bytes:
    pytest.importorskip("nestfed.deploy.flower", reason="deployment is an extra")
    from safetensors.numpy import save

    words = {"clients": 3, "shape": [2], "p": 0.5, "classes": ["0", "1"]}
    words["columns"] = json.dumps([["a", None], ["b", ["u"]]])
    arrays = {"mean": np.zeros(2), "deviation": np.ones(2), "gaps": np.zeros(2, np.uint8)}
    return save(arrays, {"plan": json.dumps(words), "token": "0" * 16})


def command_line(folder: Path, content: bytes) -> Any:
    """Words on the command line; a last one sees to it that no run begins."""
    from typer.testing import CliRunner

    from nestfed.cli.main import app

    words = [w for w in content.decode("utf-8", "replace").replace("\x00", "").split("\x1e") if w]
    if words and words[0] not in ("run", "compare", "theory", "cite"):
        words[0] = "run"
    if words and words[0] in ("run", "compare"):
        words = [*words, *["problem.name=none"] * 2]  # twice, lest an option takes one as its value
    found = CliRunner().invoke(app, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.output


DEMO = packaged()["demo"].read_bytes()
TARGETS: dict[str, Callable[[], Target]] = {
    "idx": lambda: Target(
        [bytes((0, 0, 8, 2)) + (2).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(6)],
        file("x-idx2-ubyte", lambda p: formats.read_idx(p, (2, 3))),
    ),
    "idx.gz": lambda: Target(
        [gzip.compress(bytes((0, 0, 8, 1)) + (5).to_bytes(4, "big") + bytes(5))],
        file("x.gz", lambda p: formats.read_idx(p, (5,))),
    ),
    "cifar.bin": lambda: Target([bytes(2 * formats.CIFAR_RECORD)], file("x.bin", cifar)),
    "cifar.xz": lambda: Target([lzma.compress(bytes(2 * formats.CIFAR_RECORD))], file("x.bin.xz", cifar)),
    "cifar.tar": lambda: Target([tarred()], file("x.tar.gz", lambda p: formats.read_tar(p, ["a.bin"], 40))),
    "omniglot.zip": lambda: Target(
        [zipped({f"A/character{i:02d}/{i}.png": image("PNG", "1", 105) for i in range(2)}, m) for m in (0, 8)],
        file("x.zip", lambda p: formats.read_omniglot(p, 2)),
    ),
    "tiny.zip": lambda: Target(
        [zipped(tiny(), 0), zipped(tiny())], file("x.zip", lambda p: formats.read_tiny_imagenet(p, lambda w: w, 1, 1))
    ),
    "npz": lambda: Target(
        [zipped({"x.npy": npy(np.eye(3)), "died.npy": npy(np.arange(3))}, m) for m in (0, 8)],
        file("x.npz", lambda p: formats.read_npz(p, 100_000)),
    ),
    "words": lambda: Target(
        [b"der Hund \n<unk> bellt\n"], file("x.txt", lambda p: formats.read_words(p, 1000, {"<unk>": 0}, False))
    ),
    "cache": lambda: Target([cached_seed()], cached),
    "table.csv": lambda: Target([CSV], file("x.csv", lambda p: load_table(p, "died")), 0.5),
    "table.csv.gz": lambda: Target([gzip.compress(CSV)], file("x.csv.gz", lambda p: load_table(p, "died")), 0.5),
    "table.parquet": lambda: Target([parquet_seed()], file("x.parquet", lambda p: load_table(p, "died"))),
    "table.npz": lambda: Target(
        [zipped({"x.npy": npy(np.ones((3, 2), np.float32)), "died.npy": npy(np.arange(3) % 2)}, 0)],
        file("x.npz", lambda p: load_table(p, "died")),
    ),
    "experiment": lambda: Target([p.read_bytes() for p in packaged().values()], file("x.toml", read_study)),
    "overrides": lambda: Target(
        [b"algorithm.alpha=0.3\x1erun.rounds=20\x1emodel.hidden=[3]", b'data.name="x"\x1eevaluation.keep=best'], overrides
    ),
    "checkpoint": lambda: Target([checkpoint_seed()], read_checkpoint),
    "record": lambda: Target(
        [b'{"round": 1, "loss": 0.5}\n{"round": 2, "loss": null}\n{"round": 3}\n'], file("record.jsonl", read_record), 2.0
    ),
    "flower arrays": lambda: Target([npy(np.arange(3.0)), npy(np.arange(3, dtype=np.int8))], flower_arrays, 2.0),
    "flower plan": lambda: Target([plan_seed()], file("plan.safetensors", flower_plan)),
    "command line": lambda: Target(
        [b"run\x1edemo\x1ealgorithm.name=fedavg\x1e--out\x1ex", b"theory\x1efcsg-m\x1e--N\x1e16\x1eT=100", b"cite\x1efmgda",
         b"compare\x1edemo\x1e--algorithms\x1efedavg,fcsg\x1e--seeds\x1e2"],
        command_line, 0.05,
    ),
}  # fmt: skip


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
        told = ""
        try:
            with watched(inside):
                target.read(inside, content)
        except NestfedError as error:
            told = str(error)
        except BaseException as error:
            raise AssertionError(f"{name}, input {i}: {type(error).__name__}: {error}\n{content[:400]!r}") from error
        assert "\n" not in told, f"{name}, input {i}: {told}"
        assert len(told) < 2000, f"{name}, input {i}: a sentence of {len(told)} characters"
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
    script = Path(__file__).with_name("guided.py")
    command = [sys.executable, str(script), name, str(MANY), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
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


# --- what was found in this way, each mended where it came from ---


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
        read("demo").with_overrides(parse_overrides(["run.rounds\nx=3"]))
    with pytest.raises(NestfedError, match="cannot be read: embedded null byte"):
        read("a\x00b")


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': #<f8', 'fortran_order': False, 'shape': (6,), }" + b" " * 60 + b"\n"


def test_an_array_whose_header_numpy_cannot_even_split(tmp_path: Path) -> None:
    """numpy raises TokenError, which nobody expects: a site could stop the coordinator with it."""
    (tmp_path / "x.npy").write_bytes(HEADER)
    body = json.dumps({"sums": {"x": zlib.crc32(HEADER)}, "note": 1})
    (tmp_path / "index.json").write_text(f"{zlib.crc32(body.encode()):08x}\n{body}")
    assert formats.read_arrays(tmp_path) is None
    with pytest.raises(NestfedError, match="arrays that cannot be read"):
        flower_arrays(tmp_path, HEADER)
    huge = HEADER.replace(b"#<f8'", b"'<f8'").replace(b"(6,)", b"(2**50,)"[:4])
    with pytest.raises(NestfedError, match="arrays that cannot be read"):
        flower_arrays(tmp_path, huge)


# --- bombs and lies ---


def test_bombs_are_refused_before_they_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes, in every packing that we open, and shapes that lie."""
    monkeypatch.setattr("nestfed.data.tables.MOST_BYTES", 1_000_000)
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
