"""Derived state over real gloo ranks: every rank comes to the same finding, and nothing is changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from specsync_core import Facts, ParallelGroups, PayloadError, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.errors import TransportError
from specsync_core.testing import run_ranks

REGISTRY = load_registry()


def open_sync(policy: str = "all") -> SpecTpSync:
    plan = resolve_plan(REGISTRY, environ={"SPECSYNC_SITES": policy}, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan)


def check_all(rank: int, world_size: int) -> dict[str, Any]:
    sync = open_sync()
    lens = torch.tensor([7, 8, 9 + (rank == 2)])
    before = lens.clone()
    found = {
        "equal": sync.check("state-seq-lens", lens[:2]),
        "lens": sync.check("state-seq-lens", lens),
        "ids": sync.check("state-request-ids", ["a", "b"][: 2 - (rank == 0)]),
        "key": sync.check("state-graph-key", ("decode", 8 << rank)),
        "again": sync.check("state-graph-key", ("decode", 8)),
    }
    assert torch.equal(lens, before)
    with pytest.raises(PayloadError, match=r"group rank 1: PayloadError: a object cannot be compared"):
        sync.check("state-graph-key", object() if rank == 1 else 8)
    assert sync.check("state-seq-lens", [1]), "the group goes on"
    stats = sync.stats()
    return {"found": found, "stats": stats["state-seq-lens"], "text": {name: each.text for name, each in found.items()}}


def test_all_ranks_come_to_the_same_finding_and_the_majority_names_the_odd_one() -> None:
    ranks = run_ranks(check_all, 3)
    assert ranks[0]["found"] == ranks[1]["found"] == ranks[2]["found"]
    found, text = ranks[0]["found"], ranks[0]["text"]
    assert found["equal"]
    assert found["again"]
    assert (found["lens"].odd_ranks, found["lens"].has_majority, found["lens"].index) == ((2,), True, 2)
    assert (
        "group rank 2 is the odd one out of 3: element 2 is 10 on group rank 2, 9 on group ranks 0, 1" in text["lens"]
    )
    assert found["ids"].odd_ranks == (0,)
    assert "element 1 is absent on group rank 0, 'b' on group ranks 1, 2" in text["ids"]
    assert (found["key"].odd_ranks, found["key"].has_majority) == ((1, 2), False)
    assert [rank["stats"].mismatches for rank in ranks] == [0, 0, 1]
    first = ranks[2]["stats"].first_divergence
    assert (first.own, first.rank0, first.call) == (10, 9, 2)


def two_modes(rank: int, world_size: int) -> tuple[bool, int, int]:
    off, audit = open_sync("all,-state"), open_sync("state:audit")
    assert off.check("state-seq-lens", [rank]).call == 0
    found = audit.check("state-seq-lens", [rank])
    return found.equal, found.index or 0, audit.stats()["state-seq-lens"].compared


def test_off_costs_nothing_and_audit_compares_too() -> None:
    assert run_ranks(two_modes, 2) == [(False, 0, 1)] * 2


def other_calls(rank: int, world_size: int) -> str:
    sync = open_sync()
    act = partial(sync.check, "state-seq-lens", [1]) if rank else partial(sync.agree, "dspark-mem", 1.0, "min")
    with pytest.raises(TransportError, match="do not match") as error:
        act()
    return str(error.value)


def test_ranks_that_ask_for_different_things_all_hear_so() -> None:
    for text in run_ranks(other_calls, 2):
        assert "call 1 of state-seq-lens, check" in text
        assert "call 1 of dspark-mem, op min" in text


def accept_with_logits(rank: int, world_size: int, policy: str) -> dict[str, Any]:
    sync = open_sync(policy)
    logits_BSV = torch.zeros(2, 3, 9)
    logits_BSV[0, :, 1], logits_BSV[1, :, 1] = 0.5, 2.0
    for step in range(2):
        triple = torch.tensor([1 + rank * step, 2]), torch.tensor([5, 6]), torch.zeros(2, dtype=torch.int64)
        sync.sync("dspark-accept-greedy", *triple, logits=logits_BSV)
        sync.next_step()
    return sync.stats(wait=False)["dspark-accept-greedy"].as_dict()


@pytest.mark.parametrize("policy", ["all", "all:audit"])
def test_a_callers_logits_tell_how_close_the_first_divergence_was(policy: str) -> None:
    root, peer = run_ranks(accept_with_logits, 2, args=(policy,))
    assert root["first_divergence"] is None
    first = peer["first_divergence"]
    assert (first["step"], first["own"], first["rank0"], first["logit_gap"]) == (1, 2, 1, 0.5)
