#!/usr/bin/env bash
# All checks that need a GPU, in under eight minutes: one JSON object on standard output, everything
# else on standard error. Sets nothing up: it takes the environment that ./run made, or $PYTHON.
# Further arguments go to pytest.
#
# Ends with 0 if all passed, 1 if something failed or did not end in time, 77 where there is no CUDA
# device (then every check is "skipped" and "device" is null).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || { echo "check.sh: no $python; run ./run test quick once, or set PYTHON" >&2; exit 1; }
exec timeout --signal=INT --kill-after=9 470 "$python" tests/gpu/check.py "$@"
