"""The start-up handshake: every rank shows its plan, and all go on or all raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsync_core.collectives import AbsentRankError, GroupStore
from specsync_core.errors import PlanMismatchError

MOST_DIFFERENCES = 8
"""Differences that one message spells out per rank."""


def shake_hands(store: GroupStore, summary: Mapping[str, Any], timeout_s: float) -> None:
    """Compare what every rank decided at start-up.

    Args:
        summary: the plan's decisions and the plugin versions; nested mappings that JSON can hold.

    Raises:
        PlanMismatchError: on every rank alike, when a rank is absent or differs from group rank 0; names the
            group ranks and what differs in them.
    """
    try:
        summaries = store.exchange("start-up handshake", summary, timeout_s)
    except AbsentRankError as error:
        raise PlanMismatchError(str(error)) from None
    lines = []
    for rank, other in enumerate(summaries):
        differences = _differences(summaries[0], other)
        lines += [f"  group rank {rank}: {line}" for line in differences[:MOST_DIFFERENCES]]
        if len(differences) > MOST_DIFFERENCES:
            lines.append(f"  group rank {rank}: and {len(differences) - MOST_DIFFERENCES} more differences")
    if lines:
        raise PlanMismatchError(
            "the ranks were started with different plans, so some would broadcast where others do not:\n"
            + "\n".join(lines)
            + "\n  Give every rank the same environment, policy file and installed plugins."
        )


def _differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [
            line
            for key in sorted({*expected, *actual})
            for line in _differences(
                expected.get(key, "absent"), actual.get(key, "absent"), f"{path}.{key}".lstrip(".")
            )
        ]
    return [] if expected == actual else [f"{path} is {actual}, on group rank 0 {expected}"]
