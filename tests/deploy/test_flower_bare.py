"""A problem with nothing but the abstract methods, and clients with just len and sample, on Flower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bare import BARE, CLIENTS, OPTIONS, run

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from nestfed.deploy.flower import Custom
from nestfed.experiment.build import Assembly
from nestfed.experiment.spec import RunSpec
from tests.flower import checkpointed, deploy


@pytest.mark.parametrize("kind", BARE)
def test_equals_simulation(kind: str, tmp_path: Path) -> None:
    problem, method, clients = BARE[kind]
    spec = RunSpec(rounds=4, q=OPTIONS["q"], seed=OPTIONS["seed"])
    study = Custom(kind, lambda: Assembly(problem, method, clients, lambda model: {}, ""), spec)
    deploy(study, tmp_path, CLIENTS)
    state = checkpointed(tmp_path)
    for field, value in run(kind, mode="loop").shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=0, atol=1e-12)
