"""Certificates and keys for a federation."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError


def _cryptography() -> Any:
    try:
        import cryptography.x509 as x509
    except ImportError as error:
        raise NestfedError("Certificates and keys need an extra: pip install 'nestfed[flower]'.") from error
    return x509


def write_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write ca.crt for all sites, and server.pem and server.key for the SuperLink at these hosts."""
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if (folder / "server.key").exists():
        raise NestfedError(f"{folder} already holds certificates; delete them first if you want new ones.")

    def named(name: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    places = [_general_name(x509, host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]

    def certificate(subject: str, key: Any, extensions: Sequence[tuple[Any, bool]]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("nestfed federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        signed: bytes = builder.sign(keys[0], hashes.SHA384()).public_bytes(_pem())
        return signed

    authority = x509.SubjectKeyIdentifier.from_public_key(keys[0].public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(
        certificate(
            "nestfed federation",
            keys[0],
            [
                (x509.BasicConstraints(ca=True, path_length=0), True),
                (x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage), True),
                (authority, False),
            ],
        )
    )
    (folder / "server.pem").write_bytes(
        certificate(
            hosts[0] if hosts else "localhost",
            keys[1],
            [
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (x509.SubjectAlternativeName(places), False),
                (x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage), True),
                (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
                (issuer, False),
            ],
        )
    )
    # The authority's key is not stored, so nobody can sign another server with it.
    _write_secret(folder / "server.key", keys[1])


def write_key(path: Path) -> None:
    """Write a site's private key to PATH and its public key to PATH.pub."""
    _cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if path.exists():
        raise NestfedError(f"{path} already exists; keep it, or choose another path.")
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, key, ssh=True)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _write_secret(path: Path, key: Any, ssh: bool = False) -> None:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(_pem(), form, NoEncryption()))


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
