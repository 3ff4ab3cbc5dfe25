"""How a trial ended, in a word, from what was seen of it. No IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specsync_core.bisect.evidence import Evidence
from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.trials import How, Outcome, Trial

NEARLY = 0.8
"""A run without any site on that lasted so much of the usual time to the first sync had got there."""
LONG_SINCE = 1.5
"""The same where sites are on, which then were never called."""
DEFAULT_LIMIT_S = 600.0
"""Of the first runs, where the person gives no time-out."""
SLOWER, LATER_S = 3.0, 10.0
"""A run may take three times the longest good one so far, and ten seconds longer at least."""


@dataclass(frozen=True)
class Seen:
    """One run of the command, as it was watched."""

    exit_code: int | None
    """None: its time was up. Negative: it was ended by that signal."""
    seconds: float
    evidence: Evidence
    output_equal: bool | None = None
    """Whether its standard output is what is expected; None where nothing is."""


class Judge:
    """Knows what good runs are like.

    Args:
        limit_s: the person's time-out; None leaves it to what is measured.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._given_s = limit_s
        self._longest_good_s: float | None = None
        self._first_sync_s: float | None = None
        self._called: frozenset[str] = frozenset()
        self._is_blind = False

    def learn(self, trials: Iterable[Trial]) -> None:
        """Take the good trials."""
        good = [trial for trial in trials if trial.outcome == "good"]
        counts = [trial.counts for trial in good if trial.counts is not None and not trial.off]
        starts = [each.first_call_s for each in counts if each.first_call_s is not None]
        self._longest_good_s = max((trial.seconds for trial in good), default=None)
        self._first_sync_s = min(starts, default=None)
        self._called = frozenset(slug for each in counts for slug in each.checks)
        self._is_blind = bool(good) and not starts

    @property
    def is_blind(self) -> bool:
        """Whether good runs leave no counts: then no failure can be told from a failed start."""
        return self._is_blind

    @property
    def limit_s(self) -> float:
        """How long the next run may take."""
        if self._longest_good_s is None:
            return DEFAULT_LIMIT_S if self._given_s is None else self._given_s
        measured = max(SLOWER * self._longest_good_s, self._longest_good_s + LATER_S)
        return measured if self._given_s is None else min(measured, self._given_s)

    def judge(self, seen: Seen, off: Sites) -> tuple[Outcome, How, str]:
        """Return the outcome, by what it is known, and in words."""
        if seen.exit_code == 0 and seen.output_equal is not False:
            return "good", "exit", "ended well"
        how: How = "time-out" if seen.exit_code is None else "output" if seen.exit_code == 0 else "exit"
        words = _words(seen)
        if how != "output" and not self._has_synced(seen, off):
            return "untestable", how, f"{words}, before the first sync"
        return "bad", how, words

    def _has_synced(self, seen: Seen, off: Sites) -> bool:
        counts = seen.evidence.counts
        if self._is_blind or (counts is not None and counts.first_call_s is not None):
            return True
        if not seen.evidence.has_met or self._first_sync_s is None:
            return False
        # Where a site is off, nothing is called: what is left to tell by is the time.
        return seen.seconds >= self._first_sync_s * (NEARLY if self._called <= off else LONG_SINCE)


def _words(seen: Seen) -> str:
    if seen.exit_code is None:
        return f"time-out after {seen.seconds:.2g} s" if seen.seconds < 10 else f"time-out after {seen.seconds:.0f} s"
    if seen.exit_code == 0:
        return "output other than expected"
    if seen.exit_code < 0:
        return f"ended by signal {-seen.exit_code}"
    return f"exit code {seen.exit_code}"
