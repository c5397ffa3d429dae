"""The sites of a study: each one's number, name and public key, in sites.toml beside the experiment.

Flower's SuperLink authenticates every request of a site with its key and gives the key to the coordinator's app. So a
site's number and name follow from its key, and nobody else can register in its place.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError, unknown
from nestfed.files import write_atomically

FILE = "sites.toml"
HEADER = "# The sites of this study: `nestfed deploy enrol NAME KEY.pub` adds one. No other key can take part.\n"
NAME = re.compile(r"(?!\.)[\w.-]{1,64}", re.ASCII)
"""What a site may be called."""


@dataclass(frozen=True)
class Enrolled:
    """A site that may take part."""

    number: int
    name: str
    key: str
    """The fingerprint of its public key, as `ssh-keygen -l` prints it."""


Sites = Mapping[str, Enrolled]
"""The sites of a study by the fingerprint of their key; empty = no list, sites are taken at their word."""


def check_name(name: str) -> str:
    """Return a site's name, or reject it."""
    if not NAME.fullmatch(name):
        raise NestfedError(
            f"A site's name may contain letters, digits, '-', '_' and '.', and begins with no '.', but it is {name!r}."
        )
    return name


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's form or PEM; raise a ValueError if it is neither."""
    from cryptography.hazmat.primitives import serialization as forms

    pem = public.lstrip().startswith(b"-----")
    key: Any = forms.load_pem_public_key(public) if pem else forms.load_ssh_public_key(public)
    line = key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def owner(sites: Sites, public: bytes) -> Enrolled | None:
    """Return the site that a public key belongs to, or nothing."""
    try:
        return sites.get(fingerprint(public))
    except ValueError:
        return None


def read_sites(path: Path, sites: int) -> dict[str, Enrolled]:
    """Return the sites that sites.toml lists, of at most so many."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NestfedError(
            f"{path} does not exist: start the SuperLink in the study's folder, or set `enrolled` in the app's configuration."
        ) from None
    except (OSError, ValueError) as error:
        raise NestfedError(f"{path} is not a list of sites: {error}") from error
    listed = [_entry(path, name, entry) for name, entry in found.items()]
    for one in listed:
        if not 0 <= one.number < sites:
            raise NestfedError(f"{path} gives {one.name} the number {one.number}, but it must be 0 to {sites - 1}.")
    for what in ("number", "key"):
        values = [getattr(one, what) for one in listed]
        if twice := [one.name for one in listed if values.count(getattr(one, what)) > 1]:
            raise NestfedError(f"{path} gives {' and '.join(twice[:2])} the same {what}: each needs its own.")
    return {one.key: one for one in listed}


def _entry(path: Path, name: str, entry: Any) -> Enrolled:
    known = ("number", "key")
    if not isinstance(entry, dict):
        raise NestfedError(f"{path} is not a list of sites: {name} must be a table with a number and a key.")
    if wrong := [key for key in entry if key not in known]:
        raise unknown("key", wrong[0], known, owner=f"[{name}] in {path}")
    number, key = entry.get("number"), entry.get("key")
    if type(number) is not int or not isinstance(key, str) or not key.startswith("SHA256:"):
        raise NestfedError(f'[{name}] in {path} must have a number and a key, such as number = 0, key = "SHA256:…".')
    return Enrolled(number, check_name(name), key)


def enrol(path: Path, name: str, public: Path, sites: int, *, number: int = -1, replace: bool = False) -> Enrolled:
    """Add a site with the public key in a file; number: −1 = the next free one; replace: give a listed site a new key."""
    listed = list(read_sites(path, sites).values()) if path.exists() else []
    try:
        key = fingerprint(public.read_bytes())
    except (OSError, ValueError) as error:
        raise NestfedError(
            f"{public} is not a site's public key: expected the .pub file that `nestfed deploy key` wrote."
        ) from error
    if old := next((one for one in listed if one.name == name), None):
        if not replace:
            raise NestfedError(f"{path} lists {name} already; give its new key with --replace.")
        listed.remove(old)
        number = old.number if number < 0 else number
    if other := next((one for one in listed if one.key == key), None):
        raise NestfedError(f"{public} is the key of {other.name}: every site needs its own.")
    free = [n for n in range(sites) if n not in {one.number for one in listed}]
    if number < 0 and not free:
        raise NestfedError(f"{path} lists all {sites} sites: raise `sites` in pyproject.toml to add one.")
    made = Enrolled(number if number >= 0 else free[0], check_name(name), key)
    if made.number not in free:
        raise NestfedError(f"The number {made.number} is taken or not below {sites}: choose one of {free}.")
    write_sites(path, [*listed, made])
    return made


def write_sites(path: Path, listed: Iterable[Enrolled]) -> None:
    """Write sites.toml."""
    tables = [f'\n["{one.name}"]\nnumber = {one.number}\nkey = "{one.key}"\n' for one in sorted(listed, key=_number)]
    write_atomically(path, (HEADER + "".join(tables)).encode())


def _number(one: Enrolled) -> int:
    return one.number


def sites_of(folder: Path) -> int:
    """Return the number of sites of the study in a folder."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return int(found["tool"]["flwr"]["app"]["config"]["sites"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NestfedError(f"{folder} is not the folder of a study: `nestfed deploy init` writes one.") from error
