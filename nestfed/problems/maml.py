"""MAML as a nested problem: one gradient step adapts the model to a new task (Finn et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nestfed.core import Batch, Data, NestfedError, as_batch
from nestfed.problems.base import Compositional, Domain, Model, leading

TaskLoss = Callable[[Model, Data], Tensor]
"""L(model, (x, y)): the loss of one task on some of its examples, one number."""


@dataclass(frozen=True)
class Adaptable:
    """The model before adaptation: a callable like the user's module that can also adapt to tasks."""

    problem: MAML
    x: Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model without adaptation."""
        return self.problem.model_at(self.x, train=False)(*args, **kwargs)

    def adapt(self, support: Data, steps: int = 1) -> Tensor:
        """Return one adapted parameter vector per task, (k, d)."""
        return self.problem.adapt(self.x, support, steps)

    def predict(self, u: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs of task i's model u_i on its inputs, leading axes (k, examples)."""
        return self.problem.predict(u, inputs)


class MAML(Compositional):
    """F(x) = E_i L_i(x − λ∇L_i(x; support_i); query_i), for conditional and compositional methods.

    As a conditional problem, ξ is a task i with its query and η its support; as a compositional one, the inner value
    of task i is g_i(x) = x − λ∇L_i(x; support), in R^d, and f_i(y) = L_i(y; query). Then

        ∇F = mean_i (I − λ∇²L_i(x; support)) ∇L_i(g_i(x); query),

    where the Hessian is only applied to a vector: one backward pass through the graph of ∇L_i. The query has an
    ordinary backward pass, so its graph is freed before the second-order pass. `first_order=True` leaves out the
    Hessian; the result is then not the gradient of F.

    A batch is (outer, inner, which): outer = (x, y) of the queries, leading axes (k, query examples); inner = (x, y)
    of the supports, (k, support examples); which = the k tasks' indices among the client's `tasks`, for methods that
    keep a state per task. Clients that always draw new tasks omit `which` and `tasks`.

    Without convolutions, the k tasks are vectorised, which takes half the time of a loop. With convolutions, whose
    weights differ by task, both take the same time (measured on a CPU), so tasks run in a loop that keeps only one
    query in memory. A loop already works in pieces, so `accumulate` has nothing to split.
    """

    def __init__(
        self,
        model: nn.Module | Tensor,
        task_loss: TaskLoss,
        *,
        inner_lr: float,
        tasks: int | None = None,
        first_order: bool = False,
        vectorise: bool | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
    ) -> None:
        if not 0 < inner_lr < float("inf"):
            raise NestfedError(f"maml: inner_lr must be a finite number above 0, not {inner_lr:g}.")
        if tasks is not None and tasks < 1:
            raise NestfedError(f"maml: tasks, the number of tasks on a client, must be at least 1, not {tasks}.")
        self.task_loss, self.inner_lr, self._tasks, self.first_order = task_loss, inner_lr, tasks, first_order
        if vectorise is None:
            modules = model.modules() if isinstance(model, nn.Module) else ()
            vectorise = not any(isinstance(m, nn.modules.conv._ConvNd) for m in modules)
        self.vectorise = vectorise
        super().__init__(self._outer, self._inner, model, 1, domain=domain, clip=clip)
        self.inner_dim = self.x0.numel()

    @property
    def tasks(self) -> int:  # type: ignore[override]
        """The number of tasks on a client, if that is fixed."""
        if self._tasks is None:
            raise NestfedError(
                "A method with one state per task (local-moml, local-scgdm-tasks) needs clients with a fixed set of "
                "tasks, but these clients draw new tasks each time: use local-scgdm."
            )
        return self._tasks

    def _inner(self, x: Tensor, support: Data, sample: Batch | None = None, *, train: bool = True) -> Tensor:
        copies = x.expand(leading(support), -1)
        return x - self.inner_lr * self._slopes(sample or Batch(support), copies, support, train)

    def _outer(self, u: Tensor, query: Data, *, train: bool = True) -> Tensor:
        return self._losses(Batch(query), u, query, train).mean()

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return mean_i f_i(g_i(x))."""
        return self._outer(self._inner(x, data[1], train=train), data[0], train=train)

    def examples(self, data: Data) -> int:
        """Return the number of query and support examples."""
        return leading(data[0], 2) + leading(data[1], 2)

    def which(self, batch: Batch | Data) -> Tensor:
        """Return the indices of the batch's tasks."""
        return as_batch(batch).data[2]

    def bind(self, x: Tensor, *, train: bool = False) -> Adaptable:
        """Return the model at x, ready to be adapted."""
        return Adaptable(self, x)

    # Losses and gradients (slopes) of k tasks, each at its own vector, x of shape (k, d).

    def _task(self, sample: Batch, train: bool) -> Callable[[Tensor, Data], Tensor]:
        """Return L as a function of a task's vector and examples, with dropout from the batch's key in training."""

        def value(x: Tensor, examples: Data) -> Tensor:
            with self.evaluating(sample):
                found = self.task_loss(self.model_at(x, train=train), examples)
            if found.dim() != 0:
                raise NestfedError(
                    f"maml: a task's loss must be one number, not a tensor of shape {tuple(found.shape)}."
                )
            return found

        return value

    def _losses(self, sample: Batch, x: Tensor, examples: Data, train: bool = True) -> Tensor:
        task = self._task(sample, train)
        if self.vectorise:
            return torch.vmap(task)(x, examples)
        return torch.stack([task(p, e) for p, e in _each(x, examples)])

    def _slopes(self, sample: Batch, x: Tensor, examples: Data, train: bool = True) -> Tensor:
        """Return ∇L_i(x_i), (k, d), inside or outside a function transform.

        Each loss depends only on its own row of x, so the gradient of their sum holds every task's slope. A vmap
        around a gradient gives wrong second derivatives for convolutions with shared weights (torch 2.13; tested).
        """
        return torch.func.grad(lambda y: self._losses(sample, y, examples, train).sum())(x)

    def _eager_slopes(
        self, sample: Batch, x: Tensor, examples: Data, graph: bool, train: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the losses and ∇L_i(x_i), (k, d), by plain autograd: half the overhead of a transform."""
        with torch.enable_grad():
            if self.vectorise:
                losses = self._losses(sample, x, examples, train)
                return losses, torch.autograd.grad(losses.sum(), x, create_graph=graph)[0]
            task, losses_, slopes = self._task(sample, train), [], []
            for p, e in _each(x, examples):
                losses_.append(task(p, e))
                slopes.append(torch.autograd.grad(losses_[-1], p, create_graph=graph)[0])
            return torch.stack(losses_), torch.stack(slopes)

    # For the methods.

    def inner(self, x: Tensor, batch: Batch | Data) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return g_i(x), (k, d), and the pullback v ↦ mean_i (I − λ∇²L_i(x))v_i."""
        sample = as_batch(batch)
        support, lam = sample.data[1], self.inner_lr
        sample.note(leading(support, 2))
        if not sample.eager:
            value, pull = torch.func.vjp(lambda y: self._inner(y, support, sample), x)  # type: ignore[misc]
            if self.first_order:
                return value, lambda v: self.clip_gradient(v.mean(0), sample)
            return value, lambda v: self.clip_gradient(pull(v / len(v))[0], sample)
        copies = x.detach().expand(leading(support), -1).clone().requires_grad_()
        _, slopes = self._eager_slopes(sample, copies, support, graph=not self.first_order)
        if self.first_order:
            return x - lam * slopes, lambda v: self.clip_gradient(v.mean(0), sample)

        def pullback(v: Tensor) -> Tensor:
            (bent,) = torch.autograd.grad(slopes, copies, v)
            return self.clip_gradient((v - lam * bent).mean(0), sample)

        return x - lam * slopes.detach(), pullback

    def outer_grad(self, u: Tensor, batch: Batch | Data) -> Tensor:
        """Return ∇L_i(u_i; query) for every task, (k, d)."""
        sample = as_batch(batch)
        query = sample.data[0]
        if sample.eager:
            losses, slopes = self._eager_slopes(sample, u.detach().requires_grad_(), query, graph=False)
            value = losses.detach().mean()
        else:
            slopes, value = torch.func.grad_and_value(lambda v: self._losses(sample, v, query).sum())(u)
            value = value / len(u)
        sample.note(leading(query, 2), value)
        return slopes

    def grad(self, x: Tensor, batch: Batch | Data) -> Tensor:
        """Return the gradient of mean_i f_i(g_i(x))."""
        value, pullback = self.inner(x, batch)
        return pullback(self.outer_grad(value, batch))

    def inspect(self, batch: Batch) -> bool:
        """Return whether the loss depends on the parameters."""
        return self.depends(lambda x: self.loss(x, batch.data, train=True))

    # For users of the trained model.

    def adapt(self, x: Tensor, support: Data, steps: int = 1) -> Tensor:
        """Take `steps` inner steps on every task's support, from x or from its row of x; return (k, d)."""
        sample = Batch(support, eager=True)
        u = x.detach().expand(leading(support), -1)
        for _ in range(steps):
            leaf = u.clone().requires_grad_()
            u = u - self.inner_lr * self._eager_slopes(sample, leaf, support, graph=False, train=False)[1]
        return u

    def predict(self, u: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs of task i's model u_i on its inputs, leading axes (k, examples)."""

        def one(p: Tensor, x: Tensor) -> Tensor:
            return self.model_at(p, train=False)(x)

        with torch.no_grad():
            if self.vectorise:
                return torch.vmap(one)(u, inputs)
            return torch.stack([one(p, x) for p, x in zip(u, inputs)])


def _each(x: Tensor, examples: Data) -> list[tuple[Tensor, Data]]:
    """Return every task's vector and examples."""
    return [(row, tree_map(itemgetter(i), examples)) for i, row in enumerate(x.unbind(0))]


def squared_error(model: Model, examples: Data) -> Tensor:
    """Return the mean squared error of a task."""
    x, y = examples
    return ((model(x) - y) ** 2).mean()
