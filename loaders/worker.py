"""A decode worker process: units in, results out, over one channel of its own.

It maps the arena read-only and the batch ring writable, and writes decoded rows in place. Results
tell only what the rows could not hold. The process ends when the feeder closes the channel or
dies, whatever it is doing then: a second thread waits for nothing but that. SIGINT is ignored; the
parent decides. It holds no session, no network client and no lock that others use, and imports
torch only when the parent had it (fork) or `decode` does.
"""

from __future__ import annotations

import mmap
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from gpufeed.loaders.channel import WorkerChannel
from gpufeed.loaders.samples import SampleMaker, seed_sample
from gpufeed.loaders.units import PICKLE_PROTOCOL, Configure, Unit, UnitRunner


class SharedFd:
    """A descriptor that survives fork as it is, and spawn and forkserver by pickling."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, state: Any) -> None:
        self.fd = state.detach()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start. Everything in it pickles for spawn and forkserver.

    Attributes:
        arena_lock: stays open as long as the worker lives: it says that the arena is in use.
    """

    worker: int
    worker_count: int
    seed: int
    decode: Callable[[dict[str, Any]], Any] | None
    collate: Callable[[list[Any]], Any] | None
    init_fn: Callable[[int], None] | None
    dataset: Any
    arena: SharedFd
    arena_lock: SharedFd
    arena_bytes: int
    ring: SharedFd


def main(spec: WorkerSpec, sock: socket.socket) -> None:
    """Run until the feeder is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = WorkerChannel(sock)
    threading.Thread(
        target=_end_with_feeder, args=(channel.fileno(),), name="gpufeed-lifeline", daemon=True
    ).start()
    try:
        runner = _start(spec)
        _serve(channel, runner, spec.ring.fd)
    except (BrokenPipeError, ConnectionError):
        return


def _end_with_feeder(fd: int) -> None:
    """Block until the other end of the channel closes, then end the process at once."""
    hangup = select.poll()
    hangup.register(fd, select.POLLRDHUP)
    hangup.poll()
    os._exit(0)


def _start(spec: WorkerSpec) -> UnitRunner:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        _set_worker_info(spec)
    seed_sample(spec.seed + spec.worker)
    if spec.init_fn is not None:
        spec.init_fn(spec.worker)
    random.seed(spec.seed + spec.worker)
    arena = mmap.mmap(spec.arena.fd, spec.arena_bytes, prot=mmap.PROT_READ)
    os.close(spec.arena.fd)
    return UnitRunner(SampleMaker(memoryview(arena), spec.decode), spec.collate)


def _set_worker_info(spec: WorkerSpec) -> None:
    """Make `torch.utils.data.get_worker_info` answer in `worker_init_fn` and `decode`."""
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    if module is None or not hasattr(module, "WorkerInfo"):
        return
    module._worker_info = module.WorkerInfo(  # torch offers no other way in
        id=spec.worker,
        num_workers=spec.worker_count,
        seed=spec.seed + spec.worker,
        dataset=spec.dataset,
    )


def _serve(channel: WorkerChannel, runner: UnitRunner, ring_fd: int) -> None:
    while True:
        frame = channel.receive()
        if frame is None:
            return
        message = pickle.loads(frame)  # noqa: S301 from our own parent
        if isinstance(message, Configure):
            runner.configure(ring_fd, message.shape)
            continue
        assert isinstance(message, Unit)
        channel.send(pickle.dumps(runner.run(message), PICKLE_PROTOCOL))
