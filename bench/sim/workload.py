"""What the simulated node is asked for: a dataset, and jobs that read it in orders of their own.

Each job reads every shard once an epoch, in a fresh permutation of its own seed, at its own speed.
Jobs arrive one after another within the first epoch; one in three is killed before its end, at a
moment that no policy knows. Pure and seeded: the same arguments give the same workload.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.units import BLOCK_BYTES, MIB

Sizes = Literal["equal", "lognormal"]
Speeds = Literal["equal", "unequal"]
Order = npt.NDArray[np.int32]

SHARD_BYTES = 64 * MIB
# Of the logarithm of sizes; the largest of 1,500 shards is then about ten times the mean.
SIGMA = 0.7
SPEED_RANGE = (0.5, 2.0)
# A shard of the mean size in a second, at speed 1.
DEMAND_BYTES_PER_S = float(SHARD_BYTES)
ARRIVAL_SPREAD_EPOCHS = 1.0
KILLED_RATIO = 1 / 3


@dataclass(frozen=True, slots=True)
class Job:
    """One training job on the node.

    Attributes:
        seed: of its orders.
        speed: how fast it reads while it does not wait, in shards of the mean size a second.
        arrives_s: when.
        read_count: shards it reads in its life; ends there, or is killed there.
        epoch_count: epochs that it means to run, as its plan says.
    """

    seed: int
    speed: float
    arrives_s: float
    read_count: int
    epoch_count: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset and its jobs. `sizes[i]` are shard i's bytes."""

    sizes: tuple[int, ...]
    jobs: tuple[Job, ...]

    @property
    def total_bytes(self) -> int:
        """The dataset."""
        return sum(self.sizes)


@functools.lru_cache(maxsize=256)
def order_of(seed: int, epoch: int, shard_count: int) -> Order:
    """The permutation that a job reads in an epoch."""
    generator = np.random.default_rng((seed, epoch))
    order: Order = generator.permutation(shard_count).astype(np.int32)
    return order


def make_workload(
    *, jobs: int, sizes: Sizes, speeds: Speeds, shard_count: int, epoch_count: int, seed: int
) -> Workload:
    """The workload of one cell of the table."""
    generator = np.random.default_rng((seed, jobs, sizes == "equal", speeds == "equal"))
    if sizes == "equal":
        of_mean = np.ones(shard_count)
    else:
        of_mean = generator.lognormal(-SIGMA * SIGMA / 2, SIGMA, shard_count)
    blocks = np.maximum(1, np.round(of_mean * (SHARD_BYTES // BLOCK_BYTES))).astype(int)
    made = []
    for i in range(jobs):
        speed = 1.0 if speeds == "equal" else float(generator.uniform(*SPEED_RANGE))
        arrives_s = float(generator.uniform(0, ARRIVAL_SPREAD_EPOCHS * shard_count)) if i else 0.0
        reads = shard_count * epoch_count
        if i and generator.uniform() < KILLED_RATIO:
            reads = int(generator.uniform(shard_count, reads))
        made.append(Job(int(generator.integers(1 << 30)), speed, arrives_s, reads, epoch_count))
    return Workload(tuple((blocks * BLOCK_BYTES).tolist()), tuple(made))
