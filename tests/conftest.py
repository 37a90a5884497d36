"""For every test: no process, socket or scratch file of gpufeed is left behind.

The tests have a runtime directory and a temporary directory of their own, so that a daemon or a
demo that happens to run on the machine is neither used nor blamed.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import trustme
from hypothesis import settings

from gpufeed.cachefs.testing.seaweed import Seaweed

CHILD_END_TIMEOUT_S = 5.0
# Helpers of Python's own that live as long as the interpreter.
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Next to a socket these stay by design: removing a lock would break it, a log is there to be read.
LASTING_SUFFIXES = (".lock", ".start", ".log")
SCRATCH = ("gpufeed*", "gpufeed/*", "cachebench*")

# A continuous integration that fails must fail again: the same examples each time there.
settings.register_profile("ci", derandomize=True)
settings.register_profile("dev")
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True, scope="session")
def own_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path, because a socket's has 107 bytes; and no settings from outside."""
    tmp_path_factory.getbasetemp()  # settled before TMPDIR changes, for children
    place = tempfile.mkdtemp(prefix="gt-")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GPUFEED_", "OSS_", "ALIBABA_CLOUD_")):
                patch.delenv(name)
        # Nobody but the tests of it asks the address at which a cloud's machines find theirs.
        patch.setenv("ALIBABA_CLOUD_ECS_METADATA_DISABLED", "true")
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("TMPDIR", place)
        yield Path(place)
    shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: an authority, and a certificate of its for this machine."""

    authority: str
    certificate: str
    key: str


def make_tls_files(folder: Path, *names: str) -> TlsFiles:
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    paths = [str(folder / name) for name in ("authority.pem", "certificate.pem", "key.pem")]
    authority.cert_pem.write_to_path(paths[0])
    for i, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(paths[1], append=i > 0)
    issued.private_key_pem.write_to_path(paths[2])
    return TlsFiles(*paths)


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Of this machine, by its names on loopback."""
    return make_tls_files(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture(scope="session")
def other_tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Of another machine, by another authority."""
    return make_tls_files(tmp_path_factory.mktemp("tls"), "elsewhere.example")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server, for all tests that need one."""
    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing(own_place: Path) -> Iterator[None]:
    """Fail a test that leaves a child process, a socket or a scratch file."""
    children_before = _children()
    files_before = _files(own_place)
    yield
    if left := _children() - children_before:
        _end(left)
    files = _files(own_place) - files_before
    assert not files, f"the test left files: {sorted(files)}"


def _children() -> set[int]:
    """Child processes of every thread; one small read each, as this runs twice a test."""
    found: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        try:
            found.update(map(int, Path(path).read_text().split()))
        except OSError:  # the thread ended
            continue
    return found


def _end(pids: set[int]) -> None:
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            line = " ".join(process.cmdline())
        except psutil.Error:  # it ended
            continue
        if not any(name in line for name in LASTING_CHILDREN):
            processes.append((process, line))
    # One that was told to end may still be at it.
    _, alive = psutil.wait_procs([p for p, _ in processes], timeout=CHILD_END_TIMEOUT_S)
    described = [f"{process.pid} {line}" for process, line in processes if process in alive]
    for process in alive:
        process.kill()
    assert not described, f"the test left processes: {described}"


def _files(place: Path) -> set[str]:
    return {
        path
        for path in (p for name in SCRATCH for p in glob.glob(f"{place}/{name}"))
        if not path.endswith((*LASTING_SUFFIXES, "/gpufeed"))
    }
