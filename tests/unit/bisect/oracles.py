"""Simulated commands: which sets of sites are bad, how often, and what their ranks would count."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.search import Verdict
from specsync_core.bisect.trials import Counts, Trial
from specsync_core.registry import Registry, Site

A, B = "dspark-accept-greedy", "dspark-draft-greedy"
CALLED = ("dspark-mem", "dspark-target", "dspark-draft-greedy", "dspark-plan", "dspark-accept-greedy")
"""The sites that the simulated command goes through, in a step's order."""


@dataclass(frozen=True)
class Oracle:
    """A command whose culprits are known.

    Args:
        culprits: sets that are bad when all of a set is off, each on its own at ``rate``.
        counted: whether ranks leave counts. A member of a culprit differs in the runs in which the culprit strikes.
        noise: rate of bad runs that have nothing to do with sites.
    """

    culprits: tuple[frozenset[str], ...] = ()
    rate: float = 1.0
    counted: bool = False
    noise: float = 0.0

    def run(self, number: int, off: frozenset[str], audited: bool, chance: random.Random) -> Trial:
        strikes = [culprit for culprit in self.culprits if chance.random() < self.rate]
        bad = any(culprit <= off for culprit in strikes) or chance.random() < self.noise
        counts = None
        if self.counted:
            compared = [slug for slug in CALLED if audited or slug not in off]
            struck = [slug for slug in compared if any(slug in culprit for culprit in strikes)]
            wake = [slug for slug in compared if slug not in struck] if bad and audited else []
            differed = (*struck, *wake)
            counts = Counts(
                checks=dict.fromkeys(compared, 100), mismatches=dict.fromkeys(differed, 1), differed=differed,
                complete=True, ranks=2, first_call_s=1.0,
            )  # fmt: skip
        return Trial(
            number=number, off=off, audited=audited, outcome="bad" if bad else "good", seconds=1.0, counts=counts
        )


ONE = (frozenset({A}),)
TWO = (frozenset({A}), frozenset({B}))
PAIR = (frozenset({A, B}),)
SCENARIOS: dict[str, Oracle] = {
    "one culprit": Oracle(ONE),
    "two independent culprits": Oracle(TWO),
    "a pair that is only bad together": Oracle(PAIR),
    "a culprit in 50% of the runs": Oracle(ONE, rate=0.5),
    "a culprit in 10% of the runs": Oracle(ONE, rate=0.1),
    "none": Oracle(),
}


def answer(bisection: Bisection, run: Callable[[int, Next], Trial], parallel: int = 1, most: int = 5000) -> Verdict:
    """Feed a bisection until it has its verdict; with ``parallel``, trials end in the order in which they began."""
    running: list[Next] = []
    number = len(bisection.knowledge.trials)
    while bisection.verdict is None:
        while len(running) < parallel and (planned := bisection.next(running)) is not None:
            running.append(planned)
        number += 1
        assert number < most, "the bisection does not end"
        bisection.record(run(number, running.pop(0)))
    return bisection.verdict


def simulated(oracle: Oracle, seed: int) -> Callable[[int, Next], Trial]:
    """The oracle as a command, whose chances come from the seed."""
    chance = random.Random(seed)
    return lambda number, planned: oracle.run(number, planned.off, planned.audited, chance)


def simulate(sites: Sequence[Site], oracle: Oracle, seed: int, parallel: int = 1) -> tuple[Bisection, Verdict]:
    bisection = Bisection(sites)
    return bisection, answer(bisection, simulated(oracle, seed), parallel)


def found_sets(verdict: Verdict) -> set[frozenset[str]]:
    return {each.sites for each in verdict.found}


def halve(sites: Sequence[Site], run: Callable[[int, Next], Trial]) -> tuple[set[frozenset[str]], int]:
    """Plain halving, as by hand: one run decides; where neither half is bad, sites are dropped one by one.

    Args:
        run: as `answer` takes it.

    Returns:
        What it finds, and its number of runs.
    """
    runs = 0

    def bad(off: frozenset[str]) -> bool:
        nonlocal runs
        runs += 1
        return run(runs, Next(off, False, "halving")).outcome == "bad"

    left = [site.slug for site in sites]
    if not bad(frozenset(left)):
        return set(), runs
    while len(left) > 1:
        middle = (len(left) + 1) // 2
        if bad(frozenset(left[:middle])):
            left = left[:middle]
        elif bad(frozenset(left[middle:])):
            left = left[middle:]
        else:
            break
    for slug in list(left):
        if len(left) > 1 and bad(frozenset(left) - {slug}):
            left.remove(slug)
    return {frozenset(left)}, runs


def sites_of(registry: Registry, algorithm: str | None = None) -> list[Site]:
    return [site for site in registry.sites if algorithm in (None, site.algorithm)]
