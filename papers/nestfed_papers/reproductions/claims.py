"""How claims are judged: each function makes a check that turns evidence into a verdict.

A difference counts if the 95 % interval of its values, seed by seed, excludes 0; else it is said to be within the spread.
A claim that the seeds neither contradict nor bear out is not confirmed, and said to be undecided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from nestfed.core import Metric
from nestfed.metrics import Estimate, confidence_interval, find
from nestfed_papers.reproductions.base import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    UNTESTED,
    Evidence,
    Missing,
    Run,
    Verdict,
    plus_minus,
)

Check = Callable[[Evidence], Verdict]


LOSS = find("loss")
MSE = find("mse")


def lead(metric: Metric, first: Sequence[float], second: Sequence[float], overlap: float = 0.0) -> Estimate:
    """Return by how much the first values are better, seed by seed, with its 95 % interval."""
    return gap([metric.signed(v) for v in first], [metric.signed(v) for v in second], overlap)


def gap(first: Sequence[float], second: Sequence[float], overlap: float = 0.0) -> Estimate:
    """Return the mean of the differences, seed by seed, with its 95 % interval.

    Test sets drawn anew from the same rows are not independent: `overlap`, the size of a test set over that of the rest,
    widens the interval as Nadeau and Bengio (2003) correct it, by √(1 + n·overlap).
    """
    if len(first) != len(second) or len(first) < 2:
        raise Missing("one seed says nothing about the spread")
    found = confidence_interval([a - b for a, b in zip(first, second)])
    half = (found.high - found.value) * math.sqrt(1 + len(first) * overlap)
    return Estimate(found.value, found.value - half, found.value + half)


def clear(difference: Estimate) -> bool:
    """Tell whether a difference is more than the seeds' spread."""
    return difference.low > 0 or difference.high < 0


def _told(difference: Estimate, words: tuple[str, str] = ("ahead", "behind")) -> str:
    text = f"{words[difference.value < 0]} by {abs(difference.value):.4f}"
    return text if clear(difference) else f"{text}, within the spread: {difference.low:+.4f} to {difference.high:+.4f}"


def _against(gaps: Mapping[str, Estimate]) -> str:
    """Tell how one stands to the nearest of the others, to those that are clearly ahead, and to those not told apart."""
    near = min(gaps, key=lambda m: gaps[m].value)
    lost = [m for m, g in gaps.items() if m != near and g.high < 0]
    also = [m for m, g in gaps.items() if m != near and not clear(g)]
    text = f"{_told(gaps[near])} (to {near})"
    text += f", clearly behind {_names(lost)} too" if lost else ""
    return text + (f", not told apart from {_names(also)}" if also else "")


def _outcome(gaps: Iterable[Estimate]) -> str:
    """Judge a claim that says that all these differences are positive."""
    gaps = list(gaps)
    if all(g.low > 0 for g in gaps):
        return CONFIRMED
    return REFUTED if any(g.high < 0 for g in gaps) else UNDECIDED


def _verdict(holds: bool, figures: str) -> Verdict:
    return Verdict(CONFIRMED if holds else REFUTED, figures)


def _names(labels: Sequence[str]) -> str:
    return ", ".join(labels)


def ahead(
    data: Sequence[str],
    winners: Sequence[str],
    losers: Sequence[str],
    *,
    loss: bool = False,
    also: str | None = None,
    overlap: float = 0.0,
) -> Check:
    """Judge that every winner beats every loser, in the final metric, the final training loss or another metric."""

    def values(evidence: Evidence, on: str, method: str) -> list[float]:
        runs = evidence.of(on, method)
        if also is not None and any(also not in run.also for run in runs):
            raise Missing(f"no {also} of {method} on {on}")
        return [run.loss() if loss else run.final if also is None else run.also[also] for run in runs]

    def check(evidence: Evidence) -> Verdict:
        parts: list[str] = []
        found: list[Estimate] = []
        for on in data:
            for winner in winners:
                mine = values(evidence, on, winner)
                rivals = {loser: values(evidence, on, loser) for loser in losers}
                metric = LOSS if loss else evidence.metric(on) if also is None else find(also)
                gaps = {m: lead(metric, mine, v, overlap) for m, v in rivals.items()}
                found += gaps.values()
                what = "training loss " if loss else f"{also} " if also else ""
                told = _names([f"{m} {plus_minus(v)}" for m, v in rivals.items()])
                parts.append(f"{on}: {what}{winner} {plus_minus(mine)} against {told}; {winner} is {_against(gaps)}")
        return Verdict(_outcome(found), "; ".join(parts) + ".")

    return check


def order(data: str, published: Mapping[str, float]) -> Check:
    """Judge that the methods come in the published order; equal published values are in none."""

    def check(evidence: Evidence) -> Verdict:
        finals, metric = {m: evidence.finals(data, m) for m in published}, evidence.metric(data)
        means = {m: fmean(v) for m, v in finals.items()}
        ours, theirs = (sorted(t, key=lambda m: metric.signed(t[m]), reverse=True) for t in (means, published))
        sign = ">" if metric.higher else "<"
        told = f" {sign} ".join(f"{m} {means[m]:.4f}" for m in ours)
        printed = theirs[0] + "".join(
            f" {'=' if published[a] == published[b] else sign} {b}" for a, b in itertools.pairwise(theirs)
        )
        pairs = [(a, b) for a in theirs for b in theirs if metric.better(published[a], published[b])]
        gaps = {(a, b): lead(metric, finals[a], finals[b]) for a, b in pairs}
        turned = [f"{b} before {a}" for (a, b), g in gaps.items() if g.high < 0]
        close = [f"{a} and {b}" for (a, b), g in gaps.items() if not clear(g)]
        text = f"{data}: {told}; published order {printed}."
        if turned:
            return Verdict(REFUTED, f"{text} Clearly the other way round: {_names(turned)}.")
        if close:
            return Verdict(UNDECIDED, f"{text} Not told apart by the seeds: {_names(close)}.")
        return Verdict(CONFIRMED, text)

    return check


def reaches(data: str, published: Mapping[str, float]) -> Check:
    """Judge that every method reaches its published value in the mean."""

    def check(evidence: Evidence) -> Verdict:
        finals, metric = {m: evidence.finals(data, m) for m in published}, evidence.metric(data)
        means = {m: fmean(v) for m, v in finals.items()}
        reached = {m: metric.reached(means[m], published[m]) for m in published}
        told = _names([f"{m} {means[m]:.4f} ({means[m] - published[m]:+.4f})" for m in published])
        short = {m: sum(not metric.reached(v, published[m]) for v in finals[m]) for m in published}
        some = _names([f"{n} of {len(finals[m])} of {m}" for m, n in short.items() if n and reached[m]])
        where = "below" if metric.higher else "above"
        text = f"{data}, difference in brackets: {told}." + (f" Single seeds {where}: {some}." if some else "")
        return _verdict(all(reached.values()), text)

    return check


def leads_throughout(data: Sequence[str], method: str, *, loss: bool = False) -> Check:
    """Judge that a method is first at nine of ten evaluations after the start.

    It is contradicted where others are clearly ahead at more than a tenth of them.
    """

    def check(evidence: Evidence) -> Verdict:
        parts, holds, beaten = [], True, False
        for on in data:
            methods = evidence.methods(on)
            if method not in methods or len(methods) < 2:
                raise Missing(f"{method} was not compared on {on}")
            metric = LOSS if loss else evidence.metric(on)
            tables = {name: _by_round(evidence.of(on, name), metric) for name in methods}
            common = sorted(set.intersection(*(set(t) for t in tables.values())))
            if not common:
                raise Missing(f"no evaluation in common on {on}")
            first = [r for r in common if max(tables, key=lambda m: fmean(tables[m][r])) == method]
            behind = [
                r
                for r in common
                if any(gap(tables[method][r], t[r]).high < 0 for m, t in tables.items() if m != method)
            ]
            holds = holds and len(first) >= 0.9 * len(common)
            beaten = beaten or len(behind) > 0.1 * len(common)
            parts.append(
                f"{on}: first at {len(first)} of {len(common)} evaluations, clearly behind another at {len(behind)}"
            )
        what = ", in training loss" if loss else ""
        outcome = CONFIRMED if holds else REFUTED if beaten else UNDECIDED
        return Verdict(outcome, f"{'; '.join(parts)} (throughout means first at nine of ten{what}).")

    return check


def _by_round(runs: Sequence[Run], metric: Metric) -> dict[int, list[float]]:
    """Return the values of all seeds, more being better, at the rounds after the start that all of them have."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for p in run.curve:
            value = p.loss if metric is LOSS else p.value
            if p.round and value is not None:
                found.setdefault(p.round, []).append(metric.signed(value))
    return {r: v for r, v in found.items() if len(v) == len(runs)}


def best(data: str, method: str) -> Check:
    """Judge that one of the methods (or settings) is the best."""

    def check(evidence: Evidence) -> Verdict:
        finals = _all(evidence, data, method)
        metric = evidence.metric(data)
        gaps = {m: lead(metric, finals[method], v) for m, v in finals.items() if m != method}
        told = _names([f"{m} {plus_minus(v)}" for m, v in finals.items()])
        return Verdict(_outcome(gaps.values()), f"{told}; {method} is {_against(gaps)}.")

    return check


def good(data: str, method: str, slack: float) -> Check:
    """Judge that a method (or setting) is as good as the best, up to a slack."""

    def check(evidence: Evidence) -> Verdict:
        finals = _all(evidence, data, method)
        told = _names([f"{m} {plus_minus(v)}" for m, v in finals.items()])
        metric = evidence.metric(data)
        top = max(finals, key=lambda m: metric.signed(fmean(finals[m])))
        if top == method:
            return Verdict(CONFIRMED, f"{told}.")
        behind = lead(metric, finals[top], finals[method])
        text = f"{told}; {method} is {_told(behind, ('behind', 'ahead'))} (to {top}; good means within {slack:g})."
        if behind.value <= slack:
            return Verdict(CONFIRMED, text)
        return Verdict(REFUTED if clear(behind) else UNDECIDED, text)

    return check


def _all(evidence: Evidence, data: str, method: str) -> dict[str, list[float]]:
    """Return the final values of all methods, of which there is that one and others."""
    finals = {m: evidence.finals(data, m) for m in evidence.methods(data)}
    if method not in finals or len(finals) < 2:
        raise Missing(f"{method} was not compared on {data}")
    return finals


def overfits(data: str, method: str, other: str) -> Check:
    """Judge that one setting fits the training tasks better than another and unseen tasks worse."""

    def check(evidence: Evidence) -> Verdict:
        train = {m: [r.loss() for r in evidence.of(data, m)] for m in (method, other)}
        test = {m: evidence.finals(data, m) for m in (method, other)}
        fits, fails = lead(LOSS, train[method], train[other]), lead(evidence.metric(data), test[other], test[method])
        told = "; ".join(f"{m}: training loss {plus_minus(train[m])}, unseen {plus_minus(test[m])}" for m in train)
        figures = f"{told}; {method} is {_told(fits)} in training, {other} {_told(fails)} on unseen tasks."
        return Verdict(_outcome((fits, fails)), figures)

    return check


# --- Figure 1 of the FCSG paper ---


def noise_label(ratio: float, m: int) -> str:
    """Return the name of a case of that figure."""
    return f"ratio {ratio:g}, m = {m}"


def needs_larger_m(ratios: Sequence[float], ms: Sequence[int], methods: Sequence[str]) -> Check:
    """Judge that what a small inner batch costs is more at the highest noise than at the lowest."""

    def check(evidence: Evidence) -> Verdict:
        parts, found = [], []
        for method in methods:
            lost = []
            for ratio in ratios:
                signed = evidence.metric(noise_label(ratio, ms[0])).signed
                many, few = (evidence.finals(noise_label(ratio, m), method) for m in (ms[-1], ms[0]))
                lost.append([signed(a) - signed(b) for a, b in zip(many, few)])
            more = gap(lost[-1], lost[0])
            found.append(more)
            told = _names([f"{fmean(v):+.4f} at ratio {ratio:g}" for ratio, v in zip(ratios, lost)])
            parts.append(
                f"{method}: m = {ms[0]} instead of {ms[-1]} costs {told}; from the first to the last ratio "
                f"{more.value:+.4f} [{more.low:+.4f}, {more.high:+.4f}]"
            )
        return Verdict(_outcome(found), "; ".join(parts) + ".")

    return check


def alike(data: Sequence[str], first: str, second: str, slack: float) -> Check:
    """Judge that two methods end alike: the whole interval of their difference is within the slack."""

    def check(evidence: Evidence) -> Verdict:
        gaps = {on: lead(evidence.metric(on), evidence.finals(on, first), evidence.finals(on, second)) for on in data}
        told = "; ".join(f"{on}: {first} is {_told(g)}" for on, g in gaps.items())
        near = all(-slack <= g.low and g.high <= slack for g in gaps.values())
        far = any(g.low > slack or g.high < -slack for g in gaps.values())
        outcome = CONFIRMED if near else REFUTED if far else UNDECIDED
        return Verdict(outcome, f"{told} (alike means that the interval is within ±{slack:g}).")

    return check


def steadier(data: Sequence[str], method: str, than: str) -> Check:
    """Judge that a method's curve wavers less, over the second half of a run; a steady slope is no wavering."""

    def wobble(evidence: Evidence, on: str, name: str) -> list[float]:
        steps = []
        for run in evidence.of(on, name):
            late = [p.value for p in run.curve if p.round > run.curve[-1].round / 2]
            bends = [abs(a - 2 * b + c) / 2 for a, b, c in zip(late, late[1:], late[2:])]
            steps.append(fmean(bends) if bends else math.nan)
        return steps

    def check(evidence: Evidence) -> Verdict:
        pairs = {on: (wobble(evidence, on, method), wobble(evidence, on, than)) for on in data}
        if any(math.isnan(v) for pair in pairs.values() for values in pair for v in values):
            return Verdict(UNTESTED, "Too few evaluations in the second half.")
        gaps = {on: gap(b, a) for on, (a, b) in pairs.items()}
        told = "; ".join(
            f"{on}: {method} {fmean(a):.5f}, {than} {fmean(b):.5f}, difference [{gaps[on].low:+.5f}, {gaps[on].high:+.5f}]"
            for on, (a, b) in pairs.items()
        )
        figures = f"Mean distance of an evaluation from its neighbours' mean, second half: {told}."
        return Verdict(_outcome(gaps.values()), figures)

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


def _rows(evidence: Evidence, expected: str) -> list[dict[str, Any]]:
    found = [row for row in evidence.number("fafed") if row["expected"] == expected]
    if not found:
        raise Missing("FAFED was not run with such settings")
    return found


def converges(evidence: Evidence) -> Verdict:
    """Judge that FAFED reaches the optimum with the settings that should."""
    rows = _rows(evidence, "converges")
    told = "; ".join(f"{_settings(row)}: |x| = {row['end']:.1e}" for row in rows)
    return _verdict(all(row["end"] < 0.01 for row in rows), f"{told}.")


def _settings(row: Mapping[str, Any]) -> str:
    return f"q = {row['q']}, η = {row['eta']:g}, ρ = {row['rho']:g}, α = {row['alpha']:g}"


def stalls(evidence: Evidence) -> Verdict:
    """Judge that FAFED comes to rest away from the optimum, from 2, with several steps of which η/ρ or α is large."""
    rows = _rows(evidence, "stalls")
    told = "; ".join(f"{_settings(row)}: |x| = {row['end']:.3f}, changing {row['change']:.0e} a round" for row in rows)
    return _verdict(all(0.1 < row["end"] < 2 and row["change"] < 1e-4 for row in rows), f"{told}.")


def fits_best(method: str) -> Check:
    """Judge that a method's adapted curve is nearest to the unseen task of Figure 1."""

    def check(evidence: Evidence) -> Verdict:
        errors: dict[str, list[float]] = {name: row["after"] for name, row in evidence.number("fits").items()}
        if method not in errors:
            raise Missing(f"{method} was not fitted")
        told = _names([f"{name} {plus_minus(v, 3)}" for name, v in errors.items()])
        gaps = {m: lead(MSE, errors[method], v) for m, v in errors.items() if m != method}
        figures = f"Mean squared error on the task after one step: {told}; {method} is {_against(gaps)}."
        return Verdict(_outcome(gaps.values()), figures)

    return check


def rate(method: str, cost: str) -> Check:
    """Judge that a measured slope does not exceed the theory's exponent."""

    def check(evidence: Evidence) -> Verdict:
        found: dict[str, Any] = evidence.number("rates")
        if method not in found:
            raise Missing(f"{method} was not measured")
        (value, low, high), theory = found[method][cost], found[method]["theory"][cost]
        outcome = _below(low, high, theory)
        return Verdict(outcome, f"{cost} ∝ ε^−{value:.2f} [{low:.2f}, {high:.2f}], theory {theory:g}.")

    return check


def _below(low: float, high: float, most: float) -> str:
    """Judge that what an interval tells of is at most so much."""
    return CONFIRMED if high <= most else REFUTED if low > most else UNDECIDED


def speeds_up(evidence: Evidence) -> Verdict:
    """Judge that iterations to an accuracy fall at least like 1/N, within 0.1."""
    found = evidence.number("speedup")
    if not found:
        raise Missing("no method was measured")
    told = "; ".join(f"{name}: N^{v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in found.items())
    outcomes = {_below(low, high, -0.9) for _, low, high in found.values()}
    outcome = next(o for o in (REFUTED, UNDECIDED, CONFIRMED) if o in outcomes)
    return Verdict(
        outcome, f"Iterations to one accuracy, {told} (linear means −0.9 or steeper; not measured for other methods)."
    )


def bias_falls(evidence: Evidence) -> Verdict:
    """Judge that the conditional estimator's bias falls like 1/m, within 0.1."""
    found = evidence.number("bias")
    told = "; ".join(f"{name}: m^{v:.2f}" for name, v in found.items())
    return _verdict(all(abs(v + 1) <= 0.1 for v in found.values()), f"{told} (O(1/m) means within 0.1 of −1).")


def under_bounds(evidence: Evidence) -> Verdict:
    """Judge that runs with the theorems' own settings stay under their bounds."""
    found = evidence.number("bounds")
    told = "; ".join(f"{name}: {v:.2g} of the bound" for name, v in found.items())
    return _verdict(all(v <= 1 for v in found.values()), f"{told}.")
