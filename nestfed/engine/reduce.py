"""Reductions in place of the mean, for when some clients may be broken or hostile.

A reduction replaces the mean over the clients' uploads in every shared field. The coordinate-wise ones need all uploads
of a round at once, so their memory grows with participants × numbers sent; the mean and the clipped mean do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError

_PIECE = 2**22
"""Numbers that are sorted at once, so that sorting needs no second copy of all uploads."""


@dataclass(frozen=True)
class Reduction:
    """What the server makes of the clients' uploads."""

    kind: str = "mean"
    amount: float = 0.0
    """The share that is cut off at each end (trimmed), or the largest norm of a change (clip)."""

    @classmethod
    def parse(cls, text: str) -> Reduction:
        """Read mean, median, trimmed:SHARE or clip:NORM."""
        kind, colon, number = text.partition(":")
        try:
            amount = float(number) if colon else 0.0
        except ValueError:
            amount = float("nan")
        good = {
            "mean": not colon,
            "median": not colon,
            "trimmed": 0 < amount < 0.5,
            "clip": 0 < amount < float("inf"),
        }
        if not good.get(kind):
            raise NestfedError(
                "exchange.reduce must be mean, median, trimmed:SHARE with a share between 0 and 0.5, or clip:NORM with a norm "
                f"above 0, not {text!r}."
            )
        return cls(kind, amount)

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}" if self.amount else self.kind

    @property
    def plain(self) -> bool:
        """It is the mean."""
        return self.kind == "mean"

    @property
    def tabled(self) -> bool:
        """It needs all uploads at once, one row each."""
        return self.kind in ("median", "trimmed")

    @property
    def clips(self) -> bool:
        """It adds up clipped changes instead of uploads."""
        return self.kind == "clip"

    def clipped(self, upload: Fields, base: Fields) -> dict[str, Tensor]:
        """Return the changes against the broadcast, one row per client, shrunk so that all fields jointly fit the norm."""
        changes = {k: v - base[k] for k, v in upload.items()}
        # In the order of the names, so that the last bit does not depend on who put the fields together.
        norms = [v.double().reshape(len(v), v[:1].numel()).square().sum(1) for _, v in sorted(changes.items())]
        squares = torch.stack(norms).sum(0)
        factor = (self.amount / squares.sqrt().clamp_min(1e-300)).clamp(max=1.0)
        return {k: v * factor.to(v.dtype).view(-1, *[1] * (v.dim() - 1)) for k, v in changes.items()}

    def over(self, rows: Tensor) -> Tensor:
        """Return the reduction of uploads, one row each, coordinate by coordinate."""
        count = len(rows)
        # The median is what trimming leaves at the most: one or two rows.
        cut = (count - 1) // 2 if self.kind == "median" else int(self.amount * count)
        flat = rows.reshape(count, -1)
        width = max(1, _PIECE // count)
        pieces = [
            flat[:, i : i + width].sort(0).values[cut : count - cut].mean(0) for i in range(0, flat.shape[1], width)
        ]
        return torch.cat(pieces).view(rows.shape[1:]) if pieces else rows.new_zeros(rows.shape[1:])
