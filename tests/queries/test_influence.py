"""Influences: derivatives of the metrics by the weights of rows, by scikit-learn's weighted metrics and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, r2_score, roc_auc_score

from nestfed import metrics
from nestfed.core import NestfedError
from nestfed.queries.influence import NUMBERS, applicable, influence, influences_of_sums, losses, of_sums
from nestfed.queries.scores import BINS, LOG_ODDS, LOGITS, RANKING

Weighted = Callable[[np.ndarray, np.ndarray, np.ndarray], float]
STEP = 1e-4


def data(seed: int, n: int = 60, bins: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and bins, with ties."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 3 == 0)
    return y, np.clip(rng.normal(y * 2 + bins / 2 - 1, 2).astype(int), 0, bins - 1)


def partial_area(rate: float) -> Weighted:
    """Return the partial AUROC of weighted rows, piece by piece of the interpolated ROC curve."""

    def area(y: np.ndarray, s: np.ndarray, w: np.ndarray) -> float:
        levels = np.unique(s)[::-1]
        tpr = np.cumsum([w[y & (s == v)].sum() for v in levels]) / w[y].sum()
        fpr = np.cumsum([w[~y & (s == v)].sum() for v in levels]) / w[~y].sum()
        fpr, tpr = np.r_[0, fpr], np.r_[0, tpr]
        total = 0.0
        for a, b, left, right in zip(fpr, fpr[1:], tpr, tpr[1:]):
            end = min(b, rate)
            if a < end:
                at_end = left + (right - left) * (end - a) / (b - a)
                total += (end - a) * (left + at_end) / 2
        return total / rate

    return area


TRUE: dict[str, Weighted] = {
    "auroc": lambda y, s, w: float(roc_auc_score(y, s, sample_weight=w)),
    "ap": lambda y, s, w: float(average_precision_score(y, s, sample_weight=w)),
    "pauroc@0.23": partial_area(0.23),
    "pauroc@1": lambda y, s, w: float(roc_auc_score(y, s, sample_weight=w)),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("metric", TRUE)
def test_influences_are_derivatives_by_the_weights(metric: str, seed: int) -> None:
    y, place = data(seed)
    counts = [np.bincount(place[mark], minlength=12).astype(float) for mark in (y, ~y)]
    found = influence(metric, *counts)
    ones = np.ones(len(y))
    assert found.value == pytest.approx(TRUE[metric](y, place, ones), abs=1e-12)
    each = found.of(place, y)
    assert each.sum() == pytest.approx(0, abs=1e-12)
    for i in range(0, len(y), 7):
        moved = [TRUE[metric](y, place, ones + d * (np.arange(len(y)) == i)) for d in (STEP, -STEP)]
        assert each[i] == pytest.approx((moved[0] - moved[1]) / (2 * STEP), abs=1e-7)


def test_values_are_those_of_rows() -> None:
    y, place = data(9, n=300)
    counts = [np.bincount(place[mark], minlength=12) for mark in (y, ~y)]
    for metric, rows in (
        ("auroc", metrics.auroc),
        ("ap", metrics.average_precision),
        ("pauroc@0.1", lambda s, y: metrics.partial_auroc(s, y, 0.1)),
    ):
        assert influence(metric, *counts).value == pytest.approx(rows(place, y), abs=1e-12)


def test_rows_beyond_the_counted_bins_have_an_influence() -> None:
    """With merged cells a row can lie above every counted bin; the precision there is that of the highest bin."""
    p, n = np.zeros(12), np.zeros(12)
    p[[3, 8]], n[[2, 5]] = 4, 6
    found = influence("ap", p, n)
    assert np.isfinite(found.positive).all()
    assert np.isfinite(found.negative).all()
    assert found.positive[11] == pytest.approx(found.positive[8])


@pytest.mark.parametrize("metric", ["auroc", "pauroc@0.1", "ap"])
def test_without_a_class_a_metric_is_unknown(metric: str) -> None:
    found = influence(metric, np.zeros(12), np.ones(12))
    assert np.isnan(found.value)
    assert not found.positive.any()
    assert not found.negative.any()


def weighted_means(kind: str, metric: str) -> Callable[[np.ndarray, np.ndarray, np.ndarray], float]:
    p = lambda s: 1 / (1 + np.exp(-s))  # noqa: E731
    return {
        (LOG_ODDS, "log_loss"): lambda s, y, w: float(log_loss(y, p(s), sample_weight=w)),
        (LOG_ODDS, "brier"): lambda s, y, w: float(brier_score_loss(y, p(s), sample_weight=w)),
        (LOGITS, "log_loss"): lambda s, y, w: float(
            log_loss(y, np.exp(s) / np.exp(s).sum(1, keepdims=True), sample_weight=w)
        ),
        (NUMBERS, "mse"): lambda s, y, w: float(np.average((s - y) ** 2, weights=w)),
        (NUMBERS, "rmse"): lambda s, y, w: float(np.sqrt(np.average((s - y) ** 2, weights=w))),
        (NUMBERS, "mae"): lambda s, y, w: float(np.average(np.abs(s - y), weights=w)),
        (NUMBERS, "r2"): lambda s, y, w: float(r2_score(y, s, sample_weight=w)),
    }[kind, metric]


@pytest.mark.parametrize(
    ("kind", "metric"),
    [(LOG_ODDS, "log_loss"), (LOG_ODDS, "brier"), (LOGITS, "log_loss")]
    + [(NUMBERS, metric) for metric in ("mse", "rmse", "mae", "r2")],
)
def test_influences_on_metrics_of_sums(kind: str, metric: str) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3 if kind == LOGITS else 2, 40)
    scores = rng.normal(size=(40, 3)) if kind == LOGITS else rng.normal(size=40)
    if kind == NUMBERS:
        y = 3 + scores + rng.normal(size=40)  # type: ignore[assignment]
    true, ones = weighted_means(kind, metric), np.ones(40)
    values = losses(scores, y, kind)
    assert of_sums(metric, kind, values.sum(1), 40) == pytest.approx(true(scores, y, ones), rel=1e-12)
    each = influences_of_sums(metric, kind, values.sum(1), 40, values)
    for i in range(0, 40, 5):
        moved = [true(scores, y, ones + d * (np.arange(40) == i)) for d in (STEP, -STEP)]
        assert each[i] == pytest.approx((moved[0] - moved[1]) / (2 * STEP), abs=1e-7)


def test_accuracy_counts_scores_from_0_as_positive() -> None:
    p, n = np.zeros(BINS), np.zeros(BINS)
    p[[BINS // 2, BINS // 2 - 1]], n[[BINS // 2, 3]] = [6, 2], [1, 7]
    found = influence("accuracy", p, n)
    assert found.value == 13 / 16
    assert p @ found.positive + n @ found.negative == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("metric", "kind"),
    [("log_loss", RANKING), ("auroc", LOGITS), ("accuracy", NUMBERS), ("pauroc@0.1", NUMBERS), ("f1", LOG_ODDS)],
)
def test_metrics_that_do_not_apply_are_rejected_by_name(metric: str, kind: str) -> None:
    with pytest.raises(NestfedError, match=f"The metric '{metric}' is not defined for {kind} scores; expected one of"):
        applicable(metric, kind)


def test_a_partial_area_needs_a_rate() -> None:
    with pytest.raises(NestfedError, match=r"as in pauroc@0\.3"):
        applicable("pauroc@2", LOG_ODDS)


def test_brier_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    s, y = rng.normal(size=50), rng.integers(0, 2, 50)
    assert metrics.brier(s, y) == pytest.approx(brier_score_loss(y, 1 / (1 + np.exp(-s))), rel=1e-12)
    assert np.isnan(metrics.brier([], []))
