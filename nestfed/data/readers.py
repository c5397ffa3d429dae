"""Read the columns of .csv, .csv.gz, .parquet and .npz files, and find out how a CSV file is written."""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError, unknown
from nestfed.data.formats import bounded, read_npz, reading, refuse

MOST_BYTES = 4 << 30  # of one user's table, unpacked
SEPARATORS = (",", ";", "\t", "|")
SAMPLE = 1 << 16
"""The bytes of a CSV file that show how it is written."""
_COMMA = re.compile(r"[-+]?\d+(,\d+)?")
_PADDED = re.compile(r"0\d+")


@dataclass(frozen=True)
class Form:
    """How a CSV file is written; an empty setting is detected."""

    sep: str = ""
    decimal: str = ""
    encoding: str = ""
    """UTF-8, or else Latin-1 (cp1252), if empty."""


DETECTED = Form()


@dataclass(frozen=True)
class Raw:
    """The columns of one table as its file or data frame shows them."""

    where: str
    """The name of the table in messages."""
    columns: Mapping[str, Any]
    path: Path | None = None
    form: Form = DETECTED
    notes: tuple[str, ...] = ()
    """What was detected and may surprise."""
    site: str = ""
    first: int = 0
    """The rows of the file before these, for a piece of it."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def who(self) -> str:
        """Whose table it is, at the start of a sentence."""
        return (
            f"Site {self.site}" if self.site else self.where if self.path else self.where[:1].upper() + self.where[1:]
        )

    @property
    def inside(self) -> str:
        """Whose table it is, inside a sentence."""
        return f"site {self.site}" if self.site else self.where

    def line(self, row: int) -> str:
        """Return where a row is, in words."""
        csv = self.where.lower().endswith((".csv", ".csv.gz"))
        return f"line {self.first + row + 2}" if csv else f"row {self.first + row + 1}"  # line 1: header

    def as_text(self, names: Collection[str]) -> Raw:
        """Return the table with these columns as the file shows them, so that 250.00 or 007 is not a number."""
        numeric = [n for n in names if n in self.columns and getattr(self.columns[n].dtype, "kind", "O") in "iuf"]
        if self.path is None or not numeric or not self.path.name.lower().endswith((".csv", ".csv.gz")):
            return self
        return replace(self, columns=read_table(self.path, self.form, numeric).columns)


def read_table(path: str | Path, form: Form = DETECTED, texts: Collection[str] = ()) -> Raw:
    """Read a table's file; `texts`: columns to read as text."""
    path = Path(path)
    readers = {".csv": _csv, ".csv.gz": _csv, ".parquet": _parquet, ".npz": _npz}
    reader = next((r for suffix, r in readers.items() if path.name.lower().endswith(suffix)), None)
    if reader is None:
        raise NestfedError(f"{path} is not a table: expected a name that ends in {', '.join(readers)}.")
    if not path.is_file():
        raise NestfedError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: expected a file with a table."
        )
    if path.stat().st_size == 0:
        raise refuse(path, "is empty", "a table")
    return reader(path, form, texts)


def in_pieces(path: str | Path, form: Form, texts: Collection[str], rows: int) -> Iterator[Raw]:
    """Read a table's file a number of rows at a time, if it is a CSV file, or else at once."""
    path = Path(path)
    if not path.name.lower().endswith((".csv", ".csv.gz")) or not path.is_file() or not path.stat().st_size:
        yield read_table(path, form, texts)
        return
    header = _Csv.of(path, form, texts)
    first = 0
    for frame in header.frames(rows):
        yield Raw(str(path), {name: frame[name] for name in header.names}, path, header.form, header.notes, first=first)
        first += len(frame)


def require_column(where: str | Path, name: str, table: Mapping[str, Any]) -> None:
    """Reject a table without this column, and suggest the nearest name."""
    if name not in table:
        raise unknown("column", name, table, owner=str(where))


def _csv(path: Path, form: Form, texts: Collection[str]) -> Raw:
    header = _Csv.of(path, form, texts)
    (frame,) = header.frames(None)
    return Raw(str(path), {name: frame[name] for name in header.names}, path, header.form, header.notes)


@dataclass(frozen=True)
class _Csv:
    """A CSV file whose header was read."""

    path: Path
    form: Form
    names: Sequence[str]
    options: Mapping[str, Any]
    """How pandas reads its rows."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, form: Form, texts: Collection[str]) -> _Csv:
        """Find out how the file is written, and read its header."""
        sample, found = _looked_at(path, form)
        common = {"sep": found.sep, "encoding": found.encoding}
        # read the header as a row: pandas silently renames the second of two equal names
        (head,) = cls(
            path, found, (), {**common, "header": None, "dtype": str, "na_filter": False, "nrows": 1}, ()
        ).frames(None)
        names = [str(name).strip() for name in head.iloc[0]]
        _distinct(path, names)
        padded = _padded(sample, found.sep)
        as_text = {name: str for i, name in enumerate(names) if name in texts or i in padded}
        number = {"decimal": found.decimal} if found.decimal != found.sep else {}
        options = {"header": 0, "names": names, "index_col": False, "low_memory": False, "dtype": as_text, **number}
        notes = []
        if not form.sep and found.sep != ",":
            notes.append(f"{path} separates values by {_word(found.sep)}.")
        if not form.decimal and found.decimal == ",":
            notes.append(f"{path} writes decimals with a comma.")
        if not form.encoding and found.encoding not in ("utf-8", "utf-8-sig"):
            notes.append(f"{path} is not in UTF-8; it is read as Latin-1 ({found.encoding}).")
        return cls(path, found, names, {**common, **options}, tuple(notes))

    def frames(self, rows: int | None) -> Iterator[Any]:
        """Read the rows, `rows` at a time, or at once."""
        pd = importlib.import_module("pandas")
        expected = f"a table of values separated by {_word(self.form.sep)} in {self.form.encoding}"
        with reading(self.path, expected), _opened(self.path) as stream, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header must not be cut
            found = pd.read_csv(bounded(stream, self.path, MOST_BYTES), chunksize=rows, **self.options)
            yield from [found] if rows is None else found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with path.open("rb") as raw:
        yield gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw


def _looked_at(path: Path, form: Form) -> tuple[list[str], Form]:
    """Return the first lines of a CSV file, and how it is written."""
    with reading(path, "a table of comma-separated values in UTF-8"), _opened(path) as stream:
        encoding = form.encoding or _encoding(path)
        start = stream.read(SAMPLE)
        sample = start.decode(encoding, errors="ignore").lstrip("\ufeff").splitlines()
    if len(start) == SAMPLE and len(sample) > 1:
        sample.pop()  # it may be cut
    header = next((line for line in sample if line.strip()), "")
    sep = form.sep or max(SEPARATORS, key=lambda s: (_outside_quotes(header, s), -SEPARATORS.index(s)))
    decimal = form.decimal
    if not decimal:
        decimal = "," if sep != "," and _writes_commas(sample, sep) else "."
    return sample, Form(sep, decimal, encoding)


def _encoding(path: Path) -> str:
    """Return utf-8-sig, which also reads UTF-8 without a mark at the start, or cp1252 for a file that is not UTF-8."""
    decoder, left = codecs.getincrementaldecoder("utf-8")(), MOST_BYTES
    with _opened(path) as stream:
        while left > 0 and (block := stream.read(min(1 << 20, left))):
            left -= len(block)
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                return "latin-1" if any(b in block for b in (0x81, 0x8D, 0x8F, 0x90, 0x9D)) else "cp1252"
    return "utf-8-sig"


def _outside_quotes(line: str, sep: str) -> int:
    return sum(part.count(sep) for part in line.split('"')[::2])


def _cells(line: str, sep: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=sep), [])
    except csv.Error:
        return []


def _padded(sample: Sequence[str], sep: str) -> set[int]:
    """Return the columns with values such as 007: they are codes, and as numbers they would lose their zeros."""
    return {i for line in sample[1:] for i, cell in enumerate(_cells(line, sep)) if _PADDED.fullmatch(cell.strip())}


def _writes_commas(sample: Sequence[str], sep: str) -> bool:
    """Return whether some column has decimals with a comma, and no other values with a digit."""
    columns: dict[int, list[str]] = {}
    for line in sample[1:]:
        for i, cell in enumerate(_cells(line, sep)):
            if any(c.isdigit() for c in cell):
                columns.setdefault(i, []).append(cell.strip())
    return any(any("," in c for c in cells) and all(map(_COMMA.fullmatch, cells)) for cells in columns.values())


def _word(sep: str) -> str:
    return {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}.get(sep, repr(sep))


def _parquet(path: Path, form: Form, texts: Collection[str]) -> Raw:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise NestfedError(f"Reading {path} needs pyarrow: pip install 'nestfed[parquet]'.") from e
    with reading(path, "a Parquet file"), parquet.ParquetFile(path) as file:
        if file.metadata.num_rows * file.metadata.num_columns * 8 > MOST_BYTES:
            raise refuse(path, f"declares {file.metadata.num_rows:,} rows", f"at most {MOST_BYTES:,} bytes of content")
        arrow = file.read()
        names = [str(name) for name in arrow.column_names]
        _distinct(path, names)
        frame = arrow.to_pandas(ignore_metadata=True)
    return Raw(str(path), {name: frame[name] for name in names}, path)


def _npz(path: Path, form: Form, texts: Collection[str]) -> Raw:
    arrays = read_npz(path, MOST_BYTES)
    require_column(path, "x", arrays)
    lengths = {name: len(a) if a.ndim else -1 for name, a in arrays.items()}
    if any(length != lengths["x"] for length in lengths.values()):
        raise refuse(path, f"holds arrays of different lengths {lengths}", "one row per example")
    return Raw(str(path), dict(arrays), path)


def _distinct(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise NestfedError(f"{path} has two columns called {twice[0]!r}: rename one of them.")
