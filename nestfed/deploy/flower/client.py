"""A site: answers the coordinator's messages and logs its own errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from nestfed.algorithms.buffered import with_buffers
from nestfed.core import DivergedError, Fields, NestfedError, as_clients, unknown
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.messages import (
    Custom,
    arrays_of,
    as_record,
    facts_record,
    fields_of,
    mismatch,
    number_record,
    plan_of,
    read_plan,
    stamp_of,
    study_of,
    tensors_of,
    write_plan,
)
from nestfed.engine.local import Local
from nestfed.engine.probe import first_batch
from nestfed.engine.program import span_from
from nestfed.engine.round import Order, Reply, Upload
from nestfed.engine.store import LostStateError, Versions, private_fields

if TYPE_CHECKING:
    from nestfed.deploy.site import Place

LOG = logging.getLogger(__name__)


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
        from nestfed.deploy.site import Place

        known = ("client", "site", "data", "state", "experiment", "threads")
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
        return cls(
            Place(n, data), name, Path(str(state)), str(config.get("experiment", "")), int(config.get("threads", 0))
        )


def client_app(source: Any) -> ClientApp:
    """Return a site's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _hello(study_of(source), message, context))

    @app.query("spread")
    def spread(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _spread(study_of(source), message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _work(study_of(source), message, context, training=True))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _safely(message, lambda: _work(study_of(source), message, context, training=False))

    return app


def _safely(message: Message, act: Callable[[], RecordDict]) -> Message:
    """Always answer. An error message may quote the site's data, so it stays in the site's log."""
    with shown_by_flower():
        try:
            content = act()
        except _TroubleError as trouble:
            LOG.warning("%s", trouble)
            content = _trouble(trouble.kind)
        except DivergedError as error:
            LOG.warning("%s", error)
            content = _trouble("diverged")
        except LostStateError as error:
            LOG.warning("%s", error)
            content = _trouble("lost-state")
        except Exception:
            LOG.exception("this site failed.")
            content = _trouble("failed")
    return Message(content, reply_to=message)


class _TroubleError(NestfedError):
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _trouble(kind: str) -> RecordDict:
    return RecordDict({"trouble": ConfigRecord({"kind": kind})})


def _site(study: Any, message: Message, context: Context) -> tuple[_Node, Mapping[str, Any]]:
    """Return the site's configuration and the order; raise if the site must not take part."""
    node = _Node.read(context.node_config)
    if node.threads:
        torch.set_num_threads(node.threads)
    order: Mapping[str, Any] = message.content["order"]
    if kind := mismatch(study, order):
        raise _TroubleError(kind, f"the coordinator runs another experiment or version: {dict(order)}.")
    if node.pinned and node.pinned != study.digest():
        raise _TroubleError(
            "another-experiment", f"this site takes part in experiment {node.pinned}, not in {study.digest()}."
        )
    return node, order


def _hello(study: Any, message: Message, context: Context) -> RecordDict:
    from nestfed.deploy.site import Facts, facts

    node, _ = _site(study, message, context)
    if isinstance(study, Custom):
        found = Facts(examples=as_clients(study.make().clients).examples(node.place.n))
    else:
        found = facts(study, node.place)
    return facts_record(found, stamp_of(study, client=node.place.n, site=node.name))


def _spread(study: Any, message: Message, context: Context) -> RecordDict:
    from nestfed.deploy.site import spread

    node, _ = _site(study, message, context)
    plan = plan_of(message.content["plan"], arrays_of(message.content["scaling"]))  # type: ignore[arg-type]
    return RecordDict({"site": stamp_of(study), "squares": number_record({"squares": spread(study, node.place, plan)})})


def _work(study: Any, message: Message, context: Context, training: bool) -> RecordDict:
    from nestfed.deploy.site import Made, at_site

    node, words = _site(study, message, context)
    run, exchange, execution = study.run, study.exchange, study.execution
    token = str(words["token"])
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        raise NestfedError("The order has no valid token.")
    folder = node.state / token
    if "plan" in message.content:
        plan = plan_of(message.content["plan"], arrays_of(message.content["scaling"]))  # type: ignore[arg-type]
        write_plan(folder / "plan.safetensors", plan, token)
    found = read_plan(folder / "plan.safetensors")
    if found is None:
        raise _TroubleError("no-plan", f"{folder} has no plan; the coordinator will send it again.")
    plan = found[0]
    n = node.place.n
    made = Made(study.make(), lambda model: {}) if isinstance(study, Custom) else at_site(study, node.place, plan)
    problem = made.assembly.problem
    method = with_buffers(problem, made.assembly.algorithm, study.evaluation.keep)
    clients = as_clients(made.assembly.clients).seeded(run.seed)
    received = {
        k: v.to(problem.x0.dtype)
        for k, v in fields_of(exchange.encoding, message.content["shared"]).items()  # type: ignore[arg-type]
    }
    sent = tensors_of(message.content["tables"]) if "tables" in message.content else {}  # type: ignore[arg-type]
    tables = {k: v.to(problem.x0.dtype) for k, v in sent.items()}
    span = span_from(method, int(words["t"]), run.q)
    order = Order(int(words["round"]), span, [n], [int(words["seen"])], int(words["tap"]), tables=tables)
    reply = RecordDict({"answer": stamp_of(study, token=token, client=n, round=order.round)})
    if words["evaluate"]:
        with torch.no_grad():
            reply["tally"] = number_record(made.tally(problem.bind(method.solution(received, {}))))
    if training:
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
        upload = _upload(local, order, received)
        reply["fields"] = as_record({k: v[0] for k, v in upload.fields.items()})
        if upload.gathered:
            reply["gathered"] = as_record({k: v[0] for k, v in upload.gathered.items()})
        loss = {} if bool(upload.loss.isnan()) else {"loss": float(upload.loss)}  # a problem may record none
        reply["report"] = MetricRecord({"moved": float(upload.moved), "examples": upload.examples, **loss})
    return reply


def _upload(local: Local, order: Order, received: Fields) -> Upload:
    """Run this site's round; raise if its numbers become infinite or NaN."""
    kept = Reply({})
    with torch.no_grad():
        for upload in local.uploads(order, received, kept):
            return upload
    raise DivergedError(next(iter(kept.dropped.values())))
