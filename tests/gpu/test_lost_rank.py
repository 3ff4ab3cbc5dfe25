"""A rank that is killed while the others sync on their GPUs: they are told who, and the device memory comes back."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.errors import SpecSyncError
from specsync_core.testing import run_ranks
from tests.gpu.checks import device_of_rank

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA GPUs; there are {GPUS}")
SETTLE_S = 20


def used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def make_sync(rank: int, transport: str, timeout_s: str = "5") -> tuple[SpecTpSync, torch.device]:
    device = device_of_rank(rank)
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    environ = {"SPECSYNC_SITES": "all", "SPECSYNC_TRANSPORT": transport, "SPECSYNC_TIMEOUT_S": timeout_s}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cuda"))
    return SpecTpSync(ParallelGroups(tp=group), plan), device


def sync_until_told(rank: int, world_size: int, transport: str) -> tuple[str, float, int]:
    """Rank 1 kills itself; the other says what it was told, after how long, and that its device still works."""
    sync, device = make_sync(rank, transport)
    accept = sync.point("dspark-accept-greedy")
    own = [torch.full((8,), rank, dtype=torch.int64, device=device) for _ in range(3)]
    accept(*own)
    torch.cuda.synchronize()
    started = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = "nothing"
    while time.monotonic() - started < 60:
        try:
            accept(*own)
            time.sleep(0.05)
        except SpecSyncError as error:
            told = str(error)
            break
    took_s = time.monotonic() - started
    return told, took_s, int(torch.ones(4, device=device).sum())


@pytest.mark.timeout(200)
def test_a_killed_rank_is_named_and_its_shared_memory_is_given_back():
    before, shared = used_mib(), set(Path("/dev/shm").iterdir())
    (told, took_s, alive), lost = run_ranks(sync_until_told, 2, 120, ("one-shot",), group_timeout_s=30, lost={1})
    assert "group rank 1" in told, told
    assert took_s < 30
    assert (alive, lost) == (4, None)
    deadline = time.monotonic() + SETTLE_S
    while max(now - then for now, then in zip(used_mib(), before, strict=True)) > 64 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert max(now - then for now, then in zip(used_mib(), before, strict=True)) <= 64
    assert set(Path("/dev/shm").iterdir()) <= shared


def ragged(rank: int, world_size: int, transport: str) -> list[object]:
    """Drafts of other sizes on each rank, on the device and on the host of the same group."""
    sync, device = make_sync(rank, transport, "30")
    found: list[object] = []
    for place in (device, torch.device("cpu")):
        lengths = torch.tensor([2, 1] if rank == 0 else [0, 3, 1], device=place)
        tokens = torch.arange(int(lengths.sum()), device=place) + 10 * (rank + 1)
        lengths, tokens = sync.sync_ragged("vllm-draft-rows", lengths, tokens)
        found += [lengths.tolist(), tokens.tolist(), lengths.device.type, tokens.device.type]
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["one-shot", "grouped", "group"])
def test_ragged_drafts_on_devices_and_on_the_host(transport):
    expected = [[2, 1], [10, 11, 12], "cuda", "cuda", [2, 1], [10, 11, 12], "cpu", "cpu"]
    assert run_ranks(ragged, 2, 120, (transport,), group_timeout_s=60) == [expected] * 2


def sync_beside_patched_triton(rank: int, world_size: int) -> tuple[str, list[int]]:
    """SGLang puts plain functions into Triton's namespace; a kernel must not depend on what stands there."""
    import triton

    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    sync, device = make_sync(rank, "auto", "30")
    own = torch.full((3,), rank + 5, dtype=torch.int64, device=device)
    sync.sync("dspark-draft-sample", own)
    return sync.transports["auto"].transport.name, own.tolist()


@pytest.mark.timeout(200)
def test_one_shot_is_taken_where_the_engine_has_patched_triton():
    assert run_ranks(sync_beside_patched_triton, 2, 120, group_timeout_s=60) == [("one-shot", [5, 5, 5])] * 2
