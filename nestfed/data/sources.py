"""Named datasets: find, verify, download and decode them.

    load("fashion-mnist")                   # from NESTFED_DATA, the user's cache, or a download
    load("eicu", folder="/data/hospital")   # only from `folder/eicu-demo/…` or `folder` itself

Files are checked against their published sha256 before decoding. Decoded images and texts are kept in the cache
and memory-mapped the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.core import DATASETS, NestfedError
from nestfed.data import files, formats
from nestfed.data.encoding import Column, schema_from_json, schema_to_json
from nestfed.data.files import File, Found, Progress
from nestfed.data.tables import Array, Dataset, load_table, read_eicu, read_heart

__all__ = ["Checked", "Dataset", "File", "Source", "Split", "check", "fetch", "load", "load_table", "names", "where"]

CACHE_VERSION = 2  # increase it when the output of a decoder or the format of the cache changes
DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


@dataclass(frozen=True)
class Split:
    """A dataset as published. If the publisher names no test set (heart-disease, eicu), `test` is empty: the
    experiment then splits it by patient or hospital.
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


@dataclass(frozen=True)
class Source:
    """A named dataset; each of its `forms` is a complete set of files."""

    name: str
    about: str
    examples: str
    licence: str
    folder: str
    forms: tuple[tuple[File, ...], ...]
    decode: Callable[[Found], Split]
    cached: bool = True

    @property
    def files(self) -> tuple[File, ...]:
        """The files of the first form; none if the dataset needs no files."""
        return self.forms[0] if self.forms else ()


@dataclass(frozen=True)
class Checked:
    """The result of `check` for one file: `problem` is None if it is identical to the published one."""

    file: File
    path: Path
    problem: str | None


def names() -> tuple[Source, ...]:
    """Return every named dataset, including those of plugins, with its description, licence and files."""
    return tuple(DATASETS.values())


def load(name: str, folder: str | Path | None = None) -> Split:
    """Load a named dataset from `folder`, else from NESTFED_DATA, else from the cache, else from its publisher."""
    source: Source = DATASETS[name]
    if not source.forms:
        return source.decode(Found(Path(), ()))
    found = _find(source, folder)
    if found is None:
        if folder is not None:
            raise NestfedError(_missing(source, Path(folder)))
        found = fetch(name)
    return _through_cache(source, found)


def where(name: str, folder: str | Path | None = None) -> Path | None:
    """Return the folder with all files of a dataset, without opening them; None if not found or not needed."""
    source: Source = DATASETS[name]
    found = next((f for place in _places(folder) if (f := files.find(place, source.folder, source.forms))), None)
    return found.folder if found else None


def check(name: str, folder: str | Path | None = None) -> tuple[Checked, ...]:
    """Compare the files of a dataset with the published ones; missing files are problems too."""
    source: Source = DATASETS[name]
    if not source.forms:
        return ()
    found = _find(source, folder)
    if found is None:
        where = _places(folder)[0] / source.folder
        return tuple(Checked(f, where / f.name, files.problem(where / f.name, f)) for f in source.files)
    return tuple(Checked(f, found.path(f.name), files.problem(found.path(f.name), f)) for f in found.files)


def fetch(name: str, *, mirror: str | None = None, progress: Progress | None = None) -> Found:
    """Download a dataset into the cache, resuming an earlier attempt; skip files that are already there.

    mirror: the address of a folder laid out like NESTFED_DATA; None = NESTFED_MIRROR, or the publishers.
    progress: called with file name, bytes so far and total bytes; None = a progress bar on a terminal.
    """
    source: Source = DATASETS[name]
    if not source.forms:
        return Found(Path(), ())
    return files.fetch(source.folder, source.forms, files.cache_folder() / "data", mirror, progress)


def _places(folder: str | Path | None) -> list[Path]:
    if folder is not None:
        return [Path(folder)]
    chosen = os.environ.get("NESTFED_DATA")
    return [*([Path(chosen).expanduser()] if chosen else []), files.cache_folder() / "data"]


def _find(source: Source, folder: str | Path | None) -> Found | None:
    for place in _places(folder):
        if found := files.find(place, source.folder, source.forms):
            return found
        if source.name == "cifar-10":
            _reject_pickles(place)
    return None


def _reject_pickles(place: Path) -> None:
    for sub in ("cifar-10", ".", "cifar-10/cifar-10-batches-py", "cifar-10-batches-py"):
        for name in ("data_batch_1", "cifar-10-python.tar.gz"):
            if (place / sub / name).is_file():
                raise NestfedError(
                    f"{place / sub / name} is the Python version of CIFAR-10; it consists of pickles, which can "
                    f"execute any code when opened: replace it with the binary version, cifar-10-binary.tar.gz."
                )


def _missing(source: Source, folder: Path) -> str:
    best = max(source.forms, key=lambda form: sum(_there(folder, source, f) for f in form))
    lacking = [f.name for f in best if not _there(folder, source, f)]
    return (
        f"Dataset {source.name} is incomplete in {folder}: {', '.join(lacking)} expected there or in its folder "
        f"'{source.folder}'; put the files there, or omit the folder to download them."
    )


def _there(folder: Path, source: Source, file: File) -> bool:
    return any((place / file.name).is_file() for place in (folder / source.folder, folder))


def _through_cache(source: Source, found: Found) -> Split:
    """Return the decoded dataset, memory-mapped if the same files were decoded before."""
    if not source.cached:
        files.verify(found)
        return source.decode(found)
    stats = [(f.name, f.sha256, (s := found.path(f.name).stat()).st_size, s.st_mtime_ns) for f in found.files]
    key = hashlib.sha256(json.dumps([CACHE_VERSION, source.name, stats]).encode()).hexdigest()[:16]
    folder = files.cache_folder() / "decoded" / f"{source.name}-{key}"
    if (kept := formats.read_arrays(folder)) is None:
        files.verify(found)
        split = source.decode(found)
        with contextlib.suppress(OSError):  # continue without a cache if it cannot be written
            formats.write_arrays(folder, *_to_arrays(split))
        if (kept := formats.read_arrays(folder)) is None:
            return split
    return _from_arrays(*kept)


def _to_arrays(split: Split) -> tuple[dict[str, Array], dict[str, Any]]:
    arrays: dict[str, Array] = {}
    names: dict[str, Any] = {}
    for part, data in vars(split).items():
        if data is not None:
            arrays |= {f"{part}.x": data.x, f"{part}.y": data.y}
            arrays |= {f"{part}.column.{name}": column for name, column in data.columns.items()}
            names[part] = {"schema": schema_to_json(data.schema), "classes": data.classes}
    return arrays, names


def _from_arrays(arrays: dict[str, Array], names: dict[str, Any]) -> Split:
    parts = {}
    for part, note in names.items():
        begin = f"{part}.column."
        columns = {name.removeprefix(begin): a for name, a in arrays.items() if name.startswith(begin)}
        x, y = arrays[f"{part}.x"], arrays[f"{part}.y"]
        parts[part] = Dataset(x, y, columns, schema_from_json(note["schema"]), tuple(note["classes"]))
    return Split(**parts)


def _idx(classes: tuple[str, ...]) -> Callable[[Found], Split]:
    def decode(found: Found) -> Split:
        end = ".gz" if found.files[0].name.endswith(".gz") else ""

        def part(name: str, n: int) -> Dataset:
            x = formats.read_idx(found.path(f"{name}-images-idx3-ubyte{end}"), (n, 28, 28))
            y = formats.read_idx(found.path(f"{name}-labels-idx1-ubyte{end}"), (n,))
            return Dataset(x[:, None], y.astype(np.int64), classes=classes)

        return Split(part("train", 60_000), part("t10k", 10_000))

    return decode


def _cifar(found: Found) -> Split:
    records = 10_000
    size = records * formats.CIFAR_RECORD
    if len(found.files) == 1:
        path = found.path(found.files[0].name)
        batches = [(path, content) for content in formats.read_tar(path, CIFAR_BATCHES, size)]
    else:
        paths = [found.path(f.name) for f in found.files]
        with ThreadPoolExecutor() as pool:  # xz takes seconds per file and releases the GIL
            batches = list(zip(paths, pool.map(lambda path: formats.unpack(path, size), paths)))
    parts = [formats.read_cifar(path, content, records) for path, content in batches]
    x, y = np.concatenate([x for x, _ in parts[:5]]), np.concatenate([y for _, y in parts[:5]])
    return Split(Dataset(x, y, classes=CIFAR), Dataset(*parts[5], classes=CIFAR))


def _omniglot(found: Found) -> Split:
    """Train on background characters, test on evaluation characters; y numbers the characters of each part."""

    def part(name: str, images: int) -> Dataset:
        x, labels = formats.read_omniglot(found.path(name), images)
        classes = tuple(f"{alphabet}/{character}" for alphabet, character in sorted(set(labels)))
        number = {name: i for i, name in enumerate(classes)}
        full = [f"{alphabet}/{character}" for alphabet, character in labels]
        columns = {"alphabet": np.array([alphabet for alphabet, _ in labels]), "character": np.array(full)}
        return Dataset(x, np.array([number[name] for name in full], np.int64), columns, classes=classes)

    return Split(part("images_background.zip", 19_280), part("images_evaluation.zip", 13_180))


def _wikitext(found: Found) -> Split:
    """Number the words in order of first use in the training text."""
    vocabulary: dict[str, int] = {}
    parts = {
        file.name: formats.read_words(found.path(file.name), file.size, vocabulary, file.name == "train.txt")
        for file in found.files
    }
    words = tuple(vocabulary)
    data = {name: Dataset(tokens, np.empty(0, np.int64), classes=words) for name, tokens in parts.items()}
    return Split(data["train.txt"], data["test.txt"], data["valid.txt"])


def _tiny_imagenet(classes: int) -> Callable[[Found], Split]:
    """Use the published validation images as test set, because the published test images have no labels."""

    def decode(found: Found) -> Split:
        path = found.path(found.files[0].name)
        step = 200 // classes if path.name == "tiny-imagenet-200.zip" else 1
        train, test, words = formats.read_tiny_imagenet(path, lambda wnids: wnids[::step], 500, 50)
        return Split(Dataset(*train, classes=words), Dataset(*test, classes=words))

    return decode


def _heart(found: Found) -> Split:
    paths = {file.name.split(".")[1]: found.path(file.name) for file in found.files}
    return _all_train(read_heart(paths))


def _eicu(found: Found) -> Split:
    names = ("patient", "hospital", "apacheApsVar", "apachePredVar")
    return _all_train(read_eicu(*(found.path(f"{name}.csv.gz") for name in names)))


def _digits(found: Found) -> Split:
    """Scale the grey values 0…16 to 0…255, as in all other image datasets."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    return _quarter(Dataset(x, bunch.target.astype(np.int64), classes=DIGITS))


def _shortcut_digits(found: Found) -> Split:
    """Deal the digits to ten sites, and let the first pixel agree with "5 or more" more often than chance.

    It does so for 90 % of the images of nine sites, and for 10 % of those of the last site.
    """
    whole = _digits(found)
    x, y = np.concatenate([whole.train.x, whole.test.x]), np.concatenate([whole.train.y, whole.test.y])
    rng = np.random.default_rng(0)
    site = rng.permutation(np.arange(len(y)) % 10)
    agrees = rng.random(len(y)) < np.where(site == 9, 0.1, 0.9)
    x[:, 0, 0, 0] = np.where((y >= 5) == agrees, 255, 0)
    return _all_train(Dataset(x, y, classes=DIGITS, columns={"site": site.astype(str)}))


def _breast_cancer(found: Found) -> Split:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    schema, classes = tuple(map(Column, map(str, bunch.feature_names))), tuple(map(str, bunch.target_names))
    x, y = bunch.data.astype(np.float32), bunch.target.astype(np.int64)
    return _quarter(Dataset(x, y, schema=schema, classes=classes))


def _all_train(data: Dataset) -> Split:
    return Split(data, data.take(slice(0, 0)))


def _quarter(data: Dataset) -> Split:
    """Hold out a quarter of every class as test set, with scikit-learn's stratified split and random_state 0."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(np.arange(len(data)), test_size=0.25, random_state=0, stratify=data.y)
    return Split(data.take(np.sort(train)), data.take(np.sort(test)))


for _source in (
    Source(
        "mnist",
        "handwritten digits, grey 28×28, 10 classes",
        "60,000 train, 10,000 test",
        "CC BY-SA 3.0 as commonly stated (LeCun, Cortes, Burges)",
        "mnist",
        (files.MNIST_GZ, files.MNIST_PLAIN),
        _idx(DIGITS),
    ),
    Source(
        "fashion-mnist",
        "articles of clothing, grey 28×28, 10 classes",
        "60,000 train, 10,000 test",
        "MIT (Zalando SE)",
        "fashion-mnist",
        (files.FASHION_GZ, files.FASHION_PLAIN),
        _idx(CLOTHES),
    ),
    Source(
        "cifar-10",
        "photographs, colour 32×32, 10 classes",
        "50,000 train, 10,000 test",
        "none; research use, cite Krizhevsky 2009",
        "cifar-10",
        (files.CIFAR_XZ, files.CIFAR_BIN, files.CIFAR_TAR),
        _cifar,
    ),
    Source(
        "omniglot",
        "handwritten characters, grey 28×28, by alphabet and character, 20 of each",
        "19,280 train (964 characters), 13,180 test (659 characters)",
        "MIT (Brenden Lake)",
        "omniglot",
        (files.OMNIGLOT_STORED, files.OMNIGLOT_UPSTREAM),
        _omniglot,
    ),
    Source(
        "wikitext-2",
        "articles of Wikipedia as words, vocabulary of 33,278",
        "2,088,628 train, 217,646 validation, 245,569 test tokens",
        "CC BY-SA 3.0 (Merity et al. 2016)",
        "wikitext-2",
        (files.WIKITEXT,),
        _wikitext,
    ),
    Source(
        "tiny-imagenet",
        "photographs, colour 64×64, every tenth of the 200 classes",
        "10,000 train, 1,000 test",
        "ImageNet terms: non-commercial research and education only",
        "tiny-imagenet",
        (files.TINY_20, files.TINY_200),
        _tiny_imagenet(20),
    ),
    Source(
        "tiny-imagenet-200",
        "photographs, colour 64×64, 200 classes",
        "100,000 train, 10,000 test",
        "ImageNet terms: non-commercial research and education only",
        "tiny-imagenet",
        (files.TINY_200,),
        _tiny_imagenet(200),
    ),
    Source(
        "heart-disease",
        "heart disease in patients of four hospitals, 13 features with gaps",
        "920 (Cleveland 303, Hungarian 294, Switzerland 123, VA Long Beach 200), no test set",
        "CC BY 4.0 (Janosi, Steinbrunn, Pfisterer, Detrano 1988)",
        "heart-disease",
        (files.HEART,),
        _heart,
        cached=False,
    ),
    Source(
        "eicu",
        "death in hospital from the first day in intensive care (eICU demo 2.0.1), 186 hospitals",
        "2,492 stays, 212 deaths, no test set",
        "ODbL 1.0; do not attempt to identify patients",
        "eicu-demo",
        (files.EICU,),
        _eicu,
        cached=False,
    ),
    Source(
        "digits",
        "handwritten digits, grey 8×8, 10 classes, from scikit-learn",
        "1,347 train, 450 test",
        "CC BY 4.0 (Alpaydin, Kaynak 1998)",
        "",
        (),
        _digits,
        cached=False,
    ),
    Source(
        "shortcut-digits",
        "digits of ten sites; a mark in the corner goes with 5 or more at nine of them, with 4 or less at the last",
        "1,797, no test set",
        "CC BY 4.0 (Alpaydin, Kaynak 1998)",
        "",
        (),
        _shortcut_digits,
        cached=False,
    ),
    Source(
        "breast-cancer",
        "breast tumours, 30 features, malignant 0 or benign 1, from scikit-learn",
        "426 train, 143 test",
        "CC BY 4.0 (Wolberg, Mangasarian, Street, Street 1995)",
        "",
        (),
        _breast_cancer,
        cached=False,
    ),
):
    DATASETS.add(_source.name, _source)
