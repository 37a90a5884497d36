"""Opening a dataset: list or head what was named, make shards of it, check that they can be cached.

The decisions are in `gpufeed.cachefs.listing`; here is the I/O, once a dataset and daemon, not once
a rank: sessions that ask for the same thing at the same time share the answer, and the training
process itself never speaks to the network.

Each tenant has its own `Datasets`. What it learns of a shard without reading it (how many samples,
how long a compressed one is) it is told only if it may read the shard (`gpufeed.cachefs.access`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpufeed.cachefs import urls as addresses
from gpufeed.cachefs.access import Access
from gpufeed.cachefs.cache import KnownIndexer, ShardCache, ShardSource
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    CapacityError,
    NotFoundError,
    PastEndError,
    UsageError,
)
from gpufeed.cachefs.listing import guess_kind, manifest_hash, tar_shards, virtual_shards
from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.origin.oss_address import foreign_origin, is_cloud
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.sources import Indexer
from gpufeed.cachefs.store.catalog import StoredShard
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.tarscan import TarIndexer
from gpufeed.cachefs.units import MIB, format_bytes

# HEAD requests under way while shards named one by one are looked up.
HEADS_IN_FLIGHT = 32
OBJECTS_MAX = 20_000_000
# Shards filled ahead of the one being indexed.
INDEX_AHEAD_SHARDS = 3
KINDS = ("auto", "tar", "loose")
# Sample counts of shards that were read and not kept.
COUNTED_MAX = 1 << 16
_CREDENTIAL = frozenset({"credentials", "key", "secret", "token", "role_arn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a client asked for; equal requests share one answer."""

    urls: tuple[str, ...]
    kind: str = "auto"
    virtual_shard_bytes: int = 32 * MIB
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A dataset that this daemon has listed. `sources[i]` is shard i."""

    dataset_id: int
    kind: str
    manifest_hash: str
    sources: tuple[ShardSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What the sessions of one tenant may ask of origins.

    Attributes:
        tenant: its name; empty: there is only one.
        allow: prefixes of addresses.
        endpoint: the daemon's, by which shards' identities are told apart.
        endpoints: further ones that clients may name beside the cloud's own; None: any.
        options: what of the origin is the tenant's own, as `OriginEngine` takes it.
    """

    tenant: str = ""
    allow: tuple[str, ...] = ()
    endpoint: str = ""
    endpoints: tuple[str, ...] | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


class Datasets:
    """All datasets that a tenant has open. Owned by the daemon's loop.

    Args:
        engine: of the daemon.
        store: of the daemon.
        rights: of the tenant.
        extent_bytes: the size of a slot.
        decompress: compressed tars are kept and served as plain ones.
        access: which shards of the store the tenant may have; None: all.
        ids: numbers of datasets, no two of a daemon alike.
    """

    def __init__(
        self,
        engine: OriginEngine,
        store: ShardStore,
        rights: Rights,
        *,
        extent_bytes: int,
        decompress: bool = True,
        access: Access | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.engine = engine
        self._store = store
        self._rights = rights
        self._extent_bytes = extent_bytes
        self._decompress = decompress
        self._access = access
        self._ids = ids if ids is not None else itertools.count(1)
        self._opening: dict[Wanted, asyncio.Task[OpenDataset]] = {}
        # Of shards that could not be kept, so that they are not read again for it.
        self._counted: collections.OrderedDict[str, int] = collections.OrderedDict()

    @property
    def tenant(self) -> str:
        """Whose they are; empty: there is only one tenant."""
        return self._rights.tenant

    async def open(self, wanted: Wanted) -> OpenDataset:
        """List the dataset.

        Raises:
            GpufeedError: nothing there, not allowed, no access, or a shard exceeds the cache.
        """
        task = self._opening.get(wanted)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open(wanted))
            self._opening[wanted] = task
            task.add_done_callback(lambda _: self._opening.pop(wanted, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Give up what is being listed: it outlives the sessions that asked for it."""
        tasks = list(self._opening.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def counts(self, dataset: OpenDataset) -> list[int]:
        """Samples of each shard, -1 where not known yet."""
        return [self._count(source) for source in dataset.sources]

    def sizes(self, dataset: OpenDataset) -> list[int]:
        """Bytes of each shard; of a compressed one outside of the store, those at its origin."""
        return [self._size(source) for source in dataset.sources]

    def _size(self, source: ShardSource) -> int:
        if source.spec.is_sized:
            return source.spec.size_bytes
        stored = self._stored(source.spec.digest)
        return source.spec.size_bytes if stored is None else stored.size_bytes

    def _stored(self, digest: str) -> StoredShard | None:
        """What the store says of a shard that the tenant may read."""
        if self._access is not None and not self._access.is_proven(digest):
            return None
        return self._store.lookup(digest)

    def _count(self, source: ShardSource) -> int:
        if isinstance(source.make_indexer, _Known):
            return len(source.make_indexer.index)
        stored = self._stored(source.spec.digest)
        if stored is not None and stored.sample_count is not None:
            return stored.sample_count
        return self._counted.get(source.spec.digest, -1)

    async def index(
        self, dataset: OpenDataset, cache: ShardCache, progress: Callable[[int, int], None]
    ) -> None:
        """Make every shard's sample count known, reading what is unknown once, into the cache."""
        missing = [source for source in dataset.sources if self._count(source) < 0]
        for done, source in enumerate(missing):
            for following in missing[done + 1 : done + 1 + INDEX_AHEAD_SHARDS]:
                cache.prefetch(following)
            await cache.permit(source)
            if self._count(source) < 0:
                self._note_count(source.spec.digest, await _read_through(cache, source))
            progress(done + 1, len(missing))

    def _note_count(self, digest: str, count: int) -> None:
        self._counted[digest] = count
        if len(self._counted) > COUNTED_MAX:
            self._counted.popitem(last=False)

    def note_access(self, source: ShardSource) -> None:
        """Every object of the shard has just been looked up with the tenant's credentials."""
        if self._access is not None:
            self._access.note(source.spec.digest)

    async def _open(self, wanted: Wanted) -> OpenDataset:
        if wanted.kind not in KINDS:
            raise UsageError(f"kind={wanted.kind!r} is none of {', '.join(KINDS)}")
        named = [addresses.normalise(url) for url in addresses.expand(list(wanted.urls))]
        if not named:
            raise UsageError("no address was given")
        options = self.options(wanted.options)
        for url in named:
            self.check_allowed(url)
        infos = await self._look_up(named, options)
        kind = wanted.kind
        if kind == "auto":
            kind = guess_kind(infos, decompress=self._decompress)
        sources = self._sources(kind, infos, named, wanted, options)
        origin = self.origin_of(options)
        if origin:
            sources = [
                replace(source, spec=replace(source.spec, origin=origin)) for source in sources
            ]
        specs = [source.spec for source in sources]
        self._check_capacity(specs)
        headed = {url for url in named if not url.endswith("/")}
        for source in sources:
            if all(part.info.url in headed for part in source.spec.sources):
                self.note_access(source)
        return OpenDataset(next(self._ids), kind, manifest_hash(specs), tuple(sources))

    def origin_of(self, options: Mapping[str, str]) -> str:
        """What a shard's identity has of where it is from: see `ShardSpec.origin`.

        Raises:
            ConfigError: the endpoint among the options is no address.
        """
        return foreign_origin(options.get("endpoint", ""), self._rights.endpoint)

    def options(self, asked: Iterable[tuple[str, str]]) -> dict[str, str]:
        """A client's storage options with what is the tenant's own.

        Credentials are replaced as a whole: a key of one and a token of another are no credential.

        Raises:
            AccessDeniedError: the client names an endpoint that this daemon does not ask.
            ConfigError: it is no address.
        """
        given = dict(asked)
        endpoint = given.get("endpoint", "")
        if endpoint and not self._asks(endpoint):
            raise AccessDeniedError(
                f"this daemon does not ask {endpoint}: what answers there could say anything of "
                "any object, and would be shown the daemon's credentials; add it to "
                "daemon.endpoints, or use an embedded daemon (GPUFEED_DAEMON=off)"
            )
        own = dict(self._rights.options)
        if _CREDENTIAL & given.keys():
            own = {name: value for name, value in own.items() if name not in _CREDENTIAL}
        return own | given

    def _asks(self, endpoint: str) -> bool:
        rights = self._rights
        if rights.endpoints is None or is_cloud(endpoint):
            return True
        known = (rights.endpoint, rights.options.get("endpoint", ""), *rights.endpoints)
        return any(one and not foreign_origin(endpoint, one) for one in known)

    def check_allowed(self, url: str) -> None:
        """Whether clients may read this address.

        Raises:
            AccessDeniedError: they may not.
        """
        allow, tenant = self._rights.allow, self._rights.tenant
        if any(url.startswith(prefix) for prefix in allow):
            return
        setting = f"tenants.{tenant}.allow" if tenant else "daemon.allow"
        whose = f"for the tenant {tenant} " if tenant else ""
        raise AccessDeniedError(
            f"this daemon may not read {url}: {whose}it serves {', '.join(allow) or 'nothing'}; "
            f"add the prefix to {setting}, or use a daemon of your own (GPUFEED_DAEMON=off)"
        )

    async def _look_up(self, named: Sequence[str], options: Mapping[str, str]) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        limit = asyncio.Semaphore(HEADS_IN_FLIGHT)

        async def head(url: str) -> ObjectInfo:
            async with limit:
                return await self.engine.head(url, options)

        prefixes = [url for url in named if url.endswith("/")]
        for prefix in prefixes:
            found = await self.engine.list(prefix, options, limit_count=OBJECTS_MAX)
            # Consoles leave zero-byte objects that stand for folders.
            found = [info for info in found if not info.url.endswith("/")]
            for info in found:
                addresses.check_text(info.url)
            if not found:
                raise NotFoundError(
                    f"there is nothing under {prefix}: check the bucket, the prefix and its case"
                )
            infos.extend(found)
        single = [url for url in named if not url.endswith("/")]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(head(url)) for url in single]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        infos.extend(task.result() for task in tasks)
        return infos

    def _sources(
        self,
        kind: str,
        infos: Sequence[ObjectInfo],
        named: Sequence[str],
        wanted: Wanted,
        options: Mapping[str, str],
    ) -> list[ShardSource]:
        if kind == "tar":
            return [
                ShardSource(
                    spec=spec, options=options, make_indexer=_tar_indexer, tenant=self.tenant
                )
                for spec in tar_shards(infos, decompress=self._decompress)
            ]
        prefix = named[0] if named[0].endswith("/") else named[0].rpartition("/")[0] + "/"
        shards = virtual_shards(
            infos,
            prefix=prefix,
            shard_bytes=wanted.virtual_shard_bytes,
            extent_bytes=self._extent_bytes,
        )
        return [
            ShardSource(
                spec=shard.spec,
                options=options,
                make_indexer=_Known(shard.index),
                tenant=self.tenant,
            )
            for shard in shards
        ]

    def _check_capacity(self, specs: Sequence[ShardSpec]) -> None:
        largest = max(specs, key=lambda spec: spec.size_bytes)
        if self._store.memory_only or largest.size_bytes <= self._store.capacity_bytes:
            return
        raise CapacityError(
            f"the cache holds {format_bytes(self._store.capacity_bytes)}, but the shard "
            f"{largest.name} alone is {format_bytes(largest.size_bytes)}: raise store.capacity to "
            "at least that"
        )


async def _read_through(cache: ShardCache, source: ShardSource) -> int:
    reader = cache.open(source)
    try:
        extent = 0
        with contextlib.suppress(PastEndError):
            while True:
                slot, _ = await reader.extent(extent)
                cache.tools.pool.drop(slot)
                extent += 1
        await reader.finish()
        return sum(map(len, reader.samples(0, extent + 1)))
    finally:
        reader.close()


def _tar_indexer(spec: ShardSpec) -> Indexer:
    return TarIndexer(spec.name)


@dataclass(frozen=True, slots=True)
class _Known:
    index: SampleIndex

    def __call__(self, spec: ShardSpec) -> Indexer:
        return KnownIndexer(self.index)
