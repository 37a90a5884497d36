"""``cachebench engine``: right bytes, honest clocks, clear words, nothing left behind."""

import asyncio
import json
import os
import shutil
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpufeed.bench.cli import main
from gpufeed.bench.engine import nginx, objects, registry, runner, worker
from gpufeed.bench.engine.clients import BufferClient, Setting
from gpufeed.bench.engine.lateness import TimerLateness
from gpufeed.bench.engine.objects import BUCKET, Source, StoredObject
from gpufeed.bench.progress import Silent
from gpufeed.cachefs.checksum import crc64
from gpufeed.cachefs.errors import IntegrityError, OperatorError, UsageError
from gpufeed.cachefs.tarscan import TarIndexer
from gpufeed.cachefs.units import MIB

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path=nginx.SEARCH_PATH) is None, reason="nginx is not installed"
)
SIZE = 3 * MIB


def no_cpu_pair():
    return len(os.sched_getaffinity(0)) < 2


@pytest.fixture
def made(tmp_path):
    return tuple(objects.make_objects(tmp_path / "objects", SIZE, seed=1))


# --- objects ----------------------------------------------------------------------------------


def test_objects_are_different_tars_whose_checksums_are_told(tmp_path, made):
    paths = sorted((tmp_path / "objects" / BUCKET).iterdir())
    assert [path.name for path in paths] == [item.key for item in made]
    for path, item in zip(paths, made, strict=True):
        data = path.read_bytes()
        assert (len(data), crc64(data)) == (item.size_bytes, item.crc64)
        indexer = TarIndexer(item.key)
        indexer.feed(memoryview(data))
        indexer.finish()
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == indexer.sample_count > 1
    assert len({item.crc64 for item in made}) == len(made) == 2


def test_the_same_seed_makes_the_same_objects(tmp_path, made):
    again = tuple(objects.make_objects(tmp_path / "again", SIZE, seed=1))
    other = tuple(objects.make_objects(tmp_path / "other", SIZE, seed=2))

    assert again == made
    assert not {item.crc64 for item in other} & {item.crc64 for item in made}


def test_the_size_is_of_the_measured_objects():
    assert objects.object_count(MIB) == 1
    assert objects.object_count(64 * MIB) == 1
    assert objects.object_count(64 * MIB + 1) == 2
    with pytest.raises(UsageError, match=r"--size is 1 KiB; it must be from 1 MiB"):
        objects.object_count(1024)


# --- clients ----------------------------------------------------------------------------------


class FakeClient(BufferClient):
    """Receives from a dictionary; `spoil` may change what arrives."""

    data: dict

    def connect(self):
        self.spoil = lambda part: None

    def disconnect(self):
        pass

    def run(self, parts):
        for part in parts:
            part.target[:] = self.data[part.item.key][part.begin_bytes : part.end_bytes]
            self.spoil(part)


@pytest.fixture
def fake(tmp_path, made):
    FakeClient.data = {
        item.key: (tmp_path / "objects" / BUCKET / item.key).read_bytes() for item in made
    }
    source = Source(endpoint="http://127.0.0.1:1", objects=made)
    client = FakeClient(
        Setting(
            source=source,
            part_bytes=MIB,
            connections=2,
            origin_threads=0,
            directory=str(tmp_path),
            socket_path=str(tmp_path / "s"),
        )
    )
    client.open()
    yield client
    client.close()


def test_a_measured_pass_counts_each_byte_once_and_leaves_the_warm_up_out(fake):
    laps = []
    run = worker.measure(fake, os.getpid(), laps.append)

    assert run.bytes == sum(item.size_bytes for item in fake.setting.source.measured)
    assert laps == [run.bytes]
    assert run.wall_s > 0
    assert run.server_s is not None  # of this very process, here


def test_a_byte_that_differs_is_an_error(fake):
    def spoil(part):
        if part.begin_bytes:
            part.target[7] ^= 1

    fake.spoil = spoil
    with pytest.raises(IntegrityError, match="not to be trusted"):
        worker.measure(fake, os.getpid(), lambda _: None)


def test_bytes_of_the_lap_before_cannot_pass_for_new_ones(fake):
    lap = fake.setting.source.measured
    fake.receive(lap)
    fake.check(lap)
    with pytest.raises(IntegrityError):
        fake.check(lap)


def test_a_spec_comes_back_as_it_was_written(tmp_path, fake):
    spec = worker.Spec(engine="raw", setting=fake.setting, cpus=(0, 1), server_pid=7)
    worker.write_spec(spec, tmp_path / "spec.json")

    assert worker.read_spec(tmp_path / "spec.json") == spec


def test_the_cpu_of_a_process_that_is_gone_is_unknown():
    assert worker.thread_cpu_s(2**22 + 1) is None


def test_lateness_sees_a_loop_that_is_held_up():
    async def hold_up():
        lateness = TimerLateness()
        lateness.start()
        seen = asyncio.get_running_loop().create_future()
        # Behind the first timer, which is due while the loop is busy here.
        asyncio.get_running_loop().call_later(0.012, seen.set_result, None)
        busy_until = time.monotonic() + 0.1
        while time.monotonic() < busy_until:
            pass
        await seen
        lateness.stop()
        return lateness.milliseconds()

    assert 85 <= asyncio.run(hold_up())["lateness_ms_max"] < 10_000
    assert TimerLateness().milliseconds() == {}


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "curl"], "there is no engine 'curl'; there are raw, gpufeed"),
        (["--engines", ","], "names nobody"),
        (["--size", "1TB", "--repeats", "0"], "--repeats is 0; it must be 1 to 100"),
        (["--part", "1KiB"], "--part is 1024"),
        (["--size", "many"], "'many' is not a size"),
        (["--engines", "raw,gpufeed", "--check"], "--check compares aiohttp, gpufeed-fill too"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, capsys, words, message):
    assert main(["engine", "--work-dir", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_server_and_engine_have_cpus_of_their_own():
    assert runner.Cpus.choose([3, 5, 8], 1) == runner.Cpus((3,), (5,))
    assert runner.Cpus.choose([3, 5, 8], 2) == runner.Cpus((3,), (5, 8))
    assert runner.Cpus.choose([4], 1) == runner.Cpus((4,), (4,))
    with pytest.raises(UsageError, match="of 2 CPUs one is the server's"):
        runner.Cpus.choose([0, 1], 2)


def test_without_nginx_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nginx, "SEARCH_PATH", str(tmp_path))
    assert main(["engine", "--work-dir", str(tmp_path / "work")]) == 3
    assert "`./run deps` installs it" in capsys.readouterr().err
    with pytest.raises(OperatorError):
        nginx.find_nginx()


def test_an_engine_that_is_not_installed_is_told_by_name():
    kind = replace(registry.KINDS["obstore"], module="no_such_module_of_this_name")
    assert "no_such_module_of_this_name is not installed" in (kind.missing() or "")
    assert registry.KINDS["raw"].missing() is None


def test_every_engine_s_class_is_where_the_registry_says():
    for name, kind in registry.KINDS.items():
        assert callable(kind.load()), name


# --- the server -------------------------------------------------------------------------------


def test_the_configuration_names_each_object_under_both_styles():
    items = [StoredObject(key="a.tar", size_bytes=3, crc64=17)]
    text = nginx.configuration(Path("/where"), items, 4711)

    assert f"/{BUCKET}/a.tar 17;" in text
    assert "        /a.tar 17;" in text
    assert "listen 127.0.0.1:4711" in text
    assert "0.0.0.0" not in text


# --- whole runs -------------------------------------------------------------------------------


@needs_nginx
@pytest.mark.usefixtures("no_process_left")
def test_a_run_measures_checks_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(
        registry.KINDS,
        "absent",
        replace(registry.KINDS["raw"], module="no_such_module_of_this_name"),
    )
    disk = tmp_path / "disk"
    options = runner.EngineOptions(
        work_dir=tmp_path / "work",
        names=("raw", "gpufeed", "gpufeed-fill", "absent"),
        size_bytes=SIZE,
        repeats=1,
        part_bytes=MIB,
        connections=3,
        directory=disk,
    )
    result = runner.run(options, Silent())

    rows = {row["engine"]: row for row in result["rows"]}
    assert list(rows) == ["raw", "gpufeed", "gpufeed-fill"]
    assert [entry["engine"] for entry in result["skipped"]] == ["absent"]
    assert len(result["targets"]) == 2
    assert result["server_version"].startswith("nginx/")
    for row in rows.values():
        assert row["repeats"] == 1
        assert row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
        assert row["cpu_s_per_gb"] > 0
    assert not list(disk.iterdir())
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".lock"]


@needs_nginx
@pytest.mark.slow
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("name", [name for name in registry.KINDS if "gpufeed" not in name])
def test_every_library_receives_the_right_bytes_from_nginx(tmp_path, name):
    if reason := registry.KINDS[name].missing():
        pytest.skip(f"{name}: {reason}")
    options = runner.EngineOptions(
        work_dir=tmp_path, names=(name,), size_bytes=5 * MIB, repeats=1, part_bytes=2 * MIB
    )
    (row,) = runner.run(options, Silent())["rows"]

    assert row["engine"] == name
    assert row["cpu_s_per_gb"] > 0


@needs_nginx
@pytest.mark.usefixtures("no_process_left")
def test_the_command_writes_the_result_and_judges_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "engine.json"
    words = ["engine", "--work-dir", str(tmp_path / "work"), "--engines", "raw,aiohttp,gpufeed"]
    words += ["--size", "2MiB", "--repeats", "1", "--json", str(path)]
    assert main(words) == 0

    result = json.loads(path.read_text())
    assert [row["engine"] for row in result["rows"]] == ["raw", "aiohttp", "gpufeed"]
    assert "CPU of gpufeed <= 0.5 x aiohttp" in capsys.readouterr().out


@needs_nginx
@pytest.mark.usefixtures("no_process_left")
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path):
    work = tmp_path / "work"
    command = [sys.executable, "-m", "gpufeed.bench.cli", "engine", "--work-dir", str(work)]
    command += ["--engines", "raw", "--repeats", "100", "--size", "4MiB", "--dir", str(tmp_path)]
    ended = interrupted_after(command, "raw, round 2", log=tmp_path / "log")

    assert ended == 130
    assert [path.name for path in work.iterdir()] == [".lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "work"]


def interrupted_after(command, words, *, log):
    """Run until a line of standard error has `words`, send SIGINT, return the status."""
    import signal
    import subprocess

    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            file.write(line.encode())
            if words in line:
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=60)
        return process.returncode
