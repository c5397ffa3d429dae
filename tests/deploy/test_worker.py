"""A site's resident worker: the same numbers, rows that are read once, and no delivered code.

The SuperNode's loop, its interface and the worker's side of it are Flower's own, in this process; only the SuperLink is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import itertools
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

import uvicorn
from flwr.app import Context, Message, RecordDict
from flwr.supercore.retry import http_retry
from flwr.supernode import start_client_internal as loop
from safetensors.torch import load_file

from nestfed.core import NestfedError
from nestfed.deploy import pace, supernode
from nestfed.deploy.app import write_app
from nestfed.deploy.flower import private_site, worker
from nestfed.deploy.flower.client import answer
from nestfed.deploy.flower.kept import Kept, stamp_of_file
from nestfed.deploy.flower.mailbox import block_of, content_of
from nestfed.deploy.flower.messages import stamp_of
from nestfed.deploy.local import free_port
from nestfed.deploy.wire import pack
from nestfed.experiment import site as site_module
from nestfed.experiment.spec import Experiment, from_tables
from nestfed.queries import CLASSES, Question, answered
from nestfed.queries.tables import classes_of
from tests.flower import LocalGrid, checkpointed, coordinate, federation

FMGDA = {"name": "fmgda", "c_hat": 0.1, "c": 0.1}
SIZES = {"auroc": {"batch": 10}, "auprc": {"outer": 3, "inner": 8}}
FCSGM = {"name": "fcsg-m", "alpha": 0.5, "beta": 0.5}


def study(problem: str, algorithm: dict[str, Any], **data: Any) -> Experiment:
    return from_tables(
        {
            "data": data or {"name": "digits", "binary": True, "validation": 0.2},
            "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5},
            "model": {"name": "mlp", "hidden": [4]},
            "problem": {"name": problem, **SIZES.get(problem, {})},
            "algorithm": algorithm,
            "run": {"rounds": 3, "q": 3, "seed": 3},
            "evaluation": {"every": 1},
            "execution": {"mode": "loop"},
        }
    )


def hospitals(folder: Path) -> list[str]:
    generator = np.random.default_rng(0)
    paths = []
    for n in range(3):
        x = generator.normal(n, 1.0, (60, 2))
        y = (x.sum(1) + generator.normal(0, 1, 60) > 2 * n).astype(int)
        paths.append(folder / f"{n}.csv")
        paths[-1].write_text("a,b,died\n" + "".join(f"{a:.4f},{b:.4f},{c}\n" for (a, b), c in zip(x, y)))
    return [str(p) for p in paths]


class Staying:
    """A site's app that keeps what a worker keeps."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.kept = experiment, Kept()

    def __call__(self, message: Message, context: Context) -> Message:
        return answer(lambda: self.experiment, message, context, self.kept)


def deployed(experiment: Experiment, folder: Path, files: list[str], staying: bool) -> LocalGrid:
    folder.mkdir()
    grid = federation(experiment, folder, 3)
    for config, file in zip(grid.configs.values(), files):
        config["data"] = file
    if staying:
        grid.apps = {node: Staying(experiment) for node in grid.apps}
    coordinate(experiment, folder, grid, sites=3)
    return grid


@pytest.mark.parametrize(
    ("problem", "algorithm", "own"),
    [
        ("auroc", FMGDA, True),
        ("auprc", FCSGM, False),
        ("paired-ap", {"name": "fedxl2", "eta": 0.05, "passive": 2}, False),
    ],
)
def test_what_is_kept_changes_no_bit(problem: str, algorithm: dict[str, Any], own: bool, tmp_path: Path) -> None:
    files = hospitals(tmp_path) if own else []
    data = {"target": "died", "validation": 0.2, "test": 0.3} if own else {}
    experiment = study(problem, algorithm, **data)
    for name, staying in (("fresh", False), ("staying", True)):
        deployed(experiment, tmp_path / name, files, staying)
    fresh, staying_ = (checkpointed(tmp_path / name) for name in ("fresh", "staying"))
    assert fresh.keys() == staying_.keys()
    assert all(torch.equal(fresh[k], staying_[k]) for k in fresh)


STUDY = {
    "data": {"target": "died", "classes": ["0", "1"], "validation": 0.25, "test": 0.25},
    "model": {"name": "mlp", "hidden": []},
    "problem": {"name": "auroc"},
    "run": {"rounds": 2, "q": 2},
    "evaluation": {"every": 1, "keep": "best", "metric": "auroc"},
    "study": {},
    "methods": {
        "auroc": {"algorithm": {"name": "fmgda", "c_hat": 1.0, "c": 1.0}, "tune": {"eta": [0.03, 0.3]}},
        "fedavg": {"problem": {"name": "classify"}, "tune": {"eta": [0.03, 0.3]}},
    },
}


@pytest.mark.long
def test_a_study_of_several_trainings_reads_each_table_once_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials, last trainings and questions about either division of the rows take turns."""
    read, real = [], site_module.load_examples
    monkeypatch.setattr(site_module, "load_examples", lambda spec, *more: read.append(spec.file) or real(spec, *more))
    files = hospitals(tmp_path)
    for name, staying in (("fresh", False), ("staying", True)):
        read.clear()
        deployed(from_tables(STUDY), tmp_path / name, files, staying)
    assert sorted(read) == files
    one, two = (trained(tmp_path / name / "run") for name in ("fresh", "staying"))
    assert one.keys() == two.keys()
    assert len(one) >= 4
    for place in one:
        fresh, kept = load_file(one[place]), load_file(two[place])
        assert all(torch.equal(fresh[k], kept[k]) for k in fresh)


def trained(folder: Path) -> dict[str, Path]:
    """Return the checkpoints of all trainings, by their names without the digest, which covers the seconds."""
    found = folder.glob("trainings/**/round-*.safetensors")
    return {str(path.relative_to(folder)).rpartition("-")[0]: path for path in found}


def test_a_worker_reads_its_table_and_builds_its_objects_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many questions and rounds there are."""
    read, built = [], []
    real_read, real_built = site_module.load_examples, site_module.labelled
    monkeypatch.setattr(
        site_module, "load_examples", lambda spec, *more: read.append(spec.file) or real_read(spec, *more)
    )
    monkeypatch.setattr(site_module, "labelled", lambda *args: built.append(args[0]) or real_built(*args))
    files = hospitals(tmp_path)
    experiment = study("auroc", FMGDA, target="died", validation=0.2, test=0.3)
    deployed(experiment, tmp_path / "run", files, staying=True)
    assert sorted(read) == files
    assert len(built) == 3 + 1  # and the coordinator's


def test_a_part_of_a_dataset_has_all_its_classes_under_the_rule_for_small_cells(tmp_path: Path) -> None:
    """Its classes are those of the whole dataset, which everybody knows, also where the part has few of one."""
    experiment = study("auroc", FMGDA)
    parts = [site_module.raw_rows(experiment, site_module.Place(n))["training"] for n in range(3)]
    assert min(int(np.bincount(rows.y.astype(int), minlength=2).min()) for rows in parts) < 60
    found = [answered([Question(CLASSES, "training", {})], {"training": rows}, 60) for rows in parts]
    assert {classes_of(one["classes.training"])[0] for one in found} == {("0", "1")}


def test_a_changed_table_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a,b\n1,2\n")
    kept, made = Kept(), iter(range(9))

    def rows() -> int:
        return kept.get("rows", stamp_of_file(path), lambda: next(made))

    assert [rows(), rows()] == [0, 0]
    path.write_text("a,b\n1,3\n")
    assert [rows(), rows()] == [1, 1]
    path.unlink()
    path.write_text("a,b\n1,2\n")
    assert rows() == 2
    assert kept.get("other", (), lambda: 7) == 7
    assert rows() == 2


# --- Flower's own interface ---


def bundle(experiment: Experiment, folder: Path, client: str = "") -> bytes:
    """Return what the coordinator delivers, as Flower builds it."""
    from flwr.cli.build import build_fab_from_disk

    write_app(folder, experiment, 3)
    with (folder / "federated" / "client.py").open("a") as file:
        file.write(client)
    return build_fab_from_disk(folder)


class Site:
    """A SuperNode without a SuperLink: its state, its interface and both halves of its loop."""

    def __init__(self, fab: bytes, config: dict[str, Any]) -> None:
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supernode.main import create_app
        from flwr.supernode.nodestate import NodeStateFactory

        objects = ObjectStoreFactory()
        self.factory = NodeStateFactory(objectstore_factory=objects)
        self.state, self.store, self.fab, self.config = self.factory.state(), objects.store(), fab, config
        self.state.set_node_id(5)
        self.name = hashlib.sha256(fab).hexdigest()
        self.secret, self.port = b"known to two", free_port()
        self.server = uvicorn.Server(
            uvicorn.Config(create_app(self.factory, self.secret), "127.0.0.1", self.port, log_level="error")
        )
        self.thread = threading.Thread(target=self.server.run)
        self.late: set[str] = set()
        """Objects that are not there when they are pulled for the first time."""

    def __enter__(self) -> Site:
        self.thread.start()
        while not self.server.started:
            threading.Event().wait(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()

    def tasks(self, secret: bytes = b"") -> private_site.Tasks:
        return private_site.Tasks(f"127.0.0.1:{self.port}", None, secret or self.secret)

    def receive(self, kind: str, block: bytes) -> None:
        """Let Flower's loop receive a message of the coordinator."""
        from flwr.app.message import remove_content_from_message
        from flwr.supercore.fab import Fab
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
        from flwr.supercore.run import Run

        message = Message(content_of(block), 5, kind, group_id="1")
        message.metadata.__dict__.update(_run_id=1, _src_node_id=1)
        message.metadata.__dict__["_message_id"] = message.object_id
        parts = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
        self.late = set(parts)

        def pull(run: int, identity: str) -> bytes:
            if identity in self.late:
                self.late.discard(identity)
                raise ObjectUnavailableError(identity)
            return parts[identity]

        run = dataclasses.replace(Run.create_empty(1), fab_hash=self.name, series_id=1)
        loop._pull_and_store_message(
            self.state, self.store, self.config, lambda: (remove_content_from_message(message), get_object_tree(message)),
            lambda _: run, lambda *_: Fab(self.name, self.fab, {}), pull, lambda *_: None, None,
        )  # fmt: skip

    def sent(self) -> Message:
        """Let Flower's loop send the reply, and return it."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        found: dict[str, Any] = {"parts": {}}

        def send(message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
            found["id"] = tree.object_id
            return {some.object_id for some in iterate_object_tree(tree)}, "session"

        def push(run: int, session: str, identity: str, content: bytes) -> None:
            found["parts"][identity] = content

        loop._push_messages(self.state, self.store, send, push)
        reply = inflate_object_from_contents(found["id"], found["parts"])
        assert isinstance(reply, Message)
        return reply


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperNode's loop that polls at a pace, for this test only."""
    for module, name in ((loop, "time"), (loop, "pull_objects"), (http_retry, "_RETRYABLE_STATUS_CODES")):
        monkeypatch.setattr(module, name, getattr(module, name))
    private_site.quicken()


CODE = """
from pathlib import Path

Path({place!r}).write_text("executed")
"""


@pytest.fixture
def site(tmp_path: Path, quick: None) -> Iterator[Site]:
    code = CODE.format(place=str(tmp_path / "executed"))
    fab = bundle(study("auroc", FMGDA), tmp_path / "study", code)
    config = {"client": 1, "site": "b", "state": str(tmp_path / "state"), "min-cell": 0}
    with Site(fab, config) as found:
        yield found


def test_the_installed_flower_is_the_known_one() -> None:
    assert private_site.unusable() == ""


def test_a_task_is_answered_and_delivered_code_is_not_run(site: Site, tmp_path: Path) -> None:
    """Two messages, whose parts arrive late, through Flower's loop and interface."""
    experiment, tasks, kept = study("auroc", FMGDA), site.tasks(), Kept()

    def own(message: Message, context: Context, fab: bytes) -> Message:
        return worker.answer_with(kept, message, context, fab)

    assert not tasks.work(own)
    for _ in range(2):
        site.receive("query.hello", pack(stamp_of(experiment), {}))
        assert tasks.work(own)
        words = block_of(site.sent()).words
        assert (words["client"], words["site"], words["digest"]) == (1, "b", experiment.digest())
        assert words["rows"]["training"] > 0
    assert not tasks.work(own)
    assert not (tmp_path / "executed").exists()


def test_the_same_bundle_runs_its_code_the_ordinary_way(site: Site, tmp_path: Path) -> None:
    """So that the test above does not pass because the code is harmless."""
    with zipfile.ZipFile(io.BytesIO(site.fab)) as archive:
        exec(archive.read("federated/client.py"), {"__file__": str(tmp_path / "study" / "federated" / "client.py")})
    assert (tmp_path / "executed").exists()


def test_only_who_knows_the_secret_takes_tasks(site: Site) -> None:
    site.receive("query.hello", pack(stamp_of(study("auroc", FMGDA)), {}))
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        site.tasks(b"a guess").work(lambda *_: pytest.fail("a stranger got a message"))


def test_an_error_of_the_worker_is_a_reply(site: Site) -> None:
    """Otherwise the SuperNode would wait for one until the task fails."""
    site.receive("evaluate", pack(stamp_of(study("auroc", FMGDA)), {}))
    with pytest.raises(NestfedError, match="'evaluate'"):
        site.tasks().work(lambda message, context, fab: worker.answer_with(Kept(), message, context, fab))
    assert site.sent().has_error()


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def test_a_bundle_without_an_experiment_or_with_a_huge_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = Context(1, 5, {"client": 0, "state": str(tmp_path), "site": "a"}, RecordDict(), {})
    message = Message(content_of(pack({}, {})), 5, "query.hello")
    message.metadata.__dict__["_message_id"] = "one"

    def kind(fab: bytes) -> Any:
        return block_of(worker.answer_with(Kept(), message, context, fab)).words["trouble"]

    assert kind(zipped({"federated/client.py": b"app = None"})) == "no-experiment"
    assert "--isolation subprocess" in caplog.text
    assert kind(zipped({"experiment.toml": b"#" * 2**21})) == "failed"
    assert "more than 1,048,576 bytes" in caplog.text
    assert kind(b"no archive") == "failed"


# --- polling ---


def waited(some: pace.Pace, work: float = 0.0) -> float:
    """Return how long a pace waits, after a poll of some seconds."""
    pace.time.sleep(work)
    before = pace.time.monotonic()
    some.sleep()
    return pace.time.monotonic() - before


def test_polls_are_fast_after_work_and_slow_after_minutes_without() -> None:
    """In the clock of the tests, which moves only by the waits themselves."""
    some, start = pace.Pace(), pace.time.monotonic()
    waits = [waited(some)]
    while pace.time.monotonic() - start < 300:
        waits.append(waited(some))
    assert waits[0] == pytest.approx(0.05)
    assert waits[-1] == pytest.approx(2.0)
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(waits))
    assert len(waits) < 400  # 0.05 s all the time would be 6,000
    some.restart()
    assert waited(some) == pytest.approx(0.05)


def test_polls_of_a_busy_superlink_are_rarer() -> None:
    some = pace.Pace()
    assert waited(some, work=0.2) == pytest.approx(0.05)  # not a poll: it ended the work
    assert waited(some, work=0.2) == pytest.approx(0.4)
    assert waited(some) == pytest.approx(0.05)
    assert waited(some, work=9) == pytest.approx(2.0)


def test_flowers_loop_sleeps_at_a_pace(quick: None) -> None:
    """Its 3 s without a message are 0.05 s after work, its 0.5 s without a reply are 0.02 s at first."""
    clock = loop.time

    def slept(seconds: float) -> float:
        before = pace.time.monotonic()
        clock.sleep(seconds)
        return pace.time.monotonic() - before

    assert slept(3) == pytest.approx(0.05)
    assert slept(0.5) == pytest.approx(0.02)
    for _ in range(1000):
        clock.sleep(3)
    assert slept(3) == pytest.approx(2.0)
    slept(0.5)
    assert slept(3) == pytest.approx(0.05)
    assert clock.monotonic() > 0  # everything else is the module's own


class Locked(http.server.BaseHTTPRequestHandler):
    """A SuperLink whose database is locked at the first call."""

    calls = 0

    def do_POST(self) -> None:
        type(self).calls += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(500 if self.calls == 1 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def test_a_locked_superlink_is_asked_again(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    from flwr.proto.runtime_pb2 import GetNodesRequest
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    monkeypatch.setattr(Locked, "calls", 0)
    server = http.server.HTTPServer(("127.0.0.1", 0), Locked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = RuntimeHttpClient.from_server_address(
        f"127.0.0.1:{server.server_port}", True, None, [], retry_invoker=make_simple_http_retry_invoker()
    )
    try:
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            client.GetNodes(GetNodesRequest())
        Locked.calls = 0
        request.getfixturevalue("quick")
        assert list(client.GetNodes(GetNodesRequest()).nodes) == []
        assert Locked.calls == 2
    finally:
        client.close()
        server.shutdown()
        server.server_close()


# --- the fallback ---


def started(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """Start a SuperNode that ends at once; return its arguments."""
    seen: list[str] = []

    def ends() -> None:
        seen.extend(sys.argv[1:])
        raise SystemExit(0)

    monkeypatch.setattr(sys, "argv", ["nestfed"])
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", ends)
    monkeypatch.setattr(supernode, "_start", lambda runtime, secret: pytest.fail("a worker was started"))
    with pytest.raises(SystemExit):
        supernode.supernode(options)
    return seen


def test_another_flower_starts_a_process_for_every_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private_site, "version", lambda name: "1.42.0")
    sleeps = loop.time
    assert started(monkeypatch, "--insecure", "--node-config", "client=0") == [
        "--insecure",
        "--node-config",
        "client=0",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "nestfed: without a worker, Flower starts a process for every message: Flower is version 1.42.0, and its private "
        "interfaces are only known for 1.41.x."
    ]
    assert loop.time is sleeps


def test_a_changed_loop_starts_a_process_for_every_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(loop, "pull_objects")
    started(monkeypatch, "--insecure")
    assert "its main loop does not use 'pull_objects'" in capsys.readouterr().err


@pytest.mark.parametrize("isolation", ["subprocess", "process"])
def test_a_site_chooses_the_ordinary_way(
    isolation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, "--isolation", isolation) == ["--isolation", isolation]
    assert capsys.readouterr().err == ""


def test_where_the_tasks_are() -> None:
    assert private_site.runtime_of(["--insecure"]) == private_site.Runtime("127.0.0.1:9094")
    options = [
        "--host",
        "0.0.0.0",
        "--port",
        "9100",
        "--ssl-ca-certfile",
        "/a/ca.crt",
        "--superexec-auth-secret-file",
        "s",
    ]
    assert private_site.runtime_of(options) == private_site.Runtime("127.0.0.1:9100", "/a/ca.crt", "s")
