"""Every partition is a partition, of the promised sizes and classes, and a function of its seed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nestfed.core import NestfedError
from nestfed.data.partition import (
    Indices,
    all_classes,
    binary,
    by_column,
    dirichlet,
    even,
    hold_out,
    k_classes,
    remove,
    similar,
    summary,
)
from nestfed.report import plot

settings.register_profile("patient", deadline=None)  # a busy machine must not fail a test
settings.load_profile("patient")

seeds = st.integers(0, 2**40)
some_labels = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)
TEN = np.repeat(np.arange(10), 60)  # ten classes of sixty, in order


def is_partition(parts: list[Indices], n: int) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))  # disjoint and complete
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()


def spread(parts: list[Indices]) -> int:
    sizes = [len(p) for p in parts]
    return max(sizes) - min(sizes)


def held_classes(parts: list[Indices], labels: np.ndarray) -> list[set[int]]:
    return [set(labels[p].tolist()) for p in parts]


# ------------------------------------------------------------------------------------- over many clients


@given(st.integers(1, 300), st.integers(1, 30), seeds)
def test_even(n: int, clients: int, seed: int) -> None:
    assume(n >= clients)
    parts = even(n, clients, seed)
    is_partition(parts, n)
    assert len(parts) == clients
    assert spread(parts) <= 1


def test_even_is_uniform() -> None:
    # Row 0 goes to each of four clients equally often, and together with row 1 as often as chance has it.
    owners = np.array([[next(i for i, p in enumerate(even(8, 4, s)) if r in p) for r in (0, 1)] for s in range(2000)])
    assert np.bincount(owners[:, 0], minlength=4) == pytest.approx(500, abs=80)  # four standard deviations
    assert (owners[:, 0] == owners[:, 1]).mean() == pytest.approx(1 / 7, abs=0.035)


@given(some_labels, st.integers(1, 12), st.floats(0, 1), seeds)
def test_similar(labels: np.ndarray, clients: int, similarity: float, seed: int) -> None:
    assume(len(labels) >= clients)
    parts = similar(labels, clients, similarity, seed)
    is_partition(parts, len(labels))
    assert spread(parts) <= 1


@given(some_labels, st.integers(1, 12), seeds)
def test_similarity_zero_is_sorted(labels: np.ndarray, clients: int, seed: int) -> None:
    assume(len(labels) >= clients)
    parts = similar(labels, clients, 0.0, seed)
    for before, after in pairwise(parts):
        assert labels[before].max() <= labels[after].min()


def test_similarity_sets_how_much_is_sorted() -> None:
    # Ten clients, ten classes: the sorted share of client c is all of class c, the rest a tenth of it. Large
    # classes, because the draw leaves unequal numbers of them and the sorted pieces shift by the difference.
    labels = np.repeat(np.arange(10), 4000)
    for similarity in (0.0, 0.5, 0.95, 1.0):
        parts = [similar(labels, 10, similarity, seed) for seed in range(3)]
        share = np.mean([(labels[p] == c).mean() for ten in parts for c, p in enumerate(ten)])
        assert share == pytest.approx(1 - similarity + similarity / 10, abs=0.015)


@given(some_labels, st.integers(1, 12), seeds)
def test_all_classes(labels: np.ndarray, clients: int, seed: int) -> None:
    counts = np.unique(labels, return_counts=True)[1]
    if counts.min() < clients:
        with pytest.raises(NestfedError, match=r"cannot be split|too few"):
            all_classes(labels, clients, seed)
        return
    parts = all_classes(labels, clients, seed)
    is_partition(parts, len(labels))
    assert held_classes(parts, labels) == [set(labels.tolist())] * clients


def test_all_classes_cuts_uniformly() -> None:
    # Five examples for two clients: 1, 2, 3 or 4 of them for the first, equally likely.
    first = [len(all_classes(np.zeros(5, dtype=int), 2, s)[0]) for s in range(2000)]
    assert np.bincount(first)[1:] == pytest.approx(500, abs=80)


@given(some_labels, st.integers(1, 12), st.integers(1, 7), seeds)
def test_k_classes(labels: np.ndarray, clients: int, k: int, seed: int) -> None:
    classes, counts = np.unique(labels, return_counts=True)
    # Possible exactly when the places fit: each class at least once and at most once per client and example.
    possible = k <= len(classes) <= clients * k <= np.minimum(counts, clients).sum()
    if not possible:
        with pytest.raises(NestfedError):
            k_classes(labels, clients, k, seed)
        return
    parts = k_classes(labels, clients, k, seed)
    is_partition(parts, len(labels))
    assert [len(held) for held in held_classes(parts, labels)] == [k] * clients
    for c in classes:  # each class evenly over those who hold it
        shares = [n for p in parts if (n := (labels[p] == c).sum())]
        assert max(shares) - min(shares) <= 1


@given(st.integers(1, 5), st.integers(1, 5), seeds)
def test_k_classes_balances_equal_classes(k: int, multiple: int, seed: int) -> None:
    classes, clients = 5, 5 * multiple
    holders = k * multiple
    parts = k_classes(np.tile(np.arange(classes), 4 * holders), clients, k, seed)
    assert {len(p) for p in parts} == {4 * k}
    parts = k_classes(np.tile(np.arange(classes), 4 * holders + 1), clients, k, seed)
    assert spread(parts) <= k


def test_k_classes_weighs_large_classes() -> None:
    labels = np.repeat([0, 1], [900, 100])
    assert sorted(map(len, k_classes(labels, 10, 1, 0))) == [100] * 10


def test_k_classes_does_not_pair_classes_up() -> None:
    # 20 clients, 5 of 10 classes (FAFED): the draw must not fall into a few blocks of equal clients.
    held = held_classes(k_classes(TEN, 20, 5, 0), TEN)
    assert len({frozenset(h) for h in held}) >= 15


@given(some_labels, st.integers(1, 12), st.sampled_from([1e-6, 0.01, 0.5, 5.0, 1e6]), st.integers(1, 4), seeds)
def test_dirichlet(labels: np.ndarray, clients: int, alpha: float, minimum: int, seed: int) -> None:
    assume(len(labels) >= clients * minimum)
    parts = dirichlet(labels, clients, alpha, seed, minimum)
    is_partition(parts, len(labels))
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum


def test_dirichlet_alpha_sets_the_skew() -> None:
    # The share of a class at one client has variance (1/K)(1−1/K)/(Kα+1) under Dirichlet(α); large classes
    # make the sampling noise on top of it small.
    labels = np.repeat(np.arange(40), 1000)
    for alpha in (0.3, 3.0):
        table = summary(dirichlet(labels, 10, alpha, seed=3), labels).counts / 1000
        assert table.var() == pytest.approx(0.09 / (10 * alpha + 1), rel=0.25)


makers: list[Callable[[int], list[Indices]]] = [
    lambda seed: even(600, 20, seed),
    lambda seed: similar(TEN, 20, 0.5, seed),
    lambda seed: all_classes(TEN, 20, seed),
    lambda seed: k_classes(TEN, 20, 5, seed),
    lambda seed: dirichlet(TEN, 20, 0.3, seed),
    lambda seed: list(hold_out(600, 0.3, seed)),
    lambda seed: list(hold_out(600, 0.3, seed, labels=TEN)),
    lambda seed: list(hold_out(600, 0.3, seed, groups=np.arange(600) // 4)),
    lambda seed: [remove(binary(TEN), 1, 0.8, seed)],
]


@pytest.mark.parametrize("make", makers)
def test_seed_decides_everything(make: Callable[[int], list[Indices]]) -> None:
    np.random.seed(0)  # global state must be neither read nor changed
    before = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    first, again, other = make(7), make(7), make(8)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))
    np.testing.assert_array_equal(before, np.random.get_state()[1])


def test_one_seed_for_two_purposes_gives_unrelated_draws() -> None:
    # With one stream for both, the rows removed would be the very rows held out.
    held = [set(hold_out(100, 0.2, s)[1].tolist()) for s in range(200)]
    kept = [set(remove(np.ones(100), 1, 0.2, s).tolist()) for s in range(200)]
    assert np.mean([len(h - k) for h, k in zip(held, kept)]) == pytest.approx(4, abs=0.5)


# ------------------------------------------------------------------------------------ by a column


def test_by_column_sorts_and_names() -> None:
    parts, names = by_column([10, 9, 10, 2])
    assert names == ["2", "9", "10"]  # as numbers
    assert [p.tolist() for p in parts] == [[3], [1], [0, 2]]
    assert by_column(["Tagalog", "Greek", "", "Greek"])[1] == ["Greek", "Tagalog", "missing"]
    assert by_column([73.0, float("nan"), 9.0])[1] == ["9", "73", "missing"]  # as pandas reads a gap
    assert by_column(np.array(["b", "a"]))[1] == ["a", "b"]


def test_by_column_merges_small_groups() -> None:
    hospital = [1, 1, 1, 2, 3, 4, 5, 6]
    region = ["W", "W", "W", "W", "W", "E", "E", None]
    parts, names = by_column(hospital, smallest=2, fallback=region)  # hospital 6 has no region to join
    assert names == ["1", "small: W", "small: rest"]
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    with pytest.raises(NestfedError, match="only 1 rows together"):
        by_column([1, 1, 2], smallest=2, fallback=["W", "W", "E"])
    parts, names = by_column(hospital[:7], smallest=2, fallback=region[:7])
    assert names == ["1", "small: E", "small: W"]
    assert [p.tolist() for p in parts] == [[0, 1, 2], [5, 6], [3, 4]]
    parts, names = by_column(hospital, smallest=2)
    assert names == ["1", "small: rest"]
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4, 5, 6, 7]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ABC")), min_size=1, max_size=60),
    st.integers(1, 6),
    st.booleans(),
)
def test_by_column_properties(rows: list[tuple[int, str]], smallest: int, coarse: bool) -> None:
    values, regions = np.array([v for v, _ in rows]), [r for _, r in rows]
    try:
        parts, names = by_column(values, smallest, regions if coarse else None)
    except NestfedError:
        sizes = np.bincount(values)[values]
        small = sizes < smallest
        assert small.any()
        assert coarse or small.sum() < smallest
        return
    is_partition(parts, len(rows))
    assert len(set(names)) == len(names) == len(parts)
    assert min(map(len, parts)) >= smallest
    for v in set(values.tolist()):  # a group that is large enough stays whole and alone
        group = np.flatnonzero(values == v)
        if len(group) >= smallest:
            assert parts[names.index(str(v))].tolist() == group.tolist()
    for part, name in zip(parts, names):
        if name.startswith("small: ") and name != "small: rest":
            assert {regions[i] for i in part} == {name.removeprefix("small: ")}


# ------------------------------------------------------------------------------- imbalance and hold-out


def test_binary() -> None:
    assert binary([0, 1, 2, 3]).tolist() == [0, 0, 1, 1]
    assert binary([7, 5, 9]).tolist() == [1, 0, 1]  # of an odd number, the middle class is positive
    assert binary(["cat", "dog", "cat"], positive=["cat"]).tolist() == [1, 0, 1]
    assert binary(TEN).sum() == 300


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([0, 1]), st.floats(0, 0.99), seeds)
def test_remove(negatives: int, positives: int, side: int, fraction: float, seed: int) -> None:
    labels = np.random.default_rng(0).permutation([0] * negatives + [1] * positives)
    count = positives if side else negatives
    expected = int(fraction * count + 0.5)
    if expected == count:
        with pytest.raises(NestfedError, match="leaves none"):
            remove(labels, side, fraction, seed)
        return
    kept = remove(labels, side, fraction, seed)
    assert (np.diff(kept) > 0).all()
    assert (labels[kept] == side).sum() == count - expected
    assert (labels[kept] != side).sum() == len(labels) - count


def test_remove_gives_the_papers_prevalence() -> None:
    labels = binary(np.repeat(np.arange(10), 6000))
    assert labels[remove(labels, 1, 0.8, 0)].mean() == 1 / 6
    assert labels[remove(labels, 0, 0.8, 0)].mean() == 5 / 6


@given(some_labels, st.floats(0.05, 0.95), seeds)
def test_hold_out_by_label(labels: np.ndarray, fraction: float, seed: int) -> None:
    n = len(labels)
    assume(0 < int(fraction * n + 0.5) < n)
    for given_labels in (None, labels):
        train, held = hold_out(n, fraction, seed, labels=given_labels)
        is_partition([train, held], n)
        assert len(held) == int(fraction * n + 0.5)
    for c in np.unique(labels):
        assert abs((labels[held] == c).sum() - fraction * (labels == c).sum()) < 1 + 1e-6


@given(st.lists(st.integers(0, 15), min_size=2, max_size=100), st.floats(0.05, 0.95), seeds)
def test_hold_out_by_group(groups: list[int], fraction: float, seed: int) -> None:
    assume(len(set(groups)) > 1)
    n, column = len(groups), np.array(groups)
    train, held = hold_out(n, fraction, seed, groups=groups)
    is_partition([train, held], n)
    assert not set(column[train]) & set(column[held])
    # Near the target: no farther than a whole group, of which the largest is the worst.
    assert abs(len(held) - fraction * n) <= np.bincount(column).max()


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: even(3, 4, 0), "3 rows cannot be split over 4 clients"),
        (lambda: even(3, 0, 0), "clients must be a whole number of at least 1, not 0"),
        (lambda: even(3, 1.5, 0), "a whole number of at least 1, not 1.5"),  # type: ignore[arg-type]
        (lambda: even(3, 2, -1), "seed must be a whole number of at least 0"),
        (lambda: similar(TEN, 5, 95, 0), "between 0 and 1, not 95"),
        (lambda: similar(TEN.reshape(2, -1), 5, 0.5, 0), "shape"),
        (lambda: similar([0.0, float("nan")], 1, 0.5, 0), "1 labels are missing"),
        (lambda: all_classes([0, 0, 0, 1], 2, 0), "class 1 has 1 examples"),
        (lambda: k_classes(TEN, 20, 11, 0), "only 10"),
        (lambda: k_classes(TEN, 3, 2, 0), "k of at least 4"),
        (lambda: k_classes([0, 0, 0, 0, 1], 4, 2, 0), "too few examples"),
        (lambda: dirichlet(TEN, 20, 0.0, 0), "alpha"),
        (lambda: dirichlet(TEN, 20, 1.0, 0, minimum=31), "too few"),
        (lambda: by_column([1, 1, 2], smallest=2), "only 1 rows"),
        (lambda: by_column([1, 1, 2], fallback=["a"]), "must be equal"),
        (lambda: by_column([]), "no rows"),
        (lambda: binary(TEN, positive=[10]), "positive class 10"),
        (lambda: binary(TEN, positive=range(10)), "both labels"),
        (lambda: remove(TEN, 1, 0.5, 0), "must be 0 and 1"),
        (lambda: remove([0, 1], 2, 0.5, 0), "side"),
        (lambda: remove([0, 1], 1, 1.0, 0), "below 1"),
        (lambda: hold_out(10, 0.01, 0), "one side empty"),
        (lambda: hold_out(10, 1.0, 0), "strictly between"),
        (lambda: hold_out(4, 0.5, 0, groups=[1, 1, 1, 1]), "one group"),
        (lambda: hold_out(4, 0.5, 0, groups=[1, 2]), "2 entries where 4"),
        (lambda: hold_out(2, 0.5, 0, groups=[1, 2], labels=[0, 1]), "not both"),
        (lambda: summary([np.array([9])], [0, 1]), "client 0 holds rows beyond"),
        (lambda: summary([np.array([0])], [0, 1], names=["a", "b"]), "2 entries where 1"),
    ],
)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(NestfedError, match=words) as refusal:
        call()
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


# ----------------------------------------------------------------------------------------- looking at one


def test_summary_counts_and_reads() -> None:
    table = summary([np.array([0, 1, 2]), np.array([3])], ["a", "b", "a", "b"], names=["Cleveland", "VA"])
    assert table.counts.tolist() == [[2, 1], [0, 1]]
    assert table.sizes.tolist() == [3, 1]
    assert str(table).splitlines() == [
        "client     a  b  all",
        "Cleveland  2  1    3",
        "VA         0  1    1",
        "all        2  2    4",
    ]


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (4, 10), (100, 2), (5, 30)])
def test_picture_shows_every_client(tmp_path: Path, clients: int, classes: int) -> None:
    from PIL import Image

    labels = np.arange(3000) % classes
    path = plot.clients(summary(even(3000, clients, 0), labels), tmp_path / "new folder" / "who.png")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert pixels.shape[0] <= 1600  # no taller than a page, however many clients
    # Down a line inside the bars there are as many coloured runs as clients (text and axes are grey).
    column = pixels[:, pixels.shape[1] // 2]
    coloured = np.ptp(column, axis=1) > 40
    assert (np.diff(coloured.astype(int), prepend=0) == 1).sum() == clients
