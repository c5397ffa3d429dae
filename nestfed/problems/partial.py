"""One-way partial AUROC: rank positives above the highest-scored negatives, in each client or across clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import Data, NestfedError, at_least, one_of, positive
from nestfed.data.clients import CrossPairs, Opposites, Totals
from nestfed.problems.base import Conditional, Model
from nestfed.problems.objective import Labelled
from nestfed.problems.paired import GUO_2023, LOSSES, PairedOptions, Pairwise

ZHU_2022 = """@inproceedings{zhu2022when,
  title     = {When {AUC} meets {DRO}: Optimizing Partial {AUC} for Deep Learning with Non-Convex Convergence Guarantee},
  author    = {Zhu, Dixian and Li, Gang and Wang, Bokun and Wu, Xiaodong and Yang, Tianbao},
  booktitle = {International Conference on Machine Learning},
  volume    = {162},
  pages     = {27548--27573},
  publisher = {PMLR},
  year      = {2022}
}"""
FORMS = ("kl", "cvar")
RHO = 0.3
"""The default of the largest false positive rate ρ."""


def _psi(name: str, form: str, loss: str) -> Callable[[Tensor], Tensor]:
    one_of(f"{name}: form", form, FORMS)
    one_of(f"{name}: loss", loss, [*LOSSES])
    return LOSSES[loss]


class PartialAUROC(Conditional):
    """Minimise the mean over positives z of a soft or hard maximum over negatives z' of ψ(h(z) − h(z')) (Zhu et al. 2022).

    - `form="kl"`: λ log E exp(ψ/λ), λ = `temperature`, in log space. λ → ∞ gives the mean, as in AUROC, and λ → 0 the maximum.
    - `form="cvar"`: min over s of s + E(ψ − s)₊/ρ, the mean over the share ρ of the largest ψ: the AUROC among false positive
      rates of at most ρ = `rho`.

    Batches come from `nestfed.data.clients.Opposites`, ψ is that of `PairedAUROC`. `outer_examples` is
    `clients.outer_examples`; only SOX needs it. Its state u of a positive is

    - kl: the moving mean of exp(ψ/λ), as a logarithm;
    - cvar: the threshold s, by the rule of SOPA: s ← s + γ(mean_j p_j − ρ) with p_j = 1[ψ_j > s] at the old s, and gradient
      mean_j p_j∇ψ_j/ρ. With γ = 1, and the first time, s is the batch's own minimiser.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: str = "kl",
        rho: float = RHO,
        temperature: float = 1.0,
        loss: str = "squared_hinge",
        **options: Any,
    ) -> None:
        self.psi = _psi("partial-auroc", form, loss)
        if not 0 < rho <= 1:
            raise NestfedError(f"partial-auroc: rho must be in (0, 1], not {rho:g}.")
        if not 0 < temperature < math.inf:
            raise NestfedError(f"partial-auroc: temperature must be a finite number above 0, not {temperature:g}.")
        self.form, self.rho = form, rho
        self.scale = temperature if form == "kl" else 1.0
        super().__init__(self._weighted, self._losses, model, **options)

    def _losses(self, model: Model, outer: Data, inner: Data) -> Tensor:
        """Return ψ/λ, or ψ."""
        if isinstance(outer, Tensor) or isinstance(inner, Tensor) or len(inner) != 1:
            raise NestfedError("partial-auroc needs batches (outer, inner, which) from Opposites clients.")
        (own, _), (others,) = outer, inner
        scores = model(torch.cat([own, others[0]]))
        if scores.dim() != 1:
            raise NestfedError(
                f"partial-auroc needs a model with one score per example, not shape {tuple(scores.shape)}."
            )
        return self.psi(scores[: len(own), None] - scores[len(own) :]) / self.scale

    def _weighted(self, u: Tensor, outer: Data) -> Tensor:
        return outer[1] * self.scale * u

    def inner_mean(self, values: Tensor) -> Tensor:
        """Return log mean exp(ψ/λ), or the mean of the share ρ of the largest ψ, with a part of one if ρm is not whole."""
        if self.form == "kl":
            return torch.logsumexp(values, 1) - math.log(values.shape[1])
        return (self._largest(values) * values).mean(1) / self.rho

    def moving_mean(self, u: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        """Return log((1−w)e^u + w·e^value)."""
        return torch.logaddexp(torch.log1p(-weight) + u, weight.log() + value)

    def refreshed(self, values: Tensor, u: Tensor, weight: Tensor, outer: Data) -> tuple[Tensor, Tensor, Tensor]:
        """Move the thresholds of the cvar form, or the moving means of the kl form."""
        if self.form == "kl":
            return super().refreshed(values, u, weight, outer)
        fresh = weight == 1
        above = (values > u[:, None]).to(values.dtype)
        p = torch.where(fresh[:, None], self._largest(values), above)
        s = torch.where(fresh, self._quantile(values), u)
        new = torch.where(fresh, s, u + weight * (above.mean(1) - self.rho))
        loss = s + torch.relu(values - s[:, None]).mean(1) / self.rho
        return outer[1] * (p * values).mean(1) / self.rho, outer[1] * loss, new

    def _largest(self, values: Tensor) -> Tensor:
        """Return for each of (b, m) values the part of it, 0 … 1, that is among the share ρ of the largest."""
        rank = values.detach().argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (self.rho * values.shape[1] - rank.to(values.dtype)).clamp(0, 1)

    def _quantile(self, values: Tensor) -> Tensor:
        """Return the smallest of these parts' values, a minimiser of s + mean(ψ − s)₊/ρ."""
        last = max(math.ceil(self.rho * values.shape[1]), 1) - 1
        return values.detach().sort(1, descending=True).values[:, last]


class PairedPartialAUROC(Pairwise):
    """Minimise the mean over positives z of λ log E exp(ψ(h(z) − h(z'))/λ), z' the negatives of all clients together.

    ℓ = exp(ψ/λ) and u are kept as logarithms. FeDXL2 trains it; `rows` and `others` are those of its `CrossPairs` clients.

    others: the negatives of all clients. No ℓ can exceed its mean by more than this factor; FeDXL2 holds old scores to it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: str = "kl",
        temperature: float = 1.0,
        loss: str = "squared_hinge",
        others: int = 0,
        **options: Any,
    ) -> None:
        self.psi = _psi("paired-partial-auroc", form, loss)
        _only_kl(form)
        if not 0 < temperature < math.inf:
            raise NestfedError(
                f"paired-partial-auroc: temperature must be a finite number above 0, not {temperature:g}."
            )
        self.temperature, self.others = temperature, others
        super().__init__(model, **options)

    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        """Return log ℓ = ψ(h − h')/λ."""
        return self.psi(first - second)[..., None] / self.temperature

    def outer(self, u: Tensor) -> Tensor:
        """Return λ log u of a given log u."""
        return self.temperature * u[..., 0]

    def inner_mean(self, values: Tensor, share: Tensor) -> Tensor:
        """Return the logarithm of the mean of ℓ."""
        some = share.sum(-1, keepdim=True) > 0
        return torch.where(some, torch.logsumexp(values + torch.where(some, share, 1).log()[..., None], -2), 0)

    def moving_mean(self, u: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        """Return log((1−w)e^u + w·e^value)."""
        return torch.logaddexp(torch.log1p(-weight) + u, weight.log() + value)

    def tangent(self, slope: Tensor, u: Tensor, value: Tensor) -> Tensor:
        """Return an expression with the gradient of f'(u)·ℓ = λℓ/u, with ℓ/u at most `others`."""
        if self.others < 1:
            raise NestfedError(
                "fedxl2 compares with old scores, so PairedPartialAUROC must know how many negatives there are: pass "
                "others=clients.others."
            )
        ratio = torch.exp((value.detach() - u).clamp(max=math.log(self.others)))
        return (slope * ratio * value).sum(-1)


def _only_kl(form: str) -> None:
    if form == "cvar":
        raise NestfedError(
            "paired-partial-auroc has the form kl only: fedxl2 tracks a mean for every positive, but cvar has a threshold; use "
            "partial-auroc, which compares inside each client."
        )


@dataclass(frozen=True)
class PartialAUROCOptions(Labelled):
    """Options of partial-auroc: every outer positive is compared with the same negatives of its client."""

    outer: int = 8
    """Positives in a step."""
    inner: int = 24
    """Negatives compared with each positive."""
    form: str = "kl"
    """The maximum over negatives: kl (λ log mean exp(ψ/λ)) or cvar (the mean of the share ρ of the largest ψ)."""
    rho: float = RHO
    """The largest false positive rate ρ: of the metric, and of cvar."""
    temperature: float = 1.0
    """λ of kl."""
    loss: str = "squared_hinge"
    """ψ of the difference s of two scores: square (1−s)², squared_hinge max(0, 1−s)² or logistic log(1 + e^−s)."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "partial-auroc"
    cites = (ZHU_2022,)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "outer", "inner")
        at_least(self, 0, "clip")
        _check(self)

    def metric(self, classes: int) -> str:
        """Partial AUROC up to ρ."""
        return f"pauroc@{self.rho:g}"

    def build(
        self,
        model: nn.Module,
        arrays: tuple[Tensor, Tensor],
        parts: Sequence[np.ndarray],
        *,
        p: float | None = None,
        restarts: Callable[[int], bool] = lambda t: t == 0,
        **held: Any,
    ) -> tuple[PartialAUROC, Opposites]:
        """Return partial AUROC on positives and negatives of the same client."""
        clients = Opposites(arrays, parts, outer=self.size(self.outer, restarts), inner=self.inner, **held)
        problem = PartialAUROC(
            model,
            form=self.form,
            rho=self.rho,
            temperature=self.temperature,
            loss=self.loss,
            clip=self.clip or None,
            outer_examples=clients.outer_examples,
        )
        return problem, clients


@dataclass(frozen=True)
class PairedPartialAUROCOptions(PairedOptions):
    """Options of paired-partial-auroc: positives against the negatives of all clients."""

    form: str = "kl"
    """Only kl."""
    rho: float = RHO
    """The largest false positive rate ρ of the metric."""
    temperature: float = 1.0
    """λ: small values weigh the highest-scored negatives."""
    loss: str = "squared_hinge"
    """ψ of the difference s of two scores: square (1−s)², squared_hinge max(0, 1−s)² or logistic log(1 + e^−s)."""

    name = "paired-partial-auroc"
    cites = (GUO_2023, ZHU_2022)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        _only_kl(self.form)

    def metric(self, classes: int) -> str:
        """Partial AUROC up to ρ."""
        return f"pauroc@{self.rho:g}"

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
    ) -> tuple[PairedPartialAUROC, CrossPairs]:
        """Return partial AUROC on positives and negatives of all clients."""
        clients = self.clients(arrays, parts, False, totals, restarts, held)
        problem = PairedPartialAUROC(
            model,
            temperature=self.temperature,
            loss=self.loss,
            rows=clients.rows,
            others=clients.others,
            clip=self.clip or None,
        )
        return problem, clients


def _check(options: PartialAUROCOptions | PairedPartialAUROCOptions) -> None:
    positive(options, "rho", "temperature")
    if options.rho > 1:
        raise NestfedError(f"{options.name}: rho must be at most 1, not {options.rho:g}.")
    _psi(options.name, options.form, options.loss)
