"""The state of a deployment, at the coordinator or at a site, from its audit log, its certificates and its disk."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.deploy.audit import FOLDER, Event, events
from nestfed.deploy.disk import free, scarce

ROUND = ("round finished", "update sent")
"""The events that end a round, at the coordinator and at a site."""
STATES = {
    "site registered": "takes part", "site rejected": "rejected", "site withdrew": "withdrawn",
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """The state of a deployment."""

    directory: str
    state: str
    """running, stopped or finished."""
    round: int | None
    """The last finished round."""
    at: str
    """When that was."""
    sites: dict[str, dict[str, str]]
    """For each site its state, since when, and when it last answered; empty at a site."""
    certificates: dict[str, float]
    """Days until each certificate expires."""
    free: int
    """Free bytes of disk."""
    trouble: tuple[str, ...]
    """What somebody should look at."""

    def as_json(self) -> str:
        """Return the state as JSON."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """Return the state as lines for people."""
        last = "no round yet" if self.round is None else f"round {self.round} at {self.at}"
        lines = [f"{self.directory}: {self.state}, {last}"]
        for name, one in self.sites.items():
            lines.append(f"site {name}: {one['state']} since {one['since']}, last answer {one['answered'] or 'never'}")
        lines += [f"{name} expires in {days:.0f} days" for name, days in self.certificates.items()]
        lines.append(f"{self.free / 2**30:.1f} GiB of disk free")
        return "\n".join([*lines, *(f"TROUBLE: {sentence}" for sentence in self.trouble)])


def status(directory: Path, certificates: Path | None = None, silence: float = 6.0) -> Status:
    """Return the state of a run or of a site's part in it.

    - `certificates`: the coordinator's secrets folder, or a site's ca.crt.
    - `silence`: hours without an event after which a run that is not over is reported.
    """
    if not directory.is_dir():
        raise NestfedError(f"{directory} is not the directory of a run or the state folder of a site.")
    trouble: list[str] = []
    try:
        found: Sequence[Event] = events(directory / FOLDER)
    except NestfedError as error:
        found = ()
        trouble.append(str(error))
    state = _state(directory, found)
    rounds = [event for event in found if event["what"] in ROUND]
    sites = _sites(found)
    left = _certificates(certificates, trouble)
    trouble += [sentence] if (sentence := scarce(directory)) else []
    if state == "stopped":
        trouble.append(f"the run stopped: {found[-1].get('reason')}")
    if state == "running" and found and (hours := _age(found[-1]["time"])) > silence:
        trouble.append(f"nothing has happened for {hours:.1f} hours.")
    trouble += [f"site {name} is {one['state']}: {one['reason']}" for name, one in sites.items() if one["reason"]]
    last = rounds[-1] if rounds else {}
    return Status(
        str(directory), state, last.get("round"), last.get("time", ""), sites, left, free(directory), tuple(trouble)
    )


def _state(directory: Path, found: Sequence[Event]) -> str:
    if (directory / "finished.json").exists():
        return "finished"
    return "stopped" if found and found[-1]["what"] == "run stopped" else "running"


def _sites(found: Sequence[Event]) -> dict[str, dict[str, str]]:
    """Return the last that is known of each site; a withdrawal is no trouble."""
    sites: dict[str, dict[str, str]] = {}
    for event in found:
        if (state := STATES.get(event["what"])) and "site" in event:
            reason = event.get("reason", "") if state == "rejected" else ""
            before = sites.get(event["site"], {}).get("answered", "")
            sites[event["site"]] = {"state": state, "since": event["time"], "answered": before, "reason": reason}
        for name in _answered(event):
            if name in sites:
                sites[name]["answered"] = event["time"]
    return sites


def _answered(event: Event) -> Iterator[str]:
    yield from event.get("sites", ()) if event["what"] in ("round finished", "model judged") else ()
    yield from event.get("answered", ()) if event["what"] == "questions asked" else ()


def _certificates(place: Path | None, trouble: list[str]) -> dict[str, float]:
    from nestfed.deploy.certificates import expiring, life

    if place is None:
        return {}
    paths = [place] if place.is_file() else [place / name for name in ("ca.crt", "server.pem")]
    found: dict[str, Any] = {}
    for path in paths:
        try:
            found[path.name] = round(life(path).days, 1)
            trouble += [sentence] if (sentence := expiring(path)) else []
        except NestfedError as error:
            trouble.append(str(error))
    return found


def _age(when: str) -> float:
    """Return the hours since a time of the audit log."""
    then = datetime.datetime.fromisoformat(when)
    return (datetime.datetime.now(datetime.UTC) - then).total_seconds() / 3600
