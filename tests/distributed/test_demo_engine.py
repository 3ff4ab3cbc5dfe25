"""The demo engine on real ranks: speculative output equals plain greedy decoding, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specsync_core.demo.config import Job, JobResult, ModelConfig, World
from specsync_core.demo.engine import Engine
from specsync_core.demo.model import Alone, Decoder, init_target
from specsync_core.demo.plain import PlainSpeculator
from specsync_core.demo.scheduler import Scheduler
from specsync_core.demo.worker import Rank, make_groups, requests_of
from specsync_core.testing import run_ranks

PROMPTS = (b"Four score and seven", b"'Twas brillig", b"Alice", b"In the beginning", b"To every thing")
FAULTS = {
    "dspark": "dspark-accept-greedy:rank=1:from=2:until=5:add=1; dspark-draft-greedy:rank=1:step=3:add=1",
    "dflash": "dflash-accept-greedy:rank=1:from=2:until=5:add=1; dflash-draft-greedy:rank=1:step=3:set=65",
    "eagle": "eagle-verify-greedy:rank=1:from=2:until=5:tensor=num_correct_drafts:add=1;"
    "eagle-draft:rank=1:step=3:tensor=topk_index:add=1",
}
ENDLESS = 10_000


def world_of(ranks: int) -> World:
    return World(ranks, "cpu", 2, PROMPTS, (), requests=7, new_tokens=(9, 14, 11), slots=3)


def job(name: str, algorithm: str | None, **changes: Any) -> Job:
    return Job(name, algorithm, changes.pop("sites", "all"), ENDLESS, recorded=False, **changes)


JOBS = [
    job("plain", None),
    *(job(name, name) for name in FAULTS),
    *(job(f"{name} folded", name, folded=True) for name in FAULTS),
    *(job(f"{name} faulted", name, fault=fault) for name, fault in FAULTS.items()),
    job("dspark by group", "dspark", transport="group"),
]
FOUR_RANK_JOBS = [job("plain", None), *(job(f"{name} faulted", name, fault=fault) for name, fault in FAULTS.items())]


def do(rank: int, world_size: int, jobs: list[Job]) -> dict[str, JobResult]:
    world = world_of(world_size)
    member = Rank(world, rank, make_groups(world, rank), Path("no-recordings"))
    return {each.name: member.do(each, lambda step: None) for each in jobs}


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Plain greedy decoding in this process: one rank, no groups."""
    world = world_of(1)
    target = Decoder(ModelConfig(), init_target(ModelConfig(), world.seed), Alone())
    scheduler = Scheduler(requests_of(world, 0.0), world.slots)
    return Engine(target, None, lambda _: PlainSpeculator(), scheduler, slots=world.slots, max_len=64).run().tokens


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, JobResult]]:
    return run_ranks(do, 2, timeout_s=100, args=(JOBS,))


@pytest.mark.parametrize("name", [each.name for each in JOBS])
def test_every_rank_holds_the_tokens_of_plain_decoding(
    name: str, two_ranks: list[dict[str, JobResult]], alone: dict[int, list[int]]
) -> None:
    assert two_ranks[0][name].tokens == alone
    assert two_ranks[1][name].tokens == alone


@pytest.mark.parametrize("algorithm", list(FAULTS))
def test_speculation_was_accepted_and_the_faults_were_healed(
    algorithm: str, two_ranks: list[dict[str, JobResult]]
) -> None:
    assert two_ranks[0][algorithm].tokens_per_step > 1.2
    stats = two_ranks[1][f"{algorithm} faulted"].stats
    for fault in FAULTS[algorithm].split(";"):
        assert stats[fault.partition(":")[0].strip()]["mismatches"] > 0
    assert two_ranks[1][f"{algorithm} faulted"].unfired == ()


@pytest.mark.parametrize(
    ("name", "site"), [("dspark folded", "dspark-graph-greedy"), ("dspark folded", "dspark-accept-graph")]
)
def test_folded_runs_go_through_the_graph_sites(name: str, site: str, two_ranks: list[dict[str, JobResult]]) -> None:
    assert two_ranks[0][name].stats[site]["calls"] > 0
    assert site not in two_ranks[0]["dspark"].stats


def test_four_ranks_heal_to_the_same_tokens(alone: dict[int, list[int]]) -> None:
    for results in run_ranks(do, 4, timeout_s=100, args=(FOUR_RANK_JOBS,)):
        for result in results.values():
            assert result.tokens == alone


def test_the_reference_is_not_trivial(alone: dict[int, list[int]]) -> None:
    assert [len(alone[number]) for number in range(7)] == [9, 14, 11, 9, 14, 11, 9]
    assert len({tuple(tokens[:9]) for tokens in alone.values()}) >= 4
    assert torch.get_default_dtype() is torch.float32
