"""The doctor's first line: the answer, for somebody who reads no further. No torch."""

from __future__ import annotations

from specsync_core.diagnostics.behind import Missing
from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.progress import GONE
from specsync_core.diagnostics.verdict import Evidence, checks_text, halted_ranks, place, rank_list, show


def headline(finding: str, evidence: Evidence) -> str:
    """Say what happened in one sentence, and no more than was seen."""
    found = evidence.divergence
    if finding in ("drift-hang", "drift-crash", "silent-divergence"):
        assert found is not None
        return f"{_blame(found, evidence)}{_consequence(finding, evidence)}."
    if finding == "dead-rank":
        return _dead(evidence)
    if finding == "hang":
        return _hang(evidence)
    if finding == "healed":
        assert evidence.healed is not None
        return (
            f"Healed: {evidence.healed.site} differed on {rank_list(evidence.healed.odd_ranks)}, first in step"
            f" {evidence.healed.step}; every committed value that was compared is equal ({_committed(evidence)})."
        )
    if finding == "environment":
        first = next(each.text for each in evidence.environment if each.is_finding)
        return f"{first} No divergence was seen: {checks(evidence)}."
    if finding == "clean":
        return f"No divergence: {checks(evidence)} at declared sites."
    return "Nothing could be compared, so nothing is said about the ranks' agreement."


def _consequence(finding: str, evidence: Evidence) -> str:
    all_gone = all(state.is_gone for state in evidence.states.values())
    still = [rank for rank, state in evidence.stuck.items() if not state.is_gone]
    return {
        "drift-hang": ", and the ranks hang" if still else ", and the ranks hung, and are gone now",
        "drift-crash": ", and the ranks died" if all_gone else ", and a rank ended",
        "silent-divergence": "; nothing hangs yet, the ranks go on with different states",
    }[finding]


def _blame(found: Divergence, evidence: Evidence) -> str:
    odd = rank_list(found.odd_ranks)
    where = f"at {found.site} in step {found.step}"
    if found.kind == "skip":
        return f"{_capital(odd)} left the sync out {where}, in which the others took part"
    if found.kind == "path":
        went = " and ".join(f"{show(slug)} on rank {rank}" for rank, slug in sorted(found.values.items()))
        return f"The ranks went different ways in step {found.step} ({went}){_measured(evidence)}"
    if found.kind == "shape":
        return f"{_capital(odd)} brought another batch {where} ({show(found.own)}, not {show(found.rank0)})"
    rank_0 = "" if found.own is None else f" ({_name(found)}: {show(found.own)}, and {_theirs(found)})"
    changed = "'s value was changed after the sync" if found.equal_before else " decided differently"
    return f"{_capital(odd)}{changed} {where}{rank_0}"


def _name(found: Divergence) -> str:
    index = found.index
    places = index if isinstance(index, tuple) else () if index is None else (index,)
    return f"{found.tensor}{list(places) if places else ''}"


def _theirs(found: Divergence) -> str:
    other = next((rank for rank in sorted(found.values) if rank not in found.odd_ranks), found.reference_rank)
    return f"{show(found.values.get(other))} on rank {other}"


def _measured(evidence: Evidence) -> str:
    first = evidence.comparison.first_measured
    if first is None:
        return ""
    held = " and ".join(f"{show(value)} on rank {rank}" for rank, value in sorted(first.values.items()))
    return f", after they went by their own measurement at {first.site} ({held})"


def _dead(evidence: Evidence) -> str:
    rank = evidence.dead[0]
    state = evidence.states[rank]
    more = f" (so did {rank_list(evidence.dead[1:])})" if len(evidence.dead) > 1 else ""
    missing = evidence.behind_at.get(rank)
    where = f" before it came to {_call(missing)}" if missing is not None else ""
    ending = "ended" if where and state.ending == GONE else state.ending
    return f"Rank {rank} {ending}{where}{more}; {_no_divergence(evidence)}."


def _hang(evidence: Evidence) -> str:
    if halted := halted_ranks(evidence):
        rank, state = next(iter(halted.items()))
        more = f" (so {'is' if len(halted) == 2 else 'are'} {rank_list(tuple(halted)[1:])})" if len(halted) > 1 else ""
        return f"Rank {rank} (pid {state.pid}) {state.ending}{more}; {_no_divergence(evidence)}."
    if evidence.behind_at:
        missing = next(iter(evidence.behind_at.values()))
        ahead = f"rank {missing.ahead_rank} {'waits there' if missing.is_inside else 'has left it'}"
        return f"Rank {missing.group_rank} is behind: it has not come to {_call(missing)}; {ahead}."
    if (own := evidence.comparison.first_unsettled) is not None:
        return (
            f"Hang: own values differed at {own.site} in step {own.step} on {rank_list(own.odd_ranks)}, and what was"
            " committed is not recorded."
        )
    sites = {state.wait.what for state in evidence.stuck.values() if state.wait is not None and state.wait.is_sync}
    if len(sites) == 1 and len(evidence.stuck) == len(evidence.states):
        verb = "ended" if all(state.is_abnormal for state in evidence.stuck.values()) else "wait"
        return f"All ranks {verb} in the {sites.pop()}: look at the transport; {_no_divergence(evidence)}."
    waits = [state.wait for state in evidence.stuck.values() if state.wait is not None]
    where = ", ".join(f"rank {wait.group_rank} in {place(wait.what, wait.detail)}" for wait in waits)
    at = "" if any(wait.is_sync for wait in waits) else ", not at a declared site"
    return f"Hang{at} ({where}); {_no_divergence(evidence)}."


def _call(missing: Missing) -> str:
    return f"{missing.site} in step {missing.step} (call {missing.call})"


def _no_divergence(evidence: Evidence) -> str:
    return f"no divergence was seen: {checks(evidence)}"


def _committed(evidence: Evidence) -> str:
    count = evidence.comparison.comparisons
    return f"{count:,} compared" if count else f"by the counters: {checks(evidence)}, all of them at sites in mode sync"


def checks(evidence: Evidence) -> str:
    """How much was compared: elements where counters are there, else tensors of the recordings."""
    counted, comparison = evidence.counted, evidence.comparison
    if counted.checks:
        return checks_text(counted.mismatches, counted.checks)
    if comparison.comparisons:
        return f"0 mismatches in {comparison.comparisons:,} comparison{'' if comparison.comparisons == 1 else 's'}"
    return "nothing could be compared"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
