import pytest
import torch
import torch.distributed as dist

from specsync_core.errors import GroupError
from specsync_core.groups import ParallelGroups, TorchGroup
from specsync_core.testing import run_ranks


def subgroups(rank: int, world_size: int) -> dict[str, object]:
    found: dict[str, object] = {}
    backwards = TorchGroup(dist.new_group([2, 1], sort_ranks=False) if world_size > 2 else None) if rank else None
    if rank == 0:
        not_mine = dist.new_group([2, 1], sort_ranks=False)
        with pytest.raises(GroupError, match="not a member of the group"):
            TorchGroup(not_mine)
    else:
        assert backwards is not None
        value = torch.tensor([rank * 10])
        backwards.broadcast(value, src=0)
        found["from group rank 0"] = value.item()
        backwards.broadcast(value.fill_(rank * 10), src=1)
        found["from group rank 1"] = value.item()
        found["rank"], found["ranks"] = backwards.rank_in_group, backwards.ranks
        with pytest.raises(GroupError, match=r"cpu_group has the global ranks \[0, 1, 2\], the group \[2, 1\]"):
            TorchGroup(backwards.process_group, cpu_group=dist.group.WORLD)
    with pytest.raises(GroupError, match=r"ProcessGroup.* is not a group: .*TorchGroup\(group\)"):
        ParallelGroups(tp=dist.group.WORLD)
    found["repr"] = repr(TorchGroup())
    return found


def test_sources_are_group_relative_also_where_group_rank_0_is_not_global_rank_0():
    outside, *members = run_ranks(subgroups, 3)
    assert outside == {"repr": "TorchGroup(group rank 0 of 3, global ranks [0, 1, 2])"}
    for global_rank, found in enumerate(members, start=1):
        assert found["ranks"] == [2, 1]
        assert found["rank"] == (1 if global_rank == 1 else 0)
        assert found["from group rank 0"] == 20
        assert found["from group rank 1"] == 10
