"""Reproductions: what is claimed is judged rightly, everything is known and reported, and one runs from end to end."""

from __future__ import annotations

import html
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from nestfed_papers import estimate, page, results
from nestfed_papers.reproductions import claims, lookup, papers
from nestfed_papers.reproductions.base import (
    BUDGETS,
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    UNTESTED,
    Budget,
    Case,
    Claim,
    Evidence,
    Point,
    Reproduction,
    Run,
    reached,
)
from nestfed_papers.run import reproduce

from nestfed.core import NestfedError
from nestfed.experiment.spec import packaged

NAMES = [
    "fcsg-figure1", "fcsg-figure2", "fcsg-figure3", "fcsg-table2",
    "fmgda-figure1", "fmgda-table2", "fmgda-figure2",
    *(f"scgdm-figure{i}" for i in range(1, 8)),
    "fafed-theorem1", "fafed-figure1", "fafed-table2",
    "eicu", "heart-disease", "complexity",
]  # fmt: skip


def curve(*values: float, loss: float | None = 1.0) -> list[Point]:
    return [Point(10 * i, v, 1000 * i, 50 * i, 0.5 * i, None if i == 0 else loss) for i, v in enumerate(values)]


def made(table: dict[str, dict[str, list[float]]], budget: str = "standard", **more: Any) -> Evidence:
    """Evidence with these final values: {data: {method: one per seed}}."""
    runs = [
        Run(data, method, seed, "ap", curve(0.1, value / 2, value, loss=1 - value))
        for data, methods in table.items()
        for method, values in methods.items()
        for seed, value in enumerate(values)
    ]
    return Evidence("fcsg-table2", budget, runs, **more)


def outcome(check: claims.Check, evidence: Evidence) -> str:
    return Claim("", check).verdict(evidence).outcome


# --- The table ---


def test_every_name_of_the_issue_is_known_and_complete() -> None:
    assert list(papers.REPRODUCTIONS) == NAMES
    for name, found in papers.REPRODUCTIONS.items():
        assert set(found.budgets) == set(BUDGETS)
        assert found.claims, name
        assert found.cases or found.produce
        for budget in BUDGETS:
            for case in found.chosen(found.at(budget)):
                experiment = case.build(found.at(budget))
                assert set(case.published) <= set(experiment.methods), name
                for method in experiment.methods:
                    experiment.for_method(method)
    used = {c.experiment for r in papers.REPRODUCTIONS.values() for c in r.cases} | {
        "average-precision",
        "demo",
        "prevalence",
        "wikitext-full",
    }
    assert used == set(packaged()), "every experiment file belongs to a reproduction"
    assert set(papers.COSTS) == used - {"demo", "average-precision", "prevalence"}


def test_published_values_are_those_of_the_papers() -> None:
    """Entered a second time from the tables, in their order."""
    assert [list(v) for v in papers.AP.values()] == 2 * [["fedavg", "coda-plus", "fcsg", "fcsg-m", "acc-fcsg-m"]]
    assert [list(v) for v in papers.AUROC.values()] == 3 * [["coda", "momentum-local-sgda", "codasca", "fmgda"]]
    assert list(papers.AP["MNIST"].values()) == [0.9357, 0.9733, 0.9868, 0.9878, 0.9879]
    assert list(papers.AP["CIFAR-10"].values()) == [0.5059, 0.6039, 0.7130, 0.7157, 0.7184]
    assert [list(v.values()) for v in papers.AUROC.values()] == [
        [0.9366, 0.9369, 0.9369, 0.9382],
        [0.6009, 0.6038, 0.5608, 0.6093],
        [0.6864, 0.6896, 0.6791, 0.6905],
    ]
    assert [list(v.values()) for v in papers.ACCURACY.values()] == [
        [0.8451, 0.8496, 0.8562, 0.8586, 0.8697, 0.8816],
        [0.7958, 0.8034, 0.8053, 0.8040, 0.8015, 0.8188],
    ]
    assert list(papers.ACCURACY["Fashion-MNIST, low"]) == ["fedavg", "scaffold", "stem", "fedadam", "fedams", "fafed"]


def test_listing_and_times() -> None:
    table = estimate.listing()
    assert [row[0] for row in table] == NAMES
    for name in NAMES:
        found = lookup.find(name)
        quick, standard, full = (estimate.minutes(found, budget) for budget in BUDGETS)
        assert 0 < quick <= 15, name
        # About 40 minutes each; these two reach their published values later.
        assert standard <= {"fcsg-table2": 60, "fafed-table2": 90}.get(name, 46), name
        assert full >= standard
    with pytest.raises(NestfedError, match="did you mean fcsg-table2"):
        lookup.find("fcsg-tabel2")
    with pytest.raises(NestfedError, match="Unknown budget 'huge'"):
        lookup.find("eicu").at("huge")


def test_time_is_rounds_times_measured_seconds() -> None:
    """A method's trials by hand: the better half continues after rounds 5 and 10 of 20."""
    experiment = Case("x", "fcsg-table2-mnist").build(Budget(changes={"run.rounds": 20, "evaluation.every": 5}))
    assert estimate._trial_rounds(experiment, "fcsg", Budget()) == (4 * 5 + 2 * 5 + 1 * 10, 7)
    assert estimate._trial_rounds(experiment, "fcsg", Budget(trials=3)) == (3 * 5 + 2 * 5 + 1 * 10, 6)
    sine = Case("x", "sine").build(Budget())
    assert estimate._trial_rounds(sine, "local-bsgd", Budget(trials=3)) == (0.0, 0)


def test_a_sweep_over_local_steps_keeps_the_iterations() -> None:
    case = Case("x", "sine", sweep=("local-scgdm", "run.q", (1, 5, 20)))
    experiment = case.build(Budget(changes={"run.rounds": 40}))
    runs = [experiment.for_method(m).run for m in experiment.methods]
    assert [r.q * r.rounds for r in runs] == [200, 200, 200]
    assert list(experiment.methods) == ["q=1", "q=5", "q=20"]
    other = Case("x", "sine", sweep=("local-scgdm", "algorithm.gamma", (0.1, 0.7))).build(Budget())
    assert other.for_method("gamma=0.1").algorithm.hyper["gamma"] == 0.1
    assert other.for_method("gamma=0.1").algorithm.hyper["alpha"] == 0.8


# --- Verdicts on synthetic records ---

CLEAR = {"A": {"x": [0.90, 0.91, 0.92], "y": [0.80, 0.81, 0.82], "z": [0.70, 0.71, 0.72]}}
NEAR = {"A": {"x": [0.80, 0.90, 1.00], "y": [0.82, 0.87, 0.97], "z": [0.70, 0.71, 0.72]}}


def test_a_difference_and_its_error() -> None:
    """Against SciPy's t test of paired samples: the interval excludes 0 just when p < 0.05."""
    from scipy.stats import ttest_rel

    for first, second in (([1.0, 2.0, 3.0], [0.0, 0.0, 3.0]), ([0.90, 0.92, 0.95, 0.91], [0.89, 0.90, 0.93, 0.90])):
        found, known = claims.gap(first, second), ttest_rel(first, second)
        low, high = known.confidence_interval(0.95)
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
        assert claims.clear(found) == (known.pvalue < 0.05)
    with pytest.raises(NestfedError):
        claims.gap([1.0], [0.0])


def test_ahead() -> None:
    assert outcome(claims.ahead(["A"], ["x"], ["y", "z"]), made(CLEAR)) == CONFIRMED
    assert outcome(claims.ahead(["A"], ["y"], ["x", "z"]), made(CLEAR)) == REFUTED
    assert outcome(claims.ahead(["A"], ["x"], ["y"]), made(NEAR)) == UNDECIDED
    figures = claims.ahead(["A"], ["x"], ["y"])(made(NEAR)).figures
    assert "ahead of y by" in figures
    assert "not significant" in figures
    assert "behind x by 0.1000" in claims.ahead(["A"], ["y"], ["x", "z"])(made(CLEAR)).figures
    # Also those whose mean is not the best need a significant difference.
    wild = {"A": {"x": [0.90, 0.91, 0.92], "y": [0.850, 0.851, 0.852], "z": [0.60, 0.93, 1.0]}}
    assert outcome(claims.ahead(["A"], ["x"], ["y"]), made(wild)) == CONFIRMED
    assert outcome(claims.ahead(["A"], ["x"], ["y", "z"]), made(wild)) == UNDECIDED
    assert outcome(claims.ahead(["A"], ["y"], ["x", "z"]), made(wild)) == REFUTED, "one clear defeat is enough"
    assert outcome(claims.ahead(["A"], ["x"], ["y", "z"], loss=True), made(CLEAR)) == CONFIRMED
    assert outcome(claims.ahead(["A"], ["z"], ["x"], loss=True), made(CLEAR)) == REFUTED
    assert ", also significantly behind y" in claims.ahead(["A"], ["z"], ["x", "y"])(made(CLEAR)).figures


def test_ahead_in_another_metric() -> None:
    """Here the order is turned round in the other metric."""
    runs = [replace(run, also={"auroc": 1 - run.final}) for run in made(CLEAR).runs]
    found = Evidence("fcsg-table2", "standard", runs)
    assert outcome(claims.ahead(["A"], ["x"], ["y"], also="auroc"), found) == REFUTED
    assert outcome(claims.ahead(["A"], ["y"], ["x"], also="auroc"), found) == CONFIRMED
    assert outcome(claims.ahead(["A"], ["x"], ["y"], also="f1"), found) == UNTESTED


def test_what_cannot_be_tested_is_said() -> None:
    check = claims.ahead(["A"], ["x"], ["y"])
    assert outcome(check, made({"A": {"x": [0.9], "y": [0.8]}})) == UNTESTED
    assert outcome(check, made({"A": {"x": [0.9, 0.9]}})) == UNTESTED
    assert outcome(check, made(CLEAR, budget="quick")) == UNTESTED
    assert Claim("", claims.saddle, trains=False).verdict(made(CLEAR)).outcome == UNTESTED


def test_order_and_published_values() -> None:
    assert outcome(claims.order("A", {"x": 0.5, "y": 0.4, "z": 0.3}), made(CLEAR)) == CONFIRMED
    assert outcome(claims.order("A", {"x": 0.4, "y": 0.5, "z": 0.3}), made(CLEAR)) == REFUTED
    found = claims.order("A", {"x": 0.5, "y": 0.4, "z": 0.3})(made(NEAR))
    assert found.outcome == UNDECIDED
    assert "x and y" in found.figures
    tie = claims.order("A", {"x": 0.5, "z": 0.4, "y": 0.4})(made(CLEAR))
    assert tie.outcome == CONFIRMED
    assert "published order x > z = y" in tie.figures
    assert outcome(claims.reaches("A", {"x": 0.91, "y": 0.80}), made(CLEAR)) == CONFIRMED
    assert outcome(claims.reaches("A", {"x": 0.91, "y": 0.82}), made(CLEAR)) == REFUTED


def test_claims_on_a_metric_that_should_be_low() -> None:
    """The same evidence as log-loss: whoever has the lower values is ahead, and reaches a target from above."""
    runs = [replace(run, metric="log_loss") for run in made(CLEAR).runs]
    evidence = Evidence("fcsg-table2", "standard", runs)
    low = min(CLEAR["A"], key=lambda m: fmean(CLEAR["A"][m]))
    (others,) = [[m for m in CLEAR["A"] if m != low]]
    for check in (
        claims.ahead(["A"], [low], others),
        claims.best("A", low),
        claims.good("A", low, 0.0),
        claims.leads_throughout(["A"], low),
        claims.order("A", {m: fmean(v) for m, v in CLEAR["A"].items()}),
        claims.reaches("A", {m: fmean(v) + 0.01 for m, v in CLEAR["A"].items()}),
    ):
        assert outcome(check, evidence) == CONFIRMED
    assert outcome(claims.ahead(["A"], others[:1], [low]), evidence) == REFUTED
    assert outcome(claims.best("A", others[0]), evidence) == REFUTED
    assert outcome(claims.reaches("A", {low: fmean(CLEAR["A"][low]) - 0.01}), evidence) == REFUTED
    assert " < " in claims.order("A", {m: fmean(v) for m, v in CLEAR["A"].items()})(evidence).figures
    also = Evidence("x", "standard", [replace(run, also={"perplexity": run.final}, metric="ap") for run in runs])
    assert outcome(claims.ahead(["A"], [low], others, also="perplexity"), also) == CONFIRMED
    worst = max(fmean(v) for v in CLEAR["A"].values())
    assert {row["to_published"]["target"] for row in page.rows(replace(evidence, name="scgdm-figure2"), "A")} == {worst}
    found = Run("A", "x", 0, "log_loss", curve(0.5, 2.0, 0.9)).reach(1.0)
    assert found is not None
    assert found.round == 20


def test_settings_of_a_sweep() -> None:
    assert outcome(claims.best("A", "x"), made(CLEAR)) == CONFIRMED
    assert outcome(claims.best("A", "y"), made(CLEAR)) == REFUTED
    assert "not significant" in claims.best("A", "y")(made(NEAR)).figures
    assert outcome(claims.best("A", "x"), made(NEAR)) == UNDECIDED, "it leads, but within the spread"
    assert outcome(claims.good("A", "y", 0.11), made(CLEAR)) == CONFIRMED
    assert outcome(claims.good("A", "y", 0.05), made(CLEAR)) == REFUTED
    assert outcome(claims.good("A", "y", 0.05), made(NEAR)) == CONFIRMED
    assert outcome(claims.good("A", "y", 0.001), made(NEAR)) == UNDECIDED
    runs = [
        Run("A", method, seed, "r2", curve(0.0, value + seed / 1000, loss=loss + seed / 1000))
        for method, value, loss in (("small", 0.5, 1.0), ("large", 0.7, 2.0))
        for seed in range(3)
    ]
    assert outcome(claims.overfits("A", "small", "large"), Evidence("x", "standard", runs)) == CONFIRMED
    assert outcome(claims.overfits("A", "large", "small"), Evidence("x", "standard", runs)) == REFUTED


def test_throughout() -> None:
    def found(x: tuple[float, ...], y: tuple[float, ...], noise: float = 0.001) -> Evidence:
        runs = [
            Run("A", m, i, "ap", curve(*(v + d * noise * (1 if m == "x" else -1) for v in values)))
            for m, values in (("x", x), ("y", y))
            for i, d in enumerate((-1, 0, 1))
        ]
        return Evidence("x", "standard", runs)

    check = claims.leads_throughout(["A"], "x")
    beaten = found((0.1, 0.5, 0.6, 0.7), (0.2, 0.4, 0.65, 0.6))
    assert outcome(check, beaten) == REFUTED
    assert (
        "first at 2 of 3 evaluations, significantly behind another at 1" in check(beaten).figures
    )  # the start does not count
    assert outcome(check, found((0.1, 0.5, 0.6, 0.7), (0.2, 0.4, 0.65, 0.6), noise=0.1)) == UNDECIDED
    assert outcome(check, found((0.1, 0.5, 0.6, 0.7), (0.2, 0.4, 0.5, 0.6))) == CONFIRMED
    diverged = replace(beaten.runs[0], curve=beaten.runs[0].curve[:2])
    left = Evidence("x", "standard", [diverged, *beaten.runs[1:]])
    assert "first at 1 of 1 evaluations" in check(left).figures, "only rounds that all seeds have"


def test_overlapping_test_sets_widen_intervals() -> None:
    """By hand: differences 1, 2, 3 have deviation 1, and the factor of their mean's is √(1/3 + 1/3) instead of √(1/3)."""
    plain, wide = claims.gap([1, 2, 3], [0, 0, 0]), claims.gap([1, 2, 3], [0, 0, 0], overlap=1 / 3)
    assert plain.high - 2 == pytest.approx(4.302653 * math.sqrt(1 / 3), rel=1e-6)
    assert wide.high - 2 == pytest.approx(4.302653 * math.sqrt(1 / 3 + 1 / 3), rel=1e-6)
    assert wide.value == 2
    assert wide.low == pytest.approx(4 - wide.high)


def test_fits() -> None:
    def fits(scgdm: float) -> Evidence:
        rows = {"local-bsgd": {"after": [1.9, 2.0, 2.1]}, "local-scgdm": {"after": [scgdm + d for d in (0.1, 0, -0.1)]}}
        return Evidence("scgdm-figure1", "standard", numbers={"fits": rows})

    assert outcome(claims.fits_best("local-scgdm"), fits(1.0)) == CONFIRMED
    assert outcome(claims.fits_best("local-scgdm"), fits(1.95)) == UNDECIDED  # no significant difference
    assert outcome(claims.fits_best("local-scgdm"), fits(3.0)) == REFUTED
    assert outcome(claims.fits_best("local-moml"), fits(1.0)) == UNTESTED


def test_the_claims_on_noise() -> None:
    def noisy(loss_at_2: float) -> Evidence:
        table = {
            claims.noise_label(ratio, m): {
                method: [0.9 - lost + d for d in (-0.001, 0.0, 0.001)] for method in ("fcsg", "fcsg-m")
            }
            for ratio, m, lost in ((1.0, 100, 0.0), (1.0, 1, 0.02), (2.0, 100, 0.0), (2.0, 1, loss_at_2))
        }
        return made(table)

    check = claims.needs_larger_m((1.0, 2.0), (1, 100), ("fcsg", "fcsg-m"))
    assert outcome(check, noisy(0.1)) == CONFIRMED
    assert outcome(check, noisy(0.02)) == UNDECIDED
    assert outcome(check, noisy(0.0)) == REFUTED
    same = claims.alike([claims.noise_label(1.0, 100)], "fcsg", "fcsg-m", 0.01)
    assert outcome(same, noisy(0.1)) == CONFIRMED
    for second, expected in (
        ([0.89, 0.89, 0.89], CONFIRMED),
        ([0.80, 0.81, 0.80], REFUTED),
        ([0.7, 0.9, 0.99], UNDECIDED),
    ):
        pair = made({"A": {"x": [0.9, 0.9, 0.9], "y": second}})
        assert outcome(claims.alike(["A"], "x", "y", 0.02), pair) == expected
    smooth, rough = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], [0.5, 0.6, 0.7, 0.704, 0.70, 0.704]  # a slope does not oscillate
    runs = [
        Run("A", method, seed, "acc", curve(*(v + seed / 1e4 * i % 2 for i, v in enumerate(values))))
        for method, values in (("fcsg-m", smooth), ("fcsg", rough))
        for seed in range(3)
    ]
    assert outcome(claims.steadier(["A"], "fcsg-m", "fcsg"), Evidence("x", "standard", runs)) == CONFIRMED
    assert outcome(claims.steadier(["A"], "fcsg", "fcsg-m"), Evidence("x", "standard", runs)) == REFUTED


def test_rates() -> None:
    numbers = {
        "rates": {"fcsg": {"rounds": [3.1, 2.9, 3.3], "examples": [6.9, 6.7, 7.1], "theory": {"rounds": 3, "examples": 6}}},
        "speedup": {"fcsg": [-0.95, -1.0, -0.9]},
        "bias": {"toy": -1.02},
        "bounds": {"fcsg": 0.2, "fafed": 1.2},
    }  # fmt: skip
    evidence = Evidence("complexity", "standard", numbers=numbers)
    assert outcome(claims.rate("fcsg", "rounds"), evidence) == UNDECIDED, "above the theory, which is in the interval"
    below = Evidence(
        "complexity", "standard", numbers={"rates": {"fcsg": {"rounds": [2.9, 2.8, 3.1], "theory": {"rounds": 3}}}}
    )
    assert outcome(claims.rate("fcsg", "rounds"), below) == UNDECIDED, "below the theory, which is in the interval"
    numbers["rates"]["fcsg"] |= {"bytes": [2.8, 2.6, 2.9], "theory": {"rounds": 3, "examples": 6, "bytes": 3}}
    assert outcome(claims.rate("fcsg", "bytes"), evidence) == CONFIRMED
    slow = Evidence(
        "complexity", "standard", numbers={"speedup": {"fcsg": [-0.95, -1.0, -0.9], "fafed": [-0.9, -1.0, -0.8]}}
    )
    assert outcome(claims.speeds_up, slow) == UNDECIDED
    wide = {"rates": {"fcsg": {"rounds": [8.0, 2.0, 14.0], "theory": {"rounds": 3}}}, "speedup": {}, "fafed": []}
    assert outcome(claims.rate("fcsg", "rounds"), Evidence("complexity", "standard", numbers=wide)) == UNDECIDED
    for check in (claims.speeds_up, claims.converges):
        assert outcome(check, Evidence("complexity", "standard", numbers=wide)) == UNTESTED
    faster = Evidence("complexity", "standard", numbers={"speedup": {"fcsg": [-1.2, -1.3, -1.1]}})
    assert outcome(claims.speeds_up, faster) == CONFIRMED
    assert outcome(claims.rate("fcsg", "examples"), evidence) == REFUTED
    assert outcome(claims.rate("fafed", "examples"), evidence) == UNTESTED
    assert outcome(claims.speeds_up, evidence) == CONFIRMED
    assert outcome(claims.bias_falls, evidence) == CONFIRMED
    assert outcome(claims.under_bounds, evidence) == REFUTED


# --- Costs of a target ---


def test_the_start_reaches_nothing() -> None:
    """A model that is good before it is trained has cost nothing, which says nothing about a method."""
    found = Run("A", "x", 0, "ap", curve(0.9, 0.8, 0.95)).reach(0.85)
    assert found is not None
    assert found.round == 20
    assert Run("A", "x", 0, "ap", curve(0.9, 0.8)).reach(0.85) is None


def test_chosen_settings_are_shown_once_also_schedules() -> None:
    schedule = {"scale": 2.0, "power": 1 / 3}
    runs = [Run("MNIST", "x", s, "ap", curve(0.1, 0.5), {"algorithm.eta": schedule, "algorithm.a": a}) for s, a in enumerate((0.1, 0.9, 0.1))]  # fmt: skip
    evidence = Evidence("fcsg-table2", "standard", runs)
    (row,) = page.rows(evidence, "MNIST")
    assert page.cells(row, evidence, "MNIST")[-1] == "eta (scale 2, power 0.333), a 0.1 or 0.9"


def test_a_choice_at_the_end_of_its_list_is_marked() -> None:
    found = results.held(Path(__file__).parents[2] / "papers" / "records")["fmgda-table2"]
    assert lookup.outdated(found) == []
    row = next(r for r in page.rows(found, "CIFAR-10") if r["method"] == "fmgda")
    assert row["chosen"]["algorithm.c_hat"] == ["3.0 (largest)"]
    late = replace(found, meta={**found.meta, "folders": {}})
    assert next(iter(page.rows(late, "CIFAR-10")[-1]["chosen"].values())) == ["3.0"], (
        "of other settings nothing is said"
    )


def test_records_of_some_cases_replace_only_those(tmp_path: Path) -> None:
    whole = Evidence("fcsg-table2", "standard", [Run(d, "x", 0, "ap", curve(0.1, 0.5)) for d in ("MNIST", "CIFAR-10")], meta={"seconds": {"MNIST": 1.0, "CIFAR-10": 2.0}, "folders": {"MNIST": "a", "CIFAR-10": "b"}})  # fmt: skip
    part = Evidence("fcsg-table2", "standard", [Run("CIFAR-10", "x", 0, "ap", curve(0.1, 0.9))], meta={"seconds": {"CIFAR-10": 3.0}, "folders": {"CIFAR-10": "c"}})  # fmt: skip
    (tmp_path / "papers" / "fcsg-table2").mkdir(parents=True)
    whole.write(tmp_path / "papers" / "fcsg-table2" / "records.jsonl")
    (tmp_path / "new" / "fcsg-table2-standard").mkdir(parents=True)
    part.write(tmp_path / "new" / "fcsg-table2-standard" / "records.jsonl")
    results.collect(tmp_path / "new", tmp_path / "papers", tmp_path / "figures")
    joined = Evidence.read(tmp_path / "papers" / "fcsg-table2" / "records.jsonl")
    assert [(r.data, r.final) for r in joined.runs] == [("MNIST", 0.5), ("CIFAR-10", 0.9)]
    assert joined.meta == {"seconds": {"MNIST": 1.0, "CIFAR-10": 3.0}, "folders": {"MNIST": "a", "CIFAR-10": "c"}}
    with pytest.raises(NestfedError, match="has no case 'MNISTT'; it has MNIST, CIFAR-10"):
        reproduce("fcsg-table2", "quick", 0, tmp_path, only=["MNISTT"])


def test_costs_to_reach_a_target_by_hand() -> None:
    runs = [Run("A", "x", s, "ap", c) for s, c in enumerate((curve(0.1, 0.5, 0.9), curve(0.1, 0.7, 0.6), curve(0.1, 0.2, 0.3)))]  # fmt: skip
    found = reached(runs, 0.6)
    assert (found["reached"], found["seeds"]) == (2, 3)
    assert found["round"]["mean"] == 15.0  # rounds 20 and 10
    assert found["round"]["sd"] == pytest.approx(math.sqrt(50))
    assert found["examples"]["mean"] == 1500.0
    assert found["bytes"]["mean"] == 75.0
    assert page.cost(found, "round") == "15 ± 7.1 (2 of 3)"
    assert page.cost(reached(runs, 0.95), "round") == "–"


def test_records_survive_being_written(tmp_path: Path) -> None:
    evidence = made(CLEAR, numbers={"figures": []}, meta={"seeds": 3})
    evidence.write(tmp_path / "r.jsonl")
    assert Evidence.read(tmp_path / "r.jsonl") == evidence
    (tmp_path / "r.jsonl").write_text("nonsense")
    with pytest.raises(NestfedError, match="not the record"):
        Evidence.read(tmp_path / "r.jsonl")


# --- From end to end ---

TINY = Reproduction(
    "tiny",
    "Average precision on digits",
    {"quick": Budget(2, 2, {"run.rounds": 2, "run.q": 1, "evaluation.every": 1, "partition.clients": 2}),
     "standard": Budget(2, 2, {"run.rounds": 2, "run.q": 1, "evaluation.every": 1, "partition.clients": 2}, departs="It is tiny.")},
    claims=[Claim("FedAvg ends at least at 0.1", claims.reaches("digits", {"fedavg": 0.1}))],
    cases=[Case("digits", "average-precision", published={"fedavg": 0.1}, higher=0.9999)],
    needs=("digits",),
    also=("auroc",),
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    table = {"tiny": TINY, "fmgda-figure1": papers.REPRODUCTIONS["fmgda-figure1"]}
    monkeypatch.setattr(papers, "REPRODUCTIONS", table)
    monkeypatch.setattr(results, "REPRODUCTIONS", table)
    monkeypatch.setattr(Case, "build", _only_fedavg)
    return "tiny"


_build = Case.build


def _only_fedavg(case: Case, budget: Budget) -> Any:
    experiment = _build(case, budget)
    experiment.source["methods"] = {"fedavg": experiment.methods["fedavg"]}  # type: ignore[index]
    return experiment


def test_a_small_one_from_end_to_end(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    evidence, place = reproduce(tiny, "standard", 0, tmp_path, workers=1, tell=said.append)
    assert place == tmp_path / "tiny-standard"
    (folder,) = (tmp_path / "runs").iterdir()
    finals = [json.loads((folder / "fedavg" / f"seed-{s}" / "finished.json").read_text())["ap"] for s in (0, 1)]
    (row,) = page.rows(evidence, "digits")
    assert row["mean"] == pytest.approx(fmean(finals))
    assert row["difference"] == pytest.approx(fmean(finals) - 0.1)
    assert (row["seeds"], row["trials"], row["rounds"], row["published"]) == (2, 2, 2, 0.1)
    assert row["to_published"]["round"]["mean"] == 1, "the first evaluation after the start"
    assert row["to_higher"]["reached"] == 0
    assert [v.outcome for _, v in page.verdicts(evidence)] == [CONFIRMED]
    written = (place / "report.html").read_text(encoding="utf-8")
    for word in ("digits", "fedavg", f"{row['mean']:.4f}", "confirmed", "It is tiny."):
        assert word in written
    assert (place / "digits.png").stat().st_size > 5000
    assert len(page.header(evidence, "digits")) == len(page.cells(row, evidence, "digits"))

    # Again with more seeds: what is finished is not run again.
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("record.jsonl")}
    more, _ = reproduce(tiny, "standard", 3, tmp_path, workers=1)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert more.runs[:2] == evidence.runs
    assert len(more.runs) == 3

    # The page of results, from the records alone.
    shelf = tmp_path / "papers"
    shelf.mkdir()
    assert results.write(tmp_path, shelf, tmp_path / "page" / "results.md") == ["tiny"]
    table = json.loads((shelf / "results.json").read_text())
    assert table["tiny"]["digits"]["fedavg"]["mean"] == pytest.approx(fmean(more.finals("digits", "fedavg")), abs=1e-6)
    assert {"mean", "sd", "seeds", "published"} <= set(table["tiny"]["digits"]["fedavg"])
    text = (tmp_path / "page" / "results.md").read_text()
    assert "**confirmed**" in text
    assert "Not run yet: `nestfed reproduce fmgda-figure1`" in text
    assert results.write(tmp_path / "nowhere", shelf, tmp_path / "page" / "results.md") == ["tiny"], "rebuilt from them"
    assert (tmp_path / "page" / "results.md").read_text() == text
    assert "![tiny](figures/tiny-curves.png)" in text
    assert (tmp_path / "page" / "figures" / "tiny-curves.png").stat().st_size > 5000

    # Records of other settings than those at hand say so.
    assert "Settings have changed since" not in text
    assert lookup.outdated(more) == []
    with monkeypatch.context() as later:
        wider = replace(TINY.budgets["standard"], trials=3)
        later.setitem(papers.REPRODUCTIONS, "tiny", replace(TINY, budgets={"standard": wider}))  # type: ignore[arg-type]
        assert lookup.outdated(more) == ["digits"]
        assert "**Settings have changed since: digits.**" in results.markdown({"tiny": more})


def test_the_page_of_results_is_that_of_the_records() -> None:
    root = Path(__file__).parents[2]
    found = results.held(root / "papers" / "records")
    assert (root / "papers" / "results.md").read_text(encoding="utf-8") == results.markdown(found), "nestfed results"
    known = json.loads((root / "papers" / "records" / "results.json").read_text(encoding="utf-8"))
    assert known == json.loads(json.dumps(results.table(found)))


def test_the_saddle(tmp_path: Path) -> None:
    evidence, place = reproduce("fmgda-figure1", "quick", 0, tmp_path)
    assert evidence.number("saddle") == pytest.approx([0.0, 0.0], abs=1e-9)
    assert evidence.number("value") - evidence.number("optimum") == pytest.approx(0.25)
    assert [v.outcome for _, v in page.verdicts(evidence)] == [CONFIRMED, CONFIRMED]
    assert (place / "surface.png").stat().st_size > 20_000
    assert "data:image/png" in (place / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_name_at_quick(name: str, tmp_path: Path) -> None:
    import os

    found = lookup.find(name)
    if found.needs and not os.environ.get("NESTFED_DATA"):
        pytest.skip(f"{name} needs {', '.join(found.needs)}: set NESTFED_DATA.")
    evidence, place = reproduce(name, "quick", 0, tmp_path)
    written = (place / "report.html").read_text(encoding="utf-8")
    assert all(text in written for claim in found.claims for text in [html.escape(claim.text)])
    chosen = found.chosen(found.at("quick"))
    assert evidence.data() == [case.data for case in chosen]
    for case in chosen:
        methods = case.build(found.at("quick")).methods
        assert evidence.methods(case.data) == list(methods)
        assert all(method in written for method in methods)
        for method in methods:
            assert len(evidence.of(case.data, method)) == found.at("quick").seeds
    for _, verdict in page.verdicts(evidence):
        assert verdict.figures
    again, _ = reproduce(name, "quick", 0, tmp_path)
    assert again.runs == evidence.runs
