"""Survival measures over sites equal scikit-survival on the pooled rows, and counts pair by pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from nestfed.core import NestfedError
from nestfed.queries import Ask, Rows, at_hand
from nestfed.queries.cox import cox
from nestfed.queries.survival import baselines, brier, concordance, concordance_within, life_tables
from nestfed.queries.times import agree, cells_of

FOUND: dict[str, Any] = json.loads(Path(__file__).with_name("reference.json").read_text())
X, SITE, TRUTH = np.array(FOUND["x"]), np.array(FOUND["site"]), FOUND["plain"]
Y = np.column_stack([TRUTH["time"], TRUTH["event"]]).astype(float)
TIES = np.column_stack([FOUND["ties"]["time"], FOUND["ties"]["event"]]).astype(float)
COEF = np.array(TRUTH["breslow"]["coef"])


def asked(y: np.ndarray = Y, site: np.ndarray = SITE) -> Ask:
    return at_hand([{"training": Rows(X[site == n], y[site == n])} for n in np.unique(site)])


def test_kaplan_meier() -> None:
    times, survival, (low, high) = (np.array(v) for v in TRUTH["km"])
    table, by_site = life_tables(asked(), agree(asked()))
    assert_allclose(table.at(times, table.survival), survival, rtol=1e-12)
    inside = (survival < 1) & (survival > 0)
    for limit, truth in zip(table.interval(), (low, high)):
        assert_allclose(table.at(times, limit)[inside], truth[inside], rtol=1e-9)
    assert by_site.keys() <= set(range(6))
    for n in by_site:  # a site's own curve is that of its own rows
        mine = at_hand([{"training": Rows(X[n == SITE], Y[n == SITE])}])
        alone, _ = life_tables(mine, agree(asked()))
        assert_allclose(by_site[n].survival, alone.survival)


def test_baseline_hazard() -> None:
    times, cumulative = (np.array(v) for v in TRUTH["baseline"])
    fit = cox(asked(), ["a", "b", "c"], ties="breslow")
    common, own = baselines(asked(), fit.coef, agree(asked()))
    assert_allclose(common(times), cumulative, rtol=1e-9)
    assert common(np.array([0.0])) == 0
    assert 2 in own
    assert (own[2].cumulative == 0).all()  # the site without events


def pairs(h: np.ndarray, y: np.ndarray, weight: Any = None) -> np.ndarray:
    """Comparable, concordant and tied pairs, one by one."""
    found = np.zeros(3)
    for i, (t, event) in enumerate(y):
        for j, (s, other) in enumerate(y):
            if event and (s > t or (s == t and not other)):
                found += (1 if weight is None else weight[i]) * np.array([1, h[i] > h[j], h[i] == h[j]])
    return found


@pytest.mark.parametrize("y", [Y, TIES], ids=["plain", "ties"])
def test_c_index(y: np.ndarray) -> None:
    h, ask = X @ COEF, asked(y)
    total, concordant, tied = pairs(h, y)
    truth = (concordant + tied / 2) / total
    found = concordance(ask, COEF, agree(ask))
    assert found.low - 1e-12 <= truth <= found.high + 1e-12
    assert found.error < 5e-3
    exact = concordance(ask, COEF, agree(ask), bins=200_000)
    assert_allclose(exact.value, truth, rtol=1e-12)
    if y is Y:
        assert_allclose(truth, TRUTH["c"], rtol=1e-12)
    inside = sum(pairs(h[n == SITE], y[n == SITE]) for n in range(6))
    assert_allclose(concordance_within(ask, COEF), (inside[1] + inside[2] / 2) / inside[0], rtol=1e-12)


def test_unos_c_index_and_brier_score() -> None:
    ask = asked()
    censoring, _ = life_tables(ask, agree(ask, every=True))
    found = concordance(ask, COEF, agree(ask), censoring=censoring, until=1.0, bins=200_000)
    assert_allclose(found.value, TRUTH["uno"], rtol=1e-10)
    base, _ = baselines(ask, COEF, agree(ask))
    assert_allclose(brier(ask, COEF, base, censoring, TRUTH["horizons"]), TRUTH["brier"], rtol=1e-9)


def test_brier_score_with_ties_between_events_and_censorings() -> None:
    """Graf's weights: an event at t counts by 1/G(t−), G from censorings, events first."""
    ask, times = asked(TIES), np.array([2.0, 5.0])
    censoring, _ = life_tables(ask, agree(ask, every=True))
    base, _ = baselines(ask, COEF, agree(ask))
    time, event = TIES.T

    def uncensored(t: float, strictly: bool) -> float:
        g = 1.0
        for s in np.unique(time):
            if s < t or (s == t and not strictly):
                at_risk = (time > s).sum() + ((time == s) & (event == 0)).sum()
                g *= 1 - ((time == s) & (event == 0)).sum() / max(at_risk, 1)
        return g

    truth = []
    for t in times:
        survival = np.exp(-base(np.array([t])) * np.exp(X @ COEF))
        total = 0.0
        for i in range(len(X)):
            if event[i] and time[i] <= t:
                total += survival[i] ** 2 / uncensored(time[i], True)
            elif time[i] > t:
                total += (1 - survival[i]) ** 2 / uncensored(t, False)
        truth.append(total / len(X))
    assert_allclose(brier(ask, COEF, base, censoring, times), truth, rtol=1e-10)


def test_large_replies_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = concordance(asked(), COEF, agree(asked()))
    monkeypatch.setattr("nestfed.queries.survival.CHUNK", 5 * 2 * 1024)
    assert concordance(asked(), COEF, agree(asked())) == whole


def test_cells() -> None:
    assert cells_of(np.array([0.5, 1.0, 1.5, 9.0]), np.array([1.0, 2.0])).tolist() == [-1, 0, 0, 1]
    with pytest.raises(NestfedError, match="cells must be at least 1"):
        agree(asked(), cells=0)


def test_too_many_distinct_times_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestfed.queries.times.MOST_TIMES", 10)
    grid = agree(asked())
    assert not grid.exact
    assert grid.notes
    exact, joined = cox(asked(), ["a", "b", "c"], grid=grid), TRUTH["efron"]
    assert_allclose(exact.coef, joined["coef"], atol=np.max(joined["model"]))
