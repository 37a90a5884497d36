"""One session with a daemon, as its client holds it. No network, no event loop, no threads.

A `Session` is one `SOCK_SEQPACKET` connection to a daemon on this node. It declares a plan (shards
in the order in which they will be read), receives extents and samples in that order, reads them in
place through a read-only mapping of the daemon's arena, and gives them back. The socket is the
lease: when it closes, for whatever reason, the daemon takes everything back.

Invariants:
    - events arrive in plan order; a sample's event follows the events of all its extents;
    - an extent stays valid from its event until `release(seq)`;
    - sequence numbers and plan positions only grow, for the life of the session.

Not thread-safe: one thread at a time; only `post` may be called from anywhere, a finaliser that the
garbage collector runs in the middle of another call included. A forked child closes its copy at
once (`register_at_fork`) so that it can neither speak on the session nor keep it alive; its mapping
of the arena stays valid.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpufeed.cachefs import wire
from gpufeed.cachefs.bodies import close_all, with_body
from gpufeed.cachefs.connection import Connection, silence
from gpufeed.cachefs.errors import DaemonUnavailableError, ProtocolError, UsageError
from gpufeed.cachefs.handshake import check_welcome, hello
from gpufeed.cachefs.units import MIB
from gpufeed.cachefs.wire import (
    Event,
    FailEvent,
    Kind,
    Message,
    ShardEndEvent,
)

# Messages taken in one `receive`, so that a fast daemon cannot keep a feeder from its workers.
_MESSAGES_PER_RECEIVE_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """What a session wants to read.

    Attributes:
        urls: addresses with brace patterns, or one prefix that ends in ``/``.
        kind: ``tar`` (shards in WebDataset layout), ``loose`` (one sample an object), ``auto``.
        storage_options: ossfs's names: endpoint, key, secret, token; and region.
        virtual_shard_bytes: loose objects are grouped to about this size.
    """

    urls: tuple[str, ...]
    kind: Literal["auto", "tar", "loose"] = "auto"
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    virtual_shard_bytes: int = 32 * MIB


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard of a dataset. `sample_count` is None until it was indexed."""

    name: str
    size_bytes: int
    sample_count: int | None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as the daemon listed it: its shards and the hash of their identities."""

    dataset_id: int
    kind: str
    manifest_hash: str
    shards: tuple[ShardInfo, ...]


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_in_child() -> None:
    for session in list(_open_sessions):
        session.abandon()


os.register_at_fork(after_in_child=_close_in_child)


class ArenaMap(mmap.mmap):
    """A mapping of an arena, and of the file that says that the arena is in use.

    A mapping of a file keeps its lock as an open descriptor does, and is a forked child's too. It
    goes when this one goes: closed, or collected with the last view of it.
    """

    lock: mmap.mmap | None = None

    def close(self) -> None:
        """Unmap both.

        Raises:
            BufferError: views of it are left.
        """
        super().close()
        if self.lock is not None:
            self.lock.close()


class Session:
    """A connection to a daemon. Made by `connect`; a context manager."""

    def __init__(
        self, connection: Connection, welcome: dict[str, Any], arena_fd: int, lock_fd: int
    ) -> None:
        self._connection = connection
        self.protocol = check_welcome(welcome)
        self.socket_path = ""
        self._requests = 0
        self._positions = 0
        self._pending: collections.deque[Event] = collections.deque()
        self.arena_fd = arena_fd
        self.lock_fd = lock_fd
        self.arena_bytes = int(welcome["arena_bytes"])
        self.extent_bytes = int(welcome["extent_bytes"])
        self.window_extents = int(welcome["window_extents"])
        self._map = ArenaMap(arena_fd, self.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._map.lock = mmap.mmap(lock_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._arena = memoryview(self._map)
        self._job: str | None = None
        self._posted: collections.deque[bytes] = collections.deque()
        self._posting = threading.Lock()
        # Wakes whoever waits for the daemon when a message could not be posted at once.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        _open_sessions.add(self)

    @classmethod
    def connect(
        cls,
        socket_path: str,
        *,
        window_bytes: int = 0,
        whole: bool = False,
        token: str | None = None,
        timeout_s: float = 30.0,
    ) -> Session:
        """Open a session.

        Args:
            socket_path: the daemon's Unix socket.
            window_bytes: published, unreleased bytes wanted at most; 0 leaves it to the daemon,
                which may also grant less (`window_extents` tells).
            whole: exactly that window, or a refusal that says how much there is.
            token: says which tenant this is, where the socket alone does not.
            timeout_s: how long to wait for the answer.

        Raises:
            DaemonUnavailableError: nobody listens, or the daemon went away meanwhile.
            GpufeedError: the daemon refused, with its reason.
        """
        connection = Connection.open(socket_path, timeout_s)
        try:
            said = hello(window_bytes=window_bytes, whole=whole, token=token)
            # Refused at the door, it is closed already; why lies there to be read.
            with contextlib.suppress(DaemonUnavailableError):
                connection.send(wire.pack(Kind.HELLO, wire.pack_json(said.pack())), timeout_s)
            message, descriptors = connection.wait(time.monotonic() + timeout_s)
            if message.kind is Kind.ERROR:
                raise wire.unpack_error(message.json())
            if message.kind is not Kind.WELCOME or len(descriptors) != 2:
                close_all(descriptors)
                raise ProtocolError(f"{message.kind.name} answered HELLO")
            try:
                session = cls(connection, message.json(), *descriptors)
                session.socket_path = socket_path
                return session
            except BaseException:
                close_all(descriptors)
                raise
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- requests -----------------------------------------------------------------------------

    def open_dataset(self, request: DatasetRequest, timeout_s: float = 120.0) -> Dataset:
        """List what `request` names.

        Raises:
            GpufeedError: as the daemon says (NotFoundError, AccessDeniedError, CapacityError, …).
            DaemonUnavailableError: no answer in `timeout_s`.
        """
        body = {
            "urls": list(request.urls),
            "kind": request.kind,
            "storage_options": dict(request.storage_options),
            "virtual_shard_bytes": request.virtual_shard_bytes,
        }
        return _dataset(self._ask(Kind.OPEN, body, timeout_s))

    def index_dataset(
        self,
        dataset: Dataset,
        progress: Callable[[int, int], None] | None = None,
        timeout_s: float = 3600.0,
    ) -> Dataset:
        """Make every shard's sample count known. Reads each unindexed shard once, into the cache.

        Args:
            dataset: as opened in this session.
            progress: called with (shards done, shards in all).
            timeout_s: longest silence between two signs of progress.
        """
        body = {"dataset_id": dataset.dataset_id}
        return _dataset(self._ask(Kind.INDEX, body, timeout_s, progress))

    def begin_request(self, kind: Kind, body: dict[str, Any], timeout_s: float) -> int:
        """Send a request without waiting; its answer repeats the number returned."""
        self._requests += 1
        self._connection.send_json(kind, {"id": self._requests, **body}, timeout_s)
        return self._requests

    @property
    def is_cut(self) -> bool:
        """Whether the session has ended: extents that were held may be overwritten from then on."""
        return self._connection.is_cut

    def tell(self, kind: Kind, body: dict[str, Any]) -> None:
        """Send something that is not answered."""
        self._connection.send(wire.pack(kind, wire.pack_json(body)))

    def wait_message(self, deadline_s: float) -> Message:
        """The next message, whatever it is; for those who mind their own requests.

        Raises:
            DaemonUnavailableError: none before `deadline_s` (monotonic), or the daemon is gone.
        """
        while True:
            message = self.try_message()
            if message is not None:
                return message
            if not self._wait_socket(deadline_s):
                raise silence()

    def try_message(self) -> Message | None:
        """The next message if one is here, whatever it is; never waits.

        Raises:
            DaemonUnavailableError: the daemon is gone.
        """
        try:
            message, descriptors = self._connection.receive()
        except BlockingIOError:
            return None
        return with_body(message, descriptors)

    def post(self, data: bytes) -> None:
        """Send a packed message soon, without ever waiting: from any thread, and from finalisers.

        What the socket does not take now goes with the next `flush`. A session that is lost needs
        no more messages.
        """
        self._posted.append(data)
        if not self.flush():
            with contextlib.suppress(OSError):  # full, so somebody is woken anyway; or closed
                os.eventfd_write(self._wake_fd, 1)

    def flush(self) -> bool:
        """Send what was posted as far as the socket takes it; whether nothing is left to do."""
        # Whoever has the lock sends for those who come meanwhile, and looks again afterwards: they
        # may run inside of it, so they cannot wait for it.
        while self._posted:
            if not self._posting.acquire(blocking=False):
                return True
            try:
                while self._posted:
                    if not self._connection.try_send(self._posted[0]):
                        return False
                    self._posted.popleft()
            except DaemonUnavailableError:
                self._posted.clear()
            finally:
                self._posting.release()
        return True

    def wait_readable(self, deadline_s: float) -> bool:
        """Wait for a message, and send meanwhile what was posted; False at the deadline.

        Args:
            deadline_s: monotonic.
        """
        return bool(self._pending) or self._wait_socket(deadline_s)

    def _wait_socket(self, deadline_s: float) -> bool:
        while True:
            sends = 0 if self.flush() else select.POLLOUT
            poll = select.poll()
            poll.register(self._connection.fileno(), select.POLLIN | sends)
            poll.register(self._wake_fd, select.POLLIN)
            ready = dict(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
            if not ready:
                return False
            if self._wake_fd in ready:
                self.take_wake()
            if ready.get(self._connection.fileno(), 0) & ~select.POLLOUT:
                return True

    @property
    def wake_fd(self) -> int:
        """Readable when something posted waits for the socket; for an event loop."""
        return self._wake_fd

    def take_wake(self) -> None:
        """The waiter is awake."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _ask(
        self,
        kind: Kind,
        body: dict[str, Any],
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Any]:
        request_id = self.begin_request(kind, body, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self.wait_message(deadline_s)
            if message.kind in (Kind.REPLY, Kind.PROGRESS, Kind.ERROR):
                value = message.json()
                if value.get("id") != request_id:
                    continue
                if message.kind is Kind.REPLY:
                    return value
                if message.kind is Kind.ERROR:
                    raise wire.unpack_error(value)
                deadline_s = time.monotonic() + timeout_s
                if progress is not None:
                    progress(int(value["done"]), int(value["total"]))
            else:
                self._pending.extend(_events(message))

    # --- the data path ------------------------------------------------------------------------

    def extend_plan(self, dataset: Dataset, shard_ids: Sequence[int]) -> range:
        """Append shards to the plan; returns their positions. The order is the order of reading."""
        count = len(dataset.shards)
        if any(not 0 <= shard < count for shard in shard_ids):
            raise UsageError(f"a plan names shards outside 0..{count - 1} of the dataset")
        first = self._positions
        for begin in range(0, len(shard_ids), wire.PLAN_IDS_PER_MESSAGE_MAX):
            piece = shard_ids[begin : begin + wire.PLAN_IDS_PER_MESSAGE_MAX]
            body = wire.pack_plan(dataset.dataset_id, piece, first + begin)
            self._connection.send(wire.pack(Kind.PLAN, body))
        self._positions += len(shard_ids)
        return range(first, self._positions)

    def forecast(self, dataset: Dataset, shard_ids: Sequence[int], *, job: str, anew: bool) -> None:
        """Tell the order in which this session will read, so that the cache keeps the right shards.

        Nothing is read because of it, and nothing breaks where the plan turns out otherwise.

        Args:
            dataset: an open one.
            shard_ids: the order, from the end of what was told before.
            job: which job this process is a rank of; the same on all of them.
            anew: forget what was told before and not read yet.
        """
        if self._job is None:
            self._job = job
            self._connection.send(wire.pack(Kind.JOIN, wire.pack_json({"job": job})))
        for begin in range(0, max(1, len(shard_ids)), wire.PLAN_IDS_PER_MESSAGE_MAX):
            piece = shard_ids[begin : begin + wire.PLAN_IDS_PER_MESSAGE_MAX]
            body = wire.pack_forecast(dataset.dataset_id, piece, anew=anew and not begin)
            self._connection.send(wire.pack(Kind.FORECAST, body))

    def fileno(self) -> int:
        """The socket, to wait on for reading. Events kept back by a request count as readable."""
        return self._connection.fileno()

    def receive(self) -> list[Event]:
        """All events that are here now; never waits.

        Raises:
            DaemonUnavailableError: the daemon is gone; every extent is lost.
            ProtocolError: it does not speak the protocol.
        """
        events = list(self._pending)
        self._pending.clear()
        for _ in range(_MESSAGES_PER_RECEIVE_MAX):
            try:
                message, descriptors = self._connection.receive()
            except BlockingIOError:
                break
            close_all(descriptors)
            events.extend(_events(message))
        return events

    def release(self, seqs: Sequence[int]) -> None:
        """Give extents back, by sequence number, in any order, each once."""
        for begin in range(0, len(seqs), wire.RELEASES_PER_MESSAGE_MAX):
            piece = seqs[begin : begin + wire.RELEASES_PER_MESSAGE_MAX]
            self._connection.send(wire.pack(Kind.RELEASE, wire.pack_release(piece)))

    def arena(self) -> memoryview:
        """The whole arena, read-only. An extent begins at ``slot * extent_bytes``."""
        return self._arena

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session. Views of the arena that are still around stay mapped until they go."""
        self.abandon()
        if self.arena_fd >= 0:
            close_all((self.arena_fd, self.lock_fd))
            self.arena_fd = self.lock_fd = -1
        # Where somebody still looks at the arena, the mapping goes with the last view.
        with contextlib.suppress(BufferError):
            self._arena.release()
            self._map.close()

    def abandon(self) -> None:
        """In a forked child: let go of the socket without a word, keep the mapping."""
        _open_sessions.discard(self)
        self._connection.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1


def _events(message: Message) -> list[Event]:
    if message.kind is Kind.EXTENTS:
        return list(wire.unpack_extents(message.body))
    if message.kind is Kind.SAMPLES:
        return [wire.unpack_samples(message.body)]
    if message.kind is Kind.SHARD_END:
        value = message.json()
        return [ShardEndEvent(value["position"], value["sample_count"], value["bytes_by_tier"])]
    if message.kind is Kind.FAIL:
        value = message.json()
        return [FailEvent(value["position"], wire.unpack_error(value))]
    if message.kind is Kind.ERROR:
        raise wire.unpack_error(message.json())
    raise ProtocolError(f"an unexpected {message.kind.name}")


def _dataset(value: dict[str, Any]) -> Dataset:
    names, sizes, counts = value["names"], value["sizes"], value["counts"]
    shards = tuple(
        ShardInfo(name, size, count if count >= 0 else None)
        for name, size, count in zip(names, sizes, counts, strict=True)
    )
    return Dataset(value["dataset_id"], value["kind"], value["manifest_hash"], shards)
