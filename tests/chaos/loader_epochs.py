"""A training process that reads epochs through a daemon that is killed.

Arguments: socket, URL, workers (with a ``+``: persistent), epochs to read at least, file whose
presence ends it. It prints "batch" after each batch, and one JSON at the end: the samples of each
epoch in order (key and checksum), and how often it sought another daemon.
"""

from __future__ import annotations

import json
import os
import sys
import zlib

from gpufeed.loaders import DataLoader, ShardDataset

BATCH = 16


def summed(sample):
    return {"key": sample["__key__"], "crc": zlib.crc32(sample["jpg"])}


def main(socket: str, url: str, workers: str, epochs_min: str, stop_path: str) -> None:
    count = int(workers.rstrip("+"))
    loader = DataLoader(
        ShardDataset(url, decode=summed, seed=3, daemon=socket), batch_size=BATCH,
        num_workers=count, multiprocessing_context="forkserver" if count else None,
        persistent_workers=workers.endswith("+"),
    )  # fmt: skip
    epochs = []
    while len(epochs) < int(epochs_min) or not os.path.exists(stop_path):
        epoch = []
        for batch in loader:
            print("batch", flush=True)
            epoch += zip(batch["key"], batch["crc"].tolist(), strict=True)
        epochs.append(epoch)
    reconnects = loader.stats()["reconnects"]
    loader.close()
    print(json.dumps({"epochs": epochs, "reconnects": reconnects}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
