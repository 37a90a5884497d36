"""Work units: what the feeder asks of a decode worker, and what comes back.

A unit is some consecutive rows of one batch. It is decided where the rows lie before the unit is
sent, so results may come back in any order. `run_unit` is the whole of the work, the same in a
worker process and in the feeder's own thread.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpufeed.cachefs.errors import WorkerError
from gpufeed.loaders.batchslots import RingShape, SlotWriter
from gpufeed.loaders.samples import OWNED_PICKLE_PROTOCOL, SampleMaker, Task

PICKLE_PROTOCOL = 5
UNIT_ROWS_MAX = 32


@dataclass(slots=True)
class Unit:
    """Rows ``[row, row + len(tasks))`` of batch `batch`. `slot` None: send the rows as pickles.

    `last` closes the batch for a worker that collates whole batches.
    """

    batch: int
    row: int
    slot: int | None
    tasks: list[Task]
    last: bool = False


@dataclass(slots=True)
class Failure:
    """A sample whose `decode` raised. `error` is the pickled exception, where it pickles."""

    sample: str
    trace: str
    error: bytes | None

    def exception(self) -> WorkerError:
        """As what the trainer gets; the original is its cause where it could be carried."""
        failure = WorkerError(f"decode failed on {self.sample}; its traceback was:\n{self.trace}")
        if self.error is not None:
            try:
                failure.__cause__ = pickle.loads(self.error)  # noqa: S301 from our own worker
            except Exception:  # unpickling runs any code; the text is enough
                failure.__cause__ = None
        return failure


@dataclass(slots=True)
class UnitResult:
    """What became of a unit's rows.

    Attributes:
        batch: number of the batch.
        row: first row of the unit.
        count: rows of the unit.
        objects: by row, the strings and bytes that belong to a row written in the slot.
        pickles: by row, samples that have no slot or do not fit it.
        samples: the same, as they are, where trainer and decoder are one process.
        failures: by row, samples whose `decode` raised.
        collated: the pickled batch, from a worker that collates, with the last unit only.
        collated_objects: instead, the objects of a batch that lies in row 0 of its slot.
        collate_failure: the same, when collating raised.
    """

    batch: int
    row: int
    count: int
    objects: dict[int, list[Any]] = field(default_factory=dict)
    pickles: dict[int, bytes] = field(default_factory=dict)
    samples: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    collated: bytes | None = None
    collated_objects: list[Any] | None = None
    collate_failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Configure:
    """The ring got its shape; later units may name slots."""

    shape: RingShape


class UnitRunner:
    """Decodes units. One a worker; not thread-safe.

    Args:
        maker: makes samples.
        collate: makes whole batches here, of all units of a batch.
        keep_samples: hand samples without a slot over as they are. Only for samples that own their
            memory: what `decode` returns may lie over the arena, and a pickle is the copy of it.
    """

    def __init__(
        self,
        maker: SampleMaker,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        keep_samples: bool = False,
    ) -> None:
        self._maker = maker
        self._keep_samples = keep_samples
        self._collate = collate
        self._writer: SlotWriter | None = None
        self._batch: list[Any] = []

    def configure(self, fd: int, shape: RingShape) -> None:
        """Map the ring."""
        self._writer = SlotWriter(fd, shape)

    def run(self, unit: Unit) -> UnitResult:
        """Decode every row; an error of one row is recorded and the others go on."""
        result = UnitResult(unit.batch, unit.row, len(unit.tasks))
        if unit.row == 0:
            self._batch = []  # what an abandoned batch left
        for row, task in enumerate(unit.tasks, unit.row):
            try:
                if self._collate is not None:
                    self._batch.append(self._maker.make_owned(task))
                else:
                    self._row(unit, row, self._maker.make(task), result)
            except Exception as error:  # user code may raise anything
                result.failures[row] = _failure(str(task), error)
        if self._collate is not None and unit.last:
            self._finish(unit, result)
        return result

    def _row(self, unit: Unit, row: int, sample: Any, result: UnitResult) -> None:
        if unit.slot is not None:
            assert self._writer is not None
            objects = self._writer.write(unit.slot, row, sample)
            if objects is not None:
                if objects:
                    result.objects[row] = objects
                return
        if self._keep_samples:
            result.samples[row] = sample
        else:
            result.pickles[row] = pickle.dumps(sample, OWNED_PICKLE_PROTOCOL)

    def _finish(self, unit: Unit, result: UnitResult) -> None:
        assert self._collate is not None
        samples, self._batch = self._batch, []
        if not samples:
            return
        try:
            batch = self._collate(samples)
            if unit.slot is not None:
                assert self._writer is not None
                result.collated_objects = self._writer.write(unit.slot, 0, batch)
            if result.collated_objects is None:
                result.collated = pickle.dumps(batch, OWNED_PICKLE_PROTOCOL)
        except Exception as error:  # user code may raise anything
            name = f"the collate_fn over {len(samples)} samples of batch {unit.batch}"
            result.collate_failure = _failure(name, error)


def _failure(name: str, error: Exception) -> Failure:
    trace = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error, PICKLE_PROTOCOL)
        pickle.loads(data)  # noqa: S301 our own; some exceptions pickle and never unpickle
    except Exception:  # pickling runs arbitrary code; the text is enough
        return Failure(name, trace, None)
    return Failure(name, trace, data)
