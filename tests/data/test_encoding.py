"""From tables to model inputs: what sites agree on from sums, and what is rejected."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from nestfed.core import NestfedError
from nestfed.data.encoding import Column, Sums, TableEncoding, encode, finish, merge, numbered, schema_from_json

nan = float("nan")


def alone(x: np.ndarray) -> TableEncoding:
    return encode({"a": (x, numbered(x.shape[1]))})


def test_gaps_are_marked_and_filled_with_the_mean() -> None:
    training = np.array([[1.0, 5.0, nan], [3.0, nan, nan], [5.0, 7.0, nan]], np.float32)
    made, schema = alone(training), numbered(3)
    assert made.inputs == ("x0", "x1", "x2", "x1 is missing", "x2 is missing")
    assert_allclose(made(training, schema)[:, 0], [-1.2247449, 0, 1.2247449], rtol=1e-6)
    # three features, then "is missing" of the second and of the third, which training never knows
    assert_allclose(made(training, schema)[:, 1:], [[-1, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]], atol=1e-6)
    # a gap where training had none has no feature of its own; what training never saw is left as it is
    assert_allclose(made(np.array([[nan, 6.0, 2.0]]), schema), [[0, 0, 2, 0, 0]], atol=1e-6)
    # what is far off counts as five deviations
    assert_allclose(made(np.array([[1e9, -1e9, 0.0]]), schema), [[5, -5, 0, 0, 0]], atol=1e-6)


def test_a_large_constant_beside_small_differences() -> None:
    """Sums of squares would lose all digits here; differences from the mean do not."""
    x = 1e9 + np.arange(4.0)[:, None]
    assert_allclose(alone(x)(x, numbered(1))[:, 0], [-1.3416408, -0.4472136, 0.4472136, 1.3416408], rtol=1e-6)
    constant = alone(np.full((3, 1), 7.0))
    assert torch.equal(constant(np.full((1, 1), 7.0), numbered(1)), torch.zeros(1, 1))


def test_a_constant_feature_does_not_explode() -> None:
    made = alone(np.full((5, 1), 0.1, np.float32))
    assert abs(float(made(np.full((1, 1), 0.1, np.float32), numbered(1)))) < 1e-6


# Two sites: their columns in another order, categories that only one has met, and an "=" in names.
A = (Column("age"), Column("a=b", ("c", "d=e")))
B = (Column("a=b", ("d=e", "f")), Column("age"))
XA = np.array([[50.0, 1, 0], [nan, 0, 1], [70.0, 0, 0]])
XB = np.array([[1.0, 0, 10.0], [0, 1, 30.0]])
BOTH = {"a": (XA, A), "b": (XB, B)}


def test_sites_agree_by_column_and_category() -> None:
    made = encode(BOTH)
    assert made.schema == (Column("age"), Column("a=b", ("c", "d=e", "f")))
    pooled = np.array([[50, 1, 0, 0], [nan, 0, 1, 0], [70, 0, 0, 0], [10, 0, 1, 0], [30, 0, 0, 1]])
    assert_array_equal(np.concatenate([made.align(XA, A), made.align(XB, B)]), pooled)
    assert_allclose(made.mean, np.nanmean(pooled, 0))
    assert_allclose(made.deviation, np.nanstd(pooled, 0))
    assert made.gaps.tolist() == [True, False, False, False]
    assert made(XB, B).shape == (2, 5)


def test_it_survives_json() -> None:
    made = encode(BOTH)
    again = TableEncoding.from_json(json.loads(json.dumps(made.to_json())))
    assert again.schema == made.schema
    assert torch.equal(again(XA, A), made(XA, A))
    for wrong in ([["a", None], ["a", None]], [[1, None]], [["a", [1]]], [["a"]], 3):
        with pytest.raises((ValueError, TypeError)):
            schema_from_json(wrong)


def test_sums_are_all_that_is_needed() -> None:
    sums = {name: Sums.of(x, schema) for name, (x, schema) in BOTH.items()}
    first = merge(sums)
    made = finish(first, [first.squares(x, schema) for x, schema in BOTH.values()], sums)
    assert made.to_json() == encode(BOTH).to_json()


def test_a_new_table_may_have_other_categories() -> None:
    made = encode(BOTH)
    new = (Column("age"), Column("other"), Column("a=b", ("never met",)))
    assert_array_equal(made.align(np.array([[1.0, 9.0, 1.0]]), new), [[1, 0, 0, 0]])


def test_an_empty_column_goes_with_numbers_and_with_text() -> None:
    """A file shows a column without any value as numbers, a data frame as text."""
    gap = np.full((2, 1), nan)
    text, number = (np.array([[1.0], [1.0]]), (Column("c", ("u",)),)), (np.ones((2, 1)), (Column("c"),))
    for other, wanted in ((text, Column("c", ("u",))), (number, Column("c"))):
        for empty in ((gap, (Column("c"),)), (gap[:, :0], (Column("c", ()),))):
            for order in ({"a": empty, "b": other}, {"b": other, "a": empty}):
                made = encode(order)
                assert made.schema == (wanted,)
                assert_array_equal(made.align(*empty), np.zeros((2, 1)) if wanted.categories else gap)


@pytest.mark.parametrize("lacking", ["age", "ward"])
def test_an_absent_column_is_an_error(lacking: str) -> None:
    whole = (Column("age"), Column("ward", ("x",)))
    x = np.ones((3, 2))
    part = tuple(c for c in whole if c.name != lacking)
    for order in ({"a": (x, whole), "b": (x[:, :1], part)}, {"b": (x[:, :1], part), "a": (x, whole)}):
        with pytest.raises(NestfedError, match=f"Site b has no column '{lacking}', which site a has"):
            encode(order)
    with pytest.raises(NestfedError, match=rf"new\.csv has no column '{lacking}'"):
        encode({"a": (x, whole)})(x[:, :1], part, "new.csv")


def test_numbers_here_and_text_there_are_an_error() -> None:
    number, text = (np.ones((2, 1)), (Column("c"),)), (np.ones((2, 1)), (Column("c", ("u",)),))
    with pytest.raises(NestfedError, match="'c' holds text at site b but numbers at site a"):
        encode({"a": number, "b": text})
    with pytest.raises(NestfedError, match="The table holds text in column 'c', which is numbers elsewhere"):
        encode({"a": number})(*text)
    with pytest.raises(NestfedError, match="The table holds numbers in column 'c', which is text elsewhere"):
        encode({"a": text})(*number)
