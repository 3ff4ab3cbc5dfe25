"""The minimal set on the demo engine: an audit proves it where the facts are true, and refutes it where one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specsync_core import load_registry
from specsync_core.demo.config import Job, World
from specsync_core.demo.worker import Rank, make_groups
from specsync_core.explain import Verdict, explain, facts_from, judge, known_facts, minimal_sites
from specsync_core.testing import run_ranks

WORLD = World(
    2, "cpu", 0, (b"To be, or not to be", b"In the beginning", b"Alice was"), (), requests=6, new_tokens=(16,)
)
ALGORITHMS = ("dspark", "dflash")
REGISTRY = load_registry()


def justified(algorithm: str, **given: bool) -> tuple[list[Any], str]:
    """The explanations under the demo's own facts and these, and the policy that proves the minimal set."""
    facts = facts_from(known_facts("demo", {name.replace("_", "-"): value for name, value in given.items()}))
    found = explain(REGISTRY, facts, algorithm)
    return found, ",".join([f"{algorithm}:audit", *(site.slug for site in minimal_sites(found))])


def jobs() -> list[Job]:
    made = []
    for algorithm in ALGORITHMS:
        _, true_proof = justified(algorithm)
        _, false_proof = justified(algorithm, counter_noise=True)
        for temperature in (0.0, 1.0):
            made.append(Job(f"true {algorithm} {temperature}", algorithm, true_proof, 24, temperature, recorded=False))
        made.append(Job(f"false {algorithm}", algorithm, false_proof, 6, 1.0, recorded=False))
        made.append(Job(f"shared {algorithm}", algorithm, false_proof, 24, 1.0, recorded=False, generators="shared"))
        narrow = ",".join(site.slug for site in minimal_sites(justified(algorithm)[0]))
        made.append(Job(f"narrow {algorithm}", algorithm, narrow, 24, 1.0, recorded=False))
    return made


def do(rank: int, world_size: int) -> dict[str, tuple[dict[str, Any], dict[int, list[int]]]]:
    member = Rank(WORLD, rank, make_groups(WORLD, rank), Path("no-recordings"))
    results = {job.name: member.do(job, lambda step: None) for job in jobs()}
    return {name: (result.stats, result.tokens) for name, result in results.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(do, 2, timeout_s=90)


def verdict(ranks: list[dict[str, Any]], name: str, algorithm: str, **given: bool) -> Verdict:
    found, _ = justified(algorithm, **given)
    return judge(found, ranks[1][name][0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_true_facts_are_proven(ranks, algorithm, temperature):
    found = verdict(ranks, f"true {algorithm} {temperature}", algorithm)
    assert found.refuted == ()
    if (algorithm, temperature) == ("dflash", 1.0):  # every site that is called there draws, so none is left out
        assert str(found).startswith("nothing was checked: not called: dflash-accept-greedy")
    else:
        assert found.checks > 0, str(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_false_fact_is_refuted(ranks, algorithm):
    """Each rank draws from a generator of its own, so noise is not counter-based."""
    found = verdict(ranks, f"false {algorithm}", algorithm, counter_noise=True)
    assert any(f"{algorithm}-target has" in line for line in found.refuted), str(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_fact_holds_where_ranks_draw_alike(ranks, algorithm):
    found = verdict(ranks, f"shared {algorithm}", algorithm, counter_noise=True)
    assert found.refuted == ()
    assert f"{algorithm}-target" in found.held


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_the_minimal_set_alone_the_ranks_stay_equal(ranks, algorithm):
    (stats, mine), (_, theirs) = (each[f"narrow {algorithm}"] for each in ranks)
    assert mine == theirs
    assert sum(map(len, mine.values())) > 50
    left_out = {each.site.slug for each in justified(algorithm)[0] if not each.needed}
    assert left_out.isdisjoint({slug for slug, counted in stats.items() if counted["calls"]})
