"""The bench's child processes: started under a keeper, spoken to in JSON lines, always ended.

A `Family` owns every child of one run. `Family.close` (idempotent, also on errors and Ctrl-C) ends
them all and waits until they are gone; if the bench itself is killed, the lifelines close and the
keepers do the same (see `keeper`).

A child writes one JSON object a line to standard output. A line with ``{"type": "error"}`` is
raised here as the error of the class it names. Its standard error goes to a log file whose tail
is part of the message when the child dies.

Not thread-safe: one thread starts, reads and closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gpufeed.bench import keeper
from gpufeed.bench.interrupts import deferred, to_the_end
from gpufeed.cachefs import errors
from gpufeed.cachefs.errors import GpufeedError, WorkerError

Message = dict[str, Any]

# Longer than the keeper's own grace, so that the keeper has always finished its work.
_END_S = keeper.GRACE_S + keeper.ORPHAN_GRACE_S + 5.0
_LINE_BYTES_MAX = 64 * 1024 * 1024
_LOG_TAIL_BYTES = 2000


class Child:
    """One command under a keeper. Made by `Family.start`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._buffer = bytearray()
        self.stdout_fd = -1 if process.stdout is None else process.stdout.fileno()

    @property
    def keeper_pid(self) -> int:
        """The keeper's process id: the command and all it starts are below it."""
        return self._process.pid

    def read(self) -> tuple[list[Message], bool]:
        """Read what is there now: whole messages, and whether the child closed its output.

        Raises:
            GpufeedError: the child reported an error.
            WorkerError: a line is not JSON or too long.
        """
        chunk = os.read(self.stdout_fd, 1 << 20)
        self._buffer += chunk
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > _LINE_BYTES_MAX:
            raise WorkerError(f"{self.name} wrote a line of over {_LINE_BYTES_MAX} bytes")
        messages = [self._parse(bytes(line)) for line in lines if line.strip()]
        return messages, not chunk

    def _parse(self, line: bytes) -> Message:
        try:
            message = json.loads(line)
        except ValueError as error:
            raise WorkerError(f"{self.name} wrote {line[:200]!r}, not a JSON line") from error
        if isinstance(message, dict) and message.get("type") == "error":
            raise self.error_from(message)
        return dict(message)

    def error_from(self, message: Message) -> GpufeedError:
        """The exception that an error message stands for."""
        made = getattr(errors, str(message.get("class")), None)
        text = f"{self.name}: {message.get('message')}"
        if isinstance(made, type) and issubclass(made, GpufeedError):
            return made(text)
        return WorkerError(text)

    def wait(self) -> int:
        """Wait for the end of a child that closed its output; returns its status."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"{self.name} does not end") from error

    def died(self, status: int | None) -> WorkerError:
        """An error that shows the end of the child's log."""
        how = f"ended with status {status}" if status is not None else "gave up"
        return WorkerError(f"{self.name} {how}{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the log, ready to be appended to a message; empty when there is none."""
        try:
            text = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; the end of its log:\n{text}" if text else ""

    def end(self) -> None:
        """Close the lifeline and wait until the command and all below it are gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Family:
    """All child processes of one run; a context manager."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log_dir = log_dir
        self._environment = dict(os.environ if environment is None else environment)
        self._children: list[Child] = []

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        service: bool = False,
    ) -> Child:
        """Start `command` under a keeper; signals wait until the child is on our list.

        A `service` has nothing to say on standard output: that goes to its log too.
        """
        log_path = self._log_dir / f"{name}.log"
        # Isolated: our folder must not be where the keeper finds modules, it has an html.py.
        argv = [sys.executable, "-I", "-S", keeper.__file__, *command]
        with deferred(), log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 our own command lines
                argv,
                stdin=subprocess.PIPE,
                stdout=log if service else subprocess.PIPE,
                stderr=log,
                env={**self._environment, **(environment or {})},
                pass_fds=pass_fds,
                start_new_session=True,
            )
            child = Child(name, process, log_path)
            self._children.append(child)
        return child

    def start_module(self, name: str, module: str, *arguments: str) -> Child:
        """Start ``python -m module arguments``."""
        return self.start(name, [sys.executable, "-m", module, *arguments])

    def end(self, child: Child) -> None:
        """End one child and forget it."""
        child.end()
        if child in self._children:
            self._children.remove(child)

    def close(self) -> None:
        """End all children, the youngest first. Idempotent."""
        to_the_end(self._end_all)

    def _end_all(self) -> None:
        while self._children:
            self.end(self._children[-1])


def stream(children: Sequence[Child], *, silence_s: float) -> Iterator[tuple[Child, Message]]:
    """Yield the messages of `children` as they come, until all have ended well.

    Raises:
        GpufeedError: a child reported an error.
        WorkerError: a child died, or none said anything for `silence_s`.
    """
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout_fd, selectors.EVENT_READ, child)
        while selector.get_map():
            ready = selector.select(silence_s)
            if not ready:
                names = ", ".join(key.data.name for key in selector.get_map().values())
                tails = "".join(key.data.log_tail() for key in selector.get_map().values())
                raise WorkerError(f"{names}: no sign of life for {silence_s:.0f} s{tails}")
            for key, _ in ready:
                child = key.data
                messages, ended = child.read()
                for message in messages:
                    yield child, message
                if ended:
                    selector.unregister(key.fd)
                    status = child.wait()
                    if status:
                        raise child.died(status)


def read_ready_line(child: Child, fd: int, *, timeout_s: float) -> Message:
    """Read the JSON line that a service writes to `fd` once it serves.

    Raises:
        WorkerError: it ended, wrote nonsense, or took over `timeout_s`.
    """
    line = bytearray()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise WorkerError(f"{child.name} not ready after {timeout_s} s{child.log_tail()}")
            chunk = os.read(fd, 4096)
            if not chunk:
                raise child.died(child.wait())
            line += chunk
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise WorkerError(f"{child.name} wrote {bytes(line)!r} as its ready line") from error
