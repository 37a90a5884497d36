"""What each error code of OSS means for us: one table, which the documentation repeats.

Pure data. `gpufeed.cachefs.origin.retry` acts on it, `gpufeed.cachefs.origin.limits` on its signs.
A code that is not in it is judged by its HTTP status.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from gpufeed.cachefs.origin.limits import Sign


class Action(enum.Enum):
    """What to do about an error answer."""

    AGAIN = "again, after a back-off"
    CREDENTIALS = "fresh credentials once, then denied"
    CLOCK = "learn the server's clock once, then denied"
    CHANGED = "`ShardChangedError`"
    NOT_FOUND = "`NotFoundError`"
    DENIED = "`AccessDeniedError`"
    REFUSED = "`OperatorError`"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Attributes:
        status: with which HTTP status the code comes.
        action: what to do.
        hint: what the error tells whoever has to act; empty where nobody has.
        sign: what the limits learn from it.
    """

    status: int
    action: Action
    hint: str = ""
    sign: Sign | None = None


_EXPIRED = "the security token has expired or is not valid; give a fresh one"

CODES: Mapping[str, Rule] = {
    "TotalQpsLimitExceeded": Rule(503, Action.AGAIN, sign=Sign.REQUESTS),
    "PartitionQpsLimitted": Rule(503, Action.AGAIN, sign=Sign.REQUESTS),
    "QpsLimitExceeded": Rule(503, Action.AGAIN, sign=Sign.REQUESTS),
    "MetaOperationQpsLimitExceeded": Rule(503, Action.AGAIN, sign=Sign.REQUESTS),
    "SlowDown": Rule(503, Action.AGAIN, sign=Sign.REQUESTS),
    "DownloadTrafficRateLimitExceeded": Rule(503, Action.AGAIN, sign=Sign.BANDWIDTH),
    "ActiveRequestLimitExceeded": Rule(503, Action.AGAIN, sign=Sign.CONNECTIONS),
    "ServiceUnavailable": Rule(503, Action.AGAIN, sign=Sign.CONNECTIONS),
    "InternalError": Rule(500, Action.AGAIN),
    "RequestTimeout": Rule(400, Action.AGAIN),
    "OperationAborted": Rule(409, Action.AGAIN),
    "SecurityTokenExpired": Rule(403, Action.CREDENTIALS, _EXPIRED),
    "InvalidSecurityToken": Rule(403, Action.CREDENTIALS, _EXPIRED),
    "AccessKeyIdAndSecurityTokenNotMatch": Rule(403, Action.CREDENTIALS, _EXPIRED),
    "RequestTimeTooSkewed": Rule(
        403, Action.CLOCK, "this machine's clock is wrong by more than 15 minutes; set it"
    ),
    "AccessDenied": Rule(
        403, Action.DENIED,
        "access denied; check origin.key, origin.secret and the bucket's policy",
    ),
    "InvalidAccessKeyId": Rule(
        403, Action.DENIED, "the access key does not exist; check origin.key"
    ),
    "SignatureDoesNotMatch": Rule(
        403, Action.DENIED,
        "the signature is wrong; check that origin.secret belongs to origin.key",
    ),
    "UserDisable": Rule(
        403, Action.DENIED, "the account is disabled; check that it has no unpaid bill"
    ),
    "BucketDisable": Rule(403, Action.DENIED, "the bucket is disabled; ask its owner"),
    "SecondLevelDomainForbidden": Rule(
        403, Action.REFUSED,
        "this endpoint wants the bucket in the host's name; give the endpoint by name, not by IP",
    ),
    "InvalidObjectState": Rule(
        403, Action.REFUSED,
        "the object lies in an archive class; restore it, or copy it to the Standard class",
    ),
    "NoSuchKey": Rule(404, Action.NOT_FOUND, "the object does not exist"),
    "SymlinkTargetNotExist": Rule(404, Action.NOT_FOUND, "the symlink's target does not exist"),
    "NoSuchBucket": Rule(404, Action.NOT_FOUND, "the bucket does not exist"),
    "PreconditionFailed": Rule(412, Action.CHANGED),
    "InvalidRange": Rule(416, Action.CHANGED),
    "InvalidArgument": Rule(400, Action.REFUSED, "the service does not take an argument"),
    "InvalidBucketName": Rule(400, Action.REFUSED, "no bucket could have this name"),
    "MethodNotAllowed": Rule(
        405, Action.REFUSED, "the service does not allow this kind of request here"
    ),
}  # fmt: skip


# What a code that is not above is judged by.
STATUSES: Mapping[int, Rule] = {
    401: Rule(401, Action.DENIED, CODES["AccessDenied"].hint),
    403: Rule(403, Action.DENIED, CODES["AccessDenied"].hint),
    404: Rule(404, Action.NOT_FOUND, CODES["NoSuchKey"].hint),
    408: Rule(408, Action.AGAIN),
    412: Rule(412, Action.CHANGED),
    416: Rule(416, Action.CHANGED),
    429: Rule(429, Action.AGAIN, sign=Sign.REQUESTS),
    503: Rule(503, Action.AGAIN, sign=Sign.CONNECTIONS),
}
_FAILING = Rule(500, Action.AGAIN)
_ELSEWHERE = Rule(
    301, Action.REFUSED, "the service sends us elsewhere; set origin.endpoint to the bucket's own"
)
_REFUSED = Rule(400, Action.REFUSED, "the service refused the request")


def rule_of(status: int, code: str) -> Rule:
    """The rule for an error answer; by its status where the code has none."""
    found = CODES.get(code) or STATUSES.get(status)
    if found is not None:
        return found
    if status >= 500:
        return _FAILING
    return _ELSEWHERE if 300 <= status < 400 else _REFUSED
