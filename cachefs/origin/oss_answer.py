"""What an answer of OSS says, and whether it is the answer to what was asked. Pure.

A body is taken only after status, ``Content-Range`` and etag were checked here; an error answer
becomes a `Failure` for `gpufeed.cachefs.origin.retry` to judge.
"""

from __future__ import annotations

import base64
import binascii
import email.utils

from gpufeed.cachefs.origin.exchange import Answer, Head
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.origin.oss_xml import ErrorBody, parse_error

# Of any number in a header; a CRC-64 has up to 20.
DIGITS_MAX = 20


def server_offset_s(date: str, now_s: float) -> float:
    """How far the server's clock is ahead of ours; 0 if it did not tell."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:
        return 0.0


def asked_delay_s(head: Head) -> float:
    """By ``x-oss-qos-delay-time`` (milliseconds) the service says that it held the answer back."""
    text = head.headers.get("x-oss-qos-delay-time", "")
    return int(text) / 1000 if _is_number(text) else 0.0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


def check_etag(head: Head, want: str) -> None:
    """A server, or a proxy before it, that does not know ``If-Match`` must not mix versions."""
    told = head.headers.get("etag", "").strip('"')
    if told and told != want:
        raise AttemptFailedError(Failure(FailureKind.CHANGED, f"the answer is of etag {told}"))


def check_range(head: Head, *, whole: bool, expected: str) -> None:
    """Refuse an answer whose bytes are not those asked for, before one is taken."""
    told = head.headers.get("content-range", "")
    if whole and head.status == 200:
        return
    if head.status != 206 or told != expected:
        raise AttemptFailedError(
            Failure(
                FailureKind.WRONG_ANSWER,
                f"HTTP {head.status} with Content-Range {told!r}, want 206 with {expected!r}",
            )
        )


def status_failure(answer: Answer, wait_s: float) -> Failure:
    """An error answer, wherever it says what is wrong: in its body or in its headers."""
    head = answer.head
    body = parse_error(answer.body)
    if not body.code and head.headers.get("x-oss-err"):
        body = _error_header(head.headers["x-oss-err"])
    return Failure(
        FailureKind.STATUS,
        body.message or "no message",
        status=head.status,
        code=body.code,
        ec=body.ec or head.headers.get("x-oss-ec", ""),
        request_id=body.request_id or head.headers.get("x-oss-request-id", ""),
        date=head.headers.get("date", ""),
        wait_s=wait_s,
        endpoint=body.endpoint,
    )


def _error_header(text: str) -> ErrorBody:
    """HEAD answers have no body; the error comes base64-encoded in a header."""
    try:
        return parse_error(base64.b64decode(text, validate=True))
    except binascii.Error:
        return ErrorBody()


def crc_of(head: Head) -> int | None:
    """The whole object's CRC-64/XZ, if the answer tells it."""
    text = head.headers.get("x-oss-hash-crc64ecma", "")
    return int(text) if _is_number(text) else None
