"""The engine's own decision functions on ranks with different inputs: they disagree without specsync, agree with it."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import pytest

from tests.engines.sglang.environment import HERE, VERSIONS, is_built, python_of

LAYOUTS = {"2 ranks": (2, 1), "4 ranks in 2 attention groups": (4, 2)}
GROUPS_OF_ONE = "2 ranks in attention groups of one"
ALGORITHMS = ("dspark", "dflash", "eagle", "ngram")
SYNCED_BY_THE_ENGINE = {
    ("0.5.23", "dspark"): {"capture the draft graph"},
    ("0.5.23", "dflash"): {"capture the draft graph", "accept, greedy"},
}
"""Decisions that the engine settles itself when the plugin is absent."""

pytestmark = pytest.mark.timeout(900)


@cache
def runs(version: str) -> list[dict[str, Any]]:
    if not is_built(version):
        pytest.skip(f"no environment of sglang {version}: run `make test-engines`")
    command = [str(python_of(version)), "decisions.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])["runs"]


def run(version: str, algorithm: str, policy: str, layout: str) -> dict[str, Any]:
    ranks, groups = (LAYOUTS | {GROUPS_OF_ONE: (2, 2)})[layout]
    wanted = {"algorithm": algorithm, "policy": policy, "ranks": ranks, "attention_groups": groups}
    (found,) = [each for each in runs(version) if wanted.items() <= each.items()]
    return found


def groups_of(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    size = found["ranks"] // found["attention_groups"]
    return [found["by_rank"][start : start + size] for start in range(0, found["ranks"], size)]


def agrees(group: list[dict[str, Any]], decision: str) -> bool:
    return all(rank["values"][decision] == group[0]["values"][decision] for rank in group)


def decisions(found: dict[str, Any]) -> list[str]:
    return list(found["by_rank"][0]["values"])


everywhere = pytest.mark.parametrize(
    ("version", "algorithm", "layout"),
    [(version, algorithm, layout) for version in VERSIONS for algorithm in ALGORITHMS for layout in LAYOUTS],
)


@everywhere
@pytest.mark.parametrize("policy", ["absent", "off"])
def test_ranks_disagree_without(version, algorithm, layout, policy):
    found = run(version, algorithm, policy, layout)
    agreed = {name for name in decisions(found) if all(agrees(group, name) for group in groups_of(found))}
    by_engine = SYNCED_BY_THE_ENGINE.get((version, algorithm), set()) if policy == "absent" else set()
    assert agreed == by_engine
    assert found["by_rank"][0]["sites"] == {}


@everywhere
def test_ranks_agree_with_all(version, algorithm, layout):
    found = run(version, algorithm, "all", layout)
    disagreed = {name for name in decisions(found) if not all(agrees(group, name) for group in groups_of(found))}
    assert disagreed == set()
    assert len({json.dumps(rank["sites"]) for rank in found["by_rank"]}) == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_attention_groups_decide_for_themselves_but_start_alike(version, algorithm):
    layout = "4 ranks in 2 attention groups"
    found, absent = run(version, algorithm, "all", layout), run(version, algorithm, "absent", layout)
    for decision in decisions(found):
        first, second = (group[0]["values"][decision] for group in groups_of(found))
        leaders_decide_alike = len({str(group[0]["values"][decision]) for group in groups_of(absent)}) == 1
        whole_group = decision.startswith(("capture", "fold", "plan or none", "corpus"))
        assert (first == second) == (whole_group or leaders_decide_alike), decision


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_memory_gates_agree_over_all_ranks_where_an_attention_group_has_one(version, algorithm):
    """SG #39886: the published fix empties its set of sites there, and the gate stays local."""
    absent, found = (run(version, algorithm, policy, GROUPS_OF_ONE) for policy in ("absent", "all"))
    for gate in (name for name in decisions(found) if name.startswith(("capture", "fold"))):
        assert not agrees(absent["by_rank"], gate)
        assert agrees(found["by_rank"], gate)
    assert set(found["by_rank"][0]["sites"]) == {f"{algorithm}-mem"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_fixed_engine_broadcasts_is_not_broadcast_twice(layout):
    for algorithm, own in {
        "dspark": set(),
        "dflash": {"dflash-accept-simulated", "dflash-draft-selector"},
        "eagle": {
            *("eagle-verify-greedy", "eagle-accept-simulated", "eagle-target"),
            *("eagle-draft", "eagle-draft-tree"),
        },
        "ngram": {"eagle-ngram-draft", "eagle-ngram-tree"},
    }.items():
        assert set(run("0.5.23", algorithm, "all", layout)["by_rank"][0]["sites"]) == own


def test_the_policy_reaches_the_engines_own_sync():
    policies = {
        policy: run("0.5.23", "dflash", policy, "2 ranks")["by_rank"][0]["policy"]
        for policy in ("absent", "off", "all")
    }
    assert policies == {"absent": None, "off": "off", "all": "all"}
