"""What the ranks' counters say, as dumps hold them: evidence also where no values were recorded. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.dump import Dump

COUNTS = ("calls", "compared", "mismatches", "mismatched_calls")


@dataclass(frozen=True)
class SiteCount:
    """One site's counters on one rank."""

    group_rank: int
    site: str
    mode: str
    calls: int
    checks: int
    """Elements compared."""
    mismatches: int
    mismatched_calls: int
    first: Mapping[str, Any] | None
    """The first divergence, as `specsync_core.counters.FirstDivergence` has it."""
    is_consensus: bool

    @property
    def is_healed(self) -> bool:
        return self.mode == "sync"


@dataclass(frozen=True)
class Counted:
    """The counters of all ranks that left a dump."""

    sites: tuple[SiteCount, ...] = ()

    @property
    def checks(self) -> int:
        return sum(each.checks for each in self.sites)

    @property
    def mismatches(self) -> int:
        return sum(each.mismatches for each in self.sites if not each.is_consensus)

    def first(self, *, healed: bool) -> Divergence | None:
        """The first divergence by step that was, or was not, healed; as a divergence of own or of committed values."""
        found = [
            each for each in self.sites if each.first is not None and each.is_healed == healed and not each.is_consensus
        ]
        earliest = min(found, key=lambda each: int(each.first["step"]) if each.first else 0, default=None)
        return None if earliest is None else _divergence(earliest)


def read_counts(dumps: Mapping[int, Dump]) -> Counted:
    """Read the counters out of dumps; what is not as it should be is left out."""
    return Counted(tuple(_counts(dumps)))


def _counts(dumps: Mapping[int, Dump]) -> Iterator[SiteCount]:
    for rank, dump in sorted(dumps.items()):
        kinds = {entry.slug: entry.kind for entry in dump.recording.header.sites.values()}
        for slug, stats in (dump.stats or {}).items():
            if not isinstance(stats, Mapping):
                continue
            calls, checks, mismatches, mismatched = (stats.get(key, 0) for key in COUNTS)
            first = stats.get("first_divergence")
            if not all(isinstance(count, int) for count in (calls, checks, mismatches, mismatched)):
                continue
            yield SiteCount(
                group_rank=rank,
                site=slug,
                mode=str(stats.get("mode", "")),
                calls=calls,
                checks=checks,
                mismatches=mismatches,
                mismatched_calls=mismatched,
                first=first if _is_record(first) else None,
                is_consensus=kinds.get(slug) == "consensus",
            )


def _is_record(first: Any) -> bool:
    if first is None:
        return True
    return isinstance(first, Mapping) and isinstance(first.get("step"), int) and "own" in first and "rank0" in first


def _divergence(count: SiteCount) -> Divergence:
    first = count.first
    assert first is not None
    index = tuple(first.get("index") or ())
    return Divergence(
        phase="before" if count.is_healed else "after",
        kind="value",
        site=count.site,
        step=int(first["step"]),
        call=int(first.get("call", 0)),
        group_rank=count.group_rank,
        odd_ranks=(count.group_rank,),
        has_majority=False,
        reference_rank=0,
        tensor=str(first.get("tensor", "value")),
        index=index[0] if len(index) == 1 else index,
        own=first["own"],
        rank0=first["rank0"],
        values={count.group_rank: first["own"], 0: first["rank0"]},
        equal_before=None if count.is_healed else False,
        logit_gap=first.get("logit_gap"),
    )
