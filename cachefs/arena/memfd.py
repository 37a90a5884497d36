"""The arena's memory: one sealed memfd, cut into slots of one extent each.

The daemon maps it writable before the seal `F_SEAL_FUTURE_WRITE` goes on; from then on nobody, the
daemon included, can make another writable mapping, write through the descriptor, or resize it.
Readers receive the descriptor over the session socket and map it read-only. No name in any file
system, so a 64 MB ``/dev/shm`` does not matter and nothing is left behind by kill -9.

Pages are allocated when first touched (slots are used from the lowest up) and locked then, where
the limit allows: `mlock2(MLOCK_ONFAULT)`. `lock_note` says what became of the lock. With
`huge_pages` they are of the machine's reserved pool instead, set aside as a whole at the start and
never swapped.

Owned by the daemon; any of its threads may read and write slots that it holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import secrets

from gpufeed.cachefs.config import HUGE_PAGE_BYTES, ArenaConfig
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.units import format_bytes

# linux/fcntl.h; Python's fcntl module names all but FUTURE_WRITE.
F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_MLOCK_ONFAULT = 1
_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_HUGE = os.MFD_HUGETLB | os.MFD_HUGE_2MB
_ADVICE = "lower arena.size_bytes or raise the container's memory limit"


def _raised_limit() -> int:
    """RLIMIT_MEMLOCK, the soft limit raised to the hard one, which everybody may; -1: none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            soft = hard
    return soft


def _huge_advice(size_bytes: int) -> str:
    """What to do where the pool of huge pages does not have an arena."""
    free = "an unknown number"
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        free = next((x.split()[1] for x in file if x.startswith("HugePages_Free:")), free)
    wanted = size_bytes // HUGE_PAGE_BYTES
    return (
        f"it takes {wanted} huge pages of {format_bytes(HUGE_PAGE_BYTES)}, {free} are free: raise "
        "vm.nr_hugepages and the container's hugepages-2Mi, or set arena.huge_pages to false"
    )


class Arena:
    """The memory itself. `slot(i)` is a writable view of slot i.

    Raises:
        CapacityError: the kernel refused a memfd of that size.
    """

    def __init__(self, config: ArenaConfig) -> None:
        self.extent_bytes = config.extent_bytes
        self.slot_count = config.slot_count
        self.size_bytes = self.slot_count * self.extent_bytes
        # Tells this memory from that of any other daemon, before or after.
        self.arena_id = secrets.token_hex(16)
        self.fd = -1
        try:
            self.fd = os.memfd_create("gpufeed-arena", _FLAGS | _HUGE * config.huge_pages)
            os.ftruncate(self.fd, self.size_bytes)
            # Pages of a reserved pool are set aside now, all of them, or this fails.
            self._map = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
            if not config.huge_pages:
                self._ask_for_huge_pages()
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise CapacityError(
                f"no shared memory of {format_bytes(self.size_bytes)} for the arena: {error}; "
                + (_huge_advice(self.size_bytes) if config.huge_pages else _ADVICE)
            ) from None
        self._view = memoryview(self._map)
        self.locked_bytes = 0
        self.lock_note = self._lock() if config.lock_memory else "not locked: switched off"

    def _ask_for_huge_pages(self) -> None:
        """Before the first touch: direct writes pin two pages a slot instead of a thousand.

        Granted where the host's ``transparent_hugepage/shmem_enabled`` is ``advise``.
        """
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def _lock(self) -> str:
        limit_bytes = _raised_limit()
        libc = ctypes.CDLL(None, use_errno=True)
        anchor = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(anchor)
        failed = libc.mlock2(
            ctypes.c_void_p(address), ctypes.c_size_t(self.size_bytes), _MLOCK_ONFAULT
        )
        reason = os.strerror(ctypes.get_errno())
        # The ctypes anchor exports the buffer and would make close() fail.
        del anchor
        if failed:
            allowed = "all" if limit_bytes < 0 else format_bytes(limit_bytes)
            return (
                f"not locked ({reason}; the memlock limit allows {allowed}): raise it to "
                f"{format_bytes(self.size_bytes)} or give CAP_IPC_LOCK, else it may be swapped out"
            )
        self.locked_bytes = self.size_bytes
        return "locked as it is touched"

    def slot(self, slot: int) -> memoryview:
        """Writable view of one slot, `extent_bytes` long, page-aligned."""
        assert 0 <= slot < self.slot_count, slot
        begin = slot * self.extent_bytes
        return self._view[begin : begin + self.extent_bytes]

    def close(self) -> None:
        """Unmap and close. Readers that still map it keep the memory until they let go."""
        self._view.release()
        # A traceback may still hold a view of a slot; the mapping goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
