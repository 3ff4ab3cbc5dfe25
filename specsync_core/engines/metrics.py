"""Counters for Prometheus, from inside a worker.

A worker serves no page of its own. With ``PROMETHEUS_MULTIPROC_DIR`` set before the engine starts, prometheus_client
keeps them in that directory, and the engine's ``/metrics`` adds up what it finds there.
"""

from __future__ import annotations

import time
from typing import Any

from specsync_core.sync import SpecTpSync

INTERVAL_S = 5.0
"""Time between two readings; one waits for the device where counters live there."""

NAMES = {
    "calls": "Synchronised decisions, counted in calls",
    "mismatched_calls": "Calls in which a rank differed from group rank 0",
    "mismatches": "Elements in which a rank differed from group rank 0",
    "bytes": "Bytes that were broadcast",
}


class Metrics:
    """The counts of a `SpecTpSync` as ``specsync_*_total{site,group_rank}``; nothing without prometheus_client."""

    def __init__(self, sync: SpecTpSync, group_rank: int) -> None:
        self._sync = sync
        self._group_rank = str(group_rank)
        self._told: dict[tuple[str, str], int] = {}
        self._next_s = 0.0
        self._counters = _make_counters()

    def update(self, *, now: bool = False) -> None:
        """Bring the counters up to date, when `INTERVAL_S` are over. No collective: each rank tells of itself."""
        clock_s = time.monotonic()
        if not self._counters or (clock_s < self._next_s and not now):
            return
        self._next_s = clock_s + INTERVAL_S
        for slug, stats in self._sync.stats().items():
            for name, counter in self._counters.items():
                total = int(getattr(stats, name))
                if new := total - self._told.get((slug, name), 0):
                    counter.labels(site=slug, group_rank=self._group_rank).inc(new)
                    self._told[slug, name] = total


def _make_counters() -> dict[str, Any]:
    try:
        from prometheus_client import Counter
    except ImportError:
        return {}
    return {name: Counter(f"specsync_{name}", text, ("site", "group_rank")) for name, text in NAMES.items()}
