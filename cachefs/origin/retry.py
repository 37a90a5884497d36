"""What to do after a failed attempt. Pure: failures and counts in, a verdict out.

==========================================  ====================================================
failure                                     verdict
==========================================  ====================================================
connection refused, lost, stalled           again, after a back-off
5xx, 429, ``RequestTimeout``                again, after a back-off
answer that does not fit (200 for a range)  again; at last `IntegrityError`
``SecurityTokenExpired``, invalid token     fresh credentials once, then denied
``RequestTimeTooSkewed``                    learn the server's clock once, then denied
412, or an etag that differs                `ShardChangedError`
404                                         `NotFoundError`
other 4xx, a certificate refused            `AccessDeniedError`, or `OriginUnavailableError`
==========================================  ====================================================

Back-off doubles from `BASE_S` to `CAP_S`, with jitter, so that many nodes do not come back at once;
it is never shorter than what the service asked for, up to `WAIT_MAX_S`. The deadline bounds the
repeating: an attempt under way is ended by its connection's stall timeout, not by the clock, for on
a slow line a part that still progresses would only begin anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    IntegrityError,
    NotFoundError,
    OperatorError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.origin.failure import Failure, FailureKind

BASE_S = 0.1
CAP_S = 5.0
WAIT_MAX_S = 30.0

TOKEN_CODES = frozenset(
    {"SecurityTokenExpired", "InvalidSecurityToken", "AccessKeyIdAndSecurityTokenNotMatch"}
)
SKEW_CODE = "RequestTimeTooSkewed"
_TRANSIENT_KINDS = frozenset(
    {
        FailureKind.CONNECT,
        FailureKind.IDLE_CLOSED,
        FailureKind.LOST,
        FailureKind.STALL,
        FailureKind.MALFORMED,
        FailureKind.WRONG_ANSWER,
    }
)
_TRANSIENT_CODES = frozenset({"RequestTimeout", "QpsLimitExceeded", "OperationAborted"})

Repair = Literal["none", "credentials", "clock"]


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after `delay_s`, having repaired what `repair` names."""

    delay_s: float
    repair: Repair = "none"


@dataclass(slots=True)
class Retrier:
    """The memory of one operation's attempts."""

    what: str
    retries_max: int
    deadline_at_s: float
    rng: random.Random
    attempts: int = 0
    refreshed: bool = False
    skewed: bool = False

    def judge(self, failure: Failure, now_s: float) -> Again | GpufeedError:
        """What to do next: try again, or the error to raise."""
        self.attempts += 1
        if failure.code in TOKEN_CODES and not self.refreshed:
            self.refreshed = True
            return Again(0.0, "credentials")
        if failure.code == SKEW_CODE and not self.skewed:
            self.skewed = True
            return Again(0.0, "clock")
        if not _is_transient(failure):
            return _final(self.what, failure)
        delay_s = min(CAP_S, BASE_S * 2 ** (self.attempts - 1)) * self.rng.uniform(0.5, 1.0)
        delay_s = max(delay_s, min(failure.wait_s, WAIT_MAX_S))
        if self.attempts > self.retries_max or now_s + delay_s > self.deadline_at_s:
            return self._spent(failure)
        return Again(delay_s)

    def _spent(self, failure: Failure) -> GpufeedError:
        text = (
            f"{self.what} failed {self.attempts} times, last with {failure}; it may work later: "
            "check the network, the endpoint and the bucket's limits"
        )
        if failure.kind is FailureKind.WRONG_ANSWER:
            return IntegrityError(text)
        return OriginUnavailableError(text)


def _is_transient(failure: Failure) -> bool:
    if failure.kind is FailureKind.STATUS:
        return failure.status >= 500 or failure.status == 429 or failure.code in _TRANSIENT_CODES
    return failure.kind in _TRANSIENT_KINDS


def _final(what: str, failure: Failure) -> GpufeedError:
    if failure.kind is FailureKind.CHANGED or failure.status == 412:
        return ShardChangedError(f"{what}: {failure.detail}")
    if failure.status == 404:
        thing = "the bucket" if failure.code == "NoSuchBucket" else "the object"
        return NotFoundError(f"{what}: {thing} does not exist ({failure})")
    if failure.status in (401, 403):
        return AccessDeniedError(f"{what}: {_denied_hint(failure.code)} ({failure})")
    if failure.kind is FailureKind.CERTIFICATE:
        return OperatorError(f"{what}: {failure}; use the endpoint's own name, or fix its CA")
    return OperatorError(f"{what} was refused: {failure}")


def _denied_hint(code: str) -> str:
    if code == "SignatureDoesNotMatch":
        return "the signature is wrong; check that origin.secret belongs to origin.key"
    if code == "InvalidAccessKeyId":
        return "the access key does not exist; check origin.key"
    if code in TOKEN_CODES:
        return "the security token has expired or is not valid; give a fresh one"
    if code == SKEW_CODE:
        return "this machine's clock is wrong by more than 15 minutes; set it"
    return "access denied; check origin.key, origin.secret and the bucket's policy"
