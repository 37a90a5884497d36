"""Real daemons over more than a key and plain HTTP: roles over TLS, S3, mounted folders."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys

import pytest
from node import make_samples, tar_of

from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.errors import AccessDeniedError
from gpufeed.cachefs.testing import seaweed as s3_server
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.tokenservices import (
    PROVIDER_ARN,
    ROLE_ARN,
    ServiceFault,
    TokenServices,
)

TEMPORARY = AccessKey("STS.key", "sts-secret", "sts-token")
_numbers = itertools.count()
SCRIPT = """
import hashlib, json, sys
from gpufeed.loaders import DataLoader, ShardDataset

def decode(sample):
    return {"key": sample["__key__"], "sum": hashlib.sha256(sample["jpg"]).hexdigest()}

loader = DataLoader(ShardDataset(sys.argv[1], decode=decode), batch_size=16, num_workers=1)
for epoch in range(2):
    found = {}
    for batch in loader:
        found.update(zip(batch["key"], batch["sum"]))
    print(json.dumps(found), flush=True)
loader.close()
"""


def train(node, url: str) -> list[dict[str, str]]:
    """Two epochs in a process of its own: the checksum of each sample's image by its key."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url],
        env={**node.environment(), "GPUFEED_DAEMON": node.socket},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def sums(samples: dict[str, dict[str, bytes]]) -> dict[str, str]:
    return {key: hashlib.sha256(fields["jpg"]).hexdigest() for key, fields in samples.items()}


class TestRole:
    @pytest.fixture
    def oss_standin(self, oss_standin_factory, tls_files):
        return oss_standin_factory(
            keys=(TEMPORARY,), tls_certificate=tls_files.certificate, tls_key=tls_files.key
        )

    @pytest.fixture
    def services(self, tls_files):
        files = (tls_files.certificate, tls_files.key)
        with TokenServices(tls_files=files, issue=lambda _: TEMPORARY) as services:
            yield services

    @pytest.fixture
    def environment(self, services, tls_files, tmp_path):
        (tmp_path / "token").write_text("a-pods-token")
        return {
            "ALIBABA_CLOUD_ROLE_ARN": ROLE_ARN,
            "ALIBABA_CLOUD_OIDC_PROVIDER_ARN": PROVIDER_ARN,
            "ALIBABA_CLOUD_OIDC_TOKEN_FILE": str(tmp_path / "token"),
            "ALIBABA_CLOUD_STS_ENDPOINT": services.sts_host,
            "GPUFEED_ORIGIN_CA_FILE": tls_files.authority,
            "GPUFEED_ORIGIN_KEY": "",
            "GPUFEED_ORIGIN_SECRET": "",
        }

    def test_a_pods_role_reads_over_tls_with_nothing_configured_but_the_endpoint(
        self, node, environment, services
    ):
        samples = node.put_tars(2, 40)
        process = node.start(**environment)
        url = f"oss://{BUCKET}/train-{{000..001}}.tar"
        assert train(node, url) == [sums(samples)] * 2
        status = node.status()
        assert services.said.calls["sts"] == 1
        assert status["credential_renewals_total"] == 1
        assert status["credential_failures_total"] == 0
        assert node.stop(process) == 0

    def test_a_role_that_is_refused_is_named_to_whoever_reads(self, node, environment, services):
        node.put_tars(1, 4)
        services.said.fault = ServiceFault("status", 403, "NoPermission", "not authorized")
        process = node.start(**environment)
        with (
            Session.connect(node.socket) as session,
            pytest.raises(
                AccessDeniedError,
                match=rf"no credentials from RRSA role {ROLE_ARN}: .*NoPermission.*check ALIBABA",
            ),
        ):
            session.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/train-000.tar",)))
        assert node.stop(process) == 0


@pytest.mark.slow
def test_shards_on_s3_are_fetched_once_and_then_served_from_the_cache(node, seaweed):
    bucket = f"daemon-{next(_numbers)}"
    samples: dict[str, dict[str, bytes]] = {}
    with s3_server.s3_files(seaweed.endpoint) as files:
        files.mkdir(bucket)
        for i in range(3):
            mine = make_samples(40, i)
            files.pipe_file(f"{bucket}/train-{i:03d}.tar", tar_of(mine))
            samples |= mine
        bytes_there = files.du(bucket)
    process = node.start(
        GPUFEED_ORIGIN_ENDPOINT=seaweed.endpoint,
        GPUFEED_ORIGIN_KEY=s3_server.KEY,
        GPUFEED_ORIGIN_SECRET=s3_server.SECRET,
        GPUFEED_ORIGIN_REGION=s3_server.REGION,
    )
    assert train(node, f"s3://{bucket}/train-{{000..002}}.tar") == [sums(samples)] * 2
    status = node.status()
    assert status["fills_total"] == 3
    assert status["origin_bytes_total"] == bytes_there
    assert node.stop(process) == 0


def test_a_mounted_folder_of_links_is_a_dataset_where_it_is_allowed(node, tmp_path):
    real = tmp_path / "volume"
    real.mkdir()
    samples: dict[str, dict[str, bytes]] = {}
    for i in range(2):
        mine = make_samples(40, i)
        (real / f"train-{i:03d}.tar").write_bytes(tar_of(mine))
        samples |= mine
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "part").symlink_to(real)
    url = f"file://{tmp_path}/dataset/"
    process = node.start("--allow", url)
    assert train(node, url) == [sums(samples)] * 2
    assert node.status()["fills_total"] == 2
    assert node.stop(process) == 0
