"""What a few runs say about a rate: exact binomial bounds, and Wald's sequential test. No IO, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_HALVINGS = 60
"""Of the interval in which a bound is sought: to the last bit of a float."""


def tail(bad: int, runs: int, rate: float) -> float:
    """Return the probability of at least ``bad`` bad ones among ``runs`` runs at this rate."""
    if bad <= 0:
        return 1.0
    if rate <= 0.0 or bad > runs:
        return 0.0
    return min(1.0, math.fsum(_probability(count, runs, rate) for count in range(bad, runs + 1)))


def _probability(bad: int, runs: int, rate: float) -> float:
    if rate >= 1.0:
        return float(bad == runs)
    return math.comb(runs, bad) * rate**bad * (1.0 - rate) ** (runs - bad)


@lru_cache(maxsize=4096)
def upper_bound(bad: int, runs: int, confidence: float) -> float:
    """Return the rate that the true one is under, at this confidence (Clopper and Pearson, one-sided)."""
    if bad >= runs:
        return 1.0
    if bad == 0:
        return float(1.0 - (1.0 - confidence) ** (1.0 / runs))
    return _root(lambda rate: tail(bad + 1, runs, rate), confidence)


@lru_cache(maxsize=4096)
def lower_bound(bad: int, runs: int, confidence: float) -> float:
    """Return the rate that the true one is over, at this confidence (Clopper and Pearson, one-sided)."""
    if bad == 0:
        return 0.0
    return _root(lambda rate: tail(bad, runs, rate), 1.0 - confidence)


def _root(rising: Callable[[float], float], value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rising(middle) < value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def chance_of_excess(bad: int, runs: int, other_bad: int, other_runs: int) -> float:
    """Return how likely so many bad runs or more are where a set is bad as often as others (Fisher's exact test)."""
    every, bads = runs + other_runs, bad + other_bad
    ways = sum(math.comb(runs, k) * math.comb(other_runs, bads - k) for k in range(bad, min(runs, bads) + 1))
    return ways / math.comb(every, bads)


def runs_to_clear(rate: float, error: float) -> int:
    """Return how many good runs in a row a set with this bad rate shows with a probability of ``error`` at most."""
    if rate >= 1.0:
        return 1
    if rate <= 0.0:
        raise ValueError("no number of good runs rules out a bad rate of 0")
    return max(1, math.ceil(math.log(error) / math.log1p(-rate)))


def share(total: float, number: int) -> float:
    """Return what the ``number``-th decision (from 1) may spend, so that all of them together spend ``total``."""
    return total / (number * (number + 1))


@dataclass(frozen=True)
class SequentialTest:
    """Wald's test of "bad no more often than the noise" against "bad at ``rate`` or more often"."""

    noise: float
    """Bad rate of a set that does not matter; above 0, below ``rate``."""
    rate: float

    def evidence(self, bad: int, good: int) -> float:
        """Return the logarithm of the likelihood ratio; above 0 it speaks for ``rate``."""
        rate = min(self.rate, 1.0 - 1e-6)
        return bad * math.log(rate / self.noise) + good * math.log((1.0 - rate) / (1.0 - self.noise))

    def is_bad(self, bad: int, good: int, error: float) -> bool:
        """Whether a set that does not matter looks like this with a probability of ``error`` at most."""
        return bad > 0 and self.evidence(bad, good) >= math.log(1.0 / error)

    def is_clear(self, bad: int, good: int, error: float) -> bool:
        """Whether a set that matters looks like this with a probability of ``error`` at most."""
        if bad == 0:
            return good >= runs_to_clear(self.rate, error)
        return self.evidence(bad, good) <= math.log(error)

    def bad_still_needed(self, bad: int, good: int, error: float) -> int:
        """Return how many bad runs, and no good one, would settle that the set is bad."""
        missing = math.log(1.0 / error) - self.evidence(bad, good)
        return max(0, math.ceil(missing / math.log(min(self.rate, 1.0 - 1e-6) / self.noise)))
