"""The basic types: batch, problem, clients, algorithm, server, schedule.

Engines use only what these classes declare. Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__version__ = "0.2.0"

Fields = Mapping[str, "Tensor"]
"""Named flat vectors: the server's state, uploads and broadcasts."""

Data = Any
"""What `clients.sample(n, t)` returns: a tensor, or tuples, lists and dictionaries of tensors."""

Schedule = float | Callable[[int], float]
"""A hyper-parameter: a number, or a function of the iteration t."""


class NestfedError(Exception):
    """An error the user can fix. One sentence says what was wrong, where, and what would be right."""

    exit_code: ClassVar[int] = 2
    """What the command line exits with."""


class DivergedError(NestfedError):
    """Training produced infinite or NaN values."""


# ---------------------------------------------------------------------------------------------------------
# Names

T = TypeVar("T")

MOST_NAMES = 40
"""The most names that a message lists; a table may have thousands of columns."""


def unknown(what: str, name: str, known: Iterable[str], owner: str = "") -> NestfedError:
    """Return the error for an unknown name and suggest the nearest one: `raise unknown("metric", "acc", METRICS)`.

    - `owner`: what should have the name, such as a file.
    """
    known = sorted(known)
    lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lower, 1, 0.4)
    if near:
        hint = f"did you mean {lower[near[0]]}?"
    elif known:
        hint = f"choose one of {', '.join(known[:MOST_NAMES])}{', …' * (len(known) > MOST_NAMES)}."
    else:
        hint = "there are none."
    return NestfedError(f"{f'{owner} has' if owner else 'There is'} no {what} {name!r}; {hint}")


def one_of(setting: str, value: object, allowed: Sequence[str]) -> None:
    """Reject a value of a setting that is not among the allowed ones."""
    if value not in allowed:
        raise NestfedError(f"{setting} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}.")


def whole(what: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least `least`, or raise an error about `what`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise NestfedError(f"{what} must be a whole number of at least {least}, not {value!r}.")
    return number


class Registry(Mapping[str, T], Generic[T]):
    """A table of named entries from the library and its plugins.

    A plugin is a module named in the entry-point group `nestfed.plugins`; importing it adds entries.
    An entry given as "module:attribute" is imported on first use.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._things: dict[str, T | str] = {}

    def add(self, name: str, thing: T | str) -> None:
        """Add an entry; reject a name that is taken."""
        if self._things.setdefault(name, thing) is not thing and self._things[name] != thing:
            raise NestfedError(f"There is already a {self.what} called {name!r}: rename one of them.")

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            load_plugins()
        if name not in self._things:
            raise unknown(self.what, name, self._things)
        thing = self._things[name]
        if isinstance(thing, str):
            thing = self._things[name] = _load(partial(resolve_name, thing), f"The {self.what} {name!r} ({thing})")
        return thing

    def __contains__(self, name: object) -> bool:
        load_plugins()
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._things)

    def __len__(self) -> int:
        load_plugins()
        return len(self._things)


@dataclass(frozen=True)
class Metric:
    """A measure of a model's quality and its direction: `Metric("my_score", higher=True)`.

    Values may be None or NaN; both count as the worst. A record writes an undefined value as None.
    """

    name: str
    higher: bool
    """Whether higher is better."""
    function: Callable[[Any, Any], float] | None = None
    """Computes it from scores, (n,) or (n, classes), and labels, (n,): arrays of numpy, not tensors."""
    scores: Literal["ranking", "log-odds"] | None = None
    """The scores from which `judge` computes it: any that rank the examples, or logits. None: `judge` skips it."""

    @property
    def direction(self) -> str:
        """The word for the best value: Highest or Lowest."""
        return "Highest" if self.higher else "Lowest"

    @property
    def floor(self) -> float:
        """The value that stands for an undefined one: the worst possible."""
        return -math.inf if self.higher else math.inf

    def __call__(self, scores: Any, labels: Any) -> float:
        """Compute it from scores and labels."""
        if self.function is None:
            raise NestfedError(f"The metric {self.name} is not a function of scores and labels.")
        try:
            return float(self.function(scores, labels))
        except NestfedError:
            raise
        except Exception as error:  # of a function of the user's
            reason = " ".join(str(error).split())
            raise NestfedError(
                f"The metric {self.name} failed: {type(error).__name__}: {reason}. Its function gets two arrays of numpy, "
                "scores and labels, and returns a number."
            ) from error

    def signed(self, value: float | None) -> float:
        """Return the value with its sign chosen so that larger is better, for sorting and differences."""
        known = self.floor if value is None or math.isnan(value) else value
        return known if self.higher else -known

    def better(self, a: float | None, b: float | None) -> bool:
        """Return whether value a is better than value b."""
        return self.signed(a) > self.signed(b)

    def reached(self, value: float | None, target: float) -> bool:
        """Return whether a value is at least as good as a target."""
        return value is not None and self.signed(value) >= self.signed(target) and not math.isnan(value + target)

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return max(values, key=self.signed)

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values."""
        return min(values, key=self.signed)


METHODS: Registry[type[Algorithm[Any, Any]]] = Registry("algorithm")
SERVERS: Registry[type[Server]] = Registry("server")
"""Filled by `nestfed.algorithms`."""
OBJECTIVES: Registry[Any] = Registry("problem")
DATASETS: Registry[Any] = Registry("dataset")  # data.sources.Source
NETWORKS: Registry[Any] = Registry("network")  # models.Network
EXPERIMENTS: Registry[Path] = Registry("experiment")
COMMANDS: Registry[Callable[..., None]] = Registry("command")

METRICS: Registry[Metric] = Registry("metric")
"""Filled by `nestfed.metrics`, whose `find` also accepts the names in a record."""

_loaded: set[str] = set()
PLUGINS = "NESTFED_PLUGINS"
"""The environment variable with the files of `--plugin`, which worker processes inherit."""


@cache  # looking for entry points takes 10 ms, importing importlib.metadata 20 ms
def load_plugins() -> None:
    """Import every installed plugin, and those of `--plugin`, once."""
    from importlib.metadata import entry_points

    for place in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
        if place not in _loaded:
            _loaded.add(place)
            _load(partial(_import_file, Path(place)), f"The plugin {place}")
    for point in entry_points(group="nestfed.plugins"):
        if point.value not in _loaded:
            _loaded.add(point.value)
            _load(point.load, f"The plugin {point.name!r} ({point.value})")


def _import_file(path: Path) -> None:
    """Import a file as a module of its name."""
    from importlib.util import module_from_spec, spec_from_file_location

    found = spec_from_file_location(path.stem, path)
    if found is None or found.loader is None or path.stem in sys.modules:
        raise ImportError("it must be a .py file whose name no other module has")
    sys.modules[path.stem] = module = module_from_spec(found)
    found.loader.exec_module(module)


def _load(load: Callable[[], Any], what: str) -> Any:
    """Import something; turn any exception into a NestfedError."""
    try:
        return load()
    except Exception as error:
        raise NestfedError(
            f"{what} cannot be imported; fix or uninstall it: {type(error).__name__}: {error}"
        ) from error


# ---------------------------------------------------------------------------------------------------------
# Schedules


def at(schedule: Schedule, t: int) -> float:
    """Return the value of a hyper-parameter at iteration t."""
    return schedule(t) if callable(schedule) else schedule


def first(schedule: Schedule, t: int) -> float:
    """Return 1 at t = 0 and the schedule later: "Initialize" is a step whose momentum weight is 1."""
    value = 1.0 if t == 0 else at(schedule, t)
    if not 0 <= value <= 1:
        raise NestfedError(f"A momentum weight must be in [0, 1], but the schedule gives {value:g} at iteration {t}.")
    return value


@dataclass(frozen=True)
class Power:
    """The decaying step size scale / (shift + t)^power that most theorems use."""

    scale: float
    shift: float = 1.0
    power: float = 1 / 3

    def __post_init__(self) -> None:
        positive(self, "scale", "shift")

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
        return float(self.scale / (self.shift + t) ** self.power)


def positive(owner: object, *names: str) -> None:
    """Reject a hyper-parameter that is not a finite number above 0 (a schedule is checked at t = 1)."""
    for name in names:
        value = _number(owner, name)
        if not 0 < value < float("inf"):
            raise NestfedError(f"{_label(owner)}: {name} must be a finite number above 0, not {value:g}.")


def weight(owner: object, *names: str) -> None:
    """Reject a momentum weight outside (0, 1] (a schedule is checked at t = 1)."""
    for name in names:
        value = _number(owner, name)
        if not 0 < value <= 1:
            raise NestfedError(f"{_label(owner)}: {name} must be in (0, 1], not {value:g}.")


def at_least(owner: object, least: float, *names: str) -> None:
    """Reject a hyper-parameter below `least`."""
    for name in names:
        value = _number(owner, name)
        if not least <= value < float("inf"):
            raise NestfedError(f"{_label(owner)}: {name} must be at least {least:g}, not {value:g}.")


def _number(owner: object, name: str) -> float:
    value = getattr(owner, name)
    kinds = "a number or a function of t" if _may_vary(owner, name) else "a number"
    if callable(value) and _may_vary(owner, name):
        value = value(1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NestfedError(f"{_label(owner)}: {name} must be {kinds}, not {value!r}.")
    return float(value)


def _may_vary(owner: object, name: str) -> bool:
    """Return whether a field is declared as a `Schedule`."""
    declared = getattr(type(owner), "__dataclass_fields__", {})
    return name in declared and "Schedule" in str(declared[name].type)


def _label(owner: object) -> str:
    return getattr(type(owner), "name", "") or type(owner).__name__


# ---------------------------------------------------------------------------------------------------------
# Batches


@dataclass
class Tape:
    """The evaluations of one step: how many, on how many examples, and the loss."""

    examples: int = 0
    evaluations: int = 0
    loss: Tensor | None = None
    buffers: Tensor | None = None
    """The model's running statistics after the first evaluation."""

    def note(self, examples: int, loss: Tensor | None = None) -> None:
        """Add one evaluation; the first loss is the one at the current point."""
        self.examples += examples
        self.evaluations += 1
        if self.loss is None and loss is not None:
            self.loss = loss.detach()

    def add(self, other: Tape) -> None:
        """Add the evaluations of another tape, which came later."""
        self.examples += other.examples
        self.evaluations += other.evaluations
        self.loss = other.loss if self.loss is None else self.loss
        self.buffers = other.buffers if self.buffers is None else self.buffers


@dataclass(frozen=True)
class Batch:
    """One client's data at one iteration, with the engine's settings for evaluating it."""

    data: Data
    """What `clients.sample(n, t)` returned."""
    key: Tensor = field(default_factory=lambda: _whole_tensor(0))
    """The seed of this batch's random numbers, such as dropout masks: a whole number of its own for every (client, t)."""
    client: Tensor = field(default_factory=lambda: _whole_tensor(0))
    """The client's number, 0 … N−1. Like `key`, `steps` and `rows` it is a tensor, because clients may be vectorised."""
    steps: Tensor = field(default_factory=lambda: _whole_tensor(1))
    """The number of local steps that this client takes in this round."""
    rows: Tensor = field(default_factory=lambda: _whole_tensor(0))
    """The number of this client's training rows; 0 if unknown (`Clients.examples`)."""
    tape: Tape = field(default_factory=Tape)
    """Counts the evaluations."""
    begins: bool = False
    """This is the first iteration of its round, so the client is at the broadcast."""
    eager: bool = False
    """True outside function transforms, where the faster plain autograd works."""
    precision: torch.dtype | None = None
    """The dtype of matrix products and convolutions; None = the dtype of the state."""
    pieces: int = 1
    """Evaluate the batch in this many pieces, one after another, to save memory."""
    clips: bool = True
    """The problem clips its gradients, if it has a clipping norm."""
    buffers: Tensor | None = None
    """The model's running statistics before this step, for all of its points; None = those of the user's module."""

    @property
    def raw(self) -> Batch:
        """The same batch without clipping, for a method that corrects an estimate and clips that (`Problem.clipped`)."""
        return replace(self, clips=False)

    def note(self, examples: int, loss: Tensor | None = None) -> None:
        """Count one evaluation on this many examples, and record the loss if it is known.

        If a problem notes nothing in a step, the engine counts the batch's leading size
        (`nestfed.problems.base.leading`) for each of the method's `evaluations`, and records no loss.
        """
        self.tape.note(examples, loss)


def _whole_tensor(value: int) -> Tensor:
    import torch

    return torch.tensor(value)


def as_batch(data: Batch | Data) -> Batch:
    """Return a `Batch`; plain data is that of client 0 with the key 0."""
    return data if isinstance(data, Batch) else Batch(data)


# ---------------------------------------------------------------------------------------------------------
# Clients


class Clients(ABC):
    """The clients, and the batch that each draws at each iteration.

    Subclasses must define `__len__` and `sample`.
    """

    alike: bool = True
    """All clients' batches have the same shape, so clients can be vectorised."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of clients."""

    @abstractmethod
    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t; the same n and t always give the same batch."""

    def seeded(self, seed: int) -> Self:
        """Return these clients with the seed of a run; clients without randomness return themselves."""
        return self

    def to(self, device: torch.device) -> Self:
        """Return these clients with their data on a device."""
        return self

    def label(self, n: int) -> str:
        """Return client n's name, for messages and reports."""
        return str(n)

    def examples(self, n: int) -> int:
        """Return the number of client n's training rows; 0 if unknown."""
        return 0

    def steps(self, n: int, t: int, q: int) -> int:
        """Return how many of its q local steps client n takes in the round that begins at iteration t, at least 1."""
        return q

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Return one entry per iteration in ts: the batches of the clients ns, stacked along a new first axis."""
        return [_stack([self.sample(n, t) for n in ns], ns) for t in ts]

    def prepare(self, tasks: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - by default nothing is prepared
        """Get ready for a round: the batches of these clients and iterations (n, t) will be drawn, in about this order."""

    def close(self) -> None:  # noqa: B027 - by default there is nothing to release
        """Release processes and files at the end of a run."""


def _stack(batches: list[Data], ns: Sequence[int]) -> Data:
    import torch
    from torch.utils._pytree import tree_map

    try:
        return tree_map(lambda *leaves: torch.stack(leaves), *batches)
    except TypeError as error:
        raise NestfedError(
            f"The batch of client {ns[0]} holds something that is not a tensor: sample must return tensors, or tuples, "
            "lists and dictionaries of tensors."
        ) from error
    except (RuntimeError, ValueError) as error:
        raise NestfedError(
            f"The batches of clients {ns[0]}…{ns[-1]} differ in shape, so they cannot be vectorised; use mode='loop'."
        ) from error


@runtime_checkable
class Sampler(Protocol):
    """The minimal interface of clients; `as_clients` turns it into `Clients`."""

    def __len__(self) -> int:
        """Return the number of clients."""

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t."""


class _Sampled(Clients):
    """Wrap an object that has only `__len__` and `sample`."""

    def __init__(self, source: Sampler) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int, t: int) -> Data:
        return self.source.sample(n, t)


def as_clients(clients: object) -> Clients:
    """Return `Clients`: these, or a wrapper around an object that has `__len__` and `sample`."""
    if isinstance(clients, Clients):
        return clients
    kind = type(clients).__name__
    if not isinstance(clients, Sampler):
        missing = "sample(n, t)" if isinstance(clients, Sized) else "__len__"
        raise NestfedError(
            f"{kind} has no {missing}, but clients need __len__ and sample(n, t); for arrays use "
            'Examples.of({"a": (x1, y1), "b": (x2, y2)}, batch=32).'
        )
    more = sorted({name for name in vars(Clients) if not name.startswith("_")} & set(dir(clients)) - {"sample"})
    if more:
        raise NestfedError(f"{kind} has {', '.join(more)} but is not a nestfed.core.Clients: subclass it.")
    return _Sampled(clients)


# ---------------------------------------------------------------------------------------------------------
# Problems


class Problem(ABC):
    """The objective to minimise; algorithms work on the kinds below.

    A problem is pure: the same call returns the same numbers. Under vmap it sees one client's tensors.
    """

    kinds: ClassVar[str]
    random: bool = False
    """Evaluations draw random numbers (dropout), so batches need keys."""
    sequential: bool = False
    """Some of these numbers come from torch's generator, which cannot be vectorised: clients run one by one."""
    planar: bool = False
    """The model has 2-d convolutions, which are faster with the channels last."""
    heavy: bool = False
    """The model has convolutions or recurrences, which are slower when vectorised over clients."""
    buffers: str = ""
    """The model keeps running statistics, which are averaged ("average") or stay on their client ("private")."""

    @property
    @abstractmethod
    def x0(self) -> Tensor:
        """The starting point, one flat vector of floats."""

    @property
    def b0(self) -> Tensor:
        """The model's running statistics at the start, one flat vector; empty if it keeps none."""
        return self.x0.new_zeros(0)

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest feasible point; by default all points are feasible."""
        return x

    def project_buffers(self, b: Tensor) -> Tensor:
        """Return the nearest feasible running statistics: variances are not negative."""
        return b

    def clipped(self, estimate: Tensor) -> Tensor:
        """Return an estimate of the gradient, shortened to the problem's clipping norm if it has one."""
        return estimate

    def bind(self, x: Tensor, *, train: bool = False) -> Any:
        """Return the model at x, which is passed to `evaluate`; x itself unless the problem has a module.

        x may have running statistics behind the parameters, here and in `module`.
        """
        return x

    def module(self, x: Tensor) -> Any:
        """Return the result of a run: a model that owns its parameters, or a copy of x."""
        return x.detach().clone()

    def start(self, model: Any) -> Tensor:
        """Return the starting point for a model that `module` of a problem on the same model returned.

        What the model does not have, such as AUROC's thresholds, starts as in x0.
        """
        x0 = self.x0
        if getattr(model, "shape", None) != x0.shape:
            raise NestfedError(
                f"The trained model is a {type(model).__name__}, but this {type(self).__name__} starts from a vector of "
                f"{x0.numel()} numbers."
            )
        return model.detach().to(x0).clone()

    def to(self, device: torch.device) -> None:  # noqa: B027 - by default there is nothing to move
        """Move the problem's tensors, including x0, to a device."""

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters in x."""
        return {"x": tuple(self.x0.shape)}

    def inspect(self, batch: Batch) -> bool:
        """Evaluate a batch at x0 before training; return whether the loss depends on the parameters.

        A problem may also find out here whether it is `random` and `sequential`.
        """
        return True


class Differentiable(Problem):
    """A problem with a (possibly biased) stochastic gradient: `Minimize`, `Conditional`, `Compositional`."""

    kinds = "Minimize, Conditional or Compositional"

    @abstractmethod
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the stochastic gradient at x on `batch.data`."""

    def value_and_grad(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss at x on the batch, which `grad` notes, and the gradient."""
        tape = Tape()
        gradient = self.grad(x, replace(batch, tape=tape))
        batch.tape.add(tape)
        if tape.loss is None:
            raise NestfedError(
                f"{type(self).__name__}.grad notes no loss, but this method weights clients by their losses: call "
                "batch.note(examples, loss)."
            )
        return tape.loss, gradient


class Composed(Differentiable):
    """F(x) = f(E g(x)), with an inner value that an algorithm can track: `Compositional`.

    The inner value has one row per task in the batch; a plain compositional problem has one task.
    """

    kinds = "Compositional"
    inner_dim: int
    tasks: int = 1

    @abstractmethod
    def inner(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return g(x; ξ), shape (k, p), and its pullback v ↦ mean over tasks of ∇gᵀv."""

    @abstractmethod
    def outer_grad(self, u: Tensor, batch: Batch) -> Tensor:
        """Return ∇f(u; ζ) for every row of u, shape (k, p)."""

    @abstractmethod
    def which(self, batch: Batch) -> Tensor:
        """Return the k indices of the batch's tasks among the client's tasks."""


class Drawn(NamedTuple):
    """The rows of a batch of a `Paired` problem: b1 of S1 and b2 of S2."""

    rows: Tensor
    """The number of each S1 row among the client's own S1 rows, (b1,); rows without weight have the last number."""
    first: Tensor
    """The weights of the S1 rows, (b1,): the mean over a batch of weight·value, and then over clients, estimates the
    objective. A row that only fills the batch has weight 0."""
    second: Tensor
    """The weights of the S2 rows, (b2,)."""
    marks: Tensor
    """What ℓ needs of the S2 rows besides their scores, (b2, marks)."""


class Paired(Differentiable):
    """F(x) = mean over z ∈ S1 of f(mean over z' ∈ S2 of ℓ(h(x; z), h(x; z'))), S1 and S2 over all clients together.

    `grad` compares the rows of a client with its own. FeDXL compares them with those of all clients: then methods call
    `scores`, `pair` and `outer`, and count the evaluation (`Batch.note`).
    """

    kinds = "Paired, such as PairedAUROC"
    inner_dim: int = 1
    """The number of values of ℓ."""
    marks: int = 0
    """The numbers that ℓ needs of an S2 row besides its score, such as its label."""
    linear: bool = False
    """f is linear."""
    rows: int = 0
    """The numbers that S1 rows of a client may have (`Drawn.rows`): 0 … rows−1; 0 = unknown."""

    @abstractmethod
    def scores(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Return h of the S1 rows, (b1,), of the S2 rows, (b2,), and the pullback (v, v') ↦ ∇(vᵀh + v'ᵀh')."""

    @abstractmethod
    def drawn(self, batch: Batch) -> Drawn:
        """Return the numbers, weights and marks of the batch's rows."""

    @abstractmethod
    def pair(self, first: Tensor, second: Tensor, marks: Tensor) -> Tensor:
        """Return ℓ of scores of S1 and S2, of shape (…), with the marks of the latter, (…, marks): (…, inner_dim).

        Written in torch, so that methods can differentiate it, like `outer`.
        """

    @abstractmethod
    def outer(self, u: Tensor) -> Tensor:
        """Return f(u), from (…, inner_dim) to (…)."""

    # A problem may override the next three, to keep ℓ and u on another scale, such as their logarithms.

    def inner_mean(self, values: Tensor, share: Tensor) -> Tensor:
        """Return the mean of ℓ, (…, k, inner_dim), with these shares, (…, k): (…, inner_dim). Shares 0: any number."""
        return (share[..., None] * values).sum(-2)

    def moving_mean(self, u: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        """Return (1−w)u + w·value."""
        return (1 - weight) * u + weight * value

    def tangent(self, slope: Tensor, u: Tensor, value: Tensor) -> Tensor:
        """Return an expression with the gradient of f'(u)·ℓ, (…), u constant; slope: the derivative of `outer` at u."""
        return (slope * value).sum(-1)


class Tracked(Differentiable):
    """F(x) = E_ξ f_ξ(E g(x, ξ)), ξ one of the client's own examples, each with an inner value to track: `Conditional`."""

    kinds = "Conditional"
    inner_dim: int
    outer_examples: int
    """The largest number of outer examples ξ on a client."""

    @abstractmethod
    def outer_ids(self, batch: Batch) -> Tensor:
        """Return the numbers, 0 … `outer_examples` − 1, of the batch's b outer samples among the client's own."""

    @abstractmethod
    def tracked_grad(self, x: Tensor, u: Tensor, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mean_i ∇g_i(x)ᵀ∇f_i(u_i) with the new u_i ← (1−w_i)u_i + w_i g_i(x), and the new u, shape (b, p).

        u: the old inner values of the batch's outer samples, shape (b, p); weight: their w, shape (b,), above 0.
        """


class Saddle(Problem):
    """min over θ, max over w of F(θ, w): `Minimax`."""

    kinds = "Minimax"

    @property
    @abstractmethod
    def w0(self) -> Tensor:
        """The starting point of the maximising player."""

    @abstractmethod
    def grads(self, theta: Tensor, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the stochastic gradients with respect to θ and to w at one point."""

    def project_dual(self, w: Tensor) -> Tensor:
        """Return the nearest feasible w."""
        return w


class SolvableSaddle(Saddle):
    """A minimax problem whose best w for a given θ can be estimated from a batch, as CODA needs: `AUROC`."""

    kinds = "Minimax with an estimate of the best w, such as AUROC"

    @abstractmethod
    def best_dual(self, theta: Tensor, batch: Batch) -> Tensor:
        """Estimate argmax over w of F(θ, w) from a batch."""


# ---------------------------------------------------------------------------------------------------------
# Algorithm and server


class Server(ABC):
    """The server's update: from the mean of the uploads to the next broadcast. Frozen and pure, like an algorithm."""

    name: ClassVar[str] = ""
    """Its name in experiment files, if it composes with any method (`Algorithm.served_by`)."""

    def init(self, shared: Fields) -> Fields:
        """Return the server's own state before the first round."""
        return {}

    @abstractmethod
    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Return the server's new state and the next broadcast.

        old: the previous broadcast.
        mean: the mean of the uploads.
        fraction: the share |S|/N of the clients in that mean.
        """


@dataclass(frozen=True)
class Average(Server):
    """Broadcast the mean unchanged."""

    name = "average"

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Return the mean."""
        return state, mean


@dataclass(frozen=True)
class OnPoints(Server):
    """Another server's update of some fields; the others get the mean."""

    server: Server
    points: tuple[str, ...]

    def init(self, shared: Fields) -> Fields:
        """Start the other server with the points alone."""
        return self.server.init(self._only(shared))

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Update the points by the other server's rule."""
        state, points = self.server.update(state, self._only(old), self._only(mean), fraction)
        return state, {**mean, **points}

    def _only(self, fields: Fields) -> Fields:
        return {k: fields[k] for k in self.points}


P = TypeVar("P", bound=Problem)
S = TypeVar("S", bound=NamedTuple)


class Algorithm(ABC, Generic[P, S]):
    """One client's program on flat vectors. A frozen dataclass of hyper-parameters; its methods are pure.

    Its state has four kinds of fields. `shared` fields cross the network and are averaged. `gathered` fields cross it
    too, but are kept apart by client and handed to everybody. `private` fields stay on their client between rounds. All
    others are scratch: `receive` refills them at the start of every round.
    """

    name: ClassVar[str]
    accepts: ClassVar[type[Problem]]
    shared: ClassVar[tuple[str, ...]]
    private: ClassVar[tuple[str, ...]] = ()
    gathered: ClassVar[Mapping[str, str]] = {}
    """Contributed fields, each with the field that receives the table of all clients' contributions.

    A contribution is what `send` leaves in its field; its shape is free and may change from round to round, but all
    clients of a round contribute the same shape. At the next `receive` the table has the shape (N, *shape), and the
    state's field `fresh`, shape (N,), is 1 for the clients whose row is from the last round and 0 for all others. A client
    that did not answer keeps its old row, or has zeros if the shape has changed; a round without any answer changes
    nothing. Before the first round the table is 0 and has the shape of the contribution in `init`. Rows are in the order
    of the clients. They are never averaged, clipped or rounded. `fill` may put the server's answers into the table instead.
    """
    describes_rows: ClassVar[bool] = False
    """Its contributions hold numbers of single rows, which a site with a rule for small cells does not send."""
    weighs: ClassVar[bool] = False
    """Clients weight their own moves, so uploads must be averaged with equal weights."""
    counts_rows: ClassVar[bool] = False
    """It needs the number of every client's rows (`Batch.rows`), so clients must count them."""
    nonnegative: ClassVar[tuple[str, ...]] = ()
    """Shared fields that cannot be negative, such as second moments. Noise or rounding may push a mean below 0; it becomes 0."""
    single: ClassVar[bool] = False
    """Defined for one client only."""
    point: ClassVar[str] = "x"
    """The shared field that holds the solution."""
    points: ClassVar[tuple[str, ...]] = ()
    """The shared fields that a server may move (`served_by`): points, not estimates; empty = `point` alone."""
    talks: ClassVar[bool] = True
    """Its clients exchange something; False only for training alone, which costs no bytes."""

    family: ClassVar[str] = "plain"
    """Where `nestfed list` shows it: plain, conditional, compositional, minimax, pairs or worst client."""
    cites: ClassVar[tuple[str, ...]] = ()
    """The BibTeX entries to cite."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that `nestfed cite` accepts."""
    steps: ClassVar[tuple[str, ...]] = ("eta",)
    """The hyper-parameters that are its step sizes."""
    sizes: ClassVar[Mapping[str, str]] = {}
    """The shared fields that do not have the model's size: "dual" (the size of w), "inner value" or "one number"."""
    evaluations: ClassVar[int] = 1
    """The number of points at which a step evaluates its batch; a step that restarts an estimate has one."""

    @classmethod
    def usual(cls, lr: Schedule | None, *, rounds: int, q: int) -> dict[str, Any]:
        """Return the default hyper-parameters for one step size and the length of a run."""
        return {} if lr is None else dict.fromkeys(cls.steps, lr)

    @property
    def server(self) -> Server:
        """The server's update rule."""
        return Average()

    def served_by(self, server: Server) -> Served:
        """Return this method with another server: `FCSGM(alpha=0.1).served_by(Adam(0.01))`.

        The server moves the points: x, or both players of a minimax method. Estimates stay averages.
        """
        return Served(self, server)

    @abstractmethod
    def init(self, problem: P, x0: Tensor) -> S:
        """Return the state before iteration 0, the same for every client."""

    @abstractmethod
    def step(self, problem: P, s: S, batch: Batch, t: int) -> S:
        """Return the state after local iteration t."""

    def send(self, s: S, t: int) -> S:
        """Prepare the upload; t is the next iteration."""
        return s

    def receive(self, s: S, t: int) -> S:
        """Process the download; t is the next iteration."""
        return s

    def rejoin(self, s: S, t: int) -> S:
        """Refresh the private fields of a client that skipped the last round (called before `receive`)."""
        return s

    def restarts(self, t: int, q: int) -> bool:
        """Return whether iteration t restarts an estimate, where a larger batch helps (`initial_batch`)."""
        return t == 0

    def ends_round(self, t: int, q: int) -> bool:
        """Return whether the clients synchronise after iteration t."""
        return (t + 1) % q == 0

    def tables(self) -> tuple[str, ...]:
        """Return the fields that the server fills from contributions: the tables, and `fresh`."""
        return (*self.gathered.values(), "fresh") if self.gathered else ()

    def fill(self, field: str, table: Tensor, ns: Sequence[int], rows: Tensor) -> Tensor:
        """Return the table of a gathered field after a round, with one row per client.

        - `ns`, `rows`: the clients that answered, and their contributions. By default these replace the clients' rows.
        """
        same = table.shape[1:] == rows.shape[1:]
        found = table.clone() if same else table.new_zeros((len(table), *rows.shape[1:]))
        found[list(ns)] = rows
        return found

    def solution(self, shared: Fields, private: Fields) -> Tensor:
        """Return the solution, for `problem.bind` and `problem.module`: the point."""
        return shared[self.point]

    def own_points(self, problem: P, shared: Fields, private: Fields) -> Tensor | None:
        """Return every client's own point, one row each, or None if the method trains none.

        `result.models` are the models there. A client that never took part has the start's private fields.
        """
        return None

    def feasible(self, problem: P, shared: Fields) -> Fields:
        """Project both players onto their feasible sets, which a server step or noise may have left."""
        found = {**shared, self.point: problem.project(shared[self.point])}
        if isinstance(problem, Saddle) and "w" in shared:
            found["w"] = problem.project_dual(shared["w"])
        return found


@dataclass(frozen=True)
class Served(Algorithm[Any, Any]):
    """A method whose points are moved by another server; see `Algorithm.served_by`."""

    method: Algorithm[Any, Any]
    by: Server

    def __post_init__(self) -> None:
        if not isinstance(self.by, Server):
            raise NestfedError(f"A server must be an object such as Adam(eta_g=0.01), not {self.by!r}.")
        if type(self.method.server) is not Average or not self.method.talks:
            own = "has a server's rule of its own" if self.method.talks else "has no server"
            raise NestfedError(
                f"{self.method.name} {own}, so it cannot be served by {self.by.name or type(self.by).__name__}; choose a "
                "method whose server averages, such as fedavg."
            )
        for fact in Algorithm.__annotations__:
            object.__setattr__(self, fact, getattr(self.method, fact))
        object.__setattr__(self, "name", f"{self.method.name}+{self.by.name or type(self.by).__name__}")

    @property
    def server(self) -> Server:
        """The other server on the method's points."""
        return OnPoints(self.by, self.method.points or (self.method.point,))

    def own_points(self, problem: Any, shared: Fields, private: Fields) -> Tensor | None:
        """Return the points of the method."""
        return self.method.own_points(problem, shared, private)

    def init(self, problem: Any, x0: Tensor) -> Any:
        """Start as the method does."""
        return self.method.init(problem, x0)

    def step(self, problem: Any, s: Any, batch: Batch, t: int) -> Any:
        """One step of the method."""
        return self.method.step(problem, s, batch, t)

    def send(self, s: Any, t: int) -> Any:
        """Prepare the method's upload."""
        return self.method.send(s, t)

    def receive(self, s: Any, t: int) -> Any:
        """Process the download as the method does."""
        return self.method.receive(s, t)

    def rejoin(self, s: Any, t: int) -> Any:
        """Refresh private fields as the method does."""
        return self.method.rejoin(s, t)

    def fill(self, field: str, table: Tensor, ns: Sequence[int], rows: Tensor) -> Tensor:
        """Fill the table as the method does."""
        return self.method.fill(field, table, ns, rows)

    def restarts(self, t: int, q: int) -> bool:
        """Return whether the method restarts an estimate."""
        return self.method.restarts(t, q)

    def ends_round(self, t: int, q: int) -> bool:
        """Return whether the method's round ends."""
        return self.method.ends_round(t, q)

    def feasible(self, problem: Any, shared: Fields) -> Fields:
        """Project as the method does."""
        return self.method.feasible(problem, shared)


def refuse_mismatch(problem: Problem, algorithm: Algorithm[Any, Any]) -> None:
    """Reject a method on a kind of problem that it does not accept."""
    if not isinstance(problem, algorithm.accepts):
        raise NestfedError(
            f"{algorithm.name} works on problems of kind {algorithm.accepts.kinds}, "
            f"but this problem is {type(problem).__name__}."
        )
