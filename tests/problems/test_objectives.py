"""An objective owns its options: what each accepts, whose a foreign one is, and what all entrances train."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nestfed import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.core import NestfedError
from nestfed.data.clients import Balanced, Examples, Pairs
from nestfed.experiment.build import assemble
from nestfed.experiment.spec import from_tables, read
from nestfed.models import Mlp
from nestfed.problems import OBJECTIVES


@pytest.mark.parametrize("name", OBJECTIVES)
def test_options_are_documented_frozen_and_checked(name: str) -> None:
    options = OBJECTIVES[name]()
    assert options.name == name
    assert options.__doc__.startswith(f"Options of {name}: ")
    for field in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, field.default)
        if isinstance(field.default, bool) or not isinstance(field.default, int | float):
            continue
        with pytest.raises(NestfedError, match=rf"^{name}: {field.name} must be"):
            OBJECTIVES[name](**{field.name: -1})
    experiment = from_tables({"problem": {"name": name}})
    assert experiment.problem == options
    assert experiment.resolved()["problem"] == {"name": name, **dataclasses.asdict(options)}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ({"name": "classify", "margin": 0.1}, "problem.margin belongs to auprc, paired-ap, multi-label-ap; classify has balanced, batch, clip, initial_batch"),
        ({"name": "auroc", "outer": 3}, "problem.outer belongs to auprc, partial-auroc, invariant; auroc has balanced, batch"),
        ({"name": "classify", "bacth": 3}, "There is no setting 'problem.bacth'; did you mean problem.batch?"),
        ({"name": "clasify"}, "There is no problem 'clasify'; did you mean classify?"),
        ({"batch": 3}, "There is no problem ''; choose one of agnostic, auprc, auroc"),
        ({"name": "auprc", "margin": -1}, "[problem] auprc: margin must be a finite number above 0, not -1."),
        ({"name": "auprc", "margin": "wide"}, "problem.margin must be a number, not 'wide'."),
    ],
)  # fmt: skip
def test_wrong_options_are_rejected_by_name(problem: dict[str, object], words: str) -> None:
    with pytest.raises(NestfedError) as error:
        from_tables({"problem": problem})
    assert words in str(error.value)


def test_another_objective_leaves_the_options_of_the_file_behind_but_not_its_own() -> None:
    demo = read("average-precision")
    fedavg = demo.for_method("fedavg").problem
    assert (fedavg.name, fedavg.batch) == ("classify", 20)  # type: ignore[attr-defined]
    assert demo.with_overrides({"problem.name": "auroc"}).problem == OBJECTIVES["auroc"]()
    with pytest.raises(NestfedError, match="margin belongs to auprc"):
        demo.with_overrides({"problem.name": "auroc", "problem.margin": 0.1})
    tables = {**demo.source, "methods": {"a": {"problem": {"name": "classify", "outer": 3}}}}
    with pytest.raises(NestfedError, match="outer belongs to auprc"):
        from_tables(tables).for_method("a")
    with pytest.raises(NestfedError, match="batch belongs to"):
        demo.with_overrides({"problem.batch": 3})


def test_an_experiment_without_a_problem_says_so() -> None:
    with pytest.raises(NestfedError, match=r"names no problem: set problem\.name to one of agnostic, auprc, auroc"):
        assemble(from_tables({"algorithm": {"name": "fedavg", "eta": 0.1}}))


@pytest.mark.parametrize(
    ("estimator", "name"), [(FederatedAUC, "auroc"), (FederatedAUPRC, "auprc"), (FederatedClassifier, "classify")]
)
def test_estimators_and_experiments_train_the_same_by_default(estimator: type, name: str) -> None:
    assert estimator()._objective() == OBJECTIVES[name]()


def test_auroc_takes_the_prevalence_from_its_clients() -> None:
    """A part of the clients with p given weighs its batch as all of them together do."""
    x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 0, 0, 1, 1] * 2)
    sites = {"a": (x[:4], y[:4]), "b": (x[4:], y[4:])}
    whole = Balanced.of(sites, batch=4, seed=0)
    rates = [1 / 4, 5 / 8]
    one = Balanced((x[:4], y[:4]), [np.arange(4)], batch=4, seed=0, p=sum(rates) / 2)
    for a, b in zip(whole.sample(0, 3), one.sample(0, 3)):
        assert torch.equal(a, b)
    problem, clients = OBJECTIVES["auroc"](batch=4).build(Mlp(2, ()), whole.arrays, whole.parts, seed=0)
    assert problem.weighted
    assert torch.equal(clients.sample(1, 0)[2], whole.sample(1, 0)[2])
    plain, examples = OBJECTIVES["auroc"](balanced=False).build(Mlp(2, ()), whole.arrays, whole.parts)
    assert plain.p == pytest.approx(sum(rates) / 2)
    assert type(examples) is Examples


def test_a_large_first_batch_is_balanced_too() -> None:
    options = OBJECTIVES["auroc"](batch=4, initial_batch=10)
    x, y = torch.zeros(20, 2), torch.arange(20) % 2
    _, clients = options.build(Mlp(2, ()), (x, y), [np.arange(20)], seed=0)
    for t, size in ((0, 10), (1, 4)):
        _, labels, weight = clients.sample(0, t)
        assert (len(labels), int(labels.sum())) == (size, size // 2)
        assert torch.equal(weight, torch.ones(size)), "half of the data are positives"


@pytest.mark.parametrize("kind", [Examples, Pairs, Balanced])
def test_clients_of_sites_by_name(kind: type) -> None:
    x, y = np.arange(14.0, dtype=np.float32).reshape(7, 2), np.array([0, 1, 0, 1, 1, 0, 0])
    clients = kind.of({"a": (x[:3], y[:3]), "b": (x[3:], y[3:])}, seed=1)
    together = kind((torch.tensor(x), torch.tensor(y)), [np.arange(3), np.arange(3, 7)], names=["a", "b"], seed=1)
    assert clients.label(1) == "b"
    for n in (0, 1):
        leaves = [torch.utils._pytree.tree_leaves(c.sample(n, 2)) for c in (clients, together)]
        assert all(torch.equal(a, b) for a, b in zip(*leaves))
    with pytest.raises(NestfedError, match="arrays of site b have different lengths"):
        kind.of({"a": (x, y), "b": (x, y[:3])})
    with pytest.raises(NestfedError, match="Site b has 1 arrays"):
        kind.of({"a": (x, y), "b": (x,)})
