"""What makes the slots of one ring good for DMA: registration, and the gate before their reuse.

A slot is registered once, when its first batch is handed over and the trainer has initialised CUDA
(we never do); its pages are touched before, so that a missing one is an error and not a signal.
What the process's budget or the driver refuses stays as it is, pageable, and is counted; copies
from it are staged by the driver. Slots are unregistered together, when none is held or waiting.

Threads: `register`, `unregister_all` and the settling of `gate` call the driver, so they belong to
the thread that takes batches, never to the feeder's: a call from a second thread would break a
graph that the trainer is capturing. The ring's lock guards `gate`; `streams.current` is for any
thread.
Processes: a forked child's copy calls nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
from dataclasses import dataclass

from gpufeed.cachefs.errors import AlreadyRegisteredError, DeviceError
from gpufeed.loaders.gate import EventGate
from gpufeed.loaders.hostmem import PROCESS_BUDGET, CudaHostMemory, HostMemory, PinnedBudget
from gpufeed.loaders.streams import CudaStreams, Streams

_MADV_POPULATE_WRITE = 23  # Linux 5.14; before, the driver's own access touches the pages


@dataclass(slots=True)
class PinningStats:
    """What a ring's registration counts.

    Attributes:
        registered_count: slots that are registered now.
        registered_bytes: their bytes.
        refused_count: slots that the budget or the driver refused.
        register_s: time that registering took.
        gated_count: batches copied to the heap because copies from other slots were under way.
    """

    registered_count: int = 0
    registered_bytes: int = 0
    refused_count: int = 0
    register_s: float = 0.0
    gated_count: int = 0


class SlotPinning:
    """See the top of the file. One for one ring.

    Args:
        host: registers memory.
        streams: the accelerator's streams.
        budget: bytes that may be registered.
    """

    def __init__(
        self,
        host: HostMemory | None = None,
        streams: Streams | None = None,
        budget: PinnedBudget = PROCESS_BUDGET,
    ) -> None:
        self.streams = CudaStreams() if streams is None else streams
        self.gate = EventGate()
        self.stats = PinningStats()
        self._host = CudaHostMemory() if host is None else host
        self._budget = budget
        self._pid = os.getpid()
        self._registered: dict[int, tuple[int, int]] = {}  # slot: address, bytes
        self._refused: set[int] = set()
        self._given_up = False

    def usable(self) -> bool:
        """True when the driver may be called now."""
        return os.getpid() == self._pid and self.streams.usable()

    def register(self, slot: int, address: int, mapping: mmap.mmap, slot_bytes: int) -> None:
        """Register a slot that is not yet, where that is possible now.

        Args:
            slot: its number.
            address: where it is mapped.
            mapping: of all slots, in order.
            slot_bytes: size of each.
        """
        if slot in self._registered or slot in self._refused or not self.usable():
            return
        if self._given_up or not self._budget.take(slot_bytes):
            self._refuse(slot)
            return
        start = time.monotonic()
        try:
            _touch(mapping, slot * slot_bytes, slot_bytes)
            self._host.register(address, slot_bytes)
        except AlreadyRegisteredError:  # locked, but not ours to unlock
            self._budget.give(slot_bytes)
            self._refuse(slot)
        except DeviceError as error:
            self._budget.give(slot_bytes)
            self._refuse(slot)
            self._give_up(error)
        else:
            self._registered[slot] = (address, slot_bytes)
            self.stats.registered_count += 1
            self.stats.registered_bytes += slot_bytes
        self.stats.register_s += time.monotonic() - start

    def unregister_all(self) -> bool:
        """Before the slots are unmapped. False: some could not be, so they must stay mapped."""
        if not self._registered:
            return True
        if not self.usable():
            return False
        for slot, (address, size_bytes) in list(self._registered.items()):
            try:
                self._host.unregister(address)
            except DeviceError as error:
                warnings.warn(f"batch slots stay in memory: {error}", RuntimeWarning, stacklevel=2)
                return False
            del self._registered[slot]
            self._budget.give(size_bytes)
            self.stats.registered_count -= 1
            self.stats.registered_bytes -= size_bytes
        return True

    def _refuse(self, slot: int) -> None:
        self._refused.add(slot)
        self.stats.refused_count += 1

    def _give_up(self, error: DeviceError) -> None:
        """What was refused once will be refused again, and asking costs milliseconds a slot."""
        self._given_up = True
        warnings.warn(
            f"no more batch slots are registered, batches go on pageable: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _touch(mapping: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset_bytes, size_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # that is a kernel which does not know it
            raise DeviceError(
                f"no memory for {size_bytes} bytes of a batch slot: {error}; use smaller batches "
                "or a larger memory limit"
            ) from error
