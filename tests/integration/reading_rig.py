"""What the tests of the read API read."""

from __future__ import annotations

from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.units import KIB

SHARDS = 6
SAMPLES = 40
URL = f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar"
EXTENT = 256 * KIB
