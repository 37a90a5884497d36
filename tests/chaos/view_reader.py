"""A process that reads epochs through a daemon that is killed, and keeps views meanwhile.

Arguments: socket, file with the truth (JSON: url, keys and checksums of each shard's samples), file
whose presence ends it, seed, window, epochs to read at least, views to keep for long. It checks
every sample's place, name and bytes, stamps the views that it keeps with their checksum and looks
at them again when it lets go of them. It says when it is ready, and at its end what is left, as
JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import zlib

import numpy as np

from gpufeed.cachefs.client import Sample, open_client

# Views of late are let go of in the order in which they came, so that few extents hold many; some
# stay for whole epochs.
RECENT_MAX = 20
RECENT_RATIO = 0.5
LONG_RATIO = 0.002
RANGE_RATIO = 0.02


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_arenas() -> int:
    with open("/proc/self/maps") as file:
        return sum("gpufeed-arena" in line for line in file)


def heap_kib() -> int:
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1])


class Held:
    """Views with the checksums that they had when they came."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.views: list[tuple[memoryview, int]] = []
        self.kept_count = self.in_place_count = self.changed_count = 0

    def keep(self, view: memoryview) -> None:
        self.kept_count += 1
        self.in_place_count += isinstance(view.obj, np.ndarray)
        self.views.append((view, zlib.crc32(view)))
        if len(self.views) > self.count_max:
            self.drop()

    def drop(self) -> None:
        view, stamp = self.views.pop(0)
        self.changed_count += zlib.crc32(view) != stamp

    def clear(self) -> None:
        while self.views:
            self.drop()


def check(sample: Sample, place: tuple[int, int], truth: list[tuple[str, int]]) -> None:
    wanted_key, wanted_crc = truth[place[1]]
    crc = 0
    for view in sample.values():
        crc = zlib.crc32(view, crc)
    found = (sample.position, sample.number, sample.key, crc)
    if found != (*place, wanted_key, wanted_crc):
        raise AssertionError(f"got {found}, wanted {(*place, wanted_key, wanted_crc)}")


def main(
    socket: str, truth_path: str, stop_path: str, seed: str, window_bytes: str, epochs_min: str,
    long_max: str,
) -> dict[str, int]:  # fmt: skip
    draw = random.Random(seed)
    with open(truth_path) as file:
        known = json.load(file)
    before_descriptors = count_descriptors()
    recent, long = Held(RECENT_MAX), Held(int(long_max))
    samples = epochs = 0
    heap_first_kib = 0
    client = open_client(socket, window_bytes=int(window_bytes))
    dataset = client.open(known["url"])
    print("ready", flush=True)
    while not os.path.exists(stop_path) or epochs < int(epochs_min):
        order = draw.sample(range(len(dataset.shards)), len(dataset.shards))
        places = (
            (p, i) for p, shard in enumerate(order) for i in range(len(known["shards"][shard]))
        )
        for sample in client.samples(dataset, order):
            place = next(places)
            check(sample, place, known["shards"][order[place[0]]])
            samples += 1
            if draw.random() < RECENT_RATIO:
                recent.keep(sample["jpg"])
            if draw.random() < LONG_RATIO:
                long.keep(sample["jpg"])
            if draw.random() < RANGE_RATIO:
                shard = draw.randrange(len(dataset.shards))
                begin = draw.randrange(dataset.shards[shard].size_bytes)
                recent.keep(client.read(dataset.shards[shard].name, begin, begin + 1000))
        assert next(places, None) is None, "an epoch ended early"
        del sample
        epochs += 1
        heap_first_kib = heap_first_kib or heap_kib()
    stats = client.stats
    client.close()
    recent.clear()
    long.clear()
    gc.collect()
    return {
        "samples": samples,
        "epochs": epochs,
        "kept": recent.kept_count + long.kept_count,
        "in_place": recent.in_place_count + long.in_place_count,
        "changed": recent.changed_count + long.changed_count,
        "reconnects": stats.reconnects_count,
        "copied": stats.copied_count,
        "straddled": stats.straddled_count,
        "descriptors_left": count_descriptors() - before_descriptors,
        "arenas_left": count_arenas(),
        "heap_grown_kib": heap_kib() - heap_first_kib,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
