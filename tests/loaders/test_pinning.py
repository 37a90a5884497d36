"""Slots, registration and the gate together, over a fake accelerator."""

import gc
import os
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fake_device import MAIN, OTHER_DEVICE, SIDE, FakeHostMemory, FakeStreams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpufeed.cachefs.errors import AlreadyRegisteredError, DeviceError
from gpufeed.loaders.batch import BatchRecord, HandOver
from gpufeed.loaders.batchslots import SlotRing, find_slot, take_apart_retired
from gpufeed.loaders.gate import EventGate
from gpufeed.loaders.hostmem import PinnedBudget
from gpufeed.loaders.layout import find_layout
from gpufeed.loaders.pinning import SlotPinning
from gpufeed.loaders.transfer import copy_out, record_stream, to_device

SLOT_BYTES = 8192


class Rig:
    """A ring of small slots on a fake accelerator."""

    def __init__(self, *, host=None, streams=None, limit_bytes=1 << 30, lookahead=2):
        self.host = host or FakeHostMemory()
        self.streams = streams or FakeStreams()
        self.budget = PinnedBudget(limit_bytes)
        self.pinning = SlotPinning(self.host, self.streams, self.budget)
        self.ring = SlotRing(pinning=self.pinning)
        assert self.ring.configure(find_layout(np.zeros(SLOT_BYTES, "u1"), 1), lookahead)
        self.hand_over = HandOver(self.ring)
        self.number = 0

    def batch(self, fill=1):
        """A batch as the trainer gets it, all bytes `fill`; None where no slot is free."""
        slot = self.ring.take()
        if slot is None:
            return None
        self.ring.read(slot)[:] = fill
        self.number += 1
        return self.hand_over.to_torch(BatchRecord(self.number, 0, self.number, slot, rows=1))

    def copy(self, batch, stream=MAIN):
        """Start a copy as ``batch.to(device, non_blocking=True)`` does; returns its target."""
        result = []
        address, size = batch.data_ptr(), batch.numel()
        view = _memory(self.ring, address, size)
        self.streams.submit(stream, lambda: result.append(bytes(view)))
        return result

    def end(self):
        """Everything runs, is let go and closed: nothing may be left."""
        for stream in (MAIN, SIDE, OTHER_DEVICE):
            self.streams.run(stream)
        gc.collect()
        self.streams.capturing.clear()
        self.ring.settle()
        assert self.ring.waiting_count == 0
        assert self.ring.free_count == self.ring.shape.slot_count
        self.ring.close()
        assert self.host.ranges == {}
        assert self.host.registered_count == self.host.unregistered_count
        assert self.budget.used_bytes == 0


def _memory(ring, address, size):
    """The bytes themselves, as a device sees them: without holding the batch."""
    slot = ring.slot_of(address)
    if slot is None:
        import ctypes

        return ctypes.string_at(address, size)  # pageable: staged at once
    offset = address - ring._memory.ctypes.data
    return memoryview(ring._mapping)[offset : offset + size]


@pytest.fixture
def rig():
    return Rig()


def test_a_slot_whose_copy_is_under_way_is_not_used_again(rig):
    batch = rig.batch(7)
    slot = rig.ring.slot_of(batch.data_ptr())
    copied = rig.copy(batch)
    del batch
    rig.ring.settle()
    assert rig.ring.waiting_count == 1
    seen = {rig.ring.take() for _ in range(rig.ring.free_count)}
    assert slot not in seen
    for other in seen:
        rig.ring.read(other)[:] = 9
        rig.ring.give_back(other)
    rig.streams.run(MAIN)
    assert copied == [bytes([7]) * SLOT_BYTES]
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_work_after_the_release_is_not_waited_for_once_the_event_is_recorded(rig):
    batch = rig.batch()
    rig.copy(batch)
    del batch
    rig.ring.settle()
    rig.streams.submit(MAIN, lambda: None)
    rig.streams.run(MAIN, 1)
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_a_declared_stream_is_waited_for(rig):
    batch = rig.batch(3)
    copied = rig.copy(batch, SIDE)
    record_stream({"x": [batch]}, _Stream(SIDE))
    del batch
    rig.streams.run(MAIN)
    rig.ring.settle()
    assert rig.ring.waiting_count == 1
    rig.streams.run(SIDE)
    assert copied == [bytes([3]) * SLOT_BYTES]
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_a_copy_by_to_device_is_waited_for_and_nothing_that_its_stream_gets_later(rig):
    batch = rig.batch(4)
    copied = []

    def move(tensor):
        copied.append(rig.copy(tensor, SIDE))
        return torch.empty(0)

    copy_out((batch, ["text", {"again": batch[0]}]), move, SIDE)
    assert len(copied) == 2
    rig.streams.submit(SIDE, lambda: None)
    del batch
    rig.ring.settle()
    assert rig.ring.waiting_count == 1
    rig.streams.run(SIDE, 2)
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    assert copied[0] == [bytes([4]) * SLOT_BYTES]
    rig.end()


def test_every_device_s_current_stream_is_waited_for():
    rig = Rig(streams=FakeStreams((MAIN, OTHER_DEVICE)))
    batch = rig.batch()
    rig.copy(batch, OTHER_DEVICE)
    del batch
    rig.ring.settle()
    assert rig.ring.waiting_count == 1
    rig.streams.run(OTHER_DEVICE)
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_a_release_calls_nothing_and_one_event_serves_all_slots(rig):
    batches = [rig.batch() for _ in range(4)]
    for batch in batches:
        rig.copy(batch)
    calls = rig.host.calls_count
    batches.clear()
    del batch
    assert rig.streams.recorded_count == 0
    assert rig.host.calls_count == calls
    rig.ring.settle()
    assert rig.streams.recorded_count == 1
    rig.end()


def test_batches_beyond_what_copies_leave_free_are_on_the_heap_and_counted(rig):
    for number in range(20):
        batch = rig.batch(number)
        assert batch[0, 0] == number
        rig.copy(batch)
        del batch
        rig.ring.settle()
    assert rig.ring.waiting_count == rig.ring.held_max
    assert rig.pinning.stats.gated_count == 20 - rig.ring.held_max
    assert rig.hand_over.heap_copies_count == 20 - rig.ring.held_max
    assert rig.ring.free_count == rig.ring.shape.slot_count - rig.ring.held_max
    rig.end()


def test_without_cuda_nothing_is_registered_and_nothing_waits(rig):
    rig.streams.initialised = False
    batch = rig.batch()
    del batch
    assert rig.ring.waiting_count == 0
    assert rig.ring.free_count == rig.ring.shape.slot_count
    assert rig.host.calls_count == 0
    rig.streams.initialised = True  # the model went to the device
    batch = rig.batch()
    assert rig.pinning.stats.registered_count == 1
    del batch
    rig.end()


def test_while_a_graph_is_captured_the_driver_is_left_alone(rig):
    batch = rig.batch()
    rig.copy(batch)
    del batch
    calls = rig.host.calls_count
    rig.streams.capturing.add(MAIN)
    rig.ring.settle()
    other = rig.batch()
    assert rig.streams.recorded_count == 0
    assert rig.host.calls_count == calls
    assert rig.ring.waiting_count == 1
    del other
    rig.streams.capturing.clear()
    rig.streams.run(MAIN)
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_a_side_stream_in_a_capture_is_asked_again_later(rig):
    batch = rig.batch()
    rig.streams.capturing.add(SIDE)
    copy_out(batch, lambda tensor: tensor, SIDE)
    del batch
    rig.streams.run(MAIN)
    rig.ring.settle()
    assert rig.ring.waiting_count == 1
    rig.streams.capturing.clear()
    rig.ring.settle()
    assert rig.ring.waiting_count == 0
    rig.end()


def test_a_device_that_failed_frees_no_slot_and_no_memory(rig):
    batch = rig.batch()
    rig.copy(batch)
    del batch
    rig.streams.broken = True
    for _ in range(2):
        with pytest.raises(DeviceError, match="fake device"):
            rig.ring.settle()
    assert rig.ring.waiting_count == 1
    rig.ring.close()
    assert len(rig.host.ranges) == 1
    rig.streams.broken = False
    rig.streams.run(MAIN)
    take_apart_retired()
    assert rig.host.ranges == {}


def test_a_batch_that_outlives_its_ring_is_registered_until_it_is_gone(rig):
    batch = rig.batch(5)
    rig.copy(batch)
    rig.ring.close()
    assert len(rig.host.ranges) == 1
    assert batch[0, 0] == 5
    assert find_slot(batch.data_ptr()) is not None
    del batch
    take_apart_retired()
    assert len(rig.host.ranges) == 1  # the copy is under way still
    rig.streams.run(MAIN)
    other = Rig()
    other.ring.settle()  # whichever ring is used next takes it apart
    assert rig.host.ranges == {}
    assert rig.budget.used_bytes == 0
    other.end()


def test_the_process_s_limit_leaves_slots_pageable_and_counts_them():
    rig = Rig(limit_bytes=2 * SLOT_BYTES)
    batches = [rig.batch(n) for n in range(4)]
    assert rig.pinning.stats.registered_count == 2
    assert rig.pinning.stats.registered_bytes == 2 * SLOT_BYTES
    assert rig.pinning.stats.refused_count == 2
    assert [int(batch[0, 0]) for batch in batches] == [0, 1, 2, 3]
    batches.clear()
    rig.end()


def test_memory_that_somebody_else_locked_is_used_and_not_unlocked(rig):
    slot = rig.ring.take()
    address = rig.ring.read(slot).ctypes.data
    rig.ring.give_back(slot)
    rig.host.register(address, SLOT_BYTES)
    batch = rig.batch()
    assert batch.data_ptr() == address
    assert rig.pinning.stats.refused_count == 1
    del batch
    rig.ring.settle()
    rig.streams.run(MAIN)
    rig.ring.settle()
    rig.ring.close()
    assert list(rig.host.ranges) == [address]


@pytest.mark.parametrize("error", [DeviceError, AlreadyRegisteredError])
@pytest.mark.parametrize("fail_at", range(7))
def test_whichever_registration_fails_batches_go_on_and_nothing_stays_locked(fail_at, error):
    host = FakeHostMemory(fail_at, error)
    rig = Rig(host=host)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        batches = [rig.batch(number) for number in range(7)]
    assert [int(batch[0, 0]) for batch in batches] == list(range(7))
    gives_up = error is DeviceError
    assert len(told) == int(gives_up)
    assert rig.pinning.stats.registered_count == (fail_at if gives_up else 6)
    assert rig.pinning.stats.refused_count == (7 - fail_at if gives_up else 1)
    assert rig.budget.used_bytes == rig.pinning.stats.registered_bytes
    batches.clear()
    rig.end()


def test_slots_that_cannot_be_unregistered_stay_mapped():
    rig = Rig(host=FakeHostMemory(fail_at=1))
    batch = rig.batch()
    del batch
    rig.ring.settle()
    with pytest.warns(RuntimeWarning, match="stay in memory"):
        rig.ring.close()
    assert rig.ring._memory is not None
    take_apart_retired()  # the driver agrees at last
    assert rig.ring._memory is None
    assert rig.host.ranges == {}


def test_a_forked_child_unregisters_nothing(rig):
    batch = rig.batch(6)
    pid = os.fork()
    if pid == 0:
        try:
            calls = rig.host.calls_count
            rig.ring.settle()
            second = rig.batch(8)
            del batch, second
            gc.collect()
            rig.ring.close()
            take_apart_retired()
            os._exit(0 if rig.host.calls_count == calls and rig.host.ranges else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert batch[0, 0] == 6
    assert len(rig.host.ranges) == 1
    del batch
    rig.end()


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def test_to_device_keeps_the_tree_and_is_a_plain_copy_on_a_cpu(rig):
    batch = rig.batch(2)
    tree = {"a": [batch, "text"], "b": (Pair(batch[:, :4], 3), None)}
    moved = to_device(tree, "cpu")
    assert moved["a"][0] is batch
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], tuple)
    assert isinstance(moved["b"][0], Pair)
    assert torch.equal(moved["b"][0].image, batch[:, :4])
    assert moved["b"][1] is None
    assert to_device(torch.ones(2), "meta").device.type == "meta"
    del batch, tree, moved
    rig.end()


def test_memory_that_is_no_slot_is_of_no_concern(rig):
    record_stream([torch.ones(3), torch.empty(0)], _Stream(SIDE))
    assert copy_out(torch.ones(3), lambda tensor: tensor + 1, SIDE).tolist() == [2, 2, 2]
    assert rig.streams.recorded_count == 0
    rig.end()


def test_an_error_in_the_middle_of_a_round_loses_no_slot():
    gate, answers = EventGate(), {}

    class Asked:
        def __init__(self, name):
            self.name = name

        def query(self):
            if answers[self.name] is None:
                raise DeviceError("failed")
            return answers[self.name]

    for slot in range(3):
        gate.attach(slot, Asked(slot))
        assert not gate.release(slot, ())
    answers.update({0: True, 1: None, 2: True})
    with pytest.raises(DeviceError):
        gate.settle(lambda key: None)
    answers[1] = False
    assert gate.settle(lambda key: None) == [0, 2]
    answers[1] = True
    assert gate.settle(lambda key: None) == [1]
    assert gate.waiting_count == 0


class _Stream:
    """What `record_stream` reads of a torch stream."""

    def __init__(self, key):
        self.stream_id, self.device_index, self.device_type = key


class Machine(RuleBasedStateMachine):
    """Any order of the steps of trainer, device and loader: copies see their own bytes."""

    def __init__(self):
        super().__init__()
        self.rig = Rig(limit_bytes=6 * SLOT_BYTES)
        self.held = []
        self.copies = []
        self.fill = 0

    @rule()
    def next_batch(self):
        self.rig.ring.settle()
        self.fill = self.fill % 250 + 1
        batch = self.rig.batch(self.fill)
        assert batch is not None  # the feeder's share is never short
        self.held.append((batch, self.fill))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["current", "declared", "to_device"]))
    def copy(self, data, how):
        # By number: a strategy over the batches would hold them.
        batch, fill = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if how == "to_device":

            def move(tensor):
                self.copies.append((self.rig.copy(tensor, SIDE), fill))
                return tensor

            copy_out(batch, move, SIDE)
            return
        stream = MAIN if how == "current" else SIDE
        self.copies.append((self.rig.copy(batch, stream), fill))
        if how == "declared":
            record_stream(batch, _Stream(SIDE))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(stream=st.sampled_from([MAIN, SIDE]), count=st.integers(1, 4))
    def device_runs(self, stream, count):
        self.rig.streams.run(stream, count)

    @rule()
    def settle(self):
        self.rig.ring.settle()

    @rule(stream=st.sampled_from([MAIN, SIDE]))
    def capture(self, stream):
        self.rig.streams.capturing ^= {stream}

    @invariant()
    def every_copy_that_ran_saw_the_bytes_of_its_batch(self):
        for result, fill in self.copies:
            assert not result or set(result[0]) == {fill}
        self.copies = [one for one in self.copies if not one[0]]

    @invariant()
    def batches_that_are_held_do_not_change(self):
        assert all(set(batch[0].tolist()) == {fill} for batch, fill in self.held[-2:])

    @invariant()
    def registered_memory_is_bounded(self):
        assert sum(self.rig.host.ranges.values()) <= 6 * SLOT_BYTES
        assert self.rig.budget.used_bytes == sum(self.rig.host.ranges.values())

    def teardown(self):
        self.held.clear()
        self.rig.end()
        self.every_copy_that_ran_saw_the_bytes_of_its_batch()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
