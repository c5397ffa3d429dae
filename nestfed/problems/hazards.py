"""Discrete-time hazards: survival as one logistic regression per interval of time, for any network.

The log-likelihood is a plain sum over rows, so every plain method trains it, FedAvg first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Data, NestfedError
from nestfed.problems.base import Minimize, Model


def interval_labels(time: Any, event: Any, ends: Sequence[float]) -> Tensor:
    """Return for every row and interval whether the event happened there, (n, intervals); NaN = not observed.

    - `ends`: the ends e_1 < e_2 < … of the intervals (0, e_1], (e_1, e_2], …

    A row with an event is 0 in the intervals before it, 1 in its own, NaN after it. A censored row is 0 in the intervals that
    it survived whole, NaN after them. Events after the last end count as survival.
    """
    t, died, e = np.asarray(time, float), np.asarray(event).astype(bool), np.asarray(ends, float)
    if t.ndim != 1 or t.shape != died.shape or not np.isfinite(t).all() or (t < 0).any():
        raise NestfedError("interval_labels needs one known time from 0 and one event (0/1) for every row.")
    if not len(e) or e[0] <= 0 or (np.diff(e) <= 0).any():
        raise NestfedError(f"The ends of intervals must be positive and increase, not {list(ends)}.")
    survived = t[:, None] >= e
    labels = np.where(survived, 0.0, np.nan)
    place = np.searchsorted(e, t)  # the interval (e_{k−1}, e_k] of each time
    inside = died & (place < len(e))
    labels[inside, place[inside]] = 1.0
    return torch.from_numpy(labels.astype(np.float32))


def hazard_loss(model: Model, batch: Data) -> Tensor:
    """Return minus the mean log-likelihood of a batch (x, labels); the model returns one logit per interval."""
    x, labels = batch
    logits = model(x)
    if logits.shape != labels.shape:
        raise NestfedError(
            f"The model returns shape {tuple(logits.shape)}, expected {tuple(labels.shape)}: one logit per row and interval."
        )
    known = ~torch.isnan(labels)
    target = torch.where(known, labels, 0.0).to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(known, losses, 0.0).sum(1).mean()


def survival(logits: Tensor) -> Tensor:
    """Return the probability of surviving every interval, (n, intervals), from one logit of the hazard per interval."""
    return F.logsigmoid(-logits).cumsum(-1).exp()


class Hazards(Minimize):
    """Minus the log-likelihood of discrete-time hazards, on batches (x, labels) with labels from `interval_labels`.

    A network's outputs are the logits of the hazards. The mean over clients weights each client alike; for the pooled fit
    weight clients by their rows: `Exchange(weights="examples")`.
    """

    def __init__(self, model: nn.Module | Tensor, *, clip: float | None = None, buffers: str = "") -> None:
        super().__init__(hazard_loss, model, clip=clip, buffers=buffers)
