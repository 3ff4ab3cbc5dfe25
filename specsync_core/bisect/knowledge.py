"""What the trials so far say about any set of sites. No IO.

Two assumptions carry over from one set to another. *More sites off is no better*: a set is bad at least as often as its
subsets. And *a site at which no rank differs might as well be off*: where a trial with some sites off was good, and at
further sites that were on every check was equal, the same run with those off too would have been good. The latter is
how counts spare trials. Good trials of other sets are taken whole or not at all: a selection of the runs in which a
flaky site happened to be equal, or of the larger sets that happened to be good, would clear any flaky site.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from specsync_core.bisect.chances import SequentialTest
from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.trials import Trial

DOUBT_ERROR = 0.2
"""How often counts of a set that matters may look as if it did not, before they are no longer believed."""
MOST_UNTESTABLE = 3
"""So many trials of a set that fail before the first sync, and none that does not: it cannot be tested."""


@dataclass(frozen=True)
class Tally:
    """The trials that speak about one set."""

    bad: int = 0
    good: int = 0
    """Those that counts or larger sets contribute are included."""
    borrowed: int = 0
    """Of the good ones, how many were runs of another set."""
    by_counts: int = 0
    """Of the borrowed ones, how many count because no rank differed at the rest of the set."""

    @property
    def runs(self) -> int:
        return self.bad + self.good


@dataclass
class _Group:
    """All trials with the same sites off."""

    bad: int = 0
    good: int = 0
    compared: int = 0
    """Good trials with counts."""
    differed: set[str] = field(default_factory=set)
    """Sites at which a rank differed, or was not compared, in one of those."""
    untestable: int = 0


class Knowledge:
    """The trials of a bisection, in order.

    Args:
        candidates: every site that may be turned off.
    """

    def __init__(self, candidates: Iterable[str], trials: Iterable[Trial] = ()) -> None:
        self.candidates: Sites = frozenset(candidates)
        self.trials: list[Trial] = []
        self._groups: dict[Sites, _Group] = {}
        self._blamed: dict[Sites, int] = {}
        """Bad trials by the set that they are about."""
        self._blamed_from_outside: dict[Sites, int] = {}
        """Of those, the ones in which more sites were audited."""
        self._tallies: dict[Sites, Tally] = {}
        self.doubted: Sites | None = None
        """A set that was bad though counts had it as good as cleared: then counts are left out of account."""
        for trial in trials:
            self.add(trial)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._tallies.clear()
        group = self._groups.setdefault(trial.off, _Group())
        if trial.outcome == "untestable":
            group.untestable += 1
        elif trial.outcome == "bad":
            group.bad += 1
            self._blamed[trial.blamed] = self._blamed.get(trial.blamed, 0) + 1
            if trial.blamed != trial.off:
                self._blamed_from_outside[trial.blamed] = self._blamed_from_outside.get(trial.blamed, 0) + 1
        elif trial.outcome == "good":
            group.good += 1
            if trial.counts is not None and trial.counts.compared:
                group.compared += 1
                group.differed |= {slug for slug in self.candidates if not trial.counts.is_silent(slug)}

    def tally(self, sites: Sites) -> Tally:
        """Return the trials of a set, and the good ones that it may borrow."""
        if (known := self._tallies.get(sites)) is None:
            known = self._tallies[sites] = self._count(sites)
        return known

    def _count(self, sites: Sites) -> Tally:
        own = self._groups.get(sites, _Group())
        bad = own.bad + self._blamed_from_outside.get(sites, 0)
        best = Tally(bad, own.good)
        if not self.has_bad_within(sites):
            for off in {sites, *(off for off in self._groups if off > sites)}:
                if not self.has_bad_within(off) and (pooled := self._pool(off)).good > best.good:
                    best = Tally(0, pooled.good, pooled.good - own.good, pooled.by_counts)
        return best

    def _pool(self, sites: Sites) -> Tally:
        """Return the good trials of a set without bad ones, with those of smaller sets that count as its own.

        It is all of these or none: where one shows a difference inside the set, those that do not are a selection.
        """
        inside = [(off, group) for off, group in self._groups.items() if off < sites and group.compared]
        clean = self.doubted is None and not any(group.differed & (sites - off) for off, group in inside)
        by_counts = sum(group.compared for _, group in inside) if clean else 0
        own = self._groups.get(sites, _Group())
        return Tally(0, own.good + by_counts, by_counts, by_counts)

    def believe_counts(self) -> None:
        """Take counts into account, until `doubt_counts` finds a reason not to."""
        self.doubted = None
        self._tallies.clear()

    def doubt_counts(self, test: SequentialTest) -> None:
        """See whether a set is bad at which, by counts, no rank ever differs: then ranks differ in something else."""
        for sites in sorted(self._blamed, key=lambda each: (len(each), sorted(each))):
            if self._blamed[sites] > 1 and test.is_clear(0, self._pool(sites).by_counts, DOUBT_ERROR):
                self.doubted = sites
                self._tallies.clear()
                return

    def has_bad_within(self, sites: Sites) -> bool:
        """Whether the set, or a part of it, was ever bad, be it by noise: then its good runs are no other set's."""
        return any(blamed <= sites for blamed in self._blamed)

    def is_untestable(self, sites: Sites) -> bool:
        group = self._groups.get(sites)
        return group is not None and group.untestable >= MOST_UNTESTABLE and not group.bad + group.good

    def is_noise(self, sites: Sites, test: SequentialTest, error: float) -> bool:
        """Whether a set was bad, but no more often than something that has nothing to do with sites."""
        tally = self.tally(sites)
        return tally.bad > 0 and test.is_clear(tally.bad, tally.good, error)

    def is_suspect(self, sites: Sites, test: SequentialTest, error: float) -> bool:
        """Whether the set, or a part of it, was bad, and that is not known to be noise."""
        return any(self._suspected(sites, test, error))  # each has sites, so it is true

    def suspects(self, sites: Sites, test: SequentialTest, error: float) -> list[Sites]:
        """Return the sets within this one that trials found bad, the smallest first: clear counts make them small."""
        return sorted(self._suspected(sites, test, error), key=lambda each: (len(each), sorted(each)))

    def _suspected(self, sites: Sites, test: SequentialTest, error: float) -> Iterator[Sites]:
        """No sites at all are never among them: what is bad with all on, however often, no site is to blame for."""
        return (each for each in self._blamed if each and each <= sites and not self.is_noise(each, test, error))

    def is_clear(self, sites: Sites, test: SequentialTest, error: float) -> bool:
        """Whether the set does not matter."""
        tally = self.tally(sites)
        return test.is_clear(tally.bad, tally.good, error)

    def measured(self, sites: Sites, bads: int) -> tuple[int, int]:
        """Return bad runs and runs of a set, up to its bad run number ``bads``: what was known at that time."""
        bad = runs = 0
        for trial in self.trials:
            if trial.off == sites and trial.outcome in ("good", "bad"):
                runs += 1
                bad += trial.outcome == "bad"
                if bad == bads:
                    break
        return bad, runs

    def own(self, sites: Sites, audited: bool | None = None) -> tuple[int, int]:
        """Return bad runs and runs with exactly these sites off; ``audited`` selects by how they were off."""
        outcomes = [
            trial.outcome
            for trial in self.trials
            if trial.off == sites and audited in (None, trial.audited) and trial.outcome in ("good", "bad")
        ]
        return outcomes.count("bad"), len(outcomes)
