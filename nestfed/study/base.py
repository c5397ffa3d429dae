"""What all estimators share: the method, the run, the module, saving without pickle, the report."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from nestfed import theory
from nestfed.core import Algorithm, DivergedError, NestfedError, __version__
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.round import Record
from nestfed.engine.simulate import Result, simulate
from nestfed.files import write_model
from nestfed.models import build
from nestfed.study import advice
from nestfed.study.sites import Refused

FORMAT = 2
ATTEMPTS, SHRINK = 4, 4.0
"""How often training is begun with a step size of our own, and what it is divided by after it diverged."""


class Scores(nn.Module):
    """A user's module whose output is made one score per example, or one per class, whatever its shape."""

    def __init__(self, module: nn.Module, outputs: int) -> None:
        super().__init__()
        self.module, self.outputs = module, outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return (n,) for one output, (n, outputs) otherwise."""
        y = self.module(x)
        if self.outputs > 1:
            return y
        if y.dim() == 2 and y.shape[1] == 1:
            return y[:, 0]
        if y.dim() == 2 and y.shape[1] == 2:  # two logits: only their difference counts
            return y[:, 1] - y[:, 0]
        return y


class Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The base of the estimators. Not for users."""

    kind: ClassVar[str]
    """The kind of objective, as `nestfed.study.advice` calls it."""

    # The constructors of the estimators store, and nothing else.
    module: Any
    algorithm: Any
    lr: Any
    rounds: int
    q: int
    participation: Any
    settings: Any
    hidden: Any
    device: str
    random_state: Any
    verbose: bool | None

    def _seed(self) -> int:
        if self.random_state is None:
            return 0
        if isinstance(self.random_state, np.random.RandomState):
            return int(self.random_state.randint(2**31 - 1))
        return int(self.random_state)

    def _model(self, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        """Return the user's module, what the user's function makes for this shape, or a network of our own."""
        if self.module is None:
            layers = (() if len(shape) == 1 else (64,)) if self.hidden is None else tuple(self.hidden)
            return build("mlp", shape, outputs, seed=seed, hidden=layers)
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        if not callable(self.module):
            raise Refused(f"module must be an nn.Module or a function of the input's shape, not {self.module!r}.")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = self.module(shape)
        if not isinstance(made, nn.Module):
            raise Refused(f"module(shape) must return an nn.Module, not {type(made).__name__}.")
        return made

    def _method(self, problem: Any, clients: Any, seed: int, shrunk: float = 1.0) -> Algorithm[Any, Any]:
        """Return the method, and remember which it is and why; `shrunk` divides the measured step size."""
        if isinstance(self.algorithm, Algorithm):
            self.choice_ = advice.Choice(self.algorithm.name, "it was given")
            return self.algorithm
        N, T = len(clients), self.rounds * self.q
        if self.algorithm == "auto":
            self.choice_ = advice.choose(self.kind, clients=N, rounds=self.rounds, participation=self.participation)
        else:
            self.choice_ = advice.Choice(str(self.algorithm), "it was asked for")
        name, settings, lr = self.choice_.name, dict(self.settings or {}), self.lr
        if isinstance(lr, str) and lr != "theory":
            raise Refused(f"lr must be a number, a function of the iteration, 'theory' or None, not {lr!r}.")
        covered = name in theory.METHODS
        given = isinstance(lr, int | float)
        L = advice.smoothness(problem, clients, seed) if lr is None or lr == "theory" or (given and covered) else 0.0
        if lr == "theory":
            settings, lr = {**advice.prescribed(name, L, N=N, T=T).steps, **settings}, None
        elif lr is None:
            lr = advice.STEP[self.kind] / max(L, 1e-6) / shrunk
        self.lr_ = lr
        method = advice.configure(name, lr, settings, rounds=self.rounds, q=self.q)
        if given and covered:
            advice.check_theory(method, L, N=N, T=T, q=self.q)
        return method

    def _run(
        self,
        problem: Any,
        clients: Any,
        seed: int,
        evaluate: Callable[[Any], Mapping[str, float]] | None,
        metric: str,
    ) -> Result:
        """Train, and look at how it went. A step size of our own that turns out too large is made smaller."""
        tried: list[Any] = []
        while True:
            self.algorithm_ = self._method(problem, clients, seed, SHRINK ** len(tried))
            try:
                result = simulate(
                    problem,
                    self.algorithm_,
                    clients,
                    rounds=self.rounds,
                    q=self.q,
                    seed=seed,
                    evaluate=evaluate,
                    evaluation=Evaluation(every=max(1, self.rounds // 20)),
                    exchange=_exchange(self.participation),
                    execution=Execution(device=self.device),
                    progress=self.verbose,
                )
                refuse_runaway(result.history)
                break
            except DivergedError:
                if self.lr is not None or isinstance(self.algorithm, Algorithm) or len(tried) == ATTEMPTS - 1:
                    raise
                tried.append(self.lr_)
        self._result = result
        self.history_ = result.history
        self.n_iter_ = self.rounds
        moved = float((result.x.cpu() - problem.x0.cpu()).norm())
        self.hints_ = advice.look_at(result.history, metric, moved)
        if tried:
            steps = ", ".join(f"{lr:.3g}" for lr in tried)
            self.hints_ += [f"Training diverged with the measured step size {steps}, so {self.lr_:.3g} was taken."]
        return result

    # -----------------------------------------------------------------------------------------------------
    # Files

    def save(self, directory: str | Path) -> Path:
        """Write model.safetensors and estimator.json; there is no pickle in them."""
        check_is_fitted(self)
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        write_model(place / "model.safetensors", self.module_, None)
        told = {
            "format": FORMAT,
            "nestfed": __version__,
            "class": type(self).__name__,
            "own_module": self.module is None,
            "params": {k: v for k, v in self._plain_params().items() if k != "module"},
            "choice": {"name": self.choice_.name, "why": self.choice_.why, "method": repr(self.algorithm_)},
            "fitted": self._fitted(),
        }
        (place / "estimator.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return place

    @classmethod
    def load(cls, directory: str | Path, module: nn.Module | None = None) -> Self:
        """Read what `save` wrote; a module of one's own has to be given again, as its code is not in the files."""
        place = Path(directory)
        try:
            told = json.loads((place / "estimator.json").read_text(encoding="utf-8"))
            state = load_file(place / "model.safetensors")
        except FileNotFoundError as error:
            raise NestfedError(
                f"{place} holds no saved estimator: {Path(error.filename).name} is not there."
            ) from error
        except (ValueError, OSError) as error:
            raise NestfedError(f"{place} holds a saved estimator that cannot be read ({error}).") from error
        if told.get("format") != FORMAT:
            raise NestfedError(f"{place} was written by another version of nestfed ({told.get('nestfed')}).")
        if told["class"] != cls.__name__:
            raise NestfedError(f"{place} holds a {told['class']}, not a {cls.__name__}: use {told['class']}.load.")
        if not told["own_module"] and module is None:
            raise NestfedError(f"{place} holds a model of your own code: give load(directory, module=YourModule()).")
        found = cls(**told["params"])
        found.module = None if told["own_module"] else module
        found.choice_ = advice.Choice(told["choice"]["name"], told["choice"]["why"])
        found.history_, found.hints_ = [], []
        found._restore(told["fitted"])
        try:
            found.module_.load_state_dict(state)
        except RuntimeError as error:
            raise NestfedError(f"The module does not fit the parameters in {place}: {error}") from error
        found.module_.eval()
        return found

    def _plain_params(self) -> dict[str, Any]:
        """Return the constructor's arguments that JSON can hold; a schedule or a method object is left out."""
        found = {}
        for name, value in self.get_params(deep=False).items():
            value = value.item() if isinstance(value, np.generic) else value
            try:
                json.dumps(value)
            except TypeError:
                continue
            found[name] = value
        return found

    def _fitted(self) -> dict[str, Any]:
        raise NotImplementedError

    def _restore(self, told: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def __sklearn_is_fitted__(self) -> bool:
        """Tell scikit-learn whether `fit` was called."""
        return hasattr(self, "module_")


def _exchange(participation: int | float | None) -> Exchange:
    """Return who takes part: so many clients (int), each with a probability (float), or all (None)."""
    if isinstance(participation, int):
        return Exchange(count=participation)
    return Exchange() if participation is None else Exchange(share=participation)


def refuse_runaway(history: Sequence[Record]) -> None:
    """Raise if the loss has grown beyond all bounds, though all numbers are still finite."""
    losses = [r["loss"] for r in history if r.get("loss") is not None]
    if losses and losses[-1] > 1e3 * max(1.0, abs(losses[0])):
        raise DivergedError(f"The loss grew from {losses[0]:.3g} to {losses[-1]:.3g}: the step size is too large.")
