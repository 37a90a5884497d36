"""A ring of real batch slots on a real device, and ways to hold a stream up."""

from __future__ import annotations

import numpy as np
import torch

from gpufeed.loaders.batch import BatchRecord, HandOver
from gpufeed.loaders.batchslots import SlotRing, take_apart_retired
from gpufeed.loaders.hostmem import PinnedBudget
from gpufeed.loaders.layout import find_layout
from gpufeed.loaders.pinning import SlotPinning

SLOT_BYTES = 16 << 20
HOLD_CYCLES = 2_000_000_000  # about a second at the clocks of today's devices
POISON = 0xEE


def hold(stream: torch.cuda.Stream | None = None) -> None:
    """Keep the device busy on a stream (the current one) for about a second."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(HOLD_CYCLES)


class CudaRig:
    """See the top of the file."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        # Kernels are loaded when they are first used, which may wait for what runs: not in a test.
        torch.cuda._sleep(1)
        warm = torch.full((2,), 1, dtype=torch.uint8, device="cuda")
        assert bool((warm == 1).all())
        assert warm.sum(dtype=torch.int64).item() == 2
        self.budget = PinnedBudget()
        self.pinning = SlotPinning(budget=self.budget)
        self.ring = SlotRing(pinning=self.pinning)
        assert self.ring.configure(find_layout(np.zeros(slot_bytes, "u1"), 1), lookahead=2)
        self.hand_over = HandOver(self.ring)
        self._number = 0

    def batch(self, fill: int) -> torch.Tensor:
        """A batch as the trainer gets it, all bytes `fill`."""
        self.ring.settle()
        slot = self.ring.take()
        assert slot is not None
        self.ring.read(slot)[:] = fill
        self._number += 1
        return self.hand_over.to_torch(BatchRecord(self._number, 0, self._number, slot, rows=1))

    def poison_free_slots(self) -> None:
        """What workers may do at this moment with every slot that they could be given."""
        self.ring.settle()
        slots = []
        while (slot := self.ring.take()) is not None:
            self.ring.read(slot)[:] = POISON
            slots.append(slot)
        for slot in slots:
            self.ring.give_back(slot)

    def end(self) -> None:
        """All copies end, the ring is closed; nothing may stay registered."""
        torch.cuda.synchronize()
        self.ring.close()
        take_apart_retired()
        assert self.pinning.stats.registered_count == 0
        assert self.budget.used_bytes == 0
