"""Reading through a daemon under asyncio: what `gpufeed.cachefs.reading` does, awaited.

The engine is the same; the loop watches the sockets, and no thread touches what is read. Only
finding a daemon, or starting one, and listing a dataset go through the loop's executor, since they
wait for locks and processes.

Owned by one loop. A stream has one task at a time; ranges may be read by many tasks at once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from gpufeed.cachefs import wire
from gpufeed.cachefs.calls import ANSWER_TIMEOUT_S, REQUESTS_MAX
from gpufeed.cachefs.connection import silence
from gpufeed.cachefs.errors import DaemonUnavailableError, GpufeedError, UsageError, again
from gpufeed.cachefs.leases import Leases
from gpufeed.cachefs.rangeviews import RangeView
from gpufeed.cachefs.reading import (
    SILENCE_LIMIT_S,
    Client,
    ClientOptions,
    OpenedSession,
    Readable,
    StreamState,
    check_range,
)
from gpufeed.cachefs.reconnect import Patience
from gpufeed.cachefs.remotefile import READ_AHEAD_EXTENTS
from gpufeed.cachefs.samples import Sample
from gpufeed.cachefs.session import Session
from gpufeed.cachefs.wire import Kind, Message

# Ranges of one `read_many` under way at once.
RANGES_AT_ONCE = 16

_T = TypeVar("_T")


async def _in_executor(act: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """Do what may wait for locks and processes; `undo` it where nobody waits for it any more."""
    doing = asyncio.get_running_loop().run_in_executor(None, act)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        doing.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
        raise


def _send_posted(session: Session) -> None:
    """Send what was posted; what the socket does not take goes when it has room again."""
    loop = asyncio.get_running_loop()
    session.take_wake()
    if session.flush():
        loop.remove_writer(session.fileno())
    else:
        loop.add_writer(session.fileno(), _send_posted, session)


async def _until_readable(session: Session, limit_s: float) -> None:
    """Wait for a message, and send meanwhile what was posted.

    Raises:
        DaemonUnavailableError: none came in time.
    """
    loop = asyncio.get_running_loop()
    fd, wake_fd = session.fileno(), session.wake_fd
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, wake)
    loop.add_reader(wake_fd, _send_posted, session)
    try:
        _send_posted(session)
        async with asyncio.timeout(limit_s):
            await readable
    except TimeoutError:
        raise silence() from None
    finally:
        loop.remove_reader(fd)
        loop.remove_reader(wake_fd)
        loop.remove_writer(fd)


class AsyncCalls:
    """Requests of many tasks on one session, which it owns. At most `REQUESTS_MAX` unanswered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.leases = Leases(session)
        # Some task or other waits for the daemon nearly always.
        self.leases.begin_wait()
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(REQUESTS_MAX)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.failure: GpufeedError | None = None
        self._loop.add_reader(session.fileno(), self._readable)
        self._loop.add_reader(session.wake_fd, _send_posted, session)

    async def ask(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """A request and its answer.

        Raises:
            DaemonUnavailableError: the daemon is gone, or silent for `ANSWER_TIMEOUT_S`.
            GpufeedError: as the daemon says.
        """
        await self._room.acquire()
        try:
            if self.failure is not None:
                raise again(self.failure)
            number = self._session.begin_request(kind, body, ANSWER_TIMEOUT_S)
        except BaseException:
            self._room.release()
            raise
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self.fail(silence())
            raise silence() from None
        except asyncio.CancelledError:
            # It came in the same turn of the loop; later ones find that nobody waits.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._give_back(answer.result())
            raise

    def tell(self, kind: Kind, body: dict[str, Any]) -> None:
        """Send what is not answered."""
        if self.failure is None:
            self._session.post(wire.pack(kind, wire.pack_json(body)))

    def _give_back(self, answer: dict[str, Any]) -> None:
        if isinstance(answer.get("seq"), int):
            self.leases.give_back(answer["seq"])

    def _readable(self) -> None:
        try:
            # At most as many as there are requests.
            while self.failure is None:
                message = self._session.try_message()
                if message is None:
                    return
                self._deliver(message)
        except GpufeedError as error:
            self.fail(error)

    def _deliver(self, message: Message) -> None:
        value = message.json()
        number = value.get("id")
        answer = self._waiting.pop(number, None) if isinstance(number, int) else None
        if answer is None:
            if message.kind is Kind.ERROR:
                raise wire.unpack_error(value)
            return
        self._room.release()
        if answer.done():
            self._give_back(value)
        elif message.kind is Kind.ERROR:
            answer.set_exception(wire.unpack_error(value))
        else:
            answer.set_result(value)

    def fail(self, error: GpufeedError) -> None:
        """The session is of no use any more; its views are."""
        if self.failure is not None:
            return
        self.failure = error
        self._loop.remove_reader(self._session.fileno())
        self._loop.remove_reader(self._session.wake_fd)
        self._loop.remove_writer(self._session.fileno())
        for answer in self._waiting.values():
            self._room.release()
            if not answer.done():
                answer.set_exception(again(error))
        self._waiting.clear()
        self.leases.retire()

    async def read(self, file: int, begin_bytes: int, end_bytes: int, found: RangeView) -> None:
        """Have a file's extents that hold a range, which is not empty, lent to `found`."""
        extent_bytes = self._session.extent_bytes
        last = (end_bytes - 1) // extent_bytes
        following = begin_bytes // extent_bytes
        asked: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()
        with self.leases.pinned():
            try:
                while following <= last or asked:
                    while following <= last and len(asked) < READ_AHEAD_EXTENTS:
                        ask = self.ask(Kind.FILE_READ, {"file": file, "extent": following})
                        asked.append(self._loop.create_task(ask))
                        following += 1
                    lent = await asyncio.shield(asked[0])
                    asked.popleft()
                    found.take(int(lent["seq"]), int(lent["slot"]), int(lent["length"]))
            finally:
                for task in asked:
                    task.cancel()
                for over in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(over, dict):
                        self._give_back(over)


class AsyncClient:
    """See the top of the file. Made by `open_async_client`; an async context manager.

    Attributes:
        stats: what was read through it.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._client = Client(options)
        self.stats = self._client.stats
        self._calls: AsyncCalls | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self, urls: str | Iterable[str], **options: Any) -> Readable:
        """See `Client.open`."""
        return await _in_executor(lambda: self._client.open(urls, **options), lambda _: None)

    def samples(self, dataset: Readable, order: Sequence[int] | None = None) -> AsyncSampleStream:
        """See `Client.samples`; for ``async for``."""
        return AsyncSampleStream(self._client, self._client.state(dataset, order))

    async def read(
        self, url: str, begin_bytes: int = 0, end_bytes: int | None = None
    ) -> memoryview:
        """See `Client.read`."""
        check_range(begin_bytes, end_bytes)
        return await self._patiently(lambda: self._read(url, begin_bytes, end_bytes))

    async def read_many(self, ranges: Iterable[tuple[str, int, int | None]]) -> list[memoryview]:
        """Views of many ranges ``(url, begin, end)``, in that order; several at once.

        Raises:
            GpufeedError: one of them cannot be read.
        """
        limit = asyncio.Semaphore(RANGES_AT_ONCE)

        async def one(url: str, begin_bytes: int, end_bytes: int | None) -> memoryview:
            async with limit:
                return await self.read(url, begin_bytes, end_bytes)

        tasks = [asyncio.ensure_future(one(*asked)) for asked in ranges]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """See `Client.close`."""
        if self._calls is not None:
            self._calls.fail(DaemonUnavailableError("the client was closed"))
        self._client.close()

    async def _read(self, url: str, begin_bytes: int, end_bytes: int | None) -> memoryview:
        calls = await self._ready_calls()
        place = {"url": url, "storage_options": dict(self._client.options.storage_options)}
        told = await calls.ask(Kind.FILE_OPEN, place)
        size_bytes, file = int(told["size"]), int(told["file"])
        end_bytes = size_bytes if end_bytes is None else min(end_bytes, size_bytes)
        try:
            if begin_bytes >= end_bytes:
                return memoryview(b"")
            found = RangeView(calls.leases, begin_bytes, end_bytes, self.stats)
            await calls.read(file, begin_bytes, end_bytes, found)
            return found.view()
        finally:
            calls.tell(Kind.FILE_CLOSE, {"file": file})

    async def _ready_calls(self) -> AsyncCalls:
        async with self._connecting:
            if self._calls is None or self._calls.failure is not None:
                session = await _in_executor(self._client.new_session, Session.close)
                self._calls = AsyncCalls(session)
            return self._calls

    async def _patiently(self, act: Callable[[], Awaitable[_T]]) -> _T:
        patience = Patience()
        while True:
            try:
                return await act()
            except DaemonUnavailableError as error:
                await asyncio.sleep(self._client.lost_s(patience, error))


class AsyncSampleStream(AsyncIterator[Sample]):
    """Async iterator over samples; see `SampleStream`. Close it where it is left early."""

    def __init__(self, client: Client, state: StreamState) -> None:
        self._client = client
        self._state = state
        self._is_used = False
        self._is_closed = False

    async def __aenter__(self) -> AsyncSampleStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def __anext__(self) -> Sample:
        """The next sample.

        Raises:
            UsageError: another task is in this call.
            GpufeedError: why there is none; the stream is closed then.
        """
        if self._is_used:
            raise UsageError(
                "two tasks read one stream at once: give each its own client.samples()"
            )
        if self._is_closed:
            raise StopAsyncIteration
        self._is_used = True
        try:
            sample = await self._next()
        except GpufeedError:
            self.close()
            raise
        finally:
            self._is_used = False
        if sample is None:
            self._is_closed = True
            opened = self._state.take_opened()
            if opened is not None:
                self._client.keep(opened)
            raise StopAsyncIteration
        return sample

    async def _next(self) -> Sample | None:
        state = self._state
        while not state.is_over():
            try:
                if state.opened is None:
                    state.attach(await self._opened())
                sample = state.next()
                if sample is not None:
                    return sample
                if not (state.is_over() or state.receive()):
                    await self._wait()
            except DaemonUnavailableError as error:
                state.lose()
                await asyncio.sleep(self._client.lost_s(state.patience, error))
        return None

    async def _opened(self) -> OpenedSession:
        return await _in_executor(
            lambda: self._client.open_in_session(self._state.request), self._client.keep
        )

    async def _wait(self) -> None:
        state = self._state
        assert state.opened is not None
        state.begin_wait()
        try:
            await _until_readable(state.opened.leases.session, SILENCE_LIMIT_S)
        finally:
            state.end_wait()

    def close(self) -> None:
        """Read no more. Views stay valid."""
        self._is_closed = True
        self._state.lose()

    def __del__(self) -> None:
        # Dropped in the middle. An interpreter that ends may have taken the rest apart already.
        with contextlib.suppress(AttributeError, TypeError):
            self.close()
