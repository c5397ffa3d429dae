"""From a data set to what the clients hold: nothing leaks, nothing is lost, and the counts are the papers'."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from nestfed.algorithms import build
from nestfed.core import NestfedError
from nestfed.data.encoding import Column
from nestfed.data.sources import Dataset, Split, load
from nestfed.experiment import prepare as module
from nestfed.experiment.build import assemble, evaluate
from nestfed.experiment.prepare import DataSpec, PartitionSpec, Prepared, prepare
from nestfed.experiment.run import run
from nestfed.experiment.spec import from_tables, hyper_parameters, packaged, read
from nestfed.metrics import accuracy, judge, judge_pooled, log_loss
from nestfed.problems.auprc import AUPRC
from nestfed.problems.auroc import AUROC
from nestfed.problems.classify import Classify

HERE = bool(os.environ.get("NESTFED_DATA"))
real = [pytest.mark.data, pytest.mark.skipif(not HERE, reason="set NESTFED_DATA to a folder with the data sets")]


def toy(n: int = 200, *, classes: int = 2, test: int = 0, patients: int = 0, seed: int = 0) -> Split:
    """A table whose first feature is the row's number, so that every row can be recognised after scaling."""
    rng = np.random.default_rng(seed)

    def part(first: int, count: int) -> Dataset:
        x = np.c_[np.arange(first, first + count), rng.normal(size=(count, 2))].astype(np.float32)
        columns = {"site": np.array(["a", "b", "c", "d"])[rng.choice(4, count, p=[0.5, 0.3, 0.15, 0.05])]}
        if patients:
            columns["patient"] = rng.integers(patients, size=count).astype(np.str_)
        y = rng.permutation(np.arange(count) % classes)
        return Dataset(x, y, columns, numbers("row", "u", "v"), tuple(map(str, range(classes))))

    return Split(part(0, n), part(n, test))


def numbers(*names: str) -> tuple[Column, ...]:
    return tuple(map(Column, names))


def unscaled(tables: object, *, mark_gaps: bool) -> object:
    """Stand in for `encode`: leave numbers as they are."""
    return lambda x, schema: torch.from_numpy(np.array(x))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> object:
    """Make a split what `load` finds under any name, unscaled."""

    def give(split: Split) -> Split:
        monkeypatch.setattr(module, "load", lambda name, folder=None: split)
        monkeypatch.setattr(module, "encode", unscaled)
        return split

    return give


def rows(x: Tensor) -> set[int]:
    return {int(v) for v in x[:, 0]}


def sides(p: Prepared) -> list[set[int]]:
    found = [rows(p.x), rows(p.test.x), rows(p.validation.x) if p.validation else set()]
    assert sum(map(len, found)) == len(p.x) + len(p.test.x) + (len(p.validation.x) if p.validation else 0)
    return found


TOY = DataSpec(name="toy", validation=0.2)
FOUR = PartitionSpec(clients=4)


# -------------------------------------------------------------------------------------------- who sees what


@pytest.mark.parametrize("held_out", ["central", "clients"])
@pytest.mark.parametrize("patients", [0, 60])
def test_no_row_stands_on_two_sides_and_none_is_lost(given: object, held_out: str, patients: int) -> None:
    given(toy(patients=patients))  # type: ignore[operator]
    p = prepare(replace(TOY, held_out=held_out), FOUR, 3)
    train, test, validation = sides(p)
    assert not train & test
    assert not train & validation
    assert not test & validation
    assert train | test | validation == set(range(200))
    spread = 20 if patients else 5  # whole patients, by the hash of their id
    assert len(test) == pytest.approx(50, abs=spread)
    assert len(validation) == pytest.approx(30, abs=spread)
    assert sorted(np.concatenate(p.parts).tolist()) == list(range(len(p.x)))


@pytest.mark.parametrize("held_out", ["central", "clients"])
@pytest.mark.parametrize("group", ["", "patient", "site"])
def test_no_patient_stands_on_two_sides(given: object, held_out: str, group: str) -> None:
    split = given(toy(400, patients=60))  # type: ignore[operator]
    p = prepare(replace(TOY, group=group, held_out=held_out), FOUR, 1)
    column = split.train.columns[group or "patient"]
    a, b, c = ({column[r] for r in side} for side in sides(p))
    assert a
    assert b
    assert c
    assert not a & b | a & c | b & c


def test_the_origins_test_set_is_kept_as_it_is(given: object) -> None:
    given(toy(test=40))  # type: ignore[operator]
    p = prepare(TOY, FOUR, 0)
    assert rows(p.test.x) == set(range(200, 240))
    assert rows(p.x) | rows(p.validation.x) == set(range(200))  # type: ignore[union-attr]
    # The clients' own examples take its place if they hold the test set.
    p = prepare(replace(TOY, held_out="clients"), FOUR, 0)
    assert max(rows(p.test.x)) < 200


def test_the_test_set_does_not_depend_on_the_seed(given: object) -> None:
    """Otherwise tuning, which has a seed of its own, would train on what is tested with another seed."""
    given(toy())  # type: ignore[operator]
    first, second = (prepare(TOY, FOUR, seed) for seed in (0, 1000))
    assert rows(first.test.x) == rows(second.test.x)
    assert rows(first.validation.x) != rows(second.validation.x)  # type: ignore[union-attr]
    other = prepare(DataSpec(name="toy", validation=0.2, split=1), FOUR, 0)
    assert rows(other.test.x) != rows(first.test.x)


@pytest.mark.parametrize(("side", "kept"), [("positive", 1), ("negative", 0)])
def test_removal_is_from_training_only_and_exact(given: object, side: str, kept: int) -> None:
    given(toy(1000, test=100))  # type: ignore[operator]
    p = prepare(DataSpec(name="toy", remove=side, fraction=0.8, validation=0.2), FOUR, 0)
    assert p.validation is not None
    for held, size in ((p.test, 100), (p.validation, 200)):  # untouched, so half and half as at the origin
        assert Counter(held.y.tolist()) == {0: size // 2, 1: size // 2}
    assert Counter(p.y.tolist()) == {kept: 80, 1 - kept: 400}
    assert p.positive_rate == pytest.approx(1 / 6 if side == "positive" else 5 / 6, abs=0.002)
    # The validation set is chosen before anything is removed: the same rows with and without.
    whole = prepare(DataSpec(name="toy", validation=0.2), FOUR, 0)
    assert rows(whole.validation.x) == rows(p.validation.x)  # type: ignore[union-attr]
    assert rows(p.x) < rows(whole.x)


def test_halves_of_the_classes(given: object) -> None:
    given(toy(classes=5))  # type: ignore[operator]
    p = prepare(DataSpec(name="toy", binary=True), FOUR, 0)
    assert p.classes == 2
    assert p.summary.classes == ("negative", "positive")
    assert Counter(p.y.tolist())[1] == 90  # classes 2, 3 and 4 of 150 rows
    p = prepare(DataSpec(name="toy", positive=(0,)), FOUR, 0)
    assert Counter(p.y.tolist())[1] == 30
    assert prepare(DataSpec(name="toy"), FOUR, 0).classes == 5


def test_p_is_the_mean_of_the_clients_own_shares(given: object) -> None:
    given(toy(400))  # type: ignore[operator]
    p = prepare(DataSpec(name="toy", remove="positive"), PartitionSpec(kind="column", column="site"), 0)
    shares = [float((p.y[part] == 1).double().mean()) for part in p.parts]
    assert len(set(map(len, p.parts))) > 1
    assert p.positive_rate == pytest.approx(np.mean(shares))
    assert [sum(r) for r in p.summary.counts.tolist()] == [len(part) for part in p.parts]


def test_every_client_sets_aside_some_of_its_own(given: object) -> None:
    split = given(toy(400))  # type: ignore[operator]
    spec = PartitionSpec(kind="column", column="site")
    p = prepare(replace(TOY, held_out="clients"), spec, 0)
    assert p.validation is not None
    sites = split.train.columns["site"]
    for x, parts in ((p.x, p.parts), (p.test.x, p.test.parts), (p.validation.x, p.validation.parts)):
        for name, part in zip(p.names, parts):
            assert {sites[int(r)] for r in x[part, 0]} == {name}
        assert sum(map(len, parts)) == len(x)
    for n in range(4):  # a quarter of each, of both classes alike
        total = len(p.parts[n]) + len(p.test.parts[n]) + len(p.validation.parts[n])
        assert len(p.test.parts[n]) == pytest.approx(total / 4, abs=1.01)
        assert set(p.test.y[p.test.parts[n]].tolist()) == {0, 1}


def test_limit_and_pooled(given: object) -> None:
    given(toy())  # type: ignore[operator]
    p = prepare(DataSpec(name="toy", limit=20), PartitionSpec(kind="pooled"), 0)
    assert [len(part) for part in p.parts] == [20]
    assert p.names == ["all"]


@pytest.mark.parametrize(
    ("data", "parts", "words"),
    [
        (DataSpec(), FOUR, "a name or a file"),
        (DataSpec(name="toy", file="x.csv"), FOUR, "either a name or a file"),
        (DataSpec(file="x.csv"), FOUR, "data.target"),
        (DataSpec(name="toy", remove="both"), FOUR, "data.remove must be positive or negative"),
        (DataSpec(name="toy", remove="positive"), FOUR, "two classes"),
        (DataSpec(name="toy", positive=(7,)), FOUR, "class 7 does not exist"),
        (DataSpec(name="toy", group="doctor"), FOUR, "no column 'doctor'"),
        (DataSpec(name="toy"), PartitionSpec(kind="column"), "no column ''"),
        (DataSpec(name="toy"), PartitionSpec(kind="column", column="site", fallback="zone"), "no column 'zone'"),
        (DataSpec(name="toy"), PartitionSpec(kind="fair"), "partition.kind must be even, "),
        (DataSpec(name="toy", test=1.0), FOUR, "between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused(given: object, data: DataSpec, parts: PartitionSpec, words: str) -> None:
    given(toy(classes=3))  # type: ignore[operator]
    with pytest.raises(NestfedError, match=words) as error:
        prepare(data, parts, 0)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------- scaling


def test_scaling_is_fitted_on_training_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(change: float) -> Prepared:
        split = toy(100, test=20)
        x = split.test.x.copy()
        x[0] = change
        test = Dataset(x, split.test.y, split.test.columns, split.test.schema, split.test.classes)
        monkeypatch.setattr(module, "load", lambda name, folder=None: Split(split.train, test))
        return prepare(TOY, FOUR, 0)

    calm, wild = prepared(1.0), prepared(1e6)
    assert torch.equal(calm.x, wild.x)
    assert torch.equal(calm.test.x[1:], wild.test.x[1:])
    assert torch.equal(calm.validation.x, wild.validation.x)  # type: ignore[union-attr]
    assert float(calm.x.mean()) == pytest.approx(0, abs=1e-6)
    assert float(calm.x.var(0, correction=0).mean()) == pytest.approx(1, abs=1e-5)
    assert float(calm.validation.x.mean()) != pytest.approx(0, abs=1e-4)  # type: ignore[union-attr]


def test_images_of_floats_are_scaled_too() -> None:
    x = np.random.default_rng(0).normal(3, 2, size=(40, 1, 2, 2)).astype(np.float32)
    y = np.arange(40) % 2
    split = Split(Dataset(x, y, classes=("0", "1")), Dataset(x[:4], y[:4], classes=("0", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load", lambda name, folder=None: split)
        made = prepare(DataSpec(name="any"), FOUR, 0)
    assert made.x.shape == (40, 1, 2, 2)
    np.testing.assert_allclose(made.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(made.x.std(0, correction=0), 1, atol=1e-5)


def test_pixels_are_converted_at_once_or_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = (DataSpec(name="digits", validation=0.1), FOUR, 0)
    now = prepare(*spec)
    assert now.transform is None
    monkeypatch.setattr(module, "KEEP_AS_FLOATS", 0)
    later = prepare(*spec)
    assert later.x.dtype == torch.uint8
    assert torch.equal(later.ready(later.x), now.x)
    assert 0 <= float(now.x.min()) < float(now.x.max()) <= 1


# ------------------------------------------------------------------------------------------- own tables


def test_a_users_own_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["ward,person,age,score,outcome"]
    lines += [f"{'NS'[i % 2]},{i // 3},{40 + i % 50},{rng.normal():.3f},{'dead' if i % 5 == 0 else 'alive'}" for i in range(300)]  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = DataSpec(
        file=str(tmp_path / "t.csv"), target="outcome", columns=("ward", "person"), group="person", validation=0.2
    )
    p = prepare(data, PartitionSpec(kind="column", column="ward"), 0)
    assert p.names == ["N", "S"]
    assert p.summary.classes == ("alive", "dead")
    assert p.x.shape[1] == 2
    assert len(p.x) + len(p.test.x) + len(p.validation.x) == 300  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------- evaluation by clients


def test_pooled_metrics_are_those_of_all_rows_within_the_stated_error() -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(3000) < 0.1).astype(np.int64)
    s = rng.normal(size=3000) + y
    parts = np.split(rng.permutation(3000), [5, 20, 700])
    found = judge_pooled(s, y, parts)
    assert abs(found["auroc"] - roc_auc_score(y, s)) <= found["auroc_error"] < 1e-3
    assert abs(found["ap"] - average_precision_score(y, s)) <= found["ap_error"] < 2e-2
    odds = judge_pooled(s, y, parts, log_odds=True)
    assert {k: odds[k] for k in ("accuracy", "log_loss")} == pytest.approx(
        {"accuracy": accuracy(s, y), "log_loss": log_loss(s, y)}
    )
    with pytest.raises(NestfedError, match="No client"):
        judge_pooled(s, y, [np.arange(0)])
    logits, labels = rng.normal(size=(50, 3)), rng.integers(3, size=50)
    parts = [np.arange(7), np.arange(0), np.arange(7, 50)]
    found = judge_pooled(logits, labels, parts)
    assert {k: v for k, v in found.items() if not k.startswith("worst_")} == pytest.approx(judge(logits, labels))


def experiment(**data: object) -> object:
    return from_tables(
        {
            "data": {"name": "digits", "binary": True, "validation": 0.2, **data},
            "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.3, "minimum": 20},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "auroc", "batch": 20},
            "algorithm": {"name": "fmgda", "c_hat": 0.05, "c": 0.05},
            "run": {"rounds": 3, "q": 5},
        }
    )


def test_evaluation_by_clients(tmp_path: Path) -> None:
    chosen = experiment(held_out="clients")
    history = run(chosen, tmp_path / "r", progress=False)  # type: ignore[arg-type]
    end = history[-1]
    assert 0.6 < end["auroc"] <= 1
    assert end["auroc_error"] < 0.01
    assert end["ap_error"] < 0.05
    assert {"val_auroc", "val_ap"} <= set(end)
    # The same model on the same rows, all in one place.
    made = assemble(chosen)  # type: ignore[arg-type]
    p = prepare(chosen.data, chosen.partition, 0)  # type: ignore[attr-defined]
    model = made.problem.bind(made.problem.x0)
    with torch.no_grad():
        found, exact = evaluate(model, p, p.test), judge(model(p.test.x).numpy(), p.test.y.numpy())
    assert abs(found["auroc"] - exact["auroc"]) <= found["auroc_error"]
    assert abs(found["ap"] - exact["ap"]) <= found["ap_error"]
    # Who holds what stands beside the record.
    table = (tmp_path / "r" / "clients.txt").read_text()
    assert table.splitlines()[0].split() == ["client", "negative", "positive", "all"]
    assert len(table.splitlines()) == 7
    assert (tmp_path / "r" / "clients.png").stat().st_size > 5000


def test_who_holds_the_test_set_is_checked() -> None:
    with pytest.raises(NestfedError, match=r"data\.held_out must be central or clients, not 'everywhere'"):
        experiment(held_out="everywhere")


def test_more_classes_are_evaluated_by_clients_too() -> None:
    tables = {
        "data": {"name": "digits", "held_out": "clients"},
        "partition": {"kind": "k-classes", "clients": 5, "k": 4},
        "problem": {"name": "classify"},
        "algorithm": {"name": "fedavg", "eta": 0.1},
    }
    made = assemble(from_tables(tables))
    with torch.no_grad():
        found = made.evaluate(made.problem.bind(made.problem.x0))
    assert set(found) == {"accuracy", "log_loss", "worst_accuracy", "worst_log_loss"}
    assert found["log_loss"] == pytest.approx(math.log(10), abs=0.3)


# ----------------------------------------------------------------------------- the experiments in the package

KINDS = {"classify": Classify, "auroc": AUROC, "auprc": AUPRC}
LABELLED = [name for name in packaged() if read(name).problem.name in KINDS]


@pytest.mark.parametrize("name", LABELLED)
def test_packaged_comparisons_are_fair(name: str) -> None:
    """Every method has the same number of trials, on validation data, and every trial can be made."""
    experiment = read(name)
    trials = set()
    for method in experiment.methods:
        grid = experiment.grid(method)
        combinations = list(product(*grid.values()))
        trials.add(len(combinations))
        for values in combinations:
            trial = experiment.for_method(method).with_overrides(dict(zip(grid, values)))
            algorithm = build(trial.algorithm.name, **hyper_parameters(trial.algorithm))
            algorithm.ends_round(0, trial.run.q)  # refuses stages that do not fit
            assert issubclass(KINDS[trial.problem.name], algorithm.accepts)
            assert trial.data.validation > 0
            assert trial.evaluation.metric == experiment.evaluation.metric
    assert len(trials) == 1


def test_the_papers_tables_are_there() -> None:
    levels = [f"fafed-table2-{d}-{level}" for d in ("fashion", "mnist", "cifar10") for level in ("low", "moderate", "high")]  # fmt: skip
    others = ["fcsg-table2-mnist", "fcsg-table2-cifar10", "fmgda-table2-fashion", "fmgda-table2-cifar10"]
    assert {*levels, *others, "eicu", "heart-disease", "tiny-imagenet-auroc"} <= set(LABELLED)


# ---------------------------------------------------------------------------------------------- real data


@pytest.mark.parametrize(
    ("name", "side", "counts"),
    [("fashion-mnist", "negative", {0: 6000, 1: 30000}), ("cifar-10", "positive", {0: 25000, 1: 5000})],
)
class TestPapers:
    pytestmark = real

    @pytest.mark.long
    def test_the_papers_imbalance(self, name: str, side: str, counts: dict[int, int]) -> None:
        p = prepare(DataSpec(name=name, binary=True, remove=side, fraction=0.8), PartitionSpec(clients=16), 0)
        assert Counter(p.y.tolist()) == counts
        assert p.positive_rate == pytest.approx(5 / 6 if side == "negative" else 1 / 6, abs=1e-4)
        assert Counter(p.test.y.tolist()) == {0: 5000, 1: 5000}
        assert {len(part) for part in p.parts} <= {len(p.y) // 16, len(p.y) // 16 + 1}


class TestReal:
    pytestmark = real

    def test_fashion_over_16_clients_within_a_second(self) -> None:
        spec = (DataSpec(name="fashion-mnist", binary=True, remove="negative"), PartitionSpec(clients=16), 0)
        prepare(*spec)  # decodes, the first time
        times = []
        for _ in range(3):
            start = time.process_time()  # a busy machine must not fail a test
            p = prepare(*spec)
            times.append(time.process_time() - start)
        assert len(p.parts) == 16
        assert min(times) < 1

    def test_usual_pixels(self) -> None:
        p = prepare(DataSpec(name="fashion-mnist"), PartitionSpec(), 0)
        assert float(p.x.mean()) == pytest.approx(0, abs=1e-3)
        assert float(p.x.std()) == pytest.approx(1, abs=1e-3)

    def test_heart_disease(self) -> None:
        data = DataSpec(name="heart-disease", validation=0.25)
        p = prepare(data, PartitionSpec(kind="column", column="hospital"), 0)
        assert p.names == ["cleveland", "hungarian", "switzerland", "va"]
        assert len(p.x) + len(p.test.x) + len(p.validation.x) == 920  # type: ignore[union-attr]
        assert len(p.test.x) == 230
        assert p.summary.classes == ("no disease", "disease")
        assert bool(torch.isfinite(p.x).all() and torch.isfinite(p.test.x).all())
        known = load("heart-disease").train.x
        gaps = int(np.isnan(known).any(0).sum())
        assert p.x.shape[1] in (13 + gaps, 13 + gaps - 1)  # one "is missing" per feature with gaps in training

    @pytest.mark.parametrize("held_out", ["central", "clients"])
    def test_eicu(self, held_out: str) -> None:
        data = DataSpec(name="eicu", validation=0.25, held_out=held_out)
        parts = PartitionSpec(kind="column", column="hospital", smallest=10, fallback="region")
        p = prepare(data, parts, 0)
        assert bool(torch.isfinite(p.x).all() and torch.isfinite(p.test.x).all())
        assert len(p.x) + len(p.test.x) + len(p.validation.x) == 2492  # type: ignore[union-attr]
        assert any(name.startswith("small: ") for name in p.names)
        deaths = p.summary.counts[:, 1]
        assert (deaths == 0).any()
        # No single feature tells the outcome: what leaks would rank nearly perfectly.
        for k in range(p.x.shape[1]):
            assert 0.2 < roc_auc_score(p.y, p.x[:, k]) < 0.8

    def test_eicu_patients_stay_on_one_side(self) -> None:
        whole = load("eicu").train
        keys = {tuple(np.nan_to_num(r, nan=-9).tolist()): who for r, who in zip(whole.x, whole.columns["patient"])}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "encode", unscaled)
            p = prepare(DataSpec(name="eicu", validation=0.25), PartitionSpec(kind="pooled"), 0)
        assert p.validation is not None
        who = [
            {keys[tuple(np.nan_to_num(r, nan=-9).tolist())] for r in x.numpy()} for x in (p.x, p.test.x, p.validation.x)
        ]
        assert not who[0] & who[1] | who[0] & who[2] | who[1] & who[2]
