"""What threads share about an origin: who waits while it is down, who is woken, what is shown."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.account import Account, AccountBook, Times, share
from gpufeed.cachefs.origin.failure import Failure, FailureKind
from gpufeed.cachefs.origin.health import FAILING_S, FAILURES_MAX
from gpufeed.cachefs.origin.limits import Sign
from gpufeed.cachefs.testing.clock import ManualClock

LOST = Failure(FailureKind.LOST, "the peer closed")
TIMES = Times(0.01, 0.01)


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def account(metrics, clock):
    return Account("an origin", OriginConfig(), metrics, threads_count=2, clock=clock)


def fail(account: Account, *, probe: bool = False) -> None:
    if not probe:
        account.begin(0)
    account.failed(LOST, probe=probe)


def answer(account: Account, status: int = 200, sign: Sign | None = None, **more: bool) -> None:
    account.begin(0)
    account.answered(TIMES, 0, status, sign=sign, probe=more.get("probe", False))


def bring_down(account: Account, clock: ManualClock) -> None:
    for _ in range(FAILURES_MAX):
        fail(account)
    clock.advance(FAILING_S)
    fail(account)


class Waiters:
    """Tasks that want in, and what they were told."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.told: list[tuple[int, bool]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.waited = 0

    async def add(self, count: int) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._wait(len(self.tasks))))
        await settle()

    async def _wait(self, number: int) -> None:
        def waits() -> None:
            self.waited += 1

        self.told.append((number, await self.account.outage.admitted(waits)))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_while_it_answers_nobody_waits(account):
    waiters = Waiters(account)
    await waiters.add(3)
    assert waiters.told == [(0, False), (1, False), (2, False)]
    assert waiters.waited == 0


async def test_while_it_is_down_one_at_a_time_is_let_out(account, clock, metrics):
    bring_down(account, clock)
    assert metrics.get("origin_degraded") == 1
    assert "last with connection lost" in account.outage.trouble
    waiters = Waiters(account)
    await waiters.add(3)
    assert waiters.told == []
    assert (waiters.waited, metrics.get("origin_waiting")) == (3, 3)
    clock.advance(100.0)
    account.outage._probe_is_due()  # the timer, which runs by the loop's own clock
    await settle()
    assert waiters.told == [(0, True)]
    account.begin(0)
    fail(account, probe=True)
    clock.advance(100.0)
    account.outage._probe_is_due()
    await settle()
    assert waiters.told == [(0, True), (1, True)]
    answer(account, probe=True)
    await settle()
    assert waiters.told == [(0, True), (1, True), (2, False)]
    assert account.outage.trouble == ""
    assert (metrics.get("origin_degraded"), metrics.get("origin_waiting")) == (0, 0)


async def test_a_probe_that_is_given_up_is_the_next_ones(account, clock):
    bring_down(account, clock)
    waiters = Waiters(account)
    await waiters.add(2)
    clock.advance(100.0)
    account.outage._probe_is_due()
    await settle()
    account.given_up(probe=True, begun=False)
    await settle()
    assert waiters.told == [(0, True), (1, True)]


async def test_a_turn_of_one_who_has_gone_is_the_next_ones(account, clock):
    bring_down(account, clock)
    waiters = Waiters(account)
    await waiters.add(3)
    waiters.tasks[0].cancel()
    await settle()
    clock.advance(100.0)
    account.outage._wake_one()
    waiters.tasks[1].cancel()  # its turn is on its way to it
    await settle()
    assert waiters.told == [(2, True)]
    assert len(account.outage._parked) == 0


async def test_a_timer_lets_the_first_out_without_anybodys_doing(metrics, monkeypatch):
    account = Account("an origin", OriginConfig(), metrics)
    monkeypatch.setattr("gpufeed.cachefs.origin.health.FAILING_S", 0.0)
    monkeypatch.setattr("gpufeed.cachefs.origin.health.PROBE_FIRST_S", 0.01)
    account.outage._health._wait_s = 0.01
    for _ in range(FAILURES_MAX + 1):
        fail(account)
    async with asyncio.timeout(60):
        assert await account.outage.admitted(lambda: None)


async def test_an_answer_that_refuses_us_is_a_healthy_origins(account, clock):
    for _ in range(10 * FAILURES_MAX):
        clock.advance(1.0)
        answer(account, 403)
    assert account.outage.trouble == ""
    for _ in range(10 * FAILURES_MAX):
        clock.advance(1.0)
        answer(account, 503)
    assert "HTTP 503" in account.outage.trouble


async def test_limits_are_shown_and_the_end_takes_them_away(account, clock, metrics):
    assert metrics.get("origin_connections_limit") == 64
    assert metrics.get("origin_requests_per_s_limit") == 2000
    assert metrics.get("origin_bytes_per_s_limit") == 0
    for _ in range(40):
        account.begin(0)
    answer(account, 503, Sign.CONNECTIONS)
    assert metrics.get("origin_connections_limit") == 28
    assert account.connections_count(0) + account.connections_count(1) == 28
    clock.advance(1000.0)
    account.begin(0)
    assert metrics.get("origin_connections_limit") == 64
    account.close()
    assert not any(metrics.get(name) for name in metrics.snapshot() if "limit" in name)


def test_an_account_is_an_endpoint_and_a_key(metrics):
    book = AccountBook(metrics, 1)
    one = OriginConfig(endpoint="a", key="k", secret="s")
    assert book.account(one) is book.account(OriginConfig(endpoint="a", key="k", secret="t"))
    assert book.account(one) is not book.account(OriginConfig(endpoint="b", key="k", secret="s"))
    assert book.account(one) is not book.account(OriginConfig(endpoint="a"))
    assert metrics.get("origin_connections_limit") == 3 * 64
    book.close()
    assert metrics.get("origin_connections_limit") == 0


@pytest.mark.parametrize(("total", "parts"), [(64, 3), (5, 5), (7, 2)])
def test_shares_add_up(total, parts):
    shares = [share(total, parts, i) for i in range(parts)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
