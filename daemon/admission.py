"""Whose a connection is: by the socket that it came to, its token, and, where asked, its user.

A socket of a tenant's own is reached by whoever its directory is mounted for; at the daemon's
common socket the token says which tenant. Where a tenant has both, its own socket asks for its
token too. Tokens are read anew for each connection, so that a file that is replaced (a mounted
secret that rotates) counts at once; they are compared in constant time, and never logged or shown.

Users (``uids``, `SO_PEERCRED`) mean something on one machine without user namespaces only. In pods
everybody is uid 0, and who is of another user namespace is shown as the overflow uid, which is
refused wherever users are asked for. Process ids are never used.

Pure but for `read_tokens`.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence

from gpufeed.cachefs.errors import AccessDeniedError, ConfigError
from gpufeed.cachefs.handshake import TOKEN_CHARACTERS_MAX
from gpufeed.cachefs.units import KIB
from gpufeed.daemon.tenantconfig import OVERFLOW_UID, SECTION, TenantConfig, uids_of

_LOG = logging.getLogger("gpufeed.admission")

TOKEN_CHARACTERS_MIN = 16
TOKEN_FILE_BYTES_MAX = 64 * KIB
# The daemon's own socket, which is nobody's in particular.
COMMON_DOOR = ""


def read_tokens(path: str) -> tuple[str, ...]:
    """The tokens in a file: one a line; empty lines, and those that begin with ``#``, are none.

    Raises:
        ConfigError: it cannot be read, has none, or one is too short or too long.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(TOKEN_FILE_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from None
    lines = (line.strip() for line in text.splitlines())
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if len(data) > TOKEN_FILE_BYTES_MAX or not tokens:
        raise ConfigError(
            f"the token file {path} has {len(tokens)} tokens in {len(data)} bytes or more; it must "
            f"have one a line, in at most {TOKEN_FILE_BYTES_MAX} bytes"
        )
    for number, token in enumerate(tokens, 1):
        if not TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX:
            raise ConfigError(
                f"token {number} of {path} has {len(token)} characters; it must have "
                f"{TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX}: openssl rand -hex 32"
            )
    return tokens


class Admission:
    """See the top of the file.

    Args:
        tenants: all of them; none: everybody is of one.
        uids: of ``daemon.uids``: who may come at all; empty: not asked.
        read: reads a token file.
    """

    def __init__(
        self,
        tenants: Sequence[TenantConfig],
        uids: Sequence[str] = (),
        read: Callable[[str], tuple[str, ...]] = read_tokens,
    ) -> None:
        self._tenants = tuple(tenants)
        self._read = read
        self._uids = uids_of("daemon.uids", uids)
        self._uids_of: Mapping[str, frozenset[int]] = {
            tenant.name: uids_of(f"{SECTION}.{tenant.name}.uids", tenant.uids) for tenant in tenants
        }
        self._by_door = {t.socket_path: t for t in self._tenants if t.socket_path}

    def admit(self, door: str, token: str | None, uid: int) -> str:
        """The name of the tenant that a connection is of; empty where there is only one.

        Args:
            door: the path of the tenant's own socket that it came to, or `COMMON_DOOR`.
            token: what it said.
            uid: its user, as the kernel tells.

        Raises:
            AccessDeniedError: it is nobody's, with what to set.
        """
        _check_uid(self._uids, uid, "daemon.uids")
        if not self._tenants:
            return ""
        owner = self._by_door.get(door)
        if owner is None:
            owner = self._by_token(token)
        elif owner.token_file and not self._has(owner, token or ""):
            raise AccessDeniedError(
                f"this socket is of the tenant {owner.name}, which asks for a token too: set "
                "GPUFEED_TOKEN, or GPUFEED_TOKEN_FILE, to one that is valid"
            )
        _check_uid(self._uids_of[owner.name], uid, f"{SECTION}.{owner.name}.uids")
        return owner.name

    def _by_token(self, token: str | None) -> TenantConfig:
        if not token:
            raise AccessDeniedError(
                "this daemon serves several tenants, and the connection says of which it is not: "
                "set GPUFEED_TOKEN, or GPUFEED_TOKEN_FILE, to your tenant's token, or "
                "GPUFEED_DAEMON to its own socket"
            )
        # All of them, always: how long it takes tells nothing.
        found = [tenant for tenant in self._tenants if self._has(tenant, token)]
        if len(found) != 1:
            raise AccessDeniedError(
                "the token is of no tenant of this daemon (any more): ask its operator for one"
                if not found
                else "the token is of more than one tenant: the daemon's operator has to change it"
            )
        return found[0]

    def _has(self, tenant: TenantConfig, token: str) -> bool:
        if not tenant.token_file:
            return False
        try:
            tokens = self._read(tenant.token_file)
        except ConfigError as error:
            _LOG.error("nobody can come as tenant %s: %s", tenant.name, error)
            return False
        said = token.encode("utf-8", "surrogatepass")
        matches = [hmac.compare_digest(said, known.encode()) for known in tokens]
        return any(matches)


def _check_uid(allowed: frozenset[int], uid: int, name: str) -> None:
    if not allowed:
        return
    if uid == OVERFLOW_UID:
        raise AccessDeniedError(
            f"{name} is set, and your user is not known here (user id {uid}): you are in another "
            "user namespace, where users cannot be told apart"
        )
    if uid not in allowed:
        raise AccessDeniedError(f"user {uid} is not one of {name}")
