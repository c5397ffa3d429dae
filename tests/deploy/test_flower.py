"""The Flower engine without a network: every method gives the simulation's numbers, and nothing bad gets in."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestfed.algorithms import METHODS, Yogi
from tests.methods import method, setting
from tests.toys import SEED

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from nestfed.core import Clients, NestfedError
from nestfed.deploy.flower import Custom, client_app, roster, server
from nestfed.deploy.flower.mailbox import content_of
from nestfed.deploy.flower.messages import read_plan, stamp_of
from nestfed.deploy.wire import pack
from nestfed.engine.federation import Failing
from nestfed.engine.options import Exchange
from nestfed.engine.record import read as read_record
from nestfed.experiment.build import Assembly
from nestfed.experiment.run import claim
from nestfed.experiment.spec import Experiment, RunSpec, from_tables
from nestfed.queries import SCORES
from nestfed.queries.agreement import Agreement
from tests.flower import (
    LocalGrid,
    arrays_of,
    checkpointed,
    coordinate,
    deploy,
    federation,
    opened,
    rewritten,
    sealed,
    simulated,
    toy,
)
from tests.methods import Q
from tests.support import simulate

STAMP = {"protocol", "version", "digest"}
COSTS = ("round", "iteration", "participants", "examples", "bytes_up", "bytes_down")


def shipped(grid: LocalGrid, kind: str) -> list[tuple[int, Message, Message]]:
    return [(n, m, r) for n, m, r in grid.messages if m.metadata.message_type == kind and r is not None]


def payload(message: Message, prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {k: (str(a.dtype), a.shape) for k, a in arrays_of(message, prefix).items()}


def script(monkeypatch: pytest.MonkeyPatch, absent: dict[int, int]) -> None:
    """Make the simulation leave out a client in certain rounds: {round: client}."""

    def run(self: Any, order: Any, shared: Any) -> Any:
        there = [i for i, n in enumerate(order.asked) if absent.get(order.round + 1) != n]
        reply = self.inner.run(order.only(there), shared)
        reply.downloads = len(order.asked)
        return reply

    monkeypatch.setattr(Failing, "run", run)


def only_what_is_declared_leaves(name: str, grid: LocalGrid, bytes_up: int) -> None:
    """Of a toy's rounds: the shared fields in their dtype, three numbers, and which round they are for. No more."""
    template = method(name).init(setting(name).problem, setting(name).problem.x0)
    fields = {k: ("float64", tuple(getattr(template, k).shape)) for k in METHODS[name].shared}
    gathered, tables = set(METHODS[name].gathered), set(METHODS[name].gathered.values())
    sent = 0
    for _, order, reply in shipped(grid, "train"):
        given = {k for k in arrays_of(order) if not k.startswith("plan.")}
        assert given == {f"shared.{k}" for k in fields} | (
            {f"tables.{k}" for k in {*tables, "fresh"}} if tables else set()
        )
        assert payload(order, "shared.") == fields
        assert set(arrays_of(reply)) == {f"fields.{k}" for k in fields} | {f"gathered.{k}" for k in gathered}
        assert payload(reply, "fields.") == fields
        words = opened(reply).words
        assert set(words["report"]) | {"loss"} == {"loss", "moved", "examples"}  # a problem may note no loss
        assert set(words) == STAMP | {"client", "group", "report"}
        sent += sum(a.nbytes for a in arrays_of(reply).values())
    assert sent == bytes_up
    for _, _, reply in shipped(grid, "query.hello"):
        assert arrays_of(reply) == {}
        assert set(opened(reply).words) == STAMP | {"client", "group", "site", "rows", "torch", "problems", "clock"}
    assert {m.metadata.message_type for _, m, _ in grid.messages} == {"query.hello", "train"}


def test_a_served_method_equals_simulation(tmp_path: Path) -> None:
    """Four of five sites a round; the server's moments stay at the coordinator."""
    s, served = setting("fmgda"), method("fmgda").served_by(Yogi(0.05, tau=0.01))
    spec, exchange = RunSpec(rounds=5, q=Q, seed=SEED), Exchange(count=4)
    study = Custom(
        "served", lambda: Assembly(s.problem, served, s.clients, lambda model: {}, ""), spec, exchange=exchange
    )
    grid = deploy(study, tmp_path, 5)
    expected = simulate(s.problem, served, s.clients, rounds=5, q=Q, seed=SEED, count=4, mode="loop", progress=False)
    state = checkpointed(tmp_path)
    for field, value in expected.shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=0, atol=1e-12)
    assert {"server.M.theta", "server.V.theta", "server.M.w", "server.V.w"} <= state.keys()
    for _, order, reply in shipped(grid, "train"):
        assert set(arrays_of(order, "shared.")) == set(arrays_of(reply, "fields.")) == {"theta", "w", "u", "v"}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_equals_simulation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five sites a round, and two answers are lost: such a site resumes from its fields before that round."""
    sites = len(setting(name).clients)
    lost = {2: 1, 3: 3} if sites > 1 else {}  # round: client, which is asked in the next round too
    count = 4 if sites > 1 else None
    grid = deploy(
        toy(name, rounds=5, participation=count), tmp_path, sites, lambda n, r, m: None if lost.get(r) == n else m,
        min_sites=min(3, sites),
    )  # fmt: skip
    script(monkeypatch, lost)
    expected = simulated(name, rounds=5, participation=count, failures=0.5)
    state = checkpointed(tmp_path)
    for field, value in expected.shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=0, atol=1e-12)
    records = read_record(tmp_path / "run" / "record.jsonl")
    assert [[r[k] for k in COSTS] for r in records[1:]] == [[r[k] for k in COSTS] for r in expected.history]
    for ours, theirs in zip(records[1:], expected.history, strict=True):
        assert ours["loss"] == (theirs["loss"] and pytest.approx(theirs["loss"], rel=1e-9))  # None if none is noted
        assert ours["drift"] == pytest.approx(theirs["drift"], rel=1e-6, abs=1e-12)
    assert (tmp_path / "run" / "finished.json").exists()
    only_what_is_declared_leaves(name, grid, records[-1]["bytes_up"])
    if lost:
        assert [r["participants"] for r in records] == [0, 4, 3, 3, 4, 4]
        log = (tmp_path / "run" / "sites.log").read_text()
        assert "round 2: site clinic-1 did not answer in time" in log
        assert "round 3: site clinic-3 did not answer in time" in log


# ---------------------------------------------------------------------------------------------------------
# Sites that fail


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("fmgda", ""),
        ("codasca", "int8"),
        ("scaffold", ""),
        ("scaffold", "int8"),
        ("acc-fcsg-m", "int8"),
        ("fedadam", ""),
        ("local-scgdm-tasks", "int8"),
    ],
)
def test_killed_and_resumed(name: str, encode: str, tmp_path: Path) -> None:
    """The coordinator dies in the middle of round 3, when two sites have already answered it; a site restarts too."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    deploy(toy(name, rounds=5, encode=encode), whole, 5)

    class Killed(BaseException): ...

    def kill(n: int, round: int, reply: Message) -> Message:
        if (n, round) == (2, 3):
            raise Killed
        return reply

    with pytest.raises(Killed):
        deploy(toy(name, rounds=5, encode=encode), broken, 5, kill)
    assert read_record(broken / "run" / "record.jsonl")[-1]["round"] == 2
    deploy(toy(name, rounds=5, encode=encode), broken, 5)
    one, two = checkpointed(whole), checkpointed(broken)
    assert set(one) == set(two)
    assert all(torch.equal(one[k], two[k]) for k in one)
    records = [read_record(f / "run" / "record.jsonl") for f in (whole, broken)]
    for left, right in zip(*records, strict=True):
        assert {k: v for k, v in left.items() if k != "seconds"} == {k: v for k, v in right.items() if k != "seconds"}


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    """The run resumes a round earlier, and the sites still have that version."""
    deploy(toy("fmgda", rounds=4), tmp_path / "whole", 5)
    deploy(toy("fmgda", rounds=4), tmp_path / "broken", 5)
    for name in ("finished.json", "model.safetensors"):
        (tmp_path / "broken" / "run" / name).unlink()
    newest = max((tmp_path / "broken" / "run").glob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    deploy(toy("fmgda", rounds=4), tmp_path / "broken", 5)
    assert "damaged" in (tmp_path / "broken" / "run" / "sites.log").read_text()
    newest.unlink()
    one, two = checkpointed(tmp_path / "whole"), checkpointed(tmp_path / "broken")
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("rule", ["refuse", "restart"])
def test_a_site_that_lost_its_disk(rule: str, tmp_path: Path) -> None:
    import shutil

    def lose(n: int, round: int, reply: Message) -> Message:
        if (n, round) == (4, 2):
            for version in (tmp_path / "state-3").glob("*/version-*"):
                shutil.rmtree(version)
        return reply

    deploy(toy("scaffold", rounds=4), tmp_path, 5, lose, min_sites=4, lost_state=rule)
    log = (tmp_path / "run" / "sites.log").read_text()
    took_part = [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")][1:]
    assert "clinic-3" in log
    assert took_part == ([5, 5, 4, 4] if rule == "refuse" else [5, 5, 5, 5])
    assert ("starts over" in log) == (rule == "restart")


def test_too_few_answers_stop_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    study = toy("fmgda", rounds=3)
    with pytest.raises(NestfedError, match="too few answers 2 times"):
        deploy(study, tmp_path, 5, lambda n, r, m: None if r == 2 and n < 2 else m, min_sites=4, attempts=2)
    assert "3 of 5 sites sent valid answers in time, 4 are needed" in (tmp_path / "run" / "sites.log").read_text()
    deploy(study, tmp_path, 5)
    torch.testing.assert_close(checkpointed(tmp_path)["shared.theta"], simulated("fmgda", rounds=3).shared["theta"])


def test_a_site_that_comes_later(tmp_path: Path) -> None:
    """It joins between rounds, as a client that did not take part until then."""
    study = toy("scaffold", rounds=4)
    grid = federation(study, tmp_path, 5)
    grid.away = {104}

    def arrive(n: int, round: int, reply: Message) -> Message:
        if (n, round) == (0, 3):
            grid.away = set()
        return reply

    grid.tamper = arrive
    coordinate(study, tmp_path, grid, sites=5, min_sites=4)
    took_part = [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")][1:]
    assert took_part[0] == 4
    assert took_part[-1] == 5


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        *(("fmgda", encode) for encode in ("float16", "bfloat16", "int8", "int8/float16", "int8/bfloat16")),
        ("fcsg-m", "int8"),
        ("scaffold", "int8/bfloat16"),
    ],
)
def test_encoded_equals_simulation(name: str, encode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an answer that was lost, together with the residual that belongs to it."""
    grid = deploy(toy(name, encode=encode), tmp_path, 5, lambda n, r, m: None if (n, r) == (1, 2) else m, min_sites=4)
    script(monkeypatch, {2: 1})
    expected = simulated(name, encode=encode, failures=0.5)
    state = checkpointed(tmp_path)
    for field, value in expected.shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=0, atol=1e-12)
    records = read_record(tmp_path / "run" / "record.jsonl")
    assert records[-1]["bytes_up"] == expected.history[-1]["bytes_up"]
    assert records[-1]["bytes_down"] == expected.history[-1]["bytes_down"]
    sent = [a.nbytes for _, _, r in shipped(grid, "train") for a in arrays_of(r, "fields.").values()]
    got = [a.nbytes for _, m, _ in grid.messages for a in arrays_of(m, "shared.").values()]
    assert sum(sent) == records[-1]["bytes_up"]
    assert sum(got) == records[-1]["bytes_down"]


def test_sites_compute_in_the_precision_of_the_experiment(tmp_path: Path) -> None:
    algorithm = {"name": "fedavg", "eta": 0.1}
    experiment = labelled("classify", algorithm, execution={"precision": "bf16"})
    deploy(experiment, tmp_path, 4)
    from nestfed.experiment.run import run

    run(experiment, tmp_path / "simulated", progress=False, picture=False)
    full = labelled("classify", algorithm)
    run(full, tmp_path / "full", progress=False, picture=False)
    deployed, same, other = (
        [r["loss"] for r in read_record(tmp_path / name / "record.jsonl")[1:]] for name in ("run", "simulated", "full")
    )
    np.testing.assert_allclose(deployed, same, rtol=1e-6)
    assert np.abs(np.array(deployed) - other).max() > 1e-5


class Poisoned(Clients):
    """Clients of whom number 2 has NaN for data in the second round."""

    def __init__(self, inner: Clients) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def seeded(self, seed: int) -> Poisoned:
        return Poisoned(self.inner.seeded(seed))

    def sample(self, n: int, t: int) -> Any:
        spoil = float("nan") if n == 2 and Q <= t < 2 * Q else 1.0
        return torch.utils._pytree.tree_map(lambda v: v * spoil, self.inner.sample(n, t))


@pytest.mark.parametrize("on_nan", ["stop", "drop"])
def test_numbers_that_go_wrong_at_a_site(on_nan: str, tmp_path: Path) -> None:
    """As in a simulation: they stop the run, or the site is left out of the round; nothing of them is sent."""
    s, algorithm = setting("scaffold"), method("scaffold")
    made = Assembly(s.problem, algorithm, Poisoned(s.clients), lambda model: {}, "")
    study = Custom("bad", lambda: made, RunSpec(rounds=4, q=Q, seed=SEED), exchange=Exchange(on_nan=on_nan))
    if on_nan == "stop":
        with pytest.raises(NestfedError, match="numbers of site clinic-2 became infinite or NaN in round 2"):
            deploy(study, tmp_path, 5, min_sites=3)
        return
    grid = deploy(study, tmp_path, 5, min_sites=3)
    with pytest.warns(UserWarning, match="is dropped from this round"):
        expected = simulate(
            s.problem, algorithm, Poisoned(s.clients), rounds=4, q=Q, seed=SEED, mode="loop", on_nan="drop",
            progress=False,
        )  # fmt: skip
    for field, value in expected.shared.items():
        torch.testing.assert_close(checkpointed(tmp_path)[f"shared.{field}"], value, rtol=0, atol=1e-12)
    records = read_record(tmp_path / "run" / "record.jsonl")
    assert [r["participants"] for r in records] == [0, 5, 4, 5, 5]
    bad = [r for node, m, r in shipped(grid, "train") if node == 102 and opened(m).words["round"] == 1]
    assert [opened(r).words for r in bad] == [{"trouble": "diverged", "site": "clinic-2"}]


def test_a_lost_hello_is_repeated(tmp_path: Path) -> None:
    """Flower answers in the place of a node that is gone, perhaps only for a moment."""
    from flwr.app import Error

    study = toy("fedavg", rounds=1)
    grid = federation(study, tmp_path, 5)
    honest, calls = grid.apps[102], []

    def late(message: Message, context: Context) -> Message:
        calls.append(message.metadata.message_type)
        return Message(Error(5), reply_to=message) if len(calls) == 1 else honest(message, context)

    grid.apps[102] = late
    coordinate(study, tmp_path, grid, sites=5)
    assert calls == ["query.hello", "query.hello", "train"]


class OffByOne(LocalGrid):
    """Nodes as Flower's SuperNode is: one message at a time, and answers go out only after a message has come in."""

    def __init__(self, *args: Any, costs: dict[str, float], behind: set[int]) -> None:
        super().__init__(*args)
        self.costs, self.kept = costs, {}
        self.inbox: dict[int, list[tuple[str, float]]] = {node: [] for node in self.apps}
        self.waits: set[int] = set()
        self.ready: dict[int, list[tuple[float, str]]] = {
            node: [(0.0, "of a run that is over")] if node in behind else [] for node in self.apps
        }

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = list(super().push_messages(messages))
        for name in names:
            node, message, _ = self.messages[int(name.rpartition("-")[2])]
            self.kept[name] = self.replies.pop(name)
            self.inbox[node].append((name, self.costs[message.metadata.message_type]))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now = roster.time.monotonic()
        for node, inbox in self.inbox.items():
            while node in self.waits or inbox:
                if node in self.waits:
                    done = [name for when, name in self.ready[node] if when <= now]
                    if not done:
                        break
                    self.ready[node] = [(when, name) for when, name in self.ready[node] if when > now]
                    self.replies |= {name: self.kept[name] for name in done if name in self.kept}
                    self.waits.discard(node)
                else:
                    name, cost = inbox.pop(0)
                    self.ready[node].append((now + cost, name))
                    self.waits.add(node)
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("seconds", [0.5, 100.0])
def test_a_site_that_keeps_its_answers_back(seconds: float, tmp_path: Path) -> None:
    """Its SuperNode outlived a run that was stopped; the numbers are those of the others, and nobody waits for long."""
    study = toy("fcsg-m", rounds=3)
    costs = {"query.hello": 2.0, "train": seconds, "query.ask": 1.0}
    plain = deploy(study, tmp_path / "plain", 5)
    assert len([m for _, m, _ in plain.messages if m.metadata.message_type == "query.hello"]) == 5
    times = {}
    for behind in (set(), {102, 104}):
        folder = tmp_path / f"{len(behind)}"
        apps = federation(study, folder, 5)
        grid = OffByOne(apps.apps, apps.configs, costs=costs, behind=behind)
        start = roster.time.monotonic()
        coordinate(study, folder, grid, sites=5, deadline=1000.0)
        times[len(behind)] = roster.time.monotonic() - start
        torch.testing.assert_close(checkpointed(folder), checkpointed(tmp_path / "plain"), rtol=0, atol=0)
        assert read_record(folder / "run" / "record.jsonl")[-1]["participants"] == 5
        assert len([m for _, m, _ in grid.messages if m.metadata.message_type == "train"]) == 15
        assert not (folder / "run" / "sites.log").exists()
    # One more hello and the wait for it; then a quarter of a round, or some seconds.
    assert times[2] < times[0] + roster.HELLO_WAIT + roster.FLUSH_WAIT + 5 + 3 * max(8, seconds / 4 + 4)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 25), (100.0, 6)])
def test_a_run_continues_without_a_site_that_does_not_answer(seconds: float, rounds: int, tmp_path: Path) -> None:
    """With `min-sites` the others begin before it is known; then one round at most ends without it."""
    study = toy("fcsg-m", rounds=rounds)
    apps = federation(study, tmp_path, 5)
    costs = {"query.hello": 2.0, "train": seconds, "query.ask": 1.0}
    grid = OffByOne(apps.apps, apps.configs, costs=costs, behind={102})
    fewer = {"sites": 5, "min_sites": 4, "deadline": 400.0}
    claim(tmp_path / "run", study)
    server.write_plan(tmp_path / "run" / "plan.safetensors", Agreement(5), "0123456789abcdef")
    coordinate(study, tmp_path, grid, **fewer)
    participants = [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")]
    assert participants[-3:] == [5, 5, 5], participants
    warnings = tmp_path / "run" / "sites.log"
    assert not warnings.exists() or len(warnings.read_text().splitlines()) <= 1


def test_a_site_that_falls_behind_in_the_middle(tmp_path: Path) -> None:
    """As when a connection breaks after it has stored an answer: found by the silence, and then known."""
    study = toy("fcsg-m", rounds=6)
    apps = federation(study, tmp_path, 5)
    grid = OffByOne(apps.apps, apps.configs, costs={"query.hello": 2.0, "train": 1.0, "query.ask": 1.0}, behind=set())
    trains = itertools.count()

    def fall(n: int, round: int, reply: Message) -> Message:
        if n == 2 and next(trains) == 2:
            grid.ready[102].append((0.0, "that nobody waits for"))
        return reply

    grid.tamper = fall
    start = roster.time.monotonic()
    coordinate(study, tmp_path, grid, sites=5, deadline=400.0)
    assert [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")][1:] == [5] * 6
    assert roster.time.monotonic() - start < 400 / 4 + 2 * roster.FLUSH_WAIT + 6 * 12
    assert not (tmp_path / "run" / "sites.log").exists()


def test_a_slow_site_is_not_taken_for_one_that_keeps_back(tmp_path: Path) -> None:
    study = toy("fedavg", rounds=2)
    apps = federation(study, tmp_path, 5)
    grid = OffByOne(apps.apps, apps.configs, costs={"query.hello": 20.0, "train": 50.0}, behind=set())
    coordinate(study, tmp_path, grid, sites=5, deadline=1000.0)
    kinds = [m.metadata.message_type for node, m, _ in grid.messages if node == 102]
    assert kinds == ["query.hello", "query.hello", "train", "train"]


# ---------------------------------------------------------------------------------------------------------
# Nothing bad gets in


def changed(reply: Message, field: str, value: np.ndarray | None) -> Message:
    return rewritten(reply, arrays={f"fields.{field}": value})


def reported(reply: Message, **report: Any) -> Message:
    return rewritten(reply, {"report": {**opened(reply).words["report"], **report}})


def forged(reply: Message, dtype: str, shape: list[int], size: int = 24) -> Message:
    """A message of some bytes whose header claims one array of this type and shape, as no honest site can write it."""
    words = json.dumps({**opened(reply).words})
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"words": words}, "fields.theta": entry}).encode()
    return sealed(reply, len(header).to_bytes(8, "little") + header + bytes(size))


def pickled(reply: Message) -> Message:
    import pickle

    return sealed(reply, pickle.dumps({"theta": print}))


def extra(reply: Message) -> Message:
    reply.content["rows"] = ArrayRecord({"x": Array(np.zeros(3))})
    return reply


X = np.array([0.1, 0.2, 0.3])
DEEP = b"[" * 100_000
BAD: dict[str, tuple[Callable[[Message], Message], str]] = {
    "nan": (lambda m: changed(m, "theta", np.array([0.1, np.nan, 0.2])), "theta holds infinite or NaN"),
    "infinite": (lambda m: changed(m, "v", np.array([0.1, np.inf])), "v holds infinite or NaN"),
    "shape": (lambda m: changed(m, "theta", np.zeros(4)), r"shape \(4,\) instead of \(3\)"),
    "dtype": (lambda m: changed(m, "theta", X.astype("float32")), "float32 instead of float64"),
    "integers": (lambda m: changed(m, "theta", np.array([1, 2, 3])), "int64 instead of"),
    "0-d": (lambda m: changed(m, "theta", np.array(0.5)), r"shape \(\) instead of \(3\)"),
    "void": (lambda m: forged(m, "|V0", [2**62]), "cannot be read"),
    "huge shape": (lambda m: forged(m, "F64", [2**62]), "cannot be read"),
    "negative shape": (lambda m: forged(m, "F64", [-3]), "cannot be read"),
    "past the end": (lambda m: forged(m, "F64", [3], 24_000), "cannot be read"),
    "pickle": (pickled, "cannot be read"),
    "empty": (lambda m: sealed(m, b""), "cannot be read"),
    "long header": (lambda m: sealed(m, (2**40).to_bytes(8, "little") + b"{}"), "cannot be read"),
    "deep header": (lambda m: sealed(m, len(DEEP).to_bytes(8, "little") + DEEP), "cannot be read"),
    "huge": (lambda m: changed(m, "theta", np.zeros(400_000)), "bytes, but at most"),
    "large": (lambda m: changed(m, "theta", X + 1000), "above the limit of 50"),
    "more": (lambda m: changed(m, "rows", X), "instead of fields.theta, fields.u, fields.v, fields.w"),
    "less": (lambda m: changed(m, "u", None), "instead of fields.theta, fields.u, fields.v, fields.w"),
    "records": (extra, "not a message of this version"),
    "old round": (lambda m: rewritten(m, {"group": "1"}), "answered '1' instead of '{now}'"),
    "other client": (lambda m: rewritten(m, {"client": 1}), "answered for client 1"),
    "loss": (lambda m: reported(m, loss=float("nan")), "is not a valid number"),
    "examples": (lambda m: reported(m, examples=2**70), "is not a valid number"),
    "examples infinite": (lambda m: reported(m, examples=float("inf")), "report is invalid"),
    "moved": (lambda m: reported(m, moved="far"), "report is invalid"),
    "report": (lambda m: rewritten(m, {"report": {"examples": 3}}), "report is invalid"),
    "no report": (lambda m: rewritten(m, {"report": None}), "report is invalid"),
    "answers": (lambda m: rewritten(m, {"answered": {"a": 1}}), "list of answers is invalid"),
    "version": (lambda m: rewritten(m, {"version": "0.0.0"}), "does not run nestfed"),
    "experiment": (lambda m: rewritten(m, {"digest": "0123456789"}), "another experiment"),
}


FOREVER = ("version", "experiment")
"""Such a site is not asked again."""


def test_bad_answers_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One site sends another bad answer in every round but the first and the last."""
    kinds = dict(enumerate((k for k in BAD if k not in FOREVER), 2))
    rounds = len(kinds) + 2

    def spoil(n: int, round: int, reply: Message) -> Message:
        return BAD[kinds[round]][0](reply) if n == 3 and round in kinds else reply

    deploy(toy("fmgda", rounds=rounds), tmp_path, 5, spoil, min_sites=4, norm_limit=50.0)
    log = (tmp_path / "run" / "sites.log").read_text()
    for round, kind in kinds.items():
        sentence = BAD[kind][1].replace("{now}", str(round))
        assert re.search(f"round {round}: .*clinic-3 .*{sentence}", log), f"{kind}: {log}"
    script(monkeypatch, dict.fromkeys(kinds, 3))
    expected = simulated("fmgda", rounds=rounds, failures=0.5)
    torch.testing.assert_close(checkpointed(tmp_path)["shared.theta"], expected.shared["theta"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FOREVER)
def test_a_site_that_changes_its_software_is_rejected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, sentence = BAD[kind]
    deploy(toy("fmgda", rounds=3), tmp_path, 5, lambda n, r, m: spoil(m) if (n, r) == (3, 2) else m, min_sites=4)
    assert re.search(f"clinic-3 .*{sentence}", (tmp_path / "run" / "sites.log").read_text())
    script(monkeypatch, {2: 3, 3: 3})
    expected = simulated("fmgda", rounds=3, failures=0.5)
    torch.testing.assert_close(checkpointed(tmp_path)["shared.theta"], expected.shared["theta"], rtol=0, atol=1e-12)


def test_a_repeated_answer_counts_once(tmp_path: Path) -> None:
    study = toy("fmgda", rounds=3)
    grid = federation(study, tmp_path, 5)
    pull = LocalGrid.pull_messages
    grid.pull_messages = lambda ids: [m for m in pull(grid, ids) for _ in range(2)]  # type: ignore[method-assign]
    coordinate(study, tmp_path, grid, sites=5)
    torch.testing.assert_close(
        checkpointed(tmp_path)["shared.theta"], simulated("fmgda", rounds=3).shared["theta"], rtol=0, atol=1e-12
    )


def test_a_site_of_another_experiment_is_refused(tmp_path: Path) -> None:
    study = toy("fmgda", rounds=2)
    grid = federation(study, tmp_path, 5)
    grid.apps[103] = client_app(toy("fmgda", rounds=3))
    grid.configs[104]["experiment"] = "0123456789"  # what this site agreed to
    coordinate(study, tmp_path, grid, sites=5, min_sites=3)
    log = (tmp_path / "run" / "sites.log").read_text()
    assert len(re.findall("clinic-[34] is rejected: it runs another experiment", log)) == 2
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["participants"] == 3


def test_two_sites_with_one_number(tmp_path: Path) -> None:
    study = toy("fedavg", rounds=1)
    grid = federation(study, tmp_path, 5)
    grid.configs[104]["client"] = 3
    with pytest.raises(NestfedError, match="Only 4 of 5 sites"):
        coordinate(study, tmp_path, grid, sites=5)
    assert (
        "clinic-4 is rejected: its client number 3 is already used by clinic-3"
        in (tmp_path / "run" / "sites.log").read_text()
    )


def test_the_text_of_an_error_stays_at_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = toy("fedavg", rounds=1)

    def fail(*args: Any) -> Any:
        raise ValueError("patient Jane Doe has no age")

    broken = Custom(
        study.name, lambda: Assembly(study.make().problem, study.make().algorithm, Broken(), fail, ""), study.run
    )
    grid = federation(study, tmp_path, 5)
    grid.apps[102] = client_app(broken)
    with caplog.at_level(logging.WARNING, logger="nestfed"):
        coordinate(study, tmp_path, grid, sites=5, min_sites=4)
    assert "clinic-2 did not take part: it failed" in (tmp_path / "run" / "sites.log").read_text()
    for _, _, reply in grid.messages:
        assert b"Jane" not in b"".join(p.deflate() for p in get_all_nested_objects(reply).values())


def test_flower_shows_the_log_while_an_app_works(tmp_path: Path) -> None:
    """Its handlers get every line once, and nothing of a later simulation."""
    shown: list[logging.LogRecord] = []

    class Terminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record)

    terminal, flower, ours = Terminal(logging.INFO), logging.getLogger("flwr"), logging.getLogger("nestfed")
    before = (ours.level, list(ours.handlers))
    flower.addHandler(terminal)
    try:
        study = labelled("auroc", {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, rounds=2)
        deploy(study, tmp_path, 4, lambda n, r, m: None if (n, r) == (1, 2) else m, min_sites=2)
        lines = [r.getMessage() for r in shown if r.name.startswith("nestfed.")]
        simulated("fedavg", rounds=2)
        assert [r.getMessage() for r in shown if r.name.startswith("nestfed.")] == lines
    finally:
        flower.removeHandler(terminal)
    for line in (
        "nestfed: site clinic-0 connected as client 0.",
        f"nestfed: starting: fmgda with 4 clients, 2 rounds of 4 local steps; directory {tmp_path / 'run'}.",
        "nestfed: round 2: site clinic-1 did not answer in time.",
    ):
        assert lines.count(line) == 1
    assert sum(line.startswith("nestfed: round 2 of 2: loss") and "auroc" in line for line in lines) == 1
    assert lines[-1].startswith("nestfed: finished after round 2: ")
    assert (ours.level, ours.handlers) == before


class Broken:
    def __len__(self) -> int:
        return 5

    def sample(self, n: int, t: int) -> Any:
        raise ValueError("patient Jane Doe has no age")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"sites": 0}, "number of sites"),
        ({"sites": 5, "min_sites": 6}, "min-sites must be between 1 and the 5 sites"),
        ({"sites": 5, "weights": "examples"}, "weights is now exchange.weights"),
        ({"sites": 5, "dead_line": 3}, r"no key 'dead-line'; did you mean deadline\?"),
        ({"sites": 5, "deadline": 0.0}, "deadline and attempts"),
    ],
)
def test_wrong_configuration(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    study = toy("fedavg", rounds=1)
    with pytest.raises(NestfedError, match=sentence):
        coordinate(study, tmp_path, federation(study, tmp_path, 5), **config)


def test_wrong_node_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = toy("fedavg", rounds=1)
    for wrong in ({"client": -1}, {"client": "0"}, {"site": "../up"}, {"file": "x.csv"}):
        grid = federation(study, tmp_path, 1)
        grid.configs[100] |= wrong
        message = Message(content_of(pack(stamp_of(study), {})), 100, "query.hello")
        grid.push_messages([message])
        assert opened(grid.messages[-1][2]).words["trouble"] == "failed"
    assert "client=0 for the first" in caplog.text
    assert "may contain letters" in caplog.text
    assert "no key 'file'" in caplog.text


# ---------------------------------------------------------------------------------------------------------
# Labelled examples


SIZES = {
    "auprc": {"outer": 3, "inner": 8},
    "paired-auroc": {"first": 4},
    "paired-ap": {"first": 4},
    "paired-partial-auroc": {"first": 4},
    "partial-auroc": {"outer": 3},
}


def labelled(problem: str, algorithm: dict[str, Any], rounds: int = 3, **sections: Any) -> Experiment:
    tables: dict[str, Any] = {
        "data": {"name": "digits", "binary": problem != "classify", "validation": 0.2},
        "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [8]},
        "problem": {"name": problem, **SIZES.get(problem, {"batch": 10})},
        "algorithm": algorithm,
        "run": {"rounds": rounds, "q": 4, "seed": 3},
        "evaluation": {"every": 2},
        "execution": {"mode": "loop"},
    }
    for key, value in sections.items():
        tables[key] = {**tables.get(key, {}), **value}
    return from_tables(tables)


@pytest.mark.parametrize(
    ("problem", "algorithm", "server", "evaluate"),
    [
        ("auprc", {"name": "fcsg-m", "alpha": 0.5, "beta": 0.5}, {"name": "adam", "eta_g": 0.01}, "central"),
        ("auroc", {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, {}, "clients"),
        ("classify", {"name": "fedadam", "eta": 0.1, "eta_g": 0.05}, {}, "central"),
        ("classify", {"name": "fedadam", "eta": 0.1, "eta_g": 0.05}, {}, "clients"),
        ("paired-auroc", {"name": "fedxl1", "eta": 0.05, "passive": 2}, {}, "central"),
        ("paired-ap", {"name": "fedxl2", "eta": 0.05, "passive": 2}, {}, "clients"),
        ("paired-partial-auroc", {"name": "fedxl2", "eta": 0.01, "passive": 8}, {}, "clients"),
        ("partial-auroc", {"name": "sox", "eta": 0.05}, {}, "central"),
        ("auprc", {"name": "kl-dro", "eta": 0.1, "tau": 0.1, "alone": 2}, {}, "central"),
    ],
)
def test_a_data_set_in_parts(
    problem: str, algorithm: dict[str, Any], server: dict[str, Any], evaluate: str, tmp_path: Path
) -> None:
    """The metrics are pooled from counts, and are the simulation's to within the error that comes with them."""
    from nestfed.experiment.run import run

    experiment = labelled(problem, algorithm, data={"held_out": evaluate}, server=server)
    grid = deploy(experiment, tmp_path, 4)
    expected = run(experiment, tmp_path / "simulated", progress=False, picture=False)
    records = read_record(tmp_path / "run" / "record.jsonl")
    assert len(records) == len(expected) == 4
    for ours, theirs in zip(records, expected):
        assert (ours["loss"] or 0.0) == pytest.approx(theirs["loss"] or 0.0, rel=1e-5)
        for key in set(theirs) - {*COSTS, "loss", "drift", "seconds"}:
            slack = 0.0 if key.endswith("error") else ours.get(f"{key}_error", 0.0)
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=slack + 1e-6), key
    assert "ap" in records[2] or "accuracy" in records[2]
    assert "ap" not in records[1]
    assert "accuracy" not in records[1]
    parts = ("scores.test.", "scores.validation.")
    for _, order, reply in [*shipped(grid, "train"), *shipped(grid, "query.ask")]:
        if "round" in opened(order).words:
            answers = {k for k in arrays_of(reply) if not k.startswith(("fields.", "gathered."))}
            asked = opened(order).words["questions"]
            assert answers == {f"{part}{k}" for part in parts for k in SCORES.declared if asked}
    assert {f.name for f in (tmp_path / "run").iterdir()} >= {
        "experiment.json", "record.jsonl", "finished.json", "model.safetensors"
    }  # fmt: skip


def test_a_binary_classifier_has_the_metrics_of_simulation(tmp_path: Path) -> None:
    """Sites once sent only histograms of its scores, so a deployment had no log-loss to choose by."""
    from nestfed.experiment.run import run

    experiment = labelled("classify", {"name": "fedavg", "eta": 0.1}, rounds=1, data={"binary": True})
    deploy(experiment, tmp_path, 4)
    ours = read_record(tmp_path / "run" / "record.jsonl")[-1]
    theirs = run(experiment, tmp_path / "simulated", progress=False, picture=False)[-1]
    for key in ("accuracy", "log_loss", "val_accuracy", "val_log_loss"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "method"),
    [("sine", "local-scgdm"), ("sine", "local-moml"), ("fcsg-figure1", "fcsg-m")],
)
def test_a_packaged_experiment_of_another_kind(name: str, method: str, tmp_path: Path) -> None:
    """Its data are made up by rule: every site makes its own client's, and the coordinator evaluates."""
    from nestfed.experiment.run import run
    from nestfed.experiment.spec import read

    changes = {"run.rounds": 3, "evaluation.every": 1, "run.q": 2}
    if name == "sine":
        changes["problem.test_tasks"] = 20
    else:
        changes |= {"algorithm.alpha": 0.01, "algorithm.beta": 0.5, "partition.clients": 3}
    experiment = read(name).for_method(method).with_overrides(changes)
    sites = experiment.partition.clients
    deploy(experiment, tmp_path, sites)
    expected = run(experiment, tmp_path / "simulated", progress=False, picture=False)
    records = read_record(tmp_path / "run" / "record.jsonl")
    metrics = set(expected[-1]) - {*COSTS, "loss", "drift", "seconds"}
    assert metrics
    for ours, theirs in zip(records, expected, strict=True):
        assert (ours["loss"] or 0.0) == pytest.approx(theirs["loss"] or 0.0, rel=1e-4)
        for key in metrics:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key
    assert records[-1]["participants"] == sites


def test_a_run_of_0_rounds_evaluates_the_start(tmp_path: Path) -> None:
    from nestfed.experiment.run import run

    experiment = labelled("auroc", {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, rounds=0)
    grid = deploy(experiment, tmp_path, 4)
    (expected,) = run(experiment, tmp_path / "simulated", progress=False)
    (record,) = read_record(tmp_path / "run" / "record.jsonl")
    assert record["auroc"] == pytest.approx(expected["auroc"], abs=record["auroc_error"] + 1e-6)
    assert (tmp_path / "run" / "finished.json").exists()
    assert not shipped(grid, "train")


def test_sites_that_are_not_asked_evaluate_all_the_same(tmp_path: Path) -> None:
    from nestfed.experiment.run import run

    experiment = labelled(
        "auroc", {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, exchange={"count": 2}, evaluation={"every": 1}
    )
    grid = deploy(experiment, tmp_path, 4)
    expected = run(experiment, tmp_path / "simulated", progress=False, picture=False)
    records = read_record(tmp_path / "run" / "record.jsonl")
    for ours, theirs in zip(records, expected, strict=True):
        assert ours["auroc"] == pytest.approx(theirs["auroc"], abs=ours["auroc_error"] + 1e-6)
        assert ours["bytes_down"] == theirs["bytes_down"]
    assert len(shipped(grid, "train")) == 6
    assert len([m for _, m, _ in shipped(grid, "query.ask") if "round" in opened(m).words]) == 6 + 4


@pytest.mark.parametrize(
    "keep",
    [{"keep": "uniform"}, {"keep": "best", "metric": "accuracy"}, {"keep": "best", "metric": "log_loss"}],
    ids=lambda options: " ".join(options.values()),
)
def test_other_outcomes(keep: dict[str, str], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from nestfed.experiment.run import run

    experiment = labelled("classify", {"name": "fedavg", "eta": 0.1}, rounds=4, evaluation={"every": 1, **keep})
    deploy(experiment, tmp_path, 4)
    run(experiment, tmp_path / "simulated", progress=False, picture=False)
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("run", "simulated"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# Tables of the sites' own


def tables(folder: Path) -> list[Path]:
    """Three hospitals: gaps at one of them only, a text that one never met, a site without positives."""
    generator = np.random.default_rng(0)
    paths = []
    for n, rows in enumerate((60, 40, 30)):
        age = generator.normal(50 + 10 * n, 8, rows)
        cost = generator.normal(1e5, 1.0, rows)
        ward = generator.choice(["a", "b", "c"][: 2 + (n == 1)], rows)
        died = (age + generator.normal(0, 5, rows) > 58).astype(int) if n < 2 else np.zeros(rows, int)
        lines = [
            f"{'' if n == 1 and i % 7 == 0 else f'{a:.3f}'},{c:.4f},{w},{y}"
            for i, (a, c, w, y) in enumerate(zip(age, cost, ward, died))
        ]
        paths.append(folder / f"hospital-{n}.csv")
        paths[-1].write_text("age,cost,ward,died\n" + "\n".join(lines) + "\n")
    return paths


def hospitals(tmp_path: Path, algorithm: dict[str, Any], problem: str, **sections: Any) -> tuple[LocalGrid, Experiment]:
    data = {"name": "", "target": "died", "binary": False, "validation": 0.0, "test": 0.3}
    experiment = labelled(problem, algorithm, data=data, **sections)
    grid = federation(experiment, tmp_path, 3)
    for config_, path in zip(grid.configs.values(), tables(tmp_path)):
        config_["data"] = str(path)
    coordinate(experiment, tmp_path, grid, sites=3)
    return grid, experiment


def test_scaling_comes_from_sums(tmp_path: Path) -> None:
    """Counts, sums and squared differences make the plan that the pooled rows would have made."""
    from nestfed.data.encoding import encode
    from nestfed.experiment.site import Place, at_site, examples_at

    grid, experiment = hospitals(tmp_path, {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, "auroc")
    plan, _ = read_plan(tmp_path / "run" / "plan.safetensors")  # type: ignore[misc]
    encoding = plan.encoding
    assert encoding.features == ("age", "cost", "ward=a", "ward=b", "ward=c")
    places = [Place(n, str(tmp_path / f"hospital-{n}.csv")) for n in range(3)]
    mine = [examples_at(experiment, place) for place in places]
    rows = [encoding.align(m.prepared.x.numpy(), m.schema) for m in mine]
    pooled = encode({"all": (np.concatenate(rows), encoding.schema)})
    for n, (m, raw) in enumerate(zip(mine, rows)):
        ready = pooled(raw, encoding.schema)
        torch.testing.assert_close(encoding(m.prepared.x.numpy(), m.schema), ready, rtol=1e-5, atol=1e-6)
        made = at_site(experiment, places[n], plan).assembly
        assert made.clients.p == pytest.approx(np.mean([float((m.prepared.y == 1).double().mean()) for m in mine]))
    assert rows[1].shape[1] == 5
    assert plan.shape == (6,)  # "age is missing"
    assert {m.metadata.message_type for _, m, _ in grid.messages} == {"query.hello", "query.ask", "train"}
    for _, _, reply in shipped(grid, "query.hello"):
        assert arrays_of(reply) == {}
    asks = [(m, r) for _, m, r in shipped(grid, "query.ask") if "round" not in opened(m).words]
    assert len(asks) == 6
    for message, reply in asks:
        if [q["query"] for q in opened(message).words["questions"]] == ["classes", "table"]:
            width = 4 + (opened(reply).words["client"] == 1)  # only one hospital has ward c
            sent = payload(reply, "table.training.")
            assert sent.pop("schema")[0] == "uint8"
            assert sent == {"rows": ("int64", ()), "known": ("int64", (width,)), "total": ("float64", (width,))}
        else:
            assert payload(reply, "squares.training.") == {"rows": ("int64", ()), "squares": ("float64", (5,))}


@pytest.mark.parametrize("problem", ["auroc", "auprc"])
def test_own_tables_equal_a_simulation_of_them(problem: str, tmp_path: Path) -> None:
    from nestfed.data.clients import Balanced, Pairs
    from nestfed.experiment.site import Place, at_coordinator, examples_at

    algorithm: dict[str, Any] = (
        {"name": "fmgda", "c_hat": 0.1, "c": 0.1}
        if problem == "auroc"
        else {"name": "fcsg-m", "alpha": 0.5, "beta": 0.5}
    )
    _, experiment = hospitals(tmp_path, algorithm, problem)
    plan, _ = read_plan(tmp_path / "run" / "plan.safetensors")  # type: ignore[misc]
    mine = [examples_at(experiment, Place(n, str(tmp_path / f"hospital-{n}.csv"))) for n in range(3)]
    x = torch.cat([plan.encoding(m.prepared.x.numpy(), m.schema) for m in mine])
    y = torch.cat([m.prepared.y for m in mine])
    ends = np.cumsum([0, *(len(m.prepared.y) for m in mine)])
    parts = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    made = at_coordinator(experiment, plan)
    clients: Any = Balanced((x, y), parts, batch=10) if problem == "auroc" else Pairs((x, y), parts, outer=3, inner=8)
    expected = simulate(made.problem, made.algorithm, clients, rounds=3, q=4, seed=3, mode="loop", progress=False)
    state = checkpointed(tmp_path)
    for field, value in expected.shared.items():
        torch.testing.assert_close(state[f"shared.{field}"], value, rtol=1e-6, atol=1e-7)
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["auroc"] > 0.4


def test_a_run_that_grows_by_a_site(tmp_path: Path) -> None:
    """Stopped with two hospitals, started again with three: the new one joins as a client that sat out until then."""
    experiment = labelled(
        "auroc", {"name": "fmgda", "c_hat": 0.1, "c": 0.1}, rounds=4,
        data={"name": "", "target": "died", "binary": False, "validation": 0.0, "test": 0.3},
    )  # fmt: skip
    paths = tables(tmp_path)
    two = federation(experiment, tmp_path, 2, lambda n, r, m: None if r == 3 and n == 1 else m)
    for config, path in zip(two.configs.values(), paths):
        config["data"] = str(path)
    with pytest.raises(NestfedError, match="too few answers"):
        coordinate(experiment, tmp_path, two, sites=2, attempts=1)
    before, _ = read_plan(tmp_path / "run" / "plan.safetensors")  # type: ignore[misc]
    three = federation(experiment, tmp_path, 3)
    for config, path in zip(three.configs.values(), paths):
        config["data"] = str(path)
    coordinate(experiment, tmp_path, three, sites=3)
    records = read_record(tmp_path / "run" / "record.jsonl")
    assert [r["participants"] for r in records] == [0, 2, 2, 3, 3]
    orders = [opened(m).words for node, m, _ in shipped(three, "train") if node == 102]
    assert [o["seen"] for o in orders] == [-1, 3]
    plan, _ = read_plan(tmp_path / "run" / "plan.safetensors")  # type: ignore[misc]
    np.testing.assert_array_equal(plan.encoding.mean, before.encoding.mean)  # as it was agreed at the start


def test_weights_by_examples(tmp_path: Path) -> None:
    """One local step of FedAvg from the same point: the mean of the answers, weighted."""
    grid, _ = hospitals(tmp_path, {"name": "fedavg", "eta": 0.1}, "classify", exchange={"weights": "examples"})
    hellos = [opened(r).words for _, _, r in shipped(grid, "query.hello")]
    sizes = {words["client"]: words["rows"]["training"] for words in hellos}
    last = shipped(grid, "train")[-3:]
    mean = sum(arrays_of(r)["fields.x"] * sizes[opened(r).words["client"]] for _, _, r in last)
    torch.testing.assert_close(
        checkpointed(tmp_path)["shared.x"], torch.from_numpy(mean / sum(sizes.values())).float(), rtol=1e-5, atol=1e-6
    )
    assert len(set(sizes.values())) == 3


@pytest.mark.parametrize("column", ["age", "ward"])
def test_a_column_that_a_site_lacks_is_an_error(column: str, tmp_path: Path) -> None:
    experiment = labelled("auroc", {"name": "fmgda"}, data={"name": "", "target": "died", "binary": False, "test": 0.3})
    paths = tables(tmp_path)
    paths[1].write_text(paths[1].read_text().replace(f"{column},", "other,", 1))
    grid = federation(experiment, tmp_path, 3)
    for config, path in zip(grid.configs.values(), paths):
        config["data"] = str(path)
    with pytest.raises(NestfedError, match=f"Site clinic-1: .*It has no column '{column}', which most sites have"):
        coordinate(experiment, tmp_path, grid, sites=3)


# ---------------------------------------------------------------------------------------------------------
# The app


def test_init_writes_an_app_that_runs(tmp_path: Path) -> None:
    import importlib.util
    import tomllib

    from typer.testing import CliRunner

    from nestfed.cli.main import app

    folder = tmp_path / "study"
    done = CliRunner().invoke(app, ["deploy", "init", str(folder), "--sites", "2", "run.rounds=2", "run.q=2"])
    assert done.exit_code == 0, done.output
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    apps = {}
    for side in ("client", "server"):
        spec = importlib.util.spec_from_file_location(f"study_{side}", folder / "federated" / f"{side}.py")
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        apps[side] = module.app
    configs = {n: {"client": n, "state": str(tmp_path / f"s{n}")} for n in range(2)}
    config |= {"out": str(tmp_path / "run"), "deadline": 10.0, "enrolled": ""}
    apps["server"](LocalGrid(dict.fromkeys(configs, apps["client"]), configs), Context(1, 1, {}, RecordDict(), config))
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["round"] == 2
    assert sum(1 for line in (folder / "federated" / "client.py").read_text().splitlines() if line.strip()) <= 10
    readme = (folder / "README.md").read_text()
    assert "@" not in re.sub(r"`[^`]*`", "", readme.replace("@example", ""))


def test_init_refuses(tmp_path: Path) -> None:
    from nestfed.deploy.app import init

    (tmp_path / "file").touch()
    experiment = labelled("auroc", {"name": "fmgda"})
    for folder, study, sites, sentence in (
        (tmp_path, experiment, 4, "not empty"),
        (tmp_path / "a", experiment, 3, "partition.clients=3"),
        (tmp_path / "a", experiment.with_overrides({"exchange.failures": 0.1}), 4, "simulates failures"),
        (tmp_path / "a", experiment.with_overrides({"execution.device": "cuda"}), 4, "execution.device must be cpu"),
        (
            tmp_path / "a",
            experiment.with_overrides({"algorithm.name": "bsgd", "algorithm.alpha": 1.0}),
            4,
            "single-machine",
        ),
    ):
        with pytest.raises(NestfedError, match=sentence):
            init(folder, study, sites)
    assert not (tmp_path / "a").exists()


def test_certificates_and_keys(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    from nestfed.deploy.certificates import write_certificates, write_key

    write_certificates(tmp_path, ["coordinator.example.org", "192.0.2.7"])
    authority, server = (x509.load_pem_x509_certificate((tmp_path / f).read_bytes()) for f in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "coordinator.example.org" in names.get_values_for_type(x509.DNSName)
    assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} == {"192.0.2.7", "127.0.0.1"}
    write_key(tmp_path / "a.key")
    private = load_ssh_private_key((tmp_path / "a.key").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((tmp_path / "a.key.pub").read_bytes())
    for secret in ("a.key", "server.key"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0
    for again in (lambda: write_certificates(tmp_path, []), lambda: write_key(tmp_path / "a.key")):
        with pytest.raises(NestfedError, match="already"):
            again()


def test_stopping_one_process_spares_its_namesakes(tmp_path: Path) -> None:
    from nestfed.deploy.processes import Processes

    with Processes(tmp_path) as processes:
        for name in ("site-1", "site-10"):
            processes.start(name, ["sleep", "60"], {})
        processes.stop("site-1")
        assert processes.running["site-10"].poll() is None
    assert processes.running["site-10"].poll() is not None


def test_pairs_across_sites_of_one_class(tmp_path: Path) -> None:
    """Sites weight their rows by the totals of all sites, also a site without positives or without negatives."""
    rng = np.random.default_rng(0)
    sites = [(8, 8), (0, 12), (12, 0)]  # a quarter is held out
    lines = ["a,b,y"]
    for n, (positives, negatives) in enumerate(sites):
        y = [1] * positives + [0] * negatives
        rows = [f"{a:.4f},{b:.4f},{label}" for (a, b), label in zip(rng.normal(size=(len(y), 2)), y)]
        (tmp_path / f"{n}.csv").write_text("\n".join([*lines, *rows]) + "\n")
    experiment = from_tables(
        {
            "data": {"file": "x.csv", "target": "y", "classes": ["0", "1"], "test": 0.25},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "paired-auroc", "first": 10, "second": 10},
            "algorithm": {"name": "fedxl1", "eta": 0.1, "passive": 0},
            "run": {"rounds": 2, "q": 1},
        }
    )
    grid = federation(experiment, tmp_path, 3)
    for n in range(3):
        grid.configs[100 + n]["data"] = str(tmp_path / f"{n}.csv")
    coordinate(experiment, tmp_path, grid, sites=3)
    state = checkpointed(tmp_path)
    weights = [[float(v) for v in state[pool][:, :, -1].sum(1)] for pool in ("tables.pool1", "tables.pool2")]
    np.testing.assert_allclose(weights[0], [10 * 3 * 0.75 * k / 15 for k, _ in sites], rtol=1e-5)
    np.testing.assert_allclose(weights[1], [10 * 3 * 0.75 * k / 15 for _, k in sites], rtol=1e-5)
