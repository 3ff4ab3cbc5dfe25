"""A file per rank with what it counted, for who watches from outside: ``SPECSYNC_STATS_DIR``.

It is there as soon as the ranks have met, and is written anew while counts change and when the process ends, so that it
is evidence also after a kill. `specsync bisect` tells by it whether a run got as far as a sync, and what differed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any, Protocol

from specsync_core.counters import SiteStats
from specsync_core.device_counts import uses_cuda
from specsync_core.groups import ParallelGroups
from specsync_core.plan import Plan
from specsync_core.whole_file import replace_whole

VERSION = 1
INTERVAL_S = 0.5
"""Time between two looks at the counters. Counts that are equal in two looks are settled."""
IDLE_S = 2.0
"""An engine that makes no step for so long captures no graph: then counters on a device may be read beside it."""

logger = logging.getLogger("specsync")
_numbers = itertools.count()


class Counting(Protocol):
    """What is watched: a `SpecTpSync`."""

    groups: ParallelGroups
    plan: Plan
    step: int

    def stats(self, *, wait: bool = True) -> Mapping[str, SiteStats]: ...


class StatsFile:
    """Keeps one rank's file up to date, from a thread of its own; no collective, and nothing on the calls' path.

    Args:
        directory: made when it is not there. A directory that cannot be written is a warning, for the engine goes on.
    """

    def __init__(self, sync: Counting, directory: Path) -> None:
        self._sync = sync
        tp = sync.groups.tp
        self.path = directory / f"rank-{tp.rank_in_group}-{os.getpid()}-{next(_numbers)}.json"
        self._fixed = {
            "version": VERSION,
            "group_rank": tp.rank_in_group,
            "world_size": tp.world_size,
            "pid": os.getpid(),
            "started_s": time.time(),
        }
        self._first_call_s: float | None = None
        self._stats: dict[str, Any] = {}
        self._settled = False
        self._moved_s = time.monotonic()
        self._step = sync.step
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._broken = False
        self._write(make=True)
        # Runs in children of multiprocessing too, unlike atexit.
        self._at_exit = util.Finalize(None, self.close, exitpriority=10)
        threading.Thread(target=self._watch, name="specsync-stats", daemon=True).start()

    def step(self) -> None:
        """Called between steps, where a device may be waited for: bring the file up to date now and then."""
        if uses_cuda() and time.monotonic() > self._moved_s + INTERVAL_S:
            self._look(wait=True)
        self._step, self._moved_s = self._sync.step, time.monotonic()

    def close(self) -> None:
        """Write the last counts. Later calls do nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._at_exit.cancel()
        if not uses_cuda():
            self._look(wait=False)
            self._settled = True
        self._write()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            idle = self._sync.step > 0 and time.monotonic() > self._moved_s + IDLE_S
            if not uses_cuda() or idle:
                try:
                    self._look(wait=False)
                except RuntimeError as error:  # a device that has failed; the file says what was known before
                    logger.warning("%s: the counters cannot be read: %s", self.path, error)
                    return

    def _look(self, wait: bool) -> None:
        stats = {slug: _as_json(each) for slug, each in self._sync.stats(wait=wait).items() if each.calls}
        if stats and self._first_call_s is None:
            self._first_call_s = time.time()
        settled = stats == self._stats
        if settled and self._settled:
            return
        self._stats, self._settled = stats, settled
        self._write()

    def _write(self, make: bool = False) -> None:
        content = {
            **self._fixed,
            "modes": {slug: planned.mode.value for slug, planned in self._sync.plan.sites.items()},
            "first_call_s": self._first_call_s,
            "settled": self._settled,
            "stats": self._stats,
        }
        with self._lock:
            try:
                if make:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_whole(self.path, json.dumps(content))
            except OSError as error:
                if not self._broken:
                    logger.warning("SPECSYNC_STATS_DIR: %s cannot be written: %s", self.path, error.strerror)
                self._broken = True


def _as_json(stats: SiteStats) -> dict[str, Any]:
    first = stats.first_divergence
    return {
        "calls": stats.calls,
        "compared": stats.compared,
        "mismatches": stats.mismatches,
        "first": None if first is None else {"step": first.step, "call": first.call},
    }
