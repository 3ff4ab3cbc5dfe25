"""How far each rank of a group came: where it waits, whether it lives, who is behind. No torch."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specsync_core.diagnostics.recording import Record, Recording
from specsync_core.liveness import standstill_of

Status = Literal["finished", "failed", "died", "stopped", "running", "unknown"]
"""``stopped``: it lived in the stall, by its dump, and is gone now: whoever ended it did so after the stall."""

GONE = "is gone, and did not close its recording"
"""The ending of a rank whose process is not there, and whose exit code nobody told."""
RUNNING = "is running"


@dataclass(frozen=True)
class Wait:
    """What a rank is inside of, or was when it ended."""

    group_rank: int
    what: str
    """The engine's word for it, or ``sync of SITE``."""
    detail: str
    since_s: float
    """Wall time, seconds since the epoch."""
    seconds: float | None
    """How long, when that is known."""
    last_step: int
    """The step that the rank was in, as far as its recorder knew."""
    is_sync: bool
    """A site's own call, not a wait that the engine marked."""
    failed: str | None
    """The exception's type, when the wait was left by one and nothing was recorded since."""


@dataclass(frozen=True)
class RankState:
    """How one rank stands."""

    group_rank: int
    status: Status
    ending: str
    """In words, to follow "rank N ": ``is running``, ``was ended by signal 9 (SIGKILL)``."""
    exit_code: int | None
    wait: Wait | None
    last: Record | None
    """Its newest record."""
    progress: tuple[int, int] | None
    """Its last step and the number of site calls in it; None when that is not certain."""
    is_cut_off: bool = False
    """Newer records may be missing: that no wait is known means nothing."""
    pid: int | None = None
    """Its process id, where that was asked after and lives."""

    @property
    def is_abnormal(self) -> bool:
        return self.status in ("failed", "died")

    @property
    def is_halted(self) -> bool:
        """Its process is there, and does not run: stopped by a signal, or by a debugger."""
        return self.pid is not None and self.ending != RUNNING

    @property
    def is_gone(self) -> bool:
        """Its process is not there any more, and did not finish."""
        return self.is_abnormal or self.status == "stopped"

    @property
    def gave_up(self) -> bool:
        """It ended inside a wait, in a way that looks like the wait's own failure."""
        if self.wait is None or not self.is_abnormal:
            return False
        by_exception = self.wait.failed is not None or (self.wait.is_sync and self.exit_code in (None, 1))
        return by_exception or self.exit_code == -signal.SIGABRT

    def waited_for(self, hang_after_s: float) -> bool:
        """Its wait is known to have lasted so long."""
        return self.wait is not None and self.wait.seconds is not None and self.wait.seconds >= hang_after_s

    def is_stuck(self, hang_after_s: float) -> bool:
        """It waits for longer than a healthy rank would, or its wait failed."""
        if self.wait is None or self.status == "finished":
            return False
        return self.wait.failed is not None or self.wait.seconds is None or self.wait.seconds >= hang_after_s


def rank_state(recording: Recording, exit_codes: Mapping[int, int | None], seen_s: float | None = None) -> RankState:
    """Judge one rank by its recording, its exit code if given, else by asking after its process.

    Args:
        seen_s: wall time at which a dump saw it alive; how long a wait lasted at least, where nothing else tells.
    """
    rank = recording.header.group_rank
    code = exit_codes.get(rank)
    status, ending = _status(recording, rank in exit_codes, code)
    pid = recording.header.pid if status == "running" and rank not in exit_codes else None
    wait = open_wait(recording, time.time() if pid is not None else seen_s)
    last = recording.records[-1] if recording.records else None
    return RankState(rank, status, ending, code, wait, last, _progress(recording), recording.truncated, pid)


def _progress(recording: Recording) -> tuple[int, int] | None:
    records = recording.records
    if recording.truncated or (recording.wrapped and records[0].step == records[-1].step):
        return None
    if not records:
        return None if recording.torn else (0, 0)  # it has come to nothing yet
    step = records[-1].step
    return step, len({(r.site_number, r.call) for r in records if r.step == step and r.kind in ("before", "after")})


def missing_state(group_rank: int, exit_codes: Mapping[int, int | None]) -> RankState:
    """The state of a rank that left no readable recording."""
    code = exit_codes.get(group_rank)
    status: Status = "unknown" if code is None else "finished" if code == 0 else "died"
    ending = f"{exit_text(code)} and left no readable recording" if code is not None else "left no readable recording"
    return RankState(group_rank, status, ending, code, None, None, None)


def _status(recording: Recording, is_code_given: bool, code: int | None) -> tuple[Status, str]:
    if (closed := recording.closed) is not None:
        if closed.what == "finished":
            return "finished", "finished" if not code else f"finished, then {exit_text(code)}"
        return "failed", closed.what + (f" ({exit_text(code)})" if code else "")
    if is_code_given:
        if code is None:
            return "running", "still ran when it was ended from outside"
        return ("finished" if code == 0 else "died"), exit_text(code)
    alive = is_alive(recording)
    if alive is None:
        return "unknown", "may be running (its process cannot be asked after from here)"
    if not alive:
        return "died", GONE
    return "running", standstill_of(recording.header.pid) or RUNNING


def exit_text(code: int) -> str:
    """E.g. ``exited with code 3``, ``was ended by signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"


def is_alive(recording: Recording) -> bool | None:
    """Whether the writer lives; None when its process id means nothing here (another host, boot or namespace)."""
    mine, theirs = host_identity(), recording.header.host
    if any(mine[key] is None or mine[key] != theirs.get(key) for key in ("name", "boot_id", "pid_namespace")):
        return None
    started = process_start(recording.header.pid)
    return started is not None and started == theirs.get("process_start")


def open_wait(recording: Recording, now_s: float | None) -> Wait | None:
    """The innermost wait or site call that a rank entered and did not leave; None also when that is not certain."""
    if recording.truncated:
        return None
    stack: list[Record] = []
    failed: tuple[Record, str] | None = None
    for record, is_behind_gap in _with_gaps(recording):
        if is_behind_gap:
            stack.clear()  # what would have closed these may be lost
        if record.kind == "wait-end":
            begun = next((begin for begin in stack if begin.kind == "wait-begin" and begin.call == record.call), None)
            if begun is not None:
                del stack[stack.index(begun) :]
                if record.failed and failed is None:
                    failed = begun, record.what
        elif record.kind == "raised":
            # As of nested waits, the innermost that was left is kept.
            if stack and (stack[-1].kind, stack[-1].site_number) == ("before", record.site_number):
                failed = stack.pop(), record.what
        elif record.kind != "closed":
            failed = None
            _follow(stack, record)
    if stack and failed is None:
        return _wait(recording, stack[-1], now_s, None)
    return _wait(recording, failed[0], None, failed[1]) if failed else None


def _follow(stack: list[Record], record: Record) -> None:
    """Keep the stack of what is open. Sites do not nest: a call that did not come back was left by an exception."""
    if record.kind == "wait-begin":
        stack.append(record)
        return
    while stack and stack[-1].kind == "before":
        stack.pop()
    if record.kind == "before":
        stack.append(record)


def _with_gaps(recording: Recording) -> Iterator[tuple[Record, bool]]:
    last = None
    for record in recording.records:
        yield record, last is not None and record.sequence != last + 1
        last = record.sequence


def _wait(recording: Recording, begin: Record, now_s: float | None, failed: str | None) -> Wait:
    header = recording.header
    is_sync = begin.kind == "before"
    last = recording.records[-1]
    until_s = last.wall_s if failed else now_s
    if until_s is not None and until_s < begin.wall_s:
        until_s = None  # a dump of an earlier moment
    return Wait(
        group_rank=header.group_rank,
        what=f"sync of {header.slug(begin.site_number)}" if is_sync else begin.what,
        detail=f"call {begin.call}" if is_sync else begin.detail,
        since_s=begin.wall_s,
        seconds=None if until_s is None else max(0.0, until_s - begin.wall_s),
        last_step=begin.step,
        is_sync=is_sync,
        failed=failed,
    )


def behind_ranks(states: Mapping[int, RankState]) -> tuple[int, ...]:
    """Ranks that are not as far as the farthest, by step and site calls in it."""
    known = {rank: state.progress for rank, state in states.items() if state.progress is not None}
    farthest = max(known.values(), default=(0, 0))
    return tuple(sorted(rank for rank, progress in known.items() if progress < farthest))


def first_different_wait(recordings: Mapping[int, Recording]) -> tuple[int, Mapping[int, tuple[str, str]]] | None:
    """The first wait, by number, that is not the same on all ranks, although the one before it was; else None."""
    begun = {
        rank: {r.call: (r.what, r.detail) for r in recording.records if r.kind == "wait-begin"}
        for rank, recording in recordings.items()
    }
    shared = sorted(set.intersection(*(set(waits) for waits in begun.values()))) if len(begun) > 1 else []
    for place, number in enumerate(shared):
        at = {rank: waits[number] for rank, waits in begun.items()}
        if len(set(at.values())) > 1:
            return (number, at) if place > 0 or number == 1 else None
    return None


def host_identity() -> dict[str, Any]:
    """What tells whether a process id means the same process to a reader: host, boot, pid namespace, start time."""
    return {
        "name": socket.gethostname(),
        "boot_id": _read_text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _read_link("/proc/self/ns/pid"),
        "process_start": process_start(os.getpid()),
    }


def process_start(pid: int) -> str | None:
    """The start time of a living process in clock ticks since boot; None when it is gone, or a zombie."""
    stat = _read_text(f"/proc/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in "ZX" else fields[19]


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
