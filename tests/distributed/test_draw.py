"""`SpecTpSync.draw` where the transport cannot fuse it: draw, then sync."""

import torch

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.errors import PayloadError, SpecSyncError
from specsync_core.testing import run_ranks


def synced(policy: str) -> SpecTpSync:
    plan = resolve_plan(load_registry(), environ={"SPECSYNC_SITES": policy}, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan)


def draw(rank: int, world_size: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rank)
    scores, noise = (torch.rand(4, 50, generator=generator) + 0.1 for _ in range(2))
    sync, off = synced("all"), synced("off")
    out = torch.zeros(4, dtype=torch.int64)
    found = {
        "own greedy": scores.argmax(-1).tolist(),
        "own race": (scores / noise).argmax(-1).tolist(),
        "greedy": sync.draw("dspark-draft-greedy", scores).tolist(),
        "race": sync.draw("dspark-draft-sample", scores, noise, out=out).tolist(),
        "race, transposed": sync.draw("dspark-draft-sample", scores.t().contiguous().t(), noise).tolist(),
        "off": off.draw("dspark-draft-greedy", scores).tolist(),
        "out": out.tolist(),
    }
    try:
        sync.draw("dspark-draft-greedy", scores.long())
    except PayloadError as error:
        found["error"] = str(error)
    return found


def test_a_draw_is_group_rank_0_s_draw_on_every_rank():
    root, peer = run_ranks(draw, 2)
    assert root["own greedy"] != peer["own greedy"]
    assert root["own race"] != peer["own race"]
    for found in (root, peer):
        assert found["greedy"] == root["own greedy"]
        assert found["race"] == found["out"] == found["race, transposed"] == root["own race"]
        assert found["off"] == found["own greedy"]
        assert "scores must be float32, bfloat16 or float16 [B, V], not torch.int64 [4, 50]" in found["error"]


def draw_into_what_does_not_fit(rank: int, world_size: int) -> str:
    sync = synced("all")
    out = torch.zeros(4 + rank, dtype=torch.int64)  # wrong on group rank 1 alone
    try:
        sync.draw("dspark-draft-greedy", torch.rand(4, 50), out=out)
        sync.draw("dspark-draft-greedy", torch.rand(4, 50), out=out)
    except SpecSyncError as error:
        return str(error)
    return "nothing"


def test_an_output_that_does_not_fit_on_one_rank_reaches_all():
    for told in run_ranks(draw_into_what_does_not_fit, 2, 15):
        assert "out must be int64 [4], contiguous, on cpu, not torch.int64 [5] on cpu" in told
