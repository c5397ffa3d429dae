"""The exact estimators: scikit-learn's checks, raw tables, and real data against the fit of the pooled rows."""

from __future__ import annotations

import gzip
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from nestfed import FederatedCox, FederatedLinear, FederatedLogistic
from nestfed.core import NestfedError
from nestfed.queries.solve import SeparationError
from nestfed.study.advice import NestfedWarning
from nestfed.study.sites import DataError

DATA = Path(os.environ.get("NESTFED_DATA", "nowhere"))
KINDS = (FederatedLogistic, FederatedLinear, FederatedCox)
pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


@parametrize_with_checks([FederatedLogistic(ridge=1.0), FederatedLinear(ridge=1.0)])
def test_scikit_learn(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("kind", KINDS)
def test_the_constructor_only_stores(kind: Any) -> None:
    made = kind(ridge=0.5, min_cell=5)
    assert clone(made).get_params() == made.get_params()
    assert vars(made) == made.get_params()


def test_coefficients_are_those_of_the_pooled_table_in_its_own_units() -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    site = np.arange(len(x)) % 5
    found, pooled = FederatedLinear().fit(x, y, groups=site), LinearRegression().fit(x, y)
    assert_allclose(found.coef_[0], pooled.coef_, rtol=1e-8)
    assert_allclose(found.intercept_[0], pooled.intercept_, rtol=1e-9)
    assert_allclose(found.predict(x), pooled.predict(x), rtol=1e-9)
    assert_allclose(found.score(x, y), pooled.score(x, y), rtol=1e-10)
    table = found.summary_("model")
    assert_allclose(table["coef"], [found.intercept_[0], *found.coef_[0]], rtol=1e-9)
    ones = np.c_[np.ones(len(x)), x]
    noise = ((y - pooled.predict(x)) ** 2).sum() / (len(x) - 11)
    assert_allclose(table["se"], np.sqrt(noise * np.diag(np.linalg.inv(ones.T @ ones))), rtol=1e-7)


def test_three_classes() -> None:
    x, y = load_iris(return_X_y=True)
    y = np.array(["setosa", "versicolor", "virginica"])[y]
    found = FederatedLogistic(ridge=1.0).fit(x[:, :2], y, groups=np.arange(150) % 4)
    assert found.predict_proba(x[:, :2]).shape == (150, 3)
    assert found.score(x[:, :2], y) > 0.75
    assert found.fit_.names[0] == "versicolor: (intercept)"
    assert_allclose(found.predict_proba(x[:, :2]).sum(1), 1)


def table(rows: int = 600) -> pd.DataFrame:
    """Numbers with gaps, text with gaps, text without, and a site that never sees one category."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": rng.normal(60, 12, rows), "unit": rng.choice(["a", "b", "c"], rows, p=[0.5, 0.3, 0.2])}
    )
    frame["hospital"] = rng.choice(["north", "south", "west"], rows)
    frame.loc[frame.hospital == "west", "unit"] = frame.unit.replace("c", "a")
    frame["marker"] = np.where(rng.random(rows) < 0.2, np.nan, rng.lognormal(size=rows))
    frame["smoker"] = pd.Series(rng.choice(["yes", "no"], rows)).where(rng.random(rows) < 0.9)
    # Tables are read in float32, as everywhere in the library.
    frame[["age", "marker"]] = frame[["age", "marker"]].astype(np.float32).astype(float)
    eta = 0.04 * (frame.age - 60) + (frame.unit == "b") + 0.3 * frame.marker.fillna(1) + (frame.smoker == "yes") - 1
    frame["died"] = (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["days"] = np.ceil(100 * rng.exponential(np.exp(-eta)))
    return frame


def by_hand(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that the estimator is documented to make."""
    return pd.DataFrame({
        "age": frame.age, "unit=b": frame.unit == "b", "unit=c": frame.unit == "c",
        "marker": frame.marker.fillna(frame.marker.mean()), "smoker=no": frame.smoker == "no",
        "smoker=yes": frame.smoker == "yes", "marker is missing": frame.marker.isna(),
    }).astype(float)  # fmt: skip


def test_tables_as_they_are() -> None:
    frame = table()
    features = ["age", "unit", "hospital", "marker", "smoker"]
    found = FederatedLogistic(site_column="hospital").fit(frame[features], frame.died)
    x = by_hand(frame)
    assert found.columns_.tolist() == list(x.columns)
    assert found.sites_ == ("north", "south", "west")
    scaled = (x - x.mean()) / x.std()
    pooled = LogisticRegression(C=np.inf, tol=1e-14, max_iter=10_000, solver="newton-cholesky").fit(scaled, frame.died)
    p = pooled.predict_proba(scaled)
    mine = found.predict_proba(frame[features])
    assert_allclose(np.c_[np.ones(len(x)), scaled].T @ (mine[:, 1] - frame.died), 0, atol=1e-11)
    assert_allclose(found.coef_[0], pooled.coef_[0] / x.std(), rtol=1e-8)
    assert_allclose(mine, p, atol=1e-10)
    assert_allclose(found.predict_proba(frame[features].drop(columns="hospital")), mine)
    named = {name: (part[features].drop(columns="hospital"), part.died) for name, part in frame.groupby("hospital")}
    assert_allclose(FederatedLogistic().fit(named).coef_, found.coef_, rtol=1e-9)
    whole = FederatedLogistic(target="died").fit([p[["age", "marker", "died"]] for _, p in frame.groupby("hospital")])
    assert whole.columns_.tolist() == ["age", "marker", "marker is missing"]


def test_site_intercepts_and_the_warning_where_they_matter() -> None:
    frame = table()
    rng = np.random.default_rng(1)
    place = frame.hospital.map({"north": 0, "south": 1, "west": 2})
    frame["age"] = frame.age + 25 * place
    frame["died"] = (
        rng.random(len(frame)) < 1 / (1 + np.exp(0.05 * (frame.age - 85) - 2 * (place - 1) * -1.5))
    ).astype(int)
    with pytest.warns(NestfedWarning, match="change by more than a standard error"):
        common = FederatedLogistic(site_column="hospital").fit(frame[["age", "hospital"]], frame.died)
    own = FederatedLogistic(site_column="hospital", intercepts="site").fit(frame[["age", "hospital"]], frame.died)
    assert_allclose(own.coef_[0, 0], common.other_.coef[0], rtol=1e-9)
    assert own.fit_.names == ("age",)
    assert 0.2 < own.predict_proba(frame[["age"]])[:, 1].mean() < 0.8
    assert_allclose(own.predict_proba(frame[["age"]])[:, 1].mean(), frame.died.mean(), atol=1e-9)  # its intercept fits


def test_persons_with_several_rows() -> None:
    frame = table(300)
    x, twice = frame[["age"]], pd.concat([frame[["age"]]] * 2)
    once = FederatedLogistic().fit(x, frame.died)
    again = FederatedLogistic().fit(twice, np.tile(frame.died, 2), persons=np.tile(np.arange(300), 2))
    assert_allclose(again.summary_("robust")["se"], once.summary_("robust")["se"], rtol=1e-9)
    with pytest.raises(DataError, match="persons has shape"):
        FederatedLogistic().fit(x, frame.died, persons=[1, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_ridge_by_validation(kind: Any) -> None:
    frame = table()
    y = {FederatedLogistic: frame.died, FederatedLinear: frame.days, FederatedCox: frame[["days", "died"]]}[kind]
    rng = np.random.default_rng(0)
    x = np.c_[frame.age, rng.normal(size=(len(frame), 20))]
    found = kind(ridge="auto", check_sites=False).fit(x, y, groups=frame.hospital)
    assert found.path_.best in found.path_.ridges
    terms = frame.died.sum() if kind is FederatedCox else len(frame)
    assert_allclose(found.fit_.ridge, found.path_.best * terms)
    assert_allclose(kind(ridge=found.fit_.ridge, check_sites=False).fit(x, y, groups=frame.hospital).coef_, found.coef_)


def test_every_form_of_survival_data_gives_the_same_fit() -> None:
    frame = table()
    features = ["age", "unit", "marker", "smoker"]
    x, y = frame[features], frame[["days", "died"]]
    found = FederatedCox().fit(x, y, groups=frame.hospital)
    structured = np.array(list(zip(frame.died == 1, frame.days)), dtype=[("event", bool), ("time", float)])
    named = {name: (p[features], p[["days", "died"]].to_numpy()) for name, p in frame.groupby("hospital")}
    frames = {name: p[[*features, "days", "died"]] for name, p in frame.groupby("hospital")}
    others = (
        FederatedCox().fit(x, structured, groups=frame.hospital.to_numpy()),
        FederatedCox().fit(named),
        FederatedCox(time="days", event="died").fit(frames),
        FederatedCox(time="days", event="died", site_column="hospital").fit(
            frame[[*features, "hospital", "days", "died"]]
        ),
    )
    for other in others:
        assert_allclose(other.coef_, found.coef_, rtol=1e-10)
        assert other.sites_[-3:] == ("north", "south", "west")
    assert found.columns_.tolist() == list(by_hand(frame).columns)
    assert_allclose(found.score(x, y), others[2].score(frames), rtol=1e-12)
    assert_allclose(np.exp(found.coef_), found.summary_()["ratio"])
    assert set(found.kaplan_meier_) == {"all", "north", "south", "west"}


def test_survival_probabilities() -> None:
    frame = table()
    found = FederatedCox().fit(frame[["age", "marker"]], frame[["days", "died"]], groups=frame.hospital)
    times = [5.0, 50.0, 200.0]
    curves = found.predict_survival(frame[["age", "marker"]], times)
    assert curves.shape == (600, 3)
    assert (np.diff(curves, axis=1) <= 0).all()
    # On average over rows, the model's survival is near the Kaplan-Meier estimate.
    assert_allclose(
        curves.mean(0), found.kaplan_meier_["all"].at(np.array(times), found.kaplan_meier_["all"].survival), atol=0.02
    )
    assert_allclose(
        found.predict(frame[["age", "marker"]][:2]), np.log(-np.log(curves[:2, 1])) - np.log(found.baseline_([50.0]))
    )
    measures = found.evaluate(frame[["age", "marker"]], frame[["days", "died"]], groups=frame.hospital, times=times)
    assert (
        abs(measures["c_index"] - found.score(frame[["age", "marker"]], frame[["days", "died"]]))
        <= measures["c_index_error"]
    )
    assert 0 < measures["brier@50"] < 0.25
    own = FederatedCox(baseline="stratified").fit(frame[["age"]], frame[["days", "died"]], groups=frame.hospital)
    assert own.predict_survival(frame[["age"]][:3], times, site="west").shape == (3, 3)
    factors = FederatedCox(baseline="intercepts").fit(frame[["age"]], frame[["days", "died"]], groups=frame.hospital)
    assert np.isfinite(factors.summary_()["se"]).all()
    with pytest.raises(NestfedError, match="sites with one: north, south, west"):
        own.predict_survival(frame[["age"]], times)


def test_the_disclosure_rule() -> None:
    frame = table(3000)
    with pytest.warns(NestfedWarning, match="cells of time"):
        found = FederatedCox(min_cell=10).fit(frame[["age"]], frame[["days", "died"]], groups=frame.hospital)
    exact = FederatedCox().fit(frame[["age"]], frame[["days", "died"]], groups=frame.hospital)
    assert abs(found.coef_ - exact.coef_)[0] < exact.summary_()["se"].iloc[0]
    assert "c_index" not in found.evaluate(frame[["age"]], frame[["days", "died"]])
    rare = np.where(np.arange(3000) < 4, "rare", frame.hospital)
    with pytest.warns(NestfedWarning, match="1 sites have fewer than 10 rows"):
        left = FederatedLogistic(min_cell=10).fit(frame[["age"]], frame.died, groups=rare)
    assert "rare" not in left.sites_
    some = rare != "rare"
    assert_allclose(left.fit_.rows, some.sum())


def test_errors_say_what_would_be_right() -> None:
    frame = table(60)
    x = frame[["age"]]
    for y, message in (
        (frame[["days"]], "two columns, time and event"),
        (frame[["days", "died"]] * [-1, 1], "not negative"),
        (frame[["days", "smoker"]], "holds numbers"),
        (frame[["days", "died"]] * [1, 0], "No row has an event"),
    ):
        with pytest.raises(DataError, match=message):
            FederatedCox().fit(x, y)
    with pytest.raises(DataError, match="no column 'time'"):
        FederatedCox(time="time", event="died").fit({"a": frame})
    with pytest.raises(DataError, match="requires y to be passed"):
        FederatedCox().fit(x.to_numpy())
    with pytest.raises(DataError, match="intercepts must be"):
        FederatedLogistic(intercepts="own").fit(x, frame.died)
    with pytest.raises(DataError, match="tables, not images"):
        FederatedLogistic().fit(np.zeros((4, 1, 2, 2)), [0, 1, 0, 1])
    with pytest.raises(DataError, match="not a number"):
        FederatedLinear().fit(x, frame.unit)


def test_cross_validation() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    assert cross_val_score(FederatedLogistic(ridge=1.0), x, y, cv=3).mean() > 0.95


# ------------------------------------------------------------------------------------------------ real data


def stroke() -> pd.DataFrame:
    path = DATA / "ist" / "IST.csv.gz"
    if not path.exists():
        pytest.skip("the stroke trial is not here")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        frame = pd.read_csv(file, low_memory=False)
    frame = frame[frame.TD.notna() & frame.DIED.isin([0, 1])].reset_index(drop=True)
    return frame.assign(TD=frame.TD.astype(float))


def pooled_inputs(frame: pd.DataFrame, numbers: list[str], codes: dict[str, list[str]]) -> np.ndarray:
    return np.column_stack(
        [frame[numbers], *((frame[c] == v).astype(float) for c, values in codes.items() for v in values)]
    )


@pytest.mark.data
def test_the_stroke_trial_at_466_hospitals() -> None:
    frame = stroke()
    codes = {"SEX": ["F"], "RCONSC": ["D", "U"], "STYPE": ["LACS", "OTH", "POCS", "TACS"]}
    features = ["AGE", "RSBP", "RDELAY", *codes]
    x = pooled_inputs(frame, ["AGE", "RSBP", "RDELAY"], codes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NestfedWarning)
        found = FederatedLogistic(check_sites=False).fit(frame[features], frame.DIED, groups=frame.HOSPNUM)
        survival = FederatedCox(check_sites=False).fit(frame[features], frame[["TD", "DIED"]], groups=frame.HOSPNUM)
        one = FederatedCox(check_sites=False).fit(frame[features], frame[["TD", "DIED"]])
    assert len(found.sites_) == 466
    assert found.n_iter_ <= 8
    p = found.predict_proba(frame[features])[:, 1]
    scaled = np.c_[np.ones(len(x)), (x - x.mean(0)) / x.std(0)]
    assert_allclose(scaled.T @ (p - frame.DIED) / len(x), 0, atol=1e-13)  # the pooled score equations
    pooled = LogisticRegression(C=np.inf, tol=1e-13, max_iter=100, solver="newton-cholesky").fit(
        scaled[:, 1:], frame.DIED
    )
    assert_allclose(p, pooled.predict_proba(scaled[:, 1:])[:, 1], atol=1e-8)
    assert survival.n_iter_ <= 8
    assert_allclose(survival.coef_, one.coef_, rtol=1e-10, atol=1e-12)
    assert_allclose(survival.summary_("robust")["se"], one.summary_("robust")["se"], rtol=1e-9)
    assert_allclose(efron_score(scaled[:, 1:], frame.TD.to_numpy(), frame.DIED.to_numpy() == 1, survival.predict(frame[features])), 0,
                    atol=1e-8)  # fmt: skip


def efron_score(x: np.ndarray, time: np.ndarray, event: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The pooled score equations with Efron's ties, time by time."""
    w, score = np.exp(h), np.zeros(x.shape[1])
    for t in np.unique(time[event]):
        risk, tied = time >= t, (time == t) & event
        d = int(tied.sum())
        s0, s1, e0, e1 = w[risk].sum(), w[risk] @ x[risk], w[tied].sum(), w[tied] @ x[tied]
        score += x[tied].sum(0) - sum((s1 - k / d * e1) / (s0 - k / d * e0) for k in range(d))
    return score / event.sum()


@pytest.mark.data
def test_heart_disease_at_four_hospitals() -> None:
    columns = [
        "age",
        "sex",
        "cp",
        "trestbps",
        "chol",
        "fbs",
        "restecg",
        "thalach",
        "exang",
        "oldpeak",
        "slope",
        "ca",
        "thal",
        "num",
    ]
    names = ("cleveland", "hungarian", "switzerland", "va")
    if not (DATA / "heart-disease").exists():
        pytest.skip("heart disease is not here")
    read = {n: pd.read_csv(DATA / f"heart-disease/processed.{n}.data", names=columns, na_values="?") for n in names}
    numbers = ["age", "sex", "trestbps", "chol", "thalach", "exang", "oldpeak"]
    sites = {n: (frame[numbers], (frame.num > 0).astype(int)) for n, frame in read.items()}
    with pytest.raises(SeparationError, match="thalach is missing"):  # all few such patients are ill
        FederatedLogistic().fit(sites)
    found = FederatedLogistic(ridge=2.0).fit(sites)
    whole = pd.concat([x for x, _ in sites.values()])
    y = pd.concat([y for _, y in sites.values()])
    gaps = whole.isna()
    mean, deviation = whole.mean(), whole.std(ddof=0)
    scaled = np.c_[((whole - mean) / deviation).fillna(0), gaps.loc[:, gaps.any()].astype(float)]
    pooled = LogisticRegression(C=0.5, tol=1e-14, max_iter=1000, solver="newton-cholesky").fit(scaled, y)
    assert_allclose(found.predict_proba(whole), pooled.predict_proba(scaled), atol=1e-10)
    assert found.n_iter_ <= 8
    assert found.score(whole, y) > 0.75
    ridge = FederatedLinear(ridge=10.0).fit({n: (a, b.astype(float)) for n, (a, b) in sites.items()})
    assert_allclose(ridge.predict(whole), Ridge(10.0).fit(scaled, y).predict(scaled), atol=1e-9)
