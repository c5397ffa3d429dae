"""Measure the theorems' claims: speed-up in N, costs against ε, bias against m, runs under their bounds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from nestfed.algorithms.adaptive import FAFED
from nestfed.algorithms.compositional import LocalSCGDM
from nestfed.algorithms.conditional import FCSG, FCSGM, AccFCSGM
from nestfed.algorithms.minimax import FMGDA
from nestfed.core import Fields, at
from nestfed.engine.program import AnyAlgorithm
from nestfed.problems.invariant import InvariantLogistic
from nestfed.theory import COMPLEXITY, Prescription, prescribe
from nestfed_papers.complexity.batched import Outcome, Watch, check, run, squared_gradient
from nestfed_papers.complexity.settings import Setting
from nestfed_papers.toys import ConditionalToy

STEPS = (4.0, 16.0, 64.0, 256.0, 1024.0)
WEIGHTS = (1.0, 8.0, 64.0)
TIE = 0.02


@dataclass(frozen=True)
class Subject:
    """A method, the family of its problem, and how it is made from a prescription.

    `make` takes the prescription and two constants: one multiplies the step sizes, one the momentum weights.
    """

    name: str
    family: str
    make: Callable[[Any, float, float], AnyAlgorithm]
    point: str = "x"

    def weight(self, p: Prescription) -> float:
        """The largest momentum weight that the theorem prescribes after the first iteration."""
        if self.name == "local-scgdm":
            return max(at(p["alpha"], 1), at(p["gamma"], 1)) * at(p["eta"], 1)
        names = {
            "fcsg": (),
            "fcsg-m": ("beta",),
            "acc-fcsg-m": ("beta",),
            "fmgda": ("alpha", "beta"),
            "fafed": ("alpha",),
        }
        return max((at(p[k], 1) for k in names[self.name]), default=0.0)

    def trials(self) -> list[tuple[float, float]]:
        """Fifteen pairs of constants for every method; FCSG has no weight, so it gets fifteen step sizes."""
        if self.name == "fcsg":
            return [(float(s), 1.0) for s in np.geomspace(STEPS[0], STEPS[-1], len(STEPS) * len(WEIGHTS))]
        return [(s, w) for s in STEPS for w in WEIGHTS]


def _scaled(value: Any, factor: float) -> Any:
    """Multiply a momentum weight, a number or a schedule; it stays at most 1."""
    if callable(value):
        return lambda t: min(1.0, factor * value(t))
    return min(1.0, factor * value)


def _scgdm(p: Any, s: float, w: float) -> AnyAlgorithm:
    eta = p["eta"]
    weight = min(w, 1 / eta)  # αη and γη are at most 1
    return LocalSCGDM(eta=eta, alpha=weight * p["alpha"], beta=s * p["beta"], gamma=weight * p["gamma"])


def _fmgda(p: Any, s: float, w: float) -> AnyAlgorithm:
    # Up to constants: c is tiny and ĉ smaller still by κ²; once tuned, both are 16·s·c, equal as in the experiments.
    c, c_hat = (p["c"], p["c_hat"]) if s == 1 else (16 * s * p["c"], 16 * s * p["c"])
    return FMGDA(eta=p["eta"], c_hat=c_hat, c=c, alpha=_scaled(p["alpha"], w), beta=_scaled(p["beta"], w))


SUBJECTS = {
    s.name: s
    for s in (
        Subject("fcsg", "conditional", lambda p, s, w: FCSG(alpha=s * p["alpha"])),
        Subject("fcsg-m", "conditional", lambda p, s, w: FCSGM(alpha=s * p["alpha"], beta=_scaled(p["beta"], w))),
        Subject(
            "acc-fcsg-m", "conditional", lambda p, s, w: AccFCSGM(alpha=s * p["alpha"], beta=_scaled(p["beta"], w))
        ),
        Subject("local-scgdm", "nested", _scgdm),
        Subject("fmgda", "game", _fmgda, "theta"),
        Subject(
            "fafed",
            "plain",
            lambda p, s, w: FAFED(eta=_times(p["eta"], s), alpha=_scaled(p["alpha"], w), rho=p.constants.rho),
        ),
    )
}


def _times(schedule: Any, factor: float) -> Any:
    return lambda t: factor * schedule(t)


@cache
def setting_of(family: str, N: int, alike: bool) -> Setting:
    """Cache settings, because finding F* is slow."""
    return Setting(family, N=N, alike=alike)


def prescription(subject: Subject, setting: Setting, T: int) -> Prescription:
    """The theorem's settings for the constants of this problem."""
    extra = {"e_factor": 8000.0} if subject.name == "fmgda" else {}  # required by the proof's condition
    return prescribe(subject.name, N=setting.N, T=T, **setting.constants, **extra)


def once(
    subject: Subject,
    setting: Setting,
    T: int,
    constants: Sequence[float],
    seeds: int,
    *,
    q: int | None = None,
    m: int = 1,
    b: int = 1,
    watch: Watch | None = None,
) -> Outcome:
    """Run all seeds with the theorem's settings up to constants; a trial may change q, m and b."""
    p = prescription(subject, setting, T)
    inner = p.m * m if p.m else None
    algorithm = subject.make(p, *constants)
    clients = setting.clients(inner, b=b, B=max(p.B, b))
    watch = watch or squared_gradient(setting, subject.point)
    return run(setting.problem(inner), algorithm, clients, T, q or p.q, tuple(range(seeds)), watch)


def rms(values: Any) -> float:
    """The root of the mean over synchronised points and seeds: what the theorems bound."""
    return float(np.sqrt(np.mean(values))) if np.isfinite(values).all() else math.inf


def per_seed(outcome: Outcome) -> list[float]:
    """Every seed's mean over its synchronised points."""
    return outcome.values.mean(0).tolist()


def slope_of(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of a straight line through (log x, log y)."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def resampled(seeds: int, of: Callable[[np.ndarray], float], times: int = 300) -> list[float]:
    """Return `of` on all seeds, and its 2.5 and 97.5 percentiles over seeds drawn with replacement."""
    generator = np.random.default_rng(0)
    found = [of(generator.integers(seeds, size=seeds)) for _ in range(times)]
    return [of(np.arange(seeds)), *(float(v) for v in np.percentile(found, [2.5, 97.5]))]


# ---------------------------------------------------------------------------------------------------------
# The four measurements


def tune(plan: Plan) -> dict[str, Any]:
    """Choose the two constants of every method once, by the gradient at one T: fifteen trials each.

    A trial counts if no point leaves the ball on which the constants hold, and no momentum weight would be above 1:
    one that is cut off there does not fall with T as the theorem wants it. Of trials within TIE of the best the one with
    the smallest step is taken: the theorems limit steps from above, by 1/q, and a longer run has a larger q.
    """
    found: dict[str, Any] = {}
    for subject in SUBJECTS.values():
        if plan.only and subject.name != plan.only:
            continue
        setting = setting_of(subject.family, 4, False)
        p = prescription(subject, setting, plan.tuning)
        tried = []
        for constants in subject.trials():
            outcome = once(subject, setting, plan.tuning, constants, plan.seeds)
            tried.append((rms(outcome.values.numpy()) if outcome.reach <= setting.radius else math.inf, constants))
        allowed = [t for t in tried if t[1][1] * subject.weight(p) <= 1]
        least = min(allowed)[0]
        taken = min((t for t in allowed if t[0] <= (1 + TIE) * least), key=lambda t: (t[1][0], t[0]))
        value, (step, weight) = taken
        found[subject.name] = {"step": step, "weight": weight, "rms": value, "best": min(tried)[1], "trials": tried}
        show(
            f"tuned {subject.name}: step ×{step:.3g}, weight ×{weight:g}, {value:.4f} (best trial {min(tried)[0]:.4f})"
        )
    return found


def rates(plan: Plan, tuned: dict[str, Any]) -> dict[str, Any]:
    """(b) Rounds and examples against the gradient norm; also for the best trial, where a rule skipped it."""
    found: dict[str, Any] = {}
    for subject in SUBJECTS.values():
        if plan.only and subject.name != plan.only:
            continue
        setting, constants = setting_of(subject.family, 4, False), _constants(tuned, subject)
        theory = COMPLEXITY[subject.name]
        found[subject.name] = {
            **costs(plan, subject, setting, constants),
            "theory": {"rounds": theory.communication, "examples": theory.sample},
            "limits": limits(plan, subject, setting, constants),
        }
        best = tuple(tuned[subject.name]["best"])
        if best != constants:
            found[subject.name]["best trial"] = {"constants": best, **costs(plan, subject, setting, best)}
        for case in (found[subject.name], found[subject.name].get("best trial")):
            if case:
                slope = case["slope"]
                show(f"{subject.name}: rounds {_interval(slope['rounds'])}, examples {_interval(slope['examples'])}")
    return found


def costs(plan: Plan, subject: Subject, setting: Setting, constants: Sequence[float]) -> dict[str, Any]:
    """Return the costs and gradient norms for every T, and the two slopes."""
    rows: list[dict[str, Any]] = []
    for T in plan.Ts:
        outcome = once(subject, setting, T, constants, plan.seeds)
        p = prescription(subject, setting, T)
        spent = {"rounds": outcome.rounds, "examples": outcome.examples, "reach": outcome.reach}
        rows.append({"T": T, "q": p.q, "m": p.m, **spent, "squares": per_seed(outcome)})
    fitted = [r for r in rows if r["T"] >= plan.fit_from]
    squares = np.array([r["squares"] for r in fitted])

    def slope(cost: str) -> list[float]:
        spent = [r[cost] for r in fitted]
        return resampled(plan.seeds, lambda s: -slope_of(np.sqrt(squares[:, s].mean(1)), spent))

    return {"rows": rows, "slope": {"rounds": slope("rounds"), "examples": slope("examples")}}


def limits(plan: Plan, subject: Subject, setting: Setting, constants: Sequence[float]) -> dict[str, float]:
    """Return what limits a method at one T: the share of the start, and the gain from reducing each error."""
    T = plan.trial
    base = once(subject, setting, T, constants, plan.seeds)
    values = base.values.numpy()
    quarter = max(1, len(values) // 4)
    found = {"start": float(values[:quarter].sum() / values.sum())}
    changes: dict[str, dict[str, Any]] = {"noise": {"b": 16}, "local steps": {"q": 1}}
    if prescription(subject, setting, T).m:
        changes["bias"] = {"m": 16}
    for name, change in changes.items():
        found[name] = 1 - rms(once(subject, setting, T, constants, plan.seeds, **change).values.numpy()) / rms(values)
    return found


def speedup(plan: Plan, tuned: dict[str, Any]) -> dict[str, Any]:
    """(a) Iterations and rounds to one accuracy against N, with identical clients."""
    found: dict[str, Any] = {}
    for name in ("fcsg", "fmgda", "fafed"):
        if plan.only and name != plan.only:
            continue
        subject = SUBJECTS[name]
        table: dict[int, list[dict[str, Any]]] = {}
        for N in plan.Ns:
            setting = setting_of(subject.family, N, True)
            table[N] = []
            for factor in (0.5, 1, 2, 4):
                T = max(8, round(plan.alone * factor / N))
                outcome = once(subject, setting, T, _constants(tuned, subject), plan.seeds)
                table[N].append({"T": T, "rounds": outcome.rounds, "squares": per_seed(outcome)})
        target = rms(np.array(table[1][1]["squares"]))

        def needed(N: int, cost: str, s: np.ndarray, table: Any = table, target: float = target) -> float:
            """The cost at which the curve of N clients crosses the target, on a line through the log-log points."""
            log_e = np.log([np.sqrt(np.array(r["squares"])[s].mean()) for r in table[N]])
            line = np.polyfit(log_e, np.log([r[cost] for r in table[N]]), 1)
            return float(np.exp(np.polyval(line, np.log(target))))

        everyone = np.arange(plan.seeds)
        rows = [{"N": N, **{c: needed(N, c, everyone) for c in ("T", "rounds")}} for N in plan.Ns]
        slopes = {}
        for cost in ("T", "rounds"):

            def slope(s: np.ndarray, cost: str = cost, needed: Callable[..., float] = needed) -> float:
                return slope_of(plan.Ns, [needed(N, cost, s) for N in plan.Ns])

            slopes[cost] = resampled(plan.seeds, slope, 100)
        found[name] = {"target": target, "rows": rows, "slope": slopes, "table": table}
        show(f"{name}: iterations ∝ N^{_interval(slopes['T'])}, rounds ∝ N^{_interval(slopes['rounds'])}")
    return found


def bias(plan: Plan) -> dict[str, Any]:
    """(c) The conditional estimator's bias against m, by pairs of batches with the same outer samples.

    The estimator is compared with itself on exact inner values (η = a, one inner sample), so that only what the inner
    noise does remains. Where the bias is known in closed form, it is drawn beside.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    d, x = 5, torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    toys = {f"toy, κ = {k:g}": ConditionalToy(1, d, sigma=1.0, kappa=k) for k in (0.0, 0.3)}
    logistic = InvariantLogistic(x)
    found: dict[str, Any] = {}
    for name in (*toys, "invariant logistic"):
        rows = []
        for m in plan.ms:
            total, square, parts = torch.zeros(d, dtype=torch.float64), torch.zeros(()), 0
            for _ in range(plan.bias_parts * max(1, m // 8)):
                a = normal(20_000 // max(1, m // 8), d)
                eta = a[:, None] + normal(len(a), m, d)
                if name in toys:
                    outer: Any = (a, toys[name].targets[0].expand_as(a))
                    pair = [toys[name].problem.grad(x, (outer, e)) for e in (eta, a[:, None])]
                else:
                    outer = (a, torch.sign(a @ (x + torch.tensor([1, -1, 1, -1, 1.0]))))
                    pair = [logistic.grad(x, (outer, (e,))) for e in (eta, a[:, None])]
                difference = pair[0] - pair[1]
                total, square, parts = total + difference, square + difference.square().sum(), parts + 1
            mean = total / parts
            error = float(((square / parts - mean.square().sum()) / parts).clamp_min(0).sqrt())
            rows.append({"m": m, "bias": float(mean.norm()), "error": error})
            if name in toys:
                rows[-1]["exact"] = float(toys[name].bias(x, m).norm())
        late = [r for r in rows if r["m"] >= plan.bias_from]
        found[name] = {"rows": rows, "slope": slope_of([r["m"] for r in late], [r["bias"] for r in late])}
        show(f"bias, {name}: m^{found[name]['slope']:.2f}")
    return found


def bounds(plan: Plan) -> dict[str, Any]:
    """(d) The theorems' own settings, nothing tuned: the measured mean and its bound, over a range of T."""
    found: dict[str, Any] = {}
    for subject in SUBJECTS.values():
        setting = setting_of(subject.family, 4, False)
        rows: list[dict[str, Any]] = []
        measure = ""
        for T in plan.lengths:
            p = prescription(subject, setting, T)
            watch = _progress(setting, p) if subject.name == "fafed" else None
            outcome = once(subject, setting, T, (1.0, 1.0), plan.seeds, watch=watch)
            bound = p.bound()
            if bound is None:
                raise AssertionError(f"{subject.name} has no bound.")
            measure = bound.measure
            if outcome.reach > setting.radius:
                raise AssertionError(f"{subject.name} left the ball on which its constants hold: {outcome.reach:.3g}.")
            rows.append(
                {
                    "T": T,
                    "measured": float(outcome.values.mean()),
                    "bound": bound.total,
                    "dominant": bound.dominant,
                    "violated": p.violated(),
                }
            )
        found[subject.name] = {"rows": rows, "measure": measure, "constants": setting.constants}
        show(f"{subject.name}: measured/bound = {rows[-1]['measured'] / rows[-1]['bound']:.2g} at T = {rows[-1]['T']}")
    return found


def _progress(setting: Setting, p: Prescription) -> Watch:
    """FAFED's M_t, as in nestfed_papers.measures, for many seeds at once."""
    rho = p.constants.rho  # type: ignore[attr-defined]

    def watch(shared: Fields) -> torch.Tensor:
        step = shared["m"] / (shared["v"].sqrt() + rho)
        error = setting.gradient(shared["x"]) - shared["m"]
        return (step.square().sum(-1) / 4 + error.square().sum(-1) / (4 * rho**2)).squeeze(1)

    return watch


def _constants(tuned: dict[str, Any], subject: Subject) -> tuple[float, float]:
    return tuned[subject.name]["step"], tuned[subject.name]["weight"]


def _interval(found: Sequence[float]) -> str:
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def show(line: str) -> None:
    """Print a result."""
    logging.getLogger(__name__).info("%6.0f s  %s", time.process_time(), line)


# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The size of the measurements."""

    seeds: int = 16
    tuning: int = 1024
    Ts: tuple[int, ...] = tuple(2**k for k in range(8, 16))
    fit_from: int = 1024
    trial: int = 4096
    Ns: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    alone: int = 8192
    ms: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    bias_from: int = 4
    bias_parts: int = 40
    lengths: tuple[int, ...] = tuple(2**k for k in range(8, 14))
    only: str = ""


QUICK = Plan(4, 256, (256, 512, 1024), 256, 512, (1, 4, 16), 512, (1, 4, 16), 4, 5, (256, 1024))


FULL = Plan(seeds=32, Ts=tuple(2**k for k in range(8, 18)), lengths=tuple(2**k for k in range(8, 16)))


def everything(plan: Plan, kept: Callable[[str, Callable[[], Any]], Any] = lambda name, make: make()) -> dict[str, Any]:
    """Measure everything; `kept` may already hold parts, by name."""
    kept("check", lambda: check({s.name: (setting_of(s.family, 4, False), _trial(s)) for s in SUBJECTS.values()}))
    tuned = kept("tuned", lambda: tune(plan))
    results = {
        "tuned": tuned,
        "rates": kept("rates", lambda: rates(plan, tuned)),
        "speedup": kept("speedup", lambda: speedup(plan, tuned)),
    }
    if not plan.only:
        results |= {"bias": kept("bias", lambda: bias(plan)), "bounds": kept("bounds", lambda: bounds(plan))}
    results["processor_seconds"] = round(time.process_time())
    results["plan"] = vars(replace(plan, only=""))
    return results


def _trial(subject: Subject) -> AnyAlgorithm:
    return subject.make(prescription(subject, setting_of(subject.family, 4, False), 64), 4.0, 1.0)
