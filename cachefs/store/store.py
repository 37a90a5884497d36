"""The store: shards on NVMe, one file each, reserved before they are written, verified when read.

Reserve → write extents → commit, or abort: no other path makes bytes visible, and an abort leaves
nothing. A commit writes trailer and header, syncs, renames, syncs the directory, then the index: a
crash at any point leaves either a shard that the next start serves, or a ``.tmp`` that it removes.

Invariants:
    - resident + reserved + queued-for-unlink bytes never exceed the capacity (`cachefs.budget`);
    - leased shards are never victims;
    - every extent read is checked against its CRC-64 before anybody sees it; a wrong one takes its
      shard out (**quarantine**), and the caller fills it anew;
    - a disk that refuses writes turns reservations off for a while (`store.health`).

All methods are called on the daemon's loop, which never waits for the disk: disk and index work
runs in the store's own threads. The index is read once, at start; serving needs memory alone.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpufeed.cachefs import layout
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.config import PolicyConfig, StoreConfig
from gpufeed.cachefs.errors import DiskLateError, GpufeedError, IntegrityError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.policy import Bypass, PlanPolicy, Policy, Restored, Want
from gpufeed.cachefs.shares import NOBODY, Shares, Standing
from gpufeed.cachefs.store.accounts import Accounts
from gpufeed.cachefs.store.catalog import Catalog, StoredShard
from gpufeed.cachefs.store.files import DiskFiles, Files
from gpufeed.cachefs.store.heads import Head
from gpufeed.cachefs.store.health import DiskHealth
from gpufeed.cachefs.store.intake import Intake, StoreEvents
from gpufeed.cachefs.store.parts import DiskParts, Events
from gpufeed.cachefs.store.reader import ReadEvents
from gpufeed.cachefs.store.recovery import Found, reconcile
from gpufeed.cachefs.store.reservation import Reservation
from gpufeed.cachefs.units import BLOCK_BYTES

__all__ = ["Reservation", "ShardStore", "StoredShard"]

_LOG = logging.getLogger("gpufeed.store")


class ShardStore:
    """See the top of the file. Made by `open`; without a path it keeps nothing."""

    def __init__(
        self, config: StoreConfig, *, extent_bytes: int, metrics: Metrics, clock: Clock,
        policy: Policy,
    ) -> None:  # fmt: skip
        self._clock = clock
        self.memory_only = not config.path
        self.capacity_bytes = 0 if self.memory_only else config.capacity_bytes
        self._extent_bytes = extent_bytes
        self._metrics = metrics
        self._accounts = Accounts(self.capacity_bytes, metrics)
        self._budget = self._accounts.budget
        self._policy = policy
        self._health = DiskHealth(config.probe_after_s)
        self._shards = Catalog()
        self._leases: collections.Counter[str] = collections.Counter()
        self._numbers = itertools.count(1)
        self._disk: DiskParts | None = None
        self._intake: Intake | None = None
        metrics.set("store_capacity_bytes", self.capacity_bytes)

    @classmethod
    def open(
        cls, config: StoreConfig, *, extent_bytes: int, metrics: Metrics, clock: Clock,
        policy: Policy | None = None, files: Files | None = None,
    ) -> ShardStore:  # fmt: skip
        """Lock the directory and recover what is in it. Blocking.

        Args:
            config: where, and how much.
            extent_bytes: of every shard.
            metrics: where bytes and events are counted.
            clock: tells the time.
            policy: what decides; None: one without plans, quotas and pins.
            files: how the disk is reached; None: by system calls.

        Raises:
            OperatorError: the directory is in use, foreign, or of another format.
            StorageError: the disk refused.
        """
        if policy is None:
            policy = PlanPolicy(NextUses(), Shares(PolicyConfig(), config.capacity_bytes))
        store = cls(config, extent_bytes=extent_bytes, metrics=metrics, clock=clock, policy=policy)
        if not store.memory_only:
            events = Events(
                on_removed=store._on_removed, on_unlink_failed=store._on_unlink_failed,
                on_write_late=store._failed,
                reading=ReadEvents(
                    on_wrong=store._quarantine, on_sick=store._read_failed,
                    is_leased=store._leases.__contains__,
                ),
            )  # fmt: skip
            disk = DiskParts(config, files or DiskFiles(), clock, metrics, events)
            try:
                store._recover(disk)
            except BaseException:
                disk.close()
                raise
            store._begin(disk)
        return store

    def _begin(self, disk: DiskParts) -> None:
        events = StoreEvents(
            lookup=self._shards.get, on_committed=self._on_committed, on_aborted=self._on_aborted,
            on_failed=self._failed, next_use=self._shards.next_use,
        )  # fmt: skip
        self._disk = disk
        self._intake = Intake(
            disk, self._accounts, self._health, events,
            extent_bytes=self._extent_bytes, metrics=self._metrics, clock=self._clock,
        )  # fmt: skip

    def _recover(self, disk: DiskParts) -> None:
        found = reconcile(disk.directory, disk.index, disk.files)
        keeps = self._choose(found)
        if not keeps.all():
            useless = found.pick(np.flatnonzero(~keeps)).digests
            _LOG.warning("%d shards of other settings are removed", len(useless))
            for digest in useless:
                disk.directory.remove(disk.directory.shard_path(digest))
            disk.index.delete(useless)
            self._metrics.add("evictions_total", len(useless))
            found = found.pick(np.flatnonzero(keeps))
        rows = self._shards.load(found.digests, found.heads)
        sizes, uses = (found.heads[name].astype(np.int64) for name in ("file_bytes", "last_use"))
        self._policy.restore(Restored(rows, sizes, uses), self._clock.monotonic_s())
        disk.room.measured(disk.files.space(disk.directory.path))
        self._count()

    def _choose(self, found: Found) -> NDArray[np.bool_]:
        """Which shards stay, their bytes adopted.

        Those of another extent size are of no use. The newest go first: a smaller capacity than
        last time costs the oldest.
        """
        sizes = found.heads["file_bytes"].astype(np.int64)
        keeps: NDArray[np.bool_] = found.heads["extent_bytes"] == self._extent_bytes
        if not self._budget.adopt(int(sizes[keeps].sum())):
            for i in np.argsort(found.heads["last_use"], kind="stable")[::-1].tolist():
                keeps[i] = keeps[i] and self._budget.adopt(int(sizes[i]))
        return keeps

    # --- looking up ---------------------------------------------------------------------------

    def lookup(self, digest: str) -> StoredShard | None:
        """The shard, if it is committed."""
        return self._shards.get(digest)

    def touch(self, digest: str) -> None:
        """The shard was used; unknown ones are ignored."""
        if digest in self._shards:
            self._policy.use(digest, self._clock.monotonic_s())
            self._shards.touch(digest)

    def lease(self, digest: str) -> None:
        """Keep the shard until `release`; counted."""
        self._leases[digest] += 1
        if self._leases[digest] == 1 and digest in self._shards:
            self._policy.lease(digest)

    def release(self, digest: str) -> None:
        """One lease less."""
        assert self._leases[digest] > 0, f"{digest} is released more often than leased"
        self._leases[digest] -= 1
        if not self._leases[digest]:
            del self._leases[digest]
            if digest in self._shards:
                self._policy.release(digest, self._clock.monotonic_s())
            if self._disk is not None:
                self._disk.descriptors.release(digest)

    async def sample_index(self, digest: str) -> bytes | None:
        """The encoded `SampleIndex` of a committed shard, or None where it has no samples.

        Raises:
            IntegrityError: the shard is not here (any more), or is wrong on disk; it was set aside,
                and a fill brings it back.
            StorageError: the disk cannot say for now; the shard is kept.
        """
        disk, stored = self._found(digest)
        return await disk.reader.samples(stored)

    # --- coming in ----------------------------------------------------------------------------

    def reserve(
        self, spec: ShardSpec, *, standing: Standing = NOBODY, ahead: bool = False
    ) -> Reservation | None:
        """Room for a shard, evicting others if the policy says so; None: it is not cached.

        The room may have to wait until evicted files are gone; `write_extent` does. A second
        reservation of a shard whose first is about to be aborted is fine.

        Args:
            spec: the shard.
            standing: whose it is.
            ahead: it is fetched before somebody reads it, not because somebody does.
        """
        disk, intake = self._disk, self._intake
        if disk is None or intake is None:
            return None
        if spec.digest in self._shards or intake.is_committing(spec.digest):
            return None
        now_s = self._clock.monotonic_s()
        # A probe that cannot begin would only hold up its readers.
        if disk.threads.hangs or not self._health.admits(now_s):
            return None
        if not disk.pace.cap.admits(now_s):
            self._metrics.add("write_capped_total")
            return None
        size = layout.reserve_bytes(spec, self._extent_bytes)
        room_bytes = disk.room.available_bytes(self._budget.unlinking_bytes)
        if not disk.room.has_inode():
            # Somebody has to go even where bytes are free.
            room_bytes = min(room_bytes, size - BLOCK_BYTES)
        if room_bytes < min(size, self._budget.available_bytes):
            # What others did to the disk may have been undone since it was last measured.
            self._measure()
        want = Want(spec.digest, size, standing, ahead)
        available_bytes = min(room_bytes, self._budget.available_bytes)
        decision = self._policy.decide(want, available_bytes, now_s=now_s)
        for victim in decision.victims:
            self._evict(victim)
        self._metrics.add("evictions_total", len(decision.victims))
        if isinstance(decision, Bypass):
            _LOG.debug("%s is not cached: %s", spec.name, decision.reason)
            return None
        reservation = Reservation(
            spec, want, next(self._numbers), size, asyncio.get_running_loop().create_future(),
            self._health.reserved(),
        )  # fmt: skip
        disk.pace.cap.admitted(size, now_s)
        intake.admit(reservation)
        self._count()
        return reservation

    def grow(self, reservation: Reservation, size_bytes: int) -> bool:
        """A shard whose length was guessed is at least so long; False: there is no room for that.

        Nothing is evicted for it: what a shard expands to is known the next time.
        """
        disk, opening = self._disk, reservation.opening
        want_bytes = layout.reserve_bytes(reservation.spec.sized(size_bytes), self._extent_bytes)
        more_bytes = want_bytes - reservation.size_bytes
        if more_bytes <= 0:
            return True
        if disk is None or not reservation.granted.done() or reservation.granted.exception():
            return False
        if more_bytes > disk.room.available_bytes(0):
            self._measure()
            return False
        before_bytes = reservation.size_bytes
        if not self._accounts.resize(reservation, want_bytes):
            return False
        if not self._policy.grow(reservation.want, more_bytes):
            self._accounts.resize(reservation, before_bytes)
            return False
        reservation.want = replace(reservation.want, size_bytes=want_bytes)
        disk.room.grown(more_bytes, made=opening is not None and opening.done())
        self._count()
        return True

    @property
    def writes_at_once(self) -> bool:
        """Whether a write would begin at once, and not wait for others."""
        return self._intake is not None and self._intake.writes_at_once

    async def write_extent(
        self, reservation: Reservation, extent: int, data: memoryview, length_bytes: int,
        on_sum: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Write one extent; once cancelled, ends when nothing uses `data` any more, or is late.

        What a late disk still writes goes to a file that is never committed.

        Args:
            reservation: from `reserve`.
            extent: its number.
            data: the whole slot, page-aligned; what lies beyond `length_bytes` is padding.
            length_bytes: bytes of the shard in it.
            on_sum: is told their CRC-64, as soon as a disk thread has them in hand; not told where
                the disk refused before that.

        Raises:
            StorageError: the disk refused, or is late; abort, and go on without the cache.
        """
        assert self._intake is not None
        await self._intake.write(reservation, extent, data, length_bytes, on_sum)

    async def commit(
        self, reservation: Reservation, extent_crcs: Sequence[int], sample_index: bytes | None
    ) -> StoredShard:
        """Make the shard visible, durably. A cancellation is raised when that is done.

        Raises:
            StorageError: the disk refused; the reservation is aborted and nothing is left.
            UsageError: extents are missing, or the reservation has ended. Abort it.
            ProtocolError: `sample_index` is none. Abort.
        """
        assert self._intake is not None
        return await self._intake.commit(reservation, extent_crcs, sample_index)

    async def abort(self, reservation: Reservation) -> None:
        """Give the room back and leave nothing on the disk. Nothing to do after a commit."""
        if self._intake is not None:
            await self._intake.abort(reservation)

    def _on_committed(self, reservation: Reservation, head: Head) -> StoredShard:
        want = reservation.want
        # It was admitted with a guess of its size.
        self._policy.abandon(want)
        self._policy.add(replace(want, size_bytes=head.file_bytes), self._clock.monotonic_s())
        if want.digest in self._leases:
            self._policy.lease(want.digest)
        stored = self._shards.add(want.digest, head)
        self._count()
        return stored

    def _on_aborted(self, reservation: Reservation) -> None:
        self._policy.abandon(reservation.want)

    # --- going out ----------------------------------------------------------------------------

    def _evict(self, digest: str) -> None:
        """Take a shard out now; its file goes behind the loop's back."""
        assert self._disk is not None
        # Before the file goes, so that the log tells of every file that is missing.
        _LOG.debug("evicted %s", digest)
        stored = self._shards.remove(digest)
        self._policy.remove(digest)
        self._budget.evict(stored.file_bytes)
        self._disk.unlinker.remove(
            digest, (self._disk.directory.shard_path(digest),), stored.file_bytes, indexed=True,
            after=self._disk.descriptors.condemn(digest),
        )  # fmt: skip
        self._count()

    def _on_removed(self, size_bytes: int) -> None:
        self._budget.unlinked(size_bytes)
        self._accounts.grant()
        self._measure()

    def _on_unlink_failed(self, error: StorageError) -> None:
        self._failed(error)
        # Their room is not coming.
        self._accounts.break_promises(error)

    def adopt(self, claimed: Iterable[tuple[str, Standing]]) -> None:
        """A session claims these shards: from now on they count for their own dataset."""
        if self._policy.minds_standing:
            now_s = self._clock.monotonic_s()
            for digest, standing in claimed:
                self._policy.adopt(digest, standing, now_s)

    def expire(self) -> float:
        """Evict what nobody has used for too long; returns seconds until there may be more."""
        now_s = self._clock.monotonic_s()
        digests, again_s = self._policy.expired(now_s)
        for digest in digests:
            self._evict(digest)
        if digests:
            _LOG.info("%d shards expired, the first %s", len(digests), digests[0])
            self._metrics.add("evictions_total", len(digests))
        return again_s - now_s

    # --- reading ------------------------------------------------------------------------------

    async def read_extent(self, digest: str, extent: int, target: memoryview) -> int:
        """Read and verify one extent into a slot; returns its length in bytes.

        Even if cancelled it returns only when nothing uses `target` any more.

        Raises:
            IntegrityError: the shard is not here (any more), or its bytes are wrong, or the disk
                would not read them; it was set aside, and a fill brings it back.
            DiskLateError: the disk hangs. It may write into `target` until the error's `over` is
                done; the shard is kept.
            StorageError: the machine is short of descriptors or memory, or the disk is not trusted
                for now; the shard is kept.
        """
        disk, stored = self._found(digest)
        return await disk.reader.read(stored, extent, target)

    def _found(self, digest: str) -> tuple[DiskParts, StoredShard]:
        stored = self._shards.get(digest)
        if self._disk is None or stored is None:
            raise IntegrityError(f"the shard {digest} left the store; it is fetched again")
        return self._disk, stored

    def _quarantine(self, digest: str, why: GpufeedError) -> None:
        self._metrics.add("quarantined_total")
        _LOG.error("shard %s is set aside: %s", digest, why)
        self._evict(digest)

    # --- accounts and tasks -------------------------------------------------------------------

    def _failed(self, why: object) -> None:
        _LOG.warning("the cache disk is left alone for a while: %s", why)
        self._metrics.add("store_errors_total")
        self._writes_fail()
        self._count()

    def _writes_fail(self) -> None:
        self._health.failed(self._clock.monotonic_s())
        if self._intake is not None:
            self._intake.turn_away()

    def _read_failed(self, why: GpufeedError) -> None:
        _LOG.warning("the cache disk is not read for a while: %s", why)
        if isinstance(why, DiskLateError):
            # Whoever hangs while reading will not write.
            self._writes_fail()
        self._count()

    def _is_well(self) -> bool:
        reads_well = self._disk is None or self._disk.read_health.state == "healthy"
        return reads_well and self._health.state == "healthy"

    def _measure(self) -> None:
        if self._disk is not None:
            self._disk.measure()

    def _count(self) -> None:
        self._accounts.count()
        self._metrics.set("store_resident_shards", len(self._shards))
        self._metrics.set("store_degraded", float(not self._is_well()))

    async def close(self) -> None:
        """Abort what is reserved, wait for the disk, close everything, let the directory go."""
        disk = self._disk
        if disk is None or self._intake is None:
            return
        await self._intake.close()
        disk.unlinker.retry()
        await disk.descriptors.close()
        await disk.unlinker.drain()
        is_clean = disk.unlinker.is_idle and self._is_well()
        uses = self._shards.unsaved_uses()
        try:
            await disk.threads.run(functools.partial(disk.leave, uses, is_clean=is_clean))
        except StorageError as error:
            _LOG.warning("the next start compares the cache's index with its files: %s", error)
        self._disk = None
        await disk.threads.close()
        disk.close()
