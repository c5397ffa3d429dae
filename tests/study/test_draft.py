"""`nestfed schema`: a file that people agree on, without rare values, that reads the tables as they are."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nestfed.cli.main import app
from nestfed.core import NestfedError
from nestfed.experiment.spec import from_tables, read
from nestfed.study.draft import draft, merged
from nestfed.study.tables import read_sites

pd = pytest.importorskip("pandas")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three raw tables: separators, codes, dates, marks, rare categories, and persons at several sites."""
    rng = np.random.default_rng(0)
    paths = []
    for n, name in enumerate("abc"):
        rows = 300
        frame = pd.DataFrame({
            "person": rng.integers(0, 300, rows), "age": rng.integers(18, 90, rows).astype(float) + 0.5,
            "type_code": rng.integers(1, 6, rows), "sex": rng.choice(["F", "M"] if n else ["f", "m"], rows),
            "diag": rng.choice(["250.1", "427", "V57", "E909", "?"], rows), "lab": np.where(rng.random(rows) < 0.2, -9.0, rng.random(rows)),
            "seen": [f"2020-0{1 + i % 9}-1{i % 9}" for i in range(rows)], "died": rng.integers(0, 2, rows),
        })  # fmt: skip
        frame.loc[:2, "sex"] = "unheard-of"
        paths.append(tmp_path / f"{name}.csv")
        frame.to_csv(paths[-1], index=False, sep=",;;"[n], decimal=".,,"[n])
    return paths


def run(*words: Any) -> str:
    result = CliRunner().invoke(app, ["schema", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_file_is_an_experiment_and_reads_the_tables(files: list[Path], tmp_path: Path) -> None:
    text = run(*files, "--target", "died", "--group", "person")
    (tmp_path / "study.toml").write_text(text)
    found = read(tmp_path / "study.toml")
    assert (found.data.target, found.data.classes, found.data.group) == ("died", ("0", "1"), "person")
    kinds = {name: spec.kind for name, spec in found.schema.columns.items()}
    assert kinds == {"person": "id", "age": "number", "type_code": "?", "sex": "category", "diag": "category",
                     "lab": "number", "seen": "date"}  # fmt: skip
    with pytest.raises(NestfedError, match="leaves 'type_code' open"):
        read_sites(files, "died", group="person", schema=found.schema)
    decided = from_tables(tomllib.loads(text.replace('kind = "?"', 'kind = "category"'))).schema
    data = read_sites(files, "died", group="person", schema=decided)
    assert [site.x.shape for site in data.sites] == [(300, 15)] * 3
    assert decided != found.schema
    assert from_tables({"schema": decided.to_tables()}).digest() != from_tables({}).digest()


def test_sites_that_draft_apart_agree(files: list[Path], tmp_path: Path) -> None:
    """As one draft of all tables, but for the spelling of the first site."""
    drafts = []
    for path in files:
        drafts.append(tmp_path / f"{path.stem}.toml")
        drafts[-1].write_text(run(path, "--target", "died", "--group", "person"))
    together = from_tables(tomllib.loads(run("merge", *drafts)))
    whole = draft(files, "died", group="person")
    assert together.data == from_tables(tomllib.loads(whole.to_toml())).data
    assert together.is_study, "what sites agree on can be deployed"
    assert list(together.methods) == list(from_tables(tomllib.loads(whole.to_toml())).methods)
    for name, spec in whole.schema.columns.items():
        mine = together.schema.columns[name]
        assert {c.casefold() for c in mine.categories} == {c.casefold() for c in spec.categories}
        assert (mine.kind, mine.missing, mine.prefix) == (spec.kind, spec.missing, spec.prefix)


def test_nothing_rare_leaves_a_site(files: list[Path], tmp_path: Path) -> None:
    own = run(files[0], "--target", "died", "--group", "person")
    assert "unheard-of" not in own  # three rows
    assert "other = true" in own
    assert "unheard-of" in run(files[0], "--target", "died", "--group", "person", "--min-cell", "3")
    few = tmp_path / "few.csv"
    pd.read_csv(files[0]).head(8).assign(died=[0, 1] * 4).to_csv(few, index=False)
    text = run(few, "--target", "died", "--group", "person")
    assert "8 rows" not in text
    assert "classes = []" in text
    assert all(not column.get("categories") for column in tomllib.loads(text)["schema"]["columns"].values())


def test_a_numeric_target(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pd.DataFrame({"x": rng.normal(size=60), "cost": rng.gamma(2, 1, 60)}).to_csv(tmp_path / "t.csv", index=False)
    found = from_tables(tomllib.loads(run(tmp_path / "t.csv", "--target", "cost")))
    assert (found.data.target_kind, found.problem.name) == ("number", "regress")


def test_mistakes(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match="at least two files"):
        merged([files[0].with_suffix(".toml")][:0])
    with pytest.raises(NestfedError, match=r"none\.toml does not exist"):
        merged([tmp_path / "none.toml", tmp_path / "no.toml"])
    (tmp_path / "x.toml").write_text("[data]\n")
    with pytest.raises(NestfedError, match=r"x\.toml has no \[schema\]"):
        merged([tmp_path / "x.toml", tmp_path / "x.toml"])
    for name, target in (("p", "died"), ("q", "alive")):
        (tmp_path / f"{name}.toml").write_text(f'[data]\ntarget = "{target}"\n[schema]\n')
    with pytest.raises(NestfedError, match=r"differ in data\.target: 'died' at p, 'alive' at q"):
        merged([tmp_path / "p.toml", tmp_path / "q.toml"])


# ---------------------------------------------------------------------------------------------------------
# Reading with the options of the command line


def test_ordinary_tables_train_and_predict(files: list[Path], tmp_path: Path) -> None:
    words = ["train", *map(str, files), "--target", "died", "--group", "person", "--categorical", "type_code",
             "--rounds", "2", "--q", "2", "--out", str(tmp_path / "out")]  # fmt: skip
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "note: Column 'sex': 'f' as 'F', 'm' as 'M'; sites spell them differently." in result.output
    assert "-9 marks missing values" in result.output
    rows = pd.read_csv(files[1], sep=";", dtype=str).drop(columns=["died", "person"])
    codes = rows[rows["diag"].isin(["427"])]  # codes that look like numbers, and a category that is new
    codes.assign(sex="never met").to_csv(tmp_path / "new.csv", sep=";", index=False)
    shown = CliRunner().invoke(app, ["predict", str(tmp_path / "out"), str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv")], catch_exceptions=False)  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert len(pd.read_csv(tmp_path / "p.csv")) == len(codes)


def test_unseen_categories_are_reported(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    from nestfed import FederatedAUC

    frames = {
        path.stem: pd.read_csv(path, sep=",;;"[n], decimal=".,,"[n]).drop(columns="person")
        for n, path in enumerate(files)
    }
    est = FederatedAUC(target="died", rounds=1, q=1).fit(frames)
    caplog.clear()
    est.predict(frames["a"].assign(sex="never met"))
    assert "categories in column 'sex' that training did not have: 'never met'" in caplog.text


def test_the_command_line_is_named_in_its_own_words(files: list[Path]) -> None:
    frame = pd.read_csv(files[0])
    frame.assign(age=["old", *frame["age"][1:]]).drop(columns="lab").to_csv(files[0], index=False)
    result = CliRunner().invoke(app, ["train", *map(str, files), "--target", "died"])
    text = str(result.exception)
    assert "--missing old or --categorical age" in text
    assert "Site a has no column 'lab', which site b has" in text
    assert text.startswith("The tables have 2 problems:")


def test_labels_in_other_spellings_are_one_class(tmp_path: Path) -> None:
    for name, labels in (("a", ["Yes", "No"]), ("b", ["yes ", "No"])):
        pd.DataFrame({"x": np.arange(20.0), "end": labels * 10}).to_csv(tmp_path / f"{name}.csv", index=False)
    data = read_sites(sorted(tmp_path.glob("*.csv")), "end")
    assert data.classes == ("No", "Yes")
    assert [int(site.y.sum()) for site in data.sites] == [10, 10]
    assert any("'yes' as 'Yes'" in note for note in data.notes)
