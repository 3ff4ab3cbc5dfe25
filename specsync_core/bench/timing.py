"""Time a call in a replayed graph, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]
Meet = Callable[[], object]
"""Brings the ranks together before each sample."""

REPLAYS = 20
WARM_UP = 3


def graph_us(call: Call, meet: Meet, repeats: int = 50) -> float:
    """Microseconds of one call: the median over replays of a captured graph that holds ``repeats`` of them."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    samples = []
    for _ in range(WARM_UP + REPLAYS):
        torch.cuda.synchronize()
        meet()
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(end)) * 1e3 / repeats)
    return statistics.median(samples[WARM_UP:])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_us(call: Call, meet: Meet, repeats: int = 200, rounds: int = 9) -> float:
    """Microseconds of host time of one eager call: the median over rounds; the device is idle before each."""
    for _ in range(WARM_UP):
        call()
    samples = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        meet()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(samples)
