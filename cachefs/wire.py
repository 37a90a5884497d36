"""The session protocol: messages between a daemon and its clients, as bytes.

One message is one `SOCK_SEQPACKET` datagram: a 12-byte header and a body. Control messages carry
JSON; those of the data path are packed structs. A JSON body over `INLINE_BODY_BYTES` travels in a
memfd whose descriptor rides along (flag `IN_MEMFD`), since a datagram is bounded by the socket
buffer. File descriptors otherwise appear only in `WELCOME`: the arena.

Header, little-endian, pinned by a test: magic ``GPFD``, version u16, type u16, flags u32.

A client opens with `HELLO`; the daemon answers `WELCOME` or `ERROR` (`gpufeed.cachefs.handshake`).
Requests (`OPEN` and `INDEX`
of datasets; `STAT`, `LIST` and `FILE_*` of single objects) carry an id that their `REPLY`,
`PROGRESS` or `ERROR` repeats; the reply to `FILE_READ` lends one extent. `PLAN` extends the
session's plan; `JOIN` names the job that the session is a rank of, and `FORECAST` tells the order
that it will read in, far ahead of the plan. `EXTENTS`, `SAMPLES`, `SHARD_END` and `FAIL` flow to
the client in plan order. `RELEASE` gives extents back.

Pure: no I/O, so the daemon, the client and a fuzzer share every byte of it.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs import errors
from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError
from gpufeed.cachefs.sampleindex import SampleIndex

MAGIC = b"GPFD"
# Of the frame: it stays what it is, so that any two sides can at least tell each other what to do.
# What bodies mean is agreed on in the handshake (`gpufeed.cachefs.handshake`).
VERSION = 1
MESSAGE_BYTES_MAX = 64 * 1024
INLINE_BODY_BYTES = 48 * 1024
EXTENTS_PER_MESSAGE_MAX = 512
RELEASES_PER_MESSAGE_MAX = 4096
PLAN_IDS_PER_MESSAGE_MAX = 8192
MEMFD_BODY_BYTES_MAX = 1 << 30

FLAG_IN_MEMFD = 1

HEADER = struct.Struct("<4sHHI")
_EXTENT = struct.Struct("<QQIIII")
_PLAN = struct.Struct("<IIQ")
_SAMPLES = struct.Struct("<QQ")


class Kind(enum.IntEnum):
    """Message types. Numbers are never reused."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    INDEX = 4
    REPLY = 5
    PROGRESS = 6
    ERROR = 7
    PLAN = 8
    EXTENTS = 9
    SAMPLES = 10
    SHARD_END = 11
    FAIL = 12
    RELEASE = 13
    STAT = 14
    LIST = 15
    FILE_OPEN = 16
    FILE_READ = 17
    FILE_CLOSE = 18
    JOIN = 19
    FORECAST = 20


@dataclass(frozen=True, slots=True)
class Message:
    """A message with its header taken off. `body` may be empty."""

    kind: Kind
    body: bytes
    in_memfd: bool = False

    def json(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            ProtocolError: it is not one.
        """
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.kind.name} carries no JSON: {error}") from None
        if not isinstance(value, dict):
            raise ProtocolError(f"{self.kind.name} carries {type(value).__name__}, not an object")
        return value


@dataclass(frozen=True, slots=True)
class ExtentEvent:
    """An extent was published: bytes ``[0, length)`` of arena slot `slot`."""

    seq: int
    position: int
    extent: int
    slot: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class SamplesEvent:
    """Samples ``[first, first + len(index))`` of the shard at `position` are all published."""

    position: int
    first: int
    index: SampleIndex


@dataclass(frozen=True, slots=True)
class ShardEndEvent:
    """Everything of plan position `position` was published."""

    position: int
    sample_count: int
    bytes_by_tier: dict[str, int]


@dataclass(frozen=True, slots=True)
class FailEvent:
    """The plan stops at `position`; nothing follows."""

    position: int
    error: GpufeedError


Event = ExtentEvent | SamplesEvent | ShardEndEvent | FailEvent


def pack(kind: Kind, body: bytes = b"", *, in_memfd: bool = False) -> bytes:
    """One datagram."""
    flags = FLAG_IN_MEMFD if in_memfd else 0
    message = HEADER.pack(MAGIC, VERSION, kind, flags) + body
    assert len(message) <= MESSAGE_BYTES_MAX, (kind, len(message))
    return message


def unpack(data: bytes) -> Message:
    """Take the header off.

    Raises:
        ProtocolError: not our magic, another version (it says which side to upgrade), an unknown
            type, or too short.
    """
    if len(data) < HEADER.size:
        raise ProtocolError(f"a message of {len(data)} bytes, shorter than its header")
    magic, version, kind, flags = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"a message that begins with {magic!r}; this is no gpufeed session")
    if version != VERSION:
        older = "the other side" if version < VERSION else "this side"
        raise ProtocolError(
            f"session protocol version {version} met {VERSION}: upgrade {older} of the socket"
        )
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"unknown message type {kind}") from None
    return Message(known, data[HEADER.size :], bool(flags & FLAG_IN_MEMFD))


def pack_json(value: dict[str, Any]) -> bytes:
    """A JSON body."""
    return json.dumps(value, separators=(",", ":")).encode()


# --- data path -------------------------------------------------------------------------------


def pack_extents(events: Sequence[ExtentEvent]) -> bytes:
    """Body of `EXTENTS`."""
    assert len(events) <= EXTENTS_PER_MESSAGE_MAX
    return b"".join(
        _EXTENT.pack(e.seq, e.position, e.extent, e.slot, e.length_bytes, 0) for e in events
    )


def unpack_extents(body: bytes) -> list[ExtentEvent]:
    """See `pack_extents`.

    Raises:
        ProtocolError: not a whole number of records.
    """
    if len(body) % _EXTENT.size:
        raise ProtocolError(f"EXTENTS of {len(body)} bytes, no multiple of {_EXTENT.size}")
    return [ExtentEvent(*record[:5]) for record in _EXTENT.iter_unpack(body)]


def pack_samples(event: SamplesEvent) -> bytes:
    """Body of `SAMPLES`."""
    return _SAMPLES.pack(event.position, event.first) + event.index.encode()


def unpack_samples(body: bytes) -> SamplesEvent:
    """See `pack_samples`.

    Raises:
        ProtocolError: too short, or not an index.
    """
    if len(body) < _SAMPLES.size:
        raise ProtocolError(f"SAMPLES of {len(body)} bytes")
    position, first = _SAMPLES.unpack_from(body)
    return SamplesEvent(position, first, SampleIndex.decode(body[_SAMPLES.size :]))


def split_samples(event: SamplesEvent) -> Iterable[SamplesEvent]:
    """The same samples in pieces that fit a message.

    Raises:
        CapacityError: one sample alone has more fields than a message can name.
    """
    if len(event.index) == 1 and event.index.nbytes > INLINE_BODY_BYTES:
        sample = event.index[0]
        raise CapacityError(
            f"sample {sample.key} has {len(sample.members)} fields, whose names and places take "
            f"{event.index.nbytes} bytes, over {INLINE_BODY_BYTES}: split the sample"
        )
    if event.index.nbytes <= INLINE_BODY_BYTES:
        yield event
        return
    half = len(event.index) // 2
    yield from split_samples(SamplesEvent(event.position, event.first, event.index.slice(0, half)))
    rest = event.index.slice(half, len(event.index))
    yield from split_samples(SamplesEvent(event.position, event.first + half, rest))


def pack_plan(dataset_id: int, shard_ids: Sequence[int], first_position: int) -> bytes:
    """Body of `PLAN`: positions ``first_position …`` are these shards of the dataset."""
    assert len(shard_ids) <= PLAN_IDS_PER_MESSAGE_MAX
    count = len(shard_ids)
    return _PLAN.pack(dataset_id, count, first_position) + struct.pack(f"<{count}I", *shard_ids)


def unpack_plan(body: bytes) -> tuple[int, tuple[int, ...], int]:
    """Returns dataset id, shard ids, first position.

    Raises:
        ProtocolError: lengths disagree.
    """
    if len(body) < _PLAN.size:
        raise ProtocolError(f"PLAN of {len(body)} bytes")
    dataset_id, count, first = _PLAN.unpack_from(body)
    if len(body) != _PLAN.size + 4 * count or count > PLAN_IDS_PER_MESSAGE_MAX:
        raise ProtocolError(f"PLAN says {count} shards in {len(body)} bytes")
    return dataset_id, struct.unpack_from(f"<{count}I", body, _PLAN.size), first


def pack_forecast(dataset_id: int, shard_ids: Sequence[int], *, anew: bool) -> bytes:
    """Body of `FORECAST`: these shards come next; `anew`: instead of what was forecast before."""
    assert len(shard_ids) <= PLAN_IDS_PER_MESSAGE_MAX
    count = len(shard_ids)
    return _PLAN.pack(dataset_id, count, int(anew)) + struct.pack(f"<{count}I", *shard_ids)


def unpack_forecast(body: bytes) -> tuple[int, tuple[int, ...], bool]:
    """Returns dataset id, shard ids, `anew`.

    Raises:
        ProtocolError: lengths disagree.
    """
    dataset_id, shard_ids, anew = unpack_plan(body)
    return dataset_id, shard_ids, bool(anew)


def pack_release(seqs: Sequence[int]) -> bytes:
    """Body of `RELEASE`."""
    assert len(seqs) <= RELEASES_PER_MESSAGE_MAX
    return struct.pack(f"<{len(seqs)}Q", *seqs)


def unpack_release(body: bytes) -> tuple[int, ...]:
    """See `pack_release`.

    Raises:
        ProtocolError: not a whole number of records.
    """
    if len(body) % 8 or len(body) > 8 * RELEASES_PER_MESSAGE_MAX:
        raise ProtocolError(f"RELEASE of {len(body)} bytes")
    return struct.unpack(f"<{len(body) // 8}Q", body)


# --- errors across the socket ----------------------------------------------------------------


def pack_error(error: GpufeedError) -> dict[str, str]:
    """An error as JSON: its class in our tree, and its message."""
    return {"error": type(error).__name__, "message": str(error)}


def unpack_error(value: dict[str, Any]) -> GpufeedError:
    """The same class where we know it, else the root."""
    found = getattr(errors, str(value.get("error")), None)
    message = str(value.get("message", "no message"))
    if isinstance(found, type) and issubclass(found, GpufeedError):
        return found(message)
    return GpufeedError(message)
