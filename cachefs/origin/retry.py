"""What to do after a failed attempt. Pure: failures and counts in, a verdict out.

==========================================  ====================================================
failure                                     verdict
==========================================  ====================================================
connection refused, lost, stalled           again, after a back-off
answer that does not fit (200 for a range)  again; at last `IntegrityError`
another etag than asked for                 `ShardChangedError`
a certificate refused, no such interface    `OperatorError`
error answer                                by its code: `gpufeed.cachefs.origin.oss_codes`
==========================================  ====================================================

Back-off doubles from `BASE_S` to `CAP_S`, with jitter, so that many nodes do not come back at once;
it is never shorter than what the service asked for, up to `WAIT_MAX_S`. A probe of an origin that
is known to be down costs no retry: such a call ends with its deadline.
"""

from __future__ import annotations

import math
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
from gpufeed.cachefs.origin.oss_address import settings_for
from gpufeed.cachefs.origin.oss_codes import Action, rule_of

BASE_S = 0.1
CAP_S = 5.0
WAIT_MAX_S = 30.0

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
    rng: random.Random
    deadline_at_s: float = math.inf
    attempts: int = 0
    refreshed: bool = False
    skewed: bool = False

    def judge(self, failure: Failure, now_s: float, *, probe: bool = False) -> Again | GpufeedError:
        """What to do next: try again, or the error to raise.

        Args:
            failure: how the attempt failed.
            now_s: the time.
            probe: the attempt was one to see whether the origin is back, and costs no retry.
        """
        if not probe:
            self.attempts += 1
        action = _action(failure)
        if action is Action.CREDENTIALS and not self.refreshed:
            self.refreshed = True
            return Again(0.0, "credentials")
        if action is Action.CLOCK and not self.skewed:
            self.skewed = True
            return Again(0.0, "clock")
        if action is not Action.AGAIN:
            return _final(self.what, failure, action)
        exponent = max(0, self.attempts - 1)
        delay_s = min(CAP_S, BASE_S * 2**exponent) * self.rng.uniform(0.5, 1.0)
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


def _action(failure: Failure) -> Action:
    if failure.kind is FailureKind.STATUS:
        return rule_of(failure.status, failure.code).action
    if failure.kind is FailureKind.CHANGED:
        return Action.CHANGED
    return Action.AGAIN if failure.kind in _TRANSIENT_KINDS else Action.REFUSED


def _final(what: str, failure: Failure, action: Action) -> GpufeedError:
    if action is Action.CHANGED:
        return ShardChangedError(f"{what}: {failure}")
    advice = _advice(failure)
    if advice:
        return OperatorError(f"{what}: {failure}; {advice}")
    text = f"{what}: {rule_of(failure.status, failure.code).hint} ({failure})"
    if action is Action.NOT_FOUND:
        return NotFoundError(text)
    if action is Action.REFUSED:
        return OperatorError(text)
    return AccessDeniedError(text)


def _advice(failure: Failure) -> str:
    """For what a setting mends; empty otherwise."""
    if failure.kind is FailureKind.CERTIFICATE:
        return "use the endpoint's own name, or name the PEM file of its CA in origin.ca_file"
    if failure.kind is FailureKind.BINDING:
        return (
            "check origin.bind_interface and origin.bind_address, and that the process has "
            "CAP_NET_RAW for an interface"
        )
    return f"the bucket is elsewhere: {settings_for(failure.endpoint)}" if failure.endpoint else ""
