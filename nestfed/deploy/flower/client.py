"""A site: answers the coordinator's messages and logs its own errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from nestfed.algorithms.buffered import with_buffers
from nestfed.core import DivergedError, Fields, NestfedError, as_clients, unknown
from nestfed.deploy.agree import Agreement
from nestfed.deploy.discloses import questions_in
from nestfed.deploy.flower.gate import FIELDS, GATHERED
from nestfed.deploy.flower.kept import Kept, Key, stamp_of_file
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.mailbox import ASK, HELLO, TRAIN, block_of, content_of
from nestfed.deploy.flower.messages import (
    PLAN,
    TABLES,
    Custom,
    mismatch,
    questions_of,
    read_plan,
    received,
    stamp_of,
    study_of,
    write_plan,
)
from nestfed.deploy.wire import Packed, numbers, pack, tensors
from nestfed.engine.local import Local
from nestfed.engine.probe import first_batch
from nestfed.engine.program import span_from
from nestfed.engine.round import Order, Reply, Upload
from nestfed.engine.store import LostStateError, Versions, private_fields
from nestfed.queries import PARTS, TRAINING, Arrays, Question, Rows, answered

if TYPE_CHECKING:
    from nestfed.deploy.site import Made, Place, SiteExamples

LOG = logging.getLogger(__name__)
MIN_CELL = 10
"""The default of a site's min-cell."""


@dataclass(frozen=True)
class _Node:
    """A site's node configuration."""

    place: Place
    name: str
    state: Path
    pinned: str
    threads: int
    min_cell: int
    """No count between 1 and this leaves the site."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Node:
        from nestfed.deploy.site import Place

        known = ("client", "site", "data", "state", "experiment", "threads", "min-cell")
        if wrong := [k for k in config if k not in known]:
            raise unknown("key", wrong[0], known, owner="The node configuration")
        n = config.get("client")
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise NestfedError("The node configuration must give the client's number: client=0 for the first.")
        name = str(config.get("site", f"site-{n}"))
        if not re.fullmatch(r"[\w.-]{1,64}", name) or name.startswith("."):
            raise NestfedError(f"A site's name may contain letters, digits, '-', '_' and '.', but it is {name!r}.")
        state = config.get("state")
        if not state:
            from platformdirs import user_data_path

            state = user_data_path("nestfed") / "sites" / name
        data = str(config.get("data", ""))
        min_cell = config.get("min-cell", MIN_CELL)
        if not isinstance(min_cell, int) or isinstance(min_cell, bool) or min_cell < 0:
            raise NestfedError(f"min-cell must be a whole number of at least 0, not {min_cell!r}.")
        pinned, threads = str(config.get("experiment", "")), int(config.get("threads", 0))
        return cls(Place(n, data), name, Path(str(state)), pinned, threads, min_cell)


def client_app(source: Any) -> ClientApp:
    """Return a site's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ClientApp()

    def act(message: Message, context: Context) -> Message:
        return answer(lambda: study_of(source), message, context, Kept())

    app.query("hello")(act)
    app.query("ask")(act)
    app.train()(act)
    return app


def answer(find: Callable[[], Any], message: Message, context: Context, kept: Kept) -> Message:
    """Answer a message of the coordinator.

    find: returns the study, or raises. kept: what earlier messages left for later ones; a process that stays passes the
    same one every time.
    """
    acts: dict[str, Act] = {HELLO: _hello, ASK: _answer, TRAIN: _answer}
    kind = message.metadata.message_type
    if kind not in acts:
        raise unknown("message", kind, acts)
    return _safely(find, message, context, kept, acts[kind])


Act = Callable[["_Site"], bytes]


@dataclass(frozen=True)
class _Site:
    """A site at work on one message."""

    study: Any
    node: _Node
    packed: Packed
    arrays: Arrays
    kept: Kept

    @property
    def words(self) -> Mapping[str, Any]:
        """The words of the message."""
        return self.packed.words

    def reply(self, arrays: Arrays, **words: Any) -> bytes:
        """Return an answer to the message."""
        stamp = stamp_of(self.study, client=self.node.place.n, group=self.words.get("group"), **words)
        return pack(stamp, arrays)

    @property
    def _table(self) -> Key:
        """What has to stay the same for the site's rows to stay the same."""
        place = self.node.place
        return (self.study, place, stamp_of_file(place.file) if place.file else None)

    def _read(self, study: Any, place: Place) -> SiteExamples:
        from nestfed.deploy.site import read_examples  # not at the top: it imports all of training

        return self.kept.get("examples", self._table, lambda: read_examples(study, place))

    def raw_rows(self) -> dict[str, Rows]:
        """Return the site's rows by part, before the sites have agreed on an encoding."""
        from nestfed.deploy.site import raw_rows

        return raw_rows(self.study, self.node.place, self._read)

    def made(self, agreement: Agreement, plan: Path) -> Made:
        """Return the site's objects for an agreement, which is in the file `plan`."""
        from nestfed.deploy.site import Made, at_site

        if isinstance(self.study, Custom):
            return Made(self.study.make(), lambda part: None)
        key = (*self._table, stamp_of_file(plan))
        return self.kept.get("objects", key, lambda: at_site(self.study, self.node.place, agreement, self._read))


def _safely(find: Callable[[], Any], message: Message, context: Context, kept: Kept, act: Act) -> Message:
    """Always answer. An error message may quote the site's data, so it stays in the site's log."""
    with shown_by_flower():
        try:
            block = act(_site(find(), message, context, kept))
        except OwnTroubleError as trouble:
            LOG.warning("%s", trouble)
            block = _trouble(trouble.kind, context)
        except DivergedError as error:
            LOG.warning("%s", error)
            block = _trouble("diverged", context)
        except LostStateError as error:
            LOG.warning("%s", error)
            block = _trouble("lost-state", context)
        except Exception:
            LOG.exception("this site failed.")
            block = _trouble("failed", context)
    return Message(content_of(block), reply_to=message)


class OwnTroubleError(NestfedError):
    """A reason why this site does not take part, of which the coordinator is told the kind."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _trouble(kind: str, context: Context) -> bytes:
    return pack({"trouble": kind, "site": str(context.node_config.get("site", ""))[:64]}, {})


def _site(study: Any, message: Message, context: Context, kept: Kept) -> _Site:
    """Return the site and the message; raise if the site must not take part."""
    node = _Node.read(context.node_config)
    if node.threads:
        torch.set_num_threads(node.threads)
    packed = block_of(message)
    if kind := mismatch(study, packed.words):
        raise OwnTroubleError(kind, f"the coordinator runs another experiment or version: {dict(packed.words)}.")
    if node.pinned and node.pinned != study.digest():
        raise OwnTroubleError(
            "another-experiment", f"this site takes part in experiment {node.pinned}, not in {study.digest()}."
        )
    from nestfed.deploy.site import WITHDRAWN  # not at the top: it imports all of training

    if (node.state / WITHDRAWN).exists():
        raise OwnTroubleError(
            "withdrawn", f"this site has withdrawn: delete {node.state / WITHDRAWN} to take part again."
        )
    return _Site(study, node, packed, packed.arrays(), kept)


def _hello(site: _Site) -> bytes:
    study, node = site.study, site.node
    rows = dict.fromkeys(PARTS, 0)
    if isinstance(study, Custom):
        rows[TRAINING] = as_clients(study.make().clients).examples(node.place.n)
    else:
        rows |= {part: len(some) for part, some in site.raw_rows().items()}
    if 0 < rows[TRAINING] < node.min_cell:
        raise OwnTroubleError(
            "too-few", f"this site has {rows[TRAINING]} training rows, fewer than its min-cell = {node.min_cell}."
        )
    told = {part: n if n >= node.min_cell else 0 for part, n in rows.items()}
    return site.reply({}, site=node.name, rows=told, torch=torch.__version__)


def _answer(site: _Site) -> bytes:
    """Answer the questions of a message, and train if it is an order to."""
    asked = questions_of(site.words["questions"], site.arrays)
    if "round" not in site.words:
        parts = {} if isinstance(site.study, Custom) else site.raw_rows()
        found = _answers(site, asked, parts, None)
        return site.reply(found[1], answered=found[0])
    return _work(site, asked)


def _answers(
    site: _Site, asked: Sequence[Question], parts: Mapping[str, Rows], x: Tensor | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the keys of the questions that the site answers, and the arrays of the answers."""
    known = questions_in(site.study)
    if wrong := [one.query.name for one in asked if one.query.name not in known]:
        raise NestfedError(f"The coordinator asks {wrong[0]!r}, which this study does not need.")
    model = None if x is None else x.numpy()
    found = answered(asked, parts, site.node.min_cell, model)
    for key in found:
        LOG.info("answering %s", key)
    return list(found), {f"{key}.{k}": v for key, reply in found.items() for k, v in reply.items()}


def _work(site: _Site, asked: Sequence[Question]) -> bytes:
    study, node, words = site.study, site.node, site.words
    run, exchange, execution = study.run, study.exchange, study.execution
    token = str(words["token"])
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        raise NestfedError("The order has no valid token.")
    folder = node.state / token
    if "plan" in words:
        scaling = {k.removeprefix(PLAN): v for k, v in site.arrays.items() if k.startswith(PLAN)}
        write_plan(folder / "plan.safetensors", Agreement.unpacked(words["plan"], scaling), token)
    found = read_plan(folder / "plan.safetensors")
    if found is None:
        raise OwnTroubleError("no-plan", f"{folder} has no plan; the coordinator will send it again.")
    n = node.place.n
    made = site.made(found[0], folder / "plan.safetensors")
    problem = made.assembly.problem
    method = with_buffers(problem, made.assembly.algorithm, study.evaluation.keep)
    clients = as_clients(made.assembly.clients).seeded(run.seed)
    shared = {k: v.to(problem.x0.dtype) for k, v in received(exchange.encoding, site.arrays).items()}
    tables = {k: v.to(problem.x0.dtype) for k, v in tensors(site.arrays, TABLES).items()}
    span = span_from(method, int(words["t"]), run.q)
    order = Order(int(words["round"]), span, [n], [int(words["seen"])], int(words["tap"]), tables=tables)
    said: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if asked:
        parts = {one.part: rows for one in asked if (rows := made.rows(one.part)) is not None}
        with torch.no_grad():
            said["answered"], arrays = _answers(site, asked, parts, method.solution(shared, {}))
    if words["train"]:
        problem.inspect(first_batch(problem, clients, run.seed, n))  # it may draw random numbers
        template = method.init(problem, problem.x0)
        store = Versions(
            folder, f"{study.digest()} {token} client {n}", private_fields(method, template, exchange.encoding)
        )
        precision = torch.bfloat16 if execution.precision == "bf16" else None
        local = Local(
            problem, method, clients, store, run.seed, exchange, precision=precision, pieces=execution.accumulate,
            template=template,
        )  # fmt: skip
        upload = _upload(local, order, shared)
        arrays |= numbers({k: v[0] for k, v in upload.fields.items()}, FIELDS)
        arrays |= numbers({k: v[0] for k, v in upload.gathered.items()}, GATHERED)
        loss = {} if bool(upload.loss.isnan()) else {"loss": float(upload.loss)}  # a problem may record none
        said["report"] = {"moved": float(upload.moved), "examples": upload.examples, **loss}
    return site.reply(arrays, **said)


def _upload(local: Local, order: Order, received: Fields) -> Upload:
    """Run this site's round; raise if its numbers become infinite or NaN."""
    kept = Reply({})
    with torch.no_grad():
        for upload in local.uploads(order, received, kept):
            return upload
    raise DivergedError(next(iter(kept.dropped.values())))
