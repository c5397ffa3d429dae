"""A site: answers the coordinator's messages and logs its own errors."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from nestfed.algorithms.buffered import with_buffers
from nestfed.core import DivergedError, Fields, NestfedError, as_clients, unknown
from nestfed.deploy.audit import FOLDER, Audit
from nestfed.deploy.certificates import AUTHORITY_PATH
from nestfed.deploy.discloses import questions_in
from nestfed.deploy.flower.gate import FIELDS, GATHERED
from nestfed.deploy.flower.kept import Kept, Key, stamp_of_file
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.mailbox import ASK, HELLO, TRAIN, block_of, content_of
from nestfed.deploy.flower.messages import (
    PARAMETERS,
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
from nestfed.deploy.node import Node
from nestfed.deploy.preflight import examine, forbidden, machine
from nestfed.deploy.wire import Packed, numbers, pack, tensors
from nestfed.engine.local import Local
from nestfed.engine.probe import first_batch
from nestfed.engine.program import span_from
from nestfed.engine.round import Order, Reply, Upload
from nestfed.engine.store import LostStateError, Versions, private_fields
from nestfed.experiment.study import FINAL, Training
from nestfed.problems.objective import Labelled
from nestfed.queries import PARTS, TRAINING, Arrays, Question, Rows, answered
from nestfed.queries.agreement import Agreement

if TYPE_CHECKING:
    from nestfed.experiment.site import Made, OwnRows, SiteExamples, Table

LOG = logging.getLogger(__name__)
RELEASED = "model"
"""The folder with the study's model, in a site's state folder."""
AGREED = "plan.safetensors"
"""The file with what the sites have agreed on."""


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
    node: Node
    packed: Packed
    arrays: Arrays
    kept: Kept

    @property
    def words(self) -> Mapping[str, Any]:
        """The words of the message."""
        return self.packed.words

    @property
    def audit(self) -> Audit:
        """The site's own log of what it did."""
        return Audit(self.node.state / FOLDER, self.node.name)

    def reply(self, arrays: Arrays, **words: Any) -> bytes:
        """Return an answer to the message."""
        stamp = stamp_of(self.study, client=self.node.place.n, group=self.words.get("group"), **words)
        return pack(stamp, arrays)

    @property
    def _table(self) -> Key:
        """What has to stay the same for the site's rows to stay the same."""
        place = self.node.place
        return (self.study, place, stamp_of_file(place.file) if place.file else None)

    def _read(self) -> Table | None:
        """Return the content of the site's file; None if it has a part of the study's dataset."""
        from nestfed.experiment.site import own_table  # not at the top: it imports all of training

        file = self.node.place.file
        return self.kept.get("table", self._table, lambda: own_table(self.study, file)) if file else None

    def _examples(self, final: bool = False) -> SiteExamples:
        """Return the site's examples, in the division of a study's last trainings if `final`."""
        from nestfed.experiment.site import examples_at

        made = self.study.with_overrides(FINAL) if final else self.study
        key = (*self._table, final)
        return self.kept.get("examples", key, lambda: examples_at(made, self.node.place, self._read()))

    def raw_rows(self, final: bool = False) -> dict[str, Rows]:
        """Return the site's rows by part, before the sites have agreed on an encoding."""
        return self._examples(final).rows() if isinstance(self.study.problem, Labelled) else {}

    def inputs(self, agreement: Agreement, folder: Path) -> OwnRows:
        """Return the rows of a study as model inputs, for an agreement whose file is in a folder."""
        from nestfed.experiment.site import own_rows

        make = lambda: own_rows(self.study, self.node.place, agreement, self._read())  # noqa: E731
        return self.kept.get("inputs", (*self._table, stamp_of_file(folder / AGREED)), make)

    def made(self, agreement: Agreement, folder: Path, training: Training | None) -> Made:
        """Return the objects of a run, or of one training of a study."""
        from nestfed.experiment.site import Made, at_site, made_of

        if isinstance(self.study, Custom):
            return Made(self.study.make(), lambda part: None)
        key = (*self._table, stamp_of_file(folder / AGREED), training)
        if training is None:
            return self.kept.get(
                "objects", key, lambda: at_site(self.study, self.node.place, agreement, self._examples)
            )
        rows, experiment = self.inputs(agreement, folder), training.experiment(self.study)
        own = rows.last if training.final else rows.trial
        return self.kept.get("objects", key, lambda: made_of(experiment, own, agreement))


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
    """A reason why this site does not take part; the coordinator gets only its kind."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _trouble(kind: str, context: Context) -> bytes:
    return pack({"trouble": kind, "site": str(context.node_config.get("site", ""))[:64]}, {})


def _site(study: Any, message: Message, context: Context, kept: Kept) -> _Site:
    """Return the site and the message; raise if the site must not take part."""
    node = Node.read(context.node_config)
    if node.threads:
        torch.set_num_threads(node.threads)
    packed = block_of(message)
    if kind := mismatch(study, packed.words):
        raise OwnTroubleError(kind, f"the coordinator runs another experiment or version: {dict(packed.words)}.")
    if node.pinned and node.pinned != study.digest():
        raise OwnTroubleError(
            "another-experiment", f"this site takes part in experiment {node.pinned}, not in {study.digest()}."
        )
    from nestfed.deploy.withdraw import WITHDRAWN  # not at the top: it imports all of training

    if (node.state / WITHDRAWN).exists():
        raise OwnTroubleError(
            "withdrawn", f"this site has withdrawn: delete {node.state / WITHDRAWN} to take part again."
        )
    return _Site(study, node, packed, packed.arrays(), kept)


def _hello(site: _Site) -> bytes:
    study, node = site.study, site.node
    authority = os.environ.get(AUTHORITY_PATH)
    problems = [*machine(node.state, Path(authority) if authority else None)]
    if isinstance(study, Custom):
        made = study.make()
        rows = dict.fromkeys(PARTS, 0) | {TRAINING: as_clients(made.clients).examples(node.place.n)}
        problems += forbidden(rows[TRAINING], made.algorithm.describes_rows, node.min_cell)
    else:
        found = examine(study, node.place, node.min_cell, site.raw_rows)
        rows = {part: len(found.rows.get(part, ())) for part in PARTS}
        problems += found.problems
    for problem in problems:
        LOG.warning("%s", problem.sentence)
    kinds = list(dict.fromkeys(problem.kind for problem in problems))
    site.audit.add("registered", digest=study.digest(), problems=kinds)
    counts = {part: n if n >= node.min_cell else 0 for part, n in rows.items()}
    return site.reply({}, site=node.name, rows=counts, torch=torch.__version__, problems=kinds, clock=time.time())


def _answer(site: _Site) -> bytes:
    """Answer the questions of a message, train if it is an order to, or keep the released model."""
    if "release" in site.words:
        return _keep(site)
    asked = questions_of(site.words["questions"], site.arrays)
    if "round" in site.words:
        return _work(site, asked)
    answers = _answers(site, asked, _rows(site), site.arrays.get(PARAMETERS))
    return site.reply(answers[1], answered=answers[0])


def _keep(site: _Site) -> bytes:
    """Keep the model that the study has released, in the site's state folder."""
    from nestfed.deploy.flower.released import receive

    place = site.node.state / RELEASED
    digest = receive(place, str(site.words["release"]), site.arrays)
    site.audit.add("model received", folder=place.name, sha256=digest)
    LOG.info("the study's model is in %s: nestfed predict %s new.csv", place, place)
    return site.reply({})


def _rows(site: _Site) -> Mapping[str, Rows]:
    """Return the rows that a question outside rounds is about: of the table, or as model inputs."""
    if isinstance(site.study, Custom):
        return {}
    if "final" in site.words:
        agreement, folder = _agreed(site)
        return site.inputs(agreement, folder).by_part(bool(site.words["final"]))
    return site.raw_rows(final=site.study.is_study)


def _agreed(site: _Site) -> tuple[Agreement, Path]:
    """Return what the sites have agreed on, and the folder of the run at this site."""
    words = site.words
    token = str(words["token"])
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        raise NestfedError("The order has no valid token.")
    folder = site.node.state / token
    if "plan" in words:
        scaling = {k.removeprefix(PLAN): v for k, v in site.arrays.items() if k.startswith(PLAN)}
        write_plan(folder / AGREED, Agreement.unpacked(words["plan"], scaling), token)
        site.audit.add("study agreed", digest=site.study.digest(), run=token)
    found = read_plan(folder / AGREED)
    if found is None:
        raise OwnTroubleError("no-plan", f"{folder} has no plan; the coordinator will send it again.")
    return found[0], folder


def _answers(
    site: _Site, asked: Sequence[Question], parts: Mapping[str, Rows], x: np.ndarray | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the keys of the questions that the site answers, and the arrays of the answers."""
    known = questions_in(site.study)
    if wrong := [one.query.name for one in asked if one.query.name not in known]:
        raise NestfedError(f"The coordinator asks {wrong[0]!r}, which this study does not need.")
    found = answered(asked, parts, site.node.min_cell, x)
    for key in found:
        LOG.info("answering %s", key)
    site.audit.add("questions answered", questions=list(found), group=site.words.get("group"))
    return list(found), {f"{key}.{k}": v for key, reply in found.items() for k, v in reply.items()}


def _work(site: _Site, asked: Sequence[Question]) -> bytes:
    study, node, words = site.study, site.node, site.words
    agreement, folder = _agreed(site)
    training = Training.from_json(words["training"]) if "training" in words else None
    made, name = site.made(agreement, folder, training), ""
    if training is not None:
        study, name = training.experiment(study), f" {training.name}"
        folder /= hashlib.sha256(training.name.encode()).hexdigest()[:12]
    run, exchange, execution = study.run, study.exchange, study.execution
    n = node.place.n
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
            said["answered"], arrays = _answers(site, asked, parts, method.solution(shared, {}).numpy())
    if words["train"]:
        problem.inspect(first_batch(problem, clients, run.seed, n))  # it may draw random numbers
        template = method.init(problem, problem.x0)
        identity = f"{site.study.digest()} {words['token']}{name} client {n}"
        store = Versions(folder, identity, private_fields(method, template, exchange.encoding))
        precision = torch.bfloat16 if execution.precision == "bf16" else None
        local = Local(
            problem, method, clients, store, run.seed, exchange, precision=precision, pieces=execution.accumulate,
            template=template,
        )  # fmt: skip
        upload = _upload(local, order, shared)
        arrays |= numbers({k: v[0] for k, v in upload.fields.items()}, FIELDS)
        arrays |= numbers({k: v[0] for k, v in upload.gathered.items()}, GATHERED)
        loss = {} if bool(upload.loss.isnan()) else {"loss": float(upload.loss)}  # a problem may record none
        site.audit.add("update sent", training=name.strip(), round=order.number, examples=upload.examples)
        said["report"] = {"moved": float(upload.moved), "examples": upload.examples, **loss}
    return site.reply(arrays, **said)


def _upload(local: Local, order: Order, received: Fields) -> Upload:
    """Run this site's round; raise if its numbers become infinite or NaN."""
    kept = Reply({})
    with torch.no_grad():
        for upload in local.uploads(order, received, kept):
            return upload
    raise DivergedError(next(iter(kept.dropped.values())))
