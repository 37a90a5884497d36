"""The services on loopback, and no pauses."""

from __future__ import annotations

import pytest

from gpufeed.cachefs.origin.credentials import provider as provider_module
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.tokenservices import TokenServices

BASE = AccessKey("base-key", "base-secret")
BASE_STS = AccessKey("base-sts", "base-sts-secret", "base-token")


@pytest.fixture
def services(tls_files):
    files = (tls_files.certificate, tls_files.key)
    with TokenServices(tls_files=files, base_keys=(BASE, BASE_STS)) as services:
        yield services


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(provider_module, "PAUSE_S", 0.0)
