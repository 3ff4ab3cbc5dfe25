"""The real engine on two CPU ranks: what a fault on rank 1 does without sync, and that it does nothing with it."""

from __future__ import annotations

import sys

import pytest

from tests.engines.vllm.environment import NEWEST, is_built
from tests.engines.vllm.matrix import COUNT, COUNTED, GATE, HOT, SEED, SETUPS, keep, keep_fatal, matrix_run
from tests.engines.vllm.serving import serve

each = pytest.mark.parametrize("name", SETUPS)
trimming = pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if setup.faults == COUNTED])
going_on = pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if setup.faults != COUNTED])
seeded = pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if SEED in setup.faults])
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_built(NEWEST), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"),
]


@each
def test_with_sync_every_fault_gives_the_clean_rounds_tokens(name):
    run = matrix_run(name, "all")
    assert run.ended, run.log[-4000:]
    clean = run.round("")
    for fault in ("", *(fault for fault in SETUPS[name].faults if HOT not in fault)):
        found = run.round(fault)
        assert (fault, found.tokens, found.differing) == (fault, clean.tokens, 0)


@each
def test_with_sync_the_ranks_agree_at_a_temperature(name):
    run = matrix_run(name, "all")
    assert run.ended, run.log[-4000:]
    assert {found.fault: found.differing for found in run.rounds if HOT in found.fault and found.differing} == {}


@each
def test_every_rank_says_what_is_protected_and_proves_it(name):
    log = matrix_run(name, "all").log
    assert log.count(f"specsync: vllm {NEWEST}, {name[:2]} runner, {SETUPS[name].speculation['method']}, 2 ranks") == 1
    assert "Agreement is not a correct distribution" in log
    assert "specsync: hooks proven on 2 ranks" in log


@trimming
def test_with_sync_a_token_count_that_differs_is_healed(name):
    run = matrix_run(name, "all")
    assert run.mismatched_calls("vllm-token-count") == run.round(COUNT).decisions == 1


@trimming
def test_without_sync_other_token_counts_end_the_engine_or_corrupt_it(name):
    """Both ranks are in one all-reduce then, with tensors of different shapes. Gloo ends the engine; vLLM's own, over
    shared memory on processors with AVX-512, adds up what does not belong together."""
    run = serve(SETUPS[name], "off", ["", COUNT], hang_s=20)
    assert run.ended
    if len(run.rounds) == 1:
        assert "Received data size doesn't match expected size" in run.log or "Connection reset by peer" in run.log
        keep_fatal(name, COUNT, "died")
        return
    clean, faulty = run.rounds
    assert clean.differing == 0
    assert faulty.differing > 0
    assert faulty.tokens != clean.tokens
    keep(name, "off", run)


@going_on
def test_without_sync_the_same_rounds_diverge(name):
    run = matrix_run(name, "all:audit")
    assert run.ended, run.log[-4000:]
    found = {found.fault: (found.differing, found.decisions) for found in run.rounds}
    print(f"{name}: {found}", file=sys.stderr)
    assert found[""][0] == 0
    faults = [fault for fault in SETUPS[name].faults if fault != GATE]
    assert any(found[fault][0] for fault in faults if HOT not in fault)
    assert [fault for fault in faults if HOT not in fault and not found[fault][1]] == [], "a fault struck nothing"


@seeded
def test_without_sync_a_stray_draw_gives_other_seeds_and_other_samples(name):
    run = matrix_run(name, "all:audit")
    assert run.ended, run.log[-4000:]
    assert run.round(SEED).differing > 0
    assert run.mismatched_calls("vllm-seed") >= 3


@pytest.mark.parametrize("name", ["V1, eagle", "V1, async, eagle"])
def test_natural_divergence_is_counted_without_any_fault(name):
    """A shim of vLLM's CPU build leaves float outputs unwritten at temperatures above 0 (VL #55005)."""
    run = matrix_run(name, "all:audit")
    assert run.ended, run.log[-4000:]
    assert run.round(HOT).differing > 0
    assert run.round(HOT).decisions > 0


def test_a_flipped_drafter_gate_hangs_without_sync():
    run = serve(SETUPS["V1, eagle"], "off", ["", GATE], hang_s=20)
    assert len(run.rounds) == 1, "the gate's round came to an end"
    assert not run.ended
    keep_fatal("V1, eagle", GATE, "hung")


@pytest.mark.parametrize(("name", "fault"), [("V1, eagle", "exc@4"), ("V1, eagle", "hook@4"), ("V2, eagle", "hook@4")])
def test_an_error_on_one_rank_reaches_all_instead_of_hanging_them(name, fault):
    run = serve(SETUPS[name], "all", ["", fault])
    assert run.ended, run.log[-4000:]
    assert len(run.rounds) == 1
    assert [line for line in run.log.splitlines() if "Worker_TP0" in line and "group rank 1 gave up" in line]
