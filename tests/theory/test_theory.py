"""Theory: settings by hand, rates on a log-log grid, speed-up, conditions, and runs that stay below their bound."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from nestfed.core import NestfedError, at
from nestfed.theory import COMPLEXITY, METHODS, CubeRoot, Squared, adaptive, prescribe
from nestfed.theory.base import sum_of_cubes
from tests.algorithms import boxes

BOUNDED = [name for name, row in METHODS.items() if row.bound is not None]
RATE = {
    "fcsg": 1 / 2,
    "fcsg-m": 1 / 2,
    "acc-fcsg-m": 2 / 3,
    "local-scgdm": 1 / 2,
    "fmgda": 2 / 3,
    "fafed": 2 / 3,
}


# --- Settings computed by hand ---


def test_fcsg_by_hand():
    p = prescribe("fcsg", N=2, T=20_000, L_f=2, L_g=3, S_f=0.5, S_g=0.25, sigma_g=0.1, F0=7, m=50)
    S_F = 0.25 * 2 + 0.5 * 9
    assert p.derived["S_F"] == S_F == 5
    assert p["alpha"] == pytest.approx(0.01 / 30)
    assert p.q == 7  # 2500^(1/4) = 7.07
    terms = p.bound().terms
    assert terms["initial gap"] == pytest.approx(14 * 30 / 0.01 / 20_000)
    assert terms["bias"] == pytest.approx(2 * 9 * 0.25 * 0.01 / 50)
    assert terms["variance"] == pytest.approx(2 * (0.01 / 30) * 5 * 36 / 2)
    assert terms["client drift"] == pytest.approx(78 * 42 * (0.01 / 30) ** 2 * 25 * 36)
    assert p.bound().total == pytest.approx(sum(terms.values()))
    assert p.bound().dominant == "initial gap"


def test_corollary_4_5():
    """FCSG-M's corollary with B = 1: 12 S_F F0, 112/15 (1 + 1/N ≤ 2), 48/5 and 20/3, all over √(NT)."""
    N, T = 4, 4**3 * 30**4
    p = prescribe("fcsg-m", N=N, T=T, F0=3)
    assert p.q == 30
    unit = 1 / math.sqrt(N * T)
    terms = p.bound().terms
    assert p["beta"] == pytest.approx(5 / 6 * math.sqrt(N / T))
    assert terms["initial gap"] == pytest.approx(12 * 2 * 3 * unit)
    assert terms["client drift"] == pytest.approx(8 / 15 * (13 + 1 / N) * unit)
    assert terms["client drift"] <= 112 / 15 * unit
    assert terms["initial estimate"] == pytest.approx(48 / 5 * unit)
    assert terms["variance"] == pytest.approx(20 / 3 * unit)


def test_corollary_4_8():
    """Acc-FCSG-M's corollary: β = cα² = 5N^(1/3)/(24bT^(2/3)), and its constants over (NT)^(2/3)."""
    N, T, b = 8, 8**2 * 50**3, 3
    p = prescribe("acc-fcsg-m", N=N, T=T, b=b, L_f=2, L_g=0.5)
    S_F = 2 + 0.25
    assert (p.q, p.B) == (50, 50)
    assert p["alpha"] == pytest.approx(1 / (12 * 50 * S_F))
    assert p["beta"] == pytest.approx(30 * S_F**2 / (b * N) * p["alpha"] ** 2)
    assert p["beta"] == pytest.approx(5 * N ** (1 / 3) / (24 * T ** (2 / 3) * b))
    unit = (N * T) ** (-2 / 3)
    terms = p.bound().terms
    assert terms["initial gap"] == pytest.approx(24 * S_F * unit)
    assert terms["initial estimate"] == pytest.approx(72 * b / 5 * unit)
    assert terms["client drift"] == pytest.approx(325 / (24 * b**2) * unit)
    assert terms["variance"] == pytest.approx(5 / (4 * b**2) * unit)
    assert p.m == pytest.approx((N * T) ** (2 / 3), abs=1)


def test_theorem_4_7_with_its_printed_beta_does_not_vanish():
    totals = []
    for T in (10**6, 10**9, 10**12):
        p = prescribe("acc-fcsg-m", N=4, T=T)
        printed = p.replace(beta=5 * 2 * p["alpha"])
        assert printed.violated() == []
        totals.append(printed.bound().terms["client drift"])
    assert totals == pytest.approx([13 / 6 * 25] * 3)


def test_local_scgdm_by_hand():
    p = prescribe("local-scgdm", N=5, T=10_000, L_g=0.5, C_g=2, delta_g=0.1, sigma_f=0.3, sigma_g=0.2, F0=2)
    L_F = 4 + 0.5
    beta = 1 / math.sqrt(16 * 16 + 8 * L_F**2)  # Remark 3.6
    assert p["beta"] == pytest.approx(beta)
    assert (p["eta"], p.q) == (0.01, 10)
    gradient, inner = 4 * 0.09 + 0.04, 4 * 0.01
    expected = [
        4 / (beta * 100),
        6 * (gradient + inner) / 100,
        4 * inner / 100,
        4 * 0.01 * inner,
        4 * 0.01 * gradient,
        4e-4 * inner,
        32 * 100 * beta**2 * 1e-4 * L_F**2 * (16 * inner + 0.36 + 0.12),
    ]
    assert list(p.bound().terms.values()) == pytest.approx(expected)
    assert p.violated() == []


def test_fmgda_by_hand():
    p = prescribe("fmgda", N=8, T=8**2 * 10**3, L_f=2, mu=0.5, b=2, w0=0.3, F0=0.7, sigma=0.4, zeta=0.6)
    kappa, L = 4, 10
    h = 4 / L
    c1 = 1 / (20 * L * 10 * h**3) + 60 * L**2 / 16
    assert (p.q, p.B) == (10, 20)
    eta = p["eta"]
    assert at(eta, 0) == pytest.approx(1 / (12 * L * 10))  # 1728 = 12³
    assert at(eta, 10**9) == pytest.approx(h / (1.5 + 10**9) ** (1 / 3))
    assert at(p["alpha"], 7) == pytest.approx(c1 * at(eta, 7) ** 2)
    assert p["c"] == pytest.approx(0.99 * 0.5 / 60)
    assert p["c_hat"] == pytest.approx(math.sqrt(17 / 14400) * p["c"] / kappa**2)
    e, T = 1 / 1200, 64_000  # flat up to T
    span = e * T
    expected = [
        1.4 / (p["c_hat"] * span),
        12 * 4 * 0.3 / (p["c"] * 0.5 * span),
        2 * 0.16 / (20 * 100 * 20 * e * span),
        5 * 2 * 4 * 0.16 / (2 * 0.25 * 100 * 20 * e * span),
        2 * e**2 * 0.16 * c1**2 / 2000,
        2 * e**2 * 5 * 4 * 0.16 * c1**2 / (2 * 0.25 * 100),
        2 * e**2 * 0.16 * 2 * c1**2 / (20 * 2 * 100),
        2 * e**2 * 0.36 * 2 * c1**2 / 800,
    ]
    assert list(p.bound().terms.values()) == pytest.approx(expected)
    (sentence,) = p.violated()
    assert "8000" in sentence
    constants = {"N": 8, "T": 64_000, "L_f": 2, "mu": 0.5, "b": 2}
    assert prescribe("fmgda", **constants, e_factor=8000).violated() == []


def test_fafed_by_hand():
    p = prescribe("fafed", N=8, T=64_000, L=2, b=2, rho=0.5, sigma=0.4, zeta=0.6, F0=0.7, G=3)
    h, q, T = 2.0, 10, 64_000
    c = 1 / (12 * 2 * q * h**3 * 0.25) + 60 * 4 / (16 * 0.25)
    assert (p.q, p.B) == (10, 20)
    assert p.derived["c"] == pytest.approx(c)
    e = 0.5 / (12 * 2 * q)  # η_t = ρ/(12Lq) as long as it is flat
    assert at(p["eta"], 0) == at(p["eta"], T) == pytest.approx(e)
    assert at(p["alpha"], 0) == 1
    assert at(p["alpha"], 5) == pytest.approx(c * e**2)
    expected = [
        0.7 / (0.5 * e * T),
        2 * 0.16 / (24 * 4 * 20 * e * e * T),
        e**2 * c**2 / 4 * 5 * 0.16 / 24,
        e**2 * c**2 / 4 * 3 * 0.36 / 8,
    ]
    assert list(p.bound().terms.values()) == pytest.approx(expected)
    assert p.derived["G'"] == pytest.approx(4 * math.sqrt(0.16 + 9 + 0.25))
    assert f"G' = {4 * math.sqrt(9.41):.6g}" in "\n".join(p.lines())
    # the printed right-hand side of Theorem 2, with its two slips corrected, is an upper bound of this one
    unit = (N_T := 8 * T) ** (-2 / 3)
    assert N_T == 512_000
    first = (12 * 2 * q / T + 2 * unit) / 0.25 * 0.7
    second = 6 * q * 0.16 / (T * 0.25) + 0.16 * unit / (2 * 0.25)
    third = (144 * 150 * q / T + 1800 * unit) / (4 * 0.25) * (5 * 0.16 / 3 + 3 * 0.36) * (math.log(T) + 1)
    printed = adaptive.fafed_bound(p, printed=True)
    assert p.bound().total < printed.total < first + second + third


def test_stem_schedule():
    p = prescribe("stem", N=4, T=4**2 * 8**3, b=2, L=3, sigma=0.5)
    kappa = 8 ** (2 / 3) * 0.5 ** (2 / 3) / 3
    assert p.q == 8
    assert p.derived["kappa_bar"] == pytest.approx(kappa)
    assert at(p["eta"], 0) == pytest.approx(1 / (16 * 3 * 8))
    assert at(p["a"], 4) == pytest.approx(p.derived["c"] * at(p["eta"], 3) ** 2)
    assert p.violated() == []
    assert p.bound() is None
    # the FAFED paper's experiment: κ̄ = 20, w = σ = 1
    eta = prescribe("stem", N=16, T=1000, kappa_bar=20, w=1, c=0.01)["eta"]
    assert [at(eta, t) for t in (0, 7, 26)] == pytest.approx([20, 10, 20 / 3])


# --- Rates ---


@pytest.mark.parametrize("name", BOUNDED)
def test_rate_in_T(name):
    """The corollary's settings make the bound fall like T^-rate (the logarithm taken out)."""
    grid = np.array([1e14, 1e15, 1e16, 1e17, 1e18])
    totals = np.array([prescribe(name, N=16, T=int(T)).bound().total for T in grid])
    slope = np.polyfit(np.log(grid), np.log(totals), 1)[0]
    assert slope == pytest.approx(-RATE[name], abs=0.005)
    rounds = np.array([T / prescribe(name, N=16, T=int(T)).q for T in grid])
    samples = grid * np.array([prescribe(name, N=16, T=int(T)).m or 1 for T in grid])
    # ε² is the bound: the exponents of the complexities follow from the same grid
    epsilon = np.sqrt(totals)
    cost = COMPLEXITY[name]
    assert np.polyfit(np.log(epsilon), np.log(samples), 1)[0] == pytest.approx(-cost.sample, abs=0.05)
    assert np.polyfit(np.log(epsilon), np.log(rounds), 1)[0] == pytest.approx(-cost.communication, abs=0.05)


@pytest.mark.parametrize("name", BOUNDED)
def test_speedup(name):
    """Twice the clients are worth twice the iterations, where the paper promises a linear speed-up."""
    T = 10**16
    one, more = prescribe(name, N=16, T=2 * T).bound().total, prescribe(name, N=32, T=T).bound().total
    if COMPLEXITY[name].speedup:
        assert more == pytest.approx(one, rel=0.02)
    else:
        assert more == prescribe(name, N=16, T=T).bound().total


@pytest.mark.parametrize("name", ["fmgda", "fafed"])
def test_printed_logarithm(name):
    bound = METHODS[name].bound
    values = []
    for T in (10**12, 10**15):
        p = prescribe(name, N=16, T=T)
        printed, exact = bound(p, printed=True), bound(p)
        assert printed.total > exact.total
        values.append(sum(v for k, v in printed.terms.items() if "initial" not in k) / math.log(T))
    assert math.log(values[1] / values[0]) / math.log(1000) == pytest.approx(-2 / 3, abs=0.01)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("T", [1, 5, 40, 3000])
@pytest.mark.parametrize("start", [0.0, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("slope", [1.0, 0.3])
def test_sum_of_cubes(first, T, start, slope):
    eta = CubeRoot(scale=2.0, start=start, least=1.5, slope=slope)
    direct = sum(eta(t) ** 3 for t in range(first, T + first))
    assert sum_of_cubes(eta, T, first, printed=False) == pytest.approx(direct, rel=1e-9)
    assert sum_of_cubes(lambda t: eta(t), T, first, printed=False) == pytest.approx(direct)
    if slope == 1:
        assert sum_of_cubes(eta, T, first, printed=True) >= direct
    assert sum_of_cubes(0.5, T, first, printed=False) == T / 8


def test_monotone():
    for name in BOUNDED:
        base = prescribe(name, N=8, T=10**8)
        assert base.replace(q=base.q + 5).bound().total >= base.bound().total
        assert prescribe(name, N=8, T=10**8, F0=2).bound().total > base.bound().total
        assert prescribe(name, N=8, T=10**10).bound().total < base.bound().total
    m = [prescribe("fcsg", N=8, T=10**6, m=m).bound().terms["bias"] for m in (1, 10, 100)]
    assert m[0] == pytest.approx(10 * m[1]) == pytest.approx(100 * m[2])  # O(1/m)
    zeta = [prescribe("fafed", N=8, T=10**8, zeta=z).bound().total for z in (0, 1, 2)]
    assert zeta == sorted(zeta)
    assert prescribe("fafed", N=8, T=10**8, zeta=0).bound().terms["heterogeneity"] == 0


# --- Conditions ---


@pytest.mark.parametrize("name", METHODS)
def test_prescribed_settings_keep_the_conditions(name):
    extra = {"e_factor": 8000} if name == "fmgda" else {}
    for N in (1, 3, 16):
        for T in (10**4, 10**6, 10**9 + 7):
            assert prescribe(name, N=N, T=T, **extra).violated() == []


def test_violated():
    p = prescribe("fcsg", N=4, T=10**6)
    limit = 1 / (6 * p.q * 2)
    assert p.replace(alpha=limit).violated() == []
    (sentence,) = p.replace(alpha=limit * 1.01).violated()
    assert sentence.startswith("alpha = ")
    assert sentence.endswith(".")

    p = prescribe("fcsg-m", N=4, T=10**6)
    assert len(p.replace(beta=3 * 2 * p["alpha"]).violated()) == 1
    assert len(p.replace(beta=1.5).violated()) == 1
    p = prescribe("acc-fcsg-m", N=4, T=10**6)
    assert len(p.replace(beta=p["beta"] / 2).violated()) == 1
    assert len(p.replace(beta=82 * p.q * 4 * p["alpha"] ** 2).violated()) == 1
    assert len(p.replace(q=p.q + 1).violated()) == 1  # between 1/(12 q S_F) and the theorem's 1/(6 q S_F)
    assert any("alpha" in s for s in prescribe("acc-fcsg-m", N=100, T=100).violated())  # T < N²

    p = prescribe("local-scgdm", N=4, T=10**6)
    assert any("q = " in s for s in p.replace(q=10**5).violated())
    assert any("alpha eta" in s for s in p.replace(alpha=2000.0).violated())
    assert any("beta" in s for s in p.replace(beta=1.0).violated())
    p = prescribe("fmgda", N=4, T=10**6, e_factor=8000)
    assert any("c_hat" in s for s in p.replace(c_hat=p["c"]).violated())
    assert any("600" in s for s in prescribe("fmgda", N=1, T=8, b=10**5, e_factor=8000).violated())
    assert any("mu" in s for s in prescribe("fmgda", N=4, T=10**6, mu=2).violated())
    p = prescribe("fafed", N=4, T=10**6)
    assert len(p.replace(eta=1.0, alpha=30.0).violated()) == 1
    assert len(p.replace(eta=1e-4, alpha=1e-8).violated()) == 1
    assert any("720" in s for s in prescribe("fafed", N=1, T=8, b=10**5).violated())


def test_constant_step_for_a_scheduled_theorem():
    p = prescribe("fafed", N=4, T=10**6)
    e = at(p["eta"], 0)
    flat = p.replace(eta=e, alpha=p.derived["c"] * e**2)
    assert flat.bound().total == pytest.approx(p.bound().total)
    with pytest.raises(NestfedError, match="Squared"):
        p.replace(alpha=0.1).bound()
    with pytest.raises(NestfedError, match="constant alpha"):
        prescribe("fcsg", N=4, T=100).replace(alpha=lambda t: 0.1).bound()


# --- Runs stay below their bound ---


@pytest.mark.parametrize("name", ["fcsg", "fcsg-m", "acc-fcsg-m"])
def test_a_run_stays_below_its_bound(name):
    """f_ξ(u) = √(1+(u−ξ)²), g_η(x) = x + η: L_f = S_f = L_g = 1, S_g = 0; four clients with their own ξ."""
    N, T, sigma = 4, 4096, 0.5
    xi = np.array([[-2.0, 0.0], [-1.0, 1.0], [0.0, 2.0], [1.0, 5.0]])
    x0 = np.array([6.0])

    def F(x):
        return np.sqrt(1 + (x - xi) ** 2).mean()

    def slope(x):
        return ((x - xi) / np.sqrt(1 + (x - xi) ** 2)).mean()

    F0 = F(x0[0]) - min(F(x) for x in np.linspace(-3, 6, 2000))
    p = prescribe(name, N=N, T=T, S_g=0, sigma_g=sigma, F0=F0, m=16)
    assert p.violated() == []
    rng = np.random.default_rng(1)
    centre = xi[np.arange(N)[:, None], rng.integers(0, 2, size=(N, T))]
    shift = sigma / 4 * rng.normal(size=(N, T))  # the mean of 16 inner samples

    def grad(n, t, x):
        u = x + shift[n, t] - centre[n, t]
        return u / np.sqrt(1 + u**2)

    if name == "fcsg":
        X = boxes.fcsg(grad, x0, N, p.q, T, p["alpha"])
    else:
        X = getattr(boxes, name.replace("-", "_"))(grad, x0, N, p.q, T, p["alpha"], p["beta"])["x"]
    mean = np.mean([slope(x) ** 2 for x in X[:T].mean(axis=1)[:, 0]])
    assert mean <= p.bound().total


# --- The front door ---


@pytest.mark.parametrize("name", METHODS)
def test_lines(name):
    p = prescribe(name, N=16, T=10_000)
    rows = p.lines()
    assert all(isinstance(row, str) and "\n" not in row for row in rows)
    assert rows[0].startswith(METHODS[name].title)
    text = "\n".join(rows)
    assert f"q = {p.q}" in text
    assert COMPLEXITY[name].sample_text in text
    for step in p.steps:
        assert f"\n{step} = " in text
    assert pickle.loads(pickle.dumps(p)) == p  # schedules survive a checkpoint


def test_prescribe_answers_mistakes_in_one_sentence():
    def refusal(*args, **kwargs):
        with pytest.raises(NestfedError) as caught:
            prescribe(*args, **kwargs)
        message = str(caught.value)
        assert message.endswith((".", "?"))
        assert "\n" not in message
        return message

    assert "did you mean fcsg" in refusal("fcgs", N=1, T=1)
    assert "choose " in refusal("zzz", N=1, T=1)
    assert "needs N and T; optional constants are b=1" in refusal("fcsg")
    assert "needs T;" in refusal("fafed", N=3)
    assert "did you mean sigma?" in refusal("fafed", N=3, T=3, sigmas=1)
    assert "whole number" in refusal("fcsg", N=2.5, T=10)
    assert "whole number" in refusal("fcsg", N=0, T=10)
    assert "positive" in refusal("fcsg", N=1, T=10, L_f=0)
    assert "at least 0" in refusal("fcsg", N=1, T=10, sigma_g=-1)
    assert "finite" in refusal("fcsg", N=1, T=10, F0=math.nan)
    assert "finite" in refusal("fcsg", N=1, T=10, F0="1")
    assert "both" in refusal("fcsg", N=1, T=10, S_f=0, S_g=0)
    assert "sigma > 0" in refusal("stem", N=1, T=10, sigma=0)
    with pytest.raises(NestfedError, match="not 'gamma'"):
        prescribe("fcsg", N=1, T=10).replace(gamma=1.0)
    with pytest.raises(NestfedError, match="q must be"):
        prescribe("fcsg", N=1, T=10).replace(q=0)
    assert prescribe("ACC_FCSG_M", N=1, T=10).method == "acc-fcsg-m"


def test_small_problems_round_sensibly():
    p = prescribe("fcsg", N=16, T=1)
    assert (p.q, p.B, p.m) == (1, 1, 4)
    assert prescribe("fcsg", N=1, T=10_000).q == 10
    assert prescribe("acc-fcsg-m", N=1, T=1000).q == 10
    assert prescribe("acc-fcsg-m", N=1, T=1001).B == 11
    assert Squared(1e9, 1.0)(3) == 1


def test_complexities():
    assert COMPLEXITY["acc-fcsg-m"].sample_text == "O(N^-1 ε^-5)"
    assert COMPLEXITY["fmgda"].communication_text == "Õ(ε^-2)"
    assert COMPLEXITY["bsgd"].communication_text == "none"
    assert set(METHODS) <= set(COMPLEXITY)
