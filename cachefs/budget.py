"""The store's byte budget: what is resident, reserved and still to be unlinked, under a hard limit.

Invariant, after every call: ``resident + reserved + unlinking <= capacity``. Bytes of an evicted
shard count until its file is gone, because until then the disk holds them. Sizes are multiples of
4 KiB: that is what a disk charges.

A **promise** is a reservation that fits once the queued unlinks are done, but not yet. It holds no
bytes; it only keeps later reservations from taking the room that it waits for. Hence also
``resident + reserved + promised <= capacity``.

Pure: no I/O, no locks; used on one thread.
"""

from __future__ import annotations

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.units import BLOCK_BYTES, format_bytes


def _check(size_bytes: int) -> None:
    assert size_bytes >= 0, size_bytes
    assert size_bytes % BLOCK_BYTES == 0, f"{size_bytes} is not a multiple of {BLOCK_BYTES}"


class ByteBudget:
    """Byte accounting with a hard limit. Exactly one call ends each reservation."""

    __slots__ = (
        "capacity_bytes",
        "promised_bytes",
        "reserved_bytes",
        "resident_bytes",
        "unlinking_bytes",
    )

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self.resident_bytes = 0
        self.reserved_bytes = 0
        self.promised_bytes = 0
        self.unlinking_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What the disk holds or may hold at any moment."""
        return self.resident_bytes + self.reserved_bytes + self.unlinking_bytes

    @property
    def available_bytes(self) -> int:
        """What a new reservation may ask for, once everything queued is unlinked."""
        held_bytes = self.resident_bytes + self.reserved_bytes + self.promised_bytes
        return self.capacity_bytes - held_bytes

    def _fits(self, size_bytes: int) -> bool:
        """Now, and without taking what is promised."""
        now_bytes = self.capacity_bytes - self.used_bytes
        return size_bytes <= min(now_bytes, self.available_bytes)

    def reserve(self, size_bytes: int) -> bool:
        """Take `size_bytes` now, or promise them.

        Returns:
            True: reserved. False: promised; call `grant` after each unlink.

        Raises:
            UsageError: the bytes are not available, not even later.
        """
        _check(size_bytes)
        if size_bytes > self.available_bytes:
            raise UsageError(
                f"{format_bytes(size_bytes)} asked of a budget with "
                f"{format_bytes(self.available_bytes)} available; evict first, or bypass"
            )
        self.promised_bytes += size_bytes
        # Those promised before come first, or a stream of small fills could starve a large one.
        waiting = self.promised_bytes > size_bytes
        return not waiting and self.grant(size_bytes)

    def grant(self, size_bytes: int) -> bool:
        """Turn a promise into a reservation if the room is there by now."""
        assert size_bytes <= self.promised_bytes, (size_bytes, self.promised_bytes)
        if self.used_bytes + size_bytes > self.capacity_bytes:
            return False
        self.promised_bytes -= size_bytes
        self.reserved_bytes += size_bytes
        return True

    def withdraw(self, size_bytes: int) -> None:
        """Give a promise back."""
        assert size_bytes <= self.promised_bytes, (size_bytes, self.promised_bytes)
        self.promised_bytes -= size_bytes

    def resize(self, old_bytes: int, new_bytes: int) -> bool:
        """Change the size of one reservation; False and no change where there is no room."""
        _check(new_bytes)
        assert old_bytes <= self.reserved_bytes, (old_bytes, self.reserved_bytes)
        more_bytes = new_bytes - old_bytes
        if more_bytes > 0 and not self._fits(more_bytes):
            return False
        self.reserved_bytes += more_bytes
        return True

    def commit(self, size_bytes: int) -> None:
        """A reservation became resident."""
        assert size_bytes <= self.reserved_bytes, (size_bytes, self.reserved_bytes)
        self.reserved_bytes -= size_bytes
        self.resident_bytes += size_bytes

    def abort(self, size_bytes: int) -> None:
        """A reservation ended and left nothing on the disk."""
        assert size_bytes <= self.reserved_bytes, (size_bytes, self.reserved_bytes)
        self.reserved_bytes -= size_bytes

    def discard(self, size_bytes: int) -> None:
        """A reservation ended; its file waits to be unlinked."""
        self.abort(size_bytes)
        self.unlinking_bytes += size_bytes

    def evict(self, size_bytes: int) -> None:
        """A resident shard left the index; its file waits to be unlinked."""
        assert size_bytes <= self.resident_bytes, (size_bytes, self.resident_bytes)
        self.resident_bytes -= size_bytes
        self.unlinking_bytes += size_bytes

    def unlinked(self, size_bytes: int) -> None:
        """A file is gone."""
        assert size_bytes <= self.unlinking_bytes, (size_bytes, self.unlinking_bytes)
        self.unlinking_bytes -= size_bytes

    def adopt(self, size_bytes: int) -> bool:
        """A shard found on the disk at start is resident; False where the limit forbids it."""
        _check(size_bytes)
        if not self._fits(size_bytes):
            return False
        self.resident_bytes += size_bytes
        return True
