"""AUROC from batches that hold both classes: as many positives as negatives, weighted so that the objective is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Data
from nestfed.data.clients import _Held, without_replacement
from nestfed.data.random import Purpose
from nestfed.problems.auroc import AUROC
from nestfed.problems.base import Model


@dataclass(frozen=True)
class Balanced(_Held):
    """Clients whose batches (x, y, weight) are half positives, half negatives; the arrays are (x, y), y in {0, 1}.

    With p_n the client's share of positives, p the mean of all, and k of b examples positive, a positive weighs
    (p_n/2p)·b/k and a negative ((1−p_n)/2(1−p))·b/(b−k): in the mean over clients every positive counts as it does in
    plain batches, and so does every negative. A client of one class draws from that class.
    """

    batch: int = field(default=32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = self.arrays[1].cpu().numpy()
        split = [(part[labels[part] == 1], part[labels[part] != 1]) for part in self.parts]
        rates = np.array([len(p) / (len(p) + len(q)) for p, q in split])
        positives = np.array([_positives(self.batch, len(p), len(q)) for p, q in split])
        b, p = self.batch, float(np.clip(rates.mean(), 1e-9, 1 - 1e-9))
        weights = torch.zeros(len(split), b)
        for n, (rate, k) in enumerate(zip(rates, positives)):
            weights[n, :k] = rate / (2 * p) * b / max(k, 1)
            weights[n, k:] = (1 - rate) / (2 * (1 - p)) * b / max(b - k, 1)
        for name, value in (("_split", split), ("_positives", positives), ("_weights", weights)):
            object.__setattr__(self, name, value)

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw positives, then negatives."""
        positives, negatives = self._split[n]  # type: ignore[attr-defined]
        k = int(self._positives[n])  # type: ignore[attr-defined]
        generator = self._streams.at(Purpose.BATCH, n, t)  # type: ignore[attr-defined]
        some = [
            rows[without_replacement(generator, len(rows), size)]
            for rows, size in ((positives, k), (negatives, self.batch - k))
            if size
        ]
        return np.concatenate(some)

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int) -> Data:
        """Add the weights."""
        x, y = gathered
        return x, y, self._weights[list(ns)].to(x.device)  # type: ignore[attr-defined]


def _positives(batch: int, positives: int, negatives: int) -> int:
    if not positives:
        return 0
    return batch // 2 if negatives else batch


class BalancedAUROC(AUROC):
    """The AUROC problem divided by 4p(1−p), for batches (x, y, weight) from `Balanced`.

    Divided so, it is the problem with p = ½, and a step size means the same whatever the share of positives.
    """

    def __init__(self, model: nn.Module, *, clip: float | None = None) -> None:
        super().__init__(model, p=0.5, clip=clip)

    def _objective(self, model: Model, w: Tensor, batch: Data) -> Tensor:
        x, y, weight = batch
        h, a, b = model(x)
        w = w[0]
        positive = (h - a) ** 2 - 2 * (1 + w) * h
        negative = (h - b) ** 2 + 2 * (1 + w) * h
        return 0.5 * (weight * torch.where(y == 1, positive, negative)).mean() - w**2 / 4

    def _classes(self, data: Data, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x, y, weight = data
        return x, 2 * weight.to(dtype) * (y != 1), 2 * weight.to(dtype) * (y == 1)
