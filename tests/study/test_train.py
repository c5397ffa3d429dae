"""`nestfed train`, `predict` and `lr-find` on files: the outcome, what is left behind, and every mistake in one sentence."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from numpy.testing import assert_allclose
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from nestfed.algorithms.alone import Alone
from nestfed.algorithms.average import FedAvg
from nestfed.cli.model import predict_command
from nestfed.cli.study import lr_find_command, train_command
from nestfed.core import NestfedError
from nestfed.data.partition import even
from nestfed.study.lr_find import StepSearch, apart, with_rows
from nestfed.study.model import StudyModel
from nestfed.study.predict import predict
from nestfed.study.start import from_files, train
from nestfed.study.tables import read_sites

pd = pytest.importorskip("pandas")

app = typer.Typer(pretty_exceptions_enable=False)
app.command("train")(train_command)
app.command("predict")(predict_command)
app.command("lr-find")(lr_find_command)


def frames(sites: int = 3) -> list[Any]:
    """Breast cancer over sites, with gaps, a text column that one site never filled in, and a patient column."""
    x, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(0)
    made = []
    for n, part in enumerate(even(len(x), sites, 0)):
        frame = pd.DataFrame(x[part][:, :6], columns=["radius", "texture", "perimeter", "area", "smooth", "compact"])
        frame.loc[rng.random(len(frame)) < 0.2, "texture"] = np.nan
        frame["ward"] = rng.choice(["north", "south"], len(frame)) if n else None
        frame["patient"] = [f"p{i // 2}" for i in range(len(frame))]
        frame["malignant"] = 1 - y[part]
        made.append(frame)
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("sites")
    paths = []
    for name, frame in zip(("alpha", "beta", "gamma"), frames()):
        frame.to_csv(place / f"{name}.csv", index=False)
        paths.append(place / f"{name}.csv")
    return paths


@pytest.fixture(scope="module")
def trained(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    options = [
        "--target",
        "malignant",
        "--objective",
        "auprc",
        "--group",
        "patient",
        "--rounds",
        "6",
        "--q",
        "5",
        "--subgroup",
        "ward",
    ]
    result = CliRunner().invoke(app, ["train", *map(str, files), *options, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (out / "printed.txt").write_text(result.output)
    return out


def test_the_comparison_is_printed(trained: Path) -> None:
    text = (trained / "printed.txt").read_text()
    assert "3 sites; malignant = 1 is the positive class." in text
    for way in ("auprc ", "fedavg ", "fedavg-balanced", "logistic regression", "every site alone"):
        row = next(line for line in text.splitlines() if line.startswith(way) and " 0." in line)
        found = [float(v) for v in re.findall(r"0\.\d{3}", row)]
        assert found[0] > 0.9, row
    assert "auprc is released because the study names it" in text
    assert "its average precision is 0.9" in text


def test_the_file_of_the_study_repeats_it(trained: Path, tmp_path: Path) -> None:
    """`nestfed train study.toml` reads the same tables in the same way: equal models and metrics."""
    words = ["train", str(trained / "study.toml"), "--out", str(tmp_path / "again")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for name in ("metrics.json", "study.toml", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()
    result = CliRunner().invoke(app, [*words, "--target", "malignant"])
    assert "says what to predict and how: leave --target and other options out" in str(result.exception)


def test_what_is_left_behind(trained: Path) -> None:
    report = (trained / "report.html").read_text(encoding="utf-8")
    for words in ("beta", "ROC curve", "Calibration on test rows", "Thresholds", "by ward", "Decision curve", "fedavg"):
        assert words in report
    card = (trained / "model" / "MODEL_CARD.md").read_text(encoding="utf-8")
    for words in (
        "# Model card: malignant",
        "| beta |",
        "Limits",
        "| ward | category | north ",
    ):
        assert words in card
    names = {p.name for p in (trained / "model").iterdir()}
    onnx = {"model.onnx"} if find_spec("onnx") else set()
    assert names == {"model.json", "model.safetensors", "model.pt2", "MODEL_CARD.md", "SHA256SUMS"} | onnx
    assert not (trained / "model" / "model.pt2").read_bytes().startswith(b"\x80")  # no pickle


def test_the_exported_program_needs_no_nestfed(trained: Path, files: list[Path]) -> None:
    """Raw features, with gaps, to the same probabilities, imputation and scaling included."""
    model = StudyModel.load(trained)
    frame = pd.read_csv(files[1]).drop(columns=["malignant", "patient"])
    wanted = model.predict(frame)[:, 1]
    names = model.encoding.features
    raw = pd.get_dummies(frame, columns=["ward"], prefix_sep="=").reindex(columns=names, fill_value=0).astype(float)
    program = torch.export.load(trained / "model" / "model.pt2").module()
    found = program(torch.tensor(raw.to_numpy(np.float32)))
    assert_allclose(found.detach().numpy(), wanted, atol=1e-5)


def test_predict_writes_probabilities(trained: Path, files: list[Path], tmp_path: Path) -> None:
    frame = pd.read_csv(files[2])
    frame.drop(columns=["malignant", "patient"]).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "p.csv"
    result = CliRunner().invoke(app, ["predict", str(trained), str(tmp_path / "new.csv"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    with out.open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["row", "probability", "prediction"]
    chance = np.array([float(r["probability"]) for r in rows])
    assert len(rows) == len(frame)
    assert roc_auc_score(frame["malignant"], chance) > 0.9
    threshold = StudyModel.load(trained).threshold()
    assert all((r["prediction"] == "1") == (float(r["probability"]) >= threshold) for r in rows)
    frame.drop(columns=["area"]).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(
        NestfedError, match=r"short\.csv does not fit the model: it has no column 'area'; its columns are "
    ):
        predict(trained, tmp_path / "short.csv", out)
    with pytest.raises(NestfedError, match="contains no model"):
        predict(tmp_path, tmp_path / "new.csv", out)


def test_lr_find_draws_a_picture(files: list[Path], tmp_path: Path) -> None:
    picture = tmp_path / "lr.png"
    options = ["--target", "malignant", "--rounds", "4", "--q", "5", "--drop", "patient", "--out", str(picture)]
    result = CliRunner().invoke(app, ["lr-find", *map(str, files), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "best lr = " in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    for directory in (tmp_path / "new", tmp_path):  # as for other commands
        picture.unlink(missing_ok=True)
        options[-1] = str(directory)
        result = CliRunner().invoke(app, ["lr-find", *map(str, files), *options], catch_exceptions=False)
        assert str(directory / "lr.png") in result.output
        assert (directory / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert StepSearch("auroc", (0.1, 1.0, 10.0), (0.7, 0.9, float("nan"))).best == 1.0
    with pytest.raises(NestfedError, match="every step size"):
        _ = StepSearch("auroc", (0.1,), (float("nan"),)).best


def test_a_metric_is_judged_in_its_direction(files: list[Path]) -> None:
    """By log-loss the lowest is the best: of step sizes, of ways of training, and of a gain over FedAvg."""
    assert StepSearch("log_loss", (0.1, 1.0, 10.0), (0.7, 0.2, float("nan"))).best == 1.0


# ---------------------------------------------------------------------------------------------------------
# The split


def test_nobody_is_on_both_sides(files: list[Path]) -> None:
    data = read_sites(files, "malignant", group="patient")
    rest, test = apart(data.sites, 0.25, 0)
    for whole, a, b in zip(data.sites, rest, test):
        assert not set(a.group) & set(b.group)
        assert len(a) + len(b) == len(whole)
        assert abs(len(b) / len(whole) - 0.25) < 0.12
    small = replace(data.sites[0].take(np.arange(5)), group=None)
    kept, aside = apart([small, data.sites[1]], 0.25, 0)
    assert (len(kept[0]), len(aside[0])) == (5, 0)
    assert [site.name for site in with_rows(aside)] == ["beta"]


def test_local_training_is_that_of_each_site_alone(files: list[Path]) -> None:
    """All sites at once, without averaging, give what each gives as the only site (same scale, batches by number)."""
    from nestfed.study import FederatedClassifier

    data = read_sites(files, "malignant", drop=["patient", "ward"])
    common = {"rounds": 3, "q": 4, "standardize": False}
    tables = {s.name: (np.nan_to_num(s.x) / 100, s.y) for s in data.sites}
    together = FederatedClassifier(method=Alone(FedAvg(0.1)), **common).fit(tables)
    alone = FederatedClassifier(method="fedavg", lr=lambda t: 0.1, **common).fit({"alpha": tables["alpha"]})
    wanted = torch.cat([p.reshape(-1) for p in alone.module_.parameters()])
    assert_allclose(together._result.private["x"][0], wanted.detach(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# Mistakes


def broken(files: list[Path], tmp_path: Path, n: int, change: Any) -> list[Path]:
    """Copy the files, one of them changed."""
    made = []
    for i, path in enumerate(files):
        frame = pd.read_csv(path)
        if i == n:
            frame = change(frame)
        frame.to_csv(tmp_path / path.name, index=False)
        made.append(tmp_path / path.name)
    return made


def text_in_numbers(frame: Any) -> Any:
    return frame.assign(radius=["high" if i == 4 else v for i, v in enumerate(frame["radius"])])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, {"target": "malignent"}, r"has no column 'malignent'; did you mean malignant\?"),
        (None, {"group": "patients"}, r"has no column 'patients'; did you mean patient\?"),
        (None, {"positive": "2"}, "is never '2': it is 0, 1"),
        (None, {"drop": ["nothing"]}, "has no column 'nothing'"),
        (
            text_in_numbers,
            {"drop": ["patient"]},
            "'radius' of .*beta.csv holds the text 'high' in line 6 where its other values are numbers",
        ),
        (
            lambda f: f.assign(radius="big"),
            {"drop": ["patient"]},
            "'radius' holds text at site beta but numbers at site alpha",
        ),
        (
            lambda f: f.drop(columns="area"),
            {"drop": ["patient"]},
            "Site beta has no column 'area', which site alpha has",
        ),
        (
            lambda f: f.drop(columns="ward"),
            {"drop": ["patient"]},
            "Site beta has no column 'ward', which site alpha has",
        ),
        (lambda f: f.assign(malignant=np.where(f.index == 1, np.nan, f["malignant"])), {}, "missing in 1 of 190 rows"),
        (lambda f: f.iloc[:0], {"drop": ["patient"]}, "has no rows"),
    ],
)
def test_mistakes_in_files(files: list[Path], tmp_path: Path, change: Any, options: Any, words: str) -> None:
    paths = broken(files, tmp_path, 1, change) if change else files
    target = options.pop("target", "malignant")
    with pytest.raises(NestfedError, match=words) as caught:
        read_sites(paths, target, **options)
    assert "\n" not in str(caught.value)


def test_mistakes_in_the_call(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match=r"nowhere\.csv does not exist"):
        read_sites([*files, tmp_path / "nowhere.csv"], "malignant")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(NestfedError, match="is not a table: expected a name"):
        read_sites([tmp_path / "a.txt"], "malignant")
    with pytest.raises(NestfedError, match="is named twice"):
        read_sites([files[0], files[0]], "malignant")
    with pytest.raises(NestfedError, match="did you mean auprc"):
        from_files(files, "malignant", "aupr", data={"drop": ("patient",)})
    three = broken(files, tmp_path, 0, lambda f: f.assign(malignant=f.index % 3))
    with pytest.raises(NestfedError, match="auroc is for two classes, but 'malignant' has 3"):
        from_files(three, "malignant", "auroc", data={"drop": ("patient",)})
    same = broken(files, tmp_path, 0, lambda f: f.assign(malignant=1))
    for path in same[1:]:
        pd.read_csv(path).assign(malignant=1).to_csv(path, index=False)
    with pytest.raises(NestfedError, match="is '1' in every row of every file"):
        read_sites(same, "malignant")


def test_another_output_is_not_overwritten(files: list[Path], tmp_path: Path) -> None:
    """Before any work: a file, a directory of something else, a model of another objective."""

    def refused(out: Path, sentence: str) -> None:
        words = ["train", *map(str, files), "--target", "malignant", "--objective", "auprc", "--out", str(out)]
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, NestfedError)
        assert sentence in str(result.exception)

    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "file is a file; choose another directory with --out.")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text("")
    refused(tmp_path / "run", "run is not empty and contains no study; choose another directory")
    for mark in ("SHA256SUMS", "estimator.json"):
        (tmp_path / mark / "model").mkdir(parents=True)
        (tmp_path / mark / "model" / mark).write_text("")
        refused(tmp_path / mark, "model already contains a NestFed model: replace it with --force")


def test_a_site_of_one_class_is_accepted_and_reported(files: list[Path], tmp_path: Path) -> None:
    paths = broken(files, tmp_path, 1, lambda f: f[f["malignant"] == 0])
    options = [
        "--target",
        "malignant",
        "--drop",
        "patient",
        "--rounds",
        "2",
        "--q",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, ["train", *map(str, paths), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Site beta has fewer than 5 positives or negatives (beta: 0 of" in result.output


def test_classes_are_put_in_order(tmp_path: Path) -> None:
    for name, labels in (("a", ["survived", "died"]), ("b", ["survived", "survived"])):
        pd.DataFrame({"x": np.arange(20.0), "end": labels * 10}).to_csv(tmp_path / f"{name}.csv", index=False)
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert read_sites(paths, "end").classes == ("died", "survived")
    data = read_sites(paths, "end", positive="died")
    assert data.classes == ("survived", "died")
    assert [int(s.y.sum()) for s in data.sites] == [10, 0]


def test_more_than_two_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        y = rng.integers(0, 3, 90)
        pd.DataFrame({"u": y + 0.3 * rng.normal(size=90), "v": rng.normal(size=90), "kind": y}).to_csv(
            tmp_path / f"{name}.csv", index=False
        )
    data = read_sites(sorted(tmp_path.glob("*.csv")), "kind")
    assert data.classes == ("0", "1", "2")
    found, _, _ = train(from_files(sorted(tmp_path.glob("*.csv")), "kind", rounds=10, q=5), tmp_path / "out")
    assert found.test.entry(found.released.name, "accuracy").value.value > 0.7
    predict(tmp_path / "out", tmp_path / "a.csv", tmp_path / "p.csv")
    assert (
        (tmp_path / "p.csv").read_text().startswith("row,probability of 0,probability of 1,probability of 2,prediction")
    )
    assert StudyModel.load(tmp_path / "out").classes == ("0", "1", "2")


@pytest.mark.data
@pytest.mark.slow
def test_heart_disease_in_four_files(tmp_path: Path) -> None:
    """Four hospitals' files to a report; AUROC near what the benchmark of institutions found (0.886 ± 0.032)."""
    from nestfed.data.sources import load

    data = load("heart-disease").train
    for hospital in np.unique(data.columns["hospital"]):
        rows = data.columns["hospital"] == hospital
        frame = pd.DataFrame(data.x[rows], columns=list(data.features)).assign(disease=data.y[rows])
        frame.to_csv(tmp_path / f"{hospital}.csv", index=False)
    paths = sorted(tmp_path.glob("*.csv"))
    assert len(paths) == 4
    found, _, _ = train(from_files(paths, "disease"), tmp_path / "out")
    assert 0.82 < found.test.entry(found.released.name, "auroc").value.value < 0.95
