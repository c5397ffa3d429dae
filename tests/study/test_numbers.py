"""A study of a numeric target: exact linear regression, its metrics and its model, at hand and over Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from typer.testing import CliRunner

from nestfed.cli.main import app
from nestfed.core import NestfedError
from nestfed.deploy.discloses import questions_in
from nestfed.experiment.site import own_table
from nestfed.experiment.spec import Experiment, from_tables
from nestfed.queries.newton import RIDGES
from nestfed.study.at_hand import AtHand
from nestfed.study.convert import model_of_way
from nestfed.study.findings import page, tables
from nestfed.study.model import StudyModel
from nestfed.study.outcome import ALONE, Outcome, find_out
from nestfed.study.propose import proposed

SITES = ("north", "south", "west")
LINEAR = "linear regression"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three hospitals with costs of some hundreds, also negative ones; ages and levels differ."""
    folder, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(0)
    found = {}
    for n, (name, rows) in enumerate(zip(SITES, (240, 160, 120))):
        age, sex = rng.normal(60 + 5 * n, 10, rows), rng.choice(["f", "m"], rows)
        cost = 20 * (age - 60) + 80 * (sex == "m") + 30 * n + rng.normal(0, 100, rows)
        table = pd.DataFrame({"age": np.where(rng.random(rows) < 0.1, np.nan, age), "sex": sex, "cost": cost})
        found[name] = folder / f"{name}.csv"
        table.to_csv(found[name], index=False)
    return found


def study_of(hidden: tuple[int, ...] = (), **study: Any) -> Experiment:
    return from_tables(
        proposed(
            "cost",
            "auto",
            (240, 160, 120),
            (),
            hidden=hidden,
            rounds=8 if hidden else 6,
            q=8 if hidden else 4,
            study=study,
        )
    )


def at_hand(study: Experiment, files: dict[str, Path], folder: Path) -> AtHand:
    tables = {name: own_table(study, str(path))[0] for name, path in files.items()}
    return AtHand(study, tables, directory=folder, progress=False)


@pytest.fixture(scope="module")
def found(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[AtHand, Outcome]:
    study = study_of()
    hand = at_hand(study, files, tmp_path_factory.mktemp("runs"))
    return hand, find_out(study, hand)


def rows_of(hand: AtHand, part: str, site: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rows = [one.by_part(True)[part] for n, one in enumerate(hand.sites) if site in (None, n)]
    return np.concatenate([r.x for r in rows]), np.concatenate([r.y for r in rows]).astype(float)


def test_the_baseline_is_ridge_regression_on_the_pooled_rows(found: tuple[AtHand, Outcome]) -> None:
    hand, outcome = found
    x, y = rows_of(hand, "training")
    exact = outcome.conducted.exact
    pooled = Ridge(alpha=exact.path.best * len(x), tol=1e-12).fit(x, y)
    np.testing.assert_allclose(exact.way.x, np.r_[pooled.coef_, pooled.intercept_], rtol=1e-9)
    assert outcome.conducted.rows == {name: (len(rows_of(hand, "training", n)[1]),) for n, name in enumerate(SITES)}


def test_metrics_are_those_of_the_pooled_test_rows(found: tuple[AtHand, Outcome]) -> None:
    hand, outcome = found
    for group, site in {"all": None, "site = south": 1}.items():
        x, y = rows_of(hand, "test", site)
        p = x @ outcome.conducted.exact.way.x[:-1] + outcome.conducted.exact.way.x[-1]
        truth = {"rmse": root_mean_squared_error(y, p), "mae": mean_absolute_error(y, p), "r2": r2_score(y, p)}
        for metric, value in truth.items():
            one = outcome.test.entry(LINEAR, metric, group).value
            assert one.value == pytest.approx(value, rel=1e-6)
            assert one.low < value < one.high


def test_a_site_alone_has_ridge_regression_on_its_own_rows(found: tuple[AtHand, Outcome]) -> None:
    hand, outcome = found
    errors = 0.0
    for n, site in enumerate(hand.sites):
        x, y = rows_of(hand, "training", n)
        fits = [Ridge(alpha=r * len(x), solver="svd").fit(x, y).predict(x) for r in (0.0, *RIDGES)]
        own = x @ site.own_model[:-1] + site.own_model[-1]
        # Without a penalty scikit-learn also fits the rounding of two collinear columns, which regression leaves out.
        assert min(np.abs(p - own).max() for p in fits) < 1e-5 * np.abs(own).max()
        x, y = rows_of(hand, "test", n)
        errors += ((x @ site.own_model[:-1] + site.own_model[-1] - y) ** 2).sum()
    rmse = np.sqrt(errors / len(rows_of(hand, "test")[1]))
    assert outcome.test.entry(ALONE, "rmse").value.value == pytest.approx(rmse, rel=1e-6)


def test_a_model_of_numbers_is_written_and_predicts(
    found: tuple[AtHand, Outcome], files: dict[str, Path], tmp_path: Path
) -> None:
    hand, outcome = found
    assert outcome.released.name == LINEAR  # a linear score has its optimum already
    assert not outcome.thresholds
    model_of_way(outcome.conducted, outcome.released).save(tmp_path / "model", tables=tables(outcome))
    model = StudyModel.load(tmp_path / "model")
    assert "It predicts a number" in (tmp_path / "model" / "MODEL_CARD.md").read_text()
    predicted = model.predict(pd.read_csv(files["west"]))
    x, _ = rows_of(hand, "test", 2)
    mine = x @ outcome.released.x[:-1] + outcome.released.x[-1]
    assert np.abs(mine[:, None] - predicted).min(1).max() < 1e-3  # the test rows are some of the file's
    shown = page(outcome, {})
    assert shown.facts["target"] == "cost: a number"
    (coefficients,) = [table for table in shown.tables if table.title == "Coefficients"]
    assert coefficients.columns == ["input", "per deviation", "per unit"]
    assert {row[0]: row[2] for row in coefficients.rows}["age"] == pytest.approx(20, abs=3)


def test_a_site_answers_only_what_a_study_of_numbers_needs() -> None:
    asked = questions_in(study_of())
    assert "errors" in asked
    assert "regression-sums" in asked
    assert "scores" not in asked


def test_deployed_and_at_hand_agree(
    found: tuple[AtHand, Outcome], files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from nestfed.deploy.flower import server
    from tests.flower import alone, coordinate, federation

    alone(monkeypatch)
    there: list[Outcome] = []

    def kept(*given: Any) -> Outcome:
        there.append(find_out(*given))
        return there[0]

    monkeypatch.setattr(server, "find_out", kept)
    study = study_of()
    grid = federation(study, tmp_path, len(files))
    for (name, path), config in zip(files.items(), grid.configs.values()):
        config |= {"site": name, "data": str(path)}
    coordinate(study, tmp_path, grid, sites=len(files))
    mine, theirs = found[1], there[0]
    assert theirs.released.name == mine.released.name
    np.testing.assert_allclose(theirs.conducted.exact.way.x, mine.conducted.exact.way.x, rtol=1e-9)
    for a, b in zip(mine.ways, theirs.ways):
        assert a.settings == b.settings
        np.testing.assert_allclose(list(a.trials.values()), list(b.trials.values()), rtol=1e-5)
    for key, entry in mine.test.entries.items():
        assert theirs.test.entries[key].value.value == pytest.approx(entry.value.value, rel=1e-5)


@pytest.mark.long
def test_the_command_line(files: dict[str, Path], tmp_path: Path) -> None:
    out, given = tmp_path / "out", [str(path) for path in files.values()]
    words = ["--target", "cost", "--objective", "regress", "--rounds", "4", "--q", "4", "--out", str(out)]
    done = CliRunner().invoke(app, ["train", *given, *words])
    assert done.exit_code == 0, done.output
    assert "RMSE" in done.output
    assert StudyModel.load(out).classes == ()
    done = CliRunner().invoke(app, ["predict", str(out), given[0], "--out", str(tmp_path / "p.csv")])
    assert done.exit_code == 0, done.output
    table = pd.read_csv(files["north"])
    assert r2_score(table["cost"], pd.read_csv(tmp_path / "p.csv")["prediction"]) > 0.5


@pytest.mark.long
def test_a_network_of_numbers(files: dict[str, Path], tmp_path: Path) -> None:
    study = study_of(hidden=(4,))
    hand = at_hand(study, files, tmp_path / "runs")
    outcome = find_out(study, hand)
    assert {one.column for one in outcome.importances} == {"age", "sex"}
    assert hand.agreement.unit > 100
    assert outcome.test.entry("fedavg", "r2").value.value > 0.5  # it does not diverge, whatever the target's units
    made = model_of_way(outcome.conducted, outcome.conducted.ways[0])
    for way in outcome.ways:
        x, y = rows_of(hand, "test")
        scores = outcome.conducted.network.scores(way.x, torch.from_numpy(x))
        assert outcome.test.entry(way.name, "rmse").value.value == pytest.approx(
            root_mean_squared_error(y, scores), rel=1e-6
        )
        if way is outcome.conducted.ways[0]:
            np.testing.assert_allclose(made.scores(torch.from_numpy(x)), scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("objective", "classes", "sentence"),
    [("auroc", (), "auroc is for classes"), ("regress", ("no", "yes"), "regress is for a number")],
)
def test_an_objective_that_does_not_fit_the_target_is_rejected(objective: str, classes: Any, sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        proposed("cost", objective, (100,), classes)


def test_a_method_for_classes_is_rejected_before_work(tmp_path: Path) -> None:
    tables = proposed("cost", "regress", (100,), ())
    tables["methods"]["plain"] = {"problem": {"name": "classify"}, "algorithm": {"name": "fedavg", "eta": 0.1}}
    study = from_tables(tables)
    with pytest.raises(NestfedError, match=r"methods\.plain has the problem classify, which is for a class"):
        find_out(study, AtHand(study, {}, directory=tmp_path))
