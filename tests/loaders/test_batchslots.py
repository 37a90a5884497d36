import gc

import numpy as np
import torch

from gpufeed.loaders.batch import BatchRecord, HandOver
from gpufeed.loaders.batchslots import HELD_SLOTS_MAX, SlotRing, SlotWriter
from gpufeed.loaders.layout import find_layout


def ring_of(sample, rows=2, lookahead=2, **options):
    ring = SlotRing(**options)
    ok = ring.configure(find_layout(sample, rows), lookahead)
    return ring, ok


def test_a_slot_is_held_until_the_last_view_of_its_batch_is_gone():
    ring, _ = ring_of((np.zeros(100, "u1"), 1))
    slot = ring.take()
    SlotWriter(ring.fd, ring.shape).write(slot, 0, (np.full(100, 7, "u1"), 5))
    record = BatchRecord(1, 0, 1, slot, rows=1, objects={0: []})
    image, label = HandOver(ring).to_torch(record)
    part = image[0, 10:20].numpy()[2:4]
    del image
    gc.collect()
    assert ring.held_count == 1
    del label
    gc.collect()
    assert ring.held_count == 1
    assert part.tolist() == [7, 7]
    del part
    gc.collect()
    assert ring.held_count == 0
    assert ring.free_count == ring.shape.slot_count
    ring.close()


def test_batches_beyond_the_cap_are_copies_and_nothing_held_changes():
    ring, _ = ring_of(np.zeros(50, "i4"), rows=3)
    writer = SlotWriter(ring.fd, ring.shape)
    hand_over = HandOver(ring)
    held = []
    for number in range(40):
        slot = ring.take()
        for row in range(3):
            writer.write(slot, row, np.full(50, number * 3 + row, "i4"))
        held.append(hand_over.to_torch(BatchRecord(number, 0, number, slot, rows=3)))
    for number, batch in enumerate(held):
        assert batch[:, 0].tolist() == [number * 3 + row for row in range(3)]
        assert torch.equal(batch, batch[:, :1].expand(3, 50))
    assert hand_over.heap_copies_count == 40 - HELD_SLOTS_MAX
    assert ring.held_count == HELD_SLOTS_MAX
    held.clear()
    gc.collect()
    assert ring.held_count == 0
    ring.close()


def test_held_batches_survive_the_ring():
    ring, _ = ring_of(np.zeros(10, "u1"))
    slot = ring.take()
    SlotWriter(ring.fd, ring.shape).write(slot, 0, np.arange(10, dtype="u1"))
    batch = HandOver(ring).to_torch(BatchRecord(1, 0, 1, slot, rows=1))
    ring.close()
    del ring
    gc.collect()
    assert batch[0].tolist() == list(range(10))


def test_tensors_over_a_slot_are_writable():
    ring, _ = ring_of(np.zeros(10, "f4"))
    batch = HandOver(ring).to_torch(BatchRecord(1, 0, 1, ring.take(), rows=2))
    batch.add_(1)
    assert batch.sum().item() == 20
    ring.close()


def test_a_batch_that_is_too_large_for_the_limit_gets_no_ring():
    ring, ok = ring_of(np.zeros(5000, "u1"), rows=10, ring_bytes_max=100_000)
    assert not ok
    assert ring.take() is None
    ring.close()


def test_only_as_many_slots_are_touched_as_are_needed_at_a_time():
    ring, _ = ring_of(np.zeros(10, "u1"), lookahead=6)
    used = set()
    for _ in range(50):
        slot = ring.take()
        used.add(slot)
        ring.give_back(slot)
    assert len(used) == 1
    ring.close()
