"""Advice: what is chosen and why, warnings that name their page, and the smoothness that they are judged by."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import MinimaxToy
from numpy.testing import assert_allclose

from nestfed import FederatedAUC, FederatedAUPRC, FederatedClassifier, FederatedMAML, FederatedMinimax
from nestfed.algorithms import METHODS, build
from nestfed.core import Differentiable, NestfedError, Saddle
from nestfed.data.clients import Examples
from nestfed.engine.progress import Progress, flat_since
from nestfed.problems import Minimize
from nestfed.study import advice
from nestfed.study.advice import NestfedWarning, TheoryWarning, choose, look_at, plateau, smoothness

KINDS = {
    "auroc": Saddle,
    "auprc": Differentiable,
    "classify": Differentiable,
    "maml": Differentiable,
    "minimax": Saddle,
}


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("rounds", [1, 5, 100])
def test_a_choice_fits_the_problem_and_has_a_reason(objective: str, partial: bool, rounds: int) -> None:
    choice = choose(objective, rounds=rounds, partial=partial)
    method = METHODS[choice.name]
    assert issubclass(method.accepts, KINDS[objective])
    assert len(choice.why.split()) > 5
    if partial:
        assert not method.private or objective in ("maml",)
    build(method, **method.usual(0.1, rounds=rounds, q=10)).ends_round(0, 10)


def test_the_choices_are_those_in_bold_in_the_table_of_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs/choosing.md").read_text(encoding="utf-8")
    estimators = (FederatedAUC, FederatedAUPRC, FederatedClassifier, FederatedMAML, FederatedMinimax)
    for estimator in estimators:
        (row,) = re.findall(rf"^\|[^|]*\| `{estimator.__name__}` \|([^|]*)\|([^|]*)\|", page, re.MULTILINE)
        everybody, some = (re.findall(r"\*\*`([a-z-]+)`\*\*", cell) for cell in row)
        chosen = [choose(estimator.kind, rounds=rounds).name for rounds in (10, 9)]
        assert list(dict.fromkeys(chosen)) == everybody
        assert [choose(estimator.kind, rounds=10, partial=True).name] == some


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(NestfedError, match="choose auroc"):
        choose("auc", rounds=2)


def test_every_method_can_be_configured_by_one_step_size() -> None:
    for name in METHODS:
        more = {"eta_g": 0.1} if name in ("fedadam", "fedyogi", "fedadagrad", "fedams") else {}
        more |= {"head": "head"} if name == "fedrep" else {}
        made = build(name, **METHODS[name].usual(0.025, rounds=10, q=5), **more)
        assert 0.025 in vars(made).values()


# ---------------------------------------------------------------------------------------------------------
# Smoothness and theorems


def test_smoothness_is_the_largest_eigenvalue_of_any_client() -> None:
    """Least squares: ∇F_n(x) = H_n x − …, so L = max_n λ_max(H_n)."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(60, 4)) * [1, 2, 3, 4], dtype=torch.float64)
    y = torch.tensor(rng.normal(size=60))
    parts = np.split(np.arange(60), 3)
    problem = Minimize(lambda w, b: ((b[0] @ w - b[1]) ** 2).mean() / 2, torch.zeros(4, dtype=torch.float64))
    clients = Examples((x, y), parts, batch=20)  # whole parts, so nothing is random
    exact = max(float(torch.linalg.eigvalsh(x[p].T @ x[p] / 20)[-1]) for p in parts)
    assert_allclose(smoothness(problem, clients, steps=60), exact, rtol=1e-4)
    assert smoothness(problem, clients) <= exact * (1 + 1e-6)


def test_smoothness_of_a_saddle_counts_both_players() -> None:
    """∇F_n has the constant matrix [[H, Bᵀ], [B, −μ]], whose largest eigenvalue in size is L_n."""
    toy = MinimaxToy(N=3)
    exact = 0.0
    for coupling in toy.couplings:
        below = -toy.mu * torch.eye(toy.dual_dim, dtype=toy.dtype)
        whole = torch.cat([torch.cat([torch.diag(toy.curvature), coupling.T], 1), torch.cat([coupling, below], 1)])
        exact = max(exact, float(torch.linalg.eigvalsh(whole).abs().max()))
    assert_allclose(smoothness(toy.problem, toy.clients, steps=300), exact, rtol=1e-3)


def test_a_step_size_beyond_the_theorem_is_reported_with_its_bound() -> None:
    L = 4.0
    for name, fine, hyper in (("fcsg", 1 / (6 * 5 * L), {}), ("fcsg-m", 1 / (6 * 5 * L) * 0.99, {"beta": 1.0})):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert advice.check_theory(build(name, alpha=fine, **hyper), L, N=4, T=100, q=5) == []
        with pytest.warns(TheoryWarning, match=r"alpha = .* must be at most 1/\(6 q S_F\) = 0\.008333"):
            assert advice.check_theory(build(name, alpha=2 * fine, **hyper), L, N=4, T=100, q=5)
    with pytest.warns(TheoryWarning, match=r"docs/warnings\.md#theorem"):
        assert advice.check_theory(build("fmgda", c_hat=1.0, c=1.0), L, N=4, T=100, q=5)
    assert advice.check_theory(build("coda-plus", eta=9.0), L, N=4, T=100, q=5) == []  # no theorem here


def sites(n: int = 3, rows: int = 60, shift: float = 2.0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(n):
        y = rng.integers(0, 2, rows)
        made.append((rng.normal(size=(rows, 3)) + shift * y[:, None], y))
    return made


def test_estimators_warn_only_when_the_user_set_the_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FederatedAUPRC(rounds=2, q=2).fit(sites())
        FederatedAUPRC(rounds=2, q=2, lr="theory").fit(sites())
    with pytest.warns(TheoryWarning):
        FederatedAUPRC(rounds=2, q=2, lr=50.0).fit(sites())


# ---------------------------------------------------------------------------------------------------------
# Data and outcomes


def test_few_positives() -> None:
    poor = sites()
    poor[1] = (poor[1][0], np.where(np.arange(60) < 2, 1, 0))
    with pytest.warns(NestfedWarning, match=r"Site 1 has fewer than 5 positives or negatives \(1: 2 of 60 positive\)"):
        FederatedAUC(rounds=1, q=1).fit(poor)
    many = [(x, np.where(np.arange(60) < 1, 1, 0)) for x, _ in sites(4)]
    with pytest.warns(NestfedWarning, match=r"4 of 4 sites have fewer"):
        FederatedAUPRC(rounds=1, q=1).fit(many)


def record(n: int, drift: float = 0.0, **values: float) -> dict[str, Any]:
    return {"round": n, "drift": drift, **values}


def test_drift_is_reported_when_present() -> None:
    far = [record(n, drift=4.0) for n in range(1, 11)]
    with pytest.warns(
        NestfedWarning, match=r"distance from the mean is 2, more than the whole training moved the mean \(1\)"
    ):
        look_at(far, "auroc", moved=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_at(far, "auroc", moved=3.0)
    # Real clients that want opposite things.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    opposed = [(x, (x[:, 0] > 0).astype(int)), (x, (x[:, 0] < 0).astype(int))]
    with pytest.warns(NestfedWarning, match="drift"):
        FederatedClassifier(rounds=5, q=30, lr=lambda t: 1.0, hidden=()).fit(opposed)


def test_a_stalled_auroc_is_reported() -> None:
    rng = np.random.default_rng(0)
    noise = [(rng.normal(size=(400, 2)), rng.integers(0, 2, 400)) for _ in range(2)]
    test = rng.normal(size=(4000, 2)), rng.integers(0, 2, 4000)
    with pytest.warns(NestfedWarning, match=r"AUROC stalls at 0\.[45]\d+, which is chance.*#stalled"):
        FederatedAUC(rounds=6, q=2).fit(noise, eval_set=test)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_at([record(n, auroc=0.5 + 0.03 * n) for n in range(10)], "auroc", 1.0)


def test_hints() -> None:
    flat = [record(n, ap=min(0.1 * n, 0.4)) for n in range(12)]
    assert plateau(flat, "ap") == ["ap did not improve after round 5: fewer rounds are enough."]
    rising = [record(n, ap=0.05 * n) for n in range(12)]
    assert plateau(rising, "ap") == ["ap was still improving at the end: more rounds should help."]
    assert plateau(rising[:3], "ap") == []
    falling = [record(n, log_loss=2 - 0.05 * n) for n in range(12)]
    assert plateau(falling, "log_loss") == ["log_loss was still improving at the end: more rounds should help."]
    worse = [record(n, log_loss=2 + 0.05 * n) for n in range(12)]
    assert plateau(worse, "log_loss") == ["log_loss did not improve after round 5: fewer rounds are enough."]


def test_every_warning_names_a_section_that_exists() -> None:
    root = Path(__file__).parents[2]
    page = (root / advice.PAGE).read_text(encoding="utf-8")
    sections = {re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    source = (root / "nestfed" / "study" / "advice.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\"([a-z-]+)\",?\n?\s*(?:TheoryWarning,\n\s*)?\)", source)) & sections | set(
        re.findall(r"\"([a-z-]+)\",\n\s*(?:TheoryWarning,\n\s*)?\)", source)
    )
    assert {"few-positives", "drift", "stalled", "theorem"} == named
    assert named <= sections


@pytest.mark.parametrize(
    ("values", "since"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.9, 0.95], None),  # rises
        ([0.5, 0.9, 0.9, 0.9004, 0.9], None),  # four in a row are too few
        ([0.5, 0.9, 0.9, 0.9004, 0.9, 0.9005], 20),
        ([0.1 * i for i in range(16)] + [1.5] * 5, None),  # six of 21 are less than a third
        ([0.1 * i for i in range(10)] + [0.9] * 5, 100),
        ([-5000.0, -3000.0] + [-1000.0, -1000.5] * 3, 30),  # near means near for its size
    ],
)
def test_a_metric_that_no_longer_moves(values: list[float], since: int | None) -> None:
    assert flat_since([(10 * (i + 1), v) for i, v in enumerate(values)]) == since


def test_the_bar_says_that_nothing_moves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with Progress("fcsg", 8, 0, show=True) as bar:
        for i in range(1, 9):
            bar.update({"round": i, "loss": 0.5}, {"ap": 0.9 if i > 2 else 0.1})
    shown = capsys.readouterr().err
    assert "ap 0.9000  (ap flat since round 3)" in shown
