"""Who may take part: a site's number and name follow from its key, whoever registers first."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.node_pb2 import NodeInfo

from nestfed.core import NestfedError
from nestfed.deploy.audit import events
from nestfed.deploy.certificates import write_key
from nestfed.deploy.enrolled import Enrolled, enrol, fingerprint, owner, read_sites, write_sites
from nestfed.engine.record import read as read_record
from tests.flower import LocalGrid, coordinate, federation, toy


def keys(folder: Path, count: int) -> list[Path]:
    for n in range(count):
        write_key(folder / f"{n}.key")
    return [folder / f"{n}.key.pub" for n in range(count)]


def pem(public: Path) -> bytes:
    """The key as Flower stores it."""
    return load_ssh_public_key(public.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


STRANGER = 7


class Keyed(LocalGrid):
    """Nodes with keys, as the SuperLink knows them. A stranger connects before all others."""

    keys: dict[int, bytes]
    polls = 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        self.polls += 1
        there = [node for node in self.get_node_ids() if self.polls > 1 or node == STRANGER]
        return [NodeInfo(node_id=n, last_activated_at="now", public_key=self.keys.get(n, b"")) for n in there]


def keyed(study: Any, folder: Path, known: dict[int, Path], stranger: bool = False) -> Keyed:
    grid = federation(study, folder, 5)
    if stranger:
        grid.apps[STRANGER] = grid.apps[100]
        grid.configs[STRANGER] = {**grid.configs[100], "state": str(folder / "stranger")}
    made = Keyed(grid.apps, grid.configs)
    made.keys = {node: pem(path) for node, path in known.items()}
    return made


def test_the_fingerprint_is_that_of_openssh(tmp_path: Path) -> None:
    (public,) = keys(tmp_path, 1)
    assert fingerprint(public.read_bytes()) == fingerprint(pem(public))
    try:
        shown = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert fingerprint(public.read_bytes()) == shown.split()[1]


def test_a_list_of_sites(tmp_path: Path) -> None:
    path, public = tmp_path / "sites.toml", keys(tmp_path, 4)
    assert enrol(path, "hospital-a", public[0], 3).number == 0
    assert enrol(path, "St.Mary", public[1], 3, number=2).number == 2
    assert enrol(path, "hospital-c", public[2], 3).number == 1
    listed = read_sites(path, 3)
    assert {one.name: one.number for one in listed.values()} == {"hospital-a": 0, "hospital-c": 1, "St.Mary": 2}
    assert owner(listed, pem(public[1])) == Enrolled(2, "St.Mary", fingerprint(public[1].read_bytes()))
    assert owner(listed, pem(public[3])) is None
    assert owner(listed, b"nonsense") is None
    assert enrol(path, "hospital-a", public[3], 3, replace=True).number == 0
    assert owner(read_sites(path, 3), pem(public[0])) is None


def test_a_list_that_is_wrong(tmp_path: Path) -> None:
    path, public = tmp_path / "sites.toml", keys(tmp_path, 3)
    enrol(path, "a", public[0], 2)
    for arguments, sentence in (
        (("a", public[1], 2), "lists a already; give its new key with --replace"),
        (("b", public[0], 2), "is the key of a"),
        (("b", tmp_path / "0.key", 2), "is not a site's public key"),
        (("../b", public[1], 2), "may contain letters"),
    ):
        with pytest.raises(NestfedError, match=sentence):
            enrol(path, *arguments)
    with pytest.raises(NestfedError, match="The number 0 is taken"):
        enrol(path, "b", public[1], 2, number=0)
    enrol(path, "b", public[1], 2)
    with pytest.raises(NestfedError, match="lists all 2 sites"):
        enrol(path, "c", public[2], 2)
    for text, sentence in (
        ("[a]\nnumber = 5\nkey = 'SHA256:x'", "gives a the number 5, but it must be 0 to 1"),
        ("[a]\nnumber = 0\nkey = 'SHA256:x'\n[b]\nnumber = 0\nkey = 'SHA256:y'", "gives a and b the same number"),
        ("[a]\nnumber = 0\nkey = 'SHA256:x'\n[b]\nnumber = 1\nkey = 'SHA256:x'", "gives a and b the same key"),
        ("[a]\nnumber = 0\nkeys = 'SHA256:x'", "key"),
        ("a = 3", "a must be a table"),
        ("[a", "is not a list of sites"),
    ):
        path.write_text(text)
        with pytest.raises(NestfedError, match=sentence):
            read_sites(path, 2)
    with pytest.raises(NestfedError, match="does not exist: start the SuperLink in the study's folder"):
        read_sites(tmp_path / "other.toml", 2)


def test_a_stranger_cannot_take_a_sites_place(tmp_path: Path) -> None:
    """It registers first, as client 0 with the right name; the real sites are not affected, and it gets no message."""
    study, public = toy("fmgda", rounds=2), keys(tmp_path, 6)
    for n in range(5):
        enrol(tmp_path / "sites.toml", f"clinic-{n}", public[n], 5)
    grid = keyed(study, tmp_path, {100 + n: public[n] for n in range(5)} | {STRANGER: public[5]}, stranger=True)
    coordinate(study, tmp_path, grid, sites=5, enrolled=str(tmp_path / "sites.toml"))
    assert [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")] == [0, 5, 5]
    assert STRANGER not in {node for node, _, _ in grid.messages}
    assert "node 7 is left out: its key is not in the list" in (tmp_path / "run" / "sites.log").read_text()
    registered = [e for e in events(tmp_path / "run" / "audit") if e["what"] == "site registered"]
    assert {e["site"]: e["key"] for e in registered} == {f"clinic-{n}": fingerprint(pem(public[n])) for n in range(5)}


def test_without_a_list_whoever_comes_first_has_the_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = toy("fmgda", rounds=1)
    grid = keyed(study, tmp_path, {}, stranger=True)
    grid.configs[STRANGER]["site"] = "stranger"
    with caplog.at_level("INFO", logger="nestfed"):
        coordinate(study, tmp_path, grid, sites=5)
    log = (tmp_path / "run" / "sites.log").read_text()
    assert "clinic-0 is rejected: its client number 0 is already used by stranger" in log
    assert "does not list its sites' keys" in caplog.text


@pytest.mark.parametrize(("key", "value"), [("client", 3), ("site", "clinic-3")])
def test_a_site_cannot_take_another_ones_number_or_name(key: str, value: Any, tmp_path: Path) -> None:
    study, public = toy("fmgda", rounds=2), keys(tmp_path, 5)
    listed = [Enrolled(n, f"clinic-{n}", fingerprint(public[n].read_bytes())) for n in range(5)]
    write_sites(tmp_path / "sites.toml", listed)
    grid = keyed(study, tmp_path, {100 + n: public[n] for n in range(5)})
    grid.configs[101][key] = value
    coordinate(study, tmp_path, grid, sites=5, min_sites=4, enrolled=str(tmp_path / "sites.toml"))
    lines = [line for line in (tmp_path / "run" / "sites.log").read_text().splitlines() if "rejected" in line]
    assert len(lines) == 1
    assert "clinic-1 is rejected: its node configuration says" in lines[0]
    assert "but its key is that of client=1 and site='clinic-1'" in lines[0]
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["participants"] == 4


def test_sites_toml_is_read_as_data(tmp_path: Path) -> None:
    enrol(tmp_path / "sites.toml", "a", keys(tmp_path, 1)[0], 1)
    assert list(tomllib.loads((tmp_path / "sites.toml").read_text())) == ["a"]
