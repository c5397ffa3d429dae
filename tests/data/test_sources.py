"""Data sets: published counts and checksums on the real files, damage of every kind on small ones."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import lzma
import os
import shutil
import stat
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nestfed.cli.main import main
from nestfed.core import DATASETS, NestfedError
from nestfed.data import files, formats, readers, sources, tables
from nestfed.data.encoding import Column
from nestfed.data.faults import TableError
from nestfed.data.files import File, Found
from nestfed.data.sources import Dataset, Source, Split, load, load_table


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's folders or the network by accident."""
    monkeypatch.setenv("NESTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NESTFED_DATA", raising=False)
    monkeypatch.delenv("NESTFED_MIRROR", raising=False)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all the examples of a hypothesis test."""
    return tmp_path_factory.mktemp("shelf")


def one_sentence(error: pytest.ExceptionInfo[NestfedError], *parts: object) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    for part in parts:
        assert str(part) in message


# ---------------------------------------------------------------- the real files

data = pytest.mark.data


@data
def test_catalogue_agrees_with_the_list_beside_the_data(real: Path) -> None:
    rows = [line.split(maxsplit=1) for line in (real / "SHA256SUMS").read_text().splitlines()]
    listed = {name.lstrip("*").removeprefix("./"): digest for digest, name in rows}
    named: dict[str, list[File]] = {}  # Omniglot has two accepted versions under one name
    for source in sources.names():
        for file in itertools.chain(*source.forms):
            named.setdefault(f"{source.folder}/{file.name}", []).append(file)
    shared = named.keys() & listed.keys()
    assert len(shared) == 28  # 34 files less three eICU tables that are not used and three descriptions
    for name in shared:
        file = next(f for f in named[name] if f.sha256 == listed[name])
        assert file.size == (real / name).stat().st_size


@data
@pytest.mark.parametrize("name", [s.name for s in sources.names() if s.forms and s.name != "tiny-imagenet-200"])
def test_check_finds_nothing_wrong(real: Path, name: str) -> None:
    checked = sources.check(name, real)
    assert checked
    assert [c.problem for c in checked] == [None] * len(checked)


MNIST_COUNTS = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion-mnist": ([6000] * 10, [1000] * 10),
}


@data
@pytest.mark.parametrize(
    ("name", "mean", "std", "first"),
    [
        ("mnist", 0.1307, 0.3081, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]),
        ("fashion-mnist", 0.2860, 0.3530, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_idx_sets(real: Path, name: str, mean: float, std: float, first: list[int]) -> None:
    split = load(name)
    assert split.train.x.shape == (60000, 1, 28, 28)
    assert split.test.x.shape == (10000, 1, 28, 28)
    assert split.train.x.dtype == np.uint8
    assert split.train.y.dtype == np.int64
    grey, shares = np.arange(256) / 255, np.bincount(split.train.x.ravel(), minlength=256) / split.train.x.size
    assert shares @ grey == pytest.approx(mean, abs=5e-5)
    assert (shares @ (grey - mean) ** 2) ** 0.5 == pytest.approx(std, abs=5e-5)
    assert split.train.y[:10].tolist() == first
    counts = MNIST_COUNTS[name]
    assert np.bincount(split.train.y).tolist() == counts[0]
    assert np.bincount(split.test.y).tolist() == counts[1]
    assert len(split.train.classes) == 10


@data
def test_plain_idx_is_accepted(real: Path, tmp_path: Path) -> None:
    for path in (real / "mnist").glob("*.gz"):
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    assert np.array_equal(load("mnist", tmp_path).test.x, load("mnist").test.x)


@data
def test_second_load_is_fast_and_mapped(real: Path) -> None:
    load("fashion-mnist")
    began = time.perf_counter()
    split = load("fashion-mnist")
    assert time.perf_counter() - began < 0.3
    assert not split.train.x.flags.owndata
    assert not split.train.x.flags.writeable


CIFAR_MD5 = [
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
]


@data
def test_cifar(real: Path) -> None:
    split = load("cifar-10")
    parts = [*((split.train.x[i : i + 10000], split.train.y[i : i + 10000]) for i in range(0, 50000, 10000))]
    for (x, y), md5 in zip([*parts, (split.test.x, split.test.y)], CIFAR_MD5):
        batch = np.concatenate([y[:, None].astype(np.uint8), x.reshape(10000, -1)], 1)
        assert hashlib.md5(batch.tobytes()).hexdigest() == md5
    assert np.bincount(split.train.y).tolist() == [5000] * 10
    assert np.bincount(split.test.y).tolist() == [1000] * 10
    assert split.train.x.mean((0, 2, 3)) / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert list(split.train.classes) == (real / "cifar-10/batches.meta.txt").read_text().split()


@data
def test_omniglot(real: Path) -> None:
    split = load("omniglot")
    for part, images, alphabets in ((split.train, 19280, 30), (split.test, 13180, 20)):
        assert part.x.shape == (images, 1, 28, 28)
        assert len(set(part.columns["alphabet"])) == alphabets
        assert np.bincount(part.y).tolist() == [20] * (images // 20)
        assert len(part.classes) == len(set(part.columns["character"])) == images // 20
        assert part.classes[int(part.y[-1])] == part.columns["character"][-1]
        assert 0 < part.x.mean() < 40  # ink on an empty background
    assert not set(split.train.columns["alphabet"]) & set(split.test.columns["alphabet"])
    with zipfile.ZipFile(real / "omniglot/images_background.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".png"))
        for i in (0, 7, 10001, 19279):
            ink = ~np.asarray(Image.open(io.BytesIO(archive.read(names[i]))).convert("1"))
            fine = np.kron(ink, np.ones((4, 4)))  # each pixel in quarters: 28 blocks of 15
            area = fine.reshape(28, 15, 28, 15).mean((1, 3)) * 255
            assert np.abs(area - split.train.x[i, 0]).max() <= 0.5 + 1e-9
            assert split.train.columns["alphabet"][i] == names[i].split("/")[1]


@data
def test_wikitext(real: Path) -> None:
    split = load("wikitext-2")
    assert split.validation is not None
    parts = {"train": split.train, "valid": split.validation, "test": split.test}
    assert {name: len(part) for name, part in parts.items()} == {"train": 2088628, "valid": 217646, "test": 245569}
    assert len(split.train.classes) == 33278
    vocabulary = np.array(split.train.classes)
    eos = split.train.classes.index("<eos>")
    for (name, part), lines in zip(parts.items(), (36718, 3760, 4358)):
        assert int((part.x == eos).sum()) == lines
        assert part.x.dtype == np.int32
        assert part.y.size == 0
        text = (real / f"wikitext-2/{name}.txt").read_text(encoding="utf-8")
        assert [w for w in vocabulary[part.x[:5000]] if w != "<eos>"] == text.split()[: sum(part.x[:5000] != eos)]


@data
@pytest.mark.long
def test_tiny_imagenet(real: Path) -> None:
    split = load("tiny-imagenet")
    assert split.train.x.shape == (10000, 3, 64, 64)
    assert split.test.x.shape == (1000, 3, 64, 64)
    assert np.bincount(split.train.y).tolist() == [500] * 20
    assert np.bincount(split.test.y).tolist() == [50] * 20
    assert split.train.classes[0] == "goldfish, Carassius auratus"
    with zipfile.ZipFile(real / "tiny-imagenet/tiny-imagenet-20.zip") as archive:
        raw = archive.read("tiny-imagenet-20/train/n01443537/images/n01443537_0.JPEG")
        first = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
        assert np.array_equal(split.train.x[0], first.transpose(2, 0, 1))
        annotated = archive.read("tiny-imagenet-20/val/val_annotations.txt").decode().split("\n")[0].split("\t")
        wnids = sorted(archive.read("tiny-imagenet-20/wnids.txt").decode().split())
        assert wnids[split.test.y[0]] == annotated[1]
        assert split.test.classes[split.test.y[0]] == "refrigerator, icebox"


@data
def test_heart_disease(real: Path) -> None:
    split = load("heart-disease")
    train = split.train
    assert len(split.test) == 0
    assert train.x.shape == (920, 13)
    counts = {
        str(h): (int((train.columns["hospital"] == h).sum()), int(train.y[train.columns["hospital"] == h].sum()))
        for h in np.unique(train.columns["hospital"])
    }
    assert counts == {"cleveland": (303, 139), "hungarian": (294, 106), "switzerland": (123, 115), "va": (200, 149)}
    assert train.features[0] == "age"
    assert train.x[0].tolist()[:5] == [63, 1, 1, 145, 233]
    missing = sum(p.read_text().count("?") for p in (real / "heart-disease").glob("processed.*.data"))
    assert int(np.isnan(train.x).sum()) == missing


@data
def test_eicu(real: Path) -> None:
    split = load("eicu")
    train = split.train
    assert len(split.test) == 0
    assert (len(train), int(train.y.sum())) == (2492, 212)
    assert len(set(train.columns["hospital"])) == 186
    assert set(train.columns["region"]) == {"Midwest", "South", "West", "Northeast", "unknown"}
    patient = pd.read_csv(real / "eicu-demo/patient.csv.gz")
    patient = patient[patient["hospitaldischargestatus"].notna()].reset_index(drop=True)
    assert train.columns["patient"].tolist() == patient["uniquepid"].tolist()
    age = train.x[:, train.features.index("age")]
    assert int((age == 90).sum()) == int((patient["age"] == "> 89").sum())
    assert not (train.x[:, [train.features.index(f) for f in tables.EICU_APS]] == -1).any()
    male = train.x[:, train.features.index("gender=Male")]
    assert int(male.sum()) == int((patient["gender"] == "Male").sum())
    aps = pd.read_csv(real / "eicu-demo/apacheApsVar.csv.gz")
    row = aps.iloc[100]
    at = patient.index[patient["patientunitstayid"] == row["patientunitstayid"]][0]
    assert train.x[at, train.features.index("heartrate")] == row["heartrate"]


@data
def test_eicu_does_not_leak_the_outcome(real: Path) -> None:
    from sklearn.metrics import roc_auc_score

    train = load("eicu").train
    leaks = ("discharge", "died", "death", "expired", "mortality", "los", "predict", "actual", "score", "today", "saps")
    for feature in train.features:
        column = feature.split("=")[0]
        assert not any(leak in column for leak in leaks), feature
        values = train.x[:, train.features.index(feature)]
        known = ~np.isnan(values)
        if len(set(train.y[known])) == 2 and known.sum() > 200:
            auroc = roc_auc_score(train.y[known], values[known])
            assert 0.2 < auroc < 0.8, (feature, auroc)  # diedinhospital or discharge fields are far outside


@data
@pytest.mark.parametrize("flip", [0, 5000, -1])
def test_a_flipped_byte_of_a_real_file_is_refused(real: Path, tmp_path: Path, flip: int) -> None:
    shutil.copytree(real / "heart-disease", tmp_path / "heart-disease", copy_function=shutil.copyfile)
    path = tmp_path / "heart-disease/processed.va.data"
    content = bytearray(path.read_bytes())
    content[flip] ^= 1
    path.write_bytes(content)
    with pytest.raises(NestfedError) as error:
        load("heart-disease", tmp_path)
    one_sentence(error, path, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f")
    problems = [c for c in sources.check("heart-disease", tmp_path) if c.problem]
    assert [c.path for c in problems] == [path]


@data
def test_fetch_from_a_mirror_of_the_folder(real: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = load("eicu").train
    monkeypatch.delenv("NESTFED_DATA")
    monkeypatch.setenv("NESTFED_CACHE", str(tmp_path))
    content = {f"eicu-demo/{p.name}": p.read_bytes() for p in (real / "eicu-demo").iterdir()}
    with serving(content) as server:
        monkeypatch.setenv("NESTFED_MIRROR", server.url)
        assert np.array_equal(load("eicu").train.x, expected.x, equal_nan=True)
    assert np.array_equal(load("eicu").train.y, expected.y)  # now without the server
    assert not list(tmp_path.rglob("*.part"))


# ---------------------------------------------------------------- embedded data sets, the catalogue


def test_digits() -> None:
    split = load("digits")
    assert (len(split.train), len(split.test)) == (1347, 450)
    assert split.train.x.shape[1:] == (1, 8, 8)
    assert split.train.x.dtype == np.uint8
    assert split.train.x.max() == 255
    both = np.concatenate([split.train.y, split.test.y])
    assert np.bincount(both).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(np.bincount(split.test.y) - np.bincount(both) / 4).max() < 1
    assert np.array_equal(load("digits").test.x, split.test.x)


def test_breast_cancer() -> None:
    split = load("breast-cancer")
    both = np.concatenate([split.train.y, split.test.y])
    assert np.bincount(both).tolist() == [212, 357]
    assert split.train.classes == ("malignant", "benign")
    assert split.train.x.shape == (426, 30)
    assert split.train.features[0] == "mean radius"
    assert sources.check("breast-cancer") == ()


def test_catalogue_is_complete() -> None:
    for source in sources.names():
        assert source.about
        assert source.licence
        assert source.examples
        if source.forms:
            assert any(all(f.url for f in form) for form in source.forms), f"{source.name} has no public address"
        for file in itertools.chain(*source.forms):
            assert len(file.sha256) == 64
            assert file.size > 0


def test_unknown_name_is_corrected() -> None:
    with pytest.raises(NestfedError) as error:
        load("fasion-mnist")
    one_sentence(error, "fashion-mnist")


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist/train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(NestfedError) as error:
        load("mnist", tmp_path)
    one_sentence(error, tmp_path, "train-images-idx3-ubyte,", "t10k-labels-idx1-ubyte ")
    assert all(c.problem for c in sources.check("mnist", tmp_path))


@pytest.mark.parametrize("name", ["data_batch_1", "cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1"])
def test_cifar_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / "cifar-10" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x80\x04.")
    for folder in (tmp_path, None):
        monkeypatch.setenv("NESTFED_DATA", str(tmp_path))
        with pytest.raises(NestfedError) as error:
            load("cifar-10", folder)
        one_sentence(error, path.name, "pickle", "cifar-10-binary.tar.gz")


def test_no_pickle_in_the_modules() -> None:
    for module in (sources, formats, files, readers, tables):
        code = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert "import pickle" not in code
        assert "allow_pickle=True" not in code
        assert "extractall" not in code


def test_dataset_refuses_unequal_lengths() -> None:
    with pytest.raises(NestfedError, match="3 values of 'y'"):
        Dataset(np.zeros((2, 1)), np.zeros(3, np.int64))
    with pytest.raises(NestfedError, match="hospital"):
        Dataset(np.zeros((2, 1)), np.zeros(2, np.int64), {"hospital": np.zeros(1)})
    with pytest.raises(NestfedError, match="shape"):
        Dataset(np.zeros((2, 3)), np.zeros(2, np.int64), schema=(Column("a"), Column("b")))
    some = Dataset(np.arange(6).reshape(3, 2), np.arange(3), {"site": np.array(["a", "b", "c"])}).take([2, 0])
    assert some.y.tolist() == [2, 0]
    assert some.columns["site"].tolist() == ["c", "a"]


# ---------------------------------------------------------------- formats: round trips


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(d.to_bytes(4, "big") for d in array.shape) + array.tobytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
SMALL = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("end", PACKERS)
def test_idx_round_trip(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"images{end}"
    path.write_bytes(PACKERS[end](idx(SMALL)))
    assert np.array_equal(formats.read_idx(path, (2, 3, 4)), SMALL)


@pytest.mark.parametrize("end", PACKERS)
def test_idx_truncated_anywhere(tmp_path: Path, end: str) -> None:
    whole = PACKERS[end](idx(SMALL))
    path = tmp_path / f"images{end}"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(NestfedError) as error:
            formats.read_idx(path, (2, 3, 4))
        one_sentence(error, path)


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_a_flipped_byte_never_changes_what_is_read(tmp_path: Path, end: str) -> None:
    whole = PACKERS[end](idx(SMALL))
    path = tmp_path / f"images{end}"
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes((whole[i] ^ 0x10,)) + whole[i + 1 :])
        with contextlib.suppress(NestfedError):  # a gzip header has bytes without a meaning
            assert np.array_equal(formats.read_idx(path, (2, 3, 4)), SMALL)


@pytest.mark.parametrize(
    "header",
    [
        bytes((0, 0, 8, 3)) + b"\xff" * 12,  # 2^96 bytes
        bytes((0, 0, 8, 3)) + b"\x7f\xff\xff\xff" + b"\0\0\0\1" * 2,
        bytes((0, 0, 13, 3)) + idx(SMALL)[4:16],  # floats
        bytes((0, 0, 8, 255)) + idx(SMALL)[4:16],
        bytes((0, 0, 8, 3)) + b"\0" * 12,
        b"PK\3\4" + idx(SMALL)[4:16],
    ],
    ids=["2^96", "2^31", "floats", "255 dimensions", "empty", "zip"],
)
def test_idx_header_with_wrong_sizes(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(header + SMALL.tobytes()))
    with pytest.raises(NestfedError) as error:
        formats.read_idx(path, (2, 3, 4))
    one_sentence(error, path, "(2, 3, 4)")


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_bombs_are_refused(tmp_path: Path, end: str) -> None:
    import tracemalloc

    path = tmp_path / f"bomb{end}"
    path.write_bytes(PACKERS[end](bytes(32 << 20)))
    tracemalloc.start()
    with pytest.raises(NestfedError) as error:
        formats.unpack(path, 1000)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20  # xz itself takes 8 MiB
    tracemalloc.stop()
    one_sentence(error, path, "more than 1,000 bytes")


def cifar(n: int, seed: int = 0) -> bytes:
    table = np.random.default_rng(seed).integers(0, 256, (n, 3073), np.uint8)
    table[:, 0] %= 10
    return table.tobytes()


def test_cifar_round_trip_and_damage(tmp_path: Path) -> None:
    raw = cifar(3)
    x, y = formats.read_cifar(tmp_path, raw, 3)
    assert b"".join(bytes((int(label),)) + pixels.tobytes() for pixels, label in zip(x, y)) == raw
    for length in (0, 1, 3072, 3073, 2 * 3073, 3 * 3073 - 1):
        with pytest.raises(NestfedError, match="3 records"):
            formats.read_cifar(tmp_path, raw[:length], 3)
    with pytest.raises(NestfedError, match="label 10"):
        formats.read_cifar(tmp_path, b"\x0a" + raw[1:], 3)


def test_cifar_from_the_published_archive(tmp_path: Path) -> None:
    size = 2 * 3073
    batches = {name: cifar(2, i) for i, name in enumerate(sources.CIFAR_BATCHES)}
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_tar(path, {f"cifar-10-batches-bin/{name}": content for name, content in batches.items()})
    assert formats.read_tar(path, sources.CIFAR_BATCHES, size) == list(batches.values())
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:length])
        with contextlib.suppress(NestfedError):  # only the padding at the end may be lost
            assert formats.read_tar(path, sources.CIFAR_BATCHES, size) == list(batches.values())
            assert length > 0.9 * len(whole)
    write_tar(path, {f"x/{name}": content for name, content in list(batches.items())[:5]})
    with pytest.raises(NestfedError, match=r"lacks test_batch\.bin"):
        formats.read_tar(path, sources.CIFAR_BATCHES, size)
    write_tar(path, {f"x/{name}": content + b"!" for name, content in batches.items()})
    with pytest.raises(NestfedError, match="6,147 bytes"):
        formats.read_tar(path, sources.CIFAR_BATCHES, size)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def picture(array: np.ndarray[Any, Any], kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind)
    return out.getvalue()


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def omniglot_zip(path: Path) -> Path:
    paper = np.ones((105, 105), bool)
    line = paper.copy()
    line[:15, :15] = False  # exactly 4×4 new pixels
    dot = paper.copy()
    dot[:2, :2] = False
    members = {"a/Latin/character01/0001_01.png": line, "a/Latin/character02/0002_01.png": dot}
    others = {"a/": b"", "a/readme.txt": b"no image", "../../etc/passwd": b"x"}
    return write_zip(path, {**{n: picture(a, "PNG") for n, a in members.items()}, **others})


def test_omniglot_is_scaled_by_area(tmp_path: Path) -> None:
    x, labels = formats.read_omniglot(omniglot_zip(tmp_path / "o.zip"), 2)
    assert labels == (("Latin", "character01"), ("Latin", "character02"))
    block = np.zeros((28, 28), np.uint8)
    block[:4, :4] = 255
    assert np.array_equal(x[0, 0], block)
    assert x[1, 0, 0, 0] == round(255 * 4 / 3.75**2) == 73
    assert x[1].sum() == x[1, 0, 0, 0]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["o.zip"]  # nothing was extracted


def test_omniglot_damage(tmp_path: Path) -> None:
    path = omniglot_zip(tmp_path / "o.zip")
    whole = path.read_bytes()
    with pytest.raises(NestfedError, match="holds 2 images, expected 3"):
        formats.read_omniglot(path, 3)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(NestfedError) as error:
            formats.read_omniglot(path, 2)
        one_sentence(error, path)
    good = formats.read_omniglot(omniglot_zip(path), 2)[0]
    for i in range(0, len(whole), 3):
        path.write_bytes(whole[:i] + bytes((whole[i] ^ 0x04,)) + whole[i + 1 :])
        with contextlib.suppress(NestfedError):
            assert np.array_equal(formats.read_omniglot(path, 2)[0], good)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (picture(np.ones((104, 105), bool), "PNG"), "105×105"),
        (picture(np.zeros((105, 105), np.uint8), "JPEG"), "cannot be read"),
        (b"no image", "cannot be read"),
        (bytes(1 << 20), "more than"),
    ],
    ids=["size", "kind", "text", "bomb"],
)
def test_omniglot_wrong_members(tmp_path: Path, content: bytes, expected: str) -> None:
    path = write_zip(tmp_path / "o.zip", {"a/Latin/character01/0001_01.png": content})
    with pytest.raises(NestfedError) as error:
        formats.read_omniglot(path, 1)
    one_sentence(error, path, expected)


def tiny_zip(path: Path, classes: int, drop: str = "") -> Path:
    rng = np.random.default_rng(0)
    wnids = [f"n{i:08d}" for i in range(classes)]
    members: dict[str, bytes] = {}
    for wnid in wnids:
        for j in range(3):
            shape = (64, 64) if j == 2 else (64, 64, 3)  # some images are grey
            image = picture(rng.integers(0, 256, shape, np.uint8), "JPEG")
            members[f"t/train/{wnid}/images/{wnid}_{j}.JPEG"] = image
    rows = [(f"val_{i}.JPEG", wnids[-1 - i % classes]) for i in range(2 * classes)]
    for name, _ in rows:
        members[f"t/val/images/{name}"] = picture(rng.integers(0, 256, (64, 64, 3), np.uint8), "JPEG")
    members["t/val/val_annotations.txt"] = "".join(f"{n}\t{w}\t0\t0\t1\t1\n" for n, w in rows).encode()
    members["t/wnids.txt"] = "\n".join(reversed(wnids)).encode()
    members["t/words.txt"] = "".join(f"{w}\tword {w}\n" for w in wnids).encode()
    return write_zip(path, {n: c for n, c in members.items() if n != drop})


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    path = tiny_zip(tmp_path / "t.zip", 6)
    (x, y), (x_val, y_val), words = formats.read_tiny_imagenet(path, lambda w: w, 3, 2)
    assert (x.shape, x_val.shape) == ((18, 3, 64, 64), (12, 3, 64, 64))
    assert y.tolist() == np.repeat(np.arange(6), 3).tolist()
    assert y_val.tolist() == [5, 4, 3, 2, 1, 0] * 2
    assert words[1] == "word n00000001"
    assert (x[2, 0] == x[2, 1]).all()  # grey became three equal planes
    (half, half_y), (half_val, half_y_val), _ = formats.read_tiny_imagenet(path, lambda w: w[::2], 3, 2)
    assert np.array_equal(half, x[np.isin(y, (0, 2, 4))])
    assert np.array_equal(half_val, x_val[np.isin(y_val, (0, 2, 4))])
    assert half_y.max() == half_y_val.max() == 2


@pytest.mark.parametrize(
    "drop",
    [
        "t/wnids.txt",
        "t/words.txt",
        "t/val/val_annotations.txt",
        "t/val/images/val_0.JPEG",
        "t/train/n00000000/images/n00000000_0.JPEG",
    ],
)
def test_tiny_imagenet_lacking_a_member(tmp_path: Path, drop: str) -> None:
    path = tiny_zip(tmp_path / "t.zip", 2, drop)
    with pytest.raises(NestfedError) as error:
        formats.read_tiny_imagenet(path, lambda w: w, 3, 2)
    one_sentence(error, path)


def test_words(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(" \n = a <unk> = \nb a\n", encoding="utf-8")
    vocabulary: dict[str, int] = {}
    tokens = formats.read_words(path, 100, vocabulary, grow=True)
    assert list(vocabulary) == ["<eos>", "=", "a", "<unk>", "b"]
    assert tokens.tolist() == [0, 1, 2, 3, 1, 0, 4, 2, 0]
    path.write_text("new a", encoding="utf-8")
    assert formats.read_words(path, 100, vocabulary, grow=False).tolist() == [3, 2, 0]
    assert len(vocabulary) == 5
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(NestfedError) as error:
        formats.read_words(path, 100, vocabulary, grow=False)
    one_sentence(error, path, "UTF-8")


# ---------------------------------------------------------------- formats: any bytes at all

READERS: dict[str, Callable[[Path], object]] = {
    "x.gz": lambda p: formats.read_idx(p, (2, 3, 4)),
    "x.xz": lambda p: formats.read_idx(p, (2, 3, 4)),
    "x": lambda p: formats.read_idx(p, (2, 3, 4)),
    "x.tar.gz": lambda p: formats.read_tar(p, ["a"], 10),
    "x.zip": lambda p: formats.read_omniglot(p, 1),
    "y.zip": lambda p: formats.read_tiny_imagenet(p, lambda w: w, 1, 1),
    "x.npz": lambda p: load_table(p, "y"),
    "x.parquet": lambda p: load_table(p, "y"),
    "x.csv": lambda p: load_table(p, "y"),
    "x.csv.gz": lambda p: load_table(p, "y"),
}
MAGICS = [b"", b"\x1f\x8b\x08\0", b"\xfd7zXZ\0", b"PK\x03\x04", b"PAR1", b"x,y\n1,", idx(SMALL)[:16]]


def complaint(read: Callable[[], object]) -> str | None:
    """What is said of damaged bytes: one line, or nothing if they can be read. Any other exception fails."""
    try:
        read()
    except TableError as error:  # a list of several problems
        message = "; ".join(error.problems)
    except NestfedError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None)
@given(start=st.sampled_from(MAGICS), rest=st.binary(max_size=200))
def test_random_bytes_give_one_sentence_or_data(shelf: Path, name: str, start: bytes, rest: bytes) -> None:
    path = shelf / name
    path.write_bytes(start + rest)
    message = complaint(lambda: READERS[name](path))
    assert message is None or str(path) in message


@pytest.mark.parametrize("name", ["x.npz", "x.parquet", "x.csv.gz"])
@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_tables_give_one_sentence_or_data(shelf: Path, name: str, at: float, value: int, cut: bool) -> None:
    path = shelf / f"damaged-{name}"
    frame = pd.DataFrame({"x": np.arange(5.0), "y": [0, 1, 0, 1, 1]})
    if name == "x.npz":
        np.savez(path, x=frame[["x"]].to_numpy(), y=frame["y"].to_numpy())
    elif name == "x.parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    whole = path.read_bytes()
    i = int(at * len(whole))
    path.write_bytes(whole[:i] if cut else whole[:i] + bytes((value,)) + whole[i + 1 :])
    message = complaint(lambda: load_table(path, "y"))
    assert message is None or str(path) in message


# ---------------------------------------------------------------- users' tables

FRAME = pd.DataFrame(
    {
        "age": [61, 47, 70, 35],
        "lactate": [1.5, None, 4.25, 0.5],
        "smoker": [True, False, True, True],
        "ward": ["B", "A", None, "B"],
        "site": ["north", "south", "south", "north"],
        "died": ["yes", "no", "yes", "no"],
    }
)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_table_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FRAME.to_parquet(path) if name == "t.parquet" else FRAME.to_csv(path, index=False)
    table = load_table(path, "died", columns=["site"])
    assert table.features == ("age", "lactate", "smoker", "ward=A", "ward=B")
    expected = [[61, 1.5, 1, 0, 1], [47, np.nan, 0, 1, 0], [70, 4.25, 1, 0, 0], [35, 0.5, 1, 0, 1]]
    assert np.array_equal(table.x, np.array(expected, np.float32), equal_nan=True)
    assert table.x.dtype == np.float32
    assert table.y.tolist() == [1, 0, 1, 0]
    assert table.y.dtype == np.int64
    assert table.classes == ("no", "yes")
    assert table.columns["site"].tolist() == ["north", "south", "south", "north"]
    assert load_table(path, "died", columns=["site"], drop=["ward", "smoker"]).features == ("age", "lactate")


def test_a_gap_leaves_booleans_booleans(tmp_path: Path) -> None:
    """Otherwise a site with a gap would have text where the others have numbers."""
    table = load_table(write(tmp_path / "t.csv", "smoker,y\nTrue,0\n,1\nFalse,1\n"), "y")
    assert table.schema == (Column("smoker"),)
    assert np.array_equal(table.x[:, 0], [1, np.nan, 0], equal_nan=True)


def test_text_columns_keep_names_and_categories_apart(tmp_path: Path) -> None:
    table = load_table(write(tmp_path / "t.csv", "a=b,c,y\nu=v,1,0\nw,2,1\n,,1\n"), "y")
    assert table.schema == (Column("a=b", ("u=v", "w")), Column("c"))
    assert table.features == ("a=b=u=v", "a=b=w", "c")


def test_npz_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    x, y, site = np.arange(6.0).reshape(3, 2), np.array([2, 0, 1]), np.array(["a", "b", "a"])
    np.savez(path, x=np.asfortranarray(x), y=y, site=site)
    table = load_table(path, "y", columns=["site"])
    assert np.array_equal(table.x, x.astype(np.float32))
    assert table.y.tolist() == [2, 0, 1]
    assert table.columns["site"].tolist() == ["a", "b", "a"]
    with pytest.raises(NestfedError, match="'site', which has no role"):
        load_table(path, "y")
    np.savez_compressed(path, x=np.zeros((2, 1, 8, 8), np.uint8), y=np.array([False, True]))
    assert load_table(path, "y").x.dtype == np.uint8
    assert load_table(path, "y").classes == ("False", "True")


def npz(**headers: tuple[str, bytes]) -> bytes:
    """An .npz whose array headers say anything."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (header, content) in headers.items():
            text = header.encode().ljust(117) + b"\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 8)}", b"\0" * 16),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -1)}", b"\0" * 16),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1)}", b"\0" * 16),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1, 2)}", b"\x80\x04." + b"\0" * 13),
        ("{'descr': '<c16', 'fortran_order': False, 'shape': (1, 1)}", b"\0" * 16),
        ("__import__('os').system('true')", b"\0" * 16),
    ],
    ids=["huge", "negative", "short", "objects", "complex", "code"],
)
def test_npz_header_with_wrong_sizes(tmp_path: Path, header: str, content: bytes) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(npz(x=(header, content), y=("{'descr': '|i1', 'fortran_order': False, 'shape': (1,)}", b"\1")))
    with pytest.raises(NestfedError) as error:
        load_table(path, "y")
    one_sentence(error, path)


def test_table_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_BYTES", 10_000)
    rows = 200_000
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"x,y\n" + b"1,1\n" * rows))
    np.savez_compressed(tmp_path / "t.npz", x=np.zeros((rows, 1)), y=np.zeros(rows))
    pd.DataFrame({"x": np.zeros(rows), "y": np.zeros(rows)}).to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv.gz", "t.npz", "t.parquet"):
        with pytest.raises(NestfedError, match="10,000 bytes"):
            load_table(tmp_path / name, "y")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("empty",)),
        ("\n", ("cannot be read",)),
        ("x,y\n", ("no rows",)),
        ("x,yy\n1,1\n", ("no column 'y'", "did you mean yy?")),
        ("aaa,bbb\n1,1\n", ("no column 'y'", "choose one of aaa, bbb")),
        ("x,y\n1,1\n2,\n", ("'y'", "missing in 1 of 2 rows")),
        ("y\n1\n", ("no column left",)),
        ("x,x,y\n1,2,0\n", ("two columns called 'x'",)),
        ("x,y\ninf,1\n", ("'x'", "infinite")),
        ("x,y\n1e39,1\n", ("'x'", "infinite")),
        ("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(30)) + "high,1\n", ("'x'", "the text 'high' in line 32")),
        ("x,y\n1,yes\n2,yes\n", ("only 'yes'", "classes")),
        ("x,y\n1,-1\n2,-1\n", ("only '-1'", "classes")),
        ("x,y\n1,99999\n", ("99999", "another column")),
        ("x,y\n" + "".join(f"{i},{i / 7}\n" for i in range(1, 30)), ("different values",)),
        ("x,y\n1,1\n1,2,3,4\n", ("cannot be read",)),
        ("x,y\n1,1,9\n2,0,9\n", ("cannot be read",)),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(NestfedError) as error:
        load_table(path, "y")
    one_sentence(error, path, *parts)


def test_table_paths_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for name, part in (("none.csv", "does not exist"), ("folder.csv", "a folder"), ("t.xlsx", ".parquet")):
        with pytest.raises(NestfedError) as error:
            load_table(tmp_path / name, "y")
        one_sentence(error, name, part)
    path = write(tmp_path / "t.csv", "x,site,y\n1,a,0\n")
    for options in ({"columns": ["sit"]}, {"drop": ["sit"]}):
        with pytest.raises(NestfedError, match="did you mean site"):
            load_table(path, "y", **options)
    for options in ({"columns": ["y"]}, {"columns": ["site"], "drop": ["site"]}):
        with pytest.raises(NestfedError, match="two roles"):
            load_table(path, "y", **options)


@pytest.mark.parametrize(
    ("labels", "y", "classes"),
    [
        (["0", "1", "1"], [0, 1, 1], ("0", "1")),
        (["1", "1", "1"], [1, 1, 1], ("0", "1")),  # one class, and it is clear which
        (["0.0", "1.0", "0.0"], [0, 1, 0], ("0", "1")),
        (["2", "0", "3"], [2, 0, 3], ("0", "1", "2", "3")),
        (["1", "-1", "1"], [1, 0, 1], ("-1", "1")),
        (["True", "False", "True"], [1, 0, 1], ("False", "True")),
        (["True", "True", "True"], [1, 1, 1], ("False", "True")),
        (["malignant", "benign", "benign"], [1, 0, 0], ("benign", "malignant")),
    ],
)
def test_labels(tmp_path: Path, labels: list[str], y: list[int], classes: tuple[str, ...]) -> None:
    path = write(tmp_path / "t.csv", "x,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    table = load_table(path, "y")
    assert table.y.tolist() == y
    assert table.classes == classes


def test_sites_agree_on_labels_through_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "x,y\n1,case\n2,case\n")
    assert load_table(path, "y", classes=("control", "case")).y.tolist() == [1, 1]
    with pytest.raises(NestfedError) as error:
        load_table(path, "y", classes=("control", "dead"))
    one_sentence(error, "'case'", "control, dead")
    with pytest.raises(NestfedError, match="only once"):
        load_table(path, "y", classes=("case", "case"))


def test_columns_to_split_by_may_have_gaps(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "x,site,ward,y\n1,3,a,0\n2,,,1\n")
    columns = load_table(path, "y", columns=["site", "ward"]).columns
    assert columns["site"].tolist() == ["3", "unknown"]
    assert columns["ward"].tolist() == ["a", "unknown"]


# ---------------------------------------------------------------- downloads


@dataclass
class Server:
    url: str
    content: dict[str, bytes]
    ranges: bool = True
    cut: list[int] = field(default_factory=list)  # how many bytes to send before hanging up, request by request
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    status: int = 0


@contextlib.contextmanager
def serving(content: dict[str, bytes]) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.lstrip("/"), self.headers.get("Range")
            server.seen.append((name, asked))
            if server.status or name not in server.content:
                self.send_error(server.status or 404)
                return
            body, start = server.content[name], 0
            if asked and server.ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:][: server.cut.pop(0)] if server.cut else body[start:])

        def log_message(self, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{listener.server_port}", content)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


BODY = np.random.default_rng(0).bytes(3_000_000)
FILE = File("a.bin", len(BODY), hashlib.sha256(BODY).hexdigest())


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({"a.bin": BODY}) as running:
        yield running


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in (".lock", "cache"))


def test_download(server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    path = files.download(FILE, f"{server.url}/a.bin", tmp_path, lambda *step: steps.append(step))
    assert path.read_bytes() == BODY
    assert steps[-1] == ("a.bin", len(BODY), len(BODY))
    assert left(tmp_path) == ["a.bin"]
    files.download(FILE, f"{server.url}/a.bin", tmp_path)
    assert len(server.seen) == 1  # it was there already


def test_interrupted_download_resumes_by_itself(server: Server, tmp_path: Path) -> None:
    server.cut = [1_000_000, 500_000]
    assert files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes() == BODY
    assert [asked for _, asked in server.seen] == [None, "bytes=1000000-", "bytes=1500000-"]


def test_interrupted_download_resumes_next_time(server: Server, tmp_path: Path) -> None:
    server.cut = [700_000, *[0] * (files.TRIES - 1)]
    with pytest.raises(NestfedError) as error:
        files.download(FILE, f"{server.url}/a.bin", tmp_path)
    one_sentence(error, server.url, "700,000 of 3,000,000 bytes")
    assert left(tmp_path) == ["a.bin.part"]
    assert files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes() == BODY
    assert server.seen[-1] == ("a.bin", "bytes=700000-")


def test_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cut = False, [1_000_000]
    assert files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("old", [b"other", b"?" * len(BODY), b"?" * (len(BODY) + 5)], ids=["short", "full", "long"])
def test_remains_of_another_file_are_dropped(server: Server, tmp_path: Path, old: bytes) -> None:
    (tmp_path / "a.bin.part").write_bytes(old)
    assert files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("body", [BODY[:-1] + b"!", BODY + b"!", b"<html>"], ids=["wrong", "long", "short"])
def test_wrong_download_never_gets_the_name(server: Server, tmp_path: Path, body: bytes) -> None:
    server.content["a.bin"] = body
    with pytest.raises(NestfedError) as error:
        files.download(FILE, f"{server.url}/a.bin", tmp_path)
    one_sentence(error, f"{server.url}/a.bin")
    assert not (tmp_path / "a.bin").exists()
    server.content["a.bin"] = BODY  # and nothing is left that would spoil the next attempt
    assert files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes() == BODY


def test_a_wrong_checksum_is_reported(server: Server, tmp_path: Path) -> None:
    server.content["a.bin"] = BODY[:-1] + b"!"
    with pytest.raises(NestfedError) as error:
        files.download(FILE, f"{server.url}/a.bin", tmp_path)
    one_sentence(error, FILE.sha256, hashlib.sha256(server.content["a.bin"]).hexdigest())
    assert left(tmp_path) == []


def test_servers_that_fail(server: Server, tmp_path: Path) -> None:
    server.status = 503
    with pytest.raises(NestfedError) as error:
        files.download(FILE, f"{server.url}/a.bin", tmp_path)
    one_sentence(error, "HTTP 503")
    with pytest.raises(NestfedError) as error:
        files.download(FILE, "http://127.0.0.1:9/a.bin", tmp_path)
    one_sentence(error, "http://127.0.0.1:9/a.bin", "check the network")
    with pytest.raises(NestfedError) as error:
        files.download(FILE, "file:///a.bin", tmp_path)
    one_sentence(error, "https://")


def test_many_at_once(server: Server, tmp_path: Path) -> None:
    done: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: done.append(files.download(FILE, f"{server.url}/a.bin", tmp_path).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [BODY] * 4
    assert left(tmp_path) == ["a.bin"]
    assert len(server.seen) == 1


def test_progress_bar_on_a_terminal_only(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        terminal = True

        def isatty(self) -> bool:
            return self.terminal

    server.content["toy/a.bin"] = BODY
    for terminal in (True, False):
        screen = Screen()
        screen.terminal = terminal
        monkeypatch.setattr("sys.stderr", screen)
        files.fetch("toy", [(FILE,)], tmp_path / str(terminal), server.url)
        assert bool(screen.getvalue()) == terminal


def test_mirror_may_hold_any_form(tmp_path: Path) -> None:
    first, second = File("a.xz", 3, "0" * 64, None), File("a.bin", 3, hashlib.sha256(b"abc").hexdigest(), None)
    with serving({"toy/a.bin": b"abc"}) as server:
        found = files.fetch("toy", [(first,), (second,)], tmp_path, server.url + "/")
        assert found == Found(tmp_path / "toy", (second,))
        with pytest.raises(NestfedError) as error:
            files.fetch("toy", [(first,)], tmp_path, server.url)
        one_sentence(error, f"{server.url}/toy/a.xz", "NESTFED_MIRROR")
    with pytest.raises(NestfedError) as error:
        files.fetch("toy", [(first,)], tmp_path)
    one_sentence(error, "a.xz", "NESTFED_DATA")


def test_mirror_may_hold_another_version_under_the_same_name(tmp_path: Path) -> None:
    first, second = (File("a.zip", len(b), hashlib.sha256(b).hexdigest(), None) for b in (b"abc", b"abcd"))
    for held in (b"abc", b"abcd"):
        with serving({"toy/a.zip": held}) as server:
            found = files.fetch("toy", [(first,), (second,)], tmp_path / str(len(held)), server.url)
            assert found.path("a.zip").read_bytes() == held
    with serving({"toy/a.zip": b"zzzz"}) as server, pytest.raises(NestfedError) as error:
        files.fetch("toy", [(first,), (second,)], tmp_path / "bad", server.url)
    one_sentence(error, second.sha256)


# ---------------------------------------------------------------- finding, caching

TOY = idx(SMALL)


@dataclass
class Toy:
    """A data set of two images that counts how often it is decoded."""

    decoded: int = 0

    def decode(self, found: Found) -> Split:
        self.decoded += 1
        x = formats.read_idx(found.path("toy.idx"), (2, 3, 4))
        columns = {"site": np.array(["a", "b"])}
        train = Dataset(x[:, None], np.array([0, 1]), columns, classes=("zero", "one"))
        return Split(train, train.take(slice(0, 0)))

    def source(self) -> Source:
        file = File("toy.idx", len(TOY), hashlib.sha256(TOY).hexdigest())
        return Source("toy", "a toy", "2", "none", "toy", ((file,),), self.decode)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Toy:
    made = Toy()
    monkeypatch.setitem(DATASETS._things, "toy", made.source())
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy.idx").write_bytes(TOY)
    return made


def same(split: Split) -> bool:
    train = split.train
    site = train.columns["site"].tolist()
    return bool((train.x[:, 0] == SMALL).all()) and train.classes == ("zero", "one") and site == ["a", "b"]


def test_where_files_are_looked_for(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same(load("toy", tmp_path / "data"))
    assert same(load("toy", tmp_path / "data/toy"))
    with serving({"toy/toy.idx": TOY}) as server:
        monkeypatch.setenv("NESTFED_MIRROR", server.url)
        monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "data"))
        assert same(load("toy"))
        assert server.seen == []
        monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "nowhere"))
        assert same(load("toy"))
        assert len(server.seen) == 1
        assert same(load("toy"))
        assert len(server.seen) == 1
    assert (tmp_path / "cache/data/toy/toy.idx").read_bytes() == TOY


def test_the_data_commands(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["nestfed", "data", *words])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, "".join(capsys.readouterr())

    cached = tmp_path / "cache/data/toy/toy.idx"
    assert "no, " in command("list")[1]
    assert command("check") == (0, "No datasets on this machine yet; see `nestfed data list`.\n")
    code, text = command("check", "toy")
    assert code == 2
    assert "download it with `nestfed data fetch toy`." in text
    with serving({"toy/toy.idx": TOY}) as server:
        monkeypatch.setenv("NESTFED_MIRROR", server.url)
        assert command("fetch", "toy") == (0, f"toy is in {cached.parent}.\n")
        assert "yes" in command("list")[1]
        assert command("check") == (0, f"toy: verified, 1 file in {cached.parent}\n")
        cached.write_bytes(b"?" + TOY[1:])
        code, text = command("check", "toy")
        assert code == 2
        assert str(cached) in text
        assert "toy: files differ from the published ones." in text
        assert command("fetch", "toy")[0] == 0  # replaces the damaged file
        assert cached.read_bytes() == TOY
        monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "data"))
        seen = len(server.seen)
        assert "already in" in command("fetch", "toy")[1]
        assert len(server.seen) == seen


def test_decoded_once(toy: Toy, tmp_path: Path) -> None:
    for _ in range(3):
        split = load("toy", tmp_path / "data")
        assert same(split)
        assert len(split.test) == 0
    assert toy.decoded == 1


def test_every_kind_of_damage_to_the_cache_is_repaired(toy: Toy, tmp_path: Path) -> None:
    load("toy", tmp_path / "data")
    kept = [p for p in (tmp_path / "cache/decoded").rglob("*") if p.is_file()]
    assert len(kept) == 7  # x, y, site of two parts, and the index
    for path in kept:
        whole = path.read_bytes()
        for damage in (b"", whole[:-1], whole[:-1] + bytes((whole[-1] ^ 1,)), bytes((whole[0] ^ 1,)) + whole[1:], None):
            before = toy.decoded
            path.write_bytes(damage) if damage is not None else path.unlink()
            assert same(load("toy", tmp_path / "data"))
            assert toy.decoded == before + 1, (path.name, damage)
            assert path.read_bytes() == whole


def test_a_changed_source_is_verified_again(toy: Toy, tmp_path: Path) -> None:
    load("toy", tmp_path / "data")
    path = tmp_path / "data/toy/toy.idx"
    path.write_bytes(TOY[:-1] + b"!")
    os.utime(path, ns=(1, 1))
    with pytest.raises(NestfedError) as error:
        load("toy", tmp_path / "data")
    one_sentence(error, path, "sha256")


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_without_a_cache(toy: Toy, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    if kind == "file":
        cache.write_text("in the way")
    else:
        cache.mkdir()
        cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert same(load("toy", tmp_path / "data"))
    assert same(load("toy", tmp_path / "data"))
    cache.chmod(0o700)


def test_two_at_once_share_the_cache(toy: Toy, tmp_path: Path) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.extend(same(load("toy", tmp_path / "data")) for _ in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20
    assert not list((tmp_path / "cache").rglob("tmp*"))
