"""A client that is there to be killed: reads all shards in random orders until it is.

Imports once and forks for each line on stdin (socket path, seed); answers with the child's pid. A
child writes one byte to the pipe of the descriptor given as argument for every extent it has read.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys

from chaos_data import HELD_MAX, TrueShard, read_checked

from gpufeed.cachefs.client import Session


def read_until_killed(socket: str, seed: int, truth: dict[str, TrueShard], told: int) -> None:
    draw = random.Random(seed)
    urls = sorted(truth)
    while True:
        draw.shuffle(urls)
        with Session.connect(socket) as session:
            read_checked(
                session, truth, urls, hold=lambda: HELD_MAX,
                watch=lambda _: os.write(told, b"e"),
            )  # fmt: skip


def main(truth_path: str, told: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open(truth_path, encoding="utf-8") as file:
        truth = {
            url: TrueShard(url, size, tuple(crcs), tuple(tuple(m) for m in members))
            for url, size, crcs, members in json.load(file)
        }
    print("ready", flush=True)
    for line in sys.stdin:
        socket, seed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                read_until_killed(socket, seed, truth, told)
            finally:
                os._exit(1)
        print(pid, flush=True)


main(sys.argv[1], int(sys.argv[2]))
