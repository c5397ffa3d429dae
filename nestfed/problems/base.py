"""The four kinds of problem. Users write f and g in plain torch; gradients come from automatic differentiation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nestfed.core import (
    Batch,
    Composed,
    Data,
    Differentiable,
    NestfedError,
    Problem,
    Saddle,
    Tracked,
    as_batch,
    one_of,
)
from nestfed.data.random import global_states
from nestfed.problems.flat import Flat, KeyedDropout, gradients_at

Model = Any
"""The model passed to f and g: the user's module with the current parameters, or the vector itself."""


def leading(data: Data, axes: int = 1) -> int:
    """Return the number of examples in a batch: the size of the leading axes of its first tensor."""
    leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor) and leaf.dim() >= axes]
    count = 1
    for size in leaves[0].shape[:axes] if leaves else ():
        count *= size
    return count if leaves else 0


class Domain(Protocol):
    """A closed convex set."""

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the set."""


@dataclass(frozen=True)
class Ball:
    """All x with ‖x‖ ≤ radius."""

    radius: float

    def project(self, x: Tensor) -> Tensor:
        """Shrink x onto the ball."""
        return x * (self.radius / x.norm().clamp_min(1e-30)).clamp(max=1.0)


@dataclass(frozen=True)
class Box:
    """All x with low ≤ x_i ≤ high."""

    low: float
    high: float

    def project(self, x: Tensor) -> Tensor:
        """Clamp every coordinate."""
        return x.clamp(self.low, self.high)


@dataclass(frozen=True)
class Simplex:
    """All x ≥ 0 with Σx_i = 1, the weights of a mixture."""

    def project(self, x: Tensor) -> Tensor:
        """Project by sorting (Duchi et al. 2008)."""
        ordered = x.sort(descending=True).values
        rank = torch.arange(1, x.numel() + 1, device=x.device, dtype=x.dtype)
        excess = (ordered.cumsum(0) - 1) / rank
        active = (ordered > excess).sum()
        shift = excess.gather(0, (active - 1).unsqueeze(0))
        return (x - shift).clamp_min(0)


class Modelled(Problem):
    """The base of all kinds, and of a kind of your own: a model, and optionally a penalty, a domain and a clipping norm.

    A model that keeps running statistics (BatchNorm) needs `buffers`: "average" shares and averages them, "private" keeps
    them on their client. Its clients run one after another.

    Inside an objective, `model_at(x)` is the model and `penalised` adds the penalty. Around it, `estimate` returns
    gradients of an expression; for anything else, evaluate inside `with self.evaluating(batch):` and count it with
    `batch.note`. These three respect dropout keys, precision, accumulation and clipping, so that all engines agree.
    Dropout in parts that are recomputed in the backward pass (`torch.utils.checkpoint`) needs `estimate`.
    """

    _inside = ""
    """The prefix of the user's parameters, if the problem puts the user's module into one of its own."""
    _inspected = False
    """`depends` is looking whether the loss without the penalty depends on the parameters."""

    def __init__(
        self,
        model: nn.Module | Tensor,
        *,
        penalty: Callable[[Model], Tensor] | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
        buffers: str = "",
    ) -> None:
        if clip is not None and not clip > 0:
            raise NestfedError(f"clip must be a norm above 0, not {clip:g}.")
        if buffers:
            one_of("buffers", buffers, ("average", "private"))
        self.flat = Flat(model, bool(buffers))
        self.buffers = buffers if len(self.flat.b0) else ""
        self.random, self.planar, self.heavy = self.flat.random, self.flat.planar, self.flat.heavy
        self.penalty, self.domain, self.clip = penalty, domain, clip

    @property
    def x0(self) -> Tensor:
        """The model's parameters as one vector."""
        return self.flat.x0

    @property
    def b0(self) -> Tensor:
        """The running statistics of the user's module as one vector."""
        return self.flat.b0

    def model_at(self, x: Tensor, *, train: bool = True) -> Model:
        """Return the model with the parameters x, for use in an objective until the next call; cheaper than `bind`."""
        return self.flat.bind(x, train=train)

    def bind(self, x: Tensor, *, train: bool = False) -> Model:
        """Return a copy of the user's module with the parameters x, or the vector itself."""
        return self.flat.own(x, train=train)

    def module(self, x: Tensor) -> Any:
        """Return a copy of the user's model with the parameters x."""
        return self.flat.module(x)

    def start(self, model: Any) -> Tensor:
        """Return the parameters of a model that was trained on another objective."""
        if isinstance(model, nn.Module) and isinstance(self.flat.source, nn.Module):
            x = self.flat.vector({self._inside + k: p for k, p in model.named_parameters() if p.requires_grad})
            return torch.cat([x, self.flat.statistics(model)])
        return super().start(model)

    def to(self, device: torch.device) -> None:
        """Move the model to a device."""
        self.flat.to(device)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the trained parameters."""
        return self.flat.parameters()

    def examples(self, data: Data) -> int:
        """Return the number of examples in one evaluation of this batch."""
        return leading(data)

    def cut(self, data: Data, pieces: int) -> list[tuple[float, Data]]:
        """Split a batch into pieces, each with its weight in the batch's mean loss."""
        return _cut(data, leading(data), pieces)

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the domain."""
        return x if self.domain is None else self.domain.project(x)

    def project_buffers(self, b: Tensor) -> Tensor:
        """Return running statistics with variances of at least 0."""
        return self.flat.feasible(b)

    def estimate(self, loss: Callable[..., Tensor], at: tuple[Tensor, ...], batch: Batch | Data) -> tuple[Tensor, ...]:
        """Return the gradients of loss(*at, data) with respect to each of `at`, and count the evaluation.

        The first of `at` is the model's vector; its gradient is clipped if the problem has a clipping norm.
        """
        sample = as_batch(batch)
        if sample.pieces == 1:
            with self.evaluating(sample):
                total, value = _gradients(lambda *y: loss(*y, sample.data), at, self._eager(sample))
        else:
            value = at[0].new_zeros(())
            total = tuple(torch.zeros_like(x) for x in at)
            for i, (share, part) in enumerate(self.cut(sample.data, sample.pieces)):
                with self.evaluating(sample, i):
                    found, one = _gradients(lambda *y: loss(*y, part), at, self._eager(sample))  # noqa: B023
                total = tuple(t.add(g, alpha=share) for t, g in zip(total, found))
                value = value + share * one
        sample.note(self.examples(sample.data), value)
        return self.clip_gradient(total[0], sample), *total[1:]

    def evaluating(self, sample: Batch, piece: int = 0) -> AbstractContextManager[Any]:
        """Return the context of an evaluation: random numbers from the batch's key, and its precision.

        Dropout is a function of the key, also when vectorised. All other random numbers come from torch's generator,
        seeded by the key for this evaluation, which works only for one client at a time. Every piece of a batch has
        numbers of its own.
        """
        stack = ExitStack()
        if self.buffers:
            stack.enter_context(self.flat.tracking(sample, piece))
        if sample.precision is not None:
            stack.enter_context(torch.autocast(tree_leaves(sample.data)[0].device.type, sample.precision))
        if self.random:
            if self.sequential or self._eager(sample):
                key = sample.key
                stack.enter_context(torch.random.fork_rng([key.device] if key.device.type == "cuda" else []))
                # Measured: seeding the generators of all devices takes 0.3 ms.
                seed = torch.default_generator.manual_seed if key.device.type == "cpu" else torch.manual_seed
                seed(int(key) + piece)
            stack.enter_context(self._keyed(sample, piece))
        return stack

    def _keyed(self, sample: Batch, piece: int = 0) -> AbstractContextManager[Any]:
        """Return the mode that draws dropout masks from the batch's key."""
        if not self.random:
            return nullcontext()
        return KeyedDropout(sample.key + piece, self.sequential or self._eager(sample))

    def _eager(self, sample: Batch) -> bool:
        """Return whether to use plain autograd: a layer cannot change its running statistics inside a transform."""
        return sample.eager or bool(self.buffers)

    def penalised(self, value: Tensor, model: Model) -> Tensor:
        """Return a loss, which must be one number, plus the penalty."""
        value = _one_number("f", value)
        if self.penalty is None:
            return value
        more = _one_number("penalty", self.penalty(model))
        return value + (more.detach() if self._inspected else more)

    def clipped(self, estimate: Tensor) -> Tensor:
        """Return an estimate of the gradient, shortened to the norm `clip`."""
        if self.clip is None:
            return estimate
        return estimate * (self.clip / estimate.norm().clamp_min(1e-30)).clamp(max=1.0)

    def clip_gradient(self, gradient: Tensor, sample: Batch) -> Tensor:
        """Return a gradient, clipped unless the method clips its own estimate."""
        return self.clipped(gradient) if sample.clips else gradient

    def depends(self, loss: Callable[[Tensor], Tensor]) -> bool:
        """Return whether a loss without its penalty depends on the parameters.

        Find out whether it draws random numbers, and how; reject those of generators that no key seeds.
        """
        leaf = self.x0.detach().clone().requires_grad_()
        cuda = leaf.device.type == "cuda"
        devices = [leaf.device] if cuda else []
        with (
            torch.random.fork_rng(devices),
            torch.enable_grad(),
            KeyedDropout(torch.zeros_like(leaf[0].long())) as mode,
        ):
            others = self.flat.changing()
            before = torch.cuda.get_rng_state(leaf.device) if cuda else torch.get_rng_state()
            unkeyed = global_states()
            self._inspected = True
            try:
                value = loss(leaf)
            finally:
                self._inspected = False
            if drawn := [name for name, state in global_states().items() if state != unkeyed[name]]:
                raise NestfedError(
                    f"The model or the objective draws from the global generator of {drawn[0]}, which does not depend on the "
                    "run's seed: use dropout, torch.rand or torch.randn."
                )
            now = self.flat.changing()
            if changed := [name for name, b in others.items() if not torch.equal(b, now[name])]:
                raise NestfedError(
                    f"The model changes its buffer {changed[0]} in training, but only parameters and the running statistics of "
                    "normalisation layers are averaged or kept by client: make it a parameter, or leave it constant."
                )
            after = torch.cuda.get_rng_state(leaf.device) if cuda else torch.get_rng_state()
            self.sequential = not torch.equal(before, after)
            self.random = self.random or self.sequential or mode.calls > 0
            return value.requires_grad and torch.autograd.grad(value, leaf, allow_unused=True)[0] is not None


class Direct(Differentiable, Modelled):
    """A problem whose gradient estimator is the gradient of one expression: subclasses define `loss`."""

    @abstractmethod
    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return the objective's estimate on this batch."""

    def grad(self, x: Tensor, batch: Batch | Data) -> Tensor:
        """Return the gradient of that estimate."""
        (gradient,) = self.estimate(lambda y, data: self.loss(y, data, train=True), (x,), batch)
        return gradient

    def inspect(self, batch: Batch) -> bool:
        """Return whether the loss depends on the parameters."""
        if type(self).grad is not Direct.grad:  # a gradient of its own, so the loss may not be the objective
            return True
        return self.depends(lambda x: self.loss(x, batch.data, train=True))


def _one_number(name: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise NestfedError(f"{name} must return one number as a tensor, not a {type(value).__name__}.")
    if value.dim() != 0:
        raise NestfedError(f"{name} must return one number for a batch, not a tensor of shape {tuple(value.shape)}.")
    return value


def _cut(data: Data, length: int, pieces: int) -> list[tuple[float, Data]]:
    """Split along the first axis; tensors of length 1 go into every piece."""
    if any(leaf.dim() < 1 or len(leaf) not in (1, length) for leaf in tree_leaves(data)):
        raise NestfedError(
            "accumulate: this problem's batches are not rows of examples, so they cannot be split into pieces."
        )
    size = -(-length // pieces)

    def piece(start: int) -> Data:
        return tree_map(lambda leaf: leaf[start : start + size] if len(leaf) == length else leaf, data)

    return [(min(size, length - start) / length, piece(start)) for start in range(0, length, size)]


def _gradients(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], eager: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients with respect to all arguments, and the value."""
    if not eager:
        gradients, value = torch.func.grad_and_value(function, argnums=tuple(range(len(at))))(*at)
        return gradients, value.to(at[0].dtype)
    leaves = tuple(x.detach().requires_grad_() for x in at)
    with torch.enable_grad():
        value = function(*leaves)
    found = gradients_at(leaves, [value], [torch.ones_like(value)], unused=len(at) > 1)
    # A player that the loss does not use gets a zero gradient.
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves)), value.detach().to(at[0].dtype)


class Minimize(Direct):
    """F(x) = E f(x; ξ), an average of losses. `f(model, batch)` returns the batch's mean loss."""

    def __init__(self, f: Callable[[Model, Data], Tensor], model: nn.Module | Tensor, **options: Any) -> None:
        self.f = f
        super().__init__(model, **options)

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return f on this batch."""
        model = self.model_at(x, train=train)
        return self.penalised(self.f(model, data), model)


class Conditional(Direct, Tracked):
    """F(x) = E_ξ f_ξ(E_{η|ξ} g_η(x, ξ)).

    A batch is a pair (outer, inner): b outer samples ξ, and inner samples η with leading axes (b, m), or
    (1, m) if all outer samples share the inner ones. `g(model, outer, inner)` returns one value per pair,
    (b, m, …). The library takes the mean over m, *inside* f (Eq. 3 of the FCSG paper). `f(u, outer)` maps
    these means, (b, …), to (b,). The estimator's bias is O(1/m).

    SOX tracks the inner mean of every outer example, which lowers this bias. It needs batches (outer, inner, which) with
    the numbers of the b outer samples among the client's own, `outer_examples`, the largest number of them on a client,
    and `inner_dim`, the number of values that g returns per pair.
    """

    def __init__(
        self,
        f: Callable[[Tensor, Data], Tensor],
        g: Callable[[Model, Data, Data], Tensor],
        model: nn.Module | Tensor,
        *,
        outer_examples: int | None = None,
        inner_dim: int = 1,
        **options: Any,
    ) -> None:
        self.f, self.g, self._outer_examples, self.inner_dim = f, g, outer_examples, inner_dim
        super().__init__(model, **options)

    @property
    def outer_examples(self) -> int:  # type: ignore[override]
        """The largest number of outer examples on a client."""
        if self._outer_examples is None:
            raise NestfedError(
                "A method with one state per outer example (sox) needs to know how many of them a client has: pass "
                f"{type(self).__name__}(…, outer_examples=…), for Pairs outer_examples=clients.outer_examples."
            )
        return self._outer_examples

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return the mean over the outer samples of f(mean over the inner samples of g)."""
        outer, inner = data[:2]
        model = self.model_at(x, train=train)
        u = self.inner_mean(self._values(model, outer, inner))
        return self.penalised(self._outer(u, outer).mean(), model)

    def _values(self, model: Model, outer: Data, inner: Data) -> Tensor:
        values = self.g(model, outer, inner)
        if values.dim() < 2:
            raise NestfedError(
                f"g must return one value per pair of outer and inner sample, shape (b, m, …), not {tuple(values.shape)}."
            )
        return values

    def _outer(self, u: Tensor, outer: Data) -> Tensor:
        losses = self.f(u, outer)
        if losses.shape != u.shape[:1]:
            raise NestfedError(
                f"f must return one number per outer sample, shape ({len(u)},), not {tuple(losses.shape)}."
            )
        return losses

    # A subclass may override the first two, to keep inner values on another scale, such as their logarithms, or the
    # third, to track something else than means. With weight 1 it must agree with `loss`.

    def inner_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the inner samples, from (b, m, …) to (b, …)."""
        return values.mean(1)

    def moving_mean(self, u: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        """Return (1−w)u + w·value."""
        return (1 - weight) * u + weight * value

    def refreshed(self, values: Tensor, u: Tensor, weight: Tensor, outer: Data) -> tuple[Tensor, Tensor, Tensor]:
        """Return per outer sample an expression with the gradient ∇g_iᵀ∇f_i(u_i), the loss f_i(u_i), and the new u_i.

        values: those of g, (b, m, …); u: the old u_i, (b, …); weight: (b,).
        """
        value = self.inner_mean(values)
        new = self.moving_mean(u, value, weight.view(-1, *[1] * (value.dim() - 1)))
        losses = self._outer(new, outer)
        return losses / weight, losses, new

    def outer_ids(self, batch: Batch | Data) -> Tensor:
        """Return the numbers of the outer samples among the client's own."""
        data = as_batch(batch).data
        if len(data) != 3:
            raise NestfedError(
                "A method with one state per outer example (sox) needs batches (outer, inner, which), where `which` are "
                f"the numbers of the outer samples among the client's own, but this batch has {len(data)} parts."
            )
        return data[2]

    def tracked_grad(self, x: Tensor, u: Tensor, weight: Tensor, batch: Batch | Data) -> tuple[Tensor, Tensor]:
        """Return the gradient at the moving means of the inner values, and these means.

        It is the gradient of mean_i f_i((1−w_i)u_i + w_i g_i(x))/w_i.
        """
        sample = as_batch(batch)
        data = (*sample.data[:2], u, weight)
        total, loss, means = torch.zeros_like(x), x.new_zeros(()), []
        for i, (share, part) in enumerate(self.cut(data, sample.pieces) if sample.pieces > 1 else [(1.0, data)]):
            with self.evaluating(sample, i):
                gradient, (value, new) = _gradient_with(lambda y: self._tracked(y, *part), x, self._eager(sample))  # noqa: B023
            total, loss = total.add(gradient, alpha=share), loss + share * value
            means.append(new)
        sample.note(self.examples(sample.data), loss)
        return self._once(self.clip_gradient(total, sample), sample), torch.cat(means).to(u.dtype)

    def _tracked(
        self, x: Tensor, outer: Data, inner: Data, u: Tensor, weight: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        model = self.model_at(x)
        values = self._values(model, outer, inner)
        if values[0, 0].numel() != self.inner_dim:
            raise NestfedError(
                f"g returns {values[0, 0].numel()} values per pair of outer and inner sample, not inner_dim = {self.inner_dim}."
            )
        scaled, losses, new = self.refreshed(values, u.view(len(values), *values.shape[2:]), weight, outer)
        objective = self.penalised(scaled.mean(), model)
        return objective, (objective - (scaled - losses).mean(), new.flatten(1) if new.dim() > 1 else new[:, None])

    def _once(self, gradient: Tensor, sample: Batch) -> Tensor:
        """Reject an outer example that a batch has twice, with different inner samples for one state.

        Vectorised clients get NaN, and the engine then evaluates the batch again, one client at a time.
        """
        if leading(sample.data[1]) == 1:  # both have the same inner value
            return gradient
        twice = (self.outer_ids(sample).sort().values.diff() == 0).any()
        if sample.eager and bool(twice):
            raise NestfedError("sox: a batch has an outer example twice; draw outer examples without replacement.")
        return torch.where(twice, torch.nan, gradient)

    def examples(self, data: Data) -> int:
        """Return the number of outer and inner samples."""
        return leading(data[0]) + leading(data[1], 2)

    def cut(self, data: Data, pieces: int) -> list[tuple[float, Data]]:
        """Split along the outer samples; shared inner samples go into every piece."""
        return _cut(data, leading(data[0]), pieces)


def _gradient_with(
    function: Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor]]], x: Tensor, eager: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the gradient of the first result, and the others."""
    if not eager:
        return torch.func.grad(function, has_aux=True)(x)
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value, (one, other) = function(leaf)
    (gradient,) = gradients_at([leaf], [value], [torch.ones_like(value)])
    return gradient, (one.detach(), other.detach())


class Compositional(Direct, Composed):
    """F(x) = f(E_ξ g(x; ξ)), with an inner value in R^p that does not depend on the outer sample.

    A batch is a pair (outer, inner) = (ζ, ξ). `g(model, inner)` returns the batch's mean inner value, (p,);
    `f(u, outer)` returns the outer loss at an inner value u.
    """

    def __init__(
        self,
        f: Callable[[Tensor, Data], Tensor],
        g: Callable[[Model, Data], Tensor],
        model: nn.Module | Tensor,
        inner_dim: int,
        **options: Any,
    ) -> None:
        self.f, self.g, self.inner_dim = f, g, inner_dim
        super().__init__(model, **options)

    def loss(self, x: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return f(g(x; ξ); ζ)."""
        outer, inner = data
        model = self.model_at(x, train=train)
        return self.penalised(self.f(self.g(model, inner), outer), model)

    def examples(self, data: Data) -> int:
        """Return the number of outer and inner samples."""
        return leading(data[0]) + leading(data[1])

    def cut(self, data: Data, pieces: int) -> list[tuple[float, Data]]:
        """Raise an error: the inner value is a mean over the whole batch, inside f."""
        raise NestfedError("accumulate: a Compositional problem needs its whole batch at once; draw smaller batches.")

    def inner(self, x: Tensor, batch: Batch | Data) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return g(x; ξ) as one row, and its pullback, which includes the gradient of a penalty."""
        sample = as_batch(batch)

        def value(y: Tensor) -> tuple[Tensor, Tensor]:
            model = self.model_at(y)
            return self.g(model, sample.data[1]), self.penalised(y.new_zeros(()), model)

        with self.evaluating(sample):
            (u, extra), pull = vjp(value, x, self._eager(sample), partial(self._keyed, sample))
        if u.shape != (self.inner_dim,):
            raise NestfedError(f"g must return {self.inner_dim} values (inner_dim), not shape {tuple(u.shape)}.")
        sample.note(leading(sample.data[1]))
        one = torch.ones_like(extra)
        return u[None], lambda v: self.clip_gradient(pull((v[0], one)), sample)

    def outer_grad(self, u: Tensor, batch: Batch | Data) -> Tensor:
        """Return ∇f(u; ζ)."""
        sample = as_batch(batch)
        with self.evaluating(sample):
            (gradient,), value = _gradients(
                lambda v: _one_number("f", self.f(v[0], sample.data[0])), (u,), self._eager(sample)
            )
        sample.note(leading(sample.data[0]), value)
        return gradient

    def which(self, batch: Batch | Data) -> Tensor:
        """Return 0: there is one task."""
        return torch.zeros(1, dtype=torch.long, device=self.x0.device)


def vjp(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    eager: bool,
    keyed: Callable[[], AbstractContextManager[Any]],
) -> tuple[tuple[Tensor, Tensor], Callable[[tuple[Tensor, Tensor]], Tensor]]:
    """Return the two values of a function, and its pullback; `keyed` is the mode for parts that it recomputes."""
    if not eager:
        found = torch.func.vjp(function, x)
        return found[0], lambda cotangents: found[1](cotangents)[0]
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        values = function(leaf)
    live = [i for i, v in enumerate(values) if v.requires_grad]

    def pullback(cotangents: tuple[Tensor, Tensor]) -> Tensor:
        with keyed():
            (gradient,) = gradients_at([leaf], [values[i] for i in live], [cotangents[i] for i in live])
        return gradient

    return (values[0].detach(), values[1].detach()), pullback


class Minimax(Saddle, Modelled):
    """min over θ, max over w of E f(θ, w; ξ). `f(model, w, batch)` returns the batch's mean loss."""

    def __init__(
        self,
        f: Callable[[Model, Tensor, Data], Tensor],
        model: nn.Module | Tensor,
        w0: Tensor,
        *,
        dual_domain: Domain | None = None,
        **options: Any,
    ) -> None:
        self.f, self._w0, self.dual_domain = f, w0.detach().clone(), dual_domain
        super().__init__(model, **options)

    @property
    def w0(self) -> Tensor:
        """The starting point of the maximising player."""
        return self._w0.to(self.x0)

    def loss_at(self, theta: Tensor, w: Tensor, data: Data, *, train: bool = False) -> Tensor:
        """Return f on this batch."""
        model = self.model_at(theta, train=train)
        return self.penalised(self.f(model, w, data), model)

    def grads(self, theta: Tensor, w: Tensor, batch: Batch | Data) -> tuple[Tensor, Tensor]:
        """Return ∇_θ f and ∇_w f on this batch."""
        g, h = self.estimate(lambda a, b, data: self.loss_at(a, b, data, train=True), (theta, w), batch)
        return g, h

    def inspect(self, batch: Batch) -> bool:
        """Return whether the loss depends on the parameters of the model."""
        if type(self).grads is not Minimax.grads:  # gradients of its own, so the loss may not be the objective
            return True
        return self.depends(lambda theta: self.loss_at(theta, self.w0, batch.data, train=True))

    def project_dual(self, w: Tensor) -> Tensor:
        """Return the nearest point of the dual domain."""
        return w if self.dual_domain is None else self.dual_domain.project(w)
