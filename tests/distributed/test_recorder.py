"""Recorder, faults and doctor over real gloo ranks: what a person reads when ranks drift, hang or die."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.diagnostics import Diagnosis, FaultInjector, Recorder, diagnose, parse_faults, recording_path
from specsync_core.testing import RankError, run_ranks

REGISTRY = load_registry()
STUCK_S = 6.0


def open_sync(rank: int, world_size: int, directory: str, policy: str, faults: str = "") -> tuple[SpecTpSync, Recorder]:
    plan = resolve_plan(REGISTRY, environ={"SPECSYNC_SITES": policy}, facts=Facts(platform="cpu"))
    recorder = Recorder(
        recording_path(directory, rank),
        group_rank=rank,
        world_size=world_size,
        ranks=range(world_size),
        plan_digest=plan.digest,
        sites=REGISTRY.sites,
        values=True,
    )
    injector = FaultInjector(parse_faults(faults, REGISTRY, "test"), rank, allowed=True)
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan, taps=(injector, recorder)), recorder


def decode(sync: SpecTpSync, steps: int) -> list[list[int]]:
    """Steps whose values are equal on all ranks, if nothing interferes. Returns the accepted lengths."""
    accepted = []
    for step in range(steps):
        sync.sync("dspark-draft-greedy", torch.tensor([step, step + 1]))
        triple = torch.tensor([step, 3]), torch.tensor([70, 71]), torch.zeros(2, dtype=torch.int64)
        lens, *_ = sync.sync("dspark-accept-greedy", *triple)
        accepted.append(lens.tolist())
        sync.next_step()
    return accepted


def all_reduce(recorder: Recorder, detail: str, group: dist.ProcessGroup | None = None) -> None:
    with recorder.waiting("tp all-reduce", detail):
        dist.all_reduce(torch.ones(4), group=group)


def decode_and_close(rank: int, world_size: int, directory: str, policy: str, faults: str) -> list[list[int]]:
    sync, recorder = open_sync(rank, world_size, directory, policy, faults)
    with recorder:
        accepted = decode(sync, 6)
        all_reduce(recorder, "last")
    return accepted


def test_a_clean_run(tmp_path: Path) -> None:
    accepted = run_ranks(decode_and_close, 2, args=(str(tmp_path), "all", ""))
    assert accepted[0] == accepted[1] == [[step, 3] for step in range(6)]
    found = diagnose(tmp_path)
    assert (found.finding, found.comparisons, found.healed) == ("clean", 6 * 4, {})


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_fault_with_sync_on_is_healed_and_with_sync_off_is_found(tmp_path: Path, odd: int) -> None:
    fault = f"dspark-accept-greedy:rank={odd}:step=4:index=1:add=1"
    healed = run_ranks(decode_and_close, 3, args=(str(tmp_path / "on"), "all", fault))
    assert healed[0] == healed[1] == healed[2]
    found = diagnose(tmp_path / "on")
    assert (found.finding, found.healed) == ("healed", {"dspark-accept-greedy": 1})
    assert (found.step, found.group_rank, found.tensor, found.index) == (4, odd, "correct_len", 1)

    drifted = run_ranks(decode_and_close, 3, args=(str(tmp_path / "off"), "off", fault))
    assert drifted[odd][4] == [4, 4]
    found = diagnose(tmp_path / "off")
    assert (found.finding, found.site, found.step) == ("silent-divergence", "dspark-accept-greedy", 4)
    assert (found.group_rank, found.index, found.own) == (odd, 1, 4)


def test_a_fault_after_the_sync_is_told_apart(tmp_path: Path) -> None:
    run_ranks(decode_and_close, 2, args=(str(tmp_path), "all", "dspark-accept-greedy:rank=1:step=4:when=after:set=0"))
    found = diagnose(tmp_path)
    assert (found.finding, found.step) == ("silent-divergence", 4)
    assert found.divergence is not None
    assert found.divergence.equal_before is True


def drift_and_die(rank: int, world_size: int, directory: str) -> None:
    sync, recorder = open_sync(rank, world_size, directory, "off", "dspark-accept-greedy:rank=1:step=3:add=1")
    decode(sync, 5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(recorder, "layer 0")


def test_the_recording_of_a_killed_rank_is_read(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(drift_and_die, 2, args=(str(tmp_path),))
    found = diagnose(tmp_path, {0: None, 1: -signal.SIGKILL})
    assert (found.site, found.step, found.own, found.rank0) == ("dspark-accept-greedy", 3, 4, 3)
    assert found.dead_ranks == (1,)
    assert found.comparisons == 5 * 4
    assert "Rank 1 was ended by signal 9 (SIGKILL)" in found.text


def drift_and_hang(rank: int, world_size: int, directory: str) -> None:
    """Rank 1's longer prefix ends its request, so that it asks for the next one while rank 0 still decodes."""
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=STUCK_S))
    model = dist.new_group(backend="gloo", timeout=timedelta(seconds=STUCK_S))
    sync, recorder = open_sync(rank, world_size, directory, "off", "dspark-accept-greedy:rank=1:step=3:add=1")
    with recorder:
        for number in range(3):
            all_reduce(recorder, f"layer {number}", model)
        decode(sync, 4)
        if rank == 0:
            all_reduce(recorder, "layer 0, batch 2", model)
        with recorder.waiting("request broadcast"):
            dist.broadcast(torch.zeros(1), src=0, group=host)


def watch(directory: Path, running: Future[object], until: Callable[[Diagnosis], bool]) -> Diagnosis:
    """What somebody reads who looks again and again, at the latest when the ranks have ended."""
    while True:
        is_over = running.done()
        found = diagnose(directory, hang_after_s=0.5)
        if is_over or until(found):
            return found
        time.sleep(0.1)


def test_a_hang_is_read_while_the_ranks_are_stuck_in_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_ranks, drift_and_hang, 2, args=(str(tmp_path),))
        found = watch(tmp_path, running, lambda found: len(found.waits) == 2)
        with pytest.raises(RankError):
            running.result(timeout=90)
    assert (found.finding, found.site, found.step) == ("drift-hang", "dspark-accept-greedy", 3)
    assert (found.group_rank, found.own, found.rank0) == (1, 4, 3)
    assert (found.waits[0].what, found.waits[0].detail) == ("tp all-reduce", "layer 0, batch 2")
    assert found.waits[1].what == "request broadcast"
    assert found.waits[0].seconds is not None
    assert found.waits[0].seconds >= 0.5
    assert found.dead_ranks == ()

    afterwards = diagnose(tmp_path)
    assert afterwards.finding == "drift-hang"
    assert (afterwards.site, afterwards.step) == (found.site, found.step)


def exit_by_fault(rank: int, world_size: int, directory: str) -> None:
    sync, recorder = open_sync(rank, world_size, directory, "off", "dspark-draft-greedy:rank=1:step=2:exit=37")
    decode(sync, 4)
    all_reduce(recorder, "layer 0")


def test_a_rank_that_exits_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(exit_by_fault, 2, args=(str(tmp_path),))
    found = diagnose(tmp_path, {0: None, 1: 37})
    assert (found.finding, found.dead_ranks, found.divergence) == ("dead-rank", (1,), None)
    assert "Rank 1 exited with code 37; it was in no recorded wait" in found.text


def drop_one(rank: int, world_size: int, directory: str) -> None:
    """Ranks hold different values, and rank 1 alone skips the second broadcast, keeps its own value and ends.

    Group rank 0 is one call ahead of its peers at most: it learns that rank 1 took no part when it begins the next.
    """
    sync, recorder = open_sync(rank, world_size, directory, "all", "dspark-target:rank=1:step=1:drop")
    with recorder:
        for _ in range(2 + (rank == 0)):
            sync.sync("dspark-target", torch.tensor([100 + rank]))
            sync.next_step()


def test_a_dropped_broadcast_leaves_the_other_rank_in_it(tmp_path: Path) -> None:
    """Rank 0 never leaves the sync, so nobody knows what it would have committed: what rank 1 left out is known."""
    with pytest.raises(RankError):
        run_ranks(drop_one, 2, args=(str(tmp_path),))
    found = diagnose(tmp_path, {0: 1, 1: 0})
    assert (found.finding, found.dead_ranks, found.healed) == ("drift-crash", (), {"dspark-target": 1})
    assert found.divergence is not None
    assert (found.divergence.kind, found.site, found.step, found.group_rank) == ("skip", "dspark-target", 1, 1)
    assert found.headline == (
        "Rank 1 left the sync out at dspark-target in step 1, in which the others took part, and a rank ended."
    )
    assert found.waits[0].what == "sync of dspark-target"
    assert found.waits[0].failed == "TransportError", "its peer had ended, so it did not wait"
    assert "Rank 1 finished." in found.text
