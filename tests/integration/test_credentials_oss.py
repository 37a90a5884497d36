"""Temporary credentials end to end: tokens that expire while data is read, and nobody notices."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials import provider as provider_module
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.origin_contract import Reading, content
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, REGION
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.tokenservices import (
    PROVIDER_ARN,
    ROLE_ARN,
    ServiceFault,
    TokenServices,
)

DATA = content(3_000_000)
URL = f"oss://{BUCKET}/a.tar"
PART = 500_000
PARTS = 6
KEYS_MAX = 60
READS_MAX = 5000
LIFETIME_S = 2


@pytest.fixture
def keys():
    """A row of temporary keys, each good until two seconds after the one before it."""
    begin_s = int(time.time())
    return [
        AccessKey(f"STS.{i}", f"secret-{i}", f"token-{i}", begin_s + LIFETIME_S * (i + 1))
        for i in range(KEYS_MAX)
    ]


@pytest.fixture
def lasting():
    return [AccessKey(f"STS.{i}", f"secret-{i}", f"token-{i}") for i in range(KEYS_MAX)]


@pytest.fixture
def cloud(tls_files, oss_standin_factory, monkeypatch, tmp_path):
    """``cloud(keys, issue)``: an OSS that takes these keys and services that give them."""
    running = []

    def start(keys, issue):
        standin = oss_standin_factory(keys=tuple(keys))
        Path(standin.root, BUCKET, "a.tar").write_bytes(DATA)
        files = (tls_files.certificate, tls_files.key)
        services = TokenServices(tls_files=files, issue=issue).__enter__()
        running.append(services)
        (tmp_path / "token").write_text("a-pods-token")
        for name, value in {
            "ROLE_ARN": ROLE_ARN,
            "OIDC_PROVIDER_ARN": PROVIDER_ARN,
            "OIDC_TOKEN_FILE": str(tmp_path / "token"),
            "STS_ENDPOINT": services.sts_host,
            "CREDENTIALS_URI": services.uri,
        }.items():
            monkeypatch.setenv(f"ALIBABA_CLOUD_{name}", value)
        return standin, services

    yield start
    for services in running:
        services.__exit__()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def start_engine(metrics, tls_files):
    engines = []

    def start(standin, **fields: object) -> OriginEngine:
        config = OriginConfig(
            endpoint=standin.endpoint, region=REGION, ca_file=tls_files.authority, **fields
        )
        engine = OriginEngine(config, metrics)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


async def read_whole(engine: OriginEngine) -> bytes:
    info = await engine.head(URL)
    readings = [Reading(PART) for _ in range(PARTS)]
    await asyncio.gather(*(r.run(engine, info, i * PART) for i, r in enumerate(readings)))
    return b"".join(r.memory for r in readings)


@pytest.mark.parametrize("kind", ["rrsa", "uri"])
async def test_tokens_expire_during_a_long_read_and_no_read_fails(
    cloud, start_engine, keys, metrics, kind
):
    given: set[str] = set()

    def issue(_: int) -> AccessKey:
        now_s = time.time()
        key = next(key for key in keys if key.expires_at_s > now_s + LIFETIME_S / 2)
        given.add(key.key)
        return key

    standin, _ = cloud(keys, issue)
    # So slow that reads are under way whenever a token ends.
    standin.set_scenario({"mb_per_s_per_connection": 2})
    engine = start_engine(standin, credentials=kind)
    for _ in range(READS_MAX):
        assert await read_whole(engine) == DATA
        if len(given) == 4:
            break
    assert len(given) == 4
    assert metrics.get("credential_renewals_total") >= 4
    assert metrics.get("credential_failures_total") == 0
    assert metrics.get("origin_in_flight") == 0


async def test_a_token_that_is_refused_before_its_time_is_replaced(
    cloud, start_engine, lasting, metrics
):
    standin, services = cloud(lasting, lambda n: lasting[n - 1])
    engine = start_engine(standin)
    assert await read_whole(engine) == DATA
    assert services.said.calls["sts"] == 1
    standin.set_scenario({"faults": [{"first": 1, "methods": ["GET"], "expire_token": True}]})
    assert await read_whole(engine) == DATA
    assert services.said.calls["sts"] == 2
    assert metrics.get("credential_renewals_total") == 2


async def test_a_service_that_is_down_is_noticed_only_when_the_token_has_ended(
    cloud, start_engine, keys, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(provider_module, "PAUSE_S", 0.01)
    standin, services = cloud(
        keys, lambda _: next(k for k in keys if k.expires_at_s > time.time() + LIFETIME_S / 2)
    )
    engine = start_engine(standin, credentials="uri")
    assert await read_whole(engine) == DATA
    services.said.fault = ServiceFault("status", 503)
    error: OriginUnavailableError | None = None
    reads = 0
    while error is None and reads < READS_MAX:
        try:
            assert await read_whole(engine) == DATA
            reads += 1
        except OriginUnavailableError as caught:
            error = caught
    assert "no credentials from credentials URI at 127.0.0.1" in str(error)
    assert "HTTP 503" in str(error)
    assert "check ALIBABA_CLOUD_CREDENTIALS_URI" in str(error)
    assert "could not be renewed" in caplog.text
    services.said.fault = None
    for _ in range(READS_MAX):  # until the back-off has passed
        try:
            assert await read_whole(engine) == DATA
            return
        except OriginUnavailableError:
            await asyncio.sleep(0.05)
    pytest.fail("it did not come back")
