"""Calibrations from sums: identities with the pooled rows, scikit-learn's fits, and what shrinkage does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from nestfed.core import NestfedError
from nestfed.metrics import log_loss
from nestfed.queries import TEST, VALIDATION, Rows, at_hand
from nestfed.queries.calibration import FACTS, LINE, OWN, own_pair, targets
from nestfed.study.decide import Calibration
from nestfed.study.labelled import calibrate as calibrate_rows
from nestfed.study.recalibrate import STRENGTHS, agreement, calibrate, recalibrate
from tests.study.scored_sites import NAMES, A, both_parts, rows, stacked

SHIFTS = (-1.5, 0.0, 1.0)


def shifted(n: int = 600, seed: int = 0, shifts: Any = SHIFTS, slopes: Any = (1.0, 1.0, 1.0)) -> list[dict[str, Rows]]:
    """Return sites whose log-odds differ from the common score by an intercept and a slope."""
    found = []
    for i, (shift, slope, name) in enumerate(zip(shifts, slopes, NAMES)):
        parts = {}
        for k, part in enumerate((VALIDATION, TEST)):
            rng = np.random.default_rng([seed, i, k])
            x = rng.normal(size=(n, 3))
            y = (rng.random(n) < expit(slope * (x @ A) + shift)).astype(np.int64)
            parts[part] = Rows(x, y, scores=lambda w, x=x: x @ w, site=name)
        found.append(parts)
    return found


def platt_by_scikit_learn(s: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return a and b of logistic regression without penalty on rows counted in both classes, weighted by Platt's targets."""
    high, low = targets(y.sum(), len(y) - y.sum())
    t = np.where(y == 1, high, low)
    fit = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000)
    fit.fit(np.r_[s, s][:, None], np.r_[np.ones(len(y)), np.zeros(len(y))], np.r_[t, 1 - t])
    return float(fit.coef_[0, 0]), float(fit.intercept_[0])


# ---------------------------------------------------------------------------------------------------------
# The common calibration


@pytest.mark.parametrize("seed", range(3))
def test_the_common_calibration_is_that_of_the_pooled_rows(seed: int) -> None:
    found = both_parts(seed=seed)
    every = stacked(found, VALIDATION)
    made = calibrate(at_hand(found), A)
    assert (made.a, made.b) == pytest.approx(platt_by_scikit_learn(every.x @ A, every.y), rel=1e-4)
    own = calibrate_rows([(site[VALIDATION].x @ A, site[VALIDATION].y) for site in found])
    assert (made.a, made.b) == pytest.approx(own, rel=1e-7)


def test_scores_of_any_scale_have_the_same_probabilities() -> None:
    found = both_parts()
    every = stacked(found, VALIDATION)
    one, other = calibrate(at_hand(found), A), calibrate(at_hand(found), 1e4 * A)
    assert one(every.x @ A) == pytest.approx(other(1e4 * every.x @ A), abs=1e-9)


def test_scores_that_separate_the_classes_have_a_finite_calibration() -> None:
    x = np.r_[np.linspace(1, 2, 30), np.linspace(-2, -1, 30)]
    found = [{VALIDATION: Rows(x[:, None], (x > 0).astype(np.int64), scores=lambda w: w[0] * x)}]
    made = calibrate(at_hand(found), np.ones(1))
    assert 0 < made.a < 100


def test_the_order_of_scores_is_kept() -> None:
    """Scores that rank the wrong way round get a small slope above 0, and the right mean."""
    found = both_parts()
    every = stacked(found, VALIDATION)
    made = calibrate(at_hand(found), -A)
    assert made.a > 0
    assert made(-every.x @ A).mean() == pytest.approx(every.y.mean(), abs=0.01)
    constant = calibrate(at_hand(found), 0 * A)
    assert constant(np.zeros(1)) == pytest.approx(every.y.mean(), abs=0.01)


def test_sites_below_their_limit_contribute_nothing() -> None:
    found = both_parts()
    few = found[0][VALIDATION]
    found[0] = {VALIDATION: replace(few, y=(np.arange(400) < 5).astype(np.int64))}
    made, without = calibrate(at_hand(found, 10), A), calibrate(at_hand(found[1:], 10), A)
    assert made == without
    nobody = [{VALIDATION: rows(30, 0, positive=0.05)}]
    with pytest.raises(NestfedError, match="No site may describe its validation rows"):
        calibrate(at_hand(nobody, 10), A)


# ---------------------------------------------------------------------------------------------------------
# By site


def test_infinite_shrinkage_is_the_common_calibration() -> None:
    found = shifted()
    ask = at_hand(found)
    common = calibrate(ask, A)
    made = recalibrate(ask, A, common, NAMES, strength=math.inf)
    assert made.calibration == Calibration(common.a, common.b, dict.fromkeys(NAMES, (common.a, common.b)))


@pytest.mark.parametrize("way", ["slope", "intercept"])
def test_without_shrinkage_it_is_the_sites_own_fit(way: Any) -> None:
    found = shifted(300, slopes=(0.5, 1.0, 2.0))
    ask = at_hand(found)
    common = calibrate(ask, A)
    made = recalibrate(ask, A, common, NAMES, way=way, strength=0.0).calibration
    for site, name in zip(found, NAMES):
        s, y = site[VALIDATION].x @ A, site[VALIDATION].y
        if way == "slope":
            assert made.sites[name] == pytest.approx(platt_by_scikit_learn(s, y), rel=1e-4, abs=1e-6)
        else:  # the mean of the probabilities is that of Platt's targets
            a, b = made.sites[name]
            assert a == pytest.approx(common.a)
            high, low = targets(y.sum(), len(y) - y.sum())
            assert expit(a * s + b).mean() == pytest.approx(np.where(y == 1, high, low).mean(), abs=1e-9)


def test_shrinkage_in_between_minimises_the_penalised_loss() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=200)
    t, common = np.where(rng.random(200) < expit(2 * z - 1), 0.98, 0.02), np.array([0.7, 0.5])

    def objective(pair: np.ndarray, strength: float) -> float:
        eta = pair[0] * z + pair[1]
        loss = (np.logaddexp(0, eta) - t * eta).sum()
        return float(loss + strength / 2 * ((pair - common) ** 2).sum())

    for strength in (0.0, 5.0, 100.0):
        true = minimize(
            objective, common, args=(strength,), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12}
        ).x
        assert own_pair(z, t, common, strength, slope=True) == pytest.approx(true, abs=1e-6)
    far = [np.abs(own_pair(z, t, common, k, slope=True) - common).sum() for k in STRENGTHS]
    assert (np.diff(far) < 0).all()


def test_sites_that_differ_get_their_own_calibration() -> None:
    found = shifted(1500)
    ask = at_hand(found)
    common = calibrate(ask, A)
    made = recalibrate(ask, A, common, NAMES)
    assert made.strength < 100
    assert made.kept == ()
    losses = []
    for calibration in (common, made.calibration):
        each = [calibration.log_odds(site[TEST].x @ A, name) for site, name in zip(found, NAMES)]
        losses.append(log_loss(np.concatenate(each), stacked(found).y))
    assert losses[1] < losses[0] - 0.05


def test_slopes_that_differ_are_found() -> None:
    ask = at_hand(shifted(3000, shifts=(0, 0, 0), slopes=(0.3, 1.0, 2.5)))
    made = recalibrate(ask, A, calibrate(ask, A), NAMES)
    assert made.way == "slope"
    a = [made.calibration.sites[name][0] for name in NAMES]
    assert a == sorted(a)
    assert a[0] < 0.5 < 2 < a[2]


def test_sites_that_are_alike_are_shrunk() -> None:
    """With few rows and no difference between sites, own calibrations would only add noise."""
    strong = 0
    for seed in range(6):
        ask = at_hand(shifted(60, seed, shifts=(0, 0, 0)))
        strong += recalibrate(ask, A, calibrate(ask, A), NAMES).strength >= 10
    assert strong >= 4


def test_a_site_with_few_rows_keeps_the_common_calibration() -> None:
    found = shifted()
    found[1] = {k: replace(r, y=(np.arange(600) < 4).astype(np.int64)) for k, r in found[1].items()}
    ask = at_hand(found, 10)
    made = recalibrate(ask, A, Calibration(1.0, 0.0), NAMES)
    assert made.kept == ("south",)
    assert set(made.calibration.sites) == {"north", "west"}


def copies(one: Rows, times: int) -> Rows:
    """Return every row several times, as rows of one person."""
    x, person = np.repeat(one.x, times, 0), np.repeat(np.arange(len(one)), times)
    return Rows(x, np.repeat(one.y, times), person, scores=lambda w: x @ w, site=one.site)


def test_persons_are_left_out_together() -> None:
    """Copies of the same rows must not make own fits look better than they are."""
    found = shifted(80, 3, shifts=(0, 0, 0))
    copied = [{VALIDATION: copies(site[VALIDATION], 4)} for site in found]
    once, often = (
        at_hand(some)(
            OWN, VALIDATION, x=A, scale=np.array([0.0, 1.0]), common=np.array([1.0, 0.0]), strengths=np.zeros(1), seed=0
        )
        for some in (found, copied)
    )
    for n in once:
        # Platt's targets depend on the number of rows, so the fits are nearly and not exactly the same.
        assert often[n]["losses"] == pytest.approx(4 * once[n]["losses"], rel=0.05)


def test_wrong_requests() -> None:
    ask = at_hand(shifted(60))
    with pytest.raises(NestfedError, match="slope"):
        recalibrate(ask, A, Calibration(), NAMES, way="slopes")  # type: ignore[arg-type]
    with pytest.raises(NestfedError, match="numbers from 0 or inf"):
        recalibrate(ask, A, Calibration(), NAMES, strength=-1.0)


# ---------------------------------------------------------------------------------------------------------
# Agreement of probabilities with frequencies


def test_slope_and_intercept_are_those_of_logistic_regression() -> None:
    found = shifted(800)
    common = Calibration(0.8, 0.3)
    made = agreement(at_hand(found), A, common, NAMES)
    for name, some in {"all": found, **{f"site = {n}": [s] for n, s in zip(NAMES, found)}}.items():
        every = stacked(some)
        eta, y = common.log_odds(every.x @ A), every.y
        fit = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000).fit(eta[:, None], y)
        assert made[name].slope.value == pytest.approx(fit.coef_[0, 0], rel=1e-4)
        design = np.stack([eta, np.ones(len(y))], 1)
        p = fit.predict_proba(eta[:, None])[:, 1]
        error = np.sqrt(np.linalg.inv(design.T @ ((p * (1 - p))[:, None] * design))[0, 0])
        assert (made[name].slope.high - made[name].slope.low) / 2 == pytest.approx(1.96 * error, rel=1e-3)
        assert expit(eta + made[name].intercept.value).sum() == pytest.approx(y.sum())
    # the sites' frequencies differ as they were made to
    intercepts = [made[f"site = {name}"].intercept for name in NAMES]
    assert [one.value for one in intercepts] == sorted(one.value for one in intercepts)
    assert intercepts[0].high < 0 < intercepts[2].low


def test_own_calibrations_agree_better() -> None:
    found = shifted(2000)
    ask = at_hand(found)
    common = calibrate(ask, A)
    own = recalibrate(ask, A, common, NAMES).calibration
    gaps = [
        max(abs(agreement(ask, A, one, NAMES)[f"site = {name}"].intercept.value) for name in NAMES)
        for one in (common, own)
    ]
    assert gaps[1] < 0.25 < 0.8 < gaps[0]


def test_agreement_is_unknown_where_it_cannot_be() -> None:
    x = np.r_[np.linspace(1, 2, 30), np.linspace(-2, -1, 30)]
    apart = Rows(x[:, None], (x > 0).astype(np.int64), scores=lambda w: w[0] * x)
    alike = replace(apart, y=np.zeros(60, np.int64))
    made = agreement(at_hand([{TEST: apart}, {TEST: alike}]), np.ones(1), Calibration())
    assert np.isnan(made["site = 0"].slope.value)
    assert np.isnan(made["site = 1"].slope.value)
    assert np.isfinite(made["all"].slope.value)
    assert np.isnan(agreement(at_hand([{TEST: apart}]), np.ones(1), Calibration())["all"].slope.value)


# ---------------------------------------------------------------------------------------------------------
# The disclosure rule


@pytest.mark.parametrize("query", [FACTS, OWN, LINE])
def test_a_site_with_a_small_class_sends_nothing_but_zeros(query: Any) -> None:
    few = replace(rows(100, 0), y=(np.arange(100) < 9).astype(np.int64))
    more = {
        FACTS.name: {},
        OWN.name: {"scale": np.array([0.0, 1.0]), "common": np.array([1.0, 0.0]), "strengths": np.zeros(1), "seed": 0},
        LINE.name: {"case": Calibration().to_json()},
    }[query.name]
    reply = query(few, 10, x=A, **more)
    assert reply.pop("rows") == 100
    assert not any(np.any(value) for value in reply.values())
    open_reply = query(few, 0, x=A, **more)
    assert open_reply["used"] == 100
