"""Exact Cox regression equals the pooled fit: scikit-survival, statsmodels, and the partial likelihood written row by row.

Some sites have no event, one or two; one column is constant within a site, another within all sites but one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from nestfed.core import NestfedError
from nestfed.queries import QUERIES, Question, Rows, at_hand, pooled
from nestfed.queries.cox import _Common, cox, cox_path
from nestfed.queries.newton import regression
from nestfed.queries.slots import misfit
from nestfed.queries.solve import Sums
from nestfed.queries.survival import baselines, brier, concordance, concordance_within, life_tables
from nestfed.queries.times import agree
from tests.queries.likelihood import minus_log_likelihood

FOUND: dict[str, Any] = json.loads(Path(__file__).with_name("reference.json").read_text())
X, SITE = np.array(FOUND["x"]), np.array(FOUND["site"])
NAMES = ("a", "b", "c")
KINDS = [(kind, ties) for kind in ("ties", "plain") for ties in ("efron", "breslow")]


def target(kind: str) -> np.ndarray:
    return np.column_stack([FOUND[kind]["time"], FOUND[kind]["event"]]).astype(float)


def sites(y: np.ndarray, site: np.ndarray = SITE, x: np.ndarray = X, group: Any = None) -> list[dict[str, Rows]]:
    return [
        {"training": Rows(x[site == n], y[site == n], None if group is None else group[site == n])}
        for n in np.unique(site)
    ]


def fit(y: np.ndarray, site: np.ndarray = SITE, x: np.ndarray = X, **options: Any) -> Any:
    names = NAMES[: x.shape[1]] + tuple(f"more{i}" for i in range(x.shape[1] - 3))
    return cox(at_hand(sites(y, site, x)), names, **options)


def slope(f: Any, x: np.ndarray, h: float = 1e-5) -> np.ndarray:
    return np.array([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(len(x))])


@pytest.mark.parametrize(("kind", "ties"), KINDS)
def test_scikit_survival_and_statsmodels(kind: str, ties: Any) -> None:
    found, truth = fit(target(kind), ties=ties), FOUND[kind][ties]
    assert_allclose(found.coef, truth["coef"], rtol=1e-9, atol=1e-10)
    assert_allclose(found.standard_errors(), truth["model"], rtol=1e-8)
    assert_allclose(found.log_likelihood, truth["llf"], rtol=1e-12)
    if (kind, ties) == (
        "ties",
        "breslow",
    ):  # statsmodels has no Efron here, and fails on rows censored before all events
        assert_allclose(found.standard_errors("robust"), truth["robust"], rtol=1e-8)
        assert_allclose(found.standard_errors("site"), truth["site"], rtol=1e-8)
    assert found.iterations <= 7
    assert found.sites == tuple(range(6))  # sites without events are at risk


@pytest.mark.parametrize(("kind", "ties"), KINDS)
def test_stratified(kind: str, ties: Any) -> None:
    found, truth = fit(target(kind), ties=ties, baseline="stratified"), FOUND[kind][ties]
    assert_allclose(found.coef, truth["stratified"], rtol=1e-7, atol=1e-8)
    assert_allclose(found.standard_errors(), truth["stratified_model"], rtol=1e-7)
    gradient = slope(lambda b: sum(minus_log_likelihood(b, X[n == SITE], target(kind)[n == SITE], ties) for n in range(6)),
                     found.coef)  # fmt: skip
    assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize(("kind", "ties"), KINDS)
def test_the_textbook_likelihood(kind: str, ties: Any) -> None:
    y, ridge = target(kind), 0.7
    found = fit(y, ties=ties, ridge=ridge)
    assert_allclose(found.log_likelihood, -minus_log_likelihood(found.coef, X, y, ties), rtol=1e-12)
    assert_allclose(slope(lambda b: minus_log_likelihood(b, X, y, ties), found.coef) + ridge * found.coef, 0, atol=1e-7)


def test_robust_errors_are_derivatives_by_the_rows_weights() -> None:
    """Row i's score residual is the derivative of the score by its weight (infinitesimal jackknife)."""
    y = target("ties")
    found = fit(y, ties="breslow")
    score = lambda w: slope(lambda b: minus_log_likelihood(b, X, y, "breslow", w), found.coef, 1e-4)  # noqa: E731
    each = slope(score, np.ones(len(X)), 1e-4)
    bread = found.covariance["model"]
    assert_allclose(found.covariance["robust"], bread @ each.T @ each @ bread, rtol=1e-4)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_stratified_robust_errors_add_up_over_sites(ties: Any) -> None:
    y = target("ties")
    own = fit(y, ties=ties, baseline="stratified", ridge=0.5)
    meat = np.zeros((3, 3))
    for n in (3, 4, 5):
        mine = Rows(X[n == SITE], y[n == SITE])
        reply = QUERIES["cox-stratified"](mine, coef=own.coef, ties=ties)
        common = _Common(at_hand([{"training": mine}]), agree(at_hand([{"training": mine}])), ties, 3)
        common(own.coef)
        assert_allclose(reply["outer"], common.outer(own.coef)[0], atol=1e-10)
    for n in range(6):
        meat += QUERIES["cox-stratified"](Rows(X[n == SITE], y[n == SITE]), coef=own.coef, ties=ties)["outer"]
    bread = own.covariance["model"]
    assert_allclose(own.covariance["robust"], bread @ meat @ bread, rtol=1e-10)


def test_efrons_score_residuals() -> None:
    """Efron's likelihood is the mean over orders of a tie: in each, its events leave the risk set by fractions (R's rule)."""
    y = target("ties")
    found = fit(y, ties="efron")
    each, (time, event), w = np.zeros_like(X), y.T, np.exp(X @ found.coef)
    for t in np.unique(time[event == 1]):
        tied = (time == t) & (event == 1)
        d = int(tied.sum())
        for place in range(d):
            part = np.where(time >= t, w, 0.0) * np.where(tied, 1 - place / d, 1.0)
            mean = part @ X / part.sum()
            each += (tied / d - part / part.sum())[:, None] * (X - mean)
    bread = found.covariance["model"]
    assert_allclose(each.sum(0), 0, atol=1e-10)
    assert_allclose(found.covariance["robust"], bread @ each.T @ each @ bread, rtol=1e-9)
    by_site = np.array([each[n == SITE].sum(0) for n in range(6)])
    assert_allclose(found.covariance["site"], bread @ by_site.T @ by_site @ bread, rtol=1e-8, atol=1e-12)
    person = np.arange(len(X)) // 2
    grouped = cox(at_hand(sites(y, 0 * SITE, group=person)), NAMES)
    pairs = np.add.reduceat(each, np.arange(0, len(X), 2))
    assert_allclose(grouped.covariance["robust"], bread @ pairs.T @ pairs @ bread, rtol=1e-9)


@pytest.mark.parametrize("parts", [1, 2, 9, 60])
@pytest.mark.parametrize(("kind", "ties"), KINDS)
def test_any_partition_gives_the_same_answer(kind: str, ties: Any, parts: int) -> None:
    site = np.random.default_rng(parts).integers(0, parts, len(X))
    one, other = fit(target(kind), ties=ties), fit(target(kind), site, ties=ties)
    assert_allclose(other.coef, one.coef, rtol=1e-10, atol=1e-10)
    for errors in ("model", "robust"):
        assert_allclose(other.standard_errors(errors), one.standard_errors(errors), rtol=1e-10)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_site_intercepts_are_dummies_of_the_pooled_table(ties: Any) -> None:
    y = target("ties")
    x = X[:, :2]  # the third column is constant within most sites
    some = np.isin(SITE, [n for n in range(6) if y[n == SITE, 1].any()])
    largest = max(range(6), key=lambda n: y[n == SITE, 1].sum())
    dummies = np.column_stack([n == SITE for n in range(6) if n != largest and y[n == SITE, 1].any()])
    own = fit(y, x=x, ties=ties, baseline="intercepts")
    pooled_fit = fit(y[some], 0 * SITE[some], np.c_[x, dummies][some], ties=ties)
    assert_allclose(own.coef, pooled_fit.coef[:2], atol=1e-9)
    assert_allclose(own.standard_errors(), pooled_fit.standard_errors()[:2], rtol=1e-8)
    assert_allclose(own.log_likelihood, pooled_fit.log_likelihood, rtol=1e-11)


def test_a_column_constant_at_every_site_is_known_to_the_common_baseline_only() -> None:
    x = np.c_[X[:, :2], SITE % 2]
    y = target("plain")
    assert np.isfinite(fit(y, x=x).standard_errors()).all()
    own = fit(y, x=x, baseline="stratified")
    assert np.isnan(own.standard_errors()).tolist() == [False, False, True]
    assert "c" in own.notes[0]


def test_fewer_cells() -> None:
    """Times that move down to cells: the fit of the pooled rows with these times."""
    y = target("plain")
    ask = at_hand(sites(y))
    grid = agree(ask, cells=12)
    assert len(grid.starts) == 12
    assert not grid.exact
    assert "joined to 12 cells" in grid.notes[0]
    place = np.searchsorted(grid.starts, y[:, 0], side="right") - 1
    moved = np.c_[np.where(place >= 0, grid.starts[place], -1), y[:, 1]]
    kept = place >= 0
    found = cox(ask, NAMES, grid=grid)
    assert_allclose(slope(lambda b: minus_log_likelihood(b, X[kept], moved[kept], "efron"), found.coef), 0, atol=1e-6)


@pytest.mark.parametrize("name", ["cox-stratified", "common"])
def test_finite_differences(name: str) -> None:
    y, coef, h = target("ties"), np.array([0.4, -0.3, 0.2]), 1e-5
    if name == "common":
        ask = at_hand(sites(y))
        sums = _Common(ask, agree(ask), "efron", 3)
        value, both = lambda b: sums(b).value, lambda b: sums(b)
    else:
        query = QUERIES[name]
        value = lambda b: float(query(Rows(X, y), coef=b, ties="efron")["loss"])  # noqa: E731
        both = lambda b: _sums(query(Rows(X, y), coef=b, ties="efron"))  # noqa: E731
    here = both(coef)
    assert_allclose(here.gradient, slope(value, coef, h), rtol=1e-6, atol=1e-6)
    assert_allclose(here.hessian, slope(lambda b: both(b).gradient, coef, h), rtol=1e-6, atol=1e-6)


def _sums(reply: Any) -> Any:
    total = pooled([reply])
    return Sums(float(total["loss"]), total["gradient"], total["hessian"])


def test_ridge_by_validation() -> None:
    rng = np.random.default_rng(3)
    x, noise = rng.normal(size=(120, 10)), rng.exponential(size=120)
    y = np.c_[np.ceil(5 * noise * np.exp(-x[:, 0])), rng.random(120) < 0.8].astype(float)
    parts = [
        {"training": Rows(x[i:80:4], y[i:80:4]), "validation": Rows(x[80 + i :: 4], y[80 + i :: 4])} for i in range(4)
    ]
    path = cox_path(at_hand(parts), [f"x{i}" for i in range(10)], ridges=(0.001, 0.1, 10.0))
    events = y[:80, 1].sum()
    for ridge, loss in zip(path.ridges, path.losses):
        coef = cox(at_hand(parts), [f"x{i}" for i in range(10)], ridge=ridge * events).coef
        assert_allclose(loss, minus_log_likelihood(coef, x[80:], y[80:], "efron") / y[80:, 1].sum(), rtol=1e-10)
    assert path.best in (0.001, 0.1, 10.0)


def test_a_single_covariate_that_separates() -> None:
    """All events have the higher value: the likelihood has no maximum."""
    y = np.c_[np.arange(1.0, 61.0), np.arange(60) < 20]
    x = np.where(y[:, 1:] == 1, 1.0, 0.0) * [[1.0]]
    with pytest.raises(NestfedError, match="grow without end"):
        cox(at_hand([{"training": Rows(x, y)}]), ["a"])


def test_a_site_that_stops_answering_ends_the_fit() -> None:
    """Sums over different rows must not be compared."""
    plain, seen = at_hand(sites(target("ties"))), []

    def ask(query: Any, part: str = "training", **arguments: Any) -> Any:
        seen.append(query.name)
        replies = dict(plain(query, part=part, **arguments))
        if seen.count("cox-risk") == 3:
            replies.pop(4)
        return replies

    with pytest.raises(NestfedError, match=r"Site 4 stopped answering \(cox-risk\)"):
        cox(ask, NAMES)


def test_errors_say_what_would_be_right() -> None:
    y = target("ties")
    with pytest.raises(NestfedError, match="No site has an event"):
        fit(y * [1, 0])
    with pytest.raises(NestfedError, match="two columns, time and event"):
        fit(y[:, 0])
    with pytest.raises(NestfedError, match="ties must be"):
        fit(y, ties="exact")
    with pytest.raises(NestfedError, match=r"events must be 0 \(censored\) or 1"):
        fit(y + 0.5)


def through_the_gate(plain: Any) -> Any:
    """Return a way to ask that packs questions as a deployment does, and checks replies as its gate does."""
    messages = pytest.importorskip("nestfed.deploy.flower.messages")

    def ask(query: Any, part: str = "training", **arguments: Any) -> Any:
        words, arrays = messages.questions_packed([Question(query, part, arguments)])
        (one,) = messages.questions_of(json.loads(json.dumps(words)), arrays)
        replies = plain(one.query, one.part, **one.arguments)
        for reply in replies.values():
            header = {k: (v.dtype.str, v.shape) for k, v in reply.items()}
            assert misfit(header, query.slots(**one.arguments)) == ""
            assert query.invalid(reply, most_rows=len(X), **one.arguments) == ""
        return replies

    return ask


@pytest.mark.parametrize("min_cell", [0, 2])
def test_every_question_can_be_sent_and_every_reply_passes_the_gate(min_cell: int) -> None:
    y = target("ties")
    site = SITE // 3
    for baseline in ("stratified", "common", "intercepts"):
        ask = at_hand(sites(y, site), min_cell)
        try:
            expected = cox(ask, NAMES, baseline=baseline, ridge=0.1)
        except NestfedError as error:
            with pytest.raises(NestfedError) as found:
                cox(through_the_gate(ask), NAMES, baseline=baseline, ridge=0.1)
            assert str(found.value) == str(error)  # noqa: PT017
        else:
            sent = cox(through_the_gate(ask), NAMES, baseline=baseline, ridge=0.1)
            assert_allclose(sent.coef, expected.coef, rtol=1e-13)
    ask = through_the_gate(at_hand(sites(y, site)))
    grid = agree(ask, every=True)
    censoring, _ = life_tables(ask, grid)
    base, _ = baselines(ask, np.ones(3), agree(ask, cells=5))
    assert 0 < concordance(ask, np.ones(3), grid).value < 1
    assert 0 < concordance_within(ask, np.ones(3)) < 1
    assert np.isfinite(brier(ask, np.ones(3), base, censoring, [2.0])).all()
    labels = [{"training": Rows(X[site == n], y[site == n, 1].astype(int))} for n in (0, 1)]
    for family in ("logistic", "linear"):
        for own in (False, True):
            assert regression(through_the_gate(at_hand(labels)), family, NAMES, own_intercepts=own).rows == len(X)
