"""Which sites each rank went through, step by step, and where the ranks' ways part. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specsync_core.diagnostics.divergence import Call, Divergence, odd_ranks
from specsync_core.diagnostics.recording import Header, Record, Recording, Value


@dataclass
class Path:
    """The sites that one rank called, by step, as far as its recording can be trusted to be whole."""

    steps: dict[int, list[Call]]
    last_step: int | None
    is_finished: bool
    doubtful: Sequence[tuple[float, float]]
    """Ranges of steps of which records are missing."""

    def is_whole(self, step: int) -> bool:
        """Every call of the step, up to the rank's present one, is here: also when there is none."""
        inside = self.last_step is not None and step <= self.last_step
        return inside and not any(first <= step <= last for first, last in self.doubtful)

    def is_ended(self, step: int) -> bool:
        """No further call of this step will come."""
        return self.is_finished or (self.last_step is not None and step < self.last_step)


def trace_path(recording: Recording, calls: Sequence[Call]) -> Path:
    steps: dict[int, list[Call]] = {}
    for call in calls:
        steps.setdefault(call.step, []).append(call)
    closed = recording.closed
    return Path(
        steps=steps,
        last_step=max(steps, default=None),
        is_finished=closed is not None and closed.what == "finished",
        doubtful=tuple(_doubtful_steps(recording.records)),
    )


def _doubtful_steps(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Steps beside a gap in the sequence numbers, the gap before the oldest kept record included."""
    last_sequence, last_step = 0, -math.inf
    for record in records:
        if record.sequence != last_sequence + 1:
            yield last_step, float(record.step)
        last_sequence, last_step = record.sequence, float(record.step)


def first_path_divergence(
    recordings: Mapping[int, Recording], calls: Mapping[int, Sequence[Call]], reference: int
) -> tuple[float, Divergence] | None:
    """Find the first step in which ranks went through different sites, and its place in the reference's program."""
    paths = {rank: trace_path(recording, calls[rank]) for rank, recording in recordings.items()}
    header = recordings[reference].header
    for step in sorted({step for path in paths.values() for step in path.steps}):
        whole = {rank: path for rank, path in paths.items() if path.is_whole(step)}
        found = _compare_paths(whole, step, reference) if reference in whole and len(whole) > 1 else None
        if found is not None:
            place, sites = found
            return _position(paths[reference], step, place), _describe_path(sites, step, header)
    return None


def _compare_paths(paths: Mapping[int, Path], step: int, reference: int) -> tuple[int, dict[int, int | None]] | None:
    """The first place in a step where ranks differ, and the site that each went through there."""
    own = {rank: [call.site for call in path.steps.get(step, ())] for rank, path in paths.items()}
    for place in range(max(len(sites) for sites in own.values())):
        at: dict[int, int | None] = {}
        for rank, sites in own.items():
            if place < len(sites):
                at[rank] = sites[place]
            elif paths[rank].is_ended(step):
                at[rank] = None
        if reference in at and len(set(at.values())) > 1:
            return place, at
    return None


def _position(path: Path, step: int, place: int) -> float:
    calls = path.steps.get(step, [])
    if place < len(calls):
        return calls[place].position
    later = [call.position for other, own in path.steps.items() if other > step for call in own]
    return min(later, default=math.inf) - 0.5


def _describe_path(sites: Mapping[int, int | None], step: int, header: Header) -> Divergence:
    reference = header.group_rank
    odd, has_majority = odd_ranks(sites, reference)
    values: dict[int, Value | str | None] = {
        rank: None if site is None else header.slug(site) for rank, site in sites.items()
    }
    right = next(rank for rank in sites if rank not in odd)
    return Divergence(
        phase="after",
        kind="path",
        site=str(values[right] or values[odd[0]]),
        step=step,
        call=0,
        group_rank=odd[0],
        odd_ranks=odd,
        has_majority=has_majority,
        reference_rank=reference,
        tensor=None,
        index=None,
        own=values[odd[0]],
        rank0=values[reference],
        values=values,
        equal_before=None,
    )
