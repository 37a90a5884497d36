"""What the filesystems that write raise, and what programs then see."""

from __future__ import annotations

import errno

import pytest

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    IntegrityError,
    NotFoundError,
    OriginUnavailableError,
    UsageError,
)
from gpufeed.cachefs.targeterrors import DETAIL_CHARS_MAX, as_target_errors

ADDRESS = "oss://bucket/key"


class Answer(Exception):
    """As oss2's, whose attributes are what is read."""

    def __init__(self, status: int, code: str = "", body: str = "") -> None:
        super().__init__({"status": status})
        self.status, self.body, self.request_id = status, body, "R-1"
        self.details = {"Code": code} if code else {}
        self.message = "as the service says"


class ClientError(Exception):
    """A client library's own."""


def wrapped(answer: Answer) -> OSError:
    """As ossfs gives it."""
    error = OSError(errno.EIO, str(answer))
    error.__cause__ = answer
    return error


@pytest.mark.parametrize("form", [wrapped, lambda answer: answer], ids=["ossfs", "oss2"])
@pytest.mark.parametrize(
    ("answer", "ours", "pythons", "words"),
    [
        (
            Answer(403, "SignatureDoesNotMatch"),
            AccessDeniedError,
            PermissionError,
            "check key, sec",
        ),
        (Answer(403, "InvalidAccessKeyId"), AccessDeniedError, PermissionError, "target_options"),
        (Answer(403), AccessDeniedError, PermissionError, "HTTP 403, request R-1"),
        (Answer(403, "SecurityTokenExpired"), AccessDeniedError, PermissionError, "a fresh one"),
        (Answer(403, "RequestTimeTooSkewed"), AccessDeniedError, PermissionError, "clock"),
        (Answer(404, "NoSuchBucket"), NotFoundError, FileNotFoundError, "bucket does not exist"),
        (Answer(503, "SlowDown"), OriginUnavailableError, OSError, "SlowDown"),
        (Answer(-2, body="RequestError: refused\n"), OriginUnavailableError, OSError, "refused"),
        (Answer(-1, body="ClientError: bad name"), UsageError, ValueError, "bad name"),
        (Answer(-3, body="InconsistentError: crc"), IntegrityError, OSError, "write it again"),
        (Answer(409, "FileAlreadyExists"), GpufeedError, OSError, "as the service says"),
    ],
)
def test_each_answer_of_oss_is_pythons_and_ours_and_one_line(
    form, answer, ours, pythons, words
) -> None:
    with pytest.raises(ours, match=words) as caught, as_target_errors(ADDRESS):
        raise form(answer)
    assert isinstance(caught.value, pythons)
    text = str(caught.value)
    assert text.startswith(ADDRESS)
    assert "\n" not in text
    assert "{" not in text
    assert "origin.key" not in text


@pytest.mark.parametrize(
    ("foreign", "ours", "pythons"),
    [
        (FileNotFoundError("x"), NotFoundError, FileNotFoundError),
        (PermissionError(errno.EACCES, "no"), AccessDeniedError, PermissionError),
        (ConnectionResetError("gone"), OriginUnavailableError, OSError),
        (TimeoutError("late"), OriginUnavailableError, OSError),
        (ClientError("no endpoint\nanswers"), OriginUnavailableError, OSError),
        (OSError(errno.EIO, "a client's"), GpufeedError, OSError),
    ],
)
def test_other_filesystems_errors_are_of_the_same_classes(foreign, ours, pythons) -> None:
    with pytest.raises(ours) as caught, as_target_errors(ADDRESS):
        raise foreign
    assert isinstance(caught.value, pythons)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        (ADDRESS, FileExistsError("x")),
        (ADDRESS, TypeError("a wrong argument")),
        ("file:///x", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_what_says_enough_stays_as_it_is(address, error) -> None:
    with pytest.raises(type(error)) as caught, as_target_errors(address):
        raise error
    assert caught.value is error


def test_a_clients_long_story_is_cut() -> None:
    with pytest.raises(OriginUnavailableError) as caught, as_target_errors(ADDRESS):
        raise Answer(-2, body="x" * 5000)
    assert DETAIL_CHARS_MAX < len(str(caught.value)) < DETAIL_CHARS_MAX + 200
