"""Convert an `nn.Module` to one flat vector and back, with views instead of copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, has_torch_function

from nestfed.core import Batch, NestfedError

MEAN, VARIANCE = "running_mean", "running_var"
_STRIDE = 2**20
"""From the seed of torch's generator at one call of dropout to that at the next; the pieces of a batch are in between."""


class Flat:
    """The layout of a model: an `nn.Module`, or a plain vector.

    With `buffers`, running statistics are one more vector, b. It may stand behind the parameters x.
    """

    def __init__(self, model: nn.Module | Tensor, buffers: bool = False) -> None:
        self.source = model
        if isinstance(model, Tensor):
            self.x0 = _vector(model)
            self.b0 = self.x0.new_zeros(0)
            self.random = self.planar = self.heavy = False
            return
        if not buffers:
            _reject_running_statistics(model)
        named = _named(model)
        self.names = list(named)
        self.shapes = [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.x0 = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.random = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        self.planar = any(isinstance(m, nn.Conv2d) for m in model.modules())
        self.heavy = any(isinstance(m, nn.modules.conv._ConvNd | nn.RNNBase) for m in model.modules())
        self._train = _skeleton(model).train()
        self._eval = _skeleton(model).eval()
        self._places = {training: _places(m) for training, m in ((True, self._train), (False, self._eval))}
        self._statistics = {training: _statistics(m) for training, m in ((True, self._train), (False, self._eval))}
        self.b0 = _concatenated(self._statistics[False]).to(self.x0)

    def bind(self, x: Tensor, *, train: bool = True) -> Any:
        """Return the user's module with the parameters x, for use until the next call; x itself for a vector.

        Storing views in one module costs a fraction of `torch.func.functional_call`, and modules that recompute
        activations find them in the backward pass.
        """
        if isinstance(self.source, Tensor):
            return x
        module = self._train if train else self._eval
        d = self.x0.numel()
        if len(self.b0) and (x.numel() > d or not train):
            self._load(self._statistics[train], x[d:] if x.numel() > d else self.b0)
        x = x[:d]
        if torch.compiler.is_compiling():
            return partial(torch.func.functional_call, module, dict(zip(self.names, self._values(x))))
        for places, value in zip(self._places[train], self._values(x)):
            for table, name in places:
                table[name] = value
        return module

    @contextmanager
    def tracking(self, sample: Batch, piece: int) -> Iterator[None]:
        """Evaluate a piece of a batch with its running statistics; keep those after the first evaluation of its step."""
        places = self._statistics[True]
        if piece == 0:
            self._load(places, self.b0 if sample.buffers is None else sample.buffers)
        yield
        if not sample.tape.evaluations:
            sample.tape.buffers = _concatenated(places)

    def feasible(self, b: Tensor) -> Tensor:
        """Return running statistics with variances of at least 0."""
        low = [torch.full_like(table[k], 0 if k == VARIANCE else -torch.inf) for table, k in self._statistics[False]]
        return torch.maximum(b, torch.cat([v.reshape(-1) for v in low]).to(b))

    def changing(self) -> dict[str, Tensor]:
        """Return copies of the buffers that are not running statistics."""
        if isinstance(self.source, Tensor):
            return {}
        known = {id(table[k]) for table, k in self._statistics[True]}
        return {
            name: b.clone()
            for name, b in self._train.named_buffers()
            if id(b) not in known and not name.endswith("num_batches_tracked")
        }

    def own(self, x: Tensor, *, train: bool = False) -> Any:
        """Return a module of its own with the parameters x, through which gradients reach x; x itself for a vector."""
        if isinstance(self.source, Tensor):
            return x
        module = self._train if train else self._eval
        kept = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        memo: dict[int, Any] = {id(t): t for t in kept}
        b = x[self.x0.numel() :] if x.numel() > self.x0.numel() else self.b0
        x = x[: self.x0.numel()]
        for (table, name), value in zip(self._statistics[train], self._parts(b)):
            memo[id(table[name])] = value
        for places, value in zip(self._places[train], self._values(x)):
            memo |= {id(table[name]): value for table, name in places}
        return copy.deepcopy(module, memo)

    def module(self, x: Tensor) -> nn.Module | Tensor:
        """Return a copy of the user's model with the parameters x, in evaluation mode."""
        if isinstance(self.source, Tensor):
            return x.detach().clone()
        result = copy.deepcopy(self.source)
        d = self.x0.numel()
        with torch.no_grad():
            if x.numel() > d:
                for (table, name), value in zip(_statistics(result), self._parts(x[d:])):
                    table[name].copy_(value)
            for parameter, part in zip(_trainable(result), torch.split(x[:d], self.sizes)):
                parameter.copy_(part.view_as(parameter))
        return result.eval()

    def vector(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return x0 with these parameters in place of its own; reject one that the model does not have."""
        parts = dict(zip(self.names, torch.split(self.x0, self.sizes)))
        shapes = dict(zip(self.names, self.shapes))
        for name, value in named.items():
            if shapes.get(name) != value.shape:
                has = f"of shape {tuple(shapes[name])}" if name in shapes else "none of this name"
                raise NestfedError(
                    f"The trained model has a parameter {name} of shape {tuple(value.shape)}, but this problem's model has "
                    f"{has}: both problems must be built on the same module."
                )
            parts[name] = value.detach().to(self.x0).reshape(-1)
        return torch.cat(list(parts.values()))

    def statistics(self, model: nn.Module) -> Tensor:
        """Return the running statistics of a trained copy of the user's module; nothing if this problem keeps none."""
        return _concatenated(_statistics(model)).to(self.x0) if len(self.b0) else self.b0

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the trained parameters."""
        if isinstance(self.source, Tensor):
            return {"x": tuple(self.x0.shape)}
        return {name: tuple(shape) for name, shape in zip(self.names, self.shapes)}

    def to(self, device: torch.device) -> None:
        """Move x0, and the model's frozen parameters and buffers."""
        self.x0, self.b0 = self.x0.to(device), self.b0.to(device)
        if not isinstance(self.source, Tensor):
            for skeleton in (self._train, self._eval):
                for module in skeleton.modules():
                    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                    for table in tables:
                        for name, tensor in table.items():
                            if tensor is not None and not tensor.is_meta:
                                table[name] = tensor.to(device)

    def _parts(self, b: Tensor) -> list[Tensor]:
        """Return copies of the parts of b, because a layer changes its statistics in place."""
        shapes = [table[name].shape for table, name in self._statistics[False]]
        return [part.clone().view(s) for part, s in zip(torch.split(b, [s.numel() for s in shapes]), shapes)]

    def _load(self, places: Statistics, b: Tensor) -> None:
        for (table, name), value in zip(places, self._parts(b.detach())):
            table[name] = value

    def _values(self, x: Tensor) -> list[Tensor]:
        return [p.view(shape) for p, shape in zip(torch.split(x, self.sizes), self.shapes)]


def _vector(model: Tensor) -> Tensor:
    """Return a copy of a model that is a plain vector."""
    if model.dim() != 1 or not model.is_floating_point():
        raise NestfedError(
            f"The model must be an nn.Module or a vector of floats, not {model.dtype} {tuple(model.shape)}."
        )
    return model.detach().clone()


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen by name; reject a model without any, or with several dtypes."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        kind = type(model).__name__
        frozen = "; all are frozen (requires_grad=False)" if any(True for _ in model.parameters()) else ""
        raise NestfedError(f"{kind} has no parameters to train{frozen}.")
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1:
        raise NestfedError(f"All parameters must have one dtype, but {type(model).__name__} has {dtypes}.")
    return named


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def _skeleton(model: nn.Module) -> nn.Module:
    """Copy a module without the memory of its parameters, which every call provides; frozen ones stay."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in _trainable(model)}
    return copy.deepcopy(model, memo)


Places = list[list[tuple[dict[str, Any], str]]]


def _places(module: nn.Module) -> Places:
    """Return where each trained parameter is stored: in two places if two layers share it."""
    held = [(m._parameters, k, p) for m in module.modules() for k, p in m._parameters.items()]
    return [[(table, k) for table, k, p in held if p is parameter] for parameter in _trainable(module)]


Statistics = list[tuple[dict[str, Any], str]]


def _keeping(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that keep running statistics, with their names."""
    return [
        (name or "The model", m)
        for name, m in model.named_modules()
        if getattr(m, "track_running_stats", False) and m._buffers.get(MEAN) is not None
    ]


def _statistics(model: nn.Module) -> Statistics:
    """Return where running statistics are stored."""
    for name, module in _keeping(model):
        if getattr(module, "momentum", None) is None:
            raise NestfedError(
                f"{name} ({type(module).__name__}) averages over all its batches (momentum=None), which needs a count for each "
                "client: give it a momentum such as 0.1."
            )
    return [(module._buffers, name) for _, module in _keeping(model) for name in (MEAN, VARIANCE)]


def _concatenated(places: Statistics) -> Tensor:
    parts = [table[name].detach().reshape(-1) for table, name in places]
    return torch.cat(parts) if parts else torch.zeros(0)


def _reject_running_statistics(model: nn.Module) -> None:
    for name, module in _keeping(model):
        raise NestfedError(
            f"{name} ({type(module).__name__}) keeps running statistics, which are not parameters and would not be averaged: "
            "use GroupNorm or LayerNorm, or track_running_stats=False, or the problem's option buffers='average' or 'private'."
        )


def channels_last(leaf: Tensor) -> Tensor:
    """Lay out images (…, channels, height, width) with channels last, which makes convolutions faster on a CPU."""
    if leaf.dim() < 4 or not leaf.is_floating_point():
        return leaf
    if leaf.shape[-3] > 1:
        return leaf.movedim(-3, -1).contiguous().movedim(-1, -3)
    strides = list(leaf.contiguous().stride())
    strides[-3] = 1  # one channel: no data moves, but the strides select the convolution
    return leaf.contiguous().as_strided(leaf.shape, strides)


class KeyedDropout(TorchFunctionMode):
    """Draw dropout masks from a key instead of a global generator.

    A mask is a pure function of (key, number of the call, index of the element). It is therefore the same
    vectorised or not, at both points of a variance-reduced step, and after a resume.

    With `alone`, clients are not vectorised, and a call may be repeated by activation checkpointing in a backward pass
    in this mode (`gradients_at`). It then keeps its number, which is stored in the seed of torch's generator: torch
    restores that generator before it repeats a part of a model. So fork and seed it with the key around an evaluation.
    """

    def __init__(self, key: Tensor, alone: bool = False) -> None:
        super().__init__()
        self.key = key
        self.calls = 0
        self._first = int(key) if alone else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `dropout` and pass everything else through."""
        kwargs = kwargs or {}
        if func is not nn.functional.dropout:
            return func(*args, **kwargs)
        return self._dropout(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        position = torch.arange(x.numel(), device=x.device).view(x.shape)
        bits = _mix(_mix(position + (self._number() << 40)) ^ self.key)
        kept = ((bits >> 24) & 0xFFFFFF) >= round(p * 2**24)
        return x * kept.to(x.dtype) / (1 - p)

    def _number(self) -> int:
        """Return the number of this call, or of the call that it repeats."""
        self.calls += 1
        if self._first is None:
            return self.calls
        mark = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed((mark + _STRIDE) % 2**63)
        return (mark - self._first) // _STRIDE % 2**22 + 1  # as many as fit into the position below


def gradients_at(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor], unused: bool = False
) -> tuple[Any, ...]:
    """Return the gradients with respect to the leaves; with `unused`, None for those that the outputs do not use.

    `torch.autograd.grad` suspends every `TorchFunctionMode`, but parts that are recomputed need `KeyedDropout`. So inside
    a mode call torch's engine, as it does.
    """
    if not has_torch_function(tuple(leaves)):
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=unused)
    engine = torch.autograd.Variable._execution_engine
    found: tuple[Any, ...] = engine.run_backward(
        tuple(outputs), tuple(cotangents), False, False, tuple(leaves), allow_unreachable=unused, accumulate_grad=False
    )
    return found


def uniform(key: Tensor, shape: tuple[int, ...], stream: int) -> Tensor:
    """Return numbers in [0, 1), float64, as a pure function of (key, stream, index of the element).

    They are independent of the dropout masks of the same key.
    """
    position = torch.arange(math.prod(shape), device=key.device).view(shape)
    bits = _mix(_mix(position + (stream << 40) + (1 << 62)) ^ key)
    return ((bits >> 20) & 0xFFFFFFFFFFF).double() / 2**44


def _mix(h: Tensor) -> Tensor:
    """Scramble 64 bits (the finaliser of SplitMix64; `&` makes torch's arithmetic shift a logical one)."""
    h = (h ^ ((h >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    h = (h ^ ((h >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return h ^ ((h >> 31) & 0x1FFFFFFFF)
