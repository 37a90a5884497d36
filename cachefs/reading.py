"""Reading through a daemon: samples of a dataset in an order of one's own, and ranges of files.

`Client` holds what its readers share: how the daemon is found, sessions that are idle, one session
for ranges. Each `SampleStream` has a session of its own, so that one which is read slowly holds up
no other.

Invariants:
    - samples come in the order asked for, each once, also over a daemon that is killed or
      restarted: the stream finds it again, declares the rest of its order, and goes on behind the
      last sample that it gave. A dataset that changed meanwhile is an error;
    - views that were given stay valid and unchanged, whatever becomes of the daemon, the stream or
      the client (`gpufeed.cachefs.leases`);
    - no call waits without a limit, and nothing here has a thread.

A client may be used by several threads, a stream by one at a time. A forked child may go on with
the client, which opens sessions anew there, but not with its parent's streams. Pickled, a client
is its arguments.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpufeed.cachefs.calls import Calls
from gpufeed.cachefs.connect import open_session
from gpufeed.cachefs.connection import silence
from gpufeed.cachefs.errors import DaemonUnavailableError, ShardChangedError, UsageError
from gpufeed.cachefs.leases import Leases
from gpufeed.cachefs.reconnect import Patience
from gpufeed.cachefs.remotefile import Place, RemoteFile
from gpufeed.cachefs.samples import ReadStats, Sample, SampleCutter, Taken
from gpufeed.cachefs.session import Dataset, DatasetRequest, Session, ShardInfo
from gpufeed.cachefs.units import MIB

# The origin's own deadline and retries lie within it.
SILENCE_LIMIT_S = 180.0
# Sessions kept for the next stream.
IDLE_MAX = 4
WINDOW_BYTES_DEFAULT = 128 * MIB

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client finds its daemon, and how much it may hold.

    Attributes:
        daemon: auto, required, off or a socket's path; None leaves it to ``GPUFEED_DAEMON``.
        token: of the tenant; None leaves it to ``GPUFEED_TOKEN`` and ``GPUFEED_TOKEN_FILE``.
        window_bytes: of each session: what may be published to it and not given back. Views hold at
            most half of it.
        storage_options: of the origin, for what is read by ranges; of datasets, those of `open`.

    Raises:
        UsageError: the window is negative.
    """

    daemon: str | None = None
    token: str | None = None
    window_bytes: int = WINDOW_BYTES_DEFAULT
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window_bytes < 0:
            raise UsageError(f"window_bytes is {self.window_bytes}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Readable:
    """A dataset as it was listed: what was asked for, and its shards at that time."""

    request: DatasetRequest
    manifest_hash: str
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session in which a dataset is open."""

    leases: Leases
    request: DatasetRequest
    dataset: Dataset


def check_range(begin_bytes: int, end_bytes: int | None) -> None:
    """Whether these are the ends of a range; None is the end of the object.

    Raises:
        UsageError: they are not.
    """
    if begin_bytes < 0 or (end_bytes is not None and end_bytes < begin_bytes):
        raise UsageError(f"[{begin_bytes}, {end_bytes}) is no range of bytes")


class ReadFile:
    """One version of one object, read by ranges. Threads may share it."""

    def __init__(self, client: Client, remote: RemoteFile) -> None:
        self._client = client
        self._remote = remote
        self.url = remote.url
        self.size_bytes = remote.size_bytes
        self.etag = remote.etag

    def read(self, begin_bytes: int = 0, end_bytes: int | None = None) -> memoryview:
        """A read-only view of ``[begin_bytes, end_bytes)``, less what lies behind the end.

        In place where one extent has it, or extents in neighbouring slots; else a copy.

        Raises:
            UsageError: the range is none.
            ShardChangedError: the object is of another version by now.
            GpufeedError: as the daemon says, or it is gone.
        """
        check_range(begin_bytes, end_bytes)
        end_bytes = self.size_bytes if end_bytes is None else end_bytes
        stats = self._client.stats
        return self._client.patiently(lambda: self._remote.read_view(begin_bytes, end_bytes, stats))

    def close(self) -> None:
        """Let go of it; views stay valid."""
        self._remote.close()


class Client(Place):
    """See the top of the file. Made by `open_client`; a context manager.

    Attributes:
        stats: what was read through it; of all threads, so nearly exact while they read.
    """

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options.daemon, options.storage_options)
        self.options = options
        self.stats = ReadStats()
        self._is_closed = False
        self._has_connected = False
        self._former = ""
        self._lock = threading.Lock()
        self._idle: collections.deque[OpenedSession] = collections.deque()
        self._calls: Calls | None = None
        _clients.add(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[ClientOptions], Client], tuple[ClientOptions]]:
        return Client, (self.options,)

    # --- datasets -----------------------------------------------------------------------------

    def open(self, urls: str | Iterable[str], **options: Any) -> Readable:
        """List a dataset.

        Args:
            urls: addresses with brace patterns, or one prefix that ends in ``/``.
            **options: see `DatasetRequest`; storage options are the client's where none are given.

        Raises:
            GpufeedError: as the daemon says (NotFoundError, AccessDeniedError, …), or it is gone.
        """
        named = (urls,) if isinstance(urls, str) else tuple(urls)
        options.setdefault("storage_options", self.options.storage_options)
        request = DatasetRequest(urls=named, **options)
        opened = self.patiently(lambda: self.open_in_session(request))
        self.keep(opened)
        return Readable(request, opened.dataset.manifest_hash, opened.dataset.shards)

    def samples(self, dataset: Readable, order: Sequence[int] | None = None) -> SampleStream:
        """All samples of shards, in this order of shards; each shard's own in the shard's order.

        Args:
            dataset: opened by this client, or by another of the same daemon.
            order: shard numbers, each as often as it is wanted; None is all of them, once.

        Raises:
            UsageError: the order names a shard that the dataset does not have.
        """
        return SampleStream(self, self.state(dataset, order))

    def state(self, dataset: Readable, order: Sequence[int] | None) -> StreamState:
        """See `samples`."""
        count = len(dataset.shards)
        chosen = tuple(range(count)) if order is None else tuple(order)
        if any(not 0 <= shard < count for shard in chosen):
            raise UsageError(f"an order names shards outside 0..{count - 1} of the dataset")
        return StreamState(dataset, chosen, self.stats)

    # --- ranges -------------------------------------------------------------------------------

    def file(self, url: str, *, etag: str | None = None) -> ReadFile:
        """One object, for several reads of the same version.

        Raises:
            GpufeedError: it is not there, may not be read, or is of another version than wanted.
        """
        remote = self.patiently(lambda: RemoteFile(self, url, etag=etag))
        return ReadFile(self, remote)

    def read(self, url: str, begin_bytes: int = 0, end_bytes: int | None = None) -> memoryview:
        """See `ReadFile.read`; of the version that is there now."""
        file = self.file(url)
        try:
            return file.read(begin_bytes, end_bytes)
        finally:
            file.close()

    def read_many(self, ranges: Iterable[tuple[str, int, int | None]]) -> list[memoryview]:
        """Views of many ranges ``(url, begin, end)``, in that order; each object is opened once.

        Raises:
            GpufeedError: one of them cannot be read.
        """
        files: dict[str, ReadFile] = {}
        try:
            views = []
            for url, begin_bytes, end_bytes in ranges:
                if url not in files:
                    files[url] = self.file(url)
                views.append(files[url].read(begin_bytes, end_bytes))
            return views
        finally:
            for file in files.values():
                file.close()

    # --- what readers share -------------------------------------------------------------------

    def calls(self) -> Calls:
        """The session for ranges."""
        with self._lock:
            self._check_open()
            if self._calls is None or self._calls.has_failed:
                self._calls = Calls(self.new_session())
            return self._calls

    def open_in_session(self, request: DatasetRequest) -> OpenedSession:
        """A session with the dataset open in it: an idle one, or a new one.

        Raises:
            GpufeedError: as the daemon says, or it is gone.
        """
        with self._lock:
            self._check_open()
            for opened in self._idle:
                if opened.request == request:
                    self._idle.remove(opened)
                    return opened
        leases = Leases(self.new_session())
        try:
            return OpenedSession(leases, request, leases.session.open_dataset(request))
        except BaseException:
            leases.retire()
            raise

    def new_session(self) -> Session:
        """A session that is the caller's.

        Raises:
            DaemonUnavailableError: no daemon answers.
            GpufeedError: it refused, with its reason.
        """
        options = self.options
        session = open_session(
            daemon=options.daemon, window_bytes=options.window_bytes, token=options.token,
            former=self._former,
        )  # fmt: skip
        self._former = session.socket_path
        self._has_connected = True
        return session

    def keep(self, opened: OpenedSession) -> None:
        """Nobody reads in it now; the next stream may."""
        opened.leases.begin_wait()
        with self._lock:
            if not self._is_closed and not opened.leases.session.is_cut:
                self._idle.append(opened)
                opened_first = self._idle.popleft() if len(self._idle) > IDLE_MAX else None
            else:
                opened_first = opened
        if opened_first is not None:
            opened_first.leases.retire()

    def patiently(self, act: Callable[[], _T]) -> _T:
        """Do it again while the daemon is away, for a limited time.

        Raises:
            DaemonUnavailableError: it stays away.
            GpufeedError: whatever `act` raises else.
        """
        patience = Patience()
        while True:
            try:
                return act()
            except DaemonUnavailableError as error:
                time.sleep(self.lost_s(patience, error))

    def lost_s(self, patience: Patience, error: DaemonUnavailableError) -> float:
        """How long to wait before the daemon is sought again.

        Raises:
            DaemonUnavailableError: it was never there, or is away for too long.
            UsageError: the client was closed.
        """
        self._check_open()
        if not self._has_connected:
            raise error
        self.stats.reconnects_count += patience.is_fresh
        return patience.delay_s(error, time.monotonic())

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this client was closed; open another")

    def close(self) -> None:
        """End all sessions in which nothing is read; streams end theirs. Views stay valid."""
        with self._lock:
            self._is_closed = True
            idle = list(self._idle)
            self._idle.clear()
            calls, self._calls = self._calls, None
        for opened in idle:
            opened.leases.retire()
        if calls is not None:
            calls.close()

    def _begin_anew(self) -> None:
        """In a forked child: nothing is open, and the lock may be held for ever."""
        self._lock = threading.Lock()
        self._idle.clear()
        self._calls = None


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    for client in list(_clients):
        client._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_child)


class StreamState:
    """Where a stream stands, and the session it reads in; what blocking and asyncio share.

    Does no I/O but for the session's messages, and never waits.
    """

    def __init__(self, dataset: Readable, order: Sequence[int], stats: ReadStats) -> None:
        self.request = dataset.request
        self.stats = stats
        self._manifest_hash = dataset.manifest_hash
        self._names = [dataset.shards[shard].name for shard in order]
        self._order = order
        self._taken = Taken(0, 0)
        self._cutter: SampleCutter | None = None
        self.opened: OpenedSession | None = None
        self.patience = Patience()
        self._is_over = not order

    def is_over(self) -> bool:
        """Whether the order's last sample was given."""
        return self._is_over

    def attach(self, opened: OpenedSession) -> None:
        """Read on in this session.

        Raises:
            ShardChangedError: the dataset is another by now.
            DaemonUnavailableError: the daemon is gone.
        """
        self.opened = opened
        found = opened.dataset.manifest_hash
        if found != self._manifest_hash:
            raise ShardChangedError(
                f"the dataset {', '.join(self.request.urls)} changed while it was read: its shards "
                f"had manifest {self._manifest_hash}, now {found}; open it again"
            )
        base, skip = self._taken
        rest = self._order[base:]
        positions = opened.leases.session.extend_plan(opened.dataset, rest)
        self._cutter = SampleCutter(
            opened.leases,
            self._names[base:],
            first_position=positions.start,
            base=base,
            skip=skip,
            stats=self.stats,
        )

    def next(self) -> Sample | None:
        """The next sample, of what is here; None if none is, or `is_over`.

        Raises:
            GpufeedError: why there is none.
        """
        cutter = self._cutter
        if cutter is None:
            return None
        sample = cutter.next()
        self._taken = cutter.taken
        if sample is not None:
            self.patience.read()
        elif cutter.is_over:
            self._is_over = True
        return sample

    def receive(self) -> bool:
        """Take what the daemon sent; whether there was anything.

        Raises:
            DaemonUnavailableError: it is gone.
        """
        assert self.opened is not None
        assert self._cutter is not None
        events = self.opened.leases.session.receive()
        for event in events:
            self._cutter.on_event(event)
        return bool(events)

    def begin_wait(self) -> None:
        """Nothing is here: let the daemon have all the room there is."""
        assert self.opened is not None
        assert self._cutter is not None
        self.opened.leases.begin_wait()
        self._cutter.spill()

    def end_wait(self) -> None:
        """Something may be here."""
        if self.opened is not None:
            self.opened.leases.end_wait()

    def take_opened(self) -> OpenedSession | None:
        """Give up the session; extents that no view holds go back."""
        opened, self.opened = self.opened, None
        self._cutter = None
        return opened

    def lose(self) -> None:
        """The session is of no use any more; its views are."""
        opened = self.take_opened()
        if opened is not None:
            opened.leases.retire()


class SampleStream(Iterator[Sample]):
    """Iterator over samples; see `Client.samples`. A context manager, closed at its end anyway."""

    def __init__(self, client: Client, state: StreamState) -> None:
        self._client = client
        self._state = state
        self._using = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __next__(self) -> Sample:
        """The next sample.

        Raises:
            UsageError: another thread is in this call, or this is a forked child.
            GpufeedError: why there is none; the stream is closed then.
        """
        with self._alone():
            if self._is_closed:
                raise StopIteration
            try:
                sample = self._next()
            except BaseException:
                self.close()
                raise
            if sample is None:
                self._finish()
                raise StopIteration
            return sample

    def _next(self) -> Sample | None:
        state = self._state
        while not state.is_over():
            try:
                if state.opened is None:
                    state.attach(self._client.open_in_session(state.request))
                sample = state.next()
                if sample is not None:
                    return sample
                if not (state.is_over() or state.receive()):
                    self._wait()
            except DaemonUnavailableError as error:
                state.lose()
                time.sleep(self._client.lost_s(state.patience, error))
        return None

    def _wait(self) -> None:
        state = self._state
        assert state.opened is not None
        state.begin_wait()
        try:
            if not state.opened.leases.session.wait_readable(time.monotonic() + SILENCE_LIMIT_S):
                raise silence()
        finally:
            state.end_wait()

    def _finish(self) -> None:
        """The order is read to its end: the session can serve another stream."""
        self._is_closed = True
        opened = self._state.take_opened()
        if opened is not None:
            self._client.keep(opened)

    def close(self) -> None:
        """Read no more. Views stay valid."""
        self._is_closed = True
        if self._pid == os.getpid():
            self._state.lose()

    def __del__(self) -> None:
        # Dropped in the middle. An interpreter that ends may have taken the rest apart already.
        with contextlib.suppress(AttributeError, TypeError):
            self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._pid != os.getpid():
            raise UsageError(
                "this stream is the parent process's: begin one of your own with client.samples()"
            )
        if not self._using.acquire(blocking=False):
            raise UsageError(
                "two threads read one stream at once: give each thread its own client.samples()"
            )
        try:
            yield
        finally:
            self._using.release()

    def __reduce__(self) -> Any:
        raise TypeError("a stream cannot be pickled: pickle its client, and begin another there")


def open_client(
    daemon: str | None = None,
    *,
    token: str | None = None,
    window_bytes: int = WINDOW_BYTES_DEFAULT,
    storage_options: Mapping[str, str] | None = None,
) -> Client:
    """A client of the daemon that `daemon` or ``GPUFEED_DAEMON`` names; see `ClientOptions`.

    Nothing is opened before it is used.
    """
    return Client(
        ClientOptions(
            daemon=daemon, token=token, window_bytes=window_bytes,
            storage_options=dict(storage_options or {}),
        )
    )  # fmt: skip
