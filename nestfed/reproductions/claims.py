"""How claims are judged: each function makes a check that turns evidence into a verdict.

A difference counts if it exceeds twice its standard error over seeds; what lies within is said to be within it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from nestfed.reproductions.base import CONFIRMED, REFUTED, UNTESTED, Evidence, Missing, Verdict, plus_minus

Check = Callable[[Evidence], Verdict]


def gap(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means and its standard error."""
    if min(len(first), len(second)) < 2:
        raise Missing("one seed says nothing about the spread")
    return fmean(first) - fmean(second), math.sqrt(stdev(first) ** 2 / len(first) + stdev(second) ** 2 / len(second))


def _verdict(holds: bool, figures: str) -> Verdict:
    return Verdict(CONFIRMED if holds else REFUTED, figures)


def _names(labels: Sequence[str]) -> str:
    return ", ".join(labels)


def ahead(data: Sequence[str], winners: Sequence[str], losers: Sequence[str], *, loss: bool = False) -> Check:
    """Judge that every winner beats every loser, in the final metric (or in the final training loss)."""

    def values(evidence: Evidence, on: str, method: str) -> list[float]:
        runs = evidence.of(on, method)
        return [run.loss() for run in runs] if loss else [run.final for run in runs]

    def check(evidence: Evidence) -> Verdict:
        parts, holds = [], True
        for on in data:
            for winner in winners:
                mine = values(evidence, on, winner)
                rivals = {loser: values(evidence, on, loser) for loser in losers}
                best = (min if loss else max)(rivals, key=lambda m: fmean(rivals[m]))
                difference, error = gap(rivals[best], mine) if loss else gap(mine, rivals[best])
                clear = difference > 2 * error
                holds = holds and clear
                within = "" if abs(difference) > 2 * error else f", within twice its standard error of {error:.4f}"
                what = "training loss " if loss else ""
                parts.append(
                    f"{on}: {what}{winner} {plus_minus(mine)}, best of the others {best} {plus_minus(rivals[best])} "
                    f"({'less by' if loss else 'ahead by'} {difference:+.4f}{within})"
                )
        return _verdict(holds, "; ".join(parts) + ".")

    return check


def order(data: str, published: Mapping[str, float]) -> Check:
    """Judge that the methods come in the published order."""

    def check(evidence: Evidence) -> Verdict:
        means = {m: fmean(evidence.finals(data, m)) for m in published}
        ours, theirs = (sorted(t, key=lambda m: t[m], reverse=True) for t in (means, published))
        told = " > ".join(f"{m} {means[m]:.4f}" for m in ours)
        close = []
        for a, b in itertools.pairwise(ours):
            difference, error = gap(evidence.finals(data, a), evidence.finals(data, b))
            if abs(difference) <= 2 * error:
                close.append(f"{a} and {b}")
        near = f" Not told apart by the seeds: {_names(close)}." if close else ""
        return _verdict(list(ours) == list(theirs), f"{data}: {told}; published order {' > '.join(theirs)}.{near}")

    return check


def reaches(data: str, published: Mapping[str, float]) -> Check:
    """Judge that every method gets at least to its published value."""

    def check(evidence: Evidence) -> Verdict:
        means = {m: fmean(evidence.finals(data, m)) for m in published}
        told = _names([f"{m} {means[m]:.4f} ({means[m] - published[m]:+.4f})" for m in published])
        return _verdict(all(means[m] >= published[m] for m in published), f"{data}, difference in brackets: {told}.")

    return check


def leads_throughout(data: Sequence[str], method: str, *, loss: bool = False) -> Check:
    """Judge that a method is first at nine of ten evaluations after the start."""

    def check(evidence: Evidence) -> Verdict:
        parts, holds = [], True
        for on in data:
            tables: dict[str, dict[int, float]] = {}
            for name in evidence.methods(on):
                by_round: dict[int, list[float]] = {}
                for run in evidence.of(on, name):
                    for p in run.curve:
                        value = p.loss if loss else p.value
                        if p.round and value is not None:
                            by_round.setdefault(p.round, []).append(-value if loss else value)
                tables[name] = {r: fmean(v) for r, v in by_round.items()}
            if method not in tables or len(tables) < 2:
                raise Missing(f"{method} was not compared on {on}")
            common = sorted(set.intersection(*(set(t) for t in tables.values())))
            if not common:
                raise Missing(f"no evaluation in common on {on}")
            first = [r for r in common if max(tables, key=lambda m: tables[m][r]) == method]
            holds = holds and len(first) >= 0.9 * len(common)
            parts.append(f"{on}: first at {len(first)} of {len(common)} evaluations")
        return _verdict(holds, "; ".join(parts) + (" (training loss)." if loss else "."))

    return check


def best(data: str, method: str) -> Check:
    """Judge that one of the methods (or settings) is the best."""

    def check(evidence: Evidence) -> Verdict:
        means = {m: evidence.finals(data, m) for m in evidence.methods(data)}
        if method not in means:
            raise Missing(f"{method} was not run on {data}")
        top = max(means, key=lambda m: fmean(means[m]))
        told = _names([f"{m} {plus_minus(v)}" for m, v in means.items()])
        if top == method:
            return _verdict(True, f"{told}.")
        difference, error = gap(means[top], means[method])
        near = " (within twice the standard error)" if difference <= 2 * error else ""
        return _verdict(False, f"{told}; the best is {top}, by {difference:.4f}{near}.")

    return check


def good(data: str, method: str, slack: float) -> Check:
    """Judge that a method (or setting) is as good as the best, up to a slack."""

    def check(evidence: Evidence) -> Verdict:
        means = {m: fmean(evidence.finals(data, m)) for m in evidence.methods(data)}
        if method not in means:
            raise Missing(f"{method} was not run on {data}")
        top = max(means, key=lambda m: means[m])
        behind = means[top] - means[method]
        told = _names([f"{m} {v:.4f}" for m, v in means.items()])
        return _verdict(behind <= slack, f"{told}; {method} is {behind:.4f} behind the best ({top}).")

    return check


def overfits(data: str, method: str, other: str) -> Check:
    """Judge that one setting fits the training tasks better than another and unseen tasks worse."""

    def check(evidence: Evidence) -> Verdict:
        train = {m: [r.loss() for r in evidence.of(data, m)] for m in (method, other)}
        test = {m: evidence.finals(data, m) for m in (method, other)}
        fits, fails = gap(train[other], train[method]), gap(test[other], test[method])
        told = "; ".join(f"{m}: training loss {plus_minus(train[m])}, unseen {plus_minus(test[m])}" for m in train)
        return _verdict(fits[0] > 2 * fits[1] and fails[0] > 2 * fails[1], f"{told}.")

    return check


# --- Figure 1 of the FCSG paper ---


def noise_label(ratio: float, m: int) -> str:
    """Return the name of a case of that figure."""
    return f"ratio {ratio:g}, m = {m}"


def needs_larger_m(ratios: Sequence[float], ms: Sequence[int], methods: Sequence[str]) -> Check:
    """Judge that what a small inner batch costs grows with the noise."""

    def check(evidence: Evidence) -> Verdict:
        parts, holds = [], True
        for method in methods:
            lost, errors = [], []
            for ratio in (ratios[0], ratios[-1]):
                many, few = (evidence.finals(noise_label(ratio, m), method) for m in (ms[-1], ms[0]))
                difference, error = gap(many, few)
                lost.append(difference)
                errors.append(error)
            grows = lost[1] - lost[0] > 2 * math.hypot(*errors)
            holds = holds and grows
            parts.append(
                f"{method}: m = {ms[0]} instead of {ms[-1]} costs {lost[0]:+.4f} at ratio {ratios[0]:g} and "
                f"{lost[1]:+.4f} at ratio {ratios[-1]:g}"
            )
        return _verdict(holds, "; ".join(parts) + ".")

    return check


def alike(data: Sequence[str], first: str, second: str, slack: float) -> Check:
    """Judge that two methods end alike."""

    def check(evidence: Evidence) -> Verdict:
        gaps = {on: fmean(evidence.finals(on, first)) - fmean(evidence.finals(on, second)) for on in data}
        told = "; ".join(f"{on}: {first} − {second} = {d:+.4f}" for on, d in gaps.items())
        return _verdict(all(abs(d) <= slack for d in gaps.values()), f"{told} (alike means within {slack:g}).")

    return check


def steadier(data: Sequence[str], method: str, than: str) -> Check:
    """Judge that a method's curve goes up and down less, over the second half of a run."""

    def wobble(evidence: Evidence, on: str, name: str) -> float:
        steps = []
        for run in evidence.of(on, name):
            late = [p.value for p in run.curve if p.round > run.curve[-1].round / 2]
            steps.append(fmean(abs(b - a) for a, b in itertools.pairwise(late)) if len(late) > 1 else math.nan)
        return fmean(steps)

    def check(evidence: Evidence) -> Verdict:
        pairs = {on: (wobble(evidence, on, method), wobble(evidence, on, than)) for on in data}
        if any(math.isnan(v) for pair in pairs.values() for v in pair):
            return Verdict(UNTESTED, "Too few evaluations in the second half.")
        told = "; ".join(f"{on}: {method} {a:.4f}, {than} {b:.4f}" for on, (a, b) in pairs.items())
        return _verdict(all(a < b for a, b in pairs.values()), f"Mean step between evaluations, second half: {told}.")

    return check


# --- Without training ---


def saddle(evidence: Evidence) -> Verdict:
    """Judge that there is a point with zero gradient, up one way and down the other, far above the optimum."""
    norm, curvatures = evidence.number("gradient_norm"), evidence.number("eigenvalues")
    above = evidence.number("value") - evidence.number("optimum")
    where = _names([f"{round(m, 9) + 0.0:.3g}" for m in evidence.number("saddle")])
    holds = norm < 1e-9 and min(curvatures) < 0 < max(curvatures) and above > 0.1
    told = (
        f"at m = ({where}) the gradient is {norm:.1e}, the eigenvalues are {_names([f'{c:.3f}' for c in curvatures])}"
    )
    return _verdict(holds, f"{told.capitalize()}, and the surface lies {above:.3f} above its infimum.")


def no_mu(evidence: Evidence) -> Verdict:
    """Judge that the PL inequality fails for every μ: its quotient falls to 0 on the way to the saddle."""
    rows = evidence.number("approach")
    quotients = [row["quotient"] for row in rows]
    falls = all(b < a for a, b in itertools.pairwise(quotients)) and quotients[-1] < 1e-6
    told = "; ".join(
        f"at distance {row['distance']:g}: {row['quotient']:.1e}" for row in rows[:: max(1, len(rows) // 4)]
    )
    return _verdict(falls, f"½‖∇S‖²/(S − S*), of which μ would have to be a lower bound, {told}.")


def diverges(evidence: Evidence) -> Verdict:
    """Judge that the naive method goes away for ever, by exactly what the theorem says, whatever its settings."""
    rows = evidence.number("naive")
    worst = max(row["error"] for row in rows)
    holds = all(row["end"] > row["start"] and row["monotone"] for row in rows) and worst < 1e-8
    told = "; ".join(
        f"η = {row['eta']:g}, β = {row['beta']:g}: |x| {row['start']:g} → {row['end']:.3f}" for row in rows
    )
    return _verdict(holds, f"{told}; every step is η/(3√(1−β^t)) up to {worst:.0e}.")


def converges(evidence: Evidence) -> Verdict:
    """Judge that FAFED reaches the optimum with the settings that should."""
    rows = [row for row in evidence.number("fafed") if row["expected"] == "converges"]
    told = "; ".join(f"q = {row['q']}, η = {row['eta']:g}, ρ = {row['rho']:g}: |x| = {row['end']:.1e}" for row in rows)
    return _verdict(all(row["end"] < 0.01 for row in rows), f"{told}.")


def stalls(evidence: Evidence) -> Verdict:
    """Judge that FAFED does not converge with long steps and several of them."""
    rows = [row for row in evidence.number("fafed") if row["expected"] == "stalls"]
    told = "; ".join(f"q = {row['q']}, η = {row['eta']:g}, ρ = {row['rho']:g}: |x| = {row['end']:.3f}" for row in rows)
    return _verdict(all(0.5 < row["end"] < 2 for row in rows), f"{told}.")


def fits_best(method: str) -> Check:
    """Judge that a method's adapted curve is nearest to the unseen task of Figure 1."""

    def check(evidence: Evidence) -> Verdict:
        errors: dict[str, list[float]] = {name: row["after"] for name, row in evidence.number("fits").items()}
        if method not in errors:
            raise Missing(f"{method} was not fitted")
        told = _names([f"{name} {plus_minus(v, 3)}" for name, v in errors.items()])
        first, second = sorted(errors, key=lambda m: fmean(errors[m]))[:2]
        difference, error = gap(errors[second], errors[first])
        near = "" if difference > 2 * error else f", but {second} is within twice the standard error"
        holds = first == method and not near
        return _verdict(holds, f"Mean squared error on the task after one step: {told}; best is {first}{near}.")

    return check


def rate(method: str, cost: str) -> Check:
    """Judge that a measured slope does not exceed the theory's exponent by more than 5 %, or its interval holds it."""

    def check(evidence: Evidence) -> Verdict:
        found: dict[str, Any] = evidence.number("rates")
        if method not in found:
            raise Missing(f"{method} was not measured")
        (value, low, high), theory = found[method][cost], found[method]["theory"][cost]
        return _verdict(low <= theory * 1.05, f"{cost} ∝ ε^−{value:.2f} [{low:.2f}, {high:.2f}], theory {theory:g}.")

    return check


def speeds_up(evidence: Evidence) -> Verdict:
    """Judge that iterations to an accuracy fall like 1/N, within 0.1."""
    found = evidence.number("speedup")
    told = "; ".join(f"{name}: N^{v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in found.items())
    return _verdict(all(abs(v[0] + 1) <= 0.1 for v in found.values()), f"Iterations to one accuracy, {told}.")


def bias_falls(evidence: Evidence) -> Verdict:
    """Judge that the conditional estimator's bias falls like 1/m, within 0.1."""
    found = evidence.number("bias")
    told = "; ".join(f"{name}: m^{v:.2f}" for name, v in found.items())
    return _verdict(all(abs(v + 1) <= 0.1 for v in found.values()), f"{told}.")


def under_bounds(evidence: Evidence) -> Verdict:
    """Judge that runs with the theorems' own settings stay under their bounds."""
    found = evidence.number("bounds")
    told = "; ".join(f"{name}: {v:.2g} of the bound" for name, v in found.items())
    return _verdict(all(v <= 1 for v in found.values()), f"{told}.")
