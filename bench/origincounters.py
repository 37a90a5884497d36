"""What the origin was asked for: the OSS stand-in's own counters, read over its control endpoint.

`OriginCounters` of two moments subtract. Without an endpoint (a contender that reads local files)
there is nothing to count and both are 0.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from gpufeed.cachefs.errors import OriginUnavailableError

COUNTERS_PATH = "/_standin/counters"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class OriginCounters:
    """Requests of every kind, and body bytes sent."""

    requests: int = 0
    bytes: int = 0

    def __sub__(self, other: OriginCounters) -> OriginCounters:
        return OriginCounters(self.requests - other.requests, self.bytes - other.bytes)


def read_counters(origin: Mapping[str, str]) -> OriginCounters:
    """Ask the stand-in at ``origin["endpoint"]``.

    Raises:
        OriginUnavailableError: it does not answer as a stand-in.
    """
    endpoint = origin.get("endpoint", "")
    if not endpoint:
        return OriginCounters()
    where = urllib.parse.urlsplit(endpoint)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", COUNTERS_PATH)
        response = connection.getresponse()
        counters = json.loads(response.read())
        return OriginCounters(int(counters["requests"]), int(counters["bytes"]))
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise OriginUnavailableError(
            f"{endpoint}{COUNTERS_PATH}: no counters ({error}); is it an OSS stand-in?"
        ) from error
    finally:
        connection.close()
