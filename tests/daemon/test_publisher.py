"""The publisher: what a release lets out, the session's rate, what is fetched ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpufeed.cachefs import wire
from gpufeed.cachefs.errors import PastEndError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.sampleindex import Member, SampleIndex, SampleIndexBuilder
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.publisher import Publisher

EXTENTS = 200


async def permit(source) -> None:
    """Everybody may read everything."""


class Book:
    """Notes the rate that it is told."""

    rate_per_s = 0.0

    def extend(self, session, digests) -> None: ...
    def begin(self, session, digest) -> None: ...
    def advance(self, session) -> None: ...

    def pending(self, digest) -> bool:
        return False

    def measured(self, session, shards_per_s) -> None:
        self.rate_per_s = shards_per_s


class Reader:
    """A shard of `EXTENTS` extents, each of which comes when it is let go."""

    is_stored = False
    extent_count = EXTENTS

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    def length(self, extent: int) -> int:
        return 10

    async def extent(self, extent: int) -> tuple[int, str]:
        if extent >= EXTENTS:
            raise PastEndError("past the end")
        comes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(comes)
        await comes
        return extent, "origin"

    def ready(self, extent: int) -> int | None:
        return None

    def samples(self, first: int, extents_done: int) -> list[object]:
        return []

    async def finish(self) -> None: ...
    def raise_if_failed(self) -> None: ...
    def close(self) -> None: ...


class Outlet:
    """Where the sequence numbers of published extents come out."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[int] = asyncio.Queue()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        message = wire.unpack(data)
        if message.kind is Kind.EXTENTS:
            self.published.put_nowait(wire.unpack_extents(message.body)[0].seq)
        elif message.kind is Kind.SHARD_END:
            self.ended.put_nowait(None)

    has_room = True

    async def drained(self) -> None: ...


async def test_work_on_extents_in_hand_is_the_sessions_time_while_the_next_is_sought() -> None:
    now = SimpleNamespace(s=100.0)
    book, outlet, reader = Book(), Outlet(), Reader()
    tools = SimpleNamespace(
        pool=SimpleNamespace(drop=lambda slot: None), metrics=Metrics(), extent_bytes=10
    )
    cache = SimpleNamespace(
        tools=tools, permit=permit, open=lambda source: reader, prefetch=lambda source: None
    )
    publisher = Publisher(
        1, cache, book, outlet, window_extents=16, clock=SimpleNamespace(monotonic_s=lambda: now.s)
    )
    source = SimpleNamespace(
        spec=SimpleNamespace(digest="d", name="n", size_bytes=10 * EXTENTS), adhoc=False
    )
    task = asyncio.ensure_future(publisher.run())
    publisher.extend(0, [source, source])

    held: list[int] = []
    for _ in range(EXTENTS):
        comes = await reader.asked.get()
        if len(held) >= 3:
            # The session works on one of three for a second while the origin brings the fourth.
            now.s += 1.0
            publisher.release([held.pop(0)])
        comes.set_result(None)
        held.append(await outlet.published.get())
    await outlet.ended.get()
    await reader.asked.get()  # the second shard was begun: the rate was told

    assert book.rate_per_s * EXTENTS == pytest.approx(1.0, rel=0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_position_ahead_is_decided_upon_once() -> None:
    asked: list[str] = []
    tools = SimpleNamespace(
        pool=SimpleNamespace(drop=lambda slot: None), metrics=Metrics(), extent_bytes=10
    )
    cache = SimpleNamespace(
        tools=tools, permit=permit, open=lambda source: Reader(),
        prefetch=lambda source: asked.append(source.spec.digest),
    )  # fmt: skip
    publisher = Publisher(
        1, cache, Book(), Outlet(), window_extents=16,
        clock=SimpleNamespace(monotonic_s=lambda: 0.0),
    )  # fmt: skip
    sources = [
        SimpleNamespace(spec=SimpleNamespace(digest=str(i), name="n", size_bytes=10), adhoc=False)
        for i in range(5)
    ]
    publisher.extend(0, sources[:3])
    for _ in range(3):
        publisher._prefetch_more()
    publisher.extend(3, sources[3:])
    publisher._prefetch_more()
    assert asked == ["1", "2", "3", "4"]


class AtHand(Reader):
    """A shard of five extents in the arena, each with one sample."""

    is_stored = True
    extent_count = 5

    def __init__(self, fields: Callable[[int], int]) -> None:
        super().__init__()
        self._fields = fields

    def ready(self, extent: int) -> int | None:
        return extent

    def samples(self, first: int, extents_done: int) -> list[SampleIndex]:
        builder = SampleIndexBuilder()
        for i in range(first, min(extents_done, 5)):
            members = [Member(f"{n:05d}", 10 * i, 1) for n in range(self._fields(i))]
            builder.add(f"sample-{i}", members)
        return [builder.build()] if len(builder) else []


class Messages:
    """Everything that was sent."""

    has_room = True

    def __init__(self) -> None:
        self.sent: asyncio.Queue[wire.Message] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        self.sent.put_nowait(wire.unpack(data))

    async def drained(self) -> None: ...


def at_hand(outlet: Messages, reader: Reader, window: int) -> Publisher:
    tools = SimpleNamespace(
        pool=SimpleNamespace(drop=lambda slot: None), metrics=Metrics(), extent_bytes=10
    )
    cache = SimpleNamespace(
        tools=tools, permit=permit, open=lambda source: reader, prefetch=lambda source: None
    )
    publisher = Publisher(
        1, cache, Book(), outlet, window_extents=window,
        clock=SimpleNamespace(monotonic_s=lambda: 0.0),
    )  # fmt: skip
    spec = SimpleNamespace(digest="d", name="the shard", size_bytes=50)
    publisher.extend(0, [SimpleNamespace(spec=spec, adhoc=False)])
    return publisher


async def test_a_release_lets_out_what_is_in_the_arena_in_the_same_call() -> None:
    outlet = Messages()
    publisher = at_hand(outlet, AtHand(lambda i: 1), window=2)
    task = asyncio.ensure_future(publisher.run())
    extents = wire.unpack_extents((await outlet.sent.get()).body)
    assert [event.extent for event in extents] == [0, 1]
    assert wire.unpack_samples((await outlet.sent.get()).body).first == 0
    for extent in (2, 3):
        publisher.release([extent - 1])
        # No turn of the loop was taken.
        (event,) = wire.unpack_extents(outlet.sent.get_nowait().body)
        assert (event.extent, event.seq) == (extent, extent + 1)
        assert outlet.sent.get_nowait().kind is Kind.SAMPLES
    publisher.release([3, 4])
    assert [outlet.sent.get_nowait().kind for _ in range(2)] == [Kind.EXTENTS, Kind.SAMPLES]
    assert (await outlet.sent.get()).kind is Kind.SHARD_END
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("last", [False, True])
async def test_what_is_wrong_with_a_shard_is_told_of_the_shard_though_a_release_met_it(
    last: bool,
) -> None:
    outlet = Messages()
    too_many = 4 if last else 2
    publisher = at_hand(outlet, AtHand(lambda i: 5000 if i == too_many else 1), window=2)
    task = asyncio.ensure_future(publisher.run())
    published = 0
    while True:
        message = await outlet.sent.get()
        if message.kind is Kind.EXTENTS:
            for event in wire.unpack_extents(message.body):
                published += 1
                publisher.release([event.seq])
        elif message.kind is Kind.FAIL:
            break
        else:
            assert message.kind is Kind.SAMPLES
    assert "5000 fields" in message.json()["message"]
    assert published == too_many + 1
    await task
