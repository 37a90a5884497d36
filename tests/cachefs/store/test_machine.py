"""The store against a model: any order of moves, crashes and wrong bytes among them.

The model is a dict of what was committed. The store may hold less (it evicts and quarantines), but
never more, never other bytes, and never more bytes than its limit; at rest disk, index and accounts
say the same.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_rig import Rig

from gpufeed.cachefs import checksum, layout
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.testing.shards import EXTENT_BYTES, content, make_spec, slot
from gpufeed.cachefs.units import KIB

SHARDS_COUNT = 6
SPECS = [make_spec(number, 1 + number * 40 * KIB) for number in range(SHARDS_COUNT)]
numbers = st.integers(0, SHARDS_COUNT - 1)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.path = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.open: dict[int, tuple] = {}  # number -> reservation, extents written
        self.committed: set[int] = set()
        self.damaged: set[int] = set()
        self.leased: list[int] = []
        self.wanted: set[int] = set()

    @initialize(capacity=st.integers(100, 800))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity * KIB
        self.start()

    def start(self) -> None:
        self.rig = self.run(self._start())

    async def _start(self) -> Rig:
        return Rig(self.path / "cache", capacity_bytes=self.capacity)

    def run(self, work):
        return self.loop.run_until_complete(work)

    @rule(number=numbers)
    def reserve(self, number: int) -> None:
        if number in self.open:
            return
        reservation = self.run(self._reserve(number))
        if reservation is not None:
            assert number not in self.committed or not self.rig.holds(SPECS[number])
            self.open[number] = (reservation, set())
        self._forget_evicted()

    async def _reserve(self, number: int):
        return self.rig.store.reserve(SPECS[number])

    def _forget_evicted(self) -> None:
        for number in list(self.committed):
            if not self.rig.holds(SPECS[number]):
                assert number not in self.leased
                assert number not in self.wanted
                self.committed.remove(number)
                self.damaged.discard(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self._write(number, data.draw(st.integers(0, self._extents(number) - 1)))

    def _extents(self, number: int) -> int:
        return SPECS[number].extent_count(EXTENT_BYTES)

    def _write(self, number: int, extent: int) -> None:
        reservation, written = self.open[number]
        piece = content(SPECS[number])[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES]
        self.run(self.rig.store.write_extent(reservation, extent, slot(piece), len(piece)))
        written.add(extent)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        for extent in set(range(self._extents(number))) - self.open[number][1]:
            self._write(number, extent)
        reservation, _ = self.open.pop(number)
        whole = content(SPECS[number])
        crcs = [
            checksum.crc64(whole[begin : begin + EXTENT_BYTES])
            for begin in range(0, len(whole), EXTENT_BYTES)
        ]
        self.run(self.rig.store.commit(reservation, crcs, None))
        self.committed.add(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.run(self.rig.store.abort(self.open.pop(number)[0]))

    @rule(number=numbers)
    def read(self, number: int) -> None:
        try:
            found = self.run(self.rig.read(SPECS[number]))
        except IntegrityError:
            assert number in self.damaged or number not in self.committed
            self.committed.discard(number)
            self.damaged.discard(number)
            return
        assert number in self.committed - self.damaged
        assert found == content(SPECS[number])

    @rule(number=numbers)
    def lease(self, number: int) -> None:
        if number in self.committed - self.damaged:
            self.rig.store.lease(SPECS[number].digest)
            self.leased.append(number)

    @precondition(lambda self: self.leased)
    @rule()
    def release(self) -> None:
        self.rig.store.release(SPECS[self.leased.pop()].digest)

    @rule(number=numbers)
    def want(self, number: int) -> None:
        self.wanted ^= {number}
        if number in self.wanted:
            self.rig.claim(SPECS[number], session=number)
        else:
            self.rig.uses.drop(number)

    @rule(number=numbers, at=st.integers(0, 1 << 20))
    def corrupt_a_byte(self, number: int, at: int) -> None:
        if number not in self.committed - self.damaged or number in self.leased:
            return
        with self.rig.shard_file(SPECS[number]).open("r+b") as file:
            file.seek(layout.DATA_OFFSET + at % SPECS[number].size_bytes)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        self.damaged.add(number)

    @rule()
    def crash_and_reopen(self) -> None:
        self.run(self.rig.crash())
        committed = set(self.committed)
        self.start()
        self._after_start()
        assert committed <= self.committed

    @rule(capacity=st.integers(100, 800))
    def close_and_reopen(self, capacity: int) -> None:
        self.run(self.rig.store.close())
        self.rig.check()
        self.capacity = capacity * KIB
        self.start()
        self.leased.clear()
        self.wanted.clear()
        self._after_start()

    def _after_start(self) -> None:
        for number in self.wanted:
            self.rig.claim(SPECS[number], session=number)
        self.open.clear()
        self.leased.clear()
        held = {number for number in range(SHARDS_COUNT) if self.rig.holds(SPECS[number])}
        # A crash may bring back what was on its way out; less room may cost the oldest.
        self.committed = held
        self.damaged &= held
        self.rig.check()

    @invariant()
    def the_limit_holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_limit()
            for number in self.committed:
                assert self.rig.holds(SPECS[number])

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.run(self.rig.store.close())
            self.rig.check()
        self.loop.close()
        shutil.rmtree(self.path)


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def test_a_few_random_lives_agree_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=machine_settings(8, 20))


@pytest.mark.slow
def test_many_random_lives_agree_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=machine_settings(40, 40))
