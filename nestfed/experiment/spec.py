"""Experiment files (TOML) and their tables."""

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
from typing import Any, ClassVar

from nestfed.core import EXPERIMENTS, NestfedError, Power, one_of, unknown, whole
from nestfed.data.schema import EMPTY, TableSchema
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.experiment.prepare import DataSpec, PartitionSpec
from nestfed.experiment.study import SitesSpec, StudySpec
from nestfed.metrics import find
from nestfed.problems import OBJECTIVES
from nestfed.problems.objective import Objective

for _path in sorted((Path(__file__).parent / "packaged").glob("*.toml")):
    EXPERIMENTS.add(_path.stem, _path)


@dataclass(frozen=True)
class ModelSpec:
    """The [model] table: the name of a network, and its options."""

    name: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSpec:
    """The [run] table: rounds, local steps and seed."""

    rounds: int = 100
    """Communication rounds."""
    q: int = 10
    """Local iterations per round."""
    seed: int = 0
    sites: str = "federated"
    """federated, or alone: each client trains alone, and the metrics are averaged."""

    def __post_init__(self) -> None:
        whole("run.rounds", self.rounds, 0)
        whole("run.q", self.q)
        one_of("run.sites", self.sites, ("federated", "alone"))


@dataclass(frozen=True)
class AlgorithmSpec:
    """The [algorithm] table: the name of a method, and its hyper-parameters."""

    name: str = ""
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerSpec:
    """The [server] table: the name of a server that moves the method's points, and its options; empty = the method's own."""

    name: str = ""
    hyper: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hyper and not self.name:
            raise NestfedError("[server] has options but no name: set server.name, such as server.name = 'adam'.")


@dataclass(frozen=True)
class WarmUpSpec:
    """The [warm_up] table: the first of the run's rounds have another method, and possibly another objective."""

    rounds: int = 0
    """They count among run.rounds; 0 = no warm-up."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    server: ServerSpec = ServerSpec()
    problem: Objective = Objective()
    """The objective, on the same model and data; without a name it is that of the run."""

    def __post_init__(self) -> None:
        whole("warm_up.rounds", self.rounds, 0)
        if self.rounds and not self.algorithm.name:
            raise NestfedError(
                "[warm_up] has rounds but no method: set warm_up.algorithm, such as { name = 'fedavg', eta = 0.1 }."
            )


@dataclass(frozen=True)
class Experiment:
    """An experiment, and the methods to compare on it."""

    data: DataSpec = DataSpec()
    schema: TableSchema = EMPTY
    """What the columns of data.file are; those that it does not name are detected."""
    partition: PartitionSpec = PartitionSpec()
    model: ModelSpec = ModelSpec()
    problem: Objective = Objective()
    """The [problem] table: the options of the named objective."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    server: ServerSpec = ServerSpec()
    warm_up: WarmUpSpec = WarmUpSpec()
    run: RunSpec = RunSpec()
    evaluation: Evaluation = Evaluation()
    exchange: Exchange = Exchange()
    execution: Execution = Execution()
    sites: SitesSpec = SitesSpec()
    study: StudySpec = StudySpec()
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The tables as written, to override them and to record them."""

    portable: ClassVar[bool] = True
    """Whether another process can build it from its tables."""

    def __reduce__(self) -> tuple[Any, ...]:
        return from_tables, (copy.deepcopy(dict(self.source)),)

    def __post_init__(self) -> None:
        if self.evaluation.metric:
            find(self.evaluation.metric)
        if self.run.sites == "alone" and self.evaluation.keep != "last":
            raise NestfedError("run.sites = 'alone' keeps each client's last model: set evaluation.keep = 'last'.")
        if self.run.sites == "alone" and self.warm_up.rounds:
            raise NestfedError(
                "run.sites = 'alone' trains each client alone and has no warm-up: set warm_up.rounds = 0."
            )
        if self.warm_up.rounds and self.warm_up.rounds >= self.run.rounds:
            raise NestfedError(
                f"The warm-up has {self.warm_up.rounds} rounds (warm_up.rounds), which leaves none of the run's "
                f"{self.run.rounds} for its own method: set run.rounds higher."
            )

    @property
    def is_study(self) -> bool:
        """Whether the file has a [study] table, so that `nestfed train` and a deployment compare all of its methods."""
        return "study" in self.source

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """The [methods.NAME] tables: changes to the rest of the file, and settings to `tune`."""
        return dict(self.source.get("methods", {}))

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain data."""
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k != "source"}
        settings["model"] = {"name": self.model.name, **self.model.options}
        settings |= _named(self) | {"schema": self.schema.to_tables()}
        if not self.server.name:
            del settings["server"]
        settings["warm_up"] = {
            "rounds": self.warm_up.rounds, **{k: v for k, v in _named(self.warm_up).items() if v["name"]},
        }  # fmt: skip
        if not self.warm_up.rounds:
            del settings["warm_up"]
        del settings["sites"]  # where the tables are
        if self.is_study:
            settings["methods"] = copy.deepcopy(self.methods)
        else:
            del settings["study"]
        return settings

    def digest(self) -> str:
        """Return a short hash of these settings."""
        return hashlib.sha256(json.dumps(identity(self.resolved()), sort_keys=True).encode()).hexdigest()[:10]

    def with_overrides(self, changes: Mapping[str, Any]) -> Experiment:
        """Return the experiment with dotted settings changed: {"algorithm.alpha": 0.1}."""
        tables = copy.deepcopy(dict(self.source))
        changed: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if not name:
                raise NestfedError(f"{key!r} is not a setting; write section.name, with a section of {_known()}.")
            if section not in _SECTIONS:
                raise unknown("section", section, _SECTIONS)
            changed.setdefault(section, {})[name] = value
        for section, table in changed.items():
            tables[section] = _merged(section, tables.get(section, {}), table)
        return from_tables(tables)

    def for_method(self, name: str) -> Experiment:
        """Return the experiment with one of its methods, or with one of the library's algorithms."""
        from nestfed.algorithms import METHODS

        if name not in self.methods:
            if name == self.algorithm.name:
                return self
            try:
                METHODS[name]
            except NestfedError as error:
                if self.methods:
                    raise NestfedError(f"{error} The methods of this file are {', '.join(self.methods)}.") from error
                raise
            return self._with_algorithm(name)
        tables = copy.deepcopy(dict(self.source))
        own = {"algorithm": {}, **self.methods[name]}
        for section, table in own.items():
            if section == "tune":
                continue
            if section not in _SECTIONS:
                raise unknown("section", section, [*_SECTIONS, "tune"], owner=f"methods.{name}")
            keep = {"name": name} if section == "algorithm" else tables.get(section, {})
            tables[section] = _merged(section, keep, table)
        return from_tables(tables)

    def steps(self) -> tuple[str, ...]:
        """Return the names of the method's step sizes."""
        from nestfed.algorithms import METHODS

        return METHODS[self.algorithm.name].steps

    def grid(self, name: str) -> dict[str, Any]:
        """Return the values to tune by dotted setting; a name without a section is a hyper-parameter."""
        given = self.methods.get(name, {}).get("tune", {})
        return {key if "." in key else f"algorithm.{key}": values for key, values in given.items()}

    def alone(self) -> Experiment:
        """Return the experiment without its other methods."""
        return from_tables({k: v for k, v in self.source.items() if k != "methods"})

    def _with_algorithm(self, name: str) -> Experiment:
        """Return the experiment with another algorithm, which keeps the hyper-parameters that both have."""
        from nestfed.algorithms import METHODS

        known = {f.name for f in dataclasses.fields(METHODS[name])}  # type: ignore[arg-type]
        tables = copy.deepcopy(dict(self.source))
        tables["algorithm"] = {"name": name, **{k: v for k, v in self.algorithm.hyper.items() if k in known}}
        return from_tables(tables)


def _named(spec: Experiment | WarmUpSpec) -> dict[str, dict[str, Any]]:
    """Return method, server and objective as plain tables."""
    return {
        "problem": {"name": spec.problem.name, **dataclasses.asdict(spec.problem)},
        "algorithm": {"name": spec.algorithm.name, **spec.algorithm.hyper},
        "server": {"name": spec.server.name, **spec.server.hyper},
    }


def _merged(section: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with changes; a new objective or server keeps only the options that it has."""
    if section == "warm_up":
        return _merged_warm_up(base, changes)
    name = changes.get("name", "")
    if section == "server" and "name" in changes and name != base.get("name"):
        base = {k: v for k, v in base.items() if k in _server_options(name)}
    if section == "problem" and name != base.get("name") and isinstance(name, str) and name in OBJECTIVES:
        base = {k: v for k, v in base.items() if k in _options(name)}
    return {**base, **changes}


def _merged_warm_up(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [warm_up] table with changes, which may be dotted ("algorithm.eta"); a new method has its own settings."""
    inner: dict[str, Any] = {}
    for key, value in changes.items():
        table, dot, name = key.partition(".")
        inner[table] = {**inner.get(table, {}), name: value} if dot else value
    found = dict(base)
    for key, value in inner.items():
        old = found.get(key, {})
        if isinstance(value, Mapping) and key in _OF_WARM_UP:
            fresh = key == "algorithm" and value.get("name", old.get("name")) != old.get("name")
            value = _merged(key, {} if fresh else old, value)
        found[key] = value
    return found


def _options(objective: str) -> dict[str, Any]:
    """Return the options of an objective with their defaults."""
    return {f.name: f.default for f in dataclasses.fields(OBJECTIVES[objective])}


def _server_options(name: Any) -> set[str]:
    """Return the options of a server; none of an unknown one."""
    from nestfed.algorithms import SERVERS

    known = isinstance(name, str) and name in SERVERS
    return {f.name for f in dataclasses.fields(SERVERS[name])} if known else set()  # type: ignore[arg-type]


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the results and differ from their defaults, by table.

    Of [execution] only precision affects them. Leaving defaults out lets the library add an option without making
    existing runs foreign: the default of a new option is what was done before.
    """
    found = {k: _chosen(k, v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    return {k: v for k, v in found.items() if v}


def _chosen(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without execution settings that do not matter and without defaults."""
    if section == "warm_up":
        inner = {k: _chosen(k, v) if k in _OF_WARM_UP else v for k, v in table.items()}
        return {k: v for k, v in inner.items() if v}
    name = table.get("name", "")
    kind = OBJECTIVES[name] if section == "problem" and name in OBJECTIVES else _SECTIONS.get(section)
    fields = dataclasses.fields(kind) if kind is not None else ()
    plain = json.loads(json.dumps({f.name: f.default for f in fields if f.default is not dataclasses.MISSING}))
    return {
        k: v
        for k, v in json.loads(json.dumps(table)).items()
        if (section != "execution" or k == "precision") and (k == "name" or k not in plain or v != plain[k])
    }


def difference(now: Mapping[str, Any], before: Mapping[str, Any], where: str = "") -> str:
    """Return the first setting that differs between two identities, in one clause; nothing if none does."""
    for key in {**now, **before}:
        one, other, name = now.get(key), before.get(key), f"{where}{key}"
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            if inside := difference(one or {}, other or {}, f"{name}."):
                return inside
        elif one != other:
            here, there = (repr(of[key]) if key in of else "its default" for of in (now, before))
            return f"{name} is {here} instead of {there}"
    return ""


_SECTIONS: dict[str, type] = {
    "data": DataSpec,
    "schema": TableSchema,
    "partition": PartitionSpec,
    "model": ModelSpec,
    "problem": Objective,
    "algorithm": AlgorithmSpec,
    "server": ServerSpec,
    "warm_up": WarmUpSpec,
    "run": RunSpec,
    "evaluation": Evaluation,
    "exchange": Exchange,
    "execution": Execution,
    "sites": SitesSpec,
    "study": StudySpec,
}
_OF_WARM_UP = {name: _SECTIONS[name] for name in ("algorithm", "server", "problem")}
"""The tables inside [warm_up]."""
_MOVED = {
    "run.evaluate": "data.held_out",
    "run.output": "evaluation.keep",
    "run.participation": "exchange.count (clients per round) or exchange.share (their probability)",
    "run.noise": "exchange.privacy = { clip, noise }",
    **{f"run.{f.name}": f"{section}.{f.name}" for section in ("evaluation", "exchange", "execution")
       for f in dataclasses.fields(_SECTIONS[section])},
}  # fmt: skip
"""Settings of version 0.1 and their new names."""


def _known() -> str:
    return ", ".join(_SECTIONS)


def packaged() -> dict[str, Path]:
    """Return the packaged experiments by name."""
    return dict(sorted(EXPERIMENTS.items()))


def read(path: str | Path) -> Experiment:
    """Read an experiment file, or a packaged experiment by name."""
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
        super().__init__(" ".join(sentence.split()))  # a name or value may contain line breaks
        self.section, self.key = section, key


def _line(text: str, section: str, key: str) -> str:
    """Return ", line N" for a setting, or nothing if a simple search does not find it."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            header = stripped.strip("[] ")
            inside = header == section
            if (inside and not key) or header == f"{section}.{key}":
                return f", line {number}"
        elif inside and stripped.split("=")[0].strip().strip("\"'") == key:
            return f", line {number}"
    return ""


def from_tables(tables: Mapping[str, Any]) -> Experiment:
    """Check the tables and return the experiment."""
    for name in tables:
        if name not in (*_SECTIONS, "methods"):
            raise _SettingError(name, "", str(unknown("section", name, _SECTIONS)))
    _reject_moved(tables)
    for name, table in tables.items():
        _reject_odd(name, "", table)
    _reject_odd_methods(tables.get("methods", {}))
    parsed = {name: _section(name, cls, tables.get(name, {})) for name, cls in _SECTIONS.items()}
    return Experiment(**parsed, source=tables)


def _reject_moved(tables: Mapping[str, Any]) -> None:
    """Reject settings of version 0.1, all in one sentence."""
    old = []
    for section, table in tables.items():
        inside = table if isinstance(table, Mapping) else {}
        old += [(section, key, _MOVED[f"{section}.{key}"]) for key in inside if f"{section}.{key}" in _MOVED]
        if section == "methods":
            with_grid = [
                f"methods.{name}" for name, own in inside.items() if isinstance(own, Mapping) and "grid" in own
            ]
            old += [(method, "grid", f"{method}.tune") for method in with_grid]
    if old:
        sentence = "; ".join(f"{section}.{key} is now {place}" for section, key, place in old)
        raise _SettingError(*old[0][:2], f"{sentence}.")


def _reject_odd(section: str, key: str, value: Any, depth: int = 0) -> None:
    """Reject TOML values that no setting has: dates, deep nesting, numbers beyond 64 bits."""
    where = f"{section}.{key}" if key else f"[{section}]"
    if depth > 16:
        raise _SettingError(section, key, f"{where} is nested too deeply.")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _reject_odd(section, key or str(name), inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _reject_odd(section, key, inner, depth + 1)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise _SettingError(section, key, f"{where} is a whole number beyond 64 bits.")
    elif isinstance(value, date | time):
        raise _SettingError(section, key, f"{where} must be a number, text, true, false or a list, not {value}.")


def _reject_odd_methods(methods: Any) -> None:
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
    if cls in (ModelSpec, AlgorithmSpec, ServerSpec):
        rest = {k: _setting(v) for k, v in table.items() if k != "name"}
        name = table.get("name", cls().name)
        if not isinstance(name, str):
            raise _SettingError(section, "name", f"{section}.name must be text, not {name!r}.")
        return _made(section, cls, name, rest)
    if cls is SitesSpec:
        return _made(section, cls, dict(table))
    if cls is Objective:
        return _objective(section, table)
    if cls is TableSchema:
        try:
            return TableSchema.from_tables(table)
        except NestfedError as error:
            raise _SettingError(section, "", str(error)) from error
    inner: dict[str, Any] = {}
    if cls is WarmUpSpec:
        inner = {k: _section(f"{section}.{k}", _OF_WARM_UP[k], v) for k, v in table.items() if k in _OF_WARM_UP}
        table = {k: v for k, v in table.items() if k not in inner}
    values = inner | _values(section, table, {f.name: f.default for f in dataclasses.fields(cls)})
    try:
        return cls(**values)
    except NestfedError as error:  # raised by the table's own checks
        key = next((k for k in values if f"{section}.{k}" in str(error)), "")
        raise _SettingError(section, key, str(error)) from error


def _made(section: str, cls: type, *values: Any) -> Any:
    try:
        return cls(*values)
    except NestfedError as error:
        raise _SettingError(section, "", str(error)) from error


def _values(section: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's settings in the types of their defaults; reject those without one."""
    for key in table:
        if key not in defaults:
            known = [f"{section}.{k}" for k in defaults]
            raise _SettingError(section, key, str(unknown("setting", f"{section}.{key}", known)))
    return {key: _typed(section, key, value, defaults[key]) for key, value in table.items()}


def _objective(section: str, table: Mapping[str, Any]) -> Objective:
    """Return the options of the objective that a [problem] table names."""
    options = {k: v for k, v in table.items() if k != "name"}
    name = _typed(section, "name", table.get("name", ""), "")
    if name not in OBJECTIVES:
        if not name and not options:
            return Objective()
        raise _SettingError(section, "name", str(unknown("problem", name, OBJECTIVES)))
    own = _options(name)
    for key in options:
        owners = [other for other in OBJECTIVES if key in _options(other)] if key not in own else []
        if owners:
            sentence = f"{section}.{key} belongs to {', '.join(owners)}; {name} has {', '.join(sorted(own))}."
            raise _SettingError(section, key, sentence)
    try:
        made: Objective = OBJECTIVES[name](**_values(section, options, own))
    except _SettingError:
        raise
    except NestfedError as error:
        raise _SettingError(section, "", f"[{section}] {error}") from error
    return made


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
    try:
        return Gaussian(**value)
    except NestfedError as error:
        raise _SettingError("exchange", "privacy", str(error)) from error


def _setting(value: Any) -> Any:
    """Return an option of a model or method; a list becomes a tuple."""
    return tuple(value) if isinstance(value, list) else value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse settings of the command line: section.name=value, with a value in TOML or plain text."""
    changes = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise NestfedError(f"{override!r} is not a setting; write section.name=value.")
        changes[key] = parse_value(key, text)[0]
    return changes


def parse_value(key: str, text: str) -> tuple[Any, bool]:
    """Return a value in TOML and true, or else plain text and false."""
    try:
        return tomllib.loads(f"v = {text}")["v"], True
    except tomllib.TOMLDecodeError:
        return text, False
    except RecursionError as error:
        raise NestfedError(f"{key} is nested too deeply.") from error


def hyper_parameters(spec: AlgorithmSpec) -> dict[str, Any]:
    """Return hyper-parameters; {scale = 1.0, shift = 1.0, power = 0.33} becomes the schedule scale/(shift+t)^power."""
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
