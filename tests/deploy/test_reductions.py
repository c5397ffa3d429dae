"""Reductions, privacy and wrong answers between a coordinator and sites that only pass messages."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods import method, setting

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from nestfed import Examples, Minimize
from nestfed.algorithms import FedAvg
from nestfed.deploy.flower import Custom
from nestfed.deploy.flower.gate import Gate
from nestfed.deploy.wire import RejectedError, numbers, pack, unpack
from nestfed.engine.options import Exchange, Gaussian
from nestfed.engine.program import Span
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Fold, Order, RunState, empty_reply
from nestfed.experiment.build import Assembly
from nestfed.experiment.spec import RunSpec
from tests.flower import checkpointed, deploy, simulated, toy


@pytest.mark.parametrize(("name", "encode"), [("fcsg-m", ""), ("scaffold", "int8/float16")])
@pytest.mark.parametrize("reduce", ["median", "trimmed:0.3", "clip:0.05"])
def test_reductions_equal_the_simulation(name: str, reduce: str, encode: str, tmp_path: Path) -> None:
    options = {"participation": 4, "reduce": reduce, "encode": encode}
    deploy(toy(name, **options), tmp_path, 5)
    expected = simulated(name, **options)
    state = checkpointed(tmp_path)
    for field, value in expected.shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=1e-10, atol=1e-10)


def test_a_deployment_draws_noise_that_nobody_else_can(tmp_path: Path) -> None:
    """Nobody moves, so what is left is noise: it is not the seed's, and it is as large as promised."""
    problem = Minimize(lambda x, b: 0.0 * x.sum() * b[0].sum(), torch.zeros(50))
    clients = Examples((torch.zeros(4, 1),), list(np.arange(4)[:, None]), batch=1)
    made = Assembly(problem, FedAvg(0.1), clients, lambda model: {}, "")
    exchange = Exchange(share=0.5, privacy=Gaussian(clip=0.5, noise=2.0))
    points = []
    for folder in (tmp_path / "0", tmp_path / "1"):
        deploy(Custom("still", lambda: made, RunSpec(rounds=1, q=1, seed=0), exchange=exchange), folder, 4, min_sites=1)
        points.append(checkpointed(folder)["shared.x"])
        assert read_record(folder / "run" / "record.jsonl")[-1]["loss"] is None
        # Who is asked follows from a seed that all know, so sampling promises nothing.
        assert "all clients in every round" in (folder / "run" / "privacy.txt").read_text()
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
    st.one_of(st.none(), st.floats()),
    st.floats(),
    st.integers(-5, 2**70),
)
@settings(max_examples=200, deadline=None)
def test_answers_of_any_shape(fields: dict[str, torch.Tensor], loss: float | None, moved: float, examples: int) -> None:
    """What passes the gate has the right names, shapes and types, and is finite."""
    s, algorithm, exchange = setting("scaffold"), method("scaffold"), Exchange()
    shared = RunState.start(algorithm, algorithm.init(s.problem, s.problem.x0), 5).shared
    order = Order(0, Span(0, 3), range(5), [-1] * 5)
    fold = Fold(exchange, shared, empty_reply(shared, "x", order, exchange))
    gate = Gate(order, shared, "x", exchange, 0.0, fold, {})
    with contextlib.suppress(RejectedError):
        packed = unpack(
            pack({"report": {"loss": loss, "moved": moved, "examples": examples}}, numbers(fields, "fields."))
        )
        upload = gate.checked(1, packed, packed.arrays(gate.slots()), None)
        assert set(upload.fields) == {"x", "c"}
        assert all(v.shape == (1, *shared[k].shape) and v.dtype == shared[k].dtype for k, v in upload.fields.items())
        assert all(bool(torch.isfinite(v).all()) for v in upload.fields.values())
        assert examples >= 0
