"""HTTPS end to end: right bytes over TLS, faults that pass through it, and wrong certificates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import ConfigError, OperatorError, OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.origin_contract import Reading, content
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.testing.standin.process import StandinProcess

DATA = content(3_000_000)
URL = f"oss://{BUCKET}/a.tar"


def put(standin: StandinProcess) -> None:
    Path(standin.root, BUCKET, "a.tar").write_bytes(DATA)


@pytest.fixture
def standin(oss_standin_factory, tls_files):
    standin = oss_standin_factory(tls_certificate=tls_files.certificate, tls_key=tls_files.key)
    put(standin)
    return standin


@pytest.fixture
async def start_engine(monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    engines = []

    def start(endpoint: str, **fields: object) -> OriginEngine:
        config = OriginConfig(
            endpoint=endpoint, region=REGION, key=KEY, secret=SECRET, retries_max=2,
            stall_timeout_s=1.0, **fields,
        )  # fmt: skip
        engine = OriginEngine(config, Metrics())
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


async def read_whole(engine: OriginEngine, part_bytes: int = 1_000_000) -> bytes:
    info = await engine.head(URL)
    begins = range(0, len(DATA), part_bytes)
    readings = [Reading(part_bytes // 2, part_bytes // 2) for _ in begins]
    await asyncio.gather(*(r.run(engine, info, at) for r, at in zip(readings, begins, strict=True)))
    return b"".join(r.memory for r in readings)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_bytes_are_right_over_tls(standin, start_engine, tls_files, name):
    assert standin.endpoint.startswith("https://")
    engine = start_engine(f"https://{name}:{standin.port}", ca_file=tls_files.authority)
    assert await read_whole(engine) == DATA
    assert len(await engine.list(f"oss://{BUCKET}/")) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"first": 2, "reset_after_bytes": 300_000},
        {"first": 2, "truncate_after_bytes": 700_000},
        {"first": 1, "stall_after_bytes": 600_000},
        {"first": 2, "status": 503},
    ],
    ids=lambda fault: list(fault)[1],
)
async def test_faults_of_the_wire_pass_through_tls_and_cost_no_byte(
    standin, start_engine, tls_files, fault
):
    engine = start_engine(standin.endpoint, ca_file=tls_files.authority)
    standin.set_scenario({"faults": [fault]})
    assert await read_whole(engine) == DATA


@pytest.mark.parametrize("authority", ["system", "other"])
async def test_a_certificate_of_an_unknown_authority_is_an_operators_error(
    standin, start_engine, other_tls_files, authority
):
    named = {"ca_file": other_tls_files.authority} if authority == "other" else {}
    engine = start_engine(standin.endpoint, **named)
    with pytest.raises(OperatorError, match=r"certificate refused.*origin\.ca_file") as caught:
        await engine.head(URL)
    assert type(caught.value) is OperatorError


async def test_a_certificate_of_another_name_is_an_operators_error(
    oss_standin_factory, start_engine, other_tls_files
):
    standin = oss_standin_factory(
        tls_certificate=other_tls_files.certificate, tls_key=other_tls_files.key
    )
    engine = start_engine(standin.endpoint, ca_file=other_tls_files.authority)
    with pytest.raises(OperatorError, match=r"not valid for '127\.0\.0\.1'.*own name"):
        await engine.head(URL)


async def test_a_missing_authority_is_named(standin, start_engine):
    engine = start_engine(standin.endpoint, ca_file="/no/such/file.pem")
    with pytest.raises(ConfigError, match=r"origin\.ca_file /no/such/file\.pem"):
        await engine.head(URL)


async def test_tls_to_a_plain_server_is_told(oss_standin, start_engine, tls_files):
    endpoint = oss_standin.endpoint.replace("http://", "https://")
    engine = start_engine(endpoint, ca_file=tls_files.authority)
    with pytest.raises(OriginUnavailableError, match="does not speak TLS"):
        await engine.head(URL)


async def test_plain_http_works_beside_it(oss_standin, start_engine, tls_files):
    put(oss_standin)
    engine = start_engine(oss_standin.endpoint, ca_file=tls_files.authority)
    assert await read_whole(engine) == DATA


class TestStandin:
    def test_control_goes_without_tls(self, standin):
        assert standin.counters()["requests"] == 0

    @pytest.mark.parametrize("half", ["tls_certificate", "tls_key"])
    def test_half_of_tls_is_refused(self, oss_standin_factory, half):
        with pytest.raises(ConfigError, match="both a certificate and its key"):
            oss_standin_factory(**{half: "x"})

    def test_what_is_no_certificate_is_refused(self, oss_standin_factory):
        with pytest.raises(OperatorError, match="no certificate and key in PEM"):
            oss_standin_factory(tls_certificate=__file__, tls_key=__file__)
