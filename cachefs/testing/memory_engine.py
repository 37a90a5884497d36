"""An origin engine over a dict, on the caller's own loop: countable, and faulty on demand.

Satisfies `gpufeed.cachefs.filltools.Engine`. `gate`, when set, holds every read until the event is
set (`asked` tells that one came); `fail_at` makes the n-th read fail with `failure` after half of
its bytes; `corrupt` flips one byte of every answer of these addresses; `demanded` notes of each
read whether somebody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, NotFoundError, OriginUnavailableError
from gpufeed.cachefs.model import ObjectInfo


class MemoryEngine:
    """Objects by address."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.reads = 0
        self.bytes_by_url: Counter[str] = Counter()
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()
        self.fail_at = 0
        self.failure: GpufeedError = OriginUnavailableError("a fault that the test asked for")
        self.corrupt: set[str] = set()
        self.tells_crc = True
        self.demanded: list[bool] = []

    def info(self, url: str) -> ObjectInfo:
        """What a listing would say."""
        if url not in self.objects:
            raise NotFoundError(f"{url} does not exist")
        data = self.objects[url]
        return ObjectInfo(url, len(data), f"etag-{checksum.crc64(data):x}")

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `Engine`."""
        info = self.info(url)
        crc = checksum.crc64(self.objects[url]) if self.tells_crc else None
        return ObjectInfo(info.url, info.size_bytes, info.etag, crc)

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: Callable[[int], None],
        options: Mapping[str, str] | None = None,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `Engine`."""
        self.reads += 1
        self.demanded.append(demand)
        number = self.reads
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        else:
            await asyncio.sleep(0)
        data = bytearray(self.objects[info.url])
        crc = checksum.crc64(bytes(data)) if self.tells_crc else None
        if info.url in self.corrupt:
            data[len(data) // 2] ^= 1
        at = begin_bytes
        for i, target in enumerate(targets):
            if number == self.fail_at and i >= len(targets) // 2:
                raise self.failure
            target[:] = data[at : at + len(target)]
            at += len(target)
            self.bytes_by_url[info.url] += len(target)
            on_target(i)
        return crc
