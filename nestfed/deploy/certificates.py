"""Certificates and keys for a federation."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.files import write_atomically

LOG = logging.getLogger(__name__)
AUTHORITY_PATH = "NESTFED_AUTHORITY"
"""The environment variable by which `nestfed deploy supernode` tells the site's app where its ca.crt is."""
AUTHORITY = "nestfed federation"
AUTHORITY_DAYS = 3650
"""How long a kept authority is valid; the server's certificate can be renewed as long."""
SOON = 1 / 3
"""The share of a certificate's life below which it should be renewed."""


def _cryptography() -> Any:
    try:
        import cryptography.x509 as x509
    except ImportError as error:
        raise NestfedError("Certificates and keys need an extra: pip install 'nestfed[flower]'.") from error
    return x509


def write_certificates(folder: Path, hosts: Sequence[str], days: int = 365, passphrase: bytes = b"") -> None:
    """Write ca.crt for all sites, and server.pem and server.key for the SuperLink at these hosts.

    With a passphrase, the authority's key is kept, encrypted, as ca.key, and `renew` can use it. Without one it is not
    stored, so nobody can sign another certificate with it.
    """
    _cryptography()
    if (folder / "server.key").exists():
        raise NestfedError(
            f"{folder} already holds certificates; renew them, or delete them first if you want new ones."
        )
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = _new_key(), _new_key()
    own = _authority(authority, max(days, AUTHORITY_DAYS) if passphrase else days)
    (folder / "ca.crt").write_bytes(own)
    (folder / "server.pem").write_bytes(_server(own, authority, server.public_key(), hosts, days))
    _write_secret(folder / "server.key", server)
    if passphrase:
        _write_secret(folder / "ca.key", authority, passphrase=passphrase)


def renew(folder: Path, passphrase: bytes, days: int = 365) -> list[str]:
    """Renew server.pem with the kept key of the authority, and ca.crt if it expires soon; return which were renewed.

    Hosts and keys stay. A site with the old ca.crt accepts the new server.pem as long as its ca.crt is valid.
    """
    x509 = _cryptography()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not (folder / "ca.key").is_file():
        raise NestfedError(
            f"{folder} has no ca.key, so its certificates cannot be renewed: delete them, write new ones with a passphrase, "
            "and send every site the new ca.crt."
        )
    try:
        authority = load_pem_private_key((folder / "ca.key").read_bytes(), passphrase)
    except (ValueError, TypeError) as error:
        raise NestfedError(
            f"{folder / 'ca.key'} cannot be opened: the passphrase is wrong, or the file is damaged."
        ) from error
    own, old = _read(folder / "ca.crt"), _read(folder / "server.pem")
    if own.public_key() != authority.public_key():
        raise NestfedError(f"{folder / 'ca.key'} does not belong to {folder / 'ca.crt'}.")
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    common = old.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    renewed = ["server.pem"]
    pem = own.public_bytes(_pem())
    if expiring(folder / "ca.crt") or _left(own).days < days:
        pem = _authority(authority, max(days, AUTHORITY_DAYS))
        renewed.append("ca.crt")
    hosts = [common, *(str(name.value) for name in names)]
    made = _server(pem, authority, old.public_key(), hosts, days)
    for name, content in zip(renewed, (made, pem)):
        write_atomically(folder / name, content)
    return renewed


@dataclass(frozen=True)
class Life:
    """How long a certificate is valid from now on."""

    days: float
    share: float
    """Of its whole life."""


def life(path: Path) -> Life:
    """Return how long a certificate is still valid; negative if it has expired."""
    return _left(_read(path))


def expiring(path: Path) -> str:
    """Return a warning if less than a third of a certificate's life is left, or nothing."""
    left = life(path)
    if left.days <= 0:
        return f"{path} expired {-left.days:.0f} days ago."
    return f"{path} expires in {left.days:.0f} days: renew it." if left.share < SOON else ""


def remember_authority(options: Sequence[str]) -> None:
    """Tell the site's app where its ca.crt is, given the options of its SuperNode; warn if it expires soon."""
    option = "--root-certificates"
    given = [value for name, value in itertools.pairwise(options) if name == option]
    given += [text.partition("=")[2] for text in options if text.startswith(f"{option}=")]
    if given and (path := Path(given[-1])).is_file():
        os.environ[AUTHORITY_PATH] = str(path.resolve())
        if sentence := expiring(path):
            LOG.warning("%s", sentence)


def warnings(folder: Path) -> list[str]:
    """Return a warning for each of the coordinator's certificates that expires soon."""
    there = [folder / name for name in ("ca.crt", "server.pem") if (folder / name).is_file()]
    return [sentence for path in there if (sentence := expiring(path))]


def _left(certificate: Any) -> Life:
    end, start = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    left = end - datetime.datetime.now(datetime.UTC)
    return Life(left.total_seconds() / 86400, left / (end - start))


def _read(path: Path) -> Any:
    x509 = _cryptography()
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NestfedError(f"{path} is not a certificate: {error}") from error


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _authority(key: Any, days: int) -> bytes:
    """Return the certificate of the authority."""
    x509 = _cryptography()
    extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(digital_signature=False, key_cert_sign=True, crl_sign=True), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ]
    return _signed(AUTHORITY, key.public_key(), key, days, extensions)


def _server(authority: bytes, signer: Any, public: Any, hosts: Sequence[str], days: int) -> bytes:
    """Return the certificate of the SuperLink."""
    x509 = _cryptography()
    issuer = x509.load_pem_x509_certificate(authority)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    places = [_general_name(x509, host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(places), False),
        (_usage(digital_signature=True, key_cert_sign=False, crl_sign=False), True),
        (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    ]
    return _signed(hosts[0] if hosts else "localhost", public, signer, days, extensions)


def _signed(subject: str, public: Any, signer: Any, days: int, extensions: Sequence[tuple[Any, bool]]) -> bytes:
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes

    def named(name: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    signed: bytes = builder.sign(signer, hashes.SHA384()).public_bytes(_pem())
    return signed


def _usage(**allowed: bool) -> Any:
    x509 = _cryptography()
    rest = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**dict.fromkeys(rest, False), **allowed)


def write_key(path: Path) -> None:
    """Write a site's private key to PATH and its public key to PATH.pub."""
    _cryptography()
    from cryptography.hazmat.primitives import serialization

    if path.exists():
        raise NestfedError(f"{path} already exists; keep it, or choose another path.")
    key = _new_key()
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, key, ssh=True)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _write_secret(path: Path, key: Any, ssh: bool = False, passphrase: bytes = b"") -> None:
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(_pem(), form, encryption))


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
