"""With min_cell = 10 nothing that leaves a site describes 1 to 9 rows: counts, sums, and differences of neighbouring cells.

The columns are 0/1, so that at coefficients 0 every sum is a count that can be read off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from nestfed.core import NestfedError
from nestfed.queries import QUERIES, Arrays, Query, Rows, at_hand
from nestfed.queries.cox import cox
from nestfed.queries.newton import regression
from nestfed.queries.survival import concordance, life_tables
from nestfed.queries.times import agree

LEAST = 10


def table(seed: int, rows: int = 400) -> Rows:
    """A site with rare values, rare pairs of values, and few events early."""
    rng = np.random.default_rng(seed)
    shares = rng.choice([0.01, 0.02, 0.05, 0.2, 0.5], 6)
    x = (rng.random((rows, 6)) < shares).astype(float)
    x = np.c_[x, rng.normal(size=rows)]
    time = np.ceil(40 * rng.weibull(1.5, rows)) / 4
    y = np.c_[time, rng.random(rows) < rng.choice([0.01, 0.1, 0.6])]
    return Rows(x, y.astype(float))


def fine(counts: Any) -> bool:
    """Whether no number is, up to rounding, from 1 to 9."""
    values = np.abs(np.asarray(counts, float))
    return bool(((values < 0.5) | (values > LEAST - 0.5)).all())


@pytest.mark.parametrize("seed", range(12))
def test_risk_sets(seed: int) -> None:
    rows = table(seed)
    starts = (
        np.quantile(rows.y[rows.y[:, 1] == 1, 0], np.arange(1, 8) / 8) if rows.y[:, 1].sum() > 8 else np.arange(7.0)
    )
    starts = np.unique(np.concatenate([[0.0], starts]))
    zero, ones = np.zeros(7), np.ones(len(starts))
    risk = QUERIES["cox-risk"](rows, LEAST, starts=starts, coef=zero)
    moments = QUERIES["cox-moments"](rows, LEAST, starts=starts, coef=zero, risk=ones, events=0 * ones)
    life = QUERIES["life-table"](rows, LEAST, starts=starts)
    for counts in (risk["events"], risk["others"], life["events"], life["others"], risk["risk_events"]):
        assert fine(counts)
    atoms = np.append(risk["risk"], 0.0)
    assert fine(atoms[:-1] - atoms[1:])
    assert fine(atoms[:-1] - atoms[1:] - risk["risk_events"])
    binary = slice(0, 6)
    assert_column_sums(moments["first_events"][:, binary], risk["events"])
    first = np.concatenate([moments["first"][:, binary], np.zeros((1, 6))])
    assert_column_sums(first[:-1] - first[1:] - moments["first_events"][:, binary], risk["others"])


def assert_column_sums(sums: np.ndarray, counts: np.ndarray) -> None:
    """A sum of 0/1 values counts one value, and the rest of the cell the other."""
    assert fine(sums)
    assert fine(counts[:, None] - sums)


def test_histograms_are_rounded() -> None:
    """Counts below 10 are not only hidden: the difference to a total describes no small cell either."""
    rows = table(1)
    sent = QUERIES["event-histogram"](rows, LEAST, starts=np.arange(12.0))["events"]
    true = QUERIES["event-histogram"](rows, 0, starts=np.arange(12.0))["events"]
    assert (true % LEAST).any()
    assert (sent == true // LEAST * LEAST).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", ["logistic", "linear"])
def test_regression_sums(seed: int, family: str) -> None:
    rows = table(seed)
    y = rows.y[:, 1].astype(int)
    reply = QUERIES["regression-sums"](Rows(rows.x, y), LEAST, family=family, coef=np.zeros((1, 8)))
    used = int(reply["used"])
    assert fine(used)
    if family == "logistic":
        assert fine(QUERIES["regression-facts"](Rows(rows.x, y), LEAST, classes=2)["classes"])
        if not used:
            assert not reply["gradient"].any()
            assert not reply["hessian"].any()
            return
    pairs = reply["hessian"][1:7, 1:7] * (4 if family == "logistic" else 1)
    single = np.diag(pairs)
    for cells in (pairs, single[:, None] - pairs, used - single[:, None] - single + pairs):
        assert fine(cells)
    if family == "logistic":
        ones = used / 2 - reply["gradient"][0]  # the sum of ½ − y
        with_value = single / 2 - reply["gradient"][1:7]
        for cells in (with_value, single - with_value, ones - with_value, used - ones - single + with_value):
            assert fine(cells)


def test_every_count_of_a_whole_study() -> None:
    seen: list[tuple[str, str, np.ndarray]] = []
    plain = at_hand([{"training": with_marks(steady(n), n)} for n in range(3)], LEAST)

    def ask(query: Query, part: str = "training", **arguments: Any) -> Mapping[int, Arrays]:
        replies = plain(query, part=part, **arguments)
        seen.extend(
            (query.name, k, reply[k])
            for reply in replies.values()
            for k, f in query.declared.items()
            if f.kind == "count"
        )
        return replies

    names = ["a", "b", "rare", "common"]
    cox(ask, names, baseline="stratified")
    grid = agree(ask)
    assert grid.protected
    cox(ask, names, grid=grid)
    life_tables(ask, grid)
    assert {name for name, _, _ in seen} >= {"survival-facts", "cox-stratified", "event-histogram", "survival-cells"}
    for name, field, value in seen:
        assert fine(value), (name, field, value)
    assert all(not len(r["times"]) for r in plain(QUERIES["event-times"], every=True, most=1000).values())


def steady(n: int, rows: int = 1500) -> Rows:
    """A large site with common values only."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(rows, 2))
    time = rng.exponential(10 * np.exp(-x @ [0.5, -0.3]))
    censored = rng.exponential(30, rows)
    return Rows(x, np.c_[np.minimum(time, censored), time < censored].astype(float))


def with_marks(rows: Rows, n: int) -> Rows:
    """Add a rare and a common 0/1 column."""
    marks = np.random.default_rng(n).random((len(rows), 2)) < [0.01, 0.5]
    return Rows(np.c_[rows.x, marks], rows.y)


def test_what_is_lost_with_large_sites() -> None:
    sites = [{"training": steady(n)} for n in range(4)]
    exact = cox(at_hand(sites), ["a", "b"])
    coarse = cox(at_hand(sites, LEAST), ["a", "b"])
    own, own_exact = (cox(at_hand(sites, m), ["a", "b"], baseline="stratified") for m in (LEAST, 0))
    assert_allclose(own.coef, own_exact.coef, rtol=1e-12)  # nothing is lost
    assert_allclose(coarse.coef, exact.coef, atol=exact.standard_errors().max())
    assert "cells of time" in coarse.notes[0]


def test_a_study_that_cannot_work_says_so_before_the_first_step() -> None:
    asked: list[str] = []

    def recorded(sites: Any) -> Any:
        ask = at_hand(sites, LEAST)

        def inner(query: Query, part: str = "training", **arguments: Any) -> Mapping[int, Arrays]:
            asked.append(query.name)
            return ask(query, part=part, **arguments)

        return inner

    few = [{"training": Rows(np.ones((50, 2)) * np.arange(2), np.c_[np.arange(50.0), np.arange(50) < 5].astype(float))}]
    with pytest.raises(NestfedError, match="No site may describe its events under its min_cell"):
        cox(recorded(few), ["a", "b"])
    small = [{"training": Rows(steady(n, 60).x, steady(n, 60).y)} for n in range(5)]
    with pytest.raises(NestfedError, match="use the stratified model"):
        cox(recorded(small), ["a", "b"])
    assert not {"cox-risk", "cox-moments", "cox-stratified"} & set(asked)
    one_class = [{"training": Rows(steady(n).x, (np.arange(1500) < 5).astype(int))} for n in range(2)]
    with pytest.raises(NestfedError, match="No site may send sums under its min_cell"):
        regression(recorded(one_class), "logistic", ["a", "b"])
    assert "regression-sums" not in asked


def test_sites_that_contribute_nothing_are_named() -> None:
    sites = [{"training": Rows(s.x, s.y[:, 1].astype(int))} for s in map(steady, range(3))]
    rare = Rows(sites[0]["training"].x, (np.arange(1500) < 5).astype(int))
    found = regression(at_hand([*sites, {"training": rare}], LEAST), "logistic", ["a", "b"])
    assert found.left_out == (3,)
    assert "1 of 4 sites, with 1,500 of 6,000 rows, contribute nothing" in found.notes[0]
    assert_allclose(found.coef, regression(at_hand(sites), "logistic", ["a", "b"]).coef, rtol=1e-12)


def test_pairs_across_sites_need_counts_that_min_cell_forbids() -> None:
    sites = at_hand([{"training": steady(n)} for n in range(2)], LEAST)
    with pytest.raises(NestfedError, match="use concordance_within"):
        concordance(sites, np.zeros(2), agree(sites))


def test_every_field_says_what_it_is() -> None:
    for name in QUERIES:
        query = QUERIES[name]
        assert query.name == name
        assert query.purpose
        assert all(len(f.meaning) > 15 for f in query.fields.values())
