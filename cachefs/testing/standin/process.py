"""A stand-in in a process of its own, for tests and benchmarks.

It listens when the constructor's ``with`` block begins and is gone when the block ends; if its
parent is killed it ends too, because its standard input does.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from gpufeed.cachefs.errors import ConfigError, OperatorError
from gpufeed.cachefs.testing.standin.config import StandinConfig
from gpufeed.cachefs.testing.standin.service import CONTROL_PREFIX

STOP_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 30.0


class StandinProcess:
    """See the top of the file. `endpoint`, `port` and `root` are set inside the block.

    Control goes over plain HTTP always.
    """

    def __init__(self, config: StandinConfig, *, prepare: bool = False) -> None:
        self.config = config
        self.root = config.root
        self.endpoint = ""
        self.port = 0
        self._control_endpoint = ""
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StandinProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            OperatorError: it did not start; the message has its reason.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "gpufeed.cachefs.testing.standin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        value = {**dataclasses.asdict(self.config), "prepare": self._prepare}
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        ready: dict[str, Any] = json.loads(line) if line else {"error": "it ended at once"}
        if "error" in ready:
            self.stop()
            raise OperatorError(f"the OSS stand-in did not start: {ready['error']}")
        self.endpoint, self.port = ready["endpoint"], ready["port"]
        self._control_endpoint = ready["control"]

    def stop(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def counters(self) -> dict[str, Any]:
        """Requests and bytes since the start or the last `reset`."""
        found: dict[str, Any] = self._control("GET", "counters")
        return found

    def reset(self) -> None:
        """Set the counters to zero."""
        self._control("POST", "reset")

    def set_scenario(self, scenario: Mapping[str, Any]) -> None:
        """Shape and break from now on, see `scenario.py`.

        Raises:
            ConfigError: the scenario is malformed; the one before stays.
        """
        self._control("PUT", "scenario", json.dumps(scenario).encode())

    def _control(self, method: str, name: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310 our own server
            f"{self._control_endpoint}{CONTROL_PREFIX}{name}", data=body, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=CONTROL_TIMEOUT_S) as answer:  # noqa: S310 as above
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                reason = json.load(refused)["error"]
            raise ConfigError(f"the OSS stand-in refused: {reason}") from None
