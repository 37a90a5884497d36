"""`DataLoader`: torch's own for any dataset, and our engine for a `ShardDataset`.

A subclass, so that ``isinstance`` and every attribute hold. For a foreign dataset it changes
nothing: all arguments go to torch. For a `ShardDataset` the arguments mean what they mean there,
with three notes: the order belongs to the dataset (`shuffle`, `sampler` and `batch_sampler` are
refused), workers live until the loader is closed or collected, and `persistent_workers=True` also
lets the loader run on into the next epoch, so that there is no gap between epochs.

`pin_memory=True` copies into torch's pinned memory, as torch does. `register_slots=True` registers
the batch slots themselves instead, so that nothing is copied on the host; not yet verified on
hardware.

With `transfer`, the module of the package that imports torch.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
import torch.utils.data
from torch.utils.data import IterableDataset, default_convert

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.batch import BatchRecord
from gpufeed.loaders.batchslots import LOOKAHEAD_MIN
from gpufeed.loaders.dataset import ShardDataset
from gpufeed.loaders.engine import CHUNK_ROWS, Engine, EngineConfig
from gpufeed.loaders.opener import BatchSize, SessionFactory
from gpufeed.loaders.resume import Cursor, OrderState
from gpufeed.loaders.world import World

PREFETCH_FACTOR = 2  # torch's default
_ORDER_ARGUMENTS = ("shuffle", "sampler", "batch_sampler")


class _Described(IterableDataset[Any]):
    """Stands for a `ShardDataset` while torch checks its arguments."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A drop-in for `torch.utils.data.DataLoader`.

    Args:
        dataset: any dataset of torch's, or a `ShardDataset`.
        batch_size: samples a batch; None yields single samples.
        session_factory: opens the session instead of the one that the dataset's `daemon` names.
        register_slots: register batch slots with CUDA once, for copies without staging. Copies on
            other streams than the current one go through `to_device` or `record_stream`.
        global_batch_size: samples of a batch over all ranks, instead of `batch_size` on each: it
            stays what it is when the world changes.
        uneven: "allow" lets ranks' batches differ by one sample where the world does not divide
            `global_batch_size`; "error" refuses it.
        **options: as torch's.

    Raises:
        UsageError: a sampler or shuffle with a `ShardDataset`, or `register_slots` without one.
        ValueError: what torch refuses.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *arguments: Any,
        session_factory: SessionFactory | None = None,
        register_slots: bool = False,
        global_batch_size: int = 0,
        uneven: Literal["error", "allow"] = "error",
        **options: Any,
    ) -> None:
        self._engine: Engine | None = None
        _check_global(batch_size, global_batch_size, uneven)
        if not isinstance(dataset, ShardDataset):
            if register_slots or global_batch_size:
                name = "register_slots" if register_slots else "global_batch_size"
                raise UsageError(
                    f"{name} needs a ShardDataset: batches of other datasets are torch's, with "
                    "pin_memory=True and batch_size"
                )
            super().__init__(dataset, batch_size, *arguments, **options)
            return
        options |= dict(zip(_POSITIONAL, arguments, strict=False))
        for name in _ORDER_ARGUMENTS:
            if options.get(name):
                raise UsageError(
                    f"{name} does not go with a ShardDataset, whose order is its own; leave it "
                    'out and use ShardDataset(..., shuffle="shards", "none" or window(n))'
                )
            options.pop(name, None)
        collate = options.get("collate_fn")
        if global_batch_size:
            batch_size = -(-global_batch_size // World.current().world_size)
        super().__init__(_Described(), batch_size, **options)
        object.__setattr__(self, "dataset", dataset)
        self._global_batch_size = global_batch_size
        self._uneven = uneven == "allow"
        # Where the next iteration begins; within an epoch after `load_state_dict` only.
        self._next = Cursor()
        self._is_begun = False
        self._loaded: OrderState | None = None
        self._user_collate = collate
        self._pins = False
        config = self._config(register_slots=register_slots)
        self._engine = Engine(dataset, config, session_factory=session_factory)

    def _config(self, *, register_slots: bool) -> EngineConfig:
        workers = self.num_workers
        factor = self.prefetch_factor or PREFETCH_FACTOR
        context = self.multiprocessing_context
        single = self.batch_size is None
        return EngineConfig(
            batch=BatchSize(
                self.batch_size or CHUNK_ROWS, self._global_batch_size, uneven=self._uneven
            ),
            num_workers=workers,
            lookahead=max(LOOKAHEAD_MIN, workers * factor),
            drop_last=self.drop_last,
            use_slots=not single,
            collate=None if single else self._user_collate,
            init_fn=self.worker_init_fn,
            context=context if isinstance(context, BaseContext) else multiprocessing.get_context(),
            continuous=self.persistent_workers,
            timeout_s=float(self.timeout),
            register_slots=register_slots,
        )

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration runs; later ones count on from it.

        After `load_state_dict`, naming the epoch of the state keeps the place in it.
        """
        if epoch != self._next.epoch or self._is_begun:
            self._next = Cursor(epoch)
            self._is_begun = False

    def _take_epoch(self, dataset: ShardDataset) -> None:
        """What `ShardDataset.set_epoch` was told."""
        if dataset.epoch is not None:
            self.set_epoch(dataset.epoch)
            dataset.epoch = None

    # As properties, so that a loader of a foreign dataset has none: whoever asks by `hasattr`
    # must not believe that its place is kept.

    @property
    def state_dict(self) -> Callable[..., dict[str, Any]]:
        """``state_dict(behind=0)``: where the trainer stands, as a small JSON.

        Counts the batches that it took, not those that were made ahead. `behind`: so many of them
        it has not used yet (1 where a wrapper fetches one ahead, as Accelerate's does).

        Raises:
            AttributeError: the dataset is no `ShardDataset`.
        """
        self._require_engine("state_dict")
        return self._state_dict

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """``load_state_dict(state)``: the next iteration goes on where `state` was taken.

        With any number of ranks, workers and batches ahead, and any batch size; all ranks load the
        same state. An order that cannot be gone on with is refused, here or by the next `iter`.

        Raises:
            AttributeError: the dataset is no `ShardDataset`.
        """
        self._require_engine("load_state_dict")
        return self._load_state_dict

    def _require_engine(self, name: str) -> Engine:
        if self._engine is None:
            raise AttributeError(f"{name} needs a ShardDataset, whose order is gpufeed's own")
        return self._engine

    def _order(self, cursor: Cursor, manifest_hash: str) -> OrderState:
        dataset = self.dataset
        assert isinstance(dataset, ShardDataset)
        return OrderState(
            cursor=cursor, seed=dataset.seed, shuffle=dataset.shuffle,
            manifest_hash=manifest_hash,
        )  # fmt: skip

    def _state_dict(self, behind: int = 0) -> dict[str, Any]:
        assert self._engine is not None
        assert isinstance(self.dataset, ShardDataset)
        self._take_epoch(self.dataset)
        if self._is_begun:
            return self._order(self._engine.place.cursor(behind), self._engine.begun_hash).pack()
        if self._loaded is not None:
            return self._order(self._next, self._loaded.manifest_hash).pack()
        if not self._engine.manifest_hash:
            self._engine.open()
        return self._order(self._next, self._engine.manifest_hash).pack()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = OrderState.unpack(state)
        assert self._engine is not None
        loaded.require_same_order(self._order(loaded.cursor, self._engine.manifest_hash))
        self._loaded = loaded
        self._next = loaded.cursor
        self._is_begun = False

    def set_world(self, rank: int, world_size: int) -> None:
        """Be this rank of a world of this size from the next batch on.

        Between two steps, on all ranks after the same one. An iterator that is under way goes on:
        what it had made ahead is given up, and made anew as the new rank's.

        Raises:
            UsageError: the dataset is no `ShardDataset`, or the batches cannot be divided so.
        """
        engine = self._engine
        if engine is None:
            raise UsageError("set_world needs a ShardDataset; other datasets have samplers")
        engine.set_world(World(rank, world_size, job=World.current().job))

    def __iter__(self) -> Any:
        """Start the next epoch."""
        if self._engine is None:
            return super().__iter__()
        dataset = self.dataset
        assert isinstance(dataset, ShardDataset)
        self._take_epoch(dataset)
        if self._is_begun:  # left early, or ended: the epoch after it
            self._next = Cursor(self._next.epoch + 1)
            self._is_begun = False  # if it cannot be begun now, the same one is tried next time
        if self._loaded is not None:
            self._engine.open()
            self._loaded.require_same_order(self._order(self._next, self._engine.manifest_hash))
            self._loaded = None
        accelerator: Any = getattr(torch, "accelerator", torch.cuda)  # torch has it from 2.6 on
        self._pins = self.pin_memory and accelerator.is_available()
        if self.pin_memory and not self._pins:  # torch's own words
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, "
                "then device pinned memory won't be used.",
                stacklevel=2,
            )
        convert = self._batch if self.batch_size is not None else self._singles
        iterator = _Iterator(self._engine, self._next, convert, single=self.batch_size is None)
        self._is_begun = True
        return iterator

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: the dataset is not indexed, so nobody knows yet.
        """
        if self._engine is None:
            return super().__len__()
        engine = self._engine
        count = engine.sample_count() if self.batch_size is None else engine.step_count()
        if count is None:
            raise TypeError(
                "the dataset's samples are not counted yet; after the first epoch they are"
            )
        return count

    def stats(self) -> dict[str, Any]:
        """Counters since the loader was made; times in seconds, sizes in bytes."""
        if self._engine is None:
            raise UsageError("stats() needs a ShardDataset; torch's loader counts nothing")
        engine = self._engine
        feed, own, pinning = engine.feed_stats, engine.stats, engine.pinning_stats
        return {
            "samples": own.samples_count,
            "batches": own.batches_count,
            "shards": feed.shards_count,
            "units": feed.units_count,
            "reconnects": own.reconnects_count,
            "stall_s": own.stall_s,
            "first_batch_s": own.first_batch_s,
            "bytes_by_tier": dict(feed.bytes_by_tier),
            "straddled_count": feed.straddled_count,
            "heap_copies_count": engine.hand_over.heap_copies_count,
            "skipped_count": own.skipped_count,
            "registered_slots_count": pinning.registered_count,
            "registered_bytes": pinning.registered_bytes,
            "register_refused_count": pinning.refused_count,
            "register_s": pinning.register_s,
            "waiting_slots_count": engine.waiting_slots_count,
            "gated_copies_count": pinning.gated_count,
        }

    def close(self) -> None:
        """End workers, feeder and session. Batches that are held stay valid."""
        if self._engine is not None:
            self._engine.close()

    def _batch(self, record: BatchRecord) -> Any:
        assert self._engine is not None
        return self._pinned(self._engine.hand_over.to_torch(record))

    def _singles(self, record: BatchRecord) -> list[Any]:
        assert self._engine is not None
        convert: Callable[[Any], Any] = self._user_collate or default_convert
        samples = self._engine.hand_over.samples(record)
        return [self._pinned(convert(sample)) for sample in samples]

    def _pinned(self, batch: Any) -> Any:
        if not self._pins:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory  # noqa: PLC0415 rarely

        return pin_memory(batch)  # type: ignore[no-untyped-call]  # torch's own, unannotated


# torch's positional arguments after dataset and batch_size.
_POSITIONAL = (
    "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
)  # fmt: skip


def _check_global(batch_size: int | None, global_batch_size: int, uneven: str) -> None:
    if uneven not in ("error", "allow"):
        raise UsageError(f'uneven is {uneven!r}; it must be "error" or "allow"')
    if global_batch_size < 0 or (global_batch_size and batch_size != 1):
        raise UsageError(
            f"global_batch_size is {global_batch_size}, batch_size {batch_size}: give one of them, "
            "at least 1"
        )


class _Iterator:
    """One epoch. Dropping it early abandons the epoch."""

    def __init__(
        self,
        engine: Engine,
        cursor: Cursor,
        convert: Callable[[BatchRecord], Any],
        *,
        single: bool,
    ) -> None:
        self._engine = engine
        self._convert = convert
        self._single = single
        self._samples: deque[Any] = deque()
        self._token = engine.begin_on(cursor)

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self._samples:
            self._engine.require_current(self._token)
            return self._next_sample()
        self._token, batch = self._engine.take_on(self._token, self._convert)
        if batch is None:
            raise StopIteration
        if not self._single:
            return batch
        self._samples.extend(batch)
        return self._next_sample()

    def _next_sample(self) -> Any:
        sample = self._samples.popleft()
        self._engine.place.left(len(self._samples))
        return sample

    def __del__(self) -> None:
        token = getattr(self, "_token", None)
        if token is not None:
            self._engine.abandon(token)
