"""Queries: their truth against pooled rows, the disclosure rule, and declarations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from nestfed.core import NestfedError
from nestfed.data.encoding import Column, encode, finish, merge
from nestfed.metrics import log_loss
from nestfed.queries import (
    CLASSES,
    QUERIES,
    ROWS,
    SCORES,
    SQUARES,
    TABLE,
    Field,
    Query,
    Question,
    Rows,
    TooFewError,
    answered,
    at_hand,
    pooled,
)
from nestfed.queries.base import from_text
from nestfed.queries.scores import LOG_ODDS, LOGITS, RANKING, judged
from nestfed.queries.slots import AtMost, Slot, misfit
from nestfed.queries.tables import sums_of

SCHEMA = (Column("age"), Column("ward", ("a", "b", "burns")))


def table(seed: int, rows: int = 200, rare: int = 3) -> Rows:
    generator = np.random.default_rng(seed)
    ward = generator.integers(0, 2, rows)
    ward[:rare] = 2
    age = generator.normal(60, 10, rows)
    age[generator.random(rows) < 0.2] = np.nan
    values = np.column_stack([age, np.eye(3)[ward]])
    return Rows(values, (age > 60).astype(int), table=values, schema=SCHEMA, classes=("no", "yes"))


def scored(seed: int, rows: int, kind: str = RANKING) -> Rows:
    generator = np.random.default_rng(seed)
    y = (generator.random(rows) < 0.3).astype(int)
    s = generator.normal(y * 1.5, 1.0)
    scores = np.column_stack([-s, s, 0 * s]) if kind == LOGITS else s
    return Rows(np.zeros((rows, 1)), y, scores=lambda x: x[0] * scores)


ONE = np.ones(1)


# ---------------------------------------------------------------------------------------------------------
# Truth


def test_the_encoding_from_queries_is_that_of_all_rows() -> None:
    sites = [{"training": table(n)} for n in range(4)]
    ask = at_hand(sites)
    sums = {f"Site {n}": sums_of(reply) for n, reply in ask(TABLE).items()}
    made = merge(sums)
    squares = ask(SQUARES, schema=[[c.name, c.categories and list(c.categories)] for c in made.schema], mean=made.mean)
    made = finish(made, [reply["squares"] for reply in squares.values()], sums)
    rows = np.concatenate([site["training"].table for site in sites])
    true = encode({"all": (rows, SCHEMA)})
    np.testing.assert_allclose(made.mean, true.mean, rtol=1e-12)
    np.testing.assert_allclose(made.deviation, true.deviation, rtol=1e-12)
    np.testing.assert_allclose(made.mean, np.nanmean(rows, 0), rtol=1e-12)
    np.testing.assert_allclose(made.deviation, np.nanstd(rows, 0), rtol=1e-12)


def test_metrics_from_counts_are_those_of_all_rows() -> None:
    sites = [{"test": scored(n, 300, LOG_ODDS)} for n in range(3)]
    replies = list(at_hand(sites)(SCORES, "test", kind=LOG_ODDS, x=ONE).values())
    found = judged(replies, LOG_ODDS)
    y = np.concatenate([site["test"].y for site in sites])
    s = np.concatenate([site["test"].scores(ONE) for site in sites])
    assert found["auroc"] == pytest.approx(roc_auc_score(y, s), abs=found["auroc_error"])
    assert found["ap"] == pytest.approx(average_precision_score(y, s), abs=found["ap_error"])
    assert found["auroc_error"] < 0.002
    assert found["accuracy"] == pytest.approx(((s > 0) == y).mean(), rel=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(s, y), rel=1e-12)
    assert found["worst_auroc"] == pytest.approx(min(judged([r], LOG_ODDS)["auroc"] for r in replies))


def test_metrics_of_several_classes() -> None:
    (reply,) = at_hand([{"test": scored(0, 300, LOGITS)}])(SCORES, "test", kind=LOGITS, x=ONE).values()
    assert set(judged([reply], LOGITS)) == {"accuracy", "log_loss", "worst_accuracy", "worst_log_loss"}


def test_scores_that_are_not_numbers_make_metrics_unknown() -> None:
    (reply,) = at_hand([{"test": scored(0, 50, LOG_ODDS)}])(SCORES, "test", kind=LOG_ODDS, x=ONE * np.nan).values()
    assert all(np.isnan(v) for v in judged([reply], LOG_ODDS).values())


# ---------------------------------------------------------------------------------------------------------
# Small cells


@given(st.integers(0, 10_000), st.integers(60, 600), st.integers(2, 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_cell_below_the_limit_and_honest_bounds(seed: int, rows: int, min_cell: int, log_odds: bool) -> None:
    """Cells merge until they are large enough; the metrics' stated error still covers the true value."""
    kind = LOG_ODDS if log_odds else RANKING
    mine = scored(seed, rows, kind)
    try:
        reply = SCORES(mine, min_cell, kind=kind, x=ONE)
    except TooFewError:
        assert min(mine.y.sum(), rows - mine.y.sum()) < min_cell
        return
    for name in ("positives", "negatives"):
        assert (reply[name] >= min_cell).all()
    assert int(reply["positives"].sum()) == mine.y.sum()
    if log_odds:
        correct = float(reply["sums"][0])
        assert correct in (0, rows) or min_cell <= correct <= rows - min_cell
    assert SCORES.invalid(reply, rows, kind=kind) == ""
    found = judged([reply], kind, "pauroc@0.3")
    truth = judged([SCORES(mine, 0, kind=kind, x=ONE)], kind, "pauroc@0.3")
    assert found["auroc"] == pytest.approx(roc_auc_score(mine.y, mine.scores(ONE)), abs=found["auroc_error"] + 1e-9)
    for name in ("ap", "pauroc@0.3"):
        assert found[name] == pytest.approx(truth[name], abs=found[f"{name}_error"] + truth[f"{name}_error"] + 1e-9)


def test_the_loss_at_ten() -> None:
    """At ten sites with 1,000 rows each, merging bins moves the pooled AUROC by less than 0.01."""
    sites = [{"test": scored(n, 1000)} for n in range(10)]
    plain, careful = (
        judged(list(at_hand(sites, k)(SCORES, "test", kind=RANKING, x=ONE).values()), RANKING)["auroc"] for k in (0, 10)
    )
    assert careful == pytest.approx(plain, abs=0.01)
    assert careful != plain


@given(st.integers(0, 10_000), st.integers(12, 80), st.integers(0, 12), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_rare_categories_and_gaps_stay(seed: int, rows: int, rare: int, min_cell: int) -> None:
    mine = table(seed, rows, min(rare, rows))
    reply = TABLE(mine, min_cell)
    n, first = int(reply[ROWS]), 0
    schema = from_text(reply["schema"])
    for k in (reply["known"], *(reply["total"][1:],)):
        assert not (((k > 0) & (k < min_cell)) | ((k < n) & (k > n - min_cell))).any()
    assert [name for name, _ in schema] == ["age", "ward"]
    for _, categories in schema:
        if categories is not None:
            assert all(reply["total"][first + i] >= min_cell for i in range(len(categories)))
        first += 1 if categories is None else len(categories)
    assert TABLE.invalid(reply, n) == ""


def test_names_of_small_classes_stay_unless_the_study_states_them() -> None:
    y = np.array([0] * 50 + [1] * 40 + [2] * 4)
    for stated in (False, True):
        rows = Rows(np.zeros((94, 2)), y, classes=("flu", "cold", "plague"), stated=stated)
        reply = CLASSES(rows, 10)
        names = from_text(reply["names"])["names"]
        assert names == (["flu", "cold", "plague"] if stated else ["flu", "cold"])
        assert reply["counts"].tolist() == ([50, 40, 0] if stated else [50, 40])


def test_a_count_that_leaves_few_rows_out_is_hidden_too() -> None:
    rows = Rows(np.zeros((100, 1)), np.array([0] * 96 + [1] * 4), classes=("no", "yes"))
    assert CLASSES(rows, 10)["counts"].tolist() == [100, 0]


def test_too_few_rows_answer_nothing() -> None:
    few, many = {"test": scored(0, 9)}, {"test": scored(1, 900)}
    assert set(at_hand([few, many], 10)(SCORES, "test", kind=RANKING, x=ONE)) == {1}
    assert answered([Question(SCORES, "validation", {"kind": RANKING})], many, 0, ONE) == {}


# ---------------------------------------------------------------------------------------------------------
# Declarations


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_is_declared_in_words(name: str) -> None:
    query = QUERIES[name]
    assert query.purpose.startswith("to ")
    for field in query.declared.values():
        assert len(field.meaning.split()) > 2
        assert not field.meaning.endswith(".")


def test_a_query_that_breaks_its_declaration_is_blamed() -> None:
    wrong: dict[str, Any] = {"n": np.zeros(3)}
    query = Query("wrong", "to test", lambda rows: wrong, {"n": Field("a sum of one number", "sum")})
    with pytest.raises(
        NestfedError, match=r"'wrong' broke its own declaration: its n has shape \(3,\) instead of \(\)"
    ):
        query(scored(0, 20))


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({}, "it sent nothing instead of a, b."),
        ({"a": ("<f8", (3,)), "b": ("<i8", (2,)), "c": ("<i8", ())}, "it sent a, b, c instead of a, b."),
        ({"a": ("<f4", (3,)), "b": ("<i8", (2,))}, "its a is float32 instead of float64."),
        ({"a": ("<f8", (3, 1)), "b": ("<i8", (2,))}, r"its a has shape (3, 1) instead of (3)."),
        ({"a": ("<f8", (3,)), "b": ("<i8", (9,))}, "its b has shape (9,) instead of (at most 5)."),
        ({"a": ("<f8", (3,)), "b": ("<i8", (0,))}, ""),
    ],
)
def test_misfit(header: Any, sentence: str) -> None:
    assert misfit(header, {"a": Slot("<f8", (3,)), "b": Slot("<i8", (AtMost(5),))}) == sentence


# ---------------------------------------------------------------------------------------------------------
# Pooling


def test_one_bad_site_cannot_move_the_median_far() -> None:
    replies = [{ROWS: np.array(100), "total": np.array([float(n)])} for n in (50, 52, 48, 51)]
    bad = {ROWS: np.array(100), "total": np.array([1e15])}
    assert pooled([*replies, bad])["total"][0] > 1e14
    assert 49 < pooled([*replies, bad], "median")["total"][0] / 5 < 53


def test_one_site_cannot_fake_the_median_metrics() -> None:
    sites = [{"test": scored(n, 200)} for n in range(5)]
    replies = list(at_hand(sites)(SCORES, "test", kind=RANKING, x=ONE).values())
    honest = judged(replies, RANKING, reduce="median")["auroc"]
    perfect = Rows(np.zeros((200, 1)), sites[0]["test"].y, scores=lambda x: 10.0 * sites[0]["test"].y)
    replies[0] = SCORES(perfect, 0, kind=RANKING, x=ONE)
    assert judged(replies, RANKING, reduce="median")["auroc"] <= max(judged([r], RANKING)["auroc"] for r in replies[1:])
    assert judged(replies, RANKING, reduce="median")["auroc"] == pytest.approx(honest, abs=0.03)
