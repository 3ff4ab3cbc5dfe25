"""Ranks on two hosts: the same guarantees over a link that is slow, lossy, cut for a while, or cut for good."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.demo.config import Job, World
from specsync_core.errors import SpecSyncError
from specsync_core.testing import run_ranks
from tests.distributed import hosts
from tests.distributed.hosts import ADDRESSES, LINK, UnavailableError, Weather, two_hosts

PORT = 29500
FAIR = Weather()
FOUL = Weather(delay_ms=10, jitter_ms=4, loss_percent=1)


def on_its_host(rank: int, names: tuple[str, str], *args: object) -> str:
    """Even ranks live on the first host, odd ones on the second; group rank 0 holds the store."""
    hosts.enter(names[rank % 2])
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    return f"tcp://{ADDRESSES[0]}:{PORT}"


def run_on_hosts(fn, world_size: int, weather: Weather, args: tuple[object, ...] = (), **options):
    try:
        with two_hosts(weather) as names:
            return run_ranks(fn, world_size, args=(names, *args), setup=on_its_host, **options)
    except UnavailableError as error:
        pytest.skip(str(error))


def steps(rank: int, cut_for_s: float | None, count: int = 12) -> dict[str, object]:
    import specsync_core.bounded_store as module

    module.CALL_S = 3.0
    environ = {"SPECSYNC_SITES": "all", "SPECSYNC_TIMEOUT_S": "20"}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cpu"))
    sync = SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=plan)
    time.sleep(1.0)
    found: dict[str, object] = {"tokens": []}
    started = time.monotonic()
    try:
        for number in range(count):
            if number == 4 and rank == 1 and cut_for_s != 0:
                hosts.cut(cut_for_s)
            started = time.monotonic()
            own = torch.full((4,), number * 10 + rank)
            found["tokens"].append(sync.sync("dspark-target", own).tolist())
            found["agreed"] = sync.agree("dspark-mem", number + rank, "min")
    except SpecSyncError as error:
        found |= {"kind": type(error).__name__, "message": str(error), "waited_s": time.monotonic() - started}
        try:
            sync.sync("dspark-target", torch.zeros(4))
            found["again"] = "it went on"
        except SpecSyncError:
            found["again"] = "refused"
        began = time.monotonic()
        dist.destroy_process_group()
        found["shutdown_s"] = time.monotonic() - began
    return found


def healthy(rank: int, world_size: int, names: tuple[str, str], cut_for_s: float | None) -> dict[str, object]:
    return steps(rank, cut_for_s)


AGREED = {"tokens": [[number * 10] * 4 for number in range(12)], "agreed": 11}


@pytest.mark.parametrize("weather", [FAIR, FOUL], ids=["fair", "foul"])
def test_ranks_on_two_hosts_agree_whatever_the_weather(weather):
    assert run_on_hosts(healthy, 3, weather, (0,), timeout_s=60) == [AGREED] * 3


def test_a_short_partition_is_lived_through():
    assert run_on_hosts(healthy, 2, FAIR, (2.0,), timeout_s=60, group_timeout_s=30) == [AGREED] * 2


def test_a_lasting_partition_ends_both_sides_and_each_names_the_other():
    near, far = run_on_hosts(healthy, 2, FAIR, (None,), timeout_s=90, group_timeout_s=5)
    for end in (near, far):
        assert end["kind"] == "TransportError", end
        assert end["again"] == "refused"
        assert end["waited_s"] < 5 + 20
        assert end["shutdown_s"] < 15
        assert end["tokens"] == AGREED["tokens"][: len(end["tokens"])]
    assert "Group rank 1 (pid " in near["message"]
    assert "does not answer (stopped, dead or cut off)" in near["message"]
    assert (
        "The group's store, which lives in group rank 0 unless a launcher holds it, does not answer" in far["message"]
    )


def demo(rank: int, world_size: int, names: tuple[str, str], job: Job, cuts: bool) -> dict[str, object]:
    from specsync_core.demo.worker import Rank, make_groups

    prompts = (b"two hosts, one text", b"and a link between")
    world = World(world_size, "cpu", 3, prompts, (job,), new_tokens=(10, 12), group_timeout_s=8)
    groups = make_groups(world, rank)
    member = Rank(world, rank, groups, Path(tempfile.mkdtemp()))
    tokens: dict[str, object] = {}

    def on_step(step: int) -> None:
        if cuts and step == 3 and rank == 1:
            hosts.cut()

    try:
        tokens = {"tokens": member.do(job, on_step).tokens}
    except (SpecSyncError, RuntimeError) as error:
        tokens = {"error": type(error).__name__, "message": str(error)}
    return tokens


JOB = Job("two-hosts", "dspark", "all", steps=6, temperature=0.8, recorded=False)


def test_the_demo_decodes_the_same_tokens_across_two_hosts():
    near, far = run_on_hosts(demo, 2, Weather(delay_ms=2, jitter_ms=1, loss_percent=0.2), (JOB, False), timeout_s=90)
    assert near["tokens"]
    assert near == far


def test_the_demo_ends_on_both_hosts_when_the_link_is_cut():
    for end in run_on_hosts(demo, 2, FAIR, (JOB, True), timeout_s=90):
        assert end.get("error") in ("TransportError", "RuntimeError"), end


def test_hosts_are_removed_whatever_happens_and_leftovers_too():
    names: list[str] = []
    try:
        with two_hosts(FOUL) as made:
            names += made
            hosts.sh("ip", "netns", "add", "specsync-4194305-a")  # of a test run that was killed: no such process
            raise KeyError("the test fails")
    except UnavailableError as error:
        pytest.skip(str(error))
    except KeyError:
        pass
    assert len(names) == 2
    hosts.remove_leftovers()
    left = hosts.sh("ip", "netns", "list").stdout
    assert not [name for name in (*names, "specsync-4194305-a") if name in left]


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda word: None)
    with pytest.raises(UnavailableError, match="network namespaces need"), two_hosts(FAIR):
        pass
