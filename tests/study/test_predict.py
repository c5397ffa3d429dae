"""`nestfed predict`: decisions by the model's threshold, in pieces, with every oddity of the rows reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from nestfed import FederatedAUC
from nestfed.cli.model import predict_command
from nestfed.core import NestfedError
from nestfed.data.schema import EMPTY, ColumnSpec, TableSchema
from nestfed.metrics import Estimate
from nestfed.study import rows
from nestfed.study.convert import model_of
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.model import StudyModel
from nestfed.study.predict import predict
from nestfed.study.sites import Encoded
from nestfed.study.tables import read_sites
from tests.study.released import INPUTS, released, table

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")
NO = Estimate(float("nan"), float("nan"), float("nan"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("released") / "model"
    made = replace(
        released("auc"),
        calibration=Calibration(1.5, -0.2, {"a": (1.0, 1.0)}),
        thresholds=tuple(
            Threshold(rule, p, NO, NO, NO, NO) for rule, p in (("sensitivity 0.9", 0.3), ("balanced", 0.45))
        ),
    )
    made.save(place)
    return place


@pytest.fixture
def new(tmp_path: Path) -> Path:
    table(rows=53, seed=5).assign(person=[f"p{i}" for i in range(53)]).to_csv(tmp_path / "new.csv", index=False)
    return tmp_path / "new.csv"


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"prediction": str})


def test_the_decision_is_that_of_the_threshold(model: Path, new: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    probability = StudyModel.load(model).predict(pd.read_csv(new))[:, 1]
    for rule, cut in (("", 0.3), ("balanced", 0.45), ("0.6", 0.6)):
        found = predict(model, new, out, threshold=rule)
        written = read(out)
        assert_allclose(written["probability"], probability, atol=5.1e-7)
        assert [*written] == ["row", "probability", "prediction"]
        assert (written["prediction"] == np.where(probability >= cut, "1", "0")).all()
        assert found.positive == (probability >= cut).sum()
        assert found.rows == 53
        assert f"from a probability of {cut:g}" in found.decision
    assert len({predict(model, new, out, threshold=rule).positive for rule in ("", "balanced", "0.6")}) == 3
    predict(model, new, out, site="a")
    assert_allclose(read(out)["probability"], StudyModel.load(model).predict(pd.read_csv(new), "a")[:, 1], atol=5.1e-7)


def test_pieces_give_the_same_as_the_whole(
    model: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(model, new, tmp_path / "whole.csv", keep=["person", "lab"])
    monkeypatch.setattr(rows, "PIECE", 7)
    assert len(list(rows.pieces(new, EMPTY))) == 8
    found = predict(model, new, tmp_path / "pieces.csv", keep=["person", "lab"])
    assert (tmp_path / "pieces.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert found.rows == 53
    written = read(tmp_path / "pieces.csv")
    assert [*written] == ["row", "person", "lab", "probability", "prediction"]
    assert list(written["person"]) == [f"p{i}" for i in range(53)]
    assert list(written["row"]) == list(range(1, 54))
    assert (written["lab"].isna() == pd.read_csv(new)["lab"].isna()).all()


def test_parquet_and_csv_give_the_same(model: Path, new: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pd.read_csv(new).to_parquet(tmp_path / "new.parquet")
    pd.read_csv(new).to_csv(tmp_path / "new.csv.gz", index=False)
    answers = []
    for name in ("new.csv", "new.parquet", "new.csv.gz"):
        predict(model, tmp_path / name, tmp_path / "p.csv")
        answers.append((tmp_path / "p.csv").read_text())
    assert answers[0] == answers[1] == answers[2]


def test_codes_stay_codes(model: Path, tmp_path: Path) -> None:
    """A column of categories that holds only numbers in the new file is not a column of numbers; 12.0 is 12."""
    frame = table(rows=9, seed=5).assign(ward="12")
    wanted = StudyModel.load(model).predict(frame)[:, 1]
    for ward in (12, 12.0, [12.0] * 8 + [np.nan]):
        frame.assign(ward=ward).to_csv(tmp_path / "codes.csv", index=False)
        found = predict(model, tmp_path / "codes.csv", tmp_path / "p.csv")
        assert_allclose(read(tmp_path / "p.csv")["probability"][:8], wanted[:8], atol=5.1e-7)
        assert not any("does not know" in note for note in found.notes)


def test_what_is_unusual_is_reported(model: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.read_csv(new, dtype={"ward": str})
    frame.loc[:3, "ward"] = "North "
    frame.loc[50, "ward"] = "attic"
    frame.loc[49, "ward"] = "nroth"
    frame.loc[51, "ward"] = None
    frame.to_csv(tmp_path / "odd.csv", index=False)
    monkeypatch.setattr(rows, "PIECE", 20)  # counts add up over pieces
    found = predict(model, tmp_path / "odd.csv", tmp_path / "p.csv")
    assert found.notes == [
        f"Column 'ward' of {tmp_path / 'odd.csv'}: 'North' as 'north', which differ in capital letters only.",
        "Column 'ward' has categories that the model does not know: 'attic' (1 row), 'nroth' (1 row, like 'north').",
        "The model does not use 'days', 'grade', 'person'.",
    ]
    absent = StudyModel.load(model).predict(frame.assign(ward=None))[:, 1]
    assert_allclose(read(tmp_path / "p.csv")["probability"][[49, 50, 51]], absent[[49, 50, 51]], atol=5.1e-7)


def test_all_problems_are_in_one_sentence(model: Path, new: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(new).astype(object)
    frame.loc[3, "age"] = "old"
    frame.drop(columns=["lab", "ward"]).to_csv(tmp_path / "bad.csv", index=False)
    (tmp_path / "p.csv").write_text("before")
    with pytest.raises(NestfedError) as caught:
        predict(model, tmp_path / "bad.csv", tmp_path / "p.csv")
    text = str(caught.value)
    for words in (
        "it has no column 'ward', 'lab'",
        "holds the text 'old' in line 5 where its other values are numbers",
    ):
        assert words in text
    assert (tmp_path / "p.csv").read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.csv", "new.csv", "p.csv"]  # no temporary files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keep": ["persn"]}, "has no column 'persn'; did you mean person"),
        ({"keep": ["person", "person"]}, "two columns called 'person'"),
        ({"site": "z"}, "has no site 'z'"),
        ({"threshold": "best"}, "has no threshold 'best'"),
    ],
)
def test_mistakes_in_the_call(change: dict[str, str], words: str, model: Path, new: Path, tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match=words):
        predict(model, new, tmp_path / "p.csv", **change)
    assert not (tmp_path / "p.csv").exists()


def test_mistakes_in_files(model: Path, new: Path, tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match="is the table itself"):
        predict(model, new, new)
    for name, content, words in (
        ("none.csv", "age,ward,lab\n", "has no rows"),
        ("empty.csv", "", "is empty"),
        ("twice.csv", "age,age,lab\n1,2,3\n", "two columns called 'age'"),
        ("long.csv", "age,ward,lab\n1,a,3,4\n", "cannot be read"),
        ("inf.csv", "age,ward,lab\n1e60,a,3\n", "Column 'age' of .* holds infinite values"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(NestfedError, match=words):
            predict(model, tmp_path / name, tmp_path / "p.csv")
    with pytest.raises(NestfedError, match="does not exist"):
        predict(model, tmp_path / "nowhere.csv", tmp_path / "p.csv")
    (tmp_path / "x.npz").write_bytes(b"")
    with pytest.raises(NestfedError, match="has no named columns"):
        predict(model, tmp_path / "x.npz", tmp_path / "p.csv")


def test_numbers_and_several_classes(new: Path, tmp_path: Path) -> None:
    for kind, columns in (
        ("linear", ["prediction"]),
        ("classes", [*(f"probability of {i}" for i in range(3)), "prediction"]),
    ):
        made = released(kind).save(tmp_path / kind)
        found = predict(tmp_path / kind, new, tmp_path / "p.csv")
        written, values = pd.read_csv(tmp_path / "p.csv"), made.predict(pd.read_csv(new)[INPUTS])
        assert [*written] == ["row", *columns]
        assert found.decision == ""
        if kind == "linear":
            assert_allclose(written["prediction"], values, rtol=1e-5)
        else:
            assert_allclose(written.iloc[:, 1:4], values, atol=5.1e-7)
            assert (written["prediction"] == values.argmax(1)).all()
        with pytest.raises(NestfedError, match="A threshold needs two classes"):
            predict(tmp_path / kind, new, tmp_path / "p.csv", threshold="0.5")


def test_the_command(model: Path, new: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(predict_command)
    words = [str(model), str(new), "--out", str(tmp_path / "p.csv"), "--keep", "person", "--threshold", "balanced"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "died = 1 from a probability of 0.45 (balanced):" in result.output
    assert "note: The model does not use 'days', 'grade'." in result.output


def test_raw_files_are_read_as_the_schema_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes by prefix, dates since another one, marks of missing values, semicolons and decimal commas; also in pieces."""
    rng = np.random.default_rng(0)
    for name in "ab":
        n = 80
        day = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 300, n), "D")
        frame = pd.DataFrame(
            {
                "code": rng.choice(["I21.0", "I21.4", "J18.9", "K35", "I50.1"], n),
                "admitted": day.strftime("%d.%m.%Y"),
                "left": (day + pd.to_timedelta(rng.integers(1, 30, n), "D")).strftime("%d.%m.%Y"),
                "lab": np.where(rng.random(n) < 0.2, -9, rng.normal(5, 2, n).round(2)),
                "died": rng.integers(0, 2, n),
            }
        )
        frame.to_csv(tmp_path / f"{name}.csv", index=False, sep=";", decimal=",")
    how = TableSchema(
        {
            "code": ColumnSpec("category", prefix=3),
            "admitted": ColumnSpec("date", format="%d.%m.%Y"),
            "left": ColumnSpec("date", format="%d.%m.%Y", since="admitted"),
            "lab": ColumnSpec(missing=("-9",)),
        }
    )
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    data = read_sites(files, "died", schema=how)
    estimator = FederatedAUC(rounds=3, q=2)._fit(Encoded.of(data.sites))
    model = model_of(estimator, "died", data.classes).save(tmp_path / "out")
    inputs = estimator._scaled(data.sites[1].x, data.sites[1].schema)
    wanted = model.predictions(model.scores(inputs.double()))[:, 1]
    assert {"code=I21", "code=J18", "left", "lab"} <= set(model.encoding.features)
    for piece in (1000, 9):
        monkeypatch.setattr(rows, "PIECE", piece)
        found = predict(tmp_path / "out", files[1], tmp_path / "p.csv", keep=["code"])
        assert_allclose(read(tmp_path / "p.csv")["probability"], wanted, atol=5.1e-7)
        assert read(tmp_path / "p.csv")["code"].str.len().max() == 5  # as it stands in the file
        assert not any("does not know" in note for note in found.notes)
