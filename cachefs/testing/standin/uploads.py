"""Uploads in parts: begun, filled, listed, completed or given up. No sockets.

Parts wait in memory, at most `UPLOADS_MAX` uploads of them; a completed one becomes a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

from gpufeed.cachefs import checksum
from gpufeed.cachefs.testing.standin.listing import iso_time
from gpufeed.cachefs.testing.standin.objects import Buckets
from gpufeed.cachefs.testing.standin.replies import (
    OssError,
    Reply,
    Request,
    parse_xml,
    xml_reply,
)

UPLOADS_MAX = 1000


class Uploads:
    """See the top of the file.

    Attributes:
        operations: those that change no listing, by kind of request.
    """

    def __init__(self, buckets: Buckets, new_id: Callable[[], str]) -> None:
        self._buckets = buckets
        self._new_id = new_id
        self._uploads: dict[str, dict[int, bytes]] = {}
        self.operations: Mapping[str, Callable[[Request], Reply]] = {
            "initiate": self._initiate,
            "part": self._part,
            "list_parts": self._list_parts,
            "abort": self._abort,
        }

    def _initiate(self, request: Request) -> Reply:
        self._buckets.require(request.bucket)
        if len(self._uploads) >= UPLOADS_MAX:
            raise OssError(503, "ServiceUnavailable", f"{UPLOADS_MAX} uploads are open.")
        upload = self._new_id()
        self._uploads[upload] = {}
        return xml_reply(
            '<?xml version="1.0" encoding="UTF-8"?>\n<InitiateMultipartUploadResult>'
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        )

    def _parts(self, request: Request) -> dict[int, bytes]:
        upload = request.argument("uploadId") or ""
        if upload not in self._uploads:
            raise OssError(
                404, "NoSuchUpload", "The specified upload does not exist.", "0042-00000001",
                UploadId=upload,
            )  # fmt: skip
        return self._uploads[upload]

    def _part(self, request: Request) -> Reply:
        number = int(request.argument("partNumber") or "0")
        self._parts(request)[number] = request.body
        etag = _md5(request.body)
        crc = checksum.crc64(request.body)
        return Reply(200, {"ETag": f'"{etag}"', "x-oss-hash-crc64ecma": str(crc)})

    def _list_parts(self, request: Request) -> Reply:
        parts = sorted(self._parts(request).items())
        entries = "".join(
            f"<Part><PartNumber>{n}</PartNumber><LastModified>{iso_time(0)}</LastModified>"
            f'<ETag>"{_md5(data)}"</ETag><Size>{len(data)}</Size></Part>'
            for n, data in parts
        )
        last = parts[-1][0] if parts else 0
        return xml_reply(
            '<?xml version="1.0" encoding="UTF-8"?>\n<ListPartsResult>'
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{request.argument('uploadId')}</UploadId>"
            f"<PartNumberMarker>0</PartNumberMarker>"
            f"<NextPartNumberMarker>{last}</NextPartNumberMarker><MaxParts>1000</MaxParts>"
            f"<IsTruncated>false</IsTruncated>{entries}</ListPartsResult>"
        )

    def complete(self, request: Request) -> Reply:
        """Make the object of the parts named.

        Raises:
            OssError: no such upload or part.
        """
        parts = self._parts(request)
        numbers = [int(p.findtext("PartNumber", "0")) for p in parse_xml(request.body)]
        if not numbers or any(number not in parts for number in numbers):
            raise OssError(400, "InvalidPart", "One of the parts could not be found.")
        data = b"".join(parts[number] for number in numbers)
        etag = f"{_md5(data)}-{len(numbers)}"
        stored = self._buckets.put(request.bucket, request.key, data, etag)
        del self._uploads[request.argument("uploadId") or ""]
        reply = xml_reply(
            '<?xml version="1.0" encoding="UTF-8"?>\n<CompleteMultipartUploadResult>'
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f'<ETag>"{etag}"</ETag></CompleteMultipartUploadResult>'
        )
        reply.headers["x-oss-hash-crc64ecma"] = str(stored.crc64)
        return reply

    def _abort(self, request: Request) -> Reply:
        self._parts(request)
        del self._uploads[request.argument("uploadId") or ""]
        return Reply(204)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest().upper()
