"""Permutation importance by query, and coefficients of linear scores in their columns' units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestfed import metrics
from nestfed.core import NestfedError
from nestfed.data.encoding import Column, encode
from nestfed.data.random import Purpose, Streams
from nestfed.queries import TEST, at_hand
from nestfed.queries.influence import NUMBERS
from nestfed.study.counts import Candidate
from nestfed.study.decide import Calibration
from nestfed.study.importance import coefficients, importance, inputs_by_column
from tests.study.scored_sites import A, resampled, sites, stacked

COLUMNS = {"first": [0], "second": [1], "unused": [2], "both": [0, 1]}


def test_importance_is_the_loss_on_permuted_rows() -> None:
    found = sites(300)
    made = {one.column: one for one in importance(at_hand(found), Candidate(A), COLUMNS, repeats=2, seed=3)}
    every = stacked(found)
    base = metrics.auroc(every.x @ A, every.y)
    for column, places in COLUMNS.items():
        values = []
        for r in range(2):
            scores = []
            for site in found:
                order = Streams(3 * 2 + r).at(Purpose.JUDGE, 0, 0).permutation(300)
                x = site[TEST].x.copy()
                x[:, places] = x[order][:, places]
                scores.append(x @ A)
            values.append(metrics.auroc(np.concatenate(scores), every.y))
        assert made[column].loss.value == pytest.approx(base - np.mean(values), abs=2e-3)
        assert made[column].between == pytest.approx(np.std(values, ddof=1), abs=2e-3)


def test_the_order_of_importance() -> None:
    made = importance(at_hand(sites(1500)), Candidate(A), COLUMNS)
    assert [one.column for one in made] == ["both", "first", "second", "unused"]
    assert made[0].loss.low > 0
    unused = made[-1].loss
    # Its coefficient is 0: the scores do not change.
    assert (unused.value, unused.low, unused.high) == pytest.approx((0, 0, 0), abs=1e-12)
    by_loss = importance(at_hand(sites(1500)), Candidate(A), COLUMNS, metric="log_loss")
    assert by_loss[0].column == "both"
    assert by_loss[0].loss.low > 0


@pytest.mark.long
def test_the_interval_is_that_of_the_paired_bootstrap() -> None:
    found = sites(300, persons=100)
    (made,) = importance(at_hand(found), Candidate(A), {"first": [0]}, repeats=3)
    every, rng = stacked(found), np.random.default_rng(0)
    scores = []
    for r in range(3):
        each = []
        for site in found:
            order = Streams(r).at(Purpose.JUDGE, 0, 0).permutation(300)
            each.append(np.c_[site[TEST].x[order][:, :1], site[TEST].x[:, 1:]] @ A)
        scores.append(np.concatenate(each))
    draws = []
    for _ in range(400):
        at = resampled(every.group, 900, rng)
        permuted = np.mean([metrics.auroc(s[at], every.y[at]) for s in scores])
        draws.append(metrics.auroc((every.x @ A)[at], every.y[at]) - permuted)
    assert (made.loss.high - made.loss.low) / 3.92 == pytest.approx(np.std(draws), rel=0.12)


def test_many_columns_take_several_questions() -> None:
    asked = []
    honest = at_hand(sites(60))

    def ask(query, part=TEST, **arguments):  # type: ignore[no-untyped-def]
        asked.append(len(arguments["cases"]))
        return honest(query, part, **arguments)

    made = importance(ask, Candidate(A), {f"c{i}": [i % 3] for i in range(10)}, repeats=5)
    assert len(made) == 10
    assert max(asked) <= 25
    same = importance(honest, Candidate(A), {"c0": [0]}, repeats=5)
    assert next(one for one in made if one.column == "c0").loss == same[0].loss


def test_numbers_have_an_importance() -> None:
    found = sites(300, kind="numbers")
    made = importance(at_hand(found), Candidate(A), COLUMNS, kind=NUMBERS, metric="rmse")
    assert made[0].column in ("first", "both")
    assert made[0].loss.low > 0


def test_wrong_requests() -> None:
    found = sites(60)
    with pytest.raises(NestfedError, match="'f1' is not defined"):
        importance(at_hand(found), Candidate(A), COLUMNS, metric="f1")
    with pytest.raises(NestfedError, match="repeats must be at least 1"):
        importance(at_hand(found), Candidate(A), COLUMNS, repeats=0)
    fixed = [{TEST: replace(site[TEST], scores_of=None)} for site in found]
    with pytest.raises(NestfedError, match="cannot score its rows by permuted inputs"):
        importance(at_hand(fixed), Candidate(A), COLUMNS)


def table() -> tuple[np.ndarray, tuple[Column, ...]]:
    rng = np.random.default_rng(0)
    age = rng.normal(60, 10, 200)
    age[:20] = np.nan
    return np.c_[age, np.eye(2)[rng.integers(0, 2, 200)]], (Column("age"), Column("sex", ("F", "M")))


def test_inputs_belong_to_columns() -> None:
    x, schema = table()
    encoding = encode({"a": (x, schema)})
    assert encoding.inputs == ("age", "sex=F", "sex=M", "age is missing")
    assert inputs_by_column(encoding) == {"age": [0, 3], "sex": [1, 2]}


def test_coefficients_give_the_change_of_the_log_odds() -> None:
    """One year more adds the coefficient per unit; the intercept is the log-odds of mean inputs."""
    x, schema = table()
    encoding, calibration = encode({"a": (x, schema)}), Calibration(0.5, -0.25)
    w = np.array([0.8, -0.1, 0.3, 0.6, -1.2])

    def log_odds(rows: np.ndarray) -> np.ndarray:
        return calibration.log_odds(encoding(rows, schema).double().numpy() @ w[:-1] + w[-1])

    found = coefficients(w, encoding, calibration)
    here = np.array([[60.0, 1.0, 0.0]])
    assert log_odds(here + np.array([1, 0, 0])) - log_odds(here) == pytest.approx(found.per_unit["age"], rel=1e-4)
    change = found.per_unit["sex=M"] - found.per_unit["sex=F"]
    assert log_odds(here + np.array([0, -1, 1])) - log_odds(here) == pytest.approx(change, rel=1e-4)
    assert found.odds_ratio["age"] == pytest.approx(np.exp(found.per_unit["age"]))
    assert log_odds(encoding.mean[None]) == pytest.approx(found.per_unit["(intercept)"], abs=1e-6)
    gap = log_odds(np.array([[np.nan, *encoding.mean[1:]]]))
    assert gap - found.per_unit["(intercept)"] == pytest.approx(found.per_unit["age is missing"], rel=1e-4)
    with pytest.raises(NestfedError, match="A linear score of 4 inputs has 5 parameters, not 4"):
        coefficients(w[:-1], encoding)
