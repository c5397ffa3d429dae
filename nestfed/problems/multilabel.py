"""Several labels per example: the mean over labels of AUROC or average precision. A label may be unknown (NaN)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Batch, Data, NestfedError, as_batch, at_least, positive
from nestfed.data.clients import Examples
from nestfed.problems.auprc import MARGIN, QI_2021, ratio, surrogate
from nestfed.problems.auroc import AUROC, YING_2016, Thresholds, square_losses
from nestfed.problems.base import Direct, Minimax, Model
from nestfed.problems.objective import Labelled

YUAN_2021 = """@inproceedings{yuan2021large,
  title     = {Large-Scale Robust Deep {AUC} Maximization: A New Surrogate Loss and Empirical Studies on Medical Image Classification},
  author    = {Yuan, Zhuoning and Yan, Yan and Sonka, Milan and Yang, Tianbao},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  pages     = {3040--3049},
  year      = {2021}
}"""


def _rows(name: str, batch: Data) -> tuple[Tensor, Tensor]:
    """Return the inputs, and the labels as (n, L)."""
    if isinstance(batch, Tensor) or len(batch) != 2 or batch[1].dim() != 2:
        raise NestfedError(f"{name} needs batches (x, y) from Examples clients, y of shape (n, L) with 0, 1 or NaN.")
    return batch[0], batch[1]


def _classes(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return marks of the positives and of the negatives, (n, L), and of the labels that have both, (L,)."""
    above, below = (y == 1).to(dtype), (y == 0).to(dtype)
    return above, below, (above.sum(0) > 0) & (below.sum(0) > 0)


def _mean_over(here: Tensor, values: Tensor) -> Tensor:
    """Return the mean of the values, one per label, over the labels that are here; 0 if none is."""
    return torch.where(here, values, 0).sum() / here.sum().clamp_min(1)


def _wide(name: str, scores: Tensor, y: Tensor) -> Tensor:
    """Return scores as (n, L); a network with one output may return (n,)."""
    scores = scores[:, None] if scores.dim() == 1 else scores
    if scores.shape != y.shape:
        raise NestfedError(
            f"{name} needs a model with one score per label, shape {tuple(y.shape)}, not {tuple(scores.shape)}."
        )
    return scores


class MultiLabelAUROC(AUROC):
    """Minimise the mean over L labels of `AUROC`, θ = (model, a, b), with a, b and w in R^L (Yuan et al. 2021).

    Batches are (x, y) from `Examples` clients, y of shape (n, L) with 0, 1 or NaN for unknown. A label without both classes
    among the known rows of a batch is left out of its mean. Without `p`, positives and negatives of a label count half
    each, as in `AUROC(model)`. With `p`, the share of positives of every label, known rows count alike, as in `AUROC(model, p=p)`.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: int,
        *,
        p: Sequence[float] | Tensor | None = None,
        sigmoid: bool = False,
        **options: Any,
    ) -> None:
        shares = None if p is None else torch.as_tensor(p, dtype=torch.float64)
        if shares is not None and (shares.shape != (labels,) or not bool(((shares > 0) & (shares < 1)).all())):
            raise NestfedError(f"multi-label-auroc: p must be {labels} shares of positives between 0 and 1.")
        if not isinstance(model, nn.Module):
            raise NestfedError("multi-label-auroc needs an nn.Module that gives one score per label.")
        self.shares = shares
        Minimax.__init__(self, self._mean, Thresholds(model, sigmoid, labels), torch.zeros(labels), **options)

    def _weights(self, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Return the weights of positives and of negatives, whose sums estimate 1 each, the labels with both, and p."""
        above, below, here = _classes(y, dtype)
        if self.shares is None:
            return above / above.sum(0).clamp_min(1), below / below.sum(0).clamp_min(1), here, 0.5
        p, known = self.shares.to(above), (above + below).sum(0).clamp_min(1)
        return above / known / p, below / known / (1 - p), here, p

    def _mean(self, model: Model, w: Tensor, batch: Data) -> Tensor:
        x, y = _rows("multi-label-auroc", batch)
        h, a, b = model(x)
        h = _wide("multi-label-auroc", h, y)
        above, below, here, p = self._weights(y, h.dtype)
        losses = (p * above + (1 - p) * below) * square_losses(h, a, b, w, y, p)
        return _mean_over(here, losses.sum(0) - p * (1 - p) * w**2)

    def best_dual(self, theta: Tensor, batch: Batch | Data) -> Tensor:
        """Estimate E[h|−] − E[h|+] of every label; b − a for a label without both classes."""
        sample = as_batch(batch)
        x, y = _rows("multi-label-auroc", sample.data)
        with self.evaluating(sample):
            h, a, b = self.model_at(theta)(x)
        h = _wide("multi-label-auroc", h, y)
        above, below, here, _ = self._weights(y, theta.dtype)
        sample.note(len(x))
        away = (below * (h - b) - above * (h - a)).sum(0)
        return (b - a + torch.where(here, away, 0)).detach()


class MultiLabelAP(Direct):
    """Minimise the mean over labels of −mean over positives z⁺ of g₁/g₂, g = mean over rows z of (1[y=1]ℓ, ℓ), ℓ as in `AUPRC`.

    Batches are (x, y) from `Examples` clients, y of shape (n, L) with 0, 1 or NaN for unknown. The z⁺ and the z of a label are
    the known rows of the batch, as if it were the client's data and `Pairs` had drawn all of it. A label without both classes
    among them is left out. There is no state per example, so SOX does not train it.
    """

    def __init__(self, model: nn.Module | Tensor, *, margin: float = MARGIN, **options: Any) -> None:
        if not margin > 0:
            raise NestfedError(f"multi-label-ap: margin must be above 0, not {margin:g}.")
        self.margin = margin
        super().__init__(model, **options)

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return the estimate from the batch's pairs."""
        model = self.model_at(x, train=train)
        rows, y = _rows("multi-label-ap", data)
        h = torch.sigmoid(_wide("multi-label-ap", model(rows), y))
        above, below, here = _classes(y, h.dtype)
        values = surrogate(self.margin, h[:, None], h) * (above + below) / (above + below).sum(0).clamp_min(1)
        u = torch.stack([(values * above).sum(1), values.sum(1)], -1)
        each = (above * ratio(u, self.margin)).sum(0) / above.sum(0).clamp_min(1)
        return self.penalised(_mean_over(here, each), model)

    def cut(self, data: Data, pieces: int) -> list[tuple[float, Data]]:
        """Raise an error: every row is compared with the whole batch."""
        raise NestfedError("accumulate: pairs need their whole batch at once; draw smaller batches.")


@dataclass(frozen=True)
class _MultiLabelOptions(Labelled):
    """The options of both."""

    batch: int = 64
    """Examples in a step: large enough to have both classes of most labels."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    binary = False
    several = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "batch")
        at_least(self, 0, "clip")

    def clients(
        self,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        restarts: Callable[[int], bool],
        held: dict[str, Any],
    ) -> Examples:
        """Return clients that draw plain batches."""
        return Examples(arrays, parts, batch=self.size(self.batch, restarts), **held)


@dataclass(frozen=True)
class MultiLabelAUROCOptions(_MultiLabelOptions):
    """Options of multi-label-auroc: the mean over labels of the AUC square loss, as a minimax problem."""

    sigmoid: bool = False
    """Take the sigmoid of the model's outputs as the scores."""

    name = "multi-label-auroc"
    cites = (YING_2016, YUAN_2021)

    def metric(self, classes: int) -> str:
        """The mean AUROC."""
        return "auroc"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[MultiLabelAUROC, Examples]:
        """Return the problem on plain batches."""
        problem = MultiLabelAUROC(model, arrays[1].shape[1], sigmoid=self.sigmoid, clip=self.clip or None)
        return problem, self.clients(arrays, parts, restarts, held)


@dataclass(frozen=True)
class MultiLabelAPOptions(_MultiLabelOptions):
    """Options of multi-label-ap: the mean over labels of average precision, on the pairs of a batch."""

    margin: float = MARGIN
    """The margin s of the surrogate loss."""

    name = "multi-label-ap"
    cites = (QI_2021,)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "margin")

    def metric(self, classes: int) -> str:
        """The mean average precision."""
        return "ap"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[MultiLabelAP, Examples]:
        """Return the problem on plain batches."""
        problem = MultiLabelAP(model, margin=self.margin, clip=self.clip or None)
        return problem, self.clients(arrays, parts, restarts, held)
