"""The doctor's words: what was found, where each rank is, and what could not be seen. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specsync_core.diagnostics.behind import Missing
from specsync_core.diagnostics.compare import Comparison
from specsync_core.diagnostics.counted import Counted, SiteCount
from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.dump import Dump
from specsync_core.diagnostics.environment import Difference
from specsync_core.diagnostics.facts import BAD_NCCL
from specsync_core.diagnostics.progress import RankState, Wait
from specsync_core.diagnostics.recording import Recording, Value

NEAR_TIE = 0.02
"""Logits so close that the order of an all-reduce's sums may decide between them; bfloat16 has steps of 1/128 at 1."""
SHOWN_FRAMES = 4


@dataclass(frozen=True)
class Evidence:
    """What the doctor gathered, by group rank."""

    comparison: Comparison
    divergence: Divergence | None
    """Of committed values: by the recordings, or where they hold none by the counters."""
    healed: Divergence | None
    """The first of own values, of the same sources."""
    recordings: Mapping[int, Recording]
    dumps: Mapping[int, Dump]
    counted: Counted
    environment: tuple[Difference, ...]
    states: Mapping[int, RankState]
    stuck: Mapping[int, RankState]
    dead: tuple[int, ...]
    behind: tuple[int, ...]
    behind_at: Mapping[int, Missing]
    """By group rank, the call that a rank that is behind, or ended, has not come to."""
    missing: tuple[int, ...]
    different_wait: tuple[int, Mapping[int, tuple[str, str]]] | None
    notes: tuple[str, ...]


def verdict_lines(finding: str, evidence: Evidence) -> Iterator[str]:
    """Say it, the most important line first."""
    if evidence.divergence is not None:
        yield from _divergence_lines(evidence.divergence)
    yield from _dead_lines(evidence)
    yield from _halted_lines(evidence)
    yield from _wait_lines(evidence)
    if finding in ("hang", "dead-rank"):
        yield from _no_divergence_lines(finding, evidence)
    if finding == "silent-divergence":
        yield "Nothing hangs: the ranks committed different values silently, and go on with different states."
    if finding == "healed" and evidence.healed is not None:
        yield f"Healed: {_what_differs(evidence.healed)}, before the sync{_gap(evidence.healed)}."
        yield "Every committed value that was compared is equal on all ranks."
    if finding == "clean":
        yield "No divergence was seen in what is listed below."
    yield from _count_lines(evidence)
    yield from _measured_lines(evidence)
    yield from _counter_lines(evidence)
    yield from _caveat_lines(evidence)


def _divergence_lines(found: Divergence) -> Iterator[str]:
    yield f"First divergence: {_what_differs(found)}{_gap(found)}."
    if found.kind == "skip":
        yield "From there on the calls of these ranks do not match, whatever their values are."
    elif found.kind == "path":
        yield "No value at a declared site differed before it: the ranks chose by something that no site declares."
    elif found.phase == "before":
        yield "The shapes differed before the sync: the batches differed already, by something that no site declares."
    elif found.equal_before is True:
        yield "Own values were equal before the sync: something changed them after it."
    elif found.equal_before is False:
        yield "They differed before the sync too, and were not healed: the site is off, or in audit mode."


def _gap(found: Divergence) -> str:
    if found.logit_gap is None:
        return ""
    close = ": near a tie, rounding decides" if found.logit_gap < NEAR_TIE else ""
    return f" (its two best logits there are {found.logit_gap:.3g} apart{close})"


def _what_differs(found: Divergence) -> str:
    odd = rank_list(found.odd_ranks)
    others = tuple(rank for rank in sorted(found.values) if rank not in found.odd_ranks)
    if found.kind == "path":
        went = ", ".join(f"rank {rank} went to {_site(slug)}" for rank, slug in sorted(found.values.items()))
        where = f"step {found.step}: {went}"
    elif found.kind == "skip":
        call = f"{found.site}, step {found.step}, call {found.call}"
        where = f"{call}: {odd} left the sync out, {rank_list(others)} took part"
    else:
        where = f"{found.site}, step {found.step}, call {found.call}: {_held(found, others)}"
    if found.has_majority:
        where += f" ({odd} {'are' if len(found.odd_ranks) > 1 else 'is'} the odd one out of {len(found.values)} ranks)"
    return where


def _held(found: Divergence, others: tuple[int, ...]) -> str:
    if found.kind == "value" and found.index is None:
        between = f"{rank_list(found.odd_ranks)} and {rank_list(others)}"
        return f"{found.tensor} differs between {between}, behind the values that were kept"
    index = ", ".join(map(str, found.index)) if isinstance(found.index, tuple) else str(found.index)
    name = f"{found.tensor}[{index}]" if found.kind == "value" and found.index != () else found.tensor
    held = " and ".join(f"{show(found.values[rank])} on rank {rank}" for rank in (*found.odd_ranks, *others))
    return f"{name} is {held}"


def _measured_lines(evidence: Evidence) -> Iterator[str]:
    comparison = evidence.comparison
    if comparison.first_measured is not None:
        counts = ", ".join(f"{slug} {count}" for slug, count in sorted(comparison.measured.items()))
        first = _what_differs(comparison.first_measured)
        yield (
            f"Each rank went by its own measurement (calls): {counts}; first {first}."
            " Measurements differ by nature; in mode sync the ranks would have agreed on one."
        )


def _dead_lines(evidence: Evidence) -> Iterator[str]:
    for rank, state in evidence.states.items():
        if not state.is_abnormal or rank in evidence.stuck:  # the latter is said with its wait
            continue
        if state.wait is not None:
            yield _wait_line(rank, state, state.wait)
            continue
        is_known = state.last is not None and not state.is_cut_off
        where = f"; it was in no recorded wait, and last recorded {_last(state, evidence)}" if is_known else ""
        yield f"Rank {rank} {state.ending}{where}."


def halted_ranks(evidence: Evidence) -> dict[int, RankState]:
    """Ranks whose process is stopped now, by group rank."""
    return {rank: state for rank, state in evidence.states.items() if state.is_halted}


def _halted_lines(evidence: Evidence) -> Iterator[str]:
    for rank, state in halted_ranks(evidence).items():
        yield f"Rank {rank} {state.ending}: it can do nothing before `kill -CONT {state.pid}`, nor write a dump."


def _last(state: RankState, evidence: Evidence) -> str:
    record = state.last
    assert record is not None
    header = evidence.recordings[state.group_rank].header
    what = {
        "before": f"the values before {header.slug(record.site_number)}",
        "after": f"the values after {header.slug(record.site_number)}",
        "wait-begin": "the begin of a wait",
        "wait-end": "the end of a wait",
        "raised": f"an exception out of {header.slug(record.site_number)}",
        "closed": "its end",
    }[record.kind]
    return f"{what} in step {record.step} at {clock(record.wall_s)}"


def _wait_lines(evidence: Evidence) -> Iterator[str]:
    for rank, state in evidence.stuck.items():
        assert state.wait is not None
        yield _wait_line(rank, state, state.wait)
    free = [state for rank, state in evidence.states.items() if rank not in evidence.stuck]
    if not evidence.stuck:
        return
    for state in free:
        if state.status in ("running", "unknown", "stopped") and state.last is not None and not state.is_cut_off:
            now = f"{state.ending}; it was in no long wait" if state.is_gone else "is in no long wait"
            yield f"Rank {state.group_rank} {now}; it last recorded {_last(state, evidence)}."
        elif state.status == "finished":
            yield f"Rank {state.group_rank} {state.ending}."
    if len(evidence.stuck) > 1:
        places = {(state.wait.what, state.wait.detail) for state in evidence.stuck.values() if state.wait}
        if len(places) > 1:
            yield "These waits are not the same: no rank can leave one that its peers do not enter."
        elif len(evidence.stuck) == len(evidence.states):
            yield _same_place_line(evidence)
    if evidence.different_wait is not None:
        number, at = evidence.different_wait
        entered = ", ".join(f"rank {rank} entered {place(*texts)}" for rank, texts in sorted(at.items()))
        yield f"Their recorded waits first differ at number {number}: {entered}."
    for rank in evidence.behind:
        step, calls = evidence.states[rank].progress or (0, 0)
        yield f"Rank {rank} is behind: in step {step}, after {calls} site calls in it{_ahead(evidence)}."
    for missing in evidence.behind_at.values():
        inside = "which" if missing.is_inside else "which by now has left it, and which"
        yield (
            f"The first call that rank {missing.group_rank} has not come to is {missing.site}, call {missing.call}, in"
            f" step {missing.step}; rank {missing.ahead_rank}, {inside} is farthest, has."
        )
    yield from _stack_lines(evidence)


def _same_place_line(evidence: Evidence) -> str:
    """The mark is the engine's own word: where the stacks say otherwise, they are right."""
    inner = _inner_functions(evidence)
    if len(set(inner.values())) > 1:
        shown = ", ".join(f"{name} on rank {rank}" for rank, name in inner.items())
        return f"All ranks have the same mark, but their stacks differ ({shown}): they are not in the same call."
    states = evidence.stuck.values()
    verb = "waited" if all(state.is_gone or (state.wait and state.wait.failed) for state in states) else "wait"
    return f"All ranks {verb} in the same place."


def _inner_functions(evidence: Evidence) -> dict[int, str]:
    """By rank, the innermost function of the main threads in which not all of them are; {} where they are alike."""
    stacks = {rank: dump.stacks_of("MainThread")[: -SHOWN_FRAMES - 1 : -1] for rank, dump in evidence.dumps.items()}
    known = {rank: [frame.rpartition(" in ")[2] for frame in frames] for rank, frames in stacks.items() if frames}
    for names in zip(*known.values(), strict=False):
        if len(set(names)) > 1:
            return dict(zip(known, names, strict=True))
    return {}


def _stack_lines(evidence: Evidence) -> Iterator[str]:
    for rank, dump in evidence.dumps.items():
        if shown := [_short(frame) for frame in dump.stacks_of("MainThread")[-SHOWN_FRAMES:]]:
            yield f"Rank {rank}'s main thread, at {clock(dump.written_s)}: {' > '.join(shown)}."
    for rank, state in evidence.states.items():
        # Only where the recording's writer has a handler: others would be ended by the signal.
        is_asked = rank not in evidence.dumps and state.pid is not None and not state.is_halted
        if is_asked and evidence.recordings[rank].takes_signals:
            yield f"No stack of rank {rank}: `kill -USR1 {state.pid}` writes its dump; then ask again."


def _short(frame: str) -> str:
    """The last two parts of a frame's path."""
    path, _, rest = frame.rpartition(":")
    return "/".join(path.replace("\\", "/").split("/")[-2:]) + ":" + rest


def _ahead(evidence: Evidence) -> str:
    farthest = max((s.progress, -rank) for rank, s in evidence.states.items() if s.progress is not None)
    (step, calls), rank = farthest[0], -farthest[1]
    return f"; rank {rank} is in step {step}, after {calls}"


def _wait_line(rank: int, state: RankState, wait: Wait) -> str:
    since = f"since {clock(wait.since_s)}" + (f" ({wait.seconds:.1f} s)" if wait.seconds is not None else "")
    where = f"{place(wait.what, wait.detail)}, in step {wait.last_step}"
    if wait.failed is not None:
        after = f"after {wait.seconds or 0:.1f} s"
        return f"Rank {rank} entered {where}, at {clock(wait.since_s)}, and left it by {wait.failed} {after}."
    if state.is_gone:
        return f"Rank {rank} {state.ending}; it waited in {where}, {since}."
    return f"Rank {rank} waits in {where}, {since}."


def _no_divergence_lines(finding: str, evidence: Evidence) -> Iterator[str]:
    comparison = evidence.comparison
    if comparison.first_unsettled is not None:
        yield f"Own values differed: {_what_differs(comparison.first_unsettled)}; what was committed is not recorded."
    elif comparison.comparisons == 0:
        yield "No values could be compared, so the recordings do not say whether a decision diverged."
    elif finding == "hang" and halted_ranks(evidence):
        yield f"No divergence at declared sites in {comparison.comparisons} comparisons: a rank does not run."
    elif finding == "hang" and evidence.behind_at:
        yield f"No divergence at declared sites in {comparison.comparisons} comparisons: a rank is late, or elsewhere."
    elif finding == "hang":
        yield (
            f"No divergence at declared sites in {comparison.comparisons} comparisons:"
            f" look at the transport ({_transport(evidence)})."
        )


def _transport(evidence: Evidence) -> str:
    nccl = {rank: recording.header.versions.get("nccl") for rank, recording in evidence.recordings.items()}
    known = sorted({version for version in nccl.values() if version})
    if not known:
        return "NCCL is not loaded: gloo, or the network under it"
    return "; ".join(f"NCCL {version}" + (f": {BAD_NCCL[version]}" if version in BAD_NCCL else "") for version in known)


def _count_lines(evidence: Evidence) -> Iterator[str]:
    comparison = evidence.comparison
    if comparison.healed:
        counts = ", ".join(f"{slug} {count}" for slug, count in sorted(comparison.healed.items()))
        yield f"Healed by the sync (calls): {counts}."
    if comparison.agreed:
        counts = ", ".join(f"{slug} {count}" for slug, count in sorted(comparison.agreed.items()))
        yield f"Agreed upon from different own values, as is meant (calls): {counts}."
    if comparison.unsettled:
        counts = ", ".join(f"{slug} {count}" for slug, count in sorted(comparison.unsettled.items()))
        yield f"Own values differed, and what was committed is not recorded (calls): {counts}."
    if comparison.comparisons and comparison.steps is not None:
        first, last = comparison.steps
        yield (
            f"Compared {comparison.comparisons} committed tensors of {len(comparison.sites)} sites, steps {first} to"
            f" {last}, with rank {comparison.reference_rank}'s."
        )


def _counter_lines(evidence: Evidence) -> Iterator[str]:
    """What the ranks' own counters say: evidence that the comparison ran, whatever the recordings hold."""
    counted = evidence.counted
    for rank in sorted({each.group_rank for each in counted.sites if each.checks}):
        own = [each for each in counted.sites if each.group_rank == rank and not each.is_consensus]
        checks, mismatches = sum(each.checks for each in own), sum(each.mismatches for each in own)
        if checks:
            yield f"Rank {rank}'s counters: {checks_text(mismatches, checks)} at {len(own)} sites."
    for each in counted.sites:
        if each.first is not None and not each.is_consensus:
            yield f"  {_counted_site(each)}"


def _counted_site(each: SiteCount) -> str:
    first = each.first
    assert first is not None
    what = f"{first.get('tensor', 'value')}{list(first.get('index') or ()) or ''}"
    gap = first.get("logit_gap")
    close = f", two best logits {gap:.3g} apart" if isinstance(gap, (int, float)) else ""
    return (
        f"{each.site} ({each.mode}): {checks_text(each.mismatches, each.checks)}, first in step"
        f" {first['step']}, call {first.get('call')}: {what} is {show(first['own'])} on rank {each.group_rank} and"
        f" {show(first['rank0'])} on rank 0{close}."
    )


def _caveat_lines(evidence: Evidence) -> Iterator[str]:
    """What could not be seen, or makes the comparison doubtful."""
    recordings = evidence.recordings
    if evidence.missing and recordings:
        said = [rank for rank in evidence.missing if not evidence.states[rank].is_abnormal]
        if said:
            yield f"No recording of {rank_list(said)}: nothing is known of {'it' if len(said) == 1 else 'them'}."
    if evidence.comparison.without_values:
        yield (
            f"Of {evidence.comparison.without_values} tensors the shapes alone were compared: their values were not"
            " recorded (device tensors need a recorder with values=True; captured calls have none)."
        )
    for rank, recording in recordings.items():
        yield from _recording_caveats(rank, recording)
    for difference in evidence.environment:
        if difference.is_finding or evidence.divergence is not None or evidence.healed is not None:
            yield difference.text
    for rank, dump in evidence.dumps.items():
        if rank in recordings and is_over(dump, recordings[rank]):
            yield f"Rank {rank} wrote a dump at {clock(dump.written_s)}, and went on since: {dump.reason}."
    yield from evidence.notes


def is_over(dump: Dump, recording: Recording) -> bool:
    """Whether the rank has recorded more since its dump."""
    then, now = dump.recording.records, recording.records
    return bool(now) and (not then or now[-1].sequence > then[-1].sequence)


def _recording_caveats(rank: int, recording: Recording) -> Iterator[str]:
    if not recording.records:
        yield f"Rank {rank}'s recording is empty."
    if recording.wrapped:
        first = recording.records[0]
        yield (
            f"Rank {rank}'s ring kept its last {len(recording.records)} records, from step {first.step} on:"
            " an earlier divergence would not be seen."
        )
    if recording.truncated:
        yield f"Rank {rank}'s file is cut off: newer records may be missing, so nothing is said about where it waits."
    elif recording.torn or recording.lost:
        count = max(recording.torn, recording.lost)
        yield f"Rank {rank}: {count} records could not be read (torn while they were written)."


def checks_text(mismatches: int, checks: int) -> str:
    """``3 mismatches in 61,440 checks``."""
    return f"{mismatches:,} mismatch{'' if mismatches == 1 else 'es'} in {checks:,} check{'' if checks == 1 else 's'}"


def place(what: str, detail: str) -> str:
    """E.g. ``tp all-reduce (layer 1 mlp, batch 7)``."""
    return f"{what} ({detail})" if detail else what


def rank_list(ranks: Iterable[int]) -> str:
    """E.g. ``rank 1``, ``ranks 0, 2``."""
    names = [str(rank) for rank in ranks]
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)


def show(value: Value | str | None) -> str:
    return "unknown" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _site(slug: Value | str | None) -> str:
    return "no further site" if slug is None else str(slug)


def clock(wall_s: float) -> str:
    """Local time with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(wall_s)) + f".{int(wall_s % 1 * 1000):03d}"
