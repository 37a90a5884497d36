"""nginx as the source: one worker, ``sendfile``, on loopback, that answers as OSS does.

It answers HEAD and ranged GET with ETag, ``Content-Range`` and the object's
``x-oss-hash-crc64ecma``, honours ``If-Match``, and looks at no signature. A bucket is reached in
the path (``/bucket/key``) and in the host name (``bucket.anything``).

The listening socket is ours and inherited, as nginx inherits it when it replaces itself (the
variable ``NGINX``): the port is free by construction, and no client can come too early. (Without a
master process nginx 1.22 crashes on an inherited socket, so it has one.)
"""

from __future__ import annotations

import http.client
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpufeed.bench.children import Child, Family
from gpufeed.bench.engine.objects import BUCKET, StoredObject
from gpufeed.cachefs.errors import OperatorError, WorkerError

READY_TIMEOUT_S = 20.0
BACKLOG = 512
_DIRECTORIES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
# Debian puts it where a user's PATH does not lead.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
# Pinned from its first instruction on.
_PINNED = (
    "import os, sys\n"
    "cpus = [int(cpu) for cpu in sys.argv[1].split(',')]\n"
    "os.sched_setaffinity(0, cpus)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def find_nginx() -> str:
    """The program.

    Raises:
        OperatorError: it is not installed.
    """
    found = shutil.which("nginx", path=SEARCH_PATH)
    if found is None:
        raise OperatorError(
            "nginx is not installed, and no Python server is fast enough to measure against; "
            "`./run deps` installs it from Debian"
        )
    return found


def nginx_version() -> str | None:
    """As it says it, for example ``nginx/1.22.1``; None if it does not say."""
    done = subprocess.run(  # noqa: S603 found by us
        [find_nginx(), "-v"],
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
        check=False,
    )
    return done.stderr.rpartition(" ")[2].strip() or None


def start_nginx(
    family: Family, directory: Path, objects: Sequence[StoredObject], cpus: Sequence[int]
) -> tuple[Child, str]:
    """Serve the objects under `directory` from `cpus`; returns the child and the endpoint.

    Raises:
        OperatorError: not installed.
        WorkerError: it does not come up; the message has the end of its log.
    """
    program = find_nginx()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        config = directory / "nginx.conf"
        config.write_text(configuration(directory, objects, port))
        child = family.start(
            "nginx",
            [
                *(sys.executable, "-I", "-S", "-c", _PINNED, ",".join(map(str, cpus))),
                *(program, "-p", str(directory), "-c", str(config), "-e", "stderr"),
            ],
            pass_fds=(listener.fileno(),),
            environment={"NGINX": f"{listener.fileno()};"},
            service=True,
        )
    _await(child, port, objects[0])
    return child, f"http://127.0.0.1:{port}"


def _await(child: Child, port: int, first: StoredObject) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_TIMEOUT_S)
    try:
        connection.request("HEAD", f"/{BUCKET}/{first.key}")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"nginx does not answer: {error}{child.log_tail()}") from error
    finally:
        connection.close()
    told = answer.headers.get("x-oss-hash-crc64ecma")
    if answer.status != 200 or told != str(first.crc64):
        raise WorkerError(
            f"nginx answers {answer.status} with checksum {told}, want 200 with "
            f"{first.crc64}{child.log_tail()}"
        )


def configuration(directory: Path, objects: Sequence[StoredObject], port: int) -> str:
    """The configuration file's text."""
    temporary = "\n".join(f"    {name}_temp_path {directory}/{name}-temp;" for name in _DIRECTORIES)
    checksums = "\n".join(
        f"        {prefix}/{item.key} {item.crc64};"
        for item in objects
        for prefix in (f"/{BUCKET}", "")
    )
    # As root it would give up the right to read our directories.
    user = f"user {pwd.getpwuid(0).pw_name};\n" if os.geteuid() == 0 else ""
    return f"""
{user}daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr warn;
events {{
    worker_connections 4096;
}}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 600s;
    keepalive_requests 100000000;
    default_type application/octet-stream;
    map_hash_max_size 1048576;
    map_hash_bucket_size 256;
{temporary}
    map $uri $crc64 {{
{checksums}
    }}
    server {{
        listen 127.0.0.1:{port} default_server;
        root {directory};
        add_header x-oss-hash-crc64ecma $crc64;
        add_header x-oss-object-type Normal;
        add_header x-oss-request-id $request_id;
    }}
    server {{
        listen 127.0.0.1:{port};
        server_name {BUCKET}.*;
        root {directory}/{BUCKET};
        add_header x-oss-hash-crc64ecma $crc64;
        add_header x-oss-object-type Normal;
        add_header x-oss-request-id $request_id;
    }}
}}
"""


def server_pid(child: Child, directory: Path) -> int:
    """The process that serves: the one worker below the master.

    Raises:
        WorkerError: it is gone.
    """
    try:
        master = int((directory / "nginx.pid").read_text())
        children = Path(f"/proc/{master}/task/{master}/children").read_text()
        return int(children.split()[0])
    except (OSError, ValueError, IndexError) as error:
        raise WorkerError(f"nginx is gone{child.log_tail()}") from error
