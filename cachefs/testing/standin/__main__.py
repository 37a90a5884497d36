"""``python -m gpufeed.cachefs.testing.standin``: takes a `StandinConfig` as JSON on the first line.

For `StandinProcess`; people use ``gpufeed standin``.
"""

from __future__ import annotations

import json
import os
import sys

import uvloop

from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.testing.standin.command import serve
from gpufeed.cachefs.testing.standin.config import AccessKey, StandinConfig


def main() -> int:
    """Run a stand-in that ends with its parent."""
    # Unbuffered: what follows on standard input is the lifeline, watched by its descriptor.
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 1)
        if not piece:
            return 1
        line += piece
    value = json.loads(line)
    prepare = value.pop("prepare", False)
    value["keys"] = tuple(AccessKey(**key) for key in value["keys"])
    value["public_buckets"] = tuple(value["public_buckets"])
    try:
        uvloop.run(serve(StandinConfig(**value), prepare=prepare, lifeline=True))
    except GpufeedError as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201 the parent reads it
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
