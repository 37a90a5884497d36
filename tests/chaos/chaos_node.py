"""Daemons that a test may kill at any moment, even before they are ready."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from chaos_data import EXTENT_BYTES, put_shards, read_checked
from chaos_log import DaemonLog
from node import Node

from gpufeed.cachefs.client import Session

READY_S_MAX = 90.0
END_S_MAX = 60.0
SETTLE_S_MAX = 30.0
HEALTHY_S_MAX = 90.0
LOOK_S = 1.0


class ChaosDaemon:
    """One daemon process."""

    def __init__(self, process: subprocess.Popen[bytes], ready_fd: int) -> None:
        self.process = process
        self.log = DaemonLog(process.stderr)
        self._ready_fd = ready_fd
        self.http_port = -1

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for the ready line. False: not in so long."""
        if self.http_port >= 0:
            return True
        if not select.select([self._ready_fd], [], [], timeout_s)[0]:
            return False
        with open(self._ready_fd, "rb") as file:
            line = file.readline()
        self._ready_fd = -1
        ready = json.loads(line) if line else {"error": "no ready line"}
        assert "error" not in ready, f"{ready}\n{self.log.text()}"
        self.http_port = ready["http_port"]
        return True

    def status(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.http_port}/status"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def settled(self, **wanted: float) -> dict[str, float]:
        """Look at the status until it says `wanted`; nobody tells when it does."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        while True:
            status = self.status()
            if all(status[name] == value for name, value in wanted.items()):
                return status
            found = {name: status[name] for name in wanted}
            assert time.monotonic() < deadline_s, f"{found} never became {wanted}"

    def end(self, number: int = signal.SIGKILL) -> list[str]:
        """Send a signal, wait until it is dead; returns its log."""
        self.process.send_signal(number)
        self.process.wait(END_S_MAX)
        return self.reap()

    def reap(self) -> list[str]:
        """Its log, once it is dead."""
        self.close_ready()
        lines = self.log.finish()
        assert not any("Traceback" in line for line in lines), "\n".join(lines)
        return lines

    def close_ready(self) -> None:
        """Nobody waits for the ready line any more."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1


class ChaosNode(Node):
    """See the top of the file."""

    def __init__(self, standin, place: Path) -> None:
        super().__init__(standin, place)
        self.cache = place / "cache"
        self.daemons: list[ChaosDaemon] = []

    def environment(self, **extra: str) -> dict[str, str]:
        return super().environment(**{
            "GPUFEED_ARENA_EXTENT_BYTES": str(EXTENT_BYTES),
            "GPUFEED_STORE_PATH": str(self.cache),
            "GPUFEED_DAEMON_LOG_LEVEL": "debug",
            **extra,
        })  # fmt: skip

    def launch(self, **extra: str) -> ChaosDaemon:
        """Start a daemon and do not wait for it."""
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "gpufeed.daemon", "daemon", "--socket", self.socket,
             "--http-port", "0", "--ready-fd", str(writing)],
            env=self.environment(**extra), pass_fds=(writing,), stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(writing)
        daemon = ChaosDaemon(process, reading)
        self.daemons.append(daemon)
        return daemon

    def begin(self, **extra: str) -> ChaosDaemon:
        """Start a daemon and wait until it is ready."""
        daemon = self.launch(**extra)
        assert daemon.is_ready(READY_S_MAX), f"not ready:\n{daemon.log.text()}"
        return daemon

    def close(self) -> None:
        super().close()
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            with contextlib.suppress(AssertionError):
                # A traceback was reported where it was met, or the test failed for another reason.
                daemon.reap()


def comes_back(chaos: ChaosNode, daemon: ChaosDaemon) -> None:
    """New shards keep being read until one of them has proved the disk well again."""
    deadline_s = time.monotonic() + HEALTHY_S_MAX
    number = 0
    while daemon.status()["store_degraded"]:
        number += 1
        fresh = put_shards(chaos.bucket, 1, seed=50 + number)
        with Session.connect(chaos.socket) as session:
            read_checked(session, fresh, fresh)
        daemon.log.wait_for(" committed ", timeout_s=LOOK_S)
        assert time.monotonic() < deadline_s, "the disk is well, but not trusted again"
