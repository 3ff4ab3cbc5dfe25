"""Ranks as threads: they agree as real ones do, and fail together."""

import time

import pytest
import torch

from specsync_core import Facts, ParallelGroups, SpecTpSync, load_registry, resolve_plan
from specsync_core.testing import RankError, run_fake_ranks

REGISTRY = load_registry()


def sync_of(group, **environ):
    plan = resolve_plan(REGISTRY, environ, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=group), plan)


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_a_sync_is_taken_as_it_is(transport):
    def member(group):
        sync = sync_of(group, SPECSYNC_TRANSPORT=transport)
        tokens = torch.arange(3) + group.rank_in_group
        sync.sync("dspark-draft-greedy", tokens)
        lens, _ = sync.sync_ragged("vllm-draft-rows", torch.tensor([2 - group.rank_in_group]), torch.arange(9)[:2])
        return tokens.tolist(), lens.tolist(), sync.stats()["dspark-draft-greedy"].mismatches

    assert run_fake_ranks(member, 3) == [([0, 1, 2], [2], 0), ([0, 1, 2], [2], 3), ([0, 1, 2], [2], 3)]


def test_host_values_are_agreed_on():
    def member(group):
        sync = sync_of(group)
        return sync.agree("dspark-mem", 5 - group.rank_in_group, "min"), sync.lead("vllm-draft-lead", lambda: [1, 2])

    assert run_fake_ranks(member, 2) == [(4, [1, 2])] * 2


def test_different_plans_are_refused_on_every_rank():
    def member(group):
        with pytest.raises(Exception, match="different plans"):
            sync_of(group, SPECSYNC_SITES="all" if group.rank_in_group else "rng")
        return True

    assert run_fake_ranks(member, 2) == [True, True]


def test_a_rank_that_fails_is_the_one_that_is_named():
    def member(group):
        if group.rank_in_group == 1:
            raise ValueError("boom")
        group.broadcast(torch.zeros(1))

    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*ValueError: boom"):
        run_fake_ranks(member, 2)


def test_who_waits_for_a_rank_that_has_ended_raises():
    def member(group):
        if group.rank_in_group == 0:
            group.gather(1, "the test's word")

    with pytest.raises(RankError, match="the test's word: group rank 0 waits, but group rank 1 has ended"):
        run_fake_ranks(member, 2)


def test_who_waits_too_long_raises():
    def member(group):
        if group.rank_in_group == 0:
            group.gather(1)
        time.sleep(0.5)

    with pytest.raises(RankError, match=r"group rank 0 waited 0\.05 s, and the others did not come"):
        run_fake_ranks(member, 2, timeout_s=0.05)


def test_calls_that_do_not_match_raise_on_every_rank():
    def member(group):
        with pytest.raises(
            Exception, match=r"the ranks' calls do not match: group rank 0 in a broadcast of int64\[1\]"
        ):
            group.broadcast(torch.zeros(1 + group.rank_in_group, dtype=torch.int64))
        return True

    assert run_fake_ranks(member, 2) == [True, True]


def test_arguments_reach_the_function():
    assert run_fake_ranks(lambda group, word: f"{word} {group.rank_in_group}", 2, args=("rank",)) == [
        "rank 0",
        "rank 1",
    ]
