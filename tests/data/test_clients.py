"""Batches are a pure function of (seed, client, iteration), and clients are independent of each other."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from nestfed.core import NestfedError, as_clients
from nestfed.data.clients import Examples, every
from nestfed.data.random import Purpose, Streams
from nestfed.experiment.build import assemble
from nestfed.experiment.spec import from_tables, read
from nestfed.problems.invariant import InvariantClients, InvariantLogistic

X = torch.arange(100.0)
PARTS = [np.arange(0, 50), np.arange(50, 90), np.arange(90, 95), np.arange(95, 100)]


def held(**options: object) -> Examples:
    return Examples((X, X.long()), PARTS, **{"batch": 8, "seed": 3, **options})  # type: ignore[arg-type]


def test_a_batch_does_not_depend_on_when_where_or_with_whom_it_is_drawn() -> None:
    clients = held()
    alone = clients.sample(1, 17)[0]
    for t in (5, 17, 3):
        clients.sample(0, t)
    assert torch.equal(clients.sample(1, 17)[0], alone)
    assert torch.equal(held().draw([0, 1, 2], range(15, 20))[2][0][1], alone)
    assert torch.equal(pickle.loads(pickle.dumps(clients)).sample(1, 17)[0], alone)  # another process
    own = type("Own", (), {"__len__": lambda s: 4, "sample": lambda s, n, t: clients.sample(n, t)})()
    plain = as_clients(own).draw([1], range(17, 18))
    assert torch.equal(plain[0][0][0], alone)


def test_seeds_clients_and_iterations_differ() -> None:
    clients = held()
    drawn = {tuple(clients.sample(0, t)[0].tolist()) for t in range(50)}
    assert len(drawn) == 50
    assert not torch.equal(held(seed=4).sample(0, 0)[0], clients.sample(0, 0)[0])
    assert not torch.equal(clients.sample(0, 0)[0] % 50, clients.sample(1, 0)[0] - 50)


def test_every_example_is_drawn_equally_often_and_once_a_batch() -> None:
    clients = held()
    batches = [clients.sample(0, t)[0].numpy() for t in range(2000)]
    assert all(len(set(b)) == 8 for b in batches)
    counts = np.bincount(np.concatenate(batches).astype(int), minlength=50)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_batches_hold_own_examples_only_also_with_replacement() -> None:
    clients = held()
    for n, part in enumerate(PARTS):
        for t in range(20):
            x, y = clients.sample(n, t)
            assert len(x) == 8, "a client with fewer examples draws with replacement"
            assert set(x.tolist()) <= set(part.tolist())
            assert torch.equal(x.long(), y)


def test_a_client_without_examples_is_refused_by_name() -> None:
    with pytest.raises(NestfedError, match="Geneva has no examples"):
        Examples((X,), [np.arange(3), np.arange(0)], names=["Basel", "Geneva"])
    with pytest.raises(NestfedError, match="outside"):
        Examples((X,), [np.array([100])])
    with pytest.raises(NestfedError, match="lengths"):
        Examples((X, X[:3]), [np.arange(3)])


def test_parts_are_any_lists_of_row_numbers() -> None:
    parts = [range(50), list(range(50, 90)), torch.arange(90, 95), PARTS[3]]
    clients = Examples((X, X.long()), parts, batch=8, seed=3)  # type: ignore[arg-type]
    assert torch.equal(clients.sample(1, 17)[0], held().sample(1, 17)[0])
    for wrong in ([True] * 100, [0.5], [[1, 2]], ["a"]):
        with pytest.raises(NestfedError, match=r"^The part of client 0 must be a list of row numbers, not array"):
            Examples((X, X), [wrong], batch=8)  # type: ignore[list-item]


def test_batch_sizes_may_depend_on_the_iteration() -> None:
    assert [len(held(batch=lambda t: 20 if t == 0 else 4).sample(0, t)[0]) for t in (0, 1, 2)] == [20, 4, 4]
    assert [len(b[0][0]) for b in held(batch=every(3, 9, 2)).draw([0, 1], range(4))] == [9, 2, 2, 9]


def test_a_seed_of_their_own_stays() -> None:
    assert held().seeded(9).seed == 3
    assert held(seed=None).seeded(9).seed == 9


def test_streams_are_independent_and_can_be_entered_anywhere() -> None:
    streams = Streams(1)
    first = streams.at(Purpose.BATCH, 2, 3).random(1000)
    streams.at(Purpose.INNER, 2, 3).integers(3)
    assert np.array_equal(streams.at(Purpose.BATCH, 2, 3).random(1000), first)
    for other in (
        Streams(1).at(Purpose.INNER, 2, 3),
        Streams(1).at(Purpose.BATCH, 3, 3),
        Streams(1).at(Purpose.BATCH, 2, 4),
        Streams(2).at(Purpose.BATCH, 2, 3),
    ):
        assert abs(np.corrcoef(first, other.random(1000))[0, 1]) < 0.12


def test_invariant_clients_draw_the_paper_s_distribution() -> None:
    clients = InvariantClients(clients=4, dim=5, ratio=2.0, inner=30, outer=200, seed=1, dtype=torch.float64)
    (a, b), (eta,) = clients.sample(2, 7)
    assert torch.equal(b, torch.sign(a @ clients.truth))  # type: ignore[attr-defined]
    assert abs(a.std() - 1) < 0.1
    assert abs((eta - a[:, None]).std() - 2) < 0.05, "η ~ N(a, σ2²I)"
    correlation = np.corrcoef(a.ravel(), clients.sample(3, 7)[0][0].ravel())[0, 1]
    assert abs(correlation) < 0.1, "every client has its own stream"


def test_invariant_loss_has_the_mean_inside_the_logistic() -> None:
    clients = InvariantClients(clients=2, dim=4, inner=7, outer=3, seed=0, dtype=torch.float64)
    x = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    (_, b), (eta,) = batch = clients.sample(0, 0)
    b, eta, x = b.numpy(), eta.numpy(), x.numpy()
    inside = np.mean([np.log1p(np.exp(-b[i] * (eta[i] @ x).mean())) for i in range(3)])
    penalty = 0.001 * sum(10 * v**2 / (1 + 10 * v**2) for v in x)
    loss = InvariantLogistic(torch.zeros(4, dtype=torch.float64)).loss(torch.from_numpy(x), batch)
    assert float(loss) == pytest.approx(float(inside + penalty), abs=1e-12)
    outside = np.mean([np.log1p(np.exp(-b[i] * (eta[i] @ x))).mean() for i in range(3)])
    assert abs(outside - inside) > 1e-3


def test_the_large_batch_of_an_experiment_is_drawn_when_the_method_needs_it() -> None:
    """At t = 0, and for BSpiderBoost every period; where there is no such batch the setting is refused."""
    one = read("average-precision").with_overrides(
        {"problem.initial_batch": 9, "problem.outer": 2, "partition.clients": 1}
    )
    for algorithm, sizes in (
        ({"name": "fcsg-m", "alpha": 0.1, "beta": 0.5}, [9, 2, 2, 2, 2, 2]),
        ({"name": "bspiderboost", "alpha": 0.1, "period": 3}, [9, 2, 2, 9, 2, 2]),
    ):
        tables = {**one.source, "algorithm": algorithm}
        made = assemble(from_tables({k: v for k, v in tables.items() if k != "methods"}))
        assert [len(made.clients.sample(0, t)[0][0]) for t in range(6)] == sizes
    invariant = read("fcsg-figure1").for_method("fcsg").with_overrides({"algorithm.alpha": 0.1})
    assert assemble(invariant.with_overrides({"problem.clip": 0.5})).problem.clip == 0.5
    with pytest.raises(
        NestfedError,
        match="initial_batch belongs to classify, regress, cox, auroc, auprc, agnostic, paired-auroc, paired-ap, partial-auroc, paired-partial-auroc, multi-label-auroc, multi-label-ap; invariant has clip, dim",
    ):
        assemble(invariant.with_overrides({"problem.initial_batch": 9}))
