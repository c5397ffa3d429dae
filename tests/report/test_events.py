"""TensorBoard event files, read back by TensorBoard itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not here: pip install 'nestfed[tensorboard]'")

from nestfed_papers import commands, run
from nestfed_papers.reproductions.base import Evidence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nestfed.cli import main as cli
from nestfed.core import NestfedError
from nestfed.report import events
from nestfed.report.events import NAME, following, write_events

ROUNDS = [
    {"round": r, "iteration": 10 * r, "participants": 4, "loss": None if r == 0 else 1 / r, "drift": 0.5, "examples": 320 * r}
    | {"bytes_up": 10_000_000_019 * r, "bytes_down": 8 * r, "seconds": 0.25 * r}
    | ({"ap": 0.1 * r, "val_ap": 0.2 * r} if r % 2 == 0 else {})
    for r in range(7)
]  # fmt: skip


def record(path: Path, rounds: int, more: str = "") -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in ROUNDS[:rounds]) + more)
    return path


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_the_record_holds(tmp_path: Path) -> None:
    assert write_events(record(tmp_path / "record.jsonl", 7), tmp_path / "tb") == 7
    found = read_back(tmp_path / "tb")
    assert set(found) == {
        "test/ap", "validation/ap", "training/loss", "training/drift", "training/participants",
        "cost/examples", "cost/bytes_up", "cost/bytes_down", "cost/seconds",
    }  # fmt: skip
    assert found["test/ap"] == [(r, pytest.approx(0.1 * r)) for r in (0, 2, 4, 6)]
    assert found["training/loss"] == [(r, pytest.approx(1 / r)) for r in range(1, 7)]
    assert found["cost/bytes_up"][-1] == (6, pytest.approx(6 * 10_000_000_019))


def test_rounds_are_added_once_however_often_it_is_called(tmp_path: Path) -> None:
    path, folder = tmp_path / "record.jsonl", tmp_path / "tb"
    added = [write_events(record(path, n), folder) for n in (1, 1, 4, 2, 4, 7, 7)]  # 4, 2: resumed from a checkpoint
    assert added == [1, 0, 3, 0, 0, 3, 0]
    assert [p.name for p in folder.iterdir()] == [NAME]
    grown = (folder / NAME).read_bytes()
    write_events(record(path, 7), tmp_path / "at once")
    assert len((tmp_path / "at once" / NAME).read_bytes()) == len(grown)
    assert read_back(folder) == read_back(tmp_path / "at once")


@pytest.mark.parametrize("cut", [1, 7, 60, 10**6])
def test_an_event_cut_short_by_a_crash_is_replaced(tmp_path: Path, cut: int) -> None:
    path, folder = record(tmp_path / "record.jsonl", 7, '{"round": 7, "lo'), tmp_path / "tb"
    write_events(path, folder)
    whole = read_back(folder)
    file = folder / NAME
    file.write_bytes(file.read_bytes()[: max(0, file.stat().st_size - cut)])
    assert write_events(path, folder) > 0
    assert read_back(folder) == whole


def test_damage_ends_what_is_kept(tmp_path: Path) -> None:
    path, folder = record(tmp_path / "record.jsonl", 7), tmp_path / "tb"
    write_events(path, folder)
    whole, file = read_back(folder), folder / NAME
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert 0 < write_events(path, folder) < 7
    assert read_back(folder) == whole


def test_wall_times_follow_the_seconds_of_the_record(tmp_path: Path) -> None:
    write_events(record(tmp_path / "record.jsonl", 7), tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    times = [e.wall_time for e in events.Scalars("cost/seconds")]
    assert [t - times[0] for t in times] == pytest.approx([0.25 * r for r in range(7)], abs=1e-6)
    assert times[-1] == pytest.approx((tmp_path / "record.jsonl").stat().st_mtime, abs=1e-6)


def test_no_record_no_events_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert write_events(tmp_path / "record.jsonl", tmp_path / "tb") == 0
    assert not (tmp_path / "tb").exists()
    with pytest.raises(NestfedError, match="Cannot write"):
        write_events(record(tmp_path / "record.jsonl", 2), tmp_path / "record.jsonl" / "tb")


def test_a_growing_record_is_followed_and_ended(tmp_path: Path) -> None:
    path, folder = tmp_path / "record.jsonl", tmp_path / "tb"

    def run() -> None:
        with following(path, folder, seconds=0.02):
            record(path, 3)
            deadline = time.monotonic() + 5
            while not (folder / NAME).exists() or len(read_back(folder).get("cost/seconds", ())) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            record(path, 6)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run()
    assert [step for step, _ in read_back(folder)["cost/seconds"]] == list(range(6))


def test_trials_and_reproductions_have_events_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["run.rounds=2", "run.q=1", "evaluation.every=1", "partition.clients=2"]
    cli.tune_("average-precision", small, ["fedavg"], 2, 1, tmp_path / "tuned", True)
    written = sorted(
        p.parent.relative_to(tmp_path / "tuned").as_posix() for p in (tmp_path / "tuned").rglob("events.*")
    )
    assert written == ["tensorboard/fedavg/trial-000", "tensorboard/fedavg/trial-001"]
    # A reproduction's runs are elsewhere: those of the tuning take their place here.
    evidence = Evidence("fcsg-table2", "quick", meta={"folders": {"CIFAR-10": "tuned/fedavg"}})
    monkeypatch.setattr(run, "reproduce", lambda *words, **more: (evidence, tmp_path / "place"))
    commands.reproduce("fcsg-table2", out=tmp_path, tensorboard=True)
    assert (tmp_path / "place" / "tensorboard" / "cifar-10" / "trial-001" / NAME).exists()


def test_that_tensorboard_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "find_spec", lambda name: None)
    with pytest.raises(NestfedError, match=r"nestfed\[tensorboard\]"):
        cli._tensorboard(True)
    assert not cli._tensorboard(False)
