"""What every rank counted, brought to group rank 0 on request.

Counters are read by the engine's thread when it begins a step: then no graph is being captured. Where no step begins
for `IDLE_S`, the engine is idle, and the store's thread reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from specsync_core.bounded_store import POLL_S
from specsync_core.collectives import GroupStore

IDLE_S = 1.0
FAST_S = 0.02


class Reports:
    """One rank's part in reports.

    Args:
        topic: as `Pledges`.
        read: this rank's report, as JSON can hold it.
    """

    def __init__(self, store: GroupStore, topic: str, read: Callable[[], Any]) -> None:
        self._store = store
        self._topic = topic
        self._read = read
        self._handled = 0
        self._wanted: int | None = None
        self._since = 0.0
        self._report: Any = None

    def begin_step(self) -> None:
        """Read the counters where a report is wanted, once for each request."""
        if self._wanted is not None and self._report is None:
            self._report = self._read()

    def look(self) -> float:
        """Take part in a report, if one is wanted; return in how many seconds to look again."""
        if self._wanted is None:
            wanted = self._store.read(f"{self._topic}/report")
            if wanted is None or wanted <= self._handled:
                return POLL_S
            self._report, self._since = None, time.monotonic()
            self._wanted = self._handled = wanted
        elif self._report is None and time.monotonic() > self._since + IDLE_S:
            self._report = self._read()
        if self._report is not None:
            self._store.post(f"{self._topic}/report/{self._wanted}/{self._store.rank}", self._report)
            self._wanted = None
        return POLL_S if self._wanted is None else FAST_S

    def collect(self, wait_s: float) -> list[Any]:
        """Ask every rank, and return their reports by group rank; None of a rank that did not report in time."""
        number = self._handled + 1
        for rank in range(self._store.world_size):
            self._store.remove(f"{self._topic}/report/{number - 1}/{rank}")
        self._store.post(f"{self._topic}/report", number)
        deadline = time.monotonic() + max(wait_s, 2 * POLL_S + IDLE_S)
        while True:
            keys = [f"{self._topic}/report/{number}/{rank}" for rank in range(self._store.world_size)]
            reports = [self._store.read(key) for key in keys]
            if None not in reports or time.monotonic() > deadline:
                return reports
            time.sleep(FAST_S)
