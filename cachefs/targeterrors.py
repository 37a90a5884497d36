"""Errors of the filesystems that write, translated into those of `fserrors`, each of one line.

ossfs gives `OSError` 5 with a dict for most refusals, and lets some of its client's own exceptions
out. What oss2 knows (status, code, request) is read by its attributes, so that nothing is imported
for it; `oss_codes` says what it means. What is Python's own and says enough, as `FileExistsError`
or a full disk's `OSError`, stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.fserrors import (
    FileCorruptError,
    FileFailedError,
    FileForbiddenError,
    FileMissingError,
    FileUnavailableError,
    FileUsageError,
)
from gpufeed.cachefs.origin.oss_codes import Action, rule_of

# Clients tell their whole retries in one message.
DETAIL_CHARS_MAX = 300
_DENIED = "check key, secret and token in target_options, and the bucket's policy"
# oss2's statuses of arguments that it refuses itself, and of checksums that differ; the others are
# of requests that got no answer.
_CLIENT, _INCONSISTENT = -1, -3


@contextlib.contextmanager
def as_target_errors(address: str) -> Iterator[None]:
    """Raise what the target's filesystem raises about `address` as errors of `fserrors`."""
    try:
        yield
    except GpufeedError:
        raise
    except Exception as error:  # filesystems raise what their clients raise
        translated = _translated(address, error)
        if translated is None:
            raise
        raise translated from error


def _translated(address: str, error: Exception) -> GpufeedError | None:
    """Ours for a foreign one; None leaves it as it is."""
    for one in (error, error.__cause__):
        status, details = getattr(one, "status", None), getattr(one, "details", None)
        if isinstance(status, int) and isinstance(details, dict):
            if status >= 0:
                return _refused(address, status, details.get("Code", ""), one)
            return _not_answered(address, status, _line(getattr(one, "body", "")))
    if isinstance(error, OSError):
        return _of_python(address, error)
    if type(error).__module__ == "builtins":
        return None
    return _unavailable(address, f"{type(error).__name__}: {_line(error)}")


def _of_python(address: str, error: OSError) -> GpufeedError | None:
    if isinstance(error, FileNotFoundError):
        return FileMissingError(f"{address} does not exist")
    if isinstance(error, PermissionError):
        return FileForbiddenError(f"{address}: access denied ({_line(error)}); {_DENIED}")
    if isinstance(error, (ConnectionError, TimeoutError)):
        return _unavailable(address, _line(error))
    if type(error) is not OSError or address.startswith("file://"):
        return None
    return FileFailedError(f"{address}: {_line(error)}")


def _not_answered(address: str, status: int, told: str) -> GpufeedError:
    """For what oss2 found wrong by itself."""
    if status == _CLIENT:
        return FileUsageError(f"{address}: {told}; check the address and the endpoint")
    if status == _INCONSISTENT:
        return FileCorruptError(f"{address}: {told}; write it again")
    return _unavailable(address, told)


def _refused(address: str, status: int, code: str, error: object) -> GpufeedError:
    """For an answer of OSS."""
    request = getattr(error, "request_id", "")
    answer = f"HTTP {status} {code}".strip() + (f", request {request}" if request else "")
    rule = rule_of(status, code)
    if rule.action in (Action.DENIED, Action.CREDENTIALS, Action.CLOCK):
        # Hints about keys speak of the daemon's settings, which do not count here.
        hint = _DENIED if "origin." in rule.hint else rule.hint
        return FileForbiddenError(f"{address}: access denied ({answer}); {hint}")
    if rule.action is Action.NOT_FOUND:
        return FileMissingError(f"{address}: {rule.hint} ({answer})")
    if rule.action is Action.AGAIN:
        return _unavailable(address, answer)
    told = _line(getattr(error, "message", ""))
    return FileFailedError(f"{address}: refused ({answer}): {told}")


def _unavailable(address: str, why: str) -> FileUnavailableError:
    return FileUnavailableError(
        f"{address}: the origin does not answer ({why}); check the endpoint in target_options, or "
        "try again later"
    )


def _line(told: object) -> str:
    """In one line of bounded length."""
    text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
    text = " ".join(text.split())
    return text if len(text) <= DETAIL_CHARS_MAX else f"{text[:DETAIL_CHARS_MAX]}…"
