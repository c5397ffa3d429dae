"""What messages say: versions, the study, the sites' agreement, and the shared fields as they cross the network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError, __version__
from nestfed.deploy.app import reject_warm_up
from nestfed.deploy.wire import RejectedError, numbers, pack, tensors, unpack
from nestfed.engine.encode import Encoding, squeeze
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.files import write_atomically
from nestfed.queries import QUERIES, Question
from nestfed.queries.agreement import Agreement

if TYPE_CHECKING:
    from nestfed.experiment.build import Assembly
    from nestfed.experiment.spec import RunSpec

PROTOCOL = 5
"""Increased when messages change."""

SHARED, TABLES, PLAN, QUESTION, PARAMETERS = "shared.", "tables.", "plan.", "question.", "parameters"
"""How the names of a message's arrays begin."""

TROUBLES = {
    "another-experiment": "it runs another experiment, or another version of this one",
    "another-version": f"it does not run nestfed {__version__} with protocol {PROTOCOL}",
    "lost-state": "its private fields of its last round are missing; restore its `state` folder, or set "
    "lost-state to restart",
    "no-plan": "it has no plan yet",
    "no-experiment": "it takes part in experiment files only, and this study is written in Python; to run the study's code, "
    "start its SuperNode with --isolation subprocess",
    "diverged": "its numbers became infinite or NaN; see its log",
    "withdrawn": "it has withdrawn from the study",
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


def stamp_of(study: Any, **more: Any) -> dict[str, Any]:
    """Return the words that every message has: protocol, version, experiment."""
    return {"protocol": PROTOCOL, "version": __version__, "digest": study.digest(), **more}


def mismatch(study: Any, stamp: Mapping[str, Any]) -> str:
    """Return the kind of mismatch between a stamp and our own, or nothing."""
    if stamp.get("protocol") != PROTOCOL or stamp.get("version") != __version__:
        return "another-version"
    return "another-experiment" if stamp.get("digest") != study.digest() else ""


def broadcast(encoding: Encoding, shared: Fields) -> dict[str, np.ndarray]:
    """Encode the shared fields for the sites."""
    sent = {k: squeeze(encoding.down, v)[""] for k, v in shared.items()} if encoding.down else shared
    return numbers(sent, SHARED)


def received(encoding: Encoding, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Decode the shared fields of a broadcast."""
    fields = tensors(arrays, SHARED)
    return {k: v.view(torch.bfloat16) for k, v in fields.items()} if encoding.down == "bfloat16" else fields


def questions_packed(questions: Sequence[Question]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return questions as the words and arrays of a message."""
    words: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for i, one in enumerate(questions):
        plain = {k: v for k, v in one.arguments.items() if not isinstance(v, np.ndarray)}
        words.append({"query": one.query.name, "part": one.part, "arguments": plain})
        arrays |= {f"{QUESTION}{i}.{k}": v for k, v in one.arguments.items() if isinstance(v, np.ndarray)}
    return words, arrays


def questions_of(words: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Question]:
    """Return the questions that `questions_packed` wrote."""
    found = []
    for i, one in enumerate(words):
        prefix = f"{QUESTION}{i}."
        given = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        found.append(Question(QUERIES[one["query"]], one["part"], {**one["arguments"], **given}))
    return found


def write_plan(path: Path, plan: Agreement, token: str) -> None:
    """Save the agreement, so that the run can be resumed."""
    words, arrays = plan.packed()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pack({"plan": words, "token": token}, arrays))


def read_plan(path: Path) -> tuple[Agreement, str] | None:
    """Return the saved agreement and the run's token."""
    if not path.exists():
        return None
    try:
        found = unpack(path.read_bytes())
        return Agreement.unpacked(found.words["plan"], found.arrays()), str(found.words["token"])
    except (RejectedError, KeyError, ValueError, TypeError) as error:
        raise NestfedError(f"{path} is damaged: delete it, or start in another directory.") from error
