"""Ordinary tables: what is detected in them, what a schema changes, and what is reported."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from nestfed.core import NestfedError
from nestfed.data.columns import Reading, bucket
from nestfed.data.encoding import (
    LEAST_ROWS,
    MOST_CATEGORIES,
    OTHER,
    Column,
    Sums,
    TableEncoding,
    common_schema,
    differences,
    encode,
    features_of,
    schema_from_json,
    schema_to_json,
    unseen,
)
from nestfed.data.faults import COMMAND_LINE, FILE, Faults, TableError
from nestfed.data.merge import merge
from nestfed.data.readers import Raw, read_table
from nestfed.data.schema import ColumnSpec, TableSchema
from nestfed.data.tables import load_table

pd = pytest.importorskip("pandas")


def csv(path: Path, **columns: Any) -> Path:
    frame = pd.DataFrame(columns)
    if "y" not in frame:
        frame["y"] = np.arange(len(frame)) % 2
    frame.to_csv(path, index=False)
    return path


def column(table: Any, name: str) -> np.ndarray:
    return table.x[:, table.features.index(name)]


# ---------------------------------------------------------------------------------------------------------
# What is detected


def test_diagnosis_codes_among_numbers(tmp_path: Path) -> None:
    """As in public hospital tables: 250.83 and 427 beside V57 and E909, and ? where unknown."""
    rng = np.random.default_rng(0)
    codes = [f"{i}.{j}" for i in range(250, 290) for j in range(3)] + [f"V{i}" for i in range(10, 30)] + ["E909"]
    text = [*rng.choice(codes, 500), "?", "250.00"]
    table = load_table(csv(tmp_path / "t.csv", diag=text, age=np.arange(502.0)), "y")
    assert table.table.columns["diag"] == ColumnSpec("category", missing=("?",), prefix=3)
    levels = {t[:3] for t in text if t != "?"}
    assert table.schema[0] == Column("diag", tuple(sorted(levels)))
    assert_array_equal(column(table, "diag=250"), [t.startswith("250") for t in text])
    assert table.x[500, :-1].sum() == 0  # "?" is missing
    assert "grouped by their first 3 letters" in " ".join(table.notes)


def test_34_levels_have_a_feature_each(tmp_path: Path) -> None:
    levels = [f"level {i:02d}" for i in range(34)]
    table = load_table(csv(tmp_path / "t.csv", x=levels * 4), "y")
    assert table.schema == (Column("x", tuple(levels)),)
    assert_array_equal(table.x, np.tile(np.eye(34), (4, 1)))
    assert table.notes == ()


def test_of_900_levels_the_common_ones_have_a_feature() -> None:
    """Agreed from sums alone: a level is common over all sites, not at one."""
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, 901)
    values = [rng.choice([f"dr {i:03d}" for i in range(900)], 4_000, p=p / p.sum()) for _ in range(2)]
    made = [
        Reading(Raw("t", {"dr": pd.Series(v)}), TableSchema.of(categorical=["dr"]), Faults()).features() for v in values
    ]
    sums = {f"Site {n}": Sums.of(x, schema) for n, (x, schema) in enumerate(made)}
    names, counts = np.unique(np.concatenate(values), return_counts=True)
    order = np.lexsort((names, -counts))[:MOST_CATEGORIES]
    expected = tuple(sorted(names[i] for i in order if counts[i] >= LEAST_ROWS))
    (common,) = common_schema(sums)
    assert common == Column("dr", expected, other=True)
    found = encode({str(n): one for n, one in enumerate(made)})
    assert found.features[-1] == f"dr={OTHER}"
    aligned = found.align(*made[0])
    assert_array_equal(aligned.sum(1), np.ones(4_000))  # nobody is lost
    assert_array_equal(aligned[:, -1], ~np.isin(values[0], expected))
    assert_allclose(found.mean[-1], np.mean(~np.isin(np.concatenate(values), expected)))
    assert "others share one" in differences(sums)[0]
    again = TableEncoding.from_json(found.to_json())
    assert again.schema == found.schema
    # a level that training never had is one of the others
    x, schema = np.ones((1, 1)), (Column("dr", ("dr new",)),)
    assert again.align(x, schema)[0, -1] == 1
    assert unseen(again.schema, schema, "new.csv") == []


def test_thousands_of_levels_are_divided_by_a_hash_that_needs_no_agreement(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    text = rng.choice([f"firm {chr(97 + i % 26)}{'x' * (i % 7)} {i}" for i in range(1_200)], 12_000)
    table = load_table(csv(tmp_path / "t.csv", firm=text), "y")
    assert table.table.columns["firm"] == ColumnSpec("category", buckets=64)
    assert_array_equal(table.x.sum(1), np.ones(12_000))
    assert_array_equal(
        column(table, f"firm={bucket(text[0], 64)}"), [bucket(t, 64) == bucket(text[0], 64) for t in text]
    )
    assert bucket("  Firm A ", 64) == bucket("firm a", 64)


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("a;b;y\n1,5;x;0\n2,25;z;1\n-0,5;x;1\n", ("semicolons", "comma")),
        ("a\tb\ty\n1.5\tx\t0\n2.25\tz\t1\n-.5\tx\t1\n", ("tabs",)),
        ('a;b;y\n1,5;"x";0\n2,25;z;1\n-0,5;x;1\n', ("semicolons", "comma")),
        ("\ufeffa,b,y\n1.5,x,0\n2.25,z,1\n-.5,x,1\n", ()),
    ],
)
def test_separators_and_decimal_commas(tmp_path: Path, text: str, notes: tuple[str, ...]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    table = load_table(path, "y")
    assert table.features == ("a", "b=x", "b=z")
    assert_array_equal(table.x, np.array([[1.5, 1, 0], [2.25, 0, 1], [-0.5, 1, 0]], np.float32))
    assert len(table.notes) == len(notes)
    assert all(word in note for word, note in zip(notes, table.notes))


def test_codes_with_points_do_not_hide_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;code;y\n1,5;250.83;0\n2;V45.1;1\n3,5;401.9;1\n")
    table = load_table(tmp_path / "t.csv", "y")
    assert_array_equal(column(table, "a"), [1.5, 2, 3.5])
    assert table.table.columns["code"].kind == "category"


def test_latin_1(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("stadt,y\nKöln,0\nZürich,1\n".encode("latin-1"))
    table = load_table(tmp_path / "t.csv", "y")
    assert table.features == ("stadt=Köln", "stadt=Zürich")
    assert "Latin-1" in table.notes[0]
    given = load_table(tmp_path / "t.csv", "y", schema=TableSchema(encoding="cp1250"))
    assert given.features[0] == "stadt=Köln"


def test_marks_of_missing_values(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", a=["1", "?", "3", "."], b=[-9, 0, 4, -9], c=[-1, 2, -1, 0], d=["u", "?", "v", "u"])
    table = load_table(path, "y")
    expected = [[1, np.nan, -1], [np.nan, 0, 2], [3, 4, -1], [np.nan, np.nan, 0]]
    assert_array_equal(table.x[:, :3], np.array(expected, np.float32))  # -1 may be a value
    assert table.schema[-1] == Column("d", ("u", "v"))
    given = load_table(path, "y", schema=TableSchema.of(missing=["-1"]))
    assert_array_equal(np.isnan(column(given, "c")), [True, False, True, False])


def test_zeros_in_front_make_a_code(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("ward,y\n007,0\n012,1\n007,1\n")
    assert load_table(tmp_path / "t.csv", "y").features == ("ward=007", "ward=012")


def test_dates_are_days(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", born=["2000-01-11", "1999-12-31"], seen=["01.03.2020", "02.03.2020"])
    assert load_table(path, "y").x.tolist() == [[10, 7365], [-1, 7366]]
    since = TableSchema({"seen": ColumnSpec("date", since="born", format="%d.%m.%Y")})
    found = load_table(path, "y", schema=since)
    days = [
        (pd.Timestamp("2020-03-01") - pd.Timestamp("2000-01-11")).days,
        (pd.Timestamp("2020-03-02") - pd.Timestamp("1999-12-31")).days,
    ]
    assert column(found, "seen").tolist() == days
    wrong = csv(tmp_path / "w.csv", seen=["2020-13-01", "2020-01-01"])
    with pytest.raises(NestfedError, match=r"'2020-13-01' in line 2, which is not a date.*format"):
        load_table(wrong, "y")


def test_ids_are_left_out_and_reported(tmp_path: Path) -> None:
    n = 60
    path = csv(tmp_path / "t.csv", row=np.arange(7, 7 + n), mrn=np.random.default_rng(0).permutation(9_000)[:n],
               name=[f"Person {i}" for i in range(n)], weight=50 + np.random.default_rng(1).permutation(n) * 2)  # fmt: skip
    table = load_table(path, "y")
    assert table.features == ("weight",)
    assert [note.split(":")[0] for note in table.notes] == ["Column 'row'", "Column 'mrn'", "Column 'name'"]


def test_a_number_that_may_be_a_code_is_reported(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", admission_type_id=[1, 2, 3, 8], wardID=[4, 5, 4, 6], procedures=[0, 1, 4, 6])
    table = load_table(path, "y")
    assert table.features == ("admission_type_id", "wardID", "procedures")
    assert [note.split(":")[0] for note in table.notes if "may be a code" in note] == [
        "Column 'admission_type_id'",
        "Column 'wardID'",
    ]
    chosen = load_table(path, "y", schema=TableSchema.of(categorical=["admission_type_id"]))
    assert chosen.features[:4] == tuple(f"admission_type_id={i}" for i in (1, 2, 3, 8))


# ---------------------------------------------------------------------------------------------------------
# Names of inputs


def test_names_with_an_equals_sign_stay_apart() -> None:
    schema = (Column("a", ("b=c", "d")), Column("a=b", ("c",)), Column("x=1"))
    names = features_of(schema)
    assert names == ('"a"=b=c', "a=d", '"a=b"=c', "x=1")
    assert len(set(names)) == 4
    assert schema_from_json(schema_to_json(schema)) == schema


# ---------------------------------------------------------------------------------------------------------
# Sites that differ


def test_case_and_spaces_at_other_sites() -> None:
    tables = [["Male", "Female", "Male", "Male"], ["MALE", "  female", "male "]]
    made = [
        Reading(Raw("t", {"sex": pd.Series(v)}), TableSchema.of(categorical=["sex"]), Faults()).features()
        for v in tables
    ]
    sums = {f"Site {n}": Sums.of(x, schema) for n, (x, schema) in enumerate(made)}
    assert common_schema(sums) == (Column("sex", ("Female", "Male")),)
    found = encode({str(n): one for n, one in enumerate(made)})
    assert found.align(*made[1]).tolist() == [[0, 1], [1, 0], [0, 1]]
    assert "'MALE' as 'Male'" in differences(sums)[0]


def test_what_training_never_saw_is_named() -> None:
    schema = (Column("ward", ("a", "b")), Column("n"))
    assert unseen(schema, (Column("ward", ("B", "c")), Column("n")), "new.csv") == [
        "new.csv has categories in column 'ward' that training did not have: 'c'."
    ]


# ---------------------------------------------------------------------------------------------------------
# A schema that people agreed on

AGREED = """
[schema]
missing = ["?"]
others = "ignored"

[schema.columns]
age = { unit = "years", range = [0, 120], missing = ["999"] }
stage = { kind = "ordered", categories = ["I", "II", "III"] }
"a=b" = { kind = "category", categories = ["u", "v"], other = true }
late = { kind = "number", optional = true }
"""


def agreed() -> TableSchema:
    return TableSchema.from_tables(tomllib.loads(AGREED)["schema"])


def test_a_schema_is_followed(tmp_path: Path) -> None:
    path = csv(
        tmp_path / "t.csv", age=[50, 999, "?"], stage=["ii", "I ", "III"], **{"a=b": ["U", "w", "?"]}, extra=[1, 2, 3]
    )
    table = load_table(path, "y", schema=agreed())
    assert table.features == ("age", "stage", "a=b=u", "a=b=v", f"a=b={OTHER}", "late")
    nan = np.nan
    expected = [[50, 1, 1, 0, 0, nan], [nan, 0, 0, 0, 1, nan], [nan, 2, 0, 0, 0, nan]]
    assert_array_equal(table.x, np.array(expected, np.float32))
    text = " ".join(table.notes)
    assert "no column 'late'" in text
    assert "'extra'; they are left out" in text


def test_a_schema_survives_its_file() -> None:
    schema = agreed()
    again = tomllib.loads(schema.to_toml({"age": "a note"}))
    assert TableSchema.from_tables(again["schema"]) == schema
    assert TableSchema.from_tables(schema.to_tables()) == schema


def test_all_problems_are_in_one_list(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", age=["50", "300", "old"], stage=["II", "IV", "I"], y=[0, 1, None])
    with pytest.raises(TableError) as caught:
        load_table(path, "y", drop=["nothing"], schema=agreed())
    problems = caught.value.problems
    words = ["no column 'nothing'", "text 'old' in line 4", "outside 0 to 120 years, such as 300 in line 3", "'IV' in line 3",
             "no column 'a=b', which the schema names", "'y' of"]  # fmt: skip
    assert len(problems) == len(words)
    assert all(any(word in problem for problem in problems) for word in words)
    assert str(caught.value).startswith("The tables have 6 problems:\n- ")


@pytest.mark.parametrize(
    ("entrance", "words"), [(COMMAND_LINE, "--categorical a"), (FILE, '[schema.columns]'), (None, "TableSchema.of(categorical=['a'])")]
)  # fmt: skip
def test_the_words_are_those_of_the_entrance(tmp_path: Path, entrance: Any, words: str) -> None:
    path = csv(tmp_path / "t.csv", a=[*range(9), "high"])
    with pytest.raises(NestfedError) as caught:
        load_table(path, "y", **({"entrance": entrance} if entrance else {}))
    assert words in str(caught.value)


def test_open_columns_must_be_decided(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", a=[1, 2], b=[1, 2])
    schema = TableSchema({"a": ColumnSpec("?"), "b": ColumnSpec("?")})
    with pytest.raises(NestfedError, match=r"leaves 'a', 'b' open.*decide"):
        load_table(path, "y", schema=schema)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": {"a": {"kind": "numbr"}}}, "kind = 'numbr'"),
        ({"columns": {"a": {"knd": "number"}}}, "did you mean schema.columns.a.kind"),
        ({"columns": {"a": {"kind": "ordered"}}}, "list its categories"),
        ({"columns": {"a": {"range": [2, 1]}}}, "lowest and highest"),
        ({"columns": {"a": {"kind": "category", "categories": ["x", "X "]}}}, "twice"),
        ({"columns": {"a": {"kind": "date", "since": "yesterday"}, "yesterday": {}}}, "a date column or a day"),
        ({"columns": {"a": {"kind": "category", "prefix": 3, "buckets": 8}}}, "not both"),
        ({"columns": {"a": 3}}, "must be a table"),
        ({"others": "drop"}, "detect or ignored"),
        ({"seperator": ";"}, "did you mean schema"),
        ({"missing": "?"}, "must be a list of texts"),
    ],
)
def test_mistakes_in_a_schema(settings: Any, words: str) -> None:
    with pytest.raises(NestfedError, match=words):
        TableSchema.from_tables(settings)


def test_rows_to_predict_are_not_rejected_for_what_the_schema_does_not_know() -> None:
    raw = Raw("new.csv", {"age": pd.Series([400.0]), "stage": pd.Series(["IX"]), "a=b": pd.Series(["z"])})
    reading = Reading(raw, agreed(), Faults(), strict=False)
    x, _ = reading.features()
    assert reading.faults.found == {}
    assert_array_equal(x, np.array([[400, np.nan, 0, 0, 1, np.nan]], np.float32))
    assert len(reading.notes) == 3  # the range, the order, and a column that the schema lets a table lack


def test_schemas_of_sites_are_merged() -> None:
    a = TableSchema({"n": ColumnSpec(range=(0, 5)), "c": ColumnSpec("category", categories=("u", "V")), "k": ColumnSpec("?"),
                     "d": ColumnSpec("category", prefix=3, categories=("abc",)), "only": ColumnSpec()}, ("?",), sep=";")  # fmt: skip
    b = TableSchema({"n": ColumnSpec(range=(-1, 4), missing=("-9",)), "c": ColumnSpec("category", categories=("v", "w"), other=True),
                     "k": ColumnSpec("category"), "d": ColumnSpec("category", categories=("abcd", "xyz1"))}, ("NA",))  # fmt: skip
    made, notes = merge({"a": a, "b": b}, Faults())
    assert made.columns["n"] == ColumnSpec(range=(-1, 5), missing=("-9",))
    assert made.columns["c"] == ColumnSpec("category", categories=("V", "u", "w"), other=True)
    assert made.columns["k"].kind == "?"
    assert made.columns["d"] == ColumnSpec("category", prefix=3, categories=("abc", "xyz"), other=True)
    assert (made.missing, made.sep) == (("?", "NA"), "")
    assert "? at a, category at b" in notes["k"]
    assert "b has no such column" in notes["only"]
    faults = Faults()
    merge({"a": TableSchema({"w": ColumnSpec(unit="kg")}), "b": TableSchema({"w": ColumnSpec(unit="lb")})}, faults)
    with pytest.raises(NestfedError, match="'kg' at a, 'lb' at b"):
        faults.check()


def test_a_column_read_as_text_keeps_its_digits(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("code,y\n250.00,0\n250,1\n")
    raw = read_table(tmp_path / "t.csv")
    assert raw.as_text(["code"]).columns["code"].tolist() == ["250.00", "250"]
