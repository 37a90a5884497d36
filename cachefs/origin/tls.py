"""How the certificates of endpoints are checked, in one place."""

from __future__ import annotations

import ssl

from gpufeed.cachefs.errors import ConfigError


def client_context(ca_file: str) -> ssl.SSLContext:
    """Checks names and chains, by `ca_file` (PEM) in place of the system's authorities if given.

    Raises:
        ConfigError: the file cannot be read or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"origin.ca_file {ca_file} is no file with PEM certificates: {error}"
        ) from None
