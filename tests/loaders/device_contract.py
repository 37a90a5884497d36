"""What every `HostMemory` and `Streams` does: the fakes here, the real ones in tests/gpu."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from gpufeed.cachefs.errors import AlreadyRegisteredError

SIZE_BYTES = 1 << 20


class HostMemoryContract:
    """Needs a fixture `host_memory`."""

    @pytest.fixture
    def memory(self):
        fd = os.memfd_create("contract", os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 * SIZE_BYTES)
        mapping = mmap.mmap(fd, 2 * SIZE_BYTES)
        os.close(fd)
        return np.frombuffer(mapping, np.uint8)

    def test_memory_is_registered_and_unregistered_and_may_be_again(self, host_memory, memory):
        address = memory.ctypes.data
        for _ in range(3):
            host_memory.register(address, SIZE_BYTES)
            host_memory.unregister(address)

    def test_neighbours_are_apart(self, host_memory, memory):
        address = memory.ctypes.data
        host_memory.register(address, SIZE_BYTES)
        host_memory.register(address + SIZE_BYTES, SIZE_BYTES)
        host_memory.unregister(address)
        host_memory.unregister(address + SIZE_BYTES)

    def test_what_is_registered_is_not_registered_twice(self, host_memory, memory):
        address = memory.ctypes.data
        host_memory.register(address, SIZE_BYTES)
        with pytest.raises(AlreadyRegisteredError):
            host_memory.register(address, SIZE_BYTES)
        host_memory.unregister(address)
        host_memory.register(address, SIZE_BYTES)  # the refusal took nothing
        host_memory.unregister(address)


class StreamsContract:
    """Needs fixtures `streams` and `device`: `hold(key)`, `let_go(key)`, and two streams of it."""

    def test_an_event_passes_after_what_was_submitted_before_it(self, streams, device):
        key = device.streams[0]
        device.hold(key)
        event = streams.record(key)
        assert not event.query()
        device.let_go(key)
        assert event.query()

    def test_an_event_does_not_wait_for_what_comes_after_it(self, streams, device):
        key = device.streams[0]
        event = streams.record(key)
        device.drain(key)
        device.hold(key)
        assert event.query()
        device.let_go(key)

    def test_streams_do_not_wait_for_each_other(self, streams, device):
        first, second = device.streams
        device.hold(first)
        event = streams.record(second)
        device.drain(second)
        assert event.query()
        device.let_go(first)

    def test_current_streams_are_told_and_can_be_recorded(self, streams, device):
        assert streams.usable()
        assert len(streams.current()) >= 1
        assert all(streams.record(key) is not None for key in streams.current())
