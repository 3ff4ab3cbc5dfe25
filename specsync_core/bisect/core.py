"""The decision core of a bisection: fed with trials, it says what to run next, and what is known. No IO, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specsync_core.bisect.chances import lower_bound, upper_bound
from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.knowledge import Knowledge
from specsync_core.bisect.order import Suspicion
from specsync_core.bisect.search import RATE_CONFIDENCE, Limits, Question, Search, Verdict
from specsync_core.bisect.trials import Trial
from specsync_core.registry import Site

MOST_SIMULATED = 400
"""Trials that an estimate looks ahead."""
UNSEEN_RATES = (0.3, 0.9, 1.0)
"""Bad rates that an estimate reckons with before there was a bad run."""


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

    def expected_left(self) -> list[tuple[int, int]]:
        """Return how many good and bad runs may still be to come: once for each bad rate that what was seen allows.

        The rest is played through with the most suspicious site of the smallest bad set as the culprit. Empty when
        the verdict is there.
        """
        if self.verdict is not None:
            return []
        culprits = self._likeliest()
        return [self._play(culprits, rate) for rate in self._rates()]

    def _play(self, culprits: Sequence[Sites], rate: float) -> tuple[int, int]:
        chance = random.Random(len(self.knowledge.trials))
        rest = Bisection(self.sites.values(), self.limits, self.knowledge.trials)
        good = bad = 0
        while (planned := rest.next()) is not None and good + bad < MOST_SIMULATED:
            is_bad = any(culprit <= planned.off for culprit in culprits) and chance.random() < rate
            good, bad = good + (not is_bad), bad + is_bad
            number = len(rest.knowledge.trials) + 1
            rest.record(Trial(number=number, off=planned.off, outcome="bad" if is_bad else "good"))
        return good, bad

    def _likeliest(self) -> list[Sites]:
        found = [each.sites for each in self.search.found]
        blamed = [trial.blamed for trial in self.knowledge.trials if trial.outcome == "bad" and trial.off]
        fresh = [sites for sites in blamed if not any(known <= sites for known in found)]
        whole: Sites = frozenset() if found else frozenset(self.sites)
        smallest = self.search.narrowed or min(fresh, key=len, default=whole)
        if smallest:
            found.append(frozenset(self.suspicion.sorted(smallest)[:1]))
        return found

    def _rates(self) -> tuple[float, float, float]:
        """Bad rates of the culprit: as low, as likely and as high as the runs with all candidates off leave it."""
        bad, runs = self.knowledge.own(frozenset(self.sites))
        if not bad:
            return UNSEEN_RATES
        low, high = lower_bound(bad, runs, RATE_CONFIDENCE), upper_bound(bad, runs, RATE_CONFIDENCE)
        return low, bad / runs, high
