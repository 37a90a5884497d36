"""Which process of the job this is. The only reader of the launcher's environment variables.

An initialised `torch.distributed` wins over the environment; torch is never imported here. Without
either, the job is one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpufeed.cachefs.errors import UsageError

_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the job, and of its part on this node.

    Attributes:
        rank: of this process, from 0.
        world_size: processes of the job.
        local_rank: of this process among those on this node.
        local_world_size: processes of the job on this node.
        job: what the job's processes have in common and no other job on the node has.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: a rank outside its world.
        """
        for name, rank, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= rank < size:
                raise UsageError(
                    f"{name} {rank} is not within a world of {size}; check RANK, WORLD_SIZE, "
                    "LOCAL_RANK and LOCAL_WORLD_SIZE"
                )

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world of this process.

        Raises:
            UsageError: a variable is no number, or the numbers do not fit together.
        """
        values = os.environ if environ is None else environ
        local_rank = _number(values, "LOCAL_RANK", 0)
        local_size = _number(values, "LOCAL_WORLD_SIZE", local_rank + 1)
        rank, size = _number(values, "RANK", 0), _number(values, "WORLD_SIZE", 1)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, size = distributed.get_rank(), distributed.get_world_size()
        return cls(rank, size, local_rank, local_size, _job(values, size))


def _job(values: Mapping[str, str], world_size: int) -> str:
    """What the launcher calls the job; a process on its own is one."""
    told = [f"{name}={values[name]}" for name in _JOB_VARIABLES if values.get(name)]
    return " ".join(told) if told and world_size > 1 else f"pid={os.getpid()}"


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number; the launcher sets it") from None
