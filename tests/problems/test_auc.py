"""AUROC as minimax and AUPRC as conditional problem: against their definitions, pair by pair."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestfed.algorithms import CODA, FCSGM, FMGDA, AccFCSGM, FedAvg
from nestfed.core import NestfedError
from nestfed.data.clients import Balanced, Examples, Pairs
from nestfed.metrics import auroc, average_precision
from nestfed.models import Mlp
from nestfed.problems.auprc import AUPRC
from nestfed.problems.auroc import AUROC
from nestfed.problems.classify import Classify
from tests.support import simulate


class Table(nn.Module):
    """A model whose parameters are the scores themselves: example i has the score h_i."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.h = nn.Parameter(scores.clone())

    def forward(self, i: Tensor) -> Tensor:
        return self.h[i]


def labelled(n: int, positives: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores in float64 and labels, shuffled."""
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.permutation(np.arange(n) < positives).astype(np.int64))
    return torch.from_numpy(rng.normal(size=n)) + 0.5 * y, y


def pair_loss(h: Tensor, y: Tensor) -> Tensor:
    """P = E[(1 − h⁺ + h⁻)²] over all pairs."""
    return ((1 - h[y == 1][:, None] + h[y == 0][None, :]) ** 2).mean()


def theta(problem: AUROC, h: Tensor, a: Tensor, b: Tensor) -> Tensor:
    values = {"module.h": h, "a": a[None], "b": b[None]}
    return torch.cat([values[name] for name in problem.flat.names])


# ------------------------------------------------------------------------------------------------- AUROC

CASES = [(12, 6, 0), (30, 5, 1), (30, 25, 2), (7, 1, 3), (7, 6, 4)]


@pytest.mark.parametrize(("n", "positives", "seed"), CASES)
def test_the_minimax_value_is_the_pairwise_square_loss(n: int, positives: int, seed: int) -> None:
    h, y = labelled(n, positives, seed)
    p = positives / n
    problem = AUROC(Table(h), p=p)
    batch = (torch.arange(n), y)
    a, b = h[y == 1].mean(), h[y == 0].mean()
    w = (b - a)[None]
    best = theta(problem, h, a, b)
    value = problem.loss_at(best, w, batch)
    expected = p * (1 - p) * (pair_loss(h, y) - 1)
    assert float(value) == pytest.approx(float(expected), abs=1e-8)

    # It is a saddle point of a, b and w …
    g_theta, g_w = problem.grads(best, w, batch)
    named = dict(zip(problem.flat.names, torch.split(g_theta, problem.flat.sizes)))
    assert max(abs(float(v)) for v in (named["a"], named["b"], g_w)) < 1e-12
    for d in (-0.3, 0.01, 2.0):
        assert problem.loss_at(best, w + d, batch) < value
        assert problem.loss_at(theta(problem, h, a + d, b), w, batch) > value
        assert problem.loss_at(theta(problem, h, a, b + d), w, batch) > value
    # … and there the scores' gradient is that of the pairwise loss, so training follows the right objective.
    leaf = h.clone().requires_grad_()
    (slope,) = torch.autograd.grad(p * (1 - p) * pair_loss(leaf, y), leaf)
    torch.testing.assert_close(named["module.h"], slope, rtol=0, atol=1e-12)


def test_descent_in_a_and_b_with_ascent_in_w_finds_it() -> None:
    h, y = labelled(30, 5, 1)
    problem, batch = AUROC(Table(h), p=5 / 30), (torch.arange(30), y)
    a, b, w = torch.ones((), dtype=h.dtype), torch.zeros((), dtype=h.dtype), problem.w0
    assert w.tolist() == [0.0]
    start = dict(zip(problem.flat.names, torch.split(problem.x0, problem.flat.sizes)))
    assert (float(start["a"]), float(start["b"])) == (1.0, 0.0)
    for _ in range(300):
        g, g_w = problem.grads(theta(problem, h, a, b), w, batch)
        named = dict(zip(problem.flat.names, torch.split(g, problem.flat.sizes)))
        a, b, w = a - 0.9 * named["a"][0], b - 0.9 * named["b"][0], w + 0.9 * g_w
    found = problem.loss_at(theta(problem, h, a, b), w, batch)
    assert float(found) == pytest.approx(float(5 / 36 * (pair_loss(h, y) - 1)), abs=1e-8)


@pytest.mark.parametrize("signs", set(product((1, -1), repeat=4)) - {(1, 1, 1, 1)})
def test_the_identity_notices_every_wrong_sign(signs: tuple[int, ...]) -> None:
    """If a term's sign were wrong the identity would fail: the tests above are sharp."""
    h, y = labelled(12, 5, 0)
    p, positive = 5 / 12, (y == 1).double()
    a, b = h[y == 1].mean(), h[y == 0].mean()
    s1, s2, s3, s4 = signs
    w = b - a
    square = s1 * (1 - p) * (h - a) ** 2 * positive + s1 * p * (h - b) ** 2 * (1 - positive)
    linear = 2 * (1 + s2 * w) * s3 * (p * h * (1 - positive) - (1 - p) * h * positive)
    wrong = (square + linear).mean() - s4 * p * (1 - p) * w**2
    assert abs(float(wrong - p * (1 - p) * (pair_loss(h, y) - 1))) > 1e-3


def test_clients_of_different_size_and_rate() -> None:
    """The mean over clients is the objective of the mixture in which every client weighs 1/N, with that p."""
    h, y = labelled(40, 15, 5)
    order = torch.argsort(y, descending=True)
    parts = [order[:10], order[10:17], order[17:]]  # the first holds positives only, the last negatives only
    p = float(np.mean([float(y[part].double().mean()) for part in parts]))
    assert p != 15 / 40
    problem = AUROC(Table(h), p=p)
    mass = torch.zeros(40, dtype=h.dtype)
    for part in parts:
        mass[part] = 1 / (3 * len(part))
    up, down = mass[y == 1] / p, mass[y == 0] / (1 - p)
    a, b = (up * h[y == 1]).sum(), (down * h[y == 0]).sum()
    point, w = theta(problem, h, a, b), (b - a)[None]
    value = sum(problem.loss_at(point, w, (part, y[part])) for part in parts) / 3
    pairs = (up[:, None] * down[None, :] * (1 - h[y == 1][:, None] + h[y == 0][None, :]) ** 2).sum()
    assert float(value) == pytest.approx(float(p * (1 - p) * (pairs - 1)), abs=1e-8)


def test_the_best_dual() -> None:
    h, y = labelled(30, 10, 6)
    problem, batch = AUROC(Table(h), p=1 / 3), (torch.arange(30), y)
    point = theta(problem, h, torch.tensor(0.7, dtype=h.dtype), torch.tensor(-0.2, dtype=h.dtype))
    w = problem.best_dual(point, batch)
    assert float(w) == pytest.approx(float(h[y == 0].mean() - h[y == 1].mean()), abs=1e-12)
    assert abs(float(problem.grads(point, w, batch)[1])) < 1e-12
    # Over clients that share the classes unevenly (the last has one only) the mean is the best w for all of them.
    some = [torch.arange(30)[y == 1][:8], torch.cat([torch.arange(30)[y == 1][8:], torch.arange(30)[y == 0][:6]])]
    some.append(torch.arange(30)[y == 0][6:])
    parts = [(rows[torch.arange(24) % len(rows)], y[rows][torch.arange(24) % len(rows)]) for rows in some]
    p = sum(float((labels == 1).double().mean()) for _, labels in parts) / 3
    problem = AUROC(Table(h), p=p)
    w = sum(problem.best_dual(point, part) for part in parts) / 3
    assert abs(float(sum(problem.grads(point, w, part)[1] for part in parts))) < 1e-12


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_coda_with_dropout_gives_the_same_again(mode: Literal["loop", "vmap"]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0))
    x, y = torch.randn(60, 2), torch.arange(60) % 2
    clients = Examples((x, y), [np.arange(30), np.arange(30, 60)], batch=8)
    ends = [
        simulate(AUROC(net, p=0.5), CODA(0.1, 2.0, 2), clients, rounds=4, q=2, mode=mode, progress=False).x
        for _ in range(2)
    ]
    assert torch.equal(*ends)


def test_the_score_may_be_a_sigmoid() -> None:
    h, y = labelled(12, 4, 7)
    raw, squashed = AUROC(Table(torch.sigmoid(h)), p=1 / 3), AUROC(Table(h), p=1 / 3, sigmoid=True)
    batch, a, b, w = (torch.arange(12), y), torch.tensor(0.4), torch.tensor(0.1), torch.tensor([0.2])
    a, b, w = a.double(), b.double(), w.double()
    value = squashed.loss_at(theta(squashed, h, a, b), w, batch)
    assert float(value) == pytest.approx(float(raw.loss_at(theta(raw, torch.sigmoid(h), a, b), w, batch)), abs=1e-12)
    torch.testing.assert_close(squashed.bind(squashed.x0)(batch[0]), torch.sigmoid(h))
    torch.testing.assert_close(squashed.module(squashed.x0)(batch[0]), h)  # the user's own module, as it was


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AUROC(Mlp(3), p=0.0), "between 0 and 1"),
        (lambda: AUROC(Mlp(3), p=1.0), "between 0 and 1"),
        (lambda: AUROC(torch.zeros(3), p=0.5), "nn.Module"),
        (lambda: AUROC(nn.Identity(), p=0.5).loss_at(torch.zeros(2), torch.zeros(1), _batch()), "shape"),
        (lambda: AUROC(Mlp(3, ())).loss_at(torch.zeros(6), torch.zeros(1), _batch()), "Balanced"),
        (lambda: AUROC(Mlp(3, ()), p=0.5).loss_at(torch.zeros(6), torch.zeros(1), (*_batch(), torch.ones(3))), "p=…"),
        (lambda: Balanced((torch.zeros(4, 1), torch.ones(4)), [np.arange(4)]), "one class"),
        (lambda: AUPRC(Mlp(3), margin=0.0), "margin"),
        (lambda: Pairs((torch.zeros(4, 1), torch.tensor([0, 1, 2, 0])), [np.arange(4)]), "0 and 1"),
        (lambda: Pairs((torch.zeros(4, 1), torch.zeros(4)), [np.arange(4)]), "No client has a positive"),
        (lambda: Pairs((torch.zeros(4, 1), torch.ones(4)), [np.arange(4)], inner=1), "at least 2"),
        (lambda: Pairs((torch.zeros(4, 1), torch.ones(4)), [np.arange(4)], inner_positives=24), "inner_positives"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(NestfedError, match=words):
        make()  # type: ignore[operator]


def _batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])


# ------------------------------------------------------------------------------------------------- AUPRC


def everything(h: Tensor, y: Tensor) -> object:
    """The batch of a client that draws all of its data: positives as outer samples, all examples as inner ones."""
    n, positives = len(y), int(y.sum())
    clients = Pairs((torch.arange(n), y), [np.arange(n)], outer=positives, inner=n, inner_positives=positives)
    return clients.sample(0, 0)


def by_brute_force(h: Tensor, y: Tensor, margin: float) -> Tensor:
    """−mean over positives z⁺ of (rate·mean⁺ℓ + ε)/(rate·mean⁺ℓ + (1 − rate)·mean⁻ℓ + ε), one pair at a time.

    mean⁺ counts z⁺, whose ℓ is s², once more.
    """
    s, total, rate, epsilon = torch.sigmoid(h), h.new_zeros(()), float(y.double().mean()), 1e-4 * margin**2
    for i in range(len(h)):
        if y[i] == 1:
            losses = [torch.clamp(margin - s[i] + s[j], min=0) ** 2 for j in range(len(h))]
            above = [loss for j, loss in enumerate(losses) if y[j] == 1] + [h.new_tensor(margin**2)]
            below = [loss for j, loss in enumerate(losses) if y[j] == 0]
            g1 = rate * torch.stack(above).mean()
            g2 = g1 + (1 - rate) * torch.stack(below).mean() if below else g1
            total = total - (g1 + epsilon) / (g2 + epsilon)
    return total / int(y.sum())


@pytest.mark.parametrize(("n", "positives", "seed"), CASES)
@pytest.mark.parametrize("margin", [0.1, 1.0])
def test_the_objective_over_all_pairs(n: int, positives: int, seed: int, margin: float) -> None:
    h, y = labelled(n, positives, seed)
    problem, batch = AUPRC(Table(h), margin=margin), everything(h, y)
    leaf = h.clone().requires_grad_()
    expected = by_brute_force(leaf, y, margin)
    (slope,) = torch.autograd.grad(expected, leaf)
    assert float(problem.loss(h, batch)) == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.testing.assert_close(problem.grad(h, batch), slope, rtol=0, atol=1e-12)


def test_a_better_order_has_a_lower_loss_and_descent_improves_it() -> None:
    y = torch.tensor([0, 0, 0, 0, 1, 1])
    rising = torch.linspace(-2, 2, 6, dtype=torch.float64)
    losses = [float(AUPRC(Table(h), margin=0.1).loss(h, everything(h, y))) for h in (rising, -rising)]
    assert losses[0] < -0.9 < -0.35 < losses[1] <= 0
    h, y = labelled(40, 8, 9)
    problem, batch, x = AUPRC(Table(h), margin=0.1), everything(h, y), h
    for _ in range(200):
        x = x - 5.0 * problem.grad(x, batch)
    assert average_precision(h, y) < 0.6
    assert average_precision(x, y) > average_precision(h, y) + 0.3


def test_a_positive_above_everything_does_not_divide_by_zero() -> None:
    h = torch.tensor([30.0, -30.0, -30.0, -30.0], dtype=torch.float64)
    y = torch.tensor([1, 0, 0, 0])
    clients = Pairs((torch.arange(4), y), [np.arange(4)], outer=1, inner=2, inner_positives=1, seed=0)
    problem = AUPRC(Table(h), margin=0.5)
    outer, (x, labels, weight), which = clients.sample(0, 0)
    batch = (outer, (x, labels, weight * (labels == 0)), which)  # not even z⁺ itself among the inner samples
    assert float(problem.loss(h, batch)) == pytest.approx(-1.0)
    assert torch.isfinite(problem.grad(h, batch)).all()


@pytest.mark.parametrize(("positives", "negatives", "k"), [(3, 9, 2), (3, 9, 5), (1, 11, 4), (9, 3, 2), (6, 6, 7)])
def test_the_inner_mean_targets_the_datas_own_rate(positives: int, negatives: int, k: int) -> None:
    """Also where a stratum is smaller than its share of the batch and is drawn with replacement."""
    n, m, draws = positives + negatives, 8, 3000
    y = torch.tensor([1] * positives + [0] * negatives)
    clients = Pairs((torch.arange(n), y), [np.arange(n)], outer=2, inner=m, inner_positives=k, seed=3)
    rate = positives / n
    drawn = clients.draw([0], range(draws))
    above = torch.cat([outer[0] for outer, *_ in drawn])
    x, labels, weight = (torch.cat(leaves)[:, 0] for leaves in zip(*(inner for _, inner, _ in drawn)))
    assert x.shape == (draws, m)
    # In every batch, not only on average, the positives weigh what they weigh in the data.
    np.testing.assert_allclose((weight * labels).mean(1), rate, rtol=1e-6)
    np.testing.assert_allclose(weight.mean(1), 1.0, rtol=1e-6)
    assert labels.sum(1).tolist() == [k] * draws
    share = np.bincount(x.flatten(), weight.flatten(), n) / m / draws
    outer_share = np.bincount(above.flatten(), minlength=n) / above.numel()
    # Each example weighs 1/n on average, so the mean of any g(z) is the mean over the data.
    np.testing.assert_allclose(share, 1 / n, atol=0.12 / n)
    np.testing.assert_allclose(outer_share, np.where(y.numpy() == 1, 1 / positives, 0), atol=0.03)


# ---------------------------------------------------------------------------------- clients of one class


def federation() -> tuple[Tensor, Tensor, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(np.r_[np.ones(20), np.zeros(60)].astype(np.int64))
    x = torch.from_numpy(rng.normal(size=(80, 4)) + 0.7 * y.numpy()[:, None]).float()
    # no positives · no negatives · both · a single positive · a single example
    return x, y, [np.arange(20, 40), np.arange(6), np.r_[6:19, 40:60], np.r_[19, 60:79], np.array([79])]


def test_a_client_without_positives_teaches_nothing() -> None:
    x, y, parts = federation()
    problem = AUPRC(Mlp(4, ()))
    batch = Pairs((x, y), parts, outer=3, inner=6, inner_positives=2, seed=0).sample(0, 0)
    assert float(problem.loss(problem.x0, batch)) == 0
    assert float(problem.grad(problem.x0, batch).abs().max()) == 0
    assert batch[0][1].tolist() == [0, 0, 0]


def test_a_client_without_negatives_has_nothing_to_rank() -> None:
    x, y, parts = federation()
    problem = AUPRC(Mlp(4, ()))
    batch = Pairs((x, y), parts, outer=3, inner=6, inner_positives=2, seed=0).sample(1, 0)
    assert float(problem.loss(problem.x0, batch)) == pytest.approx(-1)
    assert float(problem.grad(problem.x0, batch).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "objective", "mode"),
    [
        (FCSGM(0.2), "auprc", "vmap"),
        (AccFCSGM(0.2), "auprc", "loop"),
        (FMGDA(c_hat=0.05, c=0.05), "auroc", "vmap"),
        (FedAvg(0.3), "classify", "vmap"),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_clients_of_one_class_do_not_break_training(algorithm: object, objective: str, mode: str) -> None:
    x, y, parts = federation()
    torch.manual_seed(0)
    model = Mlp(4, ())
    if objective == "auprc":
        problem, clients = AUPRC(model), Pairs((x, y), parts, outer=3, inner=6, inner_positives=2)
    else:
        clients = Examples((x, y), parts, batch=5)  # type: ignore[assignment]
        rate = float(np.mean([float(y[p].double().mean()) for p in parts]))
        problem = AUROC(model, p=rate) if objective == "auroc" else Classify(model)  # type: ignore[assignment]
    result = simulate(problem, algorithm, clients, rounds=30, q=3, seed=0, mode=mode, progress=False)  # type: ignore[arg-type]
    assert all(math.isfinite(r["loss"]) for r in result.history)
    with torch.no_grad():
        assert auroc(result.model(x), y) > 0.78  # of at most 0.84 for such normal scores
