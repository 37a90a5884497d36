"""One session: the daemon's side of one connection, from HELLO to its end.

The socket is the lease, and the process that opened it is who holds it. When the socket closes, or
that process dies (a pidfd of the peer tells, so that a child which has inherited the socket keeps
nothing alive), the session's tasks are cancelled and every extent, claim and plan position it held
goes back, in that order.

What a client sends is checked (`cachefs.wire`); the first message that is wrong ends the session
with an error that says so, and reaches no other session. A session that the daemon ends has a
client which may still look at what it holds: those slots stay as they are until the client has
closed its side. Until then the session counts as one.

Owned by the daemon's loop. `SOCK_SEQPACKET` has no asyncio transport, so readiness callbacks drive
a non-blocking socket; the queue of outgoing messages is bounded by the session's window, and by
`OUTBOX_MESSAGES_MAX`, at which the publisher waits.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import logging
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any

from gpufeed.cachefs import wire
from gpufeed.cachefs.bodies import body_to_memfd, close_all, require_whole, with_body
from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError
from gpufeed.cachefs.handshake import Hello, agree, software
from gpufeed.cachefs.units import MIB
from gpufeed.cachefs.wire import Kind, Message
from gpufeed.daemon.memory import require_heap
from gpufeed.daemon.publisher import Publisher
from gpufeed.daemon.requests import REQUEST_KINDS, Requests

if TYPE_CHECKING:
    from gpufeed.daemon.server import SessionServer
    from gpufeed.daemon.tenants import Tenant

_LOG = logging.getLogger("gpufeed.session")

OUTBOX_MESSAGES_MAX = 256
MESSAGES_PER_WAKE_MAX = 64
REQUESTS_IN_FLIGHT_MAX = 8
# What a client may send in one body; the daemon parses it on its loop.
REQUEST_BODY_BYTES_MAX = 16 * MIB
JOB_NAME_MAX = 256
# A connection that says nothing for so long is nobody's.
HELLO_TIMEOUT_S = 10.0
# What the kernel refuses for now, it may take a little later.
SEND_AGAIN_S = 0.05
_SHORTAGES = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
# Linux 6.5 to 6.15, of a process that was waited for.
_REAPED = frozenset({errno.EINVAL, errno.ESRCH})
_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})
# asm-generic/socket.h, Linux 6.5; Python has no name for it yet.
SO_PEERPIDFD = 77
# struct ucred: process, user, group.
_PEER_CREDENTIALS = struct.Struct("iII")


class ServerSession:
    """One connection, from HELLO to its close.

    Attributes:
        door: the socket that it came to.
    """

    def __init__(self, number: int, sock: socket.socket, server: SessionServer, door: str) -> None:
        self.door = door
        self._number = number
        self._sock = sock
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._outbox: collections.deque[tuple[bytes, tuple[int, ...]]] = collections.deque()
        self._room = asyncio.Event()
        self._room.set()
        self._window = 0
        self._tenant: Tenant | None = None
        self._publisher: Publisher | None = None
        self._requests: Requests | None = None
        self._requests_in_flight = 0
        self._has_joined = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        # The daemon has ended it; the client has not closed its side yet.
        self._is_refused = False
        self._loop.add_reader(sock.fileno(), self._readable)
        self._peer = -1
        try:
            self._peer = _peer_pidfd(sock)
        except ProcessLookupError:  # only a child of it may be left
            self._loop.call_soon(self._end)
        if self._peer >= 0:
            self._loop.add_reader(self._peer, self._end)
        self._late: asyncio.TimerHandle | None
        self._late = self._loop.call_later(HELLO_TIMEOUT_S, self._say_nothing)

    # --- receiving ----------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_WAKE_MAX):
            if self._closing:
                return
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._sock, wire.MESSAGE_BYTES_MAX, 2, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                self._end()
                return
            if not data:
                close_all(descriptors)
                if _has_hung_up(self._sock):
                    self._end()
                else:
                    # As long as its socket is open a client may look at what it holds.
                    self._refuse(ProtocolError("an empty message"))
                return
            if self._is_refused:
                close_all(descriptors)
                continue
            try:
                self._handle(_message(data, descriptors, flags))
            except GpufeedError as error:
                self._refuse(error)
                return

    def _handle(self, message: Message) -> None:
        if self._publisher is None or self._requests is None:
            if message.kind is not Kind.HELLO:
                raise ProtocolError(f"{message.kind.name} came before HELLO")
            self._hello(message.json())
        elif message.kind is Kind.RELEASE:
            self._publisher.release(wire.unpack_release(message.body))
        elif message.kind is Kind.PLAN:
            self._plan(self._publisher, self._requests, message.body)
        elif message.kind is Kind.FORECAST:
            self._forecast(self._requests, message.body)
        elif message.kind is Kind.JOIN:
            self._join(message.json())
        elif message.kind in REQUEST_KINDS:
            self._request(self._requests, message.kind, message.json())
        elif message.kind is Kind.FILE_CLOSE:
            self._requests.close_file(message.json())
        else:
            raise ProtocolError(f"a client does not send {message.kind.name}")

    def _say_nothing(self) -> None:
        self._late = None
        self._refuse(ProtocolError(f"no HELLO came within {HELLO_TIMEOUT_S:g} s"))

    def _hello(self, value: dict[str, Any]) -> None:
        server = self._server
        said = Hello.unpack(value)
        protocol = agree(said)
        require_heap(server.tenants.heap_bytes_max, server.metrics)
        tenant = server.tenants.admit(self.door, said.token, _peer_uid(self._sock))
        arena = tenant.cache.tools.pool.arena
        descriptors = _duplicates(arena.fd, tenant.memory.lock_fd)
        try:
            self._enter(tenant, said)
        except GpufeedError:
            close_all(descriptors)
            raise
        self._stop_waiting()
        self._publisher = Publisher(
            self._number, tenant.cache, server.book, self,
            window_extents=self._window, clock=server.clock,
        )  # fmt: skip
        self._requests = Requests(
            self._number, tenant.datasets, server.book, tenant.cache, self._publisher, self._hint
        )
        self._spawn(self._publisher.run())
        self._spawn(self._publisher.prefetch())
        welcome = {
            "protocol": protocol,
            "software": software(),
            "tenant": tenant.name,
            "arena_bytes": arena.size_bytes,
            "extent_bytes": arena.extent_bytes,
            "window_extents": self._window,
        }
        self._send(wire.pack(Kind.WELCOME, wire.pack_json(welcome)), *descriptors)

    def _enter(self, tenant: Tenant, said: Hello) -> None:
        """Count as one of the tenant's sessions, and get a window of its arena."""
        tenant.enter()
        self._tenant = tenant
        tenant.memory.look()
        try:
            self._window = tenant.windows.grant(said.window_bytes, whole=said.whole)
        except CapacityError as error:
            raise tenant.memory.refusal() or error from None

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _plan(self, publisher: Publisher, requests: Requests, body: bytes) -> None:
        dataset_id, shard_ids, first = wire.unpack_plan(body)
        dataset = requests.dataset(dataset_id)
        count = len(dataset.sources)
        if any(shard >= count for shard in shard_ids):
            raise ProtocolError(f"PLAN names a shard outside the dataset's {count}")
        publisher.extend(first, [dataset.sources[shard] for shard in shard_ids])

    def _join(self, value: dict[str, Any]) -> None:
        job = value.get("job")
        if not isinstance(job, str) or not 0 < len(job) <= JOB_NAME_MAX:
            raise ProtocolError(f"JOIN needs a job's name of 1 to {JOB_NAME_MAX} characters")
        if self._has_joined:
            raise ProtocolError("JOIN came twice")
        self._has_joined = True
        assert self._tenant is not None, "it came before HELLO"
        self._server.book.join(self._number, self._tenant.job(job))

    def _forecast(self, requests: Requests, body: bytes) -> None:
        dataset_id, shard_ids, anew = wire.unpack_forecast(body)
        requests.dataset(dataset_id)
        self._server.book.forecast(self._number, dataset_id, shard_ids, anew=anew)

    # --- requests -----------------------------------------------------------------------------

    def _request(self, requests: Requests, kind: Kind, value: dict[str, Any]) -> None:
        if self._requests_in_flight >= REQUESTS_IN_FLIGHT_MAX:
            raise ProtocolError(f"more than {REQUESTS_IN_FLIGHT_MAX} requests at once")
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            raise ProtocolError("requests come, but their answers are not read")
        if not isinstance(value.get("id"), int):
            raise ProtocolError("a request without a number")
        self._requests_in_flight += 1
        self._spawn(self._answer(requests, kind, value))

    async def _answer(self, requests: Requests, kind: Kind, value: dict[str, Any]) -> None:
        answered = Kind.REPLY
        try:
            found = await requests.answer(kind, value)
        except GpufeedError as error:
            if kind in (Kind.OPEN, Kind.INDEX):
                # A file that is not there is an everyday answer; a dataset is not.
                _LOG.warning("session %d: %s failed: %s", self._number, kind.name, error)
            answered, found = Kind.ERROR, dict(wire.pack_error(error))
        finally:
            # Before the answer goes: whoever has it may ask again at once.
            self._requests_in_flight -= 1
        self._send_body(answered, wire.pack_json({"id": value.get("id"), **found}))

    # --- sending ------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """See `Outlet`."""
        self._send(data)

    def _hint(self, data: bytes) -> None:
        """Send what may be lost, unless the client leaves its messages lying."""
        if len(self._outbox) < OUTBOX_MESSAGES_MAX:
            self._send(data)

    @property
    def has_room(self) -> bool:
        """See `Outlet`."""
        return self._room.is_set()

    async def drained(self) -> None:
        """See `Outlet`."""
        await self._room.wait()

    def _send_body(self, kind: Kind, body: bytes) -> None:
        if len(body) <= wire.INLINE_BODY_BYTES:
            self._send(wire.pack(kind, body))
        else:
            self._send(wire.pack(kind, in_memfd=True), body_to_memfd(body))

    def _send(self, data: bytes, *descriptors: int) -> None:
        """Send now or queue. Takes the descriptors over."""
        if self._closing:
            close_all(descriptors)
            return
        if self._outbox or not self._try_send(data, descriptors):
            self._outbox.append((data, descriptors))
            if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
                self._room.clear()
            self._watch_room()

    def _try_send(self, data: bytes, descriptors: tuple[int, ...]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._sock, [data], descriptors)
            else:
                self._sock.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _SHORTAGES:
                return False
            if error.errno not in _GONE:
                # It would wait for this message for ever.
                _LOG.error("session %d: a message cannot be sent: %s", self._number, error)
                self._loop.call_soon(self._end)
            # Else the client is gone; its end arrives on the reading side.
        close_all(descriptors)
        return True

    def _watch_room(self) -> None:
        if self._outbox and not self._closing:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        # Looked at again after a while: where the kernel is short of something, the socket itself
        # has room, and would call at once for ever.
        self._loop.remove_writer(self._sock.fileno())
        sent = 0
        while self._outbox and self._try_send(*self._outbox[0]):
            self._outbox.popleft()
            sent += 1
        if len(self._outbox) < OUTBOX_MESSAGES_MAX // 2:
            self._room.set()
        if self._outbox and sent:
            self._watch_room()
        elif self._outbox:
            self._loop.call_later(SEND_AGAIN_S, self._watch_room)
        elif self._is_refused:
            self._hang_up()

    # --- the end ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("session %d: a task failed", self._number, exc_info=task.exception())
            self._refuse(GpufeedError("the daemon met an internal error; its log has the trace"))

    def _refuse(self, error: GpufeedError) -> None:
        """Tell the client why its session is over, and wait for it to close its side."""
        if self._is_refused or self._closing:
            return
        _LOG.warning("session %d ends: %s", self._number, error)
        self._send(wire.pack(Kind.ERROR, wire.pack_json(wire.pack_error(error))))
        self._is_refused = True
        self._stop_waiting()
        for task in self._tasks:
            task.cancel()
        if self._publisher is None or not self._publisher.held_count:
            self._end()
            return
        self._hang_up()

    def _hang_up(self) -> None:
        """The client sees the end behind what it was told."""
        if not self._outbox:
            with contextlib.suppress(OSError):  # it may be gone already
                self._sock.shutdown(socket.SHUT_WR)

    def _end(self) -> None:
        if self._stop_watching():
            self._server.ending(self._loop.create_task(self.close()))

    def _stop_watching(self) -> bool:
        """Nothing is received or sent from now on; False if that was so already."""
        if self._closing:
            return False
        self._closing = True
        self._stop_waiting()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self._peer >= 0:
            self._loop.remove_reader(self._peer)
            os.close(self._peer)
            self._peer = -1
        return True

    async def stop(self) -> None:
        """Nobody is served any more. What the client holds stays untouched."""
        self._stop_watching()
        self._hang_up()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Take everything back: the client is gone, or nothing writes into the arena any more."""
        await self.stop()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
            if self._requests is not None:
                self._requests.close()
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.windows.give_back(self._window)
            tenant.memory.look()
            tenant.leave()
        self._server.book.drop(self._number)
        for _, descriptors in self._outbox:
            close_all(descriptors)
        self._outbox.clear()
        self._room.set()
        self._sock.close()
        self._server.ended(self._number)


def _message(data: bytes, descriptors: list[int], flags: int) -> Message:
    try:
        require_whole(flags)
        message = wire.unpack(data)
    except GpufeedError:
        close_all(descriptors)
        raise
    return with_body(message, descriptors, REQUEST_BODY_BYTES_MAX)


def _peer_pidfd(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the process that connected dies; -1 before Linux 6.5.

    No process id is involved, so it means the same in every PID namespace.

    Raises:
        ProcessLookupError: it is dead already, and the kernel gives no descriptor of the dead.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _REAPED:
            raise ProcessLookupError(error.errno, "the client is dead") from None
        _LOG.debug("no pidfd of a client: %s", error)
        return -1


def _peer_uid(sock: socket.socket) -> int:
    """The user that connected, as this user namespace shows it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(found)
    return int(uid)


def _duplicates(*descriptors: int) -> list[int]:
    made: list[int] = []
    try:
        for fd in descriptors:
            made.append(os.dup(fd))  # noqa: PERF401 what was made before a failure is closed
    except OSError as shortage:
        close_all(made)
        raise CapacityError(
            f"the daemon has no descriptor for one more session: {shortage.strerror}; raise its "
            "limit of open files (ulimit -n)"
        ) from None
    return made


def _has_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed: an empty message reads like an end."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
