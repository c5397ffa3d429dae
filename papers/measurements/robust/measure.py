"""Hostile and broken clients: FCSG-M and FMGDA with the mean and with robust reductions.

Twenty clients hold handwritten digits (5 to 9 are the positives). A seeded share of them sends, in every round,

- scaled: its change, ten times as large;
- flipped: its change with the opposite sign, four times as large;
- stale: what it sent in its first round;
- nan: NaN (those are dropped: on_nan = "drop").

    python papers/measurements/robust/measure.py          # writes results.json beside this file and papers/figures/robust.png
    python papers/measurements/robust/measure.py --rounds 2 --out runs/robust    # a look: writes both files there
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from nestfed import AUPRC, AUROC, Evaluation, Examples, Exchange, Execution, Pairs, simulate
from nestfed.algorithms import build
from nestfed.core import Algorithm, Clients, NestfedError, as_batch
from nestfed.data.partition import even
from nestfed.metrics import auroc, average_precision

HERE = Path(__file__).parent
CLIENTS, ROUNDS, Q = 20, 24, 5
SHARES = (0.0, 0.1, 0.3)
REDUCTIONS = ("mean", "median", "trimmed:0.3", "clip:0.3")
ATTACKS = ("scaled", "flipped", "stale", "nan")


@dataclass(frozen=True)
class Marked(Clients):
    """Clients whose batches mark bad clients."""

    held: Any
    bad: frozenset[int]

    def __len__(self) -> int:
        return len(self.held)

    def seeded(self, seed: int) -> Marked:
        return Marked(self.held.seeded(seed), self.bad)

    def sample(self, n: int, t: int) -> Any:
        return self.held.sample(n, t), torch.tensor(n in self.bad)

    def draw(self, ns: Any, ts: range) -> Any:
        flags = torch.tensor([n in self.bad for n in ns])
        return [(batch, flags) for batch in self.held.draw(ns, ts)]


class Hostile(Algorithm[Any, Any]):
    """An algorithm whose bad clients train honestly and then send something else. Users have no such option."""

    def __init__(self, inner: Any, attack: str, first: int) -> None:
        self.inner, self.attack, self.first = inner, attack, first
        self.name, self.accepts, self.shared, self.point = inner.name, inner.accepts, inner.shared, inner.point
        self.private = (*inner.private, *(f"kept_{k}" for k in inner.shared))

    def __repr__(self) -> str:
        return f"{self.attack} {self.inner!r}"

    @property
    def server(self) -> Any:
        return self.inner.server

    def init(self, problem: Any, x0: Tensor) -> Any:
        s = self.inner.init(problem, x0)
        more = ["bad", *(f"start_{k}" for k in self.shared), *(f"kept_{k}" for k in self.shared)]
        State = namedtuple("State", [*s._fields, *more])
        own = [torch.zeros(()), *(getattr(s, k) for k in self.shared), *(getattr(s, k) for k in self.shared)]
        return State(*s, *own)

    def _taken(self, s: Any, after: Any) -> Any:
        return s._replace(**{k: v for k, v in after._asdict().items() if k in s._fields})

    def step(self, problem: Any, s: Any, batch: Any, t: int) -> Any:
        sample = as_batch(batch)
        data, bad = sample.data
        after = self.inner.step(problem, s, replace(sample, data=data), t)
        return self._taken(s, after)._replace(bad=bad.to(s.bad.dtype))

    def receive(self, s: Any, t: int) -> Any:
        s = s._replace(**{f"start_{k}": getattr(s, k) for k in self.shared})
        return self._taken(s, self.inner.receive(s, t))

    def send(self, s: Any, t: int) -> Any:
        s = self._taken(s, self.inner.send(s, t))
        for k in self.shared:
            start, honest = getattr(s, f"start_{k}"), getattr(s, k)
            kept = honest if t <= self.first else getattr(s, f"kept_{k}")
            wrong = {
                "scaled": start + 10 * (honest - start),
                "flipped": start - 4 * (honest - start),
                "stale": kept,
                "nan": honest * float("nan"),
            }[self.attack]
            s = s._replace(**{k: torch.where(s.bad > 0, wrong, honest), f"kept_{k}": kept})
        return s

    def ends_round(self, t: int, q: int) -> bool:
        return bool(self.inner.ends_round(t, q))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor((y[order] >= 5).astype(np.int64))
    return x[:1200], y[:1200], x[1200:], y[1200:]


def study(method: str) -> tuple[Any, Any, Any, str, Any]:
    """Return problem, algorithm, clients, the metric's name and the metric."""
    x, y, x_test, y_test = digits()
    parts = even(len(x), clients=CLIENTS, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1), nn.Flatten(-2))
    if method == "fcsg-m":
        judge = lambda m: {"ap": average_precision(m(x_test).double().numpy(), y_test.numpy())}  # noqa: E731
        clients: Any = Pairs((x, y), parts, outer=4, inner=16)
        return AUPRC(model, margin=0.1), build("fcsg-m", alpha=0.5, beta=0.5), clients, "ap", judge
    judge = lambda m: {"auroc": auroc(m(x_test).double().numpy(), y_test.numpy())}  # noqa: E731
    clients = Examples((x, y), parts, batch=20)
    algorithm = build("fmgda", c_hat=0.1, c=0.1, alpha=0.5)
    return AUROC(model, p=float(y.double().mean())), algorithm, clients, "auroc", judge


def curve(method: str, attack: str, share: float, reduce: str, rounds: int, seed: int = 0) -> list[float] | str:
    """Return the metric of every round, or the error that stopped the run."""
    problem, algorithm, clients, metric, judge = study(method)
    bad = np.random.default_rng(seed).permutation(CLIENTS)[: round(share * CLIENTS)]
    marked = Marked(clients, frozenset(map(int, bad)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = simulate(
                problem, Hostile(algorithm, attack, Q), marked, rounds=rounds, q=Q, seed=seed, evaluate=judge,
                progress=False, evaluation=Evaluation(every=2), exchange=Exchange(reduce=reduce, on_nan="drop"),
                execution=Execution(mode="vmap", workers=1),
            )  # fmt: skip
        except NestfedError as error:
            return str(error)
    return [r[metric] for r in result.history if metric in r]


def measure(rounds: int, path: Path) -> dict[str, Any]:
    """Return all curves; skip those that the file already has."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for method, reduce, attack, share in itertools.product(("fcsg-m", "fmgda"), REDUCTIONS, ATTACKS, SHARES):
        key = f"{method} {attack} {share:g} {reduce}"
        if key not in found:
            same = f"{method} {ATTACKS[0]} 0 {reduce}"  # without bad clients there is no attack
            values = found[same] if not share and same in found else curve(method, attack, share, reduce, rounds)
            found[key] = values if isinstance(values, str) else [round(v, 5) for v in values]
            path.write_text(json.dumps(found, indent=0) + "\n")
        values = found[key]
        last = values if isinstance(values, str) else f"{values[-1]:.4f}"
        print(f"{method:7} {attack:8} {share:4.0%} {reduce:12} {last}", flush=True)
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(ATTACKS), 4, figsize=(13, 10), sharex=True, sharey="col", layout="constrained")
    for row, attack in enumerate(ATTACKS):
        columns = [(m, s) for m in ("fcsg-m", "fmgda") for s in SHARES if s]
        for axis, (method, share) in zip(axes[row], columns):
            for colour, reduce in enumerate(REDUCTIONS):
                values = found[f"{method} {attack} {share:g} {reduce}"]
                if not isinstance(values, str):
                    axis.plot(2 * np.arange(len(values)), values, color=f"C{colour}", label=reduce)
            honest = found[f"{method} {attack} 0 mean"]
            axis.plot(2 * np.arange(len(honest)), honest, ":", color="black", label="mean, no bad client")
            axis.set_title(f"{method}, {share:.0%} {attack}", fontsize=9)
            if row == len(ATTACKS) - 1:
                axis.set_xlabel("rounds")
        axes[row][0].set_ylabel("average precision")
        axes[row][2].set_ylabel("AUROC")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = measure(options.rounds, options.out / "results.json")
    draw(found, (HERE.parents[1] / "figures" if options.out == HERE else options.out) / "robust.png")


if __name__ == "__main__":
    main()
