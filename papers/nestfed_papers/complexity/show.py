"""Write the figures and README.md from results.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.report.drawing import pyplot, save
from nestfed.report.plot import COLOURS
from nestfed_papers.complexity import TITLES

COLOUR = dict(zip(TITLES, COLOURS))
WITHIN = 0.05
"""A slope within 5 % of the theory's, or whose interval contains it, counts as equal."""


def everything(results: dict[str, Any], place: Path) -> None:
    """Write all figures and README.md."""
    plt = pyplot()
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    for name, draw in (("speedup", _speedup), ("rates", _rates), ("bias", _bias), ("bounds", _bounds)):
        save(draw(plt, results[name]), place / f"{name}.png")
    (place / "README.md").write_text(readme(results), encoding="utf-8")


def _minus(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _speedup(plt: Any, found: dict[str, Any]) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, cost, label in zip(panels, ("T", "rounds"), ("iterations", "communication rounds")):
        for name, one in found.items():
            Ns, costs = [r["N"] for r in one["rows"]], [r[cost] for r in one["rows"]]
            text = f"{TITLES[name]}, slope {_minus(one['slope'][cost][0])}"
            panel.loglog(Ns, costs, "o-", color=COLOUR[name], label=text, linewidth=1.6)
        first = next(iter(found.values()))["rows"]
        if cost == "T":
            top = first[0]["T"] * 1.8
            panel.loglog([1, Ns[-1]], [top, top / Ns[-1]], "--", color="#868e96", label="linear speed-up, slope −1")
        panel.set_xscale("log", base=2)
        panel.set_xticks(Ns, [str(N) for N in Ns])
        panel.minorticks_off()
        panel.set_xlabel("clients N")
        panel.set_ylabel(f"{label} to the target")
        panel.legend(frameon=False, fontsize=9)
    low, high = panels[1].get_ylim()
    panels[1].set_ylim(min(low, high / 100), high * 3)
    figure.suptitle("Linear speed-up: the cost of one accuracy with more clients (all alike)", fontsize=11)
    return figure


def _rates(plt: Any, found: dict[str, Any]) -> Any:
    figure, panels = plt.subplots(2, len(found), figsize=(15, 6), layout="constrained", sharex="col")
    for column, (name, one) in zip(panels.T, found.items()):
        errors = np.array([np.sqrt(np.mean(r["squares"])) for r in one["rows"]])
        for panel, cost in zip(column, ("rounds", "examples")):
            costs = np.array([r[cost] for r in one["rows"]], dtype=float)
            panel.loglog(1 / errors, costs, "o", color=COLOUR[name], markersize=4.5)
            measured, theory = one["slope"][cost][0], one["theory"][cost]
            for power, style, colour in ((measured, "-", COLOUR[name]), (theory, "--", "#868e96")):
                word = "measured" if style == "-" else "theory"
                line = costs[-1] * (errors / errors[-1]) ** -power
                panel.loglog(1 / errors, line, style, color=colour, linewidth=1.5, label=f"{word} ε$^{{-{power:.2g}}}$")
            panel.set_ylim(min(costs) / 2, max(costs) * (max(costs) / min(costs)) ** 0.35)
            panel.legend(frameon=False, fontsize=8, loc="upper left")
            panel.minorticks_off()
        ticks = [1 / errors[0], 1 / errors[-1]]
        column[1].set_xticks(ticks, [f"{v:.3g}" for v in ticks])
        column[0].set_title(TITLES[name], fontsize=10)
        column[1].set_xlabel("1/ε")
    panels[0, 0].set_ylabel("rounds")
    panels[1, 0].set_ylabel("examples, all clients")
    figure.suptitle(
        "Cost of reaching ε = root mean ‖∇F‖² with the theorems' schedules; lines meet at the largest T", fontsize=11
    )
    return figure


def _bias(plt: Any, found: dict[str, Any]) -> Any:
    figure, panel = plt.subplots(figsize=(5.8, 4.2), layout="constrained")
    for colour, (name, one) in zip(COLOURS, found.items()):
        rows = one["rows"]
        ms = [r["m"] for r in rows]
        panel.errorbar(
            ms,
            [r["bias"] for r in rows],
            [2 * r["error"] for r in rows],
            fmt="o",
            color=colour,
            capsize=2,
            markersize=4.5,
            label=f"{name}, slope {_minus(one['slope'])}",
        )
        if "exact" in rows[0]:
            panel.plot(ms, [r["exact"] for r in rows], "-", color=colour, linewidth=1.2)
        else:
            last = rows[-1]
            panel.plot(
                ms, [last["bias"] * last["m"] / m for m in ms], "--", color="#868e96", linewidth=1.2, label="slope −1"
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ms, [str(m) for m in ms])
    panel.set_xlabel("inner samples m")
    panel.set_ylabel("norm of the bias")
    panel.legend(frameon=False, fontsize=9)
    panel.set_title("Bias of the conditional estimator (solid lines: closed form)", fontsize=11)
    return figure


def _bounds(plt: Any, found: dict[str, Any]) -> Any:
    figure, panels = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True)
    for panel, (name, one) in zip(panels.flat, found.items()):
        Ts = [r["T"] for r in one["rows"]]
        measured, bound = [r["measured"] for r in one["rows"]], [r["bound"] for r in one["rows"]]
        panel.loglog(Ts, bound, "--", color="#343a40", label="bound of the theorem")
        panel.loglog(Ts, measured, "o-", color=COLOUR[name], label="measured")
        panel.fill_between(Ts, measured, bound, color=COLOUR[name], alpha=0.08, linewidth=0)
        panel.set_ylim(min(measured) / 4, max(bound) * 4)
        ratio = bound[-1] / measured[-1]
        panel.set_title(f"{TITLES[name]}: {float(f'{ratio:.2g}'):,.0f} times below its bound", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.minorticks_off()
    panels[0, 0].legend(frameon=False, fontsize=9, loc="lower left")
    for panel in panels[1]:
        panel.set_xlabel("iterations T")
    for panel in panels[:, 0]:
        panel.set_ylabel("mean of ‖∇F‖² (FAFED: M)")
    figure.suptitle(
        "The theorems' own settings, nothing tuned: the mean over a run of length T, and its bound", fontsize=11
    )
    return figure


# ---------------------------------------------------------------------------------------------------------
# README.md


def verdict(slope: Sequence[float], theory: float, tail: float) -> str:
    """Return below, at or above, by the interval and the tolerance, with the slope for the largest T."""
    value, low, high = slope
    if abs(value - theory) <= WITHIN * theory or low <= theory <= high:
        word = "at the bound"
    else:
        word = "below the bound" if value < theory else "**above the bound**"
    return f"{word}; {tail:.2f} at the end"


def tail(one: dict[str, Any], cost: str) -> float:
    """The slope over the four largest T."""
    rows = one["rows"][-4:]
    errors = [np.sqrt(np.mean(r["squares"])) for r in rows]
    return -float(np.polyfit(np.log(errors), np.log([r[cost] for r in rows]), 1)[0])


def limit(found: dict[str, float]) -> str:
    """Describe what limits a method, from the trials at one T."""
    gains = {k: v for k, v in found.items() if k != "start"}
    names = {"noise": "a batch of 16", "local steps": "q = 1", "bias": "16 times the m"}
    changes = ", ".join(f"{names[k]} changes ε by {-v:+.0%}" for k, v in gains.items())
    first = "the start" if found["start"] > 0.5 else max(gains, key=lambda k: gains[k])
    return f"{first}: the first quarter of the run holds {found['start']:.0%} of the squares; {changes}"


def _with_interval(found: Sequence[float]) -> str:
    return "{} [{}, {}]".format(*map(_minus, found))


def _in_regime(name: str, rows: Sequence[dict[str, float]]) -> str:
    """Return the slope over the N for which the theorem's q is at least 1, where it guarantees a speed-up."""
    power = 3 if name == "fcsg" else 2
    held = [r for r in rows if r["T"] >= r["N"] ** power]
    if len(held) < 3:
        return "–"
    slope = np.polyfit(np.log([r["N"] for r in held]), np.log([r["T"] for r in held]), 1)[0]
    return f"{_minus(float(slope))} (N ≤ {held[-1]['N']})"


def _passed_over(results: dict[str, Any]) -> list[str]:
    """Describe the best trials that a rule of the choice skipped."""
    rows = []
    for name, one in results["rates"].items():
        if "best trial" in one:
            best = one["best trial"]
            step, weight = best["constants"]
            rows.append(
                f"- {TITLES[name]} with its best trial, ×{step:.3g} and ×{weight:g}: rounds "
                f"{_with_interval(best['slope']['rounds'])}, examples {_with_interval(best['slope']['examples'])}; at the end "
                f"{tail(best, 'rounds'):.2f} and {tail(best, 'examples'):.2f}."
            )
    if not rows:
        return []
    return [
        "Two rules of that choice (skip a trial whose momentum weight would be cut off at 1; on a near tie take the smaller "
        "step) were added *after* a first measurement without them, whose slopes were steeper. They skipped these trials:",
        "",
        *rows,
    ]


def _under(found: dict[str, Any]) -> str:
    ratios = [r["measured"] / r["bound"] for one in found.values() for r in one["rows"]]
    word = "Every run stays under its bound" if max(ratios) <= 1 else "**Not every run stays under its bound**"
    return (
        f"{word}: measured/bound is between {min(ratios):.2g} and {max(ratios):.2g}. The prescribed steps are so small that over "
        "these T the runs stay close to their start, and the constants are products of worst cases."
    )


def readme(results: dict[str, Any]) -> str:
    """Return the page."""
    plan, tuned = results["plan"], results["tuned"]
    lines = [
        "# Complexity claims, measured",
        "",
        "`measure.py` writes this page from `results.json`; do not edit it. `make complexity` repeats the measurement "
        f"({results['processor_seconds'] / 60:.0f} minutes of one core for these results); "
        "`python papers/measurements/complexity/measure.py --quick` is a short test of a minute.",
        "",
        "The problems (`nestfed_papers/complexity/settings.py`) are nonconvex, noisy and small, so ∇F and all constants are "
        "known. ε is the root of the mean of ‖∇F(x̄)‖² over all synchronised points of a run and over "
        f"{plan['seeds']} seeds; the theorems bound the mean over all iterations, of which these are every q-th. Intervals are "
        "95 %, by resampling the seeds. The runs use the library's own methods and rounds, many seeds at once; each measurement "
        "first compares them with `simulate` (equal to 1e-10).",
        "",
        "## Rounds and examples to reach ε",
        "",
        "![rates](rates.png)",
        "",
        f"N = 4 different clients, one example per iteration, T from {plan['Ts'][0]} to {plan['Ts'][-1]}; q, m, B, step "
        "sizes and weights depend on T as in each theorem, up to two constants per method (one for the step sizes, one for "
        f"the momentum weights). They were chosen once, at T = {plan['tuning']}, from 15 trials per method: of those within 2 % "
        f"of the best, the one with the smallest step. Slopes are fitted over T ≥ {plan['fit_from']}, and again over the four "
        "largest T (*at the end*). The theory's exponents are upper bounds; those of FMGDA and FAFED omit a logarithm.",
        "",
        "| method | constants (step, weight) | rounds: measured | theory | | examples: measured | theory | | ε at the largest T |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results["rates"].items():
        t, s, theory = tuned[name], one["slope"], one["theory"]
        last = np.sqrt(np.mean(one["rows"][-1]["squares"]))
        weight = "–" if name == "fcsg" else f"×{t['weight']:g}"
        edge = " (largest tried)" if t["step"] == max(c[0] for _, c in t["trials"]) else ""
        lines.append(
            f"| {TITLES[name]} | ×{t['step']:.4g}{edge}, {weight} | {_with_interval(s['rounds'])} | {theory['rounds']:g} | "
            f"{verdict(s['rounds'], theory['rounds'], tail(one, 'rounds'))} | {_with_interval(s['examples'])} | {theory['examples']:g} | "
            f"{verdict(s['examples'], theory['examples'], tail(one, 'examples'))} | {last:.3g} |"
        )
    lines += ["", *_passed_over(results)]
    lines += [
        "",
        f"What limits each method, from trials at T = {plan['trial']} that reduce one source of error and keep all else:",
        "",
        *(f"- {TITLES[name]}: {limit(one['limits'])}." for name, one in results["rates"].items()),
        "",
        "How to read the slopes:",
        "",
        "- The schedules are made for the worst case: a step size that falls with T keeps the mean over a run at the theorem's "
        "rate even where a larger step would be faster. So *at the bound* means that the schedule does what the theorem "
        "promises, not that the problem is as hard as the theorem allows.",
        "- *Above the bound* does not violate a theorem. It means that over this range of T the error falls more slowly than the "
        "rate for T → ∞.",
        "- The tuned steps are many times larger than the theorems' conditions allow. Runs that satisfy the conditions are in the "
        "last section, all under their bounds. FMGDA's ĉ and c are equal, as in its experiments.",
        "- The examples of FCSG's family include m inner ones each. m = ε⁻² is prescribed because the theorem assumes only a "
        "squared bias of O(1/m). Here the bias itself is O(1/m) (below), so a smaller m would suffice.",
        "",
        "## Linear speed-up in the number of clients",
        "",
        "![speed-up](speedup.png)",
        "",
        "All clients have the same data, so that F does not change with N; constants as above. Iterations and rounds until ε is "
        "as small as one client reaches alone, from lines through four lengths T for each N. *Linear* means within 0.1 of −1.",
        "",
        "| method | target ε | iterations ∝ N^ | theory | | where q ≥ 1 is prescribed | rounds ∝ N^ | theory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results["speedup"].items():
        s = one["slope"]["T"]
        low, high = s[1], s[2]
        word = (
            "linear"
            if abs(s[0] + 1) <= 0.1 or low <= -1 <= high
            else ("more than linear" if s[0] < -1 else "less than linear")
        )
        lines.append(
            f"| {TITLES[name]} | {one['target']:.3g} | {_with_interval(s)} | −1 | {word} | {_in_regime(name, one['rows'])} | "
            f"{_with_interval(one['slope']['rounds'])} | 0 |"
        )
    lines += [
        "",
        "In theory the number of rounds does not depend on N, because q falls as N grows. Once q is 1, a round is an iteration, "
        "and more clients save rounds too. Beyond that (T < N² for FMGDA and FAFED, T < N³ for FCSG) the theorems promise no "
        "speed-up: the prescribed q would be below 1.",
        "",
        "## Bias of the conditional estimator",
        "",
        "![bias](bias.png)",
        "",
        "| problem | bias ∝ m^ | theory |",
        "| --- | --- | --- |",
        *(f"| {name} | {_minus(one['slope'])} | −1 |" for name, one in results["bias"].items()),
        "",
        f"Fitted over m ≥ {plan['bias_from']}; pairs of batches with the same outer samples.",
        "",
        "## Runs under their bounds",
        "",
        "![bounds](bounds.png)",
        "",
        "The theorems' own settings, nothing tuned, with the true constants of each problem (suprema bounded by hand).",
        "",
        "| method | measure | measured at the largest T | bound | ratio | largest term | conditions that do not hold |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results["bounds"].items():
        last = one["rows"][-1]
        broken = sorted({sentence for r in one["rows"] for sentence in r["violated"]})
        lines.append(
            f"| {TITLES[name]} | {one['measure']} | {last['measured']:.3g} | {last['bound']:.3g} | "
            f"{last['measured'] / last['bound']:.2g} | {last['dominant']} | {' '.join(broken) or 'none'} |"
        )
    lines += [
        "",
        _under(results["bounds"]),
        "",
    ]
    return "\n".join(lines)
