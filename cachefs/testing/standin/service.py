"""What the stand-in answers: addressing, authentication, operations, counters. No sockets.

`OssService.handle` takes a parsed request and returns a reply; it touches the file system and never
waits. Faults that concern the transport (stalls, resets, pacing) are left to `server.py`.
"""

from __future__ import annotations

import collections
import email.utils
import functools
import ipaddress
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from urllib.parse import unquote, unquote_plus, urlsplit
from xml.sax.saxutils import escape

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.testing.standin.config import StandinConfig
from gpufeed.cachefs.testing.standin.listing import iso_time, list_objects
from gpufeed.cachefs.testing.standin.objects import Buckets, Stored
from gpufeed.cachefs.testing.standin.ranges import check_conditions, resolve
from gpufeed.cachefs.testing.standin.replies import (
    FileBody,
    OssError,
    Reply,
    Request,
    parse_xml,
    xml_reply,
)
from gpufeed.cachefs.testing.standin.scenario import Director, Effects, Scenario
from gpufeed.cachefs.testing.standin.signature import Verifier
from gpufeed.cachefs.testing.standin.uploads import Uploads

CONTROL_PREFIX = "/_standin/"
# x-oss-traffic-limit, bits a second: OSS's own bounds.
TRAFFIC_LIMIT_MIN = 819_200
TRAFFIC_LIMIT_MAX = 838_860_800
_CODES_503 = {
    "TotalQpsLimitExceeded": "0004-00000302",
    "PartitionQpsLimitted": "0026-00000028",
    "DownloadTrafficRateLimitExceeded": "0004-00000202",
    "ServiceUnavailable": "0001-00000101",
}


class Counters:
    """Requests and body bytes, by kind and by key."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.requests = 0
        self.bytes = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.keys: dict[str, list[int]] = {}

    def count(self, kind: str, name: str) -> None:
        """One request."""
        self.requests += 1
        self.kinds[kind] += 1
        self.keys.setdefault(name, [0, 0])[0] += 1

    def sent(self, name: str, size_bytes: int) -> None:
        """Body bytes that left."""
        self.bytes += size_bytes
        self.keys.setdefault(name, [0, 0])[1] += size_bytes

    def as_json(self) -> dict[str, object]:
        """For the control endpoint."""
        return {
            "requests": self.requests,
            "bytes": self.bytes,
            "requests_by_kind": dict(self.kinds),
            "by_key": {n: {"requests": r, "bytes": b} for n, (r, b) in self.keys.items()},
        }


class OssService:
    """The service; one a server."""

    def __init__(self, config: StandinConfig) -> None:
        self.config = config
        self.buckets = Buckets(config.root)
        self.counters = Counters()
        self.director = Director(Scenario.parse(config.scenario))
        self._verifier = Verifier(config.keys, config.region)
        self._ids = itertools.count(1)
        self._id_base = int(time.time())
        self._uploads = Uploads(self.buckets, self.request_id)
        self._listed: dict[str, list[str]] = {}

    def request_id(self) -> str:
        """24 hex digits."""
        return f"{self._id_base:012X}{next(self._ids):012X}"

    # --- addressing ---------------------------------------------------------------------------

    def address(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request:
        """Find bucket and key: in the host, in the path, or in an absolute (proxy) target."""
        host = headers.get("host", "")
        if target.startswith("http://"):
            parts = urlsplit(target)
            host = parts.netloc
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        path, _, raw_query = target.partition("?")
        query = tuple(
            (unquote_plus(name), unquote_plus(value))
            for name, _, value in (p.partition("=") for p in raw_query.split("&") if p)
        )
        rest = unquote(path[1:])
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if _is_path_style(name):
            bucket, _, key = rest.partition("/")
        elif re.match(r"(?:s3\.)?oss-", name):
            bucket, key = "", rest
            if rest:
                raise OssError(
                    403, "SecondLevelDomainForbidden",
                    "Please use virtual hosted style to access.", "0003-00001403",
                )  # fmt: skip
        else:
            bucket, key = name.partition(".")[0], rest
        return Request(method, bucket, key, query, headers, body)

    # --- dispatch -----------------------------------------------------------------------------

    def handle(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Reply, Effects, str]:
        """Answer; returns the reply, what the transport has to do to it, and the name to count."""
        is_head = method == "HEAD"
        effects = Effects()
        name = "/"
        request_id = self.request_id()
        try:
            request = self.address(method, target, headers, body)
            name = request.name
            kind = _kind(request)
            self.counters.count(kind, name)
            effects = self.director.effects(method, name)
            reply = self._answer(request, kind, effects)
        except OssError as error:
            reply = error.reply(request_id, headers.get("host", ""), is_head=is_head)
        except (ValueError, OverflowError) as malformed:
            # A number that is none, an authority that cannot be split: the client's doing.
            refusal = OssError(400, "InvalidArgument", str(malformed))
            reply = refusal.reply(request_id, headers.get("host", ""), is_head=is_head)
        except OSError as broken:
            # A full or unreadable disk under the root: an answer, for no client may wait in vain.
            failure = OssError(500, "InternalError", f"The stand-in's disk: {broken}")
            reply = failure.reply(request_id, headers.get("host", ""), is_head=is_head)
        reply.headers["x-oss-request-id"] = request_id
        reply.is_head = is_head
        if effects.qos_delay_ms is not None:
            reply.headers["x-oss-qos-delay-time"] = str(int(effects.qos_delay_ms))
        return reply, effects, name

    def _answer(self, request: Request, kind: str, effects: Effects) -> Reply:
        if effects.status is not None:
            raise OssError(
                effects.status, effects.code, "This was asked of the stand-in.",
                _CODES_503.get(effects.code, ""),
            )  # fmt: skip
        self._check_region(request)
        self._authenticate(request, effects)
        if effects.change_etag and request.key:
            self.buckets.change_version(request.bucket, request.key)
        of_uploads = self._uploads.operations.get(kind)
        if of_uploads is not None:
            return of_uploads(request)
        operation: Callable[[Request, Effects], Reply] = getattr(self, f"_do_{kind}")
        return operation(request, effects)

    def _check_region(self, request: Request) -> None:
        region = self.config.other_regions.get(request.bucket)
        if region is not None:
            raise OssError(
                403, "AccessDenied",
                "The bucket you are attempting to access must be addressed using the specified "
                "endpoint. Please send all future requests to this endpoint.", "0003-00001403",
                Bucket=request.bucket, Endpoint=f"oss-{region}.aliyuncs.com",
            )  # fmt: skip

    def _authenticate(self, request: Request, effects: Effects) -> None:
        anonymous = "authorization" not in request.headers and not any(
            name in ("OSSAccessKeyId", "x-oss-signature-version") for name, _ in request.query
        )
        if (
            anonymous
            and request.bucket in self.config.public_buckets
            and request.method in ("GET", "HEAD")
        ):
            return
        self._verifier.check(request, time.time(), tokens_expired=effects.expire_token)

    # --- objects ------------------------------------------------------------------------------

    def _do_get(self, request: Request, effects: Effects) -> Reply:
        stored = self.buckets.find(request.bucket, request.key)
        headers = _object_headers(stored)
        if check_conditions(request.headers, stored.etag, stored.modified_s):
            return Reply(304, headers)
        limit = self._traffic_limit(request)
        wanted = request.headers.get("range")
        found = None
        if wanted and not effects.ignore_range:
            standard = request.headers.get("x-oss-range-behavior") == "standard"
            found = resolve(wanted, stored.size_bytes, standard=standard)
        size = stored.size_bytes
        begin, end = found or (0, size)
        body = FileBody(stored.path, begin, end - begin, size, stored.modified_s)
        if found is None:
            return Reply(200, headers, file=body, pacing_bytes_per_s=limit)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return Reply(206, headers, file=body, pacing_bytes_per_s=limit)

    def _do_head(self, request: Request, effects: Effects) -> Reply:
        if not request.key:
            self.buckets.require(request.bucket)
            return Reply(200)
        return self._do_get(request, effects)

    @staticmethod
    def _traffic_limit(request: Request) -> int:
        text = request.headers.get("x-oss-traffic-limit") or request.argument("x-oss-traffic-limit")
        if not text:
            return 0
        if not text.isdecimal() or not TRAFFIC_LIMIT_MIN <= int(text) <= TRAFFIC_LIMIT_MAX:
            raise OssError(
                400, "InvalidArgument",
                f"x-oss-traffic-limit must be {TRAFFIC_LIMIT_MIN} to {TRAFFIC_LIMIT_MAX} bit/s.",
                "0016-00000901",
            )  # fmt: skip
        return int(text) // 8

    def _do_put(self, request: Request, _: Effects) -> Reply:
        source = request.headers.get("x-oss-copy-source")
        body = request.body if source is None else self.buckets.copied(source)
        stored = self.buckets.put(request.bucket, request.key, body)
        self._listed.pop(request.bucket, None)
        if source is not None:
            return xml_reply(
                f"<CopyObjectResult><LastModified>{iso_time(stored.modified_s)}</LastModified>"
                f'<ETag>"{stored.etag}"</ETag></CopyObjectResult>'
            )
        return Reply(200, {"ETag": f'"{stored.etag}"', "x-oss-hash-crc64ecma": str(stored.crc64)})

    def _do_delete(self, request: Request, _: Effects) -> Reply:
        self.buckets.delete(request.bucket, request.key)
        self._listed.pop(request.bucket, None)
        return Reply(204)

    def _do_delete_many(self, request: Request, _: Effects) -> Reply:
        self.buckets.require(request.bucket)
        parts = ['<?xml version="1.0" encoding="UTF-8"?>\n<DeleteResult>']
        for entry in parse_xml(request.body).iterfind("Object"):
            key = entry.findtext("Key", "")
            self.buckets.delete(request.bucket, key)
            parts.append(f"<Deleted><Key>{escape(key)}</Key></Deleted>")
        parts.append("</DeleteResult>")
        self._listed.pop(request.bucket, None)
        return xml_reply("".join(parts))

    # --- buckets ------------------------------------------------------------------------------

    def _do_list(self, request: Request, _: Effects) -> Reply:
        bucket = request.bucket
        goes_on = request.argument("continuation-token") or request.argument("marker")
        if not goes_on or bucket not in self._listed:
            self._listed[bucket] = self.buckets.keys(bucket)
        body = list_objects(
            request, self._listed[bucket], lambda key: self.buckets.find(bucket, key)
        )
        return Reply(200, {"Content-Type": "application/xml"}, body)

    def _do_bucket_info(self, request: Request, _: Effects) -> Reply:
        self.buckets.require(request.bucket)
        region = self.config.region
        return xml_reply(
            '<?xml version="1.0" encoding="UTF-8"?>\n<BucketInfo><Bucket>'
            f"<CreationDate>{iso_time(0)}</CreationDate>"
            f"<ExtranetEndpoint>oss-{region}.aliyuncs.com</ExtranetEndpoint>"
            f"<IntranetEndpoint>oss-{region}-internal.aliyuncs.com</IntranetEndpoint>"
            f"<Location>oss-{region}</Location><Name>{request.bucket}</Name>"
            "<Owner><DisplayName>1</DisplayName><ID>1</ID></Owner>"
            "<AccessControlList><Grant>private</Grant></AccessControlList>"
            "<StorageClass>Standard</StorageClass></Bucket></BucketInfo>"
        )

    def _do_list_buckets(self, _: Request, __: Effects) -> Reply:
        region = self.config.region
        entries = "".join(
            f"<Bucket><CreationDate>{iso_time(0)}</CreationDate><Name>{name}</Name>"
            f"<ExtranetEndpoint>oss-{region}.aliyuncs.com</ExtranetEndpoint>"
            f"<IntranetEndpoint>oss-{region}-internal.aliyuncs.com</IntranetEndpoint>"
            f"<Location>oss-{region}</Location><StorageClass>Standard</StorageClass></Bucket>"
            for name in self.buckets.names()
        )
        return xml_reply(
            '<?xml version="1.0" encoding="UTF-8"?>\n<ListAllMyBucketsResult>'
            f"<Owner><ID>1</ID><DisplayName>1</DisplayName></Owner><Buckets>{entries}</Buckets>"
            "</ListAllMyBucketsResult>"
        )

    # --- uploads in parts ---------------------------------------------------------------------

    def _do_complete(self, request: Request, _: Effects) -> Reply:
        reply = self._uploads.complete(request)
        self._listed.pop(request.bucket, None)
        return reply

    def _do_unknown(self, request: Request, _: Effects) -> Reply:
        raise OssError(
            405, "MethodNotAllowed",
            f"The stand-in does not do {request.method} with {dict(request.query)}.",
        )  # fmt: skip

    # --- control ------------------------------------------------------------------------------

    def control(self, method: str, path: str, body: bytes) -> Reply:
        """``GET counters``, ``POST reset``, ``PUT scenario``; not counted, not signed."""
        json_headers = {"Content-Type": "application/json"}
        action = (method, path.removeprefix(CONTROL_PREFIX))
        if action == ("GET", "counters"):
            return Reply(200, json_headers, json.dumps(self.counters.as_json()).encode())
        if action == ("POST", "reset"):
            self.counters.reset()
            self._listed.clear()
            return Reply(200, json_headers, b"{}")
        if action == ("PUT", "scenario"):
            try:
                scenario = Scenario.parse(json.loads(body))
            except (ValueError, TypeError, ConfigError) as error:
                return Reply(400, json_headers, json.dumps({"error": str(error)}).encode())
            self.director = Director(scenario)
            return Reply(200, json_headers, b"{}")
        return Reply(404, json_headers, b'{"error": "counters, reset or scenario"}')


_QUERY_KINDS = {
    ("POST", "delete"): "delete_many",
    ("GET", "bucketInfo"): "bucket_info",
    ("POST", "uploads"): "initiate",
    ("PUT", "uploadId"): "part",
    ("GET", "uploadId"): "list_parts",
    ("POST", "uploadId"): "complete",
    ("DELETE", "uploadId"): "abort",
}


def _kind(request: Request) -> str:
    """Which operation a request is."""
    for name, _ in request.query:
        found = _QUERY_KINDS.get((request.method, name))
        if found:
            return found
    if not request.bucket:
        return "list_buckets" if request.method == "GET" else "unknown"
    if not request.key:
        return {"GET": "list", "HEAD": "head"}.get(request.method, "unknown")
    return {"GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete"}.get(
        request.method, "unknown"
    )


def _object_headers(stored: Stored) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "ETag": f'"{stored.etag}"',
        "Last-Modified": _http_date(int(stored.modified_s)),
        "x-oss-object-type": "Normal",
        "x-oss-storage-class": "Standard",
        "x-oss-hash-crc64ecma": str(stored.crc64),
        "x-oss-server-time": "1",
    }


@functools.lru_cache(maxsize=4096)
def _http_date(at_s: int) -> str:
    return email.utils.formatdate(at_s, usegmt=True)


@functools.lru_cache(maxsize=256)
def _is_path_style(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
