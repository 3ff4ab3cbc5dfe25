"""What recording costs a step of the demo engine: records per step, seconds per record, and their share.

    python benchmarks/recorder_cost.py

Runs the demo on two CPU ranks without a fault, with recordings; counts what a step records; then writes the same
mix of records again, alone in one process, and times it. The difference of two runs' step times would be smaller
than their noise.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch

from specsync_core.demo.config import Job
from specsync_core.demo.options import Options, prepare
from specsync_core.demo.runner import Runner
from specsync_core.diagnostics import Recorder, read_recording, recording_path
from specsync_core.manager import load_registry

STEPS, REPEATS = 32, 2000


def measure(algorithm: str, folder: Path) -> dict[str, float | str]:
    """Return the recorder's share of a step of one algorithm."""
    folder.mkdir()
    jobs = [Job(name, algorithm, "all", STEPS, recorded=name == "recorded") for name in ("recorded", "bare")]
    runner = Runner(prepare(Options(algorithm=algorithm)), folder, lambda *_: None)
    ends = {end.job.name: end for end in runner.run(jobs)}
    records = read_recording(recording_path(folder / "recorded", 0)).records
    per_step = Counter(record.kind for record in records if 4 <= record.step < STEPS - 1)
    steps = len({record.step for record in records if 4 <= record.step < STEPS - 1})
    call_s, wait_s = seconds_per_record(folder)
    spent_s = (
        call_s * (per_step["before"] + per_step["after"]) + wait_s * (per_step["wait-begin"] + per_step["wait-end"])
    ) / steps
    step_ms = ends["bare"].step_ms or float("nan")
    return {
        "algorithm": algorithm,
        "step_ms": round(step_ms, 2),
        "site_records_per_step": round((per_step["before"] + per_step["after"]) / steps, 1),
        "wait_records_per_step": round((per_step["wait-begin"] + per_step["wait-end"]) / steps, 1),
        "us_per_site_record": round(1e6 * call_s, 2),
        "us_per_wait_record": round(1e6 * wait_s, 2),
        "recorder_us_per_step": round(1e6 * spent_s, 1),
        "share_percent": round(100 * 1e3 * spent_s / step_ms, 2),
    }


def seconds_per_record(folder: Path) -> tuple[float, float]:
    """Medians: a record of a small CPU tensor at a site's call, and one of a marked wait."""
    sites = load_registry().sites
    site = next(site for site in sites if site.slug == "dspark-accept-greedy")
    tensors = [torch.arange(4), torch.arange(4), torch.zeros(4, dtype=torch.int64)]
    calls, waits = [], []
    with Recorder(folder / "alone", group_rank=0, world_size=2, ranks=(0, 1), plan_digest="", sites=sites) as recorder:
        for step in range(REPEATS):
            begin = time.perf_counter()
            recorder.before(site, tensors, step)
            recorder.after(site, tensors, step)
            middle = time.perf_counter()
            with recorder.waiting("tp all-reduce", "layer 1 mlp [16, 128]"):
                pass
            calls.append((middle - begin) / 6)
            waits.append((time.perf_counter() - middle) / 2)
    return median(calls), median(waits)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        rows = [measure(algorithm, Path(scratch) / algorithm) for algorithm in ("dspark", "dflash", "eagle")]
    print(json.dumps({"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}))
