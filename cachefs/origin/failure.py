"""What can go wrong in one attempt, as a value that `gpufeed.cachefs.origin.retry` judges.

`AttemptFailedError` carries it from the connection up to the retry loop. It never leaves this
package: the loop either tries again or raises one of `gpufeed.cachefs.errors`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gpufeed.cachefs.errors import RetryableError


class FailureKind(enum.Enum):
    """At which stage the attempt failed."""

    CONNECT = "no connection"
    CERTIFICATE = "certificate refused"
    BINDING = "the network asked for cannot be used"
    IDLE_CLOSED = "kept connection was closed"
    LOST = "connection lost"
    STALL = "no progress"
    MALFORMED = "not HTTP as we know it"
    WRONG_ANSWER = "answer does not fit the request"
    CHANGED = "another version of the object"
    STATUS = "error answer"
    OVERTAKEN = "a second request was faster"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt.

    Attributes:
        kind: the stage.
        detail: one clause with the numbers.
        status: HTTP status, 0 if there was no answer.
        code: the service's error code, for example ``NoSuchKey``; empty if not told.
        ec: the service's finer code, for example ``0002-00000007``.
        request_id: what the vendor's support asks for.
        date: the answer's ``Date`` header, from which a wrong clock is corrected.
        wait_s: how long the service asked to stay away, 0 if it did not.
        endpoint: where the service says that the bucket is, if not here.
    """

    kind: FailureKind
    detail: str
    status: int = 0
    code: str = ""
    ec: str = ""
    request_id: str = ""
    date: str = ""
    wait_s: float = 0.0
    endpoint: str = ""

    def __str__(self) -> str:
        """One clause for a message."""
        name = f"HTTP {self.status} {self.code}".rstrip() if self.status else self.kind.value
        text = f"{name}: {self.detail}" if self.detail else name
        return f"{text} (request id {self.request_id})" if self.request_id else text


class AttemptFailedError(RetryableError):
    """One attempt ended without its answer. Internal to the origin package."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
