"""The nouns that everything else is made of: problem kinds, algorithm, server, schedules. No torch at run time."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__version__ = "0.2.0"

Fields = Mapping[str, "Tensor"]
"""Named flat vectors: what a server holds and what crosses the network."""

Batch = Any
"""What `clients.sample(n, t)` returns: a tensor, or tuples and dictionaries of tensors."""

Schedule = float | Callable[[int], float]
"""A hyper-parameter: a number, or a function of the iteration t."""


class NestfedError(Exception):
    """An error the user can fix. One sentence says what was wrong, where, and what would be right."""


class DivergedError(NestfedError):
    """Numbers that became infinite or NaN in training."""


# ---------------------------------------------------------------------------------------------------------
# Names

T = TypeVar("T")


def unknown(what: str, name: str, known: Iterable[str]) -> NestfedError:
    """Return the error for an unknown name, with the nearest known one: `raise unknown("metric", "acc", METRICS)`."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}." if known else "none is known."
    return NestfedError(f"There is no {what} {name!r}; {hint}")


class Registry(Mapping[str, T], Generic[T]):
    """Things found by name: the library's own and those of plugins.

    A plugin is a module named in the entry-point group `nestfed.plugins`; it adds to these tables when it is imported.
    A thing given as "module:attribute" is imported when it is first asked for, so that names cost nothing.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._things: dict[str, T | str] = {}

    def add(self, name: str, thing: T | str) -> None:
        """Add a thing; a name that another thing has is an error."""
        if self._things.setdefault(name, thing) is not thing and self._things[name] != thing:
            raise NestfedError(f"There are two of the {self.what} {name!r}: rename one of them.")

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            load_plugins()
        if name not in self._things:
            raise unknown(self.what, name, self._things)
        thing = self._things[name]
        if isinstance(thing, str):
            thing = self._things[name] = EntryPoint(name, thing, self.what).load()
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


METHODS: Registry[type[Algorithm[Any, Any]]] = Registry("algorithm")
OBJECTIVES: Registry[Any] = Registry("problem")
EXPERIMENTS: Registry[Path] = Registry("experiment")
COMMANDS: Registry[Callable[..., None]] = Registry("command")

_loaded: set[str] = set()


def load_plugins() -> None:
    """Import every installed plugin once."""
    for point in entry_points(group="nestfed.plugins"):
        if point.value not in _loaded:
            _loaded.add(point.value)
            try:
                point.load()
            except ImportError as error:
                raise NestfedError(f"The plugin {point.name} ({point.value}) cannot be imported: {error}.") from error


# ---------------------------------------------------------------------------------------------------------
# Schedules


def at(schedule: Schedule, t: int) -> float:
    """Return the value of a hyper-parameter at iteration t."""
    return schedule(t) if callable(schedule) else schedule


def first(schedule: Schedule, t: int) -> float:
    """Return 1 at t = 0 and the schedule later: "Initialize" is a step whose momentum weight is 1."""
    value = 1.0 if t == 0 else at(schedule, t)
    if not 0 <= value <= 1:
        raise NestfedError(f"A momentum weight must lie in [0, 1], and a schedule gives {value:g} at iteration {t}.")
    return value


@dataclass(frozen=True)
class Power:
    """The decaying step size scale / (shift + t)^power that most theorems ask for."""

    scale: float
    shift: float = 1.0
    power: float = 1 / 3

    def __post_init__(self) -> None:
        positive(self, "scale", "shift")

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
        return float(self.scale / (self.shift + t) ** self.power)


def positive(owner: object, *names: str) -> None:
    """Refuse a hyper-parameter that is not a finite number above 0 (a schedule is judged at t = 1)."""
    for name in names:
        value = _number(owner, name)
        if not 0 < value < float("inf"):
            raise NestfedError(f"{_label(owner)}: {name} must be a finite number above 0, not {value:g}.")


def weight(owner: object, *names: str) -> None:
    """Refuse a momentum weight outside (0, 1] (a schedule is judged at t = 1)."""
    for name in names:
        value = _number(owner, name)
        if not 0 < value <= 1:
            raise NestfedError(f"{_label(owner)}: {name} must lie in (0, 1], not {value:g}.")


def at_least(owner: object, least: float, *names: str) -> None:
    """Refuse a hyper-parameter below `least`."""
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
    """Tell whether a field is declared as a `Schedule`."""
    declared = getattr(type(owner), "__dataclass_fields__", {})
    return name in declared and "Schedule" in str(declared[name].type)


def _label(owner: object) -> str:
    return getattr(type(owner), "name", "") or type(owner).__name__


# ---------------------------------------------------------------------------------------------------------
# What an algorithm may ask of a problem


class Problem(ABC):
    """What is minimised. A problem of one of the three kinds below answers an algorithm's questions."""

    kinds: ClassVar[str]

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the feasible set; all of space unless the problem says otherwise."""
        return x


class Differentiable(Problem):
    """A problem with a (perhaps biased) stochastic gradient: `Minimize`, `Conditional`, `Compositional`."""

    kinds = "Minimize, Conditional or Compositional"

    @abstractmethod
    def grad(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the stochastic gradient at x on this batch."""


class Composed(Differentiable):
    """F(x) = f(E g(x)), whose inner value can be tracked: `Compositional`.

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
        """Return the k indices of the batch's tasks among the client's own."""


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
    """What the server does with the mean of what the clients sent. Frozen and pure, like an algorithm."""

    def init(self, shared: Fields) -> Fields:
        """Return the server's own state before the first round."""
        return {}

    @abstractmethod
    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Return the server's new state and what it broadcasts.

        `old` is what it broadcast last, `fraction` the part |S|/N of all clients that `mean` speaks for.
        """


@dataclass(frozen=True)
class Average(Server):
    """Broadcast the mean as it is."""

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Return the mean."""
        return state, mean


P = TypeVar("P", bound=Problem)
S = TypeVar("S", bound=NamedTuple)


class Algorithm(ABC, Generic[P, S]):
    """One client's program on flat vectors. A frozen dataclass of hyper-parameters; its methods are pure.

    The fields of its state are of three sorts: `shared` cross the network; `private` stay on their client
    from round to round; all others are scratch, which `receive` fills anew at the start of every round.
    """

    name: ClassVar[str]
    accepts: ClassVar[type[Problem]]
    shared: ClassVar[tuple[str, ...]]
    private: ClassVar[tuple[str, ...]] = ()
    single: ClassVar[bool] = False
    """Defined for one client only."""
    point: ClassVar[str] = "x"
    """The shared field that is the answer."""

    family: ClassVar[str] = "plain"
    """Where `nestfed list` shows it: plain, conditional, compositional or minimax."""
    cites: ClassVar[tuple[str, ...]] = ()
    """The BibTeX entries to cite."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that `nestfed cite` knows it by."""
    steps: ClassVar[tuple[str, ...]] = ("eta",)
    """The hyper-parameters that are its step sizes."""
    sizes: ClassVar[Mapping[str, str]] = {}
    """The shared fields that are not of the model's size: "dual" (of w) or "inner value"."""
    evaluations: ClassVar[int] = 1
    """Points at which a step evaluates its batch."""

    @classmethod
    def usual(cls, lr: Schedule | None, *, rounds: int, q: int) -> dict[str, Any]:
        """Return the hyper-parameters that one step size and the length of a run decide."""
        return {} if lr is None else dict.fromkeys(cls.steps, lr)

    @property
    def server(self) -> Server:
        """What the server does with the mean."""
        return Average()

    @abstractmethod
    def init(self, problem: P, x0: Tensor) -> S:
        """Return the state before iteration 0, the same for every client."""

    @abstractmethod
    def step(self, problem: P, s: S, batch: Batch, t: int) -> S:
        """Return the state after local iteration t."""

    def send(self, s: S, t: int) -> S:
        """Prepare the upload; t is the iteration that comes next."""
        return s

    def receive(self, s: S, t: int) -> S:
        """Take in the download; t is the iteration that comes next."""
        return s

    def rejoin(self, s: S, t: int) -> S:
        """Make private fields usable again for a client that sat out the last round (before `receive`)."""
        return s

    def restarts(self, t: int) -> bool:
        """Tell whether iteration t starts an estimate anew, where a larger batch helps (`initial_batch`)."""
        return t == 0

    def ends_round(self, t: int, q: int) -> bool:
        """Tell whether the clients synchronise after iteration t."""
        return (t + 1) % q == 0

    def feasible(self, problem: P, shared: Fields) -> Fields:
        """Return the broadcast with both players in their sets, which a server's step or noise may have left."""
        found = {**shared, self.point: problem.project(shared[self.point])}
        if isinstance(problem, Saddle) and "w" in shared:
            found["w"] = problem.project_dual(shared["w"])
        return found


def refuse_mismatch(problem: Problem, algorithm: Algorithm[Any, Any]) -> None:
    """Refuse a method on a kind of problem that it cannot work on."""
    if not isinstance(problem, algorithm.accepts):
        raise NestfedError(
            f"{algorithm.name} works on problems of kind {algorithm.accepts.kinds}, "
            f"but this problem is {type(problem).__name__}."
        )
