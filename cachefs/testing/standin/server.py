"""The stand-in's transport: sockets, parsing, pacing, sendfile, and the faults of the wire.

Sockets are driven by readiness callbacks rather than by asyncio transports, because bodies go out
by `os.sendfile` on the same descriptor, paced by the kernel (``SO_MAX_PACING_RATE``) where a rate a
connection is asked for. A reply that a fault must alter passes through memory instead.

One request a connection at a time; further ones wait in the parser's queue. Everything runs on one
loop and thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import email.utils
import errno
import os
import socket
import struct
import time
from http import HTTPStatus
from typing import Any

import httptools

from gpufeed.cachefs.errors import OperatorError
from gpufeed.cachefs.testing.standin.config import StandinConfig
from gpufeed.cachefs.testing.standin.replies import Reply
from gpufeed.cachefs.testing.standin.scenario import Effects
from gpufeed.cachefs.testing.standin.sending import Sending, TotalRate
from gpufeed.cachefs.testing.standin.service import CONTROL_PREFIX, OssService
from gpufeed.cachefs.testing.standin.tlsfront import TlsFront, server_context
from gpufeed.cachefs.units import KIB, MIB

SO_MAX_PACING_RATE = 47
_UNPACED = 0xFFFFFFFF
RECEIVE_BYTES = 256 * KIB
# A connection that has more requests waiting than this is closed: nobody pipelines so deep.
PIPELINED_MAX = 64
SENDFILE_STEP_BYTES = MIB
REQUEST_BODY_BYTES_MAX = 512 * MIB
BACKLOG = 1024
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class _Connection:
    """One client."""

    def __init__(self, sock: socket.socket, server: Standin) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._server = server
        self._loop = server.loop
        self._parser: Any = httptools.HttpRequestParser(self)
        self._queue: collections.deque[tuple[str, str, dict[str, str], bytes]] = collections.deque()
        self._sending: Sending | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False
        self._paced = 0
        self._keep_alive = True
        self._begin()
        self._loop.add_reader(self._fd, self._readable)

    def _begin(self) -> None:
        self._target = ""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    # --- parsing ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self._sock.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > REQUEST_BODY_BYTES_MAX:
            raise httptools.HttpParserError(f"a body over {REQUEST_BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        self._queue.append((method, self._target, self._headers, bytes(self._body)))
        self._keep_alive = self._parser.should_keep_alive()
        if len(self._queue) > PIPELINED_MAX:
            raise httptools.HttpParserError(f"over {PIPELINED_MAX} requests wait")

    def _readable(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return
        self._next()

    # --- answering ----------------------------------------------------------------------------

    def _next(self) -> None:
        if self._sending is not None or self._timer is not None or not self._queue:
            return
        try:
            self._answer(*self._queue.popleft())
        except Exception:
            # A mistake of ours goes to the loop's log; the client must not wait for it for ever.
            self.close()
            raise

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        if target.startswith(CONTROL_PREFIX):
            path = target.partition("?")[0]
            reply, effects, name = self._server.service.control(method, path, body), Effects(), ""
            delay_s = 0.0
        else:
            reply, effects, name = self._server.service.handle(method, target, headers, body)
            delay_s = self._server.service.director.first_byte_s() + effects.delay_s
        try:
            self._sending = Sending(self._head(reply), reply, effects, name)
        except OSError:
            # Deleted or replaced since the look-up, microseconds ago; the client asks again.
            self.close()
            return
        self._pace(reply.pacing_bytes_per_s)
        if delay_s > 0:
            self._timer = self._loop.call_later(delay_s, self._go_on)
        else:
            self._flush()

    def _go_on(self) -> None:
        self._timer = None
        self._flush()

    def _pace(self, own_bytes_per_s: int) -> None:
        limit = self._server.service.director.scenario.bytes_per_s_per_connection
        rates = [rate for rate in (limit, own_bytes_per_s) if rate]
        rate = min(rates) if rates else 0
        if rate != self._paced:
            self._paced = rate
            value = struct.pack("I", min(rate, _UNPACED) if rate else _UNPACED)
            self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, value)

    def _head(self, reply: Reply) -> bytes:
        length = reply.size_bytes
        lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, '')}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        lines += [
            "Server: AliyunOSS",
            f"Date: {self._server.date()}",
            f"Connection: {'keep-alive' if self._keep_alive else 'close'}",
        ]
        if reply.status not in (204, 304):
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _flush(self) -> None:
        sending = self._sending
        if sending is None or self._timer is not None:
            return
        try:
            done = self._push(sending)
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._flush)
            return
        except OSError:
            self.close()
            return
        if self._sending is not sending:
            return
        if not done:
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        sending.close()
        self._sending = None
        if not self._keep_alive and not self._queue:
            self.close()
            return
        self._next()

    def _push(self, sending: Sending) -> bool:
        """Send what goes; True when the reply is out. A fault or the total rate may interrupt."""
        if sending.head and sending.body and sending.limit() is None and not self._total_rate():
            sent = self._sock.sendmsg((sending.head, sending.body))
            of_head = min(sent, len(sending.head))
            sending.head = sending.head[of_head:]
            self._count(sending, sent - of_head)
            sending.body = sending.body[sent - of_head :]
        # A body follows by sendfile: the head waits for it and leaves in the same segment.
        at_once = sending.limit() is None and not self._total_rate()
        more = socket.MSG_MORE if sending.file >= 0 and at_once else 0
        while sending.head:
            sending.head = sending.head[self._sock.send(sending.head, more) :]
        while sending.sent_bytes < sending.total_bytes:
            step = self._step(sending)
            if step == 0:
                return False
            if sending.file >= 0:
                sent = os.sendfile(self._fd, sending.file, sending.offset, step)
                if sent == 0:
                    raise OSError(errno.ESTALE, "the file was cut short under its answer")
                sending.offset += sent
            else:
                sent = self._sock.send(sending.body[:step])
                sending.body = sending.body[sent:]
            self._count(sending, sent)
        return True

    def _count(self, sending: Sending, sent_bytes: int) -> None:
        sending.sent_bytes += sent_bytes
        if sending.name and sent_bytes:
            self._server.service.counters.sent(sending.name, sent_bytes)

    def _total_rate(self) -> int:
        return self._server.service.director.scenario.bytes_per_s_total

    def _step(self, sending: Sending) -> int:
        """How many bytes to send next; 0: a fault struck, or the total rate says wait."""
        step = min(SENDFILE_STEP_BYTES, sending.total_bytes - sending.sent_bytes)
        limit = sending.limit()
        if limit is not None:
            step = min(step, limit)
            if step == 0:
                self._strike(sending)
                return 0
        rate = self._total_rate()
        if rate:
            step, wait_s = self._server.total.take(step, rate, self._loop.time())
            if step == 0:
                self._pause(wait_s)
        return step

    def _strike(self, sending: Sending) -> None:
        effects = sending.effects
        if effects.reset_after_bytes is not None and (
            sending.sent_bytes >= effects.reset_after_bytes
        ):
            linger = struct.pack("ii", 1, 0)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close()
        elif effects.truncate_after_bytes is not None and (
            sending.sent_bytes >= effects.truncate_after_bytes
        ):
            self.close()
        else:
            sending.stalled = True
            self._pause(effects.stall_s)

    def _pause(self, wait_s: float) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        self._timer = self._loop.call_later(wait_s, self._go_on)

    def close(self) -> None:
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._fd = -1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sending is not None:
            self._sending.close()
            self._sending = None
        self._queue.clear()
        self._sock.close()
        self._server.connections.discard(self)


class Standin:
    """A running stand-in, in the caller's loop: ``await start()``, ``await stop()``."""

    def __init__(self, config: StandinConfig) -> None:
        self.config = config
        self.service = OssService(config)
        self.total = TotalRate()
        self.connections: set[_Connection] = set()
        self.plain_port = 0
        self._front: TlsFront | None = None
        self._listener: socket.socket | None = None
        self._date = ""
        self._date_s = 0

    @property
    def port(self) -> int:
        """Where clients come."""
        return self._front.port if self._front else self.plain_port

    @property
    def endpoint(self) -> str:
        """``http://host:port``, or https where there is TLS."""
        if self._front is None:
            return self.plain_endpoint
        return f"https://{self.config.host}:{self._front.port}"

    @property
    def plain_endpoint(self) -> str:
        """Without TLS, for control."""
        return f"http://{self.config.host}:{self.plain_port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OperatorError: the port is taken.
            ConfigError: the certificate or its key will not do.
        """
        config = self.config
        context = None
        if config.tls_certificate:
            context = server_context(config.tls_certificate, config.tls_key)
        self.loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, 0 if context else config.port))
        except OSError as error:
            listener.close()
            raise OperatorError(
                f"cannot listen on {self.config.host}:{self.config.port} "
                f"({error.strerror or error}); choose another with --port, or 0 for any free one"
            ) from None
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self.plain_port = listener.getsockname()[1]
        self._listener = listener
        self.loop.add_reader(listener.fileno(), self._accept)
        if context is not None:
            self._front = TlsFront(config.host, self.plain_port, context)
            try:
                await self._front.start(config.port)
            except OperatorError:
                await self.stop()
                raise

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.add(_Connection(sock, self))

    def date(self) -> str:
        """The ``Date`` header, made once a second."""
        now = int(time.time())
        if now != self._date_s:
            self._date_s, self._date = now, email.utils.formatdate(now, usegmt=True)
        return self._date

    async def stop(self) -> None:
        """Close everything."""
        if self._front is not None:
            await self._front.stop()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.close()
