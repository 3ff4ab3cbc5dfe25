"""Meetings over a group's store: exchange, absent ranks, and failures that reach the peers."""

import socket
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from specsync_core import Facts, load_registry, resolve_plan
from specsync_core.collectives import AbsentRankError, store_of
from specsync_core.errors import PayloadError, PlanMismatchError, SpecSyncError, TransportError
from specsync_core.groups import TorchGroup
from specsync_core.handshake import shake_hands
from specsync_core.plan import Plan, PluginVersion
from specsync_core.testing import run_ranks


def caught(fn, *args):
    started = time.monotonic()
    try:
        return fn(*args), None, time.monotonic() - started
    except SpecSyncError as error:
        return type(error), str(error), time.monotonic() - started


def exchange(rank: int, world_size: int) -> list[object]:
    store = store_of(dist.group.WORLD)
    return [store.exchange("topic", {"rank": rank, "round": turn}, 10) for turn in range(2)]


def test_every_rank_gets_every_payload_in_rank_order():
    for rounds in run_ranks(exchange, 3):
        assert rounds == [[{"rank": rank, "round": turn} for rank in range(3)] for turn in range(2)]


def meet_often(rank: int, world_size: int) -> int:
    store = store_of(dist.group.WORLD)
    counts = []
    for turn in range(40):
        assert store.exchange("often", turn, 10) == [turn] * world_size
        dist.barrier()  # no rank is still inside of this meeting, nor is one in the next
        counts.append(dist.group.WORLD.get_group_store().num_keys())
        dist.barrier()
    return max(counts[20:]) - max(counts[:20])


def meet_at_rank_0(rank: int, port: int = 0) -> str:
    return f"tcp://127.0.0.1:{port}"


def meet_often_on(rank: int, world_size: int, port: int) -> int:
    return meet_often(rank, world_size)


def test_meetings_leave_nothing_behind_in_the_store():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert run_ranks(meet_often_on, 2, args=(port,), setup=meet_at_rank_0) == [0, 0]


def come_late(rank: int, world_size: int):
    if rank == 2:
        time.sleep(2.5)
    return caught(store_of(dist.group.WORLD).exchange, "start", rank, 1.0)


def test_an_absent_rank_is_named_on_every_rank_and_the_late_one_learns_of_it():
    for kind, message, _ in run_ranks(come_late, 3):
        assert kind is AbsentRankError
        assert "start: group rank 2 of 3 did not arrive within 1 s" in message


def planned(policy: str, timeout_s: float, *plugins: PluginVersion) -> Plan:
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TIMEOUT_S": str(timeout_s)}
    return replace(resolve_plan(load_registry(), environ=environ), plugins=plugins)


def never_come(rank: int, world_size: int):
    if rank:
        return caught(shake_hands, store_of(dist.group.WORLD), planned("all", 1))
    time.sleep(3)
    return None


def test_the_handshake_names_a_rank_that_never_arrives():
    _, *others = run_ranks(never_come, 3)
    for kind, message, _ in others:
        assert kind is PlanMismatchError
        assert "group rank 0 of 3 did not arrive within 1 s" in message
        assert "SPECSYNC_TIMEOUT_S" in message


def differ(rank: int, world_size: int):
    plugins = [PluginVersion("dspark", "specsync-core", "0.1.0")]
    if rank == 1:
        plugins = [PluginVersion("dspark", "specsync-core", "0.2.0"), PluginVersion("medusa", "specsync-medusa", "1.0")]
    policy = "all,-dspark-plan" if rank == 2 else "all"
    return caught(shake_hands, store_of(dist.group.WORLD), planned(policy, 10, *plugins))


def test_the_handshake_names_who_differs_in_what_on_every_rank():
    for kind, message, _ in run_ranks(differ, 3):
        assert kind is PlanMismatchError
        assert "plugins dspark: specsync-core 0.1.0 on group rank 0, specsync-core 0.2.0 on group rank 1\n" in message
        assert "plugins medusa: absent on group rank 0, specsync-medusa 1.0 on group rank 1\n" in message
        assert "dspark-plan mode: sync on group rank 0, off on group rank 2\n" in message
        assert "dspark-mem" not in message
        assert "Their policies come from: group rank 0: SPECSYNC_SITES" in message
        assert "Give every rank the same environment" in message


def differ_in_transport(rank: int, world_size: int):
    environ = {"SPECSYNC_TRANSPORT": "group"} if rank else {}
    return caught(shake_hands, store_of(dist.group.WORLD), resolve_plan(load_registry(), environ, facts=Facts()))


def test_the_handshake_names_the_variable_that_one_rank_alone_has():
    for kind, message, _ in run_ranks(differ_in_transport, 2):
        assert kind is PlanMismatchError
        assert "transport: auto on group rank 0, group on group rank 1\n" in message
        assert "group rank 1: default (preset all), transport by SPECSYNC_TRANSPORT.\n" in message


def differ_everywhere(rank: int, world_size: int):
    return caught(shake_hands, store_of(dist.group.WORLD), planned("all" if rank == 0 else "off", 10))


def test_the_handshake_does_not_drown_the_reader():
    for _, message, _ in run_ranks(differ_everywhere, 2):
        assert message.count("\n") < 15
        assert "more differences on group rank 1" in message


def give_up(rank: int, world_size: int):
    store = store_of(dist.group.WORLD)
    if rank == 1:
        time.sleep(0.5)
        store.fail(PayloadError("bonus is float32, not int64"))
        store.fail(PayloadError("a second reason, which does not count"))
        return caught(store.glance)
    return caught(TorchGroup().broadcast, torch.zeros(3), 1) if rank == 0 else caught(store.exchange, "topic", 0, 60)


def test_a_failure_reaches_peers_inside_a_collective_and_inside_a_meeting():
    for kind, message, waited_s in run_ranks(give_up, 3, group_timeout_s=60):
        assert kind is PayloadError
        assert message.startswith("group rank 1 gave up: bonus is float32, not int64")
        assert waited_s < 30, "it waited for the group's time-out instead"


def time_out(rank: int, world_size: int):
    if rank == 0:
        return caught(TorchGroup().broadcast, torch.zeros(3), 1)
    time.sleep(6)
    return caught(store_of(dist.group.WORLD).raise_failure)


def test_a_collective_that_times_out_is_a_transport_error_and_is_told_to_the_others():
    waiting, silent = run_ranks(time_out, 2, group_timeout_s=1)
    assert waiting[0] is TransportError
    assert waiting[1].startswith("broadcast on group rank 0 of 2: ")
    assert silent[0] is TransportError
    assert "group rank 0 gave up: broadcast on group rank 0 of 2" in silent[1]
