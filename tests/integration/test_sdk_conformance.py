"""Alibaba's own unmodified clients are the judges of the stand-in: they list, head and read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.testing.standin.config import AccessKey

NAMES = ["a.bin", "dir/spåce and plus+.bin", "dir/数据.bin", "dir/sub/z.bin"]
DATA = {name: f"content of {name} ".encode() * 500 for name in NAMES}
STS = AccessKey("sts-key", "sts-secret", "sts-token")


@pytest.fixture
def standin(oss_standin_factory):
    standin = oss_standin_factory(keys=(AccessKey(KEY, SECRET), STS))
    for name, data in DATA.items():
        path = Path(standin.root) / BUCKET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return standin


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
@pytest.mark.parametrize("how", ["v1", "v4", "v1-sts", "v4-sts"])
def test_oss2_lists_heads_reads_and_writes(standin, how: str) -> None:
    import oss2

    key, secret, token = (
        (STS.key, STS.secret, STS.token) if how.endswith("sts") else (KEY, SECRET, "")
    )
    if token:
        version = oss2.AUTH_VERSION_4 if how.startswith("v4") else oss2.AUTH_VERSION_1
        auth = oss2.StsAuth(key, secret, token, auth_version=version)
    else:
        auth = (oss2.AuthV4 if how == "v4" else oss2.Auth)(key, secret)
    bucket = oss2.Bucket(auth, standin.endpoint, BUCKET, region=REGION)

    assert [o.key for o in oss2.ObjectIteratorV2(bucket, max_keys=2)] == sorted(NAMES)
    assert [o.key for o in oss2.ObjectIterator(bucket, prefix="dir/", max_keys=1)] == sorted(
        NAMES[1:]
    )
    for name, data in DATA.items():
        assert bucket.head_object(name).content_length == len(data)
        assert bucket.get_object(name).read() == data
        assert bucket.get_object(name, byte_range=(10, 19)).read() == data[10:20]
    bucket.put_object("new/x.bin", b"hello")
    assert bucket.get_object("new/x.bin").read() == b"hello"
    bucket.delete_object("new/x.bin")
    assert not bucket.object_exists("new/x.bin")
    assert bucket.get_bucket_info().name == BUCKET


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
def test_oss2_uploads_in_parts_and_the_checksum_agrees(standin, tmp_path: Path) -> None:
    import oss2

    bucket = oss2.Bucket(oss2.AuthV4(KEY, SECRET), standin.endpoint, BUCKET, region=REGION)
    data = os.urandom(700_000)
    path = tmp_path / "upload.bin"
    path.write_bytes(data)

    oss2.resumable_upload(
        bucket, "big.bin", str(path), multipart_threshold=100_000, part_size=200_000,
        num_threads=1, store=oss2.ResumableStore(root=str(tmp_path)),
    )  # fmt: skip

    assert bucket.get_object("big.bin").read() == data
    assert bucket.head_object("big.bin").etag.endswith("-4")


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
def test_oss2_learns_why_it_was_refused(standin) -> None:
    import oss2

    def bucket(key: str, secret: str) -> oss2.Bucket:
        return oss2.Bucket(oss2.AuthV4(key, secret), standin.endpoint, BUCKET, region=REGION)

    with pytest.raises(oss2.exceptions.SignatureDoesNotMatch):
        bucket(KEY, "wrong").get_object("a.bin")
    with pytest.raises(oss2.exceptions.ServerError) as refused:
        bucket("nobody", "x").get_object("a.bin")
    assert refused.value.code == "InvalidAccessKeyId"
    with pytest.raises(oss2.exceptions.NoSuchKey):
        bucket(KEY, SECRET).get_object("none")


def v2_config(oss, endpoint: str, how: str):
    config = oss.config.load_default()
    credentials = (STS.key, STS.secret, STS.token) if how.endswith("sts") else (KEY, SECRET)
    config.credentials_provider = oss.credentials.StaticCredentialsProvider(*credentials)
    config.region = REGION
    config.endpoint = endpoint
    if how.startswith("v1"):
        config.signature_version = "v1"
    return config


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
@pytest.mark.parametrize("how", ["v4", "v1", "v4-sts", "v1-sts"])
def test_oss_v2_lists_heads_and_reads(standin, how: str) -> None:
    import alibabacloud_oss_v2 as oss

    client = oss.Client(v2_config(oss, standin.endpoint, how))

    pages = client.list_objects_v2_paginator().iter_page(
        oss.ListObjectsV2Request(bucket=BUCKET, max_keys=3)
    )
    assert [o.key for page in pages for o in page.contents] == sorted(NAMES)
    for name, data in DATA.items():
        head = client.head_object(oss.HeadObjectRequest(bucket=BUCKET, key=name))
        assert head.content_length == len(data)
        whole = client.get_object(oss.GetObjectRequest(bucket=BUCKET, key=name))
        assert whole.body.content == data
        part = client.get_object(
            oss.GetObjectRequest(
                bucket=BUCKET, key=name, range_header="bytes=5-9", range_behavior="standard"
            )
        )
        assert part.body.content == data[5:10]


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
def test_oss_v2_sees_the_code_of_a_wrong_secret(standin) -> None:
    import alibabacloud_oss_v2 as oss

    config = v2_config(oss, standin.endpoint, "v4")
    config.credentials_provider = oss.credentials.StaticCredentialsProvider(KEY, "wrong")

    with pytest.raises(oss.exceptions.OperationError) as refused:
        oss.Client(config).head_object(oss.HeadObjectRequest(bucket=BUCKET, key="a.bin"))
    assert "SignatureDoesNotMatch" in str(refused.value)


@pytest.mark.filterwarnings("ignore")  # the SDK's own warnings, of several kinds
@pytest.mark.parametrize("how", ["v4", "v1"])
def test_oss_v2_async_lists_heads_and_reads(standin, how: str) -> None:
    import alibabacloud_oss_v2 as oss
    import alibabacloud_oss_v2.aio as oss_aio

    async def run() -> None:
        client = oss_aio.AsyncClient(v2_config(oss, standin.endpoint, how))
        try:
            listed = await client.list_objects_v2(oss.ListObjectsV2Request(bucket=BUCKET))
            assert [o.key for o in listed.contents] == sorted(NAMES)
            for name, data in DATA.items():
                head = await client.head_object(oss.HeadObjectRequest(bucket=BUCKET, key=name))
                assert head.content_length == len(data)
                found = await client.get_object(oss.GetObjectRequest(bucket=BUCKET, key=name))
                assert await found.body.read() == data
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore")  # ossfs and its asyncio door warn about their own loops
def test_ossfs_lists_and_reads(standin) -> None:
    from ossfs import OSSFileSystem

    fs = OSSFileSystem(endpoint=standin.endpoint, key=KEY, secret=SECRET, skip_instance_cache=True)

    assert sorted(fs.find(BUCKET)) == sorted(f"{BUCKET}/{name}" for name in NAMES)
    for name, data in DATA.items():
        assert fs.info(f"{BUCKET}/{name}")["size"] == len(data)
        with fs.open(f"{BUCKET}/{name}", "rb") as file:
            file.seek(20)
            assert file.read(30) == data[20:50]
        assert fs.cat(f"{BUCKET}/{name}") == data


def test_the_osstorchconnector_lists_and_reads(standin, tmp_path: Path) -> None:
    """Its endpoint must look real: in a mount namespace of its own the name leads to loopback."""
    pytest.importorskip("osstorchconnector", reason="the vendor ships x86-64 wheels only")
    if os.getuid() != 0:
        pytest.skip("needs root for a mount namespace")
    host = f"oss-{REGION}-internal.aliyuncs.com"
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {host} {BUCKET}.{host}\n")
    credentials = tmp_path / "credentials"
    credentials.write_text(json.dumps({"AccessKeyId": KEY, "AccessKeySecret": SECRET}))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"logLevel": 2, "logPath": str(tmp_path / "connector.log")}))
    script = tmp_path / "client.py"
    script.write_text(
        textwrap.dedent(f"""
        import hashlib, json, os
        from osstorchconnector import OssMapDataset
        dataset = OssMapDataset.from_prefix(
            "oss://{BUCKET}/", endpoint="http://{host}:{standin.port}", region="{REGION}",
            cred_path="{credentials}", config_path="{config}")
        found = {{}}
        for i in range(len(dataset)):
            item = dataset[i]
            data = item.read()
            item.seek(7)
            buffer = bytearray(9)
            assert item.readinto(buffer) == 9 and bytes(buffer) == data[7:16]
            found[item.key] = hashlib.sha256(data).hexdigest()
        print(json.dumps(found), flush=True)
        os._exit(0)  # the vendor's library crashes while the interpreter ends
        """)
    )
    command = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, timeout=120, check=False
    )
    if b"unshare" in done.stderr or b"mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.decode()}")

    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        f"/{BUCKET}/{name}": hashlib.sha256(data).hexdigest() for name, data in DATA.items()
    }
