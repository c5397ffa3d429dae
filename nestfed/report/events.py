"""TensorBoard event files, written from a run's record."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from struct import unpack_from

from nestfed.core import NestfedError
from nestfed.engine.record import read
from nestfed.engine.round import Record

NAME = "events.out.tfevents.0.nestfed"
_GROUPS = {"loss": "training", "drift": "training", "participants": "training"}
_COSTS = ("examples", "bytes_up", "bytes_down", "seconds")


def require() -> None:
    """Raise an error if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise NestfedError("TensorBoard event files need the package tensorboard: pip install 'nestfed[tensorboard]'.")


def write_events(record_path: Path, folder: Path) -> int:
    """Append the rounds of a record that the folder's event file lacks; return their number.

    A resumed run repeats rounds bit for bit, so existing rounds are right. A last event that was cut short is replaced.
    """
    require()
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    history = read(record_path)
    if not history:
        return 0
    path = folder / NAME
    found = list(_whole(path.read_bytes() if path.exists() else b""))
    whole = found[-1][0] if found else 0
    events = [Event.FromString(content) for _, content in found]
    held = max((event.step for event in events if event.HasField("summary")), default=-1)
    new = [record for record in history if record["round"] > held]
    # The record has durations, not times of day: count back from its last change.
    start = record_path.stat().st_mtime - history[-1]["seconds"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(whole)
            writer = RecordWriter(file)
            if not whole:
                writer.write(Event(wall_time=start, file_version="brain.Event:2").SerializeToString())
            for record in new:
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
                event = Event(wall_time=start + record["seconds"], step=record["round"], summary=Summary(value=values))
                writer.write(event.SerializeToString())
    except OSError as error:
        raise NestfedError(f"Cannot write {path}: {error.strerror or error}.") from error
    return len(new)


@contextmanager
def following(record_path: Path, folder: Path, seconds: float = 5.0) -> Iterator[None]:
    """Write events of a record while it grows, every few seconds and at the end, even if the run fails."""
    write_events(record_path, folder)  # raise errors before the work starts
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(seconds):
            with suppress(NestfedError):  # for example a full disk: the last call below reports it
                write_events(record_path, folder)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write_events(record_path, folder)


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield a record's numbers with the names that TensorBoard groups by: test/ap, validation/ap, cost/…."""
    for key, value in record.items():
        if value is None or key in ("round", "iteration"):
            continue
        if key in _COSTS:
            yield f"cost/{key}", float(value)
        elif key in _GROUPS:
            yield f"{_GROUPS[key]}/{key}", float(value)
        elif key.startswith("val_"):
            yield f"validation/{key.removeprefix('val_')}", float(value)
        else:
            yield f"test/{key}", float(value)


def _whole(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a file as (end, bytes), up to the first incomplete one."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    place = 0
    while place + 12 <= len(content):  # the length, its checksum, the event, its checksum
        end = place + 12 + unpack_from("<Q", content, place)[0]
        if end + 4 > len(content) or unpack_from("<I", content, end)[0] != masked_crc32c(content[place + 12 : end]):
            return
        yield end + 4, content[place + 12 : end]
        place = end + 4
