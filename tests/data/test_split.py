"""Splits: nobody is on both sides, at any site; time and sites are kept apart."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from nestfed.core import NestfedError
from nestfed.data.partition import hold_out
from nestfed.data.split import TEST, VALIDATION, aside, by_hash, late
from nestfed.experiment.prepare import DataSpec, PartitionSpec, prepare
from nestfed.study.lr_find import apart
from nestfed.study.sites import Site
from nestfed.study.tables import read_sites

pd = pytest.importorskip("pandas")


def sites(seed: int = 0) -> list[Site]:
    """Five sites, the last of three rows, and persons who were at several of them."""
    rng = np.random.default_rng(seed)
    made = []
    for n, rows in enumerate((80, 60, 120, 40, 3)):
        group = rng.integers(0, 90, rows).astype(str)
        made.append(
            Site(
                f"s{n}", rng.normal(size=(rows, 1)), rng.integers(0, 2, rows), group=group, late=rng.random(rows) < 0.4
            )
        )
    return made


def persons(parts: list[Site]) -> set[str]:
    return {str(p) for site in parts for p in site.group}  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(5))
def test_a_person_at_two_sites_is_on_one_side(seed: int) -> None:
    plain = [replace(site, late=None) for site in sites(seed)]
    rest, test = apart(plain, 0.25, seed, TEST)
    fitting, validation = apart(rest, 0.25, seed, VALIDATION)
    assert persons(rest) | persons(test) == persons(plain)
    for a, b in ((rest, test), (fitting, validation), (fitting, test), (validation, test)):
        assert not persons(a) & persons(b)
    assert len(persons(test)) / len(persons(plain)) == pytest.approx(0.25, abs=0.15)  # also with equal seeds:
    assert len(persons(validation)) / len(persons(rest)) == pytest.approx(0.25, abs=0.15)


def test_the_hash_is_that_of_the_id_alone() -> None:
    """So that sites agree without a word: the order of the rows, other persons, and how a number is written are nothing."""
    ids = np.array([3, 1, 2, 3])
    held = by_hash(ids, 0.5, "test:0")
    wanted = [int.from_bytes(hashlib.sha256(f"test:0|{i}".encode()).digest()[:8], "big") / 2**64 < 0.5 for i in ids]
    assert held.tolist() == wanted
    assert by_hash(ids.astype(float), 0.5, "test:0").tolist() == wanted
    assert by_hash([" 3", "1 ", "2", "3"], 0.5, "test:0").tolist() == wanted
    share = by_hash(np.arange(20_000), 0.25, "x").mean()
    assert share == pytest.approx(0.25, abs=0.01)


def test_unknown_persons_are_divided_row_by_row() -> None:
    assert by_hash(["unknown"] * 2_000, 0.25, "x").mean() == pytest.approx(0.25, abs=0.04)


def test_without_groups_the_numbers_are_as_before() -> None:
    y = np.arange(200) % 3 == 0
    for one, other in zip(aside(200, 0.3, 7, strata=y), hold_out(200, 0.3, 7, labels=y)):
        assert_array_equal(one, other)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_temporal_split(grouped: bool) -> None:
    whole = sites() if grouped else [replace(site, group=None) for site in sites()]
    rest, test = apart(whole, 0.5, 0, TEST)
    assert all(site.late.all() for site in test if len(site))  # type: ignore[union-attr]
    assert not any(site.late.any() for site in rest)  # type: ignore[union-attr]
    rows = sum(map(len, rest)) + sum(map(len, test))
    if grouped:
        assert not persons(rest) & persons(test)
        assert rows < sum(map(len, whole))  # late rows of training persons, and early ones of test persons
    else:
        assert rows == sum(map(len, whole))
    fitting, validation = apart(rest, 0.25, 0, VALIDATION)
    assert sum(map(len, fitting)) + sum(map(len, validation)) == sum(map(len, rest))
    assert any(map(len, validation))


def test_leaving_a_site_out() -> None:
    whole = [replace(site, group=None, late=None) for site in sites()]
    rest, test = apart(whole, 0.25, 0, TEST, leave_out="s2")
    assert [len(site) for site in test] == [0, 0, 120, 0, 0]
    assert [len(site) for site in rest] == [80, 60, 0, 40, 3]
    strict, held = apart([replace(site, late=None) for site in sites()], 0.5, 0, TEST, leave_out="s2")
    assert not persons(strict) & persons(held)
    with pytest.raises(NestfedError, match="did you mean s"):
        apart(whole, 0.25, 0, TEST, leave_out="s9")


@pytest.mark.parametrize(
    ("values", "start", "wanted"),
    [
        (["2019-12-31", "2020-01-01", "2020-06-15 10:00"], "2020", [0, 1, 1]),
        (["2019-12-31", "2020-01-01", "2020-06-15"], "2020-06", [0, 0, 1]),
        (["31.12.2019", "01.01.2020", "15.06.2020"], "2020-06-15", [0, 0, 1]),
        (np.array([2018, 2020, 2021]), "2020", [0, 1, 1]),
    ],
)
def test_when_test_rows_begin(values: Any, start: str, wanted: list[int]) -> None:
    assert late(np.asarray(values), start, "admitted", "t.csv").tolist() == list(map(bool, wanted))


@pytest.mark.parametrize(
    ("values", "start", "words"),
    [
        (["2020-01-01", "soon"], "2020", "'soon' in row 2, which is not a date"),
        (["2020-01-01", "unknown"], "2020", "missing in 1 rows"),
        (["2020-01-01"], "spring", "a year, a month or a day"),
        (["2020-01-01"], "2020-13", "a year, a month or a day"),
        ([3, 4], "2020-01", "must be one"),
    ],
)
def test_mistakes_in_a_temporal_split(values: Any, start: str, words: str) -> None:
    with pytest.raises(NestfedError, match=words):
        late(np.asarray(values), start, "admitted", "t.csv")


# ---------------------------------------------------------------------------------------------------------
# The same rules in files


@pytest.fixture
def stays(tmp_path: Path) -> list[Path]:
    """Two sites with stays of the same persons; x is the number of the stay."""
    rng = np.random.default_rng(0)
    paths = []
    for n, name in enumerate("ab"):
        frame = pd.DataFrame({
            "x": 1000 * n + rng.permutation(300) + 0.5, "person": rng.integers(0, 120, 300),
            "admitted": [f"20{17 + i % 5}-0{1 + i % 9}-11" for i in range(300)], "y": rng.integers(0, 2, 300),
        })  # fmt: skip
        paths.append(tmp_path / f"{name}.csv")
        frame.to_csv(paths[-1], index=False)
    return paths


def whole_of(stays: list[Path]) -> Any:
    return pd.concat([pd.read_csv(path).assign(site=path.stem) for path in stays])


def values(x: Any) -> set[float]:
    """Which rows these are: the ranks of x survive the scaling."""
    return {round(float(v), 4) for v in x.reshape(-1)}


@pytest.mark.parametrize(
    "options", [{"group": "person"}, {"split_by": "admitted", "test_from": "2020"}, {"leave_out": "a"}]
)
def test_a_study_and_an_experiment_divide_alike(stays: list[Path], tmp_path: Path, options: dict[str, str]) -> None:
    whole = whole_of(stays)
    whole.to_csv(tmp_path / "all.csv", index=False)
    spec = DataSpec(file=str(tmp_path / "all.csv"), target="y", columns=("site", "person"), validation=0.25, **options)
    made = prepare(spec, PartitionSpec(kind="column", column="site"), 0)
    columns = {"drop": ["person"]} if "group" not in options else {}
    reading = {k: v for k, v in options.items() if k != "leave_out"}
    read = read_sites(stays, "y", **columns, **reading).sites  # type: ignore[arg-type]
    rest, test = apart(read, spec.test, spec.split, TEST, leave_out=options.get("leave_out", ""))
    _, validation = apart(rest, spec.validation, 0, VALIDATION)
    assert len(made.test.y) == sum(map(len, test))
    if "group" in options:
        assert len(made.validation.y) == sum(map(len, validation))  # type: ignore[union-attr]
    chosen = whole[np.isin(whole["x"].to_numpy(np.float32), np.concatenate([site.x for site in test])[:, 0])]
    if "split_by" in options:
        assert (chosen["admitted"] >= "2020").all()
        assert len(chosen) == (whole["admitted"] >= "2020").sum()
    if "leave_out" in options:
        assert set(chosen["site"]) == {"a"}
        assert list(made.names) == ["b"]


def test_a_site_may_lack_a_side_but_a_study_may_not(stays: list[Path]) -> None:
    from nestfed.experiment.site import divided, own_tables
    from nestfed.experiment.spec import from_tables

    study = from_tables(
        {"data": {"target": "y", "classes": ["0", "1"], "group": "person"}, "problem": {"name": "auroc"}}
    )
    tables = own_tables(study, {path.stem: path for path in stays})
    one = tables["a"].take(tables["a"].columns["person"] == tables["a"].columns["person"][0])
    parts = divided(study, one, site="a").prepared
    assert sorted((len(parts.test.y), len(parts.y))) == [0, len(one)]
    everyone = {name: divided(study, table, site=name).prepared for name, table in tables.items()}
    rest, test = apart([Site(n, t.x, t.y, group=t.columns["person"]) for n, t in tables.items()], 0.25, 0, TEST)
    assert [len(made.test.y) for made in everyone.values()] == [len(site) for site in test]
    assert [len(made.y) for made in everyone.values()] == [len(site) for site in rest]
    with pytest.raises(NestfedError, match=r"leaves no (test|training) rows"):
        prepare(DataSpec(file=str(stays[0]), target="y", group="person", test=1e-9), PartitionSpec("pooled"), 0)


def test_tables_of_all_sites_are_read_together(tmp_path: Path) -> None:
    """A code that is a number at one site is a category because it is one elsewhere; all problems are in one list."""
    from nestfed.experiment.site import own_tables
    from nestfed.experiment.spec import from_tables

    study = from_tables({"data": {"target": "y", "classes": ["0", "1"]}})
    pd.DataFrame({"code": ["250", "V57"] * 9, "y": [0, 1] * 9}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"code": ["250", "401"] * 9, "y": [0, 1] * 9}).to_csv(tmp_path / "b.csv", index=False)
    files = {name: tmp_path / f"{name}.csv" for name in "ab"}
    assert [table.features for table in own_tables(study, files).values()] == [
        ("code=250", "code=V57"),
        ("code=250", "code=401"),
    ]
    for path in files.values():
        pd.read_csv(path).assign(y=7).to_csv(path, index=False)
    with pytest.raises(NestfedError, match=r"2 problems:\n- Target 'y' of .*a\.csv holds '7'.*\n- .*b\.csv holds '7'"):
        own_tables(study, files)


def test_split_settings_that_contradict_each_other() -> None:
    for wrong in ({"split_by": "a"}, {"test_from": "2020"}, {"split_by": "a", "test_from": "2020", "leave_out": "b"}):
        with pytest.raises(NestfedError, match=r"data\.(split_by|leave_out)"):
            DataSpec(**wrong)


@pytest.mark.data
def test_eicu_patients_with_stays_in_several_hospitals() -> None:
    from nestfed.data.sources import load

    data = load("eicu").train
    hospital, patient = data.columns["hospital"], data.columns["patient"]
    at_several = pd.DataFrame({"p": patient, "h": hospital}).groupby("p")["h"].nunique() > 1
    made = [
        Site(str(h), data.x[hospital == h], data.y[hospital == h], group=patient[hospital == h])
        for h in np.unique(hospital)
    ]
    rest, test = apart(made, 0.25, 0, TEST)
    fitting, validation = apart(rest, 0.25, 0, VALIDATION)
    assert at_several.sum() > 0
    assert not persons(rest) & persons(test)
    assert not persons(fitting) & persons(validation)
    assert sum(map(len, test)) / len(data) == pytest.approx(0.25, abs=0.03)
