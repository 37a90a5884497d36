"""Not judged, only measured: what registration costs, and what copies gain by it."""

import statistics
import time

import numpy as np
import torch
from cuda_rig import CudaRig

from gpufeed.loaders.hostmem import CudaHostMemory

ROUNDS = 12
SLOT_BYTES = 64 << 20


def test_host_to_device_bandwidth(record_property):
    rig = CudaRig(SLOT_BYTES)
    registered = rig.batch(1)
    pinned = torch.ones_like(registered).pin_memory()
    pageable = torch.from_numpy(np.ones(SLOT_BYTES, np.uint8)).reshape(registered.shape)
    target = torch.empty_like(registered, device="cuda")
    contenders = {"registered_slot": registered, "torch_pinned": pinned, "pageable": pageable}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS):  # interleaved
        for name, source in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(4):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            if number:  # the first round warms up
                rates[name].append(4 * SLOT_BYTES / (time.perf_counter() - start) / 1e9)
    for name, found in rates.items():
        record_property(f"{name}_gb_per_s", round(statistics.median(found), 2))
    assert bool((target == 1).all())
    del registered
    rig.end()


def test_cost_of_registering_a_slot(record_property):
    torch.ones(1, device="cuda")
    memory = np.ones(SLOT_BYTES + 4096, np.uint8)
    address = -(-memory.ctypes.data // 4096) * 4096
    host = CudaHostMemory()
    register, unregister = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        host.register(address, SLOT_BYTES)
        middle = time.perf_counter()
        host.unregister(address)
        register.append(middle - start)
        unregister.append(time.perf_counter() - middle)
    record_property("slot_bytes", SLOT_BYTES)
    record_property("register_ms", round(1e3 * statistics.median(register), 3))
    record_property("unregister_ms", round(1e3 * statistics.median(unregister), 3))


def test_cost_of_a_round_of_the_gate(record_property):
    rig = CudaRig(slot_bytes=4096)
    times = []
    for _ in range(300):
        batch = rig.batch(1)
        batch.to("cuda", non_blocking=True)
        del batch
        start = time.perf_counter()
        rig.ring.settle()
        times.append(time.perf_counter() - start)
    record_property("settle_us_median", round(1e6 * statistics.median(times), 2))
    rig.end()
