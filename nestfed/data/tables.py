"""Datasets in memory, and how to read tables from CSV, Parquet and NPZ files."""

from __future__ import annotations

import gzip
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError, unknown
from nestfed.data.encoding import Column, Schema, features_of, numbered
from nestfed.data.formats import bounded, read_npz, reading, refuse

Array = npt.NDArray[Any]

MOST_BYTES = 4 << 30  # of one user's table, unpacked
MOST_VALUES = 20  # different texts in a column that becomes one-hot features
MOST_CLASSES = 10_000


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples in memory or memory-mapped; the arrays may be read-only.

    x        images uint8 (n, channels, height, width) · tables float32 (n, features), missing = NaN ·
             text int32 (n,), the number of each word
    y        int64 (n,) labels, positions in `classes`; empty for text ·
             float32 (n, L) with 0, 1 or NaN = unknown, if examples have several labels, named by `classes`
    columns  further properties of each example, to split by: hospital, region, patient, alphabet, …
    schema   the columns of a table x (see `nestfed.data.encoding`); a text column is several 0/1 features
    classes  names of the labels; for text the vocabulary
    """

    x: Array
    y: Array
    columns: Mapping[str, Array] = field(default_factory=dict)
    schema: Schema = ()
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.x)
        lengths = {"y": len(self.y)} if self.y.size or self.columns else {}
        for name, length in {**lengths, **{name: len(c) for name, c in self.columns.items()}}.items():
            if length != n:
                raise NestfedError(f"A dataset has {n:,} examples but {length:,} values of {name!r}: make them equal.")
        if self.schema and (self.x.ndim != 2 or self.x.shape[1] != len(self.features)):
            raise NestfedError(f"A table has the shape {self.x.shape}, expected (n, {len(self.features)}) as named.")

    @property
    def features(self) -> tuple[str, ...]:
        """The names of a table's features: a column of numbers, or `column=category`."""
        return features_of(self.schema)

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Any) -> Dataset:
        """Return the chosen rows (numbers, a slice or a mask), in the order given."""
        y = self.y[rows] if self.y.size else self.y
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Dataset(self.x[rows], y, columns, self.schema, self.classes)


def load_table(
    path: str | Path,
    target: str,
    *,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Read a user's table from .csv, .csv.gz, .parquet or .npz.

    Features are all columns except the target, `columns` (kept for splitting) and `drop`. Numbers and booleans
    become float32, NaN where missing. A text column with at most 20 different values becomes one 0/1 feature per
    value, all 0 where missing. Text columns with more values, and text among numbers, are rejected. Sites may have
    different categories: `nestfed.data.encoding` aligns them. An .npz file has the features in the array x and the
    labels in the array called `target`.

    With `classes`, y is the position of the label in `classes`, and any other label is rejected. Sites with one file
    each should pass it, so that y means the same at every site. Without it, whole numbers from 0 are kept, False and
    True become 0 and 1, and other values become 0, 1, … in sorted order if there are at least two. `Dataset.classes`
    names each y. A table with a single class is allowed if it is clear which one it is.
    """
    path = Path(path)
    return as_dataset(path, read_columns(path), target, columns=columns, drop=drop, classes=classes)


def read_columns(path: Path) -> dict[str, Any]:
    """Return the columns of a table's file, or the arrays of an .npz, unchanged."""
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
    return reader(path)


def as_dataset(
    path: Path,
    table: Mapping[str, Any],
    target: str,
    *,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Turn the output of `read_columns` into features and labels, as `load_table` describes."""
    for name in (target, *columns, *drop):
        require_column(path, name, table)
    if both := {target} & {*columns, *drop} or set(columns) & set(drop):
        raise NestfedError(f"Column {both.pop()!r} of {path} has two roles: name it once as target, column or drop.")
    kept = {name: column for name, column in table.items() if name not in {target, *columns, *drop}}
    if len(table[target]) == 0:
        raise refuse(path, "has no rows", "at least one")
    x, schema = _arrays(path, kept) if path.name.lower().endswith(".npz") else table_of(str(path), kept)
    y, names = _labels(path, target, table[target], classes)
    if len(x) != len(y):
        raise refuse(path, f"holds {len(x):,} examples and {len(y):,} labels", "one label per example")
    return Dataset(x, y, {name: _plain(table[name]) for name in columns}, schema, names)


def _csv(path: Path) -> dict[str, Any]:
    pd = _pandas()

    def read(**options: Any) -> Any:
        with reading(path, "a table of comma-separated values in UTF-8"), path.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
            with warnings.catch_warnings():  # rows longer than the header must not be cut silently
                warnings.simplefilter("error", pd.errors.ParserWarning)
                return pd.read_csv(bounded(stream, path, MOST_BYTES), **options)

    # read the header as a row: pandas silently renames the second of two equal names
    names = [str(name).strip() for name in read(header=None, dtype=str, na_filter=False, nrows=1).iloc[0]]
    _distinct(path, names)
    frame = read(header=0, names=names, index_col=False, low_memory=False)
    return {name: frame[name] for name in names}


def _parquet(path: Path) -> dict[str, Any]:
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
    return {name: frame[name] for name in names}


def _npz(path: Path) -> dict[str, Any]:
    arrays = read_npz(path, MOST_BYTES)
    require_column(path, "x", arrays)
    lengths = {name: len(a) if a.ndim else -1 for name, a in arrays.items()}
    if any(length != lengths["x"] for length in lengths.values()):
        raise refuse(path, f"holds arrays of different lengths {lengths}", "one row per example")
    return dict(arrays)


def _distinct(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise NestfedError(f"{path} has two columns called {twice[0]!r}: rename one of them.")


def require_column(path: Path, name: str, table: Mapping[str, Any]) -> None:
    """Reject a file without this column, and suggest the nearest name."""
    if name not in table:
        raise unknown("column", name, table, owner=str(path))


def _arrays(path: Path, kept: Mapping[str, Array]) -> tuple[Array, Schema]:
    """Return the x of an .npz: pixels stay bytes, everything else becomes float32."""
    if "x" not in kept:
        raise NestfedError(f"The array 'x' of {path} holds the features: it cannot be target, column or dropped.")
    if others := [name for name in kept if name != "x"]:
        raise NestfedError(f"{path} also holds {others[0]!r}, which has no role: name it in columns or in drop.")
    x = kept["x"]
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise refuse(path, f"holds x as {x.dtype} of shape {x.shape}", "numbers of shape (n, features)")
    if x.dtype == np.uint8 and x.ndim > 2:
        return x, ()
    return _finite(str(path), "x", x), numbered(x.shape[1]) if x.ndim == 2 else ()


def table_of(where: str, columns: Mapping[str, Any]) -> tuple[Array, Schema]:
    """Return the columns of a data frame as numbers with their schema; `where` names the table in errors."""
    types = _pandas().api.types
    made: dict[Column, Array] = {}
    for name, column in columns.items():
        if column.dtype == object and types.infer_dtype(column, skipna=True) == "boolean":
            column = column.astype("boolean")  # a missing value must not turn booleans into text
        if types.is_bool_dtype(column.dtype) or types.is_numeric_dtype(column.dtype):
            if column.dtype.kind == "c":
                raise NestfedError(f"Column {name!r} of {where} holds complex numbers: drop it.")
            made[Column(name)] = _finite(where, name, column.to_numpy(np.float64, na_value=np.nan))[:, None]
        elif types.is_datetime64_any_dtype(column.dtype) or types.is_timedelta64_dtype(column.dtype):
            raise NestfedError(f"Column {name!r} of {where} holds times: turn it into a number, or drop it.")
        else:
            kind, values = one_hot(name, _texts(where, name, column))
            made[kind] = values
    if not any(map(len, made)):
        raise NestfedError(f"{where} has no column left for features: expected at least one beside the target.")
    return np.concatenate(list(made.values()), 1), tuple(made)


def _texts(where: str, name: str, column: Any) -> Any:
    """Return a text column, or raise an error if it cannot become features."""
    known = column.dropna()
    if len(known) and not all(isinstance(v, str | bool | int | float) for v in known):
        raise NestfedError(f"Column {name!r} of {where} holds neither numbers nor texts: drop it.")
    values = known.astype(str)
    odd = np.flatnonzero(_pandas().to_numeric(values, errors="coerce").isna())
    if 0 < 2 * len(odd) <= len(values) and str(column.dtype) != "category":
        row = int(np.flatnonzero(column.notna())[odd[0]])
        at = f"line {row + 2}" if where.lower().endswith((".csv", ".csv.gz")) else f"row {row + 1}"  # line 1: header
        raise NestfedError(
            f"Column {name!r} of {where} holds the text {values.iloc[odd[0]][:40]!r} in {at} where its other values are "
            "numbers: write a number there, or leave it empty if it is missing."
        )
    if (count := values.nunique()) > MOST_VALUES:
        raise NestfedError(
            f"Column {name!r} of {where} holds {count:,} different texts such as {values.iloc[0][:40]!r}, expected "
            f"numbers or at most {MOST_VALUES} texts: correct it, drop it, or keep it as a column to split by."
        )
    return column.astype(object).where(column.isna(), column.astype(str))


def one_hot(name: str, column: Any) -> tuple[Column, Array]:
    """Return a text column as one 0/1 feature per category, all 0 where it is missing."""
    values = column.astype(object).where(column.notna(), None).to_numpy(object)
    found = tuple(sorted({v for v in values if v is not None}))
    return Column(name, found), (values[:, None] == np.array(found, object)).astype(np.float32).reshape(len(values), -1)


def _finite(where: str, name: str, values: Array) -> Array:
    with np.errstate(over="ignore"):
        narrow: Array = values.astype(np.float32)
    if np.isinf(narrow).any():
        raise NestfedError(
            f"Column {name!r} of {where} holds infinite values: replace them with numbers or leave them empty."
        )
    return narrow


def _labels(path: Path, target: str, column: Any, classes: Sequence[str] | None) -> tuple[Array, tuple[str, ...]]:
    where = f"Target {target!r} of {path}"
    series = _pandas().Series(column) if isinstance(column, np.ndarray) and column.ndim == 1 else column
    if getattr(series, "ndim", 1) != 1:
        raise NestfedError(f"{where} has the shape {series.shape}, expected one label per example.")
    if missing := int(series.isna().sum()):
        raise NestfedError(
            f"{where} is missing in {missing:,} of {len(series):,} rows: fill it in or remove these rows."
        )
    types = _pandas().api.types
    values = [label_of(v) for v in series.tolist()]
    found = set(values)
    if classes is not None:
        names = tuple(map(str, classes))
        if len(set(names)) < len(names):
            raise NestfedError(f"{where} has classes {', '.join(names)}, expected each only once.")
        if strange := sorted(found - set(names)):
            raise NestfedError(f"{where} holds {strange[0]!r}, expected one of {', '.join(names)} as given in classes.")
    elif types.is_bool_dtype(series.dtype) or found <= {"False", "True"}:
        names = ("False", "True")
    elif types.is_numeric_dtype(series.dtype) and all(v.isdecimal() for v in found):
        most = max(map(int, found))
        if most >= MOST_CLASSES:
            raise NestfedError(f"{where} holds {most}, expected labels below {MOST_CLASSES:,}: choose another column.")
        names = tuple(map(str, range(max(most, 1) + 1)))
    else:
        names = _sorted_names(where, found, bool(types.is_numeric_dtype(series.dtype)))
    number = {name: i for i, name in enumerate(names)}
    return np.array([number[v] for v in values], np.int64), names


def _sorted_names(where: str, found: set[str], numeric: bool) -> tuple[str, ...]:
    if len(found) == 1:
        raise NestfedError(f"{where} holds only {found.pop()!r}: list all labels, in order, in classes.")
    if len(found) > MOST_VALUES:
        raise NestfedError(f"{where} holds {len(found):,} different values: if these are labels, list them in classes.")
    return tuple(sorted(found, key=float) if numeric else sorted(found))


def label_of(value: Any) -> str:
    """Return the name of a label: 1, 1.0 and "1" are the same."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _plain(column: Any) -> Array:
    """Return a column to split by as whole numbers or text; a missing value is the text "unknown"."""
    if isinstance(column, np.ndarray):
        return column
    if column.dtype.kind in "biu" and not column.isna().any():
        return np.asarray(column.to_numpy())
    labels = ["unknown" if gone else label_of(v) for v, gone in zip(column.astype(object), column.isna())]
    return np.array(labels, np.str_)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HEART_FEATURES = _names("age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal")


def read_heart(files: Mapping[str, Path]) -> Dataset:
    """Read the processed UCI heart-disease files, hospital by hospital: y = 1 if `num` > 0, `?` = NaN."""
    pd = _pandas()
    frames = []
    for hospital, path in files.items():
        with reading(path, "14 comma-separated numbers in each row"):
            frame = pd.read_csv(path, header=None, na_values="?", dtype=np.float64)
        if frame.shape[1] != 14 or frame[13].isna().any():
            raise refuse(path, f"has {frame.shape[1]} columns or a row without diagnosis", "13 features and num")
        frames.append(frame.assign(hospital=hospital))
    table = pd.concat(frames, ignore_index=True)
    x = table[list(range(13))].to_numpy(np.float32)
    y = (table[13] > 0).to_numpy(np.int64)
    return Dataset(
        x,
        y,
        {"hospital": table["hospital"].to_numpy(np.str_)},
        tuple(map(Column, HEART_FEATURES)),
        ("no disease", "disease"),
    )


# What is known about an eICU stay at the end of its first day. Columns that are not listed are left out.
# Left out as outcomes or derived from them: every discharge field (status, location, offset, time, year, weight),
# diedinhospital, dischargelocation, var03hspxlos, and all of apachePatientResult (predicted and actual mortality,
# lengths of stay, ventilator days). Left out as not tied to the first day: pastHistory, admissionDx.
# Left out as copies (gender, age, GCS, pao2, ventday1, readmit, day1… in apachePredVar equal other columns), as
# constant (aids, saps3…, region, teachtype, …), as identifiers, as facts on the hospital, or as too many texts.
EICU_NUMBERS = ("admissionheight", "admissionweight", "unitvisitnumber")
EICU_TEXTS = ("gender", "ethnicity", "unittype", "unitadmitsource", "hospitaladmitsource", "unitstaytype")
EICU_APS = _names(
    "intubated vent dialysis eyes motor verbal meds urine wbc temperature respiratoryrate sodium heartrate meanbp ph "
    "hematocrit creatinine albumin pao2 pco2 bun glucose bilirubin fio2"
)
EICU_PRED = _names(
    "thrombolytics hepaticfailure lymphoma metastaticcancer leukemia immunosuppression cirrhosis diabetes "
    "electivesurgery activetx ima midur oobventday1 oobintubday1 ejectfx"
)


def read_eicu(patient: Path, hospital: Path, aps: Path, pred: Path) -> Dataset:
    """Read in-hospital death for each eICU stay, with features from the first day only.

    y = 1 if the hospital discharge status is Expired; stays without a status are left out. -1 means missing and
    becomes NaN, as do the APACHE features of stays without APACHE. Age "> 89" becomes 90. `hoursbefore` is the
    time in hospital before the unit. Columns: hospital, region ("unknown" where empty), patient.
    """
    stay, place = "patientunitstayid", "hospitalid"
    stays = _eicu(patient, (stay, place, "uniquepid", "age", "hospitaldischargestatus", "hospitaladmitoffset"))
    stays = stays[stays["hospitaldischargestatus"].isin(("Alive", "Expired"))]
    regions = _eicu(hospital, (place, "region")).set_index(place)["region"]
    pd = _pandas()
    numbers: dict[str, Array] = {
        "age": pd.to_numeric(stays["age"].replace("> 89", "90"), errors="coerce").to_numpy(np.float32),
        "hoursbefore": (-stays["hospitaladmitoffset"].where(stays["hospitaladmitoffset"] <= 0) / 60).to_numpy(
            np.float32
        ),
    }
    numbers |= {name: stays[name].to_numpy(np.float32) for name in EICU_NUMBERS}
    for path, names in ((aps, EICU_APS), (pred, EICU_PRED)):
        table = _eicu(path, (stay, *names)).drop_duplicates(stay).set_index(stay).reindex(stays[stay])
        numbers |= {name: table[name].where(table[name] != -1).to_numpy(np.float32) for name in names}
    made = {Column(name): values[:, None] for name, values in numbers.items()}
    made |= dict(one_hot(name, stays[name]) for name in EICU_TEXTS)
    columns = {
        "hospital": stays[place].to_numpy(np.int64),
        "region": stays[place].map(regions).fillna("unknown").to_numpy(np.str_),
        "patient": stays["uniquepid"].to_numpy(np.str_),
    }
    y = (stays["hospitaldischargestatus"] == "Expired").to_numpy(np.int64)
    return Dataset(np.concatenate(list(made.values()), 1), y, columns, tuple(made), ("survived", "died"))


def _eicu(path: Path, names: Sequence[str]) -> Any:
    with reading(path, "a table of the eICU demo, version 2.0.1"):
        frame = _pandas().read_csv(path)
    for name in names:
        require_column(path, name, frame)
    return frame


def _pandas() -> Any:
    # imported late because it takes half a second; Any because its stubs may not be installed
    return importlib.import_module("pandas")
