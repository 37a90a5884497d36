"""The stand-in over real sockets: addressing, answers, shaping, and each fault as seen."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fastcrc
import oss2
import pytest

from gpufeed.cachefs.errors import ConfigError, OperatorError
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.testing.standin.config import AccessKey, StandinConfig
from gpufeed.cachefs.testing.standin.process import StandinProcess
from gpufeed.cachefs.testing.standin.server import Standin

DATA = bytes(range(256)) * 4096  # 1 MiB
HOST = f"{BUCKET}.oss-cn-hangzhou-internal.aliyuncs.com"
TIMEOUT_S = 20.0


@pytest.fixture
def standin(oss_standin_factory: Callable[..., StandinProcess]) -> StandinProcess:
    """Its bucket may be read unsigned, which keeps these tests about the wire."""
    standin = oss_standin_factory(public_buckets=(BUCKET,))
    (Path(standin.root) / BUCKET / "k.bin").write_bytes(DATA)
    return standin


@contextmanager
def connected(standin: StandinProcess) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", standin.port, timeout=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


def get(
    standin: StandinProcess, key: str = "k.bin", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    with connected(standin) as connection:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/{key}", headers={"Host": HOST, **names})
        answer = connection.getresponse()
        return answer, answer.read()


def raw(standin: StandinProcess, text: str) -> tuple[bytes, OSError | None]:
    """Send `text` and read until the server ends the connection, and how it ended it."""
    with socket.create_connection(("127.0.0.1", standin.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(text.encode())
        return drain(sock)


def drain(sock: socket.socket) -> tuple[bytes, OSError | None]:
    received = bytearray()
    try:
        while piece := sock.recv(1 << 20):
            received += piece
    except ConnectionResetError as error:
        return bytes(received), error
    return bytes(received), None


def asked(target: str = "/k.bin", *more: str, close: bool = False) -> str:
    lines = [f"GET {target} HTTP/1.1", f"Host: {HOST}", *more]
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines) + "\r\n\r\n"


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def wait_for_requests(standin: StandinProcess, count: int) -> None:
    """Counted means looked up: the answer now waits for its first byte."""
    for _ in range(1000):
        if standin.counters()["requests"] >= count:
            return
    raise AssertionError(f"fewer than {count} requests arrived")


# --- answers -------------------------------------------------------------------------------------


def test_an_object_comes_with_the_headers_of_oss(standin: StandinProcess) -> None:
    answer, body = get(standin)

    assert (answer.status, body) == (200, DATA)
    assert answer.headers["ETag"] == f'"{hashlib.md5(DATA).hexdigest().upper()}"'
    assert answer.headers["x-oss-hash-crc64ecma"] == str(fastcrc.crc64.xz(DATA))
    assert answer.headers["Server"] == "AliyunOSS"
    assert answer.headers["x-oss-object-type"] == "Normal"
    assert answer.headers["x-oss-storage-class"] == "Standard"
    assert re.fullmatch("[0-9A-F]{24}", answer.headers["x-oss-request-id"])
    for name in ("Date", "Last-Modified", "x-oss-server-time"):
        assert answer.headers[name], name


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, 1000), (0, len(DATA)), (300_000, 900_001)])
def test_a_range_comes_as_206_with_the_checksum_of_the_whole(
    standin: StandinProcess, begin: int, end: int
) -> None:
    answer, body = get(standin, Range=f"bytes={begin}-{end - 1}")

    assert (answer.status, body) == (206, DATA[begin:end])
    assert answer.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{len(DATA)}"
    assert answer.headers["x-oss-hash-crc64ecma"] == str(fastcrc.crc64.xz(DATA))


def test_out_of_bounds_depends_on_the_range_behaviour(standin: StandinProcess) -> None:
    wanted = f"bytes=10-{len(DATA)}"
    whole, body = get(standin, Range=wanted)
    assert (whole.status, whole.headers["Content-Range"], body) == (200, None, DATA)
    clipped, body = get(standin, Range=wanted, x_oss_range_behavior="standard")
    assert (clipped.status, body) == (206, DATA[10:])
    beyond = {"Range": f"bytes={len(DATA)}-", "x-oss-range-behavior": "standard"}
    answer, body = get(standin, **beyond)
    assert (answer.status, ET.fromstring(body).findtext("Code")) == (416, "InvalidRange")


def test_an_error_has_oss_xml_and_a_head_has_it_in_a_header(standin: StandinProcess) -> None:
    answer, body = get(standin, "none")
    error = ET.fromstring(body)
    assert (answer.status, error.findtext("Code")) == (404, "NoSuchKey")
    assert error.findtext("RequestId") == answer.headers["x-oss-request-id"]
    assert error.findtext("EC") == answer.headers["x-oss-ec"] == "0026-00000001"

    answer, body = get(standin, "none", "HEAD")
    assert (answer.status, body) == (404, b"")
    hidden = ET.fromstring(base64.b64decode(answer.headers["x-oss-err"]))
    assert hidden.findtext("Code") == "NoSuchKey"
    assert hidden.findtext("RequestId") == answer.headers["x-oss-request-id"]


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("/k.bin", HOST),
        ("/k.bin", f"{BUCKET}.anything.example:80"),
        (f"/{BUCKET}/k.bin", "127.0.0.1:1234"),
        (f"/{BUCKET}/k.bin", "localhost"),
        (f"http://{HOST}/k.bin", "ignored.example"),
        (f"http://127.0.0.1:1/{BUCKET}/k.bin", "ignored.example"),
    ],
)
def test_a_bucket_is_found_in_host_path_and_proxy_target(
    standin: StandinProcess, target: str, host: str
) -> None:
    request = f"HEAD {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer, _ = raw(standin, request)
    assert answer.startswith(b"HTTP/1.1 200 "), answer


def test_path_style_on_a_real_endpoint_is_forbidden(standin: StandinProcess) -> None:
    answer, body = get(standin, f"{BUCKET}/k.bin", Host="oss-cn-hangzhou.aliyuncs.com")
    assert answer.status == 403
    assert ET.fromstring(body).findtext("Code") == "SecondLevelDomainForbidden"


@pytest.mark.parametrize("key", ["../../secret", "%2e%2e/%2e%2e/secret", "..%2f..%2fsecret"])
def test_no_key_leads_out_of_its_bucket(standin: StandinProcess, key: str) -> None:
    (Path(standin.root).parent / "secret").write_text("not for you")
    answer, body = get(standin, key)
    assert (answer.status, b"not for you" in body) == (404, False)


def test_pipelined_requests_are_answered_in_their_order(standin: StandinProcess) -> None:
    requests = [asked("/k.bin", f"Range: bytes={n}-{n}", close=n == 9) for n in range(10)]
    answer, error = raw(standin, "".join(requests))

    assert error is None
    assert [int(n) for n in re.findall(rb"Content-Range: bytes (\d+)-", answer)] == list(range(10))


def test_counters_count_requests_and_bytes_and_not_themselves(standin: StandinProcess) -> None:
    get(standin)
    get(standin, Range="bytes=0-9")
    get(standin, method="HEAD")
    expected = {"requests": 3, "bytes": len(DATA) + 10}

    for _ in range(2):
        counters = standin.counters()
        assert counters["by_key"] == {f"{BUCKET}/k.bin": expected}
        assert (counters["requests"], counters["bytes"]) == (3, len(DATA) + 10)
        assert counters["requests_by_kind"] == {"get": 2, "head": 1}
    standin.reset()
    assert standin.counters()["requests"] == 0


def test_a_malformed_request_does_not_disturb_others(standin: StandinProcess) -> None:
    raw(standin, "no http at all\r\n\r\n")
    for target in ("/k.bin?partNumber=x&uploadId=1", "/?x-oss-signature-version=a&x-oss-expires=b"):
        answer, _ = raw(standin, asked(target, close=True))
        assert answer.startswith(b"HTTP/1.1 4"), answer
    assert get(standin)[1] == DATA


def test_what_the_server_did_not_foresee_is_an_answer_and_not_silence(
    standin: StandinProcess,
) -> None:
    far = "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"
    assert get(standin, If_Modified_Since=far)[0].status == 200
    assert get(standin, Authorization="OSS test-key:x", Date=far)[0].status == 403
    (Path(standin.root) / BUCKET / "loop").symlink_to("loop")
    answer, body = get(standin, "loop")
    assert (answer.status, ET.fromstring(body).findtext("Code")) == (500, "InternalError")


def test_a_malformed_scenario_is_refused_and_the_old_one_stays(standin: StandinProcess) -> None:
    standin.set_scenario({"faults": [{"status": 503}]})
    for malformed in ({"fault": []}, {"faults": [{"every": 0}]}, {"seed": "x"}, []):
        with pytest.raises(ConfigError, match="scenario"):
            standin.set_scenario(malformed)
    assert get(standin)[0].status == 503


def test_a_mistake_of_the_server_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    (tmp_path / BUCKET).mkdir()
    (tmp_path / BUCKET / "k.bin").write_bytes(DATA)
    noted: list[BaseException] = []

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked(close=True).encode())
        answer = await asyncio.wait_for(reader.read(-1), TIMEOUT_S)
        writer.close()
        await writer.wait_closed()
        return answer

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noted.append(context["exception"]))
        standin = Standin(StandinConfig(root=str(tmp_path), public_buckets=(BUCKET,)))
        await standin.start()
        works, standin.service.handle = standin.service.handle, {}.__getitem__  # type: ignore[method-assign,assignment]
        assert await ask(standin.port) == b""
        standin.service.handle = works  # type: ignore[method-assign]
        assert body_of(await ask(standin.port)) == DATA
        await standin.stop()

    asyncio.run(run())
    assert [type(error) for error in noted] == [TypeError]


def test_a_client_that_pipelines_without_end_is_cut_off(standin: StandinProcess) -> None:
    standin.set_scenario({"first_byte_ms": 50})
    answer, _ = raw(standin, asked() * 1000)
    assert answer == b""
    assert get(standin)[1] == DATA


# --- the object changes --------------------------------------------------------------------------


def test_an_object_replaced_before_its_first_byte_is_still_of_one_version(
    standin: StandinProcess,
) -> None:
    """The version is fixed when a request arrives, however late the answer leaves."""
    path = Path(standin.root) / BUCKET / "k.bin"
    get(standin)
    standin.set_scenario({"first_byte_ms": 300})
    with connected(standin) as connection:
        connection.request("GET", "/k.bin", headers={"Host": HOST})
        wait_for_requests(standin, 2)
        new = path.with_suffix(".new")
        new.write_bytes(b"another" * 10)
        new.rename(path)
        answer = connection.getresponse()
        body = answer.read()

    assert answer.headers["ETag"] == f'"{hashlib.md5(body).hexdigest().upper()}"'
    standin.set_scenario({})
    assert get(standin)[1] == b"another" * 10


def test_a_file_cut_short_under_an_answer_breaks_that_connection_only(
    standin: StandinProcess,
) -> None:
    path = Path(standin.root) / BUCKET / "k.bin"
    for size in (len(DATA), 100_000):
        path.write_bytes(DATA[:size])
        get(standin)
        standin.reset()
        standin.set_scenario({"first_byte_ms": 300})
        with connected(standin) as connection:
            connection.request("GET", "/k.bin", headers={"Host": HOST})
            wait_for_requests(standin, 1)
            os.truncate(path, 1000)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                connection.getresponse().read()
        standin.set_scenario({})
        assert get(standin)[1] == DATA[:1000]


# --- shaping -------------------------------------------------------------------------------------


def paced(standin: StandinProcess, **headers: str) -> int:
    """The pacing that the kernel was told for one answer's connection."""
    with connected(standin) as connection:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", "/k.bin", headers={"Host": HOST, **names})
        connection.getresponse().read()
        assert connection.sock is not None
        port = connection.sock.getsockname()[1]
        found = subprocess.run(
            ["ss", "-tin", f"sport = :{standin.port} and dport = :{port}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        rate = re.search(r"pacing_rate (\d+)bps(?:/(\d+)bps)?", found)
        assert rate is not None, found
        return int(rate.group(2) or 0) // 8


def test_the_kernel_paces_a_connection_by_the_lower_of_scenario_and_traffic_limit(
    standin: StandinProcess,
) -> None:
    assert paced(standin, x_oss_traffic_limit="81920000") == 10_240_000
    standin.set_scenario({"mb_per_s_per_connection": 80})
    assert paced(standin) == 80_000_000
    assert paced(standin, x_oss_traffic_limit="81920000") == 10_240_000
    assert paced(standin, x_oss_traffic_limit="838860800") == 80_000_000
    assert get(standin, x_oss_traffic_limit="1")[0].status == 400


def test_a_total_rate_is_shared_and_sent_in_pieces_worth_a_call(standin: StandinProcess) -> None:
    """Two connections at once get all their bytes, and the server does not spin for it."""
    standin.set_scenario({"mb_per_s_total": 8})
    cpu_before_s = cpu_s(standin.pid)
    bodies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: bodies.append(get(standin)[1]), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    assert bodies == [DATA, DATA]
    # 2 MiB at 8 MB/s is a quarter of a second; a server that sends what trickles in burns it all.
    assert cpu_s(standin.pid) - cpu_before_s < 0.12


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "ServiceUnavailable", "TotalQpsLimitExceeded", "PartitionQpsLimitted",
        "DownloadTrafficRateLimitExceeded", "ActiveRequestLimitExceeded",
        "MetaOperationQpsLimitExceeded",
    ],
)  # fmt: skip
def test_a_503_of_each_kind(standin: StandinProcess, code: str) -> None:
    standin.set_scenario({"faults": [{"status": 503, "code": code, "first": 1}]})

    answer, body = get(standin)
    assert (answer.status, ET.fromstring(body).findtext("Code")) == (503, code)
    assert get(standin)[0].status == 200


def test_503s_at_a_rate_are_the_same_for_the_same_seed(standin: StandinProcess) -> None:
    def statuses() -> list[int]:
        standin.set_scenario({"seed": 5, "faults": [{"status": 503, "probability": 0.25}]})
        with connected(standin) as connection:
            return [status(connection) for _ in range(200)]

    def status(connection: http.client.HTTPConnection) -> int:
        connection.request("GET", "/k.bin", headers={"Host": HOST, "Range": "bytes=0-0"})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    first = statuses()
    assert 25 <= first.count(503) <= 75
    assert first == statuses()


def test_a_throttled_answer_says_how_long_it_was_held(standin: StandinProcess) -> None:
    standin.set_scenario({"faults": [{"qos_delay_ms": 30}]})
    answer, body = get(standin)
    assert (answer.headers["x-oss-qos-delay-time"], body) == ("30", DATA)


@pytest.mark.parametrize("after", [0, 1000, 700_000])
def test_a_reset_comes_after_so_many_bytes(standin: StandinProcess, after: int) -> None:
    standin.set_scenario({"faults": [{"reset_after_bytes": after}]})
    answer, error = raw(standin, asked())
    assert isinstance(error, ConnectionResetError)
    # What the reset overtook is lost, as on a real network.
    assert len(body_of(answer)) <= after


@pytest.mark.parametrize("after", [0, 1000, 700_000])
def test_a_truncated_answer_ends_orderly_and_early(standin: StandinProcess, after: int) -> None:
    standin.set_scenario({"faults": [{"truncate_after_bytes": after}]})
    answer, error = raw(standin, asked())
    assert error is None
    assert f"Content-Length: {len(DATA)}".encode() in answer
    assert body_of(answer) == DATA[:after]


@pytest.mark.parametrize("after", [0, 1000, 700_000])
def test_a_stall_holds_the_rest_back_and_then_sends_it(standin: StandinProcess, after: int) -> None:
    standin.set_scenario({"faults": [{"stall_after_bytes": after, "stall_s": 1.0}]})
    with socket.create_connection(("127.0.0.1", standin.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(asked(close=True).encode())
        received = bytearray()
        while not (b"\r\n\r\n" in received and len(body_of(received)) >= after):
            received += sock.recv(1 << 20)
        assert len(body_of(bytes(received))) == after
        assert select.select([sock], [], [], 0.2)[0] == []
        received += drain(sock)[0]
    assert body_of(bytes(received)) == DATA


@pytest.mark.parametrize("header", [{}, {"Range": "bytes=0-99999"}])
def test_one_wrong_byte_under_the_right_headers(
    standin: StandinProcess, header: dict[str, str]
) -> None:
    standin.set_scenario({"faults": [{"flip_byte_at": 1234}]})
    answer, body = get(standin, **header)
    expected = DATA[: len(body)]
    assert answer.headers["x-oss-hash-crc64ecma"] == str(fastcrc.crc64.xz(DATA))
    assert [i for i, (a, b) in enumerate(zip(body, expected, strict=True)) if a != b] == [1234]


def test_the_whole_object_instead_of_a_range(standin: StandinProcess) -> None:
    standin.set_scenario({"faults": [{"ignore_range": True, "first": 1}]})
    answer, body = get(standin, Range="bytes=0-9")
    assert (answer.status, answer.headers["Content-Range"], body) == (200, None, DATA)
    assert get(standin, Range="bytes=0-9")[0].status == 206


def test_an_object_that_becomes_another_version_in_the_middle(standin: StandinProcess) -> None:
    standin.set_scenario({"faults": [{"change_etag": True, "after": 2}]})
    etags = [get(standin, Range="bytes=0-9")[0].headers["ETag"] for _ in range(5)]

    assert etags[0] == etags[1]
    assert etags[2] != etags[0]
    assert etags[2] == etags[3] == etags[4], "one change, not one a request"
    assert get(standin, If_Match=etags[0])[0].status == 412
    assert get(standin, If_Match=etags[2])[0].status == 200


def test_tokens_expire_by_their_time_and_on_demand(
    oss_standin_factory: Callable[..., StandinProcess],
) -> None:
    now_s = time.time()
    keys = (
        AccessKey("fresh", "s1", "token-1", now_s + 3600),
        AccessKey("stale", "s2", "token-2", now_s - 1),
    )
    standin = oss_standin_factory(keys=keys)
    (Path(standin.root) / BUCKET / "k.bin").write_bytes(DATA)

    def asks(key: AccessKey, token: str) -> tuple[int, str | None, str | None]:
        auth = oss2.StsAuth(key.key, key.secret, token)
        address = oss2.Bucket(auth, standin.endpoint, BUCKET).sign_url("HEAD", "k.bin", 60)
        target = address.removeprefix(standin.endpoint)
        answer, error = raw(
            standin, f"HEAD {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        assert error is None
        hidden = re.search(rb"x-oss-err: (\S+)", answer)
        error_xml = ET.fromstring(base64.b64decode(hidden.group(1))) if hidden else ET.Element("E")
        status = int(answer.split(b" ", 2)[1])
        return status, error_xml.findtext("Code"), error_xml.findtext("EC")

    expired = (403, "SecurityTokenExpired", "0002-00000007")
    assert asks(keys[0], "token-1") == (200, None, None)
    assert asks(keys[1], "token-2") == expired
    assert asks(keys[0], "token-2")[1] == "AccessKeyIdAndSecurityTokenNotMatch"
    assert asks(keys[0], "nobody's")[1] == "InvalidSecurityToken"
    rule = {"expire_token": True, "first": 1, "methods": ["HEAD"]}
    standin.set_scenario({"faults": [rule]})
    assert asks(keys[0], "token-1") == expired
    assert asks(keys[0], "token-1") == (200, None, None)


# --- the process ---------------------------------------------------------------------------------


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its parent is killed outright: no handler of anybody's runs."""
    (tmp_path / BUCKET).mkdir()
    script = (
        "import os, signal\n"
        "from gpufeed.cachefs.testing.standin.config import StandinConfig\n"
        "from gpufeed.cachefs.testing.standin.process import StandinProcess\n"
        f"standin = StandinProcess(StandinConfig(root={str(tmp_path)!r}))\n"
        "standin.start()\n"
        "print(standin.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert parent.wait(TIMEOUT_S) == -signal.SIGKILL
        assert select.select([child], [], [], TIMEOUT_S)[0], "the stand-in outlived its parent"
    finally:
        os.close(child)
        parent.stdout.close()


def test_a_port_in_use_is_one_clear_error(
    standin: StandinProcess, oss_standin_factory: Callable[..., StandinProcess]
) -> None:
    with pytest.raises(OperatorError, match=f"127.0.0.1:{standin.port}"):
        oss_standin_factory(port=standin.port)
