"""A divergence, and the calls it is found in. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specsync_core.diagnostics.recording import Record, Recording, Value


@dataclass(frozen=True)
class Divergence:
    """The first place where ranks held different values."""

    phase: Literal["before", "after"]
    """``after``: the values that everything is derived from. ``before``: own values, which a sync may heal; shapes
    that differ before it cannot be healed."""
    kind: Literal["value", "shape", "path", "skip"]
    """``path``: the ranks went through different sites; ``own`` and ``rank0`` are then slugs, None for no site.
    ``shape``: they are dtypes and sizes, as text. ``skip``: some ranks left the sync out, and others took part."""
    site: str
    step: int
    call: int
    """The site's call number, from 1; 0 where the kind is ``path``."""
    group_rank: int
    """The odd one out: of the minority with three or more ranks, else the one that is not the reference."""
    odd_ranks: tuple[int, ...]
    """Every rank that does not hold what the majority, or without one the reference rank, holds."""
    has_majority: bool
    """Three or more ranks were compared and more than half of them agree."""
    reference_rank: int
    """Rank 0, or the lowest rank whose recording is there."""
    tensor: str | None
    index: int | tuple[int, ...] | None
    """Of the first different element, flat or as the counters have it; None when it lies behind the kept values."""
    own: Value | str | None
    rank0: Value | str | None
    """What the reference rank holds."""
    values: Mapping[int, Value | str | None]
    """By group rank, of all ranks that were compared here."""
    equal_before: bool | None
    """Of phase ``after``: own values were equal before the sync; None when that was not seen."""
    logit_gap: float | None = None
    """Where the engine gave logits: the distance between the best two of the request that differed, on its rank."""


@dataclass
class Call:
    """One call of a site on one rank, as far as its records were kept."""

    site: int
    number: int
    step: int
    position: int
    """Sequence number of its first record: the rank's program order."""
    before: dict[int, Record] = field(default_factory=dict)
    after: dict[int, Record] = field(default_factory=dict)


def list_calls(recording: Recording) -> list[Call]:
    """Gather a recording's site calls in program order."""
    calls: dict[tuple[int, int], Call] = {}
    for record in recording.records:
        if record.kind in ("before", "after"):
            key = (record.site_number, record.call)
            call = calls.setdefault(key, Call(*key, record.step, record.sequence))
            (call.before if record.kind == "before" else call.after)[record.tensor_index] = record
    return list(calls.values())


def odd_ranks(groups: Mapping[int, object], reference: int) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that differ from the majority, or without one from the reference, and whether there is one."""
    counts = Counter(groups.values())
    content, votes = counts.most_common(1)[0]
    has_majority = len(groups) >= 3 and 2 * votes > len(groups)
    right = content if has_majority else groups[reference]
    return tuple(sorted(rank for rank, held in groups.items() if held != right)), has_majority
