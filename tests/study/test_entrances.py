"""The same tables give the same model inputs through every entrance, and the same mistake is rejected in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from nestfed import FederatedAUC
from nestfed.core import NestfedError
from nestfed.experiment import prepare as preparing
from nestfed.experiment import site as deployed
from nestfed.experiment.prepare import DataSpec, PartitionSpec, prepare
from nestfed.experiment.spec import from_tables
from nestfed.queries import answered
from nestfed.queries.agreement import Agreement, Rules, agree
from nestfed.study.at_hand import AtHand
from nestfed.study.predict import predict
from nestfed.study.programs import Encode
from nestfed.study.start import from_files, train
from nestfed.study.tables import read_sites

pd = pytest.importorskip("pandas")

FEATURES = ("age", "smoker", "ward=x", "ward=y", "ward=z", "a=b=u", "a=b=v=w")


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    """Numbers, gaps, booleans, an "=" in names; site b has another order and never met ward z."""
    rng = np.random.default_rng(0)
    paths = {}
    for name, rows, wards in (("a", 30, ["x", "y", "z"]), ("b", 25, ["x", "y"])):
        frame = pd.DataFrame(
            {
                "age": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(60, 9, rows)),
                "smoker": np.where(rng.random(rows) < 0.2 * (name == "a"), None, rng.random(rows) < 0.5),
                "ward": np.where(rng.random(rows) < 0.2, None, rng.choice(wards, rows)),
                "a=b": rng.choice(["u", "v=w"], rows),
                "died": rng.integers(0, 2, rows),
            }
        )
        paths[name] = tmp_path / f"{name}.csv"
        (frame if name == "a" else frame[frame.columns[::-1]]).to_csv(paths[name], index=False)
    return paths


class Watched(FederatedAUC):
    """Remembers the inputs that it trained on last."""

    inputs: ClassVar[Tensor]

    def _run(self, problem: Any, clients: Any, *rest: Any) -> Any:
        type(self).inputs = clients.arrays[0]
        return super()._run(problem, clients, *rest)


QUICK = {"rounds": 1, "q": 1}


def of_estimator(tables: dict[str, Path]) -> tuple[Any, Tensor]:
    sites = {name: pd.read_csv(path) for name, path in tables.items()}
    return Watched(target="died", **QUICK).fit(sites), Watched.inputs


def of_experiment(tables: dict[str, Path], folder: Path) -> Tensor:
    whole = pd.concat([pd.read_csv(path).assign(site=name) for name, path in tables.items()])
    whole.to_csv(folder / "whole.csv", index=False)
    data = DataSpec(file=str(folder / "whole.csv"), target="died", columns=("site",))
    made = prepare(data, PartitionSpec(kind="column", column="site"), 0)
    assert list(made.names) == ["a", "b"]
    return torch.cat([made.x[part] for part in made.parts])


def of_train(tables: dict[str, Path], folder: Path) -> Tensor:
    started = from_files(list(tables.values()), "died", "auroc", **QUICK)
    return AtHand(started.study, started.tables, directory=folder).joined(final=True).x


def of_deployment(tables: dict[str, Path]) -> tuple[Agreement, Tensor]:
    settings: dict[str, Any] = {
        "data": {"target": "died"},
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": "auroc"},
        "algorithm": {"name": "fmgda"},
        "run": {"rounds": 1},
    }
    experiment = from_tables(settings)
    places = {name: deployed.Place(n, str(path)) for n, (name, path) in enumerate(tables.items())}
    names, rows = list(places), [deployed.raw_rows(experiment, place) for place in places.values()]

    def reject(n: int, sentence: str) -> None:
        raise AssertionError(sentence)

    agreed = agree(
        lambda questions: {n: answered(questions, parts, 0) for n, parts in enumerate(rows)},
        Rules(len(rows), least=len(rows)), names.__getitem__, reject,
    )  # fmt: skip
    clients = [deployed.at_site(experiment, place, agreed).assembly.clients for place in places.values()]
    return agreed, torch.cat([c.arrays[0][c.parts[n]] for n, c in enumerate(clients)])


@pytest.fixture
def every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set nothing aside, so that every entrance trains on the same rows."""
    monkeypatch.setattr(preparing, "_aside", lambda data, whole, strata, rows, *rest, **more: (rows, rows[:0]))
    monkeypatch.setattr(preparing, "_reject_empty", lambda *args, **more: None)


@pytest.mark.usefixtures("every_row")
@pytest.mark.filterwarnings("ignore")
def test_the_same_tables_give_the_same_inputs(tables: dict[str, Path], tmp_path: Path) -> None:
    fitted, inputs = of_estimator(tables)
    assert fitted.scale_.features == FEATURES
    assert fitted.scale_.inputs[len(FEATURES) :] == ("age is missing", "smoker is missing")
    assert inputs.shape == (55, 9)
    assert torch.equal(of_experiment(tables, tmp_path), inputs)
    agreed, of_sites = of_deployment(tables)
    assert torch.equal(of_sites, inputs)
    learned = {k: v for k, v in fitted.scale_.to_json().items() if k != "table"}  # how its own data frames were read
    assert agreed.encoding.to_json() == learned
    assert agreed.shape == fitted.shape_
    assert torch.equal(of_train(tables, tmp_path), inputs)
    # what a saved model makes of one site's file, and the exported program of its aligned features
    again = Watched.load(fitted.save(tmp_path / "model"))
    assert torch.equal(again._input(pd.read_csv(tables["b"])), inputs[30:])
    read = read_sites(list(tables.values()), "died").sites[1]
    encoded = Encode(fitted.scale_)(torch.from_numpy(fitted.scale_.align(read.x, read.schema)).float())
    assert torch.equal(encoded.float(), inputs[30:])
    assert torch.equal(fitted.to_model().inputs(pd.read_csv(tables["b"])).float(), inputs[30:])


@pytest.mark.parametrize("lacking", ["ward", "age"])
@pytest.mark.parametrize("entrance", ["estimator", "train", "deployment", "unscaled", "evaluate"])
@pytest.mark.filterwarnings("ignore")
def test_a_column_that_a_site_lacks_is_an_error(
    entrance: str, lacking: str, tables: dict[str, Path], tmp_path: Path
) -> None:
    whole = {name: pd.read_csv(path) for name, path in tables.items()}
    short = {**whole, "b": whole["b"].drop(columns=lacking)}
    files = {**tables, "b": tmp_path / "short" / "b.csv"}
    files["b"].parent.mkdir()
    short["b"].to_csv(files["b"], index=False)
    words = f"Site b has no column '{lacking}', which site a has"
    if entrance == "estimator":
        with pytest.raises(ValueError, match=words):
            of_estimator(files)
    elif entrance == "unscaled":
        complete = {name: frame.drop(columns="smoker").fillna({"age": 0}) for name, frame in short.items()}
        with pytest.raises(NestfedError, match=words):
            FederatedAUC(target="died", standardize=False, **QUICK).fit(complete)
    elif entrance == "train":
        with pytest.raises(NestfedError, match=words):
            of_train(files, tmp_path)
    elif entrance == "deployment":
        with pytest.raises(NestfedError, match=words):
            of_deployment(files)
    else:
        with pytest.raises(NestfedError, match=f"Site b has no column '{lacking}'"):
            of_estimator(tables)[0].evaluate(short)


@pytest.mark.filterwarnings("ignore")
def test_a_column_that_a_new_table_lacks_is_an_error(tables: dict[str, Path], tmp_path: Path) -> None:
    train(from_files(list(tables.values()), "died", "auroc", **QUICK), tmp_path / "out")
    for lacking in ("ward", "age"):
        pd.read_csv(tables["b"]).drop(columns=lacking).to_csv(tmp_path / "short.csv", index=False)
        with pytest.raises(NestfedError, match=rf"short\.csv does not fit the model: it has no column '{lacking}'"):
            predict(tmp_path / "out", tmp_path / "short.csv", tmp_path / "p.csv")


@pytest.mark.filterwarnings("ignore")
def test_unscaled_columns_are_aligned_too() -> None:
    """Sites with as many categories, but others, must not be put on top of each other."""
    frames = [
        pd.DataFrame({"ward": list("xy" * 10), "died": [0, 1] * 10}),
        pd.DataFrame({"ward": list("yz" * 10), "died": [0, 1] * 10}),
    ]
    Watched(target="died", standardize=False, **QUICK).fit(frames)
    assert Watched.inputs[[0, 1, 20, 21]].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.filterwarnings("ignore")
def test_other_names_are_not_taken_for_the_trained_ones() -> None:
    rng = np.random.default_rng(0)
    frames = [pd.DataFrame({"age": rng.normal(size=20), "died": [0, 1] * 10}) for _ in range(2)]
    found = FederatedAUC(target="died", **QUICK).fit(frames)
    assert found.predict(np.zeros((2, 1))).shape == (2,)  # an array's columns are taken in order
    with pytest.raises(ValueError, match="has no column 'age'"):
        found.predict(pd.DataFrame({"height": [1.0]}))
