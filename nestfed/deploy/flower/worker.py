"""A site's worker: a process that stays, and answers every message of the coordinator without starting another.

It keeps the site's rows and objects in memory, and the private fields on disk as any site does, so if it is killed the next
one continues. Of the bundle that the coordinator delivers it reads the experiment file, as data, and runs nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sys
import threading
import tomllib
import zipfile
from functools import partial
from pathlib import Path
from typing import NoReturn

import httpx
from flwr.app import Context, Message

from nestfed.core import NestfedError
from nestfed.deploy.flower.client import OwnTroubleError, answer
from nestfed.deploy.flower.kept import Kept
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.messages import study_of
from nestfed.deploy.flower.private_site import Tasks
from nestfed.deploy.pace import Pace
from nestfed.experiment.spec import Experiment, from_tables

LOG = logging.getLogger(__name__)
EXPERIMENT = "experiment.toml"
MOST = 2**20
"""The largest accepted experiment file, in bytes."""


def experiment_in(bundle: bytes) -> Experiment:
    """Read the experiment file of a delivered bundle, and nothing else of it."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        if EXPERIMENT not in archive.namelist():
            raise OwnTroubleError(
                "no-experiment",
                f"the coordinator's study has no {EXPERIMENT}; to run its code instead, start the SuperNode with "
                "--isolation subprocess.",
            )
        with archive.open(EXPERIMENT) as file:
            text = file.read(MOST + 1)
    if len(text) > MOST:
        raise NestfedError(f"The coordinator's {EXPERIMENT} has more than {MOST:,} bytes.")
    study = study_of(from_tables(tomllib.loads(text.decode())))
    assert isinstance(study, Experiment)
    return study


def answer_with(kept: Kept, message: Message, context: Context, bundle: bytes) -> Message:
    """Answer a message with the experiment of its bundle."""
    key = (hashlib.sha256(bundle).digest(),)
    return answer(lambda: kept.get("study", key, lambda: experiment_in(bundle)), message, context, kept)


def serve(tasks: Tasks) -> NoReturn:
    """Answer messages until the process ends."""
    pace, own = Pace(), partial(answer_with, Kept())
    while True:
        try:
            busy = tasks.work(own)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            LOG.debug("the SuperNode does not answer", exc_info=error)  # it is starting or ending, or gave up the task
            busy = False
        except Exception:
            LOG.exception("a message was not answered.")
            busy = False
        if busy:
            pace.restart()
        else:
            pace.sleep()


def main() -> None:
    """Read from the standard input where the tasks are, and end when it does: the SuperNode holds the other end."""
    where = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    root = Path(where["root"]).read_bytes() if where["root"] else None
    with shown_by_flower():
        serve(Tasks(where["address"], root, bytes.fromhex(where["secret"])))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
