"""What one run of the command was asked, how it ended, and what its ranks counted. Data; no IO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from specsync_core.bisect.hitting import Sites

Outcome = Literal["good", "bad", "untestable", "aborted"]
"""Untestable: it failed before the first sync, so it says nothing of the sites. Aborted: it was not left to end."""

How = Literal["exit", "time-out", "output", "interrupt"]
"""By what an outcome was known: the exit code, the time that was up, output other than expected, or the person."""


class Record(BaseModel):
    """A part of the report: every key is known, and nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Counts(Record):
    """What the ranks of one trial counted, all ranks together."""

    checks: dict[str, int] = {}
    """Elements compared with group rank 0's, by site; a site that was called and not compared is there with 0."""
    mismatches: dict[str, int] = {}
    """Elements that differed, by site; sites without any are left out."""
    differed: tuple[str, ...] = Field(default=(), strict=False)
    """The sites at which ranks differed, in the order in which they first did."""
    complete: bool = False
    """Every rank's counts are there, and include its last call."""
    ranks: int = 0
    first_call_s: float | None = None
    """Seconds from the trial's begin to the first sync of any rank; None when there was none."""

    @property
    def compared(self) -> bool:
        """Whether these counts are evidence: complete, and of something."""
        return self.complete and any(self.checks.values())

    def is_silent(self, site: str) -> bool:
        """Whether no rank differed here: every call was compared and equal, or there was none."""
        return site not in self.mismatches and self.checks.get(site, 1) > 0


class Trial(Record):
    """One run of the command."""

    number: int = Field(ge=1)
    off: Sites = Field(strict=False)
    """The candidate sites that were not synchronised; every other site was on."""
    audited: bool = False
    """They were compared and left alone (audit) instead of being off."""
    outcome: Outcome
    how: How = "exit"
    detail: str = ""
    """In words: ``exit code 1``, ``time-out after 40 s``."""
    seconds: float = 0.0
    said: str = ""
    """Of one that was not good: the last line of its standard error, or the first line other than expected."""
    counts: Counts | None = None

    @property
    def blamed(self) -> Sites:
        """The smallest set that the trial is about: audited sites at which no rank differed do as if they were on."""
        if not self.audited or self.counts is None or not self.counts.compared:
            return self.off
        return self.off & frozenset(self.counts.differed) or self.off


def policy_of(off: Iterable[str], everything: Iterable[str], audited: bool = False) -> str:
    """Return the value of ``SPECSYNC_SITES`` that turns exactly these sites off, or only audits them."""
    named = sorted(off)
    if audited:
        return ",".join(["all", *(f"{slug}:audit" for slug in named)])
    if set(named) >= set(everything):
        return "off"
    return ",".join(["all", *(f"-{slug}" for slug in named)])
