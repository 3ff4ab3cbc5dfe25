"""What the adapter does to an engine that is as known, under several policies: in both versions, through the loader."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from tests.engines.sglang.environment import HERE, VERSIONS, is_built, python_of

FACTORIES = [
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo.create_worker",
]
RNG = {
    *("dspark-mem", "dspark-accept-sample", "dspark-target"),
    *("dflash-mem", "dflash-accept-sample", "dflash-selector", "dflash-target"),
}
"""What 0.5.23 itself understands by ``rng``."""

pytestmark = pytest.mark.timeout(600)
in_both = pytest.mark.parametrize("version", VERSIONS)


@cache
def answers(version: str) -> dict[str, list[dict[str, Any]]]:
    if not is_built(version):
        pytest.skip(f"no environment of sglang {version}: run `make test-engines`")
    command = [str(python_of(version)), "starts.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def start(version: str, case: str) -> dict[str, Any]:
    """What a case's ranks found; all alike."""
    first, *others = answers(version)[case]
    assert all(other == first for other in others)
    return first


@in_both
def test_without_speculation_one_hook_is_placed_and_nothing_else_is_touched(version):
    found = start(version, "no speculation")
    assert found == {"patched": FACTORIES, "imported": [], "adapter": False}


@in_both
def test_hooks_are_for_the_algorithm_in_use_and_no_model_is_imported_for_them(version):
    found = start(version, "eagle, all")
    assert {"eagle_sample", "select_top_k_tokens", "build_tree_kernel_efficient"} <= set(found["hooked"])
    assert not any(word in target for target in found["patched"] for word in ("dspark", "dflash", "ngram", "models"))
    assert found["models imported"] == []


@in_both
def test_a_site_that_is_off_is_not_hooked(version):
    assert start(version, "eagle, off")["patched"] == FACTORIES
    assert start(version, "eagle, off")["hooked"] == []
    everything, without = (start(version, f"eagle, {policy}") for policy in ("all", "no verify"))
    assert set(everything["hooked"]) - set(without["hooked"]) == {"eagle_sample"}
    assert not any(target.endswith("eagle_sample") for target in without["patched"])


@in_both
def test_a_lone_rank_is_not_hooked_but_its_policy_is_read(version):
    assert start(version, "eagle, one rank")["patched"] == FACTORIES
    (lone,) = answers(version)["a typo on one rank"]
    assert "unknown token 'eagle-targe' (did you mean 'eagle-target'?)" in lone["said"]


def test_the_published_variable_keeps_its_meaning_for_the_engine_and_for_us():
    found = start("0.5.23", "dspark, published rng")
    assert found["ours"] == "rng"
    assert set(found["engine"]) == RNG


def test_the_engine_reads_our_policy_in_its_own_words():
    found = start("0.5.23", "dspark, ours")
    assert found["ours"] == "all,-dspark-plan,-dspark-draft-greedy,eagle:audit"
    assert "dspark-plan" not in found["engine"]
    assert {"dspark-draft", "dspark-accept-greedy"} <= set(found["engine"])  # one word of the engine's for five sites
    assert "resolve" not in found["hooked"]


def test_words_that_the_engine_does_not_know_do_not_stop_a_lone_rank():
    assert start("0.5.23", "dspark, one rank")["engine"] == []


@in_both
def test_minimax_m3_with_dspark_syncs_draws_alone_unless_told_otherwise(version):
    narrow, wide = start(version, "minimax"), start(version, "minimax, all")
    if version == "0.5.23":
        assert {"dspark-plan", "dspark-accept-greedy"} <= set(wide["engine"]) - set(narrow["engine"])
        assert "dspark-accept-sample" in narrow["engine"]
    else:
        assert "accept_greedy_triton" in set(wide["hooked"]) - set(narrow["hooked"])
        assert "accept_draft_tokens" in narrow["hooked"]


@in_both
def test_a_hook_that_never_fired_stops_every_rank_or_is_logged(version):
    said = start(version, "a hook that never fires")["said"]
    assert said.startswith("EngineError: hooks were applied and did not fire:")
    assert "group rank 1: the accept was never synchronised in 4 decode steps: none of sglang." in said
    assert "group rank 0" not in said
    assert start(version, "a hook that never fires, not strict")["said"] is None


@in_both
def test_the_doctor_imports_and_checks_every_target_of_the_installed_wheel(version):
    code, said = specsync(version, "doctor", "--engine", "sglang")
    assert code == 0, said
    assert f"sglang {version}: supported, tested" in said
    assert said.rstrip().endswith(" targets, 0 problems.")
    assert "sglang.srt.speculative.eagle_utils.eagle_sample" in said


@in_both
def test_the_installed_engine_is_listed_with_who_syncs_each_site(version):
    code, said = specsync(version, "engines", "--json")
    (engine,) = [each for each in json.loads(said) if each["engine"] == "sglang"]
    assert (code, engine["installed"], engine["support"]) == (0, version, "supported, tested")
    by = {each["site"]: each["synced by"] for each in engine["sites"]}
    assert by["eagle-verify-greedy"] == "specsync"
    assert by["dspark-accept-greedy"] == ("engine" if version == "0.5.23" else "specsync")
    assert by["dspark-accept-simulated"] == ("engine" if version == "0.5.23" else "not at all")


def specsync(version: str, *arguments: str) -> tuple[int, str]:
    if not is_built(version):
        pytest.skip(f"no environment of sglang {version}: run `make test-engines`")
    command = [str(python_of(version).with_name("specsync")), *arguments]
    environ = os.environ | {"PYTHONPATH": str(HERE / "stubs"), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    return done.returncode, done.stdout
