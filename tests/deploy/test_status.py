"""The state of a deployment, for people and for monitoring."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from typer.testing import CliRunner

from nestfed.cli.main import app
from nestfed.core import NestfedError
from nestfed.deploy import status as module
from nestfed.deploy.certificates import write_certificates
from nestfed.deploy.status import status
from nestfed.deploy.withdraw import withdraw
from tests.flower import coordinate, deploy, federation, toy


def shown(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["deploy", "status", *words, "--json"])
    return done.exit_code, json.loads(done.output)


def test_a_finished_run(tmp_path: Path) -> None:
    deploy(toy("fmgda", rounds=3), tmp_path, 5)
    write_certificates(tmp_path / "secrets", ["localhost"], days=100)
    code, found = shown(str(tmp_path / "run"), "--certificates", str(tmp_path / "secrets"))
    assert code == 0
    assert (found["state"], found["round"], found["trouble"]) == ("finished", 3, [])
    assert {name: one["state"] for name, one in found["sites"].items()} == {
        f"clinic-{n}": "takes part" for n in range(5)
    }
    assert all(one["answered"] == found["at"] for one in found["sites"].values())
    assert found["certificates"] == {"ca.crt": pytest.approx(100, abs=0.1), "server.pem": pytest.approx(100, abs=0.1)}
    assert found["free"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    # at a site
    code, found = shown(str(tmp_path / "state-2"), "--certificates", str(tmp_path / "secrets" / "ca.crt"))
    assert (code, found["round"], list(found["certificates"])) == (0, 3, ["ca.crt"])


def test_a_run_in_trouble(tmp_path: Path) -> None:
    """A site rejected, a site withdrawn, the run stopped, a certificate that expires: all are listed, with exit code 1."""
    study = toy("fmgda", rounds=3)
    grid = federation(study, tmp_path, 5)
    grid.configs[101]["experiment"] = "0123456789"

    def leave(n: int, round: int, reply: Any) -> Any:
        if (n, round) == (3, 2):
            withdraw(tmp_path / "state-3")
        return reply

    grid.tamper = leave
    with pytest.raises(NestfedError):
        coordinate(study, tmp_path, grid, sites=5, min_sites=4)
    write_certificates(tmp_path / "secrets", ["localhost"], days=0)
    code, found = shown(str(tmp_path / "run"), "--certificates", str(tmp_path / "secrets"))
    assert code == 1
    assert (found["state"], found["round"]) == ("stopped", 2)
    assert found["sites"]["clinic-1"]["state"] == "rejected"
    assert found["sites"]["clinic-3"]["state"] == "withdrawn"
    assert found["sites"]["clinic-3"]["answered"]
    for sentence in (
        "the run stopped: Only 3 of 5 sites can take part", "clinic-1 is rejected: it runs another experiment", "server.pem expired",
    ):  # fmt: skip
        assert any(sentence in trouble for trouble in found["trouble"]), found["trouble"]
    text = CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "run")]).output
    assert "TROUBLE: the run stopped" in text


def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deploy(toy("fmgda", rounds=2), tmp_path, 5)
    (tmp_path / "run" / "finished.json").unlink()
    now = datetime.datetime.now(datetime.UTC)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return now + datetime.timedelta(hours=8)

    assert status(tmp_path / "run").trouble == ()
    monkeypatch.setattr(module.datetime, "datetime", Later)
    assert status(tmp_path / "run").trouble == ("nothing has happened for 8.0 hours.",)
    assert status(tmp_path / "run", silence=24).trouble == ()


def test_a_changed_audit_log_is_trouble(tmp_path: Path) -> None:
    deploy(toy("fmgda", rounds=2), tmp_path, 5)
    path = tmp_path / "run" / "audit" / "log.jsonl"
    path.write_text(path.read_text().replace("clinic-4", "clinic-9"))
    code, found = shown(str(tmp_path / "run"))
    assert code == 1
    assert "was changed" in found["trouble"][0]
    done = CliRunner().invoke(app, ["deploy", "audit", str(tmp_path / "run")])
    assert done.exit_code
    assert "was changed" in str(done.exception)


def test_the_audit_of_a_run(tmp_path: Path) -> None:
    deploy(toy("fmgda", rounds=2), tmp_path, 5)
    done = CliRunner().invoke(app, ["deploy", "audit", str(tmp_path / "run")])
    assert done.exit_code == 0
    order = [word for line in done.output.splitlines() for word in ("run started", "site registered", "study agreed", "round finished", "model released") if word in line]  # fmt: skip
    assert order == ["run started", *["site registered"] * 5, "study agreed", *["round finished"] * 2, "model released"]
    assert "none changed" in done.output
    import hashlib

    assert hashlib.sha256((tmp_path / "run" / "model.safetensors").read_bytes()).hexdigest() in done.output
    site = CliRunner().invoke(app, ["deploy", "audit", str(tmp_path / "state-1")]).output
    assert site.count("update sent") == 2
