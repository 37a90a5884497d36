"""From a place in the arena to a sample dict, and the randomness that belongs to it.

A `Task` is all that a worker needs to know of one sample. It names bytes of the arena and carries
none: a field that straddles two slots that are not neighbours is given as several pieces, which
the worker joins in its own memory.

The views handed to `decode` are over a sealed, read-only mapping. They are valid until `decode`
returns: then the extent may be released and its slot filled with something else.
"""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # numpy imports it lazily, and the first sample must be seeded too

# Up to protocol 4 arrays come back writable, as torch wants them.
OWNED_PICKLE_PROTOCOL = 4

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
        self._array = np.frombuffer(arena, dtype=np.uint8)
        self._watched: list[weakref.ref[Any]] | None = None

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

    def make_owned(self, task: Task) -> Any:
        """The same, sure not to lie over the arena: to be kept after the extent is released.

        Each field is a view of an object of its own. Where one of these outlives `decode`, what it
        returned holds on to the field, by whatever way, and is copied by pickling.
        """
        self._watched = []
        try:
            sample = self.make(task)
            if any(watched() is not None for watched in self._watched):
                sample = pickle.loads(pickle.dumps(sample, OWNED_PICKLE_PROTOCOL))  # noqa: S301 own
        finally:
            self._watched = None
        return sample

    def _field(self, pieces: tuple[Piece, ...]) -> memoryview:
        if len(pieces) == 1:
            address, size = pieces[0]
            if self._watched is None:
                return self._arena[address : address + size]
            part = self._array[address : address + size]
            self._watched.append(weakref.ref(part))
            return part.data
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
def borrowed_thread() -> Iterator[None]:
    """Decode in the caller's thread as a worker would, and leave its globals as they were.

    Keeps the global random states, and lets torch use one thread meanwhile: its parallel loops
    would spin on every core for one image.
    """
    state, numpy_state = random.getstate(), numpy.random.get_state()
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if torch is None or generator is None:
        try:
            yield
        finally:
            random.setstate(state)
            numpy.random.set_state(numpy_state)
        return
    torch_state, threads = generator.get_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        generator.set_state(torch_state)
        random.setstate(state)
        numpy.random.set_state(numpy_state)
