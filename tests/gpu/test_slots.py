"""Registered slots under real copies: no copy ever sees what came after its batch."""

import gc
import os
import threading

import pytest
import torch
from cuda_rig import POISON, CudaRig, hold

from gpufeed.loaders import record_stream, to_device


@pytest.fixture
def rig():
    made = CudaRig()
    yield made
    gc.collect()
    made.end()


def all_equal(tensor, value):
    return bool((tensor == value).all())


def test_a_registered_batch_is_pinned_for_torch_and_copies_right(rig):
    batch = rig.batch(3)
    assert rig.pinning.stats.registered_count == 1
    assert batch.is_pinned()
    assert batch.pin_memory().data_ptr() == batch.data_ptr()
    assert all_equal(batch.to("cuda", non_blocking=True), 3)


def test_copies_from_registered_slots_are_asynchronous(rig):
    """What the other tests rest on: a copy under way sees what is written after the call."""
    batch = rig.batch(4)
    hold()
    copy = batch.to("cuda", non_blocking=True)
    batch.fill_(POISON)
    assert all_equal(copy, POISON)


def test_a_slot_is_poisoned_after_its_release_only_when_the_copy_has_ended(rig):
    for fill in range(1, 13):
        batch = rig.batch(fill)
        if fill % 4 == 1:
            hold()
        copy = batch.to("cuda", non_blocking=True)
        del batch
        rig.poison_free_slots()
        if fill % 4 == 1:
            assert rig.ring.waiting_count >= 1
        assert all_equal(copy, fill)
    torch.cuda.synchronize()
    rig.ring.settle()
    assert rig.ring.waiting_count == 0


def test_a_copy_on_a_side_stream_by_to_device(rig):
    side = torch.cuda.Stream()
    batch = rig.batch(5)
    hold(side)
    moved = to_device({"x": [batch]}, "cuda", stream=side)["x"][0]
    del batch
    rig.poison_free_slots()
    assert rig.ring.waiting_count == 1
    assert all_equal(moved, 5)  # on the current stream, which waits by itself


def test_device_memory_of_a_side_stream_is_not_reused_before_the_consumer_has_read_it(rig):
    side = torch.cuda.Stream()
    moved = to_device(rig.batch(6), "cuda", stream=side)
    hold()
    total = moved.sum(dtype=torch.int64)
    count = moved.numel()
    del moved
    with torch.cuda.stream(side):
        for _ in range(4):
            torch.full((1, count), POISON, dtype=torch.uint8, device="cuda")
    assert total.item() == 6 * count


def test_a_copy_of_one_s_own_on_a_side_stream_after_record_stream(rig):
    side = torch.cuda.Stream()
    batch = rig.batch(7)
    hold(side)
    with torch.cuda.stream(side):
        copy = batch.to("cuda", non_blocking=True)
    record_stream(batch, side)
    del batch
    rig.poison_free_slots()
    assert rig.ring.waiting_count == 1
    side.synchronize()
    assert all_equal(copy, 7)


def test_a_batch_let_go_in_another_thread_waits_for_that_thread_s_stream(rig):
    batches, copies = [rig.batch(8)], []

    def consume():
        with torch.cuda.stream(torch.cuda.Stream()):
            hold()
            copies.append(batches[0].to("cuda", non_blocking=True))
            batches.clear()

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    rig.poison_free_slots()
    assert rig.ring.waiting_count == 1
    torch.cuda.synchronize()
    assert all_equal(copies[0], 8)


def test_settling_during_a_capture_breaks_no_graph(rig):
    batch = rig.batch(9)
    copy = batch.to("cuda", non_blocking=True)
    del batch
    x = torch.zeros(4, device="cuda")
    assert (x + 1).tolist() == [1, 1, 1, 1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.ring.settle()
        y = x + 1
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [3, 3, 3, 3]
    assert all_equal(copy, 9)
    rig.ring.settle()
    assert rig.ring.waiting_count == 0


def test_a_forked_child_leaves_the_registration_alone(rig):
    batch = rig.batch(10)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not rig.pinning.usable() and rig.pinning.stats.registered_count == 1 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert batch.is_pinned()
    assert all_equal(batch.to("cuda", non_blocking=True), 10)


def test_a_batch_outlives_its_ring_registered(rig):
    batch = rig.batch(11)
    rig.ring.close()
    assert batch.is_pinned()
    assert all_equal(batch.to("cuda", non_blocking=True), 11)


def test_a_copy_to_another_device_than_the_current_one(rig):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.ones(1, device="cuda:1")
    batch = rig.batch(12)
    hold(torch.cuda.current_stream(1))
    copy = batch.to("cuda:1", non_blocking=True)
    del batch
    rig.poison_free_slots()
    assert rig.ring.waiting_count == 1
    torch.cuda.synchronize(1)
    assert all_equal(copy, 12)
