"""ListObjects in both versions: paging, delimiter, url encoding. Pure."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from urllib.parse import quote
from xml.sax.saxutils import escape

from gpufeed.cachefs.testing.standin.objects import Stored
from gpufeed.cachefs.testing.standin.replies import OssError, Request

MAX_KEYS_DEFAULT = 100
MAX_KEYS_LIMIT = 1000


def iso_time(at_s: float) -> str:
    """As in listings."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at_s))


def list_objects(request: Request, keys: Sequence[str], find: Callable[[str], Stored]) -> bytes:
    """The XML of one page.

    Args:
        request: with its query arguments.
        keys: all keys of the bucket, sorted by their bytes.
        find: looks one up.

    Raises:
        OssError: an argument out of range.
    """
    second = request.argument("list-type") == "2"
    prefix = request.argument("prefix") or ""
    delimiter = request.argument("delimiter") or ""
    encoded = request.argument("encoding-type") == "url"
    after = _after(request, second=second)
    count = _max_keys(request.argument("max-keys"))

    def text(value: str) -> str:
        return quote(value, safe="/") if encoded else escape(value)

    names, prefixes, last, more = _page(keys, prefix, delimiter, after, count)
    contents = [entry for key in names if (entry := _entry(key, text, find))]
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult>',
        f"<Name>{request.bucket}</Name><Prefix>{text(prefix)}</Prefix>",
        f"<MaxKeys>{count}</MaxKeys><Delimiter>{text(delimiter)}</Delimiter>",
        f"<IsTruncated>{str(more).lower()}</IsTruncated>",
    ]
    if encoded:
        parts.append("<EncodingType>url</EncodingType>")
    if second:
        parts.append(f"<StartAfter>{text(request.argument('start-after') or '')}</StartAfter>")
        parts.append(f"<KeyCount>{len(contents) + len(prefixes)}</KeyCount>")
        if more:
            token = last.encode().hex()
            parts.append(f"<NextContinuationToken>{text(token)}</NextContinuationToken>")
    else:
        parts.append(f"<Marker>{text(request.argument('marker') or '')}</Marker>")
        if more:
            parts.append(f"<NextMarker>{text(last)}</NextMarker>")
    parts.extend(contents)
    parts.extend(
        f"<CommonPrefixes><Prefix>{text(found)}</Prefix></CommonPrefixes>" for found in prefixes
    )
    parts.append("</ListBucketResult>")
    return "".join(parts).encode()


def _entry(key: str, text: Callable[[str], str], find: Callable[[str], Stored]) -> str:
    try:
        stored = find(key)
    except OssError:
        # Deleted since the keys were gathered: a listing leaves it out, it does not fail.
        return ""
    return (
        f"<Contents><Key>{text(key)}</Key><LastModified>{iso_time(stored.modified_s)}</LastModified>"
        f'<ETag>"{stored.etag}"</ETag><Type>Normal</Type><Size>{stored.size_bytes}</Size>'
        "<StorageClass>Standard</StorageClass><Owner><ID>1</ID><DisplayName>1</DisplayName></Owner>"
        "</Contents>"
    )


def _after(request: Request, *, second: bool) -> str:
    if not second:
        return request.argument("marker") or ""
    token = request.argument("continuation-token")
    if not token:
        return request.argument("start-after") or ""
    try:
        return bytes.fromhex(token).decode()
    except ValueError:
        raise OssError(
            400, "InvalidArgument", "The continuation-token is invalid.", "0017-00000203"
        ) from None


def _max_keys(given: str | None) -> int:
    if not given:
        return MAX_KEYS_DEFAULT
    if not given.isdecimal() or not 1 <= int(given) <= MAX_KEYS_LIMIT:
        raise OssError(
            400, "InvalidArgument", f"max-keys must be 1 to {MAX_KEYS_LIMIT}.", "0017-00000204"
        )
    return int(given)


def _page(
    keys: Sequence[str], prefix: str, delimiter: str, after: str, count: int
) -> tuple[list[str], list[str], str, bool]:
    """Returns keys, common prefixes, the last of either, and whether there is more."""
    at = bisect_right(keys, after.encode(), key=str.encode)
    contents: list[str] = []
    prefixes: list[str] = []
    last = ""
    for key in keys[at:]:
        if not key.startswith(prefix):
            if key.encode() > prefix.encode():
                break
            continue
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        group = key[: cut + len(delimiter)] if cut >= 0 else ""
        if group and (group == last or after.startswith(group)):
            continue
        if len(contents) + len(prefixes) == count:
            return contents, prefixes, last, True
        if group:
            prefixes.append(group)
            last = group
        else:
            contents.append(key)
            last = key
    return contents, prefixes, last, False
