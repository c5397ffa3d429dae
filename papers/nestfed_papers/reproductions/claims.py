"""How claims are judged: each function makes a check that turns evidence into a verdict.

A difference is significant if the 95 % interval of its values, paired by seed, excludes 0; otherwise it is within the
spread. A claim that the seeds neither contradict nor support is not confirmed (undecided).
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
    """Return by how much the first values are better, paired by seed, with the 95 % interval."""
    return gap([metric.signed(v) for v in first], [metric.signed(v) for v in second], overlap)


def gap(first: Sequence[float], second: Sequence[float], overlap: float = 0.0) -> Estimate:
    """Return the mean of the differences, paired by seed, with its 95 % interval.

    Test sets drawn from the same rows are not independent. `overlap`, the size of a test set over that of the rest,
    widens the interval by √(1 + n·overlap), the correction of Nadeau and Bengio (2003).
    """
    if len(first) != len(second) or len(first) < 2:
        raise Missing("one seed gives no spread")
    found = confidence_interval([a - b for a, b in zip(first, second)])
    half = (found.high - found.value) * math.sqrt(1 + len(first) * overlap)
    return Estimate(found.value, found.value - half, found.value + half)


def clear(difference: Estimate) -> bool:
    """Return whether a difference is significant."""
    return difference.low > 0 or difference.high < 0


def _difference(difference: Estimate, other: str) -> str:
    text = f"{'behind' if difference.value < 0 else 'ahead of'} {other} by {abs(difference.value):.4f}"
    interval = f"95 % interval {difference.low:+.4f} to {difference.high:+.4f}"
    return text if clear(difference) else f"{text} (not significant: {interval})"


def _against(gaps: Mapping[str, Estimate]) -> str:
    """Compare a method with its nearest rival, those significantly ahead, and those without a significant difference."""
    near = min(gaps, key=lambda m: gaps[m].value)
    lost = [m for m, g in gaps.items() if m != near and g.high < 0]
    also = [m for m, g in gaps.items() if m != near and not clear(g)]
    text = _difference(gaps[near], near)
    text += f", also significantly behind {_names(lost)}" if lost else ""
    return text + (f", no significant difference from {_names(also)}" if also else "")


def _outcome(gaps: Iterable[Estimate]) -> str:
    """Judge the claim that all these differences are positive."""
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
                listed = _names([f"{m} {plus_minus(v)}" for m, v in rivals.items()])
                parts.append(f"{on}: {what}{winner} {plus_minus(mine)} against {listed}; {winner} is {_against(gaps)}")
        return Verdict(_outcome(found), "; ".join(parts) + ".")

    return check


def order(data: str, published: Mapping[str, float]) -> Check:
    """Judge that the methods are in the published order; equal published values have no order."""

    def check(evidence: Evidence) -> Verdict:
        finals, metric = {m: evidence.finals(data, m) for m in published}, evidence.metric(data)
        means = {m: fmean(v) for m, v in finals.items()}
        ours, theirs = (sorted(t, key=lambda m: metric.signed(t[m]), reverse=True) for t in (means, published))
        sign = ">" if metric.higher else "<"
        listed = f" {sign} ".join(f"{m} {means[m]:.4f}" for m in ours)
        printed = theirs[0] + "".join(
            f" {'=' if published[a] == published[b] else sign} {b}" for a, b in itertools.pairwise(theirs)
        )
        pairs = [(a, b) for a in theirs for b in theirs if metric.better(published[a], published[b])]
        gaps = {(a, b): lead(metric, finals[a], finals[b]) for a, b in pairs}
        turned = [f"{b} before {a}" for (a, b), g in gaps.items() if g.high < 0]
        close = [f"{a} and {b}" for (a, b), g in gaps.items() if not clear(g)]
        text = f"{data}: {listed}; published order {printed}."
        if turned:
            return Verdict(REFUTED, f"{text} Significantly reversed: {_names(turned)}.")
        if close:
            return Verdict(UNDECIDED, f"{text} Differences not significant: {_names(close)}.")
        return Verdict(CONFIRMED, text)

    return check


def reaches(data: str, published: Mapping[str, float]) -> Check:
    """Judge that every method reaches its published value in the mean."""

    def check(evidence: Evidence) -> Verdict:
        finals, metric = {m: evidence.finals(data, m) for m in published}, evidence.metric(data)
        means = {m: fmean(v) for m, v in finals.items()}
        reached = {m: metric.reached(means[m], published[m]) for m in published}
        listed = _names([f"{m} {means[m]:.4f} ({means[m] - published[m]:+.4f})" for m in published])
        short = {m: sum(not metric.reached(v, published[m]) for v in finals[m]) for m in published}
        some = _names([f"{n} of {len(finals[m])} of {m}" for m, n in short.items() if n and reached[m]])
        where = "below" if metric.higher else "above"
        text = f"{data}, with the difference in brackets: {listed}." + (f" Seeds {where}: {some}." if some else "")
        return _verdict(all(reached.values()), text)

    return check


def leads_throughout(data: Sequence[str], method: str, *, loss: bool = False) -> Check:
    """Judge that a method is first at nine of ten evaluations after the start.

    It is refuted if others are significantly ahead at more than a tenth of them.
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
                f"{on}: first at {len(first)} of {len(common)} evaluations, significantly behind another at {len(behind)}"
            )
        what = ", in training loss" if loss else ""
        outcome = CONFIRMED if holds else REFUTED if beaten else UNDECIDED
        return Verdict(outcome, f"{'; '.join(parts)} (throughout means first at nine of ten evaluations{what}).")

    return check


def _by_round(runs: Sequence[Run], metric: Metric) -> dict[int, list[float]]:
    """Return the values of all seeds (higher is better) at the rounds after the start that all seeds have."""
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
        listed = _names([f"{m} {plus_minus(v)}" for m, v in finals.items()])
        return Verdict(_outcome(gaps.values()), f"{listed}; {method} is {_against(gaps)}.")

    return check


def good(data: str, method: str, slack: float) -> Check:
    """Judge that a method (or setting) is as good as the best, up to a slack."""

    def check(evidence: Evidence) -> Verdict:
        finals = _all(evidence, data, method)
        listed = _names([f"{m} {plus_minus(v)}" for m, v in finals.items()])
        metric = evidence.metric(data)
        top = max(finals, key=lambda m: metric.signed(fmean(finals[m])))
        if top == method:
            return Verdict(CONFIRMED, f"{listed}.")
        behind = lead(metric, finals[top], finals[method])
        text = f"{listed}; {method} is {_difference(lead(metric, finals[method], finals[top]), top)}; good means within {slack:g}."
        if behind.value <= slack:
            return Verdict(CONFIRMED, text)
        return Verdict(REFUTED if clear(behind) else UNDECIDED, text)

    return check


def _all(evidence: Evidence, data: str, method: str) -> dict[str, list[float]]:
    """Return the final values of all methods; raise unless this one and others were run."""
    finals = {m: evidence.finals(data, m) for m in evidence.methods(data)}
    if method not in finals or len(finals) < 2:
        raise Missing(f"{method} was not compared on {data}")
    return finals


def overfits(data: str, method: str, other: str) -> Check:
    """Judge that one setting fits the training tasks better than another, but unseen tasks worse."""

    def check(evidence: Evidence) -> Verdict:
        train = {m: [r.loss() for r in evidence.of(data, m)] for m in (method, other)}
        test = {m: evidence.finals(data, m) for m in (method, other)}
        fits, fails = lead(LOSS, train[method], train[other]), lead(evidence.metric(data), test[other], test[method])
        listed = "; ".join(f"{m}: training loss {plus_minus(train[m])}, unseen {plus_minus(test[m])}" for m in train)
        figures = (
            f"{listed}; {method} is {_difference(fits, other)} in training, {other} is {_difference(fails, method)} on unseen "
            "tasks."
        )
        return Verdict(_outcome((fits, fails)), figures)

    return check


# --- Figure 1 of the FCSG paper ---


def noise_label(ratio: float, m: int) -> str:
    """Return the name of a case of that figure."""
    return f"ratio {ratio:g}, m = {m}"


def needs_larger_m(ratios: Sequence[float], ms: Sequence[int], methods: Sequence[str]) -> Check:
    """Judge that a small inner batch costs more at the highest noise than at the lowest."""

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
            listed = _names([f"{fmean(v):+.4f} at ratio {ratio:g}" for ratio, v in zip(ratios, lost)])
            parts.append(
                f"{method}: m = {ms[0]} instead of {ms[-1]} costs {listed}; increase from the first to the last "
                f"ratio {more.value:+.4f} [{more.low:+.4f}, {more.high:+.4f}]"
            )
        return Verdict(_outcome(found), "; ".join(parts) + ".")

    return check


def alike(data: Sequence[str], first: str, second: str, slack: float) -> Check:
    """Judge that two methods perform alike: the whole interval of their difference is within the slack."""

    def check(evidence: Evidence) -> Verdict:
        gaps = {on: lead(evidence.metric(on), evidence.finals(on, first), evidence.finals(on, second)) for on in data}
        listed = "; ".join(f"{on}: {first} is {_difference(g, second)}" for on, g in gaps.items())
        near = all(-slack <= g.low and g.high <= slack for g in gaps.values())
        far = any(g.low > slack or g.high < -slack for g in gaps.values())
        outcome = CONFIRMED if near else REFUTED if far else UNDECIDED
        return Verdict(outcome, f"{listed} (alike means an interval within ±{slack:g}).")

    return check


def steadier(data: Sequence[str], method: str, than: str) -> Check:
    """Judge that a method's curve fluctuates less in the second half of a run; a steady slope does not count."""

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
        listed = "; ".join(
            f"{on}: {method} {fmean(a):.5f}, {than} {fmean(b):.5f}, difference [{gaps[on].low:+.5f}, {gaps[on].high:+.5f}]"
            for on, (a, b) in pairs.items()
        )
        figures = f"Mean distance of an evaluation from the mean of its neighbours, in the second half: {listed}."
        return Verdict(_outcome(gaps.values()), figures)

    return check


# --- Without training ---


def saddle(evidence: Evidence) -> Verdict:
    """Judge that a point has zero gradient, curvatures of both signs, and a value far above the optimum."""
    norm, curvatures = evidence.number("gradient_norm"), evidence.number("eigenvalues")
    above = evidence.number("value") - evidence.number("optimum")
    where = _names([f"{round(m, 9) + 0.0:.3g}" for m in evidence.number("saddle")])
    holds = norm < 1e-9 and min(curvatures) < 0 < max(curvatures) and above > 0.1
    listed = (
        f"at m = ({where}) the gradient is {norm:.1e}, the eigenvalues are {_names([f'{c:.3f}' for c in curvatures])}"
    )
    return _verdict(holds, f"{listed.capitalize()}, and the surface is {above:.3f} above its infimum.")


def no_mu(evidence: Evidence) -> Verdict:
    """Judge that the PL inequality fails for every μ: its quotient falls to 0 on the way to the saddle."""
    rows = evidence.number("approach")
    quotients = [row["quotient"] for row in rows]
    falls = all(b < a for a, b in itertools.pairwise(quotients)) and quotients[-1] < 1e-6
    listed = "; ".join(
        f"at distance {row['distance']:g}: {row['quotient']:.1e}" for row in rows[:: max(1, len(rows) // 4)]
    )
    return _verdict(falls, f"½‖∇S‖²/(S − S*), which μ must not exceed, {listed}.")


def diverges(evidence: Evidence) -> Verdict:
    """Judge that the naive method diverges with every setting, by exactly the steps of the theorem."""
    rows = evidence.number("naive")
    worst = max(row["error"] for row in rows)
    holds = all(row["end"] > row["start"] and row["monotone"] for row in rows) and worst < 1e-8
    listed = "; ".join(
        f"η = {row['eta']:g}, β = {row['beta']:g}: |x| {row['start']:g} → {row['end']:.3f}" for row in rows
    )
    return _verdict(holds, f"{listed}; every step is η/(3√(1−β^t)) up to {worst:.0e}.")


def _rows(evidence: Evidence, expected: str) -> list[dict[str, Any]]:
    found = [row for row in evidence.number("fafed") if row["expected"] == expected]
    if not found:
        raise Missing("FAFED was not run with these settings")
    return found


def converges(evidence: Evidence) -> Verdict:
    """Judge that FAFED converges with the settings for which it should."""
    rows = _rows(evidence, "converges")
    listed = "; ".join(f"{_settings(row)}: |x| = {row['end']:.1e}" for row in rows)
    return _verdict(all(row["end"] < 0.01 for row in rows), f"{listed}.")


def _settings(row: Mapping[str, Any]) -> str:
    return f"q = {row['q']}, η = {row['eta']:g}, ρ = {row['rho']:g}, α = {row['alpha']:g}"


def stalls(evidence: Evidence) -> Verdict:
    """Judge that FAFED, started at 2, stops away from the optimum with several local steps and a large η/ρ or α."""
    rows = _rows(evidence, "stalls")
    listed = "; ".join(
        f"{_settings(row)}: |x| = {row['end']:.3f}, changing {row['change']:.0e} a round" for row in rows
    )
    return _verdict(all(0.1 < row["end"] < 2 and row["change"] < 1e-4 for row in rows), f"{listed}.")


def fits_best(method: str) -> Check:
    """Judge that a method's adapted curve is the closest to the unseen task of Figure 1."""

    def check(evidence: Evidence) -> Verdict:
        errors: dict[str, list[float]] = {name: row["after"] for name, row in evidence.number("fits").items()}
        if method not in errors:
            raise Missing(f"{method} was not fitted")
        listed = _names([f"{name} {plus_minus(v, 3)}" for name, v in errors.items()])
        gaps = {m: lead(MSE, errors[method], v) for m, v in errors.items() if m != method}
        figures = f"Mean squared error on the task after one step: {listed}; {method} is {_against(gaps)}."
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
    """Judge that a value with this interval is at most `most`."""
    return CONFIRMED if high <= most else REFUTED if low > most else UNDECIDED


def speeds_up(evidence: Evidence) -> Verdict:
    """Judge that iterations to an accuracy fall at least like 1/N, within 0.1."""
    found = evidence.number("speedup")
    if not found:
        raise Missing("no method was measured")
    listed = "; ".join(f"{name}: N^{v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in found.items())
    outcomes = {_below(low, high, -0.9) for _, low, high in found.values()}
    outcome = next(o for o in (REFUTED, UNDECIDED, CONFIRMED) if o in outcomes)
    return Verdict(
        outcome, f"Iterations to one accuracy, {listed} (linear means −0.9 or steeper; not measured for other methods)."
    )


def bias_falls(evidence: Evidence) -> Verdict:
    """Judge that the conditional estimator's bias falls like 1/m, within 0.1."""
    found = evidence.number("bias")
    listed = "; ".join(f"{name}: m^{v:.2f}" for name, v in found.items())
    return _verdict(all(abs(v + 1) <= 0.1 for v in found.values()), f"{listed} (O(1/m) means within 0.1 of −1).")


def under_bounds(evidence: Evidence) -> Verdict:
    """Judge that runs with the theorems' own settings stay under their bounds."""
    found = evidence.number("bounds")
    listed = "; ".join(f"{name}: {v:.2g} of the bound" for name, v in found.items())
    return _verdict(all(v <= 1 for v in found.values()), f"{listed}.")
