"""Where a job stands in its order of samples, as a small JSON that any later job can go on from.

The order of an epoch's samples is a function of (manifest, seed, epoch, shuffle, order version) and
of nothing else: not of ranks, workers, batch sizes or timing (`gpufeed.loaders.order`). So a place
in it is two numbers, the epoch and the samples of it that the job took, over all ranks together.
What was made ahead and not taken does not count. Whoever loads the state may have another world,
other workers, another prefetch and another batch size.

What cannot be gone on with is refused, with both values: another dataset, seed, shuffle or version
of the order. Never is anything silently read again or left out.

Pure; constant size and cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.order import ORDER_VERSION, Shuffle

FORMAT = 1
FORMAT_KEY = "gpufeed_order_state"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place: `samples` of `epoch` were taken, by all ranks together."""

    epoch: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: negative.
        """
        if self.epoch < 0 or self.samples < 0:
            raise UsageError(f"epoch {self.epoch}, samples {self.samples}: must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """A cursor, and of which order.

    Attributes:
        cursor: the place.
        seed: of the dataset.
        shuffle: of the dataset.
        manifest_hash: of the dataset's shards and versions; empty where it was never opened.
    """

    cursor: Cursor
    seed: int
    shuffle: Shuffle
    manifest_hash: str

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        return {
            FORMAT_KEY: FORMAT,
            "order_version": ORDER_VERSION,
            "manifest_hash": self.manifest_hash,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.cursor.epoch,
            "samples": self.cursor.samples,
        }

    @classmethod
    def unpack(cls, value: Mapping[str, Any]) -> OrderState:
        """See `pack`.

        Raises:
            UsageError: not such a state, or of a version that this software does not continue.
        """
        told = value.get(FORMAT_KEY)
        if told != FORMAT:
            raise UsageError(
                f"no state of a gpufeed loader that this version reads: {FORMAT_KEY} is {told!r}, "
                f"it reads {FORMAT}"
            )
        version = value.get("order_version")
        if version != ORDER_VERSION:
            raise UsageError(
                f"the state is of order version {version!r}, this software makes {ORDER_VERSION}: "
                "finish the run with the version that began it, or begin an epoch anew"
            )
        try:
            cursor = Cursor(int(value["epoch"]), int(value["samples"]))
            return cls(
                cursor=cursor, seed=int(value["seed"]), shuffle=value["shuffle"],
                manifest_hash=str(value["manifest_hash"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"a state of a gpufeed loader without {error}") from None

    def require_same_order(self, other: OrderState) -> None:
        """This state continues in the order that `other` is a place of.

        Raises:
            UsageError: it is another order; says what differs, with both values.
        """
        for name, mine, theirs in (
            ("seed", self.seed, other.seed),
            ("shuffle", self.shuffle, other.shuffle),
        ):
            if mine != theirs:
                raise UsageError(
                    f"the state is of an order with {name}={mine!r}, the dataset has "
                    f"{name}={theirs!r}: make the dataset with {name}={mine!r} to go on from it"
                )
        if self.manifest_hash and other.manifest_hash:
            self.require_manifest(other.manifest_hash)

    def require_manifest(self, manifest_hash: str) -> None:
        """The dataset is the one that the state was taken of.

        Raises:
            UsageError: it is another one, or has changed.
        """
        if self.manifest_hash != manifest_hash:
            raise UsageError(
                f"the state is of a dataset with manifest {self.manifest_hash[:16]}, this one has "
                f"{manifest_hash[:16]}: shards were added, removed or overwritten since, so that "
                "its samples are not the same; begin an epoch anew (without load_state_dict), or "
                "name the shards of then"
            )
