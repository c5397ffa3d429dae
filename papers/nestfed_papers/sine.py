"""Sine waves: regression tasks y = A·sin(x + bπ/5) from a few points each, a standard meta-learning problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Clients, Data, NestfedError, at_least, positive
from nestfed.data.random import Purpose, Streams
from nestfed.metrics import mse, r2
from nestfed.problems.maml import MAML, Adaptable, squared_error
from nestfed.problems.objective import Generated, Made, Setting

AMPLITUDES = PHASES = (1, 2, 3, 4, 5)
"""The 25 training tasks are all pairs of these (Local-SCGDM paper)."""
LOW, HIGH = -5.0, 5.0
"""The interval of the points."""


def wave(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return A·sin(x + bπ/5)."""
    return a * torch.sin(x + b * math.pi / 5)


@dataclass(frozen=True)
class SineClients(Clients):
    """25 tasks, spread over the clients at random and evenly; each iteration `tasks` of a client's own are drawn.

    A drawn task comes with K new points as support and K others as query, uniform in [−5, 5].
    """

    clients: int = 5
    tasks: int = 3
    points: int = 10
    seed: int | None = field(default=None, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        total = len(AMPLITUDES) * len(PHASES)
        if self.clients < 1 or total % self.clients:
            raise NestfedError(
                f"sine: the number of clients must divide the {total} tasks, and {self.clients} does not."
            )
        if not 1 <= self.tasks <= self.held:
            raise NestfedError(f"sine: tasks must be 1 to {self.held}, the tasks on a client, not {self.tasks}.")
        if self.points < 1:
            raise NestfedError(f"sine: a task needs at least 1 point, not {self.points}.")
        streams = Streams(self.seed or 0)
        order = streams.at(Purpose.PROBLEM, 0, 0).permutation(total)
        pairs = np.array([(a, b) for a in AMPLITUDES for b in PHASES], dtype=np.float64)[order]
        object.__setattr__(self, "_streams", streams)
        object.__setattr__(self, "waves", torch.tensor(pairs.reshape(self.clients, self.held, 2), dtype=self.dtype))

    @property
    def held(self) -> int:
        """The number of tasks on each client."""
        return len(AMPLITUDES) * len(PHASES) // max(self.clients, 1)

    def __len__(self) -> int:
        return self.clients

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's tasks at iteration t: (query, support, numbers of the tasks)."""
        (outer, inner, which) = self.draw([n], range(t, t + 1))[0]
        return (outer[0][0], outer[1][0]), (inner[0][0], inner[1][0]), which[0]

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Draw for several clients and iterations at once."""
        which, points = [], []
        for t in ts:
            for n in ns:
                generator = self._streams.at(Purpose.TASKS, n, t)  # type: ignore[attr-defined]
                which.append(generator.choice(self.held, self.tasks, replace=False, shuffle=False))
                points.append(generator.uniform(LOW, HIGH, (self.tasks, 2 * self.points)))
        shape = (len(ts), len(ns), self.tasks)
        rows = torch.from_numpy(np.stack(which)).view(shape)
        x = torch.from_numpy(np.stack(points)).to(self.dtype).view(*shape, -1)
        waves: Tensor = self.waves  # type: ignore[attr-defined]
        own = waves[list(ns)][torch.arange(len(ns))[:, None], rows]
        y = wave(x, own[..., :1], own[..., 1:])
        k = self.points
        return [
            ((x[i, ..., k:, None], y[i, ..., k:]), (x[i, ..., :k, None], y[i, ..., :k]), rows[i])
            for i in range(len(ts))
        ]


@dataclass(frozen=True)
class SineTest:
    """Unseen tasks, A uniform in [0.1, 5] and b in [0, 5]: K points to adapt on, 100 others to judge by."""

    count: int = 600
    points: int = 10
    steps: Sequence[int] = (1, 5)
    """The numbers of inner steps after which the loss is computed, besides 0."""
    stream: int = 0
    """Which stream of tasks: validation and test draw from different ones."""

    def tasks(self) -> tuple[Data, Data]:
        """Return (query, support), the same ones for every run."""
        generator = Streams(0).at(Purpose.TASKS, 2**40 + self.stream, 0)
        a, b = generator.uniform(0.1, 5.0, (self.count, 1)), generator.uniform(0.0, 5.0, (self.count, 1))
        x = torch.from_numpy(generator.uniform(LOW, HIGH, (self.count, self.points + 100))).float()
        y = wave(x, torch.from_numpy(a).float(), torch.from_numpy(b).float())
        x = x[..., None]
        k = self.points
        return (x[:, k:], y[:, k:]), (x[:, :k], y[:, :k])

    def __call__(self, model: Adaptable) -> dict[str, float]:
        """Return the mean squared error before adaptation and after each number of inner steps, and R² beside it.

        R² is the share of the targets' mean square that the model explains.
        """
        (x, y), support = self.tasks()
        dtype = model.x.dtype
        x, y, support = x.to(dtype), y.to(dtype), (support[0].to(dtype), support[1].to(dtype))
        found: dict[str, float] = {}
        u, done = model.adapt(support, 0), 0
        for steps in (0, *sorted(self.steps)):
            u, done = model.problem.adapt(u, support, steps - done), steps
            answers = model.predict(u, x).cpu().numpy()
            found |= {f"loss_{steps}": mse(answers, y), f"r2_{steps}": r2(answers, y, baseline=0.0)}
        return found


def draw_fit(
    models: Mapping[str, Adaptable], path: Path, a: float = 2.5, b: float = 1.5, steps: int = 1, points: int = 10
) -> Path:
    """Draw the curves that models fit to one unseen task from a few points (Figure 1 of the Local-SCGDM paper)."""
    from nestfed.report.drawing import pyplot, save

    plt = pyplot()
    known = torch.from_numpy(Streams(0).at(Purpose.TASKS, 2**41, 0).uniform(LOW, HIGH, (1, points))).float()
    grid = torch.linspace(LOW, HIGH, 300)[None]
    amplitude, phase = torch.tensor(a), torch.tensor(b)
    truth = wave(known, amplitude, phase)
    figure, panels = plt.subplots(1, len(models), figsize=(3.6 * len(models), 3.4), sharey=True, layout="constrained")
    after = f"after {steps} step" + "s" * (steps != 1)
    for panel, (name, model) in zip(np.atleast_1d(panels), models.items()):
        panel.plot(grid[0], wave(grid, amplitude, phase)[0], color="#5c636a", linewidth=1.5, label="the task")
        for taken, style, label in ((0, ":", "before"), (steps, "-", after)):
            u = model.adapt((known[..., None].to(model.x), truth.to(model.x)), taken)
            curve = model.predict(u, grid[..., None].to(model.x))[0].cpu()
            panel.plot(grid[0], curve, style, color="#d9480f", linewidth=1.8, label=label)
        panel.plot(known[0], truth[0], "o", color="#0b6e99", markersize=5, label=f"its {points} points")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("x")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    np.atleast_1d(panels)[0].set_ylabel(f"y, A = {a:g}, b = {b:g}")
    np.atleast_1d(panels)[-1].legend(frameon=False, fontsize=8, loc="best")
    return save(figure, path)


@dataclass(frozen=True)
class SineOptions(Generated):
    """Options of sine: MAML on sine waves, no [data] needed."""

    tasks: int = 3
    """Tasks of a client in a step."""
    shots: int = 10
    """Points of a task."""
    inner_lr: float = 0.01
    """The step size of the inner step."""
    inner_steps: int = 1
    """Inner steps at evaluation; training takes one."""
    first_order: bool = False
    """Leave out second derivatives."""
    test_tasks: int = 600
    """Unseen tasks in the test set."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "sine"

    def __post_init__(self) -> None:
        positive(self, "inner_lr")
        at_least(self, 1, "tasks", "shots", "inner_steps", "test_tasks")
        at_least(self, 0, "clip")

    def build(self, setting: Setting) -> Made:
        """Return the problem; the metric is R² after one inner step, on tasks that are the same for every run."""
        clients = SineClients(setting.clients, self.tasks, self.shots, seed=setting.seed)
        problem = MAML(
            setting.network((1,), 1),
            squared_error,
            inner_lr=self.inner_lr,
            tasks=clients.held,
            first_order=self.first_order,
            clip=self.clip or None,
        )
        steps = tuple(sorted({1, self.inner_steps}))
        test = SineTest(self.test_tasks, self.shots, steps)
        return Made(problem, clients, "r2_1", test, SineTest(200, self.shots, steps, stream=1))
