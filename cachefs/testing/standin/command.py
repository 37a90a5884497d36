"""``gpufeed standin``: the stand-in as a program.

Prints one JSON line with its endpoint when it is ready and runs until SIGTERM, Ctrl-C or, with
``--lifeline``, until its standard input ends, so that it never outlives a test that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tomllib
from typing import Any

import uvloop

from gpufeed.cachefs.errors import ConfigError, NotFoundError
from gpufeed.cachefs.testing.standin.config import AccessKey, StandinConfig
from gpufeed.cachefs.testing.standin.server import Standin


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpufeed standin",
        description="Serve a directory as Alibaba Cloud OSS would, for tests and benchmarks: "
        "signatures are verified, ranges behave as OSS's do, and a scenario adds latency, limits "
        "and faults.",
        epilog="example: gpufeed standin --root /tmp/buckets --port 9000 --scenario slow.toml",
    )
    parser.add_argument("--root", required=True, help="directory with one folder a bucket")
    parser.add_argument("--host", default="127.0.0.1", help="address (default loopback)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 (default) = any free one")
    parser.add_argument("--region", default="cn-hangzhou", help="region that signatures name")
    parser.add_argument("--key", default="test-key", help="access key id")
    parser.add_argument(
        "--secret-variable", default="", metavar="NAME",
        help="environment variable with the secret (default: the secret is 'test-secret')",
    )  # fmt: skip
    parser.add_argument(
        "--public", action="append", default=[], metavar="BUCKET",
        help="bucket that may be read unsigned (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="PEM certificate chain: speak https"
    )
    parser.add_argument("--tls-key", default="", metavar="FILE", help="PEM key of --tls-cert")
    parser.add_argument("--scenario", default="", metavar="FILE", help="TOML or JSON file")
    parser.add_argument("--first-byte-ms", type=float, metavar="MS", help="latency of every answer")
    parser.add_argument("--mb-per-s", type=float, metavar="RATE", help="bandwidth of a connection")
    parser.add_argument(
        "--ready-fd", type=int, default=1, metavar="N",
        help="descriptor for the line that says it is ready (default: standard output)",
    )  # fmt: skip
    parser.add_argument(
        "--prepare", action="store_true", help="compute all checksums before it is ready"
    )
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    return parser


def read_scenario(path: str) -> dict[str, Any]:
    """A scenario file.

    Raises:
        NotFoundError: there is none.
        ConfigError: neither TOML nor JSON.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise NotFoundError(f"cannot read the scenario {path}: {error.strerror}") from None
    try:
        value: dict[str, Any] = (
            json.loads(data) if path.endswith(".json") else tomllib.loads(data.decode())
        )
    except ValueError as error:
        raise ConfigError(f"the scenario {path} is malformed: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"the scenario {path} is malformed: it must be a table")
    return value


def command(argv: list[str]) -> int:
    """Run it.

    Raises:
        GpufeedError: no such root, a malformed scenario, or the port is taken.
    """
    arguments = _parser().parse_args(argv)
    if not os.path.isdir(arguments.root):
        raise NotFoundError(f"{arguments.root} is no directory; make it, with a folder a bucket")
    secret = "test-secret"  # noqa: S105 a test server's public default
    if arguments.secret_variable:
        secret = os.environ.get(arguments.secret_variable, "")
        if not secret:
            raise ConfigError(f"the environment variable {arguments.secret_variable} is not set")
    scenario = read_scenario(arguments.scenario) if arguments.scenario else {}
    if arguments.first_byte_ms is not None:
        scenario["first_byte_ms"] = arguments.first_byte_ms
    if arguments.mb_per_s is not None:
        scenario["mb_per_s_per_connection"] = arguments.mb_per_s
    config = StandinConfig(
        root=arguments.root,
        host=arguments.host,
        port=arguments.port,
        region=arguments.region,
        keys=(AccessKey(arguments.key, secret),),
        public_buckets=tuple(arguments.public),
        scenario=scenario,
        tls_certificate=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )
    uvloop.run(
        serve(
            config,
            prepare=arguments.prepare,
            lifeline=arguments.lifeline,
            ready_fd=arguments.ready_fd,
        )
    )
    return 0


async def serve(config: StandinConfig, *, prepare: bool, lifeline: bool, ready_fd: int = 1) -> None:
    """Run until told to end; says on `ready_fd` how to reach it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    standin = Standin(config)
    if prepare:
        standin.service.buckets.prepare()
    await standin.start()
    try:
        if lifeline:
            loop.add_reader(sys.stdin.fileno(), _until_end, sys.stdin.fileno(), stop)
        key = config.keys[0]
        ready = {
            "endpoint": standin.endpoint, "port": standin.port, "control": standin.plain_endpoint,
            "region": config.region,
            "key": key.key, "secret": key.secret,
        }  # fmt: skip
        os.write(ready_fd, json.dumps(ready).encode() + b"\n")
        await stop.wait()
    finally:
        await standin.stop()


def _until_end(descriptor: int, stop: asyncio.Event) -> None:
    if not os.read(descriptor, 4096):
        asyncio.get_running_loop().remove_reader(descriptor)
        stop.set()
