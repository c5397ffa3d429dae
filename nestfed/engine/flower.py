"""Flower: the same rounds between machines that share nothing but named fields (`pip install 'nestfed[flower]'`).

    app = client_app("experiment.toml")     # at every site; its node configuration says which client it is
    app = server_app("experiment.toml")     # at the coordinator; the app's configuration holds the rules

Messages: `query.hello` and `query.spread` before the first round (counts, sums, names), then `train` with the shared
fields, and `evaluate` to sites that are not asked in a round. No other kind of message is answered. Whatever goes
wrong at a site is told there, in its own log; the coordinator only hears of which kind it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays
from torch import Tensor

import nestfed
from nestfed.core import Fields, NestfedError
from nestfed.engine.checkpoint import write_atomically
from nestfed.engine.encode import Encoding, squeeze
from nestfed.engine.lock import locked
from nestfed.engine.remote import Answer, Coordinator, LostStateError, Order, RefusedError, Rules, Site, Store
from nestfed.engine.sync import Participation

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
except ImportError as error:
    raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.") from error

if TYPE_CHECKING:
    from nestfed.assemble import Assembly
    from nestfed.experiment import RunSpec
    from nestfed.site import Facts, Place, Plan

PROTOCOL = 1
"""Raised when messages change."""
POLL = 0.2
"""Seconds between two looks for answers."""
MOST_TALLY = 1_000_000
"""Bytes of a site's counts that are believed."""
_LOG = logging.getLogger("flwr")  # what `flwr run --stream` and a site's own terminal show

TROUBLES = {
    "another-experiment": "it was started for another experiment, or reads this one differently",
    "another-version": f"it does not run nestfed {nestfed.__version__} with protocol {PROTOCOL}",
    "lost-state": "it does not have its private fields of the round it last took part in; bring back its `state` "
    "folder, or set lost-state to restart",
    "no-plan": "it has no plan yet",
    "failed": "it could not do what it was asked; its own log says why",
}


@dataclass(frozen=True)
class Custom:
    """A problem written in Python instead of an experiment file. `make` is called at every site and coordinator."""

    name: str
    make: Callable[[], Assembly]
    run: RunSpec

    def resolved(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {"custom": self.name, "algorithm": repr(self.make().algorithm), "run": asdict(self.run)}

    def digest(self) -> str:
        """Return a short name of these settings."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()[:10]


Source = "str | Path | Experiment | Custom"


def _study(source: Any) -> Any:
    if isinstance(source, str | Path):
        from nestfed.experiment import read

        return read(source)
    return source


# ---------------------------------------------------------------------------------------------------------
# Arrays in messages


def _record(fields: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in fields.items()})


def _numbers(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({k: Array(np.ascontiguousarray(v).reshape(v.shape)) for k, v in arrays.items()})


def _arrays(record: ArrayRecord, most: int | None = None) -> dict[str, np.ndarray]:
    """Decode arrays (never pickles), after a look at their size."""
    if most is not None and sum(len(a.data) for a in record.values()) > most:
        raise RefusedError("it sent more bytes than were asked for.")
    try:
        return {k: np.array(a.numpy()) for k, a in record.items()}
    except Exception as error:  # a header of hostile bytes may raise anything, from TokenError to MemoryError
        raise RefusedError("it sent arrays that cannot be read.") from error


def _tensors(record: ArrayRecord, most: int | None = None) -> dict[str, Tensor]:
    try:
        return {k: torch.from_numpy(a) for k, a in _arrays(record, most).items()}
    except TypeError as error:
        raise RefusedError("it sent arrays of an unknown kind of number.") from error


def _stamp(study: Any, **more: Any) -> ConfigRecord:
    return ConfigRecord({"protocol": PROTOCOL, "version": nestfed.__version__, "digest": study.digest(), **more})


def _mismatch(study: Any, stamp: Mapping[str, Any]) -> str:
    if stamp.get("protocol") != PROTOCOL or stamp.get("version") != nestfed.__version__:
        return "another-version"
    return "another-experiment" if stamp.get("digest") != study.digest() else ""


def _broadcast_record(encoding: Encoding, shared: Fields) -> ArrayRecord:
    return _record({k: squeeze(encoding.down, v)[""] for k, v in shared.items()} if encoding.down else shared)


def _received(encoding: Encoding, record: ArrayRecord) -> dict[str, Tensor]:
    fields = _tensors(record)
    return {k: v.view(torch.bfloat16) for k, v in fields.items()} if encoding.down == "bfloat16" else fields


def _plan_record(plan: Plan) -> tuple[ConfigRecord, ArrayRecord]:
    words: dict[str, Any] = {"clients": plan.clients, "shape": list(plan.shape), "p": plan.p}
    words |= {"classes": list(plan.classes), "features": list(plan.features)}
    arrays = {"mean": plan.mean, "deviation": plan.deviation, "gaps": plan.gaps}
    return ConfigRecord(words), _numbers(arrays)


def _plan(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Plan:
    from nestfed.site import Plan

    return Plan(
        int(words["clients"]), tuple(words["shape"]), tuple(words["classes"]), float(words["p"]),
        tuple(words["features"]), arrays["mean"], arrays["deviation"], arrays["gaps"].astype(bool),
    )  # fmt: skip


def _write_plan(path: Path, plan: Plan, token: str) -> None:
    words, _ = _plan_record(plan)
    arrays = {"mean": plan.mean, "deviation": plan.deviation, "gaps": plan.gaps.astype(np.uint8)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save_arrays(arrays, {"plan": json.dumps(dict(words)), "token": token}))


def _read_plan(path: Path) -> tuple[Plan, str] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            words = file.metadata()
            return _plan(json.loads(words["plan"]), {k: file.get_tensor(k) for k in file.keys()}), words["token"]  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NestfedError(f"{path} is damaged: delete it, or start in another directory.") from error


# ---------------------------------------------------------------------------------------------------------
# A site


@dataclass(frozen=True)
class _Node:
    """A site's node configuration."""

    place: Place
    name: str
    state: Path
    pinned: str
    threads: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Node:
        from nestfed.site import Place

        known = ("client", "site", "data", "state", "experiment", "threads")
        if wrong := [k for k in config if k not in known]:
            raise NestfedError(f"The node configuration knows {', '.join(known)}, but not {wrong[0]!r}.")
        n = config.get("client")
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise NestfedError("The node configuration must say which client this is: client=0 for the first.")
        name = str(config.get("site", f"site-{n}"))
        if not re.fullmatch(r"[\w.-]{1,64}", name) or name.startswith("."):
            raise NestfedError(f"A site's name is made of letters, digits, '-', '_' and '.', not {name!r}.")
        state = config.get("state")
        if not state:
            from platformdirs import user_data_path

            state = user_data_path("nestfed") / "sites" / name
        data = str(config.get("data", ""))
        return cls(
            Place(n, data), name, Path(str(state)), str(config.get("experiment", "")), int(config.get("threads", 0))
        )


def client_app(source: Any) -> ClientApp:
    """Return a site's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _hello(_study(source), message, context))

    @app.query("spread")
    def spread(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _spread(_study(source), message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _work(_study(source), message, context, training=True))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _work(_study(source), message, context, training=False))

    return app


def _safely(message: Message, act: Callable[[], RecordDict]) -> Message:
    """Answer in any case. The text of an error may quote the site's data, so it stays in the site's log."""
    try:
        content = act()
    except _TroubleError as trouble:
        _LOG.log(WARNING, "nestfed: %s", trouble)
        content = _trouble(trouble.kind)
    except LostStateError as error:
        _LOG.log(WARNING, "nestfed: %s", error)
        content = _trouble("lost-state")
    except Exception:
        _LOG.exception("nestfed: this site cannot do what it was asked.")
        content = _trouble("failed")
    return Message(content, reply_to=message)


class _TroubleError(NestfedError):
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _trouble(kind: str) -> RecordDict:
    return RecordDict({"trouble": ConfigRecord({"kind": kind})})


def _site(study: Any, message: Message, context: Context) -> tuple[_Node, Mapping[str, Any]]:
    """Return the site's configuration and the order's words, unless it must not take part."""
    node = _Node.read(context.node_config)
    if node.threads:
        torch.set_num_threads(node.threads)
    order: Mapping[str, Any] = message.content["order"]
    if kind := _mismatch(study, order):
        raise _TroubleError(kind, f"the coordinator runs another experiment or version: {dict(order)}.")
    if node.pinned and node.pinned != study.digest():
        raise _TroubleError(
            "another-experiment", f"this site takes part in experiment {node.pinned}, not in {study.digest()}."
        )
    return node, order


def _hello(study: Any, message: Message, context: Context) -> RecordDict:
    from nestfed.site import Facts, facts

    node, _ = _site(study, message, context)
    if isinstance(study, Custom):
        parts = getattr(study.make().clients, "parts", None)
        told = Facts(examples=0 if parts is None else len(parts[node.place.n]))
    else:
        told = facts(study, node.place)
    words = _stamp(
        study, client=node.place.n, site=node.name, examples=told.examples, positives=told.positives,
        shape=list(told.shape), classes=list(told.classes), features=list(told.features),
    )  # fmt: skip
    return RecordDict({"site": words, "sums": _numbers({"known": told.known, "total": told.total})})


def _spread(study: Any, message: Message, context: Context) -> RecordDict:
    from nestfed.site import spread

    node, _ = _site(study, message, context)
    plan = _plan(message.content["plan"], _arrays(message.content["scaling"]))  # type: ignore[arg-type]
    return RecordDict({"site": _stamp(study), "squares": _numbers({"squares": spread(study, node.place, plan)})})


def _work(study: Any, message: Message, context: Context, training: bool) -> RecordDict:
    from nestfed.site import Made, at_site

    node, words = _site(study, message, context)
    run, encoding = study.run, Encoding.parse(study.run.encode)
    token = str(words["token"])
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        raise NestfedError("The order has no proper token.")
    folder = node.state / token
    if "plan" in message.content:
        plan = _plan(message.content["plan"], _arrays(message.content["scaling"]))  # type: ignore[arg-type]
        _write_plan(folder / "plan.safetensors", plan, token)
    found = _read_plan(folder / "plan.safetensors")
    if found is None:
        raise _TroubleError("no-plan", f"there is no plan in {folder}; the coordinator will send it again.")
    plan = found[0]
    n = node.place.n
    made = Made(study.make(), lambda model: {}) if isinstance(study, Custom) else at_site(study, node.place, plan)
    problem, algorithm, clients = made.assembly.problem, made.assembly.algorithm, made.assembly.clients
    if hasattr(clients, "seeded"):
        clients = clients.seeded(run.seed)
    shared = {k: v.to(problem.x0.dtype) for k, v in _received(encoding, message.content["shared"]).items()}  # type: ignore[arg-type]
    order = Order(int(words["round"]), int(words["t"]), int(words["seen"]), int(words["tap"]))
    reply = RecordDict({"answer": _stamp(study, token=token, client=n, round=order.round)})
    if words["evaluate"]:
        with torch.no_grad():
            reply["tally"] = _numbers(made.tally(problem.bind(shared[algorithm.point])))
    if training:
        identity = f"{study.digest()} {token} client {n}"
        site = Site(problem, algorithm, clients, n, run.q, run.seed, Store(folder, identity), encoding)
        answer = site(order, shared)
        reply["fields"] = _record(answer.fields)
        reply["report"] = MetricRecord({"loss": answer.loss, "moved": answer.moved, "examples": answer.examples})
    return reply


# ---------------------------------------------------------------------------------------------------------
# The coordinator


@dataclass(frozen=True)
class _Setup:
    """The app's configuration, [tool.flwr.app.config]."""

    sites: int
    rules: Rules
    out: Path

    @classmethod
    def read(cls, study: Any, config: Mapping[str, Any]) -> _Setup:
        defaults = {
            "sites": 0, "min-sites": 0, "deadline": 600.0, "attempts": 3, "norm-limit": 0.0, "weights": "equal",
            "lost-state": "refuse", "out": "",
        }  # fmt: skip
        if wrong := [k for k in config if k not in defaults]:
            raise NestfedError(f"The app's configuration knows {', '.join(defaults)}, but not {wrong[0]!r}.")
        told = {**defaults, **config}
        sites = int(told["sites"])
        if sites < 1:
            raise NestfedError("The app's configuration must say how many sites there are: sites = 4.")
        if told["weights"] not in ("equal", "examples"):
            raise NestfedError(f"weights must be equal or examples, not {told['weights']!r}.")
        if told["lost-state"] not in ("refuse", "restart"):
            raise NestfedError(f"lost-state must be refuse or restart, not {told['lost-state']!r}.")
        rules = Rules(
            int(told["min-sites"]) or sites, float(told["deadline"]), int(told["attempts"]), float(told["norm-limit"]),
            told["weights"] == "examples", told["lost-state"] == "restart",
        )  # fmt: skip
        return cls(sites, rules, Path(str(told["out"]) or f"runs/deployed-{study.digest()}"))


class _Post:
    """Messages under way. An answer is taken once, and only while its question stands."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.open: dict[str, tuple[int, str]] = {}
        self.sent = self.got = 0

    def send(self, node: int, kind: str, content: RecordDict, group: str = "") -> None:
        """Ask a node something; what it was asked before and has not answered is withdrawn."""
        self.withdraw(node, kind)
        message = Message(content, node, kind, ttl=self.deadline, group_id=group)
        self.sent += _weight(message)
        for identity in self.grid.push_messages([message]):
            if identity:
                self.open[identity] = (node, kind)

    def withdraw(self, node: int | None = None, kind: str | None = None) -> None:
        """Stop waiting for answers."""
        self.open = {
            i: (n, k)
            for i, (n, k) in self.open.items()
            if not ((node is None or n == node) and (kind is None or k == kind))
        }

    def receive(self) -> list[tuple[int, str, Message]]:
        """Return the answers that have come."""
        found = []
        for reply in self.grid.pull_messages(list(self.open)) if self.open else ():
            asked = self.open.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                self.got += _weight(reply)
                found.append((*asked, reply))
        return found


def _weight(message: Message) -> int:
    """Return the bytes of a message as Flower sends it, without HTTP and TLS."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


class _Server:
    """One run of a federation, from whoever is there to the last round."""

    def __init__(self, study: Any, setup: _Setup, grid: Grid) -> None:
        self.study, self.setup = study, setup
        self.post = _Post(grid, setup.rules.deadline)
        self.grid = grid
        self.names: dict[int, str] = {}
        self.client_of: dict[int, int] = {}
        self.facts: dict[int, Facts] = {}
        self.refused: set[int] = set()
        self.doubles: dict[int, int] = {}
        """Nodes whose number another node has; without registered keys, that may be the same site before a crash."""
        self.planned: set[int] = set()
        """Nodes that have the plan."""
        self.since: dict[int, str] = {}
        """When each node that is there came up."""
        self._looked = 0.0

    # -- who is there

    def say(self, sentence: str, level: int = WARNING) -> None:
        """Tell the coordinator's people; warnings stay in sites.log."""
        _LOG.log(level, "nestfed: %s", sentence)
        if level >= WARNING:
            with (self.setup.out / "sites.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def name(self, node: int) -> str:
        """Return how people call a site."""
        return self.names.get(node) or f"node {node}"

    def look(self, at_once: bool = False) -> set[int]:
        """Return the nodes that came up since the last look, and greet them; looks are a second apart, or at once."""
        if time.monotonic() - self._looked < 1 and not at_once:
            return set()
        self._looked = time.monotonic()
        nodes = {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}
        risen = {node for node, when in nodes.items() if self.since.get(node) != when}
        self.since = nodes
        free = {node for node, n in self.doubles.items() if node in nodes and n not in self.nodes()}
        for node in risen | free:
            self.refused.discard(node)
            self.doubles.pop(node, None)
            self.post.send(node, "query.hello", RecordDict({"order": _stamp(self.study)}))
        return risen

    def nodes(self) -> dict[int, int]:
        """Return the node of every client that is there."""
        return {n: node for node, n in self.client_of.items() if node in self.since and node not in self.refused}

    def greet(self, node: int, reply: Message) -> None:
        """Take in a site's first words, or refuse it."""
        if reply.has_error():
            self.since.pop(node, None)  # as if it had not been there: if it still is, it is greeted again
            self.say(f"site {self.name(node)} did not answer a greeting (Flower's error {reply.error.code}).", INFO)
            return
        try:
            words = self._words(reply, "site")
            n, name = words.get("client"), str(words.get("site", ""))[:64]
            self.names[node] = name
            if not isinstance(n, int) or not 0 <= n < self.setup.sites:
                raise RefusedError(f"it says it is client {n}, but there are {self.setup.sites}, from 0 on.")
            if (other := self.nodes().get(n)) not in (None, node):
                self.doubles[node] = n
                raise RefusedError(f"it says it is client {n}, as {self.name(other or 0)} does already.")
            self.facts[n] = self._facts(words, reply)
        except RefusedError as error:
            self.refuse(node, str(error))
            return
        for old in [k for k, v in self.client_of.items() if v == n and k != node]:
            del self.client_of[old]
        self.client_of[node] = n
        self.say(f"site {name} is there as client {n}.", INFO)

    def refuse(self, node: int, sentence: str) -> None:
        """Leave a node out until it starts again."""
        self.refused.add(node)
        self.say(f"site {self.name(node)} is refused: {sentence}")

    def _words(self, reply: Message, key: str) -> Mapping[str, Any]:
        """Return a reply's stamp if it speaks of this experiment."""
        if reply.has_error():
            raise RefusedError(f"its app did not answer (Flower's error {reply.error.code}).")
        if "trouble" in reply.content:
            kind = str(reply.content["trouble"].get("kind"))
            raise _Spoke(kind, f"{TROUBLES.get(kind, 'it has an unknown trouble')}.")
        words = reply.content.get(key)
        if not isinstance(words, ConfigRecord):
            raise RefusedError("its answer is not one of nestfed's.")
        if kind := _mismatch(self.study, words):
            raise _Spoke(kind, f"{TROUBLES[kind]}.")
        return words

    def _facts(self, words: Mapping[str, Any], reply: Message) -> Facts:
        from nestfed.site import Facts

        sums = reply.content.get("sums")
        try:
            arrays = _arrays(sums, 10_000_000) if isinstance(sums, ArrayRecord) else {}
            told = Facts(
                int(words["examples"]), int(words["positives"]), tuple(words["shape"]), tuple(words["classes"]),
                tuple(words["features"]), arrays["known"], arrays["total"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("its counts and sums are not as asked.") from error
        sizes = {len(told.known), len(told.total), len(told.features)}
        good = len(sizes) == 1 and np.isfinite(told.total).all() and (told.known >= 0).all()
        if not good or not 0 <= told.positives <= told.examples:
            raise RefusedError("its counts and sums do not fit together.")
        return told

    def wait(self, enough: Callable[[], bool]) -> bool:
        """Take in greetings until there are enough sites; tell whether there were before the deadline."""
        end = time.monotonic() + self.setup.rules.deadline
        while not enough():
            if time.monotonic() > end:
                return False
            self.look()
            for node, kind, reply in self.post.receive():
                if kind == "query.hello":
                    self.greet(node, reply)
            time.sleep(POLL)
        return True

    # -- before the first round

    def plan(self) -> tuple[Plan, str]:
        """Return what all sites agree on: as it was before, or from what those who are there tell."""
        path = self.setup.out / "plan.safetensors"
        if found := _read_plan(path):
            return replace(found[0], clients=self.setup.sites), found[1]
        total, least = self.setup.sites, self.setup.rules.least
        if not self.wait(lambda: len(self.nodes()) >= total) and len(self.nodes()) < least:
            raise NestfedError(
                f"Only {len(self.nodes())} of {total} sites came within {self.setup.rules.deadline:g} s; "
                f"{least} are needed."
            )
        token = secrets.token_hex(8)
        plan = self._agree()
        _write_plan(path, plan, token)
        return plan, token

    def _agree(self) -> Plan:
        from nestfed.site import Plan, finish, merge

        there = self.nodes()
        if isinstance(self.study, Custom):
            return Plan(self.setup.sites)
        told = {self.name(there[n]): self.facts[n] for n in sorted(there)}
        plan = merge(told, self.setup.sites, self.setup.rules.by_examples)
        if not plan.features:
            return plan
        words, arrays = _plan_record(plan)
        for node in there.values():
            self.post.send(
                node, "query.spread", RecordDict({"order": _stamp(self.study), "plan": words, "scaling": arrays})
            )
        squares: dict[int, np.ndarray] = {}
        end = time.monotonic() + self.setup.rules.deadline
        while len(squares) < len(there) and time.monotonic() < end:
            for node, kind, reply in self.post.receive():
                if kind == "query.spread":
                    try:
                        self._words(reply, "site")
                        values = _arrays(reply.content["squares"])["squares"]  # type: ignore[arg-type]
                    except (RefusedError, KeyError) as error:
                        raise NestfedError(f"Site {self.name(node)} told no sums of squares: {error}") from error
                    if values.shape != plan.mean.shape or not np.isfinite(values).all() or (values < 0).any():
                        raise NestfedError(f"Site {self.name(node)} told sums of squares that cannot be.")
                    squares[self.client_of[node]] = values
            time.sleep(POLL)
        if len(squares) < len(there):
            raise NestfedError("A site told its sums but then not its sums of squares; start again when it is there.")
        return finish(plan, [squares[n] for n in sorted(squares)], told)

    # -- rounds

    def run(self) -> None:
        """Carry the experiment out, from the last finished round on."""
        from nestfed.running import claim

        study, setup = self.study, self.setup
        claim(setup.out, study)
        with locked(setup.out):
            self._run(study, setup)

    def _run(self, study: Any, setup: _Setup) -> None:
        if (setup.out / "finished.json").exists():
            self.say(f"{setup.out} holds a finished run; choose another `out` for a new one.", INFO)
            return
        try:
            plan, token = self.plan()
            made, tells = self._made(plan)
            spec = study.run
            self.encoding = Encoding.parse(spec.encode)
            coordinator = Coordinator(
                made.problem, made.algorithm, setup.sites, spec.rounds, spec.q, spec.seed, setup.out,
                f"{study.digest()} {token}", setup.rules, self.encoding, Participation(spec.participation or None, spec.failures),
                spec.output, f"val_{spec.metric or made.metric}" if spec.output == "best" else "",
                reduce=spec.reduce, noise=spec.noise,
            )  # fmt: skip
            for sentence in coordinator.passed_over:
                self.say(sentence)
            if coordinator.promise:
                self.say(coordinator.promise, INFO)
            if coordinator.state.round:
                self.say(f"goes on after round {coordinator.state.round} of {spec.rounds}.", INFO)
            self._rounds(coordinator, made, tells, plan, token)
        except NestfedError as error:
            self.say(f"stopped: {error}")
            raise
        self._finish(coordinator, made)

    def _made(self, plan: Plan) -> tuple[Assembly, bool]:
        """Return the coordinator's objects, and whether the sites evaluate."""
        from nestfed.site import LABELLED, at_coordinator

        if isinstance(self.study, Custom):
            return self.study.make(), False
        return at_coordinator(self.study, plan), self.study.problem.name in LABELLED

    def _rounds(self, c: Coordinator, made: Assembly, tells: bool, plan: Plan, token: str) -> None:
        every = self.study.run.every
        while True:
            due = c.state.round % every == 0 or c.over
            began = time.perf_counter()
            asked = [] if c.over else c.ask()
            answers, tallies, sent = self._ask(c, asked, due and tells, plan, token)
            if due:
                c.judge(self._metrics(c, made, tells, tallies))
                self._tell(c)
            if c.over:
                return
            c.average(answers, sent, began)
            self._count(c)

    def _ask(
        self, c: Coordinator, asked: list[int], due: bool, plan: Plan, token: str
    ) -> tuple[dict[int, Answer], dict[int, Mapping[str, np.ndarray]], int]:
        """Ask until a round's worth of good answers is there; return them, the tallies, and how many were asked."""
        rules = self.setup.rules
        answers: dict[int, Answer] = {}
        tallies: dict[int, Mapping[str, np.ndarray]] = {}
        sent = 0
        if not asked and not due:
            return answers, tallies, sent
        least = min(rules.least, len(asked)) if asked else 1
        for attempt in range(rules.attempts):
            wanted = [n for n in asked if n not in answers]
            audience = [n for n in range(self.setup.sites) if n not in asked and n not in tallies] if due else []
            need = least - len(answers) if asked else 1
            self.look(at_once=True)
            self.wait(lambda wanted=wanted or audience, need=need: len(self.nodes().keys() & set(wanted)) >= need)  # type: ignore[misc]
            sent += self._collect(c, wanted, audience, due, plan, token, answers, tallies)
            if len(answers if asked else tallies) >= least:
                return answers, tallies, sent
            self.say(
                f"round {c.state.round + 1}: {len(answers)} of {len(asked)} sites answered well in time, {least} are "
                f"needed (attempt {attempt + 1} of {rules.attempts})."
            )
        if not asked:
            return answers, tallies, sent  # only a metric is missing
        raise NestfedError(
            f"Round {c.state.round + 1} had too few answers {rules.attempts} times; the same command goes on from "
            f"round {c.state.round}."
        )

    def _collect(
        self, c: Coordinator, wanted: list[int], audience: list[int], due: bool, plan: Plan, token: str,
        answers: dict[int, Answer], tallies: dict[int, Mapping[str, np.ndarray]],
    ) -> int:  # fmt: skip
        """Ask once, and take in what comes before the deadline; return how many were asked to train."""
        end = time.monotonic() + self.setup.rules.deadline
        open_: set[int] = set()
        trained = 0
        shared = _broadcast_record(self.encoding, c.state.shared)

        def put(n: int) -> None:
            nonlocal trained
            node = self.nodes().get(n)
            if node is None:
                return
            kind = "train" if n in wanted else "evaluate"
            words = {**asdict(c.order(n)), "token": token, "evaluate": due}
            content = RecordDict({"order": _stamp(self.study, **words), "shared": shared})
            if node not in self.planned:
                content["plan"], content["scaling"] = _plan_record(plan)
            self.post.send(node, kind, content, str(c.state.round + 1))
            open_.add(n)
            trained += kind == "train"

        self.look(at_once=True)
        for n in (*wanted, *audience):
            put(n)
        while open_ and time.monotonic() < end:
            # A site that came up again has forgotten the question.
            again = {self.client_of[node] for node in self.look() if node in self.client_of} & open_
            for n in again:
                self.say(f"site {self.name(self.nodes().get(n, 0))} came back; it is asked again.", INFO)
                put(n)
            for node, kind, reply in self.post.receive():
                if kind == "query.hello":
                    self.greet(node, reply)
                    n = self.client_of.get(node, -1)
                    if n not in open_ and n not in answers and n in (*wanted, *audience) and node not in self.refused:
                        put(n)
                    continue
                n = self.client_of.get(node, -1)
                open_.discard(n)
                try:
                    self._take(c, n, node, reply, kind == "train", due, answers, tallies)
                except _Spoke as spoke:
                    if self._mend(c, n, node, spoke):
                        put(n)
                except RefusedError as error:
                    self.say(f"round {c.state.round + 1}: the answer of site {self.name(node)} is dropped: {error}")
            time.sleep(POLL)
        for n in sorted(open_):
            node = self.nodes().get(n, 0)
            self.say(f"round {c.state.round + 1}: site {self.name(node)} did not answer in time.")
        self.post.withdraw(kind="train")  # a late answer finds nobody who waits for it
        self.post.withdraw(kind="evaluate")
        return trained

    def _mend(self, c: Coordinator, n: int, node: int, spoke: _Spoke) -> bool:
        """Do something about a site's trouble; tell whether to ask it again."""
        if spoke.kind == "no-plan" and node in self.planned:
            self.planned.discard(node)
            return True
        if spoke.kind == "lost-state" and self.setup.rules.restart_lost and int(c.state.seen[n]) >= 0:
            self.say(f"round {c.state.round + 1}: site {self.name(node)} lost its private fields and starts anew.")
            c.state.seen[n] = -1
            return True
        if spoke.kind in ("another-experiment", "another-version"):
            self.refuse(node, str(spoke))
        else:
            self.say(f"round {c.state.round + 1}: site {self.name(node)} did not take part: {spoke}")
        return False

    def _take(
        self, c: Coordinator, n: int, node: int, reply: Message, training: bool, due: bool,
        answers: dict[int, Answer], tallies: dict[int, Mapping[str, np.ndarray]],
    ) -> None:  # fmt: skip
        """Check an answer to the last number before anything of it is used."""
        from nestfed.site import refuse_tally

        words = self._words(reply, "answer")
        if words.get("client") != n:
            raise RefusedError(f"it answered for client {words.get('client')}.")
        if words.get("round") != c.state.round:
            raise RefusedError(f"it answered round {_plus_one(words.get('round'))} instead of {c.state.round + 1}.")
        extra = set(reply.content) - {"answer", "fields", "report", "tally"}
        if extra or ("fields" in reply.content) != training:
            raise RefusedError("it sent records that nobody asked for, or not those asked for.")
        counted: Mapping[str, np.ndarray] = {}
        tally = reply.content.get("tally")
        if isinstance(tally, ArrayRecord) and due:
            counted = _arrays(tally, MOST_TALLY)
            if sentence := refuse_tally(counted):
                raise RefusedError(sentence)
        if training:
            fields, report = reply.content.get("fields"), reply.content.get("report")
            if not isinstance(fields, ArrayRecord) or not isinstance(report, MetricRecord):
                raise RefusedError("its fields or its report are missing.")
            # numpy's header is at most some hundred bytes for every array, of which int8 has two.
            most = sum(v.numel() * v.element_size() + 10_000 for v in c.state.shared.values()) * 2
            numbers = [v for k in ("loss", "moved", "examples") if isinstance(v := report.get(k), int | float)]
            if len(numbers) != 3 or len(report) != 3 or not isinstance(numbers[2], int):
                raise RefusedError("its report is not as asked.")
            loss, moved, examples = numbers
            answer = Answer(c.state.round, _tensors(fields, most), float(loss), float(moved), int(examples))
            answers[n] = c.believe(answer)
        if counted:
            tallies[n] = counted
        self.planned.add(node)
        if self.setup.rules.by_examples:
            c.weights = {k: float(f.examples) for k, f in self.facts.items()}
            if not c.weights[n]:
                raise NestfedError("weights = examples, but this problem's sites count none: set weights = equal.")

    # -- what people see

    def _metrics(
        self, c: Coordinator, made: Assembly, tells: bool, tallies: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[str, float]:
        from nestfed.site import pool

        if tells:
            return pool([tallies[n] for n in sorted(tallies)])
        with torch.no_grad():
            found = made.evaluate(made.problem.bind(c.state.shared[c.algorithm.point]))
        return {k: float(v) for k, v in found.items()}

    def _tell(self, c: Coordinator) -> None:
        costs = ("iteration", "examples", "bytes_up", "bytes_down", "seconds", "round", "participants", "drift")
        shown = {k: v for k, v in c.history[-1].items() if k not in costs and v is not None}
        self.say(f"round {c.state.round} of {c.rounds}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown.items()), INFO)

    def _count(self, c: Coordinator) -> None:
        """Note the bytes of the messages themselves beside the record's count of the fields in them."""
        line = {"round": c.state.round, "sent": self.post.sent, "received": self.post.got}
        with (self.setup.out / "wire.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _finish(self, c: Coordinator, made: Assembly) -> None:
        from safetensors.torch import save

        x = c.outcome()
        model = made.problem.module(x)
        tensors = model.state_dict() if hasattr(model, "state_dict") else {"x": x}
        write_atomically(
            self.setup.out / "model.safetensors", save({k: v.contiguous().clone() for k, v in tensors.items()})
        )
        write_atomically(self.setup.out / "finished.json", json.dumps(c.history[-1]).encode())


class _Spoke(RefusedError):
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _plus_one(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value


def server_app(source: Any) -> ServerApp:
    """Return the coordinator's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        study = _study(source)
        _Server(study, _Setup.read(study, context.run_config), grid).run()

    return app
