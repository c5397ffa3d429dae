"""File formats: decode published files into arrays without trusting their content.

Every reader limits its output in advance. Nothing is unpickled or extracted to disk.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import math
import os
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

CIFAR_RECORD = 1 + 3 * 32 * 32
IMAGE_BYTES = 1 << 18  # a 64×64 JPEG or a 105×105 PNG has a hundredth of this
TEXT_BYTES = 1 << 24
XZ_MEMORY = 1 << 28
END_OF_LINE = "<eos>"


def refuse(path: Path | str, found: str, expected: str) -> NestfedError:
    """Return the error for a file with unexpected content."""
    return NestfedError(f"{path} {found}, expected {expected}: replace it with a fresh copy.")


@contextlib.contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turn any exception of a decoder into an error that names the file."""
    try:
        yield
    except NestfedError:
        raise
    except Exception as e:  # damaged bytes raise anything from struct.error to SyntaxError
        raise refuse(path, f"cannot be read ({_brief(e)})", expected) from e


def unpack(path: Path, limit: int) -> bytes:
    """Return the content of a plain, .gz or .xz file; reject more than `limit` bytes."""
    with reading(path, f"{limit:,} bytes of content"):
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                content = stream.read(limit + 1)
        elif path.suffix == ".xz":
            content = _unxz(path, limit + 1)
        else:
            with path.open("rb") as plain:
                content = plain.read(limit + 1)
    if len(content) > limit:
        raise refuse(path, f"holds more than {limit:,} bytes of content", "no more than that")
    return content


def read_idx(path: Path, shape: tuple[int, ...]) -> Pixels:
    """Read unsigned bytes in the IDX format of MNIST: magic number, sizes (big-endian), then the bytes."""
    start = 4 + 4 * len(shape)
    content = unpack(path, start + math.prod(shape))
    expected = f"IDX unsigned bytes of shape {shape}"
    if len(content) < start or content[:4] != bytes((0, 0, 8, len(shape))):
        raise refuse(path, f"begins with {content[:4].hex(' ') or 'nothing'}", f"{expected} (00 00 08 0{len(shape)})")
    declared = tuple(int(d) for d in np.frombuffer(content, ">u4", len(shape), 4))
    if declared != shape:
        raise refuse(path, f"declares the shape {declared}", expected)
    if len(content) != start + math.prod(shape):
        raise refuse(path, f"ends after {len(content):,} bytes", f"{start + math.prod(shape):,} ({expected})")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(path: Path, content: bytes, records: int) -> tuple[Pixels, Labels]:
    """Decode a CIFAR-10 binary batch: records of one label and the planes R, G, B of 32×32."""
    if len(content) != records * CIFAR_RECORD:
        raise refuse(path, f"holds {len(content):,} bytes", f"{records:,} records of {CIFAR_RECORD:,}")
    table = np.frombuffer(content, np.uint8).reshape(records, CIFAR_RECORD)
    if records and table[:, 0].max() > 9:
        raise refuse(path, f"holds the label {table[:, 0].max()}", "labels from 0 to 9")
    return table[:, 1:].reshape(records, 3, 32, 32), table[:, 0].astype(np.int64)


def read_tar(path: Path, names: Sequence[str], size: int) -> list[bytes]:
    """Return the content of members of a .tar.gz, found by base name, each of exactly `size` bytes."""
    held: dict[str, bytes] = {}
    with reading(path, f"a .tar.gz with {', '.join(names)}"), tarfile.open(path, "r:gz") as tar:
        for member in tar:
            name = member.name.rpartition("/")[2]
            if name in names and member.isreg():
                if member.size != size:
                    raise refuse(path, f"holds {name} of {member.size:,} bytes", f"{size:,}")
                stream = tar.extractfile(member)
                held[name] = stream.read(size) if stream else b""
    if missing := [name for name in names if len(held.get(name, b"")) != size]:
        raise refuse(path, f"lacks {', '.join(missing)}", f"{', '.join(names)}")
    return [held[name] for name in names]


def read_omniglot(path: Path, images: int) -> tuple[Pixels, tuple[tuple[str, str], ...]]:
    """Decode an Omniglot ZIP to 28×28 with ink 255 on 0, and the (alphabet, character) of each image.

    Images are sorted by path. 105 is 3.75 × 28, so each new pixel is the mean of 3.75×3.75 old ones. In quarters
    of a pixel the weights are whole numbers, so the result is the same on every machine.
    """
    weights = np.kron(np.eye(28), np.ones((1, 15))).reshape(28, 105, 4).sum(2).astype(np.float32)
    pattern = re.compile(r"(?:.*/)?([^/]+)/(character\d+)/[^/]+\.png")
    with _zip(path) as archive:
        members = _matching(path, archive, pattern, images)
        x = np.empty((images, 1, 28, 28), np.uint8)
        for begin in range(0, images, 512):  # in pieces, to save memory
            some = members[begin : begin + 512]
            ink = np.stack([_pixels(path, archive, info, "PNG", "L", (105, 105)) == 0 for info, _ in some])
            quarters = weights @ ink.astype(np.float32) @ weights.T  # whole numbers up to 15 · 15
            x[begin : begin + 512, 0] = (quarters.astype(np.int64) * 255 + 112) // 225
    return x, tuple((match[1], match[2]) for _, match in members)


def read_tiny_imagenet(
    path: Path, choose: Callable[[Sequence[str]], Sequence[str]], train: int, val: int
) -> tuple[tuple[Pixels, Labels], tuple[Pixels, Labels], tuple[str, ...]]:
    """Decode a ZIP laid out like tiny-imagenet-200: RGB 64×64 of the chosen wnids, `train` and `val` per class.

    Classes are in the order of their wnids, train images sorted by path, validation images as annotated.
    """
    with _zip(path) as archive:
        roots = [name.removesuffix("wnids.txt") for name in archive.namelist() if name.endswith("wnids.txt")]
        if len(roots) != 1:
            raise refuse(path, f"holds {len(roots)} files wnids.txt", "one, as in tiny-imagenet-200.zip")
        wnids = choose(sorted(_text(path, archive, f"{roots[0]}wnids.txt").split()))
        label = {wnid: i for i, wnid in enumerate(wnids)}
        lines = _text(path, archive, f"{roots[0]}words.txt").splitlines()
        words = {wnid: word for wnid, _, word in (line.partition("\t") for line in lines)}
        choice = "|".join(map(re.escape, wnids))
        pattern = re.compile(rf"{re.escape(roots[0])}train/({choice})/images/[^/]+\.JPEG")
        members = _matching(path, archive, pattern, train * len(wnids))
        rows = [line.split("\t") for line in _text(path, archive, f"{roots[0]}val/val_annotations.txt").splitlines()]
        kept = [(row[0], label[row[1]]) for row in rows if len(row) > 1 and row[1] in label]
        if len(kept) != val * len(wnids):
            raise refuse(path, f"annotates {len(kept):,} validation images", f"{val * len(wnids):,}")
        infos = [archive.getinfo(f"{roots[0]}val/images/{name}") for name, _ in kept]
        x = _colour(path, archive, [info for info, _ in members])
        x_val = _colour(path, archive, infos)
    y = np.array([label[match[1]] for _, match in members], np.int64)
    y_val = np.array([i for _, i in kept], np.int64)
    return (x, y), (x_val, y_val), tuple(words.get(wnid, wnid) for wnid in wnids)


def read_words(path: Path, limit: int, vocabulary: dict[str, int], grow: bool) -> Tokens:
    """Read text as word numbers with `<eos>` after each line; new words get the next number, or `<unk>`."""
    content = unpack(path, limit)
    with reading(path, "UTF-8 text"):
        lines = content.decode("utf-8").split("\n")
    if lines[-1] == "":
        lines.pop()
    tokens: list[int] = []
    for line in lines:
        for word in (*line.split(), END_OF_LINE):
            number = vocabulary.get(word)
            if number is None:
                if grow:
                    number = vocabulary[word] = len(vocabulary)
                elif (number := vocabulary.get("<unk>")) is None:
                    raise refuse(path, f"holds the unknown word {word!r}", "words of the training text")
            tokens.append(number)
    return np.array(tokens, np.int32)


def read_npz(path: Path, limit: int) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of an .npz; check each header against the actual bytes before making the array."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    with _zip(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            content = _member(path, archive, info, limit)
            limit -= len(content)
            stream = io.BytesIO(content)
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(stream)
            if dtype.hasobject:
                raise refuse(path, f"holds Python objects in {name!r}", "an array of numbers or text")
            rest = len(content) - stream.tell()
            if any(d < 0 for d in shape) or math.prod(shape) * dtype.itemsize != rest:
                raise refuse(path, f"declares the shape {shape} of {dtype} for {rest:,} bytes in {name!r}", "a match")
            flat = np.frombuffer(content, dtype, math.prod(shape), stream.tell()) if rest else np.empty(0, dtype)
            arrays[name] = flat.reshape(shape, order="F" if fortran else "C")
    return arrays


def write_arrays(folder: Path, arrays: Mapping[str, npt.NDArray[Any]], note: Any) -> None:
    """Write arrays, one .npy each, and a note to a folder, for `read_arrays`.

    Every file is written under a temporary name and then renamed, the index last, so readers see either the
    old or the new one. Two processes that decode the same files at once write the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums: dict[str, int] = {}
    for name, array in arrays.items():
        with _renamed(folder / f"{name}.npy") as path:
            np.save(path, array, allow_pickle=False)
            sums[name] = _crc(path)
    body = json.dumps({"sums": sums, "note": note})
    with _renamed(folder / "index.json") as path:
        path.write_text(f"{zlib.crc32(body.encode()):08x}\n{body}", encoding="utf-8")


def read_arrays(folder: Path) -> tuple[dict[str, npt.NDArray[Any]], Any] | None:
    """Return the arrays, mapped from disk and read-only, and the note; None if absent or damaged anywhere."""
    try:
        crc, _, body = (folder / "index.json").read_text(encoding="utf-8").partition("\n")
        if f"{zlib.crc32(body.encode()):08x}" != crc:
            return None
        index = json.loads(body)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, expected in index["sums"].items():
            path = folder / f"{name}.npy"
            if _crc(path) != expected:
                return None
            # a plain array over the map: indexing a np.memmap is slower
            arrays[name] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        return arrays, index["note"]
    except Exception:  # damaged bytes raise anything; decode the files again
        return None


def bounded(stream: io.BufferedIOBase, path: Path, limit: int) -> IO[bytes]:
    """Return a stream that fails when read beyond `limit` bytes."""
    return io.BufferedReader(_Bounded(stream, path, limit))


class _Bounded(io.RawIOBase):
    def __init__(self, stream: io.BufferedIOBase, path: Path, limit: int) -> None:
        self._stream, self._path, self._limit, self._left = stream, path, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._stream.read(min(len(buffer), self._left + 1))
        self._left -= len(piece)
        if self._left < 0:
            raise refuse(self._path, f"holds more than {self._limit:,} bytes of content", "no more than that")
        buffer[: len(piece)] = piece
        return len(piece)


def _unxz(path: Path, most: int) -> bytes:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
    out = bytearray()
    with path.open("rb") as stream:
        while not decoder.eof and len(out) < most:
            piece = stream.read(1 << 16) if decoder.needs_input else b""
            if decoder.needs_input and not piece:
                raise EOFError("the file ends too early")
            out += decoder.decompress(piece, most - len(out))
        if decoder.eof and (decoder.unused_data or stream.read(1)):
            raise ValueError("there are bytes after the end")
    return bytes(out)


@contextlib.contextmanager
def _zip(path: Path) -> Iterator[zipfile.ZipFile]:
    with reading(path, "a ZIP file"), zipfile.ZipFile(path) as archive:
        yield archive


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """Read one member into memory; zipfile verifies its checksum."""
    with archive.open(info) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise refuse(path, f"holds more than {limit:,} bytes in {info.filename!r}", "no more than that")
    return content


def _text(path: Path, archive: zipfile.ZipFile, name: str) -> str:
    return _member(path, archive, archive.getinfo(name), TEXT_BYTES).decode("utf-8")


def _matching(
    path: Path, archive: zipfile.ZipFile, pattern: re.Pattern[str], count: int
) -> list[tuple[zipfile.ZipInfo, re.Match[str]]]:
    infos = sorted(archive.infolist(), key=lambda info: info.filename)
    kept = [(info, match) for info in infos if (match := pattern.fullmatch(info.filename))]
    if len(kept) != count:
        raise refuse(path, f"holds {len(kept):,} images", f"{count:,}")
    return kept


def _colour(path: Path, archive: zipfile.ZipFile, infos: Sequence[zipfile.ZipInfo]) -> Pixels:
    x = np.empty((len(infos), 3, 64, 64), np.uint8)
    for i, info in enumerate(infos):
        x[i] = _pixels(path, archive, info, "JPEG", "RGB", (64, 64)).transpose(2, 0, 1)
    return x


def _pixels(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, kind: str, mode: str, size: tuple[int, int]
) -> Pixels:
    from PIL import Image

    with Image.open(io.BytesIO(_member(path, archive, info, IMAGE_BYTES)), formats=(kind,)) as image:
        if image.size != size:  # known from the header, before any pixel is decoded
            raise refuse(path, f"holds {info.filename!r} of {image.size[0]}×{image.size[1]}", f"{size[0]}×{size[1]}")
        return np.asarray(image.convert(mode))


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc


def _brief(e: BaseException) -> str:
    return " ".join(str(e).split())[:200].rstrip(".") or type(e).__name__
