"""An experiment on the user's own problem, methods, clients and metric instead of names in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, ClassVar

import torch

from nestfed.core import Algorithm, Metric, NestfedError, Served, as_clients, unknown
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.schedules import described
from nestfed.experiment.spec import Experiment, from_tables

Method = Algorithm[Any, Any] | Callable[..., Algorithm[Any, Any]]
"""A method: a class, functools.partial(class, beta=0.5), an object, or a function of its hyper-parameters."""
Judge = Callable[[Any], Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class Given:
    """The user's objects. A problem or clients may be a mapping by method, or a function of the seed."""

    problem: Any
    methods: Mapping[str, Method]
    clients: Any
    metric: Metric
    evaluate: Judge
    validate: Judge | None = None
    grids: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """For each method, the values to try by hyper-parameter."""

    def problem_of(self, method: str, seed: int) -> Any:
        """Return a method's problem for a seed."""
        return _of("problem", self.problem, method, seed)

    def clients_of(self, method: str, seed: int) -> Any:
        """Return a method's clients for a seed."""
        return as_clients(_of("clients", self.clients, method, seed))


@dataclass(frozen=True)
class OwnExperiment(Experiment):
    """An experiment on given objects. Its tables are [run], [evaluation], [exchange], [execution] and [algorithm]."""

    given: Given = field(default=None, compare=False)  # type: ignore[assignment]
    portable: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        given: Given,
        rounds: int,
        q: int,
        seed: int,
        evaluation: Evaluation,
        exchange: Exchange,
        execution: Execution,
    ) -> OwnExperiment:
        """Return the experiment with these options."""
        tables: dict[str, Any] = {"run": {"rounds": rounds, "q": q, "seed": seed}}
        # The metric is an object of the user's.
        tables["evaluation"] = {k: v for k, v in dataclasses.asdict(evaluation).items() if k != "metric"}
        tables |= {"exchange": dataclasses.asdict(exchange), "execution": dataclasses.asdict(execution)}
        return cls._of(tables, given)

    @classmethod
    def _of(cls, tables: Mapping[str, Any], given: Given) -> OwnExperiment:
        made = from_tables(tables)
        return cls(**{f.name: getattr(made, f.name) for f in dataclasses.fields(Experiment)}, given=given)

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """The user's methods by name."""
        return {name: {} for name in self.given.methods}

    def with_overrides(self, changes: Mapping[str, Any]) -> OwnExperiment:
        """Return the experiment with dotted settings changed."""
        return self._of(super().with_overrides(changes).source, self.given)

    def for_method(self, name: str) -> OwnExperiment:
        """Return the experiment with one of its methods."""
        if name not in self.given.methods:
            raise unknown("method", name, self.given.methods)
        given, tables = self.given.methods[name], {**self.source, "algorithm": {"name": name}}
        if isinstance(given, Served):
            tables["server"] = {"name": given.by.name or type(given.by).__name__}
        return self._of(tables, self.given)

    def alone(self) -> OwnExperiment:
        """Return the experiment itself: its tables have no other methods."""
        return self

    def steps(self) -> tuple[str, ...]:
        """Return the names of the method's step sizes."""
        name = self.algorithm.name
        given = self.given.methods[name]
        if isinstance(given, FunctionType):  # only what it returns knows
            first = {key: values[0] for key, values in self.given.grids.get(name, {}).items()}
            return _built(name, given, first).steps
        return given.steps if isinstance(given, Algorithm) else _class(given).steps

    def grid(self, name: str) -> dict[str, Any]:
        """Return the values to tune by dotted setting."""
        settings = _settings(self.given.methods[name])
        return {settings[key]: list(values) for key, values in self.given.grids.get(name, {}).items()}

    def method(self) -> Algorithm[Any, Any]:
        """Return the method with its hyper-parameters."""
        given, hyper = self.given.methods[self.algorithm.name], dict(self.algorithm.hyper)
        if isinstance(given, Served):
            return _changed(given.method, hyper).served_by(_changed(given.by, dict(self.server.hyper)))
        if isinstance(given, Algorithm):
            return _changed(given, hyper)
        return _built(self.algorithm.name, given, hyper)

    def check_metric(self, function: str, judge: Judge, problem: Any) -> None:
        """Reject a function of the user's that does not return the metric that decides, before any work starts."""
        with torch.no_grad():
            found, name = judge(problem.bind(problem.x0)), self.given.metric.name
        if name not in found:
            raise NestfedError(f"The metric is {name!r}, but {function} returns {', '.join(found)}.")

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, with the names of the user's classes."""
        name, seed = self.algorithm.name, self.run.seed
        sections = ("run", "evaluation", "exchange", "execution")
        settings: dict[str, Any] = {k: dataclasses.asdict(getattr(self, k)) for k in sections}
        settings["evaluation"]["metric"] = self.given.metric.name
        clients = self.given.clients_of(name, seed) if name else ()
        settings["data"] = {"name": "", "file": "your own"}
        settings["partition"] = {"clients": len(clients), "kind": "by you"}
        settings["model"] = {"name": "your own"}
        settings["problem"] = {"name": type(self.given.problem_of(name, seed)).__name__ if name else ""}
        settings["algorithm"] = {
            "name": name,
            **(_fixed(self.given.methods[name]) if name else {}),
            **self.algorithm.hyper,
        }
        if self.server.hyper:
            settings["server"] = {"name": self.server.name, **self.server.hyper}
        return settings


def by_method(methods: Mapping[str, Method], grids: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the grids of each method: {"eta": …} is for all methods that have it, {"fedavg.eta": …} for one."""
    found: dict[str, dict[str, Sequence[Any]]] = {name: {} for name in methods}
    for key in sorted(grids, key=lambda key: "." in key):  # a method's own grid replaces the common one
        values = grids[key]
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise NestfedError(f"grids[{key!r}] must be a list of values to try, not {values!r}.")
        if odd := [v for v in values if not isinstance(v, bool | int | float | str)]:
            raise NestfedError(f"grids[{key!r}] contains {odd[0]!r}: the values to try must be numbers or text.")
        owner, _, hyper = key.rpartition(".")
        if owner and owner not in methods:
            raise unknown("method", owner, methods, owner="grids")
        having = [n for n, m in methods.items() if owner in ("", n) and hyper in hyper_parameters(m)]
        if not having:
            known = {h for n, m in methods.items() if owner in ("", n) for h in hyper_parameters(m)}
            raise unknown("hyper-parameter", hyper, known, owner=owner)
        for name in having:
            found[name][hyper] = values
    return found


def hyper_parameters(method: Method) -> list[str]:
    """Return the names of a method's hyper-parameters, those of its server included."""
    return list(_settings(method))


def _settings(method: Method) -> dict[str, str]:
    """Return a method's hyper-parameters, each with its dotted setting; those of a server are behind the method's own."""
    if isinstance(method, Served):
        own = {f.name: f"server.{f.name}" for f in dataclasses.fields(method.by)}  # type: ignore[arg-type]
        return own | _settings(method.method)
    names = signature(method).parameters if isinstance(method, FunctionType) else _fields(_class(method))
    return {name: f"algorithm.{name}" for name in names}


def _fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _class(method: Any) -> Any:
    """Return the class of a method, or reject what is none."""
    kind = method.func if isinstance(method, partial) else type(method) if isinstance(method, Algorithm) else method
    if isinstance(kind, type) and issubclass(kind, Algorithm):
        return kind
    raise NestfedError(
        "A method must be a class such as FedAvg, functools.partial(FCSGM, beta=0.5), an object such as FedAvg(0.1) or a "
        f"function such as lambda eta: FedAvg(eta), not {method!r}."
    )


def _changed(thing: Any, hyper: Mapping[str, Any]) -> Any:
    return dataclasses.replace(thing, **hyper) if hyper else thing


def _built(name: str, make: Callable[..., Any], hyper: Mapping[str, Any]) -> Algorithm[Any, Any]:
    """Call a class or function with hyper-parameters."""
    try:
        made = make(**hyper)
    except TypeError as error:
        raise NestfedError(
            f"The method {name!r} cannot be built: {error}; add its hyper-parameters to grids, or pass "
            "functools.partial(Class, name=value)."
        ) from error
    if not isinstance(made, Algorithm):
        raise NestfedError(f"The method {name!r} must return an object such as FedAvg(0.1), not {made!r}.")
    return made


def _fixed(method: Any) -> dict[str, Any]:
    """Return the hyper-parameters that the user fixed, as plain data."""
    if isinstance(method, Algorithm):
        return {"given": described(method)}
    fixed = {k: v if isinstance(v, int | float | str) else repr(v) for k, v in getattr(method, "keywords", {}).items()}
    return fixed | ({"given": repr(method.args)} if getattr(method, "args", ()) else {})


def _of(what: str, given: Any, method: str, seed: int) -> Any:
    if isinstance(given, Mapping):
        if method not in given:
            raise unknown("entry for the method", method, given, owner=what)
        given = given[method]
    return given(seed) if isinstance(given, FunctionType | partial) else given
