"""An experiment file (TOML) and the objects that it describes."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from nestfed.core import EXPERIMENTS, NestfedError, Power
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.experiment.prepare import DataSpec, PartitionSpec

for _path in sorted((Path(__file__).parent / "packaged").glob("*.toml")):
    EXPERIMENTS.add(_path.stem, _path)


@dataclass(frozen=True)
class ModelSpec:
    """The [model] table: a network by name, the rest are its options."""

    name: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProblemSpec:
    """The [problem] table: what is minimised, and the batches for it."""

    name: str = ""
    """classify, auroc, auprc, invariant, sine, omniglot or language."""
    batch: int = 32
    initial_batch: int = 0
    """The batch at t = 0, if it is to be another one."""
    outer: int = 4
    inner: int = 16
    inner_positives: int = 0
    margin: float = 0.1
    sigmoid: bool = False
    clip: float = 0.0
    ratio: float = 1.0
    dim: int = 10
    ways: int = 5
    """omniglot: classes in a task."""
    shots: int = 1
    """Support examples of each class; for sine, points of a task."""
    queries: int = 15
    """omniglot: query examples of each class."""
    tasks: int = 3
    """Tasks per client and iteration."""
    inner_lr: float = 0.01
    inner_steps: int = 1
    """Inner steps at evaluation; training takes one."""
    first_order: bool = False
    split: str = "characters"
    """omniglot: clients hold "characters" at random, or "alphabets", one each."""
    test_tasks: int = 600
    bptt: int = 35
    """language: words in a window, through which gradients flow."""
    vocabulary: int = 0
    """language: only so many of the most frequent words; 0 means all."""


@dataclass(frozen=True)
class RunSpec:
    """The [run] table: how long."""

    rounds: int = 100
    """Communication rounds."""
    q: int = 10
    """Local iterations in each."""
    seed: int = 0
    sites: str = "federated"
    """federated, or alone: every client trains by itself and the metrics are averaged."""

    def __post_init__(self) -> None:
        if self.sites not in ("federated", "alone"):
            raise NestfedError(f"run.sites must be federated or alone, not {self.sites!r}.")


@dataclass(frozen=True)
class AlgorithmSpec:
    """The [algorithm] table: a method by name, the rest are its hyper-parameters."""

    name: str = ""
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One experiment, and the methods that `compare` runs it with."""

    data: DataSpec = DataSpec()
    partition: PartitionSpec = PartitionSpec()
    model: ModelSpec = ModelSpec()
    problem: ProblemSpec = ProblemSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    run: RunSpec = RunSpec()
    evaluation: Evaluation = Evaluation()
    exchange: Exchange = Exchange()
    execution: Execution = Execution()
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The tables as they were written, for overriding and for the record."""

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """The [methods.NAME] tables: what differs from the rest of the file, and what to `tune`."""
        return dict(self.source.get("methods", {}))

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain data."""
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k != "source"}
        settings["model"] = {"name": self.model.name, **self.model.options}
        settings["algorithm"] = {"name": self.algorithm.name, **self.algorithm.hyper}
        return settings

    def digest(self) -> str:
        """Return a short name of these settings."""
        return hashlib.sha256(json.dumps(identity(self.resolved()), sort_keys=True).encode()).hexdigest()[:10]

    def with_overrides(self, changes: Mapping[str, Any]) -> Experiment:
        """Return the experiment with dotted settings changed: {"algorithm.alpha": 0.1}."""
        tables = copy.deepcopy(dict(self.source))
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if not name or section not in _SECTIONS:
                raise NestfedError(f"{key!r} is no setting; write it as section.name, with a section of {_known()}.")
            tables.setdefault(section, {})[name] = value
        return from_tables(tables)

    def for_method(self, name: str) -> Experiment:
        """Return the experiment as one of its methods, or one of the library's algorithms, runs it."""
        from nestfed.algorithms import find

        if name not in self.methods:
            if name == self.algorithm.name:
                return self
            try:
                find(name)
            except NestfedError as error:
                if self.methods:
                    raise NestfedError(f"{error} This file's own methods are {', '.join(self.methods)}.") from error
                raise
            return self._with_algorithm(name)
        tables = copy.deepcopy(dict(self.source))
        own = {"algorithm": {}, **self.methods[name]}
        for section, table in own.items():
            if section == "tune":
                continue
            if section not in _SECTIONS:
                raise NestfedError(f"methods.{name}.{section}: the sections are {_known()} and tune.")
            keep = {"name": name} if section == "algorithm" else tables.get(section, {})
            tables[section] = {**keep, **table}
        return from_tables(tables)

    def grid(self, name: str) -> dict[str, Any]:
        """Return what a method tunes, by dotted setting; a name without a section is one of its hyper-parameters."""
        given = self.methods.get(name, {}).get("tune", {})
        return {key if "." in key else f"algorithm.{key}": values for key, values in given.items()}

    def _with_algorithm(self, name: str) -> Experiment:
        """Return the experiment with another algorithm that keeps the hyper-parameters it also has."""
        from nestfed.algorithms import find

        known = {f.name for f in dataclasses.fields(find(name))}  # type: ignore[arg-type]
        tables = copy.deepcopy(dict(self.source))
        tables["algorithm"] = {"name": name, **{k: v for k, v in self.algorithm.hyper.items() if k in known}}
        return from_tables(tables)


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that decide the numbers: all but how the clients are run."""
    execution = {"precision": settings["execution"]["precision"]} if "execution" in settings else {}
    return {**settings, "execution": execution}


_SECTIONS: dict[str, type] = {
    "data": DataSpec,
    "partition": PartitionSpec,
    "model": ModelSpec,
    "problem": ProblemSpec,
    "algorithm": AlgorithmSpec,
    "run": RunSpec,
    "evaluation": Evaluation,
    "exchange": Exchange,
    "execution": Execution,
}
_MOVED = {
    "run.evaluate": "data.held_out",
    "run.output": "evaluation.keep",
    "run.participation": "exchange.count (clients per round) or exchange.share (their probability)",
    "run.noise": "exchange.privacy = { clip, noise }",
    **{f"run.{f.name}": f"{section}.{f.name}" for section in ("evaluation", "exchange", "execution")
       for f in dataclasses.fields(_SECTIONS[section])},
}  # fmt: skip
"""Settings of version 0.1 and where they are now."""


def _known() -> str:
    return ", ".join(_SECTIONS)


def packaged() -> dict[str, Path]:
    """Return the experiments that come with the library, by name."""
    return dict(sorted(EXPERIMENTS.items()))


def read(path: str | Path) -> Experiment:
    """Read an experiment file, or one that comes with the library by its name."""
    path = packaged().get(str(path), Path(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(str(path), packaged(), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else "; `nestfed list` shows those that come with nestfed."
        raise NestfedError(f"There is no experiment file {str(path)!r}{hint}") from None
    except (OSError, ValueError) as error:
        raise NestfedError(f"{str(path)!r} cannot be read: {error}.") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NestfedError(f"{path} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise NestfedError(f"{path} is nested too deeply.") from error
    try:
        return from_tables(tables)
    except _SettingError as error:
        raise NestfedError(f"{path}{_line(text, error.section, error.key)}: {error}") from error


class _SettingError(NestfedError):
    def __init__(self, section: str, key: str, sentence: str) -> None:
        super().__init__(" ".join(sentence.split()))  # a name or value may hold line breaks
        self.section, self.key = section, key


def _line(text: str, section: str, key: str) -> str:
    """Return ", line N" for a setting, as far as a plain look finds it."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            inside = stripped.strip("[] ") == section
            if inside and not key:
                return f", line {number}"
        elif inside and stripped.split("=")[0].strip().strip("\"'") == key:
            return f", line {number}"
    return ""


def from_tables(tables: Mapping[str, Any]) -> Experiment:
    """Check the tables of an experiment and make it."""
    for name in tables:
        if name not in (*_SECTIONS, "methods"):
            near = difflib.get_close_matches(name, _SECTIONS, 1, 0.5)
            raise _SettingError(
                name,
                "",
                f"unknown section [{name}]; " + (f"did you mean [{near[0]}]?" if near else f"known are {_known()}."),
            )
    for name, table in tables.items():
        _refuse_odd(name, "", table)
    _refuse_odd_methods(tables.get("methods", {}))
    parsed = {name: _section(name, cls, tables.get(name, {})) for name, cls in _SECTIONS.items()}
    return Experiment(**parsed, source=tables)


def _refuse_odd(section: str, key: str, value: Any, depth: int = 0) -> None:
    """Refuse what TOML can say but no setting means: dates, endless nesting, numbers of hundreds of digits."""
    where = f"{section}.{key}" if key else f"[{section}]"
    if depth > 16:
        raise _SettingError(section, key, f"{where} is nested too deeply.")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_odd(section, key or str(name), inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_odd(section, key, inner, depth + 1)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise _SettingError(section, key, f"{where} is a whole number beyond 64 bits.")
    elif isinstance(value, date | time):
        raise _SettingError(section, key, f"{where} must be a number, text, true, false or a list, not {value}.")


def _refuse_odd_methods(methods: Any) -> None:
    if not isinstance(methods, Mapping):
        raise _SettingError("methods", "", f"[methods] must be a table of tables, not {methods!r}.")
    for name, table in methods.items():
        if not isinstance(table, Mapping):
            raise _SettingError("methods", name, f"methods.{name} must be a table, not {table!r}.")
        if "grid" in table:
            raise _SettingError("methods", name, f"methods.{name}.grid is now methods.{name}.tune.")
        for section, inner in table.items():
            if not isinstance(inner, Mapping):
                raise _SettingError("methods", name, f"methods.{name}.{section} must be a table, not {inner!r}.")


def _section(section: str, cls: type, table: Any) -> Any:
    if not isinstance(table, Mapping):
        raise _SettingError(section, "", f"[{section}] must be a table, not {table!r}.")
    if cls in (ModelSpec, AlgorithmSpec):
        rest = {k: _setting(v) for k, v in table.items() if k != "name"}
        name = table.get("name", cls().name)
        if not isinstance(name, str):
            raise _SettingError(section, "name", f"{section}.name must be text, not {name!r}.")
        return cls(name, rest)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in table.items():
        if moved := _MOVED.get(f"{section}.{key}"):
            raise _SettingError(section, key, f"{section}.{key} is now {moved}.")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}."
            raise _SettingError(section, key, f"unknown setting {section}.{key}; {hint}")
        values[key] = _typed(section, key, value, fields[key].default)
    try:
        return cls(**values)
    except NestfedError as error:  # the table rejects a value
        key = next((k for k in values if f"{section}.{k}" in str(error)), "")
        raise _SettingError(section, key, str(error)) from error


def _typed(section: str, key: str, value: Any, default: Any) -> Any:
    """Return a setting in the type of its default, or reject it."""
    if (section, key) == ("exchange", "privacy"):
        return _privacy(value)
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple):
            raise _SettingError(section, key, f"{section}.{key} must be a list, not {value!r}.")
        return tuple(value)
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float):
        fits = isinstance(value, int | float)
        value = float(value) if fits else value
    else:
        fits = isinstance(value, type(default))
    if not fits:
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type(default)]
        raise _SettingError(section, key, f"{section}.{key} must be {kind}, not {value!r}.")
    return value


def _privacy(value: Any) -> Gaussian | None:
    if value is None or isinstance(value, Gaussian):
        return value
    if not isinstance(value, Mapping) or set(value) != {"clip", "noise"}:
        raise _SettingError(
            "exchange", "privacy", f"exchange.privacy must be a table {{ clip = 1.0, noise = 1.1 }}, not {value!r}."
        )
    return Gaussian(**value)


def _setting(value: Any) -> Any:
    """Return a hyper-parameter; {scale, shift, power} is a decaying schedule."""
    return tuple(value) if isinstance(value, list) else value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read settings as they are written on the command line: section.name=value, the value as in TOML or as text."""
    changes = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise NestfedError(f"{override!r} is no setting; write it as section.name=value.")
        try:
            changes[key] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            changes[key] = text
        except RecursionError as error:
            raise NestfedError(f"{key} is nested too deeply.") from error
    return changes


def hyper_parameters(spec: AlgorithmSpec) -> dict[str, Any]:
    """Return hyper-parameters with schedules made: {scale = 1.0, shift = 1.0, power = 0.33} is scale/(shift+t)^power."""
    made = {}
    for key, value in spec.hyper.items():
        if isinstance(value, Mapping):
            try:
                value = Power(**value)
            except TypeError as error:
                raise NestfedError(
                    f"algorithm.{key} must be a number or a table {{scale, shift, power}}, not {dict(value)}."
                ) from error
        made[key] = value
    return made
