"""Convert arrays, plans and facts to messages and back, and check versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays
from torch import Tensor

from nestfed.core import Fields, NestfedError, __version__
from nestfed.data.clients import Totals
from nestfed.data.encoding import Schema, Sums, TableEncoding, schema_from_json, schema_to_json
from nestfed.deploy.app import reject_warm_up
from nestfed.deploy.flower.gate import RejectedError
from nestfed.engine.encode import Encoding, squeeze
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.files import write_atomically

if TYPE_CHECKING:
    from nestfed.deploy.site import Agreement, Facts
    from nestfed.experiment.build import Assembly
    from nestfed.experiment.spec import RunSpec

PROTOCOL = 3
"""Increased when messages change."""

TROUBLES = {
    "another-experiment": "it runs another experiment, or another version of this one",
    "another-version": f"it does not run nestfed {__version__} with protocol {PROTOCOL}",
    "lost-state": "its private fields of its last round are missing; restore its `state` folder, or set "
    "lost-state to restart",
    "no-plan": "it has no plan yet",
    "diverged": "its numbers became infinite or NaN; see its log",
    "failed": "it failed; see its log",
}


@dataclass(frozen=True)
class Custom:
    """A problem written in Python instead of an experiment file. Every site and the coordinator call `make`."""

    name: str
    make: Callable[[], Assembly]
    run: RunSpec
    evaluation: Evaluation = Evaluation()
    exchange: Exchange = Exchange()
    execution: Execution = Execution()

    def resolved(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        tables = {k: asdict(getattr(self, k)) for k in ("run", "evaluation", "exchange", "execution")}
        return {"custom": self.name, "algorithm": repr(self.make().algorithm), **tables}

    @cached_property  # every message has it, and `make` may read data
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()[:10]

    def digest(self) -> str:
        """Return a short hash of these settings."""
        return self._digest


def study_of(source: Any) -> Any:
    """Read an experiment file; return an `Experiment` or `Custom` unchanged."""
    from nestfed.experiment.spec import Experiment, read

    study = read(source) if isinstance(source, str | Path) else source
    if isinstance(study, Experiment):
        reject_warm_up(study)
    return study


def as_record(fields: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert fields to a record."""
    return ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in fields.items()})


def number_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Convert arrays to a record."""
    return ArrayRecord({k: Array(np.ascontiguousarray(v).reshape(v.shape)) for k, v in arrays.items()})


def arrays_of(record: ArrayRecord, most: int | None = None) -> dict[str, np.ndarray]:
    """Decode arrays (never pickles) after checking their size."""
    if most is not None and sum(len(a.data) for a in record.values()) > most:
        raise RejectedError("it sent more bytes than allowed.")
    try:
        return {k: np.array(a.numpy()) for k, a in record.items()}
    except Exception as error:  # a hostile header can raise anything, from TokenError to MemoryError
        raise RejectedError("it sent arrays that cannot be read.") from error


def tensors_of(record: ArrayRecord, most: int | None = None) -> dict[str, Tensor]:
    """Decode tensors."""
    try:
        return {k: torch.from_numpy(a) for k, a in arrays_of(record, most).items()}
    except TypeError as error:
        raise RejectedError("it sent arrays of an unsupported type.") from error


def stamp_of(study: Any, **more: Any) -> ConfigRecord:
    """Return the header of every message: protocol, version, experiment."""
    return ConfigRecord({"protocol": PROTOCOL, "version": __version__, "digest": study.digest(), **more})


def mismatch(study: Any, stamp: Mapping[str, Any]) -> str:
    """Return the kind of mismatch between a stamp and our own, or nothing."""
    if stamp.get("protocol") != PROTOCOL or stamp.get("version") != __version__:
        return "another-version"
    return "another-experiment" if stamp.get("digest") != study.digest() else ""


def broadcast_record(encoding: Encoding, shared: Fields) -> ArrayRecord:
    """Encode the shared fields for the sites."""
    return as_record({k: squeeze(encoding.down, v)[""] for k, v in shared.items()} if encoding.down else shared)


def fields_of(encoding: Encoding, record: ArrayRecord) -> dict[str, Tensor]:
    """Decode the shared fields of a broadcast."""
    fields = tensors_of(record)
    return {k: v.view(torch.bfloat16) for k, v in fields.items()} if encoding.down == "bfloat16" else fields


def _columns(words: Mapping[str, Any]) -> Schema:
    try:
        return schema_from_json(json.loads(words["columns"]))
    except RecursionError as error:  # hostile nesting
        raise ValueError("the columns cannot be read") from error


def facts_record(facts: Facts, words: ConfigRecord) -> RecordDict:
    """Convert a site's facts to a message that starts with `words`."""
    sums = facts.sums
    words["examples"], words["positives"] = facts.examples, facts.positives
    words["shape"], words["classes"] = list(facts.shape), list(facts.classes)
    words["columns"] = json.dumps(schema_to_json(sums.schema))
    return RecordDict({"site": words, "sums": number_record({"known": sums.known, "total": sums.total})})


def facts_of(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Facts:
    """Read the facts of a message; raise ValueError, KeyError or TypeError if they are inconsistent."""
    from nestfed.deploy.site import Facts

    sums = Sums(_columns(words), int(words["examples"]), arrays["known"], arrays["total"])
    found = Facts(
        int(words["examples"]), int(words["positives"]), tuple(words["shape"]), tuple(words["classes"]), sums
    )  # fmt: skip
    width = (sum(map(len, sums.schema)),)
    good = sums.known.shape == sums.total.shape == width and np.isfinite(sums.total).all()
    good = good and ((sums.known >= 0) & (sums.known <= sums.rows)).all()
    if not good or not 0 <= found.positives <= found.examples:
        raise ValueError("its counts and sums are inconsistent.")
    return found


def plan_record(plan: Agreement) -> tuple[ConfigRecord, ArrayRecord]:
    """Convert the agreement to records."""
    words: dict[str, Any] = {"clients": plan.clients, "shape": list(plan.shape), "p": plan.p}
    words["totals"] = list(astuple(plan.totals))
    words |= {"classes": list(plan.classes), "columns": json.dumps(schema_to_json(plan.encoding.schema))}
    return ConfigRecord(words), number_record(_scaling(plan))


def _scaling(plan: Agreement) -> dict[str, np.ndarray]:
    encoding = plan.encoding
    return {"mean": encoding.mean, "deviation": encoding.deviation, "gaps": encoding.gaps.astype(np.uint8)}


def plan_of(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Agreement:
    """Read the agreement from a message or a file."""
    from nestfed.deploy.site import Agreement

    schema = _columns(words)
    numbers = arrays["mean"], arrays["deviation"], arrays["gaps"].astype(bool)
    if any(a.shape != (sum(map(len, schema)),) for a in numbers):
        raise ValueError("the numbers of columns and scales differ")
    encoding = TableEncoding(schema, *numbers)
    return Agreement(
        int(words["clients"]), tuple(words["shape"]), tuple(words["classes"]), float(words["p"]), encoding,
        Totals(*map(int, words.get("totals", (0, 0, 0)))),
    )  # fmt: skip


def write_plan(path: Path, plan: Agreement, token: str) -> None:
    """Save the agreement, so that the run can be resumed."""
    words, _ = plan_record(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save_arrays(_scaling(plan), {"plan": json.dumps(dict(words)), "token": token}))


def read_plan(path: Path) -> tuple[Agreement, str] | None:
    """Return the saved agreement and the run's token."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            words = file.metadata()
            return plan_of(json.loads(words["plan"]), {k: file.get_tensor(k) for k in file.keys()}), words["token"]  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NestfedError(f"{path} is damaged: delete it, or start in another directory.") from error
