"""The statistics, against figures that are known and against plain counting."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsync_core.bisect.chances import (
    SequentialTest,
    chance_of_excess,
    lower_bound,
    runs_to_clear,
    share,
    tail,
    upper_bound,
)


@pytest.mark.parametrize(
    ("bad", "runs", "confidence", "low", "high"),
    # scipy's betaincinv, and for 0 of n the rule 1 - (1 - confidence) ** (1 / n)
    [
        (0, 20, 0.99, 0.0, 0.20567),
        (0, 60, 0.95, 0.0, 0.04870),
        (7, 8, 0.975, 0.47349, 0.99684),
        (3, 3, 0.9, 0.46416, 1.0),
        (5, 10, 0.975, 0.18709, 0.81291),
    ],
)
def test_bounds(bad: int, runs: int, confidence: float, low: float, high: float) -> None:
    assert lower_bound(bad, runs, confidence) == pytest.approx(low, abs=2e-5)
    assert upper_bound(bad, runs, confidence) == pytest.approx(high, abs=2e-5)


@given(st.integers(1, 60), st.data(), st.floats(0.5, 0.999))
def test_a_bound_is_where_the_tail_is_the_error(runs: int, data: st.DataObject, confidence: float) -> None:
    bad = data.draw(st.integers(0, runs))
    low, high = lower_bound(bad, runs, confidence), upper_bound(bad, runs, confidence)
    assert 0.0 <= low <= bad / runs <= high <= 1.0
    if bad:
        assert tail(bad, runs, low) == pytest.approx(1.0 - confidence, abs=1e-9)
    if bad < runs:
        assert 1.0 - tail(bad + 1, runs, high) == pytest.approx(1.0 - confidence, abs=1e-9)


def test_a_single_good_run_clears_nothing_that_is_bad_half_the_time() -> None:
    test = SequentialTest(noise=0.01, rate=0.5)
    assert [test.is_clear(0, good, 0.05) for good in (1, 2, 3, 4, 5)] == [False, False, False, False, True]
    assert runs_to_clear(0.5, 0.05) == 5


def test_rates_at_the_ends() -> None:
    assert runs_to_clear(1.0, 0.001) == 1
    with pytest.raises(ValueError, match="no number of good runs rules out"):
        runs_to_clear(0.0, 0.1)
    assert tail(0, 5, 0.1) == 1.0
    assert tail(6, 5, 0.9) == 0.0
    assert tail(5, 5, 1.0) == 1.0


def test_shares_of_the_error_add_up_to_the_whole_and_never_to_more() -> None:
    spent = [share(0.01, number) for number in range(1, 1000)]
    assert all(earlier > later > 0 for earlier, later in pairwise(spent))
    assert 0.0099 < math.fsum(spent) < 0.01


@pytest.mark.parametrize(("rate", "noise", "error"), [(0.5, 0.01, 0.05), (0.1, 0.01, 0.05), (0.9, 0.02, 0.02)])
def test_the_sequential_test_errs_no_more_often_than_it_says(rate: float, noise: float, error: float) -> None:
    chance = random.Random(7)
    test = SequentialTest(noise, rate)

    def decide(true_rate: float) -> str:
        bad = good = 0
        while True:
            if chance.random() < true_rate:
                bad += 1
            else:
                good += 1
            if test.is_bad(bad, good, error):
                return "bad"
            if test.is_clear(bad, good, error):
                return "clear"

    repeats = 2000
    slack = 3 * math.sqrt(error / repeats)
    assert sum(decide(noise) == "bad" for _ in range(repeats)) / repeats <= error + slack
    assert sum(decide(rate) == "clear" for _ in range(repeats)) / repeats <= error + slack


def test_how_many_bad_runs_are_still_needed() -> None:
    test = SequentialTest(noise=0.01, rate=0.5)
    needed = test.bad_still_needed(0, 0, 0.0025)
    assert test.is_bad(needed, 0, 0.0025)
    assert not test.is_bad(needed - 1, 0, 0.0025)
    assert test.bad_still_needed(needed, 0, 0.0025) == 0


@pytest.mark.parametrize(
    ("counts", "chance"),
    # scipy.stats.fisher_exact(alternative="greater"), and for all against none 1 / comb(runs, bad)
    [((2, 2, 0, 3), 0.1), ((3, 3, 0, 15), 1 / 816), ((0, 4, 2, 9), 1.0), ((3, 4, 1, 4), 17 / 70)],
)
def test_the_chance_of_an_excess(counts: tuple[int, int, int, int], chance: float) -> None:
    assert chance_of_excess(*counts) == pytest.approx(chance)
