"""What a call costs the host: off, with one rank, and per transport over gloo. Ratios are of one run.

Usage: python benchmarks/host_cost.py [--repeat N] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.testing import run_ranks

BATCH = 16
ROUNDS = 11
"""Alternating rounds; the median of their means is reported."""


def triple(rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(BATCH) + rank + offset for offset in range(3))


def planned(policy: str, transport: str = "auto", counters: str = "on") -> SpecTpSync:
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TRANSPORT": transport, "SPECSYNC_COUNTERS": counters}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan)


def medians_us(cases: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median over alternating rounds of the mean time of one call, in microseconds."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, call in cases.items():
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            samples[name].append((time.perf_counter() - start) / repeat * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def allocated_bytes(call: Callable[[], object]) -> int:
    """Python memory that 10,000 calls leave behind."""
    call()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10_000):
        call()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def without_a_collective(rank: int, world_size: int, repeat: int) -> dict[str, Any]:
    tensors = triple(rank)
    a, b, c = tensors
    point = planned("off").point("dspark-accept-greedy")

    def empty(a: object, b: object, c: object) -> None: ...

    cases = {"point": lambda: point(a, b, c), "empty function": lambda: empty(a, b, c)}
    return {"us": medians_us(cases, repeat * 100), "left_bytes": allocated_bytes(cases["point"])}


def over_gloo(rank: int, world_size: int, repeat: int) -> dict[str, float]:
    tensors = triple(rank)
    syncs = {
        "one call, grouped": planned("all", "grouped", "off"),
        "one call, grouped, counting": planned("all", "grouped", "on"),
        "one call, group": planned("all", "group", "off"),
        "one call, audit": planned("all:audit", "grouped"),
    }
    cases: dict[str, Callable[[], object]] = {
        name: (lambda point: lambda: point(*tensors))(sync.point("dspark-accept-greedy"))
        for name, sync in syncs.items()
    }
    cases["three broadcasts"] = lambda: [dist.broadcast(tensor, src=0) for tensor in tensors]
    single = syncs["one call, grouped"].point("dspark-target")
    cases["one tensor, grouped"] = lambda: single(tensors[0])
    cases["one broadcast"] = lambda: dist.broadcast(tensors[0], src=0)
    for call in cases.values():
        call()
    dist.barrier()
    return medians_us(cases, repeat)


def measure(repeat: int) -> dict[str, Any]:
    off, one = (
        run_ranks(without_a_collective, 2, 120, (repeat,))[0],
        run_ranks(without_a_collective, 1, 120, (repeat,))[0],
    )
    ranks = run_ranks(over_gloo, 2, 300, (repeat,))
    gloo = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    baseline = gloo["three broadcasts"]
    return {
        "what": "microseconds of host time per call; gloo rows: the slower of two ranks",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "batch": BATCH,
        "off": off,
        "one_rank": one,
        "gloo_us": gloo,
        "ratio_to_three_broadcasts": {name: value / baseline for name, value in gloo.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200, help="calls per round (default 200)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    result = measure(options.repeat)
    for name in ("off", "one_rank"):
        us = result[name]["us"]
        print(
            f"{name:30} {us['point']:9.3f} us  (an empty function: {us['empty function']:.3f} us)"
            f"  leaves {result[name]['left_bytes']} bytes after 10,000 calls"
        )
    for name, value in result["gloo_us"].items():
        print(f"{name:30} {value:9.1f} us  {result['ratio_to_three_broadcasts'][name]:6.2f} of three broadcasts")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
