"""Where a node's sockets lie. The daemon and the clients must agree, so both ask here.

A root daemon (a DaemonSet, a system service) listens at `SYSTEM_SOCKET`; one started by a user in
that user's runtime directory, which is private (0700) and checked to be so, because whoever owns
the directory decides whom the client talks to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from gpufeed.cachefs.errors import OperatorError

SYSTEM_SOCKET = "/run/gpufeed/gpufeed.sock"


def runtime_directory(environ: Mapping[str, str]) -> str:
    """The user's own runtime directory; not made here."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    return f"{base}/gpufeed" if base else f"/tmp/gpufeed-{os.getuid()}"  # noqa: S108 checked below


def user_socket(environ: Mapping[str, str]) -> str:
    """Where a daemon started by this user listens."""
    return f"{runtime_directory(environ)}/gpufeed.sock"


def default_socket(environ: Mapping[str, str]) -> str:
    """Where a daemon started now, without configuration, listens."""
    return SYSTEM_SOCKET if os.getuid() == 0 else user_socket(environ)


def ensure_private_directory(path: str) -> None:
    """Make `path` with mode 0700, or check that it is ours and nobody else can write to it.

    Raises:
        OperatorError: it belongs to somebody else, is no directory, or others can write to it.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise OperatorError(f"cannot use the runtime directory {path}: {error}") from None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not ours or found.st_mode & 0o022:
        raise OperatorError(
            f"the runtime directory {path} is not private (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}); remove it, or point XDG_RUNTIME_DIR elsewhere"
        )
