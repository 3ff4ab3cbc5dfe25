"""`hooked`: each kind of point over a stand-in of its function, on two ranks that decide differently."""

from types import SimpleNamespace

import torch

from specsync_core import BroadcastPoint, Facts, ParallelGroups, SpecTpSync, load_registry, no_tensors, resolve_plan
from specsync_core.testing import hooked, run_fake_ranks

REGISTRY = load_registry()


def on_two_ranks(point, make, *args):
    def member(group):
        plan = resolve_plan(REGISTRY, {}, facts=Facts(platform="cpu"))
        sync = SpecTpSync(ParallelGroups(tp=group), plan)
        return hooked(point, make(group.rank_in_group), sync)(*args)

    return run_fake_ranks(member, 2)


def point(**options):
    known = {
        "target": "toy.decide",
        "when": "after",
        "sites": ("dspark-target",),
        "site_of": lambda call: "dspark-target",
        "tensors_of": lambda call: (call.result,),
        "versions": ">=1",
        "signature": ("tokens",),
    }
    return BroadcastPoint(**{**known, **options})


def test_after_takes_the_result():
    first, second = on_two_ranks(point(), lambda rank: lambda tokens: tokens + rank, torch.arange(3))
    assert first.tolist() == second.tolist() == [0, 1, 2]


def test_before_takes_the_arguments():
    taken = point(when="before", tensors_of=lambda call: (call.args[0].tokens,))
    results = run_fake_ranks(
        lambda group: hooked(
            taken,
            lambda holder: holder.tokens.tolist(),
            SpecTpSync(ParallelGroups(tp=group), resolve_plan(REGISTRY, {}, facts=Facts(platform="cpu"))),
        )(SimpleNamespace(tokens=torch.arange(3) + group.rank_in_group)),
        2,
    )
    assert results == [[0, 1, 2]] * 2


def test_a_host_value_replaces_the_result():
    gate = point(
        sites=("vllm-drafter-gate",), site_of=lambda call: "vllm-drafter-gate", tensors_of=no_tensors, op="all"
    )
    assert on_two_ranks(gate, lambda rank: lambda tokens: rank == 0, None) == [False, False]


def test_group_rank_0_leads():
    led = point(
        sites=("vllm-draft-lead",), site_of=lambda call: "vllm-draft-lead", tensors_of=no_tensors, rows=True, leads=True
    )
    assert on_two_ranks(led, lambda rank: lambda tokens: [[rank, 7], []], None) == [[[0, 7], []]] * 2
