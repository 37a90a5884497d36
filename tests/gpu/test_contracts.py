"""The adapters over CUDA keep the contracts that their fakes keep."""

import pytest
import torch
from cuda_rig import hold
from device_contract import HostMemoryContract, StreamsContract

from gpufeed.loaders.hostmem import CudaHostMemory
from gpufeed.loaders.streams import CudaStreams, key_of


class TestCudaHostMemory(HostMemoryContract):
    @pytest.fixture
    def host_memory(self):
        torch.ones(1, device="cuda")
        return CudaHostMemory()

    def test_a_refusal_is_not_left_for_the_next_kernel_to_be_blamed_for(self, host_memory, memory):
        address = memory.ctypes.data
        host_memory.register(address, 1 << 20)
        with pytest.raises(Exception, match="712"):
            host_memory.register(address, 1 << 20)
        assert torch.arange(4, device="cuda").add(1).tolist() == [1, 2, 3, 4]
        host_memory.unregister(address)


class TestCudaStreams(StreamsContract):
    @pytest.fixture
    def streams(self):
        torch.ones(1, device="cuda")
        return CudaStreams()

    @pytest.fixture
    def device(self, streams):
        made = _Device()
        yield made
        torch.cuda.synchronize()


class _Device:
    def __init__(self):
        self._streams = {key_of(s): s for s in (torch.cuda.Stream(), torch.cuda.Stream())}
        self.streams = tuple(self._streams)

    def hold(self, key):
        hold(self._streams[key])

    def let_go(self, key):
        self._streams[key].synchronize()

    drain = let_go


def test_what_cuda_is_asked_from_a_callback_initialises_nothing_and_names_the_current_stream():
    streams = CudaStreams()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert key_of(side) in streams.current()
    assert key_of(side) not in streams.current()
    assert len(streams.current()) == torch.cuda.device_count()
