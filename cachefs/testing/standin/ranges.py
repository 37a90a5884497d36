"""OSS's own rules for ``Range`` and for conditional requests. Pure.

Without ``x-oss-range-behavior: standard`` a range that is out of bounds is ignored and the whole
object comes with 200; with it the end is clipped, and a start beyond the end is a 416. A unit other
than ``bytes`` is ignored either way.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping

from gpufeed.cachefs.testing.standin.replies import OssError

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def resolve(text: str, size_bytes: int, *, standard: bool) -> tuple[int, int] | None:
    """The half-open range to send with 206, or None: the whole object with 200.

    Raises:
        OssError: 416.
    """
    match = _RANGE.fullmatch(text.split(",", maxsplit=1)[0].strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        begin, end = max(0, size_bytes - int(last)), size_bytes
        valid = 0 < int(last) <= size_bytes
    else:
        begin = int(first)
        end = int(last) + 1 if last else size_bytes
        valid = begin < size_bytes and end <= size_bytes and begin < end
    if valid:
        return begin, end
    if not standard:
        return None
    if begin >= size_bytes or begin >= end:
        raise OssError(
            416, "InvalidRange", "The requested range cannot be satisfied.", "0016-00000502",
            ActualObjectSize=str(size_bytes), RangeRequested=text,
        )  # fmt: skip
    return begin, min(end, size_bytes)


def check_conditions(headers: Mapping[str, str], etag: str, modified_s: float) -> bool:
    """Returns True for 304.

    Raises:
        OssError: 412.
    """

    def failed(name: str) -> OssError:
        return OssError(
            412, "PreconditionFailed",
            "At least one of the pre-conditions you specified did not hold.",
            "0016-00000503", Condition=name,
        )  # fmt: skip

    wanted = headers.get("if-match")
    if wanted is not None and wanted.strip('"') != etag:
        raise failed("If-Match")
    unmodified = _time(headers.get("if-unmodified-since"))
    if unmodified is not None and int(modified_s) > unmodified:
        raise failed("If-Unmodified-Since")
    unwanted = headers.get("if-none-match")
    if unwanted is not None and unwanted.strip('"') == etag:
        return True
    since = _time(headers.get("if-modified-since"))
    return since is not None and int(modified_s) <= since


def _time(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
