"""A rank that is killed, stopped, slow, out of memory, or raises: the others are told which, and can end."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.collectives import store_of
from specsync_core.errors import SpecSyncError
from specsync_core.testing import run_ranks

GROUP_TIMEOUT_S = 6.0
WORLD = 3
FAILING = 1


def planned_sync(transport: str = "auto", taps=()) -> SpecTpSync:
    environ = {"SPECSYNC_SITES": "all", "SPECSYNC_TIMEOUT_S": "20", "SPECSYNC_TRANSPORT": transport}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan, taps=taps)


def step(sync: SpecTpSync, rank: int) -> list[int]:
    """What a decode step does here: tensors from rank 0, and a host value that every rank waits for."""
    sync.next_step()
    tokens = sync.sync("dspark-target", torch.full((4,), sync.step * 10 + rank))
    sync.agree("dspark-mem", sync.step + rank, "min")
    return tokens.tolist()


def decode(sync: SpecTpSync, rank: int, fail, steps: int = 40) -> dict[str, object]:
    """Steps until one fails; then what a second call says, and how long shutting down takes."""
    found: dict[str, object] = {"tokens": [], "pid": os.getpid()}
    started = time.monotonic()
    try:
        for _ in range(steps):
            started = time.monotonic()
            if sync.step == 3 and rank == FAILING:
                fail()
            found["tokens"].append(step(sync, rank))
    except SpecSyncError as error:
        found |= {"kind": type(error).__name__, "message": str(error), "waited_s": time.monotonic() - started}
        found["again"] = [refused(sync.sync, "dspark-target", torch.full((4,), rank)), refused(step, sync, rank)]
        began = time.monotonic()
        dist.destroy_process_group()
        found["shutdown_s"] = time.monotonic() - began
    return found


def refused(fn, *args) -> bool:
    """Whether a call raises, instead of going on with this rank's own values."""
    try:
        fn(*args)
    except SpecSyncError:
        return True
    return False


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose(rank: int, world_size: int, how: str, transport: str) -> dict[str, object]:
    sync = planned_sync(transport)
    time.sleep(1.0)  # the ranks have introduced themselves to each other
    return decode(sync, rank, {"killed": kill, "stopped": stop}[how])


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def of_ranks(names: set[str], found: list[object]) -> set[str]:
    """The names that carry the process id of a rank, the lost one's included; other programs have names there, too."""
    told = " ".join(str(end) for end in found)
    pids = set(re.findall(r"\(pid (\d+) on", told)) | {str(end["pid"]) for end in found if end}
    return {name for name in names if pids & set(re.split(r"[^0-9a-zA-Z]", name))}


@pytest.mark.parametrize("transport", ["grouped", "group"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_others_name_a_rank_that_is_gone_and_shut_down(how, transport):
    before = shared_memory()
    found = run_ranks(
        lose, WORLD, args=(how, transport), group_timeout_s=GROUP_TIMEOUT_S, lost=(FAILING,), timeout_s=60
    )
    assert found[FAILING] is None
    for rank in (0, 2):
        survivor = found[rank]
        assert survivor["kind"] == "TransportError", survivor
        ending = {"killed": "has ended", "stopped": "is stopped (SIGSTOP)"}[how]
        assert f"roup rank {FAILING} (pid " in survivor["message"]
        assert ending in survivor["message"]
        assert "/gloo/" not in survivor["message"], "a path of the machine that built gloo helps nobody"
        assert survivor["waited_s"] < GROUP_TIMEOUT_S + 10
        assert survivor["again"] == [True, True], "it goes on unsynchronised"
        assert survivor["shutdown_s"] < GROUP_TIMEOUT_S + 2
        # What was decided before is group rank 0's, on every rank.
        assert survivor["tokens"] == [[step * 10] * 4 for step in range(1, len(survivor["tokens"]) + 1)]
    assert not of_ranks(shared_memory() - before, found)
    assert multiprocessing.active_children() == []


class Kernels:
    """Stands for device work that waits for a peer and that only this rank's own host can end."""

    def __init__(self) -> None:
        self.halted_at = 0.0

    def halt(self) -> None:
        self.halted_at = time.monotonic()


def end_outside_of_any_call(rank: int, world_size: int, port: int, failing: int) -> tuple[float, str]:
    store, kernels = store_of(dist.group.WORLD), Kernels()
    store.when_failed(kernels.halt)
    store.exchange("who is who", rank, 30)
    while len(store._identities) < world_size:
        time.sleep(0.05)
    store.exchange("known", rank, 30)
    if rank == failing:
        time.sleep(1.0)  # the others have read the meeting's outcome in the store that may end with this rank
        kill()
    started = time.monotonic()
    while not kernels.halted_at and time.monotonic() < started + 20:
        time.sleep(0.05)
    try:
        store.glance()
    except SpecSyncError as error:
        return kernels.halted_at - started, str(error)
    return 99.0, "nothing"


@pytest.mark.parametrize("failing", [0, FAILING])
def test_a_rank_that_ends_while_nobody_waits_for_it_is_noticed_and_device_waits_are_halted(failing):
    """Also the rank whose process holds the group's store."""
    args = free_port(), failing
    found = run_ranks(
        end_outside_of_any_call, WORLD, 60, args, group_timeout_s=60, lost={failing}, setup=meet_at_rank_0
    )
    assert found[failing] is None
    for took_s, told in (each for each in found if each is not None):
        assert took_s < 12, found
        assert f"group rank {failing} (pid " in told
        assert "has ended" in told


class Bursts:
    """A tap that raises on one rank, before or after the broadcast of step 4."""

    def __init__(self, rank: int, when: str, error: BaseException) -> None:
        self.rank, self.when, self.error = rank, when, error

    def _burst(self, when: str, site, step: int) -> None:
        if (self.rank, self.when, step, site.slug) == (FAILING, when, 4, "dspark-target"):
            raise self.error

    def before(self, site, tensors, step):
        self._burst("before", site, step)

    def after(self, site, tensors, step):
        self._burst("after", site, step)


class Exhausted:
    """A transport's method that finds no memory."""

    def __call__(self, *args):
        raise MemoryError("cannot allocate 512 bytes")


def burst(rank: int, world_size: int, how: str) -> dict[str, object]:
    taps = ()
    if how in ("before", "after"):
        taps = (Bursts(rank, how, ValueError("a tap has a bug")),)
    elif how == "no memory in a tap":
        taps = (Bursts(rank, "before", MemoryError("cannot allocate 99 bytes")),)
    sync = planned_sync(taps=taps)

    def fail() -> None:
        if how == "no memory":
            sync.transports["auto"].transport._host.fetch = Exhausted()
        elif how == "no memory on a device":
            sync.transports["auto"].transport._host.fetch = no_device_memory

    found = decode(sync, rank, fail)
    found["cause"] = None
    return found


def no_device_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("before", "dspark-target: ValueError: a tap has a bug"),
        ("after", "dspark-target: ValueError: a tap has a bug"),
        ("no memory in a tap", "dspark-target: MemoryError: cannot allocate 99 bytes"),
        ("no memory", "dspark-target: MemoryError: cannot allocate 512 bytes"),
        ("no memory on a device", "dspark-target: CUDA out of memory. Tried to allocate 20.00 GiB"),
    ],
)
def test_a_rank_that_raises_inside_a_sync_ends_the_wait_of_all(how, message):
    found = run_ranks(burst, WORLD, args=(how,), group_timeout_s=60, timeout_s=60)
    for rank, end in enumerate(found):
        assert end["kind"] == "TransportError", (rank, end)
        assert message in end["message"]
        assert rank == FAILING or f"group rank {FAILING} gave up: " in end["message"]
        assert end["again"] == [True, True]
        assert end["waited_s"] < 30, "it waited for the group's time-out instead"
        assert end["shutdown_s"] < 30


def slow(rank: int, world_size: int, pause_s: float) -> dict[str, object]:
    sync = planned_sync()
    time.sleep(1.0)
    return decode(sync, rank, lambda: time.sleep(pause_s), steps=8)


def test_a_rank_that_is_slow_within_the_time_out_is_waited_for():
    for end in run_ranks(slow, 2, args=(3.0,), group_timeout_s=30):
        assert end["tokens"] == [[step * 10] * 4 for step in range(1, 9)]
        assert "kind" not in end


def test_a_rank_that_is_slower_than_the_time_out_is_named_as_running_elsewhere():
    waiting, late = run_ranks(slow, 2, args=(14.0,), group_timeout_s=7)
    assert waiting["kind"] == late["kind"] == "TransportError"
    assert f"Group rank {FAILING} runs, outside of specsync, last in agreement at dspark-mem." in waiting["message"]
    assert "group rank 0 gave up: " in late["message"]
    assert waiting["again"] == late["again"] == [True, True]


def stop_the_host(rank: int, world_size: int) -> dict[str, object]:
    """The rank whose process holds the store of the whole group is stopped."""
    import specsync_core.bounded_store as module

    module.CALL_S = 3.0
    sync = planned_sync()
    time.sleep(1.0)
    global FAILING
    FAILING = 0
    return decode(sync, rank, stop)


def meet_at_rank_0(rank: int, port: int = 0, *_: object) -> str:
    return f"tcp://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def with_port(rank: int, world_size: int, port: int) -> dict[str, object]:
    return stop_the_host(rank, world_size)


def test_a_stopped_rank_that_holds_the_store_is_named_too():
    found = run_ranks(
        with_port, 3, args=(free_port(),), group_timeout_s=4, timeout_s=60, lost=(0,), setup=meet_at_rank_0
    )
    for end in found[1:]:
        assert end["kind"] == "TransportError"
        assert (
            "The group's store, which lives in group rank 0 unless a launcher holds it, does not answer"
            in (end["message"])
        )
        assert "group rank 0 (pid " in end["message"]
        assert "is stopped (SIGSTOP)" in end["message"]
        assert end["waited_s"] < 30
