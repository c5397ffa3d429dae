"""Gathered fields: every client gets the table of all contributions, in every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from nestfed.algorithms import Alone, Momentum
from nestfed.core import Average, NestfedError
from nestfed.experiment.build import Assembly
from nestfed.experiment.spec import RunSpec
from nestfed.testing import ALGORITHM_CHECKS, Trial
from tests import toys
from tests.support import answering, close, grouped, on_two_ranks, simulate
from tests.toys import SEED, Flocking

Q = 3


def run(rounds: int = 5, N: int = 5, **options: Any) -> Any:
    s = toys.plain(N)
    options = {"seed": SEED, "q": Q, "progress": False, "mode": "vmap", "workers": 1, **options}
    return simulate(s.problem, Flocking(), s.clients, rounds=rounds, **options)


@pytest.mark.parametrize("check", ALGORITHM_CHECKS)
def test_contract(check: str) -> None:
    s = toys.plain(5)
    ALGORITHM_CHECKS[check](Trial(Flocking(), s.problem, s.clients.seeded(SEED), Q, 5, SEED))


def test_served_by_the_mean_is_the_method_itself() -> None:
    s = toys.plain(5)
    options: dict[str, Any] = {"seed": SEED, "q": Q, "rounds": 5, "participation": 3, "progress": False}
    own = simulate(s.problem, Flocking(), s.clients, **options)
    same(own, simulate(s.problem, Flocking().served_by(Average()), s.clients, **options))
    moved = simulate(s.problem, Flocking().served_by(Momentum(0.5, 0.5)), s.clients, **options)
    assert (moved.x - own.x).abs().max() > 1e-3
    assert (moved.gathered["everybody"] - own.gathered["everybody"]).abs().max() > 1e-3  # norms at other points


def test_it_cannot_be_alone() -> None:
    with pytest.raises(NestfedError, match=r"^flocking needs what other clients contribute"):
        Alone(Flocking())


def test_table_by_hand() -> None:
    """Rows, fresh and bytes of every round against a loop in numbers, with absent and failing clients."""
    s, N, rounds = toys.plain(5), 5, 6
    options: dict[str, Any] = {"participation": 3, "failures": 0.3}
    result = run(rounds, **options)
    exchange = grouped(options)["exchange"]
    x, t = s.problem.x0.clone(), 0
    table, fresh = torch.zeros(N, 0, 2, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    up = down = 0
    for r in range(rounds):
        who = answering(exchange, SEED, N, r)
        down += 3 * 8 * (len(x) + table.numel() + N)
        span = range(t, t + 1 if t % Q == 0 else (t // Q + 1) * Q + 1)
        rows, points = {}, []
        scale = 1 + sum((n + 1) * float(table[n].sum()) for n in range(N) if fresh[n])
        for n in who:
            y, own = x.clone(), []
            for i in span:
                g = torch.from_numpy(s.maps["grad"](n, i, y.numpy()))
                own.append(torch.stack([g.norm(), y.norm()]))
                y = y - 0.1 / scale * g
            rows[n] = torch.stack(own)
            points.append(y)
        if who:
            x = torch.stack(points).mean(0)
            if table.shape[1:] != rows[who[0]].shape:
                table = torch.zeros(N, *rows[who[0]].shape, dtype=torch.float64)
            else:
                table = table.clone()
            fresh = torch.zeros(N, dtype=torch.float64)
            for n in who:
                table[n], fresh[n] = rows[n], 1
            up += len(who) * 8 * (len(x) + rows[who[0]].numel())
        if who or t:
            t = span.stop
        assert result.history[r]["bytes_up"] == up
        assert result.history[r]["bytes_down"] == down
    torch.testing.assert_close(result.shared["x"], x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.gathered["everybody"], table, rtol=1e-10, atol=1e-10)
    assert result.gathered["fresh"].tolist() == fresh.tolist()
    assert 0 < fresh.sum() < N


def same(one: Any, other: Any) -> None:
    close(one, other)
    torch.testing.assert_close(dict(one.gathered), dict(other.gathered), rtol=1e-10, atol=1e-10)


def test_engines_agree(tmp_path: Path) -> None:
    some = {"participation": 4, "failures": 0.2}
    loop = run(mode="loop", **some)
    same(run(workers=2, **some), loop)
    same(run(mode="loop", workers=3, **some), loop)
    run(2, mode="loop", directory=tmp_path / "a", **some)
    same(run(workers=2, directory=tmp_path / "a", **some), loop)
    (tmp_path / "ranks").mkdir()
    for one in on_two_ranks(lambda: dict(run(mode="loop", **some).gathered), tmp_path / "ranks"):
        torch.testing.assert_close(one, dict(loop.gathered), rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_compiled() -> None:
    same(run(compile=True), run(mode="loop"))


def test_exempt_from_reductions_and_rounding() -> None:
    """The first contribution is at x0, the same whatever the exchange does with the shared fields."""
    plain = run(1)
    for options in ({"reduce": "median"}, {"reduce": "trimmed:0.2"}, {"reduce": "clip:0.01"}, {"encode": "int8"}):
        assert torch.equal(run(1, **options).gathered["everybody"], plain.gathered["everybody"])
        assert not torch.equal(run(1, **options).x, plain.x)
    assert torch.equal(run(1, encode="bfloat16").gathered["everybody"], plain.gathered["everybody"])


def test_noise_is_rejected() -> None:
    with pytest.raises(NestfedError, match=r"flocking hands norms of single clients on without noise.*false promise"):
        run(clip=1.0, noise=1.0)


def test_unequal_contributions_are_rejected() -> None:
    s = toys.plain(4)

    class Paced(toys.ToyClients):
        def steps(self, n: int, t: int, q: int) -> int:
            return min(q, 1 + n)

    clients = Paced(s.clients.own, s.clients.shapes, s.clients.arrange)
    for mode, sentence in (("loop", "of the shapes"), ("vmap", "equally many steps")):
        with pytest.raises(NestfedError, match=sentence):
            simulate(s.problem, Flocking(), clients, rounds=3, q=Q, mode=mode, workers=1, progress=False)


# --- deployment ---


def study(N: int = 4, rounds: int = 4, **options: Any) -> Any:
    from nestfed.deploy.flower import Custom

    s = toys.plain(N)
    return Custom(
        "flock", lambda: Assembly(s.problem, Flocking(), s.clients, lambda model: {}, ""),
        RunSpec(rounds=rounds, q=Q, seed=SEED), **grouped(options),
    )  # fmt: skip


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests import flower

    flower.alone(monkeypatch)
    return flower


def test_deployed(flower: Any, tmp_path: Path) -> None:
    for i, options in enumerate(({}, {"participation": 3})):
        flower.deploy(study(**options), tmp_path / str(i), 4)
        found = flower.checkpointed(tmp_path / str(i))
        expected = run(4, 4, mode="loop", **options)
        torch.testing.assert_close(found["shared.x"], expected.x, rtol=1e-10, atol=1e-10)
        for k, v in expected.gathered.items():
            torch.testing.assert_close(found[f"tables.{k}"], v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (torch.full((3, 2), float("nan"), dtype=torch.float64), "holds infinite or NaN"),
        (torch.zeros(3, 2), "is float32 instead of float64"),
        (torch.zeros(9, 2, dtype=torch.float64), "has shape"),
        (torch.zeros(700_000, 2, dtype=torch.float64), "bytes, but at most"),
        (None, "instead of fields.x, gathered.norms"),
    ],
)
def test_gate(flower: Any, tmp_path: Path, wrong: Tensor | None, sentence: str) -> None:
    """A site with an invalid contribution does not take part in that round; its row is not fresh."""

    def tamper(client: int, round: int, reply: Message) -> Message:
        if client == 2 and round == 2:
            return flower.rewritten(reply, arrays={"gathered.norms": None if wrong is None else wrong.numpy()})
        return reply

    flower.deploy(study(rounds=2), tmp_path, 4, tamper, min_sites=3)
    found = flower.checkpointed(tmp_path)
    assert found["tables.fresh"].tolist() == [1, 1, 0, 1]
    assert sentence in (tmp_path / "run" / "sites.log").read_text()


def test_gate_keeps_wrong_scores_out_of_the_pool(flower: Any, tmp_path: Path) -> None:
    """A site that sends NaN scores takes no part in the round, and nobody draws its scores in the next one."""

    def tamper(client: int, round: int, reply: Message) -> Message:
        if client == 2 and round == 2:
            first = flower.arrays_of(reply)["gathered.first"].copy()
            first[0, 0] = float("nan")
            return flower.rewritten(reply, arrays={"gathered.first": first})
        return reply

    flower.deploy(flower.toy("fedxl1", 3), tmp_path, 5, tamper, min_sites=4)
    assert "its first holds infinite or NaN" in (tmp_path / "run" / "sites.log").read_text()
    found = flower.checkpointed(tmp_path)
    assert found["tables.fresh"].tolist() == [1, 1, 1, 1, 1]  # it is back in round 3
    assert torch.isfinite(found["shared.x"]).all()
