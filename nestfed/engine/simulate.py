"""Simulation: all clients on this machine, or on the machines of `torchrun`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nestfed import metrics
from nestfed.core import Clients, Fields, NestfedError, Problem, as_clients, refuse_mismatch, whole
from nestfed.engine import probe
from nestfed.engine.callbacks import Callback, Callbacks, Started, settings_of
from nestfed.engine.federation import Failing, Federation
from nestfed.engine.local import Local
from nestfed.engine.loop import Plan, drive
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.privacy import Noise
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.progress import Progress
from nestfed.engine.ranks import Group, Ranks
from nestfed.engine.record import last_known
from nestfed.engine.round import Record, Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.engine.schedules import check_schedules, described
from nestfed.engine.store import Tables, private_fields
from nestfed.engine.workers import Workers
from nestfed.files import locked, make_directory, require_locks, write_atomically

if TYPE_CHECKING:
    import pandas as pd

LOG = logging.getLogger("nestfed.engine")

SMALL = 200_000
"""Vectorise dense models with at most this many parameters over clients."""
LARGE = 20_000_000
"""From this many parameters on, one process with all threads is faster than several, and needs less memory."""
MANY = 512
WIDE = 2**20
"""Use several processes for vectorised work from MANY clients in a round, or WIDE numbers in one field of all of them."""


@dataclass(frozen=True)
class Result:
    """The result of a run. `result["ap"]` is the last value of a metric."""

    x: Tensor
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
    - `callbacks`: functions that are called with every record, or `Callback` objects. If one fails, it ends with a warning; the run
      continues.
    """
    require_locks()
    _check(problem, method, rounds, q, evaluation, exchange, evaluate is not None or measure is not None)
    clients = as_clients(clients)
    exchange.check(_some(clients, method))
    device = torch.device(execution.device)
    group = Group.join(device)
    problem.to(device)
    clients = clients.seeded(seed).to(device)
    start = _start(problem, x0)
    probe.inspect(problem, clients, seed, probe.some(len(clients)))
    rules = _rules(problem, method, clients, exchange, seed)
    statement = rules.noise.statement(rounds, method.shared) if rules.noise else ""
    path = None if directory is None else make_directory(Path(directory))
    with locked(path) if path is not None and group.leads else nullcontext():
        probed = probe.Probe.of(problem, clients, seed, start) if path is not None and group.leads else None
        template = _template(method, problem, start)
        state = RunState.start(method, template, len(clients))
        with closing(_federation(rules, clients, seed, template, state, execution, path, group)) as federation:
            del template
            plan = Plan(rules, rounds, q, seed, evaluation, _judge(rules, federation, group, evaluate, measure))
            if path is not None:
                _compare(path, probed, federation)
            identity = f"{described(method)} q={q} seed={seed} N={len(clients)} d={start.numel()} {exchange!r}"
            book = RunDirectory(
                path, identity, federation, point=method.point, rounds=rounds, evaluation=evaluation,
                checkpoint_every=execution.checkpoint_every, leads=group.leads,
            )  # fmt: skip
            state = book.resume(state, device)
            if statement and path is not None and group.leads:
                write_atomically(path / "privacy.txt", f"{statement}\n".encode())
            book.callbacks = Callbacks(callbacks if group.leads else (), book.warn)
            facts = settings_of(method, rounds=rounds, q=q, seed=seed, clients=len(clients))
            book.callbacks.start(Started(method.name, facts, list(book.history), path))
            book.progress = Progress(method.name, rounds, state.round, progress if group.leads else False)
            with book, book.deferred_interrupt(), torch.no_grad():
                drive(plan, state, federation, book)
        x = state.shared[method.point]
        if evaluation.keep != "last":
            x = federation.agree(state.outcome(method.point, evaluation.keep))
        points = method.own_points(problem, state.shared, federation.own())
        return Result(
            x, problem.module(x), book.history, dict(state.shared), dict(federation.own()), _profile(book.laps),
            statement, dict(state.tables), points, [] if points is None else [problem.module(own) for own in points],
        )  # fmt: skip


def _start(problem: Problem, x0: Tensor | None) -> Tensor:
    """Return the starting point: the user's, or the model's own parameters."""
    if x0 is None:
        return problem.x0
    if x0.shape != problem.x0.shape:
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
        found: dict[str, float] = {}
        private = federation.private() if measure is not None else {}  # every rank takes part
        if not group.leads:
            return found
        if evaluate is not None:
            with torch.no_grad():
                found |= named_numbers("evaluate", evaluate(rules.problem.bind(state.shared[rules.method.point])))
        if measure is not None:
            found |= named_numbers("measure", measure(state.shared, private))
        return found

    return judge


def named_numbers(function: str, values: Any) -> dict[str, float]:
    """Return what the user's function measured as named numbers."""
    try:
        return {str(k): float(v) for k, v in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise NestfedError(f"{function} must return named numbers such as {{'ap': 0.9}}, not {values!r}.") from None


@cache
def _warm_up() -> None:
    """Load what torch imports at its first vectorised gradient, so that no run's seconds include it."""
    torch.vmap(torch.func.grad_and_value(torch.sum))(torch.zeros(2, 1))


def _compare(path: Path, probed: probe.Probe | None, federation: Federation) -> None:
    """Reject a directory that contains a run of another problem; every rank raises the error of the first."""
    sentence, error = "", ""
    if probed is not None:
        try:
            sentence = probe.check(path, probed)
        except NestfedError as found:
            error = str(found)
    error = federation.agree(error)
    if error:
        raise NestfedError(error)
    if sentence:
        warnings.warn(sentence, stacklevel=3)


def _federation(
    rules: Rules, clients: Clients, seed: int, template: Any, state: RunState, execution: Execution,
    path: Path | None, group: Group,
) -> Federation:  # fmt: skip
    """Return the federation: clients in this process or in workers, on one rank or several."""
    problem, method, exchange = rules.problem, rules.method, rules.exchange
    device, N = torch.device(execution.device), len(clients)
    vectorised = _vectorise(execution, problem, clients)
    if vectorised:
        _warm_up()
    workers = _processes(execution.workers, vectorised, problem, device, exchange.participants(N) // group.count)
    fields = private_fields(method, template, exchange.encoding)
    limit = round(execution.memory_gb * 1e9)
    store = Tables.start(fields, group.block(N), limit=limit, folder=path, shared=workers > 1)
    local = Local(
        problem, method, clients, store, seed, exchange, device, vectorised, execution.compile,
        torch.bfloat16 if execution.precision == "bf16" else None, execution.accumulate, execution.profile, template,
    )  # fmt: skip
    federation: Federation = local
    if workers > 1:
        federation = Workers(local, state.shared, workers, exchange.count or N)
    if group.count > 1:
        federation = Ranks(federation, group, N, device)
    return Failing(federation, exchange.failures, N, seed) if exchange.failures else federation


def _check(
    problem: Problem, method: AnyAlgorithm, rounds: int, q: int, evaluation: Evaluation, exchange: Exchange,
    evaluated: bool,
) -> None:  # fmt: skip
    """Reject invalid arguments before any work starts."""
    refuse_mismatch(problem, method)
    whole("rounds", rounds, 0)
    whole("q", q)
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


def _vectorise(execution: Execution, problem: Problem, clients: Clients) -> bool:
    """Decide whether to vectorise over clients.

    Measured: it is faster for small dense models (fivefold at a few thousand parameters) and slower for convolutions
    and recurrent models, whose batched kernels are slow.
    """
    if problem.sequential:
        if execution.mode == "vmap" or execution.compile:
            raise NestfedError(
                "The model or the objective draws random numbers (other than dropout) that cannot be vectorised over "
                "clients: use mode = 'loop' without compile."
            )
        LOG.info("Clients run one after another, because the model draws random numbers that cannot be vectorised.")
        return False
    if execution.mode != "auto" or execution.compile:
        return execution.mode != "loop"
    return len(clients) > 1 and not problem.heavy and clients.alike and problem.x0.numel() <= SMALL


def _processes(workers: int, vectorised: bool, problem: Problem, device: torch.device, participants: int) -> int:
    """Decide how many processes run the clients.

    Measured: several processes with one thread each are faster than one process with several threads if a client's
    step is short. The number of torch threads limits the processes; `nestfed compare` sets it to 1.
    """
    # Daemon processes cannot have children, and accelerators do not survive a fork.
    able = device.type == "cpu" and not current_process().daemon and hasattr(os, "fork")
    if workers > 1 and not able:
        raise NestfedError(f"execution.workers = {workers} needs device = cpu and a system with fork; use 1 here.")
    if workers == 0:
        size = problem.x0.numel()
        several = (participants >= MANY or participants * size >= WIDE) if vectorised else size < LARGE
        workers = torch.get_num_threads() if several and able and not torch.cuda.is_available() else 1
    return max(1, min(workers, participants))


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
