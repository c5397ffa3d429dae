"""Estimators that protect the worst site: closed forms, a site with the opposite sign, what is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit, softmax
from sklearn.base import clone

from nestfed import Fair, FederatedAUC, FederatedAUPRC, FederatedClassifier, NestfedError
from nestfed.metrics import auroc

# Sites that differ as much as these drift apart, which an estimator says.
pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")
RATES, ROWS = np.array([0.1, 0.2, 0.7]), 100


def constant_sites() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sites that differ only in their share of positives; all rows have the same features."""
    return {str(p): (np.zeros((ROWS, 2)), (np.arange(ROWS) < p * ROWS).astype(int)) for p in RATES}


def losses(s: float) -> np.ndarray:
    return np.logaddexp(0, s) - RATES * s


def weights(fair: Fair, s: float) -> np.ndarray:
    f = losses(s)
    f = (ROWS * f + fair.k * f.mean()) / (ROWS + fair.k)
    return softmax(f / fair.settings["tau"]) if fair.way == "kl-dro" else f ** fair.settings["p"]


@pytest.mark.long
@pytest.mark.parametrize(
    "fair", [Fair("kl-dro", 0.1, k=0), Fair("kl-dro", 0.1), Fair("q-ffl", 3.0, k=0), Fair("q-ffl", 3.0)]
)
def test_the_score_is_that_of_the_weighted_sites(fair: Fair) -> None:
    """With a score s alone, f_n(s) = log(1 + e^s) − p_n·s, and the fixed point is where Σ w_n(σ(s) − p_n) = 0."""
    truth = brentq(lambda s: float(weights(fair, s) @ (expit(s) - RATES)), -5, 5)
    found = FederatedClassifier(fair=fair, lr=0.2, q=1, rounds=600, batch_size=ROWS, standardize=False)
    found.fit(constant_sites())
    assert found.decision_function(np.zeros((1, 2)))[0] == pytest.approx(truth, abs=1e-3)
    mean = np.log(RATES.mean() / (1 - RATES.mean()))
    assert abs(truth - mean) > 0.1
    assert losses(truth).max() < losses(mean).max()
    assert found.choice_.name == fair.way


def crossed_sites(seed: int = 0) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Four sites where a mark agrees with the class, and one where it disagrees; another feature says it everywhere."""
    rng, sites = np.random.default_rng(seed), {}
    for n in range(5):
        y = (rng.random(200) < 0.4).astype(int)
        agrees = rng.random(200) < (0.05 if n == 4 else 0.95)
        x = np.stack([np.where(agrees, y, 1 - y) - 0.5, y + rng.normal(size=200)], 1)
        sites[str(n)] = (x, y)
    return sites, sites["4"]


@pytest.mark.parametrize("kind", [FederatedAUC, FederatedAUPRC, FederatedClassifier])
@pytest.mark.parametrize(
    "fair", ["kl-dro", "agnostic", Fair("cvar", 0.2), Fair("q-ffl", 5.0), Fair("kl-dro", alone=20)]
)
def test_the_site_with_the_opposite_mark_is_better_off(kind: Any, fair: Any) -> None:
    if kind is FederatedAUPRC and fair == Fair("q-ffl", 5.0):
        pytest.skip("rejected, see below")
    sites, (x, y) = crossed_sites()
    quick = {"rounds": 40, "q": 4}
    plain, found = kind(**quick).fit(sites), kind(fair=fair, **quick).fit(sites)
    before, after = (auroc(one.decision_function(x), y) for one in (plain, found))
    assert after > before + 0.05


def test_a_protected_estimator_is_copied_and_saved(tmp_path: Any) -> None:
    sites, (x, _) = crossed_sites()
    found = FederatedClassifier(fair="kl-dro", rounds=2, q=2).fit(sites)
    assert clone(found).fair == "kl-dro"
    again = FederatedClassifier.load(found.save(tmp_path / "model"))
    assert again.fair == "kl-dro"
    np.testing.assert_array_equal(again.decision_function(x), found.decision_function(x))
    assert clone(FederatedAUC(fair=Fair("cvar", 0.3))).fair == Fair("cvar", 0.3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Fair("kldro"), "no protection 'kldro'; did you mean kl-dro"),
        (lambda: Fair("cvar", 2.0), r"cvar-dro: rho must be in \(0, 1\]"),
        (lambda: Fair(k=-1), "k must be at least 0"),
        (lambda: FederatedAUC(fair=3).fit(crossed_sites()[0]), "fair must be kl-dro, cvar, q-ffl, agnostic"),
        (lambda: FederatedAUC(fair="cvar", method="fmgda").fit(crossed_sites()[0]), "both choose the method"),
        (lambda: FederatedAUPRC(fair="q-ffl").fit(crossed_sites()[0]), "needs losses of at least 0"),
        (
            lambda: FederatedAUC(fair="cvar").fit({**crossed_sites()[0], "one": (np.ones((9, 2)), np.ones(9, int))}),
            "Site one has rows of one class only",
        ),
    ],
)
def test_rejected(make: Any, sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        make()
