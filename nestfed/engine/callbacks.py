"""Callbacks of a run: called at its start, with every record, and at its end.

An error of a callback ends that callback with a warning. The run and its record continue.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from nestfed.core import NestfedError
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.round import Record


@dataclass(frozen=True)
class Started:
    """What a callback learns at the start of a run."""

    method: str
    settings: Mapping[str, Any]
    """The hyper-parameters, rounds, q, seed and the number of clients."""
    history: Sequence[Record]
    """The records of a resumed run so far."""
    directory: Path | None


class Callback:
    """The base class of callbacks; override what you need. A plain function is called with every record."""

    def start(self, run: Started) -> None:
        """Begin."""

    def record(self, record: Record) -> None:
        """Receive the record of a round, with its metrics if it was evaluated."""

    def end(self, error: BaseException | None) -> None:
        """Finish; `error` is what ended the run early, if anything did."""


def check_callbacks(given: Any) -> None:
    """Reject what cannot be called back, before a run starts."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise NestfedError(f"callbacks must be a list, such as [print], not {given!r}.")
    for each in given:
        if isinstance(each, type):
            raise NestfedError(
                f"callbacks contains the class {each.__name__}: pass an object, such as {each.__name__}()."
            )
        if not isinstance(each, Callback) and not callable(each):
            raise NestfedError(f"callbacks contains {each!r}: pass functions of a record, or Callback objects.")


@dataclass
class Callbacks:
    """The callbacks of a run, each until its first error."""

    given: Sequence[Callback | Callable[[Record], Any]] = ()
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    warn: Callable[[str], None] = warnings.warn
    _started: bool = False

    def __post_init__(self) -> None:
        self._active = [each if isinstance(each, Callback) else _Function(each) for each in self.given]

    def start(self, history: Sequence[Record], directory: Path | None) -> None:
        """Start them, once: a warm-up and the rounds after it are one run."""
        if not self._started:
            self._started = True
            run = Started(self.method, self.settings, list(history), directory)
            self._each(lambda callback: callback.start(run))

    def record(self, record: Record) -> None:
        """Give each a copy of a record."""
        self._each(lambda callback: callback.record(dict(record)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End them if they have been started."""
        if self._started:
            self._each(lambda callback: callback.end(error))

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in list(self._active):
            try:
                call(callback)
            except Exception as error:
                self._active.remove(callback)
                reason = " ".join(str(error).split())
                self.warn(
                    f"The callback {_name(callback)} failed and is not called again: {type(error).__name__}: {reason}"
                )


class _Function(Callback):
    def __init__(self, function: Callable[[Record], Any]) -> None:
        self.function = function

    def record(self, record: Record) -> None:
        self.function(record)


def _name(callback: Callback) -> str:
    return getattr(callback.function, "__name__", "") if isinstance(callback, _Function) else type(callback).__name__


def settings_of(method: AnyAlgorithm, **run: Any) -> dict[str, Any]:
    """Return a method's hyper-parameters and a run's options as plain data; a schedule by its name."""
    hyper = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
    return {k: v if isinstance(v, int | float | str) else repr(v) for k, v in {**hyper, **run}.items()}
