"""Callbacks get every record; none of their errors loses a run; the ready ones write what the record has."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nestfed import Examples, FedAvg, Minimize, WarmUp
from nestfed.core import DivergedError, NestfedError
from nestfed.engine.callbacks import Callback, Started
from nestfed.engine.record import read
from nestfed.engine.simulate import simulate
from nestfed.report import callbacks as ready
from nestfed.report.events import scalars


class Diary(Callback):
    """Writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run: Started) -> None:
        self.calls.append(("start", run.method, len(run.history)))
        self.settings = run.settings

    def record(self, record: dict[str, Any]) -> None:
        self.calls.append(dict(record))
        record.clear()  # a callback has its own copy

    def end(self, error: BaseException | None) -> None:
        self.calls.append(("end", type(error).__name__))


def run(*callbacks: Any, rounds: int = 3, eta: float = 0.1, **options: Any) -> Any:
    x = torch.arange(12.0).reshape(6, 2) / 10
    clients = Examples.of({"a": (x[:3], x[:3, 0]), "b": (x[3:], x[3:, 1])}, batch=2)
    problem = Minimize(lambda v, batch: ((batch[0] @ v - batch[1]) ** 2).mean(), torch.ones(2))
    judge = lambda v: {"size": float(v.norm())}  # noqa: E731
    return simulate(
        problem, FedAvg(eta), clients, rounds=rounds, q=2, evaluate=judge, callbacks=callbacks, **options
    )  # fmt: skip


def test_a_callback_sees_every_record_with_its_metrics_and_the_start_and_the_end(tmp_path: Path) -> None:
    diary, seen = Diary(), []
    result = run(diary, lambda record: seen.append(record["round"]), directory=tmp_path)
    assert diary.calls[0] == ("start", "fedavg", 0)
    assert diary.calls[-1] == ("end", "NoneType")
    assert diary.calls[1:-1] == result.history
    assert all("size" in r for r in result.history)
    assert seen == [0, 1, 2, 3]
    assert diary.settings["eta"] == 0.1
    assert (diary.settings["rounds"], diary.settings["q"], diary.settings["clients"]) == (3, 2, 2)
    again = Diary()
    longer = run(again, rounds=5, directory=tmp_path)
    assert again.calls[0] == ("start", "fedavg", 4), "a resumed run says what it already has"
    assert again.calls[1:-1] == longer.history[4:]


def test_a_warm_up_and_the_rounds_after_it_are_one_run() -> None:
    diary = Diary()
    result = run(diary, warm_up=WarmUp(2, FedAvg(0.05)))
    assert [c for c in diary.calls if isinstance(c, tuple)] == [("start", "fedavg", 0), ("end", "NoneType")]
    assert diary.calls[1:-1] == result.history
    assert [r["round"] for r in result.history] == [0, 1, 2, 3]


def test_an_error_of_a_callback_does_not_lose_the_run(tmp_path: Path) -> None:
    class Broken(Diary):
        def record(self, record: dict[str, Any]) -> None:
            super().record(record)
            raise ValueError("the\nserver is away")

    broken, sound = Broken(), Diary()
    with pytest.warns(
        UserWarning, match="callback Broken failed and is not called again: ValueError: the server is away"
    ):
        result = run(broken, sound, directory=tmp_path)
    assert len(broken.calls) == 2, "the start and one record"
    assert sound.calls[1:-1] == result.history
    assert len(read(tmp_path / "record.jsonl")) == 4
    assert result.history == run().history or [
        {**r, "seconds": 0} for r in result.history
    ] == [{**r, "seconds": 0} for r in run().history]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([Diary], r"contains the class Diary: pass an object, such as Diary\(\)"),
        (["tensorboard"], "contains 'tensorboard': pass functions of a record, or Callback objects"),
        ("tensorboard", "callbacks must be a list"),
        (Diary(), "callbacks must be a list"),
    ],
)
def test_what_is_no_callback_is_rejected_before_the_start(given: Any, sentence: str, tmp_path: Path) -> None:
    problem = Minimize(lambda v, batch: (v**2).sum(), torch.ones(2))
    clients = Examples.of({"a": (torch.ones(3, 2),)}, batch=2)
    with pytest.raises(NestfedError, match=sentence):
        simulate(problem, FedAvg(0.1), clients, rounds=1, directory=tmp_path / "run", callbacks=given)
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_ends_its_callbacks_with_the_error() -> None:
    diary = Diary()
    with pytest.raises(DivergedError):
        run(diary, rounds=500, eta=1e6)
    assert diary.calls[-1] == ("end", "DivergedError")


def numbers(history: Any) -> dict[str, dict[int, float]]:
    """The scalars of a history by name and round."""
    found: dict[str, dict[int, float]] = {}
    for record in history:
        for name, value in scalars(record):
            found.setdefault(name, {})[record["round"]] = value
    return found


def test_tensorboard_shows_the_record(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(ready.TensorBoard(), directory=tmp_path)
    result = run(ready.TensorBoard(), rounds=5, directory=tmp_path)  # resumed
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(numbers(result.history))
    for name, values in numbers(result.history).items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(values, rel=1e-6)
    with pytest.warns(UserWarning, match="TensorBoard needs a folder"):
        run(ready.TensorBoard())


def test_mlflow_shows_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        result = run(ready.MLflow("first"))
        client = mlflow.MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
        assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
        assert found.data.params["method"] == "fedavg"
        assert found.data.params["eta"] == "0.1"
        for name, values in numbers(result.history).items():
            logged = {m.step: m.value for m in client.get_metric_history(found.info.run_id, name)}
            assert logged == pytest.approx(values)
        assert mlflow.active_run() is None
    finally:
        mlflow.set_tracking_uri(before)


def test_wandb_keeps_the_record_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = run(ready.WandB(project="test", mode="offline", dir=str(tmp_path)))
    (file,) = tmp_path.rglob("*.wandb")
    limit = time.monotonic() + 20
    while len(_rows(file)) < len(result.history) and time.monotonic() < limit:  # W&B's own process writes the file
        time.sleep(0.1)
    kept: dict[str, dict[int, float]] = {}
    for row in _rows(file):
        for name, value in row.items():
            if not name.startswith("_"):
                kept.setdefault(name, {})[row["_step"]] = value
    wanted = numbers(result.history)
    assert set(kept) == set(wanted)
    for name, values in wanted.items():
        assert kept[name] == pytest.approx(values)


def _rows(file: Path) -> list[dict[str, Any]]:
    """The logged rows of an offline run: protobuf messages in the log format of LevelDB, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole, rows = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the rest of a block is empty
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # whole, or the last part
            continue
        message = wandb_internal_pb2.Record()
        message.ParseFromString(whole)
        whole = b""
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({**row, "_step": message.history.step.num})
    return rows


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "find_spec", lambda name: None)
    for made, extra in ((ready.TensorBoard, "tensorboard"), (ready.MLflow, "mlflow"), (ready.WandB, "wandb")):
        with pytest.raises(NestfedError, match=rf"pip install 'nestfed\[{extra}\]'"):
            made()


def test_undefined_numbers_are_left_out() -> None:
    assert ready._finite({"round": 1, "loss": math.inf, "ap": 0.5, "drift": None}) == {"test/ap": 0.5}
