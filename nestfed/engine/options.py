"""The options of a run: arguments of `simulate` and tables of an experiment file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nestfed.core import Metric, NestfedError, one_of, whole
from nestfed.data.random import Purpose, Streams
from nestfed.engine.encode import Encoding
from nestfed.engine.reduce import Reduction


@dataclass(frozen=True)
class Evaluation:
    """The [evaluation] table: when to evaluate, and which point to return."""

    every: int = 1
    """Rounds between evaluations; the last round is always evaluated."""
    keep: str = "last"
    """The point to return: last, uniform (drawn from all averaged iterates) or best (by `metric`)."""
    metric: str | Metric = ""
    """The metric that decides: for keep = "best", for tuning and in tables."""
    patience: int = 0
    """End the run after this many evaluations without a better value, with keep = "best"; 0 = run all rounds."""

    def __post_init__(self) -> None:
        _whole("evaluation.every", self.every, 1)
        one_of("evaluation.keep", self.keep, ("last", "uniform", "best"))
        _of_type("evaluation.metric", self.metric, (str, Metric), "the name of a metric, or a Metric")
        _whole("evaluation.patience", self.patience, 0)
        if self.patience and self.keep != "best":
            raise NestfedError(
                f"evaluation.patience = {self.patience} ends a run after its best point, so it needs evaluation.keep = 'best', "
                f"not {self.keep!r}."
            )

    def due(self, round: int, over: bool) -> bool:
        """Return whether to evaluate after this many rounds."""
        return over or round % self.every == 0


@dataclass(frozen=True)
class Gaussian:
    """Client-level differential privacy: clip each client's change, add Gaussian noise to the sum."""

    clip: float
    """The largest norm of a client's change, over all shared fields jointly."""
    noise: float
    """The noise on the sum of the changes, in multiples of `clip`."""

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise NestfedError(f"exchange.privacy.{name} must be a finite number above 0, not {value!r}.")


@dataclass(frozen=True)
class Exchange:
    """The [exchange] table: who takes part in a round and what crosses the network."""

    count: int = 0
    """Clients per round, drawn at random; 0 = all."""
    share: float = 1.0
    """The probability that a client takes part in a round."""
    failures: float = 0.0
    """The probability that a client fails to answer (simulation only)."""
    weights: str = "equal"
    """How clients are weighted in the mean: equal, or examples (by their training examples)."""
    encode: str = ""
    """Send fewer bits: float16, bfloat16 or int8 for uploads; int8/float16 rounds downloads too."""
    reduce: str = "mean"
    """How to combine uploads: mean, median, trimmed:SHARE, or clip:NORM (the mean of clipped changes)."""
    privacy: Gaussian | None = None
    """Differential privacy for clients; the run reports ε."""
    on_nan: str = "stop"
    """If a client's numbers become infinite or NaN: stop the run, or drop the client from the round."""

    def __post_init__(self) -> None:
        _whole("exchange.count", self.count, 0)
        if not _is_number(self.share) or not 0 < self.share <= 1:
            raise NestfedError(f"exchange.share must be in (0, 1], not {self.share!r}.")
        if self.count and self.share < 1:
            raise NestfedError("exchange.count and exchange.share exclude each other: set one of them.")
        if not _is_number(self.failures) or not 0 <= self.failures < 1:
            raise NestfedError(f"exchange.failures must be in [0, 1), not {self.failures!r}.")
        one_of("exchange.weights", self.weights, ("equal", "examples"))
        one_of("exchange.on_nan", self.on_nan, ("stop", "drop"))
        _of_type("exchange.encode", self.encode, str, "text")
        _of_type("exchange.reduce", self.reduce, str, "text")
        _of_type("exchange.privacy", self.privacy, (Gaussian, type(None)), "Gaussian(clip, noise)")
        if self.weights != "equal" and (self.reduce != "mean" or self.privacy):
            raise NestfedError("exchange.weights = 'examples' needs exchange.reduce = 'mean' and no privacy.")
        if self.privacy and self.reduce != "mean":
            raise NestfedError(f"exchange.privacy is a clipped mean: leave exchange.reduce out, not {self.reduce!r}.")
        if self.privacy and self.count:
            raise NestfedError(
                "exchange.privacy needs clients that take part always or with a given probability: set exchange.share "
                f"instead of exchange.count = {self.count}."
            )
        _ = self.encoding, self.reduction  # reject invalid values now

    @cached_property
    def encoding(self) -> Encoding:
        """How uploads and downloads are rounded."""
        return Encoding.parse(self.encode)

    @cached_property
    def reduction(self) -> Reduction:
        """How uploads are combined."""
        return Reduction("clip", self.privacy.clip) if self.privacy else Reduction.parse(self.reduce)

    def check(self, clients: int) -> None:
        """Reject a count above the number of clients."""
        if self.count > clients:
            raise NestfedError(f"exchange.count must be at most the number of clients, {clients}, not {self.count}.")

    def participants(self, clients: int) -> int:
        """Return the (expected) number of clients in a round."""
        return self.count or max(1, round(self.share * clients))

    def draw(self, streams: Streams, clients: int, round: int) -> list[int]:
        """Draw the clients of a round."""
        everybody = list(range(clients))
        if 0 < self.count < clients:
            generator = streams.at(Purpose.PARTICIPATION, 0, round)
            return sorted(generator.choice(clients, self.count, replace=False).tolist())
        if self.share < 1:
            chances = streams.at(Purpose.PARTICIPATION, 0, round).random(clients)
            return [n for n in everybody if chances[n] < self.share]
        return everybody


@dataclass(frozen=True)
class Execution:
    """The [execution] table: how to run clients. Results change by rounding only, except with `precision`.

    If the model draws random numbers, `accumulate` changes results too.
    """

    mode: str = "auto"
    """vmap (clients in one vectorised call, in chunks), loop (one after another), or auto (vmap for small dense models)."""
    workers: int = 0
    """Processes that share the clients; 0 = automatic."""
    compile: bool = False
    """Compile vectorised steps: takes a few seconds, then runs small dense problems several times faster."""
    device: str = "cpu"
    """The torch device for the clients."""
    precision: str = "full"
    """full, or bf16: compute matrix products and convolutions in 16 bits; state keeps its own type."""
    accumulate: int = 1
    """Evaluate each batch in this many pieces, to save memory; every piece has its own dropout masks."""
    memory_gb: float = 0.0
    """Keep clients' private fields on disk beyond this size; 0 = half of the machine's memory."""
    checkpoint_every: int = 10
    """Rounds between checkpoints."""
    profile: bool = False
    """Measure where the time goes."""

    def __post_init__(self) -> None:
        one_of("execution.mode", self.mode, ("auto", "vmap", "loop"))
        one_of("execution.precision", self.precision, ("full", "bf16"))
        _whole("execution.workers", self.workers, 0)
        _whole("execution.accumulate", self.accumulate, 1)
        _whole("execution.checkpoint_every", self.checkpoint_every, 1)
        _of_type("execution.compile", self.compile, bool, "true or false")
        _of_type("execution.profile", self.profile, bool, "true or false")
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise NestfedError(
                f"execution.device must be a device of torch, such as cpu, not {self.device!r}."
            ) from error
        if not _is_number(self.memory_gb) or not 0 <= self.memory_gb < math.inf:
            raise NestfedError(f"execution.memory_gb must be at least 0, not {self.memory_gb!r}.")
        if self.compile and self.mode == "loop":
            raise NestfedError("execution.compile needs vectorised clients: set execution.mode to vmap or auto.")


def _whole(name: str, value: Any, least: int) -> None:
    _of_type(name, value, int, "a whole number")  # a number of numpy would change the identity of a run
    whole(name, value, least)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_type(name: str, value: Any, kind: type | tuple[type, ...], words: str) -> None:
    if not isinstance(value, kind):
        raise NestfedError(f"{name} must be {words}, not {value!r}.")
