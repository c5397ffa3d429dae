"""Pairs across clients: AUROC and average precision of all clients' rows together, with any scoring module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Batch, Data, Drawn, NestfedError, Paired, as_batch, at_least, one_of, positive
from nestfed.data.clients import CrossPairs, Totals
from nestfed.problems.auprc import MARGIN, ratio, surrogate
from nestfed.problems.base import Direct, Model, leading, vjp
from nestfed.problems.objective import Labelled

GUO_2023 = """@inproceedings{guo2023fedxl,
  title     = {{FeDXL}: Provable Federated Learning for Deep {X}-Risk Optimization},
  author    = {Guo, Zhishuai and Jin, Rong and Luo, Jiebo and Yang, Tianbao},
  booktitle = {International Conference on Machine Learning},
  publisher = {PMLR},
  year      = {2023}
}"""


class Pairwise(Direct, Paired):
    """A `Paired` problem on a scoring module. Subclasses define `pair` (ℓ) and `outer` (f).

    Batches come from `nestfed.data.clients.CrossPairs`. `rows` is `clients.rows`; only FeDXL2 needs it.
    As a plain problem (`grad`) it compares rows inside each client: mean over z ∈ S1 of f(mean over z' ∈ S2 of z's client).
    """

    def __init__(self, model: nn.Module, *, rows: int = 0, **options: Any) -> None:
        self.rows = rows
        super().__init__(model, **options)

    @abstractmethod
    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        """Return ℓ."""

    @abstractmethod
    def outer(self, u: Tensor) -> Tensor:
        """Return f(u)."""

    def scores(self, x: Tensor, batch: Batch | Data) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Return the scores, and their pullback, which includes the gradient of a penalty."""
        sample = as_batch(batch)
        if sample.pieces > 1:
            raise NestfedError("accumulate: pairs across clients need their whole batch at once; draw smaller batches.")

        def value(y: Tensor) -> tuple[Tensor, Tensor]:
            model = self.model_at(y)
            return torch.cat(self._scored(model, sample.data)).to(y.dtype), self.penalised(y.new_zeros(()), model)

        with self.evaluating(sample):
            (h, extra), pull = vjp(value, x, self._eager(sample), partial(self._keyed, sample))
        one, b = torch.ones_like(extra), leading(sample.data[0])
        return h[:b], h[b:], lambda v, w: self.clip_gradient(pull((torch.cat([v, w]), one)), sample)

    def drawn(self, batch: Batch | Data) -> Drawn:
        """Return the numbers and weights of the rows; the mark of an S2 row is its label, if there is one."""
        (_, number, first), (_, y, second) = as_batch(batch).data
        return Drawn(number, first, second, y[:, None][:, : self.marks])

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return the estimate from the client's own pairs."""
        model = self.model_at(x, train=train)
        first, second = self._scored(model, data)
        drawn = self.drawn(data)
        total = drawn.second.sum()
        share = drawn.second / torch.where(total > 0, total, 1)
        u = self.inner_mean(self.pair(first[:, None], second, drawn.marks), share)
        u = torch.where(total > 0, u, 1)  # f may be undefined at 0
        return self.penalised((drawn.first * (total > 0) * self.outer(u)).mean(), model)

    def _scored(self, model: Model, data: Data) -> tuple[Tensor, Tensor]:
        (first, *_), (second, *_) = data
        scores = model(torch.cat([first, second]))
        if scores.dim() != 1:
            raise NestfedError(
                f"{type(self).__name__} needs a model with one score per example, not shape {tuple(scores.shape)}."
            )
        return scores[: len(first)], scores[len(first) :]

    def examples(self, data: Data) -> int:
        """Return the number of S1 and S2 rows."""
        return leading(data[0]) + leading(data[1])

    def cut(self, data: Data, pieces: int) -> list[tuple[float, Data]]:
        """Raise an error: every row is compared with the whole batch."""
        raise NestfedError("accumulate: pairs need their whole batch at once; draw smaller batches.")


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "square": lambda s: (1 - s) ** 2,
    "squared_hinge": lambda s: torch.relu(1 - s) ** 2,
    "logistic": lambda s: F.softplus(-s),
}
"""ψ by name: (1−s)², max(0, 1−s)² and log(1 + e^−s)."""


class PairedAUROC(Pairwise):
    """Minimise the mean over positives z and negatives z' of ψ(h(z) − h(z')), pairs of all clients together.

    h is the model's score. f is the identity, so FeDXL1 trains it.
    """

    linear = True

    def __init__(self, model: nn.Module, *, loss: str = "squared_hinge", **options: Any) -> None:
        one_of("paired-auroc: loss", loss, [*LOSSES])
        self.psi = LOSSES[loss]
        super().__init__(model, **options)

    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        """Return ψ(h − h')."""
        return self.psi(first - second)[..., None]

    def outer(self, u: Tensor) -> Tensor:
        """Return u."""
        return u[..., 0]


class PairedAP(Pairwise):
    """Minimise −mean over positives z of u₁/u₂, u = mean over all rows z' of (1[y'=1]ℓ, ℓ), rows of all clients together.

    ℓ = max(s − h(z) + h(z'), 0)², h the sigmoid of the score, as in `AUPRC`. A tiny ε keeps the ratio defined where ℓ is 0.
    f is not linear, so FeDXL2 trains it.
    """

    inner_dim = 2
    marks = 1

    def __init__(self, model: nn.Module, *, margin: float = MARGIN, **options: Any) -> None:
        if not margin > 0:
            raise NestfedError(f"paired-ap: margin must be above 0, not {margin:g}.")
        self.margin = margin
        super().__init__(model, **options)

    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        """Return (1[y'=1]ℓ, ℓ)."""
        loss = surrogate(self.margin, torch.sigmoid(first), torch.sigmoid(second))
        return torch.stack([marks[..., 0] * loss, loss], -1)

    def outer(self, u: Tensor) -> Tensor:
        """Return −u₁/u₂."""
        return ratio(u, self.margin)


@dataclass(frozen=True)
class PairedOptions(Labelled):
    """The options of every objective on pairs across clients."""

    first: int = 8
    """Positives in a step."""
    second: int = 24
    """Examples in a step that other positives are compared with."""
    over: str = "rows"
    """Give every row of all clients the same weight, or every client: rows or clients."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    counted = True
    cites: ClassVar[tuple[str, ...]] = (GUO_2023,)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "first", "second")
        at_least(self, 0, "clip")
        one_of(f"{self.name}: over", self.over, ("rows", "clients"))

    def clients(
        self,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        everything: bool,
        totals: Totals | None,
        restarts: Callable[[int], bool],
        held: Mapping[str, Any],
    ) -> CrossPairs:
        """Return clients that draw batches of these sizes."""
        return CrossPairs(
            arrays,
            parts,
            first=self.size(self.first, restarts),
            second=self.second,
            everything=everything,
            over=self.over,
            totals=totals,
            **held,
        )


@dataclass(frozen=True)
class PairedAUROCOptions(PairedOptions):
    """Options of paired-auroc: positives against the negatives of all clients."""

    loss: str = "squared_hinge"
    """ψ of the difference s of two scores: square (1−s)², squared_hinge max(0, 1−s)² or logistic log(1 + e^−s)."""

    name = "paired-auroc"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("paired-auroc: loss", self.loss, [*LOSSES])

    def metric(self, classes: int) -> str:
        """AUROC."""
        return "auroc"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        totals: Totals | None = None,
        **held: Any,
    ) -> tuple[PairedAUROC, CrossPairs]:
        """Return AUROC on positives and negatives."""
        clients = self.clients(arrays, parts, False, totals, restarts, held)
        return PairedAUROC(model, loss=self.loss, rows=clients.rows, clip=self.clip or None), clients


@dataclass(frozen=True)
class PairedAPOptions(PairedOptions):
    """Options of paired-ap: positives against the rows of all clients."""

    margin: float = MARGIN
    """The margin s of the surrogate loss."""

    name = "paired-ap"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "margin")

    def metric(self, classes: int) -> str:
        """Average precision."""
        return "ap"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        totals: Totals | None = None,
        **held: Any,
    ) -> tuple[PairedAP, CrossPairs]:
        """Return average precision on positives and rows of both classes."""
        clients = self.clients(arrays, parts, True, totals, restarts, held)
        return PairedAP(model, margin=self.margin, rows=clients.rows, clip=self.clip or None), clients
