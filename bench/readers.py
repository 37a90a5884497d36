"""How the bytes of one loose image come to a worker: a file, an HTTP GET, an ossfs read.

Each is a callable from a key to bytes. They are made in the trainer, travel to the workers, and
open their connections there: one a process, never shared over a fork.
"""

from __future__ import annotations

import http.client
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpufeed.cachefs.errors import OriginUnavailableError

# Between a request and its answer; the stand-in answers in tens of milliseconds.
_HTTP_TIMEOUT_S = 30.0


class FileReader:
    """Reads keys below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def __call__(self, key: str) -> bytes:
        """The bytes of one file."""
        with open(f"{self._root}/{key}", "rb", buffering=0) as file:
            return file.read()


class HttpReader:
    """Plain GETs of a public bucket, path-style, over one connection a process."""

    def __init__(self, origin: Mapping[str, str], bucket: str) -> None:
        self._endpoint = origin["endpoint"].rstrip("/")
        self._bucket = bucket
        self._connection: http.client.HTTPConnection | None = None

    def url(self, key: str) -> str:
        """Address of an object."""
        return f"{self._endpoint}/{self._bucket}/{urllib.parse.quote(key)}"

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the connection."""
        return {"_endpoint": self._endpoint, "_bucket": self._bucket, "_connection": None}

    def __call__(self, key: str) -> bytes:
        """GET one object.

        Raises:
            OriginUnavailableError: not answered by 200.
        """
        if self._connection is None:
            where = urllib.parse.urlsplit(self._endpoint)
            self._connection = http.client.HTTPConnection(
                where.hostname or "", where.port, timeout=_HTTP_TIMEOUT_S
            )
        self._connection.request("GET", f"/{self._bucket}/{urllib.parse.quote(key)}")
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise OriginUnavailableError(
                f"GET {self.url(key)} answered {response.status}: {body[:200]!r}"
            )
        return body


class OssfsReader:
    """Reads through ossfs, whose file system is made where it is used: in the worker."""

    def __init__(self, origin: Mapping[str, str], bucket: str) -> None:
        self._options = {name: origin[name] for name in ("endpoint", "key", "secret")}
        self._bucket = bucket
        self._files: Any = None

    def __call__(self, key: str) -> bytes:
        """The bytes of one object."""
        if self._files is None:
            import ossfs  # noqa: PLC0415 imported by `prepare`

            self._files = ossfs.OSSFileSystem(skip_instance_cache=True, **self._options)
        return bytes(self._files.cat_file(f"{self._bucket}/{key}"))
