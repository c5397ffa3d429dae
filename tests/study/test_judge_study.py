"""Judging the models of a study: through messages as over Flower, and on the rows of tables at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nestfed import metrics
from nestfed.deploy.flower.messages import questions_of, questions_packed
from nestfed.deploy.wire import pack, unpack
from nestfed.experiment.site import own_table
from nestfed.experiment.spec import from_tables
from nestfed.queries import TEST, TRAINING, VALIDATION, Arrays, Query, Question, Rows, answered, at_hand
from nestfed.study.at_hand import AtHand
from nestfed.study.conduct import asking
from nestfed.study.counts import Candidate
from nestfed.study.importance import importance, inputs_by_column
from nestfed.study.judge import judge
from nestfed.study.recalibrate import agreement, calibrate, recalibrate
from tests.study.scored_sites import NAMES, A, B, both_parts


def through_messages(sites: list[dict[str, Rows]], min_cell: int) -> Any:
    """Return how to ask sites by messages of bytes, with the gate's checks of the answers."""

    def ask(query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        found = {}
        for n, parts in enumerate(sites):
            words, arrays = questions_packed([Question(query, part, arguments)])
            sent = unpack(pack({"questions": words}, arrays))
            (one,) = questions_of(sent.words["questions"], sent.arrays())
            reply = answered([one], parts, min_cell)
            if one.key in reply:
                back = unpack(pack({}, reply[one.key]), most=query.most_bytes(**arguments) + 10_000)
                arrived = back.arrays(query.slots(**arguments))
                assert query.invalid(arrived, len(parts[part]), **arguments) == ""
                found[n] = arrived
        return found

    return ask


@pytest.mark.parametrize("min_cell", [0, 10])
def test_messages_do_not_change_a_number(min_cell: int) -> None:
    found = both_parts(150)
    results = []
    for ask in (at_hand(found, min_cell), through_messages(found, min_cell)):
        common = calibrate(ask, A)
        own = recalibrate(ask, A, common, NAMES)
        models = {"ours": Candidate(A, own.calibration), "fedavg": Candidate(B, calibrate(ask, B))}
        table = judge(ask, models, subgroups=["sex"], sites=NAMES)
        ranked = importance(ask, models["ours"], {"first": [0], "second": [1]}, repeats=2)
        results.append((repr(own), table.to_json(), repr(agreement(ask, A, common, NAMES)), ranked))
    assert results[0] == results[1]


@pytest.mark.long
def test_the_models_of_a_study_are_judged_on_its_rows(tmp_path: Any) -> None:
    rng, tables = np.random.default_rng(0), {}
    study = from_tables(
        {
            "data": {"target": "died", "classes": ["no", "yes"], "validation": 0.25, "test": 0.25},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "auroc"},
            "study": {},
            "methods": {"auroc": {"algorithm": {"name": "fmgda", "eta": 0.1, "c_hat": 1.0, "c": 1.0}}},
        }
    )
    for name in NAMES:
        age, sex = rng.normal(60, 10, 300), rng.choice(["f", "m"], 300)
        risk = 0.08 * (age - 60) + 0.8 * (sex == "m")
        died = np.where(rng.random(300) < 1 / (1 + np.exp(-risk)), "yes", "no")
        path = tmp_path / f"{name}.csv"
        pd.DataFrame({"age": age, "sex": sex, "died": died}).to_csv(path, index=False)
        tables[name] = own_table(study, str(path))[0]
    hand = AtHand(study, tables, directory=tmp_path / "runs", progress=False)
    ask, encoding = asking(hand), hand.agreement.encoding
    x = np.array([1.0 if name == "age" else 0.0 for name in encoding.inputs] + [0.0])
    table = judge(ask, {"age": x, "alone": Candidate(None)}, metrics=["auroc"], sites=hand.names)
    rows = [site.by_part(True)[TEST] for site in hand.sites]
    y = np.concatenate([r.y for r in rows])
    alone = np.concatenate([site.network.scores(site.own_model, site.last.test.x) for site in hand.sites])
    place = encoding.inputs.index("age")
    truth = {"age": np.concatenate([r.x[:, place] for r in rows]), "alone": alone}
    for name, scores in truth.items():
        assert table.entry(name, "auroc").value.value == pytest.approx(metrics.auroc(scores, y), abs=2e-3)
    ranked = importance(ask, Candidate(x), inputs_by_column(encoding), repeats=2)
    assert [one.column for one in ranked] == ["age", "sex"]
    assert ranked[0].loss.low > 0 == ranked[1].loss.value
    trial = asking(hand, final=False)
    calibration = calibrate(trial, x, part=VALIDATION)
    assert 0.5 < calibration.a < 1.2  # 0.8 for one deviation of age
