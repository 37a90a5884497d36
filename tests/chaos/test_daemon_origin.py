"""The origin misbehaves under a daemon with a reader: right bytes, or one clear error in time.

Every kind of trouble that the stand-in knows is here; a new one that is not fails the first test.
Afterwards the same daemon serves the next reader as if nothing had been.
"""

from __future__ import annotations

import dataclasses
import signal
import time

import pytest
from chaos_data import put_shards, read_checked

from gpufeed.cachefs.client import Session
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    IntegrityError,
    NotFoundError,
    OriginUnavailableError,
)
from gpufeed.cachefs.testing.pytest_plugin import KEY, SECRET
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.standin.scenario import Effects
from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SHARDS = 3
DEADLINE_S = 10.0
# A request ends within its deadline; a reading is one HEAD and some parts, a few at a time.
READING_S_MAX = 3 * DEADLINE_S
SETTINGS = {
    "GPUFEED_ORIGIN_STALL_TIMEOUT_S": "1",
    "GPUFEED_ORIGIN_DEADLINE_S": str(DEADLINE_S),
    "GPUFEED_ORIGIN_RETRIES_MAX": "4",
    "GPUFEED_STORE_CAPACITY_BYTES": str(64 * MIB),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """A scenario, and how a reading may end: None is with the right bytes."""

    name: str
    scenario: dict
    ends: tuple[type[GpufeedError] | None, ...]
    settings: dict = dataclasses.field(default_factory=dict)


def fault(name: str, *ends: type[GpufeedError] | None, **values: object) -> Trouble:
    return Trouble(name, {"faults": [values]}, ends)


TEMPORARY = AccessKey("STS.key", "sts-secret", "sts-token")
TOKEN = {
    "GPUFEED_ORIGIN_KEY": TEMPORARY.key,
    "GPUFEED_ORIGIN_SECRET": TEMPORARY.secret,
    "GPUFEED_ORIGIN_TOKEN": TEMPORARY.token,
}
DOWN = OriginUnavailableError
TROUBLES = [
    Trouble("slow", {"first_byte_ms": {"kind": "uniform", "low": 20, "high": 80}}, (None,)),
    Trouble("tail", {"first_byte_ms": {"kind": "lognormal", "median": 5, "p99": 200}}, (None,)),
    Trouble("narrow-connections", {"mb_per_s_per_connection": 4}, (None,)),
    Trouble("narrow-total", {"mb_per_s_total": 8}, (None,)),
    fault("throttled-at-first", None, status=503, code="TotalQpsLimitExceeded", first=4),
    fault("throttled-often", None, DOWN, status=503, code="PartitionQpsLimitted", every=3),
    fault("down", DOWN, status=503),
    fault("down-for-heads", DOWN, status=503, methods=["HEAD"]),
    fault("broken", DOWN, status=500, code="InternalError"),
    fault("broken-at-first", None, status=500, code="InternalError", first=3),
    fault("forbidden", AccessDeniedError, status=403, code="AccessDenied"),
    fault("gone", NotFoundError, status=404, code="NoSuchKey"),
    fault("told-to-slow", None, qos_delay_ms=50),
    fault("reset-often", None, DOWN, reset_after_bytes=100_000, every=2),
    fault("reset-always", None, DOWN, reset_after_bytes=100_000),
    fault("reset-at-once", DOWN, reset_after_bytes=0),
    fault("cut-short-often", None, DOWN, truncate_after_bytes=100_000, every=2),
    fault("cut-short-always", None, DOWN, truncate_after_bytes=100_000),
    fault("stalls-at-first", None, stall_after_bytes=50_000, first=2),
    fault("stalls-always", None, DOWN, stall_after_bytes=50_000),
    fault("pauses", None, stall_after_bytes=50_000, stall_s=0.3),
    fault("one-wrong-byte", None, IntegrityError, flip_byte_at=30_000, first=1),
    fault("wrong-bytes", IntegrityError, flip_byte_at=30_000),
    fault("ignores-ranges", None, DOWN, IntegrityError, ignore_range=True),
    fault("ignores-some-ranges", None, DOWN, IntegrityError, ignore_range=True, every=3),
    fault("overwritten", IntegrityError, change_etag=True, after=1),
    fault("sometimes", None, DOWN, status=500, code="InternalError", probability=0.2),
    Trouble("token-expired", {"faults": [{"expire_token": True}]}, (AccessDeniedError,), TOKEN),
]  # fmt: skip


def test_every_kind_of_trouble_is_here() -> None:
    rules = [rule for trouble in TROUBLES for rule in trouble.scenario.get("faults", ())]
    mine = {name for rule in rules for name in rule}
    kinds = {field.name for field in dataclasses.fields(Effects)}
    # A delay is what `qos_delay_ms` does.
    assert kinds - {"delay_s"} <= mine | {"code"}
    shaping = {name for trouble in TROUBLES for name in trouble.scenario} - {"faults"}
    assert shaping == {"first_byte_ms", "mb_per_s_per_connection", "mb_per_s_total"}


@pytest.fixture
def oss_standin(oss_standin_factory):
    """Of this module: it knows a temporary credential too."""
    return oss_standin_factory(keys=(AccessKey(KEY, SECRET), TEMPORARY))


def read(chaos, truth) -> GpufeedError | None:
    """Read everything; the error that ended it, if one did."""
    with Session.connect(chaos.socket) as session:
        try:
            read_checked(session, truth, truth, may_be_refused=True)
        except GpufeedError as error:
            return error
    return None


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_trouble_ends_in_right_bytes_or_one_clear_error(chaos, trouble: Trouble) -> None:
    truth = put_shards(chaos.bucket, SHARDS, seed=60)
    daemon = chaos.begin(**SETTINGS, **trouble.settings)
    chaos.standin.set_scenario(trouble.scenario)
    began_s = time.monotonic()
    error = read(chaos, truth)
    took_s = time.monotonic() - began_s
    print(f"\n{trouble.name}: {took_s:.1f} s, {type(error).__name__}: {error}")
    assert took_s < READING_S_MAX
    if error is None:
        assert None in trouble.ends, f"right bytes where only {trouble.ends} were possible"
    else:
        assert isinstance(error, tuple(end for end in trouble.ends if end is not None)), error
        assert "train-60" in str(error), "the error does not say which shard"
    daemon.settled(sessions=0, fills_in_flight=0, arena_leased_slots=0, origin_in_flight=0)

    chaos.standin.set_scenario({})
    assert read(chaos, truth) is None
    assert daemon.settled(sessions=0, fills_in_flight=0)["store_resident_shards"] == SHARDS
    daemon.end(signal.SIGTERM)
    assert daemon.process.returncode == 0
