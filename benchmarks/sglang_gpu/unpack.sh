#!/usr/bin/env bash
# On the GPU machine: unpack the bundle $1 into the folder $2, which then goes on PYTHONPATH.
set -euo pipefail
bundle=$(realpath "$1")
mkdir -p "$2"
[ -d "$2/sglang" ] || for part in "$bundle"/*.tar.xz; do python3 -m tarfile -e "$part" "$2"; done
[ -d "$2/transformers" ] || python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$2" "$bundle"/wheels/*.whl
