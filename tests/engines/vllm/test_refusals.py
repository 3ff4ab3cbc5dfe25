"""A rank that cannot be synchronised stops all of them, at the start or after a few steps; nobody is left waiting."""

from __future__ import annotations

import re

import pytest

from tests.engines.vllm.environment import NEWEST, is_built
from tests.engines.vllm.matrix import SETUPS
from tests.engines.vllm.serving import Run, serve

SAMPLE = "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_built(NEWEST), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"),
]


def start(policy: str = "all", **variables: str) -> Run:
    run = serve(SETUPS["V1, ngram"], policy, [""], **variables)
    assert run.ended, run.log[-4000:]
    return run


def ranks_that_said(run: Run, text: str) -> set[str]:
    """The ranks of the workers in whose lines a text stands."""
    lines = [line for line in run.log.splitlines() if text in line]
    return {match[1] for line in lines if (match := re.match(r"\(Worker_TP(\d) pid=", line))}


def test_a_typo_in_the_policy_stops_every_rank():
    run = start("all,-vllm-tokns")
    assert not run.rounds
    assert "did you mean 'vllm-tokens'" in run.log


def test_other_parameters_on_one_rank_stop_every_rank_and_are_named():
    run = start(SHIM_BREAK="signature")
    assert not run.rounds
    said = f"group rank 1: {SAMPLE}: its parameters are (self, logits, spec_decode_metadata, novelty)"
    assert said in run.log
    assert "vllm" in run.log
    assert "SPECSYNC_STRICT=0" in run.log


def test_a_hook_that_does_not_fire_stops_every_rank():
    run = start(SHIM_BREAK="unhook")
    assert not run.rounds
    assert "group rank 0: the verdict was never synchronised in 4 decode steps" in run.log
    assert ranks_that_said(run, "the verdict was never synchronised") == {"0", "1"}


def test_a_rank_on_which_specsync_did_not_start_is_named_by_the_other():
    run = start(SHIM_BREAK="absent", SPECSYNC_TIMEOUT_S="8")
    assert not run.rounds
    assert re.search(r"group ranks? \[?1", run.log), run.log[-4000:]
