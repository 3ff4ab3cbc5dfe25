"""The summary, sentence by sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.search import Limits
from specsync_core.bisect.trials import Trial
from specsync_core.bisect.words import Summary, _durations, name_off, tell_state, tell_trial
from specsync_core.registry import Registry
from tests.unit.bisect.oracles import CALLED, PAIR, SCENARIOS, TWO, A, B, Oracle, answer, sites_of

Make = Callable[[int, Next], Trial]


@pytest.fixture
def bisection(registry: Registry) -> Bisection:
    return Bisection([site for site in sites_of(registry, "dspark") if site.slug in CALLED])


def summary(bisection: Bisection, run: Make) -> str:
    return "\n".join(Summary(bisection, answer(bisection, run)).lines())


def of(oracle: Oracle, how: str = "time-out") -> Make:
    chance = random.Random(1)

    def run(number: int, planned: Next) -> Trial:
        trial = oracle.run(number, planned.off, planned.audited, chance)
        return trial.model_copy(update={"how": how, "detail": how})

    return run


def test_the_sentence_of_one_culprit(registry: Registry) -> None:
    """Seven of eight runs hang, and none of twenty: as an operator would say it."""
    sites = [site for site in sites_of(registry, "dspark") if site.slug in CALLED]
    one, rest = frozenset({A}), frozenset(CALLED) - {A}
    trials = [Trial(number=n, off=frozenset(), outcome="good") for n in (1, 2, 3)]
    trials += [Trial(number=n, off=frozenset(CALLED), outcome="bad", how="time-out") for n in (4, 5, 6)]
    for number in range(7, 15):
        outcome = "good" if number == 9 else "bad"
        trials.append(Trial(number=number, off=one, outcome=outcome, how="time-out"))  # type: ignore[arg-type]
    trials += [Trial(number=n, off=rest, outcome="good") for n in range(15, 35)]
    bisection = Bisection(sites, Limits(), trials)
    assert bisection.verdict is not None
    text = Summary(bisection, bisection.verdict).lines()
    assert text[0] == "1 minimal set of sites found, in 34 runs (24 good, 10 bad; 0.0 s of running)."
    assert text[1] == (
        "With dspark-accept-greedy off, 7 of 8 runs hang; with everything else off and it on, 0 of 20"
        " (99% that the bad rate is under 21%)."
    )
    assert text[2] == (
        "Error rate: at most 1% that a set named here does not matter, or that one is missing which is bad in 46% of"
        " its runs or more."
    )
    assert text[3] == (
        "Noise: all on, 0 of 3 runs bad, and 0 of 20 with only the above on (99% that the bad rate is under 19%)."
    )


def test_two_sets(bisection: Bisection) -> None:
    text = summary(bisection, of(Oracle(TWO), "exit"))
    assert text.startswith("2 minimal sets of sites found, in ")
    assert f"\nWith {A} off, 3 of 3 runs fail.\n" in text
    assert f"\nWith everything else off and {A} and {B} on, 0 of " in text


def test_a_pair(bisection: Bisection) -> None:
    text = summary(bisection, of(Oracle(PAIR), "output"))
    assert f"\nWith {A} and {B} off, " in text
    assert "runs differ.\n" in text
    assert f"\nWith everything else off and {A} on, 0 of " in text
    assert f"\nWith everything else off and {B} on, 0 of " in text


def test_counts_are_told(bisection: Bisection) -> None:
    text = summary(bisection, of(replace(SCENARIOS["one culprit"], counted=True)))
    assert "; 3 of these by counts: no rank differed there, so they did not need to be off" in text
    assert f"Counts, 3 runs with all on: ranks differed, and were healed, at {A} (the most telling first)." in text
    assert "They never differed in 1,200 checks at dspark-draft-greedy, dspark-mem, dspark-plan, dspark-target." in text


def test_counts_alone(registry: Registry) -> None:
    """Two bad audited runs in which one site differs, and nothing else: no run with it off is made."""
    bisection = Bisection([site for site in sites_of(registry, "dspark") if site.slug in CALLED])
    oracle = replace(SCENARIOS["one culprit"], counted=True)

    def run(number: int, planned: Next) -> Trial:
        trial = of(oracle)(number, planned)
        if planned.audited:  # the fault leaves no wake
            assert trial.counts is not None
            alone = trial.counts.model_copy(update={"mismatches": {A: 1}, "differed": (A,)})
            trial = trial.model_copy(update={"counts": alone})
        assert planned.off != {A}
        return trial

    text = summary(bisection, run)
    assert (
        f"With {A} off, runs are bad, by counts alone: in 2 of 2 bad runs with more sites only audited, ranks differed"
        " there and nowhere else (1,000 checks), so no run with it off was needed;"
    ) in text


def test_what_was_capped_is_not_called_sure(registry: Registry) -> None:
    bisection = Bisection(sites_of(registry, "dspark"), Limits(runs=2))
    text = summary(bisection, of(SCENARIOS["one culprit"]))
    assert "; --runs 2 allowed no more" in text
    assert "So not everything here is 99% sure" in text
    assert "Error rate" not in text


def test_no_answer(registry: Registry) -> None:
    sites = sites_of(registry, "dspark")

    def always(outcome: str) -> Make:
        return lambda n, p: Trial(number=n, off=p.off, outcome=outcome, how="exit", detail="exit code 1")  # type: ignore[arg-type]

    text = summary(Bisection(sites), always("bad"))
    assert "With all sites on, 2 of 2 runs fail, and all of them should be good: no site heals this. Last: exit" in text
    text = summary(Bisection(sites, Limits(runs=20)), always("good"))
    assert text.startswith("No site was seen to matter, in 23 runs (23 good; ")
    assert (
        "With all 12 candidate sites off, 0 of 20 runs are bad, and it should be bad: none of these sites was seen to"
        " matter (99% that the bad rate is under 21%)."
    ) in text
    text = summary(Bisection(sites), always("untestable"))
    assert (
        "With all sites on, the command fails before its first sync, so it cannot be tested. Last: exit code 1." in text
    )


@pytest.mark.parametrize(
    ("off", "words"),
    [
        ((), "all sites on"),
        (CALLED, "all 5 candidate sites off"),
        ((A,), "dspark-accept-greedy off"),
        ((A, B), "dspark-accept-greedy and dspark-draft-greedy off"),
    ],
)
def test_names_of_sets(bisection: Bisection, off: tuple[str, ...], words: str) -> None:
    assert name_off(frozenset(off), bisection) == words


def test_names_of_large_sets(registry: Registry) -> None:
    whole = Bisection(sites_of(registry, "dspark"))
    everything = whole.knowledge.candidates
    assert name_off(everything - {A}, whole) == "all candidate sites off but dspark-accept-greedy"
    assert name_off(frozenset(sorted(everything)[:6]), whole) == "6 of 12 candidate sites off"


def test_lines_while_it_runs(bisection: Bisection) -> None:
    state = tell_state(bisection, 1, 600.0)
    assert re.fullmatch(r"now all sites on; about \d+ to \d+ more runs, [\d.]+ to [\d.]+ h", state)
    trial = replace(SCENARIOS["one culprit"], counted=True).run(1, frozenset(), False, random.Random(0))
    bisection.record(trial.model_copy(update={"detail": "ended well"}))
    line = tell_trial(bisection.knowledge.trials[0], bisection)
    # No run was bad so far: one that is may hang.
    assert re.search(
        r"about \d+ to \d+ more runs, [\d.]+ (min |h )?to [\d.]+ (h|min)$", tell_state(bisection, 1, 600.0)
    )
    assert tell_state(bisection, 1, 1.0).endswith(" s")
    assert line == f"trial 1: all sites on: good (ended well, 1.0 s); ranks differed first at {A}"


@pytest.mark.parametrize(
    ("least_s", "most_s", "words"),
    [(120, 250, "2 to 4 min"), (40, 250, "40 s to 4 min"), (31, 31.2, "31 s"), (1.25, 9.0, "1.2 to 9.0 s")],
)
def test_ranges_of_time(least_s: float, most_s: float, words: str) -> None:
    assert _durations(least_s, most_s) == words
