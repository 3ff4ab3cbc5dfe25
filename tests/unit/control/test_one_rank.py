"""A lone rank has nobody to agree with, and says that no control socket is made."""

import logging

import pytest

from specsync_core import Facts, ParallelGroups, SpecTpSync, load_registry, resolve_plan


class Alone:
    world_size, rank_in_group, ranks, cpu_group = 1, 0, [0], None

    def broadcast(self, tensor, src=0):
        return tensor


@pytest.mark.parametrize("asked", [True, False])
def test_a_lone_rank_says_that_no_socket_is_made(tmp_path, caplog, asked):
    environ = {"SPECSYNC_CONTROL": f"{tmp_path}/x.sock"} if asked else {}
    plan = resolve_plan(load_registry(), environ, facts=Facts(platform="cpu"))
    with caplog.at_level(logging.INFO, "specsync"):
        sync = SpecTpSync(ParallelGroups(tp=Alone()), plan)
    said = [record.getMessage() for record in caplog.records if "socket" in record.getMessage()]
    assert said == ["SPECSYNC_CONTROL: no socket is made with one rank, whose decisions nobody shares."] * asked
    assert sync.control is None
    assert list(tmp_path.iterdir()) == []
