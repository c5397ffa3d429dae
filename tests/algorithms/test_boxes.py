"""The boxes themselves: identities between them, and numbers printed in the papers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.algorithms import boxes

N, d, T = 3, 4, 13
rng = np.random.default_rng(0)
x0 = rng.normal(size=d)
Q = rng.normal(size=(N, d, d)) / 4
Q = Q + np.swapaxes(Q, 1, 2)
noise = rng.normal(size=(N, T + 1, d))
scale = 1 + 0.3 * rng.normal(size=(N, T + 1))
p = 5
G = rng.normal(size=(N, T + 1, p, d)) / 2
theta0, w0 = rng.normal(size=d), rng.normal(size=2)
C = rng.normal(size=(N, T + 1, d, 2)) / 2


def grad(n, t, x):
    return scale[n, t] * np.sin(Q[n] @ x) + noise[n, t]


def g(n, t, x):
    return np.tanh(G[n, t] @ x)


def jac(n, t, x):
    return (1 - np.tanh(G[n, t] @ x) ** 2)[:, None] * G[n, t]


def outer(n, t, u):
    return u**3 + noise[n, t, 0]


def minimax(n, t, theta, w):
    return np.sin(Q[n] @ theta) + C[n, t] @ w, C[n, t].T @ theta - w


same = np.testing.assert_allclose


@pytest.mark.parametrize("q", [1, 3, 5])
def test_conditional(q):
    ref = boxes.fedavg(grad, x0, N, q, T, 0.1)
    assert ref.shape == (T + 1, N, d)
    same(boxes.fcsg(grad, x0, N, q, T, 0.1), ref)
    same(boxes.fcsg_m(grad, x0, N, q, T, 0.1, 1.0)["x"], ref)
    same(boxes.acc_fcsg_m(grad, x0, N, q, T, 0.1, 1.0)["x"], ref)
    same(boxes.fedprox(grad, x0, N, q, T, 0.1, 0.0), ref)
    same(boxes.bsgd(grad, x0, T, 0.1), boxes.fedavg(grad, x0, 1, q, T, 0.1))
    # with β = 0 the accelerated estimator is BSpiderBoost's between two restarts
    same(
        boxes.bspiderboost(grad, x0, T, T, 0.1)["x"],
        boxes.acc_fcsg_m(grad, x0, 1, 1, T, 0.1, 0.0)["x"],
    )
    same(boxes.bspiderboost(grad, x0, 1, T, 0.1)["x"], boxes.bsgd(grad, x0, T, 0.1))


@pytest.mark.parametrize("q", [1, 3, 5])
def test_averaging_points(q):
    for X in (
        boxes.fcsg(grad, x0, N, q, T, 0.1),
        boxes.acc_fcsg_m(grad, x0, N, q, T, 0.1, 0.5)["x"],
        boxes.local_scgdm(g, jac, outer, x0, N, q, T, 0.5, 0.5, 0.1, 0.5)["x"],
        boxes.fmgda(minimax, theta0, w0, N, q, T, 0.1, 1, 1, 0.5, 0.5)["theta"],
    ):
        for t in range(1, T + 1):
            assert (np.ptp(X[t], axis=0).max() < 1e-14) == (t % q == 0)
    for out in (
        boxes.fafed(grad, x0, N, q, T, 0.1, 0.5, 0.9, 0.1),
        boxes.stem(grad, x0, N, q, T, 0.1, 0.5),
    ):
        X = out["x"]
        assert X.shape == (T, N, d)
        for t in range(1, T):
            common = t % q == 0 or t % q == 1  # all move alike from the averages
            assert (np.ptp(X[t], axis=0).max() < 1e-14) == common


@pytest.mark.parametrize("q", [1, 3])
def test_variance_reduced_keep_the_local_point(q):
    """With a constant gradient difference the recursion is exact: β = 0 and no noise tracks the gradient."""

    def exact(n, t, x):
        return Q[n] @ x

    out = boxes.acc_fcsg_m(exact, x0, 1, q, T, 0.1, 0.0)
    for t in range(T):
        same(out["u"][t + 1, 0], Q[0] @ out["x"][t, 0], atol=1e-12)
    m = boxes.fafed(exact, x0, 1, q, T, 0.1, 0.0, 0.9, 0.1)
    for t in range(T):
        same(m["m"][t, 0], Q[0] @ m["x"][t, 0], atol=1e-12)
    # several clients that average every time: the mean of d is the mean of the local gradients
    many = boxes.stem(exact, x0, N, 1, T, 0.1, 0.0)
    same(many["d"][:, 0], [np.mean([Q[n] @ x[n] for n in range(N)], axis=0) for x in many["x"]], atol=1e-12)


def test_stem_and_fafed():
    for q in (1, 4):
        a = boxes.stem(grad, x0, N, q, T, 0.1, lambda t: 0.9 / (1 + t))
        b = boxes.fafed(grad, x0, N, q, T, 0.1, lambda t: 0.9 / (1 + t), 0.9, 0.1, identity=True)
        same(a["x"], b["x"])
        same(a["d"], b["m"])
    one = boxes.stem(grad, x0, 1, 1, T, 0.1, 1.0)["x"]
    same(one, boxes.fedavg(grad, x0, 1, 1, T, 0.1)[:T])
    many = boxes.stem(grad, x0, N, 1, T, 0.1, 1.0)["x"]
    same(many, boxes.fedavg(grad, x0, N, 1, T, 0.1)[:T])
    scalar = boxes.fafed(grad, x0, N, 2, T, 0.1, 0.5, 0.9, 0.1, norm=True)
    assert scalar["v"].shape == (T, N, 1)


def test_compositional():
    for q in (1, 4):
        bsgd = boxes.local_bsgd(g, jac, outer, x0, N, q, T, 0.1)
        scgd = boxes.local_scgd(g, jac, outer, x0, N, q, T, 0.1, 1.0)
        same(scgd["x"], bsgd["x"])
        scgd = boxes.local_scgd(g, jac, outer, x0, N, q, T, 0.1, 0.7)
        scgdm = boxes.local_scgdm(g, jac, outer, x0, N, q, T, 0.5, 2.0, 0.2, 1.4)
        same(scgdm["x"], scgd["x"])
        same(scgdm["u"], scgd["u"])
        tasks = boxes.local_scgdm_tasks(
            lambda n, t: [n],
            lambda n, t, i, x: g(n, t, x),
            lambda n, t, i, x: jac(n, t, x),
            lambda n, t, i, u: outer(n, t, u),
            x0, N, q, T, 0.5, 1.0, 0.2, 1.4,
        )  # fmt: skip
        same(tasks["x"], boxes.local_scgdm(g, jac, outer, x0, N, q, T, 0.5, 1.0, 0.2, 1.4)["x"])
    same(
        boxes.scgd(g, jac, outer, x0, T, 0.1, 0.7)["x"],
        boxes.local_scgd(g, jac, outer, x0, 1, 5, T, 0.1, 0.7)["x"],
    )


def test_moml():
    arguments = (
        lambda n, t, i, x: g((n + i) % N, t, x),
        lambda n, t, i, x: jac((n + i) % N, t, x),
        lambda n, t, i, u: outer((n + i) % N, t, u),
    )
    # one task that is always sampled: Local-SCGD as long as nothing of u is averaged (N = 1)
    one = boxes.local_moml(lambda n, t: [0], *arguments, x0, 1, 2, T, 0.1, 0.7, 1)
    ref = boxes.local_scgd(g, jac, outer, x0, 1, 2, T, 0.1, 0.7)
    same(one["x"], ref["x"])
    same(one["u"][:, :, 0], ref["u"])
    # a task's state stays while it is not sampled, and its first sampling has weight 1
    two = boxes.local_moml(lambda n, t: [t % 2], *arguments, x0, N, 2, T, 0.1, 0.7, 3)
    assert two["u"].shape == (T + 1, N, 3, p)
    same(two["u"][2, :, 0], two["u"][1, :, 0])
    assert not two["u"][:, :, 2].any()
    for n in range(N):
        same(two["u"][2, n, 1], arguments[0](n, 1, 1, two["x"][1, n]))


def test_minimax():
    for q in (1, 2):
        sgda = boxes.local_sgda(minimax, theta0, w0, N, q, T, 0.1, 0.1)
        plus = boxes.coda_plus(minimax, theta0, w0, N, q, T, 0.1, np.inf, 4 * T)
        same(plus["theta"], sgda["theta"])
        same(plus["w"], sgda["w"])
        fmgda = boxes.fmgda(minimax, theta0, w0, N, q, T, 0.1, 1, 1, 1.0, 1.0)
        same(fmgda["theta"], sgda["theta"])
        same(fmgda["w"], sgda["w"])

        def alike(n, t, theta, w):
            return minimax(0, t, theta, w)

        a = boxes.coda_plus(alike, theta0, w0, N, q, T, 0.1, 2.0, 2)
        b = boxes.codasca(alike, theta0, w0, N, q, T, 0.1, 2.0, 2)
        same(a["theta"], b["theta"], atol=1e-12)
        same(a["w"], b["w"], atol=1e-12)
    shifted = boxes.momentum_local_sgda(minimax, theta0, w0, N, 1, T, 0.1, 0.2, 0.5, 2.0)
    sgda = boxes.local_sgda(minimax, theta0, w0, N, 1, T, 0.05, 0.1)
    same(shifted["theta"][1:], sgda["theta"][:T])  # iteration 0 moves nothing
    same(shifted["theta"][1], boxes.everywhere(theta0, N))


def test_coda_stages():
    assert [boxes.stage(t, 2) for t in (0, 1, 2, 7, 8)] == [(0, 0), (0, 0), (1, 2), (1, 2), (2, 8)]

    def dual(n, t, theta):
        return np.full(2, float(n))

    out = boxes.coda(minimax, dual, theta0, w0, N, 2, T, 0.1, 2.0, 2)
    same(out["theta"][3], out["theta"][2])  # iteration 2 opens stage 1: θ stays, w is fresh and averaged
    same(out["w"][3], np.ones((N, 2)))
    plus = boxes.coda_plus(minimax, theta0, w0, N, 2, T, 0.1, 2.0, 2)
    same(out["theta"][:3], plus["theta"][:3])
    # the step shrinks threefold and pulls to the point where the stage began
    step = plus["theta"][3, 0] - plus["theta"][2, 0]
    same(step, -0.1 / 3 * minimax(0, 2, plus["theta"][2, 0], plus["w"][2, 0])[0])


def test_scaffold():
    same(boxes.scaffold(grad, x0, 1, 4, T, 0.1)["x"], boxes.bsgd(grad, x0, T, 0.1), atol=1e-12)
    out = boxes.scaffold(grad, x0, N, 1, T, 0.1)
    same(out["x"], boxes.fedavg(grad, x0, N, 1, T, 0.1), atol=1e-12)  # Σ(c − c_n) = 0
    for t in range(T):
        for n in range(N):
            same(out["c_n"][t + 1, n], grad(n, t, out["x"][t, n]), atol=1e-12)
        same(out["c"][t + 1], boxes.averaged(out["c_n"][t + 1]), atol=1e-12)


def test_servers():
    avg = boxes.fedavg(grad, x0, N, 3, 3, 0.1)
    delta = avg[3, 0] - x0
    tau = 0.1
    adam = boxes.fedadam(grad, x0, N, 3, 3, 0.1, 0.5, 0.9, 0.99, tau)
    same(adam[:3], avg[:3])
    V = 0.99 * tau**2 + 0.01 * delta**2
    same(adam[3, 0], x0 + 0.5 * 0.1 * delta / (np.sqrt(V) + tau))
    yogi = boxes.fedyogi(grad, x0, N, 3, 3, 0.1, 0.5, 0.9, 0.99, tau)
    V = tau**2 - 0.01 * delta**2 * np.sign(tau**2 - delta**2)
    same(yogi[3, 1], x0 + 0.05 * delta / (np.sqrt(V) + tau))
    adagrad = boxes.fedadagrad(grad, x0, N, 3, 3, 0.1, 0.5, 0.0, tau)
    same(adagrad[3, 2], x0 + 0.5 * delta / (np.sqrt(tau**2 + delta**2) + tau))
    ams = boxes.fedams(grad, x0, N, 3, 3, 0.1, 0.5, 0.9, 0.99, 1e-3)
    same(ams[3, 2], x0 + 0.05 * delta / np.sqrt(np.maximum(0.01 * delta**2, 1e-3)))


def counter_example(n, t, x):
    slope = 6.0 if n == 0 else -2.0
    return slope * np.clip(x, -1, 1)


def test_theorem_1_of_fafed():
    start = np.array([10.0])
    first = boxes.naive_adaptive(counter_example, start, 3, 2, 1, 0.1, 0.5)["x"]
    same(first[1, :, 0], [9.8586, 10.1414, 10.1414], atol=5e-5)
    X = boxes.naive_adaptive(counter_example, start, 3, 1, 50, 0.1, 0.5)["x"][:, 0, 0]
    same(X[1], 10.0471, atol=5e-5)
    same(np.diff(X), [0.1 / (3 * np.sqrt(1 - 0.5**t)) for t in range(1, 51)])
    still = boxes.naive_adaptive(counter_example, np.zeros(1), 3, 1, 5, 0.1, 0.5)["x"]
    assert not still.any()  # 0/0 is 0


@pytest.mark.parametrize(
    ("q", "eta", "alpha", "rho", "end"),
    [(1, 0.1, 0.5, 0.1, 0.0), (5, 0.05, 0.05, 1.0, 0.0), (20, 0.01, 0.01, 1.0, 0.0), (5, 0.1, 0.5, 0.1, 0.98)],
)
def test_fafed_on_the_counter_example(q, eta, alpha, rho, end):
    out = boxes.fafed(counter_example, np.array([10.0]), 3, q, 800 * q + 1, eta, alpha, 0.5, rho)
    X = out["x"][1::q, 0, 0]  # the common point after the move that follows a synchronisation (line 12)
    same(X[-1], end, atol=0.005)
