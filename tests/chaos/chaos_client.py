"""A client that is there to be killed: reads all shards in random orders until it is.

Imports once and forks for each line on stdin (socket path, seed); answers with the child's pid. A
child writes one byte to the pipe of the descriptor given as argument for every extent it has read.

Some children leave an heir, in the middle of reading: a process that they fork, in Python or behind
its back, and that lives on until this program ends. The latter has a copy of the session's socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys

from chaos_data import HELD_MAX, TrueShard, read_checked

from gpufeed.cachefs.client import Session

HEIRS = ("none", "none", "forked", "forked behind Python's back")
FIRST_EXTENTS_MAX = 6


def leave_heir(kind: str, lifeline: int) -> None:
    """Fork a process that only lives on."""
    if kind == "none":
        return
    pid = os.fork() if kind == "forked" else ctypes.CDLL(None).fork()
    if pid == 0:
        os.read(lifeline, 1)
        os._exit(0)


def read_until_killed(
    socket: str, seed: int, truth: dict[str, TrueShard], told: int, lifeline: int
) -> None:
    draw = random.Random(seed)
    urls = sorted(truth)
    heir, at_extent, seen = draw.choice(HEIRS), draw.randint(1, FIRST_EXTENTS_MAX), 0

    def watch(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == at_extent:
            leave_heir(heir, lifeline)
        os.write(told, b"e")

    while True:
        draw.shuffle(urls)
        with Session.connect(socket) as session:
            read_checked(
                session, truth, urls, hold=lambda: HELD_MAX, watch=watch,
            )  # fmt: skip


def main(truth_path: str, told: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open(truth_path, encoding="utf-8") as file:
        truth = {
            url: TrueShard(url, size, tuple(crcs), tuple(tuple(m) for m in members))
            for url, size, crcs, members in json.load(file)
        }
    lifeline, kept = os.pipe()
    print("ready", flush=True)
    for line in sys.stdin:
        socket, seed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(kept)
            try:
                read_until_killed(socket, seed, truth, told, lifeline)
            finally:
                os._exit(1)
        print(pid, flush=True)


main(sys.argv[1], int(sys.argv[2]))
