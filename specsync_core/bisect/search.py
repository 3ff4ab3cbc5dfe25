"""The search: both end points, then every minimal set of sites that is bad when it is off. No IO.

It is a pure function of the trials so far: `Search.decide` runs through the whole search with what is known, and
returns either the question that it cannot answer yet or the verdict. So a resumed bisection needs nothing but its
trials, and trials that end in another order do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specsync_core.bisect.chances import SequentialTest, chance_of_excess, lower_bound, share
from specsync_core.bisect.hitting import Sites, hitting_sets, minimal
from specsync_core.bisect.knowledge import Knowledge
from specsync_core.bisect.order import Suspicion

ON_RUNS = 3
"""Good runs with everything on, before anything is turned off."""
BAD_RUNS = 3
"""Bad runs with every candidate off, from which the bad rate is estimated."""
MOST_BAD_ON = 2
"""So many bad runs with everything on end the bisection."""
EXTRA_ON_RUNS = 10
"""Further good runs with everything on that one bad one asks for."""
NOISE = 0.01
"""Bad rate that is put down to something else than sites: a machine that is out of memory, a port in use."""
RATE_CONFIDENCE = 0.9
"""Of the lower bound on the bad rate that the tests look for."""
DETOUR_ERROR = 0.1
"""How often a part that matters may be passed over while narrowing down; the check at the end finds it again."""

SETTLED_ERROR = 0.05
"""How often noise is narrowed down, which is long: what is left was bad once, and is first made sure of."""
NOISE_ERROR = 0.01
"""How often a set that matters may be taken for noise, after it was bad once."""

Status = Literal["found", "on-is-bad", "off-is-good", "untestable"]


@dataclass(frozen=True)
class Limits:
    """What the person allows and asks for."""

    confidence: float = 0.99
    runs: int = 60
    """Most runs that one decision about one set may take."""


@dataclass(frozen=True)
class Question:
    """Sets of which one may be bad, and how many more runs each may take."""

    why: str
    needs: tuple[tuple[Sites, int], ...]
    """A set, and how many more runs it needs at most before this question is put again."""
    audited: bool = False


@dataclass(frozen=True)
class Found:
    """A minimal set: bad when it is off."""

    sites: Sites
    confirmed: bool
    """It was bad often enough for the confidence, and more often than with all on; else `Limits.runs` came first."""


@dataclass(frozen=True)
class Check:
    """With the found sites of ``kept`` on and every other candidate off, nothing was bad."""

    kept: Sites
    off: Sites
    status: Literal["clear", "capped", "untestable"]
    """Capped: good as often as `Limits.runs` allows, which is not enough for the confidence."""


@dataclass(frozen=True)
class Verdict:
    """The end of the search."""

    status: Status
    sites: Sites = frozenset()
    """Off when it could not be tested."""
    found: tuple[Found, ...] = ()
    checks: tuple[Check, ...] = ()
    rate: float | None = None
    """Sets that are bad this often or more are found, at the confidence."""

    @property
    def sure(self) -> bool:
        """Whether every set and every check is as sure as asked for."""
        return all(each.confirmed for each in self.found) and all(each.status == "clear" for each in self.checks)


def noise_runs(knowledge: Knowledge, checks: Sequence[Check]) -> tuple[int, int]:
    """Return bad runs and runs that no set found explains: with all sites on, and those of the last checks."""
    counts = [knowledge.own(off) for off in {frozenset[str](), *(check.off for check in checks)}]
    return sum(bad for bad, _ in counts), sum(runs for _, runs in counts)


class _Unanswered(Exception):  # noqa: N818 - a way out of the search, no error
    def __init__(self, question: Question) -> None:
        self.question = question


class _Ended(Exception):  # noqa: N818
    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


@dataclass
class Search:
    """Decides what to run next.

    Args:
        knowledge: of all trials.
        suspicion: has learnt from the same trials.
    """

    knowledge: Knowledge
    suspicion: Suspicion
    limits: Limits = field(default_factory=Limits)
    stage: str = "all sites on"
    """What is being looked at, in words."""
    narrowed: Sites = frozenset()
    """The smallest set that is known to be bad and not known to be minimal; empty outside narrowing."""
    found: tuple[Found, ...] = ()
    test: SequentialTest | None = None

    def decide(self) -> Question | Verdict:
        """Return what to run next, or the end."""
        self.stage, self.narrowed, self.found, self.test = "all sites on", frozenset(), (), None
        self.knowledge.believe_counts()
        try:
            self._check_on()
            self._check_off()
            return self._search()
        except _Unanswered as unanswered:
            return unanswered.question
        except _Ended as ended:
            return ended.verdict

    # --- the end points ---------------------------------------------------------------------------------

    def _check_on(self) -> None:
        everything_on: Sites = frozenset()
        bad, runs = self.knowledge.own(everything_on)
        if bad >= MOST_BAD_ON:
            raise _Ended(Verdict("on-is-bad"))
        self._stop_if_untestable(everything_on)
        wanted = min(ON_RUNS, self.limits.runs) + EXTRA_ON_RUNS * bad
        if (missing := wanted - (runs - bad)) > 0:
            raise _Unanswered(Question(self.stage, ((everything_on, missing),)))

    def _check_off(self) -> None:
        self.stage = "all candidate sites off"
        candidates = self.knowledge.candidates
        self._stop_if_untestable(candidates)
        wanted = min(BAD_RUNS, self.limits.runs)
        bad, runs = self.knowledge.measured(candidates, wanted)
        # Bad is bad: with nothing but good runs so far, even a rate that is very low matters.
        if not self.knowledge.own(candidates, audited=False)[0]:
            spent = max(runs, self.knowledge.tally(candidates).good)
            self._ask_for_bad(candidates, wanted, self.limits.runs - (spent if runs else 0), audited=False)
            raise _Ended(Verdict("off-is-good"))
        if bad < wanted and runs < self.limits.runs:
            self._ask_for_bad(candidates, wanted - bad, self.limits.runs - runs, audited=self._may_audit)
        rate = max(lower_bound(bad, runs, RATE_CONFIDENCE), 1.0 / (2.0 * self.limits.runs))
        on_bad, on_runs = self.knowledge.own(frozenset())
        noise = min(max(NOISE, on_bad / on_runs), rate / 4.0)
        self.test = SequentialTest(noise, rate)
        self.knowledge.doubt_counts(self.test)

    @property
    def _may_audit(self) -> bool:
        """Whether the next run with all candidates off is better an audited one: as bad, and it counts."""
        bad, runs = self.knowledge.own(self.knowledge.candidates, audited=True)
        has_counts = any(t.counts is not None and t.counts.compared for t in self.knowledge.trials if not t.off)
        return has_counts and (bad > 0 or runs < BAD_RUNS)  # unless auditing hides it

    def _ask_for_bad(self, sites: Sites, bads: int, runs: int, audited: bool) -> None:
        if runs > 0:
            raise _Unanswered(Question(self.stage, ((sites, min(bads, runs)),), audited))

    def _stop_if_untestable(self, sites: Sites) -> None:
        if self.knowledge.is_untestable(sites):
            raise _Ended(Verdict("untestable", sites))

    # --- every minimal set ------------------------------------------------------------------------------

    def _search(self) -> Verdict:
        family: list[Found] = []
        checked: list[Sites] = []
        while True:
            self.found = tuple(family)
            checks: list[Check] = []
            for kept in hitting_sets(each.sites for each in family):
                off = self.knowledge.candidates - kept
                if off not in checked:
                    checked.append(off)
                status = self._check_rest(kept, off, share(self._error, checked.index(off) + 1))
                if status is None:
                    family = self._add(family, off)
                    break
                checks.append(Check(kept, off, status))
            else:
                assert self.test is not None
                noise = noise_runs(self.knowledge, checks)
                found = [replace(each, confirmed=each.confirmed and self._stands_out(each, *noise)) for each in family]
                return Verdict("found", found=tuple(found), checks=tuple(checks), rate=self.test.rate)

    def _stands_out(self, found: Found, bad: int, runs: int) -> bool:
        """Whether a set is bad more often than what no set explains; it and all on are run, in turns, until it is."""
        tally = self.knowledge.tally(found.sites)
        if chance_of_excess(tally.bad, tally.runs, bad, runs) <= self._error:
            return True
        self.stage = f"comparing {', '.join(sorted(found.sites))} off with all sites on"
        everything_on: Sites = frozenset()
        # A set that counts alone have shown is not run: no hang is needed for it.
        sets = [everything_on, found.sites] if self.knowledge.own(found.sites)[1] else [everything_on]
        needs = tuple((each, 1) for each in sets if self.knowledge.own(each)[1] < self.limits.runs)
        if needs:
            raise _Unanswered(Question(self.stage, needs))
        return False

    def _is_settled_bad(self, off: Sites) -> bool:
        """Whether the bad runs of a set are more than noise; it is run again until that shows."""
        assert self.test is not None
        for sites in self.knowledge.suspects(off, self.test, NOISE_ERROR):
            tally = self.knowledge.tally(sites)
            if self.test.is_bad(tally.bad, tally.good, SETTLED_ERROR):
                return True
        sites = self.knowledge.suspects(off, self.test, NOISE_ERROR)[0]
        spent = self.knowledge.own(sites)[1]
        if spent >= self.limits.runs or self.knowledge.is_untestable(sites):
            return True
        raise _Unanswered(Question(f"seeing whether it was noise: {self.stage}", ((sites, 1),)))

    @property
    def _error(self) -> float:
        """What wrong verdicts of one kind may add up to: half of the whole for each kind."""
        return (1.0 - self.limits.confidence) / 2.0

    def _check_rest(self, kept: Sites, off: Sites, error: float) -> Literal["clear", "capped", "untestable"] | None:
        """See whether anything but the found sites is bad; None when it is."""
        if not off:
            return "clear"
        words = ", ".join(sorted(kept)) if kept else "nothing"
        self.stage = f"only {words} on, of the candidates" if kept else "all candidate sites off"
        if self._race([off], error) is not None and self._is_settled_bad(off):
            return None
        if self.knowledge.is_untestable(off):
            return "untestable"
        return "clear" if self._is_clear(off, error) else "capped"

    def _add(self, family: list[Found], bad: Sites) -> list[Found]:
        """Find a minimal set in a bad one, and make sure of it."""
        error = share(self._error, len(family) + 1)
        smaller: Sites | None = bad
        while smaller is not None:
            sites = self._narrow(smaller)
            smaller = self._find_needless(sites, error) if len(sites) > 1 else None
        confirmed = self._confirm(sites, error)
        found = {each.sites: each for each in [*family, Found(sites, confirmed)]}
        return [found[each] for each in minimal(found)]

    def _narrow(self, bad: Sites) -> Sites:
        """Delta debugging: to a part that is bad, else to all but a part, else to smaller parts."""
        assert self.test is not None
        smaller: Sites | None = bad
        while smaller is not None:
            bad = self.narrowed = self.knowledge.suspects(smaller, self.test, NOISE_ERROR)[0]
            self.stage = f"narrowing {len(bad)} sites down"
            smaller = self._find_smaller(bad) if len(bad) > 1 else None
        self.narrowed = frozenset()
        return bad

    def _find_smaller(self, bad: Sites) -> Sites | None:
        for parts in self.suspicion.partitions(bad):
            smaller = self._race(parts, DETOUR_ERROR)
            if smaller is None and len(parts) > 2:
                smaller = self._race([bad - part for part in reversed(parts)], DETOUR_ERROR)
            if smaller is not None:
                return smaller
        return None

    def _find_needless(self, sites: Sites, error: float) -> Sites | None:
        """Return the set without a site that it does not need; None when it needs all, for sure.

        Narrowing passes over a part more easily than that. What is run is all candidates but the site, while that is
        not bad: it says as much of the set, and the check at the end needs it anyway.
        """
        self.stage = f"making sure that each of {', '.join(sorted(sites))} is needed"
        wide = {sites - {slug}: self.knowledge.candidates - {slug} for slug in self.suspicion.sorted(sites)}
        return self._race(list(wide), error, wide)

    def _confirm(self, sites: Sites, error: float) -> bool:
        """Whether the set is bad for sure; False where the runs are used up. Noise shows while more runs are made."""
        assert self.test is not None
        self.stage = f"making sure of {', '.join(sorted(sites))}"
        tally = self.knowledge.tally(sites)
        if self.test.is_bad(tally.bad, tally.good, error):
            return True
        runs = max(self.knowledge.own(sites)[1], tally.bad)
        if runs >= self.limits.runs or self.knowledge.is_untestable(sites):
            return False
        needed = self.test.bad_still_needed(tally.bad, tally.good, error)
        raise _Unanswered(Question(self.stage, ((sites, max(1, min(needed, self.limits.runs - runs))),)))

    # --- one question -----------------------------------------------------------------------------------

    def _race(self, sets: Sequence[Sites], error: float, wide: Mapping[Sites, Sites] | None = None) -> Sites | None:
        """Return the first of the sets that is bad; None when none is, as far as ``error`` and the runs allow.

        Args:
            wide: by set, a larger one that is run in its place as long as that is not bad.
        """
        assert self.test is not None
        for sites in sets:
            if self.knowledge.is_suspect(sites, self.test, NOISE_ERROR):
                return sites
        needs = [(sites, need) for sites in sets if (need := self._runs_needed(sites, error)) > 0]
        if needs:
            raise _Unanswered(Question(self.stage, tuple((self._to_run(each, wide), need) for each, need in needs)))
        return None

    def _to_run(self, sites: Sites, wide: Mapping[Sites, Sites] | None) -> Sites:
        """Return what to run for a set: the larger one, as long as its good runs count as runs of the set."""
        larger = (wide or {}).get(sites, sites)
        return sites if self.knowledge.has_bad_within(larger) or self.knowledge.is_untestable(larger) else larger

    def _is_clear(self, sites: Sites, error: float) -> bool:
        assert self.test is not None
        return self.knowledge.is_clear(sites, self.test, error)

    def _runs_needed(self, sites: Sites, error: float) -> int:
        """How many more good runs clear a set; 0 where that is so, or where no more are allowed."""
        assert self.test is not None
        if self.knowledge.is_untestable(sites) or self._is_clear(sites, error):
            return 0
        tally = self.knowledge.tally(sites)
        allowed = self.limits.runs - (tally.runs - tally.by_counts)
        needed = 0
        while needed < allowed and not self.test.is_clear(tally.bad, tally.good + needed, error):
            needed += 1
        return needed
