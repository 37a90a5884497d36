"""What `gpufeed daemon` and `gpufeed config check` refuse, and what only the second tries."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.daemon import configcommand, supervisor
from gpufeed.daemon.config import KEYS, load_settings
from gpufeed.daemon.listen import listening
from gpufeed.daemon.startchecks import require_startable

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYED = {"GPUFEED_ORIGIN_KEY": "k", "GPUFEED_ORIGIN_SECRET": "s"}


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Sets the environment to these variables, and a directory of our own."""
    for name in os.environ:
        if name.startswith(("GPUFEED_", "OSS_", "ALIBABA_CLOUD_")):
            monkeypatch.delenv(name)

    def set_to(**environ: str) -> None:
        ours = {
            "GPUFEED_STORE_PATH": str(tmp_path / "cache"), "GPUFEED_DAEMON_HTTP_PORT": "-1",
            "GPUFEED_DAEMON_SOCKET_PATH": str(tmp_path / "s"), "GPUFEED_ARENA_SIZE_BYTES": "64MiB",
        }  # fmt: skip
        for name, value in (ours | environ).items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


WRONG = [
    ({**KEYED, "OSS_ENDPOINT": "https://store.example"}, r"origin.region is not set.*OSS_ENDPOINT"),
    ({"OSS_ENDPOINT": "ftp://x"}, r"origin.endpoint is 'ftp://x'.*OSS_ENDPOINT"),
    ({"OSS_ENDPOINT": "h/path"}, "is no address"),
    ({"GPUFEED_ORIGIN_CREDENTIALS": "env"}, "credentials is env, but neither"),
    ({"GPUFEED_ORIGIN_CREDENTIALS": "uri"}, "CREDENTIALS_URI is not set"),
    ({"GPUFEED_ORIGIN_CREDENTIALS": "rrsa"}, "credentials is rrsa, but .*ROLE_ARN"),
    ({"GPUFEED_ORIGIN_CA_FILE": "/nonexistent.pem"}, "ca_file /nonexistent.pem is no file"),
    ({"GPUFEED_ORIGIN_CA_FILE": __file__}, "is no file with PEM certificates"),
    ({"GPUFEED_ARENA_SIZE_BYTES": "900TiB"}, "arena.size_bytes is 900 TiB .*more than"),
    ({"GPUFEED_POLICY_QUOTAS": "oss://b/=9"}, "policy.quotas: oss://b/ has 9 B .*least 1 MiB"),
]


@pytest.mark.parametrize(("environ", "message"), WRONG, ids=lambda value: str(value)[:50])
def test_what_cannot_work_is_refused_by_the_daemon_and_the_check(told, capsys, environ, message):
    told(**environ)
    with pytest.raises(ConfigError, match=message):
        supervisor.command([])
    assert configcommand.command(["check"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "environ",
    [
        {**KEYED, "OSS_ENDPOINT": "https://store.example", "OSS_REGION": "cn-hangzhou"},
        {**KEYED, "OSS_ENDPOINT": "oss-cn-hangzhou-internal.aliyuncs.com"},
        {"OSS_ENDPOINT": "https://store.example", "GPUFEED_ORIGIN_CREDENTIALS": "anonymous"},
        {**KEYED, "OSS_ENDPOINT": "https://store.example/s3", "GPUFEED_DAEMON_ALLOW": "s3://"},
    ],
    ids=str,
)
def test_what_can_work_is_not(told, environ):
    told(**environ)
    require_startable(load_settings())


def test_check_says_what_is_taken_and_leaves_nothing(told, tmp_path, capsys):
    assert configcommand.command(["check"]) == 0
    assert list(tmp_path.iterdir()) == []
    directory = CacheDirectory(str(tmp_path / "cache"), DiskFiles())
    directory.open()
    with socket.create_server(("127.0.0.1", 0)) as server, listening(str(tmp_path / "s")):
        before = sorted(tmp_path.rglob("*"))
        port = str(server.getsockname()[1])
        assert configcommand.command(["check", "--http-port", port]) == 3
        assert sorted(tmp_path.rglob("*")) == before
    directory.close()
    errors = capsys.readouterr().err
    assert "another gpufeed daemon uses the cache directory" in errors
    assert "another gpufeed daemon listens at" in errors
    assert f"cannot listen on http://127.0.0.1:{port}" in errors
    assert configcommand.command(["check", "--http-port", port]) == 0


def test_a_directory_that_cannot_be_made_is_found_by_trying(told, capsys):
    assert configcommand.command(["check", "--cache-path", "/proc/nowhere"]) == 2
    assert "store.path /proc/nowhere cannot be written" in capsys.readouterr().err


def test_check_notes_what_may_surprise(told, capsys):
    told(GPUFEED_POLICY_PINS="oss://bkt-one", GPUFEED_POLICY_QUOTAS="oss://two/=1GB")
    assert configcommand.command(["check", "--capacity", "900000TB"]) == 0
    out = capsys.readouterr().out
    assert "note: policy.pins: oss://bkt-one also covers oss://bkt-one-private" in out
    assert "policy.quotas" not in out
    assert "its filesystem has" in out


def test_every_setting_is_in_the_tables_of_the_documentation():
    found, section = set(), ""
    for line in DOCS.read_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# []")
        elif line.startswith("| `") and section in {key.section for key in KEYS.values()}:
            names = re.findall(r"`(\w+)`", line.split("|")[1])
            found |= {f"{section}.{name}" for name in names}
    assert found == set(KEYS)
