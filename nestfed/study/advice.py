"""Choose a method and a step size, and warn about problems, with a link to the page that explains them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestfed import theory
from nestfed.core import Algorithm, Batch, NestfedError, Saddle, as_clients
from nestfed.engine.round import Record
from nestfed.metrics import find

PAGE = "docs/warnings.md"


class NestfedWarning(UserWarning):
    """A warning that ends with a link to the page that explains it."""


class TheoryWarning(NestfedWarning):
    """A setting outside the conditions of the method's theorem."""


def warn(sentence: str, anchor: str, category: type[NestfedWarning] = NestfedWarning) -> None:
    """Warn, with a link to the section of the page."""
    warnings.warn(f"{sentence} See {PAGE}#{anchor}.", category, stacklevel=3)


# ---------------------------------------------------------------------------------------------------------
# Choosing

STEP: Mapping[str, float] = {"auroc": 1.5, "auprc": 1.0, "classify": 2.0, "maml": 0.5, "minimax": 0.5}
"""The default step size by kind of objective, in multiples of 1/L; measured (docs/choosing.md)."""


@dataclass(frozen=True)
class Choice:
    """A method and the reason for it."""

    name: str
    why: str


def choose(objective: str, *, rounds: int, partial: bool = False) -> Choice:
    """Choose a method by objective, number of rounds and participation (`partial`: clients may skip rounds).

    Methods that send or keep more (momentum, control variates) are better only if all clients take part and there are
    enough rounds. The choices are those in bold in the table of docs/choosing.md, which links to the evidence.
    """
    if objective == "auroc":
        if partial:
            return Choice("local-sgda", "it keeps no state at a site, so sites may skip rounds")
        return Choice("fmgda", "it has no stages to tune and was about as good as CODA+ on eICU and heart disease")
    if objective == "auprc":
        if partial or rounds < 10:
            return Choice("fcsg", "it sends half as much as FCSG-M and has no momentum that absent sites would miss")
        return Choice(
            "fcsg-m",
            "it maximises average precision directly, and its momentum reduces the noise of few positives per batch",
        )
    if objective == "maml":
        return Choice("local-scgdm", "it tracks the inner value by momentum and needs no fixed set of tasks")
    if objective == "minimax":
        if partial:
            return Choice("local-sgda", "it keeps no state at a site, so sites may skip rounds")
        return Choice("fmgda", "its recursive momentum for both players has the best rate of the minimax methods")
    if objective == "classify":
        return Choice("fedavg", "the objective is a plain average of losses")
    raise NestfedError(f"Unknown objective {objective!r}: choose auroc, auprc, classify, maml or minimax.")


# ---------------------------------------------------------------------------------------------------------
# Problems of the data or of the training


def few_positives(names: Sequence[str], positives: Sequence[int], examples: Sequence[int], least: int = 5) -> None:
    """Warn about sites with almost no positives (or negatives), once for all of them."""
    if sentence := lack_of_positives(names, positives, examples, least):
        warn(sentence, "few-positives")


def lack_of_positives(names: Sequence[str], positives: Sequence[int], examples: Sequence[int], least: int = 5) -> str:
    """Return a sentence on sites with almost no positives (or negatives), or nothing."""
    poor = [(n, p, m) for n, p, m in zip(names, positives, examples) if min(p, m - p) < least]
    if not poor:
        return ""
    name, p, m = min(poor, key=lambda row: min(row[1], row[2] - row[1]))
    which = f"Site {name} has" if len(poor) == 1 else f"{len(poor)} of {len(names)} sites have"
    return (
        f"{which} fewer than {least} positives or negatives ({name}: {p} of {m} positive): too few to learn the rarer "
        "class there."
    )


def look_at(history: Sequence[Record], metric: str, moved: float) -> list[str]:
    """Warn about drift and about an AUROC that stays at chance; return hints that need no warning.

    Drift is the root mean square distance of the clients from their mean after a round. It is too large if it exceeds
    `moved`, the distance from the start to the end of training.
    """
    rounds = [r for r in history if r.get("drift") is not None and r["round"] > 0]
    late = rounds[len(rounds) // 2 :]
    if late:
        spread = math.sqrt(sum(max(r["drift"], 0.0) for r in late) / len(late))
        if moved > 0 and spread > moved:
            warn(
                f"The sites' models drift apart: after a round their distance from the mean is {spread:.3g}, more than "
                f"the whole training moved the mean ({moved:.3g}); use fewer local steps (q) or a smaller lr.",
                "drift",
            )
    values = [r[metric] for r in history if r.get(metric) is not None]
    if metric == "auroc" and len(values) >= 3 and all(abs(v - 0.5) < 0.03 for v in values[len(values) // 2 :]):
        warn(
            f"AUROC stalls at {values[-1]:.3f}, which is chance: try another lr (`nestfed lr-find`), and check whether "
            "these features can predict the target at all.",
            "stalled",
        )
    return plateau(history, metric)


def plateau(history: Sequence[Record], metric: str) -> list[str]:
    """Return a hint if the metric stopped improving halfway, or still improved at the end."""
    signed = find(metric).signed
    curve = [(r["round"], signed(r[metric])) for r in history if r.get(metric) is not None]
    if len(curve) < 6:
        return []
    half = len(curve) // 2
    early, late = max(v for _, v in curve[:half]), max(v for _, v in curve[half:])
    if late - early < 1e-3:
        return [f"{metric} did not improve after round {curve[half - 1][0]}: fewer rounds are enough."]
    quarter = [v for _, v in curve[-max(2, len(curve) // 4) :]]
    if quarter[-1] - quarter[0] > 0.01:
        return [f"{metric} was still improving at the end: more rounds should help."]
    return []


# ---------------------------------------------------------------------------------------------------------
# The theorems


def smoothness(problem: Any, clients: Any, seed: int = 0, most: int = 32, steps: int = 6) -> float:
    """Estimate the smoothness of the clients' objectives at the start; the result is a lower bound.

    Power iteration on ∇F_n(x + εv) − ∇F_n(x), with one fixed batch of each of up to `most` clients. The largest value
    counts, because local steps must be stable at every client. For a minimax problem it covers the gradients of both
    players. The true constant is a supremum over all points and batches, so it may be larger.
    """
    some = as_clients(clients).seeded(seed)
    d = problem.x0.numel()
    saddle = isinstance(problem, Saddle)
    at = torch.cat([problem.x0, problem.w0]) if saddle else problem.x0
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(at.shape, generator=generator, dtype=at.dtype).to(at.device)
    largest, epsilon = 0.0, 1e-2
    count = min(most, len(some))
    for n in (round(i * len(some) / count) for i in range(count)):
        batch = Batch(some.sample(n, 0), eager=True)

        def gradient(z: Tensor, batch: Batch = batch) -> Tensor:
            return torch.cat(problem.grads(z[:d], z[d:], batch)) if saddle else problem.grad(z, batch)

        base, v = gradient(at), start
        for _ in range(steps):
            v = v / v.norm().clamp_min(1e-30)
            v = (gradient(at + epsilon * v) - base) / epsilon
        largest = max(largest, float(v.norm()))
    return largest


def prescribed(name: str, L: float, *, N: int, T: int, b: int = 1, mu: float = 0.5) -> theory.Prescription:
    """Return the settings of a method's theorem for an objective of smoothness L (μ: concavity in w)."""
    L = max(L, 1e-6)
    constants: dict[str, Any] = {"N": N, "T": max(T, 1), "b": b}
    kind = theory.method(name)
    known = {*kind.required, *kind.optional}
    if "S_g" in known and "S_f" in known:
        constants |= {"S_g": L, "S_f": 0.0, "L_f": 1.0}
    elif "mu" in known:
        constants |= {"L_f": max(L, 1.0), "mu": min(mu, max(L, 1.0))}
    elif "L" in known:
        constants |= {"L": L}
    return theory.prescribe(name, **{k: v for k, v in constants.items() if k in known})


def check_theory(algorithm: Algorithm[Any, Any], L: float, *, N: int, T: int, q: int, b: int = 1) -> list[str]:
    """Warn if the step size or q violates the method's theorem, given the smoothness; return the violations."""
    if algorithm.name not in theory.METHODS:
        return []
    plan = prescribed(algorithm.name, L, N=N, T=T, b=b)
    own = {k: getattr(algorithm, k) for k in plan.steps if hasattr(algorithm, k)}
    try:
        broken = plan.replace(**own, q=q).violated()
    except NestfedError:  # a schedule that the theorem does not cover
        return []
    if broken:
        warn(
            f"{algorithm.name}: {broken[0]} (S_F or L = {L:.3g}, estimated from the data. Step sizes beyond the theorem "
            "often work in practice.)",
            "theorem",
            TheoryWarning,
        )
    return broken
