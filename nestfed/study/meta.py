"""Meta-learning over sites: a model that adapts to a new task with a few examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from nestfed import models
from nestfed.core import Clients, Data
from nestfed.data.clients import without_replacement
from nestfed.data.random import Purpose, Streams
from nestfed.engine.options import Exchange
from nestfed.metrics import find
from nestfed.problems.classify import cross_entropy
from nestfed.problems.maml import MAML, squared_error
from nestfed.study.base import Federated, Scores
from nestfed.study.sites import (
    DataError,
    InputEncoding,
    Site,
    _entries,
    _is_pair,
    _site,
    as_table,
    common_encoding,
    encoding_from_json,
    inputs,
)


@dataclass(frozen=True)
class TaskClients(Clients):
    """Clients with their own tasks; each iteration a client draws some tasks, and a support and a query from each."""

    tasks: Sequence[Sequence[tuple[Tensor, Tensor]]]
    each: int
    shots: int
    queries: int
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_streams", Streams(self.seed or 0))

    def __len__(self) -> int:
        return len(self.tasks)

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's tasks at iteration t: (query, support, numbers of the tasks)."""
        generator = self._streams.at(Purpose.TASKS, n, t)  # type: ignore[attr-defined]
        own = self.tasks[n]
        which = without_replacement(generator, len(own), self.each)
        xs, ys = [], []
        for i in which:
            x, y = own[i]
            rows = torch.from_numpy(self._rows(generator, len(x)))
            xs.append(x[rows])
            ys.append(y[rows])
        x, y, k = torch.stack(xs), torch.stack(ys), self.shots
        return (x[:, k:], y[:, k:]), (x[:, :k], y[:, :k]), torch.from_numpy(np.asarray(which))

    def _rows(self, generator: np.random.Generator, held: int) -> np.ndarray:
        """Draw disjoint rows for support and query; in a small task, rows repeat."""
        shots, queries = self.shots, self.queries
        if held >= shots + queries:
            return without_replacement(generator, held, shots + queries)
        cut = min(max(1, held * shots // (shots + queries)), held - 1)
        order = generator.permutation(held)
        first, second = order[:cut], order[cut:]
        return np.concatenate(
            [part[without_replacement(generator, len(part), k)] for part, k in ((first, shots), (second, queries))]
        )


@dataclass(frozen=True)
class Adapted:
    """A model adapted to one task."""

    owner: FederatedMAML
    parameters: Tensor

    def predict(self, X: Any) -> np.ndarray:
        """Return predictions for examples of the task: numbers or classes."""
        x = self.owner._input(X)
        return self.owner._answers(self.owner._problem.predict(self.parameters, x[None])[0])


class FederatedMAML(Federated):
    """Learn an initialisation that adapts to a new task by one gradient step (MAML), over sites that keep their tasks.

    `fit` takes a list of tasks (X, y) for each site. `task` is "regression" (squared error) or "classification" (with
    classes 0, 1, … in each task). `adapt(X, y)` returns a model for a new task.
    """

    kind = "maml"
    _problem: MAML

    def __init__(
        self,
        module: Any = None,
        *,
        task: str = "regression",
        inner_lr: float = 0.05,
        shots: int = 10,
        queries: int = 10,
        tasks_per_step: int = 3,
        method: Any = "auto",
        lr: Any = None,
        rounds: int = 100,
        q: int = 10,
        hidden: Sequence[int] = (40, 40),
        first_order: bool = False,
        exchange: Exchange | None = None,
        device: str = "cpu",
        random_state: int | None = 0,
        verbose: bool | None = False,
    ) -> None:
        self.module = module
        self.task = task
        self.inner_lr = inner_lr
        self.shots = shots
        self.queries = queries
        self.tasks_per_step = tasks_per_step
        self.method = method
        self.lr = lr
        self.rounds = rounds
        self.q = q
        self.hidden = hidden
        self.first_order = first_order
        self.exchange = exchange
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: None = None, *, eval_set: Any = None) -> Self:
        """Train on sites, each a list of tasks (X, y); `eval_set`, a list of unseen tasks, is evaluated during training."""
        if self.task not in ("regression", "classification"):
            raise DataError(f"task must be regression or classification, not {self.task!r}.")
        sites = self._tasks_by_site(X)
        flat = [task for tasks in sites for task in tasks]
        seed = self._seed()
        self.scale_: InputEncoding = common_encoding(flat, mark_gaps=not isinstance(self.module, torch.nn.Module))
        self.n_features_in_ = len(flat[0].schema) or flat[0].x.shape[1]
        self.shape_ = tuple(inputs(self.scale_, flat[0].x[:1], flat[0].schema).shape[1:])
        self.outputs_ = 1
        if self.task == "classification":
            self.outputs_ = int(max(task.y.max() for task in flat)) + 1
            if self.outputs_ < 2:
                raise DataError("Classification tasks need at least the labels 0 and 1.")
        self._build(seed)
        tasks = [[self._tensors(task) for task in own] for own in sites]
        fewest, most = min(map(len, tasks)), max(map(len, tasks))
        self._problem._tasks = most
        # A step must not draw a task twice: a method with a state per task could keep only one of the two.
        clients = TaskClients(tasks, min(self.tasks_per_step, fewest), self.shots, self.queries)
        judged = None
        if eval_set is not None:
            unseen = [self._tensors(task) for task in self._tasks_by_site([eval_set])[0]]
            judged = lambda model: {self._metric: self._judged(unseen, model.x)}  # noqa: E731
        result = self._run(self._problem, clients, seed, judged, self._metric)
        self._x = result.x.cpu()
        self._scores = result.model.cpu()
        self.module_ = self._scores.module
        return self

    @property
    def _metric(self) -> str:
        return "r2" if self.task == "regression" else "accuracy"

    def _build(self, seed: int) -> None:
        model = Scores(self._model(self.shape_, self.outputs_, seed), self.outputs_)
        loss = squared_error if self.task == "regression" else cross_entropy
        self._scores = model
        self._problem = MAML(model, loss, inner_lr=self.inner_lr, first_order=self.first_order)

    def _tasks_by_site(self, X: Any) -> list[list[Site]]:
        found = []
        for name, tasks in _entries(X) if isinstance(X, Mapping) else [(str(n), s) for n, s in enumerate(X)]:
            if _is_pair(tasks) and not _is_pair(tasks[0]):
                raise DataError(f"Site {name} is one (X, y), expected a list of tasks, each an (X, y).")
            found.append([_site(f"{name}, task {i}", task, None) for i, task in enumerate(tasks)])
            if not found[-1]:
                raise DataError(f"Site {name} has no tasks.")
            for task in found[-1]:
                if len(task.x) < 2:
                    raise DataError(
                        f"{task.name} has one example; a task needs at least two: one to adapt, one to evaluate."
                    )
        if not found:
            raise DataError("There are no sites: pass at least one list of tasks.")
        return found

    def _tensors(self, task: Site) -> tuple[Tensor, Tensor]:
        kind = torch.float32 if self.task == "regression" else torch.int64
        return inputs(self.scale_, task.x, task.schema, task.name), torch.from_numpy(np.asarray(task.y)).to(kind)

    def _input(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return inputs(self.scale_, *as_table(X))

    def _answers(self, outputs: Tensor) -> np.ndarray:
        if self.task == "regression":
            return outputs.numpy()
        return (outputs > 0).long().numpy() if outputs.dim() == 1 else outputs.argmax(1).numpy()

    def adapt(self, X: Any, y: Any, steps: int = 1) -> Adapted:
        """Return a model after some inner steps on the examples of a new task."""
        check_is_fitted(self)
        x, labels = self._tensors(_site("the task", (X, y), None))
        return Adapted(self, self._problem.adapt(self._x, (x[None], labels[None]), steps))

    def predict(self, X: Any) -> np.ndarray:
        """Return predictions without any adaptation."""
        return self._answers(models.score(self._scores, self._input(X)))

    def score(self, X: Any, y: None = None, steps: int = 1) -> float:
        """Return R² or accuracy on unseen tasks: adapt on the first `shots` examples, evaluate on the rest."""
        check_is_fitted(self)
        tasks = [self._tensors(task) for task in self._tasks_by_site([X])[0]]
        return self._judged(tasks, self._x, steps)

    def _judged(self, tasks: Sequence[tuple[Tensor, Tensor]], at: Tensor, steps: int = 1) -> float:
        outputs, truths = [], []
        for x, y in tasks:
            if len(x) <= self.shots:
                raise DataError(f"A task has {len(x)} examples, but evaluation needs more than {self.shots} (shots).")
            k = self.shots
            u = self._problem.adapt(at, (x[None, :k], y[None, :k]), steps)
            outputs.append(self._problem.predict(u, x[None, k:])[0].cpu())
            truths.append(y[k:])
        return find(self._metric)(torch.cat(outputs).numpy(), torch.cat(truths).numpy())

    def _fitted(self) -> dict[str, Any]:
        return {
            "scale": self.scale_.to_json(),
            "shape": list(self.shape_),
            "outputs": self.outputs_,
            "features": self.n_features_in_,
        }

    def _restore(self, fitted: Mapping[str, Any]) -> None:
        self.scale_ = encoding_from_json(fitted["scale"])
        self.shape_, self.outputs_, self.n_features_in_ = tuple(fitted["shape"]), fitted["outputs"], fitted["features"]
        self._build(0)
        self.module_ = self._scores.module

    @classmethod
    def load(cls, directory: Any, module: Any = None) -> Self:
        """Load an estimator from `save`."""
        found = super().load(directory, module)
        found._x = torch.cat([p.detach().reshape(-1) for p in found._scores.parameters()])
        return found
