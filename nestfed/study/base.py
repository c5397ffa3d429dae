"""The base of all estimators: choosing the method, training, saving without pickle."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from nestfed import theory
from nestfed.algorithms import METHODS
from nestfed.algorithms import build as build_method
from nestfed.core import Algorithm, DivergedError, NestfedError, __version__, whole
from nestfed.engine.options import Evaluation, Exchange, Execution
from nestfed.engine.round import Record
from nestfed.engine.simulate import Result, simulate
from nestfed.engine.warm_up import WarmUp
from nestfed.models import Mlp, build
from nestfed.study import advice, sealed
from nestfed.study.sites import DataError

FORMAT = 2
WHAT, FACTS, PARAMETERS = "saved estimator", "estimator.json", "model.safetensors"
ATTEMPTS, SHRINK = 4, 4.0
"""Attempts with an automatic step size, and its divisor after each divergence."""


class Scores(nn.Module):
    """Wraps a user's module, so that it returns one score per example or one per class."""

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
        if y.dim() == 2 and y.shape[1] == 2:  # two logits: use their difference
            return y[:, 1] - y[:, 0]
        return y


class Precise(nn.Module):
    """Computes the scores of a trained model in float64.

    In float32, a row's score depends in its last digits on the other rows that are scored with it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's scores."""
        return self.model(x.double())


def precise(model: Scores) -> nn.Module:
    """Return a model in float64 if its network is the library's own; others may compute in float32 only."""
    return Precise(model) if isinstance(model.module, Mlp) else model


class Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The base class of the estimators; not part of the public interface."""

    kind: ClassVar[str]
    """The kind of objective, as named in `nestfed.study.advice`."""

    # scikit-learn requires constructors that only store their arguments.
    module: Any
    method: Any
    lr: Any
    rounds: int
    q: int
    exchange: Exchange | None
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
        """Return the user's module, the result of the user's function for this shape, or a default network."""
        if self.module is None:
            layers = (() if len(shape) == 1 else (64,)) if self.hidden is None else tuple(self.hidden)
            return build("mlp", shape, outputs, seed=seed, hidden=layers)
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        if not callable(self.module):
            raise DataError(f"module must be an nn.Module or a function of the input's shape, not {self.module!r}.")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = self.module(shape)
        if not isinstance(made, nn.Module):
            raise DataError(f"module(shape) must return an nn.Module, not {type(made).__name__}.")
        return made

    def _asked(self, clients: int) -> tuple[type[Algorithm[Any, Any]], dict[str, Any], str]:
        """Return the class of the method, the hyper-parameters that the user set, and the reason for the choice."""
        if self.method == "auto":
            exchange = self.exchange or Exchange()
            partial = clients > 1 and (exchange.share < 1 or 0 < exchange.count < clients)
            choice = advice.choose(self.kind, rounds=self.rounds, partial=partial)
            return METHODS[choice.name], {}, choice.why
        kind: Any = self.method
        given: dict[str, Any] = {}
        if isinstance(self.method, functools.partial):
            kind = self.method.func
            names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
            given = {**dict(zip(names, self.method.args)), **self.method.keywords}
        if isinstance(kind, str):
            return METHODS[kind], given, "you named it"
        if isinstance(kind, type) and issubclass(kind, Algorithm):
            return kind, given, "you named it"
        raise DataError(
            "method must be 'auto', a name from `nestfed list`, a class such as FMGDA, functools.partial(FMGDA, c=0.1) or "
            f"an object such as FMGDA(c_hat=0.1, c=0.1), not {self.method!r}."
        )

    def _method(self, problem: Any, clients: Any, seed: int, shrunk: float = 1.0) -> Algorithm[Any, Any]:
        """Return the method, and store the choice and its reason; `shrunk` divides the automatic step size."""
        lr = self.lr
        if isinstance(self.method, Algorithm):
            if lr is not None:
                raise DataError(
                    f"lr={lr!r} and method={self.method!r} both set the step size: leave lr out, or pass the class."
                )
            self.choice_ = advice.Choice(self.method.name, "you passed it as an object")
            return self.method
        if isinstance(lr, str) and lr != "theory":
            raise DataError(f"lr must be a number, a function of the iteration, 'theory' or None, not {lr!r}.")
        N, T = len(clients), self.rounds * self.q
        kind, settings, why = self._asked(N)
        self.choice_ = advice.Choice(kind.name, why)
        covered, given = kind.name in theory.METHODS, isinstance(lr, int | float)
        L = advice.smoothness(problem, clients, seed) if lr is None or lr == "theory" or (given and covered) else 0.0
        if lr == "theory":
            settings, lr = {**advice.prescribed(kind.name, L, N=N, T=T).steps, **settings}, None
        elif lr is None:
            lr = advice.STEP[self.kind] / max(L, 1e-6) / shrunk
        self.lr_ = lr
        method = build_method(kind, **{**kind.usual(lr, rounds=self.rounds, q=self.q), **settings})
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
        warm_up: Callable[[float], WarmUp] | None = None,
    ) -> Result:
        """Train, and check the result. Retry with a smaller step if an automatic step size diverges.

        - `warm_up`: returns the warm-up; it divides its automatic step size by its argument.
        """
        whole("rounds", self.rounds)
        tried: list[Any] = []
        while True:
            self.method_ = self._method(problem, clients, seed, SHRINK ** len(tried))
            first = None if warm_up is None else warm_up(SHRINK ** len(tried))
            try:
                result = simulate(
                    problem,
                    self.method_,
                    clients,
                    rounds=self.rounds,
                    q=self.q,
                    seed=seed,
                    evaluate=evaluate,
                    evaluation=Evaluation(every=max(1, self.rounds // 20)),
                    exchange=self.exchange or Exchange(),
                    execution=Execution(device=self.device),
                    progress=self.verbose,
                    warm_up=first,
                )
                reject_runaway([r for r in result.history if first is None or r["round"] > first.rounds])
                break
            except DivergedError:
                if self.lr is not None or isinstance(self.method, Algorithm) or len(tried) == ATTEMPTS - 1:
                    raise
                tried.append(self.lr_)
        self._result = result
        self.history_ = result.history
        self.n_iter_ = self.rounds
        moved = float((result.x.cpu() - problem.x0.cpu()).norm())
        self.hints_ = advice.look_at(result.history, metric, moved)
        if tried:
            steps = ", ".join(f"{lr:.3g}" for lr in tried)
            self.hints_ += [f"Training diverged with the automatic step size {steps}, so {self.lr_:.3g} was used."]
        return result

    # -----------------------------------------------------------------------------------------------------
    # Files

    def save(self, directory: str | Path, *, force: bool = False) -> Path:
        """Write model.safetensors and estimator.json, without pickle, both or none; `force` replaces a saved estimator."""
        check_is_fitted(self)
        place = Path(directory)
        sealed.reject_used(place, WHAT, (sealed.SUMS, FACTS), force=force)
        saved = {
            "format": FORMAT,
            "nestfed": __version__,
            "class": type(self).__name__,
            "own_module": self.module is None,
            "params": {k: v for k, v in self._plain_params().items() if k != "module"},
            "choice": {"name": self.choice_.name, "why": self.choice_.why, "method": repr(self.method_)},
            "fitted": self._fitted(),
        }
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in self.module_.state_dict().items()}
        sealed.write(place, {FACTS: (json.dumps(saved, indent=1) + "\n").encode(), PARAMETERS: save(tensors)})
        return place

    @classmethod
    def load(cls, directory: str | Path, module: nn.Module | None = None) -> Self:
        """Load an estimator from `save`. Pass your own module again, because its code is not saved."""
        place = Path(directory)
        try:
            files = sealed.read(place, WHAT).files if sealed.exists(place) else {}
            saved = json.loads(files[FACTS] if files else (place / FACTS).read_bytes())
            state = load(files[PARAMETERS] if files else (place / PARAMETERS).read_bytes())
        except KeyError as error:
            raise NestfedError(f"{place} contains no saved estimator: {error.args[0]} is missing.") from error
        except FileNotFoundError as error:
            raise NestfedError(
                f"{place} contains no saved estimator: {Path(error.filename).name} is missing."
            ) from error
        except (ValueError, OSError, SafetensorError) as error:
            raise NestfedError(f"The saved estimator in {place} cannot be read: {error}.") from error
        if saved.get("format") != FORMAT:
            raise NestfedError(f"{place} was written by another version of nestfed ({saved.get('nestfed')}).")
        if saved["class"] != cls.__name__:
            raise NestfedError(f"{place} contains a {saved['class']}, not a {cls.__name__}: use {saved['class']}.load.")
        if not saved["own_module"] and module is None:
            raise NestfedError(f"The model in {place} needs your own module: use load(directory, module=YourModule()).")
        found = cls(**saved["params"])
        found.module = None if saved["own_module"] else module
        found.choice_ = advice.Choice(saved["choice"]["name"], saved["choice"]["why"])
        found.history_, found.hints_ = [], []
        found._restore(saved["fitted"])
        try:
            found.module_.load_state_dict(state)
        except RuntimeError as error:
            raise NestfedError(f"The module does not fit the parameters in {place}: {error}") from error
        found.module_.eval()
        return found

    def _plain_params(self) -> dict[str, Any]:
        """Return the constructor's arguments that JSON can store; skip schedules and method objects."""
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

    def _restore(self, fitted: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether `fit` was called, for scikit-learn."""
        return hasattr(self, "module_")


def reject_runaway(history: Sequence[Record]) -> None:
    """Raise an error if the loss exploded, even if all numbers are still finite."""
    losses = [r["loss"] for r in history if r.get("loss") is not None]
    if losses and losses[-1] > 1e3 * max(1.0, abs(losses[0])):
        raise DivergedError(f"The loss grew from {losses[0]:.3g} to {losses[-1]:.3g}: the step size is too large.")
