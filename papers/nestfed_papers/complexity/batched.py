"""Many seeds at once: the engine's own round on states with leading axes (seeds, clients).

The methods are written on flat vectors, elementwise, so `engine.sync.Program` runs them on all seeds and clients in one
call when the problem's gradient takes leading axes too; without a function transform, a step costs the same for 16 seeds
as for one. `check()` compares the outcome with `simulate`, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestfed.core import Fields
from nestfed.engine.round import AnyAlgorithm, Program, span_from
from nestfed.engine.simulate import simulate
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize
from nestfed_papers.complexity.settings import Setting, Source

Watch = Callable[[Fields], Tensor]


class Outcome(NamedTuple):
    """What a run leaves: one value per seed and round, and what was spent by all clients of one seed."""

    values: Tensor
    """(rounds, seeds): the measure at every synchronised point."""
    rounds: int
    iterations: int
    examples: int
    shared: Fields
    reach: float
    """The longest point that was seen."""


def run(
    problem: Any, algorithm: AnyAlgorithm, clients: Source, T: int, q: int, seeds: tuple[int, ...], watch: Watch
) -> Outcome:
    """Run at least T iterations, to the end of a round; watch every synchronised point, the first one included."""
    start = problem.x0.expand(len(seeds), 1, -1)
    template = algorithm.init(problem, start)
    shared: Fields = {k: getattr(template, k) for k in algorithm.shared}
    private: Fields = {k: getattr(template, k) for k in algorithm.private}
    state = algorithm.server.init(shared)
    t = rounds = examples = 0
    values, reach = [], 0.0
    with torch.no_grad():
        while t < T:
            span = span_from(algorithm, t, q)
            program = Program(problem, algorithm, template, span, eager=True)
            batches = [clients.at(seeds, i) for i in range(*span)]
            upload, private, _ = program(shared, private, None, batches, [None] * len(batches))
            mean = {k: v.mean(1, keepdim=True) for k, v in upload.items()}
            state, shared = algorithm.server.update(state, shared, mean, 1.0)
            examples += program.examples * len(clients)
            t, rounds = span.stop, rounds + 1
            values.append(watch(shared))
            if rounds % 4 == 0:
                reach = max(reach, float(shared[algorithm.point].norm(dim=-1).max()))
    return Outcome(torch.stack(values), rounds, t, examples, shared, reach)


def squared_gradient(setting: Setting, point: str = "x") -> Watch:
    """‖∇F(x̄)‖² (or ‖∇Φ(θ̄)‖²) of every seed."""
    return lambda shared: setting.gradient(shared[point]).square().sum(-1).squeeze(1)


def check(cases: dict[str, tuple[Setting, AnyAlgorithm]]) -> float:
    """Compare run with simulate, and gradients by hand with automatic ones; return the largest difference."""
    worst = 0.0
    for setting, algorithm in cases.values():
        problem = setting.problem(4)
        clients: Any = setting.clients(4, B=3)
        found = run(problem, algorithm, clients, 20, 5, (3, 8), squared_gradient(setting, algorithm.point))
        for i, seed in enumerate((3, 8)):
            truth = simulate(
                problem, algorithm, clients, rounds=found.rounds, q=5, seed=seed, progress=False, mode="vmap"
            )
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
