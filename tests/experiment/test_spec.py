"""Experiment files: an old one names the new place of every setting, a wrong value its line."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from nestfed.core import NestfedError
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.experiment.spec import from_tables, identity, read

MOVED = {
    "every = 5": "evaluation.every",
    'metric = "ap"': "evaluation.metric",
    'output = "best"': "evaluation.keep",
    'evaluate = "clients"': "data.held_out",
    "participation = 4": "exchange.count (clients per round) or exchange.share (their probability)",
    "failures = 0.1": "exchange.failures",
    'encode = "int8"': "exchange.encode",
    'reduce = "median"': "exchange.reduce",
    "noise = 1.0": "exchange.privacy = { clip, noise }",
    'on_nan = "drop"': "exchange.on_nan",
    'mode = "loop"': "execution.mode",
    "workers = 2": "execution.workers",
    "compile = true": "execution.compile",
    'precision = "bf16"': "execution.precision",
    "accumulate = 2": "execution.accumulate",
    "memory_gb = 1.5": "execution.memory_gb",
    'device = "cpu"': "execution.device",
    "checkpoint_every = 5": "execution.checkpoint_every",
}
"""All settings that [run] had in version 0.1 and has no longer."""


@pytest.mark.parametrize(("setting", "place"), MOVED.items(), ids=[s.split(" ")[0] for s in MOVED])
def test_a_setting_that_moved_names_its_new_place(setting: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(f"[run]\nrounds = 3\n{setting}\n")
    name = setting.split(" ")[0]
    with pytest.raises(NestfedError, match=rf"old\.toml, line 3: run\.{name} is now {re.escape(place)}\."):
        read(path)


def test_all_settings_that_moved_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    grid = '[methods.fedavg]\ngrid = { "algorithm.eta" = [0.1] }\n'
    path.write_text("[run]\nrounds = 3\n" + "\n".join(MOVED) + f"\n{grid}")
    with pytest.raises(NestfedError, match=r"old\.toml, line 3: ") as caught:
        read(path)
    for setting, place in MOVED.items():
        assert f"run.{setting.split(' ')[0]} is now {place}" in str(caught.value)
    assert str(caught.value).endswith("methods.fedavg.grid is now methods.fedavg.tune.")


def test_a_setting_that_moved_is_named_for_a_method_too() -> None:
    experiment = from_tables({"methods": {"fedavg": {"run": {"every": 5}}}})
    with pytest.raises(NestfedError, match=r"run\.every is now evaluation\.every"):
        experiment.for_method("fedavg")


def test_a_grid_is_now_tune(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[methods.fedavg]\nalgorithm = { name = "fedavg" }\ngrid = { "algorithm.eta" = [0.1, 1.0] }\n')
    with pytest.raises(NestfedError, match=r"line 3: methods\.fedavg\.grid is now methods\.fedavg\.tune\."):
        read(path)


def test_the_new_places_hold_the_same(tmp_path: Path) -> None:
    """The old file above, written anew: the tables of the file are the dataclasses of the library."""
    path = tmp_path / "new.toml"
    path.write_text("""
        [data]
        name = "digits"
        held_out = "clients"
        [run]
        rounds = 3
        [evaluation]
        every = 5
        keep = "best"
        metric = "ap"
        [exchange]
        share = 0.5
        failures = 0.1
        encode = "int8"
        privacy = { clip = 1, noise = 1.1 }
        on_nan = "drop"
        [execution]
        mode = "loop"
        workers = 2
        precision = "bf16"
        accumulate = 2
        memory_gb = 1.5
        checkpoint_every = 5
        [methods.fedavg]
        tune = { eta = [0.1, 1.0], "problem.batch" = [5] }
    """)
    found = read(path)
    assert found.data.held_out == "clients"
    assert found.evaluation == Evaluation(every=5, keep="best", metric="ap")
    assert found.exchange == Exchange(
        share=0.5, failures=0.1, encode="int8", privacy=Gaussian(clip=1.0, noise=1.1), on_nan="drop"
    )
    assert found.execution == Execution(
        mode="loop", workers=2, precision="bf16", accumulate=2, memory_gb=1.5, checkpoint_every=5
    )
    assert found.grid("fedavg") == {"algorithm.eta": [0.1, 1.0], "problem.batch": [5]}
    assert found.for_method("fedavg").algorithm.name == "fedavg"


@pytest.mark.parametrize(
    ("section", "setting", "sentence"),
    [
        ("evaluation", "every = 0", "evaluation.every must be a whole number of at least 1, not 0."),
        ("evaluation", "every = 1.5", "evaluation.every must be a whole number, not 1.5."),
        ("evaluation", 'keep = "first"', "evaluation.keep must be last, uniform or best, not 'first'."),
        ("evaluation", "metric = 3", "evaluation.metric must be text, not 3."),
        ("exchange", "count = -1", "exchange.count must be a whole number of at least 0, not -1."),
        ("exchange", "share = 0.0", "exchange.share must be in (0, 1], not 0.0."),
        ("exchange", "failures = 1.0", "exchange.failures must be in [0, 1), not 1.0."),
        ("exchange", 'weights = "size"', "exchange.weights must be equal or examples, not 'size'."),
        ("exchange", 'encode = "int4"', "exchange.encode must be one of float16, bfloat16, int8"),
        ("exchange", 'reduce = "clip"', "exchange.reduce must be mean, median, trimmed:SHARE"),
        ("exchange", "privacy = 1.0", "exchange.privacy must be a table { clip = 1.0, noise = 1.1 }, not 1.0."),
        ("exchange", "privacy = { clip = 0, noise = 1 }", "exchange.privacy.clip must be a finite number above 0, not 0."),
        ("exchange", 'on_nan = "ignore"', "exchange.on_nan must be stop or drop, not 'ignore'."),
        ("execution", 'mode = "fast"', "execution.mode must be auto, vmap or loop, not 'fast'."),
        ("execution", "workers = -1", "execution.workers must be a whole number of at least 0, not -1."),
        ("execution", "compile = 1", "execution.compile must be true or false, not 1."),
        ("execution", 'device = "gpu 7"', "execution.device must be a device of torch, such as cpu, not 'gpu 7'."),
        ("execution", 'precision = "fp8"', "execution.precision must be full or bf16, not 'fp8'."),
        ("execution", "accumulate = 0", "execution.accumulate must be a whole number of at least 1, not 0."),
        ("execution", "memory_gb = -1", "execution.memory_gb must be at least 0, not -1.0."),
        ("execution", "checkpoint_every = 0", "execution.checkpoint_every must be a whole number of at least 1, not 0."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_line(section: str, setting: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f"[run]\nrounds = 3\n\n[{section}]\n{setting}\n")
    with pytest.raises(NestfedError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, line 5: {sentence}")


def test_settings_that_exclude_each_other_are_named_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[exchange]\nshare = 0.5\n[exchange.privacy]\nclip = 1.0\nnoise = -1.0\n")
    with pytest.raises(NestfedError, match=r"line 3: exchange\.privacy\.noise must be a finite number above 0, not -1"):
        read(path)
    path.write_text("[exchange]\ncount = 2\nshare = 0.5\n")
    with pytest.raises(NestfedError, match=r"line 2: exchange\.count and exchange\.share exclude each other"):
        read(path)


def test_a_new_option_with_its_default_changes_no_identity_but_a_changed_default_does() -> None:
    """Directories and digests of runs made before an option existed stay valid."""
    tables = {
        "problem": {"name": "classify", "batch": 20},
        "algorithm": {"name": "fedavg", "eta": 0.1},
        "run": {"q": 3},
    }
    now = from_tables(tables).resolved()
    before = copy.deepcopy(now)
    del before["problem"]["balanced"], before["exchange"]["on_nan"]
    assert identity(before) == identity(now)
    for table, key, value in (
        ("problem", "balanced", True),
        ("run", "rounds", 7),
        ("execution", "precision", "bfloat16"),
    ):
        other = copy.deepcopy(now)
        other[table][key] = value
        assert identity(other) != identity(now)
    threads = copy.deepcopy(now)
    threads["execution"]["workers"] = 3
    assert identity(threads) == identity(now)
    assert (
        from_tables({**tables, "problem": {**tables["problem"], "balanced": False}}).digest()
        == from_tables(tables).digest()
    )
