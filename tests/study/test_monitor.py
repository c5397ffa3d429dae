"""Monitoring: intervals by closed forms and simulation, verdicts on rows that did and did not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from numpy.testing import assert_allclose
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from nestfed.cli.model import monitor_command
from nestfed.core import NestfedError
from nestfed.data.encoding import Sums
from nestfed.metrics import Estimate, ScoreHistogram
from nestfed.study.model import StudyModel
from nestfed.study.monitor import Measure, difference_of_shares, drift, monitor, stability
from nestfed.study.performance import auroc, calibration, judged
from nestfed.study.reference import Reference, ScoreShares, summary_scores
from nestfed.study.rows import features
from nestfed.study.sites import gather
from tests.study.released import released, sites, table

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


@pytest.fixture(scope="module")
def model() -> StudyModel:
    """A model with the statistics of its own training rows and of the scores of others."""
    made = released("auc")
    reference = Reference.of([Sums.of(one.x, one.schema) for one in gather(sites("died"))], made.encoding.schema)
    scores = made.scores(made.inputs(table(rows=2000, seed=77)))
    made = replace(made, reference=reference.with_scores(ScoreShares.of_scores(scores)))
    return replace(made, provenance=replace(made.provenance, metrics={"auroc": Estimate(0.72, 0.69, 0.75)}))


def measured(model: StudyModel, frame: pd.DataFrame) -> dict[tuple[str, str], Measure]:
    values = features(frame, model.encoding)
    return {(m.column, m.kind): m for m in drift(model, values, model.scores(model.inputs(frame)))}


def test_the_reference_is_that_of_the_pooled_rows(model: StudyModel) -> None:
    pooled = pd.concat([x for x, _ in sites("died").values()])
    assert model.reference is not None
    assert model.reference.rows == len(pooled)
    known = dict(zip(model.encoding.features, model.reference.known))
    assert known["lab"] == pooled["lab"].notna().sum()
    assert known["age"] == len(pooled)
    same = measured(model, pooled)
    for (column, kind), one in same.items():
        if kind in ("mean", "missing", "categories"):
            assert abs(one.shift.value) < 1e-6, (column, kind)
        if kind == "spread":
            assert abs(one.shift.value) < 1e-3


def test_rows_that_did_not_change(model: StudyModel) -> None:
    """With probability 95 % nothing is called changed; with many rows everything is called the same."""
    alarms = [any(m.verdict == "changed" for m in measured(model, table(300, 100 + i)).values()) for i in range(40)]
    assert sum(alarms) <= 4
    found = measured(model, table(20_000, 99))
    assert {m.verdict for key, m in found.items() if key != ("lab", "spread")} == {"same"}
    few = measured(model, table(12, 98))
    assert {"changed"}.isdisjoint(m.verdict for m in few.values())
    assert few["lab", "mean"].verdict == few["ward", "categories"].verdict == "unclear"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f: f.assign(age=f["age"] + 9), ("age", "mean")),
        (lambda f: f.assign(age=60 + 2.2 * (f["age"] - 60)), ("age", "spread")),
        (lambda f: f.assign(lab=f["lab"].where(f.index % 2 == 0)), ("lab", "missing")),
        (lambda f: f.assign(ward=np.where(f.index % 3 == 0, "attic", f["ward"])), ("ward", "categories")),
        (lambda f: f.assign(ward="south", age=f["age"] + 12), ("model", "scores")),
    ],
)
def test_what_changed_is_found(change: object, what: tuple[str, str], model: StudyModel) -> None:
    found = measured(model, change(table(400, 55)))  # type: ignore[operator]
    assert found[what].verdict == "changed"
    untouched = {"age", "lab", "ward"} - {what[0]} if what[0] != "model" else {"lab"}
    assert all(m.verdict != "changed" for (column, _), m in found.items() if column in untouched)


def test_the_shift_of_a_mean_in_numbers(model: StudyModel) -> None:
    frame = table(400, 55)
    one = measured(model, frame)["age", "mean"]
    x = frame["age"].to_numpy(np.float32).astype(float)
    place = model.encoding.features.index("age")
    mean, deviation = model.encoding.mean[place], model.encoding.deviation[place]
    z = norm.isf(0.05 / 8 / 2)  # 3 measures of each of 2 numbers, one of the categories, one of the scores
    error = z * np.sqrt(1 / 720 + x.var(ddof=1) / deviation**2 / 400)
    assert_allclose(one.shift.value, (x.mean() - mean) / deviation)
    assert_allclose([one.shift.low, one.shift.high], one.shift.value + np.array([-error, error]))


def test_verdicts_follow_from_the_interval() -> None:
    def verdict(low: float, high: float) -> str:
        return Measure("c", "mean", "", "", Estimate((low + high) / 2, low, high), 0.25).verdict

    assert [verdict(0.3, 0.4), verdict(-0.4, -0.3), verdict(-0.1, 0.2)] == ["changed", "changed", "same"]
    assert [verdict(0.2, 0.3), verdict(-0.5, 0.5), verdict(-0.3, 0.1)] == ["unclear"] * 3


def test_the_stability_index() -> None:
    """By hand; 0 without a difference; its interval covers the true index, and shrinks with the rows."""
    p, q = np.array([30.5, 70.5]) / 101, np.array([50.5, 50.5]) / 101
    by_hand = float(((p - q) * np.log(p / q)).sum())
    assert_allclose(stability(np.array([50, 50]), np.array([30, 70])).value, by_hand)
    assert stability(np.array([50, 50]), np.array([50, 50])).value == 0
    rng = np.random.default_rng(0)
    old, new = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.35, 0.35])
    truth = float(((new - old) * np.log(new / old)).sum())
    for shares, wanted in ((new, truth), (old, 0.0)):
        covered = [
            found.low <= wanted <= found.high
            for found in (stability(rng.multinomial(800, old), rng.multinomial(300, shares)) for _ in range(300))
        ]
        assert 0.92 <= np.mean(covered) <= 1
    widths = [stability(old * n, new * n) for n in (100, 10_000)]
    assert widths[1].high - widths[1].low < 0.2 * (widths[0].high - widths[0].low)
    assert stability(np.array([10, 0]), np.array([10, 0])) == Estimate(0.0, 0.0, 0.0)


def test_the_difference_of_shares() -> None:
    """Newcombe's interval (1998, table II, method 10): 56/70 − 48/80 is 0.2000, 0.0524 to 0.3339; 0 of 10 has one too."""
    found = difference_of_shares(48, 80, 56, 70)
    assert_allclose([found.value, found.low, found.high], [0.2, 0.0524, 0.3339], atol=5e-5)
    none = difference_of_shares(0, 10, 0, 10)
    assert_allclose([none.value, none.low, none.high], [0, -0.2775, 0.2775], atol=5e-5)


def test_bins_of_scores() -> None:
    rng = np.random.default_rng(0)
    scores = np.r_[rng.normal(size=990), np.zeros(200)]
    for min_cell in (0, 40, 700):
        bins = ScoreShares.of_scores(scores, min_cell)
        assert bins.counts.sum() == len(scores)
        assert (bins.counts >= max(min_cell, 10)).all()
        assert (bins.count(scores) == bins.counts).all()
        coarse = ScoreShares.of_histogram(ScoreHistogram.of(scores, scores > 0), min_cell)
        assert coarse.counts.sum() == len(scores)
        assert (coarse.counts >= max(min_cell, 10)).all()
        assert (coarse.count(scores) == coarse.counts).all()
    assert len(ScoreShares.of_scores(scores).counts) >= 8
    assert len(ScoreShares.of_scores(scores[:15]).counts) == 1
    assert_allclose(summary_scores(np.array([[1.0, 4.0, 3.0], [0.0, 0.0, 0.0]])), [1, 0])


# ---------------------------------------------------------------------------------------------------------
# With labels


def test_the_interval_of_the_auroc_is_delongs() -> None:
    """Against the definition: variances of each row's share of won comparisons."""
    rng = np.random.default_rng(0)
    y = np.arange(80) % 3 == 0
    s = np.round(rng.normal(size=80) + y, 1)  # with ties
    won = (s[y][:, None] > s[~y]) + 0.5 * (s[y][:, None] == s[~y])
    variance = won.mean(1).var(ddof=1) / y.sum() + won.mean(0).var(ddof=1) / (~y).sum()
    a = won.mean()
    half = 1.959964 * np.sqrt(variance) / (a * (1 - a))
    found = auroc(s, y.astype(int))
    assert_allclose(found.value, roc_auc_score(y, s))
    assert_allclose(found.low, 1 / (1 + np.exp(-(np.log(a / (1 - a)) - half))), rtol=1e-6)
    assert_allclose(found.high, 1 / (1 + np.exp(-(np.log(a / (1 - a)) + half))), rtol=1e-6)
    assert auroc(np.arange(4.0), np.array([0, 0, 1, 1])).value == 1


def test_calibration_is_that_of_a_logistic_regression() -> None:
    rng = np.random.default_rng(1)
    logit = rng.normal(size=600)
    y = (rng.random(600) < 1 / (1 + np.exp(-(0.5 * logit - 0.7)))).astype(int)
    found = calibration(logit, y)
    other = LogisticRegression(C=np.inf, tol=1e-10).fit(logit[:, None], y)
    assert_allclose(found["slope"].value, other.coef_[0, 0], rtol=1e-4)
    assert found["slope"].low < 0.5 < found["slope"].high < 1
    shift = found["level"].value
    assert_allclose((1 / (1 + np.exp(-(logit + shift)))).sum(), y.sum())  # as many events as predicted


def test_performance_against_the_card(model: StudyModel) -> None:
    frame = table(1500, 31)
    scores = model.scores(model.inputs(frame))
    y = frame["died"].to_numpy()
    same = {str(row[0]): row[3] for row in judged(model, scores, y).rows}
    assert same["AUROC"] == "no evidence of a change"
    flipped = {str(row[0]): row[3] for row in judged(model, -scores, y).rows}
    assert (flipped["AUROC"], flipped["calibration slope"]) == ("worse", "off")
    more = np.where(np.random.default_rng(0).random(1500) < 0.3, 1, y)
    assert {str(row[0]): row[3] for row in judged(model, scores, more).rows}[
        "calibration in the large (log-odds)"
    ] == "off"
    with pytest.raises(NestfedError, match="needs rows of both"):
        judged(model, scores, np.zeros(1500, int))
    unknown = replace(model, provenance=replace(model.provenance, metrics={}))
    assert judged(unknown, scores, y).rows[0][3] == "no value to compare with"


def test_the_command(model: StudyModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    frame = table(400, 55)
    frame.assign(age=frame["age"] + 9, ward="attic").to_csv(tmp_path / "new.csv", index=False)
    app = typer.Typer()
    app.command()(monitor_command)
    words = [str(tmp_path / "m"), str(tmp_path / "new.csv"), "--labels", "died"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "Changed: age (mean), ward (categories)" in result.output
    assert "'attic' (400 rows)" in result.output
    assert "calibration slope" in result.output
    with pytest.raises(NestfedError, match="has no column 'dead'; did you mean died"):
        monitor(tmp_path / "m", tmp_path / "new.csv", "dead")
    replace(model, reference=None).save(tmp_path / "bare")
    with pytest.raises(NestfedError, match="has no statistics of its training rows"):
        monitor(tmp_path / "bare", tmp_path / "new.csv")
