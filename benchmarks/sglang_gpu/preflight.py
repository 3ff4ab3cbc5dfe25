"""Import the engine, again and again with what is missing replaced; print the missing modules, comma-separated.

    BENCH_ABSENT=$(python benchmarks/sglang_gpu/preflight.py)

For a machine without network: a module that only unused features need gets a placeholder (`stubs/`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = (
    "sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager, "
    "sglang.srt.models.llama, sglang.srt.models.dspark, sglang.srt.models.dflash, sglang.srt.models.llama_eagle, "
    "sglang.srt.speculative.eagle_worker_v2, sglang.srt.speculative.dspark_components.dspark_worker_v2, "
    "specsync_bench_shim; specsync_bench_shim.avoid_compiling()"
)


def main() -> int:
    absent: list[str] = []
    paths = ":".join(map(str, (HERE / "shim", HERE / "stubs", os.environ.get("PYTHONPATH", ""))))
    for _ in range(8):
        tried = subprocess.run(
            [sys.executable, "-c", f"import {ENGINE}"],
            env=os.environ | {"BENCH_ABSENT": ",".join(absent), "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        missing = re.findall(r"No module named '(\w+)", tried.stderr)
        if tried.returncode == 0 or not missing or missing[-1] in absent or missing[-1] in ("sglang", "sgl_kernel"):
            break
        absent.append(missing[-1])
    print(",".join(absent))
    if tried.returncode:
        print(tried.stderr[-2500:], file=sys.stderr)
    return tried.returncode


if __name__ == "__main__":
    sys.exit(main())
