"""`gpufeed standin` as a program, and the stand-in inside a caller's loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import uvloop

from gpufeed.cachefs.errors import ConfigError, GpufeedError, NotFoundError
from gpufeed.cachefs.testing.standin.command import command
from gpufeed.cachefs.testing.standin.config import StandinConfig
from gpufeed.cachefs.testing.standin.server import Standin

BUCKET = "test-bucket"
RUN = (
    "import sys; from gpufeed.cachefs.testing.standin.command import command; command(sys.argv[1:])"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / BUCKET).mkdir(parents=True)
    (tmp_path / "root" / BUCKET / "k").write_bytes(b"hello")
    return tmp_path / "root"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("scenario", ["", "s.toml", "s.json"])
def test_it_says_where_it_listens_and_ends_cleanly(
    root: Path, tmp_path: Path, number: signal.Signals, scenario: str
) -> None:
    (tmp_path / "s.toml").write_text("first_byte_ms = 1\n")
    (tmp_path / "s.json").write_text('{"first_byte_ms": 1}')
    arguments = ["--root", str(root), "--public", BUCKET, "--prepare"]
    if scenario:
        arguments += ["--scenario", str(tmp_path / scenario)]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    url = f"{ready['endpoint']}/{BUCKET}/k"
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.read() == b"hello"
    process.send_signal(number)
    _, complaints = process.communicate(timeout=20)

    assert (process.returncode, complaints) == (0, b"")


def test_with_a_certificate_it_speaks_tls_and_ends_with_connections_open(
    root: Path, tls_files
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "--root", str(root), "--public", BUCKET,
         "--tls-cert", tls_files.certificate, "--tls-key", tls_files.key],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["endpoint"] == f"https://127.0.0.1:{ready['port']}"
    assert ready["control"].startswith("http://")
    context = ssl.create_default_context(cafile=tls_files.authority)
    kept = http.client.HTTPSConnection("127.0.0.1", ready["port"], context=context, timeout=20)
    for _ in range(2):
        kept.request("GET", f"/{BUCKET}/k")
        assert kept.getresponse().read() == b"hello"
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=20)
    kept.close()

    assert (process.returncode, complaints) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--root", "{root}/none"], NotFoundError, "no directory"),
        (["--root", "{root}", "--scenario", "{root}/none.toml"], NotFoundError, "none.toml"),
        (["--root", "{root}", "--scenario", "{root}/bad.toml"], ConfigError, "malformed"),
        (["--root", "{root}", "--scenario", "{root}/unknown.json"], ConfigError, "unknown speed"),
        (["--root", "{root}", "--scenario", "{root}/list.json"], ConfigError, "a table"),
        (["--root", "{root}", "--scenario", "{root}/every.toml"], ConfigError, "every is 0"),
        (["--root", "{root}", "--mb-per-s", "-3"], ConfigError, "-3"),
        (["--root", "{root}", "--port", "70000"], ConfigError, "70000"),
        (["--root", "{root}", "--secret-variable", "NOT_SET"], ConfigError, "NOT_SET"),
    ],
)
def test_bad_input_is_one_clear_error(
    root: Path, arguments: list[str], error: type[GpufeedError], says: str
) -> None:
    (root / "bad.toml").write_text("first_byte_ms =")
    (root / "unknown.json").write_text('{"speed": 1}')
    (root / "list.json").write_text("[]")
    (root / "every.toml").write_text("[[faults]]\nevery = 0")

    with pytest.raises(error, match=says) as raised:
        command([argument.format(root=root) for argument in arguments])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_it_runs_in_the_callers_loop_and_leaves_no_descriptor(root: Path, factory: object) -> None:
    async def run() -> bytes:
        standin = Standin(StandinConfig(root=str(root), public_buckets=(BUCKET,)))
        await standin.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", standin.port)
        writer.write(f"GET /{BUCKET}/k HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        body = await reader.readexactly(5)
        await standin.stop()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        return body

    before = len(os.listdir("/proc/self/fd"))
    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]  # parametrised
        assert runner.run(run()) == b"hello"
    assert len(os.listdir("/proc/self/fd")) == before
