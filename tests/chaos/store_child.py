"""Fills a store until somebody kills it; tells on stdout, line by line, what was committed."""

from __future__ import annotations

import asyncio
import random
import sys

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards

FILLS_AT_ONCE = 3
NUMBERS = 400


async def main(path: str, capacity_bytes: int, seed: int) -> None:
    store = ShardStore.open(
        StoreConfig(path=path, capacity_bytes=capacity_bytes, free_floor_ratio=0.0),
        extent_bytes=shards.EXTENT_BYTES, metrics=Metrics(), clock=SystemClock(),
    )  # fmt: skip
    draw = random.Random(seed)
    print("ready", flush=True)

    async def fill_forever() -> None:
        while True:
            number = draw.randrange(NUMBERS)
            spec = shards.make_spec(number)
            if store.lookup(spec.digest) is not None:
                await shards.read(store, spec)
            elif await shards.fill(store, spec) is not None:
                print(number, flush=True)

    await asyncio.gather(*(fill_forever() for _ in range(FILLS_AT_ONCE)))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
