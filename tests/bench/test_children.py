"""Children speak JSON lines, fail with their own words, and never outlive their family."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpufeed.bench import keeper
from gpufeed.bench.children import Family, read_ready_line, stream
from gpufeed.cachefs.errors import CapacityError, WorkerError

pytestmark = pytest.mark.usefixtures("no_process_left")

SILENCE_S = 60.0
# Says its process ids, starts a grandchild in a session of its own, ignores SIGTERM, and waits.
STUBBORN = """
import json, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", sys.argv[1]],
                         start_new_session=True)
print(json.dumps({"type": "up", "pids": [os.getpid(), child.pid]}), flush=True)
signal.pause()
"""


def say(*messages, status=0, log=""):
    lines = "\n".join(json.dumps(message) for message in messages)
    code = f"import sys; print({lines!r}); print({log!r}, file=sys.stderr); sys.exit({status})"
    return [sys.executable, "-c", code]


@pytest.fixture
def family(tmp_path):
    with Family(tmp_path) as made:
        yield made


@pytest.fixture
def quick_grace(monkeypatch):
    """Keepers that wait a tenth of a second before they kill."""
    source = Path(keeper.__file__).read_text().replace("GRACE_S = 5.0", "GRACE_S = 0.1")
    assert "GRACE_S = 0.1" in source

    def use(path):
        path.write_text(source)
        monkeypatch.setattr(keeper, "__file__", str(path))

    return use


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_messages_of_several_children_all_arrive(family):
    children = [
        family.start(f"c{number}", say({"type": "x", "n": number}, {"type": "y", "n": number}))
        for number in range(3)
    ]
    got = sorted(
        (message["n"], message["type"]) for _, message in stream(children, silence_s=SILENCE_S)
    )
    assert got == [(number, kind) for number in range(3) for kind in "xy"]


def test_a_reported_error_is_raised_as_its_class(family):
    child = family.start(
        "c", say({"type": "error", "class": "CapacityError", "message": "too small"}, status=3)
    )
    with pytest.raises(CapacityError, match="c: too small"):
        list(stream([child], silence_s=SILENCE_S))


def test_an_error_class_that_we_do_not_know_is_a_worker_error(family):
    child = family.start("c", say({"type": "error", "class": "os", "message": "odd"}, status=1))
    with pytest.raises(WorkerError, match="odd"):
        list(stream([child], silence_s=SILENCE_S))


def test_a_child_that_dies_is_reported_with_the_end_of_its_log(family):
    child = family.start("c", say({"type": "x"}, status=7, log="the reason"))
    with pytest.raises(WorkerError, match=r"status 7(.|\n)*the reason"):
        list(stream([child], silence_s=SILENCE_S))


def test_a_child_killed_by_a_signal_has_a_shell_like_status(family):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    child = family.start("c", [sys.executable, "-c", code])
    with pytest.raises(WorkerError, match="status 137"):
        list(stream([child], silence_s=SILENCE_S))


def test_a_line_that_is_not_json_is_an_error(family):
    child = family.start("c", [sys.executable, "-c", "print('hello')"])
    with pytest.raises(WorkerError, match="not a JSON line"):
        list(stream([child], silence_s=SILENCE_S))


def test_a_silent_child_is_given_up(family):
    pause = family.start("p", [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(WorkerError, match="no sign of life"):
        list(stream([pause], silence_s=0.2))


def test_a_command_that_does_not_exist_is_reported(family):
    child = family.start("c", ["/nonexistent/command"])
    with pytest.raises(WorkerError, match="status 127"):
        list(stream([child], silence_s=SILENCE_S))


def test_closing_ends_a_child_that_ignores_signals_and_its_escaped_grandchild(
    tmp_path, quick_grace
):
    quick_grace(tmp_path / "keeper.py")
    with Family(tmp_path) as family:
        child = family.start("c", [sys.executable, "-c", STUBBORN, str(tmp_path)])
        messages = stream([child], silence_s=SILENCE_S)
        pids = next(messages)[1]["pids"]
    assert all(gone(pid) for pid in pids)
    assert gone(child.keeper_pid)


def test_a_helper_that_left_the_group_may_finish_what_it_does_at_the_end(tmp_path):
    # As torch's keeper of shared memory: it tidies when its client's pipe closes.
    helper = f"import os; os.read(0, 1); open({str(tmp_path / 'tidied')!r}, 'w').close()"
    code = (
        "import json, subprocess, sys, signal\n"
        f"subprocess.Popen([sys.executable, '-c', {helper!r}], stdin=subprocess.PIPE,"
        " start_new_session=True)\n"
        "print(json.dumps({'type': 'up'}), flush=True)\n"
        "signal.pause()"
    )
    with Family(tmp_path) as family:
        child = family.start("c", [sys.executable, "-c", code])
        next(stream([child], silence_s=SILENCE_S))
    assert (tmp_path / "tidied").exists()


def test_killing_the_bench_itself_ends_everything_below_it(tmp_path, quick_grace):
    quick_grace(tmp_path / "keeper.py")
    code = f"""
import sys
from pathlib import Path
from gpufeed.bench import keeper
keeper.__file__ = {str(tmp_path / "keeper.py")!r}
from gpufeed.bench.children import Family, stream
family = Family(Path({str(tmp_path)!r}))
child = family.start("c", [sys.executable, "-c", {STUBBORN!r}, {str(tmp_path)!r}])
pids = next(stream([child], silence_s={SILENCE_S}))[1]["pids"]
print(*pids, child.keeper_pid, flush=True)
import signal; signal.pause()
"""
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in bench.stdout.readline().split()]
    # The keeper is not our child: a descriptor of it tells when it has gone.
    watch = os.pidfd_open(pids[-1])
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    assert select.select([watch], [], [], SILENCE_S)[0]
    os.close(watch)
    assert all(gone(pid) for pid in pids[:-1])


def test_a_service_says_that_it_is_ready(family):
    read_fd, write_fd = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'{\"pid\": 5}\\n'); print('to the log')"
    child = family.start(
        "s", [sys.executable, "-c", code, str(write_fd)], pass_fds=(write_fd,), service=True
    )
    os.close(write_fd)
    assert read_ready_line(child, read_fd, timeout_s=SILENCE_S) == {"pid": 5}
    child.wait()
    assert "to the log" in child.log_tail()
    os.close(read_fd)


def test_a_service_that_ends_before_it_is_ready_shows_its_log(family):
    read_fd, write_fd = os.pipe()
    child = family.start("s", say(status=3, log="port in use"), pass_fds=(write_fd,), service=True)
    os.close(write_fd)
    with pytest.raises(WorkerError, match="port in use"):
        read_ready_line(child, read_fd, timeout_s=SILENCE_S)
    os.close(read_fd)
