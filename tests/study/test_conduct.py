"""A study gives the same result with its tables at hand and over Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from nestfed.core import NestfedError
from nestfed.experiment.site import own_table, own_tables
from nestfed.experiment.spec import Experiment, from_tables
from nestfed.experiment.study import Training, protects
from nestfed.metrics import Estimate, find, log_loss
from nestfed.queries import SCORES, Question
from nestfed.queries.newton import RIDGES, network_parameters
from nestfed.queries.scores import RANKING, judged
from nestfed.study.at_hand import AtHand
from nestfed.study.conduct import Conducted, conduct
from nestfed.study.convert import model_of_way
from nestfed.study.metric_table import Entry
from nestfed.study.model import StudyModel
from nestfed.study.outcome import Outcome, _clearly, find_out
from nestfed.study.start import Started, train

GRID = [0.03, 0.3]
TABLES: dict[str, Any] = {
    "data": {"target": "died", "classes": ["no", "yes"], "validation": 0.25, "test": 0.25},
    "model": {"name": "mlp", "hidden": []},
    "problem": {"name": "auroc"},
    "run": {"rounds": 6, "q": 4},
    "evaluation": {"every": 2, "keep": "best", "metric": "auroc", "patience": 2},
    "study": {},
    "methods": {
        "auroc": {"algorithm": {"name": "fmgda", "c_hat": 1.0, "c": 1.0}, "tune": {"eta": GRID}},
        "fedavg": {"problem": {"name": "classify"}, "tune": {"eta": GRID}},
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three hospitals with a number, a category, and missing values; their rates and ages differ."""
    folder, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(0)
    found = {}
    for n, rows in enumerate((240, 160, 120)):
        age, sex = rng.normal(60 + 5 * n, 10, rows), rng.choice(["f", "m"], rows)
        risk = 0.06 * (age - 65) + 0.8 * (sex == "m") + 0.5 * n - 0.5
        died = np.where(rng.random(rows) < 1 / (1 + np.exp(-risk)), "yes", "no")
        table = pd.DataFrame({"age": np.where(rng.random(rows) < 0.1, np.nan, age), "sex": sex, "died": died})
        found[f"site-{n}"] = folder / f"site-{n}.csv"
        table.to_csv(found[f"site-{n}"], index=False)
    return found


def study_of(**changes: Any) -> Experiment:
    return from_tables({**TABLES, **changes})


def at_hand(study: Experiment, files: dict[str, Path], folder: Path) -> AtHand:
    tables = {name: own_table(study, str(path))[0] for name, path in files.items()}
    return AtHand(study, tables, directory=folder, progress=False)


def conducted(study: Experiment, files: dict[str, Path], folder: Path) -> tuple[AtHand, Conducted]:
    hand = at_hand(study, files, folder)
    return hand, conduct(study, hand)


def test_exact_regression_is_that_of_the_pooled_rows(files: dict[str, Path], tmp_path: Path) -> None:
    """The baseline, and the start of all training, against scikit-learn on the pooled training and validation rows."""
    hand, found = conducted(study_of(), files, tmp_path)
    rows = [site.by_part(True)["training"] for site in hand.sites]
    x, y = np.concatenate([r.x for r in rows]), np.concatenate([r.y for r in rows])
    ridge = found.exact.path.best * len(x)
    pooled = LogisticRegression(C=1 / ridge, tol=1e-12, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(found.exact.way.x, np.r_[pooled.coef_[0], pooled.intercept_], atol=1e-5)
    asked = hand.ask_all([Question(SCORES, "test", {"kind": RANKING})], x=found.exact.way.x)
    test = [site.by_part(True)["test"] for site in hand.sites]
    truth = roc_auc_score(np.concatenate([r.y for r in test]), np.concatenate([r.x for r in test]) @ pooled.coef_[0])
    value = judged([asked[n]["scores.test"] for n in asked], RANKING)
    assert value["auroc"] == pytest.approx(truth, abs=value["auroc_error"] + 1e-6)


def test_the_last_trainings_use_the_validation_rows_and_the_trials_do_not(
    files: dict[str, Path], tmp_path: Path
) -> None:
    hand = at_hand(study_of(), files, tmp_path)
    sizes = {final: [len(site.by_part(final)["training"]) for site in hand.sites] for final in (True, False)}
    held = [len(site.by_part(False)["validation"]) for site in hand.sites]
    assert sizes[True] == [a + b for a, b in zip(sizes[False], held)]
    assert all("validation" not in parts for parts in (site.by_part(True) for site in hand.sites))


def deployed(study: Experiment, files: dict[str, Path], folder: Path, patch: pytest.MonkeyPatch) -> Outcome:
    from nestfed.deploy.flower import server
    from tests.flower import alone, coordinate, federation

    alone(patch)
    found: list[Outcome] = []
    patch.setattr(server, "find_out", lambda *given: found.append(find_out(*given)) or found[0])
    grid = federation(study, folder, len(files))
    for (name, path), config in zip(files.items(), grid.configs.values()):
        config |= {"site": name, "data": str(path)}
    coordinate(study, folder, grid, sites=len(files))
    return found[0]


def test_a_sites_own_model_is_a_converged_regression_on_its_rows(files: dict[str, Path], tmp_path: Path) -> None:
    hand = at_hand(study_of(), files, tmp_path)
    asked = hand.ask_all([Question(SCORES, "test", {"kind": RANKING, "own": True})])
    for n, site in enumerate(hand.sites):
        rows, test = site.by_part(True)["training"], site.by_part(True)["test"]
        fits = [
            LogisticRegression(C=1 / (ridge * len(rows)), tol=1e-12, max_iter=10_000).fit(rows.x, rows.y)
            for ridge in RIDGES
        ]
        distances = [np.abs(np.r_[fit.coef_[0], fit.intercept_] - site.own_model).max() for fit in fits]
        assert min(distances) < 1e-4
        truth = roc_auc_score(test.y, fits[int(np.argmin(distances))].decision_function(test.x))
        value = judged([asked[n]["scores.test"]], RANKING)
        assert value["auroc"] == pytest.approx(truth, abs=value["auroc_error"] + 1e-9)


@pytest.mark.long
def test_deployed_and_at_hand_agree(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same study gives the same models, choices, metrics and files; every site gets the model."""
    pytest.importorskip("flwr")
    study = study_of(data={**TABLES["data"], "subgroups": ["sex"]}, study={"thresholds": ["sensitivity 0.8"]})
    started = Started(study, own_tables(study, files))
    here, model, _ = train(started, tmp_path / "here")
    there = deployed(study, files, tmp_path, monkeypatch)
    assert list(there.conducted.names) == list(here.conducted.names)
    for mine, theirs in zip(here.ways, there.ways, strict=True):
        assert mine.name == theirs.name
        assert mine.settings == theirs.settings
        assert mine.rounds == theirs.rounds
        assert mine.trials.keys() == theirs.trials.keys()
        np.testing.assert_allclose(list(mine.trials.values()), list(theirs.trials.values()), atol=1e-9)
        np.testing.assert_allclose(mine.x, theirs.x, rtol=1e-5, atol=1e-6)
    assert there.released.name == here.released.name
    tables = [one.test.frame().set_index(["model", "group", "metric"]) for one in (here, there)]
    assert "sex = m" in {group for _, group, _ in tables[0].index}
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=1e-4, atol=1e-5)
    assert there.thresholds[0].probability == pytest.approx(here.thresholds[0].probability, abs=1e-3)
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {p.name for p in (tmp_path / "here").iterdir()}
    new = pd.read_csv(files["site-1"]).drop(columns="died")
    expected = model.predict(new)
    for place in (tmp_path / "run", *(tmp_path / f"state-{n}" / "model" for n in range(3))):
        np.testing.assert_allclose(StudyModel.load(place).predict(new), expected, atol=1e-5)
    assert not list(tmp_path.glob("state-*/model/*.pt2")), "a program is code"


@pytest.mark.long
def test_protected_methods_deployed_and_at_hand_agree(
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shrinkage knows every site's own rows; the worst site's loss decides steps and rounds."""
    pytest.importorskip("flwr")
    method = {
        "problem": {"name": "classify", "initial_batch": 60},
        "algorithm": {"name": "kl-dro", "tau": 0.1, "k": 100.0},
        "evaluation": {"metric": "worst_log_loss"},
        "tune": {"eta": [0.03, 0.3]},
    }
    fedavg = TABLES["methods"]["fedavg"]
    study = from_tables({**TABLES, "study": {"protect": ["sites"]}, "methods": {"kl-dro": method, "fedavg": fedavg}})
    hand, here = conducted(study, files, tmp_path / "here")
    there = deployed(study, files, tmp_path, monkeypatch)
    for mine, theirs in zip(here.ways, there.ways):
        assert mine.settings == theirs.settings
        assert mine.rounds == theirs.rounds
        np.testing.assert_allclose(list(mine.trials.values()), list(theirs.trials.values()), atol=1e-9)
        np.testing.assert_allclose(mine.x, theirs.x, rtol=1e-5, atol=1e-6)
    held = [site.by_part(False)["validation"] for site in hand.sites]
    way = here.ways[0]
    worst = max(log_loss(hand.network.scores(way.trial, torch.from_numpy(r.x)), r.y) for r in held)
    assert min(way.trials.values()) == pytest.approx(worst, abs=1e-5)


def test_which_methods_protect_sites() -> None:
    own = {"problem": {"name": "agnostic"}, "algorithm": {"name": "fmgda", "eta": 0.1, "c_hat": 1.0, "c": 1.0}}
    other = {"problem": {"name": "auprc"}, "algorithm": {"name": "afl", "eta": 0.1}}
    study = study_of(methods={**TABLES["methods"], "mixture": own, "afl": other})
    assert [name for name in study.methods if protects(study, name)] == ["mixture", "afl"]


def test_only_sites_can_be_protected() -> None:
    with pytest.raises(NestfedError, match=r"study\.protect can only protect 'sites', not 'sex'"):
        from_tables({**TABLES, "study": {"protect": ["sites", "sex"]}})


def test_a_study_of_three_classes(files: dict[str, Path], tmp_path: Path) -> None:
    """Coefficients of several classes as the parameters of a linear network give the regression's probabilities."""
    coef = np.array([[0.5, 1.0, -1.0], [0.2, 0.0, 2.0]])
    vector = network_parameters(coef.ravel(), 3)
    x = np.random.default_rng(0).normal(size=(5, 2))
    logits = x @ vector[:6].reshape(3, 2).T + vector[6:]
    np.testing.assert_allclose(logits[:, 1:] - logits[:, :1], np.c_[np.ones(5), x] @ coef.T)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"methods": {}}, "A study needs methods"),
        ({"study": {"baseline": "fedprox"}}, "study.baseline is 'fedprox', but the methods are auroc, fedavg"),
        ({"study": {"calibration": "isotonic"}}, "study.calibration must be common or sites"),
        (
            {"methods": {"fedavg": {"problem": {"name": "classify"}, "tune": {"eta": {"low": 0.1, "high": 1.0}}}}},
            "methods.fedavg.tune.algorithm.eta must be a list of numbers",
        ),
    ],
)
def test_an_unfit_study_is_rejected(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match=sentence):
        conduct(study_of(**changes), AtHand(study_of(), {}, directory=tmp_path))


@pytest.mark.parametrize(
    "found",
    [
        {"method": "other", "settings": {}, "final": False, "rounds": 0},
        {"method": "fedavg", "settings": {"problem.batch": 1.0}, "final": False, "rounds": 0},
        {"method": "fedavg"},
        None,
    ],
)
def test_a_site_trains_only_what_its_study_has(found: Any) -> None:
    with pytest.raises(NestfedError):
        Training.from_json(found).experiment(study_of())


@pytest.mark.parametrize("hidden", [[], [4]])
def test_every_way_can_be_released(hidden: list[int], files: dict[str, Path], tmp_path: Path) -> None:
    """The released model scores a site's own table as the study scores the site's rows."""
    study = study_of(model={"name": "mlp", "hidden": hidden})
    hand, found = conducted(study, files, tmp_path / "runs")
    for way in (*found.ways, found.exact.way):
        model = model_of_way(found, way).save(tmp_path / way.name)
        assert model.target == "died"
        assert model.classes == ("no", "yes")
        assert model.provenance.study == study.digest()
        assert model.architecture.linear == (not hidden or way is found.exact.way)
        part = hand.sites[0].by_part(True)["test"]
        scores = found.network.scores(way.x, torch.from_numpy(part.x))
        np.testing.assert_allclose(model.scores(torch.from_numpy(part.x).double()), scores, rtol=1e-12)
        table = pd.read_csv(files["site-0"])
        of_file = model.scores(model.inputs(table))
        assert np.isin(np.round(scores, 9), np.round(of_file, 9)).all()  # the test rows are some of the file's


@pytest.mark.parametrize(
    ("value", "half", "candidates", "released"),
    [
        (0.02, 0.01, 1, True),
        (0.02, 0.021, 1, False),  # the interval includes 0
        (0.02, 0.017, 6, False),  # one of six candidates may look better by chance
        (0.0005, 0.0001, 1, False),  # certain, but of no use
        (-0.02, 0.01, 1, False),
    ],
)
def test_another_model_is_released_only_if_it_is_clearly_better(
    value: float, half: float, candidates: int, released: bool
) -> None:
    gain = Estimate(value, value - half, value + half)
    entry = Entry(gain, gain, gain)
    assert _clearly(entry, find("auroc"), candidates) is released
    lower = Entry(gain, gain, Estimate(-value, -value - half, -value + half))
    assert _clearly(lower, find("log_loss"), candidates) is released
