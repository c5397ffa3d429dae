"""Every reader of outside input, with good inputs for it: `test_fuzz` and `guided` feed them bad ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import Quadratic

from nestfed.data import formats
from nestfed.data.tables import load_table
from nestfed.engine import checkpoint
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import packaged, parse_overrides, read
from nestfed.experiment.tune import search_space
from tests.methods import method


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
    """An index and an array, both mutated, the checksums corrected so that the array is really read."""
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
    return read("average-precision").with_overrides(parse_overrides(words)).resolved()


def message(folder: Path, content: bytes) -> Any:
    """A message between coordinator and site."""
    from nestfed.deploy.wire import unpack

    return unpack(content, 100_000).arrays()


def flower_plan(path: Path) -> Any:
    flower = pytest.importorskip("nestfed.deploy.flower.messages", reason="deployment is an extra")
    return flower.read_plan(path)


def plan_seed() -> bytes:
    pytest.importorskip("nestfed.deploy.flower", reason="deployment is an extra")
    from nestfed.deploy.wire import pack
    from nestfed.queries.agreement import Agreement

    words, _ = Agreement(3, (2,), ("0", "1"), 0.5).packed()
    arrays = {"mean": np.zeros(2), "deviation": np.ones(2), "gaps": np.zeros(2, np.uint8)}
    return pack({"plan": words | {"columns": [["a", None], ["b", ["u"]]]}, "token": "0" * 16}, arrays)


def message_seed() -> bytes:
    from nestfed.deploy.wire import pack

    return pack({"client": 1, "report": {"moved": 0.5}}, {"a": np.arange(3.0), "b": np.arange(4, dtype=np.int8)})


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


DEMO = packaged()["average-precision"].read_bytes()
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
    "message": lambda: Target([message_seed()], message, 2.0),
    "flower plan": lambda: Target([plan_seed()], file("plan.safetensors", flower_plan)),
    "command line": lambda: Target(
        [b"run\x1eaverage-precision\x1ealgorithm.name=fedavg\x1e--out\x1ex", b"theory\x1efcsg-m\x1e--N\x1e16\x1eT=100", b"cite\x1efmgda",
         b"compare\x1eaverage-precision\x1e--algorithms\x1efedavg,fcsg\x1e--seeds\x1e2"],
        command_line, 0.05,
    ),
}  # fmt: skip
