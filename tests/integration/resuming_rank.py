"""One rank of a training job that saves its state each step and goes on from the last one saved.

Arguments: URL, state file, file for what it saw, steps to make at most (0: the epochs), epochs. The
launcher's variables name the rank. Each step's line has the epoch, and the keys and checksums of
augmented samples; when all ranks have made it (gloo), rank 0 saves the state. It says when it has
made a step, so that it can be killed at any of them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed

from gpufeed.loaders import DataLoader, ShardDataset


def augmented(sample):
    data = bytearray(sample["jpg"])
    # What an augmentation does: its result hangs on all three generators.
    for _ in range(50):
        data[random.randrange(len(data))] ^= int(torch.randint(0, 256, ()))
    return {"key": sample["__key__"], "crc": zlib.crc32(data)}


def main(url: str, state_path: str, seen_path: str, steps_max: str, epochs: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank, workers = torch.distributed.get_rank(), int(os.environ["WORKERS"])
    loader = DataLoader(
        ShardDataset(url, decode=augmented, seed=11, shuffle=os.environ["SHUFFLE"]),
        global_batch_size=int(os.environ["GLOBAL_BATCH"]), uneven="allow", drop_last=True,
        num_workers=workers, multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip
    state = Path(state_path)
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    steps = 0
    with open(seen_path, "a") as seen:
        while loader.state_dict()["epoch"] < int(epochs):
            for batch in loader:
                told = loader.state_dict()
                rows = list(zip(batch["key"], batch["crc"].tolist(), strict=True))
                seen.write(json.dumps([told["epoch"], told["samples"], rank, rows]) + "\n")
                seen.flush()
                torch.distributed.barrier()
                if rank == 0:
                    state.with_suffix(".new").write_text(json.dumps(told))
                    state.with_suffix(".new").rename(state)
                torch.distributed.barrier()
                steps += 1
                print("step", flush=True)
                if steps == int(steps_max):
                    loader.close()
                    return
    loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
