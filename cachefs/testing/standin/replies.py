"""Requests and replies as values, and the errors of OSS. Pure: no sockets, no files."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape


@dataclass(slots=True)
class Request:
    """One request, addressed: whichever way the bucket was named, it is in `bucket`."""

    method: str
    bucket: str
    key: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    body: bytes = b""

    def argument(self, name: str) -> str | None:
        """A query argument, or None."""
        for found, value in self.query:
            if found == name:
                return value
        return None

    @property
    def name(self) -> str:
        """``bucket/key``, as counters and fault rules know it."""
        return f"{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class FileBody:
    """Bytes ``[offset, offset + size)`` of a file, as it was when the headers were made."""

    path: str
    offset_bytes: int
    size_bytes: int
    file_bytes: int
    modified_s: float


@dataclass(slots=True)
class Reply:
    """One answer. A HEAD reply names a length but carries no body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: FileBody | None = None
    is_head: bool = False
    pacing_bytes_per_s: int = 0

    @property
    def size_bytes(self) -> int:
        """Length of the body that is sent."""
        return self.file.size_bytes if self.file is not None else len(self.body)


class OssError(Exception):
    """An error as OSS answers it."""

    def __init__(self, status: int, code: str, message: str, ec: str = "", **details: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.ec = ec
        self.details = details

    def reply(self, request_id: str, host: str, *, is_head: bool) -> Reply:
        """The XML body, or for HEAD the same in a header."""
        details = "".join(f"<{k}>{escape(v)}</{k}>" for k, v in self.details.items())
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<Error>'
            f"<Code>{self.code}</Code><Message>{escape(self.message)}</Message>"
            f"<RequestId>{request_id}</RequestId><HostId>{escape(host)}</HostId>{details}"
            f"<EC>{self.ec}</EC></Error>"
        ).encode()
        headers = {"Content-Type": "application/xml"}
        if self.ec:
            headers["x-oss-ec"] = self.ec
        if is_head:
            headers["x-oss-err"] = base64.b64encode(body).decode()
            return Reply(self.status, headers, is_head=True)
        return Reply(self.status, headers, body)


def no_such_key(key: str) -> OssError:
    """404 for an object."""
    return OssError(404, "NoSuchKey", "The specified key does not exist.", "0026-00000001", Key=key)


def no_such_bucket(bucket: str) -> OssError:
    """404 for a bucket."""
    return OssError(
        404, "NoSuchBucket", "The specified bucket does not exist.", "0015-00000101",
        BucketName=bucket,
    )  # fmt: skip


def xml_reply(text: str) -> Reply:
    """200 with a body of XML."""
    return Reply(200, {"Content-Type": "application/xml"}, text.encode())


def parse_xml(body: bytes) -> ET.Element:
    """A request's body.

    Raises:
        OssError: it is no XML.
    """
    try:
        return ET.fromstring(body)  # noqa: S314 a test server's own clients
    except ET.ParseError:
        raise OssError(400, "MalformedXML", "The XML you provided was not well-formed.") from None
