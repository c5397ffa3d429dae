"""Certificates: renewal with the kept key, and when to warn."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="certificates are an extra: pip install 'nestfed[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from nestfed.core import NestfedError
from nestfed.deploy import certificates
from nestfed.deploy.certificates import expiring, life, renew, write_certificates

HOSTS = ["coordinator.example.org", "192.0.2.7", "2001:db8::7"]


def handshake(secrets: Path, authority: Path) -> None:
    """A TLS connection as a site makes it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(secrets / "server.pem", secrets / "server.key")
    client = ssl.create_default_context(cafile=str(authority))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                with server.wrap_socket(listener.accept()[0], server_side=True):
                    pass
            except ssl.SSLError:
                pass  # the client rejected it and says why

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as plain,
                client.wrap_socket(plain, server_hostname="localhost"),
            ):
                pass
        finally:
            thread.join()


def test_a_renewed_certificate_works_for_sites_with_the_old_authority(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, days=30, passphrase=b"correct horse")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    old = x509.load_pem_x509_certificate(before["server.pem"])
    (tmp_path / "site.crt").write_bytes(before["ca.crt"])
    handshake(tmp_path, tmp_path / "site.crt")
    assert renew(tmp_path, b"correct horse", days=60) == ["server.pem"]
    new = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    assert new.serial_number != old.serial_number
    assert 59 < life(tmp_path / "server.pem").days < 61
    alternative = x509.SubjectAlternativeName
    names = [c.extensions.get_extension_for_class(alternative).value for c in (old, new)]
    assert {*names[0]} == {*names[1]}
    assert {str(n.value) for n in names[1]} >= {*HOSTS, "localhost"}
    assert {name: (tmp_path / name).read_bytes() for name in before} == before | {
        "server.pem": (tmp_path / "server.pem").read_bytes()
    }
    handshake(tmp_path, tmp_path / "site.crt")


def test_an_authority_that_ends_is_renewed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites with the old ca.crt and sites with the new one accept the same server."""
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 40)
    write_certificates(tmp_path, HOSTS, days=30, passphrase=b"x")
    (tmp_path / "site.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    assert renew(tmp_path, b"x", days=60) == ["server.pem", "ca.crt"]
    assert life(tmp_path / "ca.crt").days > 59
    for authority in ("site.crt", "ca.crt"):
        handshake(tmp_path, tmp_path / authority)


def test_a_strangers_certificate_is_not_accepted(tmp_path: Path) -> None:
    """The same names, signed by another authority of the same name."""
    write_certificates(tmp_path / "ours", HOSTS)
    write_certificates(tmp_path / "theirs", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "theirs", tmp_path / "ours" / "ca.crt")


def test_the_authoritys_key_is_encrypted(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, passphrase=b"secret")
    key = (tmp_path / "ca.key").read_bytes()
    assert b"ENCRYPTED" in key
    assert (tmp_path / "ca.key").stat().st_mode & 0o077 == 0
    with pytest.raises(TypeError):
        load_pem_private_key(key, None)
    with pytest.raises(NestfedError, match="the passphrase is wrong"):
        renew(tmp_path, b"guess")


def test_what_cannot_be_renewed(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS)
    assert not (tmp_path / "ca.key").exists()
    with pytest.raises(NestfedError, match=r"has no ca.key, so its certificates cannot be renewed"):
        renew(tmp_path, b"x")
    write_certificates(tmp_path / "other", HOSTS, passphrase=b"x")
    (tmp_path / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(NestfedError, match="does not belong to"):
        renew(tmp_path, b"x")


@pytest.mark.parametrize(
    ("passed", "words"), [(0.5, ""), (0.66, ""), (0.68, "expires in 96 days: renew it"), (1.01, "expired 3 days ago")]
)
def test_when_a_warning_is_due(passed: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When less than a third of its life is left."""
    write_certificates(tmp_path, HOSTS, days=300)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=300 * passed)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return now

    monkeypatch.setattr(certificates.datetime, "datetime", Later)
    found = expiring(tmp_path / "server.pem")
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize("form", ["--root-certificates {}", "--root-certificates={}"])
def test_a_site_remembers_its_authority(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_certificates(tmp_path, HOSTS, days=0)
    monkeypatch.setenv(certificates.AUTHORITY_PATH, "")
    certificates.remember_authority(["--superlink", "x:1", *form.format(tmp_path / "ca.crt").split(), "--port", "1"])
    assert os.environ[certificates.AUTHORITY_PATH] == str(tmp_path / "ca.crt")
    assert "ca.crt expired" in caplog.text


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from nestfed.cli.main import app

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["deploy", "certificates", *words])
        return done.exit_code, done.output + str(done.exception or "")

    monkeypatch.delenv("NESTFED_PASSPHRASE", raising=False)
    code, out = run(str(tmp_path / "a"))
    assert code
    assert "give --passphrase-file or NESTFED_PASSPHRASE" in out
    assert not (tmp_path / "a").exists()
    assert run(str(tmp_path / "a"), "--discard") == (0, f"Keep {tmp_path / 'a' / 'server.key'} secret; send {tmp_path / 'a' / 'ca.crt'} to every site.\n")  # fmt: skip
    (tmp_path / "word").write_text("a phrase\n")
    assert run(str(tmp_path / "b"), "--passphrase-file", str(tmp_path / "word"))[0] == 0
    monkeypatch.setenv("NESTFED_PASSPHRASE", "a phrase")
    code, out = run(str(tmp_path / "b"), "--renew", "--days", "10")
    assert code == 0
    assert "Renewed server.pem" in out
    assert 9 < life(tmp_path / "b" / "server.pem").days < 11
