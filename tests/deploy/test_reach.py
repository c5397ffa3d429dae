"""The way to the coordinator: what a site is told when a step of it fails."""

from __future__ import annotations

import email.utils
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="certificates are an extra: pip install 'nestfed[flower]'")

from nestfed.core import NestfedError
from nestfed.deploy.certificates import write_certificates
from nestfed.deploy.reach import Address, unreachable


@contextmanager
def coordinator(secrets: Path, ahead: float = 0.0, control: int = 404) -> Iterator[Address]:
    """A TLS server with a clock of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(control if self.path.startswith("/v1/control/") else 405)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return email.utils.formatdate(time.time() + ahead, usegmt=True)

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets / "server.pem", secrets / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Address("127.0.0.1", server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    write_certificates(folder, ["localhost"])
    return folder


def found(address: Address, authority: Path) -> list[tuple[str, str]]:
    return [(problem.kind, problem.sentence) for problem in unreachable(address, authority, 5.0)]


def test_a_way_that_is_open(secrets: Path) -> None:
    with coordinator(secrets) as address:
        assert found(address, secrets / "ca.crt") == []


@pytest.mark.parametrize(("seconds", "word"), [(900.0, "behind"), (-900.0, "ahead of")])
def test_a_clock_that_differs(seconds: float, word: str, secrets: Path) -> None:
    with coordinator(secrets, seconds) as address:
        ((kind, sentence),) = found(address, secrets / "ca.crt")
    assert kind == "clock"
    assert f"s {word} the coordinator's" in sentence


def test_an_open_control_interface(secrets: Path) -> None:
    with coordinator(secrets, control=200) as address:
        ((kind, sentence),) = found(address, secrets / "ca.crt")
    assert kind == "control"
    assert "lets everybody reach the coordinator's control interface" in sentence


def test_another_authority(secrets: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"])
    with coordinator(secrets) as address:
        ((kind, sentence),) = found(address, tmp_path / "ca.crt")
        assert kind == "tls"
        assert "is not the coordinator of" in sentence
        ((kind, _),) = found(address, tmp_path / "missing.crt")
        assert kind == "tls"


def test_a_certificate_for_another_host(secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.1", *a, **k))
    with coordinator(secrets) as address:
        ((kind, sentence),) = found(Address("other.example.org", address.port), secrets / "ca.crt")
    assert kind == "tls"
    assert "other.example.org" in sentence


def test_a_port_that_is_closed(secrets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ((kind, sentence),) = found(Address("127.0.0.1", port), secrets / "ca.crt")
    assert kind == "port"
    assert f"127.0.0.1:{port}" in sentence


def test_a_name_that_does_not_exist(secrets: Path) -> None:
    ((kind, sentence),) = found(Address("coordinator.invalid", 9090), secrets / "ca.crt")
    assert kind == "name"
    assert "coordinator.invalid cannot be resolved" in sentence


def test_a_server_without_tls(secrets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        ((kind, _),) = found(Address("127.0.0.1", listener.getsockname()[1]), secrets / "ca.crt")
        thread.join()
    assert kind == "tls"


@pytest.mark.parametrize("text", ["coordinator", "coordinator:", "coordinator:port", ":9090", "coordinator:70000"])
def test_an_address_that_is_wrong(text: str) -> None:
    with pytest.raises(NestfedError, match="must be HOST:PORT"):
        Address.read(text)


def test_an_address_of_version_6() -> None:
    assert Address.read("[2001:db8::7]:9090") == Address("2001:db8::7", 9090)
