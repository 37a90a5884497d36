"""Pytest fixtures for everybody who installs gpufeed: a real OSS stand-in for each test.

``oss_standin`` runs one with the bucket ``test-bucket`` over a temporary directory;
``oss_standin_factory`` starts any number with a `StandinConfig` of the test's own making. Nothing
is imported until a fixture is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpufeed.cachefs.testing.standin.process import StandinProcess

BUCKET = "test-bucket"
REGION = "cn-hangzhou"
KEY = "test-key"
SECRET = "test-secret"  # noqa: S105 a test server's public default


@pytest.fixture
def oss_standin_factory(tmp_path: Path) -> Iterator[Callable[..., StandinProcess]]:
    """``factory(**fields of StandinConfig)`` starts a stand-in that ends with the test."""
    from gpufeed.cachefs.testing.standin.config import StandinConfig  # noqa: PLC0415 see the top
    from gpufeed.cachefs.testing.standin.process import StandinProcess  # noqa: PLC0415 as above

    with contextlib.ExitStack() as stack:

        def start(**fields: object) -> StandinProcess:
            root = tmp_path / "buckets"
            (root / BUCKET).mkdir(parents=True, exist_ok=True)
            config = StandinConfig(**{"root": str(root), **fields})  # type: ignore[arg-type]
            return stack.enter_context(StandinProcess(config))

        yield start


@pytest.fixture
def oss_standin(oss_standin_factory: Callable[..., StandinProcess]) -> StandinProcess:
    """A stand-in with the bucket ``test-bucket``, key ``test-key``, secret ``test-secret``."""
    return oss_standin_factory()
