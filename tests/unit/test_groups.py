from types import SimpleNamespace

import pytest

from specsync_core.errors import GroupError
from specsync_core.groups import Group, ParallelGroups, TorchGroup, consensus_group, select_group


def fake(world_size: int) -> Group:
    return SimpleNamespace(
        world_size=world_size, rank_in_group=0, cpu_group=None, broadcast=lambda tensor, src=0: tensor
    )


def test_attn_tp_under_dp_attention_else_tp():
    tp, attn = fake(4), fake(2)
    assert select_group(ParallelGroups(tp=tp, attn_tp=attn, dp_attention=True)) is attn
    assert select_group(ParallelGroups(tp=tp, attn_tp=attn)) is tp
    assert select_group(ParallelGroups(tp=tp)) is tp


def test_consensus_is_over_tp_unless_a_larger_choice_is_made():
    tp, attn, capture = fake(4), fake(1), fake(8)
    groups = ParallelGroups(tp=tp, attn_tp=attn, dp_attention=True)
    assert consensus_group(groups) is tp
    assert consensus_group(groups, capture) is capture
    with pytest.raises(GroupError, match="a group of one rank decides nothing while the tensor-parallel group has 4"):
        consensus_group(groups, attn)
    one = ParallelGroups(tp=fake(1))
    assert consensus_group(one, attn) is attn


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(GroupError, match="dp_attention=True needs attn_tp"):
        ParallelGroups(tp=fake(2), dp_attention=True)
    with pytest.raises(GroupError, match=r"attn_tp has 4 ranks and tp 2.*swapped"):
        ParallelGroups(tp=fake(2), attn_tp=fake(4))
    with pytest.raises(
        GroupError, match="tp: int is not a group: it has no world_size, rank_in_group, cpu_group, broadcast"
    ):
        ParallelGroups(tp=3)
    with pytest.raises(GroupError, match="attn_tp: int is not a group"):
        ParallelGroups(tp=fake(2), attn_tp=3)


def test_without_a_process_group_torch_group_says_what_to_do():
    with pytest.raises(GroupError, match="Call init_process_group first"):
        TorchGroup()
