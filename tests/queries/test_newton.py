"""Exact regressions equal the pooled fit: statsmodels, scikit-learn, closed forms, dummies in place of site intercepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, Ridge

from nestfed.core import NestfedError
from nestfed.queries import QUERIES, Rows, at_hand
from nestfed.queries.newton import regression, regression_path
from nestfed.queries.solve import SeparationError, disagreement

FOUND: dict[str, Any] = json.loads(Path(__file__).with_name("reference.json").read_text())
X, SITE = np.array(FOUND["x"]), np.array(FOUND["site"])
TRUTH = FOUND["regression"]
NAMES = ("a", "b", "c")


def sites(x: np.ndarray, y: np.ndarray, site: np.ndarray, group: np.ndarray | None = None) -> list[dict[str, Rows]]:
    return [
        {"training": Rows(x[site == n], y[site == n], None if group is None else group[site == n])}
        for n in np.unique(site)
    ]


def fit(family: Any, y: Any, site: np.ndarray = SITE, x: np.ndarray = X, **options: Any) -> Any:
    names = NAMES[: x.shape[1]] + tuple(f"more{i}" for i in range(x.shape[1] - 3))
    return regression(at_hand(sites(x, np.asarray(y), site)), family, names, **options)


@pytest.mark.parametrize(("family", "target"), [("logistic", "y"), ("linear", "number")])
def test_statsmodels(family: str, target: str) -> None:
    found, truth = fit(family, TRUTH[target]), TRUTH[family]
    assert_allclose(found.coef, truth["coef"], rtol=1e-9)
    assert_allclose(found.log_likelihood, truth["llf"], rtol=1e-12)
    for errors in ("model", "robust", "site"):
        assert_allclose(found.standard_errors(errors), truth[errors], rtol=1e-8, err_msg=errors)
    table = found.summary("model")
    assert_allclose(table["p"], truth["p"], rtol=1e-7)
    assert_allclose(table[["low", "high"]], truth["interval"], rtol=1e-8)
    assert found.iterations <= 8
    assert found.sites == tuple(range(6))


def test_several_classes() -> None:
    found = fit("logistic", TRUTH["three"], classes=3)
    assert_allclose(found.coef, np.ravel(TRUTH["several"]["coef"]), rtol=1e-8)
    assert_allclose(found.standard_errors(), np.ravel(TRUTH["several"]["model"]), rtol=1e-7)
    assert_allclose(found.log_likelihood, TRUTH["several"]["llf"], rtol=1e-12)


@pytest.mark.parametrize("ridge", [0.1, 3.0, 100.0])
def test_ridge_of_scikit_learn(ridge: float) -> None:
    y, number = np.array(TRUTH["y"]), np.array(TRUTH["number"])
    model = LogisticRegression(C=1 / ridge, tol=1e-14, max_iter=10_000, solver="newton-cholesky").fit(X, y)
    assert_allclose(fit("logistic", y, ridge=ridge).coef, [*model.intercept_, *model.coef_[0]], atol=1e-9)
    linear = Ridge(ridge, solver="cholesky").fit(X, number)
    assert_allclose(fit("linear", number, ridge=ridge).coef, [linear.intercept_, *linear.coef_], atol=1e-11)


@pytest.mark.parametrize("family", ["logistic", "linear"])
def test_site_intercepts_are_dummies_of_the_pooled_table(family: Any) -> None:
    rng = np.random.default_rng(5)
    site, x = np.repeat(np.arange(5), 40), rng.normal(size=(200, 3)) + np.repeat(np.arange(5), 40)[:, None]
    eta = x @ [0.5, -0.4, 0.0] + 0.8 * (2 - site)
    y = (rng.random(200) < expit(eta)).astype(int) if family == "logistic" else eta + rng.normal(size=200)
    own = fit(family, y, site, x, own_intercepts=True)
    dummies = fit(family, y, 0 * site, np.c_[x, np.eye(5)[site][:, 1:]])
    assert_allclose(own.coef, dummies.coef[1:4], atol=1e-10)
    assert_allclose(own.log_likelihood, dummies.log_likelihood, rtol=1e-12)
    for errors in ("model", "robust"):
        assert_allclose(own.standard_errors(errors), dummies.standard_errors(errors)[1:4], rtol=1e-9)
    common = fit(family, y, site, x)
    assert "site intercepts" in disagreement(common, own)[0]
    assert not disagreement(own, own)


def test_a_site_with_one_class_has_no_say_beside_its_intercept() -> None:
    y = np.array(TRUTH["y"])
    y[SITE == 3] = 1
    own = fit("logistic", y, own_intercepts=True)
    assert 3 in own.left_out
    some = SITE != 3
    assert_allclose(own.coef, fit("logistic", y[some], SITE[some], X[some], own_intercepts=True).coef, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2, 7, 60])
@pytest.mark.parametrize(("family", "target"), [("logistic", "y"), ("linear", "number"), ("logistic", "three")])
def test_any_partition_gives_the_same_answer(family: str, target: str, parts: int) -> None:
    site = np.random.default_rng(parts).integers(0, parts, len(X))
    classes = 3 if target == "three" else 2
    one, other = fit(family, TRUTH[target], classes=classes), fit(family, TRUTH[target], site, classes=classes)
    assert_allclose(other.coef, one.coef, rtol=1e-10, atol=1e-10)
    for errors in ("model", "robust"):
        assert_allclose(other.standard_errors(errors), one.standard_errors(errors), rtol=1e-10)


def test_robust_errors_by_person() -> None:
    """Each row twice, as one person: coefficients and robust errors of the single rows."""
    y = np.array(TRUTH["y"])
    person = np.arange(len(X))
    twice = regression(
        at_hand(sites(np.r_[X, X], np.r_[y, y], np.r_[SITE, SITE], np.r_[person, person])), "logistic", NAMES
    )
    assert_allclose(twice.standard_errors("robust"), TRUTH["logistic"]["robust"], rtol=1e-8)
    assert_allclose(twice.standard_errors("model"), np.array(TRUTH["logistic"]["model"]) / np.sqrt(2), rtol=1e-8)


def test_collinear_and_constant_columns() -> None:
    y = np.array(TRUTH["y"])
    more = np.c_[X, X[:, 0] - 2 * X[:, 1], np.ones(len(X))]
    found, plain = fit("logistic", y, x=more), fit("logistic", y)
    predictor = lambda f, x: f.coef[0] + x @ f.coef[1:]  # noqa: E731
    assert_allclose(predictor(found, more), predictor(plain, X), atol=1e-9)
    assert np.isnan(found.standard_errors()[[1, 2, 4]]).all()
    assert_allclose(found.standard_errors()[3], plain.standard_errors()[3], rtol=1e-8)
    assert "do not determine the coefficients of" in found.notes[0]
    assert_allclose(fit("logistic", y, x=more, ridge=1.0).coef[1:4].shape, 3)


@pytest.mark.parametrize("complete", [True, False])
def test_separation_is_an_error_that_ridge_mends(complete: bool) -> None:
    y = (X[:, 0] > 0).astype(int)
    if not complete:  # the column separates some rows only
        y = np.where(X[:, 1] == 1, 1, np.array(TRUTH["y"]))
    with pytest.raises(SeparationError, match="separate the outcomes"):
        fit("logistic", y)
    assert np.isfinite(fit("logistic", y, ridge=0.1).coef).all()


@pytest.mark.parametrize(("name", "family", "classes"), [
    ("regression-sums", "logistic", 2), ("regression-sums", "logistic", 3), ("regression-sums", "linear", 2),
    ("regression-within", "logistic", 2), ("regression-within", "linear", 2),
])  # fmt: skip
def test_finite_differences(name: str, family: str, classes: int) -> None:
    y = np.array(TRUTH["number" if family == "linear" else "three" if classes == 3 else "y"])
    rows, within = Rows(X, y), name == "regression-within"
    shape = (3,) if within else (classes - 1 if family == "logistic" else 1, 4)
    x, size = np.random.default_rng(1).normal(size=shape), int(np.prod(shape))
    ask = lambda v: QUERIES[name](rows, family=family, coef=v.reshape(shape))  # noqa: E731
    here, h = ask(x), 1e-5
    for j in range(size):
        step = h * np.eye(size)[j].reshape(shape)
        up, down = ask(x + step), ask(x - step)
        assert_allclose(here["gradient"][j], (up["loss"] - down["loss"]) / (2 * h), rtol=1e-6, atol=1e-6)
        assert_allclose(here["hessian"][j], (up["gradient"] - down["gradient"]) / (2 * h), rtol=1e-6, atol=1e-6)


def test_newton_converges_from_far_away() -> None:
    """Full steps overshoot from here: they are halved."""
    start = np.array([30.0, -40.0, 20.0, 10.0])
    found = fit("logistic", TRUTH["y"], start=start)
    assert_allclose(found.coef, TRUTH["logistic"]["coef"], rtol=1e-8)


def test_ridge_by_validation_is_the_best_of_the_path() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 12))
    y = (rng.random(240) < expit(x[:, 0])).astype(int)
    train, held = np.arange(240) % 3 > 0, np.arange(240) % 3 == 0
    parts = [
        {"training": Rows(x[train][i::4], y[train][i::4]), "validation": Rows(x[held][i::4], y[held][i::4])}
        for i in range(4)
    ]
    path = regression_path(at_hand(parts), "logistic", [f"x{i}" for i in range(12)])
    losses = {}
    for ridge in path.ridges:
        if ridge:
            model = LogisticRegression(C=1 / (160 * ridge), tol=1e-12, max_iter=1000).fit(x[train], y[train])
            p = model.predict_proba(x[held])[np.arange(80), y[held]]
            losses[ridge] = -np.log(p).mean()
    assert path.best == min(losses, key=lambda r: losses[r])
    at = dict(zip(path.ridges, path.losses))
    assert_allclose([at[r] for r in losses], list(losses.values()), atol=1e-6)


def test_errors_say_what_would_be_right() -> None:
    y = np.array(TRUTH["y"])
    with pytest.raises(NestfedError, match="No site has rows of class 1"):
        fit("logistic", 0 * y)
    with pytest.raises(NestfedError, match="3 model inputs, but 1 names"):
        regression(at_hand(sites(X, y, SITE)), "logistic", ["a"])
    with pytest.raises(NestfedError, match="family must be"):
        fit("poisson", y)
    with pytest.raises(NestfedError, match="without missing values"):
        fit("linear", y, x=np.where(X[0, 0] == X, np.nan, X))
