"""The decision core against simulated commands: the right sets, in how many runs, and what it says on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.search import Limits, Question
from specsync_core.bisect.trials import Counts, Trial
from specsync_core.bisect.words import Summary
from specsync_core.registry import Registry
from tests.unit.bisect.oracles import (
    PAIR,
    SCENARIOS,
    A,
    B,
    Oracle,
    answer,
    found_sets,
    halve,
    simulate,
    simulated,
    sites_of,
)

REPEATS = 12
"""``benchmarks/bisect_trials.py`` makes 100 of each."""


@pytest.mark.parametrize("counted", [False, True], ids=["exit codes alone", "with counts"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_right_sets_are_found(registry: Registry, name: str, counted: bool) -> None:
    sites = sites_of(registry, "dspark")
    oracle = replace(SCENARIOS[name], counted=counted)
    wrong = [seed for seed in range(REPEATS) if found_sets(simulate(sites, oracle, seed)[1]) != set(oracle.culprits)]
    assert len(wrong) <= REPEATS // 12


@pytest.mark.parametrize("name", ["one culprit", "a pair that is only bad together", "a culprit in 50% of the runs"])
def test_over_all_sites_and_in_parallel(registry: Registry, name: str) -> None:
    sites = [site for site in sites_of(registry) if site.kind != "check"]
    for parallel in (1, 4):
        _, verdict = simulate(sites, SCENARIOS[name], 3, parallel)
        assert found_sets(verdict) == set(SCENARIOS[name].culprits)


def test_counts_spare_runs(registry: Registry) -> None:
    sites = sites_of(registry, "dspark")
    for oracle in (SCENARIOS["one culprit"], SCENARIOS["a pair that is only bad together"]):
        plain, _ = simulate(sites, oracle, 0)
        counted, _ = simulate(sites, replace(oracle, counted=True), 0)
        assert len(counted.knowledge.trials) < 0.7 * len(plain.knowledge.trials)


def test_plain_halving_is_wrong_where_the_culprit_flakes(registry: Registry) -> None:
    """What the numbers are reported beside: it is cheap, and finds one set at most."""
    sites = sites_of(registry, "dspark")
    assert halve(sites, simulated(SCENARIOS["one culprit"], 0))[0] == {frozenset({A})}
    flaky = SCENARIOS["a culprit in 50% of the runs"]
    assert sum(halve(sites, simulated(flaky, seed))[0] == {frozenset({A})} for seed in range(40)) < 10


small = st.frozensets(st.sampled_from(["dspark-mem", "dspark-plan", A, B, "dspark-target"]), min_size=1, max_size=3)


@settings(max_examples=40)
@given(st.lists(small, min_size=1, max_size=3), st.integers(0, 10**6))
def test_every_minimal_set_of_any_family(registry: Registry, family: list[frozenset[str]], seed: int) -> None:
    """Overlapping sets too; with commands that never flake the answer is exact."""
    oracle = Oracle(tuple(family))
    _, verdict = simulate(sites_of(registry, "dspark"), oracle, seed)
    assert found_sets(verdict) == {each for each in family if not any(other < each for other in family)}
    assert all(check.status == "clear" for check in verdict.checks)


def test_noise_is_no_culprit(registry: Registry) -> None:
    """One run in a hundred fails for reasons of its own."""
    sites = sites_of(registry, "dspark")
    right = sum(
        found_sets(simulate(sites, replace(SCENARIOS["one culprit"], noise=0.01), seed)[1]) == {frozenset({A})}
        for seed in range(20)
    )
    assert right >= 19


@pytest.mark.parametrize("name", [name for name, each in SCENARIOS.items() if each.culprits and each.rate == 1])
def test_one_bad_run_of_noise_at_any_time_is_no_endless_bisection(registry: Registry, name: str) -> None:
    """With all sites on it is noise for sure, and then no set's good runs count for another one."""
    sites = sites_of(registry, "dspark")
    oracle = replace(SCENARIOS[name], counted=True)
    for noisy in range(1, 34, 2):
        run = simulated(oracle, 1)

        def noisy_run(number: int, planned: Next, run=run, noisy=noisy) -> Trial:
            trial = run(number, planned)
            return trial.model_copy(update={"outcome": "bad"}) if number == noisy else trial

        assert found_sets(answer(Bisection(sites), noisy_run, most=400)) == set(oracle.culprits), noisy


def test_frequent_noise_makes_no_culprit_that_is_called_sure(registry: Registry) -> None:
    """One run in five fails for reasons of its own; three good runs with all on are luck in half of the cases."""
    sites = [site for site in sites_of(registry, "dspark") if site.slug in ("dspark-mem", "dspark-plan", A)]
    oracle = replace(SCENARIOS["one culprit"], noise=0.2)
    verdicts = [simulate(sites, oracle, seed)[1] for seed in range(40)]
    wrong = [v for v in verdicts if v.status == "found" and v.sure and found_sets(v) != {frozenset({A})}]
    assert len(wrong) <= 1
    assert sum(verdict.status == "on-is-bad" for verdict in verdicts) >= 20


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("runs", [5, 20])
def test_noise_with_all_on_is_never_a_set_of_no_sites(registry: Registry, noise: float, runs: int) -> None:
    """One bad run with all on, and hardly more with all off: what is off in neither is no finding."""
    sites = sites_of(registry, "dspark")
    for seed in range(12):
        bisection = Bisection(sites, Limits(runs=runs))
        verdict = answer(bisection, simulated(Oracle(noise=noise), seed))
        assert frozenset() not in found_sets(verdict), seed
        assert Summary(bisection, verdict).lines()


def test_a_single_good_run_never_clears_a_set_when_the_bad_rate_is_one_half(registry: Registry) -> None:
    bisection, verdict = simulate(sites_of(registry, "dspark"), SCENARIOS["a culprit in 50% of the runs"], 5)
    (check,) = verdict.checks
    assert check.off == bisection.knowledge.candidates - {A}
    assert bisection.knowledge.tally(check.off).good >= 10


# --- the end points ---


def run_all(bisection: Bisection, outcome_of: dict[bool, str]) -> None:
    """Give every trial with all on, and every other one, the same outcome."""

    def run(number: int, planned: Next) -> Trial:
        return Trial(number=number, off=planned.off, outcome=outcome_of[not planned.off])  # type: ignore[arg-type]

    answer(bisection, run)


def test_it_stops_where_all_on_is_bad(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    run_all(bisection, {True: "bad", False: "bad"})
    assert bisection.verdict is not None
    assert bisection.verdict.status == "on-is-bad"
    assert len(bisection.knowledge.trials) == 2


def test_one_bad_run_with_all_on_asks_for_more_before_anything_is_turned_off(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    bisection.record(Trial(number=1, off=frozenset(), outcome="bad"))
    good = 0
    while (planned := bisection.next()) is not None and not planned.off:
        good += 1
        bisection.record(Trial(number=1 + good, off=frozenset(), outcome="good"))
    assert good == 13


def test_it_stops_where_all_off_is_good(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"), Limits(runs=20))
    run_all(bisection, {True: "good", False: "good"})
    assert bisection.verdict is not None
    assert bisection.verdict.status == "off-is-good"
    assert bisection.knowledge.own(bisection.knowledge.candidates) == (0, 20)


@pytest.mark.parametrize(("which", "count"), [(True, 3), (False, 6)])
def test_it_stops_where_an_end_point_cannot_be_tested(registry: Registry, which: bool, count: int) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    run_all(bisection, {True: "good", False: "good"} | {which: "untestable"})
    assert bisection.verdict is not None
    assert bisection.verdict.status == "untestable"
    assert len(bisection.knowledge.trials) == count


def test_a_part_that_cannot_be_tested_is_passed_over_and_said(registry: Registry) -> None:
    """The rest cannot start with only the culprit on: the culprit is found, and the rest is said to be unknown."""
    bisection = Bisection(sites_of(registry, "dspark"))
    everything = bisection.knowledge.candidates

    def run(number: int, planned: Next) -> Trial:
        outcome = "bad" if A in planned.off else "untestable" if planned.off == everything - {A} else "good"
        return Trial(number=number, off=planned.off, outcome=outcome)  # type: ignore[arg-type]

    verdict = answer(bisection, run)
    assert found_sets(verdict) == {frozenset({A})}
    assert [check.status for check in verdict.checks] == ["untestable"]


def test_runs_cap_every_set(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"), Limits(runs=4))
    verdict = answer(bisection, lambda n, p: SCENARIOS["one culprit"].run(n, p.off, p.audited, random.Random(n)))
    assert found_sets(verdict) == {frozenset({A})}
    assert [check.status for check in verdict.checks] == ["capped"]
    runs = [bisection.knowledge.own(trial.off)[1] for trial in bisection.knowledge.trials]
    assert max(runs) <= 4


# --- counts ---


def counted(number: int, off: frozenset[str], outcome: str, *, audited: bool = False, differed: str = "") -> Trial:
    names = ("dspark-mem", "dspark-target", B, "dspark-plan", A)
    struck = tuple(filter(None, differed.split()))
    counts = Counts(
        checks={name: 50 for name in names if audited or name not in off},
        mismatches=dict.fromkeys(struck, 1),
        differed=struck,
        complete=True,
        ranks=2,
        first_call_s=1.0,
    )
    return Trial(number=number, off=off, audited=audited, outcome=outcome, counts=counts)  # type: ignore[arg-type]


def test_where_counts_alone_decide_nothing_else_is_turned_off(registry: Registry) -> None:
    """Ranks differ at one site, also when all are only audited: no run with a part of the sites off is made."""
    bisection = Bisection(sites_of(registry, "dspark"))
    everything = bisection.knowledge.candidates

    def run(number: int, planned: Next) -> Trial:
        assert planned.off in (frozenset(), everything, everything - {A})
        return counted(number, planned.off, "bad" if A in planned.off else "good", audited=planned.audited, differed=A)

    verdict = answer(bisection, run)
    assert found_sets(verdict) == {frozenset({A})}
    assert bisection.knowledge.own(frozenset({A})) == (0, 0)
    assert bisection.knowledge.tally(frozenset({A})).bad == 2
    assert bisection.knowledge.tally(everything - {A}).by_counts >= 3


def test_the_first_to_differ_is_suspected_first(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    for number in (1, 2, 3):
        bisection.record(counted(number, frozenset(), "good", differed=f"{B} {A}"))
    suspects = bisection.suspicion.sorted(bisection.knowledge.candidates)
    assert suspects[:2] == [B, A]
    assert set(suspects[2:5]) == {"dspark-mem", "dspark-target", "dspark-plan"}


def test_a_site_that_never_differed_ranks_behind_one_that_was_not_compared(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    trial = counted(1, frozenset(), "good", differed=A)
    checks = {**trial.counts.checks, "dspark-plan": 0}  # type: ignore[union-attr]
    bisection.record(trial.model_copy(update={"counts": trial.counts.model_copy(update={"checks": checks})}))  # type: ignore[union-attr]
    suspects = bisection.suspicion.sorted(bisection.knowledge.candidates)
    assert suspects[:2] == [A, "dspark-plan"]


def test_memory_gates_differ_by_nature_and_rank_behind(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    bisection.record(counted(1, frozenset(), "good", differed=f"dspark-mem {A}"))
    assert bisection.suspicion.sorted(bisection.knowledge.candidates)[:2] == [A, "dspark-mem"]


def test_good_runs_of_a_selection_are_no_evidence(registry: Registry) -> None:
    """A flaky site is equal in most runs; counting only those would clear it."""
    bisection = Bisection(sites_of(registry, "dspark"))
    one = frozenset({A})
    for number in range(1, 9):
        bisection.record(counted(number, frozenset(), "good"))
    assert bisection.knowledge.tally(one).by_counts == 8
    bisection.record(counted(9, frozenset(), "good", differed=A))
    assert bisection.knowledge.tally(one).good == 0


def test_counts_of_another_set_need_to_be_complete(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    trial = counted(1, frozenset(), "good")
    bisection.record(trial.model_copy(update={"counts": trial.counts.model_copy(update={"complete": False})}))  # type: ignore[union-attr]
    assert bisection.knowledge.tally(frozenset({A})).good == 0


def test_counts_that_contradict_the_outcome_do_not_hide_it(registry: Registry) -> None:
    """No rank ever differs, and with all off it is bad all the same: the runs decide."""
    bisection = Bisection(sites_of(registry, "dspark"))

    def run(number: int, planned: Next) -> Trial:
        return counted(number, planned.off, "bad" if A in planned.off else "good", audited=planned.audited)

    assert found_sets(answer(bisection, run)) == {frozenset({A})}
    assert bisection.knowledge.doubted is not None
    assert bisection.knowledge.tally(bisection.knowledge.candidates - {A}).by_counts == 0


# --- beside the search ---


def test_trials_of_an_earlier_session_are_enough_to_go_on(registry: Registry) -> None:
    sites = sites_of(registry, "dspark")
    whole, verdict = simulate(sites, Oracle(PAIR), 1)
    trials = whole.knowledge.trials
    for cut in range(0, len(trials), 5):
        resumed = Bisection(sites, trials=trials[:cut])
        again = answer(resumed, lambda n, p: Oracle(PAIR).run(n, p.off, p.audited, random.Random(0)))
        assert found_sets(again) == found_sets(verdict)
        assert len(resumed.knowledge.trials) == len(trials)


def test_aborted_and_untestable_trials_decide_nothing(registry: Registry) -> None:
    sites = sites_of(registry, "dspark")
    bisection = Bisection(sites)
    before = bisection.next()
    bisection.record(Trial(number=1, off=frozenset(), outcome="aborted", how="interrupt"))
    bisection.record(Trial(number=2, off=frozenset(), outcome="untestable"))
    assert bisection.next() == before


def test_no_more_runs_start_at_once_than_are_needed(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"))
    running: list[Next] = []
    while (planned := bisection.next(running)) is not None:
        running.append(planned)
    assert [each.off for each in running] == [frozenset()] * 3
    assert isinstance(bisection._answer, Question)


def test_the_expected_rest_shrinks_to_nothing(registry: Registry) -> None:
    sites = sites_of(registry, "dspark")
    bisection = Bisection(sites)
    first = [sum(rest) for rest in bisection.expected_left()]
    assert 10 < min(first) < max(first) < 400

    def run(number: int, planned: Next) -> Trial:
        assert all(sum(rest) > 0 for rest in bisection.expected_left())
        return SCENARIOS["one culprit"].run(number, planned.off, planned.audited, random.Random(0))

    answer(bisection, run)
    assert bisection.expected_left() == []


def test_what_is_expected_is_what_comes(registry: Registry) -> None:
    """Once the rate was seen, the number of runs mostly lies in the range told for it, or misses it by half at most."""
    sites = sites_of(registry, "dspark")
    told = []
    for seed in range(10):
        bisection = Bisection(sites)
        run = simulated(SCENARIOS["a culprit in 50% of the runs"], seed)
        while not (bisection.verdict or bisection.search.test):
            planned = bisection.next()
            assert planned is not None
            bisection.record(run(len(bisection.knowledge.trials) + 1, planned))
        before = len(bisection.knowledge.trials)
        runs = [sum(rest) for rest in bisection.expected_left()]
        answer(bisection, run)
        told.append((min(runs), len(bisection.knowledge.trials) - before, max(runs)))
    assert sum(0.5 * least <= came <= 2 * most for least, came, most in told) >= 8, told
