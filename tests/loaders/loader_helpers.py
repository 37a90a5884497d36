"""Decoders that spawned workers can import, and small readings of loaders."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import torch

from gpufeed.cachefs.errors import CorruptSampleError
from gpufeed.loaders.order import epoch_shards


def whole(sample):
    """Fixed shape: the first bytes, the shard's number, the key."""
    data = bytes(sample["bin"])
    head = np.zeros(64, dtype=np.uint8)
    head[: len(data[:64])] = np.frombuffer(data[:64], np.uint8)
    return {"head": head, "size": len(data), "cls": int(bytes(sample["cls"])),
            "key": sample["__key__"], "url": sample["__url__"]}  # fmt: skip


def noisy(sample):
    return random.random(), np.random.rand(), torch.rand(()), sample["__key__"]


def variable(sample):
    return np.frombuffer(sample["bin"], np.uint8)


def exact(sample):
    """The fields as they are, copied."""
    return {"bin": bytes(sample["bin"]), "cls": bytes(sample["cls"]), "key": sample["__key__"]}


def fails_on_seven(sample):
    if sample["__key__"].endswith("7"):
        raise CorruptSampleError(f"seven is bad: {sample['__key__']}")
    return whole(sample)


def kills_itself(sample):
    if sample["__key__"].endswith("000013"):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(sample)


def pid_of(sample):
    return os.getpid()


def slow_odd(sample):
    """Some samples take longer, so that units come back out of order."""
    if int(sample["__key__"][-1]) % 3 == 0:
        time.sleep(0.002)
    return whole(sample)


def hangs(sample):
    time.sleep(3600)


_told = []


def tells_and_goes_on(sample):
    """One line a process once it decodes."""
    if not _told:
        _told.append(True)
        os.write(1, b"decoding\n")
    return whole(sample)


def tells_and_hangs(sample):
    tells_and_goes_on(sample)
    time.sleep(3600)


def keys_of(loader):
    return [key for batch in loader for key in batch["key"]]


def expected_keys(daemon, *, seed, epoch, shuffle="shards"):
    order = epoch_shards(len(daemon.shards), seed=seed, epoch=epoch, shuffle=shuffle)
    return [sample["__key__"] for sample in daemon.samples(order.tolist())]


def list_collate(samples):
    return samples


def pair_collate(samples):
    heads = torch.from_numpy(np.stack([sample["head"] for sample in samples]))
    return heads, [sample["key"] for sample in samples], len(samples), os.getpid()
