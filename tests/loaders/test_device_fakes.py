"""The fake accelerator keeps the contract that the real one keeps."""

import pytest
from device_contract import HostMemoryContract, StreamsContract
from fake_device import MAIN, SIDE, FakeHostMemory, FakeStreams


class TestFakeHostMemory(HostMemoryContract):
    @pytest.fixture
    def host_memory(self):
        return FakeHostMemory()


class TestFakeStreams(StreamsContract):
    @pytest.fixture
    def streams(self):
        return FakeStreams()

    @pytest.fixture
    def device(self, streams):
        return _Device(streams)


class _Device:
    streams = (MAIN, SIDE)

    def __init__(self, streams):
        self._streams = streams

    def hold(self, key):
        self._streams.submit(key, lambda: None)

    def let_go(self, key):
        self._streams.run(key)

    drain = let_go
