"""One question at a time, ahead of time; nobody waits while there is something to sign with."""

from __future__ import annotations

import asyncio
import logging
import random
import threading

import pytest

from gpufeed.cachefs.errors import AccessDeniedError, OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials import provider as provider_module
from gpufeed.cachefs.origin.credentials.provider import FixedCredentials, RenewedCredentials
from gpufeed.cachefs.origin.credentials.source import Issued
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.testing.clock import ManualClock

LIFETIME_S = 1000.0


class Scripted:
    """A source that gives what the test wrote; numbered credentials when nothing is written."""

    name = "a script"
    advice = "the test"

    def __init__(self) -> None:
        self.answers: list[Issued | Exception] = []
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.lifetime_s = LIFETIME_S

    async def fetch(self) -> Issued:
        self.asked += 1
        number = self.asked
        await self.gate.wait()
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer or Issued(Credentials(f"k{number}", "s", f"t{number}"), self.lifetime_s)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(provider_module, "PAUSE_S", 0.0)


@pytest.fixture
def source():
    return Scripted()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def provider(source, clock, metrics):
    provider = RenewedCredentials(source, clock=clock, metrics=metrics, rng=random.Random(1))
    yield provider
    await provider.close()


async def settled() -> None:
    """Everything that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_hundred_who_find_none_ask_once(provider, source, metrics):
    source.gate.clear()
    waiting = [asyncio.create_task(provider.get()) for _ in range(100)]
    await settled()
    assert source.asked == 1
    source.gate.set()
    assert {c.key for c in await asyncio.gather(*waiting)} == {"k1"}
    assert (source.asked, metrics.get("credential_renewals_total")) == (1, 1)


async def test_a_hundred_who_find_them_expired_ask_once(provider, source, clock):
    await provider.get()
    clock.advance(LIFETIME_S)
    source.gate.clear()
    waiting = [asyncio.create_task(provider.get()) for _ in range(100)]
    await settled()
    assert source.asked == 2
    source.gate.set()
    assert {c.key for c in await asyncio.gather(*waiting)} == {"k2"}


async def test_they_are_renewed_ahead_of_time_while_the_old_ones_are_served(
    provider, source, clock
):
    await provider.get()
    clock.advance(LIFETIME_S * 0.69)
    await provider.get()
    await settled()
    assert source.asked == 1
    clock.advance(LIFETIME_S * 0.12)
    source.gate.clear()
    # The service hangs: a hundred requests go on with what there is, and one question is open.
    assert {(await provider.get()).key for _ in range(100)} == {"k1"}
    await settled()
    assert source.asked == 2
    source.gate.set()
    await settled()
    assert (await provider.get()).key == "k2"
    await settled()
    assert source.asked == 2


async def test_a_failing_renewal_is_a_warning_and_is_tried_again_after_a_back_off(
    provider, source, clock, metrics, caplog
):
    caplog.set_level(logging.WARNING)
    await provider.get()
    clock.advance(LIFETIME_S * 0.81)
    source.answers = [AccessDeniedError("the role is gone")]
    assert (await provider.get()).key == "k1"
    await settled()
    assert "could not be renewed: the role is gone; they are good for 180 s more" in caplog.text
    assert "check the test" in caplog.text
    assert metrics.get("credential_failures_total") == 1
    assert (await provider.get()).key == "k1"
    await settled()
    assert source.asked == 2
    clock.advance(1.0)
    assert (await provider.get()).key == "k1"
    await settled()
    assert (source.asked, (await provider.get()).key) == (3, "k3")


async def test_only_when_they_are_expired_is_it_an_error_and_the_service_is_not_hammered(
    provider, source, clock
):
    await provider.get()
    clock.advance(LIFETIME_S)
    source.answers = [AccessDeniedError("the role is gone")] * 2
    with pytest.raises(AccessDeniedError) as caught:
        await provider.get()
    assert str(caught.value) == "no credentials from a script: the role is gone; check the test"
    for _ in range(100):
        with pytest.raises(AccessDeniedError, match="the role is gone"):
            await provider.get()
    assert source.asked == 2
    clock.advance(1.0)
    with pytest.raises(AccessDeniedError):
        await provider.get()
    assert source.asked == 3
    clock.advance(2.0)
    assert (await provider.get()).key == "k4"


async def test_a_service_that_does_not_answer_is_asked_three_times_and_one_that_refuses_once(
    provider, source, clock
):
    source.answers = [OriginUnavailableError("busy")] * 2
    assert (await provider.get()).key == "k3"
    clock.advance(LIFETIME_S)
    source.answers = [OriginUnavailableError("busy")] * 3
    with pytest.raises(OriginUnavailableError, match="busy; check the test"):
        await provider.get()
    assert source.asked == 6


async def test_all_who_waited_get_an_error_of_their_own(provider, source):
    source.gate.clear()
    source.answers = [AccessDeniedError("no")]
    waiting = [asyncio.create_task(provider.get()) for _ in range(10)]
    await settled()
    source.gate.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(e) for e in errors} == {AccessDeniedError}
    assert len({id(e) for e in errors}) == 10
    assert source.asked == 1


async def test_refused_ones_are_replaced_once_however_many_were_refused(provider, source):
    old = await provider.get()
    source.gate.clear()
    waiting = [asyncio.create_task(provider.renew(old)) for _ in range(100)]
    await settled()
    source.gate.set()
    await asyncio.gather(*waiting)
    await provider.renew(old)  # a straggler, refused with what has been replaced since
    assert source.asked == 2
    assert (await provider.get()).key == "k2"


async def test_a_source_that_gives_the_refused_ones_again_is_not_asked_at_once(
    provider, source, clock
):
    old = await provider.get()
    source.answers = [Issued(old, LIFETIME_S)]
    for _ in range(50):
        await provider.renew(old)
    assert source.asked == 2
    clock.advance(provider_module.REFUSED_AGAIN_S)
    await provider.renew(old)
    assert (await provider.get()).key == "k3"


async def test_a_callers_cancellation_is_not_the_others(provider, source):
    source.gate.clear()
    waiting = [asyncio.create_task(provider.get()) for _ in range(3)]
    await settled()
    waiting[0].cancel()
    await settled()
    assert waiting[0].cancelled()
    source.gate.set()
    assert {c.key for c in await asyncio.gather(*waiting[1:])} == {"k1"}
    assert source.asked == 1


async def test_closing_gives_up_the_question_and_tells_those_who_wait(provider, source):
    source.gate.clear()
    waiting = asyncio.create_task(provider.get())
    await settled()
    await provider.close()
    with pytest.raises(OriginUnavailableError, match="closed"):
        await waiting


async def test_closing_gives_up_what_a_source_asks_with_too(source, clock, metrics):
    source.gate.clear()
    base = RenewedCredentials(source, clock=clock, metrics=metrics)

    class OnBehalf(Scripted):
        async def fetch(self) -> Issued:
            return Issued(await base.get(), LIFETIME_S)

    role = RenewedCredentials(OnBehalf(), clock=clock, metrics=metrics, base=base)
    waiting = asyncio.create_task(role.get())
    await settled()
    assert source.asked == 1
    await role.close()
    with pytest.raises(OriginUnavailableError, match="closed"):
        await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_loops_of_several_threads_share_one_question(provider, source):
    source.gate.clear()
    first = asyncio.create_task(provider.get())
    await settled()
    begun = threading.Barrier(5)

    def elsewhere() -> str:
        async def get() -> str:
            begun.wait(30)
            return (await provider.get()).key

        return asyncio.run(get())

    others = [asyncio.create_task(asyncio.to_thread(elsewhere)) for _ in range(4)]
    await asyncio.to_thread(begun.wait, 30)
    source.gate.set()
    assert [await first, *await asyncio.gather(*others)][1:] == ["k1"] * 4
    assert source.asked == 1


async def test_a_mistake_in_a_source_is_raised_and_logged(provider, source, caplog):
    source.answers = [RuntimeError("a bug")]
    with pytest.raises(RuntimeError, match="a bug"):
        await provider.get()
    assert "asking a script for credentials failed" in caplog.text
    assert (await provider.get()).key == "k2"


async def test_no_log_line_holds_a_secret(provider, source, caplog):
    caplog.set_level(logging.DEBUG)
    source.answers = [Issued(Credentials("the-key", "hush", "hush-token"), LIFETIME_S)]
    await provider.get()
    assert "the-key" in caplog.text
    assert "hush" not in caplog.text


async def test_fixed_ones_stay(source):
    pair = Credentials("k", "s")
    provider = FixedCredentials(pair)
    await provider.renew(pair)
    assert await provider.get() == pair
