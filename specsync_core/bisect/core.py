"""The decision core of a bisection: fed with trials, it says what to run next, and what is known. No IO, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.knowledge import Knowledge
from specsync_core.bisect.order import Suspicion
from specsync_core.bisect.search import Limits, Question, Search, Verdict
from specsync_core.bisect.trials import Trial
from specsync_core.registry import Site

MOST_SIMULATED = 400
"""Trials that an estimate looks ahead."""


@dataclass(frozen=True)
class Next:
    """One run to make."""

    off: Sites
    audited: bool
    why: str


class Bisection:
    """Finds every minimal set of sites that is bad when it is off.

    Args:
        sites: the candidates.
        limits: confidence and runs.
        trials: of an earlier, interrupted bisection.
    """

    def __init__(self, sites: Iterable[Site], limits: Limits | None = None, trials: Iterable[Trial] = ()) -> None:
        self.sites = {site.slug: site for site in sites}
        self.limits = limits or Limits()
        self.knowledge = Knowledge(self.sites, trials)
        self.suspicion = Suspicion(self.sites.values())
        self.search = Search(self.knowledge, self.suspicion, self.limits)
        self.suspicion.learn(self.knowledge.trials)
        self._answer: Question | Verdict = self.search.decide()

    def record(self, trial: Trial) -> None:
        """Take a trial that has ended."""
        self.knowledge.add(trial)
        if trial.counts is not None:
            self.suspicion.learn(self.knowledge.trials)
        self._answer = self.search.decide()

    @property
    def verdict(self) -> Verdict | None:
        return self._answer if isinstance(self._answer, Verdict) else None

    def next(self, running: Sequence[Next] = ()) -> Next | None:
        """Return the next run to make beside those that are running; None when there is nothing to gain from one."""
        if isinstance(self._answer, Verdict):
            return None
        question = self._answer
        under_way = [each.off for each in running]
        open_needs = [
            (self.knowledge.tally(sites).runs + under_way.count(sites), position, sites)
            for position, (sites, need) in enumerate(question.needs)
            if under_way.count(sites) < need
        ]
        if not open_needs:
            return None
        _, _, sites = min(open_needs, key=lambda each: each[:2])  # in turns: the least tried first
        return Next(sites, question.audited, question.why)

    def expected_left(self) -> tuple[int, int]:
        """Return how many good and bad runs are still to come, if the likeliest answer is the right one.

        The rest is played through once with the most suspicious site of the smallest bad set as the culprit.
        """
        if self.verdict is not None:
            return 0, 0
        culprits, rate = self._likeliest()
        chance = random.Random(len(self.knowledge.trials))
        rest = Bisection(self.sites.values(), self.limits, self.knowledge.trials)
        good = bad = 0
        while (planned := rest.next()) is not None and good + bad < MOST_SIMULATED:
            is_bad = any(culprit <= planned.off for culprit in culprits) and chance.random() < rate
            good, bad = good + (not is_bad), bad + is_bad
            number = len(rest.knowledge.trials) + 1
            rest.record(Trial(number=number, off=planned.off, outcome="bad" if is_bad else "good"))
        return good, bad

    def _likeliest(self) -> tuple[list[Sites], float]:
        found = [each.sites for each in self.search.found]
        bad, runs = self.knowledge.own(frozenset(self.sites))
        blamed = [trial.blamed for trial in self.knowledge.trials if trial.outcome == "bad" and trial.off]
        fresh = [sites for sites in blamed if not any(known <= sites for known in found)]
        whole: Sites = frozenset() if found else frozenset(self.sites)
        smallest = self.search.narrowed or min(fresh, key=len, default=whole)
        if smallest:
            found.append(frozenset(self.suspicion.sorted(smallest)[:1]))
        return found, (bad + 0.5) / (runs + 1) if bad else 0.9
