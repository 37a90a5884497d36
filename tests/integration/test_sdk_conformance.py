"""Alibaba's own unmodified clients are the judges of the stand-in: they list, head and read."""

from __future__ import annotations

import asyncio
import hashlib
import io
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


def test_oss2_copies(standin) -> None:
    import oss2

    bucket = oss2.Bucket(oss2.AuthV4(KEY, SECRET), standin.endpoint, BUCKET, region=REGION)
    name = "dir/a copy of+%41.bin"
    bucket.put_object("dir/odd +%41.bin", b"what is copied")
    bucket.copy_object(BUCKET, "dir/odd +%41.bin", name)
    assert bucket.get_object(name).read() == b"what is copied"
    with pytest.raises(oss2.exceptions.NoSuchKey):
        bucket.copy_object(BUCKET, "dir/none", name)


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


def test_oss_v2_sees_the_code_of_a_wrong_secret(standin) -> None:
    import alibabacloud_oss_v2 as oss

    config = v2_config(oss, standin.endpoint, "v4")
    config.credentials_provider = oss.credentials.StaticCredentialsProvider(KEY, "wrong")

    with pytest.raises(oss.exceptions.OperationError) as refused:
        oss.Client(config).head_object(oss.HeadObjectRequest(bucket=BUCKET, key="a.bin"))
    assert "SignatureDoesNotMatch" in str(refused.value)


@pytest.mark.parametrize("how", ["v4", "v1", "v4-sts", "v1-sts"])
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
                part = await client.get_object(
                    oss.GetObjectRequest(
                        bucket=BUCKET, key=name, range_header="bytes=5-9",
                        range_behavior="standard",
                    )
                )  # fmt: skip
                assert await part.body.read() == data[5:10]
        finally:
            await client.close()

    asyncio.run(run())


def test_oss_v2_async_reads_through_the_stand_in_as_a_proxy(standin) -> None:
    """Absolute targets: the bucket is in the host, as on the real service, and no name resolves."""
    import alibabacloud_oss_v2 as oss
    import alibabacloud_oss_v2.aio as oss_aio

    async def run(secret: str) -> bytes:
        config = v2_config(oss, f"http://oss-{REGION}-internal.aliyuncs.com", "v4")
        config.credentials_provider = oss.credentials.StaticCredentialsProvider(KEY, secret)
        config.proxy_host = standin.endpoint
        client = oss_aio.AsyncClient(config)
        try:
            found = await client.get_object(oss.GetObjectRequest(bucket=BUCKET, key=NAMES[1]))
            return await found.body.read()
        finally:
            await client.close()

    assert asyncio.run(run(SECRET)) == DATA[NAMES[1]]
    with pytest.raises(oss.exceptions.OperationError, match="SignatureDoesNotMatch"):
        asyncio.run(run("wrong"))


@pytest.mark.parametrize("how", ["v1", "v4"])
def test_oss2_reads_through_the_stand_in_as_a_proxy(standin, how: str) -> None:
    import oss2

    bucket = oss2.Bucket(
        (oss2.AuthV4 if how == "v4" else oss2.Auth)(KEY, SECRET),
        f"http://oss-{REGION}-internal.aliyuncs.com",
        BUCKET,
        region=REGION,
        proxies={"http": standin.endpoint},
    )

    for name, data in DATA.items():
        assert bucket.get_object(name, byte_range=(3, 12)).read() == data[3:13]
    assert [o.key for o in oss2.ObjectIteratorV2(bucket, prefix="dir/")] == sorted(NAMES[1:])


@pytest.mark.parametrize("how", ["oss2", "oss-v2"])
def test_many_objects_are_deleted_at_once(standin, how: str) -> None:
    if how == "oss2":
        import oss2

        bucket = oss2.Bucket(oss2.AuthV4(KEY, SECRET), standin.endpoint, BUCKET, region=REGION)
        assert sorted(bucket.batch_delete_objects(NAMES[:3]).deleted_keys) == sorted(NAMES[:3])
        assert [o.key for o in oss2.ObjectIteratorV2(bucket)] == NAMES[3:]
    else:
        import alibabacloud_oss_v2 as oss

        client = oss.Client(v2_config(oss, standin.endpoint, "v4"))
        done = client.delete_multiple_objects(
            oss.DeleteMultipleObjectsRequest(
                bucket=BUCKET, objects=[oss.DeleteObject(key=name) for name in NAMES[:3]]
            )
        )
        assert sorted(entry.key for entry in done.deleted_objects) == sorted(NAMES[:3])
        left = client.list_objects_v2(oss.ListObjectsV2Request(bucket=BUCKET))
        assert [o.key for o in left.contents] == NAMES[3:]


def test_oss_v2_uploads_in_parts_and_checks_the_sum(standin) -> None:
    import alibabacloud_oss_v2 as oss

    client = oss.Client(v2_config(oss, standin.endpoint, "v4"))
    data = os.urandom(700_000)

    client.uploader(part_size=200_000, parallel_num=1).upload_from(
        oss.PutObjectRequest(bucket=BUCKET, key="big.bin"), io.BytesIO(data)
    )

    whole = client.get_object(oss.GetObjectRequest(bucket=BUCKET, key="big.bin"))
    assert whole.body.content == data
    assert whole.etag.strip('"').endswith("-4")


@pytest.mark.parametrize("login", [(KEY, SECRET, None), (STS.key, STS.secret, STS.token)])
def test_ossfs_lists_and_reads(standin, login: tuple[str, str, str | None]) -> None:
    from ossfs import OSSFileSystem

    key, secret, token = login
    fs = OSSFileSystem(
        endpoint=standin.endpoint, key=key, secret=secret, token=token, skip_instance_cache=True
    )

    assert sorted(fs.find(BUCKET)) == sorted(f"{BUCKET}/{name}" for name in NAMES)
    for name, data in DATA.items():
        assert fs.info(f"{BUCKET}/{name}")["size"] == len(data)
        with fs.open(f"{BUCKET}/{name}", "rb") as file:
            file.seek(20)
            assert file.read(30) == data[20:50]
        assert fs.cat(f"{BUCKET}/{name}") == data


def test_ossfs_learns_why_it_was_refused(standin) -> None:
    from ossfs import OSSFileSystem

    fs = OSSFileSystem(endpoint=standin.endpoint, key=KEY, secret="wrong", skip_instance_cache=True)
    with pytest.raises(Exception, match="SignatureDoesNotMatch"):
        fs.cat(f"{BUCKET}/a.bin")


def test_the_osstorchconnector_lists_and_reads(standin, tmp_path: Path) -> None:
    """Its endpoint must look real: in a mount namespace of its own the name leads to loopback."""
    pytest.importorskip("osstorchconnector", reason="the vendor ships x86-64 wheels only")
    if os.getuid() != 0:
        pytest.skip("needs root for a mount namespace")
    host = f"oss-{REGION}-internal.aliyuncs.com"
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {host} {BUCKET}.{host}\n")
    for name, secret in (("right", SECRET), ("wrong", "wrong")):
        login = {"AccessKeyId": KEY, "AccessKeySecret": secret}
        (tmp_path / name).write_text(json.dumps(login))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"logLevel": 2, "logPath": str(tmp_path / "connector.log")}))
    script = tmp_path / "client.py"
    script.write_text(
        textwrap.dedent(f"""
        import hashlib, json, os
        from osstorchconnector import OssMapDataset
        def dataset(login):
            return OssMapDataset.from_prefix(
                "oss://{BUCKET}/", endpoint="http://{host}:{standin.port}", region="{REGION}",
                cred_path="{tmp_path}/" + login, config_path="{config}")
        objects = dataset("right")
        found = {{}}
        for i in range(len(objects)):
            item = objects[i]
            data = item.read()
            item.seek(7)
            buffer = bytearray(9)
            assert item.readinto(buffer) == 9 and bytes(buffer) == data[7:16]
            found[item.key] = hashlib.sha256(data).hexdigest()
        try:
            len(dataset("wrong"))
            refused = ""
        except RuntimeError as error:
            refused = str(error)
        print(json.dumps([found, refused]), flush=True)
        os._exit(0)  # the vendor's library crashes while the interpreter ends
        """)
    )
    no_mount = 77
    command = f"mount --bind {hosts} /etc/hosts || exit {no_mount}; exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, timeout=120, check=False
    )
    if done.returncode == no_mount or done.stderr.startswith(b"unshare:"):
        pytest.skip(f"no mount namespace here: {done.stderr.decode()}")

    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found, refused = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        f"/{BUCKET}/{name}": hashlib.sha256(data).hexdigest() for name, data in DATA.items()
    }
    # The connector tells no more of a 403 than this.
    assert "errno=1(Operation not permitted)" in refused
