"""Discrete-time hazards: labels by hand, and the optimum of the person-interval table by exact logistic regression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from nestfed import FedAvg, simulate
from nestfed.core import NestfedError
from nestfed.data.clients import Examples
from nestfed.problems.hazards import Hazards, interval_labels, survival
from nestfed.queries import Rows, at_hand
from nestfed.queries.newton import regression
from nestfed.testing import check_problem

GAP = np.nan


def test_labels() -> None:
    labels = interval_labels([1, 2, 2, 3.5, 4, 9, 9, 0.5], [1, 1, 0, 0, 0, 1, 0, 0], ends=[2, 4, 6])
    truth = [
        [1, GAP, GAP], [1, GAP, GAP], [0, GAP, GAP], [0, GAP, GAP], [0, 0, GAP], [0, 0, 0], [0, 0, 0], [GAP, GAP, GAP],
    ]  # fmt: skip
    assert_allclose(labels.numpy(), truth)


def test_survival() -> None:
    hazards = torch.tensor([[0.1, 0.5, 0.2]], dtype=torch.float64)
    assert_allclose(survival(torch.logit(hazards)).numpy(), [[0.9, 0.45, 0.36]])


class Proportional(nn.Module):
    """An intercept per interval and one slope for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.intercepts = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.slope)[:, None] + self.intercepts


def study() -> tuple[Tensor, Tensor, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    time = rng.exponential(3 * np.exp(-x[:, 0]))
    return (
        torch.from_numpy(x),
        interval_labels(time, rng.random(90) < 0.7, ends=[1, 2, 4]),
        np.split(np.arange(90), [15, 40]),
    )


def test_gradients() -> None:
    x, labels, parts = study()
    check_problem(Hazards(Proportional()), Examples((x.float(), labels), parts, batch=8))


def test_fedavg_finds_the_optimum_of_the_person_interval_table() -> None:
    """With one local step, all rows and sites of equal size: gradient descent on the pooled likelihood."""
    x, labels, _ = study()
    rows, intervals = np.nonzero(~np.isnan(labels.numpy()))
    table = np.c_[x.numpy()[rows], np.eye(3)[intervals][:, 1:]]
    exact = regression(
        at_hand([{"training": Rows(table, labels.numpy()[rows, intervals].astype(int))}]), "logistic", list("abcd")
    ).coef
    truth = np.r_[exact[1:3], exact[0], exact[0] + exact[3:]]
    three = [np.arange(k, 90, 3) for k in range(3)]
    for parts in ([np.arange(90)], three):
        clients = Examples((x.float(), labels), parts, batch=len(parts[0]))
        found = simulate(Hazards(Proportional()), FedAvg(0.5), clients, rounds=800, q=1, seed=0)
        assert_allclose(found.x.numpy(), truth, atol=1e-5)


def test_errors_say_what_would_be_right() -> None:
    with pytest.raises(NestfedError, match="must be positive and increase"):
        interval_labels([1.0], [1], ends=[2, 2])
    with pytest.raises(NestfedError, match="one known time"):
        interval_labels([np.nan], [1], ends=[2])
    x, labels, parts = study()
    with pytest.raises(NestfedError, match="one logit per row and interval"):
        simulate(Hazards(nn.Linear(2, 2)), FedAvg(0.1), Examples((x.float(), labels), parts, batch=8), rounds=1, q=1)
