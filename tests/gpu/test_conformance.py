"""The built-in plugins keep every rule where graphs are really captured: two ranks, two GPUs, NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from specsync_core import TorchGroup
from specsync_core.testing import conformance_on_ranks, run_ranks
from specsync_core.testing.conformance import SCENARIOS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")

CAPTURED = {
    "dspark": {"dspark-graph-greedy", "dspark-graph-sample", "dspark-accept-graph"},
    "dflash": {"dflash-draft-greedy"},
    "eagle": set(),
}


def conform(rank: int, world_size: int, name: str) -> tuple[set[str], int]:
    torch.cuda.set_device(rank)
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    report = conformance_on_ranks(name, group, torch.device("cuda", rank))
    return report.captured, report.trials


@pytest.mark.parametrize("name", CAPTURED)
def test_built_in_plugins_keep_every_rule(name: str) -> None:
    for captured, trials in run_ranks(conform, 2, timeout_s=240, args=(name,)):
        assert captured == CAPTURED[name]
        assert trials > 4 * len(SCENARIOS)
