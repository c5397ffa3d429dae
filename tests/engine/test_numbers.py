"""Numbers going wrong: found in the round where it happens, named, and survived if the user wants that."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import CompositionalToy, Quadratic
from torch import Tensor, nn

from nestfed import Classify, Examples, Minimax, Minimize
from nestfed.algorithms import FedAvg, Scaffold, build
from nestfed.core import NestfedError, Server
from nestfed.engine.local import Local
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Order
from tests.support import bad_images, close, images, simulate

OPTIONS: dict[str, Any] = {"q": 2, "progress": False, "workers": 1}
MODES = pytest.mark.parametrize("mode", ["loop", "vmap"])


@MODES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_data(mode: str, value: float) -> None:
    problem, _, bad = bad_images(value=value)
    with pytest.raises(NestfedError) as error:
        simulate(problem, FedAvg(0.1), bad, rounds=3, **OPTIONS, mode=mode)
    assert str(error.value).startswith("The data contain infinite or NaN values at client 3, iteration 0 (round 1)")


@MODES
def test_loss_gradient_and_inner_value_are_distinguished(mode: str) -> None:
    x0 = torch.ones(2, dtype=torch.float64)

    class Ones:
        def __len__(self) -> int:
            return 2

        def sample(self, n: int, t: int) -> Tensor:
            return torch.full((1,), float(n == 1 and t == 3), dtype=torch.float64)

    def error_of(problem: Any, algorithm: Any) -> str:
        with pytest.raises(NestfedError) as error:
            simulate(problem, algorithm, Ones(), rounds=5, **OPTIONS, mode=mode)
        return str(error.value)

    where = "infinite, NaN or too large at client 1, iteration 3 (round 2)"
    loss = Minimize(lambda x, b: x.sum() / (1 - b.sum()), x0)  # 1/0 at client 1, iteration 3
    assert error_of(loss, FedAvg(0.1)).startswith(f"The loss became {where}")
    # √ at 0 has the value 0 and no finite slope.
    bend = lambda v, b: ((v - v.detach()).abs().sum() * b.sum() + 1 - b.sum()).sqrt()  # noqa: E731
    root = Minimize(lambda x, b: x.sum() + bend(x, b), x0)
    assert error_of(root, FedAvg(0.1)).startswith(f"The gradient became {where}")
    saddle = Minimax(lambda x, w, b: (x * w).sum() + bend(w, b), x0, w0=x0)
    assert error_of(saddle, build("local-sgda", eta_theta=0.1, eta_w=0.1)).startswith(f"The gradient became {where}")


def test_a_divergent_step_size_is_found_where_it_diverges() -> None:
    """x ← (1 − ηa)x on a quadratic: |x|² leaves the range of float32 at an iteration that can be computed."""
    problem = Minimize(lambda x, b: 50.0 * (x * x).sum(), torch.ones(1))
    clients = Examples((torch.zeros(4, 1),), [np.arange(2), np.arange(2, 4)], batch=1)
    factor, largest = 1 - 0.1 * 100.0, torch.finfo(torch.float32).max  # x_t = (−9)^t
    first = next(t for t in range(100) if (factor ** (t + 1)) ** 2 > largest or 50 * (factor**t) ** 2 > largest)
    with pytest.raises(NestfedError, match=r"at client 0, iteration (\d+) \(round \d+\)") as error:
        simulate(problem, FedAvg(0.1), clients, rounds=40, **OPTIONS)
    found = int(str(error.value).split("iteration ")[1].split()[0])
    assert abs(found - first) <= 1  # the gradient is a hundred times x
    assert f"(round {found // 2 + 1})" in str(error.value)


def test_overflow_in_sixteen_bits() -> None:
    """A product that fits float32 but not bfloat16's last steps to infinity is noticed at once."""
    problem = Classify(nn.Sequential(nn.Flatten(-3), nn.Linear(72, 3)))
    _, held = images()
    clients = Examples((held.arrays[0].float() * 3e37, held.arrays[1]), held.parts, batch=6)
    with pytest.raises(NestfedError, match=r"at client 0, iteration \d \(round 1\)"):
        simulate(problem, FedAvg(1.0), clients, rounds=2, precision="bf16", **OPTIONS)


@dataclass(frozen=True)
class Exploding(Server):
    """A server of whom the second update is infinite."""

    def init(self, shared: Any) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(1)}

    def update(self, state: Any, old: Any, mean: Any, fraction: float) -> Any:
        return {"rounds": state["rounds"] + 1}, {k: v / (1 - state["rounds"]) for k, v in mean.items()}


@dataclass(frozen=True)
class Exploded(FedAvg):
    @property
    def server(self) -> Server:
        return Exploding()


def test_the_servers_state(tmp_path: Path) -> None:
    problem, clients = images()
    with pytest.raises(NestfedError, match=r"The server's x became infinite or NaN in round 2.*after round 1\."):
        simulate(problem, Exploded(0.1), clients, rounds=3, directory=tmp_path, mode="loop", **OPTIONS)
    assert [r["round"] for r in read_record(tmp_path / "record.jsonl")] == [1]
    assert len(list(tmp_path.glob("round-00000001-*"))) == 1


@dataclass(frozen=True)
class Hoarder(Scaffold):
    """SCAFFOLD whose private field goes wrong in round 2, while what it sends is fine."""

    def send(self, s: Any, t: int) -> Any:
        s = super().send(s, t)
        return s._replace(own=s.own * (float("nan") if t > 2 else 1.0))


@MODES
def test_private_fields(mode: str) -> None:
    problem, clients = images()
    with pytest.raises(NestfedError, match="client 0 in its upload or private fields after round 2"):
        simulate(problem, Hoarder(0.1), clients, rounds=3, mode=mode, **OPTIONS)


def test_no_checkpoint_is_promised_that_is_not_there(tmp_path: Path) -> None:
    problem, clients = images()
    with pytest.raises(NestfedError) as error:
        simulate(problem, Hoarder(0.1), clients, rounds=3, directory=tmp_path, **OPTIONS)
    assert "checkpoint" not in str(error.value)


# --- dropping ---


LOOP, VMAP, WORKERS = {"mode": "loop"}, {"mode": "vmap"}, {"mode": "loop", "workers": 2}


@pytest.mark.parametrize(
    ("how", "encode", "reduce"),
    [  # every pair of two options
        (LOOP, "", "mean"),
        (LOOP, "int8", "median"),
        (LOOP, "int8", "clip:0.05"),
        (VMAP, "int8", "mean"),
        (VMAP, "", "median"),
        (VMAP, "", "clip:0.05"),
        (WORKERS, "int8", "mean"),
        (WORKERS, "", "median"),
        (WORKERS, "int8", "clip:0.05"),
    ],
)
def test_a_dropped_client_is_one_that_did_not_answer(
    how: dict[str, Any], encode: str, reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, good, bad = bad_images()
    options = {**OPTIONS, **how, "rounds": 4, "encode": encode, "reduce": reduce}
    with pytest.warns(
        UserWarning, match=r"client 3, iteration 0 \(round 1\).* The client is dropped from this round"
    ) as caught:
        dropped = simulate(problem, Scaffold(0.1), bad, on_nan="drop", **options)
    assert len(caught) == 1  # not once a round
    run = Local.run

    def without_3(self: Local, order: Order, shared: Any, evaluate: bool = False) -> Any:
        """Ask all, let all but client 3 answer."""
        reply = run(self, order.only([i for i, n in enumerate(order.asked) if n != 3]), shared)
        reply.downloads = len(order.asked)
        return reply

    monkeypatch.setattr(Local, "run", without_3)
    close(dropped, simulate(problem, Scaffold(0.1), good, **{**options, "workers": 1}), 1e-12)
    assert [r["participants"] for r in dropped.history] == [4] * 4


def test_a_dropped_client_comes_back_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    toy = Quadratic(4, 3)

    class Sick:
        """Client 1 is ill in round 2 only."""

        def __len__(self) -> int:
            return len(toy.clients)

        def sample(self, n: int, t: int) -> Any:
            healthy = toy.clients.sample(n, t)
            return torch.utils._pytree.tree_map(lambda v: v * float("nan"), healthy) if (n, t) == (1, 3) else healthy

    options = {**OPTIONS, "on_nan": "drop", "mode": "loop"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = simulate(toy.problem, Scaffold(0.05), Sick(), rounds=4, **options)
        simulate(toy.problem, Scaffold(0.05), Sick(), rounds=2, directory=tmp_path, **options)
        again = simulate(toy.problem, Scaffold(0.05), Sick(), rounds=4, directory=tmp_path, **options)
    assert [r["participants"] for r in whole.history] == [4, 3, 4, 4]
    assert torch.equal(whole.x, again.x)
    with pytest.raises(NestfedError, match="another experiment"):
        simulate(toy.problem, Scaffold(0.05), Sick(), rounds=4, directory=tmp_path, **{**options, "on_nan": "stop"})


def test_when_all_go_wrong_the_run_stops() -> None:
    toy = Quadratic(4, 3)
    with pytest.raises(NestfedError, match=r"No client is left in round 1: .* at client 0, iteration"):
        simulate(toy.problem, FedAvg(1e200), toy.clients, rounds=5, on_nan="drop", **OPTIONS)


def test_unknown_choice() -> None:
    toy = Quadratic(4, 3)
    with pytest.raises(NestfedError, match="on_nan must be stop or drop, not 'ignore'"):
        simulate(toy.problem, FedAvg(0.1), toy.clients, rounds=1, on_nan="ignore")


def test_the_inner_value_is_named() -> None:
    toy = CompositionalToy()
    clients = toy.clients

    class Bad:
        def __len__(self) -> int:
            return len(clients)

        def sample(self, n: int, t: int) -> Any:
            found = clients.sample(n, t)
            return torch.utils._pytree.tree_map(lambda v: v * 1e300 if v.is_floating_point() else v, found)

    with pytest.raises(
        NestfedError, match=r"The (inner value|loss|gradient|outer gradient) is infinite, NaN or too large at client 0"
    ):
        simulate(toy.problem, build("local-scgd", eta=0.05, gamma=0.7), Bad(), rounds=2, **OPTIONS)
