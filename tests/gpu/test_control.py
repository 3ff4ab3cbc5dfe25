"""Live control where graphs were captured: graphs that know their plan are captured again, others keep it as it is."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specsync_dspark.epilogue import AcceptEpilogue

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.control.client import ask
from specsync_core.control.protocol import Request
from specsync_core.errors import ControlError, PlanMismatchError
from specsync_core.testing import run_ranks

B, S, V = 4, 3, 16
SITE = "dspark-accept-graph"
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here"),
    pytest.mark.timeout(240),
]


def operate(sync: SpecTpSync, rank: int, *requests: Request) -> list[Any]:
    """Take steps until group rank 0's operator has had all its answers."""
    answers: list[Any] = []

    def work() -> None:
        for request in requests:
            try:
                answers.append(ask(sync.control.path, request))  # type: ignore[union-attr]
            except ControlError as error:
                answers.append(str(error))

    operator = threading.Thread(target=work)
    if rank == 0:
        operator.start()
    done = torch.zeros(1)
    while not done.item():
        sync.next_step()
        done = torch.tensor([float(rank == 0 and not operator.is_alive())])
        dist.broadcast(done, 0)
        time.sleep(0.005)
    return answers


def graphs(rank: int, world_size: int, transport: str, path: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    environ = {"SPECSYNC_CONTROL": path, "SPECSYNC_TRANSPORT": transport}
    sync = SpecTpSync(ParallelGroups(tp=group), resolve_plan(load_registry(), environ, facts=Facts(platform="cuda")))
    epilogue = AcceptEpilogue(sync, max_batch=B, stride=S, vocab_size=V, device=device)
    own = torch.Generator().manual_seed(rank)  # every rank accepts something else
    candidates_BS = torch.randint(V, (B, S), generator=own).to(device)
    logits_BSV = torch.randn(B, S, V, generator=own).to(device)
    prefix_B = torch.zeros(B, dtype=torch.int64, device=device)

    def accept() -> list[list[int]]:
        verdict, _ = epilogue.accept(candidates_BS, logits_BSV, prefix_B)
        return [part.tolist() for part in verdict]

    found: dict[str, Any] = {"sync": [accept(), accept()]}
    old = epilogue._replays[B]
    found["narrowed"] = operate(sync, rank, Request("mode", SITE, "audit"))
    try:
        old()
        found["old graph"] = "replayed"
    except PlanMismatchError as error:
        found["old graph"] = str(error)
    found["audit"] = [accept(), accept()]
    found["captured again"] = epilogue._replays[B] is not old and not epilogue._replays[B].stale
    found["widened"] = operate(sync, rank, Request("sites", "all"))
    found["again"] = [accept(), accept()]
    stats = sync.stats()[SITE]
    found["counted"] = stats.mismatched_calls, stats.calls

    # A graph of the engine's own, which knows nothing of plans.
    tensors = [part.clone() for part in epilogue.verdict]
    call = sync.point(SITE)
    call(*tensors)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call(*tensors)
    dist.barrier()  # both have captured
    found["refused"] = operate(sync, rank, Request("mode", SITE, "off"), Request("status"))
    found["mode"] = sync.plan.mode(SITE)
    sync.control.close()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("transport", ["auto", "grouped"])
def test_graphs_follow_the_plan_or_keep_it(tmp_path, transport: str) -> None:
    ranks = run_ranks(graphs, 2, 120, (transport, str(tmp_path / "c.sock")))
    first, second = ranks
    assert first["narrowed"][0]["group_ranks"] == first["widened"][0]["group_ranks"] == 2
    for phase in ("sync", "again"):
        assert first[phase] == second[phase]
    assert first["audit"][0] == first["audit"][1]
    assert first["audit"] != second["audit"], "audit leaves each rank its own"
    for found in ranks:
        assert found["captured again"]
        assert "must not be replayed under plan" in found["old graph"]
        assert found["mode"] == "sync"
    mismatched, calls = second["counted"]
    assert mismatched == calls - 2 > 6  # the first capture's two warm-up calls saw empty buffers, alike on both ranks
    refused, status = first["refused"]
    assert refused.startswith(f"every rank refuses: CUDA graphs of the engine hold {SITE}, and would go on under")
    assert "Start the engine without CUDA graphs" in refused
    assert status["refuses"] is not None
