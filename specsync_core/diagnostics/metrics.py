"""Counters for Prometheus, from inside a worker.

A worker serves no page of its own. With ``PROMETHEUS_MULTIPROC_DIR`` set before the engine starts, as SGLang and vLLM
do it, prometheus_client keeps each process's values in that directory, and the engine's ``/metrics`` adds up what it
finds there. ``specsync_core/dashboards/specsync.json`` is a Grafana dashboard over these names.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import ref

from specsync_core.diagnostics.faults import FaultInjector
from specsync_core.groups import Group, select_group
from specsync_core.sync import SpecTpSync

INTERVAL_S = 5.0
"""Time between two readings. One costs the host some tenths of a millisecond, and waits for no work of the engine's."""

SITE_LABELS = ("site", "group", "group_rank")
RANK_LABELS = ("group", "group_rank")

SITE_COUNTERS = {
    "calls": "Synchronised decisions, counted in calls",
    "bytes": "Bytes that were broadcast",
    "compared": "Elements that were compared with those of group rank 0",
    "mismatches": "Elements in which a rank differed from group rank 0; healed in mode sync",
    "mismatched_calls": "Calls in which a rank differed from group rank 0",
    "faults": "Faults that were injected on purpose",
}
"""Exported as ``specsync_NAME_total``, labelled with `SITE_LABELS`. All but the last are fields of `SiteStats`."""
CHECKS = "checks"
"""Exported as ``specsync_checks_total``: elements compared over all sites. While it grows, something is looking."""
GAUGES = {
    "step": ("The engine's step", RANK_LABELS),
    "plan_info": ("1 for the digest of the plan in force", ("digest", *RANK_LABELS)),
}

logger = logging.getLogger("specsync")


class Metrics:
    """Exports what a `SpecTpSync` counts on this rank; does nothing where prometheus_client is not installed.

    Labels: ``group_rank`` is the rank in the site's group, ``group`` the group's name and the global rank of its first
    member (``tp-0``): several tensor-parallel groups may share one page.
    """

    def __init__(self, sync: SpecTpSync) -> None:
        self._sync = sync
        self._told: dict[tuple[str, ...], int] = {}
        self._digest = ""
        self._next_s = 0.0
        self._instruments = _instruments()
        groups = sync.groups
        self._broadcast = _labels("attn_tp" if groups.dp_attention else "tp", select_group(groups))
        self._host = _labels("tp", groups.tp)
        atexit.register(_update_last, ref(self))

    def update(self, *, now: bool = False) -> None:
        """Bring the page up to date when `INTERVAL_S` are over; call it in every step, outside capture.

        No collective: each rank tells of itself. Counters on a device are read beside the engine's stream.
        """
        clock_s = time.monotonic()
        if not self._instruments or (clock_s < self._next_s and not now):
            return
        self._next_s = clock_s + INTERVAL_S
        checks = 0
        for slug, stats in self._sync.stats(wait=False).items():
            checks += stats.compared
            for name in SITE_COUNTERS.keys() - {"faults"}:
                self._count(name, getattr(stats, name), slug, *self._group_of(slug))
        self._count(CHECKS, checks, *self._broadcast)
        for slug, struck in self._faults():
            self._count("faults", struck, slug, *self._group_of(slug))
        self._instruments["step"].labels(*self._broadcast).set(self._sync.step)
        self._tell_plan()

    def _count(self, name: str, total: int, *labels: str) -> None:
        key = (name, *labels)
        if new := total - self._told.get(key, 0):
            self._instruments[name].labels(*labels).inc(new)
            self._told[key] = total

    def _tell_plan(self) -> None:
        digest = self._sync.plan.digest[:12]
        if digest != self._digest:
            info = self._instruments["plan_info"]
            if self._digest:
                info.labels(self._digest, *self._broadcast).set(0)
            info.labels(digest, *self._broadcast).set(1)
            self._digest = digest

    def _group_of(self, slug: str) -> tuple[str, str]:
        return self._broadcast if self._sync.plan[slug].site.kind == "broadcast" else self._host

    def _faults(self) -> Iterator[tuple[str, int]]:
        """Per site, how many faults have struck on this rank."""
        struck: dict[str, int] = {}
        for injector in (tap for tap in self._sync.taps if isinstance(tap, FaultInjector)):
            sites = {fault.text: fault.site.slug for fault in injector.faults}
            for text, times in injector.firings().items():
                struck[sites[text]] = struck.get(sites[text], 0) + times
        yield from struck.items()


def _update_last(metrics: ref[Metrics]) -> None:
    """Export what the last seconds of a process have counted."""
    if (found := metrics()) is not None:
        with suppress(RuntimeError):  # the device may be gone
            found.update(now=True)


def _labels(name: str, group: Group) -> tuple[str, str]:
    ranks = getattr(group, "ranks", None)
    return f"{name}-{ranks[0]}" if ranks else name, str(group.rank_in_group)


@cache
def _instruments() -> dict[str, Any]:
    """Make the instruments, once per process: their names are registered."""
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        logger.info("no counters are exported without prometheus_client: pip install prometheus_client")
        return {}
    made: dict[str, Any] = {
        name: Counter(f"specsync_{name}", text, SITE_LABELS) for name, text in SITE_COUNTERS.items()
    }
    made[CHECKS] = Counter(f"specsync_{CHECKS}", "Elements that were compared, over all sites", RANK_LABELS)
    for name, (text, labels) in GAUGES.items():
        # Of a process that has ended nothing stays: its step and plan are not in force any more.
        made[name] = Gauge(f"specsync_{name}", text, labels, multiprocess_mode="livemax")
    return made


def exported_names() -> set[str]:
    """Return the names of every metric as a page shows them."""
    return {f"specsync_{name}_total" for name in (*SITE_COUNTERS, CHECKS)} | {f"specsync_{name}" for name in GAUGES}
