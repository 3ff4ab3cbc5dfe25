"""How a run ended, in a word: from its exit code, its time, and what its ranks left."""

from __future__ import annotations

import pytest

from specsync_core.bisect.evidence import Evidence
from specsync_core.bisect.judge import DEFAULT_LIMIT_S, Judge, Seen
from specsync_core.bisect.trials import Counts, Trial, policy_of
from tests.unit.bisect.oracles import CALLED, A, B

ON: frozenset[str] = frozenset()
ALL_OFF = frozenset(CALLED)
SYNCED = Counts(checks=dict.fromkeys(CALLED, 9), complete=True, ranks=2, first_call_s=10.0)
MET = Evidence(has_met=True, world_size=2, counts=Counts(ranks=2))


def good(number: int, seconds: float, counts: Counts | None = SYNCED) -> Trial:
    return Trial(number=number, off=ON, outcome="good", seconds=seconds, counts=counts)


def judge_with(*trials: Trial, limit_s: float | None = None) -> Judge:
    judge = Judge(limit_s)
    judge.learn(trials)
    return judge


def seen(code: int | None, seconds: float = 30.0, evidence: Evidence | None = None, equal: bool | None = None) -> Seen:
    return Seen(code, seconds, evidence or Evidence(), equal)


def synced() -> Evidence:
    return Evidence(has_met=True, world_size=2, counts=SYNCED)


@pytest.mark.parametrize(
    ("what", "off", "expected"),
    [
        (seen(0), ON, ("good", "exit", "ended well")),
        (seen(0, equal=True), ON, ("good", "exit", "ended well")),
        (seen(0, equal=False), ON, ("bad", "output", "output other than expected")),
        (seen(3, evidence=synced()), ON, ("bad", "exit", "exit code 3")),
        (seen(-9, evidence=synced()), ON, ("bad", "exit", "ended by signal 9")),
        (seen(None, 40.2, synced()), ON, ("bad", "time-out", "time-out after 40 s")),
        (seen(None, 0.051, synced()), ON, ("bad", "time-out", "time-out after 0.051 s")),
        (seen(3), ON, ("untestable", "exit", "exit code 3, before the first sync")),
        (seen(None, 40.0), ON, ("untestable", "time-out", "time-out after 40 s, before the first sync")),
        # With every called site off there is no first sync: the time tells.
        (seen(1, 7.9, MET), ALL_OFF, ("untestable", "exit", "exit code 1, before the first sync")),
        (seen(1, 8.1, MET), ALL_OFF, ("bad", "exit", "exit code 1")),
        (seen(1, 8.1), ALL_OFF, ("untestable", "exit", "exit code 1, before the first sync")),
        # Sites are on and were never called: much later than usual.
        (seen(1, 14.0, MET), frozenset({A}), ("untestable", "exit", "exit code 1, before the first sync")),
        (seen(1, 15.1, MET), frozenset({A}), ("bad", "exit", "exit code 1")),
    ],
)
def test_outcomes(what: Seen, off: frozenset[str], expected: tuple[str, str, str]) -> None:
    assert judge_with(good(1, 20.0)).judge(what, off) == expected


def test_before_any_good_run_a_failure_without_a_sync_is_untestable() -> None:
    assert Judge().judge(seen(1), ON)[0] == "untestable"
    assert Judge().judge(seen(1, evidence=synced()), ON)[0] == "bad"


def test_where_good_runs_leave_no_counts_every_failure_is_bad() -> None:
    judge = judge_with(good(1, 20.0, None))
    assert judge.is_blind
    assert judge.judge(seen(1), ON)[0] == "bad"
    assert not judge_with(good(1, 20.0, None), good(2, 20.0)).is_blind


def test_the_time_limit_adapts_to_good_runs() -> None:
    assert Judge().limit_s == DEFAULT_LIMIT_S
    assert Judge(50.0).limit_s == 50.0
    assert judge_with(good(1, 20.0), good(2, 30.0)).limit_s == 90.0
    assert judge_with(good(1, 1.0)).limit_s == 11.0
    assert judge_with(good(1, 20.0), limit_s=50.0).limit_s == 50.0
    assert judge_with(Trial(number=1, off=ON, outcome="bad", seconds=500.0)).limit_s == DEFAULT_LIMIT_S


def test_policies() -> None:
    assert policy_of(ON, CALLED) == "all"
    assert policy_of({B, A}, CALLED) == f"all,-{A},-{B}"
    assert policy_of(CALLED, CALLED) == "off"
    assert policy_of({A, B}, CALLED, audited=True) == f"all,{A}:audit,{B}:audit"
    assert policy_of(CALLED, CALLED, audited=True).startswith("all,")


def test_an_audited_trial_is_about_the_sites_that_differed() -> None:
    differed = SYNCED.model_copy(update={"mismatches": {A: 1}, "differed": (A,)})
    trial = Trial(number=1, off=ALL_OFF, audited=True, outcome="bad", counts=differed)
    assert trial.blamed == {A}
    assert trial.model_copy(update={"audited": False}).blamed == ALL_OFF
    incomplete = differed.model_copy(update={"complete": False})
    assert trial.model_copy(update={"counts": incomplete}).blamed == ALL_OFF
    silent = SYNCED.model_copy(update={"mismatches": {}, "differed": ()})
    assert trial.model_copy(update={"counts": silent}).blamed == ALL_OFF
