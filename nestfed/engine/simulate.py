"""Simulation: all clients on this machine, or on the machines of `torchrun`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nestfed import metrics
from nestfed.algorithms.buffered import BUFFERS, with_buffers
from nestfed.core import Algorithm, Clients, Fields, NestfedError, Problem, as_clients, refuse_mismatch, whole
from nestfed.engine import checkpoint, probe
from nestfed.engine.callbacks import Callback, Callbacks, check_callbacks, settings_of
from nestfed.engine.federation import Federation
from nestfed.engine.identity import after_warm_up, identity
from nestfed.engine.loop import Plan, drive
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.place import available, make_federation, vectorises
from nestfed.engine.privacy import Noise
from nestfed.engine.program import AnyAlgorithm, span_from
from nestfed.engine.progress import Progress
from nestfed.engine.ranks import Group
from nestfed.engine.recheck import refuse_other_metrics
from nestfed.engine.record import last_known
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record, Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.engine.schedules import check_schedules
from nestfed.engine.warm_up import WarmUp
from nestfed.files import locked, make_directory, require_locks, write_atomically

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """The result of a run. `result["ap"]` is the last value of a metric."""

    x: Tensor
    """The solution: the parameters, and behind them running statistics if the model keeps any."""
    model: Any
    """The user's module with the trained parameters, or the vector itself."""
    history: list[Record]
    """One record per round."""
    shared: Fields
    """The final shared fields: the point, and the method's estimators."""
    private: Fields
    """The final private fields, one row per client (under `torchrun`: this rank's clients)."""
    profile: Mapping[str, float] = field(default_factory=dict)
    """Seconds by activity."""
    privacy: str = ""
    """With privacy: ε and its assumptions, in one sentence."""
    gathered: Fields = field(default_factory=dict)
    """The final tables of the clients' contributions, and who is fresh."""
    points: Tensor | None = None
    """Every client's own point, one row each, if the method trains one."""
    models: Sequence[Any] = ()
    """Every client's own model, if the method trains one (Ditto, FedRep, Alone)."""

    def __getitem__(self, column: str) -> float:
        """Return the last known value of a metric or cost."""
        value = last_known(self.history, column)
        if value is None:
            known = sorted({k for r in self.history for k, v in r.items() if v is not None})
            raise KeyError(f"The history has no {column!r}; it has {', '.join(known)}.")
        return value

    def frame(self) -> pd.DataFrame:
        """Return the history as a data frame, one row per round."""
        import pandas as pd

        return pd.DataFrame(self.history)


def simulate(
    problem: Problem,
    method: AnyAlgorithm,
    clients: Clients,
    *,
    rounds: int,
    q: int = 1,
    seed: int = 0,
    x0: Tensor | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    measure: Callable[[Fields, Fields], Mapping[str, float]] | None = None,
    evaluation: Evaluation = Evaluation(),
    exchange: Exchange = Exchange(),
    execution: Execution = Execution(),
    directory: str | Path | None = None,
    progress: bool | None = None,
    warm_up: WarmUp | None = None,
    callbacks: Sequence[Callback | Callable[[Record], Any]] = (),
) -> Result:
    """Train for a number of communication rounds of q local iterations each.

    - `clients`: anything with `len` and `sample(n, t)`; see `nestfed.core.Clients`.
    - `x0`: the starting point, if it is not the model's own parameters.
    - `evaluate`: gets the model in evaluation mode and returns named metrics.
    - `measure`: gets the shared fields and the private ones (a row per client) and returns named measures.
    - `evaluation`: how often to evaluate, and which point to return.
    - `exchange`: who takes part, and what crosses the network.
    - `execution`: how to run clients on this machine; results change by rounding only.
    - `directory`: write the record and checkpoints there, and resume from them. Only one run at a time may use it.
    - `progress`: show a progress bar; None = only on a terminal.
    - `warm_up`: the first of these rounds use another method and objective. `measure` and `evaluation.keep` concern only
      the rounds after them.
    - `callbacks`: functions that are called with every record, or `Callback` objects. If one fails, it ends with a warning;
      the run continues.
    """
    check_callbacks(callbacks)
    warm = warm_up if warm_up is not None and warm_up.rounds else None
    before = warm.rounds if warm is not None else 0
    own, start = _prepare(
        problem, method, clients, rounds, q, seed, x0, evaluation, exchange, execution, directory,
        evaluate is not None or measure is not None, before,
    )  # fmt: skip
    method, clients, path, group = own.method, own.clients, own.path, own.group
    parts, names = [own], method.shared
    if warm is not None:
        first = _warm_part(warm, own)
        parts, names = [first, own], tuple(dict.fromkeys((*warm.method.shared, *names)))
        begin = _start(first.problem, warm.first(problem, None if x0 is None else start))
        warm.hand_over(problem, begin)  # reject another model before any work starts
    for part in parts:
        probe.inspect(part.problem, part.clients, seed, probe.some(len(clients)))
        part.check()
    noise = Noise.plan(exchange, len(clients))
    statement = noise.statement(rounds, names) if noise else ""
    facts = settings_of(method, rounds=rounds, q=q, seed=seed, clients=len(clients))
    calls = Callbacks(callbacks if group.leads else (), method.name, facts)
    with locked(path) if path is not None and group.leads else nullcontext(), calls:
        _keep_statement(statement, path, group)
        done: _Done | None = None
        name = own.identity() if warm is None else after_warm_up(own.identity(), before, first.identity())
        probed = own.probed(start)
        if warm is not None and not own.begun(name):
            last = replace(evaluation, keep="last", metric="")
            done = first.run(begin, name, first.probed(begin), last, evaluate, None, progress, calls, None)
            start = warm.hand_over(problem, done.x)
        if done is None or rounds >= before:
            done = own.run(start, name, probed, evaluation, evaluate, measure, progress, calls, done)
        return done.result(statement)


def verify(
    problem: Problem,
    method: AnyAlgorithm,
    clients: Clients,
    *,
    directory: str | Path,
    rounds: int,
    q: int = 1,
    seed: int = 0,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    measure: Callable[[Fields, Fields], Mapping[str, float]] | None = None,
    evaluation: Evaluation = Evaluation(),
    exchange: Exchange = Exchange(),
    execution: Execution = Execution(),
) -> None:
    """Reject a directory whose run these arguments of `simulate` would not repeat; train and write nothing."""
    judged = evaluate is not None or measure is not None
    own, start = _prepare(
        problem, method, clients, rounds, q, seed, None, evaluation, exchange, execution, directory, judged, 0
    )
    path = Path(directory)
    probe.inspect(own.problem, own.clients, seed, probe.some(len(own.clients)))
    if (path / own.probe_file).exists() and (probed := own.probed(start)) is not None:
        probe.check(path, probed, own.probe_file)
    found, _ = checkpoint.read(path, own.identity(), torch.device(execution.device))
    if found is None or not judged:
        return
    state, private = found
    refuse_other_metrics(
        read_record(path / "record.jsonl"), state.number,
        lambda: _measured(own.rules, state, private, evaluate, measure), path,
    )  # fmt: skip


def _prepare(
    problem: Problem, method: AnyAlgorithm, clients: Clients, rounds: int, q: int, seed: int, x0: Tensor | None,
    evaluation: Evaluation, exchange: Exchange, execution: Execution, directory: str | Path | None, judged: bool, before: int,
) -> tuple[_Part, Tensor]:  # fmt: skip
    """Check the arguments of a run; return its own rounds, after those of a warm-up, and the starting point."""
    require_locks()
    whole("rounds", rounds, 0)
    _check(problem, method, max(rounds - before, 0), q, seed, evaluation, exchange, execution, judged)
    method = with_buffers(problem, method, evaluation.keep)
    clients = as_clients(clients)
    exchange.check(_some(clients, method))
    device = available(execution.device)
    group = Group.join(device)
    problem.to(device)
    clients = clients.seeded(seed).to(device)
    start = _start(problem, x0)
    path = None if directory is None else make_directory(Path(directory))
    part = _Part(problem, method, clients, rounds, q, seed, exchange, execution, path, group, rounds, before=before)
    return part, start


@dataclass(frozen=True)
class _Done:
    """A part of a run after its last round."""

    problem: Problem
    method: AnyAlgorithm
    state: RunState
    book: RunDirectory
    x: Tensor
    """The point that the run returns."""
    private: Fields

    def result(self, privacy: str) -> Result:
        """Return the result of the run if this part is the last one."""
        problem, state = self.problem, self.state
        points = self.method.own_points(problem, state.shared, self.private)
        return Result(
            self.x, problem.module(self.x), self.book.history, dict(state.shared), dict(self.private),
            _profile(self.book.laps), privacy, dict(state.tables), points,
            [] if points is None else [problem.module(own) for own in points],
        )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """The rounds of a run with one method: all of them, or those of the warm-up or after it."""

    problem: Problem
    method: AnyAlgorithm
    clients: Clients
    rounds: int
    """The last round's number."""
    q: int
    seed: int
    exchange: Exchange
    execution: Execution
    path: Path | None
    group: Group
    total: int
    """The run's last round, for messages."""
    before: int = 0
    """Rounds of a warm-up before these."""
    last: int = 2**31
    """The last round whose checkpoint belongs to these rounds."""
    probe_file: str = probe.FILE

    @cached_property
    def rules(self) -> Rules:
        """The rules by which these rounds are closed."""
        return _rules(self.problem, self.method, self.clients, self.exchange, self.seed)

    @cached_property
    def vectorised(self) -> bool:
        """Whether clients are vectorised."""
        return vectorises(self.execution, self.problem, self.clients)

    def check(self) -> None:
        """Reject what would fail after other rounds; the problem has been inspected."""
        _ = self.rules, self.vectorised

    def identity(self) -> str:
        """Return what identifies the run in its checkpoints."""
        N, d = len(self.clients), self.problem.x0.numel()
        return identity(self.method, self.q, self.seed, N, d, self.exchange)

    def probed(self, start: Tensor) -> probe.Probe | None:
        """Return the probe for the run directory, if this process writes one."""
        if self.path is None or not self.group.leads:
            return None
        spans, t = [], 0
        for _ in range(min(self.rounds - self.before, probe.SPANS)):
            spans.append(span_from(self.method, t, self.q))
            t = spans[-1].stop
        return probe.Probe.of(
            self.problem, self.clients, self.seed, start[: self.problem.x0.numel()], q=self.q, spans=spans,
            precision=self.execution.precision,
        )  # fmt: skip

    def begun(self, identity: str) -> bool:
        """Return whether the directory has a checkpoint of these rounds, so that the warm-up is over."""
        found = None
        if self.path is not None and self.group.leads:
            found, _ = checkpoint.read(
                self.path, identity, torch.device("cpu"), rounds=range(self.before + 1, self.last)
            )
        return bool(self.group.agree(found is not None))

    def run(
        self, start: Tensor, identity: str, probed: probe.Probe | None, evaluation: Evaluation,
        evaluate: Callable[[Any], Mapping[str, float]] | None,
        measure: Callable[[Fields, Fields], Mapping[str, float]] | None,
        progress: bool | None, calls: Callbacks, warm: _Done | None,
    ) -> _Done:  # fmt: skip
        """Run these rounds, or resume them; `warm` is the warm-up that has just ended."""
        method, group, device = self.method, self.group, torch.device(self.execution.device)
        template = _template(method, self.problem, start)
        state = RunState.start(method, template, len(self.clients), None if warm is None else warm.state)
        with closing(self._federation(template, state)) as federation:
            del template
            judge = _judge(self.rules, federation, group, evaluate, measure)
            plan = Plan(self.rules, max(self.rounds - self.before, 0), self.q, self.seed, evaluation, judge)
            if self.path is not None:
                _compare(self.path, probed, federation, self.probe_file)
            book = RunDirectory(
                self.path, identity, federation, method=method, rounds=self.total, evaluation=evaluation,
                checkpoint_every=self.execution.checkpoint_every, leads=group.leads, before=self.before,
                last=self.last, history=() if warm is None else warm.book.history,
            )  # fmt: skip
            if warm is not None:
                book.laps = warm.book.laps
            state = book.resume(state, device)
            if judge is not None and state.round:
                own = [r for r in book.history if r["round"] > self.before or not self.before]
                refuse_other_metrics(own, state.number, partial(judge, state), self.path, federation.agree)
            book.callbacks = calls
            calls.start(book.history, self.path)
            book.progress = Progress(method.name, self.total, state.number, progress if group.leads else False)
            with book, book.deferred_interrupt(), torch.no_grad():
                drive(plan, state, federation, book)
        x = state.outcome(_solution(method, state, _of_all(method, federation)), evaluation.keep)
        if evaluation.keep != "last" or BUFFERS in method.private:  # the leading rank knows
            x = federation.agree(x)
        return _Done(self.problem, method, state, book, x, federation.own())

    def _federation(self, template: Any, state: RunState) -> Federation:
        return make_federation(
            self.rules, self.clients, self.seed, template, state, self.execution, self.vectorised, self.path, self.group
        )


def _keep_statement(statement: str, path: Path | None, group: Group) -> None:
    """Write what the run says about privacy into its directory."""
    if statement and path is not None and group.leads:
        write_atomically(path / "privacy.txt", f"{statement}\n".encode())


def _warm_part(warm: WarmUp, own: _Part) -> _Part:
    """Return the rounds of a warm-up, after the checks that the run's own rounds have passed."""
    problem = own.problem if warm.problem is None else warm.problem
    rounds = min(own.rounds, warm.rounds)
    refuse_mismatch(problem, warm.method)
    warm.method.ends_round(0, own.q)
    check_schedules(warm.method, rounds, own.q)
    clients = own.clients
    if warm.clients is not None:
        clients = as_clients(warm.clients).seeded(own.seed).to(torch.device(own.execution.device))
    if _some(clients, warm.method) != len(own.clients):
        raise NestfedError(f"The warm-up has {len(clients)} clients, but the run has {len(own.clients)}.")
    problem.to(torch.device(own.execution.device))
    return replace(
        own,
        problem=problem,
        method=with_buffers(problem, warm.method, "last"),
        clients=clients,
        rounds=rounds,
        before=0,
        last=warm.rounds,
        probe_file=probe.WARM_UP_FILE,
    )


def _start(problem: Problem, x0: Tensor | None) -> Tensor:
    """Return the starting point: the user's, or the model's own parameters."""
    if x0 is None:
        return problem.x0
    if x0.shape not in (problem.x0.shape, torch.Size([problem.x0.numel() + problem.b0.numel()])):
        raise NestfedError(f"x0 has shape {tuple(x0.shape)}, but the model has {problem.x0.numel()} parameters.")
    return x0.detach().to(problem.x0)


def _template(method: AnyAlgorithm, problem: Problem, start: Tensor) -> Any:
    """Return the state of a client that has not trained yet, with every field that the method declares."""
    template = method.init(problem, start)
    declared = (*method.shared, *method.private, *method.gathered, *method.tables())
    if absent := [k for k in declared if k not in template._fields]:
        raise NestfedError(
            f"{method.name} declares the field {absent[0]!r}, but its state has {', '.join(template._fields)}."
        )
    return template


def _rules(problem: Problem, method: AnyAlgorithm, clients: Clients, exchange: Exchange, seed: int) -> Rules:
    """Return the rules by which rounds are closed: weights and noise as the exchange says."""
    N = len(clients)
    total = None
    if method.counts_rows and min(clients.examples(n) for n in range(N)) <= 0:
        raise NestfedError(
            f"{method.name} with k above 0 shrinks losses by the clients' rows, but these clients do not count them: define "
            "`examples`, or set k = 0."
        )
    if exchange.weights == "examples":
        counts = [clients.examples(n) for n in range(N)]
        if min(counts) <= 0:
            raise NestfedError(
                "exchange.weights = 'examples' needs clients that count their examples; use 'equal' here."
            )
        total = partial(float, sum(counts))
    return Rules(problem, method, exchange, N, Noise.plan(exchange, N), seed, total)


def _judge(
    rules: Rules, federation: Federation, group: Group,
    evaluate: Callable[[Any], Mapping[str, float]] | None,
    measure: Callable[[Fields, Fields], Mapping[str, float]] | None,
) -> Callable[[RunState], Mapping[str, float]] | None:  # fmt: skip
    """Return what judges a state by the user's functions, or None if there are none."""
    if evaluate is None and measure is None:
        return None

    def judge(state: RunState) -> Mapping[str, float]:
        private = federation.private() if measure is not None else _of_all(rules.method, federation)  # on every rank
        return _measured(rules, state, private, evaluate, measure) if group.leads else {}

    return judge


def _measured(
    rules: Rules, state: RunState, private: Fields,
    evaluate: Callable[[Any], Mapping[str, float]] | None,
    measure: Callable[[Fields, Fields], Mapping[str, float]] | None,
) -> dict[str, float]:  # fmt: skip
    """Return what the user's functions find in a state."""
    found: dict[str, float] = {}
    if evaluate is not None:
        with torch.no_grad():
            found |= named_numbers("evaluate", evaluate(rules.problem.bind(_solution(rules.method, state, private))))
    if measure is not None:
        measures = named_numbers("measure", measure(state.shared, private))
        if both := sorted(found.keys() & measures.keys()):
            raise NestfedError(f"evaluate and measure both return {both[0]!r}: rename one of them.")
        found |= measures
    return found


def _of_all(method: AnyAlgorithm, federation: Federation) -> Fields:
    """Return the clients' private fields if the solution needs them; every rank takes part."""
    return federation.private() if BUFFERS in method.private else {}


def _solution(method: AnyAlgorithm, state: RunState, private: Fields) -> Tensor:
    """Return the solution of a state; private statistics count from the first round of their client on."""
    seen = state.seen >= 0
    if BUFFERS in private and len(private[BUFFERS]) == len(seen) and bool(seen.any()):
        private = {BUFFERS: private[BUFFERS][seen]}
    return method.solution(state.shared, private)


def named_numbers(function: str, values: Any) -> dict[str, float]:
    """Return what the user's function measured as named numbers."""
    try:
        return {str(k): float(v) for k, v in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise NestfedError(f"{function} must return named numbers such as {{'ap': 0.9}}, not {values!r}.") from None


def _compare(path: Path, probed: probe.Probe | None, federation: Federation, file: str) -> None:
    """Reject a directory that contains a run of another problem; every rank raises the error of the first."""
    sentence, error = "", ""
    if probed is not None:
        try:
            sentence = probe.check(path, probed, file)
        except NestfedError as found:
            error = str(found)
    error = federation.agree(error)
    if error:
        raise NestfedError(error)
    if sentence:
        warnings.warn(sentence, stacklevel=4)


def _check(
    problem: Problem, method: AnyAlgorithm, rounds: int, q: int, seed: int, evaluation: Evaluation,
    exchange: Exchange, execution: Execution, evaluated: bool,
) -> None:  # fmt: skip
    """Reject invalid arguments before any work starts."""
    if not isinstance(method, Algorithm):
        raise NestfedError(f"The method must be an object such as FedAvg(eta=0.1), not {method!r}.")
    refuse_mismatch(problem, method)
    whole("q", q)
    whole("seed", seed, 0)
    for kind, options in ((Evaluation, evaluation), (Exchange, exchange), (Execution, execution)):
        if not isinstance(options, kind):
            name = kind.__name__
            raise NestfedError(f"{name.lower()} must be an object such as {name}(), not {options!r}.")
    if evaluation.keep == "best":
        if not evaluated:
            raise NestfedError("evaluation.keep = 'best' needs a metric: pass evaluate or measure.")
        if not evaluation.metric:
            raise NestfedError(
                "evaluation.keep = 'best' needs the name of a metric, such as evaluation.metric = 'auroc'."
            )
        metrics.find(evaluation.metric)
    if evaluation.keep == "uniform" and not exchange.reduction.plain:
        raise NestfedError(
            "evaluation.keep = 'uniform' needs exchange.reduce = 'mean', because it averages the clients' points."
        )
    method.ends_round(0, q)
    check_schedules(method, rounds, q)


def _some(clients: Clients, method: AnyAlgorithm) -> int:
    """Return the number of clients, or raise an error if the method does not support it."""
    if len(clients) < 1:
        raise NestfedError("There are no clients; at least one is needed.")
    if method.single and len(clients) > 1:
        raise NestfedError(f"{method.name} is a single-machine method, but there are {len(clients)} clients.")
    return len(clients)


def _profile(laps: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by activity, without overlaps."""
    gradients, compiling = laps.get("gradients", 0.0), laps.get("compiling", 0.0)
    inside = {
        **({"compiling": compiling} if compiling else {}),
        "drawing": laps.get("drawing", 0.0),
        "gradients": gradients,
        "updates": laps.get("running", 0.0) - gradients - compiling,
        "averaging": laps.get("averaging", 0.0),
    }
    rest = max(0.0, laps.get("round", 0.0) - sum(inside.values()))
    return {**inside, "rest": rest, "evaluation": laps.get("evaluation", 0.0), "saving": laps.get("saving", 0.0)}
