"""Measures of convergence: what the proofs bound, as functions for `simulate(measure=…)`.

A measure maps the shared and private fields of a run to named numbers; `together` joins several. Each asks for the truth as a
function: a toy's `true_grad`, or `Fixed` on a large fixed sample of the clients' data. The clients' drift is already a
column of every record. At round 0 there is no estimate yet; its value is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nestfed.core import Batch, Clients, Composed, Data, Fields, NestfedError, Saddle, SolvableSaddle, as_clients

Measure = Callable[[Fields, Fields], Mapping[str, float]]
Gradient = Callable[[Tensor], Tensor]


def together(*measures: Measure) -> Measure:
    """Combine measures into one."""

    def joined(shared: Fields, private: Fields) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in measures:
            found |= one(shared, private)
        return found

    return joined


def gradient_norm(gradient: Gradient, point: str = "x", name: str = "gradient_norm") -> Measure:
    """‖∇F(x̄)‖, or ‖∇Φ(θ̄)‖ with the gradient of Φ and point="theta"."""
    return lambda shared, private: {name: float(gradient(shared[point]).norm())}


def estimator_error(gradient: Gradient, estimator: str = "u", point: str = "x") -> Measure:
    """‖ū − ∇F(x̄)‖², how wrong a method's gradient estimator is (u, m or d, by its name in the method).

    A method that moves after it estimates shares the estimate for the point before, so the two are one step apart.
    """

    def measure(shared: Fields, private: Fields) -> dict[str, float]:
        return {"estimator_error": float((_field(shared, estimator) - gradient(shared[point])).square().sum())}

    return measure


def inner_error(inner: Gradient, tracked: str = "u", point: str = "x") -> Measure:
    """‖ū − g(x̄)‖², how wrong the tracked inner value is; `inner` maps x to the clients' mean g."""

    def measure(shared: Fields, private: Fields) -> dict[str, float]:
        return {"inner_error": float((_field(shared, tracked) - inner(shared[point])).square().sum())}

    return measure


def fafed_progress(gradient: Gradient, rho: float) -> Measure:
    """FAFED's M_t = ‖x̄_{t+1} − x̄_t‖²/(4η_t²) + ‖∇f(x̄_t) − m̄_t‖²/(4ρ²), which Theorem 2 bounds.

    The clients synchronise between the estimate and the move, so that x̄_t − x̄_{t+1} = η_t m̄_t/A_t with
    A_t = √v̄_t + ρ, and M_t follows from the shared fields alone (without a projection).
    """

    def measure(shared: Fields, private: Fields) -> dict[str, float]:
        m = _field(shared, "m")
        step = m / (_field(shared, "v").sqrt() + rho)
        error = gradient(shared["x"]) - m
        return {"M": float(step.square().sum() / 4 + error.square().sum() / (4 * rho**2))}

    return measure


@dataclass(frozen=True)
class Fixed:
    """The truth on a large fixed sample: `batches` batches of every client, which training (another seed) never saw.

    Each is of the size that the clients draw; the bias of a conditional estimator is O(1/m), so measure with clients
    whose m is large. The inner value of a compositional problem is averaged over all batches of a client before f sees
    it, task by task. The models are in evaluation mode; gradients are not clipped where the problem has a plain loss.
    """

    problem: Any
    clients: Clients
    batches: int = 100
    seed: int = 2**62

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise NestfedError(f"A fixed sample needs at least 1 batch of every client, not {self.batches}.")
        clients = as_clients(self.clients).seeded(self.seed)
        drawn = [[clients.sample(n, t) for t in range(self.batches)] for n in range(len(clients))]
        object.__setattr__(self, "_drawn", drawn)

    def gradient(self, x: Tensor) -> Tensor:
        """∇F(x), or ∇Φ(θ) = ∇_θF(θ, w*(θ)) of a minimax problem."""
        if isinstance(self.problem, Saddle):
            return self._pair(x, self.best_dual(x))[0]
        return self._mean(x, self._composed if self._has_tasks() else self._direct)

    def inner(self, x: Tensor) -> Tensor:
        """The mean over clients (and their tasks) of the inner value g(x)."""
        return self._mean(x, lambda x, batches: self._tracked(x, batches)[0].mean(0))

    def best_dual(self, theta: Tensor, steps: int = 1000) -> Tensor:
        """w*(θ) by gradient ascent on the fixed sample, from the problem's own estimate if it offers one.

        The step size doubles after a success and is halved after a failure, so no constant is needed.
        """
        w = self.problem.w0
        precision = torch.finfo(w.dtype).eps
        if isinstance(self.problem, SolvableSaddle):
            solve = self.problem.best_dual
            w = self._mean(theta, lambda x, batches: torch.stack([solve(x, Batch(b)) for b in batches]).mean(0))
        rate, slope = 1.0, self._pair(theta, w)[1]
        for _ in range(steps):
            new = self.problem.project_dual(w + rate * slope)
            if not torch.isfinite(new).all():
                break
            if float((new - w).abs().max()) <= precision**0.5 * rate * max(1.0, float(w.abs().max())):
                return new
            # F is concave along the step, so if the slope still points forward, the maximum is not passed.
            ahead = self._pair(theta, new)[1]
            if float((ahead * (new - w)).sum()) >= 0:
                w, slope, rate = new, ahead, 2 * rate
            else:
                rate /= 2
        raise NestfedError(f"Gradient ascent did not find the best w in {steps} steps: is F concave in w?")

    def _has_tasks(self) -> bool:
        """Return whether inner values can be averaged; a task generated for one batch has only one value."""
        if not isinstance(self.problem, Composed):
            return False
        try:
            return self.problem.tasks >= 1
        except NestfedError:
            return False

    def _mean(self, x: Tensor, of: Callable[[Tensor, Sequence[Data]], Tensor]) -> Tensor:
        drawn: list[list[Data]] = self._drawn  # type: ignore[attr-defined]
        total = torch.stack([of(x, _like(x, batches)) for batches in drawn])
        return total.mean(0)

    def _direct(self, x: Tensor, batches: Sequence[Data]) -> Tensor:
        return torch.stack([torch.func.grad(lambda y, b=b: self.problem.loss(y, b))(x) for b in batches]).mean(0)

    def _tracked(self, x: Tensor, batches: Sequence[Data]) -> tuple[Tensor, Tensor, list[Any]]:
        """Return one client's inner value of every task that it met, which tasks these are, and the pullbacks."""
        found = [(self.problem.which(b), *self.problem.inner(x, b)) for b in map(Batch, batches)]
        rows, values = torch.cat([r for r, _, _ in found]), torch.cat([v for _, v, _ in found])
        tasks, place, counts = rows.unique(return_inverse=True, return_counts=True)
        sums = values.new_zeros(len(tasks), values.shape[1]).index_add(0, place, values)
        return sums / counts.unsqueeze(1), tasks, [pull for _, _, pull in found]

    def _composed(self, x: Tensor, batches: Sequence[Data]) -> Tensor:
        means, tasks, pulls = self._tracked(x, batches)
        # E[∇gᵀ]·E[∇f] is the gradient, not E[∇gᵀ∇f], whose factors may have come from one sample.
        rows = [torch.searchsorted(tasks, self.problem.which(Batch(b))) for b in batches]
        outer = [self.problem.outer_grad(means[r], Batch(b)) for r, b in zip(rows, batches)]
        place, slopes = torch.cat(rows), torch.cat(outer)
        sums = torch.zeros_like(means).index_add(0, place, slopes)
        mean = sums / place.bincount(minlength=len(tasks)).unsqueeze(1)
        return torch.stack([pull(mean[r]) for r, pull in zip(rows, pulls)]).mean(0)

    def _pair(self, theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.func.grad(self.problem.loss_at, argnums=(0, 1))

        def of(x: Tensor, batches: Sequence[Data]) -> Tensor:
            return torch.stack([torch.cat(both(x, w, b)) for b in batches]).mean(0)

        found = self._mean(theta, of)
        return found[: len(theta)], found[len(theta) :]


def _like(x: Tensor, batches: Sequence[Data]) -> Sequence[Data]:
    return tree_map(lambda leaf: leaf.to(x.device) if isinstance(leaf, Tensor) else leaf, batches)


def _field(shared: Fields, name: str) -> Tensor:
    if name not in shared:
        raise NestfedError(f"The method does not share {name!r}; it shares {', '.join(shared)}.")
    return shared[name]
