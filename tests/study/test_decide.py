"""Thresholds, decision curves and calibration curves from counts: against the rows, scipy and scikit-learn."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import binomtest

from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.queries import TEST, VALIDATION, Rows, at_hand
from nestfed.queries.tally import Tally
from nestfed.study.counts import Candidate, Counts, count
from nestfed.study.curves import calibration_curve, decision_curve
from nestfed.study.decide import Calibration, Confusion, Threshold, choose, judged_at, thresholds
from nestfed.study.intervals import bounded, proportion, wilson
from tests.study.scored_sites import NAMES, A, both_parts, stacked

FITTED = Calibration(1.1, -0.7, {"south": (0.9, -0.2)})


def counted(found: list[dict[str, Rows]], part: str = TEST, min_cell: int = 0, **options: Any) -> Counts:
    return count(at_hand(found, min_cell), {"model": Candidate(A, FITTED)}, sites=NAMES, part=part, **options)


def probabilities(found: list[dict[str, Rows]], part: str = TEST) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' calibrated probabilities and classes."""
    each = [FITTED(site[part].x @ A, name) for site, name in zip(found, NAMES)]
    return np.concatenate(each), stacked(found, part).y


# ---------------------------------------------------------------------------------------------------------
# Calibrations


def test_a_calibration_maps_scores_to_probabilities() -> None:
    scores = np.array([-800.0, -1.0, 0.0, 2.0, 800.0])
    assert FITTED(scores) == pytest.approx(expit(1.1 * scores - 0.7))
    assert FITTED(scores, "south") == pytest.approx(expit(0.9 * scores - 0.2))
    assert (FITTED(scores, "elsewhere") == FITTED(scores)).all()
    assert Calibration.from_json(json.loads(json.dumps(FITTED.to_json()))) == FITTED


# ---------------------------------------------------------------------------------------------------------
# Shares


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (250, 1000)])
def test_wilsons_interval_is_that_of_scipy(k: int, n: int) -> None:
    true = binomtest(k, n).proportion_ci(0.95, "wilson")
    assert wilson(k / n, n) == pytest.approx((true.low, true.high), abs=1e-12)
    found = proportion(Estimate(k, k, k), n, n)
    assert (found.value, found.low, found.high) == pytest.approx((k / n, true.low, true.high), abs=1e-12)


def test_uncertain_counts_widen_an_interval() -> None:
    found = proportion(Estimate(5, 3, 8), 10, 10)
    assert found.low == wilson(0.3, 10)[0]
    assert found.high == wilson(0.8, 10)[1]


def test_intervals_on_the_scale_of_log_odds_stay_inside() -> None:
    found = bounded(0.99, 0.02**2, 20)
    assert 0 < found.low < 0.99 < found.high < 1
    assert bounded(0.5, 0.01**2, 20).low == pytest.approx(0.5 - 1.96 * 0.01, abs=1e-4)
    assert bounded(0.999, 1e6, 20).low < 1e-9
    assert bounded(1.0, 0.0, 20).high == 1


# ---------------------------------------------------------------------------------------------------------
# Thresholds


@pytest.mark.parametrize("rule", ["sensitivity 0.9", "sensitivity 1", "specificity 0.95", "alerts 0.1", "balanced"])
@pytest.mark.parametrize("seed", range(3))
def test_a_threshold_keeps_its_promise_on_validation_rows(rule: str, seed: int) -> None:
    found = both_parts(seed=seed)
    p, y = probabilities(found, VALIDATION)
    tally = counted(found, VALIDATION).tally("model")
    chosen = choose(tally, rule)
    share = {
        "sensitivity": lambda t: (p[y == 1] >= t).mean(),
        "specificity": lambda t: (p[y == 0] < t).mean(),
        "alerts": lambda t: (p >= t).mean(),
        "balanced": lambda t: (p[y == 1] >= t).mean() + (p[y == 0] < t).mean(),
    }[rule.split()[0]]
    grid = np.unique(p)
    if rule == "balanced":
        assert share(chosen) == pytest.approx(max(share(t) for t in grid), abs=0.005)
        return
    wanted = float(rule.split()[1])
    if rule.startswith("sensitivity"):
        assert share(chosen) >= wanted
        assert all(share(t) < wanted for t in grid[grid > chosen + 0.001])  # 0.001: about a bin
    elif rule.startswith("specificity"):
        assert share(chosen) >= wanted
        assert all(share(t) < wanted for t in grid[grid < chosen - 0.001])
    else:
        assert share(chosen) <= wanted
        assert all(share(t) > wanted for t in grid[grid < chosen - 0.001])


@pytest.mark.parametrize("group", ["all", "site = south", "sex = F"])
def test_a_threshold_is_judged_as_it_will_be_used(group: str) -> None:
    """Counts from bins equal those of the probabilities of the test rows, row by row."""
    found = both_parts()
    (made,) = thresholds(
        counted(found, VALIDATION).tally("model"),
        counted(found, subgroups={"sex": ["F"]}).tally("model", group),
        ["sensitivity 0.8"],
    )
    p, y = probabilities(found)
    sex = stacked(found).columns["sex"]
    mine = {"all": y >= 0, "site = south": np.arange(1200) // 400 == 1, "sex = F": sex == "F"}[group]
    called, truth = (p >= made.probability)[mine], y[mine] == 1
    assert made.sensitivity.value == (called & truth).sum() / truth.sum()
    assert made.specificity.value == pytest.approx((~called & ~truth).sum() / (~truth).sum(), rel=1e-15)
    assert made.ppv.value == (called & truth).sum() / called.sum()
    assert made.alerts.value == called.mean()
    for estimate, k, n in (
        (made.sensitivity, (called & truth).sum(), truth.sum()),
        (made.ppv, (called & truth).sum(), called.sum()),
    ):
        true = binomtest(int(k), int(n)).proportion_ci(0.95, "wilson")
        assert (estimate.low, estimate.high) == pytest.approx((true.low, true.high), abs=1e-9)


@given(st.integers(0, 10_000), st.integers(2, 20), st.floats(0.02, 0.98))
@settings(max_examples=30, deadline=None)
def test_intervals_include_what_merged_cells_leave_open(seed: int, min_cell: int, probability: float) -> None:
    found = both_parts(120, seed)
    p, y = probabilities(found)
    confusion = Confusion.of(counted(found, min_cell=min_cell).tally("model"), probability)
    assert confusion.caught.low <= (p[y == 1] >= probability).sum() <= confusion.caught.high
    assert confusion.false_alarms.low <= (p[y == 0] >= probability).sum() <= confusion.false_alarms.high
    assert confusion.specificity.low <= (p[y == 0] < probability).mean() <= confusion.specificity.high
    assert confusion.sensitivity.low <= (p[y == 1] >= probability).mean() <= confusion.sensitivity.high


def test_rows_of_the_same_person_widen_the_interval() -> None:
    found = both_parts(persons=50)
    tally = counted(found).tally("model")
    assert tally.persons[2] < 151
    found_again = [{k: Rows(r.x, r.y, None, r.columns, r.scores, site=r.site) for k, r in s.items()} for s in found]
    alone = counted(found_again).tally("model")
    few, many = (judged_at("balanced", 0.4, one).sensitivity for one in (tally, alone))
    assert few.value == many.value
    assert few.high - few.low > 1.5 * (many.high - many.low)
    rows = np.unique(np.concatenate([100 * i + s[TEST].group for i, s in enumerate(found)]), return_counts=True)[1]  # type: ignore[operator]
    assert tally.independent[2] == pytest.approx(1200**2 / (rows**2).sum())


def test_a_threshold_survives_json() -> None:
    found = both_parts(60)
    tally = counted(found).tally("model")
    for made in (*thresholds(tally, tally), judged_at("alerts 0.1", 1.0, tally)):
        again = Threshold.from_json(json.loads(json.dumps(made.to_json(), allow_nan=False)))
        assert repr(again) == repr(made)
    assert np.isnan(made.ppv.value)  # nobody is called positive


@pytest.mark.parametrize(
    "rule", ["sensitivity", "sensitivity 1.5", "recall 0.9", "balanced 0.5", "alerts x", "alerts 0"]
)
def test_wrong_rules(rule: str) -> None:
    with pytest.raises(NestfedError, match="A threshold's rule is 'sensitivity S'"):
        choose(counted(both_parts(60)).tally("model"), rule)


def test_saturated_probabilities() -> None:
    """Scores beyond 37 have probability 1 in float64; a threshold of 1 calls all of them positive, wherever they start."""
    x = np.r_[np.linspace(30, 60, 40), np.linspace(-60, 40, 60)]
    y = np.r_[np.ones(40, np.int64), np.zeros(60, np.int64)]
    found = [{TEST: Rows(x[:, None], y, scores=lambda w: w[0] * x)}]
    tally = count(at_hand(found), {"model": np.ones(1)}).tally("model")
    for rule in ("specificity 0.99", "alerts 0.05", "sensitivity 0.5"):
        made = judged_at(rule, choose(tally, rule), tally)
        assert made.alerts.low <= (expit(x) >= made.probability).mean() <= made.alerts.high
        assert made.alerts.value == pytest.approx((expit(x) >= made.probability).mean(), abs=0.011)


def test_one_class_has_no_threshold() -> None:
    found = [{TEST: Rows(np.ones((5, 1)), np.zeros(5, np.int64), scores=lambda w: np.arange(5.0))}]
    tally = count(at_hand(found), {"model": np.ones(1)}).tally("model")
    with pytest.raises(NestfedError, match="validation rows of both classes"):
        choose(tally, "balanced")


# ---------------------------------------------------------------------------------------------------------
# Curves


def test_net_benefit_is_that_of_the_rows() -> None:
    found = both_parts()
    p, y = probabilities(found)
    curve = decision_curve(counted(found).tally("model"), (0.1, 0.3, 0.5))
    for at, model, everybody in zip(curve.probability, curve.model, curve.everybody):
        weight, called = at / (1 - at), p >= at
        assert model == pytest.approx((called & (y == 1)).mean() - weight * (called & (y == 0)).mean(), abs=3e-3)
        assert everybody == pytest.approx(y.mean() - weight * (1 - y.mean()))
    assert curve.figure("model").lines[0].name == "model"
    with pytest.raises(NestfedError, match="between 0 and 1"):
        decision_curve(counted(found).tally("model"), (0.0, 0.5))


def test_predicted_and_observed_frequencies() -> None:
    found = both_parts(2000)
    p, y = probabilities(found)
    curve = calibration_curve(counted(found).tally("model"), 10)
    assert sum(one.rows for one in curve) == 6000
    assert sum(one.rows * one.observed.value for one in curve) == pytest.approx(y.sum())
    assert sum(one.rows * one.predicted for one in curve) == pytest.approx(p.sum(), rel=1e-3)
    order = np.argsort(p)
    for one, mine in zip(curve, np.array_split(order, 10)):
        assert one.rows == pytest.approx(600, abs=30)
        assert one.predicted == pytest.approx(p[mine].mean(), abs=0.01)
        assert one.observed.low <= y[mine].mean() <= one.observed.high


def test_a_tally_of_no_rows_has_no_rates() -> None:
    found = both_parts(60)
    tally: Tally = counted(found, subgroups={"sex": ["none"]}).tally("model", "sex = none")
    assert tally.sites == 0
    assert np.isnan(judged_at("balanced", 0.5, tally).sensitivity.value)
    assert calibration_curve(tally) == ()


def test_scores_that_are_not_numbers_have_no_rates() -> None:
    found = both_parts(60)
    tally = count(at_hand(found), {"model": A * np.nan}).tally("model")
    made = judged_at("balanced", 0.5, tally)
    assert all(np.isnan(one.value) for one in (made.sensitivity, made.specificity, made.ppv, made.alerts))
    assert np.isnan(decision_curve(tally).model).all()
