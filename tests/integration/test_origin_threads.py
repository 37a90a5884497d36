"""Several engine threads; a pace for prefetch; a network of one's own; an origin that is down."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading

import pytest
from origin_rig import DATA, URL, engine_before, gauges_left, put, read_whole

from gpufeed.cachefs.errors import OperatorError, OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import health, retry
from gpufeed.cachefs.testing.origin_contract import Reading


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def endpoint(oss_standin):
    put(oss_standin, "a.tar", DATA)
    return oss_standin.endpoint


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpufeed-origin")]


async def test_calls_are_dealt_to_all_threads_and_share_the_limits(endpoint, metrics, oss_standin):
    oss_standin.set_scenario({"first_byte_ms": 20})
    async with engine_before(endpoint, metrics, threads=3, connections_max=6) as engine:
        assert len(engine_threads()) == 3
        info = await engine.head(URL)
        await asyncio.gather(*(read_whole(engine, info) for _ in range(30)))
        assert metrics.get("origin_connections_limit") == 6
    assert engine_threads() == []
    assert not gauges_left(metrics)


async def test_connections_are_never_more_than_configured(metrics):
    """Counted where they arrive, over all threads."""
    accepted = most = 0

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted, most
        accepted += 1
        most = max(most, accepted)
        if accepted == 5:
            full.set()
        await reader.read()
        accepted -= 1
        writer.close()

    full = asyncio.Event()
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with engine_before(
        f"http://127.0.0.1:{port}", metrics, threads=2, connections_max=5
    ) as engine:
        heads = [asyncio.create_task(engine.head(URL)) for _ in range(40)]
        await full.wait()
        assert metrics.get("origin_in_flight") <= 5
        for task in heads:
            task.cancel()
        await asyncio.gather(*heads, return_exceptions=True)
    assert most == 5
    assert not gauges_left(metrics)
    server.close()


async def test_a_cancelled_call_on_any_thread_gives_its_memory_back(endpoint, metrics, oss_standin):
    async with engine_before(endpoint, metrics, threads=2) as engine:
        info = await engine.head(URL)
        oss_standin.set_scenario({"faults": [{"stall_after_bytes": 100_000}]})
        readings = [Reading(50_000, 950_000) for _ in range(4)]
        begun = [asyncio.Event() for _ in readings]
        running = [
            asyncio.create_task(engine.read_into(info, 0, r.targets, lambda _, e=e: e.set()))
            for r, e in zip(readings, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert metrics.get("origin_in_flight") == 0


async def test_prefetch_is_paced_and_demand_is_not(endpoint, metrics, monkeypatch):
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float, *rest: object) -> None:
        waits.append(delay_s)
        await sleep(0)

    async with engine_before(
        endpoint, metrics, prefetch_bytes_per_s_max=1_000_000, threads=1
    ) as engine:
        info = await engine.head(URL)
        monkeypatch.setattr(asyncio, "sleep", noted)
        for demand in (True, True, False, False, False):
            reading = Reading(1_000_000)
            await engine.read_into(info, 0, reading.targets, reading.reported.append, demand=demand)
            assert reading.memory == DATA
    # The first prefetch goes at once, each further one when the one before is paid.
    assert len(waits) == 2
    assert 0.5 < waits[0] < 1.0 < waits[1] < 2.0


# --- a network of one's own -----------------------------------------------------------------------


async def first_peer(metrics: Metrics, **fields: object) -> str:
    """Where the connection came from that an engine with these settings made."""
    peers: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername")[0])
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with engine_before(
        f"http://127.0.0.1:{port}", metrics, retries_max=0, **fields
    ) as engine:
        with pytest.raises(OriginUnavailableError):
            await engine.head(URL)
    server.close()
    return peers[0]


async def test_the_source_address_is_the_one_asked_for(metrics):
    assert await first_peer(metrics) == "127.0.0.1"
    assert await first_peer(metrics, bind_address="127.0.0.2") == "127.0.0.2"


async def test_an_address_or_interface_that_is_not_ours_is_said(metrics):
    for fields, text in (
        ({"bind_address": "192.0.2.1"}, r"address 192\.0\.2\.1.*bind_address"),
        ({"bind_interface": "no-such-if"}, r"interface no-such-if.*bind_interface.*CAP_NET_RAW"),
    ):
        async with engine_before("http://127.0.0.1:9", metrics, **fields) as engine:
            with pytest.raises(OperatorError, match=text):
                await engine.head(URL)
    assert metrics.get("origin_retries_total") == 0


def can_make_networks() -> bool:
    if shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "gpufeed-try"], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", "gpufeed-try"], check=True)
    return made.returncode == 0


@pytest.fixture
def far_network():
    """A veth pair whose far end answers in a network namespace of its own."""
    if not can_make_networks():
        pytest.skip("needs root and the ip command")
    name, near, far = "gpufeed-far", "gfnear", "gffar"
    inside = ["ip", "netns", "exec", name]
    for command in (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name],
        ["ip", "addr", "add", "198.18.77.1/24", "dev", near],
        ["ip", "link", "set", near, "up"],
        [*inside, "ip", "addr", "add", "198.18.77.2/24", "dev", far],
        [*inside, "ip", "link", "set", far, "up"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    yield near, name
    subprocess.run(["ip", "netns", "del", name], check=True)


async def test_an_interface_is_really_the_way_out(far_network, metrics):
    near, _ = far_network
    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    # By loopback our own address answers at once; bound to the interface it cannot be reached.
    async with engine_before(
        f"http://127.0.0.1:{port}", metrics, bind_interface=near, retries_max=0,
        connect_timeout_s=0.3,
    ) as engine:  # fmt: skip
        with pytest.raises(OriginUnavailableError, match="no connection"):
            await engine.head(URL)
    listener.close()
    # Its network is reached, and says that nobody listens there.
    async with engine_before(
        "http://198.18.77.2:9", metrics, bind_interface=near, retries_max=0
    ) as engine:
        with pytest.raises(OriginUnavailableError, match="refused"):
            await engine.head(URL)


# --- an origin that is down -----------------------------------------------------------------------


async def test_an_origin_that_is_down_is_probed_not_hammered_and_comes_back(
    endpoint, metrics, oss_standin, monkeypatch
):
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(health, "FAILING_S", 0.0)
    monkeypatch.setattr(health, "PROBE_FIRST_S", 0.05)
    monkeypatch.setattr(health, "PROBE_CAP_S", 0.1)
    here, down, probed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    failed = health.OriginHealth.failed

    def noticed(self: health.OriginHealth, now_s: float, *, probe: bool) -> bool:
        degraded = failed(self, now_s, probe=probe)
        for event, is_so in ((down, degraded), (probed, probe)):
            if is_so:
                here.call_soon_threadsafe(event.set)
        return degraded

    monkeypatch.setattr(health.OriginHealth, "failed", noticed)
    async with engine_before(
        endpoint, metrics, threads=2, connections_max=16, retries_max=6
    ) as engine:
        info = await engine.head(URL)
        oss_standin.set_scenario({"faults": [{"status": 503, "code": "InternalError"}]})
        oss_standin.reset()
        readings = [asyncio.create_task(read_whole(engine, info)) for _ in range(300)]
        await down.wait()
        assert metrics.get("origin_degraded") == 1
        # Two probes later there were two requests more, but for those that were under way.
        for _ in range(2):
            probed.clear()
            await probed.wait()
        assert oss_standin.counters()["requests_by_kind"]["get"] < 16 * 8
        assert metrics.get("origin_waiting") > 200
        oss_standin.set_scenario({})
        assert all(data == DATA for data in await asyncio.gather(*readings))
        assert metrics.get("origin_degraded") == 0
    assert not gauges_left(metrics)


async def test_calls_that_wait_for_an_origin_that_is_down_end_by_their_deadline(
    endpoint, metrics, oss_standin, monkeypatch
):
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(health, "FAILING_S", 0.0)
    monkeypatch.setattr(health, "FAILURES_MAX", 3)
    async with engine_before(endpoint, metrics, deadline_s=1.0, retries_max=50) as engine:
        info = await engine.head(URL)
        oss_standin.set_scenario({"faults": [{"status": 500, "code": "InternalError"}]})
        errors = await asyncio.gather(
            *(read_whole(engine, info) for _ in range(100)), return_exceptions=True
        )
        assert {type(error) for error in errors} == {OriginUnavailableError}
        assert any("it has not answered for" in str(error) for error in errors)
        oss_standin.set_scenario({})
        assert await read_whole(engine, info) == DATA
    assert not gauges_left(metrics)
