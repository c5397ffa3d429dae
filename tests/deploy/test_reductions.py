"""Reductions, privacy and wrong answers between a coordinator and sites that only pass messages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SEED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import simulate
from test_contract import method, setting

from nestfed import Examples, Minimize
from nestfed.algorithms import FedAvg
from nestfed.core import NestfedError
from nestfed.deploy.remote import Answer, Coordinator, Rules, Site, Store
from nestfed.engine.encode import Encoding
from nestfed.engine.round import Participation

CLIP = {"reduce": "clip:0.5", "noise": 2.0}
kinds = pytest.mark.parametrize("reduce", ["median", "trimmed:0.3", "clip:0.05"])


@pytest.mark.parametrize("encode", ["", "int8/float16"])
@pytest.mark.parametrize("name", ["fcsg-m", "scaffold"])
@kinds
def test_coordinator(name: str, reduce: str, encode: str, tmp_path: Path) -> None:
    """Sites and a coordinator that only pass messages, against the simulation."""
    s = setting(name)
    clients = s.clients.seeded(SEED)
    (tmp_path / "run").mkdir()
    coordinator = Coordinator(
        s.problem, method(name), 5, 4, 3, SEED, tmp_path / "run", "test", participation=Participation(4), reduce=reduce,
        encoding=Encoding.parse(encode),
    )  # fmt: skip
    while not coordinator.over:
        answers = {}
        for n in coordinator.ask():
            store = Store(tmp_path / f"site-{n}", f"client {n}")
            site = Site(s.problem, method(name), clients, n, 3, SEED, store, Encoding.parse(encode))
            answers[n] = coordinator.believe(site(coordinator.order(n), coordinator.broadcast()))
        coordinator.average(answers, len(answers), 0.0)
    expected = simulate(
        s.problem, method(name), s.clients, rounds=4, q=3, seed=SEED, participation=4, reduce=reduce, encode=encode,
        progress=False, mode="loop", workers=1,
    )  # fmt: skip
    torch.testing.assert_close(dict(coordinator.state.shared), dict(expected.shared), rtol=1e-10, atol=1e-10)


def test_weights_need_the_mean(tmp_path: Path) -> None:
    s = setting("fcsg-m")
    with pytest.raises(NestfedError, match="weights = examples"):
        Coordinator(
            s.problem, method("fcsg-m"), 5, 4, 3, 0, tmp_path, "test", rules=Rules(by_examples=True), reduce="median"
        )


class Still:
    """A problem on which nobody moves: what is left is noise."""

    def __init__(self, d: int = 4000, clients: int = 10) -> None:
        self.problem = Minimize(lambda x, b: 0.0 * x.sum() * b[0].sum(), torch.zeros(d))
        self.clients = Examples((torch.zeros(clients, 1),), list(np.arange(clients)[:, None]), batch=1)


def coordinator(folder: Path, **options: Any) -> Coordinator:
    still = Still(50, 4)
    folder.mkdir()
    return Coordinator(still.problem, FedAvg(0.1), 4, 2, 1, 0, folder, "test", **{**CLIP, **options})


def test_a_deployment_draws_noise_that_nobody_else_can(tmp_path: Path) -> None:
    points = []
    for i in range(2):
        c = coordinator(tmp_path / str(i), participation=Participation(0.5))
        zero = {"x": torch.zeros(50)}
        c.average({n: Answer(0, zero, 1.0, 0.0, 1) for n in (0, 2)}, 2, 0.0)
        points.append(c.state.shared["x"])
        assert c.history[-1]["loss"] is None
        assert "all clients in every round" in c.promise  # who is asked follows from a seed that all know
        assert (tmp_path / str(i) / "privacy.txt").read_text().strip() == c.promise
    assert not torch.allclose(points[0], points[1])
    assert float(torch.cat(points).std()) == pytest.approx(1.0 / 2.0, rel=0.4)


arrays = st.one_of(
    st.builds(lambda n, v: torch.full((n,), v), st.integers(0, 5), st.floats(width=32)),
    st.builds(lambda n: torch.zeros(n, dtype=torch.float64), st.integers(0, 5)),
    st.builds(lambda n: torch.zeros((n, n), dtype=torch.int64), st.integers(0, 3)),
    st.builds(lambda v: torch.full((3,), v, dtype=torch.float64), st.floats()),
)


@given(
    st.dictionaries(st.sampled_from(["x", "c", "tap.", "x.scale", "y"]), arrays, max_size=4),
    st.integers(-3, 3),
    st.floats(),
    st.floats(),
    st.integers(-5, 2**70),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_of_any_shape(
    tmp_path: Path, fields: dict[str, torch.Tensor], round: int, loss: float, moved: float, examples: int
) -> None:
    """What is not refused has the right names, shapes and types, and is finite."""
    s = setting("scaffold")
    coordinator = Coordinator(s.problem, method("scaffold"), 5, 2, 3, 0, tmp_path, "fuzz")
    with contextlib.suppress(NestfedError):
        good = coordinator.believe(Answer(round, fields, loss, moved, examples))
        assert set(good.fields) == {"x", "c"}
        assert all(bool(torch.isfinite(v).all()) for v in good.fields.values())
        assert round == 0
        assert examples >= 0
