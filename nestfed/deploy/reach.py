"""Whether a site reaches the coordinator: its name, its port, its certificate, its clock."""

from __future__ import annotations

import email.utils
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nestfed.core import NestfedError
from nestfed.deploy.preflight import Problem

MOST_OFFSET = 60.0
"""Seconds by which a site's clock may differ from the coordinator's; Flower rejects 300."""
FLEET = "/v1/fleet/"
"""The only path of the SuperLink that sites need."""
CONTROL = "/v1/control/list-runs"
"""A path of its control interface, which sites should not reach."""


@dataclass(frozen=True)
class Address:
    """Where the coordinator is."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """Read HOST:PORT."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise NestfedError(f"The coordinator's address must be HOST:PORT, not {text!r}.")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def unreachable(address: Address, authority: Path, seconds: float = 10.0) -> Iterator[Problem]:
    """Yield what keeps a site from the coordinator; the first obstacle hides those behind it."""
    try:
        places = {str(found[4][0]) for found in socket.getaddrinfo(address.host, address.port)}
    except socket.gaierror as error:
        yield Problem(
            "name", f"the name {address.host} cannot be resolved ({error.strerror}): ask your network's people."
        )
        return
    try:
        with closing(socket.create_connection((address.host, address.port), seconds)):
            pass
    except OSError as error:
        at = ", ".join(sorted(places))
        yield Problem(
            "port", f"{address} ({at}) does not answer ({error}): is the port open, and the coordinator running?"
        )
        return
    try:
        context = ssl.create_default_context(cafile=str(authority))
        server, control = (_answer(address, path, context, seconds) for path in (FLEET, CONTROL))
    except (ssl.SSLError, FileNotFoundError) as error:
        yield Problem("tls", f"{address} is not the coordinator of {authority}: {_reason(error)}.")
        return
    except (OSError, http.client.HTTPException) as error:
        yield Problem("http", f"{address} answers, but not as a SuperLink does ({error}).")
        return
    yield from _clock(server.date)
    if control.status not in (403, 404):
        yield Problem(
            "control",
            f"{address} lets everybody reach the coordinator's control interface: it should be behind the proxy of kit/.",
            minor=True,
        )


@dataclass(frozen=True)
class _Answer:
    status: int
    date: str


def _answer(address: Address, path: str, context: ssl.SSLContext, seconds: float) -> _Answer:
    with closing(
        http.client.HTTPSConnection(address.host, address.port, timeout=seconds, context=context)
    ) as connection:
        connection.request("POST", path, body=b"", headers={"content-type": "application/x-protobuf"})
        found = connection.getresponse()
        return _Answer(found.status, found.getheader("Date", ""))


def _reason(error: Exception) -> str:
    return error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)


def _clock(date: str) -> Iterator[Problem]:
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return  # a proxy that gives no date
    if abs(off := time.time() - theirs) > MOST_OFFSET:
        yield Problem(
            "clock",
            f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the coordinator's: set it.",
        )
