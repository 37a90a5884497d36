"""A batch under way and ready: rows in a slot, rows beside it, failures; and what becomes of it.

The feeder fills `BatchRecord`s; the trainer's thread turns a complete one into tensors by
`to_torch`. Where every row lies in the slot, the tensors are views of it and nothing is copied.
Otherwise the samples are put together again and collated by torch itself, so the result, or the
error, is torch's. torch is imported here only when a batch is made.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpufeed.loaders.batchslots import SlotRing
from gpufeed.loaders.layout import Column, Layout
from gpufeed.loaders.units import Failure, UnitResult


@dataclass(slots=True)
class BatchRecord:
    """One batch. `number` counts on over epochs; `index` is its place in its epoch."""

    number: int
    epoch: int
    index: int
    slot: int | None
    worker: int | None = None
    rows: int = 0
    units: int = 0
    units_done: int = 0
    closed: bool = False
    dropped: bool = False
    objects: dict[int, list[Any]] = field(default_factory=dict)
    pickles: dict[int, bytes] = field(default_factory=dict)
    samples: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    collated: bytes | None = None
    collated_objects: list[Any] | None = None
    collate_failure: Failure | None = None

    @property
    def complete(self) -> bool:
        """All its units are sent and answered."""
        return self.closed and self.units_done == self.units

    @property
    def good_count(self) -> int:
        """Rows that decoded."""
        return self.rows - len(self.failures)

    def add(self, result: UnitResult) -> None:
        """A unit of this batch came back."""
        self.units_done += 1
        self.objects.update(result.objects)
        self.pickles.update(result.pickles)
        self.samples.update(result.samples)
        self.failures.update(result.failures)
        if result.collated is not None:
            self.collated = result.collated
        if result.collated_objects is not None:
            self.collated_objects = result.collated_objects
        if result.collate_failure is not None:
            self.collate_failure = result.collate_failure


@dataclass(slots=True)
class HandOver:
    """How batches become the trainer's: counters are the caller's."""

    ring: SlotRing
    collate: Callable[[list[Any]], Any] | None = None
    heap_copies_count: int = 0

    def samples(self, record: BatchRecord) -> list[Any]:
        """The decoded samples, in row order, on the heap. Gives the slot back."""
        columns: list[npt.NDArray[Any]] = []
        shape = self.ring.shape
        if record.slot is not None and shape is not None:
            columns = shape.layout.views(self.ring.read(record.slot))
        samples = []
        for row in range(record.rows):
            if row in record.failures:
                continue
            if row in record.samples:
                samples.append(record.samples[row])
            elif row in record.pickles:
                samples.append(pickle.loads(record.pickles[row]))  # noqa: S301 from our own worker
            else:
                assert shape is not None
                objects = record.objects.get(row, [])
                samples.append(shape.layout.read_row(columns, objects, row))
        self._done(record)
        return samples

    def to_torch(self, record: BatchRecord) -> Any:
        """The batch as torch's `default_collate` would give it, or as the user's collate did."""
        if record.collated is not None:
            self._done(record)
            return pickle.loads(record.collated)  # noqa: S301 from our own worker
        if record.collated_objects is not None:
            return self._collated(record, record.collated_objects)
        if self.collate is not None:
            return self.collate(self.samples(record))
        if record.slot is None or record.pickles or record.samples or record.failures:
            from torch.utils.data import default_collate  # noqa: PLC0415 light import

            if record.index > 0 and record.pickles:
                self.heap_copies_count += 1
            return default_collate(self.samples(record))
        return self._tensors(record)

    def _tensors(self, record: BatchRecord) -> Any:
        import torch  # noqa: PLC0415 light import

        layout, columns = self._columns(record, record.rows)

        def leaf(column: Column | None, number: int) -> Any:
            if column is None:
                return [record.objects[row][number] for row in range(record.rows)]
            return torch.from_numpy(columns[number])

        return layout.build(leaf, collated=True)

    def _collated(self, record: BatchRecord, objects: list[Any]) -> Any:
        """The user's own batch, which is row 0 of the slot, in its own types."""
        layout, columns = self._columns(record, 1)

        def leaf(column: Column | None, number: int) -> Any:
            if column is None:
                return objects[number]
            value = columns[number][0]
            if column.kind in ("int", "float", "bool"):
                return value.item()
            if column.kind == "tensor":
                return sys.modules["torch"].from_numpy(columns[number]).squeeze(0)
            return columns[number].reshape(column.shape) if column.kind == "array" else value

        return layout.build(leaf, collated=False)

    def _columns(self, record: BatchRecord, rows: int) -> tuple[Layout, list[npt.NDArray[Any]]]:
        """The first rows of a slot's columns: the slot's own memory, or copies of it."""
        shape, slot = self.ring.shape, record.slot
        assert shape is not None
        assert slot is not None
        memory = self.ring.lend(slot)
        views = shape.layout.views(self.ring.read(slot) if memory is None else memory)
        columns = [view[:rows] for view in views]
        if memory is None:
            self.heap_copies_count += 1
            columns = [np.array(column) for column in columns]
            self._done(record)
        record.slot = None
        return shape.layout, columns

    def _done(self, record: BatchRecord) -> None:
        if record.slot is not None:
            self.ring.give_back(record.slot)
            record.slot = None
