"""The questions that judge several models: disclosure rules, forged replies, declarations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestfed.core import NestfedError
from nestfed.queries import Rows, TooFewError
from nestfed.queries.judging import COUNTED, LEVELS, SPREAD, WITHHELD, levels_of
from nestfed.queries.scores import LOG_ODDS, LOGITS
from nestfed.queries.tally import tallies_of

GROUPS = [["sex", "F"], ["sex", "M"], ["ward", "a"], ["ward", "b"], ["ward", "burns"]]
LEAST = 10


def site(seed: int, n: int = 300, rare: int = 3, *, group: bool = False) -> Rows:
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.3).astype(np.int64)
    score = rng.normal(y, 1.0)
    ward = rng.choice(["a", "b", "d"], n).astype("U5")
    ward[:rare] = "burns"
    sex = rng.choice(["F", "M"], n, p=[0.9, 0.1])
    columns = {"sex": sex, "ward": ward}
    return Rows(
        np.zeros((n, 1)), y, rng.integers(0, n // 3, n) if group else None, columns, lambda w: w[0] * score + w[1]
    )


def asked(groups: Any = GROUPS, models: int = 1, **more: Any) -> dict[str, Any]:
    case = {"a": 1.0, "b": 0.0, "sites": {}, "permuted": [], "seed": 0}
    cases = [case | {"model": m} for m in range(models)]
    x = np.concatenate([[1.0, 0.1 * m] for m in range(models)])
    return {"x": x, "lengths": [2] * models, "cases": cases, "kind": LOG_ODDS, "groups": groups} | more


def spread_asked(rows: Rows, min_cell: int, metrics: list[str]) -> dict[str, Any]:
    arguments = asked()
    tallies = tallies_of(COUNTED(rows, min_cell, **arguments), **arguments)
    each = [tallies[g, 0] for g in range(len(GROUPS) + 1)]
    return arguments | {
        "metrics": metrics,
        "counts": np.array([[one.histogram] for one in each]),
        "sums": np.array([[one.sums] for one in each]),
        "persons": np.array([one.persons for one in each]),
    }


# ---------------------------------------------------------------------------------------------------------
# The disclosure rule


def pieces(reply: Any, group: int, label: int) -> dict[tuple[int, int], int]:
    """Return a group's counts by cell."""
    cells = reply["cells"]
    ends = np.cumsum(cells.ravel())
    end = ends[(group * cells.shape[1]) * 2 + label]
    mine = slice(end - cells[group, 0, label], end)
    return {
        (int(a), int(b)): int(n) for a, b, n in zip(reply["first"][mine], reply["last"][mine], reply["counts"][mine])
    }


@given(st.integers(0, 10_000), st.integers(40, 400), st.integers(0, 12), st.booleans())
@settings(max_examples=80, deadline=None)
def test_no_cell_and_no_difference_of_groups_describes_a_few_rows(seed: int, n: int, rare: int, group: bool) -> None:
    rows = site(seed, n, rare, group=group)
    try:
        reply = COUNTED(rows, LEAST, **asked())
    except TooFewError:
        person = np.arange(n) if rows.group is None else rows.group
        assert min(len(np.unique(person[rows.y == k])) for k in (0, 1)) < LEAST
        return
    assert ((reply["persons"] == 0) | (reply["persons"] >= LEAST)).all()
    assert (reply["counts"] >= LEAST).all()
    for label in range(2):
        every = pieces(reply, 0, label)
        assert sum(every.values()) == reply["sizes"][0, label]
        for column in ("sex", "ward"):
            mine = [g for g, (name, _) in enumerate(GROUPS, 1) if name == column]
            own = [pieces(reply, g, label) for g in mine]
            for first, last in set().union(*own):
                inside = sum(count for (a, b), count in every.items() if first <= a and b <= last)
                rest = inside - sum(one.get((first, last), 0) for one in own)
                assert rest == 0 or rest >= LEAST
            hidden = reply["sizes"][0, label] - reply["sizes"][mine, label].sum()
            assert hidden == 0 or hidden >= LEAST


def test_hiding_a_small_group_hides_another_beside_it() -> None:
    """Three patients in the burns ward would be all patients less those of the other wards."""
    rows = site(0)
    rows = replace(
        rows, columns={**rows.columns, "ward": np.where(rows.columns["ward"] == "d", "b", rows.columns["ward"])}
    )
    sizes = COUNTED(rows, LEAST, **asked())["sizes"].sum(1)
    true = [len(rows), *((rows.columns[c] == v).sum() for c, v in GROUPS)]
    assert sizes[0] == 300
    assert sizes[5] == 0
    assert (sizes[3] == 0) != (sizes[4] == 0)
    assert sizes[3] in (0, true[3])
    assert sizes[4] in (0, true[4])
    assert (COUNTED(rows, 0, **asked())["sizes"].sum(1) == true).all()


def test_a_group_is_counted_in_persons() -> None:
    """Forty rows of four persons describe four persons."""
    rows = site(1, 400)
    sex = np.where(np.arange(400) < 40, "F", "M")
    rows = replace(rows, group=np.r_[np.arange(40) % 4, 4 + np.arange(360)], columns={"sex": sex})
    reply = COUNTED(rows, LEAST, **asked(groups=[["sex", "F"]]))
    assert reply["sizes"][1].sum() == 0
    assert COUNTED(replace(rows, group=None), LEAST, **asked(groups=[["sex", "F"]]))["sizes"][1].sum() == 40


def test_a_site_with_a_small_class_does_not_answer() -> None:
    rows = site(2)
    rows = replace(rows, y=(np.arange(300) < 9).astype(np.int64))
    with pytest.raises(TooFewError, match="fewer than min_cell = 10 persons of a class"):
        COUNTED(rows, LEAST, **asked())


def test_under_the_rule_no_number_of_wrong_predictions_leaves_a_site() -> None:
    """The products of influences on the accuracy give the number of errors; those on other metrics do not."""
    rows = site(3)
    arguments = spread_asked(rows, LEAST, ["accuracy", "log_loss"])
    reply = SPREAD(rows, LEAST, **arguments)
    open_reply = SPREAD(rows, 0, **arguments)
    assert open_reply["own_products"][0].any()
    assert open_reply["counting"].tolist() == [1, 0]
    for name in ("own_products", "products"):
        flat = reply[name].reshape(-1, 2) if name == "own_products" else np.moveaxis(reply[name], 1, -1).reshape(-1, 2)
        assert not flat[:, 0].any()
        assert flat[:, 1].any()
    assert reply["counting"].tolist() == [WITHHELD, 0]
    assert reply["values"][0, 0] == 0
    assert not reply["shifts"][:, 0].any()


def test_a_right_or_wrong_prediction_of_few_rows_is_not_counted() -> None:
    """With several classes, right and wrong predictions are two cells, which merge if one is small."""
    logits = np.zeros((50, 3))
    logits[:, 0] = 1
    y = np.r_[np.zeros(45, np.int64), np.ones(5, np.int64)]
    rows = Rows(logits, y, scores=lambda w: logits)
    arguments = asked(groups=[], kind=LOGITS)
    assert COUNTED(rows, 0, **arguments)["counts"].tolist() == [5, 45]
    assert COUNTED(rows, LEAST, **arguments)["counts"].tolist() == [50]


# ---------------------------------------------------------------------------------------------------------
# Replies that contradict themselves


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r | {"counts": r["counts"] + 1}, "it counts another number of scores than rows."),
        (lambda r: r | {"first": r["first"] + 4096}, "its bins are invalid."),
        (lambda r: r | {"first": r["first"][::-1]}, "its bins are invalid."),
        (lambda r: r | {"cells": r["cells"] + 1}, "its numbers of cells do not fit its cells."),
        (lambda r: r | {"cells": -r["cells"]}, "its numbers of cells do not fit its cells."),
        (lambda r: r | {"persons": r["persons"] * 2}, "it counts more persons than rows."),
        (lambda r: r | {"repeats": r["repeats"] * 0}, "it counts more persons than rows."),
    ],
)
def test_a_reply_that_contradicts_itself_is_rejected(change: Any, sentence: str) -> None:
    reply, arguments = COUNTED(site(4), 0, **asked(models=2)), asked(models=2)
    assert COUNTED.invalid(reply, **arguments) == ""
    assert COUNTED.invalid(change(reply), **arguments) == sentence


def test_replies_fit_their_declared_bytes() -> None:
    for models in (1, 3):
        arguments = asked(models=models)
        reply = COUNTED(site(5), 0, **arguments)
        assert sum(value.nbytes for value in reply.values()) <= COUNTED.most_bytes(**arguments)


# ---------------------------------------------------------------------------------------------------------
# Values of columns


def test_rare_values_are_not_named() -> None:
    rows = site(6)
    arguments = {"columns": ["ward"]}
    assert set(levels_of(LEVELS(rows, 0, **arguments), **arguments)["ward"]) == {"a", "b", "d", "burns"}
    assert set(levels_of(LEVELS(rows, LEAST, **arguments), **arguments)["ward"]) == {"a", "b", "d"}
    with pytest.raises(NestfedError, match="no column 'wards'"):
        LEVELS(rows, 0, columns=["wards"])


@pytest.mark.parametrize(
    "found", [{"sex": {"F": 3}}, {"ward": ["a"]}, {"ward": {"a": "many"}}, {"ward": {"a": -1}}, []]
)
def test_forged_lists_of_values(found: Any) -> None:
    from nestfed.queries.base import as_text

    reply = LEVELS(site(7), 0, columns=["ward"]) | {"levels": as_text(found)}
    assert LEVELS.invalid(reply, columns=["ward"]) in ("it lists other columns.", "its counts of values are invalid.")


def test_what_hides_a_group_may_have_one_class() -> None:
    """Ward b has 3 negatives: without ward z, which has no positives, they would be the difference to all rows."""
    ward = np.repeat(["z", "b", "a"], [50, 15, 140])
    y = np.r_[np.zeros(50), np.ones(12), np.zeros(3), np.ones(40), np.zeros(100)].astype(np.int64)
    rows = Rows(np.zeros((205, 1)), y, None, {"ward": ward}, lambda w: np.linspace(-1, 1, 205))
    sizes = COUNTED(rows, LEAST, **asked(groups=[["ward", v] for v in "zba"]))["sizes"]
    assert sizes[1:].tolist() == [[0, 0], [0, 0], [40, 100]]
