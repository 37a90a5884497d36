"""Opening a connection: where to, from where, how long it may take; socket errors translated.

A connection may be bound to an interface (``SO_BINDTODEVICE``) or to a source address, so that
object storage keeps off the network that gradients travel on.

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from typing import NamedTuple

from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.origin.http1 import Connection


class Endpoint(NamedTuple):
    """Where a connection goes. `server_name` is what the certificate must be for."""

    host: str
    port: int
    tls: bool
    server_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialling:
    """How connections are opened.

    Attributes:
        connect_timeout_s: from the look-up of the name to the end of the TLS handshake.
        stall_timeout_s: silence after which a connection is given up.
        interface: the network interface to go out by; empty = as the system routes.
        address: the source address; empty = any.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    interface: str = ""
    address: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether an interface or a source address was asked for."""
        return bool(self.interface or self.address)


async def connect(endpoint: Endpoint, how: Dialling, tls: ssl.SSLContext | None) -> Connection:
    """Open a connection from the running loop.

    Raises:
        AttemptFailedError: refused, unreachable, too slow, the wrong certificate, or a network that
            cannot be used.
    """
    loop = asyncio.get_running_loop()
    where = f"{endpoint.host}:{endpoint.port}"
    name = endpoint.server_name if tls else None

    def make() -> Connection:
        return Connection(loop, how.stall_timeout_s)

    try:
        async with asyncio.timeout(how.connect_timeout_s):
            if how.is_bound:
                sock = await _bound_socket(endpoint, how)
                _, connection = await loop.create_connection(
                    make, sock=sock, ssl=tls, server_hostname=name
                )
            else:
                _, connection = await loop.create_connection(
                    make, endpoint.host, endpoint.port, ssl=tls, server_hostname=name
                )
    except TimeoutError as error:
        raise _failed(
            FailureKind.CONNECT, f"{where} not connected after {how.connect_timeout_s:g} s"
        ) from error
    except ssl.SSLCertVerificationError as error:
        raise _failed(FailureKind.CERTIFICATE, f"{where}: {error.verify_message}") from error
    except OSError as error:
        raise _failed(FailureKind.CONNECT, f"{where}: {_told(error, tls)}") from error
    return connection


def _told(error: OSError, tls: ssl.SSLContext | None) -> str:
    told = error.strerror or str(error) or "the peer closed"
    # With TLS, connecting ends after its handshake, which a server without TLS breaks off.
    broken_off = isinstance(error, ssl.SSLError | ConnectionResetError | ConnectionAbortedError)
    return (
        f"{told} in the TLS handshake; perhaps it does not speak TLS"
        if tls and broken_off
        else told
    )


async def _bound_socket(endpoint: Endpoint, how: Dialling) -> socket.socket:
    """A connected socket that goes out as asked for, to the first of the addresses that answers.

    Raises:
        AttemptFailedError: the interface or the source address cannot be used.
        OSError: no address answers.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure = OSError(f"no address for {endpoint.host} that suits {how.address or how.interface}")
    for family, kind, protocol, _, address in found:
        if how.address and (":" in how.address) != (family == socket.AF_INET6):
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            _bind(sock, how)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            # In the system's words: event loops put their own in the place of them.
            failure = OSError(error.errno, os.strerror(error.errno or 0))
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _bind(sock: socket.socket, how: Dialling) -> None:
    try:
        if how.interface:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, how.interface.encode())
        if how.address:
            sock.bind((how.address, 0))
    except OSError as error:
        asked = f"interface {how.interface}" if how.interface else f"address {how.address}"
        raise _failed(FailureKind.BINDING, f"{asked}: {error.strerror or error}") from error


def _failed(kind: FailureKind, detail: str) -> AttemptFailedError:
    return AttemptFailedError(Failure(kind, detail))
