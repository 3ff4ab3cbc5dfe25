"""The doctor: merge the recordings of a group and say which decision diverged first. No torch.

It says what the recordings show and names what they do not: missing ranks, overwritten records, unknown values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specsync_core.diagnostics import verdict as words
from specsync_core.diagnostics.behind import Missing, missing_calls
from specsync_core.diagnostics.compare import compare
from specsync_core.diagnostics.counted import read_counts
from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.dump import SUFFIX as DUMP_SUFFIX
from specsync_core.diagnostics.dump import Dump, dump_path, read_dump
from specsync_core.diagnostics.environment import compare_environments
from specsync_core.diagnostics.headline import headline
from specsync_core.diagnostics.progress import (
    RankState,
    Wait,
    behind_ranks,
    first_different_wait,
    missing_state,
    rank_state,
)
from specsync_core.diagnostics.recording import MAGIC, SUFFIX, Recording, RecordingError, StrPath, Value, read_recording

__all__ = ["Diagnosis", "Divergence", "Finding", "Wait", "diagnose"]

RUNS_APART_S = 60.0
"""A recording that ended so long before another one began is of an earlier run: ranks meet before they decide."""

Finding = Literal[
    "drift-hang",
    "drift-crash",
    "silent-divergence",
    "dead-rank",
    "hang",
    "environment",
    "healed",
    "clean",
    "inconclusive",
]
"""``drift-hang``: committed values differ, and a rank waits, or did for long. ``drift-crash``: they differ, and a rank
died or failed at once.
``silent-divergence``: they differ, and nothing hangs. ``dead-rank``: no difference seen; a rank is gone that others
need. ``hang``: no difference seen; ranks wait. ``environment``: no difference seen; ranks run on different software,
hardware or seeds, or on software that is known to be bad. ``healed``: own values differed, committed values did not.
``clean``: values were compared and none differed. ``inconclusive``: nothing could be compared."""


@dataclass(frozen=True)
class Diagnosis:
    """What the recordings show, and no more."""

    finding: Finding
    headline: str
    """The answer in one sentence."""
    verdict: tuple[str, ...]
    """The evidence under it: plain words, one statement a line, the most important first."""
    divergence: Divergence | None
    """The first divergence of committed values."""
    first_healed: Divergence | None
    """The first divergence of own values that the sync healed."""
    waits: Mapping[int, Wait]
    """By group rank; only of ranks that did not finish."""
    healed: Mapping[str, int]
    """Calls per site whose own values differed and whose committed values were equal."""
    agreed: Mapping[str, int]
    """The same at sites of kind consensus, where own values are meant to differ."""
    comparisons: int
    """Tensors whose committed values were compared with the reference rank's."""
    world_size: int
    missing_ranks: tuple[int, ...]
    """Ranks without a readable recording."""
    dead_ranks: tuple[int, ...]
    """Ranks whose end explains why others wait: not those that gave up waiting, nor ranks that were all ended alike."""
    gone_ranks: tuple[int, ...]
    """All ranks whose process is not there any more and did not finish, whatever that explains."""
    endings: Mapping[int, str]
    """By group rank, how it stands, in the words that the text and the page use: ``is running``, ``finished``."""
    behind_ranks: tuple[int, ...]
    """Ranks that are not as far as the farthest, by step and site calls in it; empty where nothing hangs."""
    behind_at: Mapping[int, Missing]
    """By group rank, the call that a rank which is behind, or ended, has not come to, where that is certain."""
    checks: int
    """Elements that the ranks' counters compared, by their dumps; 0 without dumps."""
    mismatches: int
    reference_rank: int | None
    """The rank that the others were compared with."""

    @property
    def is_finding(self) -> bool:
        """Whether a command should exit with 1."""
        return self.finding not in ("clean", "healed")

    @property
    def text(self) -> str:
        """Headline and evidence."""
        return "\n".join((self.headline, *self.verdict))

    @property
    def _first(self) -> Divergence | None:
        return self.divergence or self.first_healed

    @property
    def site(self) -> str | None:
        """Of the first divergence; where no committed value differed, of the first that was healed. So below."""
        return self._first.site if self._first else None

    @property
    def step(self) -> int | None:
        return self._first.step if self._first else None

    @property
    def group_rank(self) -> int | None:
        return self._first.group_rank if self._first else None

    @property
    def tensor(self) -> str | None:
        return self._first.tensor if self._first else None

    @property
    def index(self) -> int | tuple[int, ...] | None:
        return self._first.index if self._first else None

    @property
    def own(self) -> Value | str | None:
        return self._first.own if self._first else None

    @property
    def rank0(self) -> Value | str | None:
        return self._first.rank0 if self._first else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that ``json`` writes; numbers that JSON does not know become text."""
        flat = ("site", "step", "group_rank", "tensor", "index", "own", "rank0", "is_finding")
        plain: dict[str, Any] = _plain({**asdict(self), **{name: getattr(self, name) for name in flat}})
        return plain


def diagnose(
    recordings: StrPath | Iterable[StrPath],
    exit_codes: Mapping[int, int | None] | None = None,
    *,
    hang_after_s: float = 1.0,
) -> Diagnosis:
    """Merge the recordings of any subset of a group's ranks.

    Args:
        recordings: a directory that holds recordings, or their paths.
        exit_codes: by group rank, as multiprocessing has them (negative: a signal); None for a rank that still ran
            when it was ended from outside. A rank that is not listed is asked after by its process id.
        hang_after_s: a living rank's wait counts as a hang from this age on.

    Raises:
        RecordingError: the directory does not exist. Damaged files are no error; the verdict names them.
    """
    return examine(recordings, exit_codes, hang_after_s=hang_after_s)[0]


def examine(
    recordings: StrPath | Iterable[StrPath],
    exit_codes: Mapping[int, int | None] | None = None,
    *,
    hang_after_s: float = 1.0,
) -> tuple[Diagnosis, words.Evidence]:
    """`diagnose`, with the evidence that a report shows."""
    exit_codes = exit_codes or {}
    chosen, dumps, notes = _choose(_read_all(recordings))
    world_size = max((r.header.world_size for r in chosen.values()), default=max(exit_codes, default=-1) + 1)
    missing = tuple(rank for rank in range(world_size) if rank not in chosen)
    stalled = any(dump.is_stall for dump in dumps.values())
    states = {rank: _state(chosen[rank], dumps.get(rank), exit_codes, stalled) for rank in sorted(chosen)}
    states |= {rank: missing_state(rank, exit_codes) for rank in missing}
    comparison = compare(chosen)
    counted = read_counts(dumps)
    divergence = comparison.divergence or counted.first(healed=False)
    healed = comparison.first_healed or counted.first(healed=True)
    environment = compare_environments(chosen, dumps)
    stuck = {rank: state for rank, state in sorted(states.items()) if state.is_stuck(hang_after_s)}
    dead = _dead_ranks(states)
    odd = any(difference.is_finding for difference in environment)
    is_compared = bool(comparison.comparisons or counted.checks)
    still = [state for state in stuck.values() if not state.is_abnormal or state.waited_for(hang_after_s)]
    finding = _finding(divergence, stuck, still, dead, states) or (
        "environment" if odd else "healed" if healed else "clean" if is_compared else "inconclusive"
    )
    hangs = bool(stuck) or finding == "dead-rank"
    behind = behind_ranks(states) if hangs else ()
    evidence = words.Evidence(
        comparison=comparison,
        divergence=divergence,
        healed=healed,
        recordings=chosen,
        dumps=dumps,
        counted=counted,
        environment=environment,
        states=dict(sorted(states.items())),
        stuck=stuck,
        dead=dead,
        behind=behind,
        behind_at=missing_calls(chosen, states, (*behind, *dead)) if hangs and divergence is None else {},
        missing=missing,
        different_wait=first_different_wait(chosen) if hangs else None,
        notes=tuple(notes),
    )
    return _diagnosis(finding, evidence, world_size), evidence


def _diagnosis(finding: Finding, evidence: words.Evidence, world_size: int) -> Diagnosis:
    comparison = evidence.comparison
    return Diagnosis(
        finding=finding,
        headline=headline(finding, evidence),
        verdict=tuple(words.verdict_lines(finding, evidence)),
        divergence=evidence.divergence,
        first_healed=evidence.healed,
        waits={rank: state.wait for rank, state in evidence.stuck.items() if state.wait is not None},
        healed=dict(sorted(comparison.healed.items())),
        agreed=dict(sorted(comparison.agreed.items())),
        comparisons=comparison.comparisons,
        world_size=world_size,
        missing_ranks=evidence.missing,
        dead_ranks=evidence.dead,
        gone_ranks=tuple(rank for rank, state in evidence.states.items() if state.is_gone),
        endings={rank: state.ending for rank, state in evidence.states.items()},
        behind_ranks=evidence.behind,
        behind_at=dict(evidence.behind_at),
        checks=evidence.counted.checks,
        mismatches=evidence.counted.mismatches,
        reference_rank=comparison.reference_rank,
    )


def _state(recording: Recording, dump: Dump | None, exit_codes: Mapping[int, int | None], stalled: bool) -> RankState:
    """How one rank stands. Its last dump tells that it lived then, and where nobody stalled, how long it had waited.

    Args:
        stalled: some rank's dump was written in a stall; then all that lived wrote one.
    """
    if dump is None and stalled and dump_path(recording.path.parent, recording.header.group_rank).exists():
        return _stopped(rank_state(recording, exit_codes), "lived in the stall, by a dump that cannot be read")
    if dump is None or words.is_over(dump, recording):
        return rank_state(recording, exit_codes)
    state = rank_state(recording, exit_codes, None if dump.is_stall else dump.written_s)
    return _stopped(state, f"lived in the stall, at {words.clock(dump.written_s)}") if dump.is_stall else state


def _stopped(state: RankState, lived: str) -> RankState:
    """Whoever ended a rank after the stall: its end explains nothing."""
    if state.status != "died" or state.exit_code is not None:
        return state
    return replace(state, status="stopped", ending=f"{lived}, and is gone now")


def _finding(
    divergence: Divergence | None,
    stuck: Mapping[int, RankState],
    still: Sequence[RankState],
    dead: Sequence[int],
    states: Mapping[int, RankState],
) -> Finding | None:
    """``still``: those of the stuck ranks that wait now, or waited for long: one that ended at once does not hang."""
    if divergence is not None:
        ended = any(state.is_abnormal for state in states.values())
        return "drift-hang" if still else "drift-crash" if ended else "silent-divergence"
    return "dead-rank" if dead else "hang" if stuck else None


def _dead_ranks(states: Mapping[int, RankState]) -> tuple[int, ...]:
    """The ranks whose end explains the others' waiting: those that ended outside a wait, else those that ended hard
    while another rank lives or gave up waiting. Ranks that all ended inside waits explain nothing."""
    if all(state.status == "died" and state.exit_code is None and state.wait is None for state in states.values()):
        return ()  # an engine that was stopped while it was idle: nobody waits, so there is nothing to explain
    ended = [rank for rank, state in states.items() if state.is_abnormal and not state.gave_up]
    outside = [rank for rank in ended if states[rank].wait is None and not states[rank].is_cut_off]
    if outside:
        return tuple(sorted(outside))
    return tuple(sorted(ended)) if len(ended) < len(states) else ()


def _read_all(recordings: StrPath | Iterable[StrPath]) -> Iterator[Recording | Dump | str]:
    """Read every file; a text says what was wrong with one."""
    for path in _paths(recordings):
        try:
            yield read_dump(path) if path.name.endswith(".json") else read_recording(path)
        except RecordingError as error:
            yield str(error)


def _paths(recordings: StrPath | Iterable[StrPath]) -> list[Path]:
    if not isinstance(recordings, (str, Path)) and isinstance(recordings, Iterable):
        return [Path(path) for path in recordings]
    path = Path(recordings)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RecordingError(f"{path}: no such directory of recordings.")
    return [file for file in sorted(path.iterdir()) if file.is_file() and _looks_like_one(file)]


def _looks_like_one(path: Path) -> bool:
    if path.suffix == SUFFIX or path.name.endswith(DUMP_SUFFIX):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _choose(
    found: Iterable[Recording | Dump | str],
) -> tuple[dict[int, Recording], dict[int, Dump], list[str]]:
    """Keep one recording per group rank, of one run: the newest; and the dumps that belong to them."""
    notes: list[str] = []
    readable: list[Recording] = []
    dumps: list[Dump] = []
    for each in found:
        if isinstance(each, str):
            notes.append(f"Not read: {each}")
        elif isinstance(each, Dump):
            dumps.append(each)
        else:
            readable.append(each)
    rings = {_writer(recording) for recording in readable}
    readable += [dump.recording for dump in dumps if _writer(dump.recording) not in rings]
    readable.sort(key=lambda recording: recording.header.started_s, reverse=True)
    chosen: dict[int, Recording] = {}
    for recording in readable:
        rank = recording.header.group_rank
        if _is_of_another_run(recording, readable[0]):
            notes.append(f"Left out: {recording.path} is of another run.")
        elif rank in chosen:
            notes.append(f"Left out: {recording.path} is an older recording of rank {rank}.")
        else:
            chosen[rank] = recording
    writers = {_writer(recording) for recording in chosen.values()}
    own = sorted((dump for dump in dumps if _writer(dump.recording) in writers), key=lambda dump: dump.written_s)
    return dict(sorted(chosen.items())), {dump.recording.header.group_rank: dump for dump in own}, notes


def _writer(recording: Recording) -> tuple[object, ...]:
    header = recording.header
    return header.run_id, header.group_rank, header.pid, header.host.get("name"), header.started_s


def _is_of_another_run(recording: Recording, newest: Recording) -> bool:
    mine, other = recording.header, newest.header
    if (mine.run_id, mine.world_size) != (other.run_id, other.world_size):
        return True
    last_s = recording.records[-1].wall_s if recording.records else mine.started_s
    return last_s < other.started_s - RUNS_APART_S


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
