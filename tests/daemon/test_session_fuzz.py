"""Hostile frames: whatever a client sends, the daemon lives, leaks nothing and serves the others.

Each round opens a connection, sometimes says a right HELLO, then sends frames that are random,
cut, nested, of wrong types, or come with descriptors that are no messages. Every gauge is then
what it was, and no descriptor is left. Seeded: a failing round is found again by its number.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct

from session_house import HELLO, House, answer

from gpufeed.cachefs import wire
from gpufeed.cachefs.wire import FLAG_IN_MEMFD, HEADER, Kind

ROUNDS = 3000
FRAMES_MAX = 12
STRANGE = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**200, -(2**70), 1.5, float("nan"), float("inf"),
    "", "x", "\udcff", "a" * 5000, [], [[]], [1, 2], ["a", 1], {}, {"id": {}}, [None] * 300,
)  # fmt: skip
FIELDS = (
    "id", "window_bytes", "token", "whole", "protocol", "software", "urls", "kind",
    "storage_options", "virtual_shard_bytes", "dataset_id", "job", "arena_id", "file", "extent",
    "url", "etag", "cursor", "recursive",
)  # fmt: skip


def strange_json(draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        return b"[" * draw.choice((1, 100, 20_000))
    value = {name: draw.choice(STRANGE) for name in draw.sample(FIELDS, draw.randint(0, 6))}
    if draw.random() < 0.5:
        value["id"] = draw.randint(0, 9)
    return wire.pack_json(value)


def frame(draw: random.Random) -> bytes:
    """One datagram."""
    kind = draw.choice(list(Kind))
    way = draw.randrange(6)
    if way == 0:
        return draw.randbytes(draw.randint(1, 200))
    if way == 1:
        return HEADER.pack(
            draw.choice((b"GPFD", b"XXXX")), draw.choice((0, 1, 2, 65535)),
            draw.choice((0, int(kind), 99, 65535)), draw.choice((0, FLAG_IN_MEMFD, 2**32 - 1)),
        ) + draw.randbytes(draw.randint(0, 60))  # fmt: skip
    if way == 2:
        whole = wire.pack(kind, strange_json(draw)[:40_000])
        return whole[: draw.randint(1, len(whole))]
    if way == 3:
        numbers = [draw.choice((0, 1, 2**31, 2**64 - 1)) for _ in range(draw.randint(0, 9))]
        return wire.pack(kind, struct.pack(f"<{len(numbers)}Q", *numbers))
    if way == 4:
        count = draw.choice((0, 1, 5, 2**32 - 1))
        return wire.pack(kind, struct.pack("<IIQ", draw.randint(0, 3), count, 2**63) + bytes(20))
    return wire.pack(kind, strange_json(draw)[:40_000])


def descriptors(draw: random.Random) -> list[int]:
    """What may ride along: memory, shrunk memory, a folder, a pipe, a socket; up to five."""
    found = []
    for _ in range(draw.randint(1, 5)):
        way = draw.randrange(5)
        if way == 0:
            fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(fd, strange_json(draw))
            if draw.random() < 0.3:
                os.ftruncate(fd, draw.choice((0, 3, 1 << 40)))
            found.append(fd)
        elif way == 1:
            found.append(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
        elif way == 2:
            reading, writing = os.pipe()
            os.close(writing)
            found.append(reading)
        elif way == 3:
            found.append(os.open("/dev/zero", os.O_RDONLY))
        else:
            found.append(os.eventfd(0))
    return found


def send(client: socket.socket, draw: random.Random) -> None:
    data = frame(draw)
    if draw.random() < 0.2:
        riding = descriptors(draw)
        if len(data) >= HEADER.size and draw.random() < 0.7:
            data = wire.pack(draw.choice(list(Kind)), in_memfd=True)
        try:
            socket.send_fds(client, [data], riding)
        finally:
            for fd in riding:
                os.close(fd)
    else:
        client.send(data)


async def test_hostile_frames_end_their_own_session_and_nothing_else(house: House) -> None:
    gc.collect()  # what earlier tests left would go meanwhile
    open_before = len(os.listdir("/proc/self/fd"))
    gauges_before = house.server.metrics.snapshot()
    sent = 0
    for number in range(ROUNDS):
        draw = random.Random(number)
        with house.connect() as client:
            if draw.random() < 0.7:
                client.send(HELLO)
                assert (await answer(client)).kind is Kind.WELCOME
            for _ in range(draw.randint(1, FRAMES_MAX)):
                try:
                    send(client, draw)
                except (BrokenPipeError, ConnectionResetError, BlockingIOError):
                    break
                sent += 1
                await asyncio.sleep(0)
        await house.until(0)
        # Everybody else is served.
        if number % 20 == 0:
            with house.connect() as other:
                other.send(HELLO)
                assert (await answer(other)).kind is Kind.WELCOME
            await house.until(0)

    assert sent > 2 * ROUNDS
    gauges = house.server.metrics.snapshot()
    passing = {"sessions_total", "heap_bytes"}
    assert {n: v for n, v in gauges.items() if n not in passing} == {
        n: v for n, v in gauges_before.items() if n not in passing
    }
    assert house.server.book.is_empty
    assert len(os.listdir("/proc/self/fd")) == open_before
