"""A survival study equals the pooled fit, is the same at hand and over Flower, and leaves a model that predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from typer.testing import CliRunner

from nestfed.cli.main import app
from nestfed.core import NestfedError
from nestfed.deploy.discloses import discloses, questions_in
from nestfed.experiment.site import own_tables
from nestfed.experiment.spec import Experiment, from_tables, read
from nestfed.study.at_hand import AtHand
from nestfed.study.hazards import Survived, survive
from nestfed.study.model import StudyModel
from nestfed.study.predict import predict
from nestfed.study.propose import proposed_survival
from nestfed.study.survival_release import headline, page, write
from tests.queries.likelihood import minus_log_likelihood

SITES = ("north", "south", "west")


def write_tables(folder: Path, rows: tuple[int, ...], *, by_site: float = 0.0, words: bool = False) -> dict[str, Path]:
    """Hospitals with ties in time, missing values and a category; sites' hazards differ by a factor if asked."""
    rng, found = np.random.default_rng(0), {}
    for n, (name, size) in enumerate(zip(SITES, rows)):
        age, sex = rng.normal(60 + 8 * n, 10, size), rng.choice(["f", "m"], size)
        risk = 0.05 * (age - 60) + 0.6 * (sex == "m") + by_site * n
        days = np.ceil(rng.exponential(60 * np.exp(-risk)))
        ends = rng.integers(30, 120, size)
        died = (days <= ends).astype(int)
        table = pd.DataFrame({"age": np.where(rng.random(size) < 0.1, np.nan, age), "sex": sex})
        table["days"] = np.minimum(days, ends)
        table["died"] = np.where(died, "yes", "no") if words else died
        found[name] = folder / f"{name}.csv"
        table.to_csv(found[name], index=False)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_tables(tmp_path_factory.mktemp("sites"), (240, 160, 120))


def study_of(files: dict[str, Path], **problem: Any) -> Experiment:
    tables = proposed_survival("days", "died")
    return from_tables({**tables, "problem": {"name": "cox", **problem}})


def at_hand(study: Experiment, files: dict[str, Path], min_cell: int = 0) -> AtHand:
    return AtHand(study, own_tables(study, files), directory=Path("unused"), min_cell=min_cell)


def survived(files: dict[str, Path], **problem: Any) -> tuple[AtHand, Survived]:
    study = study_of(files, **problem)
    hand = at_hand(study, files)
    return hand, survive(study, hand)


@pytest.fixture(scope="module")
def found(files: dict[str, Path]) -> tuple[AtHand, Survived]:
    return survived(files, times=[10.0, 40.0])


def rows_of(hand: AtHand, part: str) -> tuple[np.ndarray, np.ndarray]:
    rows = [site.by_part(True)[part] for site in hand.sites]
    return np.concatenate([r.x for r in rows]), np.concatenate([r.y for r in rows])


def test_the_fit_is_that_of_the_pooled_rows(found: tuple[AtHand, Survived]) -> None:
    """Efron's and Breslow's partial likelihoods of the pooled rows, written event by event and minimised by SciPy."""
    hand, result = found
    x, y = rows_of(hand, "training")
    ridge = result.path.best * y[:, 1].sum()
    own = {"efron": result.fit, "breslow": result.beside["common, breslow"]}
    for ties, fit in own.items():
        best = minimize(
            lambda b, ties=ties: minus_log_likelihood(b, x, y, ties) + ridge / 2 * b @ b,
            np.zeros(x.shape[1]),
            tol=1e-10,
        )
        np.testing.assert_allclose(fit.coef, result.encoding.units(intercept=False) @ best.x, rtol=1e-3, atol=1e-5)
    events = [int(site.by_part(True)["training"].y[:, 1].sum()) for site in hand.sites]
    assert [own[0] for own in result.rows.values()] == events
    assert result.fit.coef[list(result.fit.names).index("age")] == pytest.approx(0.05, abs=0.015)


def test_the_stratified_fit_is_the_sum_of_the_sites_likelihoods(found: tuple[AtHand, Survived]) -> None:
    hand, result = found
    sites = [site.by_part(True)["training"] for site in hand.sites]
    ridge = result.path.best * sum(rows.y[:, 1].sum() for rows in sites)
    best = minimize(
        lambda b: sum(minus_log_likelihood(b, r.x, r.y, "efron") for r in sites) + ridge / 2 * b @ b,
        np.zeros(sites[0].x.shape[1]), tol=1e-10,
    )  # fmt: skip
    fit = result.beside["stratified"]
    np.testing.assert_allclose(fit.coef, result.encoding.units(intercept=False) @ best.x, rtol=1e-3, atol=1e-5)


def test_test_rows_judge_the_model(found: tuple[AtHand, Survived]) -> None:
    """The C-index pair by pair; a model without columns has a worse Brier score."""
    hand, result = found
    within = np.zeros(2)
    for site in hand.sites:
        rows = site.by_part(True)["test"]
        h, (time, event) = rows.x @ result.scaled.coef, rows.y.T
        for i in np.flatnonzero(event):
            longer = (time > time[i]) | ((time == time[i]) & (event == 0))
            within += [((h[longer] < h[i]) + 0.5 * (h[longer] == h[i])).sum(), longer.sum()]
    assert result.judged.within == pytest.approx(within[0] / within[1], abs=1e-12)
    assert result.judged.pooled is not None
    assert result.judged.pooled.low <= result.judged.pooled.value <= result.judged.pooled.high
    assert result.times == (10.0, 40.0)
    assert all(0 < a < b for a, b in zip(result.judged.brier, result.judged.plain))


def test_sites_that_differ_are_reported(tmp_path: Path) -> None:
    """With hazards that differ by site, and ages too, a common baseline misleads; otherwise nobody is warned."""
    _, result = survived(write_tables(tmp_path, (240, 160, 120), by_site=-1.0))
    (doubt, *_) = [note for note in result.notes if "stratified" in note]
    own, common = (fit.coef[list(fit.names).index("age")] for fit in (result.beside["stratified"], result.fit))
    assert f"age ({common:.3g} against {own:.3g})" in doubt
    assert abs(own - 0.05) < abs(common - 0.05)


def test_a_model_is_written_and_predicts(
    found: tuple[AtHand, Survived], files: dict[str, Path], tmp_path: Path
) -> None:
    hand, result = found
    model, paths = write(result, tmp_path / "out", {})
    assert model is not None
    again = StudyModel.load(tmp_path / "out")
    assert again.survival == model.survival
    predicted = again.predict(pd.read_csv(files["west"]))
    x = hand.sites[2].by_part(True)["test"].x
    assert result.baseline is not None
    mine = result.baseline.survival(x @ result.scaled.coef, result.times)
    assert predicted.shape == (120, 2)
    assert np.abs(mine[:, None] - predicted[None]).max(2).min(1).max() < 1e-6  # the test rows are some of the file's
    card = paths["model card"].read_text()
    assert "It predicts the probability that died has not happened until some days." in card
    assert "trained for the partial likelihood by exact Cox regression over 3 sites" in card
    assert "log hazard" in card
    assert "## Decisions" not in card
    assert "Hazard ratios" in paths["report"].read_text()
    assert json.loads(paths["metrics"].read_text())["within"] == result.judged.within
    out = tmp_path / "p.csv"
    assert predict(tmp_path / "out", files["west"], out, times=[0, 10, 50]).notes == []
    table = pd.read_csv(out)
    assert list(table) == ["row", "survival at 0", "survival at 10", "survival at 50"]
    assert (np.diff(table.to_numpy()[:, 1:]) <= 0).all()
    np.testing.assert_allclose(table["survival at 10"], predicted[:, 0], rtol=1e-5)


def test_times_need_a_model_of_survival(files: dict[str, Path], tmp_path: Path) -> None:
    from tests.study.released import released

    place = tmp_path / "model"
    released("linear").save(place)
    with pytest.raises(NestfedError, match="Times need a model of survival"):
        predict(place, files["west"], tmp_path / "p.csv", times=[10])


def test_under_a_disclosure_rule_the_stratified_model_remains(files: dict[str, Path]) -> None:
    """It is the exact fit still; curves and pairs across sites are withheld, in sentences."""
    study = study_of(files, baseline="stratified")
    free, ruled = survive(study, at_hand(study, files)), survive(study, at_hand(study, files, min_cell=10))
    names = list(free.fit.names)
    assert ruled.fit.coef[names.index("age")] == pytest.approx(free.fit.coef[names.index("age")], rel=0.1)
    assert ruled.judged.pooled is None
    assert any("no C-index of pairs across sites" in note for note in ruled.notes)
    assert ruled.baseline is None


def test_an_approximate_fit_is_not_called_exact(tmp_path: Path) -> None:
    """Coarse cells of time also make the common and the stratified fit differ; that says nothing about the sites."""
    files = write_tables(tmp_path, (700, 600, 500))
    study = study_of(files)
    free, ruled = survive(study, at_hand(study, files)), survive(study, at_hand(study, files, min_cell=3))
    assert free.exact
    assert "of the pooled rows" in headline(free)
    assert not ruled.exact
    assert "of the pooled rows" not in headline(ruled)
    assert "approximate" in headline(ruled)
    assert any("cells of time" in note for note in ruled.notes)
    assert not [note for note in ruled.notes if "stratified by site the coefficients" in note]


def test_a_stratified_study_leaves_a_report_without_a_model(files: dict[str, Path], tmp_path: Path) -> None:
    _, result = survived(files, baseline="stratified")
    model, paths = write(result, tmp_path, {})
    assert model is None
    assert not (tmp_path / "model").exists()
    assert "common" in [*next(t for t in page(result, {}).tables if t.title == "Other models").columns]
    assert paths["report"].exists()


def test_deployed_and_at_hand_agree(
    found: tuple[AtHand, Survived], files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from nestfed.deploy.flower import server
    from tests.flower import alone, coordinate, federation

    alone(monkeypatch)
    there: list[Survived] = []

    def kept(*given: Any) -> Survived:
        there.append(survive(*given))
        return there[0]

    monkeypatch.setattr(server, "survive", kept)
    study = study_of(files, times=[10.0, 40.0])
    grid = federation(study, tmp_path, len(files))
    for (name, path), config in zip(files.items(), grid.configs.values()):
        config |= {"site": name, "data": str(path)}
    coordinate(study, tmp_path, grid, sites=len(files))
    mine, theirs = found[1], there[0]
    assert theirs.path.best == mine.path.best
    assert theirs.rows == mine.rows
    np.testing.assert_allclose(theirs.fit.coef, mine.fit.coef, rtol=1e-9)
    for kind, errors in mine.fit.covariance.items():
        np.testing.assert_allclose(theirs.fit.covariance[kind], errors, rtol=1e-7)
    np.testing.assert_allclose(theirs.judged.brier, mine.judged.brier, rtol=1e-9)
    assert theirs.judged.within == mine.judged.within
    assert theirs.beside.keys() == mine.beside.keys()
    assert {*theirs.notes} == {*mine.notes}
    model = StudyModel.load(tmp_path / "run")
    sent = list(tmp_path.glob("state-*/**/model.json"))
    assert len(sent) == 3  # every site has the model
    assert model.predict(pd.read_csv(files["north"])).shape == (240, 2)


def test_a_site_answers_only_what_a_survival_study_needs(files: dict[str, Path]) -> None:
    study = study_of(files)
    assert {"cox-risk", "brier", "table"} <= {*questions_in(study)}
    assert not {"scores", "regression-sums", "judge-counts"} & {*questions_in(study)}
    assert not [item for item in discloses(study) if item.name.startswith("fields.")]  # there are no rounds


def test_the_command_line(tmp_path: Path) -> None:
    files = write_tables(tmp_path, (240, 160, 120), words=True)
    out, given = tmp_path / "out", [str(path) for path in files.values()]
    words = ["train", *given, "--objective", "survival", "--time", "days", "--event", "died", "--out", str(out)]
    done = CliRunner().invoke(app, [*words, "--at", "10"])
    assert done.exit_code == 0, done.output
    assert "Exact does not mean accurate" in done.output
    assert StudyModel.load(out).survival is not None
    ready = read(out / "study.toml")
    assert ready.data.time == "days"
    assert list(ready.sites.files) == list(SITES)
    again = CliRunner().invoke(app, ["train", str(out / "study.toml"), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    models = [StudyModel.load(place).parameters["head.weight"].numpy() for place in (out, tmp_path / "again")]
    np.testing.assert_array_equal(*models)
    done = CliRunner().invoke(app, ["monitor", str(out), given[0]])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["predict", str(out), given[0], "--out", str(tmp_path / "p.csv"), "--time", "20"])
    assert done.exit_code == 0, done.output
    assert list(pd.read_csv(tmp_path / "p.csv")) == ["row", "survival at 20"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--objective", "survival", "--time", "days"], "--time TD --event DIED"),
        (["--objective", "survival", "--time", "days", "--event", "died", "--target", "died"], "leave --target out"),
        (["--objective", "survival", "--time", "days", "--event", "died", "--hidden", "4"], "leave --hidden out"),
        (["--target", "died", "--time", "days"], "--time is for survival"),
        ([], "Name the column to predict with --target"),
        (["--objective", "survival", "--time", "sex", "--event", "died"], "expected numbers"),
        (["--objective", "survival", "--time", "dais", "--event", "died"], "dais"),
    ],
)
def test_wrong_options_are_one_sentence(
    words: list[str], sentence: str, files: dict[str, Path], tmp_path: Path
) -> None:
    place = tmp_path / "out"
    done = CliRunner().invoke(app, ["train", *map(str, files.values()), *words, "--out", str(place)])
    assert done.exit_code != 0
    assert sentence in " ".join(f"{done.output} {done.exception or ''}".split())
    assert not (place / "model").exists()


def test_negative_times_and_three_kinds_of_events_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,days,died\n60,-1,0\n61,3,2\n62,4,1\n")
    study = from_tables(proposed_survival("days", "died"))
    with pytest.raises(NestfedError) as error:
        own_tables(study, {"a": tmp_path / "a.csv"})
    assert "negative in 1 of 3 rows" in str(error.value)
    assert "two values, not 3" in str(error.value)
