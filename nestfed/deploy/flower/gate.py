"""Check a site's whole answer before any of it is used: first its header, then its arrays, then what they mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Fields
from nestfed.deploy.wire import Packed, RejectedError, tensors
from nestfed.engine.encode import wire_form
from nestfed.engine.options import Exchange
from nestfed.engine.program import TAP
from nestfed.engine.round import Fold, Order, Upload
from nestfed.queries import Answers, Arrays, AtMost, Question
from nestfed.queries.slots import Slot

FIELDS, GATHERED = "fields.", "gathered."
MOST_GATHERED = 10_000_000
"""The largest accepted contribution of a site to the gathered tables, in bytes."""


@contextmanager
def inside() -> Iterator[None]:
    """Turn any error about an answer into a reason to drop it."""
    try:
        yield
    except RejectedError:
        raise
    except Exception as error:  # a hostile answer can raise anything
        raise RejectedError(f"it cannot be used ({type(error).__name__}: {error})"[:300]) from error


def answers_of(
    packed: Packed, arrays: Arrays, questions: Collection[Question], most_rows: Mapping[str, int]
) -> Answers:
    """Return a site's answers, or raise; `most_rows`: the rows of each part that it declared when it registered."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for one in questions:
        if one.key in answered_by(packed):
            prefix = f"{one.key}."
            reply = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if sentence := one.query.invalid(reply, most_rows.get(one.part), **one.arguments):
                raise RejectedError(sentence)
            found[one.key] = reply
    return found


def answered_by(packed: Packed) -> list[str]:
    """Return the keys of the questions that a site says it answers."""
    named = packed.words.get("answered", [])
    if not isinstance(named, list) or not all(isinstance(key, str) for key in named):
        raise RejectedError("its list of answers is invalid.")
    return named


def answer_slots(packed: Packed, questions: Collection[Question]) -> dict[str, Slot]:
    """Return the arrays that the answers to these questions must have; a site may leave out whole answers."""
    named = answered_by(packed)
    return {
        f"{one.key}.{k}": slot
        for one in questions
        if one.key in named
        for k, slot in one.query.slots(**one.arguments).items()
    }


def most_bytes(questions: Collection[Question]) -> int:
    """Return the largest number of bytes of the answers to these questions."""
    return sum(one.query.most_bytes(**one.arguments) for one in questions)


@dataclass(frozen=True)
class Gate:
    """Checks the uploads of one round."""

    order: Order
    shared: Fields
    point: str
    exchange: Exchange
    norm_limit: float
    """The largest accepted norm of a change; 0 = no limit."""
    fold: Fold
    gathered: Mapping[str, int]
    """The fields of a contribution to the gathered tables, with their number of axes."""

    def slots(self) -> dict[str, Slot]:
        """Return the arrays that an upload must have."""
        form = wire_form(self.exchange.encoding.up, self.shared)
        if self.order.tapped:
            x = self.shared[self.point]
            form[TAP] = (x.dtype, tuple(x.shape))
        found = {f"{FIELDS}{k}": Slot(_name(dtype), shape) for k, (dtype, shape) in form.items()}
        number = self.shared[self.point].dtype
        size = AtMost(MOST_GATHERED)  # only the sites know the sizes; `most_bytes` bounds them
        return found | {f"{GATHERED}{k}": Slot(_name(number), (size,) * axes) for k, axes in self.gathered.items()}

    def most_bytes(self) -> int:
        """Return the largest number of bytes of an upload."""
        own = sum(slot.most_bytes for k, slot in self.slots().items() if k.startswith(FIELDS))
        return own + MOST_GATHERED * bool(self.gathered)

    def checked(self, n: int, packed: Packed, arrays: Arrays, first: Upload | None) -> Upload:
        """Return client n's upload, or raise; `first`: the round's first upload, whose contribution has the right shape."""
        fields, rows = tensors(arrays, FIELDS), tensors(arrays, GATHERED)
        for k, value in (*fields.items(), *rows.items()):
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RejectedError(f"its {k} holds infinite or NaN values.")
        for k, value in rows.items():
            if first is not None and value.shape != first.gathered[k].shape[1:]:
                shape = tuple(first.gathered[k].shape[1:])
                raise RejectedError(f"its {k} has shape {tuple(value.shape)}, but that of other sites is {shape}.")
        loss, moved, examples = _report(packed)
        changes = {k: v[None] for k, v in fields.items()}
        self._check_change(changes)
        place = self.order.asked.index(n)
        numbers = torch.tensor([[math.nan if loss is None else loss], [moved]], dtype=torch.float64)
        upload = Upload([n], [place], changes, numbers[0], numbers[1], examples)
        upload.gathered = {k: v[None] for k, v in rows.items()}
        return upload

    def _check_change(self, rows: Mapping[str, Tensor]) -> None:
        values, base = self.fold.decoded(rows), self.fold.base
        norm = math.sqrt(sum(float(((values[k][0] - base[k]) ** 2).sum()) for k in self.shared))
        if not math.isfinite(norm):
            raise RejectedError("its change is infinite or NaN.")
        if self.norm_limit and norm > self.norm_limit:
            raise RejectedError(f"its change has norm {norm:.4g}, above the limit of {self.norm_limit:g}.")


def _report(packed: Packed) -> tuple[float | None, float, int]:
    """Return an upload's loss, movement and number of examples."""
    report = packed.words.get("report")
    if not isinstance(report, dict) or set(report) - {"loss"} != {"moved", "examples"}:
        raise RejectedError("its report is invalid.")
    loss, moved, examples = report.get("loss"), report["moved"], report["examples"]
    if type(moved) not in (int, float) or type(examples) is not int or type(loss) not in (int, float, type(None)):
        raise RejectedError("its report is invalid.")
    if not (math.isfinite(loss or 0.0) and math.isfinite(moved) and moved >= 0 and 0 <= examples < 2**53):
        raise RejectedError("its loss, movement or number of examples is not a valid number.")
    return loss, float(moved), examples


def _name(dtype: torch.dtype) -> str:
    return torch.empty(0, dtype=dtype).numpy().dtype.str
