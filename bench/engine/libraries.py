"""Other people's clients, each used as its own documentation says is fastest.

Checksums that a library computes by itself are switched off where it has a switch (in the vendor's
SDKs they cost 2.5 CPU seconds a gigabyte). What a library hands out is copied to where it belongs,
since that is what whoever feeds a cache has to do; `osstorchconnector` receives in place.

Libraries are imported when their engine is made: most machines do not have all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufeed.bench.engine.clients import LoopClient, Part, ThreadClient
from gpufeed.bench.engine.objects import ACCESS_KEY, ACCESS_SECRET, BUCKET, REGION
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.units import MIB

# ruff: noqa: PLC0415 see the top of the file

COPY_BYTES = MIB
# The vendor's connector takes endpoints that look real only; the bench makes this one lead here.
VENDOR_HOST = f"oss-{REGION}-internal.aliyuncs.com"


def _copy(part: Part, data: Any) -> None:
    if len(data) != len(part.target):
        raise IntegrityError(
            f"{part.item.key}: {len(data)} bytes came for the {len(part.target)} asked for"
        )
    part.target[:] = memoryview(data)


class _Filler:
    """Puts chunks one behind the other into a part."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._done = 0

    def add(self, chunk: bytes) -> None:
        end = self._done + len(chunk)
        if end > len(self._part.target):
            raise IntegrityError(f"{self._part.item.key}: more bytes than were asked for")
        self._part.target[self._done : end] = chunk
        self._done = end

    def finish(self) -> None:
        if self._done != len(self._part.target):
            raise IntegrityError(
                f"{self._part.item.key}: {self._done} bytes came for the "
                f"{len(self._part.target)} asked for"
            )


class AiohttpClient(LoopClient):
    """aiohttp, the chunks copied as they come."""

    async def start(self) -> None:
        """See `LoopClient`."""
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.setting.connections),
            read_bufsize=2 * MIB,
            auto_decompress=False,
        )

    async def stop(self) -> None:
        """See `LoopClient`."""
        await self._session.close()

    async def get(self, part: Part) -> None:
        """See `LoopClient`."""
        url = f"{self.setting.source.endpoint}/{BUCKET}/{part.item.key}"
        headers = {"Range": f"bytes={part.begin_bytes}-{part.end_bytes - 1}"}
        filler = _Filler(part)
        async with self._session.get(url, headers=headers) as answer:
            answer.raise_for_status()
            async for chunk in answer.content.iter_chunked(COPY_BYTES):
                filler.add(chunk)
        filler.finish()


class ObstoreClient(LoopClient):
    """obstore (object_store in Rust), its S3 client."""

    async def start(self) -> None:
        """See `LoopClient`."""
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET,
            endpoint=self.setting.source.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=ACCESS_SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    async def get(self, part: Part) -> None:
        """See `LoopClient`."""
        import obstore

        _copy(
            part,
            await obstore.get_range_async(
                self._store, part.item.key, start=part.begin_bytes, end=part.end_bytes
            ),
        )


class OpendalClient(LoopClient):
    """OpenDAL, its OSS service."""

    async def start(self) -> None:
        """See `LoopClient`."""
        import opendal

        self._operator = opendal.AsyncOperator(
            "oss",
            bucket=BUCKET,
            endpoint=self.setting.source.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY,
            access_key_secret=ACCESS_SECRET,
            addressing_style="path",
        )

    async def get(self, part: Part) -> None:
        """See `LoopClient`."""
        data = await self._operator.read(
            part.item.key, offset=part.begin_bytes, size=len(part.target)
        )
        _copy(part, data)


class Oss2Client(ThreadClient):
    """oss2, the vendor's first SDK, checksums off."""

    def connect(self) -> None:
        """See `ThreadClient`."""
        super().connect()
        import oss2

        oss2.defaults.connection_pool_size = self.setting.connections
        self._bucket = oss2.Bucket(
            oss2.AuthV4(ACCESS_KEY, ACCESS_SECRET),
            self.setting.source.endpoint,
            BUCKET,
            region=REGION,
            enable_crc=False,
        )

    def get(self, part: Part) -> None:
        """See `ThreadClient`."""
        answer = self._bucket.get_object(
            part.item.key, byte_range=(part.begin_bytes, part.end_bytes - 1)
        )
        filler = _Filler(part)
        while chunk := answer.read(COPY_BYTES):
            filler.add(chunk)
        filler.finish()


class OssV2Client(ThreadClient):
    """alibabacloud-oss-v2, the vendor's second SDK, checksums off."""

    def connect(self) -> None:
        """See `ThreadClient`."""
        super().connect()
        import alibabacloud_oss_v2 as oss

        config = oss.config.load_default()
        config.credentials_provider = oss.credentials.StaticCredentialsProvider(
            ACCESS_KEY, ACCESS_SECRET
        )
        config.region = REGION
        config.endpoint = self.setting.source.endpoint
        config.disable_download_crc64_check = True
        self._oss = oss
        self._client = oss.Client(config)

    def get(self, part: Part) -> None:
        """See `ThreadClient`."""
        answer = self._client.get_object(
            self._oss.GetObjectRequest(
                bucket=BUCKET,
                key=part.item.key,
                range_header=f"bytes={part.begin_bytes}-{part.end_bytes - 1}",
                range_behavior="standard",
            )
        )
        filler = _Filler(part)
        with answer.body as body:
            for chunk in body.iter_bytes(block_size=COPY_BYTES):
                filler.add(chunk)
        filler.finish()


class OssfsClient(ThreadClient):
    """ossfs, the fsspec file system. Its ``end`` is inclusive, unlike fsspec's: minus one."""

    def connect(self) -> None:
        """See `ThreadClient`."""
        super().connect()
        from ossfs import OSSFileSystem

        self._fs = OSSFileSystem(
            endpoint=self.setting.source.endpoint,
            key=ACCESS_KEY,
            secret=ACCESS_SECRET,
            skip_instance_cache=True,
        )

    def get(self, part: Part) -> None:
        """See `ThreadClient`."""
        path = f"{BUCKET}/{part.item.key}"
        _copy(part, self._fs.cat_file(path, part.begin_bytes, part.end_bytes - 1))


class ConnectorClient(ThreadClient):
    """osstorchconnector, the vendor's connector for PyTorch: C++, receives in place.

    It cuts objects into requests by itself, so a whole object is one call; one thread an object.
    """

    def connect(self) -> None:
        """See `ThreadClient`."""
        super().connect()
        from osstorchconnector import OssMapDataset

        directory = Path(self.setting.directory)
        login = directory / "login.json"
        login.write_text(json.dumps({"AccessKeyId": ACCESS_KEY, "AccessKeySecret": ACCESS_SECRET}))
        config = directory / "connector.json"
        config.write_text(json.dumps({"logLevel": 2, "logPath": str(directory / "connector.log")}))
        items = self.setting.source.objects
        self._numbers = {item.key: number for number, item in enumerate(items)}
        self._objects = OssMapDataset.from_objects(
            [f"oss://{BUCKET}/{item.key}" for item in items],
            endpoint=f"http://{VENDOR_HOST}:{self.setting.source.port}",
            region=REGION,
            cred_path=str(login),
            config_path=str(config),
        )

    def request_bytes(self) -> int:
        """See `BufferClient`: whole objects."""
        return max(item.size_bytes for item in self.setting.source.objects)

    def get(self, part: Part) -> None:
        """See `ThreadClient`."""
        found = self._objects[self._numbers[part.item.key]]
        if found.readinto(part.target) != len(part.target):
            raise IntegrityError(f"{part.item.key}: fewer bytes came than were asked for")
