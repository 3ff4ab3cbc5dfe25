"""The real engine on two CPU ranks: what a fault on rank 1 does without sync, and that it does nothing with it."""

from __future__ import annotations

import sys

import pytest

from tests.engines.vllm.environment import is_built
from tests.engines.vllm.serving import HOT, SETUPS, VERSION, keep_hang, matrix_run, serve

each = pytest.mark.parametrize("name", SETUPS)
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of vllm {VERSION}: run `make test-engines`"),
]


@each
def test_with_sync_every_fault_gives_the_clean_rounds_tokens(name):
    run = matrix_run(name, "all")
    assert run.ended, run.log[-4000:]
    clean = run.round("")
    for fault in ("", *SETUPS[name].faults):
        found = run.round(fault)
        assert (fault, found.tokens, found.differing) == (fault, clean.tokens, 0)


@each
def test_with_sync_the_ranks_agree_at_a_temperature(name):
    run = matrix_run(name, "all")
    assert run.ended, run.log[-4000:]
    assert run.round(HOT).differing == 0


@each
def test_every_rank_says_what_is_protected_and_proves_it(name):
    log = matrix_run(name, "all").log
    assert f"specsync: vllm {VERSION}, {name[:2]} runner" in log
    assert "specsync: hooks proven on 2 ranks" in log


@each
def test_without_sync_the_same_rounds_diverge(name):
    run = matrix_run(name, "all:audit")
    assert run.ended, run.log[-4000:]
    differing = {found.fault: found.differing for found in run.rounds}
    print(f"{name}: {differing}, {run.count('mismatched_calls')} calls differ", file=sys.stderr)
    assert differing[""] == 0
    assert any(differing[fault] for fault in SETUPS[name].faults if fault.startswith(("tok", "acc")))
    assert run.count("mismatched_calls") > 0


def test_natural_divergence_is_counted_without_any_fault():
    """A shim of vLLM's CPU build leaves float outputs unwritten at temperatures above 0 (VL #55005)."""
    run = serve(SETUPS["V1, eagle"], "all:audit", [HOT])
    assert run.ended, run.log[-4000:]
    assert run.round(HOT).differing > 0
    assert run.count("mismatched_calls") > 0


def test_a_flipped_drafter_gate_hangs_without_sync():
    run = serve(SETUPS["V1, eagle"], "off", ["", "gate@4"])
    assert len(run.rounds) == 1, "the gate's round came to an end"
    assert not run.ended
    keep_hang("V1, eagle", "gate@4")


def test_an_error_on_one_rank_ends_the_engine_instead_of_hanging_it():
    run = serve(SETUPS["V1, eagle"], "all", ["", "exc@4"])
    assert run.ended, run.log[-4000:]
    assert len(run.rounds) == 1
    assert "group rank 1 gave up" in run.log
