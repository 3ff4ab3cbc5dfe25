"""In which order sites are suspected, and into which parts a set of them falls. No IO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.trials import Trial
from specsync_core.registry import Site

PHASES = ("init", "target", "draft", "plan", "accept", "state")
"""In the order of a request's life: the tie-break where ranks began to differ in one step."""


class Suspicion:
    """Ranks candidate sites by what the trials counted.

    First the sites at which ranks differed, the first to differ first; then memory gates that differed, for free memory
    hardly ever is equal and rarely decides otherwise; then sites that were not compared; then those that never
    differed, the least checked first; last the sites that the command never called.

    Args:
        sites: the candidates.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = {site.slug: site for site in sites}
        self._rank: dict[str, tuple[float, ...]] = {}
        self.learn(())

    def learn(self, trials: Iterable[Trial]) -> None:
        """Take the counts of all trials."""
        seen = [trial for trial in trials if trial.counts is not None and trial.counts.checks]
        counted = [trial.counts for trial in seen if trial.counts is not None]
        healed = [trial.counts.differed for trial in seen if trial.counts is not None and not trial.off]
        audited = [trial.counts.differed for trial in seen if trial.counts is not None and trial.audited]
        first: dict[str, float] = {}
        for orders, penalty in ((healed, 0.0), (audited, 1000.0)):  # unhealed, others differ in a culprit's wake
            for differed in orders:
                for position, slug in enumerate(differed):
                    first[slug] = min(first.get(slug, 1e9), penalty + position)
        checks: dict[str, int] = {}
        for counts in counted:
            for slug, count in counts.checks.items():
                checks[slug] = checks.get(slug, 0) + count
        self._rank = {slug: self._place(slug, first, checks, bool(counted)) for slug in self._sites}

    def _place(self, slug: str, first: dict[str, float], checks: dict[str, int], counted: bool) -> tuple[float, ...]:
        site = self._sites[slug]
        if slug in first:
            group, within = (1, 0.0) if site.cause == "memory" else (0, first[slug])
        elif not counted or checks.get(slug) == 0:
            group, within = 2, 0.0
        elif slug in checks:
            group, within = 3, float(checks[slug])
        else:
            group, within = 4, 0.0
        return (group, within, PHASES.index(site.phase), site.number)

    def rank(self, slug: str) -> tuple[float, ...]:
        """Return a key: the smaller, the more suspicious."""
        return self._rank[slug]

    def sorted(self, slugs: Iterable[str]) -> list[str]:
        return sorted(slugs, key=self.rank)

    def partitions(self, sites: Sites) -> Iterator[list[Sites]]:
        """Yield ways to split a set, coarse ones first; in each the most suspicious part comes first."""
        order = self.sorted(sites)
        first = order[0]
        if self.rank(first)[0] == 0:
            yield [frozenset({first}), sites - {first}]
        yield from (
            parts for key in (self._evidence, self._algorithm, self._phase) if len(parts := self._split(order, key)) > 1
        )
        middle = (len(order) + 1) // 2
        yield [frozenset(order[:middle]), frozenset(order[middle:])]
        if len(order) > 2:
            yield [frozenset({slug}) for slug in order]

    def _split(self, order: Sequence[str], key: Callable[[str], object]) -> list[Sites]:
        parts: dict[object, set[str]] = {}
        for slug in order:
            parts.setdefault(key(slug), set()).add(slug)
        return [frozenset(part) for part in parts.values()]

    def _evidence(self, slug: str) -> object:
        return self.rank(slug)[0]

    def _algorithm(self, slug: str) -> object:
        return self._sites[slug].algorithm

    def _phase(self, slug: str) -> object:
        return self._sites[slug].phase
