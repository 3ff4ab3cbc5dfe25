"""Compare the recordings of a group call by call: what differed first, what was healed. No torch.

Calls are aligned by site, the site's call number and the step; "first" means earliest in the reference rank's
program order. Values are compared bit by bit (through checksums): 0.0 and -0.0 differ, a NaN equals itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specsync_core.diagnostics.divergence import Call, Divergence, list_calls, odd_ranks
from specsync_core.diagnostics.path import first_path_divergence
from specsync_core.diagnostics.recording import Header, Record, Recording, Value


@dataclass
class Comparison:
    """What the comparison of all ranks showed."""

    reference_rank: int | None = None
    comparisons: int = 0
    """Tensors of committed values that were compared with the reference rank's, over all other ranks."""
    without_values: int = 0
    """Pairs of tensors of which only shapes could be compared."""
    sites: set[str] = field(default_factory=set)
    steps: tuple[int, int] | None = None
    """First and last step that were compared."""
    divergence: Divergence | None = None
    first_healed: Divergence | None = None
    healed: Counter[str] = field(default_factory=Counter)
    """Calls whose own values differed, and whose committed values were compared and equal."""
    agreed: Counter[str] = field(default_factory=Counter)
    """The same at sites of kind consensus, where own values are meant to differ."""
    measured: Counter[str] = field(default_factory=Counter)
    """Calls in which ranks went on with measurements of their own, as in modes off and audit. No decision yet."""
    first_measured: Divergence | None = None
    first_unsettled: Divergence | None = None
    unsettled: Counter[str] = field(default_factory=Counter)
    """Calls whose own values differed, and whose committed values are not all known."""


class _Verdict(NamedTuple):
    """How the records of one tensor in one phase compare."""

    kind: Literal["equal", "value", "shape", "unknown"]
    groups: Mapping[int, object]
    """By rank, what it holds: equal objects are equal content."""


def compare(recordings: Mapping[int, Recording]) -> Comparison:
    """Compare recordings by group rank. Never raises on what a reader let through."""
    result = Comparison(reference_rank=min(recordings, default=None))
    if result.reference_rank is None:
        return result
    calls = {rank: list_calls(recording) for rank, recording in recordings.items()}
    header = recordings[result.reference_rank].header
    position = math.inf
    by_key = {rank: {(call.site, call.number): call for call in own} for rank, own in calls.items()}
    for call in calls[result.reference_rank]:
        peers = {rank: keyed.get((call.site, call.number)) for rank, keyed in by_key.items()}
        aligned = {rank: peer for rank, peer in peers.items() if peer is not None and peer.step == call.step}
        if len(aligned) > 1:
            found = _compare_call(call, aligned, header, result)
            if found is not None and result.divergence is None:
                result.divergence, position = found, call.position
    path = first_path_divergence(recordings, calls, result.reference_rank)
    if path is not None and path[0] < position:
        result.divergence = path[1]
    return result


def _compare_call(call: Call, aligned: Mapping[int, Call], header: Header, result: Comparison) -> Divergence | None:
    """Count one call into the result; return its divergence of committed values, if any."""
    slug, reference = header.slug(call.site), result.reference_rank
    assert reference is not None
    before = _compare_tensors({rank: peer.before for rank, peer in aligned.items()}, reference)
    after = _compare_tensors({rank: peer.after for rank, peer in aligned.items()}, reference)
    if header.is_measurement(call.site):
        if (differs := _first_different(after)) is not None:
            result.measured[slug] += 1
            found = _describe("after", differs, after, call, aligned, header, None)
            result.first_measured = result.first_measured or found
        return None
    for verdict in after.values():
        others = len(verdict.groups) - 1
        if verdict.kind == "unknown":
            result.without_values += others
        elif others > 0:
            result.comparisons += others
            result.sites.add(slug)
            result.steps = (result.steps[0] if result.steps else call.step, call.step)

    if (skip := _describe_skip(call, aligned, header)) is not None:
        return skip
    differ_before, differ_after = _first_different(before), _first_different(after)
    if differ_after is not None:
        mine = before.get(differ_after)
        equal_before = None if mine is None or mine.kind == "unknown" else mine.kind == "equal"
        return _describe("after", differ_after, after, call, aligned, header, equal_before)
    if differ_before is not None:
        own = _describe("before", differ_before, before, call, aligned, header, None)
        return _count_own_difference(own, before, after, header.is_consensus(call.site), result)
    return None


def _describe_skip(call: Call, aligned: Mapping[int, Call], header: Header) -> Divergence | None:
    """Whether some ranks left the sync of this call out while others took part in it."""
    done = {rank: any(record.skipped for record in peer.after.values()) for rank, peer in aligned.items() if peer.after}
    took_part = {rank for rank in aligned if not done.get(rank, False)}
    skipped = tuple(rank for rank, is_skipped in done.items() if is_skipped)
    if not skipped or not took_part:
        return None
    values = {rank: "left out" if rank in skipped else "took part" for rank in aligned}
    return Divergence(
        phase="after",
        kind="skip",
        site=header.slug(call.site),
        step=call.step,
        call=call.number,
        group_rank=skipped[0],
        odd_ranks=skipped,
        has_majority=False,
        reference_rank=header.group_rank,
        tensor=None,
        index=None,
        own="left out",
        rank0=values[header.group_rank],
        values=values,
        equal_before=None,
    )


def _count_own_difference(
    own: Divergence,
    before: Mapping[int, _Verdict],
    after: Mapping[int, _Verdict],
    is_consensus: bool,
    result: Comparison,
) -> Divergence | None:
    """Count a call whose own values differed and whose committed values were not seen to differ."""
    if _is_healed(before, after):
        (result.agreed if is_consensus else result.healed)[own.site] += 1
        if not is_consensus:
            result.first_healed = result.first_healed or own
        return None
    if own.kind == "shape":
        return own  # no broadcast can heal it, and whether it was even tried is not recorded
    result.unsettled[own.site] += 1
    result.first_unsettled = result.first_unsettled or own
    return None


def _is_healed(before: Mapping[int, _Verdict], after: Mapping[int, _Verdict]) -> bool:
    """Every tensor that differed on some ranks was compared on all of them afterwards, and was equal."""
    return all(
        index in after and after[index].kind == "equal" and set(own.groups) <= set(after[index].groups)
        for index, own in before.items()
    )


def _first_different(verdicts: Mapping[int, _Verdict]) -> int | None:
    return next((index for index, verdict in sorted(verdicts.items()) if verdict.kind in ("value", "shape")), None)


def _compare_tensors(records: Mapping[int, Mapping[int, Record]], reference: int) -> dict[int, _Verdict]:
    """Compare every tensor that the reference rank has, by its position."""
    verdicts = {}
    for index in records[reference]:
        own = {rank: tensors[index] for rank, tensors in records.items() if index in tensors}
        verdicts[index] = _compare_records(own)
    return verdicts


def _compare_records(records: Mapping[int, Record]) -> _Verdict:
    shapes = {rank: (shape_text(record), record.tensor_count) for rank, record in records.items()}
    if len(set(shapes.values())) > 1:
        return _Verdict("shape", shapes)
    if not all(record.has_values for record in records.values()):
        return _Verdict("unknown", shapes)
    sums = {rank: (record.crc32, record.payload) for rank, record in records.items()}
    return _Verdict("equal" if len(set(sums.values())) == 1 else "value", sums)


def shape_text(record: Record) -> str:
    """E.g. ``int64 [4]``; beyond four dimensions the number of elements stands for the rest."""
    sizes = [str(size) for size in record.dims]
    if record.ndim > len(record.dims):
        sizes.append(f"... {record.ndim} dimensions, {record.numel} elements")
    return f"{record.dtype} [{', '.join(sizes)}]" if record.tensor_count else "nothing"


def _describe(
    phase: Literal["before", "after"], tensor: int, verdicts: Mapping[int, _Verdict], call: Call,
    aligned: Mapping[int, Call], header: Header, equal_before: bool | None,
) -> Divergence:  # fmt: skip
    verdict = verdicts[tensor]
    reference = header.group_rank
    odd, has_majority = odd_ranks(verdict.groups, reference)
    records = {rank: getattr(aligned[rank], phase)[tensor] for rank in verdict.groups}
    right = next(rank for rank in verdict.groups if rank not in odd)
    index: int | None = None
    values: dict[int, Value | str | None] = {rank: shape_text(record) for rank, record in records.items()}
    if len({record.tensor_count for record in records.values()}) > 1:
        values = {rank: f"{text}, one of {records[rank].tensor_count}" for rank, text in values.items()}
    if verdict.kind == "value":
        index = _first_index(records[odd[0]], records[right])
        values = {rank: None if index is None else record.values[index] for rank, record in records.items()}
    return Divergence(
        phase=phase,
        kind="shape" if verdict.kind == "shape" else "value",
        site=header.slug(call.site),
        step=call.step,
        call=call.number,
        group_rank=odd[0],
        odd_ranks=odd,
        has_majority=has_majority,
        reference_rank=reference,
        tensor=header.tensor(call.site, tensor),
        index=index,
        own=values[odd[0]],
        rank0=values[reference],
        values=values,
        equal_before=equal_before,
    )


def _first_index(one: Record, other: Record) -> int | None:
    """The first kept element whose bits differ."""
    count = len(one.values)
    size = len(one.payload) // count if count else 1
    chunks = ((one.payload[i * size : (i + 1) * size], other.payload[i * size : (i + 1) * size]) for i in range(count))
    return next((index for index, (mine, theirs) in enumerate(chunks) if mine != theirs), None)
