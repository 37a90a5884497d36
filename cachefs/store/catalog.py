"""What is in the store, as the daemon's memory has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A committed shard."""

    digest: str
    size_bytes: int
    file_bytes: int
    sample_count: int | None
