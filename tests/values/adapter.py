"""The only file here that calls the library: it translates neutral settings into calls, and results into values.

When the library's interface changes, this file changes with it and no case does.
"""

from __future__ import annotations

import csv
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nestfed_papers import language, omniglot
from torch import nn

# What only some cases need is imported where they need it: two ranks and every worker of the tests load this file.
from nestfed import algorithms
from nestfed.core import Clients, Metric
from nestfed.data import partition
from nestfed.data.clients import Examples
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.engine.record import read as read_record
from nestfed.engine.simulate import simulate
from nestfed.models import build as network
from nestfed.problems.classify import Classify
from nestfed.problems.maml import MAML
from nestfed.problems.multilabel import MultiLabelAP, MultiLabelAUROC
from tests.toys import SETTINGS
from tests.values.registry import plain

Values = dict[str, Any]
Settings = Mapping[str, Any]
LEFT_OUT = ("seconds",)
"""Columns of a record that are different every time."""

USUAL: Settings = {
    "toy": "plain",  # or conditional, compositional, tasked, minimax, images, words, characters
    "clients": 5,
    "method": "fedavg",
    "hyper": {},
    "rounds": 4,
    "local_steps": 3,
    "seed": 5,
    "how": "loop",  # or vmap, workers (two processes, each a loop), vmap-workers
    "pieces": 1,  # in which a batch is evaluated
    "on_disk": False,  # whether the clients' own fields lie on disk
    "participation": None,  # a count, or a probability as a float
    "failures": 0.0,
    "encoding": "",
    "reduction": "mean",
    "noise": 0.0,
    "bad_numbers": "stop",  # or drop
    "sick": None,  # (client, iteration) at which the data are NaN
    "outcome": "last",  # or uniform, best
    "judge": "",  # the metric for best: norm or -norm
    "evaluate_every": 1,
    "folder": None,  # for the record and checkpoints; a run resumes from what it finds there
}


def records(history: Sequence[Mapping[str, Any]]) -> list[Values]:
    """Return a run's lines without what is different every time."""
    return [{k: v for k, v in line.items() if k not in LEFT_OUT} for line in history]


# ---------------------------------------------------------------------------------------------------------
# Simulation


def simulated(settings: Settings) -> Values:
    """Run in this process (or this rank)."""
    s = _complete(settings)
    problem, clients = _toy(s["toy"], s["clients"])
    method = algorithms.build(s["method"], **s["hyper"])
    if s["sick"]:
        clients = _Sick(clients, *s["sick"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = simulate(
            problem,
            method,
            clients,
            rounds=s["rounds"],
            q=s["local_steps"],
            seed=s["seed"],
            measure=lambda shared, private: _measured(shared[method.point]),
            evaluation=_evaluation(s),
            exchange=_exchange(s),
            execution=Execution(
                mode="vmap" if s["how"].startswith("vmap") else "loop",
                workers=2 if s["how"].endswith("workers") else 1,
                accumulate=s["pieces"],
                memory_gb=1e-9 if s["on_disk"] else 0.0,
            ),
            directory=s["folder"],
            progress=False,
        )
    values: Values = {
        "point": result.x,
        "shared": dict(result.shared),
        "private": {k: v.clone() for k, v in result.private.items()},
        "records": records(result.history),
    }
    if s["noise"]:
        values["epsilon"] = float(re.search(r"ε = ([\d.e+-]+|inf) ", result.privacy)[1])  # type: ignore[index]
    if s["sick"]:
        # A garbage collection at this moment may find what other tests left open.
        values["warnings"] = sum(not issubclass(w.category, ResourceWarning | DeprecationWarning) for w in caught)
    return values


def _evaluation(s: Settings) -> Evaluation:
    metric = Metric(s["judge"].removeprefix("-"), higher=not s["judge"].startswith("-"))
    return Evaluation(every=s["evaluate_every"], keep=s["outcome"], metric=metric if s["judge"] else "")


def _exchange(s: Settings) -> Exchange:
    part = s["participation"]
    privacy = Gaussian(float(s["reduction"].removeprefix("clip:")), s["noise"]) if s["noise"] else None
    return Exchange(
        count=part if isinstance(part, int) else 0,
        share=part if isinstance(part, float) else 1.0,
        failures=s["failures"],
        encode=s["encoding"],
        reduce="mean" if privacy else s["reduction"],
        privacy=privacy,
        on_nan=s["bad_numbers"],
    )


def on_two_ranks(runs: Mapping[str, Settings]) -> Values:
    """Run on two ranks that share the clients out; return what each of them holds, by run."""
    from tests import support

    with tempfile.TemporaryDirectory() as name:
        # Whole, because the arrays of toys are small.
        ranks = support.on_two_ranks(lambda: {n: plain(simulated(s), whole=True) for n, s in runs.items()}, Path(name))
    return {f"rank {r}": found for r, found in enumerate(ranks)}


def over_flower(settings: Settings) -> Values:
    """Run as a coordinator and sites that pass Flower's messages, all in this process."""
    from pytest import MonkeyPatch  # noqa: PT013

    from nestfed.deploy.flower import Custom
    from nestfed.experiment.build import Assembly
    from nestfed.experiment.spec import RunSpec
    from tests import flower

    s = _complete(settings)
    problem, clients = _toy(s["toy"], s["clients"])
    method = algorithms.build(s["method"], **s["hyper"])
    spec = RunSpec(rounds=s["rounds"], q=s["local_steps"], seed=s["seed"])
    made = Assembly(problem, method, clients, lambda model: {}, "")
    with tempfile.TemporaryDirectory() as name, MonkeyPatch.context() as patch:
        flower.alone(patch)
        folder = Path(name)
        flower.deploy(Custom(s["method"], lambda: made, spec, exchange=_exchange(s)), folder, len(clients))
        state = flower.checkpointed(folder)
        history = read_record(folder / "run" / "record.jsonl")
    kept = {k: v for k, v in state.items() if k.startswith(("shared.", "server."))}
    return {"state": kept, "records": records(history)}


def _complete(settings: Settings) -> Values:
    unknown = settings.keys() - USUAL.keys()
    if unknown:
        raise KeyError(f"No such setting: {', '.join(sorted(unknown))}.")
    return {**USUAL, **settings}


def _measured(point: torch.Tensor) -> dict[str, float]:
    """Return two numbers of a point, in the place of metrics."""
    return {"norm": float(point.double().norm()), "first": float(point[0])}


@dataclass(frozen=True)
class _Sick(Clients):
    """Clients of whom one has NaN for data at one iteration."""

    clients: Any
    who: int
    when: int

    def __len__(self) -> int:
        return len(self.clients)

    def seeded(self, seed: int) -> _Sick:
        return _Sick(self.clients.seeded(seed), self.who, self.when)

    def sample(self, n: int, t: int) -> Any:
        healthy = self.clients.sample(n, t)
        if (n, t) != (self.who, self.when):
            return healthy
        return torch.utils._pytree.tree_map(lambda v: v * float("nan"), healthy)


def _toy(kind: str, count: int) -> tuple[Any, Any]:
    """Return a problem and its clients."""
    if kind in SETTINGS:
        made = SETTINGS[kind](count, torch.float64)
        return made.problem, made.clients
    if kind.startswith("labels-"):
        return _labels(kind, count)
    return {"images": _images, "words": _words, "characters": _characters}[kind](count)


def _labels(kind: str, count: int) -> tuple[Any, Any]:
    """Three labels per example, some unknown, in float64."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20 * count, 4))
    y = (x @ rng.normal(size=(4, 3)) + rng.normal(size=(20 * count, 3)) > [0, 0.5, 2]).astype(float)
    y[rng.random(y.shape) < 0.2] = np.nan
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(4, 3, dtype=torch.float64)
    problem = MultiLabelAUROC(net, 3) if kind == "labels-auroc" else MultiLabelAP(net)
    return problem, Examples((torch.tensor(x), torch.tensor(y)), partition.even(len(x), count, 0), batch=8)


def _images(count: int) -> tuple[Any, Any]:
    """A convolution with dropout on random images, in float32."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(20 * count, 2, 6, 6)), dtype=torch.float32)
    y = torch.tensor(rng.integers(3, size=20 * count))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(-3), nn.Linear(48, 3)]
    return Classify(nn.Sequential(*layers)), Examples((x, y), partition.even(len(x), count, 0), batch=6)


def _words(count: int) -> tuple[Any, Any]:
    """A recurrent network on random words, in float32."""
    text = torch.tensor(np.random.default_rng(1).integers(9, size=400))
    model = network("lstm", None, 9, seed=0, size=4, layers=1)
    return language.Language(model, clip=1.0), language.TextClients(text, clients=count, batch=3, bptt=5)


def _characters(count: int) -> tuple[Any, Any]:
    """Meta-learning on tasks of random images, in float32."""
    pixels = np.random.default_rng(2).integers(256, size=(6 * count, 20, 28, 28))
    drawn = omniglot.Characters(torch.tensor(pixels, dtype=torch.uint8), ["one"] * (6 * count))
    parts = [np.arange(6 * n, 6 * n + 6) for n in range(count)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
    episodes = omniglot.Episodes(drawn, parts, 3, 1, 4)
    return MAML(model, omniglot.cross_entropy, inner_lr=0.05), omniglot.OmniglotClients(episodes, tasks=2)


# ---------------------------------------------------------------------------------------------------------
# Dividing data


def divided(labels: Sequence[int], clients: int, seed: int) -> Values:
    """Return who gets which examples, by every rule, and what is set aside or left out."""
    y = np.asarray(labels)
    places = [f"place {int(i**0.5)}" for i in range(len(y))]
    by_place = partition.by_column(places, smallest=6, fallback=[i % 2 for i in range(len(y))])
    found = {
        "even": partition.even(len(y), clients, seed),
        "similar": partition.similar(y, clients, 0.5, seed),
        "all classes": partition.all_classes(y, clients, seed),
        "two classes": partition.k_classes(y, clients, 2, seed),
        "dirichlet": partition.dirichlet(y, clients, 0.5, seed),
        "by column": by_place[0],
        "aside by class": partition.hold_out(len(y), 0.25, seed, labels=y),
        "aside by group": partition.hold_out(len(y), 0.25, seed, groups=places),
        "kept": [partition.remove((y > 1).astype(int), 1, 0.6, seed)],
    }
    return {"names": list(by_place[1]), **{rule: [part.tolist() for part in parts] for rule, parts in found.items()}}


# ---------------------------------------------------------------------------------------------------------
# Experiments: the same functions as the commands `run`, `tune` and `compare`


def run_experiment(tables: Settings) -> Values:
    """Run an experiment; return its record and its model."""
    from safetensors.torch import load_file

    from nestfed.experiment.run import run
    from nestfed.experiment.spec import from_tables

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        history = run(from_tables(tables), out, progress=False, picture=False)
        models = {str(p.parent.relative_to(out)): load_file(p) for p in sorted(out.rglob("model.safetensors"))}
    return {"records": records(history), "models": models}


def tuned(tables: Settings, methods: Sequence[str], trials: int) -> Values:
    """Tune, the worse half of the trials stopping early; return every trial and what was chosen."""
    from nestfed.experiment.spec import from_tables
    from nestfed.experiment.tune import tune

    with tempfile.TemporaryDirectory() as folder:
        metric, found = tune(from_tables(tables), methods, Path(folder) / "tuning", trials=trials, extend=0, workers=1)
    return {
        "metric": metric.name,
        "methods": {
            name: {
                "chosen": dict(one.chosen),
                "trials": [
                    {"settings": dict(t.settings), "state": t.state, "value": t.value, "round": t.round}
                    for t in one.trials
                ],
            }
            for name, one in found.items()
        },
    }


def compared(tables: Settings, methods: Sequence[str], seeds: int, trials: int) -> Values:
    """Compare methods, each tuned and then run with every seed."""
    from nestfed.experiment.compare import compare
    from nestfed.experiment.spec import from_tables

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "comparison"
        metric, outcomes = compare(from_tables(tables), methods, seeds, out, trials=trials, extend=0, workers=1)
    return {
        "metric": metric.name,
        "methods": {
            one.method: {
                "chosen": dict(one.chosen),
                "trials": one.trials,
                "final": one.final(metric.name),
                "diverged": len(one.diverged),
                "records": [records(history) for history in one.histories],
            }
            for one in outcomes
        },
    }


# ---------------------------------------------------------------------------------------------------------
# Estimators

Table = tuple[np.ndarray, np.ndarray]


def fitted(kind: str, sites: Sequence[Table], new: np.ndarray, **settings: Any) -> Values:
    """Fit an estimator for auroc, auprc or accuracy, and use it on new rows."""
    from nestfed import study

    kinds = {
        "auroc": study.FederatedAUC,
        "auprc": study.FederatedAUPRC,
        "accuracy": study.FederatedClassifier,
    }
    with _no_advice():
        found = kinds[kind](**settings).fit(list(sites))
    return {
        **_parts(found),
        "classes": found.classes_,
        "calibration": list(found.calibration_),
        "probabilities": found.predict_proba(new),
        "predictions": found.predict(new).tolist(),
    }


def fitted_to_tasks(sites: Sequence[Sequence[Table]], unseen: Sequence[Table], **settings: Any) -> Values:
    """Fit the estimator for meta-learning; adapt it to a task and judge it."""
    from nestfed.study import FederatedMAML

    with _no_advice():
        found = FederatedMAML(**settings).fit(list(sites))
    x, y = unseen[0]
    return {
        **_parts(found),
        "score": found.score(list(unseen)),
        "unadapted": found.predict(x),
        "adapted": found.adapt(x[:10], y[:10]).predict(x[10:]),
    }


def fitted_to_the_worst_mixture(sites: Sequence[Table], new: np.ndarray, **settings: Any) -> Values:
    """Fit the minimax estimator: squared error under the worst weights of the sites."""
    from nestfed.problems import Simplex
    from nestfed.study import FederatedMinimax

    count = len(sites)

    def weighted(model: Any, w: torch.Tensor, batch: Any) -> torch.Tensor:
        x, y, site = batch
        return (count * w[site] * (model(x) - y) ** 2).mean()

    made = FederatedMinimax(objective=weighted, w0=[1 / count] * count, dual_domain=Simplex(), **settings)
    with _no_advice():
        found = made.fit(list(sites))
    return {**_parts(found), "w": found.w_, "predictions": found.predict(new)}


@contextmanager
def _no_advice() -> Iterator[None]:
    """Leave out warnings, which the tests make errors: these data are small on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parts(found: Any) -> Values:
    return {
        "method": found.choice_.name,
        "lr": found.lr_,
        "model": dict(found.module_.state_dict()),
        "scale": _scale(found.scale_),
        "records": records(found.history_),
    }


# ---------------------------------------------------------------------------------------------------------
# Tables of the user's own: the same functions as the commands `train` and `predict`


def trained(
    files: Sequence[Path], target: str, objective: str, new: Path, *, group: str = "", **settings: Any
) -> Values:
    """Train on one table per site, compare, write the model, read it again and predict."""
    from nestfed.study.predict import predict
    from nestfed.study.start import from_files, train

    started = from_files(files, target, objective, data={"group": group}, **settings)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with _no_advice():
            found, model, _ = train(started, out / "study")
        predict(out / "study", new, out / "predictions.csv")
        with (out / "predictions.csv").open(newline="", encoding="utf-8") as stream:
            predictions = [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(stream)]
    return {
        "metric": found.metric,
        "classes": list(model.classes),
        "rows": {name: list(counts) for name, counts in found.conducted.rows.items()},
        "released": found.released.name,
        "test": [list(row.values()) for row in found.test.frame().to_dict("records")],
        "ways": [
            {
                "name": one.name,
                "settings": dict(one.settings),
                "trials": [[name, value] for name, value in one.trials.items()],
                "rounds": one.rounds,
                "x": one.x.tolist(),
                "records": records(one.history),
            }
            for one in found.ways
        ],
        "model": dict(model.parameters),
        "calibration": list(model.calibration.at()),
        "thresholds": [[one.rule, one.probability] for one in model.thresholds],
        "predictions": predictions,
    }


def encoded(files: Sequence[Path], target: str, *, group: str = "") -> Values:
    """Return what becomes of one table per site: the features, their common scale, and each site's first rows."""
    from nestfed.data.encoding import features_of
    from nestfed.study.sites import common_encoding
    from nestfed.study.tables import read_sites

    data = read_sites(files, target, group=group)
    scale = common_encoding(data.sites)
    return {
        "classes": list(data.classes),
        "scale": _scale(scale),
        "sites": {
            site.name: {
                "features": list(features_of(site.schema)),
                "labels": site.y.tolist(),
                "raw": site.x[:3].tolist(),
                "input": scale(site.x[:3], site.schema).tolist(),
                "inputs": scale(site.x, site.schema),
            }
            for site in data.sites
        },
    }


def _scale(found: Any) -> Values:
    """Return how a table is scaled, feature by feature."""
    numbers = {k: getattr(found, k).tolist() for k in ("mean", "deviation", "gaps")}
    return {"kind": "columns", "features": list(found.features), **numbers}


def _number(text: str) -> float | str:
    """Return a cell of a file as a float if it is written as one, so that its last digit may differ."""
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else text
