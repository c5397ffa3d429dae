"""Check a site by itself, before it connects: its study, its table, its machine, its key, and its way to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestfed.core import NestfedError
from nestfed.deploy.enrolled import fingerprint
from nestfed.deploy.node import Node
from nestfed.deploy.preflight import Examined, Problem, examine, machine
from nestfed.deploy.reach import Address, unreachable
from nestfed.deploy.withdraw import WITHDRAWN

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment


@dataclass(frozen=True)
class Way:
    """How a site connects, with the options of its SuperNode."""

    superlink: str = ""
    authority: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Checked:
    """What is right and what is wrong with a site."""

    facts: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def ready(self) -> bool:
        """Whether the site can take part."""
        return not any(problem.stops for problem in self.problems)


def check(study: Experiment, node: Node, way: Way) -> Checked:
    """Check everything that a site can check by itself."""
    from nestfed.experiment.site import raw_rows

    found = examine(study, node.place, node.min_cell, lambda: raw_rows(study, node.place))
    facts = [*_facts(study, node, found)]
    problems = [*_agreed(study, node), *found.problems, *machine(node.state, way.authority)]
    if way.key is not None:
        known, wrong = _key(way.key)
        facts += known
        problems += wrong
    if way.superlink:
        if way.authority is None:
            raise NestfedError("--superlink needs --root-certificates, the ca.crt from the coordinator.")
        problems += unreachable(Address.read(way.superlink), way.authority)
    return Checked(tuple(facts), tuple(problems))


def _agreed(study: Experiment, node: Node) -> Iterator[Problem]:
    if node.pinned and node.pinned != study.digest():
        yield Problem("study", f"this site agreed to the study {node.pinned}, but this one is {study.digest()}.")
    if (node.state / WITHDRAWN).exists():
        yield Problem("withdrawn", f"this site has withdrawn: delete {node.state / WITHDRAWN} to take part again.")


def _key(path: Path) -> tuple[list[str], list[Problem]]:
    """Return what the coordinator must know of a private key, and what is wrong with it."""
    from cryptography.hazmat.primitives import serialization as forms

    try:
        public = forms.load_ssh_private_key(path.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError):
        return [], [Problem("key", f"{path} is not a private key: `nestfed deploy key` writes one.")]
    shown = fingerprint(public.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH))
    known = path.stat().st_mode & 0o077
    sentence = f"{path} can be read by other users: chmod 600 {path}"
    return [f"key {shown}, which the coordinator must list"], [
        Problem("key-mode", sentence, minor=True)
    ] if known else []


def _facts(study: Experiment, node: Node, found: Examined) -> Iterator[str]:
    yield f"study {study.digest()}, as client {node.place.n} with the name {node.name}"
    if found.rows:
        yield ", ".join(f"{len(rows)} {part} rows" for part, rows in found.rows.items())
