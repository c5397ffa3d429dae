"""Cases by name, their values as plain data, and where two sets of values differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPECTED = Path(__file__).with_name("expected")
LARGE = 20
"""An array with more numbers than this is stored as its size, mean, norm and five of its numbers."""


@dataclass(frozen=True)
class Tolerance:
    """Two floats agree if they differ by no more than `relative` times the expected one, or by no more than `floor`."""

    relative: float
    floor: float

    def allows(self, expected: float, got: float) -> bool:
        if not (self.relative and math.isfinite(expected) and math.isfinite(got)):
            return repr(expected) == repr(got)  # which also tells 0 from -0
        return abs(expected - got) <= max(self.relative * abs(expected), self.floor)


DOUBLE = Tolerance(1e-10, 1e-12)
"""For float64. The floor is for what is 0 but for rounding, such as the drift of a single client."""
SINGLE = Tolerance(1e-4, 2e-5)
"""For float32, where processors with other vector units add in another order. The floor is for scores near 0, which are
sums of numbers near 1. From AVX-512 down to SSE4 no number of any case used more than a quarter of this."""
BITS = Tolerance(0.0, 0.0)
"""For two runs on one machine, of code that was only moved."""


@dataclass(frozen=True)
class Case:
    """One small run under a stable name, GROUP/NAME."""

    name: str
    values: Callable[[], Any]
    tolerance: Tolerance = DOUBLE
    slow: bool = False
    needs: str = ""
    """A module that is an extra of the library."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


CASES: dict[str, Case] = {}


def case(name: str, **how: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that returns nested values."""

    def register(values: Callable[[], Any]) -> Callable[[], Any]:
        if name in CASES:
            raise ValueError(f"There are two cases called {name}.")
        CASES[name] = Case(name, values, **how)
        return values

    return register


def every_case() -> dict[str, Case]:
    """Import the files of cases, which registers them, and return all."""
    for name in ("cases", "studies", "tables"):
        import_module(f"tests.values.{name}")
    return CASES


# ---------------------------------------------------------------------------------------------------------
# Values as plain data


def plain(value: Any, *, whole: bool = False) -> Any:
    """Return values as JSON knows them; large arrays are summed up unless they are wanted `whole`."""
    if isinstance(value, Mapping):
        return {str(k): plain(v, whole=whole) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, whole=whole) for v in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value.tolist() if whole or value.size <= LARGE or value.dtype.kind not in "fiub" else _summed_up(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A case gave a {type(value).__name__}, not a plain value.")


def _summed_up(array: np.ndarray) -> dict[str, Any]:
    flat = array.astype(np.float64).reshape(-1)
    places = [i * (flat.size - 1) // 4 for i in range(5)]
    return {
        "shape": list(array.shape),
        "mean": float(flat.mean()),
        "norm": float(np.sqrt((flat * flat).sum())),
        "some": flat[places].tolist(),
    }


def expected(group: str) -> dict[str, Any]:
    """Return the stored values of a group's cases."""
    path = EXPECTED / f"{group}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(group: str, values: Mapping[str, Any]) -> None:
    """Store the values of a group's cases, one case a line so that a diff shows which ones changed."""
    lines = (f"{json.dumps(name)}:{json.dumps(values[name], separators=(',', ':'))}" for name in sorted(values))
    (EXPECTED / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------
# Differences


def differences(expected: Any, got: Any, tolerance: Tolerance, path: str = "") -> Iterator[str]:
    """Tell every place where two values differ: floats by tolerance, everything else exactly."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected.keys() - got.keys():
            yield f"{path}/{key}: expected {_short(expected[key])}, got nothing"
        for key in got.keys() - expected.keys():
            yield f"{path}/{key}: expected nothing, got {_short(got[key])}"
        for key in expected.keys() & got.keys():
            yield from differences(expected[key], got[key], tolerance, f"{path}/{key}")
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            yield f"{path}: expected {len(expected)} values, got {len(got)}"
        for i, (one, other) in enumerate(zip(expected, got)):
            yield from differences(one, other, tolerance, f"{path}/{i}")
    elif type(expected) is float and type(got) is float:
        if not tolerance.allows(expected, got):
            off = abs(got - expected) / abs(expected) if expected else math.inf
            yield f"{path}: expected {expected!r}, got {got!r} (off by {off:.1e} of it)"
    elif type(expected) is not type(got) or expected != got:
        yield f"{path}: expected {_short(expected)}, got {_short(got)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
