"""The estimators: scikit-learn's own checks, the same numbers from every form of data, closed forms, files."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from nestfed import FederatedAUC, FederatedAUPRC, FederatedClassifier, FederatedMAML, FederatedMinimax
from nestfed.algorithms import FMGDA, CODAPlus
from nestfed.core import DivergedError, NestfedError
from nestfed.data.clients import Balanced
from nestfed.data.encoding import numbered
from nestfed.data.partition import even
from nestfed.engine.options import Exchange
from nestfed.problems import Simplex
from nestfed.problems.auroc import AUROC
from nestfed.study import advice
from nestfed.study.labelled import calibrate
from nestfed.study.meta import TaskClients
from nestfed.study.sites import common_encoding, gather

pd = pytest.importorskip("pandas")

QUICK: dict[str, Any] = {"rounds": 8, "q": 5}
BINARY = (FederatedAUC, FederatedAUPRC, FederatedClassifier)


def cancer(sites: int = 4) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Breast cancer over sites (malignant is 1), and a test set."""
    x, y = load_breast_cancer(return_X_y=True)
    y = 1 - y
    rows = np.random.default_rng(0).permutation(len(x))
    train, test = rows[:400], rows[400:]
    return [(x[train[part]], y[train[part]]) for part in even(400, sites, 0)], (x[test], y[test])


# No exceptions: every check of scikit-learn applies to the three labelled estimators and is passed. The meta-learner and
# the minimax estimator are fitted on lists of tasks and with a function of the user's: `fit(X, y)` says nothing to them.
@parametrize_with_checks([kind(rounds=4, q=5) for kind in BINARY])
def test_scikit_learn(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("kind", [*BINARY, FederatedMAML, FederatedMinimax])
def test_the_constructor_only_stores(kind: Any) -> None:
    made = kind(rounds=3, lr=0.2)
    again = clone(made)
    assert again is not made
    assert again.get_params() == made.get_params()
    assert vars(made) == made.get_params()
    with pytest.raises(NotFittedError):
        made.save("nowhere")


# ---------------------------------------------------------------------------------------------------------
# Data in every form


def test_every_form_of_data_gives_the_same_model() -> None:
    sites, (x, _) = cancer()
    few = {"rounds": 2, "q": 3}
    reference = FederatedAUC(**few).fit(sites)
    scores = reference.decision_function(x)
    names = [f"f{i}" for i in range(x.shape[1])]
    frames = [(pd.DataFrame(a, columns=names), pd.Series(b)) for a, b in sites]
    tensors = [(torch.tensor(a), torch.tensor(b)) for a, b in sites]
    sets = [torch.utils.data.TensorDataset(*pair) for pair in tensors]
    rows = [torch.utils.data.Subset(one, range(len(one))) for one in sets]
    whole = np.concatenate([a for a, _ in sites]), np.concatenate([b for _, b in sites])
    groups = np.repeat(["a", "b", "c", "d"], [len(b) for _, b in sites])
    with_site = pd.DataFrame(whole[0], columns=names).assign(site=groups)
    labelled = {k: f.assign(died=d.to_numpy()) for k, (f, d) in zip("abcd", frames)}
    forms: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
        "dict": (dict(zip("abcd", sites)), None, {}, {}),
        "frames": (frames, None, {}, {}),
        "tensors": (tensors, None, {}, {}),
        "TensorDataset": (sets, None, {}, {}),
        "Dataset": (rows, None, {}, {}),
        "groups": (*whole, {"groups": groups}, {}),
        "site_column": (with_site, whole[1], {}, {"site_column": "site"}),
        "target": (labelled, None, {}, {"target": "died"}),
    }
    for form, (a, b, options, settings) in forms.items():
        found = FederatedAUC(**few, **settings).fit(a, b, **options)
        at = pd.DataFrame(x, columns=names) if form in ("frames", "site_column", "target") else x
        # Sums in another order differ in the last digit of float32.
        assert_allclose(found.decision_function(at), scores, rtol=2e-3, atol=2e-3, err_msg=form)
        assert found.sites_.counts.tolist() == reference.sites_.counts.tolist()


class _HuggingFaceStyle:
    """The two methods of `datasets.Dataset` that an estimator needs."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns_ = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns_)

    def __len__(self) -> int:
        return len(self.columns_["label"])

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns_[name]


def test_hugging_face_style_partitions() -> None:
    x, y = load_digits(return_X_y=True)
    parts = [
        _HuggingFaceStyle({"image": list(x[i::3].reshape(-1, 1, 8, 8)), "label": y[i::3].tolist()}) for i in range(3)
    ]
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    found = FederatedClassifier(network, lr=lambda t: 0.3, rounds=20, q=10).fit(parts)
    assert found.score(x.reshape(-1, 1, 8, 8), y) > 0.9
    table = _HuggingFaceStyle({"a": [0.0, 1.0, 0.2, 0.9] * 9, "b": ["u", "v", "u", "v"] * 9, "label": [0, 1, 0, 1] * 9})
    assert FederatedAUC(**QUICK).fit([table, table]).score(table) == 1.0


def test_text_columns_and_gaps_are_handled() -> None:
    rng = np.random.default_rng(0)

    def frame(n: int, ward: list[str]) -> Any:
        y = rng.integers(0, 2, n)
        age = y + rng.normal(size=n)
        age[rng.random(n) < 0.3] = np.nan
        return pd.DataFrame({"age": age, "ward": rng.choice(ward, n), "died": y})

    a, b = frame(80, ["x", "y"]), frame(80, ["y", "z"])
    found = FederatedAUC(**QUICK, target="died").fit({"a": a, "b": b})
    assert found.scale_.features == ("age", "ward=x", "ward=y", "ward=z")
    assert found.shape_ == (5,)  # and "age is missing"
    new = pd.DataFrame({"age": [3.0, np.nan, -3.0], "ward": ["never met", "x", "y"]})
    chance = found.predict_proba(new)[:, 1]
    assert chance[0] > chance[1] > chance[2]
    with pytest.raises(NestfedError, match="no column 'age'"):
        found.predict(new[["ward"]])


def test_the_scale_is_that_of_all_rows_together() -> None:
    rng = np.random.default_rng(0)
    sites = [(rng.normal(i, 1 + i, (20 + i, 3)), rng.integers(0, 2, 20 + i)) for i in range(3)]
    sites[0][0][3, 1] = np.nan
    scale = common_encoding(gather(sites))
    whole = np.concatenate([x for x, _ in sites])
    ready = scale(whole, numbered(3)).numpy()
    mean, deviation = np.nanmean(whole, 0), np.nanstd(whole, 0)
    wanted = np.nan_to_num((whole - mean) / deviation)
    assert_allclose(ready[:, :3], np.clip(wanted, -5, 5), atol=1e-5)
    assert_array_equal(ready[:, 3], np.isnan(whole[:, 1]))
    images = [(rng.integers(0, 255, (8, 2, 4, 4)).astype(np.uint8), np.arange(8) % 2) for _ in range(2)]
    both = np.concatenate([x for x, _ in images])
    scaled = common_encoding(gather(images))(both, ()).numpy()
    assert_allclose(scaled.mean((0, 2, 3)), 0, atol=1e-5)
    assert_allclose(scaled.std((0, 2, 3)), 1, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# The mathematics


def test_balanced_batches_have_the_same_objective() -> None:
    """In expectation the balanced, weighted gradient is that of AUROC with plain batches, divided by 4p(1 − p)."""
    rng = np.random.default_rng(0)
    sizes, positives = (40, 25, 30, 12), (4, 10, 0, 12)
    y = np.concatenate([np.r_[np.ones(k), np.zeros(n - k)] for n, k in zip(sizes, positives)]).astype(np.int64)
    x = torch.tensor(rng.normal(size=(len(y), 3)), dtype=torch.float64)
    labels = torch.tensor(y)
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    model = nn.Sequential(nn.Linear(3, 1, dtype=torch.float64), nn.Flatten(0))
    p = float(np.mean([k / n for n, k in zip(sizes, positives)]))
    plain, balanced = AUROC(model, p=p), AUROC(model)
    theta, w = plain.x0 + 0.1, torch.tensor([0.3], dtype=torch.float64)
    exact = [plain.grads(theta, w, (x[part], labels[part])) for part in parts]
    wanted = [torch.stack([g[i] for g in exact]).mean(0) / (4 * p * (1 - p)) for i in (0, 1)]
    clients = Balanced((x, labels), parts, batch=8, seed=1)
    batches = [torch.cat(leaves) for leaves in zip(*clients.draw(range(len(parts)), range(1500)))]
    drawn = torch.func.vmap(lambda *batch: balanced.grads(theta, w, batch))(*batches)
    for i, all_ in enumerate(drawn):
        error = all_.std(0) / len(all_) ** 0.5
        assert bool(((all_.mean(0) - wanted[i]).abs() < 4 * error + 1e-9).all())


def test_a_batch_of_one_class_is_drawn_from_that_class() -> None:
    x, y = torch.arange(10.0)[:, None], torch.tensor([0] * 5 + [1] * 5)
    clients = Balanced((x, y), [np.arange(5), np.arange(5, 10)], batch=6)
    assert set(clients.sample(0, 0)[1].tolist()) == {0}
    assert set(clients.sample(1, 0)[1].tolist()) == {1}


def test_calibration_is_logistic_regression_from_sums() -> None:
    rng = np.random.default_rng(0)
    s = rng.normal(2, 3, 4000)
    y = (rng.random(4000) < 1 / (1 + np.exp(-(0.7 * s - 2)))).astype(int)
    a, b = calibrate([(s[:100], y[:100]), (s[100:], y[100:])])
    known = LogisticRegression(C=1e9, tol=1e-10).fit(s[:, None], y)
    assert_allclose((a, b), (known.coef_[0, 0], known.intercept_[0]), rtol=0.01)  # Platt's targets are not 0 and 1
    one = calibrate([(s, y)])
    assert_allclose((a, b), one, rtol=1e-9)
    separable = calibrate([(np.r_[np.zeros(50), np.ones(50)], np.r_[np.zeros(50), np.ones(50)])])
    assert np.isfinite(separable).all()
    assert separable[0] > 0


@pytest.mark.parametrize("kind", BINARY)
def test_one_site_does_as_well_as_scikit_learn(kind: Any) -> None:
    sites, (x, y) = cancer(1)
    found = kind(rounds=30, q=10).fit(*sites[0])
    known = LogisticRegression(max_iter=5000).fit(*sites[0])
    assert roc_auc_score(y, found.decision_function(x)) > roc_auc_score(y, known.decision_function(x)) - 0.01
    expected = {
        FederatedAUC: roc_auc_score(y, found.decision_function(x)),
        FederatedAUPRC: average_precision_score(y, found.decision_function(x)),
        FederatedClassifier: float((found.predict(x) == y).mean()),
    }[kind]
    assert_allclose(found.score(x, y), expected)
    assert found.evaluate(x, y)[kind.metric] == found.score(x, y)
    chance = found.predict_proba(x)
    assert_allclose(chance.sum(1), 1)
    assert abs(chance[:, 1].mean() - y.mean()) < 0.06  # calibrated


def test_probabilities_are_calibrated_on_rare_positives() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 4))
    y = (rng.random(4000) < 1 / (1 + np.exp(-(2 * x[:, 0] - 4)))).astype(int)
    found = FederatedAUC(rounds=20, q=10).fit(x[:2000], y[:2000], groups=np.arange(2000) % 4)
    chance = found.predict_proba(x[2000:])[:, 1]
    assert abs(chance.mean() - y[2000:].mean()) < 0.02
    top = chance > np.quantile(chance, 0.9)
    assert abs(chance[top].mean() - y[2000:][top].mean()) < 0.1


# ---------------------------------------------------------------------------------------------------------
# Settings


def test_auto_says_what_it_chose_and_why() -> None:
    sites, _ = cancer()
    found = FederatedAUC(**QUICK).fit(sites)
    assert found.choice_.name == found.method_.name
    assert len(found.choice_.why) > 20
    few = FederatedAUC(**QUICK, exchange=Exchange(count=2)).fit(sites)
    assert few.choice_.name == "local-sgda"
    for asked in ("coda-plus", CODAPlus, partial(CODAPlus, gamma=100.0)):
        made = FederatedAUC(method=asked, **QUICK).fit(sites)
        assert isinstance(made.method_, CODAPlus)
        assert made.method_.eta == made.lr_
    assert made.method_.gamma == 100.0
    own = FMGDA(c_hat=0.1, c=0.05)
    assert FederatedAUC(method=own, **QUICK).fit(sites).method_ is own
    with pytest.raises(NestfedError, match="both set the step size"):
        FederatedAUC(method=own, lr=0.1, **QUICK).fit(sites)
    with pytest.raises(NestfedError, match="method must be 'auto'"):
        FederatedAUC(method=3, **QUICK).fit(sites)
    with pytest.raises(NestfedError, match="did you mean fmgda"):
        FederatedAUC(method="fmgd").fit(sites)
    with pytest.raises(NestfedError, match="works on problems of kind Minimax"):
        FederatedAUPRC(method="fmgda", **QUICK).fit(sites)


def test_the_users_module_is_trained_and_left_alone() -> None:
    sites, (x, y) = cancer()
    for outputs in (1, 2):
        module = nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, outputs))
        before = {k: v.clone() for k, v in module.state_dict().items()}
        found = FederatedAUC(module, **QUICK).fit(sites)
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        assert type(found.module_) is nn.Sequential
        assert found.score(x, y) > 0.95
    made = FederatedAUC(lambda shape: nn.Linear(shape[0], 1), **QUICK).fit(sites)
    assert made.module_.in_features == 30
    with pytest.raises(NestfedError, match=r"does not accept a batch of these data, of shape \(2, 30\)"):
        FederatedAUC(nn.Linear(7, 1)).fit(sites)
    with pytest.raises(NestfedError, match="one score per example"):
        FederatedAUC(nn.Linear(30, 5)).fit(sites)
    with pytest.raises(NestfedError, match="running statistics"):
        FederatedAUC(nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))).fit(sites)


def test_grid_search_over_sites() -> None:
    sites, _ = cancer()
    x, y = np.concatenate([a for a, _ in sites]), np.concatenate([b for _, b in sites])
    site = np.repeat(np.arange(4.0), [len(b) for _, b in sites])
    with_site = np.column_stack([x, site])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = GridSearchCV(FederatedAUC(site_column=30, rounds=4, q=5), {"lr": [1e-6, 0.1]}, cv=2).fit(with_site, y)
    assert search.best_params_ == {"lr": 0.1}
    assert len(search.best_estimator_.sites_.names) == 4
    found = cross_val_score(FederatedAUC(site_column=30, **QUICK), with_site, y, groups=site, cv=GroupKFold(2))
    assert (found > 0.95).all()


def test_metadata_routing_of_groups() -> None:
    import sklearn

    sites, _ = cancer()
    x, y = np.concatenate([a for a, _ in sites]), np.concatenate([b for _, b in sites])
    site = np.repeat(np.arange(4), [len(b) for _, b in sites])
    with sklearn.config_context(enable_metadata_routing=True):
        made = FederatedAUC(rounds=4, q=5).set_fit_request(groups=True)
        folds = StratifiedKFold(2, shuffle=True, random_state=0)
        search = GridSearchCV(made, {"hidden": [(), (4,)]}, cv=folds).fit(x, y, groups=site)
    assert len(search.best_estimator_.sites_.names) == 4


def test_evaluation_during_training_changes_nothing() -> None:
    sites, test = cancer()
    with_, without = (FederatedAUC(**QUICK).fit(sites, eval_set=e) for e in (test, None))
    assert_array_equal(with_.decision_function(test[0]), without.decision_function(test[0]))
    curve = [r["auroc"] for r in with_.history_ if "auroc" in r]
    assert_allclose(curve[-1], with_.score(*test))
    assert len(curve) == 9  # every round of eight, and before


def test_the_theorems_schedule_on_request() -> None:
    sites, _ = cancer()
    found = FederatedAUPRC(lr="theory", **QUICK).fit(sites)
    plain = FederatedAUPRC(**QUICK).fit(sites)
    assert 0 < found.method_.alpha < plain.method_.alpha
    with pytest.raises(NestfedError, match="'theory'"):
        FederatedAUPRC(lr="thoery").fit(sites)


# ---------------------------------------------------------------------------------------------------------
# Mistakes


def test_mistakes_are_one_sentence() -> None:
    sites, (x, y) = cancer()
    made = FederatedAUC(**QUICK)
    for wrong, words in (
        (lambda: made.fit(x), "requires y to be passed"),
        (lambda: made.fit([]), "requires y|no sites|0"),
        (lambda: made.fit({}), "no sites"),
        (lambda: made.fit([(x, y[:-1])]), "169 examples and 168 labels"),
        (lambda: made.fit([(x, y), (x[:, :5], y)]), "no column 'x5'"),
        (lambda: made.fit([(x, y)], groups=y), r"fit\(X, y, groups"),
        (lambda: made.fit(x, np.zeros(len(x))), "all of one class"),
        (lambda: made.fit(x, np.arange(len(x)) % 3), "use FederatedClassifier"),
        (lambda: made.fit([pd.DataFrame({"a": [1, 2]})]), "set target="),
        (lambda: made.fit(["a.csv"]), "could not convert|expected a pair|requires y"),
        (lambda: FederatedAUC(batch_size=2).fit(sites), "batch_size must be at least 4"),
        (lambda: FederatedAUC(rounds=-1).fit(sites), "rounds must be"),
        (lambda: made.fit(sites).score(x, y + 5), "was not in the training data"),
        (lambda: FederatedAUC(standardize=False, **QUICK).fit([(np.where(x > 20, np.nan, x), y)]), "contains NaN"),
        (lambda: FederatedMAML().fit([(x, y)]), "expected a list of tasks"),
        (lambda: FederatedMinimax().fit(sites), "needs objective"),
    ):
        with pytest.raises((NestfedError, ValueError), match=words) as caught:
            wrong()
        assert "\n" not in str(caught.value).strip()


# ---------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("kind", BINARY)
def test_a_warm_up_by_fedavg_on_cross_entropy(kind: Any, tmp_path: Path) -> None:
    """It is the same as training the warm-up first and handing its module over."""
    sites, (x, y) = cancer()
    module = nn.Linear(30, 1)
    first = FederatedClassifier(module, method="fedavg", rounds=3, q=5).fit(sites)
    whole = kind(module, rounds=7, warm_up=3, q=5).fit(sites, eval_set=(x, y))
    assert [r["round"] for r in whole.history_] == list(range(8))
    assert (
        "The first 3 of its 7 rounds trained cross-entropy by FedAvg" in whole.report(tmp_path / "a.html").read_text()
    )
    second = kind(first.module_, rounds=4, q=5, method=whole.method_).fit(sites)
    assert_array_equal(whole.decision_function(x), second.decision_function(x))
    whole.save(tmp_path / "m")
    assert kind.load(tmp_path / "m", nn.Linear(30, 1)).warm_up == 3
    assert clone(whole).warm_up == 3
    with pytest.raises(NestfedError, match="warm_up=7 leaves none of the 7 rounds"):
        kind(rounds=7, warm_up=7).fit(sites)
    with pytest.raises(NestfedError, match="warm_up must be a whole number of at least 0, not -1"):
        kind(warm_up=-1).fit(sites)


@pytest.mark.parametrize("kind", BINARY)
def test_saved_and_loaded(kind: Any, tmp_path: Path) -> None:
    sites, (x, _) = cancer()
    text = [(a, np.where(b == 1, "malignant", "benign")) for a, b in sites]
    found = kind(hidden=(4,), **QUICK).fit(text)
    found.save(tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["SHA256SUMS", "estimator.json", "model.safetensors"]
    again = kind.load(tmp_path / "m")
    assert_array_equal(again.predict_proba(x), found.predict_proba(x))
    assert set(again.predict(x)) == {"malignant", "benign"}
    assert again.get_params() | {"hidden": (4,)} == found.get_params()
    with pytest.raises(NestfedError, match=f"contains a {kind.__name__}, not a FederatedMAML"):
        FederatedMAML.load(tmp_path / "m")
    with pytest.raises(NestfedError, match=r"estimator\.json is missing"):
        kind.load(tmp_path)
    for name in ("model.safetensors", "estimator.json"):
        whole = (tmp_path / "m" / name).read_bytes()
        (tmp_path / "m" / name).write_bytes(whole[:100])
        with pytest.raises(NestfedError, match=f"damaged: {name} is missing or changed"):
            kind.load(tmp_path / "m")
        (tmp_path / "m" / name).write_bytes(whole)


def test_a_module_of_ones_own_is_given_again(tmp_path: Path) -> None:
    sites, (x, _) = cancer()
    found = FederatedAUC(nn.Linear(30, 1), **QUICK).fit(sites)
    found.save(tmp_path)
    with pytest.raises(NestfedError, match="module=YourModule"):
        FederatedAUC.load(tmp_path)
    with pytest.raises(NestfedError, match="does not fit"):
        FederatedAUC.load(tmp_path, module=nn.Linear(29, 1))
    assert_array_equal(FederatedAUC.load(tmp_path, module=nn.Linear(30, 1)).predict(x), found.predict(x))


def test_the_report_is_one_page(tmp_path: Path) -> None:
    sites, test = cancer()
    found = FederatedAUC(**QUICK).fit(dict(zip(("north", "south", "east", "west"), sites)), eval_set=test)
    text = found.report(tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<title>FederatedAUC: 4 sites</title>" in text
    assert "south" in text
    assert found.choice_.name in text
    assert f"{found.score(*test):.4f}" in text


# ---------------------------------------------------------------------------------------------------------
# Tasks and adversaries


def lines(count: int, seed: int, points: int = 20) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tasks y = s·(x + 1): an initialisation cannot know the slope s, one step on a few points can."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        x = rng.normal(size=(points, 1))
        made.append((x, rng.normal() * (x[:, 0] + 1)))
    return made


def test_maml_learns_to_adapt(tmp_path: Path) -> None:
    sites = [lines(6, seed) for seed in range(3)]
    unseen = lines(30, 99)
    found = FederatedMAML(hidden=(), inner_lr=0.4, rounds=10, q=5, lr=lambda t: 0.05).fit(sites, eval_set=unseen)
    assert found.score(unseen) > 0.5 > found.score(unseen, steps=0) + 0.3
    assert_allclose(found.history_[-1]["r2"], found.score(unseen))
    x, y = unseen[0]
    adapted = found.adapt(x[:10], y[:10]).predict(x[10:])
    assert adapted.shape == (10,)
    found.save(tmp_path)
    again = FederatedMAML.load(tmp_path)
    assert_allclose(again.adapt(x[:10], y[:10]).predict(x[10:]), adapted, rtol=1e-6)


def test_a_small_tasks_support_and_query_share_no_row() -> None:
    rows = torch.arange(40)
    tasks = [[(rows[:12], rows[:12]), (rows[12:], rows[12:])]]
    for t in range(20):
        (query, _), (support, _), which = TaskClients(tasks, 2, 10, 10).sample(0, t)
        assert sorted(which.tolist()) == [0, 1]
        assert query.shape == support.shape == (2, 10)
        for one, other in zip(query.tolist(), support.tolist()):
            assert not set(one) & set(other)


def test_maml_never_meets_a_task_twice_in_a_step() -> None:
    draws = np.random.default_rng(0)
    tasks = [(draws.normal(size=(20, 2)), draws.normal(size=20)) for _ in range(4)]
    met: list[int] = []
    ask = TaskClients.sample

    def watched(self: TaskClients, n: int, t: int) -> Any:
        found = ask(self, n, t)
        met.append(len(set(found[2].tolist())) - len(found[2]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskClients, "sample", watched)
        FederatedMAML(tasks_per_step=3, rounds=2, q=2, shots=5, queries=5).fit([tasks[:2], tasks[2:]])
    assert met
    assert set(met) == {0}
    with pytest.raises(NestfedError, match="one example"):
        FederatedMAML(rounds=1).fit([[(np.ones((1, 2)), np.ones(1))]])


@pytest.mark.parametrize("algorithm", ["fmgda", "coda", "coda-plus", "codasca", "local-sgda", "momentum-local-sgda"])
def test_a_schedule_as_step_size(algorithm: str) -> None:
    """A constant schedule is the number; FMGDA's number is one of its two, beside the η of the paper's steps ĉη and cη."""
    sites, (x, _) = cancer()
    number: dict[str, Any] = {"lr": 0.05}
    if algorithm == "fmgda":
        number = {"method": FMGDA(eta=0.05, c=1.0, c_hat=1.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the theorem would want
        ends = [
            FederatedAUC(**{"method": algorithm, **given}, rounds=2, q=5).fit(sites).predict_proba(x)
            for given in (number, {"lr": lambda t: 0.05})
        ]
    assert_allclose(*ends, rtol=1e-6)


def test_maml_on_classification_tasks() -> None:
    """Two classes whose order flips from task to task: nothing can be said before adaptation."""
    rng = np.random.default_rng(0)

    def task() -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(30, 2))
        return x, ((x[:, 0] > 0) ^ (rng.random() < 0.5)).astype(int)

    sites, unseen = [[task() for _ in range(6)] for _ in range(3)], [task() for _ in range(20)]
    found = FederatedMAML(task="classification", hidden=(), inner_lr=5.0, rounds=6, q=5, lr=lambda t: 0.05).fit(sites)
    assert found.score(unseen) > 0.85
    assert abs(found.score(unseen, steps=0) - 0.5) < 0.2


def test_agnostic_training_helps_the_worst_site(tmp_path: Path) -> None:
    """Three sites, one of them different: the mean forgets it, the maximum over mixtures of sites does not."""
    rng = np.random.default_rng(0)
    sites = []
    for slope in (1.0, 1.0, -1.0):
        x = rng.normal(size=(200, 1))
        sites.append((x, (slope * x[:, 0]).astype(np.float32)))

    def weighted(model: Any, w: torch.Tensor, batch: Any) -> torch.Tensor:
        x, y, site = batch
        return (len(w) * w[site] * (model(x) - y) ** 2).mean()

    made = FederatedMinimax(
        objective=weighted,
        w0=[1 / 3] * 3,
        dual_domain=Simplex(),
        method="local-sgda",
        lr=lambda t: 0.03,
        rounds=150,
        q=2,
    )
    found = made.fit(sites)
    errors = [float(((found.predict(x) - y) ** 2).mean()) for x, y in sites]
    # Best mean: slope 1/3, errors 0.44, 0.44, 1.78. Best worst case: slope 0, errors 1, 1, 1, and half of w on the odd one.
    assert max(errors) < 1.25
    assert 0.35 < found.w_[2] < 0.65
    assert_allclose(found.w_.sum(), 1, atol=1e-5)
    found.save(tmp_path)
    again = FederatedMinimax.load(tmp_path)
    assert_allclose(again.predict(sites[0][0]), found.predict(sites[0][0]), rtol=1e-6)


# --- a step size that is too large ---


@pytest.mark.parametrize("times", [30.0, 100.0])  # NaN after some rounds; finite, but a loss of 1e32
def test_a_step_size_of_our_own_that_diverges_is_made_smaller(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "STEP", {**advice.STEP, "auroc": times})
    sites, test = cancer(2)
    found = FederatedAUC(**QUICK).fit(sites)
    assert found.score(*test) > 0.95
    (found_hint,) = [hint for hint in found.hints_ if "diverged" in hint]
    assert f"so {found.lr_:.3g} was used" in found_hint


@pytest.mark.parametrize("times", [1.0, 1000.0])
def test_a_step_size_of_the_users_is_left_alone(times: float) -> None:
    sites, _ = cancer(2)
    with pytest.raises(DivergedError, match="step size is too large"), pytest.warns(advice.TheoryWarning):
        FederatedAUC(lr=times, **QUICK).fit(sites)
