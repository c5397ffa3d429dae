"""Running an experiment in a directory."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file

from nestfed.core import NestfedError
from nestfed.experiment.build import assemble
from nestfed.experiment.run import run
from nestfed.experiment.spec import from_tables

ALONE = {
    "data": {"name": "digits", "binary": True, "validation": 0.1, "limit": 300},
    "partition": {"clients": 3},
    "problem": {"name": "classify", "batch": 8},
    "algorithm": {"name": "fedavg", "eta": 0.1},
    "run": {"rounds": 3, "q": 4, "sites": "alone"},
}


def test_clients_that_train_alone_are_judged_by_their_own_models(tmp_path: Path) -> None:
    experiment = from_tables(ALONE)
    last = run(experiment, tmp_path / "run", progress=False)[-1]
    made = assemble(experiment)
    each = []
    for n in range(3):
        module = made.problem.module(made.problem.x0)
        module.load_state_dict(load_file(tmp_path / "run" / f"client-{n}.safetensors"))
        each.append(made.evaluate(module.eval()))
    for name in each[0]:
        assert last[name] == pytest.approx(fmean(found[name] for found in each), rel=1e-6)
    assert len({found["log_loss"] for found in each}) == 3
    assert last["examples"] == 3 * 3 * 4 * 8
    assert last["bytes_up"] == last["bytes_down"] == 0
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_clients_that_train_alone_have_no_common_best_model() -> None:
    with pytest.raises(NestfedError, match=r"evaluation.keep = 'last'"):
        from_tables({**ALONE, "evaluation": {"keep": "best", "metric": "auroc"}})
