"""SOX: the bias that it removes, its states per example, and what it rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestfed import AUPRC, FCSGM, SOX, Minimize, Pairs
from nestfed.core import Batch, NestfedError
from nestfed.data.clients import Paced
from nestfed.models import Mlp
from nestfed.problems.auprc import AUPRCOptions
from nestfed.problems.base import Conditional
from nestfed.testing import check_algorithm, check_problem
from tests import toys
from tests.support import simulate


def limit(toy: toys.OwnExamples, method: Any) -> Tensor:
    """The mean of the iterates after a transient."""
    seen: list[Tensor] = []

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append(shared["x"].clone())
        return {}

    simulate(toy.problem, method, toy.clients, rounds=120, q=5, seed=1, measure=measure, mode="loop", progress=False)
    return torch.stack(seen[30:]).mean(0)


def test_it_finds_the_optimum_where_fcsg_m_does_not() -> None:
    """With one inner sample: the limit of FCSG-M has the bias σ², that of SOX γσ²; both are known exactly."""
    toy = toys.OwnExamples(N=1, sigma=1.0, inner=1, outer=6)
    truth, gamma = toy.minimiser, 0.05
    away = float((toy.limit(1.0) - truth).norm())
    assert away > 1
    biased, tracked = limit(toy, FCSGM(0.05, 0.5)), limit(toy, SOX(0.05, 0.5, gamma))
    assert float((biased - toy.limit(1.0)).norm()) < 0.05 * away
    assert float((biased - truth).norm()) > 0.8 * away
    assert float((tracked - truth).norm()) < 0.2 * away
    assert float((tracked - toy.limit(gamma)).norm()) < 0.05 * away


# ------------------------------------------------------------------------------------------------- pairs


def federation() -> tuple[Tensor, Tensor, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(np.r_[np.ones(20), np.zeros(60)].astype(np.int64))
    x = torch.from_numpy(rng.normal(size=(80, 4)) + 0.7 * y.numpy()[:, None])
    # no positives · no negatives · both, in disorder · fewer positives than a batch
    return x, y, [np.arange(20, 40), np.arange(6), rng.permutation(np.r_[6:18, 40:60]), np.r_[18, 19, 60:80]]


def test_pairs_number_their_positives() -> None:
    x, y, parts = federation()
    clients = Pairs((x, y), parts, outer=3, inner=6, seed=0)
    assert clients.outer_examples == 12
    positives = np.sort(parts[2][y[parts[2]].numpy() == 1])
    seen = set()
    for t in range(40):
        (drawn, _), _, which = clients.sample(2, t)
        assert len(set(which.tolist())) == 3
        assert torch.equal(drawn, x[positives[which]])
        seen |= set(which.tolist())
    assert seen == set(range(12))
    for n in (0, 1, 3):
        assert int(clients.sample(n, 1)[2].max()) < 12
    together = clients.draw([2, 3], range(5, 6))[0][2]
    assert torch.equal(together, torch.stack([clients.sample(n, 5)[2] for n in (2, 3)]))


def auprc() -> tuple[AUPRC, Pairs]:
    x, y, parts = federation()
    clients = Pairs((x, y), parts, outer=3, inner=6, seed=0)
    torch.manual_seed(0)
    return AUPRC(Mlp(4, ()).double(), outer_examples=clients.outer_examples), clients


def test_the_contract_on_average_precision() -> None:
    problem, clients = auprc()
    check_problem(problem, clients)
    check_algorithm(SOX(0.2, 0.3, 0.5), problem, clients, rounds=3)


def test_average_precision_without_memory_is_fcsg_m() -> None:
    problem, clients = auprc()
    ours, theirs = (
        simulate(problem, m, clients, rounds=4, q=3, seed=2, count=3, mode="vmap", progress=False)
        for m in (SOX(0.2, 0.3, 1.0), FCSGM(0.2, 0.3))
    )
    torch.testing.assert_close(ours.x, theirs.x, rtol=1e-12, atol=1e-12)
    met = ours.private["met"].sum(1)
    assert float(met[2]) > 3  # its own positives, and only those
    assert float(met[3]) == 2


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_pieces_pace_and_workers_change_nothing(mode: str) -> None:
    problem, clients = auprc()
    paced = Paced(clients, lambda n, t, q: 1 + n % q)
    options = {"rounds": 3, "q": 2, "seed": 2, "progress": False, "mode": mode}
    whole = simulate(problem, SOX(0.2), paced, **options)
    for more in ({"accumulate": 2}, {"workers": 2}, {"mode": "loop"}):
        other = simulate(problem, SOX(0.2), paced, **{**options, **more})
        torch.testing.assert_close(other.x, whole.x, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(other.private["u"], whole.private["u"], rtol=1e-10, atol=1e-10)


def test_an_objective_of_a_file_counts_its_positives() -> None:
    x, y, parts = federation()
    problem, clients = AUPRCOptions(outer=3, inner=6).build(Mlp(4, ()).double(), (x, y), parts)
    assert problem.outer_examples == clients.outer_examples == 12


# ------------------------------------------------------------------------------------------------- errors


def test_what_is_missing_is_named() -> None:
    _, clients = auprc()
    with pytest.raises(NestfedError, match=r"AUPRC\(…, outer_examples=…\)"):
        simulate(AUPRC(Mlp(4, ()).double()), SOX(0.1), clients, rounds=1, progress=False)
    with pytest.raises(NestfedError, match="kind Conditional"):
        simulate(Minimize(lambda x, b: x.sum(), torch.zeros(2)), SOX(0.1), clients, rounds=1, progress=False)
    s = toys.conditional()
    unnumbered = Conditional(s.problem.f, s.problem.g, s.problem.x0, outer_examples=4)
    with pytest.raises(NestfedError, match=r"\(outer, inner, which\)"):
        simulate(unnumbered, SOX(0.1), s.clients, rounds=1, progress=False)
    s = toys.sampled()
    wrong = Conditional(s.problem.f, s.problem.g, s.problem.x0, outer_examples=4)
    with pytest.raises(NestfedError, match=r"2 values .* not inner_dim = 1"):
        simulate(wrong, SOX(0.1), s.clients, rounds=1, progress=False)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_an_example_twice_in_a_batch_is_rejected(mode: str) -> None:
    s = toys.sampled()

    def twice(own: Any, noise: Any) -> Any:
        outer, inner, which = s.clients.arrange(own, noise)
        return outer, inner, which[:, :1].expand_as(which)

    with pytest.raises(NestfedError, match="twice; draw outer examples without replacement"):
        simulate(s.problem, SOX(0.1), replace(s.clients, arrange=twice), rounds=1, mode=mode, progress=False)


def test_the_gradient_is_that_of_the_moving_means() -> None:
    """G = mean_i ∇g_i(x)ᵀ∇f_i(u_i) with the new u, by hand in numpy."""
    s = toys.sampled()
    batch = Batch(s.clients.seeded(toys.SEED).sample(1, 2), eager=True)
    drawn = s.maps["tasks"](1, 2)
    u, w = torch.tensor([[0.3, -0.2], [1.1, 0.4]], dtype=torch.float64), torch.tensor([0.25, 1.0], dtype=torch.float64)
    g, new = s.problem.tracked_grad(torch.from_numpy(s.x0), u, w, batch)
    by_hand = [(1 - float(w[k])) * u[k].numpy() + float(w[k]) * s.maps["g"](1, 2, i, s.x0) for k, i in enumerate(drawn)]
    np.testing.assert_allclose(new, by_hand, atol=1e-12)
    pulls = [s.maps["jac"](1, 2, i, s.x0).T @ s.maps["outer"](1, 2, i, v) for i, v in zip(drawn, by_hand)]
    np.testing.assert_allclose(g, np.mean(pulls, axis=0), atol=1e-12)
