"""A warm-up: some rounds with another method and objective, then the run's own, as one run."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestfed import AUROC, FMGDA, Adam, Balanced, Classify, Examples, FedAvg, Minimize, Scaffold, WarmUp, Yogi
from nestfed.core import DivergedError, Metric, NestfedError
from nestfed.engine import checkpoint
from nestfed.engine.record import read as read_record
from nestfed.engine.run_directory import Interrupted
from tests import toys
from tests.methods import method, setting
from tests.support import identical, on_two_ranks, simulate
from tests.toys import SEED, Flocking

Q = 3
COSTS = ("examples", "bytes_up", "bytes_down")
OPTIONS: dict[str, Any] = {"q": Q, "seed": SEED, "progress": False, "mode": "loop", "workers": 1}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()


def rows(clients: int = 5) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(100, 3)))
    y = torch.from_numpy((rng.random(100) < 0.3).astype(np.int64))
    return (x, y), np.array_split(np.arange(100), clients)


def pieces(module: nn.Module | None = None) -> tuple[AUROC, Balanced, Classify, Examples]:
    """Return AUROC with balanced batches, and cross-entropy with plain ones, on one module."""
    arrays, parts = rows()
    model = net() if module is None else module
    return (
        AUROC(model), Balanced(arrays, parts, batch=8), Classify(model), Examples(arrays, parts, batch=6),
    )  # fmt: skip


def warmed(rounds: int = 7, warm: int = 3, main: Any = None, before: Any = None, **options: Any) -> Any:
    auroc, balanced, classify, examples = pieces()
    start = WarmUp(warm, before or FedAvg(0.3), classify, examples)
    main = main or FMGDA(c_hat=0.1, c=0.1)
    return simulate(auroc, main, balanced, rounds=rounds, warm_up=start, **{**OPTIONS, **options})


def score(model: Any) -> dict[str, float]:
    (x, y), _ = rows()
    s = model(x)
    return {"gap": float(s[y == 1].mean() - s[y == 0].mean())}


GAP = Metric("gap", higher=True)


@pytest.mark.parametrize("exchange", [{}, {"count": 3}, {"failures": 0.4}, {"encode": "int8"}], ids=str)
@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_equals_two_runs_by_hand(mode: str, exchange: dict[str, Any]) -> None:
    """The trained module is handed over; AUROC's a, b and w start as always. Costs add up."""
    whole = warmed(evaluate=score, mode=mode, **exchange)
    auroc, balanced, classify, examples = pieces()
    options = {**OPTIONS, "evaluate": score, "mode": mode, **exchange}
    first = simulate(classify, FedAvg(0.3), examples, rounds=3, **options)
    start = torch.cat([torch.tensor([1.0, 0.0]), first.x])
    assert list(auroc.parameters())[:2] == ["a", "b"]
    second = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=4, x0=start, **options)
    identical(dict(whole.shared), dict(second.shared))
    identical(dict(whole.private), dict(second.private))
    assert [r["round"] for r in whole.history] == list(range(8))
    assert [r["gap"] for r in whole.history] == [r["gap"] for r in (*first.history, *second.history[1:])]
    assert [r["loss"] for r in whole.history[1:]] == [r["loss"] for r in (*first.history[1:], *second.history[1:])]
    end, t = first.history[-1], first.history[-1]["iteration"]
    assert [r["iteration"] for r in whole.history[4:]] == [t + r["iteration"] for r in second.history[1:]]
    for cost in COSTS:
        assert [r[cost] for r in whole.history[4:]] == [end[cost] + r[cost] for r in second.history[1:]]
        assert [r[cost] for r in whole.history[:4]] == [r[cost] for r in first.history]


def test_no_rounds_is_no_warm_up(tmp_path: Path) -> None:
    auroc, balanced, _, _ = pieces()
    plain = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=4, **OPTIONS, directory=tmp_path)
    none = warmed(4, 0)
    identical(dict(plain.shared), dict(none.shared))
    identical(dict(plain.private), dict(none.private))
    free = [[{k: v for k, v in r.items() if k != "seconds"} for r in result.history] for result in (plain, none)]
    assert free[0] == free[1]
    assert len(warmed(4, 0, directory=tmp_path).history) == 4, "it is the same run"


@pytest.fixture(scope="module")
def whole() -> Any:
    return warmed(evaluate=score, before=Scaffold(0.3))


@pytest.mark.parametrize(("stop", "every"), [(1, 2), (3, 1), (3, 10), (4, 1), (4, 2), (6, 10)])
def test_resumes_to_the_last_bit(whole: Any, stop: int, every: int, tmp_path: Path) -> None:
    """Stopped in the warm-up, at the boundary, and after it; one record and one line of checkpoints."""
    options = {"evaluate": score, "directory": tmp_path, "checkpoint_every": every, "before": Scaffold(0.3)}
    assert warmed(stop, **options).history[-1]["round"] == stop
    resumed = warmed(**options)
    identical(dict(whole.shared), dict(resumed.shared))
    identical(dict(whole.private), dict(resumed.private))
    free = [[{k: v for k, v in r.items() if k != "seconds"} for r in result.history] for result in (whole, resumed)]
    assert free[0] == free[1]
    lines = read_record(tmp_path / "record.jsonl")
    assert [r["round"] for r in lines] == list(range(8))
    seconds = [r["seconds"] for r in lines]
    assert seconds == sorted(seconds)
    assert max(tmp_path.glob("round-*")).name.startswith("round-00000007-")
    again = warmed(**options)
    identical(dict(whole.shared), dict(again.shared))
    assert len(read_record(tmp_path / "record.jsonl")) == 8


def test_resumes_after_a_crash_before_the_first_checkpoint_of_its_own(tmp_path: Path, recwarn: Any) -> None:
    """The last checkpoint is the one at the end of the warm-up; the record has rounds beyond it."""
    whole = warmed()

    class Stop(Exception):
        pass

    seen: list[Any] = []

    def broken(model: Any) -> dict[str, float]:
        seen.append(model)
        if len(seen) == 6:
            raise Stop
        return {}

    with pytest.raises(Stop):
        warmed(evaluate=broken, directory=tmp_path, checkpoint_every=10)
    assert [p.name[:14] for p in tmp_path.glob("round-*")] == ["round-00000003"]
    resumed = warmed(directory=tmp_path, checkpoint_every=10)
    identical(dict(whole.shared), dict(resumed.shared))
    assert [r["round"] for r in read_record(tmp_path / "record.jsonl")] == list(range(8))
    assert not [w for w in recwarn if "beginning" in str(w.message)]


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("rounds", [2, 4])
def test_a_finished_run_keeps_its_rounds(warm: int, rounds: int, tmp_path: Path) -> None:
    """Fewer rounds than a directory has return what it has, with a warm-up and without; nothing starts again."""
    whole = warmed(warm=warm, directory=tmp_path)
    again = warmed(rounds, warm=warm, directory=tmp_path)
    identical(dict(whole.shared), dict(again.shared))
    assert [r["round"] for r in read_record(tmp_path / "record.jsonl")] == list(range(1, 8))


def test_a_damaged_checkpoint_falls_back_across_the_boundary(tmp_path: Path) -> None:
    whole = warmed()
    warmed(4, directory=tmp_path, checkpoint_every=1)
    newest = max(tmp_path.glob("round-*"))
    newest.write_bytes(newest.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="is damaged and was skipped"):
        resumed = warmed(directory=tmp_path, checkpoint_every=1)
    identical(dict(whole.shared), dict(resumed.shared))


def test_an_interruption_in_the_warm_up(tmp_path: Path) -> None:
    import _thread

    seen: list[Any] = []

    def judge(model: Any) -> dict[str, float]:
        seen.append(model)
        if len(seen) == 3:
            _thread.interrupt_main()
        return score(model)

    with pytest.raises(Interrupted, match="Stopped after round 2 of 7; run it again to resume"):
        warmed(evaluate=judge, directory=tmp_path)
    identical(dict(warmed(evaluate=score, directory=tmp_path).shared), dict(warmed(evaluate=score).shared))


def test_another_warm_up_is_another_run(tmp_path: Path) -> None:
    warmed(directory=tmp_path)
    for other in ({"warm": 2}, {"before": FedAvg(0.2)}, {"warm": 0}):
        with pytest.raises(NestfedError, match="another experiment"):
            warmed(**other, directory=tmp_path)
    assert {p.name for p in tmp_path.glob("*.json")} == {"probe.json", "probe-warm-up.json"}
    probe = json.loads((tmp_path / "probe-warm-up.json").read_text())
    probe["gradients"] = {k: [1 + v for v in g] for k, g in probe["gradients"].items()}
    (tmp_path / "probe-warm-up.json").write_text(json.dumps(probe))
    warmed(directory=tmp_path)  # only the rounds that are left are checked
    for path in tmp_path.glob("round-*"):
        path.unlink()
    with pytest.raises(NestfedError, match="another problem"):
        warmed(directory=tmp_path)


def test_workers_and_ranks(tmp_path: Path) -> None:
    whole = warmed(count=4)
    torch.testing.assert_close(dict(warmed(count=4, workers=2).shared), dict(whole.shared), rtol=1e-10, atol=1e-10)

    def work() -> list[Any]:
        found = [dict(warmed(count=4).shared)]
        for rounds in (2, 4, 7):  # a pause in the warm-up, one after it
            last = warmed(rounds, count=4, directory=tmp_path / "run", checkpoint_every=1)
        return [*found, dict(last.shared), last.history]

    for ranks in on_two_ranks(work, tmp_path):
        for shared in ranks[:2]:
            torch.testing.assert_close(shared, dict(whole.shared), rtol=1e-10, atol=1e-10)
        assert [r["examples"] for r in ranks[2]] == [r["examples"] for r in whole.history]


def test_the_point_that_a_run_returns() -> None:
    """best and uniform are chosen after the warm-up; the point that it hands over counts."""
    best = {"evaluate": score, "keep": "best", "metric": GAP}
    whole = warmed(**best)
    auroc, balanced, classify, examples = pieces()
    first = simulate(classify, FedAvg(0.3), examples, rounds=3, **OPTIONS)
    start = torch.cat([torch.tensor([1.0, 0.0]), first.x])
    for keep in ({}, {"keep": "uniform"}, best):
        by_hand = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=4, x0=start, **OPTIONS, **keep)
        identical(warmed(**keep).x, by_hand.x)
    worse = {**best, "evaluate": lambda model: {"gap": -score(model)["gap"]}}
    handed = warmed(**worse)
    rises = [r["gap"] for r in handed.history[3:]]
    assert max(rises) == rises[0], "the first point is the best, or this test shows nothing"
    identical(handed.x, start)
    assert not torch.equal(whole.x, start)


def test_measures_after_the_warm_up_only() -> None:
    """`measure` knows the fields of the run's method; the warm-up has others."""
    whole = warmed(evaluate=score, measure=lambda shared, private: {"w": float(shared["w"])})
    assert ["w" in r for r in whole.history] == [False] * 4 + [True] * 4
    assert all("gap" in r for r in whole.history)
    alone = warmed(measure=lambda shared, private: {"w": float(shared["w"])})
    assert ["w" in r for r in alone.history] == [False] * 2 + [True] * 5, "from the point that was handed over"


def test_the_same_problem_with_another_method() -> None:
    """Without another problem the whole point is handed over, with a and b."""
    auroc, balanced, _, _ = pieces()
    warm = WarmUp(3, method("local-sgda"))
    whole = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=5, warm_up=warm, **OPTIONS)
    first = simulate(auroc, method("local-sgda"), balanced, rounds=3, **OPTIONS)
    second = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=2, x0=first.x, **OPTIONS)
    identical(dict(whole.shared), dict(second.shared))


def test_a_starting_point() -> None:
    """x0 is a point of the run's problem; the warm-up starts at its model."""
    auroc, balanced, classify, examples = pieces()
    x0 = auroc.x0 + 0.1
    warm = WarmUp(3, FedAvg(0.3), classify, examples)
    whole = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=3, warm_up=warm, x0=x0, **OPTIONS)
    first = simulate(classify, FedAvg(0.3), examples, rounds=3, x0=x0[2:], **OPTIONS)
    identical(whole.x[2:], first.x)


def test_vectors_are_handed_over_too() -> None:
    s = setting("fedavg")
    other = Minimize(lambda x, batch: (x - 1).square().sum() + 0 * batch[1].sum(), s.problem.x0)
    warm = WarmUp(2, FedAvg(0.05), other)
    whole = simulate(s.problem, method("scaffold"), s.clients, rounds=4, warm_up=warm, **OPTIONS)
    first = simulate(other, FedAvg(0.05), s.clients, rounds=2, **OPTIONS)
    second = simulate(s.problem, method("scaffold"), s.clients, rounds=2, x0=first.x, **OPTIONS)
    identical(dict(whole.shared), dict(second.shared))


def test_gathered_tables_start_fresh() -> None:
    """The tables of a run are those of its own rounds; a warm-up may have tables too, or none."""
    s = toys.plain(5)
    options = {**OPTIONS, "count": 3}
    for before in (FedAvg(0.05), Flocking(0.05)):
        whole = simulate(s.problem, Flocking(), s.clients, rounds=6, warm_up=WarmUp(3, before), **options)
        first = simulate(s.problem, before, s.clients, rounds=3, **options)
        second = simulate(s.problem, Flocking(), s.clients, rounds=3, x0=first.x, **options)
        identical(dict(whole.gathered), dict(second.gathered))
        identical(whole.x, second.x)
        sent = [[r[k] for r in h] for k in COSTS for h in (whole.history[3:], second.history)]
        for both, own, k in zip(sent[::2], sent[1::2], COSTS):
            assert both == [first.history[-1][k] + v for v in own]
    after = simulate(s.problem, FedAvg(0.05), s.clients, rounds=6, warm_up=WarmUp(3, Flocking()), **options)
    assert not after.gathered


def test_servers_start_fresh(tmp_path: Path) -> None:
    """Both methods may have servers; the moments of the second start at 0. It resumes to the last bit."""
    s = setting("fedavg")
    before, own = FedAvg(0.05).served_by(Adam(0.01)), Scaffold(0.05)
    for last in (own, FedAvg(0.05).served_by(Yogi(0.02))):
        whole = simulate(s.problem, last, s.clients, rounds=5, warm_up=WarmUp(2, before), **OPTIONS)
        first = simulate(s.problem, before, s.clients, rounds=2, **OPTIONS)
        identical(whole.x, simulate(s.problem, last, s.clients, rounds=3, x0=first.x, **OPTIONS).x)
        for rounds in (1, 3, 5):
            run = tmp_path / last.name
            found = simulate(
                s.problem, last, s.clients, rounds=rounds, warm_up=WarmUp(2, before), directory=run, **OPTIONS
            )
        identical(found.x, whole.x)


def test_every_client_has_its_own_model_after_it() -> None:
    s = setting("ditto")
    whole = simulate(s.problem, method("ditto"), s.clients, rounds=4, warm_up=WarmUp(2, FedAvg(0.05)), **OPTIONS)
    first = simulate(s.problem, FedAvg(0.05), s.clients, rounds=2, **OPTIONS)
    second = simulate(s.problem, method("ditto"), s.clients, rounds=2, x0=first.x, **OPTIONS)
    assert whole.points is not None
    identical(whole.points, second.points)


def test_frozen_parameters_stay() -> None:
    module = net()
    module[0].weight.requires_grad_(False)
    auroc, balanced, classify, examples = pieces(module)
    kept = copy.deepcopy(module[0].weight)
    warm = WarmUp(2, FedAvg(0.3), classify, examples)
    result = simulate(auroc, FMGDA(c_hat=0.1, c=0.1), balanced, rounds=4, warm_up=warm, **OPTIONS)
    identical(result.model[0].weight, kept)
    assert not torch.equal(result.model[2].weight, module[2].weight)


def test_privacy_counts_all_rounds_and_never_repeats_noise() -> None:
    """Noise is drawn by the round's number in the record, so that no round of the run repeats that of the warm-up."""
    s = setting("fedavg")
    options = {**OPTIONS, "clip": 0.5, "noise": 1.0}
    warm = WarmUp(2, method("fedavg"), s.problem)
    whole = simulate(s.problem, method("fedavg"), s.clients, rounds=4, warm_up=warm, **options)
    assert "in 4 rounds" in whole.privacy
    first = simulate(s.problem, method("fedavg"), s.clients, rounds=2, **options)
    again = simulate(s.problem, method("fedavg"), s.clients, rounds=2, x0=first.x, **options)
    assert (whole.x - again.x).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda: WarmUp(-1, FedAvg(0.1)), "warm_up.rounds must be a whole number of at least 0, not -1"),
        (lambda: WarmUp(1, FedAvg), r"warm_up.method must be an object such as FedAvg\(eta=0.1\)"),
        (lambda: warmed(before=FMGDA()), "fmgda works on problems of kind Minimax"),
        (lambda: warmed(before=FedAvg(lambda t: 1 - t)), "fedavg: eta must be a finite number above 0"),
    ],
)
def test_wrong_warm_ups(change: Any, sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        change()


def test_another_model_or_other_clients_are_rejected() -> None:
    auroc, balanced, classify, examples = pieces()
    few = replace(examples, parts=examples.parts[:3])
    with pytest.raises(NestfedError, match="The warm-up has 3 clients, but the run has 5"):
        simulate(auroc, FMGDA(), balanced, rounds=3, warm_up=WarmUp(1, FedAvg(0.1), classify, few), **OPTIONS)
    other = Classify(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double())
    with pytest.raises(NestfedError, match=r"parameter module.0.weight of shape \(1, 3\).* of shape \(4, 3\)"):
        simulate(auroc, FMGDA(), balanced, rounds=3, warm_up=WarmUp(1, FedAvg(0.1), other, examples), **OPTIONS)
    vector = Minimize(lambda x, batch: x.square().sum(), torch.zeros(3).double())
    with pytest.raises(
        NestfedError, match=r"The trained model is a .*, but this Minimize starts from a vector of 3 numbers"
    ):
        simulate(vector, FedAvg(0.1), examples, rounds=3, warm_up=WarmUp(1, FedAvg(0.1), classify), **OPTIONS)


def test_a_wrong_run_is_rejected_before_its_warm_up(tmp_path: Path) -> None:
    """What concerns only the rounds after the warm-up is found before its first round."""
    s = toys.plain(4)
    private = {"clip": 0.5, "noise": 1.0}
    with pytest.raises(NestfedError, match="false promise"):
        simulate(
            s.problem, Flocking(), s.clients, rounds=4, warm_up=WarmUp(2, FedAvg(0.05)), directory=tmp_path,
            **{**OPTIONS, **private},
        )  # fmt: skip
    auroc, balanced, _, examples = pieces()
    other = Classify(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double())
    with pytest.raises(NestfedError, match="the same module"):
        simulate(
            auroc, FMGDA(), balanced, rounds=3, warm_up=WarmUp(2, FedAvg(0.1), other, examples), directory=tmp_path,
            **OPTIONS,
        )  # fmt: skip
    assert not list(tmp_path.glob("r*"))


def test_errors_name_the_round_of_the_record() -> None:
    s = toys.plain(4)
    for mode in ("loop", "vmap"):
        with pytest.raises(DivergedError, match=r"\(round 4\)"):
            simulate(
                s.problem, FedAvg(1e200), s.clients, rounds=6, warm_up=WarmUp(3, FedAvg(0.05)),
                **{**OPTIONS, "mode": mode},
            )  # fmt: skip


def test_checkpoints_are_read_by_round(tmp_path: Path) -> None:
    warmed(4, directory=tmp_path, checkpoint_every=1)
    identity = next(iter(tmp_path.glob("round-*")))
    from safetensors import safe_open

    with safe_open(identity, "pt") as file:
        fingerprint = file.metadata()["fingerprint"]
    cpu = torch.device("cpu")
    assert checkpoint.read(tmp_path, fingerprint, cpu)[0].state.number == 4  # type: ignore[union-attr]
    assert checkpoint.read(tmp_path, fingerprint, cpu, rounds=range(1, 4))[0].state.number == 3  # type: ignore[union-attr]
    assert checkpoint.read(tmp_path, fingerprint, cpu, rounds=range(5, 9)) == (None, [])
