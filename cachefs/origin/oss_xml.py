"""The XML of OSS: error bodies and listings. Pure.

Bodies are bounded by the connection's limits before they come here; the parser of the standard
library neither fetches external entities nor is handed anything but an authenticated server's word.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What an error answer says."""

    code: str = ""
    message: str = ""
    ec: str = ""
    request_id: str = ""
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One entry of a listing."""

    key: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Listing:
    """One page; `next_token` is empty on the last; `folders` only where a delimiter was given."""

    objects: tuple[ListedObject, ...]
    next_token: str
    folders: tuple[str, ...] = ()


def parse_error(body: bytes) -> ErrorBody:
    """An error body; all fields are empty where it is none."""
    try:
        root = ET.fromstring(body)  # noqa: S314 see the top of the file
    except ET.ParseError:
        return ErrorBody()
    found = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    return ErrorBody(
        found.get("Code", ""), found.get("Message", ""), found.get("EC", ""),
        found.get("RequestId", ""), found.get("Endpoint", ""),
    )  # fmt: skip


def parse_listing(body: bytes) -> Listing | None:
    """A page of ListObjectsV2, or None where the body is none or says that it goes on nowhere."""
    try:
        root = ET.fromstring(body)  # noqa: S314 see the top of the file
        if root.tag.rpartition("}")[2] != "ListBucketResult":
            return None
        return _listing(root)
    except (ET.ParseError, ValueError):
        return None


def _listing(root: ET.Element) -> Listing | None:
    encoded = root.findtext("EncodingType") == "url"

    def text(value: str) -> str:
        return unquote(value) if encoded else value

    objects = tuple(
        ListedObject(
            text(entry.findtext("Key", "")),
            int(entry.findtext("Size", "0")),
            entry.findtext("ETag", "").strip('"'),
        )
        for entry in root.iterfind("Contents")
    )
    folders = tuple(text(e.findtext("Prefix", "")) for e in root.iterfind("CommonPrefixes"))
    token = text(root.findtext("NextContinuationToken", ""))
    if root.findtext("IsTruncated", "").strip().lower() != "true":
        return Listing(objects, "", folders)
    # Taken for the end, a page that does not say where to go on would lose samples silently.
    return Listing(objects, token, folders) if token else None
