"""The metrics against their definitions, and the histogram against the rows it was made of."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from nestfed.core import METRICS, Metric, NestfedError
from nestfed.metrics import (
    Estimate,
    ScoreHistogram,
    ScoreTotals,
    accuracy,
    auroc,
    average_precision,
    confidence_interval,
    find,
    judge,
    log_loss,
    mae,
    mse,
    partial_auroc,
    perplexity,
    r2,
)

settings.register_profile("patient", deadline=None)  # a busy machine must not fail a test
settings.load_profile("patient")

ROUNDING = 1e-12


def auroc_by_definition(scores: list[float], labels: list[int]) -> float:
    """The probability that a positive is above a negative, pair by pair."""
    pos = [s for s, y in zip(scores, labels) if y == 1]
    neg = [s for s, y in zip(scores, labels) if y != 1]
    return sum((p > n) + (p == n) / 2 for p, n in product(pos, neg)) / (len(pos) * len(neg))


def ap_by_definition(scores: list[float], labels: list[int]) -> float:
    """The mean over positives of the precision among all examples scored at least as high."""
    precisions = []
    for s, y in zip(scores, labels):
        if y == 1:
            above = [label for other, label in zip(scores, labels) if other >= s]
            precisions.append(above.count(1) / len(above))
    return statistics.fmean(precisions)


# Few distinct values make ties; extreme ones reach the outer bins; the odd long list makes imbalance.
some_scores = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-2, 2),
    st.floats(allow_nan=False, allow_infinity=True),
    st.just(0.25),
)
examples = st.lists(st.tuples(some_scores, st.integers(0, 1)), min_size=2, max_size=60).filter(
    lambda rows: len({y for _, y in rows}) == 2
)
grids = st.sampled_from([(2, None), (3, None), (16, None), (4096, None), (2, (0.0, 1.0)), (50, (-1.0, 1.0))])


def columns(rows: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [s for s, _ in rows], [y for _, y in rows]


# --------------------------------------------------------------------------------------- rows in one place


rates = st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0])


@given(examples, rates)
def test_partial_auroc_is_that_of_scikit_learn_before_its_rescaling(rows: list[tuple[float, int]], rho: float) -> None:
    scores, labels = columns(rows)
    value = partial_auroc(scores, labels, rho)
    finite = np.unique(scores, return_inverse=True)[1]  # it takes no infinite scores
    standardised = roc_auc_score(labels, finite, max_fpr=rho)
    expected = standardised if rho == 1 else 2 * (standardised - 0.5) * (1 - rho / 2) + rho / 2
    assert value == pytest.approx(expected, abs=1e-9)
    if rho == 1:
        assert value == pytest.approx(auroc(scores, labels), abs=ROUNDING)
    assert find(f"pauroc@{rho:g}")(scores, labels) == value
    assert judge(scores, labels, metric=f"val_pauroc@{rho:g}")[f"pauroc@{rho:g}"] == value


@given(examples, grids, rates)
def test_partial_auroc_of_counts_lies_between_its_bounds(rows: list[tuple[float, int]], grid: Any, rho: float) -> None:
    scores, labels = columns(rows)
    bins, range = grid
    pooled = sum(ScoreHistogram.of([s], [y], bins, range) for s, y in rows)
    estimate = pooled.partial_auroc(rho)  # type: ignore[union-attr]
    assert estimate.low - ROUNDING <= partial_auroc(scores, labels, rho) <= estimate.high + ROUNDING
    assert estimate.low - ROUNDING <= estimate.value <= estimate.high + ROUNDING
    if rho == 1:
        assert estimate.value == pytest.approx(pooled.auroc().value, abs=ROUNDING)  # type: ignore[union-attr]
    totals = ScoreTotals.of(scores, labels)
    assert totals.metrics("pauroc@0.1")["pauroc@0.1"] == pytest.approx(totals.histogram.partial_auroc(0.1).value)  # type: ignore[union-attr]


def test_partial_auroc_by_hand() -> None:
    """The mean over positives of the wins against the two highest of four negatives: 4 beats both, 2 beats neither."""
    scores, labels = [4.0, 3.0, 2.5, 2.0, 1.0, 0.0], [1, 0, 0, 1, 0, 0]
    assert partial_auroc(scores, labels, 0.5) == 0.5
    assert partial_auroc(scores, labels, 0.75) == pytest.approx((1 + 1 / 3) / 2)
    assert math.isnan(partial_auroc(scores, [1] * 6, 0.5))
    assert ScoreHistogram.of(scores, [0] * 6).partial_auroc(0.5).error != 0
    for wrong in ("pauroc", "pauroc@", "pauroc@0", "pauroc@1.2", "pauroc@much"):
        with pytest.raises(NestfedError, match=r"as in pauroc@0\.3; got "):
            find(wrong)


@given(examples)
def test_ranking_metrics_equal_their_definitions(rows: list[tuple[float, int]]) -> None:
    scores, labels = columns(rows)
    assert auroc(scores, labels) == pytest.approx(auroc_by_definition(scores, labels), abs=ROUNDING)
    assert average_precision(scores, labels) == pytest.approx(ap_by_definition(scores, labels), abs=ROUNDING)


def test_labels_may_be_signs_or_booleans() -> None:
    scores = [0.1, 0.4, 0.35, 0.8]
    expected = 0.75  # of the four pairs only (0.35, 0.4) is wrong
    for labels in ([0, 0, 1, 1], [-1, -1, 1, 1], [False, False, True, True]):
        assert auroc(scores, labels) == expected


def test_what_does_not_exist_is_nan() -> None:
    assert math.isnan(auroc([0.1, 0.2], [1, 1]))
    assert math.isnan(auroc([0.1, 0.2], [0, 0]))
    assert math.isnan(auroc([], []))
    assert math.isnan(average_precision([0.1, 0.2], [0, 0]))
    assert average_precision([0.1, 0.2], [1, 1]) == 1.0
    nan = float("nan")
    for metric in (auroc, average_precision, accuracy, log_loss):
        assert math.isnan(metric([nan, 0.2], [0, 1])), metric
    assert math.isnan(accuracy([[nan, 1.0]], [1]))


def test_accuracy_and_log_loss_by_hand() -> None:
    assert accuracy([2.0, -1.0, 3.0, 0.5], [1, 0, 0, 1]) == 0.75
    assert accuracy([[1.0, 2.0, 0.0], [5.0, 2.0, 0.0]], [1, 2]) == 0.5
    assert log_loss([0.0, 0.0], [0, 1]) == pytest.approx(math.log(2))
    assert log_loss([math.log(3)], [1]) == pytest.approx(math.log(4 / 3))  # probability 3/4
    assert log_loss([[0.0, math.log(2), math.log(5)]], [1]) == pytest.approx(math.log(4))  # probability 2/8
    assert log_loss([1000.0], [0]) == pytest.approx(1000.0)  # no clipping


def test_perplexity() -> None:
    assert perplexity(np.zeros((3, 50)), [0, 7, 49]) == pytest.approx(50)
    assert perplexity([1e6], [0]) == math.inf


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: auroc([0.1], [0, 1]), "shapes"),
        (lambda: auroc([[0.1], [0.2]], [0, 1]), "shapes"),
        (lambda: auroc([0.1, 0.2], [0, 2]), "0/1"),
        (lambda: accuracy([[0.1, 0.2]], [2]), "from 0 to 1"),
        (lambda: accuracy([[0.1, 0.2]], [0, 1]), "labels"),
        (lambda: log_loss([[0.1, 0.2]], [0.5]), "whole numbers"),
        (lambda: ScoreHistogram.of([0.1], [1], bins=1), "bins"),
        (lambda: ScoreHistogram.of([0.1], [1], range=(1.0, 0.0)), "low < high"),
        (lambda: ScoreHistogram.of([0.1], [1], 4) + ScoreHistogram.of([0.1], [1], 8), "same bins"),
        (lambda: ScoreHistogram.of([0.1], [1], 4) + ScoreHistogram.of([0.1], [1], 4, (0, 1)), "same bins"),
        (lambda: confidence_interval([]), "no values"),
        (lambda: confidence_interval([1.0], level=95), "level"),
    ],
)
def test_refusals(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NestfedError, match=words):
        call()


# ------------------------------------------------------------------------------------------- the histogram


@settings(max_examples=300)
@given(examples, grids)
def test_truth_is_within_the_stated_bounds(
    rows: list[tuple[float, int]], grid: tuple[int, tuple[float, float] | None]
) -> None:
    scores, labels = columns(rows)
    histogram = ScoreHistogram.of(scores, labels, *grid)
    for estimate, truth in (
        (histogram.auroc(), auroc_by_definition(scores, labels)),
        (histogram.average_precision(), ap_by_definition(scores, labels)),
    ):
        assert estimate.low - ROUNDING <= truth <= estimate.high + ROUNDING
        assert abs(estimate.value - truth) <= estimate.error + ROUNDING
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1 + ROUNDING


@pytest.mark.parametrize("positives", [1, 3, 50])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_bounds_against_scikit_learn_under_extreme_imbalance(positives: int, scale: float) -> None:
    rng = np.random.default_rng(positives)
    labels = np.arange(20_000) < positives
    scores = scale * (rng.normal(size=20_000) + labels)
    histogram = ScoreHistogram.of(scores, labels)
    area, precision = histogram.auroc(), histogram.average_precision()
    assert abs(area.value - roc_auc_score(labels, scores)) <= area.error + ROUNDING
    assert abs(precision.value - average_precision_score(labels, scores)) <= precision.error + ROUNDING
    assert area.error < 0.01  # and the bound is worth stating over four decades of scale


def in_bins(rows: list[tuple[int, float, int]]) -> tuple[list[float], list[int]]:
    """Scores on the grid 0..4 from (bin, place inside the bin, label)."""
    return [b + place for b, place, _ in rows], [y for _, _, y in rows]


def test_bounds_are_attained() -> None:
    # Two bins with both classes. Worst: negatives above distinct positives. Best: tied positives on top.
    worst = [(0, 0.9, 0), (0, 0.2, 1), (0, 0.1, 1), (2, 0.9, 0), (2, 0.8, 0), (2, 0.3, 1), (2, 0.2, 1)]
    best = [(0, 0.1, 0), (0, 0.9, 1), (0, 0.9, 1), (2, 0.1, 0), (2, 0.2, 0), (2, 0.8, 1), (2, 0.8, 1)]
    grid = (4, (0.0, 4.0))
    low, high = (ScoreHistogram.of(*in_bins(rows), *grid) for rows in (worst, best))
    assert low.average_precision() == high.average_precision()
    assert low.average_precision().low == pytest.approx(ap_by_definition(*in_bins(worst)))
    assert low.average_precision().high == pytest.approx(ap_by_definition(*in_bins(best)))
    assert low.auroc().low == pytest.approx(auroc_by_definition(*in_bins(worst)))
    assert low.auroc().high == pytest.approx(auroc_by_definition(*in_bins(best)))


@given(st.integers(1, 20), st.integers(1, 20), st.floats(-1e6, 1e6))
def test_constant_scores(positives: int, negatives: int, score: float) -> None:
    labels = [1] * positives + [0] * negatives
    histogram = ScoreHistogram.of([score] * len(labels), labels)
    assert histogram.auroc() == Estimate(0.5, 0.0, 1.0)
    assert histogram.average_precision().value == pytest.approx(positives / len(labels))
    assert histogram.average_precision().high == 1.0


@given(examples)
def test_finer_grids_have_tighter_bounds(rows: list[tuple[float, int]]) -> None:
    # Grids of 2^k bins are nested, so here the bound cannot grow at all.
    estimates = [ScoreHistogram.of(*columns(rows), bins=2**k) for k in (2, 5, 8, 11)]
    for coarse, fine in pairwise(estimates):
        assert fine.auroc().error <= coarse.auroc().error + ROUNDING
        assert fine.average_precision().high <= coarse.average_precision().high + ROUNDING
        assert fine.average_precision().low >= coarse.average_precision().low - ROUNDING


def test_bound_falls_like_one_over_bins() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(50_000) < 0.2
    scores = rng.normal(size=50_000) + labels
    errors = [ScoreHistogram.of(scores, labels, bins=b).auroc().error for b in (256, 1024, 4096)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    assert errors[2] < 5e-4


@given(st.lists(examples, min_size=1, max_size=5))
def test_merging_is_pooling(clients: list[list[tuple[float, int]]]) -> None:
    merged = sum(ScoreHistogram.of(*columns(rows), bins=64) for rows in clients)
    pooled = ScoreHistogram.of(*columns([row for rows in clients for row in rows]), bins=64)
    assert isinstance(merged, ScoreHistogram)
    np.testing.assert_array_equal(merged.positives, pooled.positives)
    np.testing.assert_array_equal(merged.negatives, pooled.negatives)
    assert merged.auroc() == pooled.auroc()


def test_pooled_auroc_is_not_the_average_of_local_ones() -> None:
    # Each client ranks its own patients perfectly, but their scores are shifted against each other.
    clients = [([0.0, 1.0], [0, 1]), ([10.0, 11.0], [0, 1]), ([20.0, 21.0], [0, 1])]
    assert statistics.fmean(auroc(*c) for c in clients) == 1.0
    pooled = sum(ScoreHistogram.of(*c) for c in clients).auroc()  # type: ignore[union-attr]
    assert pooled.value == pytest.approx(6 / 9)  # three of the nine pairs are lost
    assert pooled.error == 0
    # And a client of one class, which has no AUROC of its own, still counts.
    alone = ScoreHistogram.of([30.0], [0])
    assert math.isnan(alone.auroc().value)
    assert (sum(ScoreHistogram.of(*c) for c in clients) + alone).auroc().value == pytest.approx(6 / 12)


def test_empty_and_diverged_clients() -> None:
    whole = ScoreHistogram.of([0.0, 1.0], [0, 1])
    assert (whole + ScoreHistogram.of([], [])).auroc().value == 1.0
    diverged = whole + ScoreHistogram.of([float("nan")], [1])
    assert math.isnan(diverged.auroc().value)
    assert math.isnan(diverged.average_precision().error)
    assert math.isnan(ScoreHistogram.of([0.0], [0]).average_precision().value)


@given(examples)
def test_curves_enclose_the_estimates(rows: list[tuple[float, int]]) -> None:
    histogram = ScoreHistogram.of(*columns(rows), bins=32)
    false, true = histogram.roc_curve()
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(histogram.auroc().value)
    recall, precision = histogram.pr_curve()
    assert recall[-1] == 1
    assert (np.diff(recall) >= 0).all()
    area = float(np.sum(np.diff(recall, prepend=0) * precision))
    assert area == pytest.approx(histogram.average_precision().value)


def test_order_survives_rounding_at_the_edges() -> None:
    # Neighbouring floats around every edge must fall into non-decreasing bins, each on its side of the edge.
    bins = 512
    squashed = 2 * np.arange(1, bins) / bins - 1
    edges: NDArray[np.float64] = squashed / (1 - np.abs(squashed))
    for shift, expected in ((-np.inf, np.arange(bins - 1)), (np.inf, np.arange(1, bins))):
        scores = np.nextafter(edges, shift)
        histogram = ScoreHistogram.of(scores, np.ones(bins - 1, dtype=int), bins=bins)
        np.testing.assert_array_equal(np.repeat(np.arange(bins), histogram.positives), expected)


# ------------------------------------------------------------------------------------------------ intervals


def test_confidence_interval_from_the_tables() -> None:
    # Student's t for 4 degrees of freedom at 95 % is 2.776; the standard error of 1..5 is sqrt(2.5/5).
    few = confidence_interval([1, 2, 3, 4, 5])
    assert few.value == 3
    assert few.error == pytest.approx(2.776 * math.sqrt(0.5), abs=1e-3)
    many = confidence_interval([0.0, 1.0] * 5000, level=0.99)
    assert many.error == pytest.approx(2.576 * 0.5 / 100, rel=1e-3)
    assert confidence_interval([2.0]) == Estimate(2.0, -math.inf, math.inf)


def test_confidence_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = [abs((e := confidence_interval(rng.normal(size=4), 0.8)).value) <= e.error for _ in range(2000)]
    assert statistics.fmean(hits) == pytest.approx(0.8, abs=0.03)  # the normal interval would reach 0.71


def test_estimate_reads_well() -> None:
    assert str(Estimate(0.91234, 0.912, 0.9125)) == "0.9123 ± 0.00034"


# --- Direction ---


def test_a_metric_knows_which_of_two_values_is_better() -> None:
    for metric, good, bad in ((find("auroc"), 0.9, 0.6), (find("log_loss"), 0.2, 0.7)):
        assert metric.better(good, bad)
        assert not metric.better(bad, good)
        assert not metric.better(good, good)
        assert metric.best([bad, good, bad]) == good
        assert metric.worst([good, bad, good]) == bad
        assert metric.signed(good) > metric.signed(bad)
        assert metric.reached(good, bad)
        assert metric.reached(good, good)
        assert not metric.reached(bad, good)
    assert (find("auroc").direction, find("log_loss").direction) == ("Highest", "Lowest")


@pytest.mark.parametrize("metric", [Metric("up", higher=True), Metric("down", higher=False)])
@pytest.mark.parametrize("nothing", [math.nan, None])
def test_a_value_that_does_not_exist_is_the_worst(metric: Metric, nothing: float | None) -> None:
    for value in (-1e300, 0.0, 1e300):
        assert metric.better(value, nothing)
        assert not metric.better(nothing, value)
        assert not metric.reached(nothing, value)
    assert not metric.better(nothing, nothing)
    assert not metric.reached(0.0, math.nan)
    assert metric.best([math.nan, 1.0, math.nan]) == 1
    assert math.isnan(metric.worst([1.0, math.nan]))


def test_found_by_the_names_in_a_record() -> None:
    lower = ["log_loss", "perplexity", "mse", "rmse", "mae", "loss", "drift", "loss_5", "auroc_error", "val_ap_error"]
    lower += ["gradient_norm", "estimator_error", "inner_error", "accuracy_ci95"]  # of the papers
    higher = ["auroc", "ap", "accuracy", "log_likelihood", "r2", "r2_1", "val_r2_1", "val_auroc"]
    assert [find(name).higher for name in lower] == [False] * len(lower)
    assert [find(name).higher for name in higher] == [True] * len(higher)
    assert find("val_r2_1").name == "val_r2_1"
    own = Metric("my_score", higher=False)
    assert find(own) is own


def test_a_name_without_direction_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NestfedError, match=r'METRICS.add\("my_score", Metric\("my_score", higher=True\)\)'):
        find("my_score")
    with pytest.raises(NestfedError, match="did you mean log_loss"):
        find("logloss")
    for guessed in ("my_loss", "my_error", "my_norm", ""):  # nothing follows from how a name ends
        with pytest.raises(NestfedError):
            find(guessed)
    monkeypatch.setattr(METRICS, "_things", {**METRICS._things})
    METRICS.add("my_score", Metric("my_score", higher=False))
    assert find("val_my_score").direction == "Lowest"


def test_regression_metrics() -> None:
    p, y = [1.0, 2.0, 4.0], [1.0, 3.0, 2.0]
    assert (mse(p, y), mae(p, y)) == pytest.approx((5 / 3, 1))
    assert find("rmse")(p, y) == pytest.approx(math.sqrt(5 / 3))
    with pytest.raises(NestfedError, match="drift is not a function of scores"):
        find("drift")(p, y)
    assert r2(p, y) == pytest.approx(1 - 5 / 2)
    assert r2(p, y, baseline=0.0) == pytest.approx(1 - 5 / 14)
    assert r2(y, y) == 1
    assert math.isnan(r2([1.0, 2.0], [3.0, 3.0]))
    assert all(math.isnan(f([], [])) for f in (mse, mae, r2))
    with pytest.raises(NestfedError, match="one prediction per target"):
        mse([1.0], [1.0, 2.0])


def test_judge_computes_what_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    y = [0, 1, 1]
    assert judge([0.1, 0.2, -3.0], y) == {"auroc": 0.5, "ap": pytest.approx(5 / 6)}
    assert list(judge([0.1, 0.2, -3.0], y, log_odds=True)) == ["auroc", "ap", "accuracy", "log_loss"]
    assert list(judge(np.zeros((3, 4)), [0, 3, 2])) == ["accuracy", "log_loss"]
    monkeypatch.setattr(METRICS, "_things", {**METRICS._things})
    METRICS.add("mean_score", Metric("mean_score", True, lambda s, _: float(np.mean(s)), "ranking"))
    assert judge([1.0, 2.0, 3.0], y)["mean_score"] == 2


def test_totals_of_clients_add_up_to_the_metrics_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    s, y = rng.normal(size=40), rng.integers(0, 2, 40)
    one, other = (ScoreTotals.of(s[part], y[part], log_odds=True) for part in (slice(7), slice(7, None)))
    found, exact = (one + other).metrics(), judge(s, y, log_odds=True)
    for name, value in exact.items():
        assert found[name] == pytest.approx(value, abs=found.get(f"{name}_error", 0) + ROUNDING)
    nobody = ScoreTotals.of([], np.zeros(0, int), log_odds=True)
    assert (one + nobody).metrics() == one.metrics()
    silent = ScoreTotals.of(s, y)
    assert math.isnan((one + silent).metrics()["log_loss"]), "a client that tells no losses makes the mean unknown"
    assert all(math.isnan(v) for v in nobody.metrics().values())


def test_a_metric_of_a_plugin_that_fails_is_one_sentence() -> None:
    """Its function gets arrays of numpy, which the sentence says."""
    for function, sentence in (
        (lambda s, y: s.softmax(0), "AttributeError: 'numpy.ndarray' object has no attribute 'softmax'"),
        (lambda s, y: None, "TypeError: float"),
    ):
        with pytest.raises(NestfedError, match=rf"The metric mine failed: {sentence}.*gets two arrays of numpy"):
            Metric("mine", True, function)(np.zeros(2), np.ones(2))
