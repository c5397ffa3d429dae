"""The rule that chooses from a grid: noise as by hand, the smaller step within it, ends and what is beyond them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nestfed.core import Metric, NestfedError
from nestfed.experiment.choice import Option, best, beyond, choose, end, noise, rank, resampled
from nestfed.metrics import find
from nestfed.study.lr_find import StepSearch

AP, LOSS = find("ap"), find("log_loss")


def test_the_smaller_of_two_equal_steps_is_chosen_whatever_the_last_bits_say() -> None:
    for first, second in ((0.95, math.nextafter(0.95, 1)), (math.nextafter(0.95, 1), 0.95)):
        assert choose(AP, [Option(first, (30.0,)), Option(second, (100.0,)), Option(0.9, (10.0,))]) == 0
        assert StepSearch("ap", (10.0, 30.0, 100.0), (0.9, first, second)).best == 30.0
        assert rank(AP, [Option(second, (100.0,)), Option(first, (30.0,)), Option(0.9, (10.0,))]) == [1, 0, 2]


def test_a_difference_beyond_noise_decides() -> None:
    assert choose(AP, [Option(0.90, (1.0,)), Option(0.95, (10.0,))]) == 1
    assert choose(LOSS, [Option(0.30, (1.0,)), Option(0.20, (10.0,)), Option(math.inf, (100.0,))]) == 1
    assert choose(LOSS, [Option(0.2001, (1.0,)), Option(0.20, (10.0,)), Option(None, (100.0,))]) == 0
    with pytest.raises(NestfedError, match="all of them diverged"):
        choose(AP, [Option(None, (1.0,)), Option(math.nan, (2.0,))])


def test_without_steps_the_best_value_is_chosen_and_the_first_of_equal_ones() -> None:
    assert choose(AP, [Option(0.9), Option(0.9005)]) == 1
    assert choose(AP, [Option(0.9), Option(math.nextafter(0.9, 1))]) == 0
    # of the smallest step the best other setting
    options = [Option(0.9500, (3.0,)), Option(0.9495, (1.0,)), Option(0.9498, (1.0,)), Option(0.9, (0.1,))]
    assert choose(AP, options) == 2


def test_the_noise_is_the_paired_standard_error_on_the_rows() -> None:
    """Of accuracy it has a closed form: the deviation of the rows' differences over √n; the bootstrap agrees."""
    rng = np.random.default_rng(1)
    n = 2000
    labels = rng.integers(0, 2, n)
    right = [rng.random(n) < 0.93]
    right.append(np.where(rng.random(n) < 0.98, right[0], ~right[0]))
    scores = [np.where(r, 1.0, -1.0) * np.where(labels == 1, 1, -1) for r in right]
    accuracy = find("accuracy")
    one, other = (Option(r.mean(), (1.0,), resampled(accuracy, s, labels)) for r, s in zip(right, scores))
    exact = (right[0].astype(float) - right[1]).std(ddof=1) / math.sqrt(n)
    assert one.value is not None
    assert 1e-3 * one.value < exact < 1e-2 * one.value
    assert noise(one, other) == pytest.approx(exact, rel=0.25)
    unpaired = math.sqrt(sum(r.mean() * (1 - r.mean()) / n for r in right))
    assert noise(one, other) < 0.7 * unpaired
    assert resampled(accuracy, scores[0], labels) == list(one.resamples), "always the same resamples"
    assert resampled(Metric("regret", higher=False), scores[0], labels) == []


def test_the_noise_of_seeds_and_its_limits() -> None:
    a, b = Option(0.5, seeds=(0.501, 0.499, 0.5)), Option(0.495, seeds=(0.498, 0.492, 0.495))
    assert noise(a, b) == pytest.approx(np.std([0.003, 0.007, 0.005], ddof=1) / math.sqrt(3))
    assert noise(a, Option(0.495)) == pytest.approx(0.0005), "0.1 % of the best value if nothing is known"
    wild = Option(0.4, resamples=(0.1, 0.9, 0.4))
    assert noise(Option(0.5, resamples=(0.9, 0.1, 0.5)), wild) == pytest.approx(0.005), "at most 1 % of it"
    assert noise(Option(0.0), Option(0.1)) == 0


def test_ends_and_what_is_beyond_them() -> None:
    assert [end(v, [0.1, 1.0, 10.0]) for v in (0.1, 1.0, 10.0)] == ["smallest", None, "largest"]
    assert end(1.0, [1.0, 1.0]) is None
    assert beyond(10.0, [0.1, 1.0, 10.0]) == 100.0
    assert beyond(0.3, [0.3, 1.0, 3.0]) == pytest.approx(0.09)
    assert beyond(1.0, [0.1, 1.0, 10.0]) is None
    assert beyond(0.0, [0.0, 1.0]) is None
    assert best(AP, [Option(0.9, (2.0,)), Option(0.9, (1.0,))]) == 1
    assert StepSearch("ap", (0.1, 1.0), (0.5, 0.9)).end == "largest"
