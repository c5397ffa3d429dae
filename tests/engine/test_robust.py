"""Reductions in place of the mean: right by independent formulas, the same wherever clients run, robust where promised."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from nestfed.algorithms import Scaffold
from nestfed.core import NestfedError
from nestfed.engine import reduce as robust
from nestfed.engine.reduce import Reduction
from tests.methods import run_some
from tests.support import bad_images, close, on_two_ranks, simulate

KINDS = ["median", "trimmed:0.3", "clip:0.05"]
kinds = pytest.mark.parametrize("reduce", KINDS)


# --- formulas ---


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.25, 0.4, 0.49]))
@settings(max_examples=60, deadline=None)
def test_median_and_trimmed_mean(count: int, d: int, seed: int, share: float) -> None:
    rows = np.random.default_rng(seed).normal(size=(count, d))
    table = torch.from_numpy(rows)
    torch.testing.assert_close(Reduction("median").over(table), torch.from_numpy(np.median(rows, 0)))
    trimmed = torch.from_numpy(stats.trim_mean(rows, share, 0))
    torch.testing.assert_close(Reduction("trimmed", share).over(table), trimmed)


def test_sorting_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 3, 50)))
    whole = Reduction("median").over(rows)
    monkeypatch.setattr(robust, "_PIECE", 64)
    assert torch.equal(Reduction("median").over(rows), whole)
    assert whole.shape == (3, 50)


def test_clipping_is_joint_over_all_fields() -> None:
    base = {"x": torch.ones(2), "u": torch.zeros(1)}
    upload = {"x": torch.tensor([[1.0, 4.0], [1.0, 1.3]]), "u": torch.tensor([[4.0], [0.4]])}  # norms 5 and 0.5
    found = Reduction("clip", 1.0).clipped(upload, base)
    torch.testing.assert_close(found["x"], torch.tensor([[0.0, 0.6], [0.0, 0.3]]))
    torch.testing.assert_close(found["u"], torch.tensor([[0.8], [0.4]]))
    huge = {"x": torch.full((1, 2), 3e38), "u": torch.zeros(1, 1)}  # its square leaves float32
    torch.testing.assert_close(Reduction("clip", 1.0).clipped(huge, base)["x"], torch.full((1, 2), 0.5**0.5))


@pytest.mark.parametrize(
    "wrong",
    ["mode", "median:3", "trimmed", "trimmed:0.5", "trimmed:x", "clip", "clip:0", "clip:-1", "clip:inf", "clip:nan"],
)
def test_wrong_words(wrong: str) -> None:
    with pytest.raises(NestfedError, match=r"exchange\.reduce must be mean, median, trimmed:SHARE"):
        Reduction.parse(wrong)


@pytest.mark.parametrize("text", ["mean", *KINDS])
def test_words_and_back(text: str) -> None:
    assert str(Reduction.parse(text)) == text


# --- engines agree, for every shared field ---


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        *itertools.product(["fmgda", "scaffold"], KINDS),
        *itertools.product(["fcsg-m", "local-scgdm", "fafed", "codasca"], ["median"]),
    ],
)
def test_loop_vmap_and_workers(name: str, reduce: str) -> None:
    loop = run_some(name, mode="loop", workers=1, reduce=reduce)
    close(run_some(name, mode="vmap", workers=1, reduce=reduce), loop)
    close(run_some(name, mode="loop", workers=3, reduce=reduce), loop)
    mean = run_some(name, mode="loop", workers=1)
    assert any(not torch.allclose(v, mean.shared[k]) for k, v in loop.shared.items())
    assert all(r["drift"] is None for r in loop.history if r["participants"])


def test_two_ranks(tmp_path: Path) -> None:
    problem, _, bad = bad_images()

    def found(reduce: str) -> dict[str, Tensor]:
        with pytest.warns(UserWarning, match="dropped"):
            some = simulate(
                problem, Scaffold(0.1), bad, rounds=3, q=2, reduce=reduce, on_nan="drop", progress=False, mode="loop",
                workers=1,
            )  # fmt: skip
        participants = torch.tensor([r["participants"] for r in some.history])
        whole = run_some("fmgda", mode="loop", workers=1, reduce=reduce)
        return {**whole.shared, "dropped": some.x, "participants": participants}

    expected = {reduce: found(reduce) for reduce in KINDS}
    for one in on_two_ranks(lambda: {reduce: found(reduce) for reduce in KINDS}, tmp_path):
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


def test_resumes_to_the_last_bit_and_not_as_another(tmp_path: Path) -> None:
    whole = run_some("scaffold", 4, mode="loop", workers=1, reduce="median")
    run_some("scaffold", 2, mode="loop", workers=1, reduce="median", directory=tmp_path)
    again = run_some("scaffold", 4, mode="loop", workers=2, reduce="median", directory=tmp_path)
    for k, v in whole.shared.items():
        assert torch.equal(again.shared[k], v)
    with pytest.raises(NestfedError, match="another experiment"):
        run_some("scaffold", 4, mode="loop", workers=1, directory=tmp_path)


def test_what_does_not_go_together() -> None:
    with pytest.raises(NestfedError, match="uniform"):
        run_some("fcsg-m", reduce="median", keep="uniform")
    with pytest.raises(NestfedError, match=r"weights = 'examples' needs exchange\.reduce = 'mean'"):
        run_some("fcsg-m", reduce="median", weights="examples")


# --- robust where promised ---


@pytest.mark.parametrize(("reduce", "most"), [("median", 5), ("trimmed:0.4", 4)])
def test_bad_rows_move_the_result_no_further_than_the_good_ones_lie(reduce: str, most: int) -> None:
    """By any values whatever: the breakdown point of each."""
    rng = np.random.default_rng(1)
    good = rng.normal(size=(11, 40))
    for bad in (1e300, -1e300, 3.0):
        rows = good.copy()
        rows[:most] = bad
        found = Reduction.parse(reduce).over(torch.from_numpy(rows)).numpy()
        assert (found >= good[most:].min(0) - 1e-12).all()
        assert (found <= good[most:].max(0) + 1e-12).all()


def test_clipping_bounds_what_one_client_can_do() -> None:
    """Each of N clients moves the clipped mean by at most 2·NORM/N, whatever it sends."""
    rng = np.random.default_rng(2)
    base = {"x": torch.zeros(6, dtype=torch.float64)}
    rows = torch.from_numpy(rng.normal(size=(8, 6)))
    clip = Reduction("clip", 0.5)
    before = clip.clipped({"x": rows}, base)["x"].mean(0)
    for _ in range(20):
        rows[3] = torch.from_numpy(rng.normal(size=6) * 10.0 ** rng.integers(-3, 9))
        assert float((clip.clipped({"x": rows}, base)["x"].mean(0) - before).norm()) <= 2 * 0.5 / 8 + 1e-12
