"""What a client tells when it connects: its token, and the arenas that it still maps."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from lockfile import lock_fd

from gpufeed.cachefs import wire
from gpufeed.cachefs.bodies import close_all
from gpufeed.cachefs.connect import open_session
from gpufeed.cachefs.errors import ConfigError, DaemonUnavailableError
from gpufeed.cachefs.wire import Kind


@pytest.fixture
def hellos(tmp_path: Path):
    """A daemon that welcomes one client, and the HELLO that it got."""
    path = str(tmp_path / "d.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    listener.settimeout(20)
    got: list[dict] = []

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            got.append(wire.unpack(sock.recv(wire.MESSAGE_BYTES_MAX)).json())
            arena = os.memfd_create("gpufeed-arena")
            os.ftruncate(arena, 4096)
            value = {"arena_bytes": 4096, "extent_bytes": 4096, "window_extents": 1}
            welcome = wire.pack(Kind.WELCOME, wire.pack_json(value))
            descriptors = [arena, lock_fd()]
            socket.send_fds(sock, [welcome], descriptors)
            close_all(descriptors)
            sock.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()

    def connect(**arguments) -> dict:
        with open_session(daemon=path, **arguments):
            pass
        thread.join(20)
        return got[0]

    yield connect
    listener.close()


def test_the_token_of_the_argument_goes_before_the_environments(hellos) -> None:
    assert hellos(token="mine", environ={"GPUFEED_TOKEN": "theirs"})["token"] == "mine"


def test_the_token_of_the_environment(hellos) -> None:
    assert hellos(environ={"GPUFEED_TOKEN": "theirs"})["token"] == "theirs"


def test_the_token_of_a_mounted_file(hellos, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")
    environ = {"GPUFEED_TOKEN_FILE": str(tmp_path / "token")}
    assert hellos(environ=environ)["token"] == "from a file"


def test_no_token(hellos) -> None:
    assert "token" not in hellos(environ={})


def test_a_session_that_had_the_nodes_daemon_takes_no_other(tmp_path: Path) -> None:
    """An embedded one would have neither its settings nor its cache."""
    path = str(tmp_path / "node.sock")
    environ = {"GPUFEED_DAEMON_SOCKET_PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(DaemonUnavailableError, match=f"no gpufeed daemon answers at {path}"):
        open_session(former=path, environ=environ)
    assert not list(tmp_path.iterdir()), "a daemon was started"


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(ConfigError, match=f"GPUFEED_TOKEN_FILE={path}"):
        open_session(daemon="/none", environ={"GPUFEED_TOKEN_FILE": str(path)})
