"""Check a site's whole upload before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.engine.encode import wire_form
from nestfed.engine.options import Exchange
from nestfed.engine.program import TAP
from nestfed.engine.round import Fold, Order, Upload


class RejectedError(NestfedError):
    """An answer that must not be used."""


class TroubleError(RejectedError):
    """A site reports an error of its own."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


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

    def checked(self, n: int, fields: Mapping[str, Tensor], loss: float | None, moved: float, examples: int) -> Upload:
        """Return client n's upload, or raise."""
        form = wire_form(self.exchange.encoding.up, self.shared)
        if self.order.tapped:
            x = self.shared[self.point]
            form[TAP] = (x.dtype, tuple(x.shape))
        if set(fields) != set(form):
            raise RejectedError(f"it sent {', '.join(sorted(fields)) or 'nothing'} instead of {', '.join(form)}.")
        for k, (dtype, shape) in form.items():
            value = fields[k]
            if tuple(value.shape) != shape:
                raise RejectedError(f"its {k} has shape {tuple(value.shape)} instead of {shape}.")
            if value.dtype != dtype:
                raise RejectedError(f"its {k} is {value.dtype} instead of {dtype}.")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RejectedError(f"its {k} holds infinite or NaN values.")
        if not (math.isfinite(loss or 0.0) and math.isfinite(moved) and examples >= 0):
            raise RejectedError("its loss, movement or number of examples is not a number.")
        rows = {k: v[None] for k, v in fields.items()}
        self._check_change(rows)
        place = self.order.asked.index(n)
        numbers = torch.tensor([[math.nan if loss is None else loss], [moved]], dtype=torch.float64)
        return Upload([n], [place], rows, numbers[0], numbers[1], examples)

    def contribution(self, fields: Mapping[str, Tensor], names: Collection[str], first: Upload | None) -> Fields:
        """Return a client's contribution to the tables as one row, or raise.

        Only the sites know its shape, so it must be that of the round's first upload.
        """
        if set(fields) != set(names):
            raise RejectedError(
                f"it contributed {', '.join(sorted(fields)) or 'nothing'} instead of {', '.join(names)}."
            )
        for k, value in fields.items():
            if value.dtype != self.shared[self.point].dtype:
                raise RejectedError(f"its {k} is {value.dtype} instead of {self.shared[self.point].dtype}.")
            if not bool(torch.isfinite(value).all()):
                raise RejectedError(f"its {k} holds infinite or NaN values.")
            if first is not None and value.shape != first.gathered[k].shape[1:]:
                shape = tuple(first.gathered[k].shape[1:])
                raise RejectedError(f"its {k} has shape {tuple(value.shape)}, but that of other sites is {shape}.")
        return {k: v[None] for k, v in fields.items()}

    def _check_change(self, rows: Fields) -> None:
        values, base = self.fold.decoded(rows), self.fold.base
        norm = math.sqrt(sum(float(((values[k][0] - base[k]) ** 2).sum()) for k in self.shared))
        if not math.isfinite(norm):
            raise RejectedError("its change is infinite or NaN.")
        if self.norm_limit and norm > self.norm_limit:
            raise RejectedError(f"its change has norm {norm:.4g}, above the limit of {self.norm_limit:g}.")
