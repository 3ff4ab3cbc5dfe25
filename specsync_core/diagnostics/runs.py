"""The runs in a directory: which one to look at, and which belong together. No torch.

A run is one group of ranks. An engine with several replicas makes several at once, each in a folder of its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsync_core.diagnostics.doctor import RUNS_APART_S, Diagnosis, examine
from specsync_core.diagnostics.progress import is_alive
from specsync_core.diagnostics.recording import SUFFIX, RecordingError, read_recording
from specsync_core.diagnostics.verdict import Evidence

RUN_NAME = re.compile(r"run-\d{8}-\d{6}-[0-9a-f]{6}")
MOST_NAMED = 5


@dataclass(frozen=True)
class Run:
    """One group of ranks, examined."""

    path: Path
    diagnosis: Diagnosis
    evidence: Evidence

    @property
    def ranks(self) -> str:
        """Global ranks of the group's members."""
        members = next((each.header.ranks for each in self.evidence.recordings.values()), ())
        return ", ".join(map(str, members))

    @property
    def span_s(self) -> tuple[float, float]:
        """From the start of its first recorder to its last record, wall time."""
        recordings = list(self.evidence.recordings.values())
        starts = [each.header.started_s for each in recordings]
        ends = [each.records[-1].wall_s if each.records else each.header.started_s for each in recordings]
        return min(starts, default=0.0), max(ends, default=0.0)


def examine_runs(directory: Path) -> tuple[list[Run], list[Path]]:
    """Examine a folder of recordings; or, in a directory of such folders, the newest and those that ran beside it.

    Returns:
        The runs, and the newest of the older ones that were left out.

    Raises:
        RecordingError: there is no such directory.
    """
    folders = runs_in(directory)
    if not folders:
        return [Run(directory, *examine(directory))], []
    newest = Run(folders[0], *examine(folders[0]))
    runs = [newest]
    for place, folder in enumerate(folders[1:], 1):
        run = Run(folder, *examine(folder))
        if not _belongs_to(run, newest):
            return runs, list(folders[place : place + MOST_NAMED])
        runs.append(run)
    return runs, []


def _belongs_to(run: Run, newest: Run) -> bool:
    """Both lived at the same time, and are not the same ranks started again."""
    gap_s = newest.span_s[0] - run.span_s[1]
    return gap_s <= 0 or (gap_s < RUNS_APART_S and run.ranks != newest.ranks)


def runs_in(directory: Path) -> Sequence[Path]:
    """The folders of runs in a directory, the newest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if RUN_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def prune(directory: Path, keep: int) -> None:
    """Remove the oldest runs' folders beyond ``keep``; nothing else, and none whose processes may live."""
    for run in runs_in(directory)[keep:]:
        if not any(_lives(path) for path in run.glob(f"*{SUFFIX}")):
            shutil.rmtree(run, ignore_errors=True)


def _lives(path: Path) -> bool:
    try:
        return is_alive(read_recording(path)) is True
    except RecordingError:
        return False
