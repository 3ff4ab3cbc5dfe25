"""The start-up handshake: every rank shows its plan, and all go on or all raise."""

from __future__ import annotations

from specsync_core.collectives import AbsentRankError, GroupStore
from specsync_core.errors import PlanMismatchError
from specsync_core.plan import Plan, summary_differences

MOST_DIFFERENCES = 8
"""Differences that one message spells out per rank."""


def shake_hands(store: GroupStore, plan: Plan) -> None:
    """Compare what every rank decided at start-up: plans and plugin versions.

    Raises:
        PlanMismatchError: on every rank alike, when a rank is absent or differs from group rank 0; names the
            group ranks, what differs in them, and where their policies come from.
    """
    own = {"decides": plan.summary(), "from": plan.policy_origins()}
    try:
        shown = store.exchange("start-up handshake", own, plan.timeout_s)
    except AbsentRankError as error:
        raise PlanMismatchError(str(error)) from None
    lines = []
    for rank, other in enumerate(shown):
        if other["decides"] == shown[0]["decides"]:
            continue
        names = "on group rank 0", f"on group rank {rank}"
        differences = list(summary_differences(shown[0]["decides"], other["decides"], *names))
        lines += differences[:MOST_DIFFERENCES]
        if len(differences) > MOST_DIFFERENCES:
            lines.append(f"and {len(differences) - MOST_DIFFERENCES} more differences {names[1]}")
    if lines:
        origins = "; ".join(f"group rank {rank}: {', '.join(other['from'])}" for rank, other in enumerate(shown))
        raise PlanMismatchError(
            "the ranks were started with different plans, so some would broadcast where others do not:\n"
            + "".join(f"  {line}\n" for line in lines)
            + f"  Their policies come from: {origins}.\n"
            "  Give every rank the same environment, policy file and installed plugins."
        )
