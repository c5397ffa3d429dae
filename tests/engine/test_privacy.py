"""Privacy: the accountant's published values, the noise that is really there, and what one client can change."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from nestfed import Examples, Minimize
from nestfed import simulate as run_public
from nestfed.algorithms import FedAvg, build
from nestfed.core import NestfedError
from nestfed.engine import privacy
from nestfed.engine.options import Evaluation, Exchange, Gaussian
from nestfed.engine.privacy import Noise, epsilon
from tests.methods import Q, method, run_some, setting
from tests.support import close, simulate

pytest.importorskip("dp_accounting", reason="the accountant is an extra: pip install 'nestfed[privacy]'")

CLIP = {"clip": 0.5, "noise": 2.0}


# --- the accountant ---


@pytest.mark.parametrize(
    ("n", "batch", "noise", "epochs", "delta", "published"),
    # The values of TensorFlow Privacy's compute_dp_sgd_privacy_test.py, which uses the same accountant.
    [(60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595), (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444842)],
)
def test_published_values(n: int, batch: int, noise: float, epochs: int, delta: float, published: float) -> None:
    assert epsilon(noise, batch / n, epochs * n // batch, delta) == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (5.0, 10), (20.0, 100)])
def test_without_sampling_it_is_near_the_exact_value(noise: float, rounds: int) -> None:
    """T Gaussian rounds are one with noise/√T, whose ε is known exactly (Balle and Wang 2018, Theorem 8)."""
    sigma, delta = noise / math.sqrt(rounds), 1e-5

    def exact(e: float) -> float:
        return float(norm.cdf(0.5 / sigma - e * sigma) - math.exp(e) * norm.cdf(-0.5 / sigma - e * sigma))

    found = epsilon(noise, 1.0, rounds, delta)
    assert exact(found) <= delta  # it promises no more than is true
    assert exact(0.85 * found) > delta  # and not much less


def test_what_it_depends_on() -> None:
    base = epsilon(1.0, 0.1, 100, 1e-5)
    assert epsilon(2.0, 0.1, 100, 1e-5) < base < epsilon(1.0, 0.2, 100, 1e-5)
    assert base < epsilon(1.0, 0.1, 200, 1e-5)
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0


def test_the_accountant_leaves_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """absl configures the root logger at its first warning if the user has not."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    assert epsilon(1.0, 0.5, 10, 1e-5) > 0  # skips some orders
    assert root.handlers == []


def test_a_missing_accountant_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(NestfedError, match=r"pip install 'nestfed\[privacy\]'"):
        run_some("fcsg-m", 1, **CLIP, participation=None)


# --- the noise ---


class Still:
    """A problem on which nobody moves: what is left is noise."""

    def __init__(self, d: int = 4000, clients: int = 10) -> None:
        self.problem = Minimize(lambda x, b: 0.0 * x.sum() * b[0].sum(), torch.zeros(d))
        self.clients = Examples((torch.zeros(clients, 1),), list(np.arange(clients)[:, None]), batch=1)


@pytest.mark.parametrize(("participation", "expected"), [(None, 10.0), (0.5, 5.0)])
def test_every_field_has_the_noise_that_was_promised(participation: Any, expected: float) -> None:
    still = Still()
    found = simulate(
        still.problem, build("fcsg-m", alpha=0.1, beta=0.5), still.clients, rounds=1, participation=participation,
        progress=False, **CLIP,
    )  # fmt: skip
    assert set(found.shared) == {"x", "u"}
    both = torch.cat([found.shared["x"], found.shared["u"]]) * expected / (2.0 * 0.5)
    assert abs(float(both.mean())) < 5 / math.sqrt(8000)
    assert float(both.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * 8000))
    assert abs(float((found.shared["x"] * found.shared["u"]).mean())) < 5 / 100 / math.sqrt(4000)  # not twice the same


def test_the_noise_of_rounds_is_independent_and_also_there_when_nobody_comes() -> None:
    still = Still(1000)
    points: list[Tensor] = []
    result = simulate(
        still.problem, FedAvg(0.1), still.clients, rounds=40, participation=0.05, progress=False, **CLIP,
        measure=lambda shared, private: points.append(shared["x"].clone()) or {},
    )  # fmt: skip
    assert 0 in [r["participants"] for r in result.history[1:]]
    steps = torch.stack([b - a for a, b in itertools.pairwise(points)])
    assert (steps.std(1) * 0.5 / 1.0 - 1).abs().max() < 0.15
    assert abs(float(torch.corrcoef(steps).fill_diagonal_(0).abs().max())) < 0.2


def test_engines_agree_and_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {**CLIP, "participation": 0.7}
    loop = run_some("fmgda", mode="loop", workers=1, **options)
    close(run_some("fmgda", mode="vmap", workers=1, **options), loop)
    close(run_some("fmgda", mode="loop", workers=2, **options), loop)
    run_some("fmgda", 2, mode="loop", workers=1, directory=tmp_path, **options)
    again = run_some("fmgda", 4, mode="loop", workers=1, directory=tmp_path, **options)
    assert all(torch.equal(v, loop.shared[k]) for k, v in again.shared.items())
    assert (tmp_path / "privacy.txt").read_text().strip() == loop.privacy


def test_nothing_without_noise_is_recorded() -> None:
    history = run_some("fcsg-m", participation=None, **CLIP).history
    assert {(r["loss"], r["drift"]) for r in history} == {(None, None)}


def test_one_client_changes_the_published_sum_by_no_more_than_the_clip() -> None:
    """The sensitivity that the accountant believes in, with the noise held fixed."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    parts = list(np.arange(40).reshape(10, 4))
    problem = Minimize(lambda m, b: ((b[0] - m) ** 2).sum(), torch.zeros(3))

    def published(arrays: Tensor) -> Tensor:
        return simulate(
            problem, FedAvg(0.5), Examples((arrays,), parts, batch=4), rounds=1, q=3, progress=False, **CLIP
        ).x

    first = published(x)
    for scale in (0.01, 1.0, 1e6):
        changed = x.clone()
        changed[8:12] = scale * torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        # Replacing a client is removing one and adding another.
        assert float((published(changed) - first).norm()) * 10 <= 2 * 0.5 + 1e-4


# --- the tighter accountant, states that cannot be negative, choices ---


def exact_epsilon(noise: float, rounds: int, delta: float) -> float:
    """ε of `rounds` Gaussian mechanisms without sampling, in closed form (Balle & Wang 2018, Theorem 8)."""
    from scipy.optimize import brentq

    sigma = noise / np.sqrt(rounds)

    def excess(e: float) -> float:
        return float(norm.cdf(0.5 / sigma - e * sigma) - np.exp(e) * norm.cdf(-0.5 / sigma - e * sigma) - delta)

    return float(brentq(excess, 0, 200))


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 100)])
def test_the_pld_accountant_is_exact_without_sampling(noise: float, rounds: int) -> None:
    exact = exact_epsilon(noise, rounds, 1e-5)
    tight, loose = (epsilon(noise, 1.0, rounds, 1e-5, kind) for kind in ("pld", "rdp"))
    assert tight == pytest.approx(exact, rel=1e-3)
    assert tight < loose


def test_the_documented_example() -> None:
    """500 clients, each with probability 0.1, noise 1.0, 100 rounds: 7.90 by RDP, 7.05 by PLD."""
    assert epsilon(1.0, 0.1, 100, 1e-5) == pytest.approx(7.904, abs=5e-4)
    assert epsilon(1.0, 0.1, 100, 1e-5, "pld") == pytest.approx(7.05, abs=5e-3)


@pytest.mark.parametrize("noise", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("clip", [0.1, 1.0])
@pytest.mark.parametrize(
    ("name", "scalar"), [("fafed", False), ("fafed", True), ("ada-fcsg-m", None), ("ada-fmgda", None)]
)
def test_states_that_cannot_be_negative_survive_noise(
    name: str, scalar: bool | None, clip: float, noise: float
) -> None:
    """FAFED once stopped in round 2: noise made its second moment negative, and the error blamed the step size."""
    s, made = setting(name), method(name)
    if scalar is not None:
        made = replace(made, norm=scalar)
    exchange = Exchange(privacy=Gaussian(clip=clip, noise=noise))
    result = run_public(s.problem, made, s.clients, rounds=8, q=Q, seed=0, exchange=exchange, progress=False)
    assert torch.isfinite(result.x).all()
    assert all((result.shared[k] >= 0).all() for k in made.nonnegative)


def test_choosing_by_metrics_without_noise_is_rejected() -> None:
    s = setting("fedavg")
    with pytest.raises(NestfedError, match=r"evaluation\.keep = 'best' would choose by metrics without noise"):
        run_public(
            s.problem, method("fedavg"), s.clients, rounds=2, q=1, seed=0, evaluate=lambda model: {"loss": 0.0},
            exchange=Exchange(privacy=Gaussian(clip=1.0, noise=1.0)),
            evaluation=Evaluation(keep="best", metric="log_loss"), progress=False,
        )  # fmt: skip


# --- words ---


def test_the_statement_says_what_it_rests_on() -> None:
    blur = Noise.plan(Exchange(share=0.1, privacy=Gaussian(clip=0.5, noise=2.0)), 100)
    assert blur is not None
    text = blur.statement(50, ("x", "u"))
    rdp, pld = (epsilon(2.0, 0.1, 50, 1e-5, kind) for kind in ("rdp", "pld"))
    assert f"ε = {rdp:.4g} (RDP accountant; {pld:.4g} by the tighter PLD accountant) at δ = 1e-05" in text
    for words in ("50 rounds", "one client with all its examples", "probability 0.1", "x, u jointly", "clipped to 0.5"):
        assert words in text


def test_an_empty_promise_costs_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any noise the PLD accountant once took ten seconds at the start of every run."""
    asked: list[str] = []
    monkeypatch.setattr(privacy, "epsilon", lambda *given: asked.append(given[4] if len(given) > 4 else "rdp") or 1e4)
    blur = Noise.plan(Exchange(privacy=Gaussian(clip=1.0, noise=0.1)), 4)
    assert blur is not None
    assert "ε = 1e+04 (RDP accountant) at" in blur.statement(8, ("x",))
    assert asked == ["rdp"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({**CLIP, "reduce": "median"}, "not 'median'"),
        ({**CLIP, "reduce": "clip:1.0"}, "not 'clip:1.0'"),
        ({**CLIP, "weights": "examples"}, "no privacy"),
        ({**CLIP, "noise": -1.0}, r"exchange\.privacy\.noise must be a finite number above 0, not -1"),
        ({**CLIP, "noise": float("nan")}, r"exchange\.privacy\.noise must be a finite number above 0, not nan"),
        ({**CLIP, "clip": 0.0}, r"exchange\.privacy\.clip must be a finite number above 0, not 0"),
        ({**CLIP, "participation": 2}, r"set exchange\.share instead of exchange\.count = 2"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        run_some("fcsg-m", 1, **{"participation": None, **options})
