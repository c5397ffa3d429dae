"""Running statistics (BatchNorm): rejected by default, averaged or private on request, in every engine."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed import (
    AUPRC,
    AUROC,
    CODA,
    FCSGM,
    FMGDA,
    Adam,
    Alone,
    Balanced,
    Classify,
    Compositional,
    Examples,
    FedAvg,
    LocalSCGD,
    Metric,
    Minimize,
    Pairs,
    Scaffold,
    WarmUp,
)
from nestfed.core import Batch, NestfedError
from nestfed.testing import check_algorithm, check_problem
from tests.methods import method
from tests.support import identical, on_two_ranks, simulate

N, SEED = 3, 4
RUN: dict[str, Any] = {"rounds": 3, "q": 2, "seed": SEED, "progress": False, "workers": 1}


def network(seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(4, 5), nn.BatchNorm1d(5, **options), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)
        return nn.Sequential(*layers).double()


def loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sites() -> dict[str, Any]:
    generator, found = torch.Generator().manual_seed(0), {}
    for n in range(N):
        x = torch.randn(20 + n, 4, generator=generator, dtype=torch.float64) * (n + 1) + n
        found[f"site {n}"] = (x, x.sum(1).tanh())
    return found


def held(count: int = N) -> Examples:
    return Examples.of(dict(list(sites().items())[:count]), batch=6, seed=1)


def labelled() -> dict[str, Any]:
    return {name: (x, (y > y.median()).long()) for name, (x, y) in sites().items()}


def problem(buffers: str = "average", **options: Any) -> Minimize:
    return Minimize(loss, network(), buffers=buffers, **options)


def statistics(model: Any) -> Tensor:
    return torch.cat([model[1].running_mean, model[1].running_var])


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def trained(start: nn.Module, n: int, ts: range, eta: float = 0.1) -> nn.Module:
    """Train one client by plain torch."""
    model = copy.deepcopy(start).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=eta)
    for t in ts:
        optimizer.zero_grad()
        loss(model, held().sample(n, t)).backward()
        optimizer.step()
    return model


def test_one_client_is_plain_torch_training() -> None:
    for kind in ("average", "private"):
        found = simulate(problem(kind), FedAvg(0.1), held(1), **{**RUN, "rounds": 4, "q": 5})
        expected = trained(network(), 0, range(20))
        close(dict(found.model.named_parameters()), dict(expected.named_parameters()))
        close(statistics(found.model), statistics(expected))
        x = held().arrays[0]
        close(found.model(x), expected.eval()(x))
        assert float((statistics(found.model) - statistics(network())).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["average", "private"])
def test_rounds_are_local_training_and_means(kind: str) -> None:
    """FedAvg by hand, with two of three clients in a round: the mean of their parameters, and of their statistics or not."""
    from nestfed.data.random import Streams
    from nestfed.engine.options import Exchange

    expected, own = network(), {n: statistics(network()) for n in range(N)}
    rounds = [Exchange(count=2).draw(Streams(SEED), N, round) for round in range(4)]
    assert len({tuple(asked) for asked in rounds}) > 1
    for round, asked in enumerate(rounds):
        models = []
        for n in asked:
            start = copy.deepcopy(expected)
            if kind == "private":
                start[1].running_mean, start[1].running_var = own[n][:5].clone(), own[n][5:].clone()
            models.append(trained(start, n, range(2 * round, 2 * round + 2)))
            own[n] = statistics(models[-1]).clone()
        tables = [m.state_dict() for m in models]
        means = {k: torch.stack([t[k] for t in tables]).mean(0) for k in tables[0] if "tracked" not in k}
        expected.load_state_dict({**expected.state_dict(), **means})
    found = simulate(problem(kind), FedAvg(0.1), held(), **{**RUN, "rounds": 4, "count": 2})
    close(dict(found.model.named_parameters()), dict(expected.named_parameters()))
    if kind == "average":
        close(statistics(found.model), statistics(expected))
        close(found.shared["buffers"], statistics(expected))
        assert not found.private
        assert not found.models
    else:
        rows = torch.stack([own[n] for n in range(N)])
        close(found.private["buffers"], rows)
        close(statistics(found.model), rows.mean(0))
        assert set(found.shared) == {"x"}
        assert float(rows.std(0).min()) > 1e-3
        for n, model in enumerate(found.models):
            close(statistics(model), own[n])
            close(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_private_statistics_count_from_a_clients_first_round_on() -> None:
    found = simulate(problem("private"), FedAvg(0.1), held(), **{**RUN, "rounds": 1, "count": 1})
    rows = found.private["buffers"]
    moved = (rows - statistics(network())).abs().amax(1) > 1e-3
    assert int(moved.sum()) == 1
    close(statistics(found.model), rows[moved][0])


METHODS = {
    "scaffold": Scaffold(0.1), "stem": method("stem"), "ditto": method("ditto"), "served": FedAvg(0.1).served_by(Adam(0.01)),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_every_method_carries_them(name: str, tmp_path: Path) -> None:
    """Workers and resumed runs give the same numbers; the statistics are those that its own steps have seen."""
    for kind in ("average", "private"):
        options = {**RUN, "count": 2, "encode": "int8"}
        whole = simulate(problem(kind), METHODS[name], held(), **options)
        for rounds in (1, 3):
            run = {**options, "rounds": rounds}
            resumed = simulate(problem(kind), METHODS[name], held(), directory=tmp_path / kind, **run)
        several = simulate(problem(kind), METHODS[name], held(), **{**options, "workers": 2})
        for found in (resumed, several):
            identical(dict(found.shared), dict(whole.shared))
            identical(dict(found.private), dict(whole.private))
            identical(found.x, whole.x)
        assert float((statistics(whole.model) - statistics(network())).abs().max()) > 0.1
        assert len(whole.models) == (N if kind == "private" or name == "ditto" else 0)
    with pytest.raises(NestfedError, match="another experiment"):
        simulate(problem("average"), METHODS[name], held(), directory=tmp_path / "private", **options)


def test_on_ranks(tmp_path: Path) -> None:
    """The solution of private statistics is that of all ranks' clients."""
    whole = simulate(problem("private"), FedAvg(0.1), held(), evaluate=score, **RUN)

    def work() -> list[Any]:
        found = simulate(problem("private"), FedAvg(0.1), held(), evaluate=score, **RUN)
        return [found.x, found.history[-1].get("score")]

    for x, value in on_two_ranks(work, tmp_path):
        close(x, whole.x)
        assert value is None or value == pytest.approx(whole["score"])


def score(model: Any) -> dict[str, float]:
    assert not model.training
    return {"score": float(model(held().arrays[0]).square().sum())}


def test_a_server_does_not_move_them() -> None:
    """Under Adam with a huge step, the parameters move; the statistics are still the clients' mean."""
    options = {**RUN, "rounds": 1, "q": 2}
    served = simulate(problem(), FedAvg(0.1).served_by(Adam(5.0)), held(), **options)
    plain = simulate(problem(), FedAvg(0.1), held(), **options)
    identical(served.shared["buffers"], plain.shared["buffers"])
    assert float((served.shared["x"] - plain.shared["x"]).abs().max()) > 1


def test_the_contract() -> None:
    check_problem(problem(), held())
    check_algorithm(Scaffold(0.1), problem(), held(), q=2, rounds=3)
    check_algorithm(FedAvg(0.1), problem("private"), held(), q=2, rounds=3)


def test_the_first_evaluation_of_a_step_updates_them() -> None:
    """Both points of a variance-reduced step start from the same statistics; the second leaves no trace."""
    made, data, b = problem(), held().sample(0, 0), torch.rand(10, dtype=torch.float64)
    expected = network().train()
    expected[1].running_mean, expected[1].running_var = b[:5].clone(), b[5:].clone()
    expected(data[0])
    batch = Batch(data, eager=True, buffers=b)
    for x in (made.x0, made.x0 + 1):
        made.grad(x, batch.raw)
    close(batch.tape.buffers, statistics(expected))
    assert not torch.equal(b, statistics(expected))


def test_accumulation_updates_them_piece_by_piece_like_torch() -> None:
    made, data = problem(), held().sample(0, 0)
    batch = Batch(data, eager=True, buffers=made.b0, pieces=2)
    made.grad(made.x0, batch)
    made.grad(made.x0 + 1, batch)
    expected = network().train()
    expected(data[0][:3])
    expected(data[0][3:])
    close(batch.tape.buffers, statistics(expected))


def test_evaluate_and_the_best_model_have_their_statistics() -> None:
    """Every evaluation sees the statistics of its round, and the model returned is the evaluated one."""
    seen: list[tuple[float, Tensor]] = []

    def evaluate(model: Any) -> dict[str, float]:
        seen.append((score(model)["score"], statistics(model)))
        return {"score": -abs(len(seen) - 3.0)}  # the third evaluation is best

    best = {"keep": "best", "metric": Metric("score", higher=True), "evaluate": evaluate, "rounds": 5}
    found = simulate(problem(), FedAvg(0.1), held(), **{**RUN, **best})
    close(statistics(found.model), seen[2][1])
    assert score(found.model)["score"] == pytest.approx(seen[2][0])
    assert len({round(float(s.sum()), 9) for _, s in seen}) == len(seen)
    seen.clear()
    found = simulate(problem("private"), FedAvg(0.1), held(), evaluate=evaluate, **RUN)
    close(statistics(found.model), seen[-1][1])


def test_a_run_continues_from_a_solution() -> None:
    first = simulate(problem(), FedAvg(0.1), held(), **{**RUN, "rounds": 2})
    again = simulate(problem(), FedAvg(0.1), held(), x0=first.x, **{**RUN, "rounds": 0})
    close(statistics(again.model), statistics(first.model))
    plain = simulate(problem(), FedAvg(0.1), held(), x0=first.shared["x"], **{**RUN, "rounds": 0})
    close(statistics(plain.model), statistics(network()))


def test_clients_alone_keep_their_own() -> None:
    found = simulate(problem(), Alone(FedAvg(0.1)), held(), **{**RUN, "rounds": 2})
    for n, model in enumerate(found.models):
        expected = trained(network(), n, range(4))
        close(statistics(model), statistics(expected))
        close(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_a_warm_up_hands_them_over() -> None:
    """From cross-entropy to AUROC, whose module has two more parameters."""
    net, balanced = network(), Balanced.of(labelled(), batch=6)
    examples = Examples.of(labelled(), batch=6)
    for kind in ("average", "private"):
        classify, auroc = Classify(net, buffers=kind), AUROC(net, buffers=kind)
        warm = WarmUp(2, FedAvg(0.1), classify, examples)
        first = simulate(classify, FedAvg(0.1), examples, **{**RUN, "rounds": 2})
        handed = simulate(auroc, FMGDA(), balanced, warm_up=warm, **{**RUN, "rounds": 2})
        close(statistics(handed.model), statistics(first.model))
        whole = simulate(auroc, FMGDA(), balanced, warm_up=warm, **{**RUN, "rounds": 4})
        second = simulate(auroc, FMGDA(), balanced, x0=auroc.start(first.model), **{**RUN, "rounds": 2})
        identical(whole.x, second.x)


def test_other_kinds_of_problem() -> None:
    """The statistics of a compositional problem are those of its g; AUROC and AUPRC train with them too."""
    made = Compositional(
        lambda u, outer: u[0] ** 2, lambda m, inner: loss(m, inner)[None], network(), 1, buffers="average"
    )
    data = held().sample(0, 0)
    expected = network().train()
    expected(data[0])
    for evaluate in (lambda batch: made.grad(made.x0, batch), lambda batch: made.inner(made.x0, batch)):
        batch = Batch((data, data), eager=True, buffers=made.b0)
        evaluate(batch)
        close(batch.tape.buffers, statistics(expected))
    pairs = Pairs.of({name: (x, y) for name, (x, y) in labelled().items()}, outer=2, inner=6)
    double = Examples.of({name: (x, x, y) for name, (x, y) in sites().items()}, batch=6)
    inner = Compositional(
        lambda u, outer: u[0] ** 2, lambda m, rows: loss(m, rows)[None], network(), 1, buffers="average"
    )

    class Twice:
        def __len__(self) -> int:
            return N

        def sample(self, n: int, t: int) -> Any:
            x, z, y = double.sample(n, t)
            return (x, y), (z, y)

    for one, how, clients in (
        (AUROC(network(), buffers="average"), CODA(eta=0.1, T0=4), Balanced.of(labelled(), batch=6)),
        (AUPRC(network(), buffers="average"), FCSGM(0.1), pairs),
        (inner, LocalSCGD(0.1), Twice()),
    ):
        found = simulate(one, how, clients, **RUN)
        assert float((statistics(found.model) - statistics(network())).abs().max()) > 0.1
        assert bool(found.model(held().arrays[0]).isfinite().all())


def test_noise_never_makes_a_variance_negative() -> None:
    found = simulate(problem(), FedAvg(0.01), held(), **{**RUN, "clip": 1.0, "noise": 20.0})
    assert float(found.model[1].running_var.min()) >= 0
    assert float(found.model[1].running_mean.min()) < 0
    assert bool(found.model(held().arrays[0]).isfinite().all())


def test_vectorising_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nestfed.engine"):
        simulate(problem(), FedAvg(0.1), held(), **RUN)
    assert "because the model keeps running statistics" in caplog.text
    for options in ({"mode": "vmap"}, {"compile": True}):
        with pytest.raises(NestfedError, match=r"keeps running statistics.*use mode = 'loop' without compile"):
            simulate(problem(), FedAvg(0.1), held(), **{**RUN, **options})


def test_deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged statistics give the simulation's numbers, and the coordinator's model has them."""
    pytest.importorskip("flwr")
    from nestfed.deploy.flower import Custom
    from nestfed.experiment.build import Assembly
    from nestfed.experiment.spec import RunSpec
    from tests import flower

    flower.alone(monkeypatch)

    def study(kind: str) -> Custom:
        made = Assembly(problem(kind), Scaffold(0.1), held(), score, "score")
        return Custom("statistics", lambda: made, RunSpec(rounds=3, q=2, seed=SEED))

    flower.deploy(study("average"), tmp_path, N)
    expected = simulate(problem(), Scaffold(0.1), held(), evaluate=score, **RUN)
    close(flower.checkpointed(tmp_path)["shared.buffers"], expected.shared["buffers"])
    model = load_file(tmp_path / "run" / "model.safetensors")
    close(torch.cat([model["1.running_mean"], model["1.running_var"]]), statistics(expected.model))
    from nestfed.engine.record import read as read_record

    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["score"] == pytest.approx(expected["score"])
    with pytest.raises(NestfedError, match="no complete model: use 'average' for a deployment"):
        flower.deploy(study("private"), tmp_path / "private", N)


class Counting(nn.Module):
    """A layer with a buffer of its own that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(4).double())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x @ self.weight


def test_errors() -> None:
    with pytest.raises(
        NestfedError, match=r"^1 \(BatchNorm1d\) keeps running statistics.*buffers='average' or 'private'"
    ):
        Minimize(loss, network())
    with pytest.raises(NestfedError, match="buffers must be average or private, not 'mean'"):
        problem("mean")
    with pytest.raises(NestfedError, match=r"1 \(BatchNorm1d\) averages over all its batches \(momentum=None\)"):
        Minimize(loss, network(momentum=None), buffers="average")
    for kind, keep in (("average", "uniform"), ("private", "uniform"), ("private", "best")):
        with pytest.raises(NestfedError, match=f"keep = '{keep}' would return a point without its running statistics"):
            simulate(problem(kind), FedAvg(0.1), held(), evaluate=score, keep=keep, metric="ap", **RUN)
    with pytest.raises(NestfedError, match="x0 has shape"):
        simulate(problem(), FedAvg(0.1), held(), x0=torch.zeros(7), **RUN)
    with pytest.raises(NestfedError, match="The model changes its buffer calls in training"):
        simulate(Minimize(loss, Counting()), FedAvg(0.1), held(), **RUN)


def test_without_statistics_the_option_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    runs = [
        simulate(Minimize(loss, model, buffers=b), FedAvg(0.1), held(), **{**RUN, "mode": "vmap"})
        for b in ("", "average")
    ]
    identical(runs[0].x, runs[1].x)
    assert set(runs[1].shared) == {"x"}
