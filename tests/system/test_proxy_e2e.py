"""The kit's proxy in front of a real SuperLink: sites get through, nothing else does, and strangers stay out."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from nestfed.deploy.app import write_app
from nestfed.deploy.audit import events
from nestfed.deploy.certificates import write_key
from nestfed.deploy.enrolled import write_sites
from nestfed.deploy.kit import filled, values_of
from nestfed.deploy.local import Local, free_port
from nestfed.deploy.processes import Processes
from nestfed.deploy.reach import Address, unreachable
from nestfed.deploy.status import status
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import from_tables

NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: the kit's proxy is not tried"),
    pytest.mark.skipif(
        " " in sys.prefix, reason="Flower's SuperLink needs a Python environment without a space in its path"
    ),
]
SITES = 3


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Local, int]]:
    """A SuperLink on one port, and nginx with the kit's configuration on another."""
    folder = tmp_path_factory.mktemp("proxy")
    with Processes(folder / "logs") as processes:
        local = Local(folder, processes)
        local.superlink()
        front = free_port()
        text = filled("nginx.conf", values_of("localhost", "") | {"PORT": str(front), "CONTROL": str(local.port)})
        text = text.replace("/srv/nestfed/study/secrets", str(local.secrets)).replace(
            f"    listen [::]:{front} ssl;\n", ""
        )
        (folder / "site.conf").write_text(text)
        temporary = "".join(
            f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.getuid() == 0 else ""
        (folder / "nginx.conf").write_text(
            f"{user} daemon off; pid {folder}/nginx.pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary} include {folder}/site.conf; }}\n"
        )
        assert NGINX is not None
        processes.start("nginx", [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")], {})
        local._wait_for("nginx", front)
        yield local, front


def asked(port: int, path: str, authority: Path, method: str = "POST") -> int:
    """The status of a request with exactly this path."""
    context = ssl.create_default_context(cafile=str(authority))
    with closing(http.client.HTTPSConnection("localhost", port, timeout=10, context=context)) as connection:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("content-length", "0")
        connection.putheader("content-type", "application/protobuf")
        connection.endheaders()
        return connection.getresponse().status


CONTROL = ("/v1/control/list-runs", "/v1/control/register-node", "/v1/control/start-run", "/v1/control/list-nodes")
TRICKS = (
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/%2e%2e%2fcontrol%2flist-runs", "//v1/control/list-runs", "/v1//control/list-runs", "/./v1/control/list-runs",
    "/v1/fleet//../control/list-runs", "/v1/control/list-runs?/v1/fleet/get-run", "/v1/control/list-runs#/v1/fleet/get-run",
    "/v1/control/..%2ffleet/get-run", "/V1/CONTROL/list-runs", "/v1/fleet/", "/v1/fleet", "/v1/runtime/pull-messages",
    "/docs", "/openapi.json", "/health", "/", "/v1/fleet/get-run/../../control/list-runs", "/v1/fleet/get-run%00/control",
)  # fmt: skip


def test_the_control_interface_is_not_reachable(behind: tuple[Local, int]) -> None:
    """It is there for the coordinator itself, and behind the proxy no spelling of its paths leads to it."""
    local, front = behind
    authority = local.secrets / "ca.crt"
    assert asked(local.port, CONTROL[0], authority) not in (403, 404)
    for path in (*CONTROL, *TRICKS):
        assert asked(front, path, authority) in (400, 404), path
    assert asked(front, "/v1/fleet/pull-messages", authority) not in (403, 404, 502)
    assert asked(front, "/v1/fleet/pull-messages", authority, "GET") == 403
    assert [p.kind for p in unreachable(Address("localhost", front), authority)] == []
    assert [p.kind for p in unreachable(Address("localhost", local.port), authority)] == ["control"]


def flwr(local: Local, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Flower's command line, as whoever has the public ca.crt can use it."""
    environment = local.environment(f"stranger-{port}")
    config = Path(environment["FLWR_HOME"]) / "config.toml"
    config.write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "localhost:{port}"\n'
        f'root-certificates = "{local.secrets / "ca.crt"}"\n'
    )
    command = [local.command("flwr"), *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
    )


def study() -> Any:
    return from_tables(
        {
            "data": {"name": "digits", "binary": True},
            "partition": {"kind": "dirichlet", "clients": SITES, "alpha": 0.5},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "auroc", "batch": 10},
            "algorithm": {"name": "fmgda", "c_hat": 0.1, "c": 0.1},
            "run": {"rounds": 2, "q": 4, "seed": 3},
            "evaluation": {"every": 10},
        }
    )


def test_strangers_stay_out_and_sites_get_through(behind: tuple[Local, int], tmp_path: Path) -> None:
    """One stranger has no registered key; one has, and comes first with site 0's number and name: it gets no message."""
    local, front = behind
    write_app(tmp_path / "app", study(), SITES, out=str(tmp_path / "run"), enrolled=str(tmp_path / "sites.toml"))
    write_key(local.secrets / "stranger.key")
    registered = flwr(local, front, "supernode", "register", str(local.secrets / "stranger.key.pub"), "local")
    assert registered.returncode or "404" in registered.stdout + registered.stderr
    started = flwr(local, front, "run", str(tmp_path / "app"), "local")
    assert started.returncode or "404" in started.stdout + started.stderr
    listed = flwr(local, local.port, "list", "local")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "federated" not in listed.stdout  # no run was started

    local.register(0, 1, 2, 7, 8)
    write_sites(tmp_path / "sites.toml", [local.enrolled(n) for n in range(SITES)])
    control, local.port = local.port, front  # sites connect to the proxy
    try:
        (local.secrets / "site-9.key").write_bytes((local.secrets / "stranger.key").read_bytes())
        local.supernode(9)
        local.supernode(7, client=0, site="site-0", state=str(tmp_path / "stranger"))
        until(
            lambda: "SuperNode ID" in local.processes.tail("site-7", 100),
            "the stranger with a registered key to connect",
        )
        until(lambda: local.processes.running["site-9"].poll() is not None, "the stranger without one to give up")
        assert "SuperNode ID" not in local.processes.tail("site-9", 100)
        for n in range(SITES):
            local.supernode(n)
        run = local.run(tmp_path / "app")
        until(lambda: (tmp_path / "run" / "finished.json").exists() or run.poll() is not None, "the end of the run")
    finally:
        local.port = control
    assert (tmp_path / "run" / "finished.json").exists(), local.processes.tail("run", 40)
    assert [r["participants"] for r in read_record(tmp_path / "run" / "record.jsonl")] == [0, SITES, SITES]
    happened = events(tmp_path / "run" / "audit")
    assert [e["what"] for e in happened].count("left out a key that is not enrolled") == 1
    assert {e["site"] for e in happened if e["what"] == "site registered"} == {f"site-{n}" for n in range(SITES)}
    assert "is left out: its key is not in the list" in (tmp_path / "run" / "sites.log").read_text()
    assert not (tmp_path / "stranger" / "audit").exists()  # it was asked nothing
    assert status(tmp_path / "run", local.secrets).trouble == ()
