"""From a place in the arena to a sample dict, and the randomness that belongs to it.

A `Task` is all that a worker needs to know of one sample. It names bytes of the arena and carries
none: a field that straddles two slots that are not neighbours is given as several pieces, which
the worker joins in its own memory.

The views handed to `decode` are over a sealed, read-only mapping. They are valid until `decode`
returns: then the extent may be released and its slot filled with something else.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy.random  # numpy imports it lazily, and the first sample must be seeded too

Piece = tuple[int, int]  # arena address, bytes


class Task(NamedTuple):
    """One sample: who it is, its seed, and each field as pieces of the arena."""

    key: str
    shard: str
    offset_bytes: int
    seed: int
    fields: tuple[tuple[str, tuple[Piece, ...]], ...]

    def __str__(self) -> str:
        """How errors name a sample."""
        return f"sample {self.key!r} of {self.shard} at byte {self.offset_bytes}"


class SampleMaker:
    """Runs `decode` over the arena. One instance a worker; one thread at a time."""

    def __init__(self, arena: memoryview, decode: Callable[[dict[str, Any]], Any] | None) -> None:
        self._arena = arena
        self._decode = decode

    def make(self, task: Task) -> Any:
        """The decoded sample; without a `decode`, the dict with its fields copied to bytes."""
        sample: dict[str, Any] = {"__key__": task.key, "__url__": task.shard}
        for name, pieces in task.fields:
            sample[name] = self._field(pieces)
        if self._decode is None:
            for name, _ in task.fields:
                sample[name] = bytes(sample[name])
            return sample
        seed_sample(task.seed)
        return self._decode(sample)

    def _field(self, pieces: tuple[Piece, ...]) -> memoryview:
        if len(pieces) == 1:
            address, size = pieces[0]
            return self._arena[address : address + size]
        joined = b"".join(self._arena[address : address + size] for address, size in pieces)
        return memoryview(joined)


def seed_sample(seed: int) -> None:
    """Seed `random`, numpy's global generator, and torch's where torch is loaded."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed)


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Keep the caller's global random states; for decoding in the caller's thread."""
    state = random.getstate()
    numpy_state = numpy.random.get_state()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    torch_state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)
        if generator is not None:
            generator.set_state(torch_state)
