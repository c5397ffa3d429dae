"""An experiment file (TOML) and the objects that it describes."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from nestfed.core import EXPERIMENTS, NestfedError, Power, unknown
from nestfed.experiment.prepare import DataSpec, PartitionSpec
from nestfed.problems import OBJECTIVES
from nestfed.problems.objective import Objective

for _path in sorted((Path(__file__).parent / "packaged").glob("*.toml")):
    EXPERIMENTS.add(_path.stem, _path)


@dataclass(frozen=True)
class ModelSpec:
    """The [model] table: a network by name, the rest are its options."""

    name: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSpec:
    """The [run] table: how long, how it is evaluated, where."""

    rounds: int = 100
    q: int = 10
    seed: int = 0
    every: int = 1
    evaluate: str = "central"
    """central: on the test set. clients: each on examples of its own; only counts of scores are put together."""
    metric: str = ""
    """The metric that decides: for tuning, for output = "best", and in tables."""
    output: str = "last"
    participation: int | float = 0
    """Clients per round by count (whole number) or probability; 0 means all."""
    failures: float = 0.0
    encode: str = ""
    """What is sent in fewer bits: float16, bfloat16 or int8 for uploads; int8/float16 rounds downloads too."""
    reduce: str = "mean"
    """In place of the mean over clients: median, trimmed:SHARE, or clip:NORM, the mean of clipped changes."""
    noise: float = 0.0
    """Gaussian noise for privacy, in multiples of clip's NORM; ε is told."""
    on_nan: str = "stop"
    """What becomes of a run when a client's numbers go wrong: stop, or "drop" that client from its round."""
    mode: str = "auto"
    """How clients are run: vmap (vectorised), loop (one after another), or auto."""
    workers: int = 0
    """Processes that share the clients out; 0 means as many as pay."""
    compile: bool = False
    """Compile vectorised steps: some seconds at the start, then small dense problems are several times faster."""
    precision: str = "full"
    """bf16 computes products and convolutions in 16 bits; all state keeps its own type."""
    accumulate: int = 1
    """Evaluate every batch in this many pieces, when it does not fit as a whole."""
    memory_gb: float = 0.0
    """What clients keep between rounds lies on disk beyond this; 0 means half of the machine's memory."""
    device: str = "cpu"
    checkpoint_every: int = 10
    sites: str = "federated"
    """federated, or "alone": every client trains by itself and the metrics are averaged."""


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
    problem: Objective = Objective()
    """The [problem] table: the options of the objective that it names."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    run: RunSpec = RunSpec()
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The tables as they were written, for overriding and for the record."""

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """The [methods.NAME] tables: what differs from the rest of the file, and the `grid` to tune over."""
        return dict(self.source.get("methods", {}))

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain data."""
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k != "source"}
        settings["model"] = {"name": self.model.name, **self.model.options}
        settings["problem"] = {"name": self.problem.name, **settings["problem"]}
        settings["algorithm"] = {"name": self.algorithm.name, **self.algorithm.hyper}
        return settings

    def digest(self) -> str:
        """Return a short name of these settings."""
        return hashlib.sha256(json.dumps(identity(self.resolved()), sort_keys=True).encode()).hexdigest()[:10]

    def with_overrides(self, changes: Mapping[str, Any]) -> Experiment:
        """Return the experiment with dotted settings changed: {"algorithm.alpha": 0.1}."""
        tables = copy.deepcopy(dict(self.source))
        changed: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if not name or section not in _SECTIONS:
                raise NestfedError(f"{key!r} is not a setting; write section.name, with a section of {_known()}.")
            changed.setdefault(section, {})[name] = value
        for section, table in changed.items():
            tables[section] = _merged(section, tables.get(section, {}), table)
        return from_tables(tables)

    def for_method(self, name: str) -> Experiment:
        """Return the experiment as one of its methods, or one of the library's algorithms, runs it."""
        from nestfed.algorithms import METHODS

        if name not in self.methods:
            if name == self.algorithm.name:
                return self
            try:
                METHODS[name]
            except NestfedError as error:
                if self.methods:
                    raise NestfedError(f"{error} This file's own methods are {', '.join(self.methods)}.") from error
                raise
            return self._with_algorithm(name)
        tables = copy.deepcopy(dict(self.source))
        for section, table in self.methods[name].items():
            if section == "grid":
                continue
            if section not in _SECTIONS:
                raise NestfedError(f"methods.{name}.{section}: the sections are {_known()} and grid.")
            tables[section] = _merged(section, {} if section == "algorithm" else tables.get(section, {}), table)
        return from_tables(tables)

    def _with_algorithm(self, name: str) -> Experiment:
        """Return the experiment with another algorithm that keeps the hyper-parameters it also has."""
        from nestfed.algorithms import METHODS

        known = {f.name for f in dataclasses.fields(METHODS[name])}  # type: ignore[arg-type]
        tables = copy.deepcopy(dict(self.source))
        tables["algorithm"] = {"name": name, **{k: v for k, v in self.algorithm.hyper.items() if k in known}}
        return from_tables(tables)


def _merged(section: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with changes; options that only the base's objective has are left behind with it."""
    name = changes.get("name", "")
    if section == "problem" and name != base.get("name") and isinstance(name, str) and name in OBJECTIVES:
        base = {k: v for k, v in base.items() if k in _options(name)}
    return {**base, **changes}


def _options(objective: str) -> dict[str, Any]:
    """Return the options of an objective with their defaults."""
    return {f.name: f.default for f in dataclasses.fields(OBJECTIVES[objective])}


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that decide the numbers: all but how the clients are run."""
    how = ("mode", "workers", "compile", "accumulate", "memory_gb", "device")
    # Settings that did not always exist leave the name of an older experiment as it was.
    new = {"reduce": "mean", "noise": 0.0, "on_nan": "stop"}
    run = {k: v for k, v in settings.get("run", {}).items() if k not in how and (k not in new or v != new[k])}
    return {**settings, "run": run}


_SECTIONS: dict[str, type] = {
    "data": DataSpec,
    "partition": PartitionSpec,
    "model": ModelSpec,
    "problem": Objective,
    "algorithm": AlgorithmSpec,
    "run": RunSpec,
}


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
        raise unknown("experiment file", str(path), packaged()) from None
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
            raise _SettingError(name, "", str(unknown("section", name, _SECTIONS)))
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
    if cls is Objective:
        return _objective(table)
    return cls(**_values(section, table, {f.name: f.default for f in dataclasses.fields(cls)}))


def _values(section: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's settings in the types of their defaults; reject those without one."""
    for key in table:
        if key not in defaults:
            known = [f"{section}.{k}" for k in defaults]
            raise _SettingError(section, key, str(unknown("setting", f"{section}.{key}", known)))
    return {key: _typed(section, key, value, defaults[key]) for key, value in table.items()}


def _objective(table: Mapping[str, Any]) -> Objective:
    """Return the options of the objective that the [problem] table names."""
    options = {k: v for k, v in table.items() if k != "name"}
    name = _typed("problem", "name", table.get("name", ""), "")
    if name not in OBJECTIVES:
        if not name and not options:
            return Objective()
        raise _SettingError("problem", "name", str(unknown("problem", name, OBJECTIVES)))
    own = _options(name)
    for key in options:
        owners = [other for other in OBJECTIVES if key in _options(other)] if key not in own else []
        if owners:
            sentence = f"problem.{key} belongs to {' and '.join(owners)}; {name} has {', '.join(sorted(own))}."
            raise _SettingError("problem", key, sentence)
    try:
        made: Objective = OBJECTIVES[name](**_values("problem", options, own))
    except _SettingError:
        raise
    except NestfedError as error:
        raise _SettingError("problem", "", f"[problem] {error}") from error
    return made


def _typed(section: str, key: str, value: Any, default: Any) -> Any:
    """Return a setting in the type of its default, or refuse it."""
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple):
            raise _SettingError(section, key, f"{section}.{key} must be a list, not {value!r}.")
        return tuple(value)
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float) or key == "participation":
        fits = isinstance(value, int | float)
        value = float(value) if fits and key != "participation" else value
    else:
        fits = isinstance(value, type(default))
    if not fits:
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type(default)]
        raise _SettingError(section, key, f"{section}.{key} must be {kind}, not {value!r}.")
    return value


def _setting(value: Any) -> Any:
    """Return a hyper-parameter; {scale, shift, power} is a decaying schedule."""
    return tuple(value) if isinstance(value, list) else value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read settings as they are written on the command line: section.name=value, the value as in TOML or as text."""
    changes = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise NestfedError(f"{override!r} is not a setting; write section.name=value.")
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
