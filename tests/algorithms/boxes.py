"""The boxes of the papers, transcribed one by one in plain numpy with explicit loops.

Written from the pseudo-code alone, without the library: tests compare the library with these.

What holds for all of them
- `grad(n, t, x)` is client n's stochastic gradient on the batch B_t that it draws at iteration t, so
  `grad(n, t, y)` is the same batch at another point. The line "Initialize" of a box is iteration 0.
- Iterations 0 … T−1 are run. X has shape (T+1, N, d): X[0] is the common start and X[t+1] holds every
  client's x after iteration t, after averaging if (t+1) % q == 0. Other variables come in a dict with the
  same layout; what is not defined before iteration 0 (an estimator, a tracked value) is zero there.
- FAFED and STEM synchronise after the estimate at iterations t with t % q == 0 and move after that. Their
  arrays have shape (T, N, d): X[t] is the point of iteration t, averaged if t % q == 0.
- A step size or weight is a number or a function of the iteration t (0, 1, …) that uses it. A box that
  starts counting at 1 after "Initialize" moves at its t with what belongs to iteration t−1.
- The estimate that a box makes after its last move is never used and not made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Schedule = float | Callable[[int], float]
Grad = Callable[[int, int, Array], Array]
MinimaxGrad = Callable[[int, int, Array, Array], tuple[Array, Array]]
TaskMap = Callable[[int, int, int, Array], Array]


def at(value: Schedule, t: int) -> float:
    """The value of a number or schedule at iteration t."""
    return value(t) if callable(value) else value


def everywhere(v: Array, N: int) -> Array:
    """The same vector at all N clients."""
    return np.stack([np.array(v, dtype=float) for _ in range(N)])


def averaged(v: Array) -> Array:
    """Every client receives the mean over clients."""
    mean = np.zeros_like(v[0])
    for n in range(len(v)):
        mean = mean + v[n]
    return everywhere(mean / len(v), len(v))


# --- Conditional stochastic optimisation (Wu et al. 2023, "Federated Conditional Stochastic Optimization") ---


def fcsg(grad: Grad, x0: Array, N: int, q: int, T: int, alpha: Schedule) -> Array:
    """FCSG: Algorithm 1 with line 14."""
    x = everywhere(x0, N)
    u = np.zeros_like(x)
    X = [x.copy()]
    for n in range(N):
        u[n] = grad(n, 0, x[n])  # 2
    for t in range(1, T + 1):  # 3
        for n in range(N):  # 4
            x[n] = x[n] - at(alpha, t - 1) * u[n]  # 9, inside 8
        if t % q == 0:  # 5
            u = averaged(u)  # 7, overwritten by 14 before it is used
            x = averaged(x)  # 8
        X.append(x.copy())
        if t < T:
            for n in range(N):
                u[n] = grad(n, t, x[n])  # 14
    return np.array(X)


def fcsg_m(grad: Grad, x0: Array, N: int, q: int, T: int, alpha: Schedule, beta: Schedule) -> dict[str, Array]:
    """FCSG-M: Algorithm 1 with line 15."""
    x = everywhere(x0, N)
    u = np.zeros_like(x)
    X, U = [x.copy()], [u.copy()]
    for n in range(N):
        u[n] = grad(n, 0, x[n])  # 2
    for t in range(1, T + 1):  # 3
        for n in range(N):  # 4
            x[n] = x[n] - at(alpha, t - 1) * u[n]  # 9, inside 8
        if t % q == 0:  # 5
            u = averaged(u)  # 7
            x = averaged(x)  # 8
        X.append(x.copy())
        U.append(u.copy())
        if t < T:
            for n in range(N):
                u[n] = (1 - at(beta, t)) * u[n] + at(beta, t) * grad(n, t, x[n])  # 15
    return {"x": np.array(X), "u": np.array(U)}


def acc_fcsg_m(grad: Grad, x0: Array, N: int, q: int, T: int, alpha: Schedule, beta: Schedule) -> dict[str, Array]:
    """Acc-FCSG-M: Algorithm 2."""
    x = everywhere(x0, N)
    u = np.zeros_like(x)
    X, U = [x.copy()], [u.copy()]
    for n in range(N):
        u[n] = grad(n, 0, x[n])  # 2
    for t in range(1, T + 1):  # 3
        previous = x.copy()  # x_{t-1}, where the last estimate was made
        for n in range(N):  # 4
            x[n] = x[n] - at(alpha, t - 1) * u[n]  # 9, inside 8
        if t % q == 0:  # 5
            u = averaged(u)  # 7
            x = averaged(x)  # 8
        X.append(x.copy())
        U.append(u.copy())
        if t < T:
            for n in range(N):
                u[n] = grad(n, t, x[n]) + (1 - at(beta, t)) * (u[n] - grad(n, t, previous[n]))  # 14
    return {"x": np.array(X), "u": np.array(U)}


def bsgd(grad: Grad, x0: Array, T: int, alpha: Schedule) -> Array:
    """BSGD (Hu et al. 2020): one machine, called client 0."""
    x = everywhere(x0, 1)
    X = [x.copy()]
    for t in range(T):
        x[0] = x[0] - at(alpha, t) * grad(0, t, x[0])
        X.append(x.copy())
    return np.array(X)


def bspiderboost(grad: Grad, x0: Array, q: int, T: int, alpha: Schedule) -> dict[str, Array]:
    """BSpiderBoost (Hu et al. 2020): one machine; the caller makes batch t large when t % q == 0."""
    x = everywhere(x0, 1)
    u = np.zeros_like(x)
    previous = x.copy()
    X, U = [x.copy()], [u.copy()]
    for t in range(T):
        if t % q == 0:
            u[0] = grad(0, t, x[0])
        else:
            u[0] = u[0] + grad(0, t, x[0]) - grad(0, t, previous[0])
        previous = x.copy()
        x[0] = x[0] - at(alpha, t) * u[0]
        X.append(x.copy())
        U.append(u.copy())
    return {"x": np.array(X), "u": np.array(U)}


# --- Compositional optimisation (Gao, Li, Huang 2022, Local-SCGDM); g and jac use ξ_t, outer uses ζ_t ---


def local_bsgd(g: Grad, jac: Grad, outer: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule) -> dict[str, Array]:
    """Local-BSGD (= Local-MAML): the inner value is that of the current batch."""
    x = everywhere(x0, N)
    X = [x.copy()]
    for t in range(T):
        for n in range(N):
            u = g(n, t, x[n])
            z = jac(n, t, x[n]).T @ outer(n, t, u)
            x[n] = x[n] - at(eta, t) * z
        if (t + 1) % q == 0:
            x = averaged(x)
        X.append(x.copy())
    return {"x": np.array(X)}


def local_scgd(
    g: Grad, jac: Grad, outer: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, gamma: Schedule
) -> dict[str, Array]:
    """Local-SCGD: a moving average u of the inner value; x and u are averaged."""
    x = everywhere(x0, N)
    p = len(g(0, 0, x[0]))
    u = np.zeros((N, p))
    X, U = [x.copy()], [u.copy()]
    for t in range(T):
        for n in range(N):
            if t == 0:
                u[n] = g(n, t, x[n])
            else:
                u[n] = (1 - at(gamma, t)) * u[n] + at(gamma, t) * g(n, t, x[n])
            z = jac(n, t, x[n]).T @ outer(n, t, u[n])  # with the new u
            x[n] = x[n] - at(eta, t) * z
        if (t + 1) % q == 0:
            u = averaged(u)
            x = averaged(x)
        X.append(x.copy())
        U.append(u.copy())
    return {"x": np.array(X), "u": np.array(U)}


def scgd(g: Grad, jac: Grad, outer: Grad, x0: Array, T: int, eta: Schedule, gamma: Schedule) -> dict[str, Array]:
    """SCGD (Wang, Fang, Liu 2017): one machine, called client 0."""
    x = everywhere(x0, 1)
    u = np.zeros((1, len(g(0, 0, x[0]))))
    X, U = [x.copy()], [u.copy()]
    for t in range(T):
        weight = 1.0 if t == 0 else at(gamma, t)
        u[0] = (1 - weight) * u[0] + weight * g(0, t, x[0])
        x[0] = x[0] - at(eta, t) * (jac(0, t, x[0]).T @ outer(0, t, u[0]))
        X.append(x.copy())
        U.append(u.copy())
    return {"x": np.array(X), "u": np.array(U)}


def local_scgdm(
    g: Grad,
    jac: Grad,
    outer: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    alpha: float,
    beta: float,
    gamma: float,
) -> dict[str, Array]:
    """Local-SCGDM: Algorithm 1; the box's K and p are N and q here."""
    x = everywhere(x0, N)
    p = len(g(0, 0, x[0]))
    u, m = np.zeros((N, p)), np.zeros_like(x)
    X, U, M = [x.copy()], [u.copy()], [m.copy()]
    for t in range(T):  # 1
        e = at(eta, t)
        for n in range(N):
            if t == 0:  # 2
                u[n] = g(n, t, x[n])  # 3
                z = jac(n, t, x[n]).T @ outer(n, t, u[n])  # 4
                m[n] = z  # 5
            else:
                u[n] = (1 - gamma * e) * u[n] + gamma * e * g(n, t, x[n])  # 7
                z = jac(n, t, x[n]).T @ outer(n, t, u[n])  # 8
                m[n] = (1 - alpha * e) * m[n] + alpha * e * z  # 9
            x[n] = x[n] - beta * e * m[n]  # 11
        if (t + 1) % q == 0:  # 12
            u = averaged(u)  # 13
            m = averaged(m)  # 14
            x = averaged(x)  # 15
        X.append(x.copy())
        U.append(u.copy())
        M.append(m.copy())
    return {"x": np.array(X), "u": np.array(U), "m": np.array(M)}


def local_scgdm_tasks(
    tasks: Callable[[int, int], Sequence[int]],
    g: TaskMap,
    jac: TaskMap,
    outer: TaskMap,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    alpha: float,
    beta: float,
    gamma: float,
) -> dict[str, Array]:
    """Local-SCGDM on several tasks per iteration with one shared inner state s.

    `tasks(n, t)` are the tasks that client n samples at iteration t; `g(n, t, i, x)` and so on are task i's.
    u_i = (1−γη)s + γη g_i(x), a gradient from each u_i, the new s is the mean of the u_i.
    """
    x = everywhere(x0, N)
    p = len(g(0, 0, tasks(0, 0)[0], x[0]))
    u, m = np.zeros((N, p)), np.zeros_like(x)
    X, U, M = [x.copy()], [u.copy()], [m.copy()]
    for t in range(T):  # 1
        c = 1.0 if t == 0 else gamma * at(eta, t)  # 3 or 7
        a = 1.0 if t == 0 else alpha * at(eta, t)  # 5 or 9
        for n in range(N):
            sampled = tasks(n, t)
            state = np.zeros(p)
            z = np.zeros_like(x[n])
            for i in sampled:
                u_i = (1 - c) * u[n] + c * g(n, t, i, x[n])  # 3, 7
                z = z + jac(n, t, i, x[n]).T @ outer(n, t, i, u_i)  # 4, 8
                state = state + u_i
            u[n] = state / len(sampled)
            m[n] = (1 - a) * m[n] + a * z / len(sampled)  # 5, 9
            x[n] = x[n] - beta * at(eta, t) * m[n]  # 11
        if (t + 1) % q == 0:  # 12
            u = averaged(u)  # 13
            m = averaged(m)  # 14
            x = averaged(x)  # 15
        X.append(x.copy())
        U.append(u.copy())
        M.append(m.copy())
    return {"x": np.array(X), "u": np.array(U), "m": np.array(M)}


def local_scgdm_own_tasks(
    tasks: Callable[[int, int], Sequence[int]],
    g: TaskMap,
    jac: TaskMap,
    outer: TaskMap,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    alpha: float,
    beta: float,
    gamma: float,
    n_tasks: int,
) -> dict[str, Array]:
    """Local-SCGDM with one inner state per task, as in its sine-wave experiment: u stays on its client.

    `tasks(n, t)` are the tasks (0 … n_tasks−1) that client n samples at iteration t. A task's state is refreshed when
    it is sampled, the first time with weight 1; the momentum's weight is 1 at iteration 0.
    """
    x = everywhere(x0, N)
    p = len(g(0, 0, tasks(0, 0)[0], x[0]))
    u, m = np.zeros((N, n_tasks, p)), np.zeros_like(x)
    seen = np.zeros((N, n_tasks), dtype=bool)
    X, U, M = [x.copy()], [u.copy()], [m.copy()]
    for t in range(T):  # 1
        e = at(eta, t)
        for n in range(N):
            z = np.zeros_like(x[n])
            sampled = tasks(n, t)
            for i in sampled:
                if not seen[n, i]:
                    u[n, i] = g(n, t, i, x[n])  # 3
                else:
                    u[n, i] = (1 - gamma * e) * u[n, i] + gamma * e * g(n, t, i, x[n])  # 7
                seen[n, i] = True
                z = z + jac(n, t, i, x[n]).T @ outer(n, t, i, u[n, i]) / len(sampled)  # 4, 8
            if t == 0:  # 2
                m[n] = z  # 5
            else:
                m[n] = (1 - alpha * e) * m[n] + alpha * e * z  # 9
            x[n] = x[n] - beta * e * m[n]  # 11
        if (t + 1) % q == 0:  # 12
            m = averaged(m)  # 14
            x = averaged(x)  # 15
        X.append(x.copy())
        U.append(u.copy())
        M.append(m.copy())
    return {"x": np.array(X), "u": np.array(U), "m": np.array(M)}


def local_moml(
    tasks: Callable[[int, int], Sequence[int]],
    g: TaskMap,
    jac: TaskMap,
    outer: TaskMap,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    beta: Schedule,
    n_tasks: int,
) -> dict[str, Array]:
    """Local-MOML: one inner state per task, kept on its client and refreshed only when it is sampled.

    `tasks(n, t)` are the tasks (0 … n_tasks−1) that client n samples at iteration t. The returned "u" has
    shape (T+1, N, n_tasks, p) and is zero for a task that was never sampled.
    """
    x = everywhere(x0, N)
    p = len(g(0, 0, tasks(0, 0)[0], x[0]))
    u = np.zeros((N, n_tasks, p))
    seen = np.zeros((N, n_tasks), dtype=bool)
    X, U = [x.copy()], [u.copy()]
    for t in range(T):
        for n in range(N):
            sampled = tasks(n, t)
            z = np.zeros_like(x[n])
            for i in sampled:
                weight = at(beta, t) if seen[n, i] else 1.0
                u[n, i] = (1 - weight) * u[n, i] + weight * g(n, t, i, x[n])
                seen[n, i] = True
                z = z + jac(n, t, i, x[n]).T @ outer(n, t, i, u[n, i])
            x[n] = x[n] - at(eta, t) * z / len(sampled)
        if (t + 1) % q == 0:
            x = averaged(x)
        X.append(x.copy())
        U.append(u.copy())
    return {"x": np.array(X), "u": np.array(U)}


def sox(
    drawn: Callable[[int, int], Sequence[int]],
    g: TaskMap,
    jac: TaskMap,
    outer: TaskMap,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    beta: Schedule,
    gamma: Schedule,
    n_examples: int,
) -> dict[str, Array]:
    """SOX (Wang & Yang 2022) on every client: one inner state per own example; x and m are averaged.

    `drawn(n, t)` are the examples (0 … n_examples−1) that client n draws at iteration t; `g(n, t, i, x)` is the mean over
    the inner samples of example i.
    """
    x = everywhere(x0, N)
    m = np.zeros_like(x)
    state: list[dict[int, Array]] = [{} for _ in range(N)]
    p = len(g(0, 0, drawn(0, 0)[0], x[0]))
    X, M, U = [x.copy()], [m.copy()], [np.zeros((N, n_examples, p))]
    for t in range(T):
        for n in range(N):
            batch = drawn(n, t)
            for i in batch:  # u_i ← (1−γ)u_i + γ g_i(x)
                fresh = g(n, t, i, x[n])
                state[n][i] = (1 - at(gamma, t)) * state[n][i] + at(gamma, t) * fresh if i in state[n] else fresh
            G = sum(jac(n, t, i, x[n]).T @ outer(n, t, i, state[n][i]) for i in batch) / len(batch)
            m[n] = G if t == 0 else (1 - at(beta, t)) * m[n] + at(beta, t) * G
            x[n] = x[n] - at(eta, t) * m[n]
        if (t + 1) % q == 0:
            x, m = averaged(x), averaged(m)
        X.append(x.copy())
        M.append(m.copy())
        U.append(np.array([[state[n].get(i, np.zeros(p)) for i in range(n_examples)] for n in range(N)]))
    return {"x": np.array(X), "m": np.array(M), "u": np.array(U)}


# --- Minimax: grad(n, t, theta, w) returns (∇_θ f, ∇_w f) on B_t ---


def local_sgda(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta_theta: Schedule,
    eta_w: Schedule,
) -> dict[str, Array]:
    """Local SGDA (Deng and Mahdavi 2021): both gradients at the old point."""
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    H, W = [theta.copy()], [w.copy()]
    for t in range(T):
        for n in range(N):
            g_theta, g_w = grad(n, t, theta[n], w[n])
            theta[n] = theta[n] - at(eta_theta, t) * g_theta
            w[n] = w[n] + at(eta_w, t) * g_w
        if (t + 1) % q == 0:
            theta, w = averaged(theta), averaged(w)
        H.append(theta.copy())
        W.append(w.copy())
    return {"theta": np.array(H), "w": np.array(W)}


def momentum_local_sgda(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta_theta: Schedule,
    eta_w: Schedule,
    a: Schedule,
    beta: float,
) -> dict[str, Array]:
    """Momentum Local SGDA (Sharma et al. 2022): iteration 0 only estimates, later ones move, then estimate."""
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    d_theta, d_w = np.zeros_like(theta), np.zeros_like(w)
    H, W, DH, DW = [theta.copy()], [w.copy()], [d_theta.copy()], [d_w.copy()]
    for t in range(T):
        for n in range(N):
            if t == 0:
                d_theta[n], d_w[n] = grad(n, t, theta[n], w[n])
            else:
                step = at(a, t - 1)
                theta[n] = theta[n] - step * at(eta_theta, t - 1) * d_theta[n]
                w[n] = w[n] + step * at(eta_w, t - 1) * d_w[n]
                g_theta, g_w = grad(n, t, theta[n], w[n])
                d_theta[n] = (1 - step * beta) * d_theta[n] + step * beta * g_theta
                d_w[n] = (1 - step * beta) * d_w[n] + step * beta * g_w
        if (t + 1) % q == 0:
            theta, w = averaged(theta), averaged(w)
            d_theta, d_w = averaged(d_theta), averaged(d_w)
        H.append(theta.copy())
        W.append(w.copy())
        DH.append(d_theta.copy())
        DW.append(d_w.copy())
    return {"theta": np.array(H), "w": np.array(W), "d_theta": np.array(DH), "d_w": np.array(DW)}


def stage(t: int, T0: int) -> tuple[int, int]:
    """The stage s of iteration t and the stage's first iteration; stage s lasts T0·3^s iterations."""
    s, first = 0, 0
    while t >= first + T0 * 3**s:
        first += T0 * 3**s
        s += 1
    return s, first


def coda(
    grad: MinimaxGrad,
    dual: Callable[[int, int, Array], Array],
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta0: float,
    gamma: float,
    T0: int,
) -> dict[str, Array]:
    """CODA (Guo et al. 2020); T0 is a multiple of q.

    The first iteration of every stage but the first estimates w afresh by `dual(n, t, theta)`, leaves θ, and
    is followed by a synchronisation of its own.
    """
    assert T0 % q == 0
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    reference = theta.copy()
    H, W = [theta.copy()], [w.copy()]
    for t in range(T):
        s, first = stage(t, T0)
        eta = eta0 / 3**s
        if t == first:
            reference = averaged(theta)
        if t == first and s >= 1:
            for n in range(N):
                w[n] = dual(n, t, theta[n])
            theta, w = averaged(theta), averaged(w)
        else:
            for n in range(N):
                g_theta, g_w = grad(n, t, theta[n], w[n])
                theta[n] = theta[n] - eta * (g_theta + (theta[n] - reference[n]) / gamma)
                w[n] = w[n] + eta * g_w
        if (t + 1) % q == 0:
            theta, w = averaged(theta), averaged(w)
        H.append(theta.copy())
        W.append(w.copy())
    return {"theta": np.array(H), "w": np.array(W)}


def coda_plus(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta0: float,
    gamma: float,
    T0: int,
) -> dict[str, Array]:
    """CODA+ (Yuan et al. 2021): CODA's stages without the fresh w and its synchronisation."""
    assert T0 % q == 0
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    reference = theta.copy()
    H, W = [theta.copy()], [w.copy()]
    for t in range(T):
        s, first = stage(t, T0)
        eta = eta0 / 3**s
        if t == first:
            reference = averaged(theta)
        for n in range(N):
            g_theta, g_w = grad(n, t, theta[n], w[n])
            theta[n] = theta[n] - eta * (g_theta + (theta[n] - reference[n]) / gamma)
            w[n] = w[n] + eta * g_w
        if (t + 1) % q == 0:
            theta, w = averaged(theta), averaged(w)
        H.append(theta.copy())
        W.append(w.copy())
    return {"theta": np.array(H), "w": np.array(W)}


def codasca(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta0: float,
    gamma: float,
    T0: int,
    eta_g: float = 1.0,
) -> dict[str, Array]:
    """CODASCA (Yuan et al. 2021): CODA+ with control variates, all zero at first and kept across stages.

    c_k is the mean of the round's raw gradients, without the proximal term. "c_theta" and "c_w" are the
    clients' own c_k; the common c is their mean.
    """
    assert T0 % q == 0
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    reference, old_theta, old_w = theta.copy(), theta.copy(), w.copy()
    c_theta, c_w = np.zeros_like(theta), np.zeros_like(w)
    sum_theta, sum_w = np.zeros_like(theta), np.zeros_like(w)
    H, W, CH, CW = [theta.copy()], [w.copy()], [c_theta.copy()], [c_w.copy()]
    for t in range(T):
        s, first = stage(t, T0)
        eta = eta0 / 3**s
        if t == first:
            reference = averaged(theta)
        common_theta, common_w = averaged(c_theta), averaged(c_w)
        for n in range(N):
            g_theta, g_w = grad(n, t, theta[n], w[n])
            sum_theta[n] = sum_theta[n] + g_theta
            sum_w[n] = sum_w[n] + g_w
            proximal = (theta[n] - reference[n]) / gamma
            theta[n] = theta[n] - eta * (g_theta + proximal - c_theta[n] + common_theta[n])
            w[n] = w[n] + eta * (g_w - c_w[n] + common_w[n])
        if (t + 1) % q == 0:
            c_theta, c_w = sum_theta / q, sum_w / q
            sum_theta, sum_w = np.zeros_like(theta), np.zeros_like(w)
            theta = old_theta + eta_g * (averaged(theta) - old_theta)
            w = old_w + eta_g * (averaged(w) - old_w)
            old_theta, old_w = theta.copy(), w.copy()
        H.append(theta.copy())
        W.append(w.copy())
        CH.append(c_theta.copy())
        CW.append(c_w.copy())
    return {"theta": np.array(H), "w": np.array(W), "c_theta": np.array(CH), "c_w": np.array(CW)}


def fmgda(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    c_hat: float,
    c: float,
    alpha: Schedule,
    beta: Schedule,
) -> dict[str, Array]:
    """FMGDA: Algorithm 1; the box's η_t is eta(t−1) here, its α_t and β_t are alpha(t) and beta(t)."""
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    u, v = np.zeros_like(theta), np.zeros_like(w)
    H, W, U, V = [theta.copy()], [w.copy()], [u.copy()], [v.copy()]
    for n in range(N):
        u[n], v[n] = grad(n, 0, theta[n], w[n])  # 2
    for t in range(1, T + 1):  # 3
        old_theta, old_w = theta.copy(), w.copy()
        for n in range(N):  # 4
            theta[n] = theta[n] - c_hat * at(eta, t - 1) * u[n]  # 11, inside 8
            w[n] = w[n] + c * at(eta, t - 1) * v[n]  # 12, inside 9
        if t % q == 0:  # 5
            u, v = averaged(u), averaged(v)  # 6, 7
            theta, w = averaged(theta), averaged(w)  # 8, 9
        H.append(theta.copy())
        W.append(w.copy())
        U.append(u.copy())
        V.append(v.copy())
        if t < T:
            for n in range(N):
                new_theta, new_w = grad(n, t, theta[n], w[n])  # 14
                before_theta, before_w = grad(n, t, old_theta[n], old_w[n])
                u[n] = new_theta + (1 - at(alpha, t)) * (u[n] - before_theta)  # 15
                v[n] = new_w + (1 - at(beta, t)) * (v[n] - before_w)  # 16
    return {"theta": np.array(H), "w": np.array(W), "u": np.array(U), "v": np.array(V)}


# --- Plain minimisation ---


def fedavg(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule) -> Array:
    """FedAvg (McMahan et al. 2017)."""
    x = everywhere(x0, N)
    X = [x.copy()]
    for t in range(T):
        for n in range(N):
            x[n] = x[n] - at(eta, t) * grad(n, t, x[n])
        if (t + 1) % q == 0:
            x = averaged(x)
        X.append(x.copy())
    return np.array(X)


def fednova(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, tau: Sequence[int]) -> dict[str, Array]:
    """FedNova (Wang et al. 2020): client n takes the first tau[n] of the round's q steps."""
    x = everywhere(x0, N)
    X, L = [x.copy()], [np.zeros((N, 1))]
    d, length = np.zeros_like(x), np.zeros((N, 1))
    for t in range(T):
        if t % q == 0:
            start, length = x[0].copy(), np.zeros((N, 1))
        for n in range(N):
            if t % q < tau[n]:
                x[n] = x[n] - at(eta, t) * grad(n, t, x[n])
                length[n, 0] += at(eta, t)
        if (t + 1) % q == 0:
            for n in range(N):
                d[n] = (start - x[n]) / length[n]
            length = averaged(length)
            x = everywhere(start - length[0, 0] * d.mean(0), N)
        X.append(x.copy())
        L.append(length.copy())
    return {"x": np.array(X), "length": np.array(L)}


def fedprox(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, mu: float) -> Array:
    """FedProx (Li et al. 2020), its inner problem solved by q gradient steps."""
    x = everywhere(x0, N)
    start = x.copy()
    X = [x.copy()]
    for t in range(T):
        for n in range(N):
            x[n] = x[n] - at(eta, t) * (grad(n, t, x[n]) + mu * (x[n] - start[n]))
        if (t + 1) % q == 0:
            x = averaged(x)
            start = x.copy()
        X.append(x.copy())
    return np.array(X)


def scaffold(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, eta_g: float = 1.0) -> dict[str, Array]:
    """SCAFFOLD (Karimireddy et al. 2020), option II, all clients take part; qη is the sum of the round's steps."""
    y = everywhere(x0, N)
    x = y.copy()
    c_n, c = np.zeros_like(y), np.zeros_like(y)
    X, C_n, C = [y.copy()], [c_n.copy()], [c.copy()]
    for t in range(T):
        for n in range(N):
            y[n] = y[n] - at(eta, t) * (grad(n, t, y[n]) - c_n[n] + c[n])
        if (t + 1) % q == 0:
            new = np.zeros_like(c_n)
            for n in range(N):
                new[n] = c_n[n] - c[n] + (x[n] - y[n]) / sum(at(eta, t - i) for i in range(q))
            x = x + eta_g * averaged(y - x)
            c = c + averaged(new - c_n)
            c_n = new
            y = x.copy()
        X.append(y.copy())
        C_n.append(c_n.copy())
        C.append(c.copy())
    return {"x": np.array(X), "c_n": np.array(C_n), "c": np.array(C)}


def feddyn(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, alpha: float) -> dict[str, Array]:
    """FedDyn (Acar et al. 2021), its inner problem solved by q gradient steps; all clients take part."""
    x, y = np.array(x0, dtype=float), everywhere(x0, N)
    lam, h = np.zeros_like(y), np.zeros_like(x)
    X, L = [y.copy()], [lam.copy()]
    for t in range(T):
        for n in range(N):
            y[n] = y[n] - at(eta, t) * (grad(n, t, y[n]) - lam[n] + alpha * (y[n] - x))
        if (t + 1) % q == 0:
            for n in range(N):
                lam[n] = lam[n] - alpha * (y[n] - x)
            h = h - alpha / N * sum(y[n] - x for n in range(N))
            x = averaged(y)[0] - h / alpha
            y = everywhere(x, N)
        X.append(y.copy())
        L.append(lam.copy())
    return {"x": np.array(X), "lambda": np.array(L)}


def ditto(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, mu: float) -> dict[str, Array]:
    """Ditto (Li et al. 2021): w is FedAvg's model, v_n a client's own, pulled towards the round's broadcast."""
    w, v = everywhere(x0, N), everywhere(x0, N)
    broadcast = np.array(x0, dtype=float)
    W, V = [w.copy()], [v.copy()]
    for t in range(T):
        for n in range(N):
            v[n] = v[n] - at(eta, t) * (grad(n, t, v[n]) + mu * (v[n] - broadcast))
            w[n] = w[n] - at(eta, t) * grad(n, t, w[n])
        if (t + 1) % q == 0:
            w = averaged(w)
            broadcast = w[0].copy()
        W.append(w.copy())
        V.append(v.copy())
    return {"x": np.array(W), "v": np.array(V)}


def fedrep(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, q_h: int, d_b: int) -> dict[str, Array]:
    """FedRep (Collins et al. 2021): the first d_b coordinates are the body, the others the head."""
    body, head = everywhere(x0[:d_b], N), everywhere(x0[d_b:], N)

    def shared() -> Array:
        return np.concatenate([body, everywhere(x0[d_b:], N)], axis=1)

    X, H = [shared()], [head.copy()]
    for t in range(T):
        for n in range(N):
            gradient = grad(n, t, np.concatenate([body[n], head[n]]))
            if t % q < q_h:
                head[n] = head[n] - at(eta, t) * gradient[d_b:]
            else:
                body[n] = body[n] - at(eta, t) * gradient[:d_b]
        if (t + 1) % q == 0:
            body = averaged(body)
        X.append(shared())
        H.append(head.copy())
    return {"x": np.array(X), "head": np.array(H)}


def _fedopt(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    server: Callable[[Array, Array], Array],
) -> Array:
    """FedAvg's local steps; at a synchronisation `server(x, Δ)` gives the new x from the old one and Δ."""
    x = everywhere(x0, N)
    old = np.array(x0, dtype=float)
    X = [x.copy()]
    for t in range(T):
        for n in range(N):
            x[n] = x[n] - at(eta, t) * grad(n, t, x[n])
        if (t + 1) % q == 0:
            delta = averaged(x)[0] - old
            old = server(old, delta)
            x = everywhere(old, N)
        X.append(x.copy())
    return np.array(X)


def _reddi(
    second: Callable[[Array, Array], Array], d: int, eta_g: float, beta1: float, tau: float
) -> Callable[[Array, Array], Array]:
    """Reddi et al. 2021, Algorithm 2: the three servers differ in the second moment only."""
    M, V = np.zeros(d), np.full(d, tau**2)

    def server(x: Array, delta: Array) -> Array:
        nonlocal M, V
        M = beta1 * M + (1 - beta1) * delta
        V = second(V, delta)
        return x + eta_g * M / (np.sqrt(V) + tau)

    return server


def fedadam(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    eta_g: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> Array:
    """FedAdam."""

    def second(V: Array, delta: Array) -> Array:
        return beta2 * V + (1 - beta2) * delta**2

    return _fedopt(grad, x0, N, q, T, eta, _reddi(second, len(x0), eta_g, beta1, tau))


def fedyogi(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    eta_g: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> Array:
    """FedYogi."""

    def second(V: Array, delta: Array) -> Array:
        return V - (1 - beta2) * delta**2 * np.sign(V - delta**2)

    return _fedopt(grad, x0, N, q, T, eta, _reddi(second, len(x0), eta_g, beta1, tau))


def fedadagrad(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    eta_g: float,
    beta1: float,
    tau: float,
) -> Array:
    """FedAdagrad."""

    def second(V: Array, delta: Array) -> Array:
        return V + delta**2

    return _fedopt(grad, x0, N, q, T, eta, _reddi(second, len(x0), eta_g, beta1, tau))


def fedams(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    eta_g: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    tau: float = 0.0,
) -> Array:
    """FedAMS (Wang, Lin, Chen 2022): M and V̂ start at zero, V at τ² as FedAdam's (0 in the paper)."""
    d = len(x0)
    M, V, V_hat = np.zeros(d), np.full(d, tau**2), np.zeros(d)

    def server(x: Array, delta: Array) -> Array:
        nonlocal M, V, V_hat
        M = beta1 * M + (1 - beta1) * delta
        V = beta2 * V + (1 - beta2) * delta**2
        V_hat = np.maximum(np.maximum(V_hat, V), epsilon)
        return x + eta_g * M / np.sqrt(V_hat)

    return _fedopt(grad, x0, N, q, T, eta, server)


def naive_adaptive(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, beta: float) -> dict[str, Array]:
    """Naive adaptive FedAvg (FAFED paper, Algorithm 1): v_0 = 0, 0/0 is 0; the box's t is t+1 here."""
    x = everywhere(x0, N)
    v = np.zeros_like(x)
    X, V = [x.copy()], [v.copy()]
    for t in range(T):  # 3
        for n in range(N):  # 4
            g = grad(n, t, x[n])  # 5
            v[n] = beta * v[n] + (1 - beta) * g**2  # 6
            for j in range(len(g)):
                if v[n, j] > 0:
                    x[n, j] = x[n, j] - at(eta, t) * g[j] / np.sqrt(v[n, j])  # 10, inside 8
        if (t + 1) % q == 0:  # 7
            x = averaged(x)  # 8
        X.append(x.copy())
        V.append(v.copy())
    return {"x": np.array(X), "v": np.array(V)}


def stem(grad: Grad, x0: Array, N: int, q: int, T: int, eta: Schedule, a: Schedule) -> dict[str, Array]:
    """STEM (Khanduri et al. 2021); a(t) weighs the estimate of iteration t (a_{t+1} = cη_t² in theory)."""
    x = everywhere(x0, N)
    d = np.zeros_like(x)
    for n in range(N):
        d[n] = grad(n, 0, x[n])
    d = averaged(d)
    X, D = [x.copy()], [d.copy()]
    local = x.copy()  # x_t before averaging
    for t in range(1, T):
        previous = local.copy()
        for n in range(N):
            x[n] = x[n] - at(eta, t - 1) * d[n]
        local = x.copy()
        for n in range(N):
            d[n] = grad(n, t, x[n]) + (1 - at(a, t)) * (d[n] - grad(n, t, previous[n]))
        if t % q == 0:
            d = averaged(d)
            x = averaged(x)
        X.append(x.copy())
        D.append(d.copy())
    return {"x": np.array(X), "d": np.array(D)}


def fafed(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    alpha: Schedule,
    beta: float,
    rho: float,
    norm: bool = False,
    identity: bool = False,
) -> dict[str, Array]:
    """FAFED: Algorithm 2; `norm` keeps one scalar v from ‖∇f‖² (shape (T, N, 1)), `identity` sets A = I.

    alpha(t) weighs the estimate of iteration t (α_{t+1} = cη_t² in theory). Line 12 averages after the move;
    with one A and one m for all this is the move from the average, which is how X[t] is recorded. The
    correction at iteration t+1 still uses the client's own x_t, from before averaging.
    """

    def squared(g: Array) -> Array:
        return np.array([np.sum(g**2)]) if norm else g**2

    def adaptive(v: Array) -> Array:
        return np.ones_like(v[0]) if identity else np.sqrt(v[0]) + rho  # the same v at all clients

    x = everywhere(x0, N)
    m = np.zeros_like(x)
    v = np.zeros((N, 1)) if norm else np.zeros_like(x)
    for n in range(N):  # 2
        g = grad(n, 0, x[n])
        m[n], v[n] = g, squared(g)
    m, v = averaged(m), averaged(v)  # 2
    A = adaptive(v)  # 2
    X, M, V = [x.copy()], [m.copy()], [v.copy()]
    local = x.copy()  # x_t before averaging
    for t in range(1, T):  # 4
        previous = local.copy()
        for n in range(N):
            x[n] = x[n] - at(eta, t - 1) * m[n] / A  # 3 with A_0 (Eq. 8), 12, 15
        local = x.copy()
        for n in range(N):  # 5
            g, g_before = grad(n, t, x[n]), grad(n, t, previous[n])  # 6
            m[n] = g + (1 - at(alpha, t)) * (m[n] - g_before)  # 7
            v[n] = beta * v[n] + (1 - beta) * squared(g)  # 8
        if t % q == 0:  # 9
            v = averaged(v)  # 10
            A = adaptive(v)  # 10
            m = averaged(m)  # 11
            x = averaged(x)  # 12
        X.append(x.copy())
        M.append(m.copy())
        V.append(v.copy())
    return {"x": np.array(X), "m": np.array(M), "v": np.array(V)}


# ---------------------------------------------------------------------------------------------------------
# Adaptive nested methods, and other servers: no paper's box, but the formulas of the sheet


def ada_fcsg_m(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    alpha: Schedule,
    beta: Schedule,
    rho2: Schedule,
    rho: float,
) -> dict[str, Array]:
    """Ada-FCSG-M: FCSG-M's estimator, FAFED's preconditioner and order."""
    x, u, v = everywhere(x0, N), everywhere(0 * x0, N), everywhere(0 * x0, N)
    for n in range(N):
        u[n] = grad(n, 0, x[n])
        v[n] = u[n] ** 2
    u, v = averaged(u), averaged(v)
    A = np.sqrt(v[0]) + rho
    X, U, V = [x.copy()], [u.copy()], [v.copy()]
    for t in range(1, T):
        for n in range(N):
            x[n] = x[n] - at(alpha, t - 1) * u[n] / A
            g = grad(n, t, x[n])
            u[n] = (1 - at(beta, t)) * u[n] + at(beta, t) * g
            v[n] = at(rho2, t) * v[n] + (1 - at(rho2, t)) * g**2
        if t % q == 0:
            v = averaged(v)
            A = np.sqrt(v[0]) + rho
            u, x = averaged(u), averaged(x)
        X.append(x.copy())
        U.append(u.copy())
        V.append(v.copy())
    return {"x": np.array(X), "u": np.array(U), "v": np.array(V)}


def ada_fmgda(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    c_hat: float,
    c: float,
    alpha: Schedule,
    beta: Schedule,
    rho2: Schedule,
    rho: float,
) -> dict[str, Array]:
    """Ada-FMGDA: FMGDA's estimators, FAFED's preconditioner for each player, FAFED's order."""
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    u, v, s, r = np.zeros_like(theta), np.zeros_like(w), np.zeros_like(theta), np.zeros_like(w)
    for n in range(N):
        u[n], v[n] = grad(n, 0, theta[n], w[n])
        s[n], r[n] = u[n] ** 2, v[n] ** 2
    u, v, s, r = averaged(u), averaged(v), averaged(s), averaged(r)
    A, B = np.sqrt(s[0]) + rho, np.sqrt(r[0]) + rho
    out: dict[str, list[Array]] = {k: [] for k in ("theta", "w", "u", "v", "square_theta", "square_w", "last")}
    own_theta, own_w = theta.copy(), w.copy()  # before averaging
    for t in range(T):
        if t > 0:
            for n in range(N):
                theta[n] = theta[n] - c_hat * at(eta, t - 1) * u[n] / A
                w[n] = w[n] + c * at(eta, t - 1) * v[n] / B
                g, h = grad(n, t, theta[n], w[n])
                g_before, h_before = grad(n, t, own_theta[n], own_w[n])
                u[n] = g + (1 - at(alpha, t)) * (u[n] - g_before)
                v[n] = h + (1 - at(beta, t)) * (v[n] - h_before)
                s[n] = at(rho2, t) * s[n] + (1 - at(rho2, t)) * g**2
                r[n] = at(rho2, t) * r[n] + (1 - at(rho2, t)) * h**2
            own_theta, own_w = theta.copy(), w.copy()
            if t % q == 0:
                s, r = averaged(s), averaged(r)
                A, B = np.sqrt(s[0]) + rho, np.sqrt(r[0]) + rho
                u, v, theta, w = averaged(u), averaged(v), averaged(theta), averaged(w)
        for k, value in zip(out, (theta, w, u, v, s, r, own_theta)):
            out[k].append(value.copy())
    return {k: np.array(values) for k, values in out.items()}


def fcsg_m_adam(
    grad: Grad,
    x0: Array,
    N: int,
    q: int,
    T: int,
    alpha: Schedule,
    beta: Schedule,
    eta_g: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> dict[str, Array]:
    """FCSG-M whose x, not u, is moved by Adam at the server."""
    x, u = everywhere(x0, N), everywhere(0 * x0, N)
    z, M, V = np.array(x0, dtype=float), np.zeros(len(x0)), np.full(len(x0), tau**2)  # z: the server's x
    X, U = [x.copy()], [u.copy()]
    for t in range(T):
        for n in range(N):
            b = 1.0 if t == 0 else at(beta, t)
            u[n] = (1 - b) * u[n] + b * grad(n, t, x[n])
            x[n] = x[n] - at(alpha, t) * u[n]
        if (t + 1) % q == 0:
            delta = x.mean(0) - z
            M = beta1 * M + (1 - beta1) * delta
            V = beta2 * V + (1 - beta2) * delta**2
            z = z + eta_g * M / (np.sqrt(V) + tau)
            x, u = everywhere(z, N), averaged(u)
        X.append(x.copy())
        U.append(u.copy())
    return {"x": np.array(X), "u": np.array(U)}


def fmgda_yogi(
    grad: MinimaxGrad,
    theta0: Array,
    w0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    c_hat: float,
    c: float,
    alpha: Schedule,
    beta: Schedule,
    eta_g: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> dict[str, Array]:
    """FMGDA whose players, not u and v, are moved by Yogi at the server, each with its own moments."""
    theta, w = everywhere(theta0, N), everywhere(w0, N)
    u, v = np.zeros_like(theta), np.zeros_like(w)
    before_theta, before_w = theta.copy(), w.copy()
    server = {"theta": np.array(theta0, dtype=float), "w": np.array(w0, dtype=float)}
    M = {k: np.zeros_like(z) for k, z in server.items()}
    V = {k: np.full_like(z, tau**2) for k, z in server.items()}
    out: dict[str, list[Array]] = {"theta": [theta], "w": [w], "u": [u.copy()], "v": [v.copy()]}
    for t in range(T):
        new_theta, new_w = theta.copy(), w.copy()
        for n in range(N):
            g, h = grad(n, t, theta[n], w[n])
            if t == 0:
                u[n], v[n] = g, h
            else:
                g_before, h_before = grad(n, t, before_theta[n], before_w[n])
                u[n] = g + (1 - at(alpha, t)) * (u[n] - g_before)
                v[n] = h + (1 - at(beta, t)) * (v[n] - h_before)
            new_theta[n] = theta[n] - c_hat * at(eta, t) * u[n]
            new_w[n] = w[n] + c * at(eta, t) * v[n]
        before_theta, before_w = theta, w
        theta, w = new_theta, new_w
        if (t + 1) % q == 0:
            for k, mean in (("theta", theta.mean(0)), ("w", w.mean(0))):
                delta = mean - server[k]
                M[k] = beta1 * M[k] + (1 - beta1) * delta
                V[k] = V[k] - (1 - beta2) * delta**2 * np.sign(V[k] - delta**2)
                server[k] = server[k] + eta_g * M[k] / (np.sqrt(V[k]) + tau)
            theta, w = everywhere(server["theta"], N), everywhere(server["w"], N)
            u, v = averaged(u), averaged(v)
        for k, value in zip(out, (theta, w, u, v)):
            out[k].append(value.copy())
    return {k: np.array(values) for k, values in out.items()}


# --- Pairs across clients (Guo et al. 2023, "FeDXL", as the sheet of algorithms has it) ---

Maps = Mapping[str, Callable[..., Any]]
"""`first(n, t)`: the drawn S1 rows as (number, features, weight); `second(n, t)`: S2 rows as (label, features, weight);
`score(x, z)` and its gradient `pull(x, z)`; `ell(h, h', label)`, its derivatives `slopes`, `outer`(u) = f'(u);
`luck(n, t, side, place)`: the uniform number for a passive position."""
Pool = list[tuple[Any, ...]]


def chosen(pool: Pool, luck: float) -> tuple[Any, ...]:
    """The row of a pool at a uniform number; a row's last entry is its weight, and its probability is in proportion."""
    total = 0.0
    for row in pool:
        total += row[-1]
    reached = 0.0
    for row in pool:
        reached += row[-1]
        if reached > luck * total:
            return row
    raise AssertionError("the pool is empty")


def fedxl1(maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, passive: int) -> dict[str, Array]:
    """FeDXL1: S1 and S2 pools of scores; rows without weight are not there."""
    x = everywhere(x0, N)
    X = [x.copy()]
    pool1: Pool = []
    pool2: Pool = []
    own1: list[Pool] = [[] for _ in range(N)]
    own2: list[Pool] = [[] for _ in range(N)]
    for t in range(T):
        for n in range(N):
            first, second = maps["first"](n, t), maps["second"](n, t)
            G = np.zeros_like(x[n])
            for i, (_, z, w) in enumerate(first):
                h = maps["score"](x[n], z)
                for k in range(passive if t and w else 0):
                    c, label, _ = chosen(pool2, maps["luck"](n, t, 0, i * passive + k))
                    d, _ = maps["slopes"](h, c, label)
                    G = G + w / len(first) / passive * d[0] * maps["pull"](x[n], z)
                own1[n].append((h, w))
            for j, (label, z, w) in enumerate(second):
                h = maps["score"](x[n], z)
                for k in range(passive if t and w else 0):
                    c, _ = chosen(pool1, maps["luck"](n, t, 1, j * passive + k))
                    _, d = maps["slopes"](c, h, label)
                    G = G + w / len(second) / passive * d[0] * maps["pull"](x[n], z)
                own2[n].append((h, label, w))
            if t > 0:
                x[n] = x[n] - at(eta, t) * G
        if t % q == 0:
            x = averaged(x)
            pool1, pool2 = ([row for one in own for row in one] for own in (own1, own2))
            own1, own2 = [[] for _ in range(N)], [[] for _ in range(N)]
        X.append(x.copy())
    return {"x": np.array(X)}


def fedxl2(
    maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, gamma: Schedule, beta: Schedule, passive: int
) -> dict[str, Array]:
    """FeDXL2: one u per own S1 row; passive S1 rows bring theirs."""
    x, m = everywhere(x0, N), np.zeros((N, len(x0)))
    p = len(maps["ell"](0.0, 0.0, 1.0))
    u, met = np.zeros((N, maps["rows"](), p)), np.zeros((N, maps["rows"]()))
    out: dict[str, list[Array]] = {"x": [x.copy()], "m": [m.copy()], "u": [u.copy()], "met": [met.copy()]}
    pool1: Pool = []
    pool2: Pool = []
    own1: list[Pool] = [[] for _ in range(N)]
    own2: list[Pool] = [[] for _ in range(N)]
    for t in range(T):
        for n in range(N):
            first, second = maps["first"](n, t), maps["second"](n, t)
            G = np.zeros_like(x[n])
            for i, (number, z, w) in enumerate(first):
                if not w:
                    continue
                h = maps["score"](x[n], z)
                if t == 0:
                    values = [maps["ell"](h, maps["score"](x[n], other), label) for label, other, v in second if v]
                    if not values:  # a site without S2 rows has no u before it gets a pool
                        continue
                    u[n, number] = sum(values) / len(values)
                else:
                    others = [chosen(pool2, maps["luck"](n, t, 0, i * passive + k)) for k in range(passive)]
                    value = sum(maps["ell"](h, c, label) for c, label, _ in others) / passive
                    c = at(gamma, t) if met[n, number] else 1.0
                    u[n, number] = (1 - c) * u[n, number] + c * value
                    for c, label, _ in others:
                        d, _ = maps["slopes"](h, c, label)
                        G = G + w / len(first) / passive * (maps["outer"](u[n, number]) @ d) * maps["pull"](x[n], z)
                met[n, number] = 1
                own1[n].append((h, u[n, number].copy(), w))
            for j, (label, z, w) in enumerate(second):
                h = maps["score"](x[n], z)
                for k in range(passive if t and w else 0):
                    c, theirs, _ = chosen(pool1, maps["luck"](n, t, 1, j * passive + k))
                    _, d = maps["slopes"](c, h, label)
                    G = G + w / len(second) / passive * (maps["outer"](theirs) @ d) * maps["pull"](x[n], z)
                own2[n].append((h, label, w))
            if t > 0:
                b = 1.0 if t == 1 else at(beta, t)
                m[n] = (1 - b) * m[n] + b * G
                x[n] = x[n] - at(eta, t) * m[n]
        if t % q == 0:
            x, m = averaged(x), averaged(m)
            pool1, pool2 = ([row for one in own for row in one] for own in (own1, own2))
            own1, own2 = [[] for _ in range(N)], [[] for _ in range(N)]
        for k, v in (("x", x), ("m", m), ("u", u), ("met", met)):
            out[k].append(v.copy())
    return {k: np.array(v) for k, v in out.items()}


# --- The worst client: functions of the clients' losses ---

Loss = Callable[[int, int, Array], float]


def over_clients(
    grad: Grad,
    loss: Loss,
    x0: Array,
    N: int,
    q: int,
    T: int,
    eta: Schedule,
    start: Callable[[Array], Any],
    weights: Callable[[Array, Any], Array],
    after: Callable[[Array, Any], Any],
    alone: int = 0,
    rows: Sequence[int] = (),
    k: float = 0.0,
) -> dict[str, Array]:
    """The server keeps numbers v = start(f(x0)); a round has w = weights(f(x), v), then v = after(f(x), v).

    With `alone`, every client first takes so many steps by itself, and f − f* stands for f. "level" is v at every client, "mean" f̄.
    With `rows` and `k`, f is shrunk to a mean over clients: the server knows this round's, a client last round's.
    """

    def shrunk(f: Array, mean: float) -> Array:
        return np.array([(rows[n] * f[n] + k * mean) / (rows[n] + k) for n in range(N)]) if rows else f

    fbar = 0.0
    x, y = np.array(x0, dtype=float), everywhere(x0, N)
    best, known, f, w = np.zeros(N), np.zeros(N), np.zeros(N), np.ones(N)
    v: Any = np.zeros(N)
    X, R, V, F = [everywhere(x0, N)], [np.zeros((N, 2))], [np.zeros(N)], [fbar]
    for t in range(T):
        r = t - alone  # 1, 2, … are the iterations of the rounds
        if r == 0:
            if alone:
                best = np.array([loss(n, t, y[n]) for n in range(N)])
            known = np.ones(N)
            f = np.array([loss(n, t, x) for n in range(N)]) - best
            fbar = sum(f) / N
            v = start(shrunk(f, fbar))
            y = everywhere(x, N)
        else:
            if r > 0 and (r - 1) % q == 0:
                f = np.array([loss(n, t, x) for n in range(N)]) - best
                w = weights(shrunk(f, fbar), v)
            for n in range(N):
                y[n] = y[n] - at(eta, t) * grad(n, t, y[n])
        moved = everywhere(x, N)
        if r > 0:
            for n in range(N):
                moved[n] = x + w[n] * (y[n] - x)
            if r % q == 0:
                x = x + sum(w[n] * (y[n] - x) for n in range(N)) / N
                fbar = sum(f) / N
                v = after(shrunk(f, fbar), v)
                y, moved = everywhere(x, N), everywhere(x, N)
        X.append(moved)
        R.append(np.stack([best, known], 1))
        V.append(v * np.ones(N))
        F.append(fbar)
    return {"x": np.array(X), "reached": np.array(R), "level": np.array(V), "mean": np.array(F)}


def onto_simplex(v: Array) -> Array:
    """The projection max(v − c, 0) with the c for which it sums to 1, by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - (low + high) / 2, 0)


def afl(maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, gamma: float, update: str, **more: Any) -> Any:
    """Agnostic federated learning, λ at the server."""

    def after(f: Array, lam: Array) -> Array:
        if update == "projected":
            return onto_simplex(lam + gamma * f)
        return lam * np.exp(gamma * f) / sum(lam * np.exp(gamma * f))

    def start(f: Array) -> Array:
        return np.full(N, 1 / N)

    def weights(f: Array, lam: Array) -> Array:
        return N * lam

    return over_clients(maps["grad"], maps["loss"], x0, N, q, T, eta, start, weights, after, **more)


def kl_dro(maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, tau: float, gamma: float, **more: Any) -> Any:
    """KL-DRO, τ log mean exp(f/τ)."""

    def start(f: Array) -> float:
        return float(tau * np.log(np.mean(np.exp(f / tau))))

    def after(f: Array, L: float) -> float:
        return float(tau * np.log((1 - gamma) * np.exp(L / tau) + gamma * np.mean(np.exp(f / tau))))

    def weights(f: Array, L: float) -> Array:
        return np.exp((f - L) / tau)

    return over_clients(maps["grad"], maps["loss"], x0, N, q, T, eta, start, weights, after, **more)


def cvar_dro(
    maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, rho: float, eta_s: float, **more: Any
) -> Any:
    """CVaR over the worst share ρ of clients."""

    def above(f: Array, s: float) -> Array:
        return np.array([1.0 if f[n] > s else 0.0 for n in range(N)])

    def after(f: Array, s: float) -> float:
        return float(s - eta_s * (1 - np.mean(above(f, s)) / rho))

    def weights(f: Array, s: float) -> Array:
        return above(f, s) / rho

    return over_clients(maps["grad"], maps["loss"], x0, N, q, T, eta, np.mean, weights, after, **more)


def q_ffl(maps: Maps, x0: Array, N: int, q: int, T: int, eta: Schedule, p: float, **more: Any) -> Any:
    """q-FFL; what clients get is the logarithm of M."""

    def log_mean(f: Array, old: float = 0.0) -> float:
        return float(np.log(np.mean(np.maximum(f, 0) ** p)))

    def weights(f: Array, log_M: float) -> Array:
        return np.maximum(f, 0) ** p / np.exp(log_M)

    return over_clients(maps["grad"], maps["loss"], x0, N, q, T, eta, log_mean, weights, log_mean, **more)
