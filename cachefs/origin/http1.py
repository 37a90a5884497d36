"""One HTTP/1.1 connection that receives bodies straight into the caller's memory.

Theory of operation. A `Connection` is an `asyncio.BufferedProtocol`: before every read the
transport asks `get_buffer` where to put the bytes. While an answer's head is awaited that is a
small fixed buffer, parsed by httptools once the blank line is there. The caller's `accept` then
looks at the head, before any byte of the body is taken, and chooses: a `Sink`, whose memory the
transport writes from then on, or None, and the body (an error, a listing) is collected up to a
limit. Only collected bodies may be chunked or end with the connection.

    IDLE --exchange--> HEAD --accept--> SINK or COLLECT --last byte--> IDLE
      any --connection_lost--> LOST

Invariants. One exchange at a time, no pipelining. An exchange ends either with its last byte or
after `connection_lost`: never while the transport could still write into the sink. This holds for
failures and for cancellation alike, so the memory may be reused as soon as `exchange` returns.

A stall is the absence of any byte for `stall_timeout_s`; there is one timer a connection, and it
is moved only when it fires.

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from typing import Any, cast

import httptools

from gpufeed.cachefs.origin.exchange import Answer, Exchange, Head
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.origin.sink import Sink
from gpufeed.cachefs.tasks import until_done
from gpufeed.cachefs.units import KIB

HEAD_LIMIT_BYTES = 16 * KIB

_BLANK_LINE = b"\r\n\r\n"


@functools.lru_cache(maxsize=256)
def _lower(name: bytes) -> str:
    """A header's name; answers have the same ones again and again."""
    return name.decode("latin-1").lower()


class _Phase(enum.Enum):
    IDLE = 0
    HEAD = 1
    SINK = 2
    COLLECT = 3
    LOST = 4


class _Parser:
    """Feeds httptools and keeps what it tells. One an answer."""

    __slots__ = ("_machine", "body", "complete", "excess", "headers", "limit_bytes", "truncated")

    def __init__(self, limit_bytes: int) -> None:
        self._machine: Any = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.limit_bytes = limit_bytes
        self.complete = False
        self.excess = False
        self.truncated = False

    def feed(self, data: memoryview) -> None:
        try:
            self._machine.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                raise _failed(FailureKind.MALFORMED, f"{error}") from error
            self.excess = True

    def head(self) -> Head:
        return Head(self._machine.get_status_code(), self.headers)

    def keeps_alive(self) -> bool:
        told = self.headers.get("connection", "").lower()
        return self._machine.get_http_version() == "1.1" and "close" not in told

    def release(self) -> None:
        """Let go of the machine, which refers back: cycles cost garbage collections."""
        self._machine = None

    def on_message_begin(self) -> None:
        self.excess = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers[_lower(name)] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        room_bytes = self.limit_bytes - len(self.body)
        self.truncated = self.truncated or len(data) > room_bytes
        self.body += data[:room_bytes]

    def on_message_complete(self) -> None:
        self.complete = True


class Connection(asyncio.BufferedProtocol):
    """One connection; see the module's text. Made by `dial.connect`.

    Attributes:
        first_byte_s: when the head of the last answer had come, by `time.monotonic`; the loop's
            clock counts whole milliseconds, in which a body may have come and gone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stall_timeout_s: float) -> None:
        self._loop = loop
        self._stall_timeout_s = stall_timeout_s
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = loop.create_future()
        self._phase = _Phase.IDLE
        self._scratch = bytearray(HEAD_LIMIT_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._head_bytes = 0
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser: _Parser | None = None
        self._head: Head | None = None
        self._sink: Sink | None = None
        self._failure: Failure | None = None
        self._keep_alive = True
        self._exchanges_count = 0
        self._progress_s = 0.0
        self.first_byte_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # What the pool and the origin call.

    @property
    def reusable(self) -> bool:
        """Whether another exchange may begin."""
        closing = self._transport is None or self._transport.is_closing()
        return self._phase is _Phase.IDLE and self._keep_alive and not closing

    async def exchange(self, exchange: Exchange) -> Answer:
        """Send a request and receive its answer.

        Raises:
            AttemptFailedError: no complete answer; the connection is lost by then.
        """
        if self._phase is _Phase.LOST:
            # The peer took a fresh connection and dropped it before it was used.
            raise _failed(FailureKind.LOST, "the peer closed before the request was sent")
        assert self._phase is _Phase.IDLE, self._phase
        assert self._transport is not None, "not connected"
        self._phase = _Phase.HEAD
        self._exchange, self._parser, self._head = exchange, None, None
        self._head_bytes = 0
        waiter: asyncio.Future[Answer] = self._loop.create_future()
        self._waiter = waiter
        self._progress_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_timeout_s, self._check_stall)
        self._transport.write(exchange.request)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._abort()
            await until_done(self._lost)
            raise
        finally:
            self._exchange, self._waiter, self._sink, self._parser = None, None, None, None
            self._exchanges_count += 1

    def abort(self, failure: Failure | None = None) -> None:
        """Drop the connection; an exchange under way fails, with `failure` if it is given.

        `wait_lost` says when it is gone.
        """
        self._failure = self._failure or failure
        self._abort()

    async def wait_lost(self) -> None:
        """Wait until the transport is gone."""
        await until_done(self._lost)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        # uvloop's transports have the methods, but not the base class.
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The place of the bytes that come next."""
        if self._phase is _Phase.SINK:
            assert self._sink is not None, "no sink"
            return self._sink.buffer()
        if self._phase is _Phase.HEAD:
            return self._scratch_view[self._head_bytes :]
        return self._scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        self._progress_s = self._loop.time()
        try:
            if self._phase is _Phase.SINK:
                assert self._sink is not None, "no sink"
                self._sink.advance(nbytes)
                if self._sink.remaining_bytes == 0:
                    self._complete()
            elif self._phase is _Phase.HEAD:
                self._head_bytes += nbytes
                self._read_head()
            elif self._phase is _Phase.COLLECT:
                self._collect(self._scratch_view[:nbytes])
            else:
                # Bytes that nobody asked for: whatever they are, this connection is of no use.
                self._abort()
        except AttemptFailedError as error:
            self._fail(error.failure)

    def eof_received(self) -> None:
        """The peer has ended its side; the transport closes, `connection_lost` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport will not touch any buffer again."""
        phase, self._phase = self._phase, _Phase.LOST
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lost.done():
            self._lost.set_result(None)
        if self._waiter is None or self._waiter.done() or phase is _Phase.IDLE:
            return
        if phase is _Phase.COLLECT and self._failure is None and exc is None and self._until_eof():
            self._finish()
            return
        self._waiter.set_exception(AttemptFailedError(self._failure or self._loss(phase, exc)))

    # Inside.

    def _read_head(self) -> None:
        while self._phase is _Phase.HEAD:
            end = self._scratch.find(_BLANK_LINE, 0, self._head_bytes)
            if end < 0:
                if self._head_bytes == HEAD_LIMIT_BYTES:
                    raise _failed(
                        FailureKind.MALFORMED, f"a head of more than {HEAD_LIMIT_BYTES} bytes"
                    )
                return
            end += len(_BLANK_LINE)
            assert self._exchange is not None, "no exchange"
            parser = self._parser = _Parser(self._exchange.body_limit_bytes)
            parser.feed(self._scratch_view[:end])
            head = parser.head()
            rest = bytes(self._scratch_view[end : self._head_bytes])
            if 100 <= head.status < 200 and head.status != 101:
                self._scratch_view[: len(rest)] = rest
                self._head_bytes = len(rest)
                continue
            self.first_byte_s = time.monotonic()
            self._head, self._keep_alive = head, parser.keeps_alive()
            self._begin_body(head, memoryview(rest))

    def _begin_body(self, head: Head, rest: memoryview) -> None:
        assert self._exchange is not None, "no exchange"
        assert self._parser is not None, "no parser"
        sink = self._exchange.accept(head)
        if self._exchange.bodiless or head.status in {204, 304}:
            self._keep_alive = self._keep_alive and not rest
            self._complete()
        elif sink is None:
            self._phase = _Phase.COLLECT
            if self._parser.complete:
                self._keep_alive = self._keep_alive and not rest
                self._complete()
            elif rest:
                self._collect(rest)
        else:
            self._begin_sink(head, sink, rest)

    def _begin_sink(self, head: Head, sink: Sink, rest: memoryview) -> None:
        wanted_bytes = sink.remaining_bytes
        chunked = "transfer-encoding" in head.headers
        if chunked or head.content_length_bytes != wanted_bytes or wanted_bytes == 0:
            told = "chunked" if chunked else f"Content-Length {head.content_length_bytes}"
            raise _failed(FailureKind.WRONG_ANSWER, f"{told} where {wanted_bytes} bytes are due")
        self._phase, self._sink = _Phase.SINK, sink
        if len(rest) > wanted_bytes:
            self._keep_alive = False
        sink.write(rest[:wanted_bytes])
        if sink.remaining_bytes == 0:
            self._complete()

    def _collect(self, data: memoryview) -> None:
        parser = self._parser
        assert parser is not None, "no parser"
        parser.feed(data)
        if parser.complete or parser.truncated:
            self._keep_alive = self._keep_alive and not (parser.excess or parser.truncated)
            self._complete()

    def _complete(self) -> None:
        self._phase = _Phase.IDLE
        self._finish()
        if not self._keep_alive:
            self._abort()

    def _finish(self) -> None:
        assert self._head is not None, "no head"
        assert self._parser is not None, "no parser"
        answer = Answer(self._head, bytes(self._parser.body), self._parser.truncated)
        self._parser.release()
        self._sink = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)

    def _until_eof(self) -> bool:
        assert self._head is not None, "no head"
        return not {"content-length", "transfer-encoding"} & self._head.headers.keys()

    def _loss(self, phase: _Phase, exc: Exception | None) -> Failure:
        why = str(exc) if exc is not None else "the peer closed"
        if phase is _Phase.HEAD and self._head_bytes == 0 and self._exchanges_count > 0:
            return Failure(FailureKind.IDLE_CLOSED, why)
        if self._sink is not None:
            why += f" with {self._sink.remaining_bytes} bytes still due"
        elif phase is _Phase.HEAD:
            why += f" after {self._head_bytes} bytes of the head"
        return Failure(FailureKind.LOST, why)

    def _check_stall(self) -> None:
        self._timer = None
        if self._phase in {_Phase.IDLE, _Phase.LOST}:
            return  # armed again by the next exchange
        left_s = self._progress_s + self._stall_timeout_s - self._loop.time()
        if left_s <= 0:
            self._fail(Failure(FailureKind.STALL, f"no byte for {self._stall_timeout_s:g} s"))
        else:
            self._timer = self._loop.call_later(left_s, self._check_stall)

    def _fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _failed(kind: FailureKind, detail: str) -> AttemptFailedError:
    return AttemptFailedError(Failure(kind, detail))
