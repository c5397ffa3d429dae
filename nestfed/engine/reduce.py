"""Robust alternatives to the mean, for federations in which some clients may be broken or hostile.

A reduction combines the clients' uploads in every shared field. Coordinate-wise reductions need all uploads of a round
at once, so their memory grows with participants × numbers sent. The mean and the clipped mean need only sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError

_PIECE = 2**22
"""Numbers to sort at a time, so that sorting needs no second copy of all uploads."""


@dataclass(frozen=True)
class Reduction:
    """How the server combines the clients' uploads."""

    kind: str = "mean"
    amount: float = 0.0
    """The share cut off at each end (trimmed), or the largest norm of a change (clip)."""

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
        """Whether it is the mean."""
        return self.kind == "mean"

    @property
    def tabled(self) -> bool:
        """Whether it needs all uploads at once, one row each."""
        return self.kind in ("median", "trimmed")

    @property
    def clips(self) -> bool:
        """Whether it sums clipped changes instead of uploads."""
        return self.kind == "clip"

    def clipped(self, upload: Fields, base: Fields) -> dict[str, Tensor]:
        """Return the changes against the broadcast, one row per client, with the joint norm of all fields clipped."""
        changes = {k: v - base[k] for k, v in upload.items()}
        # Sum in the order of the names, so that the last bit does not depend on the order of the fields.
        norms = [v.double().reshape(len(v), v[:1].numel()).square().sum(1) for _, v in sorted(changes.items())]
        squares = torch.stack(norms).sum(0)
        factor = (self.amount / squares.sqrt().clamp_min(1e-300)).clamp(max=1.0)
        return {k: v * factor.to(v.dtype).view(-1, *[1] * (v.dim() - 1)) for k, v in changes.items()}

    def over(self, rows: Tensor) -> Tensor:
        """Return the reduction of uploads, one row each, coordinate by coordinate."""
        count = len(rows)
        # The median trims as much as possible: one or two rows remain.
        cut = (count - 1) // 2 if self.kind == "median" else int(self.amount * count)
        flat = rows.reshape(count, -1)
        width = max(1, _PIECE // count)
        pieces = [
            flat[:, i : i + width].sort(0).values[cut : count - cut].mean(0) for i in range(0, flat.shape[1], width)
        ]
        return torch.cat(pieces).view(rows.shape[1:]) if pieces else rows.new_zeros(rows.shape[1:])
