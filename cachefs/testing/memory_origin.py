"""An origin over a dict, with a gate: a test can hold its reads and see that they wait.

Runs on the engine's loop and thread; `objects`, `gate` and `asked` are for the test's own. The gate
is a `threading` one because the two live on different threads; held reads wait for it in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import NotFoundError, ShardChangedError
from gpufeed.cachefs.model import ObjectInfo, folder_info
from gpufeed.cachefs.origin.base import OnTarget

GATE_TIMEOUT_S = 60.0


class MemoryOrigin:
    """Satisfies `Origin`. The etag is the content's checksum.

    Attributes:
        objects: contents by address; a test may change them at any time.
        gate: reads wait until it is set; it is set at first.
        asked: set when a read has come to the gate.
        reads_count: reads begun.
        cancelled_count: reads given up at the gate.
        closed: `close` was called.
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.reads_count = 0
        self.cancelled_count = 0
        self.closed = False

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        return self._info(url)

    def _info(self, url: str) -> ObjectInfo:
        data = self.objects.get(url)
        if data is None:
            raise NotFoundError(f"{url} does not exist")
        crc = checksum.crc64(data)
        return ObjectInfo(url, len(data), f"etag-{crc:x}", crc)

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        for url in sorted(self.objects):
            if url.startswith(prefix_url):
                yield self._info(url)

    async def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        below = [url for url in sorted(self.objects) if url.startswith(folder_url)]
        folders = set()
        for url in below:
            name, slash, _ = url.removeprefix(folder_url).partition("/")
            if slash:
                folders.add(f"{folder_url}{name}/")
            else:
                yield self._info(url)
        for url in sorted(folders):
            yield folder_info(url)

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `Origin`."""
        self.reads_count += 1
        self.asked.set()
        await self._pass_gate()
        now = self._info(info.url)
        if now.etag != info.etag:
            raise ShardChangedError(f"{info.url} was {info.etag}, now it is {now.etag}")
        data = self.objects[info.url]
        at = begin_bytes
        for i, target in enumerate(targets):
            target[:] = data[at : at + len(target)]
            at += len(target)
            on_target(i)
        return now.crc64

    async def _pass_gate(self) -> None:
        if self.gate.is_set():
            return
        try:
            passed = await asyncio.to_thread(self.gate.wait, GATE_TIMEOUT_S)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        assert passed, f"the test kept the gate shut for {GATE_TIMEOUT_S:g} s"

    async def close(self) -> None:
        """See `Origin`."""
        self.closed = True
