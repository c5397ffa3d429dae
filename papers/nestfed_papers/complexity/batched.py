"""Many seeds at once: the engine's own loop on states with leading axes (seeds, clients).

The methods are written on flat vectors, elementwise, so a client's program runs them on all seeds and clients in one
call when the problem's gradient takes leading axes too; without a function transform, a step costs the same for 16 seeds
as for one. `check()` compares the outcome with `simulate`, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestfed.core import Fields
from nestfed.engine.local import Local
from nestfed.engine.loop import Plan, rounds, send
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.program import AnyAlgorithm, Program, Who, span_from
from nestfed.engine.round import Order, Reply, Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.engine.simulate import simulate
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize
from nestfed_papers.complexity.settings import Setting, Source

Watch = Callable[[Fields], Tensor]


class Outcome(NamedTuple):
    """The result of a run: one value per seed and round, and the costs of all clients of one seed."""

    values: Tensor
    """(rounds, seeds): the measure at every synchronised point."""
    rounds: int
    examples: int
    shared: Fields
    reach: float
    """The largest norm of a point."""


def run(
    problem: Any, algorithm: AnyAlgorithm, clients: Source, T: int, q: int, seeds: tuple[int, ...], watch: Watch
) -> Outcome:
    """Run at least T iterations, to the end of a round; measure every synchronised point, including the first."""
    total = T_rounds = 0
    while total < T:
        total, T_rounds = span_from(algorithm, total, q).stop, T_rounds + 1
    template = algorithm.init(problem, problem.x0.expand(len(seeds), 1, -1))
    federation = Batched(problem, algorithm, clients, template, seeds)
    state = RunState.start(algorithm, template, len(clients))
    rules = Rules(problem, algorithm, Exchange(), len(clients))
    plan, evaluation = Plan(rules, T_rounds, q, 0, Evaluation()), Evaluation()
    book = RunDirectory(
        None, "", federation, method=algorithm, rounds=T_rounds, evaluation=evaluation, checkpoint_every=T_rounds
    )
    values, reach = [], 0.0
    with torch.no_grad():
        loop = rounds(plan, state, book)
        work = next(loop, None)
        while work is not None:
            work = send(loop, federation.run(work.order, work.shared))
            values.append(watch(state.shared))
            if state.round % 4 == 0:
                reach = max(reach, float(state.shared[algorithm.point].norm(dim=-1).max()))
    return Outcome(torch.stack(values), state.round, state.examples, state.shared, reach)


class Batched(Local):
    """All clients of all seeds in one call: a field has leading axes (seeds, clients)."""

    def __init__(
        self, problem: Any, algorithm: AnyAlgorithm, clients: Source, template: Any, seeds: tuple[int, ...]
    ) -> None:
        self.problem, self.method, self.source, self.seeds, self.template = problem, algorithm, clients, seeds, template
        self.fields: Fields = {k: getattr(template, k) for k in algorithm.private}

    def run(self, order: Order, shared: Fields) -> Reply:
        """Run a round of all clients."""
        program = Program(self.problem, self.method, self.template, order.span, eager=True)
        batches = [self.source.at(self.seeds, t) for t in range(*order.span)]
        count, steps = len(order.asked), len(batches)
        who = Who(
            torch.zeros(steps, dtype=torch.int64), torch.tensor(0), torch.tensor(steps), torch.tensor(0)
        )  # these problems use none
        upload, self.fields, report = program(shared, self.fields, None, who, batches)
        return Reply(
            {k: v.sum(1, keepdim=True) for k, v in upload.items()},
            answered=list(order.asked),
            downloads=count,
            weight=count,
            moved=float(report.moved),
            examples=sum(examples for examples, _ in program.costs) * count,
        )

    def own(self) -> Fields:
        """Return nothing: these runs are not saved."""
        return {}


def squared_gradient(setting: Setting, point: str = "x") -> Watch:
    """‖∇F(x̄)‖² (or ‖∇Φ(θ̄)‖²) of every seed."""
    return lambda shared: setting.gradient(shared[point]).square().sum(-1).squeeze(1)


def check(cases: dict[str, tuple[Setting, AnyAlgorithm]]) -> float:
    """Compare `run` with `simulate`, and explicit gradients with automatic ones; return the largest difference."""
    worst = 0.0
    for setting, algorithm in cases.values():
        problem = setting.problem(4)
        clients: Any = setting.clients(4, B=3)
        found = run(problem, algorithm, clients, 20, 5, (3, 8), squared_gradient(setting, algorithm.point))
        for i, seed in enumerate((3, 8)):
            truth = simulate(
                problem, algorithm, clients, rounds=found.rounds, q=5, seed=seed, progress=False,
                execution=Execution(mode="vmap"),
            )  # fmt: skip
            assert truth.history[-1]["examples"] == found.examples, algorithm.name
            for name, value in truth.shared.items():
                worst = max(worst, float((found.shared[name][i, 0] - value).abs().max()))
        worst = max(worst, _by_hand(problem, clients.seeded(5)))
    if not worst < 1e-10:
        raise AssertionError(f"The batched runs differ from simulate by {worst:g}.")
    return worst


def _by_hand(problem: Any, clients: Source) -> float:
    batch = torch.utils._pytree.tree_map(lambda leaf: leaf[1], clients.draw(range(len(clients)), range(7, 8))[0])
    x = problem.x0 + torch.linspace(-1, 1, len(problem.x0), dtype=torch.float64)
    if isinstance(problem, Minimax):
        w = problem.w0 + 0.3
        pairs = zip(problem.grads(x, w, batch), Minimax.grads(problem, x, w, batch))
    elif isinstance(problem, Compositional):
        (u, pull), (u2, pull2) = problem.inner(x, batch), Compositional.inner(problem, x, batch)
        v, v2 = problem.outer_grad(u, batch), Compositional.outer_grad(problem, u2, batch)
        pairs = zip((u, v, pull(v)), (u2, v2, pull2(v2)))
    else:
        kind = Conditional if isinstance(problem, Conditional) else Minimize
        pairs = zip((problem.grad(x, batch),), (kind.grad(problem, x, batch),))
    return max(float((one - two).abs().max()) for one, two in pairs)
