"""Which slots may not be reused yet, because the accelerator may still read them. Pure.

A slot that the trainer holds collects *declared* streams and *attached* events. When it is released
it waits for both and for what the releasing thread's current streams hold. A stream is turned into
an event by `settle`, at the latest possible moment: whatever was submitted before the release was
submitted before the event. A slot is returned by `settle` once, when every event of its has passed.

Invariants: no slot is returned while an event of its has not passed; an error of the device leaves
everything as it was, so a slot whose copies cannot be known to have ended is never reused. One
event a stream and `settle` serves all slots. Nothing here waits. The caller's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpufeed.loaders.streams import Event, StreamKey


@dataclass(slots=True)
class _Uses:
    streams: set[StreamKey] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class EventGate:
    """See the top of the file."""

    def __init__(self) -> None:
        self._held: dict[int, _Uses] = {}
        self._waiting: dict[int, _Uses] = {}

    @property
    def waiting_count(self) -> int:
        """Slots that were released and may not be reused yet."""
        return len(self._waiting)

    def declare(self, slot: int, stream: StreamKey) -> None:
        """A held slot is read on `stream` too; wait for all that it has at the release."""
        self._held.setdefault(slot, _Uses()).streams.add(stream)

    def attach(self, slot: int, event: Event) -> None:
        """A held slot may not be reused before `event` has passed."""
        self._held.setdefault(slot, _Uses()).events.append(event)

    def release(self, slot: int, streams: Iterable[StreamKey]) -> bool:
        """A held slot is let go, while `streams` are current. True: it is free at once."""
        assert slot not in self._waiting, slot
        uses = self._held.pop(slot, None) or _Uses()
        uses.streams.update(streams)
        if not uses.streams and not uses.events:
            return True
        self._waiting[slot] = uses
        return False

    def settle(self, record: Callable[[StreamKey], Event | None]) -> list[int]:
        """Turn streams into events and ask all events; the slots that are free now.

        Raises:
            DeviceError: from `record` or an event.
        """
        recorded: dict[StreamKey, Event | None] = {}
        for uses in self._waiting.values():
            for stream in tuple(uses.streams):
                if stream not in recorded:
                    recorded[stream] = record(stream)
                event = recorded[stream]
                if event is not None:
                    uses.streams.remove(stream)
                    uses.events.append(event)
        asked: dict[int, bool] = {}
        free = []
        for slot, uses in self._waiting.items():
            uses.events = [event for event in uses.events if not _passed(event, asked)]
            if not uses.events and not uses.streams:
                free.append(slot)
        for slot in free:
            del self._waiting[slot]
        return free


def _passed(event: Event, asked: dict[int, bool]) -> bool:
    """Ask each event once a round, however many slots wait for it."""
    if id(event) not in asked:
        asked[id(event)] = event.query()
    return asked[id(event)]
