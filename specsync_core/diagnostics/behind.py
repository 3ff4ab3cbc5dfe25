"""Which call a rank has not come to, although another rank has: who is behind, and at which site. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from specsync_core.diagnostics.divergence import Call, list_calls
from specsync_core.diagnostics.progress import RankState
from specsync_core.diagnostics.recording import Recording


@dataclass(frozen=True)
class Missing:
    """The first call that one rank has not come to and another has."""

    group_rank: int
    site: str
    step: int
    call: int
    ahead_rank: int
    """The rank that is farthest."""
    is_inside: bool
    """The rank that is ahead has not left this call either."""


def missing_calls(
    recordings: Mapping[int, Recording], states: Mapping[int, RankState], ranks: Collection[int]
) -> dict[int, Missing]:
    """Find for each of these ranks the call that it should have come to next; only where that is certain."""
    known = {rank: state.progress for rank, state in states.items() if state.progress is not None}
    if not known:
        return {}
    ahead_rank = max(known, key=lambda rank: (known[rank], -rank))
    ahead = list_calls(recordings[ahead_rank])
    header = recordings[ahead_rank].header
    found = {}
    for rank in ranks:
        if rank == ahead_rank or rank not in known:
            continue
        call = _first_missing(ahead, list_calls(recordings[rank]))
        if call is not None:
            slug = header.slug(call.site)
            found[rank] = Missing(rank, slug, call.step, call.number, ahead_rank, not call.after)
    return found


def _first_missing(ahead: list[Call], own: list[Call]) -> Call | None:
    """The first call of the one rank behind the last that both have made; None when they went different ways."""
    made = {(call.site, call.number) for call in own}
    numbers = {(call.site, call.number) for call in ahead}
    if own and (own[-1].site, own[-1].number) not in numbers:
        return None  # it is not behind: it is elsewhere
    last = max((place for place, call in enumerate(ahead) if (call.site, call.number) in made), default=-1)
    rest = ahead[last + 1 :]
    return rest[0] if rest else None
