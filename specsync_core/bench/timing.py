"""Time calls in replayed graphs, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], object]
Meet = Callable[[], object]
"""Brings the ranks together before each sample."""

REPLAYS = 20
WARM_UP = 3


def replays_us(calls: Mapping[str, Call], meet: Meet, line_up: Call, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each call, replay by replay, in graphs that hold ``repeats`` of it.

    The calls take turns, so that what changes on the machine meanwhile changes them alike.

    Args:
        meet: brings the ranks' hosts together.
        line_up: enqueues what lets every rank's device begin the replay at the same moment.

    Returns:
        By call: `REPLAYS` samples of this rank; the i-th ones are of one turn.
    """
    graphs = {key: _capture(call, meet, repeats) for key, call in calls.items()}
    samples: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(WARM_UP + REPLAYS):
        for key, graph in graphs.items():
            torch.cuda.synchronize()
            meet()
            start, end = _event(), _event()
            line_up()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[key].append(float(start.elapsed_time(end)) * 1e3 / repeats)
    return {key: taken[WARM_UP:] for key, taken in samples.items()}


def _capture(call: Call, meet: Meet, repeats: int) -> Any:
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    return graph


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
