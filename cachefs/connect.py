"""Finding a daemon, or starting one: how a training process gets a session, for any door.

``GPUFEED_DAEMON`` (or the `daemon` argument) says which:

- ``auto`` (default): the node's daemon if one answers; else an embedded one, shared by all loaders
  of this user with the same configuration, which ends by itself some seconds after the last;
- ``required``: the node's daemon, or an error;
- ``off``: an embedded daemon of one's own, memory only: nothing is cached on disk;
- a path: the daemon that listens there, or an error.

An embedded daemon is a fresh process (never a fork of the trainer: no CUDA, no locks, no threads
of it), in a session of its own so that Ctrl-C does not reach it, its output in a log file. Who
starts it is decided by `flock` on ``<socket>.start``; a daemon that is about to end closes a
connection without an answer, so every attempt is repeated, at most `ATTEMPTS_MAX` times.

Where the daemon knows tenants by tokens, ``GPUFEED_TOKEN`` is the token, or ``GPUFEED_TOKEN_FILE``
names the file that holds it (a mounted secret, which may be replaced while we run).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpufeed.cachefs import paths, wire
from gpufeed.cachefs.errors import ConfigError, DaemonUnavailableError
from gpufeed.cachefs.handshake import TOKEN_CHARACTERS_MAX
from gpufeed.cachefs.session import Session

ATTEMPTS_MAX = 5
# An interpreter that starts on a busy node, a cache directory of a million shards.
START_TIMEOUT_S = 60.0
_MODES = ("auto", "required", "off")
_private_numbers = itertools.count(1)


def open_session(
    *,
    daemon: str | None = None,
    window_bytes: int = 0,
    whole: bool = False,
    token: str | None = None,
    former: str = "",
    environ: Mapping[str, str] | None = None,
) -> Session:
    """A session with the daemon that `daemon` or ``GPUFEED_DAEMON`` names.

    Args:
        daemon: auto, required, off or a path; None leaves it to ``GPUFEED_DAEMON``.
        window_bytes: see `Session.connect`.
        whole: see `Session.connect`.
        token: of the tenant; None leaves it to the environment.
        former: where the session before this one was, which was lost. The node's daemon is sought
            there only: an embedded one has neither its settings nor its cache.
        environ: the environment; None is the process's own.

    Raises:
        ConfigError: the token's file cannot be read.
        DaemonUnavailableError: it does not answer, or the embedded one did not start.
        GpufeedError: it refused, with its reason.
    """
    environ = os.environ if environ is None else environ
    mode = daemon or environ.get("GPUFEED_DAEMON", "") or "auto"
    wanted = _Wanted(window_bytes, token if token is not None else _token(environ), whole=whole)
    if mode not in _MODES:
        return wanted.connect(mode)
    if mode == "auto" and former in node_sockets(environ):
        return wanted.connect(former)
    if mode != "off":
        found = _connect_node(environ, wanted)
        if found is not None:
            return found
    if mode == "required":
        raise DaemonUnavailableError(
            f"no gpufeed daemon answers at {' or '.join(node_sockets(environ))}; start `gpufeed "
            "daemon`, or set GPUFEED_DAEMON=auto for an embedded one"
        )
    directory = paths.runtime_directory(environ)
    paths.ensure_private_directory(directory)
    name = f"private-{os.getpid()}-{next(_private_numbers)}" if mode == "off" else _name(environ)
    return _connect_embedded(f"{directory}/{name}.sock", wanted, private=mode == "off")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What every attempt tells."""

    window_bytes: int
    token: str | None = field(repr=False)
    whole: bool = False

    def connect(self, path: str) -> Session:
        return Session.connect(
            path, window_bytes=self.window_bytes, whole=self.whole, token=self.token
        )


def _token(environ: Mapping[str, str]) -> str | None:
    token = environ.get("GPUFEED_TOKEN")
    path = environ.get("GPUFEED_TOKEN_FILE", "")
    if token or not path:
        return token or None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(TOKEN_CHARACTERS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"GPUFEED_TOKEN_FILE={path} cannot be read ({error}): name the file that holds the "
            "token, or set GPUFEED_TOKEN"
        ) from None


def node_sockets(environ: Mapping[str, str]) -> list[str]:
    """Where a daemon of this node may listen, most specific first."""
    configured = environ.get("GPUFEED_DAEMON_SOCKET_PATH", "")
    if configured:
        return [configured]
    return [paths.user_socket(environ), paths.SYSTEM_SOCKET]


def _connect_node(environ: Mapping[str, str], wanted: _Wanted) -> Session | None:
    for path in node_sockets(environ):
        if os.path.exists(path):
            with contextlib.suppress(DaemonUnavailableError):
                return wanted.connect(path)
    return None


def _name(environ: Mapping[str, str]) -> str:
    """Loaders share an embedded daemon if they would configure it alike."""
    settings = sorted(item for item in environ.items() if item[0].startswith("GPUFEED_"))
    text = repr((settings, sys.executable)).encode()
    return "embedded-" + hashlib.blake2b(text, digest_size=6).hexdigest()


def _connect_embedded(path: str, wanted: _Wanted, *, private: bool) -> Session:
    failure = DaemonUnavailableError(f"the embedded daemon at {path} kept going away")
    for _ in range(ATTEMPTS_MAX):
        try:
            return wanted.connect(path)
        except DaemonUnavailableError as error:
            failure = error
        with _start_lock(path):
            # Somebody may have started it while we waited for the lock.
            with contextlib.suppress(DaemonUnavailableError):
                return wanted.connect(path)
            _start(path, private=private)
            # While we hold the lock: a daemon that hardly lingers is still there for us.
            with contextlib.suppress(DaemonUnavailableError):
                return wanted.connect(path)
    raise failure


@contextlib.contextmanager
def _start_lock(path: str) -> Iterator[None]:
    descriptor = os.open(path + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(path: str, *, private: bool) -> None:
    """Start an embedded daemon and wait until it accepts sessions.

    Raises:
        GpufeedError: why it could not start.
    """
    log_path = path.removesuffix(".sock") + ".log"
    reading, writing = os.pipe()
    command = [
        sys.executable, "-m", "gpufeed.daemon", "daemon", "--embedded", "--socket", path,
        "--http-port", "-1", "--ready-fd", str(writing),
    ]  # fmt: skip
    if private:
        command.append("--memory-only")
    try:
        with open(log_path, "wb") as log:
            starter = subprocess.Popen(  # noqa: S603 our own interpreter and module
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writing,)
            )
        os.close(writing)
        writing = -1
        try:
            # It detaches itself: what we started ends at once, and the daemon is nobody's child.
            starter.wait(START_TIMEOUT_S)
            answer = _read_line(reading)
        except subprocess.TimeoutExpired:
            starter.kill()
            starter.wait()
            answer = b""
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if not answer:
        raise DaemonUnavailableError(
            f"the embedded daemon did not start within {START_TIMEOUT_S:.0f} s; see {log_path}"
        )
    value = json.loads(answer)
    if "error" in value:
        raise wire.unpack_error(value)


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], START_TIMEOUT_S)
        piece = os.read(descriptor, 4096) if readable else b""
        if not piece:
            break
        data += piece
    return data
