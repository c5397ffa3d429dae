"""What leaves a site, and what gets in before the first round: registration, questions, small cells, withdrawal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from flwr.app import Message

from nestfed.core import NestfedError
from nestfed.deploy.app import init
from nestfed.deploy.discloses import discloses, page
from nestfed.deploy.flower import roster
from nestfed.deploy.flower.messages import read_plan
from nestfed.deploy.wire import pack
from nestfed.deploy.withdraw import withdraw
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import Experiment, from_tables
from nestfed.queries.base import as_text
from tests.flower import LocalGrid, arrays_of, coordinate, federation, opened, rewritten, sealed

FMGDA = {"name": "fmgda", "c_hat": 0.1, "c": 0.1}


def study(rounds: int = 2, algorithm: dict[str, Any] | None = None, **sections: Any) -> Experiment:
    tables: dict[str, Any] = {
        "data": {"target": "died", "test": 0.3, "validation": 0.3},
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": "auroc", "batch": 10},
        "algorithm": algorithm or FMGDA,
        "run": {"rounds": rounds, "q": 2},
    }
    for key, value in sections.items():
        tables[key] = {**tables.get(key, {}), **value}
    return from_tables(tables)


def clinics(folder: Path, sites: int = 5, rows: int = 300, rare: int = 4) -> list[Path]:
    """Tables in which the ward "burns" and gaps in "weight" are rare at every site."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for n in range(sites):
        generator = np.random.default_rng(n)
        age = generator.normal(60, 10, rows)
        weight = [f"{w:.2f}" for w in generator.normal(80, 12, rows)]
        ward = generator.choice(["a", "b"], rows).astype(object)
        ward[:rare], weight[-rare:] = "burns", [""] * rare
        died = (age + generator.normal(0, 8, rows) > 66).astype(int)
        lines = [f"{a:.2f},{w},{x},{y}" for a, w, x, y in zip(age, weight, ward, died)]
        paths.append(folder / f"clinic-{n}.csv")
        paths[-1].write_text("age,weight,ward,died\n" + "\n".join(lines) + "\n")
    return paths


def at_clinics(folder: Path, experiment: Experiment, sites: int = 5, min_cell: int = 0, **shape: Any) -> LocalGrid:
    grid = federation(experiment, folder, sites)
    for config, path in zip(grid.configs.values(), clinics(folder / "tables", sites, **shape)):
        config |= {"data": str(path), "min-cell": min_cell}
    return grid


def log_of(folder: Path) -> str:
    return (folder / "run" / "sites.log").read_text()


# ---------------------------------------------------------------------------------------------------------
# The list


@pytest.mark.parametrize("algorithm", [FMGDA, {"name": "fedavg", "eta": 0.1}], ids=lambda a: a["name"])
def test_the_list_of_what_leaves_a_site_is_complete(algorithm: dict[str, Any], tmp_path: Path) -> None:
    """Every word and every array of every answer is in the list, and nothing in the list is never sent."""
    problem = {"name": "auroc" if algorithm is FMGDA else "classify", "batch": 10}
    experiment = study(algorithm=algorithm, problem=problem, evaluation={"keep": "uniform"})
    grid = at_clinics(tmp_path, experiment)
    coordinate(experiment, tmp_path, grid, sites=5)
    sent: set[str] = set()
    for _, _, reply in grid.messages:
        words = opened(reply).words
        sent |= {k for k in words if k != "report"} | {f"report.{k}" for k in words.get("report", {})}
        sent |= {re.sub(r"\.(training|test|validation)\.", ".", k) for k in arrays_of(reply)}
    listed = {item.name for item in discloses(experiment)}
    assert sent == listed - {"trouble"}
    text = page(experiment)
    assert all(f"| `{name}` |" in text for name in listed)
    assert experiment.digest() in text


def test_privacy_of_tables_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    """Exact means and categories would have to leave the sites without noise."""
    experiment = study(exchange={"privacy": {"clip": 1.0, "noise": 1.0}})
    with pytest.raises(NestfedError, match="sites answer no questions, so tables cannot be put on a common scale"):
        init(tmp_path / "app", experiment, 3)
    assert not (tmp_path / "app").exists()


@pytest.mark.long
def test_the_list_of_what_leaves_a_site_in_a_study_is_complete(tmp_path: Path) -> None:
    """From registration to the released model, under every site's rule for small cells."""
    experiment = from_tables(
        {
            "data": {"target": "died", "classes": ["0", "1"], "validation": 0.3, "subgroups": ["ward"]},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "auroc"},
            "run": {"rounds": 2, "q": 2},
            "evaluation": {"every": 1, "keep": "best", "metric": "auroc"},
            "study": {},
            "methods": {
                "auroc": {"algorithm": FMGDA},
                "fedavg": {"problem": {"name": "classify"}, "algorithm": {"eta": 0.1}},
            },
        }
    )
    grid = at_clinics(tmp_path, experiment, sites=3, min_cell=10)
    coordinate(experiment, tmp_path, grid, sites=3)
    assert (tmp_path / "run" / "finished.json").exists()
    sent: set[str] = set()
    for _, _, reply in grid.messages:
        words = opened(reply).words
        sent |= {k for k in words if k != "report"} | {f"report.{k}" for k in words.get("report", {})}
        sent |= {re.sub(r"\.(training|test|validation)\.", ".", k) for k in arrays_of(reply)}
    assert sent <= {item.name for item in discloses(experiment)}
    assert {
        "judge-counts.counts",
        "calibration-sums.loss",
        "regression-sums.hessian",
        "fields.theta",
        "fields.x",
    } <= sent


# ---------------------------------------------------------------------------------------------------------
# Small cells


def told(grid: LocalGrid, name: str) -> list[np.ndarray]:
    return [a for _, _, r in grid.messages for k, a in arrays_of(r).items() if re.search(name, k)]


def test_no_small_cell_leaves_a_site(tmp_path: Path) -> None:
    experiment = study()
    plain, careful = tmp_path / "plain", tmp_path / "careful"
    grids = {0: at_clinics(plain, experiment), 10: at_clinics(careful, experiment, min_cell=10)}
    for folder, grid in zip((plain, careful), grids.values()):
        coordinate(experiment, folder, grid, sites=5)
    counts = r"\.(rows|known|counts|positives|negatives|unscored)$"
    assert any(((a > 0) & (a < 10)).any() for a in told(grids[0], counts))
    for a in told(grids[10], counts):
        assert not ((a > 0) & (a < 10)).any()
    for a in told(grids[10], r"table\.training\.known$"):
        assert set(a.tolist()) <= {0, *map(int, told(grids[10], r"table\.training\.rows$"))}
    messages = b"".join(bytes(opened(m).block) for _, _, m in grids[10].messages)
    assert b"burns" not in messages
    plan, _ = read_plan(careful / "run" / "plan.safetensors")  # type: ignore[misc]
    assert plan.encoding.features == ("age", "weight", "ward=a", "ward=b")
    assert read_record(careful / "run" / "record.jsonl")[-1]["auroc"] > 0.7


def test_a_site_with_a_rule_sends_no_numbers_of_single_rows(tmp_path: Path) -> None:
    """FedXL's contributions are scores of single rows with their classes; they once left sites whatever their min-cell."""
    experiment = from_tables(
        {
            **study(algorithm={"name": "fedxl1", "eta": 0.1, "passive": 0}).source,
            "problem": {"name": "paired-auroc", "first": 4, "second": 4},
        }
    )
    grid = at_clinics(tmp_path, experiment, min_cell=10)
    with pytest.raises(NestfedError, match="scores of single rows, which its min_cell forbids"):
        coordinate(experiment, tmp_path, grid, sites=5)
    assert not any(k.startswith("gathered.") for _, _, reply in grid.messages for k in arrays_of(reply))


def test_a_site_with_too_few_rows_does_not_take_part(tmp_path: Path) -> None:
    experiment = study()
    grid = at_clinics(tmp_path, experiment, min_cell=10)
    small = tmp_path / "tables" / "clinic-2.csv"
    small.write_text("\n".join(small.read_text().splitlines()[:16]) + "\n")  # 7 training rows
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=3)
    assert "clinic-2 is rejected: it has fewer rows than its min_cell" in log_of(tmp_path)
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["participants"] == 4
    assert not any(b'"rows": {"training": 7' in bytes(opened(m).block) for _, _, m in grid.messages)


@pytest.mark.parametrize(
    ("rows", "min_cell", "sections", "sentence"),
    [
        (60, 40, {}, "needs positive and negative rows, but all sites together tell of 0 positives"),
        (100, 31, {"evaluation": {"keep": "best", "metric": "auroc"}}, "needs validation rows, but no site has any"),
    ],
)
def test_a_study_that_cannot_work_says_so_before_round_1(
    rows: int, min_cell: int, sections: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    experiment = study(**sections, **({} if sections else {"data": {"test": 0.1, "validation": 0.1}}))
    grid = at_clinics(tmp_path, experiment, min_cell=min_cell, rows=rows)
    with pytest.raises(NestfedError, match=sentence):
        coordinate(experiment, tmp_path, grid, sites=5)
    assert "train" not in {m.metadata.message_type for _, m, _ in grid.messages}


# ---------------------------------------------------------------------------------------------------------
# Registration and questions: nothing bad gets in, and nobody else suffers


def declared(reply: Message, **rows: Any) -> Message:
    return rewritten(reply, {"rows": {**opened(reply).words["rows"], **rows}})


def replaced(reply: Message, name: str, value: Any) -> Message:
    return rewritten(reply, arrays={name: value}) if name in opened(reply).header else reply


def swollen(reply: Message, name: str, value: Any) -> Message:
    return rewritten(reply, arrays={name: np.full_like(opened(reply).arrays()[name], value)})


def forged_histogram(reply: Message) -> Message:
    """16 GiB of counts, claimed by a header of some bytes."""
    packed = opened(reply)
    if "scores.test.positive_first" not in packed.header:
        return reply
    words = json.dumps(dict(packed.words))
    entry = {"dtype": "I64", "shape": [2**31], "data_offsets": [0, 2**34]}
    header = json.dumps({"__metadata__": {"words": words}, "scores.test.positive_first": entry}).encode()
    return sealed(reply, len(header).to_bytes(8, "little") + header)


HELLO, TABLE, SCORES = "query.hello", "table.training", "scores.test"
SPOILT: dict[str, tuple[str, Callable[[Message], Message], str]] = {
    "infinite rows": (HELLO, lambda m: declared(m, training=float("inf")), "numbers of rows are invalid"),
    "rows as text": (HELLO, lambda m: declared(m, training="many"), "numbers of rows are invalid"),
    "negative rows": (HELLO, lambda m: declared(m, test=-1), "numbers of rows are invalid"),
    "no rows": (HELLO, lambda m: rewritten(m, {"rows": None}), "numbers of rows are invalid"),
    "client as text": (HELLO, lambda m: rewritten(m, {"client": "3"}), "client number is 3, but must be 0 to 4"),
    "another message": (HELLO, lambda m: sealed(m, b"x" * 100), "cannot be read"),
    "integer classes": ("classes.training", lambda m: replaced(m, "classes.training.names", np.arange(2)), "int64 instead of uint8"),
    "classes that are no list": (
        "classes.training", lambda m: replaced(m, "classes.training.names", as_text(7)), "list of classes is invalid"
    ),
    "text as sums": (TABLE, lambda m: replaced(m, f"{TABLE}.total", as_text("much")), "uint8 instead of float64"),
    "0-d sums": (TABLE, lambda m: replaced(m, f"{TABLE}.total", np.array(1.0)), r"shape \(\) instead of"),
    "infinite sums": (TABLE, lambda m: swollen(m, f"{TABLE}.total", np.inf), "infinite or NaN"),
    "too many known": (TABLE, lambda m: swollen(m, f"{TABLE}.known", 10**6), "counts outside 0 to"),
    "too many rows": (TABLE, lambda m: replaced(m, f"{TABLE}.rows", np.array(10**6)), "counts outside 0 to"),
    "deep schema": (TABLE, lambda m: replaced(m, f"{TABLE}.schema", np.full(10**5, 91, np.uint8)), "list of columns is invalid"),
    "big-endian": (TABLE, lambda m: replaced(m, f"{TABLE}.total", np.zeros(6, ">f8").astype("<f4")), "float32 instead of float64"),
    "negative squares": ("squares", lambda m: swollen(m, "squares.training.squares", -1.0), "negative values"),
    "forged histogram": (SCORES, forged_histogram, "cannot be read"),
    "bins twice": (SCORES, lambda m: swollen(m, f"{SCORES}.positive_first", 5), "bins are invalid"),
    "a bin beyond": (SCORES, lambda m: swollen(m, f"{SCORES}.positive_first", 2**40), "bins are invalid"),
    "more positives than rows": (SCORES, lambda m: swollen(m, f"{SCORES}.positives", 10**6), "counts outside 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
def test_one_bad_site_is_dropped_and_the_others_continue(kind: str, tmp_path: Path) -> None:
    """Today's crashes, hangs and gigabytes: each is one line in sites.log, and the run finishes with the other four."""
    where, change, sentence = SPOILT[kind]

    def spoil(name: str, client: int, reply: Message) -> Message:
        if client != 3 or (where == HELLO) != (name == HELLO) or "trouble" in opened(reply).words:
            return reply
        concerned = where == HELLO or any(k.startswith(where) for k in opened(reply).header)
        return change(reply) if concerned else reply

    experiment = study()
    grid = at_clinics(tmp_path, experiment)
    grid.spoil = spoil
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    lines = [line for line in log_of(tmp_path).splitlines() if re.search(sentence, line)]
    assert lines, log_of(tmp_path)
    assert all("clinic-3" in line or "node 103" in line for line in lines)
    for n in (0, 1, 2, 4):
        assert f"clinic-{n} is rejected" not in log_of(tmp_path)
    last = read_record(tmp_path / "run" / "record.jsonl")[-1]
    assert last["participants"] == (4 if where in (HELLO, SCORES) else last["participants"])
    assert np.isfinite(last["auroc"])


def test_the_site_that_differs_is_named_and_not_its_neighbour(tmp_path: Path) -> None:
    """The first of five sites has other classes and another column; the other four continue without it."""
    experiment = study()
    grid = at_clinics(tmp_path, experiment)
    first = tmp_path / "tables" / "clinic-0.csv"
    first.write_text(first.read_text().replace("age,", "years,", 1))
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    assert "clinic-0 is rejected: It has no column 'age', which most sites have. It has a column 'years'" in log_of(
        tmp_path
    )
    assert log_of(tmp_path).count("is rejected") == 1


def test_a_question_that_the_study_does_not_need_is_not_answered(tmp_path: Path) -> None:
    """A coordinator of another mind learns nothing; a later library may know more queries than this study declares."""
    from nestfed.deploy.flower.messages import questions_packed, stamp_of
    from nestfed.queries import QUERIES, Field, Query, Question

    spy = Query("spy", "to read rows", lambda rows: {"y": rows.y}, {"y": Field("labels", "count", ("n",))})
    QUERIES.add("spy", spy)
    try:
        experiment = study()
        grid = at_clinics(tmp_path, experiment)
        words, arrays = questions_packed([Question(spy)])
        from nestfed.deploy.flower.mailbox import content_of

        message = Message(content_of(pack(stamp_of(experiment, questions=words), arrays)), 100, "query.ask")
        grid.push_messages([message])
        assert opened(grid.messages[-1][2]).words == {"trouble": "failed", "site": "clinic-0"}
    finally:
        del QUERIES._things["spy"]


def test_a_run_that_no_site_can_join_stops_at_once_with_the_reasons(tmp_path: Path) -> None:
    """It once waited for the whole deadline and then said that 0 of 5 sites came."""
    experiment = study()
    grid = at_clinics(tmp_path, experiment, rows=20)
    for config in grid.configs.values():
        config["min-cell"] = 50
    start = roster.time.monotonic()
    with pytest.raises(
        NestfedError, match=r"Only 0 of 5 sites can take part, 5 are needed.* Site clinic-0: it has fewer rows"
    ):
        coordinate(experiment, tmp_path, grid, sites=5, deadline=600.0)
    assert roster.time.monotonic() - start < 10


# ---------------------------------------------------------------------------------------------------------
# Withdrawal


def test_a_site_withdraws(tmp_path: Path) -> None:
    """After round 2 it answers nothing more; its contributions stay, and the run continues while enough sites are left."""
    experiment = study(rounds=5)
    grid = at_clinics(tmp_path, experiment)

    def leave(n: int, round: int, reply: Message) -> Message:
        if (n, round) == (1, 2):
            withdraw(tmp_path / "state-1")
        return reply

    grid.tamper = leave
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    assert [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")] == [0, 5, 5, 4, 4, 4]
    assert log_of(tmp_path).count("clinic-1 is rejected: it has withdrawn from the study.") == 1


def test_too_few_sites_are_left_after_a_withdrawal(tmp_path: Path) -> None:
    experiment = study(rounds=5)
    grid = at_clinics(tmp_path, experiment)
    grid.tamper = lambda n, round, m: (withdraw(tmp_path / "state-1") and m) if (n, round) == (1, 2) else m
    with pytest.raises(NestfedError, match="4 of 5 sites are left, but 5 are needed"):
        coordinate(experiment, tmp_path, grid, sites=5)
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["round"] == 2


def test_withdraw_needs_a_state_folder(tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match="is not the state folder of a site"):
        withdraw(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------
# One dishonest site, and a robust reduction


@pytest.mark.parametrize("reduce", ["mean", "median", "trimmed:0.25"])
def test_one_site_cannot_spoil_the_statistics_of_a_robust_study(reduce: str, tmp_path: Path) -> None:
    """It tells of sums of 1e15 and of perfect scores. With the mean, the scale is ruined; with a robust reduction it is not."""

    def lie(kind: str, client: int, reply: Message) -> Message:
        if client != 2 or kind == HELLO or "trouble" in opened(reply).words:
            return reply
        if f"{TABLE}.total" in opened(reply).header:
            return swollen(reply, f"{TABLE}.total", 1e15)
        return (
            swollen(reply, "squares.training.squares", 1e30)
            if "squares.training.squares" in opened(reply).header
            else reply
        )

    experiment = study(rounds=8, exchange={"reduce": reduce}, evaluation={"every": 8})
    found = {}
    for folder, spoil in ((tmp_path / "honest", None), (tmp_path / "lying", lie)):
        grid = at_clinics(folder, experiment)
        grid.spoil = spoil or grid.spoil
        coordinate(experiment, folder, grid, sites=5)
        plan, _ = read_plan(folder / "run" / "plan.safetensors")  # type: ignore[misc]
        found[folder.name] = (
            plan.encoding.mean,
            plan.encoding.deviation,
            read_record(folder / "run" / "record.jsonl")[-1],
        )
    (mean, deviation, honest), (other_mean, other_deviation, lying) = found.values()
    if reduce == "mean":
        assert other_mean.max() > 1e10
        assert lying["auroc"] < honest["auroc"] - 0.1
    else:
        np.testing.assert_allclose(other_mean[:2], mean[:2], rtol=0.05)
        np.testing.assert_allclose(other_deviation[:2], deviation[:2], rtol=0.2)
        assert lying["auroc"] == pytest.approx(honest["auroc"], abs=0.03)


def test_the_best_model_does_not_follow_one_sites_word(tmp_path: Path) -> None:
    """A site that praises the start and condemns the rest: pooled, the start wins; with medians, it does not."""
    kept = {}
    for reduce in ("mean", "median"):

        def lie(kind: str, client: int, reply: Message) -> Message:
            packed = opened(reply)
            if client != 2 or "scores.validation.sums" not in packed.header:
                return reply
            praise = packed.words["group"] == "1"  # the first round evaluates the start
            return swollen(reply, "scores.validation.sums", 0.0 if praise else 1e9)

        experiment = study(
            rounds=4, algorithm={"name": "fedavg", "eta": 0.3}, problem={"name": "classify", "batch": 10},
            exchange={"reduce": reduce}, evaluation={"keep": "best", "metric": "log_loss"},
        )  # fmt: skip
        grid = at_clinics(tmp_path / reduce, experiment)
        grid.spoil = lie
        coordinate(experiment, tmp_path / reduce, grid, sites=5)
        records = read_record(tmp_path / reduce / "run" / "record.jsonl")
        kept[reduce] = min(range(5), key=lambda r: records[r]["val_log_loss"])
    assert kept["mean"] == 0
    assert kept["median"] > 0
