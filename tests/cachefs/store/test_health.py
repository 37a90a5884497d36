"""The disk's state machine, every transition of its table."""

from __future__ import annotations

from gpufeed.cachefs.store.health import BACKOFF_S, DiskHealth


def probing() -> DiskHealth:
    health = DiskHealth()
    health.failed(0.0)
    assert health.admits(BACKOFF_S)
    assert health.reserved()
    return health


def test_a_healthy_disk_admits_and_probes_nothing() -> None:
    health = DiskHealth()
    assert health.admits(0.0)
    assert not health.reserved()
    assert health.state == "healthy"


def test_a_failed_disk_admits_nothing_until_the_back_off_is_over() -> None:
    health = DiskHealth()
    health.failed(100.0)
    assert not health.admits(100.0 + BACKOFF_S - 0.1)
    assert health.admits(100.0 + BACKOFF_S)
    assert health.state == "degraded"


def test_asking_is_not_reserving() -> None:
    health = DiskHealth()
    health.failed(0.0)
    assert all(health.admits(BACKOFF_S) for _ in range(3))


def test_one_probe_at_a_time_and_its_success_heals() -> None:
    health = probing()
    assert not health.admits(10 * BACKOFF_S)
    health.probe_succeeded()
    assert health.admits(BACKOFF_S)
    assert health.state == "healthy"


def test_a_failed_probe_backs_off_again() -> None:
    health = probing()
    health.failed(BACKOFF_S)
    health.probe_ended(BACKOFF_S)
    assert not health.admits(BACKOFF_S + 1)
    assert health.admits(2 * BACKOFF_S)


def test_a_probe_that_ended_without_verdict_is_followed_by_another_at_once() -> None:
    health = probing()
    health.probe_ended(BACKOFF_S)
    assert health.admits(BACKOFF_S)


def test_a_success_after_another_failure_proves_nothing() -> None:
    health = probing()
    health.failed(BACKOFF_S)
    health.probe_succeeded()
    assert health.state == "degraded"
