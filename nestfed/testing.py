"""Check that your own method, problem or clients satisfy the contract of `nestfed.core`.

Call these functions from your tests:

    from nestfed.testing import check_algorithm, check_clients, check_problem

    def test_contract():
        check_clients(clients)
        check_problem(problem, clients)
        check_algorithm(HeavyBall(eta=0.1), problem, clients)

A violation raises an AssertionError (or a NestfedError) that describes it. The library's own methods, problems and
clients are tested with the same functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nestfed.algorithms.buffered import BUFFERS, with_buffers
from nestfed.core import (
    Algorithm,
    Batch,
    Clients,
    Composed,
    Data,
    Differentiable,
    Fields,
    NestfedError,
    Paired,
    Problem,
    Saddle,
    SolvableSaddle,
    Tape,
    Tracked,
    as_clients,
)
from nestfed.data.random import Purpose, Streams, global_states
from nestfed.engine.intercept import intercepted
from nestfed.engine.options import Exchange, Execution
from nestfed.engine.program import Span, batch_keys, span_from
from nestfed.engine.round import RunState
from nestfed.engine.simulate import Result, simulate
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize

_FEW = 8
"""The number of clients to check."""


# ---------------------------------------------------------------------------------------------------------
# Comparing


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, dict):  # the order of names does not matter
        tree = {k: tree[k] for k in sorted(tree)}
    return tree_leaves(tree)


def _equal(one: Any, other: Any) -> bool:
    """Compare to the last bit; NaN equals NaN."""
    left, right = _tensors(one), _tensors(other)
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else bool(a == b)
        for a, b in zip(left, right)
    )


def _close(one: Any, other: Any, what: str) -> None:
    """Require equality up to rounding: 1e-9 in float64, 1e-4 in float32, relative to the largest number."""
    for a, b in zip(_tensors(one), _tensors(other), strict=True):
        _require(a.shape == b.shape, f"{what}: the shapes are {tuple(a.shape)} and {tuple(b.shape)}.")
        if not a.numel():
            continue
        allowed = 1e-9 if a.dtype == torch.float64 else 1e-4
        error = float((a.double() - b.double()).abs().max())
        largest = max(1.0, float(b.double().abs().max()))
        _require(error <= allowed * largest, f"{what}: they differ by {error:.3g}.")


def _finite(tree: Any, what: str) -> None:
    for leaf in _tensors(tree):
        _require(bool(torch.isfinite(leaf).all()), f"{what} is infinite or NaN.")


def _copied(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


@contextmanager
def _no_global_randomness(what: str) -> Iterator[None]:
    """Require that the global generators of torch, numpy and `random` are not used."""
    before, others = torch.get_rng_state(), global_states()
    yield
    untouched = torch.equal(before, torch.get_rng_state()) and others == global_states()
    _require(untouched, f"{what} draws from a global generator, so its numbers depend on other code.")


def _pure(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call twice; require the same result and unchanged arguments."""
    before = _copied(arguments)
    first = _copied(call(*arguments))
    _require(_equal(before, arguments), f"{what} changes its arguments in place.")
    _require(_equal(first, call(*arguments)), f"{what} returns a different result when it is called again.")
    return first


# ---------------------------------------------------------------------------------------------------------
# Clients


def check_clients(clients: Any, *, seed: int = 0) -> None:
    """Check clients: length, determinism, `draw` against `sample`, `seeded`, `to`, `label`, `examples` and `steps`."""
    there = as_clients(clients)
    kind = type(clients).__name__
    _require(len(there) >= 1, f"{kind} has no clients: len() is {len(there)}.")
    ns = [*range(min(len(there), _FEW))]
    first = _copied(there.sample(0, 0))
    for leaf in tree_leaves(first):
        _require(isinstance(leaf, Tensor), f"{kind}.sample returns a {type(leaf).__name__} instead of a tensor.")
    with _no_global_randomness(f"{kind}.sample"):
        run = there.seeded(seed)
        _require(len(run) == len(there), f"{kind}.seeded changes the number of clients.")
        asked = {(n, t): _copied(run.sample(n, t)) for t in range(3) for n in ns}
        for n, t in reversed(asked):
            sentence = f"{kind}.sample({n}, {t}) returns a different batch when called again or in another order."
            _require(_equal(asked[n, t], run.sample(n, t)), sentence)
        again = there.seeded(seed)
        same = all(_equal(batch, again.sample(n, t)) for (n, t), batch in asked.items())
        _require(same, f"{kind}.seeded({seed}) gives different batches when it is called again.")
        there.seeded(seed + 1).sample(0, 0)
        _require(_equal(first, there.sample(0, 0)), f"{kind}.seeded changes the clients that it is called on.")
    moved = run.to(torch.device("cpu"))
    _require(_equal(asked[0, 0], moved.sample(0, 0)), f"{kind}.to changes the batches.")
    for n in ns:
        _require(isinstance(run.label(n), str), f"{kind}.label({n}) is not a str.")
        count = run.examples(n)
        _require(isinstance(count, int) and count >= 0, f"{kind}.examples({n}) is {count!r}, not a count.")
        for t, q in itertools.product((0, 5, 10), (1, 5)):
            taken = run.steps(n, t, q)
            sentence = f"{kind}.steps({n}, {t}, {q}) is {taken!r}, not a whole number from 1 to {q}."
            _require(isinstance(taken, int) and 1 <= taken <= q, sentence)
    groups = [ns, ns[::-1]] if run.alike else []
    for who in ([n] for n in ns):
        groups.append(who)
    for who in groups:
        for t, drawn in zip(range(3), run.draw(who, range(3)), strict=True):
            for i, n in enumerate(who):
                one = tree_map(lambda leaf, i=i: leaf[i], drawn)
                sentence = f"{kind}.draw({who}, …) differs from sample({n}, {t}), stacked along a new first axis."
                _require(_equal(one, asked[n, t]), sentence)


# ---------------------------------------------------------------------------------------------------------
# Problems


def check_problem(problem: Any, clients: Any, *, exact: bool = True, seed: int = 0) -> None:
    """Check a problem on its clients' batches.

    problem: a `Differentiable`, `Composed` or `Saddle` problem.
    clients: provide the batches.
    exact: gradients must match finite differences of the noted loss (`batch.note`) in float64. Set False for a clipped
        or first-order gradient. Problems that note no loss skip this check.
    """
    kind = type(problem).__name__
    _require(
        isinstance(problem, Differentiable | Saddle),
        f"{kind} has no kind: subclass nestfed.core.Differentiable, Composed or Saddle.",
    )
    run = as_clients(clients).seeded(seed)
    _check_start(problem, kind)
    generator = torch.Generator().manual_seed(seed)

    def near(x: Tensor) -> Tensor:
        """Return a point near x, because x itself may be special (all zeros)."""
        return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    x = problem.project(near(problem.x0))
    points = (x, problem.project_dual(near(problem.w0))) if isinstance(problem, Saddle) else (x,)
    key = torch.tensor(12345 + seed)
    data = run.sample(0, 0)
    for name, question in _questions(problem).items():
        what = f"{kind}.{name}"
        answers = []
        with _no_global_randomness(what), torch.no_grad():
            for eager in (True, False):

                def ask(*at: Tensor, question: Question = question, eager: bool = eager) -> Any:
                    return question(at, Batch(data, key, eager=eager))

                answers.append(_pure(what, ask, *points))
        _check_shapes(problem, what, name, answers[0], points, data)
        _close(answers[1], answers[0], f"{what} with batch.eager False and True")
        _check_tape(what, question, points, Batch(data, key, eager=True))
        if run.alike and len(run) > 1 and not problem.buffers:
            _check_vectorised(what, question, points, run, key)
    if exact:
        _check_differences(problem, kind, points, data, key, generator)


def _check_start(problem: Problem, kind: str) -> None:
    """Check the starting point, the projections and the model."""
    x0 = problem.x0
    vector = isinstance(x0, Tensor) and x0.dim() == 1 and x0.is_floating_point() and x0.numel() > 0
    _require(vector, f"{kind}.x0 must be a vector of floats.")
    _finite(x0, f"{kind}.x0")
    _require(not x0.requires_grad, f"{kind}.x0 requires a gradient: detach it.")
    _require(_equal(x0, problem.x0), f"{kind}.x0 differs between two calls.")
    projections: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [("project", problem.project, x0)]
    if isinstance(problem, Saddle):
        w0 = problem.w0
        _require(w0.dim() == 1 and w0.dtype == x0.dtype, f"{kind}.w0 must be a vector of the dtype of x0.")
        projections.append(("project_dual", problem.project_dual, w0))
    for name, project, start in projections:
        for point in (start, start + 3, start - 3):
            once = _pure(f"{kind}.{name}", project, point)
            _require(once.shape == start.shape, f"{kind}.{name} changes the shape of its argument.")
            _require(once.dtype == start.dtype, f"{kind}.{name} changes the dtype of its argument.")
            _close(project(once), once, f"{kind}.{name} is not idempotent")
    problem.bind(x0)
    model = problem.module(x0)
    own = [model] if isinstance(model, Tensor) else [*model.parameters()] if isinstance(model, nn.Module) else []
    shared = any(v.untyped_storage().data_ptr() == x0.untyped_storage().data_ptr() for v in own)
    _require(not shared, f"{kind}.module(x) shares memory with x: return a copy.")


Question = Callable[[tuple[Tensor, ...], Batch], Any]


def _questions(problem: Problem) -> dict[str, Question]:
    """Return the calls that a method may make, each as a function of a point and a batch that returns tensors."""
    asked: dict[str, Question] = {}
    if isinstance(problem, Differentiable):
        asked["grad"] = lambda at, batch: problem.grad(at[0], batch)
    if isinstance(problem, Composed):

        def nested(at: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
            u, pull = problem.inner(at[0], batch)
            return u, pull(torch.ones_like(u))

        asked["inner"] = nested
        asked["outer_grad"] = lambda at, batch: problem.outer_grad(problem.inner(at[0], batch)[0], batch)
        if _has_tasks(problem):
            asked["which"] = lambda at, batch: problem.which(batch)
    if isinstance(problem, Paired):

        def scored(at: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
            first, second, pull = problem.scores(at[0], batch)
            return first, second, pull(torch.ones_like(first), torch.ones_like(second))

        asked["scores"] = scored
    if isinstance(problem, Tracked) and _counts_outer(problem):
        asked["outer_ids"] = lambda at, batch: problem.outer_ids(batch)

        def tracked(at: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, Tensor]:
            b = len(problem.outer_ids(batch))
            weight = torch.full((b,), 0.5, dtype=at[0].dtype, device=at[0].device)
            return problem.tracked_grad(at[0], at[0].new_ones(b, problem.inner_dim), weight, batch)

        asked["tracked_grad"] = tracked
    if isinstance(problem, Saddle):
        asked["grads"] = lambda at, batch: problem.grads(at[0], at[1], batch)
    if isinstance(problem, SolvableSaddle):
        asked["best_dual"] = lambda at, batch: problem.best_dual(at[0], batch)
    return asked


def _has_tasks(problem: Composed) -> bool:
    """Return whether clients have a fixed set of tasks; new tasks have no indices."""
    try:
        return problem.tasks >= 1
    except NestfedError:
        return False


def _counts_outer(problem: Tracked) -> bool:
    """Return whether the number of a client's outer examples is known."""
    try:
        return problem.outer_examples >= 1
    except NestfedError:
        return False


def _check_shapes(problem: Any, what: str, name: str, found: Any, points: tuple[Tensor, ...], data: Data) -> None:
    x = points[0]
    if name in ("which", "outer_ids"):
        count, of = (problem.tasks, "tasks") if name == "which" else (problem.outer_examples, "outer examples")
        integral = found.dim() == 1 and not found.is_floating_point()
        _require(integral, f"{what} must return a vector of whole numbers.")
        inside = bool(((found >= 0) & (found < count)).all())
        _require(inside, f"{what} returns a number outside 0…{count - 1}, the client's {of}.")
        return
    expected: list[tuple[int, ...]] = [tuple(p.shape) for p in points]
    if name in ("inner", "outer_grad"):
        count = len(problem.which(Batch(data))) if _has_tasks(problem) else len(_tensors(found)[0])
        rows = (count, problem.inner_dim)
        expected = [rows, tuple(x.shape)] if name == "inner" else [rows]
    if name == "tracked_grad":
        expected = [tuple(x.shape), (len(problem.outer_ids(Batch(data))), problem.inner_dim)]
    if name == "best_dual":
        expected = [tuple(points[1].shape)]
    if name == "scores":
        drawn = problem.drawn(Batch(data))
        expected = [tuple(drawn.first.shape), tuple(drawn.second.shape), tuple(x.shape)]
    for one, shape in zip(_tensors(found), expected, strict=True):
        _require(tuple(one.shape) == shape, f"{what} returns the shape {tuple(one.shape)}, not {shape}.")
        _require(one.dtype == x.dtype, f"{what} returns {one.dtype}, but x is {x.dtype}.")
        _require(not one.requires_grad, f"{what} returns a tensor that requires a gradient: detach it.")
    _finite(found, what)


def _check_tape(what: str, question: Question, points: tuple[Tensor, ...], batch: Batch) -> None:
    with torch.no_grad():
        question(points, batch)
    count, loss = batch.tape.examples, batch.tape.loss
    _require(isinstance(count, int) and count >= 0, f"{what} notes {count!r} examples, not a count.")
    _require(loss is None or loss.dim() == 0, f"{what} notes a loss that is not one number.")


def _check_vectorised(what: str, question: Question, points: tuple[Tensor, ...], run: Clients, key: Any) -> None:
    """Require equal results with vmap over clients and one by one, each client at its own point."""
    ns = range(min(len(run), _FEW))
    (drawn,) = run.draw(ns, range(1, 2))
    scale = torch.linspace(0.9, 1.1, len(ns))
    at = tuple(torch.stack([p * s.to(p) for s in scale]) for p in points)
    who = torch.arange(len(ns))
    keys = key + who
    with torch.no_grad():
        together = torch.vmap(lambda at, data, key, n: question(at, Batch(data, key, n)))(at, drawn, keys, who)
        for i, n in enumerate(ns):
            batch = Batch(run.sample(n, 1), keys[i], who[i], eager=True)
            alone = question(tuple(p[i] for p in at), batch)
            _close(tree_map(lambda leaf, i=i: leaf[i], together), alone, f"{what} vectorised over clients and not")


def _check_differences(
    problem: Any, kind: str, points: tuple[Tensor, ...], data: Data, key: Any, generator: torch.Generator
) -> None:
    """Compare gradients with central differences of the noted loss, and the pullback with those of the inner value."""
    at = tuple(p.double() for p in points)
    data = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, data)
    name = "grads" if isinstance(problem, Saddle) else "grad"
    ask = _questions(problem)[name]

    def batch() -> Batch:
        return Batch(data, key, eager=True)

    def noted(at: tuple[Tensor, ...]) -> Tensor | None:
        one = batch()
        ask(at, one)
        return one.tape.loss

    def along(value: Callable[[tuple[Tensor, ...]], Tensor], direction: tuple[Tensor, ...]) -> Tensor:
        h = 1e-6
        ahead, behind = (value(tuple(p + s * d for p, d in zip(at, direction))) for s in (h, -h))
        return (ahead - behind) / (2 * h)

    def agree(what: str, slope: Tensor, difference: Tensor) -> None:
        error, largest = float((slope - difference).abs().max()), max(1.0, float(difference.abs().max()))
        sentence = (
            f"{what} is off by {error:.3g} from finite differences in float64 ({float(difference.flatten()[0]):.6g})"
        )
        _require(error <= 1e-4 * largest, f"{sentence}; exact=False skips this for a clipped or biased gradient.")

    directions = [
        tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device) for p in at) for _ in range(3)
    ]
    with torch.no_grad():
        start = noted(at)
        if start is not None and start.dtype == torch.float64:
            found = ask(at, batch())
            parts = found if isinstance(found, tuple) else (found,)
            for d in directions:
                slope = torch.stack([(g * v).sum() for g, v in zip(parts, d)]).sum()
                agree(f"{kind}.{name}", slope, along(lambda at: noted(at), d))  # type: ignore[arg-type, return-value]
        if isinstance(problem, Tracked) and _counts_outer(problem):
            b = len(problem.outer_ids(batch()))
            one, none = at[0].new_ones(b), at[0].new_zeros(b, problem.inner_dim)
            fresh = problem.tracked_grad(at[0], none, one, batch())[0]
            _close(fresh, problem.grad(at[0], batch()), f"{kind}.tracked_grad with weight 1, and grad")
        if isinstance(problem, Composed):
            u, pull = problem.inner(at[0], batch())
            v = torch.randn(u.shape, generator=generator, dtype=torch.float64).to(u.device)
            linear = pull(v) - problem.inner(at[0], batch())[1](torch.zeros_like(v))  # a penalty's gradient cancels
            for d in directions:
                change = along(lambda at: problem.inner(at[0], batch())[0], d)
                agree(f"{kind}.inner's pullback", (linear * d[0]).sum(), (change * v).sum(1).mean())
        if isinstance(problem, Paired):
            first, second, back = problem.scores(at[0], batch())
            v, w = (
                torch.randn(h.shape, generator=generator, dtype=torch.float64).to(h.device) for h in (first, second)
            )
            linear = back(v, w) - problem.scores(at[0], batch())[2](0 * v, 0 * w)
            for d in directions:
                change = along(lambda at: torch.cat(problem.scores(at[0], batch())[:2]), d)
                agree(f"{kind}.scores' pullback", (linear * d[0]).sum(), (change * torch.cat([v, w])).sum())


# ---------------------------------------------------------------------------------------------------------
# Methods


@dataclass(frozen=True)
class Trial:
    """A method on a problem, the argument of each of `ALGORITHM_CHECKS`."""

    method: Algorithm[Any, Any]
    problem: Any
    clients: Clients
    q: int = 3
    rounds: int = 6
    seed: int = 0

    @property
    def name(self) -> str:
        """The method's class."""
        return type(self.method).__name__

    @property
    def mode(self) -> str:
        """The default mode: vectorised if possible."""
        return "vmap" if self.clients.alike and not self.problem.buffers else "loop"

    @property
    def some(self) -> int:
        """The number of participants in rounds with absent clients: more than half."""
        return len(self.clients) // 2 + 1

    def run(
        self,
        rounds: int | None = None,
        *,
        mode: str = "",
        workers: int = 1,
        exchange: Exchange = Exchange(),
        **more: Any,
    ) -> Result:
        """Train with the engine."""
        return simulate(
            self.problem, self.method, self.clients, rounds=rounds or self.rounds, q=self.q, seed=self.seed,
            exchange=exchange, execution=Execution(mode=mode or self.mode, workers=workers), progress=False, **more,
        )  # fmt: skip

    def batch(self, n: int, t: int, span: Span, *, eager: bool = True) -> Batch:
        """Return client n's batch at step t of a round."""
        device = self.problem.x0.device
        key = batch_keys(Streams(self.seed), [n], Span(t, t + 1), device)[0, 0]
        client, steps = torch.tensor([n, self.steps(n, span)], device=device)
        rows = torch.tensor(self.clients.examples(n))
        return Batch(self.clients.sample(n, t), key, client, steps, rows, begins=t == span.start, eager=eager)

    def steps(self, n: int, span: Span) -> int:
        """Return the number of client n's steps in a round."""
        return self.clients.steps(n, span.start, span.stop - span.start)

    def span(self, t: int) -> Span:
        """Return the iterations of the round that begins at t."""
        return span_from(self.method, t, self.q)


def check_algorithm(
    method: Algorithm[Any, Any], problem: Any, clients: Any, *, q: int = 3, rounds: int = 6, seed: int = 0
) -> None:
    """Check a method on a problem that it accepts with all of `ALGORITHM_CHECKS`.

    clients: at least three, so that some can be absent; one for a single-machine method.
    q: local iterations per round.
    rounds: the length of each run, which must not diverge.
    """
    method = with_buffers(problem, method, "last")
    trial = Trial(method, problem, as_clients(clients).seeded(seed), q, rounds, seed)
    for check in ALGORITHM_CHECKS.values():
        check(trial)


def check_declaration(trial: Trial) -> None:
    """The method is a frozen dataclass with a name and a docstring; its state matches its declared fields."""
    method, name = trial.method, trial.name
    _require(dataclasses.is_dataclass(method), f"{name} must be a dataclass of its hyper-parameters.")
    _require(isinstance(method.name, str) and method.name, f"{name} needs a name.")
    _require(method.__doc__ and len(method.__doc__.splitlines()[0]) > 20, f"{name} needs a docstring of one sentence.")
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        try:
            setattr(method, field.name, getattr(method, field.name))
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{name}.{field.name} can be assigned: declare @dataclass(frozen=True).")
    twin = replace(method)  # type: ignore[type-var]
    _require(twin == method, f"{name}: instances with the same hyper-parameters must be equal.")
    _require(hash(twin) == hash(method), f"{name}: instances with the same hyper-parameters must have the same hash.")
    _require(isinstance(trial.problem, method.accepts), f"{name} does not accept a {type(trial.problem).__name__}.")
    state = method.init(trial.problem, trial.problem.x0)
    fields: tuple[str, ...] = state._fields
    sorts: dict[str, Sequence[str]] = {"shared": method.shared, "private": method.private}
    sorts |= {"gathered": (*method.gathered, *method.tables())} if method.gathered else {}
    for sort, names in sorts.items():
        unknown = [k for k in names if k not in fields]
        _require(not unknown, f"{name}.{sort} names {unknown}, but the state has {', '.join(fields)}.")
        _require(len(set(names)) == len(names), f"{name}.{sort} names a field twice.")
    for one, other in itertools.combinations(sorts, 2):
        both = sorted({*sorts[one]} & {*sorts[other]})
        _require(not both, f"{name}: {both} cannot be both {one} and {other}.")
    _require(method.point in method.shared, f"{name}.point is {method.point!r}, which is not a shared field.")
    wrong = [k for k in method.points if k not in method.shared]
    _require(not wrong, f"{name}.points names {wrong}, which are not shared fields.")
    for k in fields:
        _require(isinstance(getattr(state, k), Tensor), f"{name}: the field {k} of the state must be a tensor.")
    _check_facts(trial, state)


def _check_facts(trial: Trial, state: Any) -> None:
    """The step sizes are hyper-parameters, and shared fields have the sizes that the method declares."""
    method, problem, name = trial.method, trial.problem, trial.name
    inner = method
    while isinstance(getattr(inner, "method", None), Algorithm):  # such as Served
        inner = inner.method  # type: ignore[attr-defined]
    hyper = [field.name for field in dataclasses.fields(inner)]  # type: ignore[arg-type]
    for step in method.steps:
        _require(step in hyper, f"{name}.steps names {step!r}, but its hyper-parameters are {', '.join(hyper)}.")
    known: dict[str, Callable[[], int]] = {
        "dual": lambda: problem.w0.numel(),
        "inner value": lambda: problem.inner_dim,
        "one number": lambda: 1,
    }
    for k, size in method.sizes.items():
        _require(k in method.shared, f"{name}.sizes names {k!r}, which is not a shared field.")
        _require(size in known, f"{name}.sizes[{k!r}] is {size!r}, but must be one of {', '.join(known)}.")
    for k in method.shared:
        if k == BUFFERS:
            continue
        said = method.sizes.get(k, "the model's size")
        right = known[said]() if said in known else problem.x0.numel()
        found = getattr(state, k).numel()
        _require(
            found == right, f"{name}: the shared field {k} has {found} numbers, but by {name}.sizes {right} ({said})."
        )


def check_purity(trial: Trial) -> None:
    """Inputs stay unchanged, the same inputs give the same outputs, and no global generator is used."""
    method, problem, name = trial.method, trial.problem, trial.name
    kept = (*method.shared, *method.private, *method.gathered)
    with _no_global_randomness(name), torch.no_grad():
        for eager in (True, False):
            state = _pure(f"{name}.init", lambda x: method.init(problem, x), problem.x0.clone())
            tables, t = RunState.start(method, state, len(trial.clients)).tables, 0
            for _ in range(2):
                span = trial.span(t)
                state = state._replace(**tables)
                for hook in ("rejoin", "receive"):
                    state = _pure(f"{name}.{hook}", lambda s, t, hook=hook: getattr(method, hook)(s, t), state, t)
                for i in range(*span):
                    batch = trial.batch(0, i, span, eager=eager)

                    def step(s: Any, data: Data, i: int, batch: Batch = batch) -> Any:
                        return method.step(problem, s, replace(batch, data=data, tape=Tape()), i)

                    state = _pure(f"{name}.step", step, state, batch.data, i)
                    _keep_dtype(trial, {k: getattr(state, k) for k in kept})
                state, t = _pure(f"{name}.send", method.send, state, span.stop), span.stop
                _keep_dtype(trial, {k: getattr(state, k) for k in kept})
                tables = _gathered(trial, tables, dict.fromkeys(range(len(trial.clients)), state))
            old = {k: getattr(state, k) for k in method.shared}
            mean = {k: v + 0.1 for k, v in old.items()}
            own = dict(method.server.init(old))
            server = f"{type(method.server).__name__}.update"
            own, new = _pure(server, lambda own, old: method.server.update(own, old, mean, 0.5), own, old)  # noqa: B023
            _require(set(new) == set(method.shared), f"{server} must return all shared fields and no others.")
            _pure(f"{name}.feasible", lambda shared: method.feasible(problem, shared), new)


def _gathered(trial: Trial, tables: Fields, states: Mapping[int, Any]) -> dict[str, Tensor]:
    """Return the tables after a round in which these clients contributed, as `Algorithm.gathered` says."""
    found = dict(tables)
    if not states or not tables:
        return found
    for name, table in trial.method.gathered.items():
        rows = torch.stack([getattr(states[n], name) for n in sorted(states)])
        what, fill = f"{trial.name}.fill", partial(trial.method.fill, name)
        found[table] = _pure(what, lambda old, rows: fill(old, sorted(states), rows), tables[table], rows)  # noqa: B023
        _require(len(found[table]) == len(trial.clients), f"{what} must return one row per client.")
    found["fresh"] = tables["fresh"].new_tensor([n in states for n in range(len(trial.clients))])
    return found


def _client_round(trial: Trial, state: Any, n: int, t: int) -> Any:
    """Return a client's state after the round that starts at t: receive, step, send."""
    span = trial.span(t)
    with torch.no_grad():
        state = trial.method.receive(state, t)
        for i in range(t, t + trial.steps(n, span)):
            state = trial.method.step(trial.problem, state, trial.batch(n, i, span), i)
        return trial.method.send(state, span.stop)


def _walk(trial: Trial, problem: Any, rounds: int = 2) -> Iterator[tuple[int, Any]]:
    """Take the steps of client 0's first rounds; yield every iteration and the state after it."""
    method, t = trial.method, 0
    with torch.no_grad():
        state = method.init(problem, problem.x0)
        state = state._replace(**RunState.start(method, state, len(trial.clients)).tables)
        for _ in range(rounds):
            span = trial.span(t)
            state = method.receive(state, t)
            for i in range(*span):
                state = method.step(problem, state, trial.batch(0, i, span), i)
                yield i, state
            state, t = method.send(state, span.stop), span.stop


def check_evaluations(trial: Trial) -> None:
    """A step evaluates its batch at as many points as `evaluations` says, and at one if it restarts an estimate."""
    method, points = trial.method, 0

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal points
            points += name != "outer_grad"  # the other half of `inner`
            return function(*args, **named)

        return call

    before = 0
    for t, _ in _walk(trial, intercepted(trial.problem, counted)):
        declared = 1 if method.restarts(t, trial.q) else method.evaluations
        of = "a step that restarts an estimate has one point" if method.restarts(t, trial.q) else "evaluations"
        found, before = points - before, points
        if points:  # else it is a kind of problem of its own
            _require(
                found == declared,
                f"{trial.name}.step evaluates its batch at {found} points in iteration {t}, but it declares {declared} "
                f"({of}).",
            )


def check_domain(trial: Trial) -> None:
    """A step ends inside the problem's domain: give it one that the method would leave."""
    players = {trial.method.point: "project"}
    if isinstance(trial.problem, Saddle) and "w" in trial.method.shared:
        players["w"] = "project_dual"
    for t, state in _walk(trial, trial.problem):
        for k, project in players.items():
            point = getattr(state, k)
            inside = getattr(trial.problem, project)(point)
            _close(point, inside, f"{trial.name}.step leaves the domain at iteration {t}: {k} needs problem.{project}")


def check_scratch(trial: Trial) -> None:
    """The result of a round does not depend on the scratch fields at its start."""
    method = trial.method
    after = trial.run(2)
    t = after.history[-1]["iteration"]
    template = method.init(trial.problem, trial.problem.x0)
    kept = {**after.shared, **after.gathered, **{k: v[0] for k, v in after.private.items()}}
    scratch = sorted({*template._fields} - {*kept})
    spoilt = template._replace(**{k: torch.full_like(getattr(template, k), math.nan) for k in scratch})
    one, other = (_client_round(trial, start._replace(**kept), 0, t) for start in (template, spoilt))
    for k in (*method.shared, *method.private, *method.gathered):
        same = _equal(getattr(one, k), getattr(other, k))
        sentence = (
            f"{trial.name}: {k} depends on {' or '.join(scratch)} from before the round, but only shared, private and "
            "gathered fields are kept: fill the others in receive."
        )
        _require(same, sentence)
    _finite({k: getattr(other, k) for k in method.shared}, f"{trial.name}: the upload")


def check_dtype(trial: Trial) -> None:
    """All shared and private fields keep the dtype of x0, vectorised and in a loop."""
    for mode in {trial.mode, "loop"}:
        result = trial.run(2, mode=mode)
        _keep_dtype(trial, {"x": result.x, **result.shared, **result.private, **result.gathered})


def _keep_dtype(trial: Trial, fields: Fields) -> None:
    dtype = trial.problem.x0.dtype
    for k, v in fields.items():
        _require(v.dtype == dtype, f"{trial.name}: {k} becomes {v.dtype}, but x0 is {dtype}.")


_COUNTS = ("round", "iteration", "participants", "examples", "bytes_up", "bytes_down")


def _same_run(one: Result, other: Result, what: str) -> None:
    _close(one.shared, other.shared, f"{what}: shared fields")
    _close(one.private, other.private, f"{what}: private fields")
    _close(one.gathered, other.gathered, f"{what}: gathered fields")
    _require(len(one.history) == len(other.history), f"{what}: the records differ in length.")
    for a, b in zip(one.history, other.history):
        for column in _COUNTS:
            _require(a[column] == b[column], f"{what}: {column} is {a[column]} and {b[column]}.")
        known = a["loss"] is not None, b["loss"] is not None
        _require(known[0] == known[1], f"{what}: only one of them has a loss.")
        if all(known):
            _close(torch.tensor(a["loss"]), torch.tensor(b["loss"]), f"{what}: the losses")


def check_modes(trial: Trial) -> None:
    """Vectorised clients, clients in a loop and clients in two processes give the same numbers."""
    points: list[Tensor] = []

    def measure(shared: Fields, private: Fields) -> dict[str, float]:
        points.append(shared[trial.method.point].clone())
        return {}

    alone = trial.run(mode="loop", measure=measure)
    _require(not torch.equal(points[0], points[-1]), f"{trial.name} does not leave the starting point.")
    if trial.mode == "vmap":
        path, points = points, []
        _same_run(trial.run(mode="vmap", measure=measure), alone, f"{trial.name} vectorised and in a loop")
        _close(points, path, f"{trial.name} vectorised and in a loop: the points after every round")
    if len(trial.clients) > 1:
        _same_run(
            trial.run(mode="loop", workers=2, measure=measure), alone, f"{trial.name} with two workers and with one"
        )


def check_resume(trial: Trial) -> None:
    """A resumed run equals an uninterrupted one, even with absent clients."""
    exchange = Exchange(count=trial.some)
    whole = trial.run(exchange=exchange)
    with tempfile.TemporaryDirectory() as folder:
        trial.run(trial.rounds // 2, directory=Path(folder), exchange=exchange)
        again = trial.run(directory=Path(folder), exchange=exchange)
    what = f"{trial.name}: a resumed run differs from an uninterrupted one"
    _require(_equal(again.shared, whole.shared), f"{what} in its shared fields.")
    _require(_equal(again.private, whole.private), f"{what} in its private fields.")
    _require(_equal(again.gathered, whole.gathered), f"{what} in its gathered fields.")
    for column in (*_COUNTS, "loss"):
        columns = [[r[column] for r in result.history] for result in (again, whole)]
        _require(columns[0] == columns[1], f"{what} in its record of {column}.")


def check_participation(trial: Trial) -> None:
    """Rounds with absent or failing clients are repeatable, counted correctly, and equal to explicit rounds."""
    total, name = len(trial.clients), trial.name
    if total == 1:
        return
    for failures in (0.0, 0.3):
        exchange = Exchange(count=trial.some, failures=failures)
        result = trial.run(exchange=exchange)
        _require(
            _equal(result.shared, trial.run(exchange=exchange).shared), f"{name}: repeating a run changes its result."
        )
        _finite(
            [*result.shared.values(), *result.private.values()], f"{name}: a field after rounds with absent clients"
        )
        _close(
            trial.run(mode="loop", exchange=exchange).shared,
            result.shared,
            f"{name} with absent clients, vectorised and not",
        )
        _require(
            {*result.shared} == {*trial.method.shared}, f"{name}: the uploaded fields differ from the declared ones."
        )
        shared, private, tables, answered = _explicit_rounds(trial, exchange)
        _close(dict(result.shared), shared, f"{name}: the engine's rounds and explicit rounds")
        _close(dict(result.private), private, f"{name}: private fields of the engine and of explicit rounds")
        _close(dict(result.gathered), tables[-1], f"{name}: gathered fields of the engine and of explicit rounds")
        once = _bytes(result.shared) if trial.method.talks else 0
        up = down = 0
        for i, (record, came) in enumerate(zip(result.history, answered, strict=True)):
            row = {k: v[0] for k, v in tables[i + 1].items() if k != "fresh"}
            up += came * (once + _bytes(row))
            down += trial.some * (once + _bytes(tables[i]))
            sent = (record["participants"], record["bytes_up"], record["bytes_down"])
            _require(
                sent == (came, up, down),
                f"{name}: the record of round {record['round']} counts the wrong participants or bytes.",
            )


def _bytes(fields: Fields) -> int:
    return sum(v.numel() * v.element_size() for v in fields.values())


def _explicit_rounds(
    trial: Trial, exchange: Exchange
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]], list[int]]:
    """Train with explicit loops: clients rejoin, receive, step and send; the server gets the mean and |S|/N.

    Returns shared and private fields, the tables before every round and at the end, and the numbers of answers.
    """
    method, total = trial.method, len(trial.clients)
    template = method.init(trial.problem, trial.problem.x0)
    shared: Fields = {k: getattr(template, k) for k in method.shared}
    states, server = [template] * total, method.server.init(shared)
    last, t, answered = dict.fromkeys(range(total), -1), 0, []
    tables = [RunState.start(method, template, total).tables]
    for r in range(trial.rounds):
        luck = Streams(trial.seed).at(Purpose.FAILURE, 0, r).random(total)
        asked = exchange.draw(Streams(trial.seed), total, r)
        answering = [n for n in asked if luck[n] >= exchange.failures]
        for n in answering:
            state = states[n]._replace(**shared, **tables[-1])
            if r > 0 and last[n] != r - 1:
                state = method.rejoin(state, t)
            states[n], last[n] = _client_round(trial, state, n, t), r
        if answering:
            mean = {k: torch.stack([getattr(states[n], k) for n in answering]).mean(0) for k in shared}
            server, shared = method.server.update(server, shared, mean, len(answering) / total)
            shared = method.feasible(trial.problem, shared)
        tables.append(_gathered(trial, tables[-1], {n: states[n] for n in answering}))
        if answering or t:
            t = trial.span(t).stop
        answered.append(len(answering))
    private = {k: torch.stack([getattr(s, k) for s in states]) for k in method.private}
    return dict(shared), private, tables, answered


def check_private(trial: Trial) -> None:
    """A client's private fields change only in rounds in which it takes part."""
    if len(trial.clients) < 3:
        return
    few: int = len(trial.clients) // 2
    before, after = (trial.run(rounds, exchange=Exchange(count=few)) for rounds in (trial.rounds - 1, trial.rounds))
    for k, v in after.private.items():
        changed = int((v != before.private[k]).reshape(len(v), -1).any(1).sum())
        _require(changed <= few, f"{trial.name}: {k} changed at {changed} clients, but {few} took part.")


def check_refusals(trial: Trial) -> None:
    """A problem of another kind, or two clients for a single-machine method, give a one-sentence error."""
    x, method = torch.zeros(3, dtype=torch.float64), trial.method
    others: Sequence[Problem] = (
        Minimize(lambda x, b: x.sum(), x),
        Conditional(lambda u, o: u, lambda x, o, i: x, x),
        Compositional(lambda u, o: u.sum(), lambda x, i: x, x, 3),
        Minimax(lambda x, w, b: x.sum(), x, x),
    )
    for problem in (p for p in others if not isinstance(p, method.accepts)):
        text = _rejected(replace(trial, problem=problem), f"a problem of kind {type(problem).__name__}")
        for word in (method.name, method.accepts.kinds, type(problem).__name__):
            _require(word in text, f"{trial.name}: the error for a problem of another kind does not name {word!r}.")
    if method.single:
        text = _rejected(replace(trial, clients=as_clients(_Twins(trial.clients))), "two clients")
        _require("single-machine" in text, f"{trial.name}: the error for two clients does not say single-machine.")


def _rejected(trial: Trial, what: str) -> str:
    """Return the error of a rejected run, which must be one sentence."""
    try:
        trial.run(1)
    except NestfedError as error:
        text = str(error)
    else:
        raise AssertionError(f"{trial.name} accepts {what}.")
    sentences = text.count(". ") + text.endswith(".")
    _require(sentences == 1 and "\n" not in text, f"{trial.name}: the error for {what} is not one sentence: {text}")
    return text


@dataclass
class _Twins:
    """Two clients, both with the data of the first."""

    clients: Clients

    def __len__(self) -> int:
        return 2

    def sample(self, n: int, t: int) -> Data:
        return self.clients.sample(0, t)


ALGORITHM_CHECKS: dict[str, Callable[[Trial], None]] = {
    "declaration": check_declaration,
    "purity": check_purity,
    "dtype": check_dtype,
    "evaluations": check_evaluations,
    "domain": check_domain,
    "scratch": check_scratch,
    "modes": check_modes,
    "resume": check_resume,
    "participation": check_participation,
    "private": check_private,
    "refusals": check_refusals,
}
"""The checks of `check_algorithm` by name, to run one alone or each as its own test."""
