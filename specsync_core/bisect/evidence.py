"""Reads what the ranks of one trial left in their stats files (`specsync_core.stats_file`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsync_core.bisect.order import PHASES
from specsync_core.bisect.trials import Counts
from specsync_core.bounded_file import MAX_TEXT_BYTES, read_bounded
from specsync_core.registry import Site

VERSION = 1
"""Of the files; one of another version is left alone."""


@dataclass(frozen=True)
class Evidence:
    """What a trial left behind."""

    has_met: bool = False
    """Ranks were there, and had agreed on their plans."""
    world_size: int = 0
    """Ranks of the largest group."""
    modes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By site, the modes in which ranks ran it."""
    counts: Counts | None = None


def read_evidence(directory: Path, sites: Iterable[Site], began_s: float) -> Evidence:
    """Read every rank's file; what cannot be read is as if it were not there.

    Args:
        sites: gives the order of sites at which ranks first differed in the same step.
        began_s: wall clock at the trial's begin.
    """
    files = [content for path in sorted(directory.glob("rank-*.json")) if (content := _read(path)) is not None]
    if not files:
        return Evidence()
    modes: dict[str, set[str]] = {}
    for content in files:
        for slug, mode in content["modes"].items():
            modes.setdefault(slug, set()).add(mode)
    return Evidence(
        has_met=True,
        world_size=max(content["world_size"] for content in files),
        modes={slug: frozenset(found) for slug, found in modes.items()},
        counts=_merge(files, {site.slug: site for site in sites}, began_s),
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_bounded(path, MAX_TEXT_BYTES))
        if content["version"] != VERSION:
            return None
        for key, kind in (("group_rank", int), ("world_size", int), ("modes", dict), ("stats", dict)):
            if not isinstance(content[key], kind):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found: dict[str, Any] = content
    return found


def _merge(files: Sequence[dict[str, Any]], sites: Mapping[str, Site], began_s: float) -> Counts:
    checks: dict[str, int] = {}
    mismatches: dict[str, int] = {}
    first: dict[str, int] = {}
    for content in files:
        for slug, stats in content["stats"].items():
            checks[slug] = checks.get(slug, 0) + int(stats["compared"])
            if stats["mismatches"]:
                mismatches[slug] = mismatches.get(slug, 0) + int(stats["mismatches"])
                step = stats["first"]["step"] if stats["first"] else 0
                first[slug] = min(first.get(slug, step), step)

    def order(slug: str) -> tuple[int, int, int]:
        site = sites.get(slug)
        return (first[slug], PHASES.index(site.phase), site.number) if site else (first[slug], len(PHASES), 0)

    calls_s = [content["first_call_s"] for content in files if content.get("first_call_s")]
    ranks = {content["group_rank"] for content in files}
    return Counts(
        checks=checks,
        mismatches=mismatches,
        differed=tuple(sorted(mismatches, key=order)),
        complete=all(content.get("settled") for content in files)
        and ranks == set(range(max(content["world_size"] for content in files))),
        ranks=len(ranks),
        first_call_s=max(0.0, min(calls_s) - began_s) if calls_s else None,
    )
