"""Where a body goes: the caller's pieces of memory, filled once and in order.

A sink outlives the attempts of one read. The connection of the moment asks `buffer` for the next
bytes' place and tells `advance` how many came; a later attempt goes on at `position_bytes`, so a
target that was reported is never written again.

Lives on the engine's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NOWHERE = memoryview(bytearray(0))


class Sink:
    """The targets of one read and how far they are filled. See the module's text."""

    __slots__ = ("_current", "_index", "_on_target", "_targets", "position_bytes", "total_bytes")

    def __init__(self, targets: Sequence[memoryview], on_target: Callable[[int], None]) -> None:
        self._targets = [_as_bytes(target) for target in targets]
        self._on_target = on_target
        self._index = 0
        self.position_bytes = 0
        self.total_bytes = sum(len(target) for target in self._targets)
        self._current = self._targets[0] if self._targets else _NOWHERE

    @property
    def remaining_bytes(self) -> int:
        """How many bytes are still to come."""
        return self.total_bytes - self.position_bytes

    def buffer(self) -> memoryview:
        """The place of the next bytes: the rest of the target being filled; not empty."""
        if not self._current:
            self.report()
        assert self._current, "nothing is missing"
        return self._current

    def advance(self, received_bytes: int) -> None:
        """Note that the first `received_bytes` of `buffer` hold their bytes."""
        assert 0 < received_bytes <= len(self._current), (received_bytes, len(self._current))
        self.position_bytes += received_bytes
        self._current = self._current[received_bytes:]
        if not self._current:
            self.report()

    def write(self, data: memoryview) -> None:
        """Copy `data`, at most `remaining_bytes` long, to where the next bytes belong."""
        while data:
            place = self.buffer()
            piece_bytes = min(len(data), len(place))
            place[:piece_bytes] = data[:piece_bytes]
            data = data[piece_bytes:]
            self.advance(piece_bytes)

    def report(self) -> None:
        """Report the full target, and the empty ones that follow it; move on to the next."""
        while self._index < len(self._targets) and not self._current:
            index = self._index
            self._index += 1
            more = self._index < len(self._targets)
            self._current = self._targets[self._index] if more else _NOWHERE
            self._on_target(index)


def _as_bytes(target: memoryview) -> memoryview:
    assert not target.readonly, "a target must be writable"
    assert target.contiguous, "a target must be contiguous"
    return target if target.format == "B" and target.ndim == 1 else target.cast("B")
