"""A cache directory over many daemons that end badly, and what must be true of it each time.

What must be there follows from the log (`chaos_log.Ledger`): committed and not evicted since. A
shard that is there is served without a request to the origin, and nothing else lies about.
"""

from __future__ import annotations

from pathlib import Path

from chaos_data import Truth, put_shards, read_checked
from chaos_disk import shard_files
from chaos_log import Ledger
from chaos_node import ChaosDaemon, ChaosNode

from gpufeed.cachefs.client import Session

READY_S_MAX = 60.0


class Siege:
    """The directory `cache`, its ledger and its shards at the origin."""

    def __init__(self, chaos: ChaosNode, cache: Path, *, capacity_bytes: int, seed: int) -> None:
        self.chaos = chaos
        self.cache = cache
        self.capacity_bytes = capacity_bytes
        self.seed = seed
        self.truth: Truth = put_shards(chaos.bucket, 24, seed=seed)
        self.ledger = Ledger()
        self.served_count = 0

    def launch(self) -> ChaosDaemon:
        return self.chaos.launch(
            GPUFEED_STORE_PATH=str(self.cache),
            GPUFEED_STORE_CAPACITY_BYTES=str(self.capacity_bytes),
        )

    def check_start(self, daemon: ChaosDaemon) -> None:
        """What was committed is there and right, and there is nothing else."""
        assert daemon.is_ready(READY_S_MAX)
        urls = self.ledger.urls()
        self.chaos.standin.reset()
        if urls:
            with Session.connect(self.chaos.socket) as session:
                outcome = read_checked(session, self.truth, urls)
            assert outcome.bytes_from("origin") == 0, f"fetched again: {outcome.tiers}"
        kinds = self.chaos.standin.counters()["requests_by_kind"]
        assert "get" not in kinds, f"committed shards were asked for again: {kinds}"
        self.served_count += len(urls)
        self.check_files(daemon)

    def check_files(self, daemon: ChaosDaemon) -> None:
        """At rest, every file is a resident shard and every byte is counted."""
        status = daemon.settled(
            sessions=0, fills_in_flight=0, arena_leased_slots=0, store_reserved_bytes=0
        )
        files = shard_files(self.cache)
        assert not [name for name in files if name.endswith(".tmp")]
        assert len(files) == status["store_resident_shards"]
        assert sum(files.values()) == status["store_resident_bytes"] <= self.capacity_bytes
