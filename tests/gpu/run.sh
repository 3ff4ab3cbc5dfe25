#!/bin/sh
# Run the GPU tests and fail when none of them ran: a machine without GPUs skips them all, which proves nothing.
set -eu
python=${PYTHON:-python3}
report=$(mktemp)
"$python" -m pytest tests/gpu -q -p no:cacheprovider --junitxml="$report" "$@"
"$python" - "$report" <<'PY'
import sys
import xml.etree.ElementTree as ElementTree

suites = list(ElementTree.parse(sys.argv[1]).iter("testsuite"))
tests, skipped = (sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped"))
print(f"{tests - skipped} GPU tests ran, {skipped} were skipped")
sys.exit(0 if tests > skipped else "no GPU test ran")
PY
