"""The write cap: exact in time, and a bypass where its queue is long."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from store_rig import Rig

from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.store.writecap import QUEUE_S_MAX, WriteCap
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.units import MIB


def test_no_cap_admits_and_delays_nothing() -> None:
    cap = WriteCap(0)
    cap.admitted(1 << 50, 0.0)
    assert cap.admits(0.0)
    assert cap.delay_s(1 << 50, 0.0) == 0.0


def test_writes_are_spaced_at_the_cap_and_idle_time_is_not_saved_up() -> None:
    cap = WriteCap(100)
    assert [cap.delay_s(50, 1000.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert cap.delay_s(50, 1001.5) == 0.0
    assert cap.delay_s(50, 2000.0) == 0.0
    assert cap.delay_s(50, 2000.0) == 0.5


def test_a_queue_over_its_bound_admits_nobody_until_it_has_drained_to_it() -> None:
    cap = WriteCap(100)
    for _ in range(3):
        assert cap.admits(1000.0)
        cap.admitted(100, 1000.0)
    assert not cap.admits(1000.0)
    assert not cap.admits(1000.9)
    assert cap.admits(1003.0 - QUEUE_S_MAX)


async def test_new_shards_stream_past_a_capped_store_and_are_counted(tmp_path: Path) -> None:
    clock, metrics = ManualClock(), Metrics()
    config = StoreConfig(
        path=str(tmp_path), capacity_bytes=64 * MIB, free_floor_ratio=0.0,
        write_bytes_per_s_max=MIB, writes_in_flight_max=1,
    )  # fmt: skip
    store = ShardStore.open(
        config, extent_bytes=shards.EXTENT_BYTES, metrics=metrics, clock=clock
    )  # fmt: skip
    held = []
    for number in range(100):
        reservation = store.reserve(shards.make_spec(number))
        if reservation is None:
            break
        held.append(reservation)

    # Each is reserved with about 212 KiB, and the queue is two seconds of 1 MiB.
    assert 9 <= len(held) <= 11
    assert metrics.get("write_capped_total") == 1
    clock.advance(1.0)
    assert store.reserve(shards.make_spec(200)) is not None
    await store.close()


async def test_no_more_writes_are_under_way_than_allowed(tmp_path: Path) -> None:
    class Counting(DiskFiles):
        lock = threading.Lock()
        running = most = 0

        def write(self, descriptor, data, offset):
            if len(data) < shards.EXTENT_BYTES:  # an end, or what completes a file
                super().write(descriptor, data, offset)
                return
            with self.lock:
                Counting.running += 1
                Counting.most = max(Counting.most, Counting.running)
            super().write(descriptor, data, offset)
            with self.lock:
                Counting.running -= 1

    rig = Rig(tmp_path, files=Counting(), writes_in_flight_max=1)
    await asyncio.gather(*(rig.fill(shards.make_spec(n, shards.EXTENT_BYTES)) for n in range(4)))
    assert Counting.most == 1
    await rig.close()
