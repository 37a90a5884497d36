"""Opening a connection: where to, from where, how long it may take; socket errors translated.

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple

from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.origin.http1 import Connection


class Endpoint(NamedTuple):
    """Where a connection goes. `server_name` is what the certificate must be for."""

    host: str
    port: int
    tls: bool
    server_name: str


async def connect(
    endpoint: Endpoint,
    *,
    connect_timeout_s: float,
    stall_timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Connection:
    """Open a connection from the running loop.

    Raises:
        AttemptFailedError: refused, unreachable, too slow, or the wrong certificate.
    """
    loop = asyncio.get_running_loop()
    where = f"{endpoint.host}:{endpoint.port}"
    try:
        async with asyncio.timeout(connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(loop, stall_timeout_s),
                endpoint.host,
                endpoint.port,
                ssl=tls,
                server_hostname=endpoint.server_name if tls else None,
            )
    except TimeoutError as error:
        raise _failed(
            FailureKind.CONNECT, f"{where} not connected after {connect_timeout_s:g} s"
        ) from error
    except ssl.SSLCertVerificationError as error:
        raise _failed(FailureKind.CERTIFICATE, f"{where}: {error.verify_message}") from error
    except OSError as error:
        raise _failed(FailureKind.CONNECT, f"{where}: {error.strerror or error}") from error
    return connection


def _failed(kind: FailureKind, detail: str) -> AttemptFailedError:
    return AttemptFailedError(Failure(kind, detail))
