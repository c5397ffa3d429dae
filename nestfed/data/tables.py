"""Datasets in memory, and how to read tables from CSV, Parquet and NPZ files."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError, one_of
from nestfed.data.columns import Reading, finite, label_of, numbers
from nestfed.data.detect import detect
from nestfed.data.encoding import Column, Schema, features_of, numbered
from nestfed.data.faults import PYTHON, Entrance, Faults
from nestfed.data.formats import reading, refuse
from nestfed.data.readers import Raw, read_table, require_column
from nestfed.data.schema import EMPTY, TableSchema, spaced

Array = npt.NDArray[Any]
LOG = logging.getLogger(__name__)

MOST_VALUES = 20  # different labels that are classes without being listed
MOST_CLASSES = 10_000
CLASS, NUMBER, SURVIVAL = TARGETS = ("class", "number", "survival")
"""What a target is: one of several classes, a number, or the time to an event that may not have happened yet."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples in memory or memory-mapped; the arrays may be read-only.

    x        images uint8 (n, channels, height, width) · tables float32 (n, features), missing = NaN ·
             text int32 (n,), the number of each word
    y        int64 (n,) labels, positions in `classes`; empty for text · float64 (n,) if the target is a number ·
             float64 (n, 2) with time and event for survival ·
             float32 (n, L) with 0, 1 or NaN = unknown, if examples have several labels, named by `classes`
    columns  further properties of each example, to split by: hospital, region, patient, alphabet, …
    schema   the columns of a table x (see `nestfed.data.encoding`); a text column is several 0/1 features
    classes  names of the labels; for text the vocabulary; empty if the target is a number
    table    how the file's columns became those of x
    notes    sentences on what was detected in the file and may surprise
    """

    x: Array
    y: Array
    columns: Mapping[str, Array] = field(default_factory=dict)
    schema: Schema = ()
    classes: tuple[str, ...] = ()
    table: TableSchema = EMPTY
    notes: tuple[str, ...] = ()

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
        return replace(self, x=self.x[rows], y=y, columns=columns)


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for, besides features."""

    target: str
    columns: tuple[str, ...] = ()
    """Columns to divide by."""
    drop: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    """The target's values in order; None = those of the table."""
    kind: str = CLASS
    """What the target is: class, number or survival."""
    subgroups: tuple[str, ...] = ()
    """Columns that are features, and by whose values a model is judged as well."""
    time: str = ""
    """For survival, the column of times; `target` is the event."""

    def __post_init__(self) -> None:
        one_of("data.target_kind", self.kind, TARGETS)
        if (self.kind == SURVIVAL) != bool(self.time):
            raise NestfedError(
                "Survival needs the column of times and that of events: data.time, data.target and target_kind = 'survival'."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns with a role."""
        return (self.target, *([self.time] if self.time else []), *self.columns, *self.drop)

    def check(self, tables: Sequence[Raw], faults: Faults) -> None:
        """Note columns that tables lack, those with two roles, and tables without rows."""
        for name in (*self.names, *self.subgroups):
            lacking = [raw for raw in tables if name not in raw.columns]
            for raw in lacking[:1] if len(lacking) == len(tables) else lacking:
                like = ", like the other tables," if len(lacking) == len(tables) > 1 else ""
                with faults.noting():
                    require_column(raw.where + like, name, raw.columns)
        for name in ({self.target} & {*self.columns, *self.drop}) | set(self.columns) & set(self.drop):
            faults.add(f"Column {name!r} of {tables[0].where} has two roles: name it once as target, column or drop.")
        for raw in tables:
            if self.target in raw.columns and len(raw.columns[self.target]) == 0:
                faults.add(str(refuse(Path(raw.where), "has no rows", "at least one")))


def load_table(
    path: str | Path,
    target: str,
    *,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    schema: TableSchema = EMPTY,
    target_kind: str = CLASS,
    subgroups: Sequence[str] = (),
    time: str = "",
    entrance: Entrance = PYTHON,
) -> Dataset:
    """Read a user's table from .csv, .csv.gz, .parquet or .npz.

    Features are all columns except the target, `columns` (kept for splitting) and `drop`. `schema` says what they are;
    columns that it does not name are detected (`nestfed.data.detect`). Numbers, booleans, ordered categories and dates
    become float32, NaN where missing. A column of text becomes one 0/1 feature per category, all 0 where missing. Sites may
    have different categories: `nestfed.data.encoding` aligns them. An .npz file has the features in the array x and the
    labels in the array called `target`. All that is wrong with the file is in one error.

    With `classes`, y is the position of the label in `classes`, and any other label is rejected. Sites with one file
    each should pass it, so that y means the same at every site. Without it, whole numbers from 0 are kept, False and
    True become 0 and 1, and other values become 0, 1, … in sorted order if there are at least two. `Dataset.classes`
    names each y. A table with a single class is allowed if it is clear which one it is. With target_kind = "number", y is
    the target as numbers; with "survival", y holds the columns `time` and `target`, which says whether the event happened.
    """
    names = None if classes is None else tuple(map(str, classes))
    roles = Roles(target, tuple(columns), tuple(drop), names, target_kind, tuple(subgroups), time)
    faults = Faults(entrance)
    raw = read_table(path, schema.form, schema.as_text)
    if raw.where.lower().endswith(".npz"):
        return _from_npz(raw, roles, faults)
    (found,) = as_datasets([raw], roles, schema, faults)
    for note in found.notes:
        LOG.warning("%s", note)
    return found


def as_datasets(tables: Sequence[Raw], roles: Roles, schema: TableSchema, faults: Faults) -> list[Dataset]:
    """Turn tables with the same columns into features and labels; raise everything that is wrong in one error."""
    roles.check(tables, faults)
    schema, made, notes = tables_of(tables, schema.decided(), faults, roles.names)
    found = []
    for raw, (x, columns) in zip(tables, made):
        if roles.target not in raw.columns or (roles.time and roles.time not in raw.columns):
            continue
        with faults.noting():
            y, names = _target(raw, roles, schema, faults)
            kept = {
                name: plain(raw.columns[name]) for name in (*roles.columns, *roles.subgroups) if name in raw.columns
            }
            if x.shape[1]:
                found.append(Dataset(x, y, kept, columns, names, schema, notes))
    faults.check()
    return found


def tables_of(
    tables: Sequence[Raw], schema: TableSchema, faults: Faults, roles: Sequence[str] = ()
) -> tuple[TableSchema, list[tuple[Array, Schema]], tuple[str, ...]]:
    """Return how to read some tables, their features as numbers, and notes on what was detected."""
    found = detect(tables, schema, roles, faults)
    notes = [note for raw in tables for note in raw.notes]
    notes += [f"Column {name!r}: {note}." for name, note in found.notes.items()]
    holders = {name: raw.inside for raw in reversed(tables) for name in raw.columns}
    made = []
    for raw in tables:
        one = Reading(raw.as_text(found.schema.as_text), found.schema, faults, holders=holders)
        made.append(one.features())
        notes += one.notes
    return found.schema, made, tuple(dict.fromkeys(notes))


def _from_npz(raw: Raw, roles: Roles, faults: Faults) -> Dataset:
    """Turn the arrays of an .npz into a dataset."""
    roles.check([raw], faults)
    faults.check()
    path = Path(raw.where)
    x, schema = _arrays(path, {name: column for name, column in raw.columns.items() if name not in roles.names})
    y, names = _target(raw, roles, EMPTY, faults)
    faults.check()
    return Dataset(x, y, {name: plain(raw.columns[name]) for name in roles.columns}, schema, names)


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
    return finite(str(path), "x", x), numbered(x.shape[1]) if x.ndim == 2 else ()


def one_hot(name: str, column: Any) -> tuple[Column, Array]:
    """Return a text column as one 0/1 feature per category, all 0 where it is missing."""
    values = column.astype(object).where(column.notna(), None).to_numpy(object)
    found = tuple(sorted({v for v in values if v is not None}))
    return Column(name, found), (values[:, None] == np.array(found, object)).astype(np.float32).reshape(len(values), -1)


def _target(raw: Raw, roles: Roles, schema: TableSchema, faults: Faults) -> tuple[Array, tuple[str, ...]]:
    """Return the target of every row, and the names of its classes; none if it is a number."""
    marks = (*schema.missing, *(schema.columns[roles.target].missing if roles.target in schema.columns else ()))
    column = raw.columns[roles.target]
    series = _pandas().Series(column) if isinstance(column, np.ndarray) and column.ndim == 1 else column
    where = f"Target {roles.target!r} of {raw.where}"
    if getattr(series, "ndim", 1) != 1:
        raise NestfedError(f"{where} has the shape {series.shape}, expected one label per example.")
    if roles.kind == NUMBER:
        return _number_target(where, series, marks, raw, faults), ()
    if marks:
        series = series.where(~series.map(lambda v: spaced(str(label_of(v)))).isin(marks))
    if missing := int(series.isna().sum()):
        raise NestfedError(
            f"{where} is missing in {missing:,} of {len(series):,} rows: fill it in or remove these rows."
        )
    labels, names = _labels(where, series, roles.classes)
    if roles.kind == SURVIVAL:
        return _survival_target(where, labels, names, raw, roles, schema, faults), ()
    return labels, names


def _survival_target(
    where: str, labels: Array, names: tuple[str, ...], raw: Raw, roles: Roles, schema: TableSchema, faults: Faults
) -> Array:
    """Return time and event; the second of two values of the target is the event."""
    if len(names) != 2:
        faults.add(f"{where} says whether the event happened, so it has two values, not {len(names)}.")
    marks = (*schema.missing, *(schema.columns[roles.time].missing if roles.time in schema.columns else ()))
    there = f"Time {roles.time!r} of {raw.where}"
    time = _number_target(there, _pandas().Series(raw.columns[roles.time]), marks, raw, faults)
    if early := int((time < 0).sum()):
        faults.add(f"{there} is negative in {early:,} of {len(time):,} rows: expected times from 0.")
    return np.column_stack([time, labels == 1]).astype(np.float64)


def _number_target(where: str, series: Any, marks: tuple[str, ...], raw: Raw, faults: Faults) -> Array:
    values, odd = numbers(series, marks, where)
    if odd:
        text, (row, _) = next(iter(odd.items()))
        faults.add(f"{where} holds the text {text[:40]!r} in {raw.line(row)}, expected numbers.")
    elif missing := int((~np.isfinite(values)).sum()):
        faults.add(
            f"{where} is missing or infinite in {missing:,} of {len(values):,} rows: fill it in or remove these rows."
        )
    return values


def _labels(where: str, series: Any, classes: Sequence[str] | None) -> tuple[Array, tuple[str, ...]]:
    """Return each label's position among the classes, and the names of the classes."""
    types = _pandas().api.types
    values = [spaced(label_of(v)) for v in series.tolist()]
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


def plain(column: Any) -> Array:
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
