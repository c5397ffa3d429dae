"""Convert an `nn.Module` to one flat vector and back, with views instead of copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nestfed.core import NestfedError


class Flat:
    """The layout of a model: an `nn.Module`, or a plain vector."""

    def __init__(self, model: nn.Module | Tensor) -> None:
        self.source = model
        if isinstance(model, Tensor):
            if model.dim() != 1 or not model.is_floating_point():
                raise NestfedError(
                    f"The model must be an nn.Module or a vector of floats, not {model.dtype} {tuple(model.shape)}."
                )
            self.x0 = model.detach().clone()
            self.random = self.planar = self.heavy = False
            return
        _reject_running_statistics(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            kind = type(model).__name__
            frozen = "; all are frozen (requires_grad=False)" if any(True for _ in model.parameters()) else ""
            raise NestfedError(f"{kind} has no parameters to train{frozen}.")
        dtypes = {p.dtype for p in named.values()}
        if len(dtypes) > 1:
            raise NestfedError(f"All parameters must have one dtype, but {type(model).__name__} has {dtypes}.")
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

    def bind(self, x: Tensor, *, train: bool = True) -> Any:
        """Return the user's module with the parameters x, for use until the next call; x itself for a vector.

        Storing views in one module costs a fraction of `torch.func.functional_call`, and modules that recompute
        activations find them in the backward pass.
        """
        if isinstance(self.source, Tensor):
            return x
        module = self._train if train else self._eval
        if torch.compiler.is_compiling():
            return partial(torch.func.functional_call, module, dict(zip(self.names, self._values(x))))
        for places, value in zip(self._places[train], self._values(x)):
            for table, name in places:
                table[name] = value
        return module

    def own(self, x: Tensor, *, train: bool = False) -> Any:
        """Return a module of its own with the parameters x, through which gradients reach x; x itself for a vector."""
        if isinstance(self.source, Tensor):
            return x
        module = self._train if train else self._eval
        kept = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        memo: dict[int, Any] = {id(t): t for t in kept}
        for places, value in zip(self._places[train], self._values(x)):
            memo |= {id(table[name]): value for table, name in places}
        return copy.deepcopy(module, memo)

    def module(self, x: Tensor) -> nn.Module | Tensor:
        """Return a copy of the user's model with the parameters x, in evaluation mode."""
        if isinstance(self.source, Tensor):
            return x.detach().clone()
        result = copy.deepcopy(self.source)
        with torch.no_grad():
            for parameter, part in zip(_trainable(result), torch.split(x, self.sizes)):
                parameter.copy_(part.view_as(parameter))
        return result.eval()

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the trained parameters."""
        if isinstance(self.source, Tensor):
            return {"x": tuple(self.x0.shape)}
        return {name: tuple(shape) for name, shape in zip(self.names, self.shapes)}

    def to(self, device: torch.device) -> None:
        """Move x0, and the model's frozen parameters and buffers."""
        self.x0 = self.x0.to(device)
        if not isinstance(self.source, Tensor):
            for skeleton in (self._train, self._eval):
                for module in skeleton.modules():
                    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                    for table in tables:
                        for name, tensor in table.items():
                            if tensor is not None and not tensor.is_meta:
                                table[name] = tensor.to(device)

    def _values(self, x: Tensor) -> list[Tensor]:
        return [p.view(shape) for p, shape in zip(torch.split(x, self.sizes), self.shapes)]


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


def _reject_running_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and getattr(module, "running_mean", None) is not None:
            raise NestfedError(
                f"{name or 'The model'} ({type(module).__name__}) keeps running statistics, which are not parameters and "
                "would not be averaged: use GroupNorm or LayerNorm, or track_running_stats=False."
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

    A mask is a pure function of (key, index of the call, index of the element). It is therefore the same
    vectorised or not, at both points of a variance-reduced step, and after a resume.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

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
        self.calls += 1
        position = torch.arange(x.numel(), device=x.device).view(x.shape)
        bits = _mix(_mix(position + (self.calls << 40)) ^ self.key)
        kept = ((bits >> 24) & 0xFFFFFF) >= round(p * 2**24)
        return x * kept.to(x.dtype) / (1 - p)


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
